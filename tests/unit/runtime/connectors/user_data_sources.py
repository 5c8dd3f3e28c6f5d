"""PySpark data sources as a user writes them: nothing here knows the engine. Their world is a directory."""

from __future__ import annotations

import json
import logging
import os
import random
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Row
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    InputPartition,
    SimpleDataSourceStreamReader,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

ARROW_SCHEMA = pa.schema([("n", pa.int64()), ("label", pa.string())])


class Range(InputPartition):
    def __init__(self, start: int, end: int) -> None:
        super().__init__((start, end))
        self.start, self.end = start, end


class CountingReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Numbers below a limit that lies in a file; at most ``step`` per range."""

    def __init__(self, options: Any) -> None:
        self.directory = Path(options["directory"])
        self.step = int(options.get("step", "10"))
        self.form = options.get("form", "tuple")
        self.target: int | None = None
        self.left: list[Any] = []
        if self.form == "locked":
            self.lock = threading.Lock()

    def _available(self) -> int:
        return int((self.directory / "available").read_text())

    def prepareForTriggerAvailableNow(self) -> None:
        self.target = self._available()

    def initialOffset(self) -> dict[str, Any]:
        return {"n": 0}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self.step)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        available = self._available() if self.target is None else self.target
        if isinstance(limit, ReadAllAvailable):
            return {"n": available}
        assert isinstance(limit, ReadMaxRows)
        return {"n": min(start["n"] + limit.max_rows, available)}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        found: list[InputPartition] = [Range(n, min(n + 3, end["n"])) for n in range(start["n"], end["n"], 3)]
        if self.form == "lock":
            found[0].lock = threading.Lock()  # type: ignore[attr-defined]
        return found

    def read(self, partition: Any) -> Iterator[Any]:
        numbers = range(partition.start, partition.end)
        if self.form == "leaving":
            self.left.extend((n, f"l{n}") for n in numbers)
            yield from self.left
        elif self.form == "none":
            yield None
            yield from ((n, f"l{n}") for n in numbers)
        elif self.form == "arrow":
            yield pa.record_batch(
                [pa.array(numbers, pa.int64()), pa.array([f"l{n}" for n in numbers])], schema=ARROW_SCHEMA
            )
        elif self.form == "row":
            yield from (Row(label=f"l{n}", n=n) for n in numbers)
        elif self.form == "task":
            task = TaskContext.get()
            assert task is not None
            reported = [task.partitionId(), task.attemptNumber(), task.taskAttemptId()]
            yield from ((n, json.dumps(reported)) for n in numbers)
        elif self.form == "wrong":
            yield from ((n,) for n in numbers)
        else:
            yield from ((n, f"l{n}") for n in numbers)

    def commit(self, end: dict[str, Any]) -> None:
        with (self.directory / "commits").open("a") as log:
            log.write(json.dumps(end) + "\n")

    def stop(self) -> None:
        (self.directory / "stopped").touch()


class Counting(DataSource):
    @classmethod
    def name(cls) -> str:
        return "counting"

    def schema(self) -> str:
        return "n BIGINT, label STRING"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return CountingReader(self.options)


class OldReader(DataSourceStreamReader):
    """The signature before Spark 4.2: no start, no limit."""

    def __init__(self) -> None:
        self.at = 0

    def initialOffset(self) -> dict[str, Any]:
        return {1: 0}  # type: ignore[dict-item]

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]
        self.at += 2
        return {1: self.at}  # type: ignore[dict-item]

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return [Range(start["1"], end["1"])]

    def read(self, partition: Any) -> Iterator[Any]:
        yield from ([n, "old"] for n in range(partition.start, partition.end))


class Old(Counting):
    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return OldReader()


class ForgetfulReader(DataSourceStreamReader):
    """Five numbers per range, known to the object that found the range until it is committed."""

    def __init__(self) -> None:
        self.ranges: dict[int, list[int]] = {}

    def initialOffset(self) -> dict[str, Any]:
        return {"n": 0}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        first = start["n"]
        start["n"] += 5
        self.ranges[start["n"]] = list(range(first, start["n"]))
        return start

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return [InputPartition(n) for n in self.ranges[end["n"]]]

    def read(self, partition: Any) -> Iterator[Any]:
        yield (partition.value, "forgetful")

    def commit(self, end: dict[str, Any]) -> None:
        self.ranges = {known: numbers for known, numbers in self.ranges.items() if known > end["n"]}


class Forgetful(Counting):
    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return ForgetfulReader()


class ListingReader(ForgetfulReader):
    """Ten numbers per range, in another order each time."""

    commit = DataSourceStreamReader.commit

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        return {"n": start["n"] + 10}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        numbers = list(range(start["n"], end["n"]))
        random.SystemRandom().shuffle(numbers)
        return [InputPartition(n) for n in numbers]


class Listing(Counting):
    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return ListingReader()


class SimpleReader(SimpleDataSourceStreamReader):
    def __init__(self, options: Any) -> None:
        self.limit = int(options.get("limit", "7"))

    def initialOffset(self) -> dict[str, Any]:
        return {"n": 0}

    def read(self, start: dict[str, Any]) -> tuple[Iterator[Any], dict[str, Any]]:
        end = min(start["n"] + 3, self.limit)
        return ((n, f"s{n}") for n in range(start["n"], end)), {"n": end}  # type: ignore[return-value]

    def readBetweenOffsets(self, start: dict[str, Any], end: dict[str, Any]) -> Iterator[Any]:
        return iter([(n, f"s{n}") for n in range(start["n"], end["n"])])


class Simple(Counting):
    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        raise NotImplementedError("streamReader")

    def simpleStreamReader(self, schema: Any) -> SimpleDataSourceStreamReader:
        return SimpleReader(self.options)


@dataclass
class Written(WriterCommitMessage):
    partition: int
    rows: int
    files: tuple[str, ...]


class FileWriter(DataSourceStreamWriter):
    """Stages a file of at most ``rows`` rows; the commit appends what was staged to a log, once per batch id."""

    def __init__(self, options: Any, schema: Any) -> None:
        self.directory = Path(options["directory"])
        self.columns = schema.fieldNames()
        self.fail_at = int(options.get("failAt", "-1"))
        self.most_rows = int(options.get("rows", "-1"))

    def write(self, iterator: Iterator[Row]) -> WriterCommitMessage:
        task = TaskContext.get()
        assert task is not None
        name = f"staged-{task.partitionId()}-{os.urandom(4).hex()}"
        rows = 0
        with (self.directory / name).open("w") as staged:
            for row in iterator:
                if row.n == self.fail_at:
                    raise ValueError(f"cannot write {row.n}")
                staged.write(json.dumps(row.asDict()) + "\n")
                rows += 1
                if rows == self.most_rows:
                    break
        return Written(task.partitionId(), rows, (name,))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        target = self.directory / f"batch-{batchId}"
        if target.exists():
            return
        staged = [
            self.directory / name for message in messages if isinstance(message, Written) for name in message.files
        ]
        partial = self.directory / f".batch-{batchId}"
        partial.write_text("".join(file.read_text() for file in staged))
        partial.replace(target)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """As Spark's file writers do: what was staged goes."""
        for message in messages:
            for name in message.files if isinstance(message, Written) else ():
                (self.directory / name).unlink()
        with (self.directory / "aborted").open("a") as log:
            log.write(f"{batchId}\n")


class Files(DataSource):
    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamWriter:
        assert overwrite is False
        return FileWriter(self.options, schema)


class Odd:
    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass
class Reported(WriterCommitMessage):
    """What the task context said, and values that JSON lacks."""

    task: tuple[int, int, int]
    rows: Any
    odd: Any


class TaskWriter(DataSourceStreamWriter):
    """Names its files by the task attempt, as many writers do; ``odd=lock`` makes a message that cannot travel."""

    def __init__(self, options: Any) -> None:
        self.directory = Path(options["directory"])
        self.odd = options.get("odd", "")

    def write(self, iterator: Iterator[Row]) -> WriterCommitMessage:
        task = TaskContext.get()
        assert task is not None
        lines = [json.dumps(row.asDict()) for row in iterator]
        (self.directory / f"part-{task.taskAttemptId()}").write_text("\n".join(lines) + "\n")
        reported = (task.partitionId(), task.attemptNumber(), task.taskAttemptId())
        if self.odd == "lock":
            return Reported(reported, len(lines), {"of": Odd(threading.Lock())})
        return Reported(reported, np.int64(len(lines)), [Odd(Row(n=uuid.UUID(int=len(lines))))])

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        reported = [[*message.task, int(message.rows), message.odd[0].value.n.int] for message in messages]  # type: ignore[union-attr]
        (self.directory / f"reported-{batchId}").write_text(json.dumps(reported))


class Tasks(DataSource):
    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamWriter:
        return TaskWriter(self.options)


class ArrowWriter(DataSourceStreamArrowWriter):
    def __init__(self, options: Any) -> None:
        self.directory = Path(options["directory"])

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for batch in iterator:
            assert isinstance(batch, pa.RecordBatch)
            if batch.column("n")[0].as_py() < 0:
                break
        return WriterCommitMessage()

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        (self.directory / f"arrow-{batchId}").write_text(str(len(messages)))


class ArrowFiles(DataSource):
    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamWriter:
        return ArrowWriter(self.options)


class SeenWriter(DataSourceStreamWriter):
    """Keeps what came as text, in a file."""

    def __init__(self, options: Any) -> None:
        self.directory = Path(options["directory"])

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        seen = [*map(repr, iterator)]
        logging.getLogger("user").warning("%d seen", len(seen))
        (self.directory / "seen").write_text("\n".join(seen))
        return WriterCommitMessage()

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        assert TaskContext.get() is None


class SeenArrowWriter(SeenWriter, DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return super().write(f"{batch.schema} {batch.to_pylist()}" for batch in iterator)


class Seen(DataSource):
    """With ``form=arrow`` its writer takes record batches; with ``form=none`` there is none."""

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamWriter:
        forms: dict[str, Any] = {"row": SeenWriter, "arrow": SeenArrowWriter, "none": lambda options: None}
        writer: DataSourceStreamWriter = forms[self.options["form"]](self.options)
        return writer
