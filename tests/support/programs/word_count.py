"""Counts words in windows of ten minutes that begin every five minutes."""

import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

source, output = sys.argv[1:]
spark = SparkSession.builder.appName("word count").getOrCreate()

lines = spark.readStream.schema("line STRING, at TIMESTAMP").json(source + "/lines")
words = lines.select(F.explode(F.split(F.lower("line"), r"\W+")).alias("word"), "at").where("word <> ''")
counts = (
    words.withWatermark("at", "10 minutes")
    .groupBy(F.window("at", "10 minutes", "5 minutes"), "word")
    .count()
    .select("window.start", "window.end", "word", "count")
)

query = (
    counts.writeStream.queryName("word_count")
    .format("parquet")
    .outputMode("append")
    .option("path", output + "/rows")
    .option("checkpointLocation", output + "/checkpoint")
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
