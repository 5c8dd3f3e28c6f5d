"""Sources of the rows of DataFrames of the session's own Spark: of one DataFrame, or one for each range of values.

Spark computes each DataFrame when its range is read, in a thread: checkpoints continue during that time. After a
failure the range is computed again, and its rows have to be the same in the same order, which is checked.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NotRequired, TypedDict

import pyarrow as pa

from ckpt_runtime.sources import Source, Split, SplitEnumerator, SplitReader, SplitRows

_LOOK_EVERY_MS = 1000
_WAIT_MS = 50
_DIGESTED_ROWS = 8192


class _Progress(TypedDict):
    """The state of an enumerator: how many ranges it has found, and the end of the last one."""

    ranges: int
    end: NotRequired[Any]


class _Range(TypedDict):
    start: Any
    end: Any


class _Place(TypedDict):
    """How many rows of a range have been emitted, and a digest of all rows of it."""

    rows: int
    digest: str


class FrameSource(Source):
    """Reads DataFrames of the session's own Spark. A program registers a subclass and names it as a format.

    Without :meth:`latest` it has the rows of one DataFrame, and ends. With it, there is a DataFrame for each range
    between two values: the first one begins at :meth:`first`, and each other one where the one before it ended. A range
    is read by one subtask, in whose memory its rows have to fit. Values are values of JSON.
    """

    state_type: Any = _Progress
    description_type: Any = _Range
    position_type: Any = _Place

    @abstractmethod
    def read(self, spark: Any, start: Any, end: Any) -> Any:
        """Returns the DataFrame of a range; both ends are None for a source without :meth:`latest`.

        ``spark`` is a separate session. The same call has to give the same rows in the same order at any later time:
        a DataFrame that shuffles rows has to be sorted, and must not depend on the clock or on random numbers. If it
        gives other rows when a range is read again, the job fails.
        """

    def latest(self, spark: Any) -> Any:
        """Returns the end of the data that exists now, or None if there is none; called about once a second."""
        raise NotImplementedError

    def first(self) -> Any:
        """Returns where the first range of a new job begins."""
        return None

    @property
    def is_bounded(self) -> bool:
        return type(self).latest is FrameSource.latest

    def schema(self, declared: pa.Schema | None) -> pa.Schema:
        if declared is None:
            raise ValueError("set the columns of its DataFrames: .schema('name STRING, ...')")
        return declared

    def open_enumerator(self, schema: pa.Schema, state: Any, *, bounded: bool) -> SplitEnumerator:
        return _Ranges(self, state, bounded=bounded)

    def open_reader(self, schema: pa.Schema, *, subtask: int, parallelism: int) -> SplitReader:
        return _FrameReader(self, schema)


class _Ranges(SplitEnumerator):
    idle_ms = _LOOK_EVERY_MS

    def __init__(self, source: FrameSource, state: _Progress | None, *, bounded: bool) -> None:
        self._source = source
        self._bounded = bounded
        self._ranges = 0 if state is None else state["ranges"]
        self._end = _as_json(source, "first", source.first()) if state is None else state.get("end")
        self._looked = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ranges of frames")
        self._asked: Future[Any] | None = None

    def discover(self) -> Sequence[Split]:
        if self._source.is_bounded:
            return [] if self._ranges else [self._next(None, None)]
        if self._bounded and self._looked:
            return []
        if self._asked is None:
            self._asked = self._pool.submit(lambda: self._source.latest(self._source.spark()))
        if not self._bounded and not self._asked.done():
            return []
        latest, self._asked, self._looked = _as_json(self._source, "latest", self._asked.result()), None, True
        if latest is None or latest == self._end:
            return []
        start, self._end = self._end, latest
        return [self._next(start, latest)]

    def snapshot(self) -> Any:
        return {"ranges": self._ranges, "end": self._end}

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _next(self, start: Any, end: Any) -> Split:
        self._ranges += 1
        return Split(str(self._ranges), {"start": start, "end": end})


class _FrameReader(SplitReader):
    """Reads one range after the other."""

    idle_ms = _WAIT_MS

    def __init__(self, source: FrameSource, schema: pa.Schema) -> None:
        self._source = source
        self._schema = schema
        self._waiting: deque[tuple[Split, _Place | None]] = deque()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rows of frames")
        self._asked: Future[tuple[pa.Table, str]] | None = None

    def add(self, split: Split, position: Any) -> None:
        self._waiting.append((split, position))

    def read(self, most_rows: int) -> SplitRows | None:
        if not self._waiting:
            return None
        split, place = self._waiting[0]
        if self._asked is None:
            self._asked = self._pool.submit(self._rows, split.description)
        if not self._asked.done():
            return None
        table, digest = self._asked.result()
        if place is not None and place["digest"] != digest:
            raise ValueError(
                f"{type(self._source).__name__}: the DataFrame of {_shown(split.description)} had other rows when it "
                "was read again, after some of its rows had been emitted: return the same rows in the same order, "
                "sort it, and do not use the clock or random numbers"
            )
        start = 0 if place is None else place["rows"]
        rows = table.slice(start, most_rows).combine_chunks().to_batches()
        place = _Place(rows=start + sum(batch.num_rows for batch in rows), digest=digest)
        if place["rows"] < table.num_rows:
            self._waiting[0] = (split, place)
            return SplitRows(split.id, place, rows[0])
        self._waiting.popleft()
        self._asked = None
        return SplitRows(split.id, place, rows[0] if rows else None, ended=True)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _rows(self, description: _Range) -> tuple[pa.Table, str]:
        frame = self._source.read(self._source.spark(), description["start"], description["end"])
        found = frame.toArrow()
        if found.schema.names != self._schema.names:
            raise ValueError(
                f"{type(self._source).__name__}: the DataFrame of {_shown(description)} has the columns "
                f"{', '.join(found.schema.names)}, but {', '.join(self._schema.names)} are declared"
            )
        table = found.cast(self._schema).combine_chunks()
        digest = hashlib.sha256()
        for start in range(0, table.num_rows, _DIGESTED_ROWS):
            # By values: the bytes that Arrow has under nulls mean nothing.
            digest.update(repr(table.slice(start, _DIGESTED_ROWS).to_pydict()).encode())
        return table, digest.hexdigest()


def _as_json(source: FrameSource, method: str, value: Any) -> Any:
    """An end of a range as a restored job has it, such as a list in the place of a tuple."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{type(source).__name__}.{method}() returned {value!r}, which is not a value of JSON: {error}; return a "
            "text or a number, such as str(time) or int(number), and convert it in read()"
        ) from None


def _shown(description: _Range) -> str:
    return "the source" if description["end"] is None else f"{description['start']!r} to {description['end']!r}"
