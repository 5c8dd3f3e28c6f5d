"""Runs connectors by hand: contexts, collecting outputs, and the redistribution of list state on a restore."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from ckpt_runtime.checkpoint.completed_checkpoint import OperatorListState, OperatorStateMode
from ckpt_runtime.checkpoint.sink_state import SinkLineage
from ckpt_runtime.operators.operator import (
    Operator,
    OperatorContext,
    OperatorStateStore,
    SourceOperator,
    SourceStatus,
    WaitingInput,
)

JOB = "0123456789abcdef0123456789abcdef"
SINK = SinkLineage("0" * 16)


class Collector:
    """An output that keeps what it gets, or hands it on."""

    def __init__(self, forward: Callable[[pa.RecordBatch], None] | None = None) -> None:
        self.batches: list[pa.RecordBatch] = []
        self.watermarks: list[int] = []
        self.ranges: list[int] = []
        self.forward = forward

    def emit(self, batch: pa.RecordBatch) -> None:
        self.batches.append(batch)
        if self.forward is not None and batch.num_rows:
            self.forward(batch)

    def emit_watermark(self, timestamp_ms: int) -> None:
        self.watermarks.append(timestamp_ms)

    def emit_coming_watermark(self, timestamp_ms: int, batch: int) -> None:
        self.ranges.append(batch)

    def emit_end_of_range(self) -> None:
        """Where it stands between rows is another harness's to say."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for batch in self.batches for row in batch.to_pylist()]

    def column(self, name: str) -> list[Any]:
        return [value for batch in self.batches for value in batch.column(name).to_pylist()]


class Clock:
    """Milliseconds that only a test moves."""

    def __init__(self) -> None:
        self.ms = 1_000_000

    def __call__(self) -> int:
        return self.ms


def context(
    subtask: int = 0,
    parallelism: int = 1,
    *,
    uid: str = "op",
    attempt: int = 0,
    state: Sequence[OperatorListState] = (),
    restored: int | None = None,
    now_ms: Callable[[], int] = lambda: 0,
    monotonic_ms: Callable[[], float] = lambda: 0,
    job_id: str = JOB,
    sink: SinkLineage = SINK,
    set_timer: Callable[[int], None] = lambda at_ms: None,
    waiting_input: Callable[[], WaitingInput] = lambda: WaitingInput.NOTHING,
    configuration: dict[str, str] | None = None,
) -> OperatorContext:
    return OperatorContext(
        job_id=job_id,
        uid=uid,
        name=uid,
        subtask_index=subtask,
        parallelism=parallelism,
        attempt=attempt,
        operator_state=OperatorStateStore(tuple(state)),
        now_ms=now_ms,
        monotonic_ms=monotonic_ms,
        set_timer=set_timer,
        restored_checkpoint_id=restored,
        waiting_input=waiting_input,
        sink=sink,
        configuration=configuration or {},
    )


def opened(operator: Operator, where: OperatorContext) -> Collector:
    output = Collector()
    operator.open(where, output)
    return output


def snapshot_of(operator: Operator, checkpoint_id: int) -> tuple[OperatorListState, ...]:
    operator.prepare_snapshot(checkpoint_id)
    operator.snapshot(checkpoint_id)
    return operator.context.operator_state.snapshot()


def redistributed(snapshots: Sequence[Sequence[OperatorListState]], parallelism: int) -> list[list[OperatorListState]]:
    """List states of some old subtasks, dealt to new ones: split ones in turn, broadcast ones copied."""
    result: list[list[OperatorListState]] = [[] for _ in range(parallelism)]
    names = {state.name: state.mode for snapshot in snapshots for state in snapshot}
    for name, mode in sorted(names.items()):
        lists = [state.items for snapshot in snapshots for state in snapshot if state.name == name]
        items = [item for part in lists for item in part]
        for subtask in range(parallelism):
            mine = items[subtask::parallelism]
            if mode is OperatorStateMode.BROADCAST:
                mine = list(lists[subtask % len(lists)])
            elif mode is OperatorStateMode.UNION:
                mine = items
            if mine:
                result[subtask].append(OperatorListState(name, mode, tuple(mine)))
    return result


def drain(source: SourceOperator, polls: int | None = None) -> bool:
    """Polls to the end of input, or some times; says whether the end came."""
    while polls is None or polls > 0:
        if source.poll() is SourceStatus.END_OF_INPUT:
            return True
        polls = None if polls is None else polls - 1
    return False
