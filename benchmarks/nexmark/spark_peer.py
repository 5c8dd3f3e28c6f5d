"""The queries in Structured Streaming: the same programs over the same events, which are read from Parquet files."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from benchmarks.harness import progress
from benchmarks.nexmark.generator import EVENT, Generator
from benchmarks.nexmark.pipeline.queries import QUERIES, Views
from benchmarks.nexmark.processes import CpuTime, Timed

_PER_FILE = 250_000
_WARM_FILES = 2


class SparkPeer:
    """A session of Spark with the events in files, each of which is a part of a micro-batch."""

    def __init__(self, options: Namespace, directory: Path) -> None:
        self._options = options
        self._directory = directory
        builder = SparkSession.builder.master(f"local[{options.parallelism}]").config("spark.ui.enabled", "false")
        builder = builder.config("spark.sql.shuffle.partitions", str(options.parallelism))
        self._spark = builder.config("spark.driver.memory", "4g").getOrCreate()

    def __enter__(self) -> Self:
        self._spark.conf.set("spark.sql.shuffle.partitions", str(self._options.parallelism))
        self._spark.conf.set("spark.sql.session.timeZone", "UTC")
        _write(self._directory / "events", self._options.events)
        _write(self._directory / "warm-events", min(_WARM_FILES * _PER_FILE, self._options.events))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._spark.stop()

    def run(self, name: str) -> Timed:
        """Measures a query once it is warm, from the start of the query to its end."""
        self._run(name, "warm-events", None)
        return self._run(name, "events", None)

    def _run(self, name: str, events: str, output: Path | None) -> Timed:
        schema = self._spark.createDataFrame(EVENT.empty_table()).schema
        stream = self._spark.readStream.schema(schema).option("maxFilesPerTrigger", self._options.parallelism * 2)
        query, mode = QUERIES[name]
        frame = query(Views.of(stream.parquet(str(self._directory / events))))
        writer = frame.writeStream.format("noop").outputMode(mode).trigger(availableNow=True)
        checkpoint = self._directory / f"spark-{name}-{events}"
        start = time.monotonic()
        with CpuTime() as cpu:
            writer.option("checkpointLocation", str(checkpoint)).start().awaitTermination()
            seconds = time.monotonic() - start
        return Timed(seconds, cpu.seconds)


def _write(directory: Path, events: int) -> None:
    directory.mkdir()
    generator = Generator()
    for number, first in enumerate(range(0, events, _PER_FILE)):
        end = min(first + _PER_FILE, events)
        table = pa.Table.from_batches([generator.events(first, end - first)])
        pq.write_table(table, directory / f"{number:04d}.parquet")
    progress(f"wrote {events:,} events")
