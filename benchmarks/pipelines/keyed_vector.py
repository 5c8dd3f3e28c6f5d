"""Count and sum per key by an ``ArrowStatefulProcessor``; every update goes to a sink that checks it."""

# Names are PySpark's.
# ruff: noqa: N802, N803, N815

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

from ckpt_runtime.processors import ArrowStatefulProcessor

OUTPUT_SCHEMA = "key BIGINT, count BIGINT, sum BIGINT"


class VectorCountAndSum(ArrowStatefulProcessor):
    """One row out per row in: the key with its count and sum so far."""

    keySchema = "key BIGINT"
    inputSchema = "key BIGINT, value BIGINT"
    stateSchema = "count BIGINT, sum BIGINT"

    def handleBatch(self, rows: pa.Table, offsets: Any, state: pa.Table, timerValues: Any) -> Any:
        first, after, sizes = offsets[:-1], offsets[1:], np.diff(offsets)
        values = rows["value"].to_numpy()
        sums = np.cumsum(values)
        # The state of a key, less the running numbers before its first row.
        counts_before = state["count"].fill_null(0).to_numpy() - first
        sums_before = state["sum"].fill_null(0).to_numpy() - sums[first] + values[first]
        counts = np.arange(1, len(values) + 1) + np.repeat(counts_before, sizes)
        sums += np.repeat(sums_before, sizes)
        updates = pa.table({"key": rows["key"], "count": counts, "sum": sums})
        return updates, pa.table({"count": counts[after - 1], "sum": sums[after - 1]})


def pipeline(spark: SparkSession, report: str, keys: str) -> None:
    """``report`` is the sink's report directory, ``keys`` the number of keys."""
    (
        spark.readStream.format("numbers")
        .option("keys", keys)
        .option("batchRows", 65_536)
        .load()
        .hint("uid", "source")
        .groupBy("key")
        .transformWithState(VectorCountAndSum(), OUTPUT_SCHEMA, "Update", "None")
        .hint("uid", "state")
        .writeStream.format("verify")
        .outputMode("update")
        .options(key="key", count="count", sum="sum", report=report, reportIntervalMs=1000)
        .queryName("verify")
        .start()
    )
