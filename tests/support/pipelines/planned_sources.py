"""PySpark data sources that rely on what Spark promises them; the same classes run in Spark and in the engine.

Each gives rows of one text and ends. Arguments of the pipeline: DIRECTORY FAULTS.
"""

from __future__ import annotations

import json
import os
import random
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
from injected import act
from pyspark import TaskContext
from pyspark.sql import Row, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    InputPartition,
    SimpleDataSourceStreamReader,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow

RANGES, ROWS = 3, 5
PARTITIONS, SLOW_ROWS = 30, 6


class _Source(DataSource):
    """Options ``directory`` and ``faults``."""

    reader_class: type[Any]

    @classmethod
    def name(cls) -> str:
        return cls.__name__.lower()

    def schema(self) -> str:
        return "row STRING"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        reader: DataSourceStreamReader = self.reader_class(self.options)
        return reader


class StatefulReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Keeps what it has found until it is committed, and changes the offset that it is given. Logs its calls."""

    def __init__(self, options: Any) -> None:
        self.log = Path(options["directory"]) / "calls"
        self.ranges: dict[int, list[int]] = {}
        self.prepared = False

    def _called(self, method: str, *offsets: dict[str, Any]) -> None:
        entry = {
            "method": method,
            "object": f"{os.getpid()}-{id(self)}",
            "offsets": [offset["n"] for offset in offsets],
        }
        with self.log.open("a") as log:
            log.write(json.dumps(entry) + "\n")

    def prepareForTriggerAvailableNow(self) -> None:
        self._called("prepareForTriggerAvailableNow")
        self.prepared = True

    def initialOffset(self) -> dict[str, Any]:
        self._called("initialOffset")
        return {"n": 0}

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        assert self.prepared
        self._called("latestOffset", start)
        first = start["n"]
        if first < RANGES * ROWS:
            start["n"] += ROWS
            self.ranges[start["n"]] = list(range(first, start["n"]))
        return start

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        self._called("partitions", start, end)
        return [InputPartition(number) for number in self.ranges[end["n"]]]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        yield (f"stateful {partition.value}",)

    def commit(self, end: dict[str, Any]) -> None:
        self._called("commit", end)
        self.ranges.pop(end["n"], None)


class Stateful(_Source):
    """Planning depends on what the object knows."""

    reader_class = StatefulReader


class UnorderedReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One range, whose partitions and their rows come in another order each time, some as record batches."""

    def __init__(self, options: Any) -> None:
        self.faults = options.get("faults")

    def prepareForTriggerAvailableNow(self) -> None:
        """All is there."""

    def initialOffset(self) -> dict[str, Any]:
        return {"n": 0}

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        return {"n": PARTITIONS}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        numbers = list(range(start["n"], end["n"]))
        random.SystemRandom().shuffle(numbers)
        return [InputPartition({number}) for number in numbers]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        [number] = partition.value
        rows = list(range(SLOW_ROWS))
        random.SystemRandom().shuffle(rows)
        for row in rows:
            act(self.faults, "read")
            text = f"unordered {number} {row}"
            yield pa.record_batch({"row": [text]}) if number % 2 else (text,)


class Unordered(_Source):
    """Planned once, or rows are lost and doubled."""

    reader_class = UnorderedReader


class Level(Enum):
    LOW = "low"


class Place(NamedTuple):
    topic: str
    offset: int


class Inner:
    __slots__ = ("zone",)

    def __init__(self, zone: Any) -> None:
        self.zone = zone

    def __repr__(self) -> str:
        return f"Inner({self.zone!r})"


@dataclass
class Custom(InputPartition):
    """A partition of many types."""

    place: Place
    level: Level
    more: dict[Any, Any]
    inner: tuple[Inner, ...]


class TypedReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Partitions of classes; the rows tell what arrived."""

    def __init__(self, options: Any) -> None:
        pass

    def prepareForTriggerAvailableNow(self) -> None:
        """All is there."""

    def initialOffset(self) -> dict[str, Any]:
        return {"n": 0}

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        return {"n": 4}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        moment = datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1)
        times = {"when": moment, "utc": datetime(2024, 1, 1, tzinfo=UTC), "late": timedelta(microseconds=-1)}
        numbers = {1: np.int64(7), 2**70: Decimal("1.50"), "f": float("nan"), (2, "x"): np.datetime64("2024-01-01")}
        others = {None: b"\xff", "day": date(2024, 1, 1), "id": uuid.UUID(int=5), "row": Row(b=1, a=Row(c=None))}
        more: dict[Any, Any] = {**times, **numbers, **others, "kinds": [frozenset({1}), {2}, (3,), [], True]}
        return [
            InputPartition(None),
            Custom(Place("t", 3), Level.LOW, more, (Inner(None), Inner([1]))),
            InputPartition(Row(of="spark", n=1)),
            InputPartition(("plain", [1], {"a": {"b": None}})),
        ]

    def read(self, partition: Any) -> Iterator[Any]:
        yield (f"typed {type(partition).__name__} {partition!r}",)
        if isinstance(partition, Custom):
            yield (f"typed {partition.level is Level.LOW} {partition.more['when'].utcoffset()}",)


class Typed(_Source):
    """Partition objects travel."""

    reader_class = TypedReader


class LeavingReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Keeps in the object what a partition gave, as one may whose object reads one partition only."""

    def __init__(self, options: Any) -> None:
        self.rows: list[tuple[str]] = []
        self.numbers = iter([0, 1])

    def prepareForTriggerAvailableNow(self) -> None:
        """All is there."""

    def initialOffset(self) -> dict[str, Any]:
        return {"n": 0}

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        return {"n": 4}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return [InputPartition(number) for number in range(start["n"], end["n"])]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        self.rows.extend((f"leaving {partition.value} {number}",) for number in self.numbers)
        return iter(self.rows)


class Leaving(_Source):
    """An object of its own reads each partition; the source that makes it has given its schema."""

    reported = ""

    def schema(self) -> str:
        self.reported = super().schema()
        return self.reported

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        assert self.reported
        return LeavingReader(self.options)


class FewReader(SimpleDataSourceStreamReader, SupportsTriggerAvailableNow):
    """Rows with the offset."""

    def prepareForTriggerAvailableNow(self) -> None:
        """There are ten rows."""

    def initialOffset(self) -> dict[str, Any]:
        return {"n": 0}

    def read(self, start: dict[str, Any]) -> tuple[Iterator[Any], dict[str, Any]]:
        end = min(start["n"] + 4, 10)
        return iter([(f"few {n}",) for n in range(start["n"], end)]), {"n": end}

    def readBetweenOffsets(self, start: dict[str, Any], end: dict[str, Any]) -> Iterator[Any]:
        return iter([(f"few {n}",) for n in range(start["n"], end["n"])])


class Few(_Source):
    """A simple reader."""

    def simpleStreamReader(self, schema: Any) -> SimpleDataSourceStreamReader:
        return FewReader()

    streamReader = DataSource.streamReader


@dataclass
class Part(WriterCommitMessage):
    """What a task has written."""

    task: tuple[int, int, int]
    rows: Any
    path: Path
    id: uuid.UUID
    in_thread: int


class PartsWriter(DataSourceStreamWriter):
    """Names its files by the task attempt; the commit publishes them."""

    def __init__(self, options: Any) -> None:
        self.directory = Path(options["directory"]) / "parts"

    def write(self, iterator: Iterator[Row]) -> WriterCommitMessage:
        task = TaskContext.get()
        assert task is not None
        reported = (task.partitionId(), task.attemptNumber(), task.taskAttemptId())
        rows = [row.row for row in iterator]
        path = self.directory / f"part-{reported[2]}"
        path.write_text("".join(f"{row}\n" for row in rows))
        with ThreadPoolExecutor(1) as pool:
            in_thread = pool.submit(task.taskAttemptId).result()
        return Part(reported, np.int32(len(rows)), path, uuid.uuid4(), in_thread)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        parts = [message for message in messages if isinstance(message, Part)]
        assert TaskContext.get() is None
        reported = [[*part.task, int(part.rows), part.path.name, part.id.version, part.in_thread] for part in parts]
        partial = self.directory / f".commit-{batchId}-{uuid.uuid4().hex}"
        partial.write_text(json.dumps(reported))
        partial.replace(self.directory / f"commit-{batchId}")


class Parts(_Source):
    """The writer's."""

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamWriter:
        return PartsWriter(self.options)


READERS: tuple[type[_Source], ...] = (Stateful, Unordered, Typed, Leaving, Few)


def pipeline(spark: SparkSession, directory: str, faults: str) -> None:
    """Builds the job: all readers, united, into the writer."""
    streams = []
    for source in (*READERS, Parts):
        spark.dataSource.register(source)
    for source in READERS:
        reader = spark.readStream.format(source.name()).option("directory", directory).option("faults", faults)
        streams.append(reader.load().hint("uid", source.name()))
    rows = reduce(lambda one, other: one.union(other), streams)
    parts = rows.writeStream.format("parts").option("directory", directory).queryName("parts")
    parts.trigger(availableNow=True).start()
