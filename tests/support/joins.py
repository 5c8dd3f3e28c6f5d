"""A join run by its operator in several subtasks, beside what it must give: computed row by row from the definition."""

from __future__ import annotations

import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.checkpoint.completed_checkpoint import KeyedHandle, OperatorListState
from ckpt_runtime.graph.key_groups import key_group_range
from ckpt_runtime.graph.output_schemas import join_output_schema
from ckpt_runtime.graph.specs import JoinSide, JoinSpec
from ckpt_runtime.operators.join import JoinOperator
from ckpt_runtime.operators.operator import OperatorContext, OperatorStateStore
from ckpt_runtime.state.backend import BackendParameters
from ckpt_runtime.state.hashing import hash_columns, split_by_owner
from ckpt_runtime.state.registry import create_backend
from tests.support.inline_snapshots import handles_of, restore

MAX_PARALLELISM = 16
LEFT, RIGHT = 0, 1
EPOCH = datetime(1970, 1, 1)
MS = pa.timestamp("ms")
Row = dict[str, Any]


def join_spec(
    how: str = "inner",
    within_ms: tuple[int, int] | None = (-2, 3),
    keys: Iterable[tuple[str, pa.DataType]] = (("k", pa.int64()),),
    payload: pa.DataType | None = None,
    time: pa.DataType = MS,
) -> JoinSpec:
    """Sides with key columns of one name, event times ``lt`` and ``rt``, and a column ``l`` or ``r`` of ``payload``."""
    sides = []
    for name in ("l", "r"):
        fields = [*keys, (f"{name}t", time), (name, payload or pa.int64())]
        sides.append(JoinSide(pa.schema(fields), tuple(key for key, _ in keys), within_ms and f"{name}t"))
    return JoinSpec(how, sides[0], sides[1], within_ms)


@dataclass
class Subtask:
    """One operator with its backend; collects what it emits, none of which may be late by either side's event time.

    ``sent`` is the last watermark that went out.
    """

    spec: JoinSpec
    index: int = 0
    parallelism: int = 1
    handles: tuple[KeyedHandle, ...] = ()
    lists: tuple[OperatorListState, ...] = ()
    backend_type: str = "hashmap"
    options: Mapping[str, str] = field(default_factory=dict)
    configuration: dict[str, str] = field(default_factory=dict)
    events: list[Any] = field(default_factory=list)
    sent: int | None = None

    def __post_init__(self) -> None:
        groups = key_group_range(MAX_PARALLELISM, self.parallelism, self.index)
        self.backend = create_backend(
            self.backend_type, BackendParameters("join", groups, MAX_PARALLELISM, tempfile.mkdtemp, self.options)
        )
        restore(self.backend, self.handles)
        self.context = OperatorContext(
            job_id="j", uid="join", name="join", subtask_index=self.index, parallelism=self.parallelism, attempt=0,
            now_ms=lambda: 0,
            monotonic_ms=lambda: 0,
            set_timer=lambda at_ms: None, operator_state=OperatorStateStore(self.lists), keyed_state=self.backend,
            configuration=self.configuration,
        )  # fmt: skip
        self.operator = JoinOperator(self.spec)
        self.operator.open(self.context, self)

    def emit(self, batch: pa.RecordBatch) -> None:
        batch.validate(full=True)
        assert batch.schema.equals(join_output_schema(self.spec))
        assert batch.num_rows
        for side in self.spec.sides:
            if self.sent is not None and side.event_time in batch.schema.names and batch[side.event_time].type == MS:
                earliest = pc.min(batch[side.event_time]).cast(pa.int64()).as_py()
                assert earliest is None or earliest > self.sent, "a row behind the watermark that went out"
        self.events += batch.to_pylist()

    def emit_watermark(self, timestamp_ms: int) -> None:
        assert self.sent is None or timestamp_ms >= self.sent
        self.sent = timestamp_ms
        self.events.append(timestamp_ms)

    def emit_coming_watermark(self, timestamp_ms: int, batch: int) -> None:
        self.events.append(("coming", timestamp_ms))

    def emit_end_of_range(self) -> None:
        raise AssertionError("no range ends behind a shuffle")

    def snapshot(self) -> tuple[list[KeyedHandle], tuple[OperatorListState, ...]]:
        self.operator.snapshot(1)
        return handles_of([self.backend]), self.context.operator_state.snapshot()

    def living(self) -> tuple[int, int]:
        """Rows kept of each side."""
        left, right = self.operator._buffers.sides
        return len(left), len(right)

    def take(self) -> list[Any]:
        events, self.events = self.events, []
        return events

    def left(self, *rows: Row) -> list[Any]:
        """Processes left rows; what comes out."""
        self.operator.process_batch(pa.RecordBatch.from_pylist(list(rows), self.spec.left.schema), LEFT)
        return self.take()

    def right(self, *rows: Row) -> list[Any]:
        self.operator.process_batch(pa.RecordBatch.from_pylist(list(rows), self.spec.right.schema), RIGHT)
        return self.take()

    def watermark(self, timestamp_ms: int) -> list[Any]:
        """What comes out in front of the watermark, and it."""
        self.operator.process_watermark(timestamp_ms)
        return self.take()


class JoinJob:
    """All subtasks behind a hash exchange, which can be snapshotted, and restored at another parallelism."""

    def __init__(
        self, spec: JoinSpec, parallelism: int = 1, backend_type: str = "hashmap", rows_in_memory: int = 1000
    ) -> None:
        self.spec = spec
        self.backend_type = backend_type
        self.options = {"state.backend.rocksdb.cache.max-rows": str(rows_in_memory)}
        self.subtasks: list[Subtask] = []
        self._start(parallelism)
        self.late = 0

    def process(self, side: int, rows: list[Row]) -> list[Row]:
        described = self.spec.sides[side]
        batch = pa.RecordBatch.from_pylist(rows, described.schema)
        hashes = hash_columns(batch, described.keys)
        parts = split_by_owner(batch, hashes, MAX_PARALLELISM, len(self.subtasks))
        for subtask, part in zip(self.subtasks, parts, strict=True):
            if part.num_rows:
                subtask.operator.process_batch(part, side)
        return self._taken()

    def watermark(self, timestamp_ms: int) -> list[Row]:
        for subtask in self.subtasks:
            subtask.operator.process_watermark(timestamp_ms)
        return self._taken()

    def rescale(self, parallelism: int) -> None:
        """Takes a snapshot and continues from it."""
        self.late = self.late_rows
        parts = [subtask.snapshot() for subtask in self.subtasks]
        handles = tuple(handle for found, _ in parts for handle in found)
        items = tuple(item for _, lists in parts for state in lists for item in state.items)
        lists = tuple(OperatorListState(s.name, s.mode, items) for s in parts[0][1])
        self.close()
        self._start(parallelism, handles, lists)

    def _start(
        self, parallelism: int, handles: tuple[KeyedHandle, ...] = (), lists: tuple[OperatorListState, ...] = ()
    ) -> None:
        self.subtasks = [
            Subtask(self.spec, index, parallelism, handles, lists, self.backend_type, self.options)
            for index in range(parallelism)
        ]

    def close(self) -> None:
        """Local files go."""
        for subtask in self.subtasks:
            subtask.backend.close()

    @property
    def late_rows(self) -> int:
        return self.late + sum(subtask.operator.late_rows_dropped for subtask in self.subtasks)

    @property
    def living(self) -> tuple[int, int]:
        counts = [subtask.living() for subtask in self.subtasks]
        return sum(left for left, _ in counts), sum(right for _, right in counts)

    def _taken(self) -> list[Row]:
        return [event for subtask in self.subtasks for event in subtask.take() if not isinstance(event, int)]


class Expected:
    """The definition: what must have come out so far is a function of the rows that were on time and the watermark.

    It keeps every row for ever and compares each with all of the other side. Rows are numbered as they come.
    """

    def __init__(self, spec: JoinSpec) -> None:
        self.spec = spec
        self.late = 0
        self.pairs_by_key: dict[Any, list[str]] = defaultdict(list)
        self._watermark = 0
        self._rows: tuple[list[tuple[int, Row]], list[tuple[int, Row]]] = ([], [])
        self._arrivals = 0
        self._matched: set[int] = set()
        self._joined: Counter[str] = Counter()

    def process(self, side: int, rows: list[Row]) -> None:
        for row in rows:
            time = self._time(side, row)
            if time is not None and time <= self._watermark:
                self.late += 1
            elif self._can_match(side, row):
                self._compare(side, row)
            self._arrivals += 1

    def _compare(self, side: int, row: Row) -> None:
        for number, other in self._rows[1 - side]:
            left, right = (row, other) if side == LEFT else (other, row)
            if self._matches(left, right):
                self._matched |= {number, self._arrivals}
                merged = text(self._merged(left, right))
                self._joined[merged] += 1
                self.pairs_by_key[self._key(LEFT, left)].append(merged)
        self._rows[side].append((self._arrivals, row))

    def advance(self, watermark: int) -> None:
        self._watermark = max(self._watermark, watermark)

    def output(self) -> Counter[str]:
        """All rows that must have come out, as :func:`text`."""
        how = self.spec.how
        if how == "left_semi":
            return Counter(text(row) for number, row in self._rows[LEFT] if number in self._matched)
        found = Counter(self._joined)
        for side, kinds in ((LEFT, ("left_outer", "full_outer")), (RIGHT, ("right_outer", "full_outer"))):
            for number, row in self._rows[side] if how in kinds else ():
                if number not in self._matched and self._ended(side, row):
                    found[text(self._merged(row, None) if side == LEFT else self._merged(None, row))] += 1
        return found

    def living(self) -> tuple[int, int]:
        """Rows of each side that may still match, and so are in the state."""
        gone = self._matched if self.spec.how == "left_semi" else set()
        left = [number for number, row in self._rows[LEFT] if not self._ended(LEFT, row) and number not in gone]
        return len(left), sum(not self._ended(RIGHT, row) for _, row in self._rows[RIGHT])

    def _matches(self, left: Row, right: Row) -> bool:
        if self._key(LEFT, left) != self._key(RIGHT, right):
            return False
        if self.spec.within_ms is None:
            return True
        left_time, right_time = self._time(LEFT, left), self._time(RIGHT, right)
        assert left_time is not None
        assert right_time is not None
        return self.spec.within_ms[0] <= right_time - left_time <= self.spec.within_ms[1]

    def _can_match(self, side: int, row: Row) -> bool:
        keyed = None not in self._key(side, row) or self.spec.how in ("full_outer", ("left_outer", "right_outer")[side])
        return keyed and (self.spec.within_ms is None or self._time(side, row) is not None)

    def _ended(self, side: int, row: Row) -> bool:
        if self.spec.within_ms is None:
            return False
        time = self._time(side, row)
        assert time is not None
        last = time + (self.spec.within_ms[1] if side == LEFT else -self.spec.within_ms[0])
        return last <= self._watermark

    def _time(self, side: int, row: Row) -> int | None:
        column = self.spec.sides[side].event_time
        return None if column is None else row[column]

    def _key(self, side: int, row: Row) -> tuple[Any, ...]:
        return tuple(row[key] for key in self.spec.sides[side].keys)

    def _merged(self, left: Row | None, right: Row | None) -> Row:
        names = [side.schema.names for side in self.spec.sides]
        missing = (dict.fromkeys(names[LEFT]), dict.fromkeys(names[RIGHT]))
        present: list[Row] = [right or {}, left or {}]
        if self.spec.how == "right_outer":
            present.reverse()
        return {**missing[LEFT], **missing[RIGHT], **present[0], **present[1]}


def text(row: Row) -> str:
    """A row in a form that can be compared and counted: timestamps as milliseconds."""
    return repr(sorted((name, _millis(value)) for name, value in row.items()))


def _millis(value: Any) -> Any:
    return (value - EPOCH) // timedelta(milliseconds=1) if isinstance(value, datetime) else value
