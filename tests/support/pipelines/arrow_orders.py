"""Numbers the orders of each country and quantity, with the states of all of them as columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from ckpt_runtime.processors import ArrowStatefulProcessor

SCHEMA = "country STRING, amount DOUBLE, quantity INT, price DECIMAL(10,2), tags ARRAY<STRING>, placed_at TIMESTAMP"


class Numbered(ArrowStatefulProcessor):
    """One row out per row in: the key, and how many rows it has had."""

    keySchema = "country STRING, quantity INT"
    inputSchema = "country STRING, quantity INT, price DECIMAL(10,2)"
    stateSchema = "orders BIGINT, price DECIMAL(10,2)"

    def handleBatch(self, rows: pa.Table, offsets: Any, state: pa.Table, timerValues: Any) -> Any:
        before = pc.fill_null(state["orders"], 0).to_numpy() - offsets[:-1]
        numbers = np.arange(1, rows.num_rows + 1) + np.repeat(before, np.diff(offsets))
        last = pa.array(offsets[1:] - 1)
        new = pa.table({"orders": pa.array(numbers).take(last), "price": rows["price"].take(last)})
        return rows.select(["country", "quantity"]).append_column("number", pa.array(numbers)), new


def pipeline(spark: SparkSession, path: str, output: str, rate: str) -> None:
    rows = spark.readStream.format("replay").option("rowsPerSecond", rate).schema(SCHEMA).load(path)
    numbered = rows.groupBy("country", "quantity").transformWithState(
        Numbered(), "country STRING, quantity INT, number BIGINT", "Append", "None"
    )
    numbered.hint("uid", "orders").writeStream.format("parquet").queryName("orders").start(output)
