"""Asynchronous operations (savepoints, stops, checkpoints, disposals) by trigger id, as REST polls them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

from ckpt_runtime.failure_report import FailureCause, report_of
from ckpt_runtime.jobmaster.gateway_values import OperationKind, OperationNotFound, OperationStatus

STORE_DURATION_S = 300.0
"""How long a finished operation can be polled (Flink's rest.async.store-duration)."""

MAX_OPERATIONS = 10_000

_CANCELLED = OperationStatus(True, failure=FailureCause("Cancelled", "the session is shutting down", ""))


_Key = tuple[OperationKind, str | None, str]
OnEnd = Callable[[OperationKind, str | None, str, OperationStatus], None]


class OperationFailure(RuntimeError):
    """An operation's expected failure; its message is for the client."""


@dataclass(slots=True)
class _Operation:
    task: asyncio.Task[OperationStatus]
    ended_at: float | None = None


class OperationStore:
    """Operations by kind, job and trigger id. Starting a known operation again does nothing."""

    def __init__(self, on_end: OnEnd | None = None) -> None:
        """``on_end`` is called for each operation once it has ended."""
        self._on_end = on_end
        self._operations: dict[_Key, _Operation] = {}

    def knows(self, kind: OperationKind, job_id: str | None, trigger_id: str | None) -> bool:
        return trigger_id is not None and (kind, job_id, trigger_id) in self._operations

    def start(
        self,
        kind: OperationKind,
        job_id: str | None,
        trigger_id: str | None,
        operation: Callable[[], Awaitable[OperationStatus]],
    ) -> str:
        """Starts the operation in the background and returns its trigger id, a new one when none is given."""
        self._expire()
        trigger_id = trigger_id or uuid.uuid4().hex
        key = (kind, job_id, trigger_id)
        if key not in self._operations:
            task = asyncio.get_running_loop().create_task(_run(operation))
            entry = self._operations[key] = _Operation(task)
            # Bound to the entry, because the key may belong to another operation when this one ends.
            task.add_done_callback(partial(self._ended, key, entry))
        return trigger_id

    def _ended(self, key: _Key, entry: _Operation, task: asyncio.Task[OperationStatus]) -> None:
        entry.ended_at = time.monotonic()
        if self._on_end is not None:
            self._on_end(*key, _outcome(task))

    def status(self, kind: OperationKind, job_id: str | None, trigger_id: str) -> OperationStatus:
        """Raises OperationNotFound, also once the operation's time in the store is over."""
        self._expire()
        operation = self._operations.get((kind, job_id, trigger_id))
        if operation is None:
            raise OperationNotFound(kind, trigger_id, job_id)
        if not operation.task.done():
            return OperationStatus(completed=False)
        return _outcome(operation.task)

    async def stop(self) -> None:
        """Cancels the operations that still run."""
        tasks = [operation.task for operation in self._operations.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _expire(self) -> None:
        now = time.monotonic()
        expired = [
            key
            for key, operation in self._operations.items()
            if operation.ended_at is not None and now - operation.ended_at > STORE_DURATION_S
        ]
        # Running operations are never dropped, at any number: a client waits for the answer.
        surplus = len(self._operations) - len(expired) - MAX_OPERATIONS
        if surplus > 0:
            ended = [key for key, operation in self._operations.items() if operation.ended_at is not None]
            expired += [key for key in ended if key not in set(expired)][:surplus]
        for key in expired:
            del self._operations[key]


def _outcome(task: asyncio.Task[OperationStatus]) -> OperationStatus:
    return _CANCELLED if task.cancelled() else task.result()


async def _run(operation: Callable[[], Awaitable[OperationStatus]]) -> OperationStatus:
    try:
        return await operation()
    except asyncio.CancelledError:
        return _CANCELLED
    except Exception as error:
        # The trace begins with the line that clients show.
        cause = report_of(error)
        is_expected = isinstance(error, OperationFailure)
        return OperationStatus(
            True, failure=replace(cause, stack_trace=f"{cause.exception}: {cause.message}") if is_expected else cause
        )
