"""The source of Nexmark's events, which are computed as the job runs. Workers find the generator on Python's path."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.nexmark.generator import EVENT, EVENTS_PER_S, GROUP, START_US, Generator, place_of
from benchmarks.pipelines.latency import Ages
from ckpt_runtime.sources import Source, Split, SplitEnumerator, SplitReader, SplitRows

UNMEASURED_S = 5.0
"""Seconds by the clock after which latencies are counted."""


class NexmarkSource(Source):
    """Format ``nexmark``: rows of :data:`EVENT`. It ends behind ``events`` of them, which are whole groups.

    The events come in ranges of ``splitsPerRange`` splits, of which each has up to ``eventsPerSplit`` events: the
    splits of a range share its groups in turn, so that their readers are at about the same event at any time.
    ``eventsPerSecond`` is the rate of events in event time. With a ``rate``, so many events are due in a second by the
    clock, from the time that the file ``begin`` holds, and none is made before it is due.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self.events = self._number("events", "1000000")
        self.per_split = self._number("eventsPerSplit", "100000")
        self.splits = self._number("splitsPerRange", "2")
        self.due = Due(Path(options["begin"]), self._number("rate", "0")) if options.get("begin") else None
        self.generator = Generator(self._number("eventsPerSecond", str(EVENTS_PER_S)))
        for name, value in (("events", self.events), ("eventsPerSplit", self.per_split)):
            if value % GROUP:
                raise ValueError(f"{name} is {value}; it has to be a multiple of {GROUP}")

    def _number(self, name: str, default: str) -> int:
        given = {key.lower(): value for key, value in self.options.items()}
        text = given.get(name.lower(), default)
        if not text.isdigit() or int(text) == 0:
            raise ValueError(f"{name} is {text!r}; it has to be a positive whole number")
        return int(text)

    @classmethod
    def name(cls) -> str:
        return "nexmark"

    def schema(self, declared: pa.Schema | None) -> pa.Schema:
        if declared is not None:
            raise ValueError("the format nexmark has a schema of its own")
        return EVENT

    def open_enumerator(self, schema: pa.Schema, state: Any, *, bounded: bool) -> SplitEnumerator:
        return _Enumerator(self, int(state or 0))

    def open_reader(self, schema: pa.Schema, *, subtask: int, parallelism: int) -> SplitReader:
        return _Reader(self.generator, self.due)


class Due:
    """When events are due by the clock. The file has the time of the first one, and exists once the job is RUNNING."""

    def __init__(self, file: Path, rate: int) -> None:
        self._file = file
        self._rate = rate
        self._begin: float | None = None

    @property
    def begin(self) -> float | None:
        """The time of the first event, in seconds since the epoch; None while it is not known."""
        if self._begin is None and self._file.exists():
            self._begin = float(self._file.read_text())
        return self._begin

    def events(self, share: Share) -> int:
        """How many events of a share are due."""
        if self.begin is None:
            return 0
        groups, rest = divmod(int((time.time() - self.begin) * self._rate) - share.first, share.stride)
        return max(0, groups * GROUP + min(rest, GROUP))


class RowAges:
    """Counts how long after its last event was due each row has come; passes the rows on.

    Rows of the first seconds do not count. It knows the place of a single event, and that of the end of a window to
    within a group.
    """

    def __init__(self, begin: str, rate: str, per_second: str) -> None:
        self._due = Due(Path(begin), int(rate))
        self._rate = int(rate)
        self._step_us = 1_000_000 // int(per_second)
        self._ages = Ages(Path(begin).parent)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            now = time.time()
            assert self._due.begin is not None
            times = batch.column("due").cast(pa.timestamp("us", "UTC")).cast(pa.int64()).to_numpy()
            due_s = place_of((times - START_US) // self._step_us) / self._rate
            ages = now - self._due.begin - due_s[due_s >= UNMEASURED_S]
            self._ages.count((ages * 1_000_000).astype("int64"))
            yield batch


@dataclass(frozen=True)
class Share:
    """A split: ``events`` events, in groups that begin at the places ``first``, ``first`` + ``stride`` and so on."""

    first: int
    stride: int
    events: int


class _Enumerator(SplitEnumerator):
    """Finds the splits of one range after the other. Its state is the number of events in the splits so far."""

    def __init__(self, source: NexmarkSource, found: int) -> None:
        self._source = source
        self._found = found

    def discover(self) -> Sequence[Split]:
        source, begin = self._source, self._found
        end = self._found = min(begin + source.splits * source.per_split, source.events)
        groups = (end - begin) // GROUP
        shares = [
            Share(begin + at * GROUP, source.splits * GROUP, len(range(at, groups, source.splits)) * GROUP)
            for at in range(min(groups, source.splits))
        ]
        return [Split(str(share.first), asdict(share)) for share in shares]

    def snapshot(self) -> Any:
        return self._found


class _Reader(SplitReader):
    """Reads one split after the other; a position is the number of events of the split that have been read."""

    idle_ms = 1

    def __init__(self, generator: Generator, due: Due | None) -> None:
        self._generator = generator
        self._due = due
        self._splits: deque[tuple[Split, int]] = deque()

    def add(self, split: Split, position: Any) -> None:
        self._splits.append((split, position or 0))

    def read(self, most_rows: int) -> SplitRows | None:
        if not self._splits:
            return None
        split, start = self._splits[0]
        share = Share(**split.description)
        end = min(start + most_rows, share.events)
        if self._due is not None:
            end = min(end, self._due.events(share))
            if end <= start:
                return None
        self._splits.popleft()
        ended = end == share.events
        if not ended:
            self._splits.appendleft((split, end))
        first = share.first + start // GROUP * share.stride + start % GROUP
        return SplitRows(split.id, end, self._generator.events(first, end - start, stride=share.stride), ended=ended)
