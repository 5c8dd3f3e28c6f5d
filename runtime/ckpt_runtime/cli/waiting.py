"""Waiting for an operation with something to look at meanwhile, and leaving it alone on Ctrl-C."""

from __future__ import annotations

from ckpt_runtime.cli.framework import Cli
from ckpt_runtime.client.models import OperationStatus
from ckpt_runtime.client.requests import OperationKind


def wait_for_operation(
    cli: Cli, kind: OperationKind, trigger_id: str, job_id: str | None, timeout_s: float | None, doing: str
) -> OperationStatus:
    """The finished operation. Ctrl-C and timeouts leave it running and tell its trigger id."""
    try:
        with cli.output.progress() as progress:
            progress.show(doing)
            return cli.client().wait_for_operation(kind, trigger_id, job_id, timeout_s=timeout_s)
    except KeyboardInterrupt:
        cli.output.note(f"the {kind} goes on as operation {trigger_id}")
        raise
