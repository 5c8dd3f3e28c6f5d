"""What a PySpark program that runs without Spark has built: its queries, sources, views, functions and options.

Requests that a program makes before it starts its queries (a frame's schema, the types of a text) are answered from the
given analyses. A missing answer ends the program with :class:`AnalysisNeeded`; the caller then gets the answer from
Spark, and runs the program again. A worker has all answers of the planning process, and needs no Spark.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import msgspec

from ckpt_runtime.frontend import avro_functions, protobuf_functions
from ckpt_runtime.frontend.python_functions import CapturedFunctions
from ckpt_runtime.frontend.scripts import ScriptClock
from ckpt_runtime.frontend.typed_plan import (
    EMPTY_BATCHES,
    MOST_QUESTIONS,
    PLACEHOLDER_FILES,
    WATERMARK_POLICY,
    Analysis,
    AnalysisNeeded,
    AnalysisRequest,
    TableRequest,
)
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.source_formats import FILE_METADATA, is_local_path, is_pattern

MOST_LOCAL_BYTES = 4 << 20
"""Maximum size of the rows that a program gives to one ``createDataFrame``: they are part of the request to Spark."""
_MESSAGE_FUNCTIONS = {
    **dict.fromkeys(avro_functions.NAMES, avro_functions.function_of),
    **dict.fromkeys(protobuf_functions.NAMES, protobuf_functions.function_of),
}
_RANDOM = {"rand": 0, "random": 0, "randn": 0, "uuid": 0, "randstr": 1, "shuffle": 1, "uniform": 2}
"""Functions by the number of arguments before their seed, which has no effect on a stream."""
_FILE_NAME = "input_file_name"
"""The function whose result the engine finds in the hidden column of files."""
_ANALYSES = msgspec.json.Decoder(Analysis)
"""Made once, where templates import this module: to make one for these types takes longer than to plan a step."""
_MAY_BE_STATIC = frozenset({"read", "local_relation", "range", "sql"})
TABLE_SOURCES = ("csv", "json", "orc", "parquet", "text")
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
    are those that expressions and ``mapInArrow`` call, ``conversions`` the options by which PySpark converts values for
    them, ``event_time`` those that decide when event time advances. ``directory`` holds the program's files, and in a
    worker those of its static tables; ``tables`` are the digests of the tables that queries read. ``static_views`` are
    the relations of views that read no stream. ``clock`` is the program's, which passes while it waits for them.
    ``infers_schemas``: streams of files without a schema have the columns of the files that are there. ``explain``
    returns the text of ``explain()`` for a frame or a query (with columns if its last argument is true), and
    ``explained`` has the texts that the program requested. ``remembered`` are answers to an earlier run of the program,
    not all of which it has to use; it uses all ``analyses`` before it makes other requests. ``changes`` counts
    the files and tables that the program has let Spark change. ``listens``: the program may add listeners, whose events
    another run of it gets.
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
    static_views: dict[str, bytes] = field(default_factory=dict)
    declarations: list[str] = field(default_factory=list)
    registered: dict[str, bytes] = field(default_factory=dict)
    called: CapturedFunctions = field(default_factory=CapturedFunctions)
    conversions: dict[str, str] = field(default_factory=dict)
    event_time: dict[str, str] = field(default_factory=dict)
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
    changes: int = 0
    listens: bool = False
    _unanswered: list[str] = field(default_factory=list)
    _may_be_static: bool = False
    _reads_metadata: bool = False

    @property
    def has_empty_batches(self) -> bool:
        """Whether batches of no data follow, as in Spark by default."""
        return self.event_time.get(EMPTY_BATCHES, "true").lower() != "false"

    @property
    def has_greatest_watermark(self) -> bool:
        """Whether event time is the greatest of several streams' watermarks, and not the least one."""
        return self.event_time.get(WATERMARK_POLICY, "min").lower() == "max"

    def analysis_of(self, request: AnalysisRequest, *, later: bool = False) -> Analysis:
        """Returns Spark's answer. Raises AnalysisNeeded if it is missing, and PlanError if it is an error.

        With ``later`` a missing answer is returned empty, and :meth:`require_answers` requests it together with others.
        """
        if self.changes:
            request = msgspec.structs.replace(request, changes=self.changes)
        question = msgspec.json.encode(request)
        digest = sha256(question).hexdigest()
        text = self.analyses.get(digest, self.remembered.get(digest))
        if text is None and not self.analyses.keys() <= self.used.keys():
            raise PlanError(
                "pipeline", "it builds another plan each time it runs; a plan must not depend on time or random numbers"
            )
        if text is None:
            self._unanswered.append(question.decode())
            if not later or len(self._unanswered) == MOST_QUESTIONS:
                self.require_answers()
            return Analysis()
        self.used[digest] = text
        analysis = _ANALYSES.decode(text)
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
        elif name == "Expression" and message.unresolved_function.function_name.lower() in _RANDOM:
            call = message.unresolved_function
            del call.arguments[_RANDOM[call.function_name.lower()] :]  # a seed, which PySpark chooses at random
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
                check_one_path("load", source.options)
                source.options["path"] = ",".join(given.paths)
            declared = bool(source.schema) or source.format.lower() == "text"
            if source.format.lower() in TABLE_SOURCES and (
                _has_columns(source.options) if declared else self.infers_schemas
            ):
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
        if self._reads_metadata and source.format.lower() in TABLE_SOURCES:
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
        if table.format not in TABLE_SOURCES:
            raise PlanError(
                "readStream.table",
                f"{table.name} has the format {table.format!r}; streams read tables of {', '.join(TABLE_SOURCES)}",
            )
        return CapturedSource(table.format, {**table.options, **options, "path": table.location}, table.schema)

    def _inferred(self, stream: Any) -> str:
        """Returns the columns that Spark finds in the files of a stream that are there now, as Spark's JSON.

        If columns are declared, these are they, followed by those of directories, with their types unless declared.
        """
        from pyspark.sql.connect.proto import Relation

        table = Relation(read=stream)
        table.read.is_streaming = False
        request = AnalysisRequest(table.SerializeToString(deterministic=True), configuration=dict(self.configuration))
        return str(struct_type(self.analysis_of(request)).json())

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


def path_option(options: Mapping[str, str], name: str = "path") -> str:
    """Returns the path that an option of a reader or writer names, an empty text without one."""
    return next((value for key, value in options.items() if key.lower() == name), "")


def _has_columns(options: Mapping[str, str]) -> bool:
    """Whether directories below a local path have names of columns: Spark adds these to the declared ones."""
    path = path_option(options, "basepath") or path_option(options)
    if not path or not is_local_path(path) or is_pattern(path):
        return False
    try:
        with os.scandir(path.removeprefix("file:")) as entries:
            return any("=" in entry.name[1:] and entry.is_dir() for entry in entries)
    except OSError:
        return False


def check_one_path(method: str, options: Mapping[str, str]) -> None:
    """Raises PlanError for the option ``path`` of a reader or writer whose method has a path, too, as Spark does."""
    if any(key.lower() == "path" for key in options):
        raise PlanError(
            method,
            f"There is a 'path' option set and {method}() is called with a path parameter. Either remove the path "
            f"option, or call {method}() without the parameter.",
        )


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


def _with_stable_names(message: bytes) -> bytes:
    """Returns a message in which the random names that PySpark gives to frames in ``spark.sql`` are numbered."""
    names = dict.fromkeys(re.findall(rb"_pyspark_connect_temp_view_[0-9a-f]{32}", message))
    for number, name in enumerate(names):
        message = message.replace(name, name[:-32] + b"%032d" % number)
    return message


def struct_type(analysis: Analysis) -> Any:
    """Returns the columns as PySpark's ``StructType``."""
    from pyspark.sql.types import StructType

    fields = [
        {"name": column.name, "type": column.type, "nullable": column.nullable, "metadata": {}}
        for column in analysis.columns
    ]
    return StructType.fromJson({"type": "struct", "fields": fields})
