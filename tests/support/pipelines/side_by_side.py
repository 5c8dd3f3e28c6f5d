"""Runs a stateful processor, or a function of ``group_functions``, on the batches of a directory."""

from __future__ import annotations

import json

import arrow_processors
import group_functions
import side_processors
import unusual_processors
from batches import Batches
from pyspark.sql import SparkSession

PROCESSORS = (side_processors, unusual_processors, arrow_processors)


def pipeline(spark: SparkSession, case: str) -> None:
    """``case`` is JSON: all fields of ``Case`` that a pipeline needs, ``source`` and ``output``.

    ``second`` names a processor behind the first one, with the same keys and schema.
    """
    given = json.loads(case)
    spark.dataSource.register(Batches)
    options = {"path": given["source"], "chunk": given["chunk"], "availableNow": given["ends"]}
    stream = spark.readStream.format(Batches.name()).options(**options).load().hint("uid", "source")
    if given["watermark"]:
        stream = stream.withWatermark(*given["watermark"]).hint("uid", "watermark")
    for uid in filter(None, ("processor", given["second"])):
        name = given["processor"] if uid == "processor" else uid
        grouped = stream.groupBy(*given["keys"])
        if given["timeout"]:
            function = getattr(group_functions, name)
            stream = grouped.applyInPandasWithState(
                function, given["schema"], group_functions.STATE, given["mode"], given["timeout"]
            ).hint("uid", uid)
            continue
        processor = next(getattr(module, name) for module in PROCESSORS if hasattr(module, name))
        transform = grouped.transformWithStateInPandas if given["in_pandas"] else grouped.transformWithState
        stream = transform(processor(), given["schema"], given["mode"], given["time_mode"]).hint("uid", uid)
    stream.writeStream.format("parquet").outputMode(given["mode"]).queryName("results").start(given["output"])
