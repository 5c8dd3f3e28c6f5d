import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

source, path, output = sys.argv[1:]
spark = SparkSession.builder.appName("doubled").getOrCreate()
orders = spark.readStream.format(source).schema("country STRING, amount DOUBLE").load(path)
assert orders.columns == ["country", "amount"]
doubled = orders.filter(F.col("country").isNotNull()).selectExpr("country", "amount * 2 AS amount")
query = (
    doubled.writeStream.format("parquet")
    .option("checkpointLocation", output + "/checkpoint")
    .start(output + "/doubled")
)
doubled.explain()
query.explain(extended=True)
query.awaitTermination()
