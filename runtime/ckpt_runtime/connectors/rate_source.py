"""Formats ``rate`` and ``rate-micro-batch``: rows with a timestamp and an increasing number, for tests, as in Spark.

Row ``i`` of ``rate`` has value ``i`` and the time at which it is due. A split holds the rows with one remainder modulo
the number of splits. After a restore no row is repeated or omitted, and rows that became due in the meantime are
emitted at once. ``rate-micro-batch`` produces rows as fast as they are consumed; the rows of a batch have the same
time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec import Meta

from ckpt_runtime.connectors.splits import BuiltInSource
from ckpt_runtime.sources import (
    PositionKind,
    Split,
    SplitEnumerator,
    SplitReader,
    SplitRows,
    StartPosition,
)

_DEFAULT_SPLITS = 8


_Count = Annotated[int, Meta(ge=0, le=1 << 53)]
_Time = Annotated[int, Meta(ge=-(1 << 53), le=1 << 53)]
_Splits = Annotated[int, Meta(ge=1, le=1 << 20)]


class _EnumeratorState(TypedDict):
    """The state of the enumerator of ``rate``: whether the splits were sent, and when the source began, if it has."""

    made: bool
    start_ms: NotRequired[_Count]


class _RateSplit(TypedDict):
    """The rows of ``rate`` in a split, and the time at which the source began."""

    remainder: _Count
    splits: _Splits
    start_ms: _Count


class _Batches(TypedDict):
    """The state of the enumerator of ``rate-micro-batch``: how many batches were sent, and the first value and the time
    of the next one, which earlier releases computed from the options."""

    batch: _Count
    first: NotRequired[_Count]
    ms: NotRequired[_Time]


class _BatchSplit(TypedDict):
    """The rows of a batch of ``rate-micro-batch`` in a split, and their time."""

    first: _Count
    end: _Count
    step: _Splits
    ms: _Time


class RateSource(BuiltInSource):
    """The source of both formats."""

    start_positions: ClassVar[frozenset[PositionKind]] = frozenset({"earliest"})

    def __init__(self, format_: str, options: Mapping[str, str]) -> None:
        super().__init__(format_, options)
        is_rate = format_ == "rate"
        self.state_type = _EnumeratorState if is_rate else _Batches
        self.description_type = _RateSplit if is_rate else _BatchSplit
        self.position_type = _Count

    def open_enumerator(self, schema: pa.Schema, state: Any, *, bounded: bool) -> SplitEnumerator:
        splits = self._values["numPartitions"] or _DEFAULT_SPLITS
        if self._format == "rate":
            return _RateEnumerator(splits, state)
        return _BatchEnumerator(self._values, splits, state, bounded=bounded)

    def repositioned(
        self, schema: pa.Schema, state: Any, reading: Sequence[tuple[Split, Any]], position: StartPosition
    ) -> Any:
        """All rows since the first one, with the times that they had."""
        if self._format != "rate":
            return {"batch": 0}
        starts = [split.description["start_ms"] for split, _ in reading]
        return {"made": False, **({"start_ms": min(starts)} if starts else {})}

    def open_reader(self, schema: pa.Schema, *, subtask: int, parallelism: int) -> SplitReader:
        if self._format == "rate":
            ramp_s = int(self._values["rampUpTime"] / 1000)
            return _RateReader(schema, Schedule(int(self._values["rowsPerSecond"]), ramp_s))
        return _BatchReader(schema)


class _RateEnumerator(SplitEnumerator):
    """Makes all splits at the start."""

    def __init__(self, splits: int, state: Any) -> None:
        self._splits = splits
        self._made = state is not None and state["made"]
        self._start_ms = None if state is None else state.get("start_ms")

    def discover(self) -> Sequence[Split]:
        if self._made:
            return ()
        self._made = True
        start_ms = int(time.time() * 1000) if self._start_ms is None else self._start_ms
        return [
            Split(str(at), {"remainder": at, "splits": self._splits, "start_ms": start_ms}, bounded=False)
            for at in range(self._splits)
        ]

    def snapshot(self) -> Any:
        return {"made": self._made, **({} if self._made or self._start_ms is None else {"start_ms": self._start_ms})}


class Schedule:
    """Computes when rows are due. During the ramp-up the rate grows by the same amount every second."""

    def __init__(self, rows_per_second: int, ramp_up_s: int) -> None:
        self._rate = rows_per_second
        self._ramp_s = ramp_up_s
        self._step = rows_per_second // (ramp_up_s + 1)
        self._of_ramp = self._after(ramp_up_s)
        """How many rows are due at the end of the ramp."""

    def due_after(self, ms: int) -> int:
        """How many rows are due ``ms`` after the start."""
        second, rest = divmod(max(ms, 0), 1000)
        return self._after(second) + rest * (self._after(second + 1) - self._after(second)) // 1000

    def times_ms(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """When each row is due, in ms after the start: spread evenly over its second."""
        behind = rows - self._of_ramp
        seconds = np.where(behind >= 0, self._ramp_s + behind // self._rate, 0)
        first, of_second = rows - behind % self._rate, np.full(len(rows), self._rate)
        early = behind < 0
        if early.any():
            steps = rows[early] // self._step  # after n seconds, n * (n + 1) / 2 steps are due
            at = (np.sqrt(2.0 * steps + 0.25) - 0.5).astype(np.int64)
            at -= at * (at + 1) // 2 > steps  # the root may be a little wrong
            at += (at + 1) * (at + 2) // 2 <= steps
            seconds[early], first[early], of_second[early] = at, at * (at + 1) // 2 * self._step, (at + 1) * self._step
        # As in Spark, whose Math.round rounds halves up.
        offsets: npt.NDArray[np.int64] = np.floor((rows - first) * (1000.0 / of_second) + 0.5).astype(np.int64)
        offsets += seconds * 1000
        return offsets

    def _after(self, second: int) -> int:
        if second <= self._ramp_s:
            return second * (second + 1) // 2 * self._step
        return self._of_ramp + (second - self._ramp_s) * self._rate


class _RateReader(SplitReader):
    """Emits the rows of its splits that are due."""

    def __init__(self, schema: pa.Schema, schedule: Schedule) -> None:
        self._schema = schema
        self._schedule = schedule
        self._splits: deque[tuple[Split, int]] = deque()

    def add(self, split: Split, position: Any) -> None:
        self._splits.append((split, split.description["remainder"] if position is None else position))

    def read(self, most_rows: int) -> SplitRows | None:
        now_ms = int(time.time() * 1000)
        for _ in range(len(self._splits)):
            split, position = self._splits.popleft()
            start_ms, step = split.description["start_ms"], split.description["splits"]
            due = self._schedule.due_after(now_ms - start_ms)
            rows = np.arange(position, min(due, position + most_rows * step), step, dtype=np.int64)
            position += len(rows) * step
            self._splits.append((split, position))
            if len(rows):
                times = (self._schedule.times_ms(rows) + start_ms) * 1000
                columns = [pa.array(times, self._schema.field(0).type), pa.array(rows)]
                return SplitRows(split.id, position, pa.RecordBatch.from_arrays(columns, schema=self._schema))
        return None

    def backlog(self) -> int:
        """The number of rows that are due and were not emitted yet."""
        now_ms = int(time.time() * 1000)
        waiting = 0
        for split, position in self._splits:
            due = self._schedule.due_after(now_ms - split.description["start_ms"])
            waiting += max(0, -(-(due - position) // split.description["splits"]))
        return waiting


class _BatchEnumerator(SplitEnumerator):
    """Makes one batch per call; a bounded source makes one batch in all."""

    def __init__(self, options: dict[str, Any], splits: int, state: Any, *, bounded: bool) -> None:
        self._rows = int(options["rowsPerBatch"])
        self._advance_ms = int(options["advanceMillisPerBatch"])
        self._splits = splits
        found = {"batch": 0} if state is None else state
        self._batch = found["batch"]
        # As in Spark, a job that is restored with other options continues at the value and the time that were reached.
        self._first = found.get("first", self._batch * self._rows)
        self._ms = found.get("ms", int(options["startTimestamp"]) + self._batch * self._advance_ms)
        self._bounded = bounded
        self._ended = False

    def discover(self) -> Sequence[Split]:
        if self._ended:
            return ()
        self._ended = self._bounded
        first, time_ms = self._first, self._ms
        self._batch, self._first, self._ms = self._batch + 1, first + self._rows, time_ms + self._advance_ms
        return [
            Split(
                f"{self._batch}-{at}",
                {"first": first + at, "end": first + self._rows, "step": self._splits, "ms": time_ms},
            )
            for at in range(min(self._splits, self._rows))
        ]

    def snapshot(self) -> Any:
        return {"batch": self._batch, "first": self._first, "ms": self._ms}


class _BatchReader(SplitReader):
    """Emits the rows of its splits in sequence."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._splits: deque[tuple[Split, int]] = deque()

    def add(self, split: Split, position: Any) -> None:
        self._splits.append((split, split.description["first"] if position is None else position))

    def read(self, most_rows: int) -> SplitRows | None:
        if not self._splits:
            return None
        split, position = self._splits.popleft()
        end, step = split.description["end"], split.description["step"]
        rows = np.arange(position, min(end, position + most_rows * step), step, dtype=np.int64)
        position += len(rows) * step
        if position < end:
            self._splits.appendleft((split, position))
        times = pa.repeat(pa.scalar(split.description["ms"] * 1000, pa.int64()), len(rows))
        columns = [times.cast(self._schema.field(0).type), pa.array(rows)]
        batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        return SplitRows(split.id, position, batch, ended=position >= end)
