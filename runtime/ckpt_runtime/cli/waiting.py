"""Waiting for an operation with something to look at meanwhile, and leaving it alone on Ctrl-C."""

from __future__ import annotations

from ckpt_runtime.cli.framework import Cli
from ckpt_runtime.client.errors import UNKNOWN_JOB, CkptClientError, Conflict, NotFound, OperationFailed
from ckpt_runtime.client.models import OperationStatus
from ckpt_runtime.client.requests import OperationKind
from ckpt_runtime.client.stack_traces import telling_line


def wait_for_operation(
    cli: Cli, kind: OperationKind, trigger_id: str, job_id: str | None, timeout_s: float | None, doing: str
) -> OperationStatus:
    """The finished operation. Ctrl-C and timeouts leave it running and tell its trigger id.

    Flink accepts an operation on any job id and lets it fail: that is NotFound for an unknown job and Conflict for one
    that has ended, as a session answers at once.
    """
    try:
        with cli.output.progress() as progress:
            progress.show(doing)
            return cli.client().wait_for_operation(kind, trigger_id, job_id, timeout_s=timeout_s)
    except OperationFailed as error:
        if job_id is None or not telling_line(error.stack_trace).startswith(UNKNOWN_JOB):
            raise
        raise _about_the_job(cli, job_id) from error
    except KeyboardInterrupt:
        cli.output.note(f"the {kind} goes on as operation {trigger_id}")
        raise


def _about_the_job(cli: Cli, job_id: str) -> CkptClientError:
    """Why there is no such running job."""
    try:
        state = cli.client().job_details(job_id).state
    except NotFound as error:
        return error
    return Conflict(409, [f"job {job_id} is {state}"])
