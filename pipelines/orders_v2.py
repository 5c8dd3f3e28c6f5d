"""Example pipeline, version 2: the table of version 1 with one more column, the mean of an order.

It continues from a savepoint of version 1 with the windows that are open there. Rows of version 1 keep null in the new
column.
"""

from __future__ import annotations

from orders import parse_arguments, revenue, write_revenue
from pyspark.sql import SparkSession, functions


def pipeline(spark: SparkSession, *arguments: str) -> None:
    """Builds the job."""
    options = parse_arguments(arguments)
    rows = revenue(spark, options)
    write_revenue(rows.withColumn("mean_cents", functions.col("revenue_cents") / functions.col("orders")), options)
