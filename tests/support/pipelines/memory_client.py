"""A notebook of a Spark Connect client that reads its queries' memory tables, and what Spark's batches have instead.

python memory_client.py sc://localhost:15002/;token=... ORDERS
"""

import json
import sys
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

url, path = sys.argv[1:]
spark = SparkSession.builder.remote(url).getOrCreate()
schema = "country STRING, amount DOUBLE, quantity INT"
spark.conf.set("execution.checkpointing.interval", "250 ms")
batch = spark.read.schema(schema).parquet(path)
stream = spark.readStream.schema(schema).parquet(path)
seen: dict[str, Any] = {}


def totals(rows: DataFrame) -> DataFrame:
    counts = rows.groupBy("country").agg(F.count("*").alias("n"), F.sum("amount").alias("a total"))
    return counts.orderBy(F.desc("country")).limit(3)


def listed(frame: DataFrame) -> list[Any]:
    return [[str(value) for value in row] for row in frame.collect()]


def refusal(action: Any) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


writer = totals(stream).writeStream.format("memory").outputMode("complete")
seen["unnamed"] = refusal(writer.start)
query = writer.queryName("totals").start()
seen["before"] = refusal(lambda: spark.sql("select count(*) from totals").collect())
seen["columns"] = spark.table("totals").columns
query.processAllAvailable()
seen["processed"] = listed(spark.sql("select * from totals"))
spark.conf.set("parallelism.default", "2")
rows = stream.where("quantity = 3").writeStream.format("memory").queryName("rows").trigger(availableNow=True).start()
rows.awaitTermination()
seen["rows"] = sorted(listed(spark.sql("select amount, country from rows")))
seen["wanted rows"] = sorted(listed(batch.where("quantity = 3").select("amount", "country")))
query.stop()
query.processAllAvailable()
ended = totals(stream).writeStream.format("memory").outputMode("complete").queryName("totals")
ended.trigger(availableNow=True).start().awaitTermination()
seen["totals"] = listed(spark.sql("select * from totals"))
seen["wanted totals"] = listed(totals(batch))
print(json.dumps(seen))
