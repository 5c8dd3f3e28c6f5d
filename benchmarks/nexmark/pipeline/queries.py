"""The queries of Nexmark as PySpark programs, which the engine and Structured Streaming both run.

Each query takes the views ``person``, ``auction`` and ``bid`` of one stream of events, as the published ones do. Some
take a further column that they pass on, to measure the latency of their rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as fn

DELAY = "4 seconds"
"""How late events may be, as in the published queries."""
WINDOW = "10 seconds"


@dataclass(frozen=True)
class Views:
    """The three kinds of events as tables, with one column of event time."""

    person: DataFrame
    auction: DataFrame
    bid: DataFrame

    @classmethod
    def of(cls, events: DataFrame) -> Views:
        """Makes the views of a stream of events."""
        time = fn.when(fn.col("event_type") == 0, fn.col("person.dateTime"))
        time = time.when(fn.col("event_type") == 1, fn.col("auction.dateTime")).otherwise(fn.col("bid.dateTime"))
        timed = events.withColumn("dateTime", time).withWatermark("dateTime", DELAY)
        tables = []
        for number, kind in enumerate(("person", "auction", "bid")):
            fields = [name for name in timed.select(f"{kind}.*").columns if name != "dateTime"]
            columns = [fn.col(f"{kind}.{name}").alias(name) for name in fields]
            tables.append(timed.where(fn.col("event_type") == number).select(*columns, "dateTime"))
        return cls(*tables)


def q0(views: Views) -> DataFrame:
    """Passes all bids on."""
    return views.bid.select("auction", "bidder", "price", "dateTime", "extra")


def q1(views: Views) -> DataFrame:
    """Converts the currency of prices."""
    price = (fn.lit("0.908").cast("decimal(4,3)") * fn.col("price")).alias("price")
    return views.bid.select("auction", "bidder", price, "dateTime", "extra")


def q2(views: Views, *due: Column) -> DataFrame:
    """Selects the bids on some auctions."""
    return views.bid.where("auction % 123 = 0").select("auction", "price", *due)


def q3(views: Views, *due: Column) -> DataFrame:
    """Finds who sells in one category in three states: an inner join that keeps all rows."""
    times = [fn.col("dateTime").alias(name) for name in ("sold", "joined")] if due else []
    sold = views.auction.where("category = 10").select(fn.col("id").alias("auction"), "seller", *times[:1])
    people = views.person.where("state IN ('OR', 'ID', 'CA')").select("id", "name", "city", "state", *times[1:])
    return sold.join(people, fn.expr("seller = id")).select("name", "city", "state", "auction", *due)


def q5(views: Views) -> DataFrame:
    """Finds the auctions with the most bids in each sliding window."""

    def counts() -> DataFrame:
        return views.bid.groupBy(fn.window("dateTime", WINDOW, "2 seconds"), "auction").agg(fn.count("*").alias("num"))

    most = counts().groupBy("window").agg(fn.max("num").alias("most")).withColumnRenamed("window", "same_window")
    joined = counts().join(most, fn.expr("window = same_window AND num >= most"))
    return joined.select("auction", "num", "window.start", "window.end")


def q7(views: Views, *due: Column) -> DataFrame:
    """Finds the highest bids of each window."""
    highest = views.bid.groupBy(fn.window("dateTime", WINDOW)).agg(fn.max("price").alias("highest"))
    highest = highest.select("highest", fn.col("window.end").alias("until"))
    within = "price = highest AND dateTime BETWEEN until - INTERVAL 10 SECONDS AND until"
    joined = views.bid.join(highest, fn.expr(within))
    return joined.select("auction", "price", "bidder", "dateTime", "extra", *due)


def q8(views: Views) -> DataFrame:
    """Finds who registered and opened an auction in the same window."""
    people = views.person.groupBy(fn.window("dateTime", WINDOW), "id", "name").agg(fn.count("*").alias("times"))
    sellers = views.auction.groupBy(fn.window("dateTime", WINDOW), "seller").agg(fn.count("*").alias("times"))
    sellers = sellers.select("seller", fn.col("window").alias("same_window"))
    joined = people.join(sellers, fn.expr("id = seller AND window = same_window"))
    return joined.select("id", "name", "window.start")


def q11(views: Views) -> DataFrame:
    """Counts the bids of each bidder's sessions."""
    sessions = views.bid.groupBy("bidder", fn.session_window("dateTime", WINDOW)).agg(fn.count("*").alias("bids"))
    return sessions.select("bidder", "bids", "session_window.start", "session_window.end")


def q12(views: Views, *due: Column) -> DataFrame:
    """Counts the bids of each bidder in windows of the clock."""
    clocked = views.bid.select("bidder", fn.current_timestamp().alias("now"), *(["dateTime"] if due else []))
    windows = clocked.groupBy(fn.window("now", WINDOW), "bidder").agg(fn.count("*").alias("bids"), *due)
    return windows.select("bidder", "bids", "window.start", "window.end", *(["due"] if due else []))


def q17(views: Views, *due: Column) -> DataFrame:
    """Reports on the bids of each auction by day."""
    price = fn.col("price")
    ranks = [price < 10_000, (price >= 10_000) & (price < 1_000_000), price >= 1_000_000]
    day = fn.date_format("dateTime", "yyyy-MM-dd").alias("day")
    return views.bid.groupBy("auction", day).agg(
        fn.count("*").alias("total_bids"),
        *(fn.count_if(condition).alias(f"rank{at}_bids") for at, condition in enumerate(ranks, start=1)),
        fn.min("price").alias("min_price"),
        fn.max("price").alias("max_price"),
        fn.avg("price").alias("avg_price"),
        fn.sum("price").alias("sum_price"),
        *due,
    )


def q18(views: Views) -> DataFrame:
    """Finds the latest bid of each bidder on each auction."""
    row = fn.struct("price", "channel", "url", "dateTime", "extra")
    latest = views.bid.groupBy("bidder", "auction").agg(fn.max_by(row, fn.col("dateTime")).alias("latest"))
    return latest.select("auction", "bidder", "latest.*")


def q20(views: Views) -> DataFrame:
    """Adds the auction to each bid in one category: an inner join that keeps all rows."""
    own = ("itemName", "description", "initialBid", "reserve", "expires", "seller", "category")
    auctions = views.auction.where("category = 10").select(
        "id", *own, fn.col("dateTime").alias("auction_time"), fn.col("extra").alias("auction_extra")
    )
    return views.bid.join(auctions, fn.expr("auction = id")).drop("id")


def q21(views: Views, *due: Column) -> DataFrame:
    """Adds the number of each bid's channel, by its name or from its address."""
    known = ("apple", "google", "facebook", "baidu")
    name = fn.lower("channel")
    found = fn.regexp_extract("url", "(&|^)channel_id=([^&]*)", 2)
    number = fn.when(name == known[0], "0")
    for at, channel in enumerate(known[1:], start=1):
        number = number.when(name == channel, str(at))
    rows = views.bid.where((found != "") | name.isin(*known))
    return rows.select("auction", "bidder", "price", "channel", number.otherwise(found).alias("channel_id"), *due)


def q22(views: Views, *due: Column) -> DataFrame:
    """Takes the directories out of each bid's address."""
    directories = [fn.split_part("url", fn.lit("/"), fn.lit(at)).alias(f"dir{at - 3}") for at in (4, 5, 6)]
    return views.bid.select("auction", "bidder", "price", "channel", *directories, *due)


QUERIES: dict[str, tuple[Callable[..., DataFrame], str]] = {
    "q0": (q0, "append"),
    "q1": (q1, "append"),
    "q2": (q2, "append"),
    "q3": (q3, "append"),
    "q5": (q5, "append"),
    "q7": (q7, "append"),
    "q8": (q8, "append"),
    "q11": (q11, "append"),
    "q12": (q12, "update"),
    "q17": (q17, "update"),
    "q18": (q18, "update"),
    "q20": (q20, "append"),
    "q21": (q21, "append"),
    "q22": (q22, "append"),
}
"""Each query and its output mode."""


_CLOSED = f"INTERVAL {DELAY}"
DUE = {
    "q0": "dateTime",
    "q1": "dateTime",
    "q5": f"end + {_CLOSED}",
    "q8": f"start + INTERVAL {WINDOW} + {_CLOSED}",
    "q11": f"end + {_CLOSED}",
    "q18": "dateTime",
    "q20": "greatest(dateTime, auction_time)",
}
"""The event time of the event that completes a row, from the columns of a query. The watermark ends a window."""
DUE_INSIDE = {
    "q2": "dateTime",
    "q3": "greatest(sold, joined)",
    "q7": f"until + {_CLOSED}",
    "q12": "max(dateTime)",
    "q17": "max(dateTime)",
    "q21": "dateTime",
    "q22": "dateTime",
}
"""The same for queries that pass on none of the columns which tell it."""


def due_times(name: str, views: Views) -> DataFrame:
    """A query's rows, of which only the time is left when each was due: column ``due``."""
    query, _ = QUERIES[name]
    if name in DUE:
        return query(views).select(fn.expr(DUE[name]).alias("due"))
    return query(views, fn.expr(DUE_INSIDE[name]).alias("due")).select("due")


def pipeline(
    spark: SparkSession, names: str, events: str, per_split: str, splits: str, per_second: str, output: str, pace: str
) -> None:
    """Runs the queries ``names``, with commas between them, over so many events; ``per_second`` is of event time.

    ``splits`` are found at one time, each of up to ``per_split`` events. Writes Parquet below ``output``; without one,
    nothing. With a ``pace``, a rate and a file with a space between them, so many events come in a second by the clock
    from when the file exists, and the latencies of the rows are counted in files beside it.
    """
    from events import NexmarkSource, RowAges  # type: ignore[import-not-found]

    spark.dataSource.register(NexmarkSource)
    reader = spark.readStream.format("nexmark").options(events=events, eventsPerSplit=per_split, splitsPerRange=splits)
    rate, _, begin = pace.partition(" ")
    if rate:
        reader = reader.option("rate", rate).option("begin", begin)
    views = Views.of(reader.option("eventsPerSecond", per_second).load())
    for name in names.split(","):
        query, mode = QUERIES[name]
        if rate:
            rows = due_times(name, views).mapInArrow(RowAges(begin, rate, per_second), "due TIMESTAMP")
        else:
            rows = query(views)
        writer = rows.writeStream.format("parquet" if output else "noop").outputMode(mode)
        writer.queryName(name).trigger(availableNow=True).start(f"{output}/{name}" if output else None)
