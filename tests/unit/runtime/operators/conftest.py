"""A harness that runs one operator with a real state backend, a manual clock and collected output."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import KeyedHandle, OperatorListState
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.operators.operator import Operator, OperatorContext, OperatorStateStore
from ckpt_runtime.state.backend import BackendParameters
from ckpt_runtime.state.registry import create_backend
from tests.support.inline_snapshots import handles_of, restore


class Harness:
    """Opens an operator and is its output, clock and timer service."""

    def __init__(
        self,
        operator: Operator,
        handles: Sequence[KeyedHandle] = (),
        lists: tuple[OperatorListState, ...] = (),
        configuration: dict[str, str] | None = None,
        backend: str = "hashmap",
    ) -> None:
        self.operator = operator
        self.now = 0
        self.timer: int | None = None
        self.batches: list[pa.RecordBatch] = []
        self.events: list[Any] = []
        parameters = BackendParameters("op", KeyGroupRange(0, 127), 128, tempfile.mkdtemp, {})
        self.backend = create_backend(backend, parameters)
        restore(self.backend, handles)
        self.context = OperatorContext(
            job_id="j", uid="op", name="op", subtask_index=0, parallelism=1, attempt=0,
            operator_state=OperatorStateStore(lists), now_ms=lambda: self.now, monotonic_ms=lambda: self.now,
            set_timer=self._set_timer, keyed_state=self.backend, configuration=configuration or {},
        )  # fmt: skip
        operator.open(self.context, self)

    def _set_timer(self, at_ms: int) -> None:
        self.timer = at_ms if self.timer is None else min(self.timer, at_ms)

    def emit(self, batch: pa.RecordBatch) -> None:
        batch.validate(full=True)
        self.batches.append(batch)
        self.events += batch.to_pylist()

    def emit_watermark(self, timestamp_ms: int) -> None:
        self.events.append(("watermark", timestamp_ms))

    def emit_coming_watermark(self, timestamp_ms: int, batch: int) -> None:
        self.events.append(("coming", timestamp_ms, batch))

    def emit_end_of_range(self) -> None:
        self.events.append("end of range")

    def process(self, batch: pa.RecordBatch) -> list[Any]:
        self.operator.process_batch(batch, 0)
        return self.take()

    def advance(self, now: int) -> list[Any]:
        self.now = now
        if self.timer is not None and self.timer <= now:
            self.timer = None
            self.operator.on_processing_time(now)
        return self.take()

    def watermark(self, timestamp_ms: int) -> list[Any]:
        self.operator.process_watermark(timestamp_ms)
        return self.take()

    def end_of_range(self) -> list[Any]:
        self.operator.process_end_of_range()
        return self.take()

    def take(self) -> list[Any]:
        events, self.events = self.events, []
        return events

    def lists(self) -> tuple[OperatorListState, ...]:
        self.operator.snapshot(1)
        return self.context.operator_state.snapshot()

    def snapshot(self) -> list[KeyedHandle]:
        return handles_of([self.backend])


@pytest.fixture
def harness() -> type[Harness]:
    return Harness
