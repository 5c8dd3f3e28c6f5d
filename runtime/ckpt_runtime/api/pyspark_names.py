"""Methods of PySpark's classes that a pipeline's classes lack: the error for a call names the alternative."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, NoReturn

_NO_RESULTS = "nothing runs while a pipeline is described; see the job's rows in what its sink has written"
_COLUMNS = "call select(column, ..., name=expression)"
_PROCESSOR = "call groupBy(...).transformWithState(...)"
_DATA_SOURCE = "call format(...) with a built-in format or a PySpark DataSource class"
_SPARK_ONLY = "a pipeline has no Spark session; what is no stream can be read in a processor's init, or in mapInArrow"

STREAM: Mapping[str, str] = {
    **dict.fromkeys(("drop", "withColumnRenamed", "withColumnsRenamed", "withColumns", "selectExpr", "toDF"), _COLUMNS),
    **dict.fromkeys(("distinct", "dropDuplicates", "drop_duplicates", "dropDuplicatesWithinWatermark"), _PROCESSOR),
    **dict.fromkeys(("mapInPandas",), "call mapInArrow(func, schema)"),
    **dict.fromkeys(("unionAll", "unionByName"), "call union with a stream of the same columns"),
    **dict.fromkeys(("repartition", "coalesce"), "call rebalance() or groupBy(...), and setParallelism(n) behind it"),
    **dict.fromkeys(("show", "collect", "toPandas", "toArrow", "take", "first", "head", "foreach"), _NO_RESULTS),
    "agg": "call groupBy(column, ...).agg(...)",
    "write": "call writeStream",
}
GROUPED: Mapping[str, str] = {
    **dict.fromkeys(("sum", "min", "max", "avg", "mean"), "call agg(...) with the functions of ckpt_runtime.api"),
    **dict.fromkeys(
        ("applyInPandasWithState", "applyInPandas", "applyInArrow"),
        "call transformWithState(...)",
    ),
}
READER: Mapping[str, str] = {
    **dict.fromkeys(("parquet", "json", "csv", "text", "orc", "xml", "table"), _DATA_SOURCE),
    "name": "call uid(...) on what load() returns",
}
WRITER: Mapping[str, str] = {
    "trigger": "the option execution.checkpointing.interval says how often rows are committed, and a source's option "
    "availableNow=true that it ends with what is there",
    **dict.fromkeys(("foreachBatch", "foreach"), "write a PySpark DataSource with a streamWriter"),
    **dict.fromkeys(("partitionBy", "clusterBy"), "add a sink for each part"),
    "toTable": _DATA_SOURCE,
}
SINK: Mapping[str, str] = dict.fromkeys(
    ("awaitTermination", "stop", "processAllAvailable", "status", "lastProgress", "isActive", "exception"), _NO_RESULTS
)
SESSION: Mapping[str, str] = dict.fromkeys(("read", "sql", "table", "createDataFrame", "sparkContext"), _SPARK_ONLY)


class NamesOfPySpark:
    """Names the alternative in the error for a missing PySpark method."""

    _missing: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # a type checker should report such names itself

        def __getattr__(self, name: str) -> NoReturn:
            """Called for unknown names. :raises AttributeError: always"""
            here = f"{type(self).__name__!r} object has no attribute {name!r}"
            instead = self._missing.get(name)
            raise AttributeError(here if instead is None else f"{here}, other than in PySpark: {instead}")
