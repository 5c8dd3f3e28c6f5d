"""``ckpt health``: whether a job is healthy, for people, scripts and probes."""

from __future__ import annotations

from ckpt_runtime.cli.exit_codes import ExitCode
from ckpt_runtime.cli.framework import Cli
from ckpt_runtime.cli.job_commands import JobArgument
from ckpt_runtime.cli.output import duration_text


def health(cli: Cli, job: JobArgument) -> ExitCode:
    """Say whether a job is well, and why not. Exit code 1 for one that is UNHEALTHY."""
    found = cli.client().job_health(job)
    checkpoints, pressure = found.checkpoints, found.backpressure
    rate = "none has ended" if checkpoints.success_rate is None else f"{checkpoints.success_rate:.0%} of the last "
    if checkpoints.success_rate is not None:
        rate += f"{checkpoints.ended} completed"
    age = checkpoints.last_completed_age_ms
    cli.output.result(
        found,
        f"Health:       {found.verdict}",
        *(f"              {reason}" for reason in found.reasons),
        f"State:        {found.state}, {found.restarts} restarts",
        f"Checkpoints:  {rate}" + ("" if age is None else f", the last one {duration_text(age)} ago"),
        f"Backpressure: {pressure.ratio:.0%}" + (f", {pressure.vertex}" if pressure.vertex else ""),
    )
    return ExitCode.FAILED if found.verdict == "UNHEALTHY" else ExitCode.OK
