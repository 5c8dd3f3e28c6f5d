"""``ckpt config`` (FLIP-530) and ``ckpt patch-checkpoint-config`` (FLIP-571): the configuration of a running job."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from ckpt_runtime.cli import framework
from ckpt_runtime.cli.framework import Cli, CommandError, ExitCode
from ckpt_runtime.cli.job_commands import JobArgument
from ckpt_runtime.cli.output import duration_text, size_text, time_text
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.errors import CkptClientError, Conflict
from ckpt_runtime.contract.configuration import CheckpointConfig, CheckpointConfigPatch, ConfigChange

DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only show the changes and whether they need a restart.")]
WaitOption = Annotated[bool, typer.Option("--wait", "-w", help="Wait until the job runs with it.")]
VersionOption = Annotated[int | None, typer.Option("--version", min=1, help="Fail unless this is the current version.")]


def get(cli: Cli, job: JobArgument, key: Annotated[str | None, typer.Argument(help="One option.")] = None) -> None:
    """Show the configuration of a job: what was given at its submission or later, not the cluster's."""
    found = cli.client().job_config(job)
    if key is not None:
        if key not in found.configuration:
            raise CommandError(f"{key}: not in the configuration of job {job}", ExitCode.NOT_FOUND)
        cli.output.result({key: found.configuration[key]}, found.configuration[key])
        return
    lines = [f"{name} = {value}" for name, value in sorted(found.configuration.items())]

    running = "" if found.running_version == found.version else f", the tasks still run with {found.running_version}"
    made = [
        f"# version {made.version}: {', '.join(made.options)}; {time_text(made.timestamp)} by {made.by}"
        for made in reversed(found.changes)
    ]
    cli.output.result(found, *lines, *[f"# version {found.version}{running}", *made])


def set_options(
    cli: Cli,
    job: JobArgument,
    options: Annotated[list[str], typer.Argument(metavar="KEY=VALUE...", help="What to set.")],
    version: VersionOption = None,
    dry_run: DryRunOption = False,
    wait: WaitOption = False,
) -> None:
    """Set options of a running job. What needs no restart is applied at once."""
    wanted: dict[str, str | None] = {}
    for option in options:
        key, separator, value = option.partition("=")
        if not separator or not key.strip():
            raise CommandError(f"{option!r} is not of the form KEY=VALUE", ExitCode.USAGE)
        wanted[key.strip()] = value.strip()
    _show(cli, job, cli.client().patch_job_config(job, wanted, version, dry_run=dry_run), wait=wait)


def unset(
    cli: Cli,
    job: JobArgument,
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="What to remove.")],
    version: VersionOption = None,
    dry_run: DryRunOption = False,
    wait: WaitOption = False,
) -> None:
    """Remove options of a running job: what its pipeline sets counts then, else what the cluster says."""
    _show(cli, job, cli.client().patch_job_config(job, dict.fromkeys(keys), version, dry_run=dry_run), wait=wait)


def edit(cli: Cli, job: JobArgument, dry_run: DryRunOption = False, wait: WaitOption = False) -> None:
    """Open the configuration of a running job in $EDITOR, and replace it with what that leaves."""
    client = cli.client()
    found = client.job_config(job)
    if found.version is None:
        raise CommandError("this server has no configurations and versions of running jobs", ExitCode.SERVER_ERROR)
    handle, name = tempfile.mkstemp(prefix="ckpt-config-", suffix=".json")  # private to this user
    os.close(handle)
    file = Path(name)
    file.write_text(json.dumps(found.configuration, indent=2, sort_keys=True) + "\n")
    try:
        _edit(file)
        wanted = _read(file)
        planned = client.replace_job_config(job, wanted, found.version, dry_run=True)
        if dry_run or not planned.changes:
            change = planned
        else:
            cli.output.note("\n".join(_lines(planned)))
            change = client.replace_job_config(job, wanted, found.version)
    except Conflict as error:
        said = f"{_explained(client, job, found.version, error)}; {file} has your text"
        raise CommandError(said, ExitCode.CONFLICT) from error
    except (CkptClientError, CommandError):
        cli.output.note(f"{file} has your text")
        raise
    file.unlink()
    _show(cli, job, change, wait=wait)


def _edit(file: Path) -> None:
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    try:
        done = subprocess.run([*shlex.split(editor), str(file)], check=False)
    except (OSError, ValueError) as error:
        raise CommandError(f"$EDITOR: {editor!r} cannot be started: {error}", ExitCode.USAGE) from error
    if done.returncode != 0:
        raise CommandError(f"$EDITOR: {editor!r} ended with {done.returncode}; nothing has changed", ExitCode.FAILED)


def _read(file: Path) -> dict[str, str]:
    try:
        document = json.loads(file.read_text())
    except ValueError as error:
        raise CommandError(f"the edited text is not JSON: {error}", ExitCode.USAGE) from error
    if not isinstance(document, dict) or not all(isinstance(value, str) for value in document.values()):
        raise CommandError("the edited text is not a JSON object of keys and texts", ExitCode.USAGE)
    return document


def _explained(client: CkptClient, job: str, version: int, error: Conflict) -> str:
    """Explain a conflict by the changes that others have made meanwhile."""
    found = client.job_config(job)
    others = [made for made in found.changes if made.version > version]
    if not others:
        return str(error)
    changes = "; ".join(f"version {made.version} by {made.by} changed {', '.join(made.options)}" for made in others)
    return f"the configuration has changed while you edited version {version}: {changes}"


def _lines(change: ConfigChange) -> list[str]:
    def text(value: str | None) -> str:
        return "(not set)" if value is None else value

    return [
        f"{key}: {text(made.before)} -> {text(made.after)}"
        f"{' (restart)' if made.change == 'restart' else ''}"
        f"{'' if made.hidden_by_override is None else f' (under the override {made.hidden_by_override})'}"
        for key, made in change.changes.items()
    ]


def _show(cli: Cli, job: str, change: ConfigChange, *, wait: bool) -> None:
    if wait and change.restart and not change.dry_run:
        with cli.output.progress() as show:
            show(f"restarting job {job} with version {change.version}")
            cli.client().wait_for_config(job, change.version)
    if not change.changes:
        said = f"Nothing has changed; job {job} has version {change.version}."
    elif change.dry_run:
        said = f"It would be version {change.version}{', with a restart' if change.restart else ''}."
    else:
        restarting = "" if not change.restart else ", with which it runs" if wait else ", for which it restarts"
        said = f"Job {job} has version {change.version}{restarting}."
    cli.output.result(change, *_lines(change), said)


def patch_checkpoint_config(  # noqa: PLR0913 -- one parameter for each option
    cli: Cli,
    job: JobArgument,
    interval: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Time between triggers, e.g. '10 s'.")
    ] = None,
    timeout: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Timeout of each checkpoint, including pending ones.")
    ] = None,
    min_pause: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Time after one ends, before the next.")
    ] = None,
    max_concurrent: Annotated[int | None, typer.Option(help="Maximum number of checkpoints at a time.")] = None,
    tolerable_failed_checkpoints: Annotated[
        int | None, typer.Option(help="Consecutive failures that do not fail the job.")
    ] = None,
    aligned_timeout: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Maximum time of the alignment, before it turns unaligned.")
    ] = None,
    unaligned: Annotated[bool | None, typer.Option("--unaligned/--aligned", help="Let barriers overtake data.")] = None,
    max_inflight_data: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Maximum in-flight data to persist per subtask.")
    ] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Return to the submitted settings.")] = False,
) -> None:
    """Change the checkpoint configuration of a running job. Only what is given changes."""
    patch = CheckpointConfigPatch(
        interval_ms=framework.duration_ms("--interval", interval),
        timeout_ms=framework.duration_ms("--timeout", timeout),
        min_pause_ms=framework.duration_ms("--min-pause", min_pause),
        max_concurrent=max_concurrent,
        tolerable_failed_checkpoints=tolerable_failed_checkpoints,
        aligned_timeout_ms=framework.duration_ms("--aligned-timeout", aligned_timeout),
        unaligned=unaligned,
        max_inflight_data_bytes=framework.size_bytes("--max-inflight-data", max_inflight_data),
    )
    if reset == bool(patch.to_json()):
        raise CommandError("give the values to change, or --reset alone", ExitCode.USAGE)
    client = cli.client()
    config = client.reset_checkpoint_config(job) if reset else client.patch_checkpoint_config(job, patch)
    cli.output.result(config, *_configuration_lines(config))


def _configuration_lines(config: CheckpointConfig) -> list[str]:
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
