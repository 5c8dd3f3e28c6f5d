"""A query that reads what has arrived since its last run, one file in each of Spark's batches."""

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery


def pipeline(spark: SparkSession, directory: str, location: str) -> None:
    started(spark, directory, location)


def started(spark: SparkSession, directory: str, location: str) -> StreamingQuery:
    writer = spark.readStream.option("maxFilesPerTrigger", 1).text(directory).writeStream.format("noop")
    return writer.option("checkpointLocation", location).trigger(availableNow=True).start()
