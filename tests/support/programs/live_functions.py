"""A script whose queries call Python functions, and which decides by what earlier ones have written."""

import sys
import time
from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle, StreamingQuery, StreamingQueryListener
from pyspark.sql.types import StringType


class Ends(StreamingQueryListener):
    """Counts the queries that have ended."""

    count = 0

    def onQueryStarted(self, event: Any) -> None:
        """Ignores it."""

    def onQueryProgress(self, event: Any) -> None:
        """Ignores it."""

    def onQueryIdle(self, event: Any) -> None:
        """Ignores it."""

    def onQueryTerminated(self, event: Any) -> None:
        self.count += 1


class Counter(StatefulProcessor):
    """Counts the rows of each word."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.seen = handle.getValueState("seen", "n INT")

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        before = self.seen.get()[0] if self.seen.exists() else 0
        count = before + sum(len(frame) for frame in rows)
        self.seen.update((count,))
        yield pd.DataFrame({"word": [key[0]], "n": [count]})

    def close(self) -> None:
        """Holds nothing."""


@F.udf(StringType())
def shout(text: str) -> str:
    """Returns a text in capitals."""
    return text.upper()


def progressed(query: StreamingQuery, seconds: float) -> bool:
    """Looks at a query again and again until it reports progress."""
    deadline = time.monotonic() + seconds
    while not query.lastProgress and time.monotonic() < deadline:
        time.sleep(0.1)
    return query.lastProgress is not None


def main(directory: str) -> None:
    """Starts one query after another."""
    spark = SparkSession.builder.master("local[2]").appName("functions").getOrCreate()
    provider = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", provider)
    ends = Ends()
    spark.streams.addListener(ends)
    try:
        spark.read.parquet(f"{directory}/nothing").show()
    except AnalysisException as error:
        print(error.getCondition())
    spark.udf.register("twice", lambda text: text * 2, "string")
    spark.createDataFrame([("A", "Anna"), ("B", "Bert")], "word STRING, name STRING").createOrReplaceTempView("names")
    spark.sql("SELECT twice(name) AS twice FROM names ORDER BY 1").show()

    lines = spark.readStream.option("maxFilesPerTrigger", 1).text(f"{directory}/words")
    words = lines.select(F.explode(F.split("value", " ")).alias("word")).select(shout("word").alias("word"))
    print(words.columns)
    words.createOrReplaceTempView("words")
    named = spark.sql("SELECT n.name, twice(w.word) AS twice FROM words w JOIN names n ON w.word = n.word")
    query = named.writeStream.format("memory").queryName("named").start()
    print(progressed(query, 60))
    query.processAllAvailable()
    spark.sql("SELECT name, twice, count(*) AS count FROM named GROUP BY ALL ORDER BY 1").show()
    most = spark.table("named").groupBy("name").count().orderBy(F.desc("count")).first()["name"]
    query.stop()

    chosen: list[str] = []

    def keep(frame: DataFrame, batch: int) -> None:
        frame.join(spark.table("names"), "word").where(F.col("name") == most).write.mode("append").json(
            f"{directory}/kept"
        )
        chosen.append(str(batch))

    words.writeStream.foreachBatch(keep).trigger(availableNow=True).start().awaitTermination()
    print(sorted(row["word"] for row in spark.read.json(f"{directory}/kept").collect()))

    counted = words.groupBy("word").transformWithStateInPandas(Counter(), "word STRING, n INT", "update", "none")
    query = counted.writeStream.format("memory").outputMode("update").queryName("counted").start()
    query.processAllAvailable()
    spark.table("counted").groupBy("word").agg(F.max("n")).orderBy("word").show()
    query.stop()

    @F.udf("double")
    def inverse(text: str) -> float:
        return 1 / (len(text) - 1)

    query = words.select(inverse("word")).writeStream.format("noop").start()
    try:
        query.awaitTermination()
    except StreamingQueryException as error:
        print("ZeroDivisionError" in str(error))
    spark.streams.removeListener(ends)


if __name__ == "__main__":
    main(sys.argv[1])
