"""A notebook of a Spark Connect client: what it gets from a session, as one JSON document on standard output.

python connect_client.py sc://localhost:15002/;token=... ORDERS OUTPUT
"""

import json
import sys
from contextlib import redirect_stdout
from io import StringIO
from threading import Condition
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQueryListener

url, orders_path, output = sys.argv[1:]
spark = SparkSession.builder.remote(url).getOrCreate()
seen: dict[str, Any] = {}


def refusal(action: Any) -> str:
    try:
        action()
    except Exception as error:
        condition = error.getCondition() if isinstance(error, PySparkException) else None
        return f"{type(error).__name__}, {condition}: {error}"
    return "not refused"


class Listener(StreamingQueryListener):
    """Keeps the events that it gets."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []
        self.changed = Condition()

    def onQueryStarted(self, event: Any) -> None:
        self.keep("started", event.name)

    def onQueryProgress(self, event: Any) -> None:
        self.keep("progress", event.progress)

    def onQueryIdle(self, event: Any) -> None:
        self.keep("idle", str(event.id))

    def onQueryTerminated(self, event: Any) -> None:
        self.keep("ended", [str(event.id), event.exception])

    def keep(self, kind: str, value: Any) -> None:
        with self.changed:
            self.events.append((kind, value))
            self.changed.notify_all()

    def wait(self, kind: str, count: int) -> list[Any]:
        """The values of a kind, as soon as there are so many."""
        with self.changed:
            found = self.changed.wait_for(lambda: [v for k, v in self.events if k == kind][count - 1 :], 120)
            assert found, self.events
            return [v for k, v in self.events if k == kind]


def shown(action: Any) -> str:
    with redirect_stdout(StringIO()) as text:
        action()
    return text.getvalue()


seen["batch"] = [row.id for row in spark.createDataFrame([(1,), (2,)], "id INT").where("id > 1").collect()]
schema = "country STRING, amount DOUBLE, quantity INT"
static = spark.read.schema(schema).parquet(orders_path)
orders = spark.readStream.format("replay").schema(schema).load(orders_path)
seen["columns"] = [orders.isStreaming, orders.columns, static.isStreaming]
counts = "SELECT country, count(*) AS n, sum(quantity) AS total"
totals = f"{counts} FROM {{0}} LEFT JOIN known USING (country) GROUP BY country"
spark.createDataFrame([("AT",), ("DE",)], "country STRING").createOrReplaceTempView("known")
seen["compression"] = spark.conf.get("spark.connect.session.planCompression.threshold")
orders.createOrReplaceTempView("orders")
static.createOrReplaceTempView("orders_as_batch")
seen["wanted"] = sorted(map(list, spark.sql(totals.format("orders_as_batch")).collect()), key=str)

spark.conf.set("execution.checkpointing.interval", "250 ms")
seen["option"] = spark.conf.get("execution.checkpointing.interval")
query = (
    spark.sql(totals.format("orders"))
    .hint("uid", "totals")
    .writeStream.format("parquet")
    .outputMode("update")
    .queryName("totals")
    .start(f"{output}/totals")
)
seen["started"] = [query.id, query.name]
query.awaitTermination()
seen["ended"] = [query.isActive, query.exception() is None, query.status["message"]]
progress = query.lastProgress
seen["progress"] = None if progress is None else [progress.name, progress.batchId >= 1]

listener = Listener()
spark.streams.addListener(listener)
seen["plan of a frame"] = shown(spark.sql(totals.format("orders")).explain)
numbers = spark.readStream.format("numbers").option("rowsPerSecond", "100").load()
running = numbers.writeStream.format("parquet").queryName("running").start(f"{output}/running")
seen["active"] = [active.name for active in spark.streams.active]
seen["second of a name"] = refusal(numbers.writeStream.format("noop").queryName("running").start)
seen["in time"] = running.awaitTermination(0.2)
seen["plan of a query"] = shown(running.explain)
listener.wait("progress", 2)
seen["found"] = getattr(spark.streams.get(running.id), "name", None)
running.stop()
spark.streams.resetTerminated()
seen["stopped"] = [running.isActive, [active.name for active in spark.streams.active], spark.streams.get(running.id)]

seen["listened"] = [listener.wait("started", 1), running.id, listener.wait("ended", 1)]
reports = [json.loads(each.json) for each in listener.wait("progress", 1)]
seen["reports"] = [[each["batchId"], each["numInputRows"] > 0, each["name"]] for each in reports]
seen["report"] = reports[-1]
spark.conf.set("restart-strategy.type", "none")
failing = orders.selectExpr("1 DIV (quantity - quantity) AS x").writeStream.format("parquet").start(f"{output}/failing")
seen["raised"] = refusal(failing.awaitTermination)
seen["failure"] = str(failing.exception())
seen["listened to a failure"] = listener.wait("ended", 2)[1][1]
spark.streams.removeListener(listener)

seen["unknown column"] = refusal(lambda: spark.sql("SELECT nope FROM orders").writeStream.start(f"{output}/refused"))
seen["action"] = refusal(orders.collect)
seen["two paths"] = refusal(lambda: spark.readStream.schema(schema).option("path", orders_path).parquet(output).columns)
seen["path"] = refusal(lambda: spark.readStream.schema(schema).parquet(f"{output}/away").writeStream.start(output))
length = F.udf(len, "int")
seen["code"] = refusal(lambda: orders.select(length("country")).writeStream.start(f"{output}/refused"))
seen["option of nothing"] = refusal(lambda: spark.conf.set("execution.checkpointing.intervall", "1 s"))
seen["batch error"] = refusal(lambda: spark.sql("SELECT nope FROM range(3)").collect())
spark.stop()
print(json.dumps(seen))
