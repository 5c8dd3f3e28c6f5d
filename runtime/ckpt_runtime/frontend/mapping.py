"""Maps the typed plans of a program's queries to the operators of a job, and each ``writeStream`` to its sink.

Columns of a source that a query does not read for certain are pruned, as Spark's optimizer prunes them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pyarrow as pa

from ckpt_runtime.configuration.checkpointing_options import CheckpointingOptions
from ckpt_runtime.configuration.registry import DEFAULT_CHECKPOINTS_DIRECTORY
from ckpt_runtime.expressions.nodes import Column, Expression
from ckpt_runtime.frontend.batch_writers import MEMORY_VIEW, SPARK_FILES, Console, MemoryTable, SparkWrite
from ckpt_runtime.frontend.capture import TABLE_SOURCES, Capture, CapturedQuery, CapturedSource, path_option
from ckpt_runtime.frontend.complete_mode import check_complete, check_complete_sink
from ckpt_runtime.frontend.function_mapping import add_filter, add_functional, with_functions
from ckpt_runtime.frontend.generators import columns_of
from ckpt_runtime.frontend.joins import parts_of
from ckpt_runtime.frontend.observe import add_observe
from ckpt_runtime.frontend.query_operators import Inputs, QueryOperators, arrow_schema
from ckpt_runtime.frontend.query_watermark import QueryWatermarks, only_event_time
from ckpt_runtime.frontend.stateful import add_stateful, check_output_mode
from ckpt_runtime.frontend.typed_plan import (
    IGNORED_FILES,
    Aggregate,
    Analysis,
    Deduplicate,
    Expand,
    Filter,
    Generate,
    Join,
    Limit,
    MapPartitions,
    Observe,
    PlanNode,
    Project,
    Repartition,
    Sort,
    Source,
    StatefulFunction,
    StaticTable,
    TypedColumn,
    Union,
    Watermark,
)
from ckpt_runtime.graph import specs
from ckpt_runtime.graph.bad_rows import reader_policy
from ckpt_runtime.graph.ddl import to_arrow_schema
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.formats import (
    AVAILABLE_NOW_OPTION,
    BATCH_LIMITS,
    MAX_WAITING_BATCHES,
    check_sink,
    check_types_of_pyspark,
    is_split_source,
    partition_columns,
    partition_option,
    source_schema,
)
from ckpt_runtime.graph.job_graph import Partitioning
from ckpt_runtime.graph.kafka_columns import DELIVERY_GUARANTEE
from ckpt_runtime.graph.logical import LogicalInput, LogicalNode, LogicalPlan
from ckpt_runtime.graph.options import Option, absolute, parse_value
from ckpt_runtime.graph.source_formats import (
    FILE_METADATA,
    SINK_LOG,
    is_local_path,
    is_pattern,
    parted_metadata,
    taken_by_spark,
    with_file_metadata,
)
from ckpt_runtime.graph.specs import FILE_FORMATS, STAGED_FORMATS, SinkSpec, UserFunction
from ckpt_runtime.graph.text_outputs import TEXT_OUTPUTS
from ckpt_runtime.sources import is_source

CHECKPOINT_LOCATION = "checkpointlocation"
"""The option of a query, in lower case, that names the directory in which its runs continue each other."""
CHECKPOINT_LOCATIONS = "spark.sql.streaming.checkpointLocation"
"""Spark's option with the directory in which each named query has its location, unless it sets another one."""


def location_of(start: Any, settings: Mapping[str, str]) -> str | None:
    """Returns the checkpoint location of a query, by its own option or by Spark's; None if it has none."""
    given = next((value for key, value in start.options.items() if key.lower() == CHECKPOINT_LOCATION), None)
    root = settings.get(CHECKPOINT_LOCATIONS)
    return f"{root.rstrip('/')}/{start.query_name}" if given is None and root and start.query_name else given


def delivered(start: Any) -> dict[str, str]:
    """Returns the options of a query's sink. With ``realTime``, messages of Kafka are visible at once by default."""
    options = dict(start.options)
    in_real_time = start.WhichOneof("trigger") == "real_time_batch_duration"
    if (
        in_real_time
        and start.format.lower() == "kafka"
        and not any(key.lower() == DELIVERY_GUARANTEE.key.lower() for key in options)
    ):
        options[DELIVERY_GUARANTEE.key] = "at-least-once"
    return options


def sink_spec(
    start: Any, capture: Capture, resolve: Callable[[str], str | type], schema: pa.Schema, shown: tuple[str, ...] = ()
) -> SinkSpec:
    """Returns the sink of a query that writes rows of a schema.

    ``start`` is Spark's own request. ``shown`` are names that the console shows instead of the schema's.
    Raises PlanError for sinks that the engine cannot write as Spark does.
    """
    if duplicates := {name for name in schema.names if schema.names.count(name) > 1}:
        raise PlanError("writeStream", f"two columns are named {sorted(duplicates)[0]!r}; give them aliases")
    options = {key: value for key, value in delivered(start).items() if key.lower() != CHECKPOINT_LOCATION}
    if start.path:
        options["path"] = start.path
    columns = list(start.partitioning_column_names)
    if columns and (start.HasField("foreach_batch") or start.HasField("foreach_writer")):
        raise PlanError(
            "partitionBy", "foreach and foreachBatch do not support it, as in Spark: call it in the function"
        )
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
        write = _batch_writer(name, start, options, columns, schema, shown)
        if write is not None:
            return _staged("foreachBatch", write, start, capture, schema)
    if columns:
        options["partitionBy"] = partition_option(target, columns)
    in_zone = target in TEXT_OUTPUTS.keys() - {"text"} or (columns and target in FILE_FORMATS - {"delta"})
    if in_zone and not any(key.lower() == "timezone" for key in options):
        options["timeZone"] = capture.configuration.get("spark.sql.session.timeZone", "UTC")
    check_sink(target, options, schema)
    return SinkSpec(target, options)


def _calls_with_checkpoints(start: Any) -> bool:
    """Whether the rows of a checkpoint, like those of a batch of Spark, are given to one call: of a function of the
    program, or of what shows them."""
    is_function = start.HasField("foreach_batch") or start.HasField("foreach_writer")
    return is_function or start.format.lower() in ("console", "memory")


def _batch_writer(
    name: str, start: Any, options: dict[str, str], columns: list[str], schema: pa.Schema, shown: tuple[str, ...]
) -> Any:
    """Returns what writes a checkpoint's frame with Spark; None for formats that the engine itself writes."""
    if name == "memory":
        view = options.get(MEMORY_VIEW)
        if not view or not view.isidentifier():
            raise PlanError(
                "format",
                "'memory' is a table in the session's Spark, which clients of Spark Connect read: run the script by "
                "`ckpt run --client`, or write to parquet",
            )
        return MemoryTable(view, start.output_mode.lower() == "complete")
    if name == "console":
        return Console.of(options, shown)
    if name == "jdbc":
        return SparkWrite(name, options, tuple(columns))
    if name not in SPARK_FILES:
        return None
    path = path_option(options)
    if name in TEXT_OUTPUTS and path and not is_local_path(path):
        return None  # Spark may lack a client for the store
    return _files(name, options, columns, schema)


def _staged(format_: str, function: Any, start: Any, capture: Capture, schema: pa.Schema) -> SinkSpec:
    """Returns the sink that stages the rows of each checkpoint in files, and calls a function with them."""
    check_types_of_pyspark("writeStream", schema)
    key = CheckpointingOptions.CHECKPOINTS_DIRECTORY.key
    directory = capture.option(key)
    given = {key.lower(): value for key, value in start.options.items()}
    location = directory or given.get(CHECKPOINT_LOCATION) or capture.option(DEFAULT_CHECKPOINTS_DIRECTORY)
    if not location:
        raise PlanError(
            "writeStream",
            f"the rows of a checkpoint are staged in files until it completes: set {key}, or the query's option "
            "checkpointLocation, to a directory that all workers share",
        )
    parse_value(Option("checkpointLocation", absolute), location)
    if isinstance(function, SparkWrite) and function.path and not any(map(is_local_path, (function.path, location))):
        raise PlanError(
            "option 'path'",
            f"Spark writes format {function.format!r} to a directory of this file system, from where the engine sends "
            f"the files to {function.path!r}: set {key} or checkpointLocation to such a directory, which Spark and all "
            f"workers share, not to {location!r}, or write parquet, csv, json or text",
        )
    user_function = UserFunction(function, capture.session, dict(capture.configuration))
    staged = {"path": f"{location.rstrip('/')}/staged"}
    if start.HasField("foreach_batch") and (waiting := given.get(MAX_WAITING_BATCHES.key.lower())) is not None:
        staged[MAX_WAITING_BATCHES.key] = str(parse_value(MAX_WAITING_BATCHES, waiting))
    return SinkSpec(format_, staged, user_function)


def _files(name: str, options: dict[str, str], columns: list[str], schema: pa.Schema) -> SparkWrite:
    """Returns Spark's batch writer for a file format. Raises PlanError for rows that it cannot write."""
    keys = partition_columns({"partitionBy": columns}, schema)
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
    parse_value(Option("path", absolute), path)
    rest = {key: value for key, value in options.items() if key.lower() != "path"}
    return SparkWrite(name, rest, tuple(columns), path)


def _function(given: Any, capture: Capture) -> Any:
    """Raises PlanError for a function that was sent as a pickle, by a client in another process."""
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


_CORRUPT = "columnNameOfCorruptRecord"


def check_pruned(source: CapturedSource, at: int, nodes: Sequence[PlanNode]) -> None:
    """Checks that Spark finds the same bad records as the engine, for the source of a query at position ``at``.

    Spark looks only at columns that the query reads, and JSON has no option for that, as CSV has. Raises PlanError for
    a source of JSON that handles bad records, and a query that leaves out columns of it.
    """
    options = {key.lower(): value for key, value in source.options.items()}
    names = [column.name for column in nodes[at].columns]
    corrupt = options.get(_CORRUPT.lower(), "_corrupt_record")
    mode = options.get("mode", "PERMISSIVE").upper()
    if source.format.lower() != "json" or (mode == "PERMISSIVE" and corrupt not in names):
        return
    if reader_policy(source.options) is not None:
        return  # an option of the engine's, for which all columns count
    read = _read_columns(nodes)[at]
    left_out = [name for place, name in enumerate(names) if place not in read and name != corrupt]
    if left_out:
        what = f"mode {mode}" if mode != "PERMISSIVE" else f"the column of bad records, {corrupt!r}"
        raise PlanError(
            "format 'json'",
            f"{what}: in Spark, the columns that the query reads decide which records are bad, and it does not read "
            f"{', '.join(left_out)}: remove them from the schema, or read format 'text' and call from_json",
        )


def _read_columns(nodes: Sequence[PlanNode]) -> list[set[int]]:
    """The columns of each node that later nodes read for certain; the result of the query has all of its columns."""
    read: list[set[int]] = [set() for _ in nodes]
    read[-1] = set(range(len(nodes[-1].columns)))
    for at in reversed(range(len(nodes))):
        node = nodes[at]
        widths = [len(nodes[place].columns) for place in node.inputs]
        for place, columns in zip(node.inputs, _read_of_inputs(node, read[at], widths), strict=True):
            read[place] |= columns
    return read


def _read_of_inputs(node: PlanNode, wanted: set[int], widths: list[int]) -> list[set[int]]:
    """The columns that a node needs from each of its inputs for its ``wanted`` columns."""
    match node:
        case Project():
            return [set(columns_of([node.expressions[place] for place in wanted]))]
        case Aggregate():
            computed = [each for place, each in enumerate(node.aggregates, len(node.keys)) if place in wanted]
            return [{*node.keys, *(argument for each in computed for argument in each.arguments)}]
        case Expand():
            return [set(columns_of([row[place] for row in node.rows for place in wanted]))]
        case Generate():
            return [{place for place in wanted if place < widths[0]} | columns_of([node.function])]
        case MapPartitions() | StatefulFunction():
            return [set(range(width)) for width in widths]
        case Join():
            both = wanted | (set() if node.condition is None else columns_of([node.condition]))
            left = widths[0]
            return [{place for place in both if place < left}, {place - left for place in both if place >= left}]
    # The remaining nodes forward columns by position.
    return [wanted | _read_by_itself(node) for _ in widths]


def _read_by_itself(node: PlanNode) -> set[int]:
    """The columns that a node reads for any wanted columns."""
    match node:
        case Filter():
            return set(columns_of([node.condition]))
        case Watermark():
            return {node.column}
        case Deduplicate():
            return set(node.keys)
        case Sort():
            return set(columns_of([order.expression for order in node.orders]))
    return set()


Resolve = Callable[[str], str | type]


def spark_columns(source: CapturedSource, resolve: Resolve) -> list[tuple[str, str]]:
    """Returns the columns of a stream with Spark's names of their types, for Spark's analyzer. Raises PlanError."""
    from pyspark.sql.pandas.types import from_arrow_schema

    schema = from_arrow_schema(_schema_of(source, resolve))
    return [(field.name, field.dataType.simpleString()) for field in schema]


def _schema_of(source: CapturedSource, resolve: Resolve) -> pa.Schema:
    return source_schema(resolve(source.format), source.options, _declared(source))


def _declared(source: CapturedSource) -> pa.Schema | None:
    if not source.schema:
        return None
    if source.schema.lstrip().startswith("{"):
        import json

        from pyspark.sql.types import StructType

        return to_arrow_schema(StructType.fromJson(json.loads(source.schema)))
    return to_arrow_schema(source.schema)


_OF_DIRECTORIES = (FILE_FORMATS | SPARK_FILES) - {"delta"}


def check_paths(starts: Sequence[Any], plan: LogicalPlan) -> None:
    """Raises PlanError for a stream of local files whose path does not exist, as Spark does, unless a query writes it,
    and for a query that would write files where Spark's readers ignore them.

    ``starts`` are Spark's requests for the queries of a plan.
    """
    written = {start.path or path_option(start.options): (start.format or "parquet").lower() for start in starts}
    for path, format_ in written.items():
        log = os.path.join(path.removeprefix("file:"), SINK_LOG)
        if format_ in _OF_DIRECTORIES and is_local_path(path) and os.path.isdir(log):
            raise taken_by_spark(path)
    for node in plan.nodes:
        spec = node.spec
        path = path_option(spec.options) if isinstance(spec, specs.SourceSpec) and spec.format in TABLE_SOURCES else ""
        is_named = is_local_path(path) and not is_pattern(path) and path not in written
        if is_named and not os.path.exists(path.removeprefix("file:")):
            raise PlanError("load", f"[PATH_NOT_FOUND] Path does not exist: {path}. SQLSTATE: 42K03")


def add_queries(capture: Capture, plan: LogicalPlan, resolve: Resolve, fresh: Collection[int] = ()) -> None:
    """Adds the operators of all queries that a program started. Common parts of several of them are computed once.

    ``fresh`` are the numbers of those that start from the beginning with each run; they share nothing with the others.
    Raises PlanError for a feature that the engine lacks; the message names it and an alternative.
    """
    continuing, beginning = Shared(), Shared()
    for number, query in enumerate(capture.queries):
        before = len(plan.nodes)
        mapper = QueryMapper(capture, plan, resolve, beginning if number in fresh else continuing)
        mapper.add(query, query.start.query_name or str(number))
        for node in plan.nodes[before:]:
            node.starts_fresh = number in fresh


@dataclass(slots=True)
class Shared:
    """Operators that several queries may use.

    ``sources`` are those of streams, by the ids of their relations, and whether they end with the data that is there.
    ``frames`` are the outputs of other relations, by the relation, its inputs, and what else decides about them.
    """

    sources: dict[int, tuple[LogicalNode, bool]] = field(default_factory=dict)
    frames: dict[Any, tuple[LogicalInput, ...]] = field(default_factory=dict)


class QueryMapper:
    """Adds one query to a plan."""

    def __init__(self, capture: Capture, plan: LogicalPlan, resolve: Resolve, shared: Shared) -> None:
        self._capture = capture
        self._plan = plan
        self._resolve = resolve
        self._shared = shared
        self._operators = QueryOperators(capture, plan, {}, "append")
        self._inputs: list[Inputs] = []
        """The origins of the rows of the typed plan's nodes; none for those that have not been added yet."""
        self._of_all_rows: dict[int, int] = {}
        self._ends = self._one_batch = self._emits_latest = False
        self._name = ""

    def add(self, query: CapturedQuery, name: str) -> str:
        """Adds the operators of the query, the sink included. Returns its output mode.

        What belongs to this query alone is identified by ``name``.
        """
        self._name = name
        self._one_batch = query.start.once
        self._ends = bool(query.start.available_now or query.start.once)
        self._emits_latest = _calls_with_checkpoints(query.start)
        self.add_frame(query.analysis, str(query.start.output_mode or "append").lower())
        if isinstance(query.analysis.nodes[-1], StaticTable):
            raise PlanError("writeStream", "the frame reads no stream; write it with df.write, or read with readStream")
        self._sink(query, self._inputs[-1], arrow_schema(query.analysis.columns))
        return self._operators.output_mode

    def add_frame(self, analysis: Analysis, output_mode: str) -> None:
        """Adds the operators of a frame, without a sink."""
        nodes = analysis.nodes
        mode = check_output_mode(output_mode, nodes)
        if mode == "complete":
            check_complete(nodes)
        self._operators = QueryOperators(self._capture, self._plan, analysis.places, mode)
        self._operators.emits_latest = self._emits_latest
        self._operators.has_empty_batches &= not self._one_batch
        self._inputs = [()] * len(nodes)
        watermarks = QueryWatermarks(nodes, mode)
        self._of_all_rows = watermarks.of_all_rows
        for at in watermarks.order:
            node = nodes[at]
            if isinstance(node, Source) and node.plan_id is not None:
                check_pruned(self._capture.sources[node.plan_id], at, nodes)
            for other in watermarks.others(at):
                self._add_event_time(other, node.inputs[0], nodes)
            if watermarks.has_no_effect(at) or (isinstance(node, Filter) and self._is_moved(node, nodes)):
                self._inputs[at] = self._inputs[node.inputs[0]]
            else:
                self._inputs[at] = self._once(at, nodes)
                if at in watermarks.of_all_rows.values():  # rows that are sent in turn are so behind the moved filters
                    self._inputs[at] = _forward(self._inputs[at])

    def _add_event_time(self, watermark: int, below: int, nodes: tuple[PlanNode, ...]) -> None:
        """Adds the watermarks of another stream, but no rows, to the rows of a node."""
        given = self._inputs[watermark]
        schema = arrow_schema(nodes[below].columns)
        key = ("event time", given, schema)
        found = self._shared.frames.get(key)
        if found is None:
            found = only_event_time(self._operators, nodes[watermark], given, nodes[below])
            self._shared.frames[key] = found
        self._inputs[below] += found

    def _once(self, at: int, nodes: tuple[PlanNode, ...]) -> Inputs:
        """Returns the origin of the rows of a node; adds its operators unless another query has the same node."""
        node = nodes[at]
        static = isinstance(node, StaticTable) or any(isinstance(nodes[at], StaticTable) for at in node.inputs)
        if static or isinstance(node, Generate) or self._operators.output_mode == "complete":
            # A table is not an operator by which its join could be found again, the columns that a generator repeats
            # depend on its readers, and a complete result belongs to one query.
            return self._mapped(at, nodes)
        inputs = tuple(self._inputs[place] for place in node.inputs)
        relation = msgspec.json.encode(msgspec.structs.replace(node, inputs=()), order="sorted")
        own = f"{self._operators.output_mode} {self._emits_latest}" if isinstance(node, Aggregate) else ""
        own = self._name if at in self._of_all_rows else own
        key = (own, self._ends, self._one_batch, relation, inputs)
        found = self._shared.frames.get(key)
        if found is None:
            found = self._shared.frames[key] = self._mapped(at, nodes)
        return found

    def _mapped(self, at: int, nodes: tuple[PlanNode, ...]) -> Inputs:
        """Adds the operators of a node and returns what their rows come from."""
        node = nodes[at]
        inputs = self._inputs[node.inputs[0]] if node.inputs else ()
        schema = arrow_schema(node.columns)
        match node:
            case Source():
                return self._source(node, schema)
            case StaticTable():
                return ()  # the join that reads it gets it as a file
            case Project():
                inputs, trees = with_functions(self._operators, node.expressions, nodes[node.inputs[0]].columns, inputs)
                columns = tuple(zip(schema.names, trees, strict=True))
                return self._operators.apply(specs.EvaluateSpec(columns, schema), inputs, schema, node.plan_id)
            case Filter() | Observe():
                add: Any = add_filter if isinstance(node, Filter) else add_observe
                return tuple(add(self._operators, node, inputs, schema))
            case Watermark():
                return self._watermark(at, node, nodes, schema)
            case Union() | Repartition():
                return self._edges(node, nodes, schema)
            case Aggregate() | Expand() | Deduplicate() | Sort() | Limit():
                return add_stateful(self._operators, node, nodes, inputs)
            case Generate() | MapPartitions() | StatefulFunction() | Join():
                return add_functional(self._operators, node, nodes, [self._inputs[at] for at in node.inputs])

    def _edges(self, node: Union | Repartition, nodes: tuple[PlanNode, ...], schema: pa.Schema) -> Inputs:
        """Returns the edges of a relation that needs no operator: it determines how rows reach the next one."""
        if isinstance(node, Repartition):
            return _in_turn(self._inputs[node.inputs[0]])
        if any(isinstance(nodes[at], StaticTable) for at in node.inputs):
            raise PlanError("union", "a stream and a static table cannot be combined by union, as in Spark; join them")
        return tuple(edge for at in node.inputs for edge in self._renamed(at, nodes[at], schema))

    def _watermark(self, at: int, node: Watermark, nodes: tuple[PlanNode, ...], schema: pa.Schema) -> Inputs:
        """Adds event time. Where rows are repartitioned before it, they are after it: it has to see them in order."""
        column = schema.names[node.column]
        if not pa.types.is_timestamp(schema.field(node.column).type):
            raise PlanError(
                "withWatermark",
                f"column {column!r} is not a timestamp; select its window.start or window.end first",
            )
        spec = specs.WatermarkSpec(
            *(column, node.delay_ms),
            keeps_last=not self._operators.has_empty_batches,
            greatest=self._capture.has_greatest_watermark,
        )
        inputs = self._inputs[node.inputs[0]]
        if at in self._of_all_rows:
            return self._filtered_watermark(spec, inputs, nodes[self._of_all_rows[at]])
        if _has_watermark(node, nodes):
            raise PlanError("withWatermark", "the stream has a watermark already; set it once, as in Spark")
        edges = _forward(inputs)
        if self._ends and len(apart := [each for edge in edges for each in self._operators.apart(edge)]) > 1:
            edges = tuple(made for edge in apart for made in self._operators.apply(spec, (edge,), schema, None))
            spec = replace(spec, united=True)
        edges = self._operators.apply(spec, edges, schema, node.plan_id)
        return _in_turn(edges) if _are_in_turn(inputs) else edges

    def _filtered_watermark(self, spec: specs.WatermarkSpec, inputs: Inputs, of_all_rows: PlanNode) -> Inputs:
        """Adds the event time of rows behind moved filters, which have the parallelism of the one in front of them."""
        edges = self._operators.apply(spec, inputs, inputs[0].node.schema, None)
        between = [edges[0].node]
        while not isinstance((above := between[-1].inputs[0].node).spec, specs.WatermarkSpec):
            between.append(above)
        for each in between:
            each.parallelism = above.parallelism
            each.filtered_for = each.filtered_for or self._name  # another query may have the same filters
        return _in_turn(edges) if _are_in_turn(self._inputs[of_all_rows.inputs[0]]) else edges

    def _is_moved(self, node: Filter, nodes: Sequence[PlanNode]) -> bool:
        """Whether all conditions of a filter are in front of the watermark before it, too, and it has no hints.

        Between the two there may be other filters.
        """
        [at] = node.inputs
        while isinstance(nodes[at], Filter):
            [at] = nodes[at].inputs
        if at not in self._of_all_rows or (node.plan_id is not None and self._capture.hints.get(node.plan_id)):
            return False
        moved: list[Expression] = []
        while isinstance(below := nodes[nodes[at].inputs[0]], Filter):
            moved += parts_of(below.condition)
            [at] = nodes[at].inputs
        return all(part in moved for part in parts_of(node.condition))

    def _source(self, node: Source, schema: pa.Schema) -> Inputs:
        assert node.plan_id is not None
        known, ends = self._shared.sources.get(node.plan_id, (None, self._ends))
        if ends != self._ends:
            raise PlanError("trigger", "queries that read one stream need one trigger, availableNow or another")
        if known is None:
            source = self._capture.sources[node.plan_id]
            if source.format.lower() in ("csv", "json", "delta") and not any(
                key.lower() == "timezone" for key in source.options
            ):
                source.options["timeZone"] = self._capture.configuration.get("spark.sql.session.timeZone", "UTC")
            for setting in IGNORED_FILES if source.format.lower() in TABLE_SOURCES else ():
                name = setting.rpartition(".")[2]
                if setting in self._capture.configuration and not path_option(source.options, name.lower()):
                    source.options[name] = self._capture.configuration[setting]
            if self._ends and is_split_source(self._resolve(source.format)):
                source.options[AVAILABLE_NOW_OPTION] = "true"
                for limit in [key for key in source.options if self._one_batch and key.lower() in BATCH_LIMITS]:
                    del source.options[limit]  # as in Spark, there is one batch
            declared = _declared(source)
            read = _schema_of(source, self._resolve)
            format_ = self._resolve(source.format)
            if self._reads_metadata(node, len(read)):
                read = with_file_metadata(str(format_), read)
            program = specs.UserFunction(None, self._capture.session, dict(self._capture.configuration))
            spec = specs.SourceSpec(
                format_, dict(source.options), declared, program=program if is_source(format_) else None
            )
            known = self._operators.apply(spec, (), read, node.plan_id)[0].node
            self._shared.sources[node.plan_id] = (known, ends)
        assert known.schema is not None
        if known.schema.equals(schema):
            return (LogicalInput(known),)
        if len(known.schema) != len(schema) and len(parted_metadata(known.schema)[0]) != len(schema):
            raise PlanError(
                "schema",
                f"the source has the columns {', '.join(known.schema.names)}, but had {', '.join(schema.names)} when "
                "the job was planned: submit the program again from the last checkpoint",
            )
        expressions = tuple(zip(schema.names, _columns(node.columns), strict=True))
        return self._operators.apply(specs.EvaluateSpec(expressions, schema), (LogicalInput(known),), schema, None)

    def _reads_metadata(self, node: Source, width: int) -> bool:
        """Whether this query, or another one that reads the same stream of files, reads its hidden column."""
        nodes = [node, *(each for query in self._capture.queries for each in query.analysis.nodes)]
        same = (each for each in nodes if isinstance(each, Source) and each.plan_id == node.plan_id)
        return any(each.columns[width:] and each.columns[-1].name == FILE_METADATA for each in same)

    def _renamed(self, at: int, node: PlanNode, schema: pa.Schema) -> Inputs:
        """Converts an input of a union to the names and types of the union's columns."""
        if arrow_schema(node.columns).equals(schema):
            return self._inputs[at]
        columns = tuple(zip(schema.names, _columns(node.columns), strict=True))
        return self._operators.apply(specs.EvaluateSpec(columns, schema), self._inputs[at], schema, None)

    def _sink(self, query: CapturedQuery, inputs: Inputs, schema: pa.Schema) -> None:
        start = query.start
        shown: tuple[str, ...] = ()
        if start.format.lower() == "console" and len({*schema.names}) < len(schema.names):
            # The console shows equal names, as in Spark, but the columns of staged files have different ones.
            shown = tuple(schema.names)
            schema = pa.schema([field.with_name(f"{field.name}_{at}") for at, field in enumerate(schema)])
            columns = tuple(zip(schema.names, _columns(query.analysis.columns), strict=True))
            inputs = self._operators.apply(specs.EvaluateSpec(columns, schema), inputs, schema, None)
        spec = sink_spec(start, self._capture, self._resolve, schema, shown)
        if self._operators.whole:
            check_complete_sink(spec)
            spec = replace(spec, table=schema)
        node = self._operators.add(LogicalNode(spec, inputs, None, parallelism=1 if self._operators.whole else None))
        if start.query_name:
            # Not the name itself, which programs may also give to an operator of the query.
            node.uid, node.name = f"{start.query_name}-sink", start.query_name


def _columns(of: Sequence[TypedColumn]) -> list[Column]:
    """Returns expressions that give columns as they are."""
    return [Column(at, column.type) for at, column in enumerate(of)]


def _has_watermark(node: PlanNode, nodes: Sequence[PlanNode]) -> bool:
    """Returns whether a watermark is set below a node, with no stateful operation between them."""
    below = [nodes[at] for at in node.inputs]
    passes = (Project, Filter, Generate, MapPartitions, Union, Repartition)
    return any(
        isinstance(each, Watermark) or (isinstance(each, passes) and _has_watermark(each, nodes)) for each in below
    )


def _forward(edges: Inputs) -> Inputs:
    """Returns edges that send the rows of a subtask to one subtask of what reads them."""
    return tuple(LogicalInput(edge.node) for edge in edges)


def _are_in_turn(edges: Inputs) -> bool:
    return any(edge.partitioning is Partitioning.REBALANCE for edge in edges)


def _in_turn(edges: Inputs) -> Inputs:
    """Returns edges that send rows in turn to the subtasks of what reads them."""
    return tuple(LogicalInput(edge.node, Partitioning.REBALANCE) for edge in edges)
