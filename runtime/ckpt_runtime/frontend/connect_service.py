"""The answers of Spark Connect's service to a program that is captured: each request changes or reads its capture."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import msgspec
import pyarrow as pa

from ckpt_runtime.expressions.types import SparkType
from ckpt_runtime.frontend.batch_writers import SPARK_FILES
from ckpt_runtime.frontend.capture import Capture, CapturedQuery, check_one_path, struct_type
from ckpt_runtime.frontend.mapping import CHECKPOINT_LOCATION, location_of
from ckpt_runtime.frontend.scripts import ScriptEndedError
from ckpt_runtime.frontend.typed_plan import (
    CONFIGURED,
    EVENT_TIME_OPTIONS,
    WATERMARK_POLICY,
    Analysis,
    AnalysisRequest,
    Files,
    Shown,
    Source,
    TableRequest,
)
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.specs import BYTES_OPTION, ROWS_OPTION

_CHANGE_RESULTS = (
    "spark.sql.legacy.",
    "spark.sql.mapKeyDedupPolicy",
    "spark.sql.timestampType",
    "spark.sql.decimalOperations.",
    "spark.sql.chunkBase64String.",
)
"""Spark options that change the results of expressions. Others control how Spark runs, and have no effect here."""
_ONLY_VALUES = {
    "spark.sql.streaming.statefulOperator.allowMultiple": "true",
    "spark.sql.sources.default": "parquet",
    "spark.sql.columnNameOfCorruptRecord": "_corrupt_record",
    "spark.sql.jsonGenerator.ignoreNullFields": "true",
    "spark.sql.function.concatBinaryAsString": "false",
    "spark.sql.function.eltOutputAsString": "false",
    "spark.sql.parser.escapedStringLiterals": "false",
    "spark.sql.parser.quotedRegexColumnNames": "false",
    "spark.sql.ansi.doubleQuotedIdentifiers": "false",
    "spark.sql.ansi.enforceReservedKeywords": "false",
    "spark.sql.ansi.relationPrecedence": "false",
    "spark.sql.groupByOrdinal": "true",
    "spark.sql.orderByOrdinal": "true",
    "spark.sql.groupByAliases": "true",
    "spark.sql.legacy.pathOptionBehavior.enabled": "false",
    "spark.sql.streaming.fileStreamSink.ignoreMetadata": "false",
}
"""Spark options with which a program would mean something else, by the only value that the engine has: the default."""
STATEMENT = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/)*(?:CREATE|DECLARE|SET|RESET|DROP|USE|CACHE|UNCACHE|INSERT|MERGE|UPDATE|DELETE|ALTER)\s",
    re.IGNORECASE | re.DOTALL,
)
"""SQL that does something, and gives no rows of a stream."""
_CHANGES_TABLES = re.compile(
    r"\s*(?:CREATE\s+(?:TABLE|DATABASE|SCHEMA|NAMESPACE)|DROP\s+TABLE|INSERT)\s", re.IGNORECASE
)
"""SQL that Spark runs when the program is submitted."""
SETTING = re.compile(r"\s*SET\s+([\w.:]+)\s*=([^;]*);*\s*", re.IGNORECASE)
"""The statement that sets an option, in the form that Spark reads."""
_NEEDS_SPARK = (
    "needs a running Spark, and a program is planned without one: remove it, call it in foreachBatch, or run the "
    "script by `ckpt run --client`, where the session's Spark runs it"
)
STREAM_ACTION = (
    "Queries with streaming sources must be executed with writeStream.start(), or from a streaming table or flow "
    "definition within a Spark Declarative Pipeline."
)
"""Spark's message for an action on a frame of a stream, such as show or collect."""
_WRITTEN_FORMATS = SPARK_FILES | {"parquet"}
"""Formats of the files that a program may write before it starts its queries."""
_SAVE_AS_TABLE = 1
"""The number of the method ``saveAsTable`` in requests to write a table."""
_MODES = {"SAVE_MODE_APPEND": "append", "SAVE_MODE_OVERWRITE": "overwrite", "SAVE_MODE_IGNORE": "ignore"}
_CONVERSIONS = (
    *("spark.sql.execution.pythonUDF.", "spark.sql.execution.pandas.", "spark.sql.execution.pyspark."),
    *(ROWS_OPTION, BYTES_OPTION),
)
_INFERENCE = "spark.sql.streaming.schemaInference"
_DEFAULTS = {
    "spark.sql.timestampType": "TIMESTAMP_LTZ",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.execution.pythonUDF.arrow.enabled": "true",
    # Local rows are part of the request: there is no server that could keep them.
    **dict.fromkeys(
        (
            "spark.sql.session.localRelationCacheThreshold",
            "spark.sql.session.localRelationSizeLimit",
            "spark.sql.session.localRelationChunkSizeRows",
            "spark.sql.session.localRelationChunkSizeBytes",
            "spark.sql.session.localRelationBatchOfChunksSizeBytes",
        ),
        str(1 << 40),
    ),
}


class Service:
    """Spark Connect's service over a capture."""

    def __init__(self, capture: Capture) -> None:
        from pyspark.sql.connect import proto

        self._capture = capture
        self._proto = proto
        self._settings: dict[str, str] = {}
        """Options of Spark that the program has set, whether they have an effect or not."""
        self._methods: dict[str, Callable[[Any], Any]] = {
            "Config": self._config,
            "AnalyzePlan": self._analyze,
            "ExecutePlan": self._execute,
            "ReleaseExecute": lambda request: proto.ReleaseExecuteResponse(session_id=request.session_id),
            "ReleaseSession": lambda request: proto.ReleaseSessionResponse(session_id=request.session_id),
        }

    def answer(self, method: str, request: Any) -> Any:
        """Returns the response to a call of a method of gRPC. Raises PlanError for one that needs a running Spark."""
        if method not in self._methods:
            raise PlanError("pipeline", f"{method} {_NEEDS_SPARK}")
        return self._methods[method](request)

    def _config(self, request: Any) -> Any:
        response = self._proto.ConfigResponse(session_id=request.session_id)
        operation = request.operation
        kind = operation.WhichOneof("op_type")
        pairs = getattr(getattr(operation, kind), "pairs", ())
        if kind == "set":
            for pair in pairs:
                self.set(pair.key, pair.value)
        elif kind in ("get_with_default", "get_option", "get"):
            keys = [(pair.key, pair.value) for pair in pairs] or [(key, None) for key in getattr(operation, kind).keys]
            for key, default in keys:
                value = {**_DEFAULTS, **self._settings}.get(key)
                if value is None and not key.startswith("spark."):
                    value = self._capture.option(key)  # one of the job's, as it was submitted or set
                response.pairs.add(key=key, value=default if value is None else value)
        elif kind == "unset":
            for key in operation.unset.keys:
                self.unset(key)
        elif kind == "is_modifiable":
            for key in operation.is_modifiable.keys:
                response.pairs.add(key=key, value="true")
        return response

    def set(self, key: str, value: str) -> None:
        """Sets an option of the job, or one of Spark's. Raises PlanError for one of Spark's that changes results."""
        if not key.startswith("spark."):
            self._capture.configure(key, value)
        elif key.startswith(_CHANGE_RESULTS) and key not in _ONLY_VALUES:
            raise PlanError(key, "expressions are always computed with the default of this option; do not set it")
        elif value.lower() != _ONLY_VALUES.get(key, value).lower():
            raise PlanError(key, f"{value!r} is not supported; programs run with {_ONLY_VALUES[key]!r} only")
        elif key == WATERMARK_POLICY and value.lower() not in ("min", "max"):
            raise PlanError(key, f"{value!r} is not one of min, max")
        elif key == ROWS_OPTION and not re.fullmatch(r"[+-]?\d+", value):
            raise PlanError(key, f"{value!r} is not an integer; 0 or less is no limit")
        elif key == BYTES_OPTION and not re.fullmatch(r"0*[1-9]\d*", value):
            raise PlanError(key, f"{value!r} is not a number of bytes; it has to be at least 1, without a unit")
        else:
            self._settings[key] = value
        if key in CONFIGURED:
            self._capture.configuration[key] = value
        elif key.startswith(_CONVERSIONS):
            self._capture.conversions[key] = value
        elif key in EVENT_TIME_OPTIONS:
            self._capture.event_time[key] = value
        elif key == _INFERENCE:
            self._capture.infers_schemas = value.lower() == "true"

    def unset(self, key: str) -> None:
        """Removes an option of Spark. Raises PlanError for one of the job."""
        if not key.startswith("spark."):
            raise PlanError(key, "a program cannot remove an option of its job: do not set it")
        capture = self._capture
        for known in (self._settings, capture.configuration, capture.conversions, capture.event_time):
            known.pop(key, None)
        if key == _INFERENCE:
            self._capture.infers_schemas = False

    def _analyze(self, request: Any) -> Any:
        response = self._proto.AnalyzePlanResponse(session_id=request.session_id)
        kind = request.WhichOneof("analyze")
        if kind == "schema":
            analysis = self._capture.analysis_of(self._capture.request_of(request.schema.plan.root))
            response.schema.schema.CopyFrom(_proto_type(struct_type(analysis).jsonValue()))
        elif kind == "tree_string":
            analysis = self._capture.analysis_of(self._capture.request_of(request.tree_string.plan.root))
            level = request.tree_string.level if request.tree_string.HasField("level") else None
            response.tree_string.tree_string = struct_type(analysis).treeString(level or 2**31 - 1)
        elif kind == "ddl_parse":
            analysis = self._capture.analysis_of(AnalysisRequest(ddl=request.ddl_parse.ddl_string))
            response.ddl_parse.parsed.CopyFrom(_proto_type(analysis.parsed))
        elif kind == "is_streaming":
            analysis = self._capture.analysis_of(self._capture.request_of(request.is_streaming.plan.root))
            response.is_streaming.is_streaming = any(isinstance(node, Source) for node in analysis.nodes)
        elif kind == "explain":
            extended = _shows_columns(request.explain)
            analysis = self._capture.analysis_of(self._capture.request_of(request.explain.plan.root))
            response.explain.explain_string = self._capture.explanation(analysis, extended=extended)
        elif kind in ("persist", "unpersist") and not self._may_read_stream(request):
            getattr(response, kind).SetInParent()  # a static table is read once
        elif kind == "spark_version":
            import pyspark

            response.spark_version.version = pyspark.__version__
        else:
            raise PlanError("pipeline", f"{kind} {_NEEDS_SPARK}")
        return response

    def _execute(self, request: Any) -> Iterator[Any]:
        response = self._proto.ExecutePlanResponse(session_id=request.session_id, operation_id=request.operation_id)
        kind = request.plan.command.WhichOneof("command_type") if request.plan.HasField("command") else None
        if kind == "write_stream_operation_start":
            self._start(request.plan.command.write_stream_operation_start, response)
        elif kind == "sql_command":
            self._sql(request.plan.command.sql_command.input, response.sql_command_result.relation)
        elif kind == "streaming_query_command":
            self._query_command(request.plan.command.streaming_query_command, response)
        elif kind == "streaming_query_manager_command":
            self._manager_command(request.plan.command.streaming_query_manager_command, response)
        elif kind == "create_dataframe_view":
            view = request.plan.command.create_dataframe_view
            if view.is_global:
                raise PlanError("createGlobalTempView", "programs share no views; use createOrReplaceTempView")
            self._add_view(view.name, view.input)
        elif kind == "register_function":
            function = request.plan.command.register_function
            self._capture.registered[function.function_name] = self._capture.prepared(function)
        elif kind is None:
            self._collect(request.plan.root, response)
        elif kind == "write_operation" and not self._capture.queries:
            self._write(request.plan.command.write_operation)
        elif kind != "ml_command":
            raise PlanError("pipeline", f"{kind} {_NEEDS_SPARK}")
        last = self._proto.ExecutePlanResponse(session_id=request.session_id, operation_id=request.operation_id)
        last.result_complete.SetInParent()
        return iter([response, last])

    def _collect(self, relation: Any, response: Any) -> None:
        """Answers an action on a frame, such as ``collect`` or ``show``, with the rows that Spark has now.

        Raises ScriptEndedError when queries have been started: what an action reads then may depend on their rows.
        """
        if self._may_read_stream(relation):
            raise PlanError("query", STREAM_ACTION)
        if self._capture.queries:
            for position in self._capture.clock.end():
                self._capture.queries[position].start.available_now = True
            raise ScriptEndedError("reads rows behind the start of its queries")
        collected: bool | Shown = True
        if relation.WhichOneof("rel_type") == "show_string":
            show = relation.show_string
            collected, relation = Shown(show.num_rows, show.truncate, show.vertical), show.input
        request = msgspec.structs.replace(self._capture.request_of(relation), collected=collected)
        analysis = self._capture.analysis_of(request)
        assert analysis.rows is not msgspec.UNSET
        if collected is True:
            response.schema.CopyFrom(_proto_type(struct_type(analysis).jsonValue()))
        with pa.ipc.open_stream(analysis.rows) as reader:
            response.arrow_batch.row_count = sum(batch.num_rows for batch in reader)
        response.arrow_batch.data = analysis.rows

    def _write(self, given: Any) -> None:
        """Lets Spark write the rows of a frame without a stream, before the program starts its queries."""
        if self._may_read_stream(given.input):
            raise PlanError("df.write", "a stream is written with writeStream, as in Spark")
        paths = [given.path] if given.path else [given.options[key] for key in given.options if key.lower() == "path"]
        others = given.sort_column_names or given.clustering_columns or given.HasField("bucket_by")
        inserts = given.HasField("table") and given.table.save_method != _SAVE_AS_TABLE
        table = given.table.table_name
        format_ = given.source.lower() or "parquet"
        if inserts or others or not (paths or table) or format_ not in _WRITTEN_FORMATS:
            raise PlanError(
                "df.write",
                f"a program writes {', '.join(sorted(_WRITTEN_FORMATS))} with save or saveAsTable before it starts its "
                "queries, without buckets and clusters; write other formats before, or in foreachBatch",
            )
        mode = given.DESCRIPTOR.enum_types_by_name["SaveMode"].values_by_number[given.mode].name
        options = {key: value for key, value in given.options.items() if key.lower() != "path"}
        columns = tuple(given.partitioning_columns)
        files = Files(format_, "".join(paths[:1]), _MODES.get(mode, "error"), options, columns, table)
        self._capture.analysis_of(msgspec.structs.replace(self._capture.request_of(given.input), collected=files))
        self._capture.changes += 1

    def _sql(self, given: Any, result: Any) -> None:
        """Sets the result of ``spark.sql``: the relation itself, or no rows for a statement that creates something."""
        relation = given.with_relations.root if given.WhichOneof("rel_type") == "with_relations" else given
        if not STATEMENT.match(relation.sql.query):
            result.CopyFrom(given)
            return
        result.local_relation.SetInParent()
        if setting := SETTING.fullmatch(relation.sql.query):
            self.set(setting[1], setting[2].strip())
            return
        if self._capture.queries and _CHANGES_TABLES.match(relation.sql.query):
            raise PlanError(
                "spark.sql",
                "a program changes tables before it starts its queries, not behind their start; a script that does "
                "runs by `ckpt run --client`",
            )
        configuration = dict(self._capture.configuration)
        analysis = self._capture.analysis_of(AnalysisRequest(statement=relation.sql.query, configuration=configuration))
        view = analysis.view
        if analysis.ran is True:
            self._capture.changes += 1
            return
        if view is msgspec.UNSET:
            self._capture.declarations.append(relation.sql.query)
            return
        exists = view.name.lower() in {name.lower() for name in self._capture.views}
        if exists and view.keeps:
            return
        if exists and not view.replaces:
            raise PlanError("spark.sql", f"the temporary view {view.name!r} exists; use CREATE OR REPLACE")
        relation.sql.query = view.query
        named = type(given)()
        if view.columns:
            named.to_df.input.CopyFrom(given)
            named.to_df.column_names.extend(view.columns)
        else:
            named.CopyFrom(given)
        self._capture.views.pop(view.name, None)  # it may read views that are newer than the one before it
        self._add_view(view.name, named)

    def _add_view(self, name: str, relation: Any) -> None:
        """Keeps a view for requests to Spark, and, unless it may read a stream, for functions of ``foreachBatch``."""
        static = not self._may_read_stream(relation)
        self._capture.views[name] = self._capture.request_of(relation).relation
        self._capture.static_views.pop(name, None)
        if static:
            self._capture.static_views[name] = relation.SerializeToString()

    def _may_read_stream(self, relation: Any) -> bool:
        return reads_stream(relation, self._capture.views.keys() - self._capture.static_views.keys())

    def _query_command(self, command: Any, response: Any) -> None:
        """Answers commands of scripts about queries that they started. Waiting for a query returns at once."""
        result = response.streaming_query_command_result
        result.query_id.CopyFrom(command.query_id)
        kind = command.WhichOneof("command")
        position = next(at for at in range(len(self._capture.queries)) if _id_of(at) == command.query_id.id)
        clock = self._capture.clock
        if kind == "await_termination":
            ended = clock.await_query(position, _seconds(command.await_termination))
            result.await_termination.terminated = ended
        elif kind == "stop":
            clock.stop(position)
            if clock.ends_with_data(position):
                self._capture.queries[position].start.available_now = True
        elif kind == "process_all_available":
            clock.processed.add(position)
        elif kind == "status":
            result.status.status_message = "planned"
            result.status.is_active = clock.is_active(position)
        elif kind in ("last_progress", "recent_progress"):
            result.recent_progress.SetInParent()
        elif kind == "exception":
            result.exception.SetInParent()
        elif kind == "explain":
            query = self._capture.queries[position]
            result.explain.result = self._capture.explanation(query, extended=command.explain.extended)
        else:
            raise PlanError("query", f"{kind} has no result while a pipeline is planned")

    def _manager_command(self, command: Any, response: Any) -> None:
        """Answers commands of scripts to ``spark.streams``."""
        result = response.streaming_query_manager_command_result
        result.SetInParent()  # PySpark requires a result, even one without a value
        kind = command.WhichOneof("command")
        clock = self._capture.clock
        queries = {_id_of(at): query.start.query_name for at, query in enumerate(self._capture.queries)}
        if kind == "active":
            result.active.SetInParent()
            for at, (id_, name) in enumerate(queries.items()):
                if clock.is_active(at):
                    result.active.active_queries.add(name=name).id.id = id_
        elif kind == "get_query":
            if command.get_query in queries:
                result.query.id.id = command.get_query
                result.query.name = queries[command.get_query]
        elif kind == "await_any_termination":
            result.await_any_termination.terminated = clock.await_any(_seconds(command.await_any_termination))
        elif kind == "reset_terminated":
            clock.terminated = False
        else:
            raise PlanError("spark.streams", f"{kind} is not supported; use the REST API and metrics of the job")

    def _start(self, given: Any, response: Any) -> None:
        start = type(given)()  # the program's writer may start other queries
        start.CopyFrom(given)
        clock = self._capture.clock
        check_name(start.query_name, [self._capture.queries[at].start.query_name for at in clock.active])
        if start.path:
            check_one_path("start", start.options)
        if start.table_name:
            self._to_table(start)
        location = location_of(start, self._settings)
        if location is not None and location_of(start, {}) is None:
            start.options[CHECKPOINT_LOCATION] = location
        analysis = self._capture.analysis_of(self._capture.request_of(start.input, with_rows=True), later=True)
        self._check_order(start, analysis)
        self._capture.queries.append(CapturedQuery(start, analysis))
        clock.started(ends=start.available_now or start.once)
        result = response.write_stream_operation_start_result
        result.query_id.id = _id_of(len(self._capture.queries) - 1)
        result.query_id.run_id = result.query_id.id
        result.name = start.query_name

    def _check_order(self, start: Any, analysis: Analysis) -> None:
        """Raises PlanError for a query that reads what an earlier one has written, which has ended for the program.

        Spark runs one behind the other. In a job both run at the same time, and static tables are read before.
        """
        capture = self._capture
        before = [query.start for at, query in enumerate(capture.queries) if not capture.clock.is_active(at)]
        written = {place for each in before for place in _places(each.options, each.path, each.table_name)}
        read: set[str] = set()
        for table in (part for name, part in parts(start) if name == "read" and not part.is_streaming):
            source = table.data_source
            read |= _places(source.options, *source.paths, table.named_table.unparsed_identifier)
        for node in analysis.nodes if start.available_now or start.once else ():
            if isinstance(node, Source) and node.plan_id in capture.sources:
                read |= _places(capture.sources[node.plan_id].options)
        if both := read & written:
            raise PlanError(
                "load",
                f"{min(both)!r} is written by an earlier query, which has ended for the program; but all queries are "
                "one job, which runs them at the same time: compute both results from one frame, or submit the second "
                "query as a program of its own",
            )

    def _to_table(self, start: Any) -> None:
        """Makes a request write to the directory of the table that ``toTable`` names."""
        if start.HasField("foreach_batch") or start.HasField("foreach_writer"):
            raise PlanError("toTable", "a query either writes a table or calls a function")
        paths = [start.options.pop(key) for key in list(start.options) if key.lower() == "path"]
        columns = tuple(start.partitioning_column_names)
        table = TableRequest(start.table_name, start.format or "parquet", "".join(paths[:1]), columns)
        request = msgspec.structs.replace(self._capture.request_of(start.input), table=table)
        answer = self._capture.analysis_of(request).table
        assert answer is not msgspec.UNSET
        start.format, start.path = answer.format, answer.location


def check_name(name: str, active: Collection[str]) -> None:
    """Raises Spark's error for the start of a query while another one of its name is active."""
    if name and name in active:
        from pyspark.errors.exceptions.connect import IllegalArgumentException

        raise IllegalArgumentException(
            f"Cannot start query with name {name} as a query with that name is already active in this SparkSession"
        )


def _seconds(wait: Any) -> float | None:
    """Returns the limit of a wait for queries; None without one."""
    return wait.timeout_ms / 1000 if wait.HasField("timeout_ms") else None


def _shows_columns(explain: Any) -> bool:
    """Returns whether a mode of ``explain`` shows columns. Raises PlanError for one about Spark's own execution."""
    mode = explain.DESCRIPTOR.enum_types_by_name["ExplainMode"].values_by_number[explain.explain_mode].name
    name = mode.removeprefix("EXPLAIN_MODE_").lower()
    if name in ("codegen", "cost"):
        raise PlanError("explain", f"mode {name!r} describes how Spark runs a plan; use simple, extended or formatted")
    return name in ("extended", "formatted")


def parts(message: Any) -> Iterator[tuple[str, Any]]:
    """Yields the names of all fields that are set, with each message in them, at any depth."""
    todo = [message]
    while todo:
        for descriptor, value in todo.pop().ListFields():
            if descriptor.message_type is None:
                continue
            is_map = descriptor.message_type.GetOptions().map_entry
            several = value.values() if is_map else value if descriptor.is_repeated else (value,)
            for element in several:
                if hasattr(element, "ListFields"):
                    yield descriptor.name, element
                    todo.append(element)


def reads_stream(message: Any, views: Collection[str]) -> bool:
    """Returns whether a plan reads a stream, through a reader or through one of the given views of streams."""
    names = "|".join(re.escape(view) for view in views)
    pattern = re.compile(rf"(?<![\w`]){'`?'}(?:{names}){'`?'}(?![\w`])", re.IGNORECASE) if views else None
    for name, part in parts(message):
        if name == "read":
            table = part.named_table.unparsed_identifier.strip("`")
            if part.is_streaming or table.lower() in {view.lower() for view in views}:
                return True
        elif name in ("sql", "expression_string"):
            text = part.query if name == "sql" else part.expression
            if pattern is not None and pattern.search(text):
                return True
    return False


def _places(options: Mapping[str, str], *names: str) -> set[str]:
    """The directories, tables and topics that a reader or writer names."""
    given = {key.lower(): value for key, value in options.items()}
    texts = (*names, *(given.get(key, "") for key in ("path", "topic")), *given.get("subscribe", "").split(","))
    return {text.strip().removeprefix("file://").removeprefix("file:").rstrip("/") for text in texts} - {""}


def _id_of(position: int) -> str:
    """Returns the id of a program's query."""
    return str(uuid.UUID(int=position + 1))


def _proto_type(type_: SparkType) -> Any:
    """Returns a type as PySpark's client gets it."""
    from pyspark.sql.connect.types import pyspark_types_to_proto_types
    from pyspark.sql.types import _parse_datatype_json_value

    return pyspark_types_to_proto_types(_parse_datatype_json_value(type_))
