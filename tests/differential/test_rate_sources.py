"""``rate`` and ``rate-micro-batch``: the rows of Spark's own sources and of the engine's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from ckpt_runtime.connectors.rate_source import RateSource, Schedule
from ckpt_runtime.graph.formats import source_schema
from tests.support.patience import deadline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.row("ends.4")
def test_rows_of_each_second_are_due_when_spark_has_them(spark: SparkSession, tmp_path: Path) -> None:
    """A batch of Spark has the rows of one second, or of several if it was late: only the former can be compared."""
    rows_per_second, ramp_s = 2000, 2  # the ramp does not divide the rate, and times end in half a millisecond
    schedule = Schedule(rows_per_second, ramp_s)
    due = [schedule.due_after(second * 1000) for second in range(100)]
    compared: list[int] = []
    problems: list[str] = []

    def compare(batch: DataFrame, _: int) -> None:
        rows = batch.orderBy("value").toArrow()
        values = rows.column("value").to_numpy()
        if not len(values):
            return
        if values[0] not in due or int(values[-1]) + 1 not in due:
            problems.append(f"rows {values[0]} to {values[-1]} are no whole seconds: {due[:10]}")
            return
        second = max(at for at, first in enumerate(due) if first == values[0])
        if due[second + 1] != values[-1] + 1:
            return
        times = rows.column("timestamp").cast(pa.int64()).to_numpy() // 1000
        wanted = schedule.times_ms(np.arange(due[second], due[second + 1], dtype=np.int64))
        if (times - times[0]).tolist() != (wanted - second * 1000).tolist():
            problems.append(f"second {second}: {times - times[0]} in Spark, {wanted - second * 1000} here")
        compared.append(second)

    options = {"rowsPerSecond": str(rows_per_second), "rampUpTime": f"{ramp_s}s", "numPartitions": "3"}
    frame = spark.readStream.format("rate").options(**options).load()
    query = frame.writeStream.foreachBatch(compare).option("checkpointLocation", str(tmp_path)).start()
    is_over = deadline(60)
    try:
        while len(compared) < 2 + ramp_s and not problems and query.isActive and not is_over():
            query.awaitTermination(0.1)
    finally:
        query.stop()
    assert query.exception() is None
    assert problems == []
    assert len(compared) >= 2 + ramp_s


@pytest.mark.row("ends.4")
def test_each_run_with_available_now_reads_the_next_batch_of_spark(spark: SparkSession, tmp_path: Path) -> None:
    """The third run has other options."""
    options = {
        "rowsPerBatch": "7",
        "numPartitions": "3",
        "startTimestamp": "1700000000123",
        "advanceMillisPerBatch": "250",
    }
    theirs: list[list[tuple[int, int]]] = []

    def shown(rows: pa.Table) -> list[tuple[int, int]]:
        times = rows.column("timestamp").cast(pa.int64()).to_pylist()
        return sorted(zip(rows.column("value").to_pylist(), times, strict=True))

    def keep(batch: DataFrame, _: int) -> None:
        theirs.append(shown(batch.toArrow()))

    others = {"rowsPerBatch": "5", "numPartitions": "2", "startTimestamp": "99", "advanceMillisPerBatch": "1000"}
    runs = (options, options, others, others)
    for given in runs:
        frame = spark.readStream.format("rate-micro-batch").options(**given).load()
        writer = frame.writeStream.foreachBatch(keep).option("checkpointLocation", str(tmp_path))
        writer.trigger(availableNow=True).start().awaitTermination()
    schema = source_schema("rate-micro-batch", options, None)
    state: Any = None
    ours: list[list[tuple[int, int]]] = []
    for given in runs:
        source = RateSource("rate-micro-batch", given)
        enumerator = source.open_enumerator(schema, state, bounded=True)
        reader = source.open_reader(schema, subtask=0, parallelism=1)
        while splits := enumerator.discover():
            for split in splits:
                reader.add(split, None)
            found = [rows.batch for rows in iter(lambda: reader.read(2), None) if rows.batch is not None]  # noqa: B023
            ours.append(shown(pa.Table.from_batches(found)))
        state = enumerator.snapshot()
    assert ours == theirs
    assert len(ours) == 4
