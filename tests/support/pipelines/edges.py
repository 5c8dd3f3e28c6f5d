"""Every way from one operator to the next: union, rebalance, broadcast; each row must arrive, in the right number."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc
from injected import act
from sequence import SCHEMA

from ckpt_runtime.api import Stream, StreamSession, count, max


def pipeline(session: StreamSession, output: str, rows: str, rate: str, faults: str) -> None:
    """Builds the job: two sources of ``rows`` rows each."""

    def numbers(name: str) -> Stream:
        return (
            session.readStream.format("numbers")
            .option("sequence", True)
            .option("rows", rows)
            .option("rowsPerSecond", rate)
            .option("batchRows", 64)
            .load()
            .uid(name)
        )

    def pass_through(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            act(faults, "map")
            yield batch

    first = numbers("first")
    second = numbers("second").withColumn("source", pc.add(pc.field("source"), 1000)).uid("renamed")
    united = first.union(second).rebalance().mapInArrow(pass_through, SCHEMA).uid("united")
    united.writeStream.format("parquet").uid("united-sink").start(f"{output}/united")
    repeated = first.broadcast().mapInArrow(pass_through, SCHEMA).uid("repeated")
    repeated.writeStream.format("parquet").uid("repeated-sink").start(f"{output}/repeated")
    doubled = first.union(first).mapInArrow(pass_through, SCHEMA).uid("doubled")
    doubled.writeStream.format("parquet").uid("doubled-sink").start(f"{output}/doubled")
    totals = first.union(first).groupBy("source").agg(count().alias("rows"), max("n").alias("greatest")).uid("totals")
    totals.writeStream.format("parquet").uid("totals-sink").start(f"{output}/totals")
