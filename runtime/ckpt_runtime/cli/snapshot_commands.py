"""``ckpt savepoint``, ``ckpt stop``, ``ckpt checkpoint``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from ckpt_runtime.cli import values
from ckpt_runtime.cli.exit_codes import CommandError, ExitCode
from ckpt_runtime.cli.framework import Cli, command
from ckpt_runtime.cli.job_commands import JobArgument, WaitTimeoutOption
from ckpt_runtime.cli.waiting import wait_for_operation
from ckpt_runtime.client.requests import Format


class FormatChoice(StrEnum):
    """FLIP-203's two formats as users type them."""

    NATIVE = "native"
    CANONICAL = "canonical"

    @property
    def on_the_wire(self) -> Format:
        """The request's spelling."""
        return "NATIVE" if self is FormatChoice.NATIVE else "CANONICAL"


FormatOption = Annotated[
    FormatChoice,
    typer.Option("--type", case_sensitive=False, help="Format; only canonical ones change the state backend."),
]
DetachedOption = Annotated[bool, typer.Option("--detached", help="Print the trigger id and do not wait.")]


def add_snapshot_commands(app: typer.Typer) -> None:
    """Register the commands."""
    command(app, "savepoint")(savepoint)
    command(app, "stop")(stop)
    command(app, "checkpoint")(checkpoint)


def savepoint(
    cli: Cli,
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Job id.", callback=values.optional_job_id)] = None,
    directory: Annotated[
        str | None, typer.Argument(metavar="[DIRECTORY]", help="Where to; else as configured.")
    ] = None,
    type: FormatOption = FormatChoice.NATIVE,
    dispose: Annotated[
        str | None, typer.Option("--dispose", "-d", metavar="PATH", help="Delete this savepoint instead.")
    ] = None,
    detached: DetachedOption = False,
    wait_timeout: WaitTimeoutOption = None,
) -> None:
    """Take a savepoint of a running job, or delete one with --dispose."""
    timeout_s = values.timeout_s("--wait-timeout", wait_timeout)
    if dispose is not None:
        if job is not None:
            raise CommandError("--dispose takes the savepoint's path and no JOB", ExitCode.USAGE)
        _dispose(cli, dispose, detached, timeout_s)
        return
    if job is None:
        raise CommandError("Missing argument 'JOB'", ExitCode.USAGE)
    trigger_id = cli.client().trigger_savepoint(job, directory, savepoint_format=type.on_the_wire)
    _report_location(cli, job, trigger_id, detached, timeout_s, "taking a savepoint")


def _dispose(cli: Cli, path: str, detached: bool, timeout_s: float | None) -> None:
    trigger_id = cli.client().dispose_savepoint(path)
    if detached:
        cli.output.result({"trigger_id": trigger_id}, trigger_id)
        return
    wait_for_operation(cli, "savepoint-disposal", trigger_id, None, timeout_s, "deleting the savepoint")
    cli.output.result({"disposed": path}, f"Savepoint {path} is deleted.")


def stop(
    cli: Cli,
    job: JobArgument,
    savepoint_path: Annotated[
        str | None, typer.Option("--savepoint-path", "-p", metavar="DIRECTORY", help="Where to; else as configured.")
    ] = None,
    drain: Annotated[bool, typer.Option("--drain", help="Send the end of data through: windows fire.")] = False,
    type: FormatOption = FormatChoice.NATIVE,
    detached: DetachedOption = False,
    wait_timeout: WaitTimeoutOption = None,
) -> None:
    """Stop a job with a savepoint."""
    timeout_s = values.timeout_s("--wait-timeout", wait_timeout)
    trigger_id = cli.client().stop_with_savepoint(job, savepoint_path, savepoint_format=type.on_the_wire, drain=drain)
    _report_location(cli, job, trigger_id, detached, timeout_s, "stopping with a savepoint")


def _report_location(cli: Cli, job: str, trigger_id: str, detached: bool, timeout_s: float | None, doing: str) -> None:
    if detached:
        cli.output.result({"trigger_id": trigger_id}, trigger_id)
        return
    status = wait_for_operation(cli, "savepoint", trigger_id, job, timeout_s, doing)
    cli.output.result({"trigger_id": trigger_id, "location": status.location}, str(status.location))


def checkpoint(
    cli: Cli,
    job: JobArgument,
    full: Annotated[bool, typer.Option("--full", help="Write everything, not only what changed.")] = False,
    detached: DetachedOption = False,
    wait_timeout: WaitTimeoutOption = None,
) -> None:
    """Trigger a checkpoint."""
    timeout_s = values.timeout_s("--wait-timeout", wait_timeout)
    trigger_id = cli.client().trigger_checkpoint(job, full=full)
    if detached:
        cli.output.result({"trigger_id": trigger_id}, trigger_id)
        return
    status = wait_for_operation(cli, "checkpoint", trigger_id, job, timeout_s, "taking a checkpoint")
    document = {"trigger_id": trigger_id, "checkpoint_id": status.checkpoint_id}
    cli.output.result(document, f"Checkpoint {status.checkpoint_id} is completed.")
