"""The job of the snapshots in ``tests/data/golden``: every kind of state. Uids, schemas and state names stay for ever.

Both inputs have (source, n) with n = 0, 1, 2, ... per source; a row's event time is n + 1 milliseconds. The watermark
stays behind all of them, so that timers and unmatched rows wait until the input ends, whatever order rows came in.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from ckpt_runtime.api import Stream, StreamSession, count, max
from ckpt_runtime.api import sum as sum_of

GROUP = 4


class Remembering(StatefulProcessor):
    """Keeps a value, a list and a map of its key, and a timer for each group of rows."""

    more_fields = ""
    more_values: tuple[Any, ...] = ()

    def __init__(self, sleep_ms: float) -> None:
        self._sleep_s = sleep_ms / 1000

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._seen = handle.getValueState("seen", f"seen BIGINT{self.more_fields}")
        self._last = handle.getListState("last", "n BIGINT")
        self._groups = handle.getMapState("groups", "start BIGINT", f"rows BIGINT, total BIGINT{self.more_fields}")

    def handleInputRows(self, key: tuple[Any, ...], rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        seen = self._seen.get()[0] if self._seen.exists() else 0
        last = [item[0] for item in self._last.get()] if self._last.exists() else []
        for row in rows:
            time.sleep(self._sleep_s)
            seen += 1
            last = [*last, row.n][-3:]
            group = (row.n // GROUP * GROUP,)
            known = self._groups.getValue(group) if self._groups.containsKey(group) else (0, 0)
            self._groups.updateValue(group, (known[0] + 1, known[1] + row.n, *self.more_values))
            self._handle.registerTimer(group[0] + 1)
            yield Row(source=key[0], n=row.n, seen=seen, last=sum(last))
        self._seen.update((seen, *self.more_values))
        self._last.put([(n,) for n in last])

    def handleExpiredTimer(self, key: tuple[Any, ...], timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        group = (expiredTimerInfo.getExpiryTimeInMs() - 1,)
        rows, total = self._groups.getValue(group)[:2]
        self._groups.removeKey(group)
        yield Row(source=key[0], n=-1 - group[0], seen=rows, last=total)

    def close(self) -> None:
        pass


def numbers(session: StreamSession, directory: str, name: str, rows_per_second: int) -> Stream:
    """The rows of an input file with their event time."""
    return (
        session.readStream.format("replay")
        .option("path", f"{directory}/{name}.parquet")
        .option("partitionBy", "source")
        .option("rowsPerSecond", rows_per_second)
        .option("batchRows", 32)
        .load()
        .uid(name)
        .withColumn("at", pc.add(pc.field("n"), 1).cast(pa.timestamp("ms")))
        .uid(f"{name}-time")
        .withWatermark("at", "1 hour")
        .uid(f"{name}-watermark")
    )


def write(stream: Stream, directory: str, name: str) -> None:
    """To a directory of its own. The files that a kept snapshot covers are not kept with it."""
    sink = stream.uid(name).writeStream.format("parquet").option("onMissing", "ignore")
    sink.uid(f"{name}-sink").start(f"{directory}/out/{name}")


def write_kept_and_totals(left: Stream, directory: str, processor: Remembering) -> None:
    """What is kept per source: by a processor, and as running aggregates."""
    schema = "source BIGINT, n BIGINT, seen BIGINT, last BIGINT"
    write(left.groupBy("source").transformWithState(processor, schema, "Append", "EventTime"), directory, "kept")
    totals = left.groupBy("source").agg(count().alias("rows"), max("n").alias("max"), sum_of("n").alias("sum"))
    write(totals, directory, "totals")


def pipeline(session: StreamSession, directory: str, rate: str, sleep_ms: str) -> None:
    """Builds the job. ``rate`` is that of the left rows per second; ``sleep_ms`` per row holds its sources back."""
    left = numbers(session, directory, "left", int(rate))
    right = numbers(session, directory, "right", int(rate) // 2)
    write_kept_and_totals(left, directory, Remembering(float(sleep_ms)))
    numbered = right.select("source", "n", m="n", right_at="at").uid("right-numbers")
    joined = left.join(numbered, ["source", "n"], "left_outer", within=("0 ms", "0 ms"))
    write(joined.uid("joined").select("source", "n", "m"), directory, "matches")
