"""Whom ``TaskContext.get()`` tells what: the thread that runs a task's code, as a process does in Spark."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from ckpt_runtime.graph.ddl import to_arrow_schema
from ckpt_runtime.graph.specs import MapInArrowSpec, ProcessSpec
from ckpt_runtime.operators.operator import Operator
from ckpt_runtime.operators.python_functions import MapInArrowOperator
from ckpt_runtime.operators.stateful_processor import StatefulProcessorOperator
from ckpt_runtime.operators.task_context import new_task, running
from tests.unit.runtime.connectors.harness import context, opened
from tests.unit.runtime.operators.conftest import Harness

ROWS = pa.record_batch({"n": [1, 2]})
REPORTED = to_arrow_schema("partition INT, attempt INT, id BIGINT")


def reported() -> tuple[int, int, int]:
    task = TaskContext.get()
    assert task is not None
    return task.partitionId(), task.attemptNumber(), task.taskAttemptId()


def test_a_task_is_known_to_its_thread_while_it_runs() -> None:
    one, other = new_task(1, 0), new_task(2, 3)
    assert TaskContext.get() is None
    with running(one):
        with running(other):
            assert reported()[:2] == (2, 3)
        assert TaskContext.get() is one
    assert TaskContext.get() is None
    assert one.taskAttemptId() != other.taskAttemptId()


def test_threads_started_by_a_task_have_its_context() -> None:
    with running(new_task(5, 1)), ThreadPoolExecutor(1) as pool:
        task = TaskContext.get()
        assert task is not None
        assert pool.submit(task.taskAttemptId).result() == reported()[2]
        assert pool.submit(TaskContext.get).result() is None, "a thread would see the context of another task"


def mapped(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in batches:
        yield pa.RecordBatch.from_pylist([dict(zip(REPORTED.names, reported(), strict=True))], schema=REPORTED)


def test_each_call_of_a_mapped_function_is_a_task_of_its_subtask() -> None:
    found: list[tuple[Any, ...]] = []
    for subtask in range(2):
        operator: Operator = MapInArrowOperator(MapInArrowSpec(mapped, REPORTED))
        output = opened(operator, context(subtask, 2, attempt=4))
        operator.process_batch(ROWS, 0)
        operator.process_batch(ROWS, 0)
        found += [tuple(row.values()) for row in output.rows]
    assert [row[:2] for row in found] == [(0, 4), (0, 4), (1, 4), (1, 4)]
    assert len({task_attempt for *_, task_attempt in found}) == 4
    assert TaskContext.get() is None


class Reporting(StatefulProcessor):
    """Gives the context that it sees in ``init`` and with each row."""

    def init(self, handle: Any) -> None:
        self.first = reported()

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for _ in rows:
            assert reported() == self.first
            yield Row(**dict(zip(REPORTED.names, reported(), strict=True)))

    def close(self) -> None:
        assert reported() == self.first


def test_a_processor_is_a_task_from_its_beginning_to_its_end(harness: type[Harness]) -> None:
    run = harness(StatefulProcessorOperator(ProcessSpec(("n",), Reporting(), REPORTED, "Update", "None")))
    assert [(row["partition"], row["attempt"]) for row in run.process(ROWS)] == [(0, 0), (0, 0)]
    run.operator.close()
