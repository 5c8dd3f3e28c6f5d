"""Operators over groups in several subtasks behind a hash exchange, which can be snapshotted and rescaled."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa

from ckpt_runtime.checkpoint.completed_checkpoint import KeyedHandle, OperatorListState
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.graph.aggregates import GroupAggregate
from ckpt_runtime.graph.key_groups import key_group_range
from ckpt_runtime.graph.specs import DeduplicateSpec, GroupSpec, TableSpec
from ckpt_runtime.operators.groups import Combiner
from ckpt_runtime.operators.operator import OperatorContext, OperatorStateStore
from ckpt_runtime.state.backend import BackendParameters
from ckpt_runtime.state.hashing import hash_columns, split_by_owner
from ckpt_runtime.state.registry import create_backend
from ckpt_runtime.task.deployed_job import create_operator
from tests.support.inline_snapshots import CHECKPOINT, handles_of, restore

MAX_PARALLELISM = 16
TIME = pa.timestamp("us")
Row = dict[str, Any]
_Spec: TypeAlias = GroupSpec | TableSpec | DeduplicateSpec


def aggregate(function: str, *columns: str, result: pa.DataType, **changes: Any) -> GroupAggregate:
    """An aggregate that is named after its function and columns."""
    return GroupAggregate(function, columns, f"{function}({', '.join(columns)})", result, **changes)


class GroupSubtask:
    """One operator with its backend; collects what it emits."""

    def __init__(
        self,
        spec: _Spec,
        index: int,
        parallelism: int,
        handles: Sequence[KeyedHandle],
        lists: tuple[OperatorListState, ...],
        backend: str,
    ) -> None:
        groups = key_group_range(MAX_PARALLELISM, parallelism, index)
        options: Mapping[str, str] = {"state.backend.rocksdb.cache.max-rows": "1000"}
        parameters = BackendParameters("groups", groups, MAX_PARALLELISM, tempfile.mkdtemp, options)
        self.backend = create_backend(backend, parameters)
        restore(self.backend, tuple(handles))
        self.context = OperatorContext(
            job_id="j", uid="groups", name="groups", subtask_index=index, parallelism=parallelism, attempt=0,
            now_ms=lambda: 0, monotonic_ms=lambda: 0, set_timer=lambda at_ms: None,
            operator_state=OperatorStateStore(lists), keyed_state=self.backend,
            restored_checkpoint_id=1 if lists else None,
        )  # fmt: skip
        self.rows: list[Row] = []
        self.watermarks: list[int] = []
        self.operator: Any = create_operator(spec, spec.schema)
        self.operator.open(self.context, self)

    def emit(self, batch: pa.RecordBatch) -> None:
        batch.validate(full=True)
        assert batch.num_rows
        self.rows += batch.to_pylist()

    def emit_watermark(self, timestamp_ms: int) -> None:
        self.watermarks.append(timestamp_ms)

    def emit_coming_watermark(self, timestamp_ms: int, batch: int) -> None:
        """It changes nothing for groups."""

    def emit_end_of_range(self) -> None:
        raise AssertionError("no range ends behind a shuffle")


class GroupJob:
    """All subtasks of one operator.

    ``combines``: each second batch is combined before the exchange, if the aggregates allow it.
    """

    def __init__(self, spec: _Spec, parallelism: int = 1, backend: str = "hashmap", *, combines: bool = True) -> None:
        self.spec = spec
        self._combines = combines
        self._backend = backend
        self._late = self._batches = 0
        self._start(parallelism)

    def _start(
        self, parallelism: int, handles: Sequence[KeyedHandle] = (), lists: tuple[OperatorListState, ...] = ()
    ) -> None:
        self.subtasks = [
            GroupSubtask(self.spec, index, parallelism, handles, lists, self._backend) for index in range(parallelism)
        ]

    def process(self, *rows: Row) -> list[Row]:
        """Processes rows as one batch; returns what comes out."""
        batch = pa.RecordBatch.from_pylist(list(rows), self.spec.schema)
        self._batches += 1
        if (
            self._combines
            and self._batches % 2 == 0
            and isinstance(self.spec, GroupSpec)
            and Combiner.combines(self.spec)
        ):
            batch = Combiner(self.spec).combined(batch)
        parts = split_by_owner(batch, hash_columns(batch, self.spec.keys), MAX_PARALLELISM, len(self.subtasks))
        for subtask, part in zip(self.subtasks, parts, strict=True):
            if part.num_rows:
                subtask.operator.process_batch(part, 0)
        return self._taken()

    def watermark(self, timestamp_ms: int) -> list[Row]:
        for subtask in self.subtasks:
            subtask.operator.process_watermark(timestamp_ms)
            assert subtask.watermarks[-1] == timestamp_ms
        return self._taken()

    def checkpoint(self) -> list[Row]:
        """Does what comes before a barrier; returns what comes out."""
        for subtask in self.subtasks:
            subtask.operator.prepare_snapshot(1)
        return self._taken()

    def restart(
        self,
        parallelism: int = 1,
        spec: _Spec | None = None,
        properties: CheckpointProperties = CHECKPOINT,
        backend: str | None = None,
    ) -> None:
        """Takes a snapshot and continues from it, at another parallelism, with another spec or another backend."""
        self._late = self.late
        for subtask in self.subtasks:
            subtask.operator.prepare_snapshot(1)
            subtask.operator.snapshot(1)
        handles = handles_of([subtask.backend for subtask in self.subtasks], properties)
        states = [subtask.context.operator_state.snapshot() for subtask in self.subtasks]
        items = tuple(item for lists in states for state in lists for item in state.items)
        self.close()
        self.spec = spec or self.spec
        self._backend = backend or self._backend
        self._start(parallelism, handles, tuple(OperatorListState(s.name, s.mode, items) for s in states[0]))

    def close(self) -> None:
        for subtask in self.subtasks:
            subtask.backend.close()

    @property
    def late(self) -> int:
        return self._late + sum(int(subtask.operator.late_rows_dropped) for subtask in self.subtasks)

    @property
    def living(self) -> int:
        """The stored rows, after those that wait were added."""
        for subtask in self.subtasks:
            subtask.operator.prepare_snapshot(1)
        return sum(len(subtask.operator._buffer) for subtask in self.subtasks)

    def _taken(self) -> list[Row]:
        found = [row for subtask in self.subtasks for row in subtask.rows]
        for subtask in self.subtasks:
            subtask.rows = []
        return found
