"""Maps a query's ``writeStream`` to the spec of its sink."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from ckpt_runtime.configuration.checkpointing_options import CheckpointingOptions
from ckpt_runtime.configuration.registry import DEFAULT_CHECKPOINTS_DIRECTORY
from ckpt_runtime.frontend.batch_writers import MEMORY_VIEW, SPARK_FILES, Console, MemoryTable, SparkWrite
from ckpt_runtime.frontend.capture import Capture
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.formats import (
    MAX_WAITING_BATCHES,
    check_sink,
    check_types_of_pyspark,
    partition_columns,
    partition_option,
)
from ckpt_runtime.graph.options import parse_value
from ckpt_runtime.graph.source_formats import check_location
from ckpt_runtime.graph.specs import STAGED_FORMATS, SinkSpec, UserFunction

_CHECKPOINT_LOCATION = "checkpointlocation"
"""An option of Spark's own engine, which is ignored: the session has a checkpoint directory for all queries."""


def sink_spec(start: Any, capture: Capture, resolve: Callable[[str], str | type], schema: pa.Schema) -> SinkSpec:
    """Returns the sink of a query that writes rows of a schema.

    ``start`` is Spark's own request. Raises PlanError for what the engine cannot write as Spark does.
    """
    if duplicates := {name for name in schema.names if schema.names.count(name) > 1}:
        raise PlanError("writeStream", f"two columns are named {sorted(duplicates)[0]!r}; give them aliases")
    options = {key: value for key, value in start.options.items() if key.lower() != _CHECKPOINT_LOCATION}
    if start.path:
        options["path"] = start.path
    columns = list(start.partitioning_column_names)
    if start.HasField("foreach_batch"):
        return _staged("foreachBatch", _function(start.foreach_batch, capture), start, capture, schema)
    if start.HasField("foreach_writer"):
        function = _function(start.foreach_writer, capture)
        _check_foreach(function)
        return _staged("foreach", function, start, capture, schema)
    name = (start.format or "parquet").lower()
    target = resolve(start.format or "parquet")
    if not isinstance(target, type):
        if name in {format_.lower() for format_ in STAGED_FORMATS}:
            raise PlanError(
                "format", f"{start.format!r} is a method: call .foreachBatch(function) or .foreach(function)"
            )
        write = _batch_writer(name, start, options, columns, schema)
        if write is not None:
            return _staged("foreachBatch", write, start, capture, schema)
    if columns:
        options["partitionBy"] = partition_option(target, columns)
    check_sink(target, options, schema)
    return SinkSpec(target, options)


def _batch_writer(name: str, start: Any, options: dict[str, str], columns: list[str], schema: pa.Schema) -> Any:
    """Returns what writes a checkpoint's frame with Spark; None for formats that the engine itself writes."""
    if name == "memory":
        view = options.get(MEMORY_VIEW)
        if not view or not view.isidentifier():
            raise PlanError(
                "format",
                "'memory' is a table in the session's Spark, which clients of Spark Connect read: start the query from "
                "a client that is connected to the session, or write to parquet",
            )
        return MemoryTable(view, start.output_mode.lower() == "complete")
    if name == "console":
        return Console.of(options)
    if name == "jdbc":
        return SparkWrite(name, options, tuple(columns))
    return _files(name, options, columns, schema) if name in SPARK_FILES else None


def _staged(format_: str, function: Any, start: Any, capture: Capture, schema: pa.Schema) -> SinkSpec:
    """Returns the sink that stages the rows of each checkpoint in files, and calls a function with them."""
    check_types_of_pyspark("writeStream", schema)
    key = CheckpointingOptions.CHECKPOINTS_DIRECTORY.key
    directory = capture.option(key)
    given = {key.lower(): value for key, value in start.options.items()}
    location = directory or given.get(_CHECKPOINT_LOCATION) or capture.option(DEFAULT_CHECKPOINTS_DIRECTORY)
    if not location:
        raise PlanError(
            "writeStream",
            f"the rows of a checkpoint are staged in files until it completes: set {key}, or the query's option "
            "checkpointLocation, to a directory that all workers share",
        )
    check_location(location)
    user_function = UserFunction(function, capture.session, dict(capture.configuration))
    staged = {"path": f"{location.rstrip('/')}/staged"}
    if start.HasField("foreach_batch") and (waiting := given.get(MAX_WAITING_BATCHES.key.lower())) is not None:
        staged[MAX_WAITING_BATCHES.key] = str(parse_value(MAX_WAITING_BATCHES, waiting))
    return SinkSpec(format_, staged, user_function)


def _files(name: str, options: dict[str, str], columns: list[str], schema: pa.Schema) -> SparkWrite:
    """Returns Spark's batch writer for a file format. Raises PlanError for rows that it cannot write, and for a
    location that Spark and the engine spell differently."""
    keys = partition_columns({"partitionBy": ",".join(columns)}, schema)
    kept = [field for field in schema if field.name not in keys]
    if name == "text" and [field.type for field in kept] != [pa.string()]:
        raise PlanError("format", "'text' writes a single text column; select it, as in concat_ws(',', *columns)")
    nested = [field.name for field in kept if pa.types.is_nested(field.type)]
    if name == "csv" and nested:
        raise PlanError("format", f"'csv' cannot represent column {nested[0]!r}; write its fields, or to_json of it")
    given = {key.lower(): value for key, value in options.items()}
    path = given.get("path", "")
    if not path:
        raise PlanError("option 'path'", f"format {name!r} needs it")
    check_location(path)
    if not path.startswith(("/", "file:/")):
        raise PlanError(
            "option 'path'",
            f"{path!r} is not a directory of this file system; Spark writes format {name!r} and the engine publishes "
            "the files, so both must be able to access the directory: write parquet there, or call foreachBatch",
        )
    rest = {key: value for key, value in options.items() if key.lower() != "path"}
    return SparkWrite(name, rest, tuple(columns), path)


def _function(given: Any, capture: Capture) -> Any:
    """Raises PlanError for a function that came as a pickle, from a client that runs elsewhere."""
    position = given.python_function.command
    if not position.isdigit() or int(position) >= len(capture.functions):
        raise PlanError("writeStream", "a function is found by running its program: submit the program with `ckpt run`")
    return capture.functions[int(position)]


def _check_foreach(function: Any) -> None:
    """Raises PlanError for objects that Spark refuses, too."""
    if callable(function) and not hasattr(function, "process"):
        return
    for name in ("open", "process", "close"):
        method = getattr(function, name, None)
        if (method is None and name == "process") or (method is not None and not callable(method)):
            raise PlanError("foreach", f"expected a function, or an object with a method process; got {name}")
