"""Gives each click the name and the department of its page, from a table of pages."""

import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as F


def main(source: str, output: str) -> None:
    spark = SparkSession.builder.appName("enrichment").getOrCreate()
    pages = (
        spark.read.option("header", True)
        .schema("page STRING, title STRING, department STRING")
        .csv(source + "/pages.csv")
    )
    clicks = spark.readStream.schema("user STRING, page STRING, at TIMESTAMP").parquet(source + "/clicks")
    spark.conf.set("spark.sql.session.timeZone", "Europe/Vienna")
    enriched = (
        clicks.join(F.broadcast(pages), "page", "left")
        .withColumn("department", F.coalesce("department", F.lit("unknown")))
        .withColumn("hour", F.date_format("at", "yyyy-MM-dd HH"))
    )
    query = (
        enriched.writeStream.trigger(availableNow=True)
        .option("checkpointLocation", output + "/checkpoint")
        .start(output + "/rows", format="parquet")
    )
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
