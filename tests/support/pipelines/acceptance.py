"""Programs with the behaviour that Spark's own test suites of streams check, each with its input.

Spark and the engine run the same function over the same files. Each batch of rows is a file, which Spark reads as one
micro-batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

Batches = Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Program:
    """A query over streams. ``inputs`` are the batches of each stream, by the parameters of ``build``.

    ``schemas`` are the columns of streams that are not ``v INT``. ``settings`` are options of Spark.
    ``trigger`` ends the query. ``differs`` says what the engine does instead, where its rows are not Spark's.
    """

    name: str
    build: Callable[..., DataFrame]
    inputs: Mapping[str, Batches]
    schemas: Mapping[str, str]
    mode: str
    settings: Mapping[str, str]
    differs: str = ""
    suite: bool = False
    trigger: str = "availableNow"


PROGRAMS: dict[str, Program] = {}
"""All programs by their names."""


def program(
    mode: str = "append",
    *,
    settings: Mapping[str, str] | None = None,
    differs: str = "",
    suite: bool = False,
    schemas: Mapping[str, str] | None = None,
    trigger: str = "availableNow",
    **inputs: Batches,
) -> Callable[..., Any]:
    """Returns what registers programs with this input: a function, which it decorates, or several by their names."""

    def register(build: Callable[..., DataFrame] | None = None, **builds: Callable[..., DataFrame]) -> Any:
        for name, made in {build.__name__: build}.items() if build else builds.items():
            assert name not in PROGRAMS, name
            found = Program(name, made, inputs, schemas or {}, mode, settings or {}, differs, suite, trigger)
            PROGRAMS[name] = found
        return build

    return register


def frame_of(spark: SparkSession, made: Program, directory: str) -> DataFrame:
    """Returns the frame of a program whose files are in the directory."""
    streams = {
        name: spark.readStream.schema(made.schemas.get(name, "v INT"))
        .option("maxFilesPerTrigger", 1)
        .json(f"{directory}/{name}")
        for name in made.inputs
    }
    return made.build(**streams)


def pipeline(spark: SparkSession, name: str, directory: str, output: str) -> None:
    """Starts the query of a program, which ends with its files. Each batch of its result is a file."""
    made = PROGRAMS[name]
    for key, value in made.settings.items():
        spark.conf.set(key, value)
    writer = frame_of(spark, made, directory).writeStream.outputMode(made.mode).trigger(**{made.trigger: True})
    writer.foreachBatch(written_to(Path(output))).option("checkpointLocation", f"{output}-checkpoint").start()


def written_to(directory: Path) -> Callable[[DataFrame, int], None]:
    """Returns a function for ``foreachBatch`` that writes each batch to a file."""

    def write(batch: DataFrame, batch_id: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        hidden = directory / f".{batch_id}"
        pq.write_table(batch.toArrow(), hidden)
        os.replace(hidden, directory / f"{batch_id:06}.parquet")

    return write
