"""Runs a PySpark program without Spark: PySpark's own classes build its plan, and their requests to Spark are captured.

PySpark's Connect client sends requests through a gRPC channel; here that channel is an object of this process. Requests
that a program makes before it starts its queries (a frame's schema, the types of a text) are answered from the given
analyses. A missing answer ends the program with :class:`AnalysisNeeded`; the caller then gets the answer from Spark,
and runs the program again. A worker has all answers of the planning process, and needs no Spark.
"""

from __future__ import annotations

import os
import re
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, SupportsIndex

import msgspec

from ckpt_runtime.expressions.types import SparkType
from ckpt_runtime.frontend import avro_functions, protobuf_functions
from ckpt_runtime.frontend.python_functions import CapturedFunctions
from ckpt_runtime.frontend.scripts import ScriptClock
from ckpt_runtime.frontend.typed_plan import (
    CONFIGURED,
    MOST_QUESTIONS,
    PLACEHOLDER_FILES,
    Analysis,
    AnalysisNeeded,
    AnalysisRequest,
    Source,
    TableRequest,
)
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.source_formats import FILE_METADATA
from ckpt_runtime.graph.specs import ROWS_OPTION

REMOTE_MODE = {"SPARK_CONNECT_MODE_ENABLED": "1", "SPARK_REMOTE": "sc://in-process"}
"""PySpark's variables for a remote Spark; they make ``builder.getOrCreate()`` return the captured session."""
_CHANGE_RESULTS = (
    "spark.sql.legacy.",
    "spark.sql.mapKeyDedupPolicy",
    "spark.sql.timestampType",
    "spark.sql.decimalOperations.",
    "spark.sql.chunkBase64String.",
)
"""Spark options that change the results of expressions. Others control how Spark runs, and have no effect here."""
_ONLY_VALUES = {
    "spark.sql.streaming.multipleWatermarkPolicy": "min",
    "spark.sql.streaming.unsupportedOperationCheck": "true",
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
}
"""Spark options with which a program would mean something else, by the only value that the engine has: the default."""
_STATEMENT = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/)*(?:CREATE|DECLARE|SET|RESET|DROP|USE|CACHE|UNCACHE|INSERT|MERGE|UPDATE|DELETE|ALTER)\s",
    re.IGNORECASE | re.DOTALL,
)
"""SQL that does something, and gives no rows of a stream."""
_SETTING = re.compile(r"\s*SET\s+([\w.:]+)\s*=([^;]*);*\s*", re.IGNORECASE)
"""The statement that sets an option, in the form that Spark reads."""
_NEEDS_SPARK = (
    "needs a running Spark, and a program is planned without one: remove it, call it in foreachBatch, or start the "
    "queries from a client of Spark Connect (the session's option connect.enabled), where the session's Spark runs it"
)
MOST_LOCAL_BYTES = 4 << 20
"""Maximum size of the rows that a program gives to one ``createDataFrame``: they are part of the request to Spark."""
_MESSAGE_FUNCTIONS = {
    **dict.fromkeys(avro_functions.NAMES, avro_functions.function_of),
    **dict.fromkeys(protobuf_functions.NAMES, protobuf_functions.function_of),
}
_FILE_NAME = "input_file_name"
"""The function whose result the engine finds in the hidden column of files."""
_MAY_BE_STATIC = frozenset({"read", "local_relation", "range", "sql"})
_TABLE_SOURCES = ("csv", "json", "orc", "parquet", "text")
"""Formats of tables in Spark's catalog that a stream can read."""


@dataclass(slots=True)
class CapturedSource:
    """A stream that the program reads."""

    format: str
    options: dict[str, str]
    schema: str


@dataclass(slots=True)
class CapturedQuery:
    """A query that the program started: Spark's own request, and the analysis of its plan."""

    start: Any
    analysis: Analysis


@dataclass(slots=True)
class Capture:
    """The result of running a program. ``schema_of`` returns a source's columns: names, and Spark's names of types.

    ``configure`` sets an option of the job, and ``option`` returns one.

    ``functions`` are those given to ``foreach`` and ``foreachBatch``; a request names one by its position; ``called``
    are those that expressions and ``mapInArrow`` call, ``settings`` the other options of Spark that the program
    has set. ``directory`` holds the program's files, and in a worker those of its static tables; ``tables`` are the
    digests of the tables that queries read. ``clock`` is the program's, which passes while it waits for them.
    ``infers_schemas``: streams of files without a schema have the columns of the files that are
    there. ``explain`` returns the text of ``explain()`` for a frame or a query (with columns if its
    last argument is true), and ``explained`` has the texts that the program requested. ``remembered`` are answers to an
    earlier run of the program, not all of which it has to use; it uses all ``analyses`` before it makes other requests.
    """

    analyses: Mapping[str, str]
    schema_of: Callable[[CapturedSource], list[tuple[str, str]]]
    configure: Callable[[str, str], None]
    queries: list[CapturedQuery] = field(default_factory=list)
    sources: dict[int, CapturedSource] = field(default_factory=dict)
    hints: dict[int, dict[str, str]] = field(default_factory=dict)
    used: dict[str, str] = field(default_factory=dict)
    configuration: dict[str, str] = field(default_factory=dict)
    views: dict[str, bytes] = field(default_factory=dict)
    declarations: list[str] = field(default_factory=list)
    registered: dict[str, bytes] = field(default_factory=dict)
    called: CapturedFunctions = field(default_factory=CapturedFunctions)
    settings: dict[str, str] = field(default_factory=dict)
    option: Callable[[str], str | None] = lambda key: None  # noqa: ARG005
    functions: list[Any] = field(default_factory=list)
    directory: str = ""
    tables: set[str] = field(default_factory=set)
    session: Any = None
    clock: ScriptClock = field(default_factory=ScriptClock)
    infers_schemas: bool = False
    explain: Callable[[Capture, Analysis | CapturedQuery, bool], str] | None = None
    explained: list[str] = field(default_factory=list)
    remembered: Mapping[str, str] = field(default_factory=dict)
    _unanswered: list[str] = field(default_factory=list)
    _may_be_static: bool = False
    _reads_metadata: bool = False

    def analysis_of(self, request: AnalysisRequest, *, later: bool = False) -> Analysis:
        """Returns Spark's answer. Raises AnalysisNeeded if it is missing, and PlanError if it is an error.

        With ``later`` a missing answer is returned empty, and :meth:`require_answers` requests it together with others.
        """
        question = msgspec.json.encode(request)
        digest = sha256(question).hexdigest()
        text = self.analyses.get(digest, self.remembered.get(digest))
        if text is None and not self.analyses.keys() <= self.used.keys():
            raise PlanError(
                "pipeline",
                "it builds another plan each time it runs; a plan must not depend on time or random numbers (uuid, "
                "rand and shuffle use a random seed: set one)",
            )
        if text is None:
            self._unanswered.append(question.decode())
            if not later or len(self._unanswered) == MOST_QUESTIONS:
                self.require_answers()
            return Analysis()
        self.used[digest] = text
        analysis = msgspec.json.decode(text, type=Analysis)
        if analysis.error:
            raise PlanError("query", analysis.error)
        if analysis.unsupported:
            raise PlanError("query", analysis.unsupported)
        return analysis

    def require_answers(self) -> None:
        """Raises AnalysisNeeded if there are requests without an answer; it names all of them."""
        if self._unanswered:
            raise AnalysisNeeded(f"[{','.join(self._unanswered)}]")

    def forget_questions(self) -> None:
        """Removes the requests that had no answer. A session that keeps its capture calls this with the answers."""
        self._unanswered.clear()

    def explanation(self, of: Analysis | CapturedQuery, *, extended: bool) -> str:
        """Returns and keeps the text of ``explain()``. Raises AnalysisNeeded, and PlanError for an invalid plan."""
        self.require_answers()
        if self.explain is None:
            raise PlanError("explain", "a stream is explained only in a program that `ckpt run` or `ckpt plan` runs")
        text = self.explain(self, of, extended)
        self.explained.append(text)
        return text

    def request_of(self, relation: Any, *, with_rows: bool = False) -> AnalysisRequest:
        """Returns the request for the types of a relation, without sources, texts of hints and source positions.

        ``with_rows`` also requests the rows of its static tables.
        """
        prepared = self.prepared(relation)
        rows = True if with_rows and self._may_be_static else msgspec.UNSET
        parts = dict(self.views), dict(self.registered), dict(self.configuration)
        declarations = tuple(self.declarations) or msgspec.UNSET
        return AnalysisRequest(prepared, *parts, with_rows=rows, declarations=declarations)

    def prepared(self, message: Any) -> bytes:
        """Returns the bytes of a relation or function, without what differs between processes or needs a connector."""
        copy = type(message)()
        copy.CopyFrom(message)
        text = message.SerializeToString().lower()
        self._reads_metadata = FILE_METADATA.encode() in text or _FILE_NAME.encode() in text
        self._prepare(copy)
        return _with_stable_names(copy.SerializeToString(deterministic=True))

    def _prepare(self, message: Any) -> None:
        """Removes from a message, in place, what differs between processes or needs a connector."""
        name = message.DESCRIPTOR.name
        if name == "Relation":
            kind = message.WhichOneof("rel_type")
            if kind == "read" and message.read.is_streaming:
                self._replace_source(message)
                return
            if kind in _MAY_BE_STATIC:
                self._note_static(message)
            if kind == "hint" and message.hint.name.lower() in ("uid", "parallelism"):
                self._take_hint(message)
                return
        elif name == "Expression" and (call := _message_call(message)) is not None:
            self.called.replace_call(message, _MESSAGE_FUNCTIONS[call.function_name.lower()](call))
        elif name == "Expression" and message.unresolved_function.function_name.lower() == _FILE_NAME:
            _replace_file_name(message)
            return
        elif name == "Origin":
            place = message.python_origin.call_site.splitlines()[:1]
            message.python_origin.call_site = os.path.basename(place[0]) if place else ""
            return
        self._prepare_parts(message)

    def _prepare_parts(self, message: Any) -> None:
        for descriptor, value in message.ListFields():
            if descriptor.message_type is None:
                continue
            if descriptor.message_type.GetOptions().map_entry:
                if descriptor.message_type.fields_by_name["value"].message_type is not None:
                    for element in value.values():
                        self._prepare(element)
            elif descriptor.is_repeated:
                for element in value:
                    self._prepare(element)
            else:
                self._prepare(value)

    def _note_static(self, relation: Any) -> None:
        self._may_be_static = True
        size = len(relation.local_relation.data)
        if size > MOST_LOCAL_BYTES:
            raise PlanError(
                "createDataFrame",
                f"its rows have {size} bytes, but at most {MOST_LOCAL_BYTES} can be part of a program. Write them to "
                "a file, and read it with spark.read",
            )

    def _replace_source(self, relation: Any) -> None:
        read = relation.read
        if read.WhichOneof("read_type") == "named_table":
            name = read.named_table.unparsed_identifier
            if name.strip("`").lower() in {view.lower() for view in self.views}:
                read.is_streaming = False  # the view is one of the program's, and is a stream by itself
                return
            source = self._table_source(name, dict(read.named_table.options))
        else:
            given = read.data_source
            source = CapturedSource(given.format, dict(given.options), given.schema)
            if given.paths:
                source.options["path"] = ",".join(given.paths)
            if self.infers_schemas and not source.schema and source.format.lower() in _TABLE_SOURCES:
                source.schema = self._inferred(read)
        self.sources[relation.common.plan_id] = source
        columns = self.schema_of(source)
        plan_id = relation.common.plan_id
        relation.Clear()
        relation.common.plan_id = plan_id
        project = relation.project
        project.input.read.is_streaming = True
        placeholder = project.input.read.data_source
        placeholder.format = "rate"
        if self._reads_metadata and source.format.lower() in _TABLE_SOURCES:
            # Spark's own sources of files have the hidden column; that of Parquet has one more field.
            placeholder.format = "parquet" if source.format.lower() == "parquet" else "text"
            placeholder.schema = "value STRING"
            placeholder.paths.append(PLACEHOLDER_FILES)
        for name, kind in columns:
            alias = project.expressions.add().alias
            alias.name.append(name)
            alias.expr.cast.expr.literal.null.null.SetInParent()
            alias.expr.cast.type_str = kind

    def _table_source(self, name: str, options: dict[str, str]) -> CapturedSource:
        """Returns the stream of the files of a table of Spark's catalog."""
        table = self.analysis_of(AnalysisRequest(table=TableRequest(name))).table
        assert table is not msgspec.UNSET
        if table.format not in _TABLE_SOURCES:
            raise PlanError(
                "readStream.table",
                f"{table.name} has the format {table.format!r}; streams read tables of {', '.join(_TABLE_SOURCES)}",
            )
        return CapturedSource(table.format, {**table.options, **options, "path": table.location}, table.schema)

    def _inferred(self, stream: Any) -> str:
        """Returns the columns that Spark finds in the files of a stream that are there now, as Spark's JSON."""
        from pyspark.sql.connect.proto import Relation

        table = Relation(read=stream)
        table.read.is_streaming = False
        return str(_struct_type(self.analysis_of(AnalysisRequest(table.SerializeToString(deterministic=True)))).json())

    def _take_hint(self, relation: Any) -> None:
        """Keeps a hint of the engine for the relation below it, which replaces it: Spark would drop it with a
        warning."""
        hint = relation.hint
        text = ""
        for parameter in hint.parameters:
            literal = parameter.literal
            text = str(getattr(literal, literal.WhichOneof("literal_type")))
        name = hint.name.lower()
        below = type(relation)()
        below.CopyFrom(hint.input)
        relation.CopyFrom(below)
        self._prepare(relation)
        self.hints.setdefault(relation.common.plan_id, {})[name] = text


def _message_call(expression: Any) -> Any:
    """The call of a function of messages that an expression is, also by ``call_function``; None for other ones."""
    kind = expression.WhichOneof("expr_type")
    if kind not in ("unresolved_function", "call_function"):
        return None
    call = getattr(expression, kind)
    return call if call.function_name.lower() in _MESSAGE_FUNCTIONS else None


def _replace_file_name(expression: Any) -> None:
    """Replaces the function of a file's name, which Spark writes with the empty authority of a local file."""
    expression.alias.name.append(f"{_FILE_NAME}()")
    call = expression.alias.expr.unresolved_function
    call.function_name = "regexp_replace"
    call.arguments.add().unresolved_attribute.unparsed_identifier = f"{FILE_METADATA}.file_path"
    for text in ("^file:/", "file:///"):
        call.arguments.add().literal.string = text


class _Call:
    """A method of the gRPC service."""

    def __init__(self, name: str, answer: Callable[[Any], Any] | None, live: Callable[[], Any]) -> None:
        self._name = name
        self._answer = answer
        self._live = live

    def __call__(self, request: Any, **options: Any) -> Any:
        live = self._live()
        if live is not None:
            return live(request, **options)
        if self._answer is None:
            raise PlanError("pipeline", f"{self._name} {_NEEDS_SPARK}")
        return self._answer(request)


def _channel(service: Mapping[str, Callable[[Any], Any]]) -> Any:
    """Returns a gRPC channel that calls functions of this process, by the names of the service's methods."""
    import grpc

    class Channel(grpc.Channel):
        live: Any = None
        """The connection that ``live_session`` sets, which takes all calls from then on."""

        def _method(self, kind: str, path: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> _Call:
            name = path.rsplit("/", 1)[-1]

            def live() -> Any:
                return None if self.live is None else self.live.method(kind, path, arguments, named)

            return _Call(name, service.get(name), live)

        def unary_unary(self, path: str, *arguments: Any, **named: Any) -> Any:
            return self._method("unary_unary", path, arguments, named)

        def unary_stream(self, path: str, *arguments: Any, **named: Any) -> Any:
            return self._method("unary_stream", path, arguments, named)

        def stream_unary(self, path: str, *arguments: Any, **named: Any) -> Any:
            return self._method("stream_unary", path, arguments, named)

        def stream_stream(self, path: str, *arguments: Any, **named: Any) -> Any:
            return self._method("stream_stream", path, arguments, named)

        def subscribe(self, callback: Any, try_to_connect: bool = False) -> None:
            """Does nothing: there is no connection."""

        def unsubscribe(self, callback: Any) -> None:
            """Does nothing: there is no connection."""

        def close(self) -> None:
            """Does nothing: there is no connection."""

    return Channel()


class Service:
    """Spark Connect's service over a capture."""

    def __init__(self, capture: Capture) -> None:
        from pyspark.sql.connect import proto

        self._capture = capture
        self._proto = proto
        self.methods: dict[str, Callable[[Any], Any]] = {
            "Config": self._config,
            "AnalyzePlan": self._analyze,
            "ExecutePlan": self._execute,
            "ReleaseExecute": lambda request: proto.ReleaseExecuteResponse(session_id=request.session_id),
            "ReleaseSession": lambda request: proto.ReleaseSessionResponse(session_id=request.session_id),
        }

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
                known = {**_DEFAULTS, **self._capture.settings, **self._capture.configuration}
                value = known.get(key)
                if value is None and not key.startswith("spark."):
                    value = self._capture.option(key)  # one of the job's, as it was submitted or set
                response.pairs.add(key=key, value=default if value is None else value)
        elif kind == "is_modifiable":
            for key in operation.is_modifiable.keys:
                response.pairs.add(key=key, value="true")
        return response

    def set(self, key: str, value: str) -> None:
        """Sets an option of the job, or one of Spark's. Raises PlanError for one of Spark's that changes results."""
        if not key.startswith("spark."):
            self._capture.configure(key, value)
        elif key.startswith(_CHANGE_RESULTS):
            raise PlanError(key, "expressions are always computed with the default of this option; do not set it")
        elif value.lower() != _ONLY_VALUES.get(key, value).lower():
            raise PlanError(key, f"{value!r} is not supported; programs run with {_ONLY_VALUES[key]!r} only")
        elif key in CONFIGURED:
            self._capture.configuration[key] = value
        elif key == ROWS_OPTION and not re.fullmatch(r"[+-]?\d+", value):
            raise PlanError(key, f"{value!r} is not an integer; without a limit it is 0 or less")
        else:
            self._capture.settings[key] = value
            if key == "spark.sql.streaming.schemaInference":
                self._capture.infers_schemas = value.lower() == "true"

    def _analyze(self, request: Any) -> Any:
        response = self._proto.AnalyzePlanResponse(session_id=request.session_id)
        kind = request.WhichOneof("analyze")
        if kind == "schema":
            analysis = self._capture.analysis_of(self._capture.request_of(request.schema.plan.root))
            response.schema.schema.CopyFrom(_proto_type(_struct_type(analysis).jsonValue()))
        elif kind == "tree_string":
            analysis = self._capture.analysis_of(self._capture.request_of(request.tree_string.plan.root))
            level = request.tree_string.level if request.tree_string.HasField("level") else None
            response.tree_string.tree_string = _struct_type(analysis).treeString(level or 2**31 - 1)
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
        elif kind in ("persist", "unpersist") and not _reads_stream(getattr(request, kind).relation):
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
            self._capture.views[view.name] = self._capture.request_of(view.input).relation
        elif kind == "register_function":
            function = request.plan.command.register_function
            self._capture.registered[function.function_name] = self._capture.prepared(function)
        elif kind != "ml_command":
            what = kind or "an action on a frame, such as show or collect,"
            raise PlanError("pipeline", f"{what} {_NEEDS_SPARK}")
        last = self._proto.ExecutePlanResponse(session_id=request.session_id, operation_id=request.operation_id)
        last.result_complete.SetInParent()
        return iter([response, last])

    def _sql(self, given: Any, result: Any) -> None:
        """Sets the result of ``spark.sql``: the relation itself, or no rows for a statement that creates something."""
        relation = given.with_relations.root if given.WhichOneof("rel_type") == "with_relations" else given
        if not _STATEMENT.match(relation.sql.query):
            result.CopyFrom(given)
            return
        result.local_relation.SetInParent()
        if setting := _SETTING.fullmatch(relation.sql.query):
            self.set(setting[1], setting[2].strip())
            return
        view = self._capture.analysis_of(AnalysisRequest(statement=relation.sql.query)).view
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
        self._capture.views[view.name] = self._capture.request_of(named).relation

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

    def _start(self, start: Any, response: Any) -> None:
        if start.table_name:
            start = self._to_table(start)
        analysis = self._capture.analysis_of(self._capture.request_of(start.input, with_rows=True), later=True)
        self._capture.queries.append(CapturedQuery(start, analysis))
        self._capture.clock.started(ends=start.available_now or start.once)
        result = response.write_stream_operation_start_result
        result.query_id.id = _id_of(len(self._capture.queries) - 1)
        result.query_id.run_id = result.query_id.id
        result.name = start.query_name

    def _to_table(self, given: Any) -> Any:
        """Returns a request that writes to the directory of the table that ``toTable`` names."""
        if given.HasField("foreach_batch") or given.HasField("foreach_writer"):
            raise PlanError("toTable", "a query either writes a table or calls a function")
        start = type(given)()
        start.CopyFrom(given)
        paths = [start.options.pop(key) for key in list(start.options) if key.lower() == "path"]
        columns = tuple(start.partitioning_column_names)
        table = TableRequest(start.table_name, start.format or "parquet", "".join(paths[:1]), columns)
        request = msgspec.structs.replace(self._capture.request_of(start.input), table=table)
        answer = self._capture.analysis_of(request).table
        assert answer is not msgspec.UNSET
        start.format, start.path = answer.format, answer.location
        return start


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


def _reads_stream(message: Any) -> bool:
    """Returns whether a part of a request reads a stream by its source, not by a view's name."""
    if message.DESCRIPTOR.name == "Read" and message.is_streaming:
        return True
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None or descriptor.message_type.GetOptions().map_entry:
            continue
        if any(map(_reads_stream, value if descriptor.is_repeated else (value,))):
            return True
    return False


def _with_stable_names(message: bytes) -> bytes:
    """Returns a message in which the random names that PySpark gives to frames in ``spark.sql`` are numbered."""
    names = dict.fromkeys(re.findall(rb"_pyspark_connect_temp_view_[0-9a-f]{32}", message))
    for number, name in enumerate(names):
        message = message.replace(name, name[:-32] + b"%032d" % number)
    return message


def _id_of(position: int) -> str:
    """Returns the id of a program's query."""
    return str(uuid.UUID(int=position + 1))


_DEFAULTS = {
    "spark.sql.timestampType": "TIMESTAMP_LTZ",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.shuffle.partitions": "200",
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


def _struct_type(analysis: Analysis) -> Any:
    """Returns the columns as PySpark's ``StructType``."""
    from pyspark.sql.types import StructType

    fields = [
        {"name": column.name, "type": column.type, "nullable": column.nullable, "metadata": {}}
        for column in analysis.columns
    ]
    return StructType.fromJson({"type": "struct", "fields": fields})


def _proto_type(type_: SparkType) -> Any:
    """Returns a type as PySpark's client gets it."""
    from pyspark.sql.connect.types import pyspark_types_to_proto_types
    from pyspark.sql.types import _parse_datatype_json_value

    return pyspark_types_to_proto_types(_parse_datatype_json_value(type_))


@contextmanager
def _kept_functions(functions: list[Any]) -> Iterator[None]:
    """Makes writers keep the function of ``foreach`` and ``foreachBatch``, and send its position, not a pickle."""
    from pyspark.sql.connect.streaming import readwriter

    writers: Any = readwriter.DataStreamWriter

    def keeping(field: str) -> Callable[[Any, Any], Any]:
        def keep(self: Any, function: Any) -> Any:
            getattr(self._write_proto, field).python_function.command = str(len(functions)).encode()
            functions.append(function)
            return self

        return keep

    before = writers.foreachBatch, writers.foreach
    writers.foreachBatch, writers.foreach = keeping("foreach_batch"), keeping("foreach_writer")
    try:
        yield
    finally:
        writers.foreachBatch, writers.foreach = before


@contextmanager
def _remote_mode(capture: Capture) -> Iterator[None]:
    """Sets PySpark's variables for a remote Spark. ``time.sleep`` returns at once after a query was started.

    PySpark refuses a builder with both a remote Spark and a master; here a program's master has no effect.
    """
    from pyspark.sql.session import SparkSession

    builders: Any = SparkSession.Builder
    checked, builders._validate_startup_urls = builders._validate_startup_urls, lambda self: None  # noqa: ARG005
    before = {name: os.environ.get(name) for name in (*REMOTE_MODE, "MASTER")}
    sleep, thread = time.sleep, threading.get_ident()

    def wait(seconds: float | SupportsIndex, /) -> None:
        """Does not wait for queries, which the program's job will run."""
        if not capture.queries or threading.get_ident() != thread:
            sleep(seconds)
        else:
            capture.clock.wait(float(seconds))

    time.sleep = wait
    os.environ.update(REMOTE_MODE)
    os.environ.pop("MASTER", None)  # spark-submit sets it, and PySpark takes either a master or a remote Spark
    try:
        yield
    finally:
        builders._validate_startup_urls = checked
        time.sleep = sleep
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def captured_session(capture: Capture, register: Callable[[type], None]) -> Iterator[Any]:
    """Yields a ``SparkSession`` whose programs are captured; in this context ``pyspark.sql.functions`` builds plans.

    ``register`` takes the classes that the program gives to ``spark.dataSource.register``.
    """
    with _remote_mode(capture):
        warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
        from pyspark.sql.connect.client.core import ChannelBuilder
        from pyspark.sql.connect.plan import LogicalPlan
        from pyspark.sql.connect.session import SparkSession
        from pyspark.sql.connect.streaming.query import StreamingQueryManager

        service = Service(capture)

        class Builder(ChannelBuilder):
            def toChannel(self) -> Any:  # noqa: N802 PySpark's name
                return _channel(service.methods)

            @property
            def host(self) -> str:
                return "in-process"

        # Ids of relations count from 0 for each program, because they are part of the requests to Spark.
        LogicalPlan._nextPlanId = 0

        class Streams(StreamingQueryManager):
            def addListener(self, listener: Any) -> None:  # noqa: N802 PySpark's name
                # Here, because PySpark's own method turns errors into warnings.
                raise PlanError(
                    "spark.streams.addListener",
                    "a program ends before its queries have events; use `ckpt events`, metrics and the REST API for "
                    "a job's progress and end",
                )

        class DataSources:
            def register(self, dataSource: type) -> None:  # noqa: N803 PySpark's name
                register(dataSource)

        class Context:
            """What a program without Spark's Java machine has of ``sparkContext``."""

            def setLogLevel(self, logLevel: str) -> None:  # noqa: N802, N803 PySpark's names
                """Does nothing: the program prints no messages of Spark, and the job logs as its session does."""

            def __getattr__(self, name: str) -> Any:
                raise PlanError(
                    f"sparkContext.{name}",
                    "a program is planned without Spark's Java machine, as with Spark Connect; use functions of the "
                    "SparkSession, such as spark.createDataFrame, spark.conf and spark.version",
                )

        class Session(SparkSession):
            @property
            def sparkContext(self) -> Any:  # noqa: N802 PySpark's name
                return Context()

            @property
            def dataSource(self) -> Any:  # noqa: N802 PySpark's name
                return DataSources()

            @property
            def streams(self) -> Any:
                return Streams(self)

            def stop(self) -> None:
                """Ends no job: queries continue, unless the program has waited for them."""
                capture.clock.stop_session()

        connection: Any = Builder()
        session = Session(connection)
        SparkSession._set_default_and_active_session(session)
        capture.session = session
        try:
            with _kept_functions(capture.functions), capture.called.named_in_plans():
                yield session
        finally:
            SparkSession._active_session.session = None
            SparkSession._default_session = None
