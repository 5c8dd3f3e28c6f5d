"""``ckpt savepoint``, ``ckpt stop``, ``ckpt checkpoint``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from ckpt_runtime.cli import framework
from ckpt_runtime.cli.framework import Cli, CommandError, ExitCode
from ckpt_runtime.cli.job_commands import IncarnationOption, JobArgument, WaitTimeoutOption
from ckpt_runtime.cli.output import size_text, user_name
from ckpt_runtime.client.errors import UNKNOWN_JOB, CkptClientError, Conflict, NotFound, OperationFailed
from ckpt_runtime.client.requests import Format, OperationKind
from ckpt_runtime.contract.checkpoints import Checkpoint, OperationStatus
from ckpt_runtime.contract.jobs import root_cause_line


class FormatChoice(StrEnum):
    """FLIP-203's two formats as users type them."""

    NATIVE = "native"
    CANONICAL = "canonical"

    @property
    def on_the_wire(self) -> Format:
        """The format as spelled in requests."""
        return "NATIVE" if self is FormatChoice.NATIVE else "CANONICAL"


FormatOption = Annotated[
    FormatChoice,
    typer.Option(
        "--type",
        case_sensitive=False,
        help="Format; only a canonical savepoint can be restored into another state backend.",
    ),
]
DetachedOption = Annotated[bool, typer.Option("--detached", help="Print the trigger id and do not wait.")]


@dataclass(frozen=True, slots=True)
class StartedOperation:
    """An operation that a command has started; ``job_id`` is None if it does not belong to a job."""

    cli: Cli
    kind: OperationKind
    trigger_id: str
    job_id: str | None

    def wait(self, doing: str, detached: bool, timeout_s: float | None) -> OperationStatus | None:
        """Wait for the end of the operation and show its progress; if detached, only print its trigger id.

        Ctrl-C and timeouts leave it running. Flink accepts an operation on any job id and lets it fail later. This
        raises NotFound for an unknown job and Conflict for an ended one, which a session answers at once.
        """
        if detached:
            self.cli.output.result({"trigger_id": self.trigger_id}, self.trigger_id)
            return None
        try:
            with self.cli.output.progress() as show:
                show(doing)
                return self.cli.client().wait_for_operation(
                    self.kind,
                    self.trigger_id,
                    self.job_id,
                    timeout_s=timeout_s,
                    on_wait=lambda: show(self._so_far(doing)),
                )
        except OperationFailed as error:
            if self.job_id is None or not root_cause_line(error.stack_trace).startswith(UNKNOWN_JOB):
                raise
            raise _missing_job_error(self.cli, self.job_id) from error
        except KeyboardInterrupt:
            self.cli.output.note(f"the {self.kind} continues as operation {self.trigger_id}")
            raise

    def _so_far(self, doing: str) -> str:
        """The progress of the latest snapshot of this kind, if the session reports it."""
        latest = self.snapshot(lambda item: item.is_savepoint == (self.kind == "savepoint"))
        if latest is None or latest.progress_size is None:
            return doing
        subtasks = f"{latest.num_acknowledged} of {latest.num_subtasks} subtasks"
        return f"{doing}: {subtasks}, {size_text(latest.progress_size)} so far"

    def snapshot(self, wanted: Callable[[Checkpoint], bool]) -> Checkpoint | None:
        """The job's newest matching snapshot in the history, if any; for display only, so errors are ignored."""
        if self.job_id is None:
            return None
        with suppress(CkptClientError):
            return next(filter(wanted, self.cli.client().checkpoint_statistics(self.job_id).history), None)
        return None


def _missing_job_error(cli: Cli, job_id: str) -> CkptClientError:
    """The error that says why there is no such running job."""
    try:
        state = cli.client().job_details(job_id).state
    except NotFound as error:
        return error
    return Conflict(409, [f"job {job_id} is {state}"])


def savepoint(
    cli: Cli,
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="Job id.", callback=framework.optional_job_id)
    ] = None,
    directory: Annotated[
        str | None, typer.Argument(metavar="[DIRECTORY]", help="Target directory; default: as configured.")
    ] = None,
    type: FormatOption = FormatChoice.NATIVE,
    dispose: Annotated[
        str | None, typer.Option("--dispose", "-d", metavar="PATH", help="Delete this savepoint instead.")
    ] = None,
    detached: DetachedOption = False,
    wait_timeout: WaitTimeoutOption = None,
) -> None:
    """Take a savepoint of a running job, or delete one with --dispose."""
    timeout_s = framework.timeout_s("--wait-timeout", wait_timeout)
    if dispose is not None:
        if job is not None:
            raise CommandError("--dispose takes the savepoint's path and no JOB", ExitCode.USAGE)
        operation = StartedOperation(cli, "savepoint-disposal", cli.client().dispose_savepoint(dispose), None)
        if operation.wait("deleting the savepoint", detached, timeout_s):
            cli.output.result({"disposed": dispose}, f"Savepoint {dispose} is deleted.")
        return
    if job is None:
        raise CommandError("Missing argument 'JOB'", ExitCode.USAGE)
    trigger_id = cli.client().trigger_savepoint(
        job, directory, savepoint_format=type.on_the_wire, requester=user_name()
    )
    _tell_location(StartedOperation(cli, "savepoint", trigger_id, job), "taking a savepoint", detached, timeout_s)


def stop(
    cli: Cli,
    job: JobArgument,
    savepoint_path: Annotated[
        str | None,
        typer.Option("--savepoint-path", "-p", metavar="DIRECTORY", help="Target directory; default: as configured."),
    ] = None,
    drain: Annotated[
        bool, typer.Option("--drain", help="End the input first, so that windows and timers fire.")
    ] = False,
    type: FormatOption = FormatChoice.NATIVE,
    detached: DetachedOption = False,
    wait_timeout: WaitTimeoutOption = None,
    incarnation: IncarnationOption = None,
) -> None:
    """Stop a job with a savepoint."""
    timeout_s = framework.timeout_s("--wait-timeout", wait_timeout)
    trigger_id = cli.client().stop_with_savepoint(
        job,
        savepoint_path,
        savepoint_format=type.on_the_wire,
        drain=drain,
        requester=user_name(),
        incarnation=incarnation,
    )
    _tell_location(
        StartedOperation(cli, "savepoint", trigger_id, job), "stopping with a savepoint", detached, timeout_s
    )


def _tell_location(operation: StartedOperation, doing: str, detached: bool, timeout_s: float | None) -> None:
    if status := operation.wait(doing, detached, timeout_s):
        taken = operation.snapshot(lambda item: item.external_path == status.location)
        document: dict[str, object] = {"trigger_id": operation.trigger_id, "location": status.location}
        if taken is not None and taken.incremental is not None:  # Flink does not report it
            document |= {name: getattr(taken, name) for name in ("incremental", "checkpointed_size", "reused_size")}
            written = f"{size_text(taken.checkpointed_size)} written"
            how = f"incremental: {written}, {size_text(taken.reused_size)} duplicated"
            if not operation.cli.output.as_json:
                operation.cli.output.note(how if taken.incremental else f"full: {written}")
        operation.cli.output.result(document, str(status.location))


def checkpoint(
    cli: Cli,
    job: JobArgument,
    full: Annotated[bool, typer.Option("--full", help="Write the whole state, not only the changes.")] = False,
    detached: DetachedOption = False,
    wait_timeout: WaitTimeoutOption = None,
) -> None:
    """Trigger a checkpoint."""
    timeout_s = framework.timeout_s("--wait-timeout", wait_timeout)
    trigger_id = cli.client().trigger_checkpoint(job, full=full)
    if status := StartedOperation(cli, "checkpoint", trigger_id, job).wait("taking a checkpoint", detached, timeout_s):
        document = {"trigger_id": trigger_id, "checkpoint_id": status.checkpoint_id}
        cli.output.result(document, f"Checkpoint {status.checkpoint_id} is completed.")
