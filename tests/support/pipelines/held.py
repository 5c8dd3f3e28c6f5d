"""Twenty subtasks in two slots, of which one can be held up: nineteen of them acknowledge a checkpoint, one does not.

Nine times count and sum per key, and as the tenth vertex the source. The subtask of the first count that a test wants
to hold stands still in user code as long as the file ``hold`` is there, and says so by the file ``holding``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

BRANCHES = 9
HELD_KEY = 0


class HeldCounter(StatefulProcessor):
    """Count and sum of the values of a key."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._totals = handle.getValueState("totals", "count BIGINT, sum BIGINT")
        self._hold = Path(self._directory, "hold")
        self._holding = Path(self._directory, "holding")

    def handleInputRows(self, key: tuple[Any, ...], rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        if key[0] == HELD_KEY and self._hold.exists():
            self._holding.touch()
            while self._hold.exists():
                time.sleep(0.002)
            self._holding.unlink()
        count, total = self._totals.get() or (0, 0)
        for row in rows:
            count, total = count + 1, total + row.value
            yield Row(key=key[0], count=count, sum=total)
        self._totals.update((count, total))

    def close(self) -> None:
        """Nothing to close."""


def pipeline(spark: SparkSession, directory: str) -> None:
    """Builds the job. ``directory`` is for the files, and for what the sinks report."""
    numbers = spark.readStream.format("numbers").options(keys="20", rowsPerSecond="500", batchRows="16")
    rows = numbers.load().hint("uid", "source")
    for branch in range(BRANCHES):
        groups = rows.groupBy("key")
        if branch == 0:
            schema = "key BIGINT, count BIGINT, sum BIGINT"
            counted = groups.transformWithState(HeldCounter(directory), schema, "Append", "None")
        else:
            counted = groups.agg(F.count("*").alias("count"), F.sum("value").alias("sum"))
        (
            counted.hint("uid", f"state-{branch}")
            .writeStream.format("verify")
            .options(key="key", count="count", sum="sum", report=f"{directory}/report-{branch}", reportIntervalMs=200)
            .outputMode("update")
            .queryName(f"branch-{branch}")
            .start()
        )
