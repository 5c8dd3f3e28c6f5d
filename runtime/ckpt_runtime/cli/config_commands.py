"""``ckpt patch-checkpoint-config``: change the checkpoint configuration of a running job (FLIP-571)."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt_runtime.cli import values
from ckpt_runtime.cli.exit_codes import CommandError, ExitCode
from ckpt_runtime.cli.framework import Cli
from ckpt_runtime.cli.job_commands import JobArgument
from ckpt_runtime.cli.output import duration_text, size_text
from ckpt_runtime.contract.configuration import CheckpointConfig, CheckpointConfigPatch


def patch_checkpoint_config(  # noqa: PLR0913 -- one parameter for each option
    cli: Cli,
    job: JobArgument,
    interval: Annotated[str | None, typer.Option(metavar="DURATION", help="Between triggers, e.g. '10 s'.")] = None,
    timeout: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Of each checkpoint, pending ones too.")
    ] = None,
    min_pause: Annotated[str | None, typer.Option(metavar="DURATION", help="After one ends, before the next.")] = None,
    max_concurrent: Annotated[int | None, typer.Option(help="How many at once.")] = None,
    tolerable_failed_checkpoints: Annotated[int | None, typer.Option(help="In a row before the job fails.")] = None,
    aligned_timeout: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Of the alignment, before it turns unaligned.")
    ] = None,
    unaligned: Annotated[bool | None, typer.Option("--unaligned/--aligned", help="Let barriers overtake data.")] = None,
    max_inflight_data: Annotated[str | None, typer.Option(metavar="SIZE", help="To persist per subtask.")] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Return to the submitted values.")] = False,
) -> None:
    """Change the checkpoint configuration of a running job. Only what is given changes."""
    patch = CheckpointConfigPatch(
        interval_ms=values.duration_ms("--interval", interval),
        timeout_ms=values.duration_ms("--timeout", timeout),
        min_pause_ms=values.duration_ms("--min-pause", min_pause),
        max_concurrent=max_concurrent,
        tolerable_failed_checkpoints=tolerable_failed_checkpoints,
        aligned_timeout_ms=values.duration_ms("--aligned-timeout", aligned_timeout),
        unaligned=unaligned,
        max_inflight_data_bytes=values.size_bytes("--max-inflight-data", max_inflight_data),
    )
    if reset == bool(patch.to_json()):
        raise CommandError("give the values to change, or --reset alone", ExitCode.USAGE)
    client = cli.client()
    config = client.reset_checkpoint_config(job) if reset else client.patch_checkpoint_config(job, patch)
    cli.output.result(config, *_lines(config))


def _lines(config: CheckpointConfig) -> list[str]:
    unbounded = "unbounded" if config.max_inflight_data_bytes is None else size_text(config.max_inflight_data_bytes)
    shown = {
        "interval": "off" if config.interval_ms is None else duration_text(config.interval_ms),
        "timeout": duration_text(config.timeout_ms),
        "min-pause": duration_text(config.min_pause_ms),
        "max-concurrent": config.max_concurrent,
        "tolerable-failed-checkpoints": config.tolerable_failed_checkpoints,
        "unaligned": "yes" if config.unaligned else "no",
        "aligned-timeout": duration_text(config.aligned_timeout_ms),
        "max-inflight-data": unbounded,
        "overridden": ", ".join(config.overrides) or "nothing",
    }
    return [f"{name + ':':<20} {value}" for name, value in shown.items()]
