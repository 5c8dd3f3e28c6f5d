"""``foreachBatch`` in a thread of its own: checkpoints complete while the function runs, and a bounded number waits.

The committer's state has the checkpoints whose calls have not returned, so a restored job makes these calls again. When
more checkpoints wait than the query allows, the committer takes no barrier, and the writers take no rows: staged rows
are bounded as well. A writer sees by its staged files which checkpoints wait, because the committer deletes them when
the function has returned.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import pyarrow as pa

from ckpt_runtime.checkpoint.completed_checkpoint import OperatorStateMode
from ckpt_runtime.connectors.sink_operators import CHECK_EVERY_MS, CommitterOperator, PreparingSinkOperator
from ckpt_runtime.graph.schema import NonNegative
from ckpt_runtime.operators.operator import OperatorContext, Output
from ckpt_runtime.operators.task_context import HelperThread
from ckpt_runtime.sinks import Transaction

_LOOK_EVERY_MS = 100


class StagedSink(Protocol):
    """The interface of a sink whose rows are staged: a limit, and whether a committable still waits."""

    max_waiting: int

    def still_staged(self, committable: Any) -> bool:
        """Whether the rows of a committable are still there, because its commit has not returned."""


class _CallerThread:
    """Runs calls one after the other. It makes no further call after a failure, or after :meth:`stop`."""

    def __init__(self, name: str) -> None:
        self._calls: deque[tuple[Transaction, Callable[[], None]]] = deque()
        self._returned: deque[Transaction] = deque()
        self._error: BaseException | None = None
        self._wake = threading.Condition()
        self._stopped = False
        # The thread keeps the ids of the subtask for log lines. A call that never returns must not keep the process.
        run = contextvars.copy_context().run
        self._thread = HelperThread(target=run, args=(self._run,), name=name, daemon=True)
        self._thread.start()

    def add(self, transaction: Transaction, call: Callable[[], None]) -> None:
        with self._wake:
            self._calls.append((transaction, call))
            self._wake.notify()

    def returned(self) -> list[Transaction]:
        """The calls that have returned since the last time. Raises the error of a call, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        return [self._returned.popleft() for _ in range(len(self._returned))]

    def stop(self) -> None:
        """Waits for the call in progress: it must not overlap with its repetition by the next attempt."""
        with self._wake:
            self._stopped = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stopped or self._calls)
                if self._stopped:
                    return
                transaction, call = self._calls.popleft()
            try:
                call()
            except BaseException as error:  # user code may call sys.exit()
                self._error = error
                return
            self._returned.append(transaction)


class WaitingCommitterOperator(CommitterOperator):
    """Commits in the order of checkpoints, in a thread of its own.

    If it ``joins``, what was prepared for an aborted checkpoint is committed with the next one, in one call: some
    writers may have prepared rows of a batch of the source for the first, and others for the second.
    """

    def __init__(self, sink: Any, schema: pa.Schema, *, joins: bool = False) -> None:
        super().__init__(sink, schema)
        self._max_waiting: int = sink.max_waiting
        self._called: set[Transaction] = set()
        self._joins = joins
        self._aborted: set[int] = set()
        self._caller: _CallerThread | None = None

    def open(self, context: OperatorContext, output: Output) -> None:
        self._caller = _CallerThread(f"functions of {context.uid}")
        super().open(context, output)

    @property
    def is_full(self) -> bool:
        if len(self._called) > self._max_waiting:
            self._settle()
        return len(self._called) > self._max_waiting

    @property
    def has_commits_left(self) -> bool:
        self._settle()
        return bool(self._called)

    def on_processing_time(self, now_ms: int) -> None:
        """Raises the failure of a call even if the next barrier is hours away."""
        self._settle()
        if self._called:
            self.context.set_timer(now_ms + CHECK_EVERY_MS)

    def snapshot(self, checkpoint_id: int) -> None:
        self._settle()
        super().snapshot(checkpoint_id)

    def notify_complete(self, checkpoint_id: int) -> None:
        super().notify_complete(checkpoint_id)
        self._aborted = {aborted for aborted in self._aborted if aborted > checkpoint_id}

    def notify_aborted(self, checkpoint_id: int) -> None:
        super().notify_aborted(checkpoint_id)
        if self._joins:
            self._aborted.add(checkpoint_id)

    def _ordered(self) -> list[Transaction]:
        aborted: Transaction | None = None
        for known in sorted(self._messages.keys() - self._called, key=lambda known: known.checkpoint_id):
            whole = known
            if aborted is not None and known.batch_id is None:
                whole = replace(known, batch_id=aborted.batch_id)
                joined = self._messages.pop(aborted) + self._messages.pop(known)
                self._messages[whole] = joined
            aborted = whole if whole.checkpoint_id in self._aborted else None
        return super()._ordered()

    def close(self) -> None:
        if self._caller is not None:
            self._caller.stop()
            try:
                self._settle()
            finally:
                super().close()

    def _commit_up_to(self, checkpoint_id: int) -> None:
        assert self._caller is not None
        self._settle()
        for known in self._ordered():
            if known.checkpoint_id <= checkpoint_id and known not in self._called:
                committables = self._decoded(known)
                self._called.add(known)
                self._caller.add(known, lambda known=known, values=committables: self._commit(known, values))  # type: ignore[misc]
        if self._called:
            self.context.set_timer(self.context.now_ms() + CHECK_EVERY_MS)

    def _settle(self) -> None:
        """Forgets the checkpoints whose calls have returned."""
        assert self._caller is not None
        for known in self._caller.returned():
            self._called.discard(known)
            del self._messages[known]


_STAGED = "staged"
"""The operator state of a writer that stages ranges without rows: up to which split of the source it did."""


class WaitingWriterOperator(PreparingSinkOperator):
    """Stages rows while not too many completed checkpoints wait.

    With ``batch``, the schema of the rows, each range with splits of the source is staged, also without rows. Sources
    send the end of the last range again after a restore, and one without splits behind their data.
    """

    def __init__(self, sink: Any, table: pa.Schema | None = None, batch: pa.Schema | None = None) -> None:
        super().__init__(sink, table)
        self._batch = batch
        self._staged_upto = 0
        self._staged: StagedSink = sink
        self._prepared_by_checkpoint: dict[int, Any] = {}
        self._waiting: deque[Any] = deque()
        """A committable of each completed checkpoint, oldest first: all of a checkpoint's files go together."""
        self._look_at_ms = 0.0

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        self._staged_upto = max(context.operator_state.restored(_STAGED, NonNegative), default=0)

    def process_end_of_range(self) -> None:
        super().process_end_of_range()
        if self._batch is not None and self.context.chain_time.upto > self._staged_upto:
            self._staged_upto = self.context.chain_time.upto
            self.process_batch(pa.RecordBatch.from_pylist([], self._batch), 0)

    def snapshot(self, checkpoint_id: int) -> None:
        super().snapshot(checkpoint_id)
        if self._batch is not None:
            self.context.operator_state.put(_STAGED, [self._staged_upto], OperatorStateMode.UNION)

    @property
    def is_full(self) -> bool:
        if len(self._waiting) <= self._staged.max_waiting:
            return False
        now = self.context.monotonic_ms()
        if now >= self._look_at_ms:
            self._look_at_ms = now + _LOOK_EVERY_MS
            while self._waiting and not self._staged.still_staged(self._waiting[0]):
                self._waiting.popleft()
        return len(self._waiting) > self._staged.max_waiting

    def notify_complete(self, checkpoint_id: int) -> None:
        for prepared in sorted(self._prepared_by_checkpoint):
            if prepared <= checkpoint_id:
                self._waiting.append(self._prepared_by_checkpoint.pop(prepared))

    def _prepared(self, checkpoint_id: int) -> Sequence[Any]:
        committables = super()._prepared(checkpoint_id)
        if committables:
            self._prepared_by_checkpoint[checkpoint_id] = committables[0]
        return committables
