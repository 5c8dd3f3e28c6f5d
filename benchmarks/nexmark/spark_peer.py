"""The queries in Structured Streaming: the same programs over the same events, which are read from Parquet files."""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from pathlib import Path

import psutil  # type: ignore[import-untyped, unused-ignore]
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

    def __init__(self, spark: SparkSession, options: Namespace, directory: Path) -> None:
        self._spark = spark
        self._options = options
        self._directory = directory
        self._warm: set[str] = set()
        assert spark._jvm is not None
        self.process = psutil.Process(spark._jvm.java.lang.ProcessHandle.current().pid())
        _write(directory / "events", options.events)
        _write(directory / "warm-events", min(_WARM_FILES * _PER_FILE, options.events))

    def run(self, name: str) -> Timed:
        """Measures a query from its start to its end, after a shorter run that warms it up."""
        if name not in self._warm:
            self._run(name, "warm-events")
            self._warm.add(name)
        return self._run(name, "events")

    def _run(self, name: str, events: str) -> Timed:
        schema = self._spark.createDataFrame(EVENT.empty_table()).schema
        stream = self._spark.readStream.schema(schema).option("maxFilesPerTrigger", self._options.parallelism * 2)
        query, mode = QUERIES[name]
        frame = query(Views.of(stream.parquet(str(self._directory / events))))
        writer = frame.writeStream.format("noop").outputMode(mode).trigger(availableNow=True)
        with tempfile.TemporaryDirectory(dir=self._directory) as checkpoint:
            start = time.monotonic()
            with CpuTime(lambda: [self.process]) as cpu:
                writer.option("checkpointLocation", checkpoint).start().awaitTermination()
                return Timed(time.monotonic() - start, cpu.seconds)


def _write(directory: Path, events: int) -> None:
    directory.mkdir()
    generator = Generator()
    for number, first in enumerate(range(0, events, _PER_FILE)):
        end = min(first + _PER_FILE, events)
        table = pa.Table.from_batches([generator.events(first, end - first)])
        pq.write_table(table, directory / f"{number:04d}.parquet")
    progress(f"wrote {events:,} events")
