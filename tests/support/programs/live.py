"""A script that reads what its queries have written, while they run, and starts further ones over it."""

import argparse
import logging
import sys
import time
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery, StreamingQueryListener

logger = logging.getLogger("live")


class Watcher(StreamingQueryListener):
    """Counts the rows that queries have read, and keeps the names of those that have ended."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.rows: dict[str, int] = {}
        self.ended: list[str] = []

    def onQueryStarted(self, event: Any) -> None:
        self.names[str(event.id)] = event.name

    def onQueryProgress(self, event: Any) -> None:
        name = event.progress.name
        self.rows[name] = self.rows.get(name, 0) + event.progress.numInputRows

    def onQueryIdle(self, event: Any) -> None:
        """Ignores it."""

    def onQueryTerminated(self, event: Any) -> None:
        self.ended.append(self.names[str(event.id)])


def words(spark: SparkSession, directory: str) -> None:
    """Prints counts from a table in memory again and again, until the progress has all rows."""
    lines = spark.readStream.text(f"{directory}/words")
    counts = lines.select(F.explode(F.split("value", " ")).alias("word")).groupBy("word").count()
    query = counts.writeStream.outputMode("complete").format("memory").queryName("counts").start()
    rows, seen = 0, set()
    while rows < 3:
        for progress in query.recentProgress:
            if progress["batchId"] not in seen:
                seen.add(progress["batchId"])
                rows += progress["numInputRows"]
        time.sleep(0.1)
    query.processAllAvailable()
    for _ in range(2):
        spark.sql("select * from counts order by word").show()
    print(query.isActive, query.status["message"] != "")
    query.stop()


def copied(frame: DataFrame, name: str, directory: str) -> StreamingQuery:
    """Starts a query that ends with the files that are there."""
    writer = frame.writeStream.format("parquet").queryName(name).trigger(availableNow=True)
    return writer.option("checkpointLocation", f"{directory}/{name}-checkpoint").start(f"{directory}/{name}")


def stages(spark: SparkSession, directory: str) -> None:
    """Runs three queries, one behind the other, each over the output of the one before."""
    orders = spark.readStream.schema("id INT, city STRING, at TIMESTAMP").option("header", True)
    copied(orders.csv(f"{directory}/orders"), "bronze", directory).awaitTermination()
    columns = spark.read.parquet(f"{directory}/bronze").schema
    bronze = spark.readStream.schema(columns).parquet(f"{directory}/bronze").dropDuplicates(["id"])
    copied(bronze, "silver", directory).awaitTermination()
    silver = spark.readStream.schema(columns).parquet(f"{directory}/silver")
    times = silver.select("id", F.col("at").cast("string").alias("at"), F.upper("city").alias("city"))
    copied(times, "gold", directory).awaitTermination()
    report = spark.read.parquet(f"{directory}/gold").orderBy("id")
    report.show(truncate=False)
    report.groupBy("city").count().coalesce(1).write.mode("overwrite").json(f"{directory}/report")
    print(sorted(row["city"] for row in spark.read.json(f"{directory}/report").collect()))


def repaired(spark: SparkSession, directory: str) -> None:
    """Starts a query again, with another divisor, until it does not fail."""
    orders = spark.readStream.schema("id INT, city STRING, at TIMESTAMP").option("header", True)
    for divisor in (2, 7):
        frame = orders.csv(f"{directory}/orders").selectExpr(f"10 div (id - {divisor}) AS quotient")
        query = copied(frame, "quotients", directory)
        try:
            query.awaitTermination()
        except StreamingQueryException as error:
            logger.warning("the query is started again: %s", "DIVIDE_BY_ZERO" in str(error))
        else:
            print(sorted(row.quotient for row in spark.read.parquet(f"{directory}/quotients").collect()))


def main() -> int:
    """Runs all parts, and leaves a query running."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", required=True)
    directory = parser.parse_args().directory
    logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s", force=True)
    builder = SparkSession.builder.master("local[*]").appName("live").config("spark.sql.shuffle.partitions", 1)
    spark = builder.config("execution.checkpointing.interval", "2 s").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    spark.sql("SET spark.sql.session.timeZone = Asia/Tokyo")
    watcher = Watcher()
    spark.streams.addListener(watcher)
    words(spark, directory)
    stages(spark, directory)
    while "gold" not in watcher.ended:
        time.sleep(0.1)
    print(watcher.ended, {name: watcher.rows[name] for name in ("bronze", "silver", "gold")})
    spark.streams.removeListener(watcher)
    repaired(spark, directory)
    spark.readStream.format("rate").load().writeStream.format("noop").queryName("left").start()
    return 3


if __name__ == "__main__":
    sys.exit(main())
