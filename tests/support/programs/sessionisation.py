"""Finds the sessions of users: clicks with less than a quarter of an hour between them."""

import sys
from collections.abc import Iterator

import pandas as pd
from pyspark.sql import SparkSession
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

GAP = pd.Timedelta(minutes=15)


def sessions(key: tuple[str], clicks: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """The state is the open session: its first and its last click in microseconds, and its number of clicks."""
    ended = []
    current = list(state.get) if state.exists else None
    if state.hasTimedOut:
        ended.append(current)
        current = None
        state.remove()
    else:
        for time in pd.concat(clicks)["at"].sort_values():
            at = time.value // 1000
            if current is not None and at - current[1] >= GAP.value // 1000:
                ended.append(current)
                current = None
            current = [at, at, 1] if current is None else [current[0], at, current[2] + 1]
        state.update(tuple(current))
        state.setTimeoutTimestamp(current[1] // 1000 + GAP.value // 1_000_000)
    yield pd.DataFrame(
        [(key[0], pd.Timestamp(first, unit="us"), (last - first) / 1e6, number) for first, last, number in ended],
        columns=["user", "began", "seconds", "clicks"],
    ).astype({"seconds": float, "clicks": "int64", "began": "datetime64[us]"})


if __name__ == "__main__":
    source, output = sys.argv[1:]
    spark = SparkSession.builder.appName("sessions").getOrCreate()
    query = (
        spark.readStream.schema("user STRING, page STRING, at TIMESTAMP")
        .parquet(source + "/clicks")
        .withWatermark("at", "20 minutes")
        .groupBy("user")
        .applyInPandasWithState(
            sessions,
            outputStructType="user STRING, began TIMESTAMP, seconds DOUBLE, clicks LONG",
            stateStructType="first LONG, last LONG, clicks LONG",
            outputMode="append",
            timeoutConf=GroupStateTimeout.EventTimeTimeout,
        )
        .writeStream.format("parquet")
        .outputMode("append")
        .option("path", output + "/rows")
        .option("checkpointLocation", output + "/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
