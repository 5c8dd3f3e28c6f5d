"""The source of Nexmark's events, which are computed as the job runs. Workers find the generator on Python's path."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from benchmarks.nexmark.generator import EVENT, EVENTS_PER_S, GROUP, Generator
from ckpt_runtime.sources import Source, Split, SplitEnumerator, SplitReader, SplitRows


class NexmarkSource(Source):
    """Format ``nexmark``: rows of :data:`EVENT`. It ends behind ``events`` of them, which are whole groups.

    A split holds ``eventsPerSplit`` events in a row, and ``splitsPerRange`` splits are found at one time.
    ``eventsPerSecond`` is the rate of events in event time.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self.events = self._number("events", "1000000")
        self.per_split = self._number("eventsPerSplit", "100000")
        self.splits = self._number("splitsPerRange", "2")
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
        return _Reader(self.generator)


class _Enumerator(SplitEnumerator):
    """Finds the splits of one range after the other. Its state is the number of events in the splits so far."""

    def __init__(self, source: NexmarkSource, found: int) -> None:
        self._source = source
        self._found = found

    def discover(self) -> Sequence[Split]:
        splits: list[Split] = []
        while self._found < self._source.events and len(splits) < self._source.splits:
            end = min(self._found + self._source.per_split, self._source.events)
            splits.append(Split(str(self._found), {"end": end}))
            self._found = end
        return splits

    def snapshot(self) -> Any:
        return self._found


class _Reader(SplitReader):
    """Reads one split after the other; a position is the place of the next event."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._splits: deque[tuple[Split, int]] = deque()

    def add(self, split: Split, position: Any) -> None:
        self._splits.append((split, int(split.id if position is None else position)))

    def read(self, most_rows: int) -> SplitRows | None:
        if not self._splits:
            return None
        split, place = self._splits.popleft()
        end = min(place + most_rows, split.description["end"])
        ended = end == split.description["end"]
        if not ended:
            self._splits.appendleft((split, end))
        return SplitRows(split.id, end, self._generator.events(place, end), ended=ended)
