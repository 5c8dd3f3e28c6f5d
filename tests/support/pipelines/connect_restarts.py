"""Queries that are stopped, fail or are replaced, and then start again in the same checkpoint location.

python connect_restarts.py sc://localhost:15002/;token=... DIRECTORY
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery


def refusal(action: Callable[[], Any]) -> list[Any]:
    """The kind and the condition of the error that an action raises; a legacy condition counts as none."""
    try:
        action()
    except PySparkException as error:
        condition = error.getCondition()
        return [type(error).__name__, None if condition and condition.startswith("_LEGACY") else condition]
    return []


def listed(frame: DataFrame) -> list[Any]:
    return sorted([list(row) for row in frame.collect()], key=str)


def processed(query: StreamingQuery) -> StreamingQuery:
    query.processAllAvailable()
    query.stop()
    return query


def seen(spark: SparkSession, directory: Path) -> dict[str, Any]:
    """What a client of Spark, or of the engine, sees."""
    source, found = directory / "lines", dict[str, Any]()
    source.mkdir(parents=True)

    def arrive(name: str, *lines: str) -> None:
        (directory / name).write_text("".join(f"{line}\n" for line in lines))
        (directory / name).rename(source / name)

    def writer(frame: DataFrame, name: str) -> Any:
        return frame.writeStream.option("checkpointLocation", str(directory / f"at-{name}")).queryName(name)

    def rows_of(name: str) -> list[Any]:
        return listed(spark.read.schema(lines.schema).parquet(str(directory / name)))

    arrive("a", "4", "2", "4")
    lines = spark.readStream.schema("v INT").csv(str(source))
    counts = writer(lines.groupBy("v").count(), "counts").format("memory").outputMode("complete")
    copies = writer(lines, "copies").format("memory")
    firsts = writer(lines.dropDuplicates(), "firsts").option("path", str(directory / "firsts"))
    firsts = firsts.trigger(processingTime="1 second")

    def quotients(expression: str) -> Any:
        return writer(lines.selectExpr(f"{expression} AS v"), "quotients").option("path", str(directory / "quotients"))

    first = processed(counts.start())
    processed(copies.start())
    processed(firsts.start())
    whole = processed(quotients("CAST(8 DIV v AS INT)").start())
    found["counts"] = listed(spark.table("counts"))
    progress = [report for report in first.recentProgress if report.numInputRows]
    found["progress"] = [[str(each["id"]) == first.id, str(each.runId) == first.runId] for each in progress]
    arrive("b", "2", "7")
    again = processed(counts.start())
    found["counts again"] = listed(spark.table("counts"))
    found["ids"] = [again.id == first.id, again.runId == first.runId]
    found["copies again"] = refusal(copies.start)
    unnamed = lines.writeStream.format("noop").option("checkpointLocation", str(directory / "at-unnamed"))
    replaced = unnamed.start()
    replaced.processAllAvailable()
    replacing = unnamed.start()
    found["replaced"] = [replaced.isActive, replaced.exception(), replacing.isActive, replacing.id == replaced.id]
    replacing.stop()
    processed(firsts.start())
    found["firsts"] = rows_of("firsts")
    arrive("c", "9", "2", "0")
    firsts.trigger(availableNow=True).start().awaitTermination()
    found["firsts again"] = rows_of("firsts")

    failed = quotients("CAST(8 DIV v AS INT)").start()
    found["failed"] = refusal(failed.processAllAvailable)
    found["failure"] = str(failed.exception()).startswith(
        f"[STREAM_FAILED] Query [id = {failed.id}, runId = {failed.runId}] terminated with exception: "
    )
    repaired = processed(quotients("CAST(try_divide(8, v) AS INT)").start())
    found["repaired"] = [whole.id == failed.id == repaired.id, rows_of("quotients")]

    streams = spark.streams
    streams.resetTerminated()
    found["none has ended"] = streams.awaitAnyTermination(0.2)
    failing = lines.selectExpr("8 DIV v AS v").writeStream.format("noop").start()
    found["one has failed"] = [refusal(failing.awaitTermination), refusal(streams.awaitAnyTermination)]
    processed(lines.writeStream.format("noop").start())
    found["another one has ended"] = refusal(streams.awaitAnyTermination)
    streams.resetTerminated()
    processed(lines.writeStream.format("noop").start())
    found["one has ended"] = streams.awaitAnyTermination(60)

    lines.createOrReplaceTempView("lines")
    lines.selectExpr("v + 1 AS w").createOrReplaceTempView("next")
    spark.range(2).createOrReplaceTempView("lines")
    found["replaced view"] = [listed(spark.table("lines")), spark.table("next").isStreaming]
    spark.sql("CREATE OR REPLACE TEMP VIEW small AS SELECT w FROM next WHERE w < 9")
    spark.sql("CREATE TABLE numbers USING parquet AS SELECT 1 AS one")
    spark.readStream.table("numbers").createOrReplaceTempView("of_a_table")
    spark.sql("DROP TABLE numbers")
    processed(spark.table("small").writeStream.format("memory").queryName("smaller").start())
    found["view of views"] = listed(spark.table("smaller"))
    found["dropped"] = spark.catalog.dropTempView("small")
    spark.sql("DROP VIEW next")
    found["dropped views"] = [refusal(lambda name=name: spark.table(name).columns) for name in ("small", "next")]
    spark.sql(f"SET spark.sql.streaming.checkpointLocation = {directory / 'named'}")
    processed(lines.writeStream.format("noop").queryName("inside").start())
    spark.conf.unset("spark.sql.streaming.checkpointLocation")
    processed(lines.writeStream.format("noop").queryName("outside").start())
    found["locations"] = [path.name for path in (directory / "named").iterdir()]
    return found


if __name__ == "__main__":
    session = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
    print(json.dumps(seen(session, Path(sys.argv[2]))))
    session.stop()
