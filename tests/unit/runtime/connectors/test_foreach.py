"""Functions and objects of ``foreach`` get the calls that PySpark's own code makes for the rows of a partition."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.serializers import CloudPickleSerializer
from pyspark.sql import Row
from pyspark.sql.streaming.readwriter import DataStreamWriter

from ckpt_runtime.connectors.sink_operators import CommittingSinkOperator
from ckpt_runtime.connectors.staged_sinks import staged_sink
from ckpt_runtime.graph.specs import SinkSpec, UserFunction
from ckpt_runtime.operators.task_context import new_task, running
from tests.unit.runtime.connectors.harness import context, opened

EPOCHS = {4: [1, 2], 5: [3], 7: [5, 6]}
"""The rows of each checkpoint."""


class Log:
    """Writes what is called into a file."""

    def __init__(self, file: str) -> None:
        self.file = file

    def note(self, *call: Any) -> None:
        with Path(self.file).open("a") as log:
            log.write(json.dumps(call) + "\n")


class Buffer(Log):
    """Sends the rows of an epoch when it is closed. Its rows are those since it was made, as in many programs."""

    def __init__(self, file: str) -> None:
        super().__init__(file)
        self.rows: list[int] = []

    def open(self, partition: int, epoch: int) -> bool:
        self.note("open", partition, epoch)
        return epoch != 5

    def process(self, row: Row) -> None:
        self.rows.append(row.n)

    def close(self, error: Exception | None) -> None:
        self.note("close", self.rows, repr(error))


class Failing(Buffer):
    """Raises an error for a row, which ``close`` gets."""

    def process(self, row: Row) -> None:
        if row.n == 6:
            raise ValueError(f"row {row.n}")
        super().process(row)


class FailsToClose(Failing):
    def close(self, error: Exception | None) -> None:
        super().close(error)
        raise OSError("close")


class Minimal(Log):
    def process(self, row: Row) -> None:
        task = TaskContext.get()
        assert task is not None
        self.note(row.n, task.partitionId(), task.getLocalProperty("streaming.sql.batchId"))


class CanBeCalled(Minimal):
    """It has all methods, but is a function for Spark because it can be called."""

    def __call__(self, row: Row) -> None:
        self.note("called", row.n)


@pytest.mark.row("ends.1")
@pytest.mark.parametrize("made", [Buffer, Failing, FailsToClose, Minimal, CanBeCalled])
def test_object_gets_the_calls_of_spark_and_is_a_fresh_copy_in_each_epoch(
    tmp_path: Path, made: Callable[[str], Any]
) -> None:
    def in_spark() -> None:
        given, pickles = made(str(tmp_path / "spark")), CloudPickleSerializer()
        for epoch, numbers in EPOCHS.items():
            with running(new_task(0, 0, epoch)):
                copy = pickles.loads(pickles.dumps(given))
                DataStreamWriter._construct_foreach_function(copy)(0, iter([Row(n=n) for n in numbers]))

    def in_the_engine() -> None:
        spec = SinkSpec("foreach", {"path": str(tmp_path / "staged")}, UserFunction(made(str(tmp_path / "ours")), None))
        operator = CommittingSinkOperator(staged_sink(spec))
        opened(operator, context(uid="out"))
        try:
            for epoch, numbers in EPOCHS.items():
                operator.process_batch(pa.record_batch({"n": pa.array(numbers, pa.int64())}), 0)
                operator.prepare_snapshot(epoch)
                operator.snapshot(epoch)
                operator.notify_complete(epoch)
        finally:
            operator.close()

    def outcome(run: Callable[[], None]) -> str:
        try:
            run()
        except Exception as error:
            return repr(error)
        return ""

    assert outcome(in_the_engine) == outcome(in_spark)
    assert (tmp_path / "ours").read_text() == (tmp_path / "spark").read_text()
