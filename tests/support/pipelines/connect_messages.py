"""A Spark Connect client that reads messages of Protocol Buffers and writes them as Avro and as other messages.

python connect_messages.py sc://localhost:15002/;token=... MESSAGES DESCRIPTORS OUTPUT
"""

import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.avro.functions import from_avro, to_avro
from pyspark.sql.protobuf.functions import from_protobuf, to_protobuf

url, messages, descriptors, output = sys.argv[1:]
spark = SparkSession.builder.remote(url).getOrCreate()

ID = '{"type": "record", "name": "Id", "fields": [{"name": "id", "type": ["null", "long"]}]}'

values = spark.readStream.schema("value BINARY").parquet(messages)
order = from_protobuf("value", "Order", descriptors, {"mode": "PERMISSIVE", "enums.as.ints": "true"})
orders = values.select(order.alias("order")).select("order.id", "order.kind", "order.lines")
written = orders.select(
    to_avro(F.struct("id"), ID).alias("avro"),
    to_protobuf(F.struct("id", "kind", "lines"), "shop.Order", descriptors).alias("protobuf"),
)
both = written.select("*", from_avro("avro", ID).id.alias("id"))
query = both.writeStream.format("parquet").queryName("messages").option("checkpointLocation", f"{output}-checkpoint")
query.trigger(availableNow=True).start(output).awaitTermination()
