"""Asks Spark's analyzer for the types of a captured plan, in the JVM of the session's driver.

``SparkConnectPlanner`` converts the relation to a Catalyst plan, and the analyzer resolves it. A streaming source is
represented by typed nulls over Spark's ``rate``, so that no connector is needed. Parts of the plan without a stream are
static tables: Spark runs these, and nothing else.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from typing import Any

import msgspec

from ckpt_runtime.expressions.types import UnsupportedExpressionError
from ckpt_runtime.frontend.catalog_tables import NewTables, StaticTables, table_to_read, table_to_write
from ckpt_runtime.frontend.catalyst import companion, items, jvm_name, spark_type
from ckpt_runtime.frontend.moved_filters import with_equalities_of_joins, with_moved_filters
from ckpt_runtime.frontend.plan_reader import PlanReader
from ckpt_runtime.frontend.typed_plan import (
    CONFIGURED,
    MOST_QUESTIONS,
    PLACEHOLDER_FILES,
    Analysis,
    AnalysisRequest,
    CatalogTable,
    CreatedView,
    Files,
    TableRequest,
)
from ckpt_runtime.graph.schema import DocumentError


class Analyzer:
    """Answers analysis requests with one Spark session, which the first call of a process starts if there is none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._serial = 0

    def answer(
        self, questions: str, tables: StaticTables | None = None, known: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Returns the JSON texts of the answers to a JSON list of requests, by the requests' digests. Blocks.

        ``tables`` collects the static tables whose rows are requested, and tables that have to be created; tables of
        requests that ``known`` answers are not read again. Raises DocumentError for a text that is not a list of
        requests: a program could have written it.
        """
        try:
            texts = msgspec.json.decode(questions, type=list[msgspec.Raw])
            requests = [msgspec.json.decode(text, type=AnalysisRequest) for text in texts[: MOST_QUESTIONS + 1]]
        except msgspec.MsgspecError as error:
            raise DocumentError(f"the request to Spark is malformed: {error}") from error
        if len(requests) > MOST_QUESTIONS:
            raise DocumentError(f"more than {MOST_QUESTIONS} requests to Spark at once")
        answers = {}
        for text, request in zip(texts, requests, strict=True):
            digest = sha256(bytes(text)).hexdigest()
            given = (request.with_rows, request.table, request.collected, request.statement)
            lasting = any(part is not msgspec.UNSET for part in given)
            if known is not None and lasting and digest in known:
                answers[digest] = known[digest]
            else:
                answers[digest] = msgspec.json.encode(self.analyze(request, tables)).decode()
        return answers

    def analyze(self, request: AnalysisRequest, tables: StaticTables | None = None) -> Analysis:
        """Returns Spark's answer, which may be an author's error. Blocks; calls of several threads are serialized.

        Rows of static tables are read outside the lock, because Spark may have no free core to compute them.
        """
        known = tables or StaticTables()
        static: dict[int, Any] = {}
        with self._lock:
            self._serial += 1
            spark = spark_session()
            session = spark._jsparkSession.newSession()
            analysis = _refusing(lambda: _analyze(spark, session, request, self._serial, known, static))
        if analysis.ran is True:

            def execute() -> Analysis:
                known.check_writes(f"the statement {request.statement}")
                with known.limited(spark):
                    session.sql(request.statement)
                return analysis

            return _refusing(execute)
        collected = request.collected
        if collected is not msgspec.UNSET and analysis.nodes:
            form = None if isinstance(collected, bool) else collected
            if len(static) != 1 or len(analysis.nodes) != 1:
                return Analysis(unsupported="an action on a frame: only a frame that reads no stream has rows")
            [plan] = static.values()

            def collect() -> Analysis:
                if isinstance(form, Files):
                    known.write(spark, session, plan, form)
                    return analysis
                rows = known.collected(spark, session, plan, analysis.columns, form)
                return msgspec.structs.replace(analysis, rows=rows)

            return _refusing(collect)
        if request.with_rows is not True or not analysis.nodes:
            return analysis

        def read() -> Analysis:
            nodes = list(analysis.nodes)
            for at, plan in static.items():
                digest = known.read(spark, session, plan, nodes[at].columns)
                nodes[at] = msgspec.structs.replace(nodes[at], digest=digest)
            return msgspec.structs.replace(analysis, nodes=tuple(nodes))

        return _refusing(read)

    def create_tables(self, new: NewTables) -> str:
        """Creates tables in Spark's catalog. Blocks. Returns Spark's error, or an empty text."""
        with self._lock:
            session = spark_session()._jsparkSession.newSession()

            def create() -> Analysis:
                new.create(session)
                return Analysis()

            return _refusing(create).error


ANALYZER = Analyzer()
"""The analyzer of this process, which has one Spark session."""


def spark_session() -> Any:
    """Returns the driver's session. Outside of Spark it starts one, which runs nothing."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    if SparkContext._active_spark_context is None:
        builder = builder.master("local[1]").config("spark.ui.enabled", "false")
    return builder.getOrCreate()


_NO_METADATA = (
    "the column _metadata: as in Spark, only the frame that reads a stream of files has it, and frames that are made "
    "of it by select, filter and the like; select its fields there, before a view, an aggregation or a union"
)


def _refusing(answer: Callable[[], Analysis]) -> Analysis:
    """Returns the answer, or an answer that says why the query is refused."""
    from py4j.protocol import Py4JError, Py4JJavaError
    from pyspark.errors.exceptions.base import PySparkException

    try:
        return answer()
    except UnsupportedExpressionError as error:
        return Analysis(unsupported=str(error))
    except Py4JJavaError as error:
        message = str(error.java_exception.getMessage())
    except Py4JError as error:
        message = f"Spark's analyzer cannot be reached: {error}"
    except PySparkException as error:
        message = str(error.getMessage() or error)
    if message.startswith("[UNRESOLVED_COLUMN") and "name `_metadata`" in message:
        return Analysis(unsupported=_NO_METADATA)
    return Analysis(error=message)


def _analyze(
    spark: Any, session: Any, request: AnalysisRequest, serial: int, tables: StaticTables, static: dict[int, Any]
) -> Analysis:
    """Returns the typed plan. ``static`` gets the plans of its static tables by their positions."""
    sessions = type(spark)._get_j_spark_session_class(spark._jvm)
    try:
        if request.ddl:
            return Analysis(parsed=spark_type(spark._jvm.org.apache.spark.sql.types.DataType.fromDDL(request.ddl)))
        if refused := set(request.configuration) - CONFIGURED:
            raise UnsupportedExpressionError(
                f"the option {min(refused)}", "a program cannot set this option for the analyzer"
            )
        for key, value in request.configuration.items():
            session.conf().set(key, value)
        # Spark's parser takes its options from the session that is active in its thread.
        sessions.setActiveSession(session)
        planner = _Planner(spark._jvm, session, serial)
        if request.statement is not msgspec.UNSET:
            if _declares(session, request.statement):
                return Analysis()
            if _changes_tables(session, request.statement):
                return Analysis(ran=True)
            return Analysis(view=_created_view(session, request.statement))
        ansi = session.conf().get("spark.sql.ansi.enabled") == "true"
        for function in request.functions.values():
            planner.register_function(function)
        for text in request.declarations or ():
            if not _declares(session, text):
                raise UnsupportedExpressionError(f"the statement {text}", "it declares no variable and no function")
            session.sql(text)
        with tables.limited(spark):  # Spark may have to open files to find their columns
            texts = [request.relation, *(text.encode() for text in request.declarations or ())]
            for name, relation in views_read(texts, request.views).items():
                planner.register(name, relation, PlanReader(spark._jvm, ansi))
            if request.table is not msgspec.UNSET:
                return Analysis(table=planner.table(request.table, request.relation, tables.new))
            plan = planner.analyzed(request.relation)
        zone = str(session.conf().get("spark.sql.session.timeZone"))
        return PlanReader(spark._jvm, ansi, static, zone).read(plan)
    finally:
        sessions.setActiveSession(spark._jsparkSession)


def views_read(texts: Iterable[bytes], views: Mapping[str, bytes]) -> dict[str, bytes]:
    """Returns the views that texts of SQL or serialized relations may read, themselves or through other views.

    As in Spark, a view that is no longer valid, because a table that it reads was dropped, fails only what reads it.
    """
    found: dict[str, bytes] = {}
    while texts := [*texts]:
        text = b"\n".join(texts).lower()
        named = {name: view for name, view in views.items() if name not in found and _may_name(text, name)}
        found |= named
        texts = named.values()
    return {name: view for name, view in views.items() if name in found}


def _may_name(text: bytes, view: str) -> bool:
    """Whether a text in lower case, of SQL or of a relation, may contain a view's name. ``IDENTIFIER`` computes one."""
    plain = view.isascii() and "`" not in view
    return not plain or view.lower().encode() in text or b"identifier" in text


def _declares(session: Any, statement: str) -> bool:
    """Returns whether a statement is about variables or a temporary function of SQL, so that Spark runs no task."""
    plan = session.sessionState().sqlParser().parsePlan(statement)
    match jvm_name(plan):
        case "CreateVariable" | "DropVariable":
            return True
        case "SetVariable":
            source = plan.sourceQuery()
            of_constants = jvm_name(source) == "Project" and jvm_name(source.child()) == "OneRowRelation"
            return of_constants and bool(source.subqueriesAll().isEmpty())
        case "CreateSQLFunctionCommand":  # a function in Java names its class
            return bool(plan.isTemp())
    return False


_RUN_ONCE = frozenset({"CreateNamespace", "CreateTable", "CreateTableAsSelect", "DropTable", "InsertIntoStatement"})
"""Commands that Spark runs when a program is submitted."""


def _changes_tables(session: Any, statement: str) -> bool:
    """Returns whether a statement is one of them. Raises UnsupportedExpressionError for a format that is a class."""
    plan = session.sessionState().sqlParser().parsePlan(statement)
    name = jvm_name(plan)
    if name.startswith("CreateTable") and name in _RUN_ONCE and plan.tableSpec().provider().isDefined():
        _check_format(str(plan.tableSpec().provider().get()))
    return name in _RUN_ONCE


_INSTEAD = {
    "SetVariable": "set the variable to an expression that reads no table: SET VARIABLE name = value",
    "SetCommand": "use spark.conf.set",
    "SetCatalogAndNamespace": "name the database with the table, as in shop.orders",
    "CreateViewCommand": "programs share no views: create a temporary view that is not global",
}
"""What to do instead of a statement, by the name of its command."""


def _created_view(session: Any, statement: str) -> CreatedView:
    """Parses a statement that creates a temporary view, which does not run. Raises UnsupportedExpressionError."""
    plan = session.sessionState().sqlParser().parsePlan(statement)
    # The kinds of views are case objects in some versions of Spark only.
    kind = plan.viewType().getClass().getSimpleName() if jvm_name(plan) == "CreateViewCommand" else ""
    if kind != "LocalTempView$":
        name = jvm_name(plan)
        instead = "a program may create temporary views, variables and functions of SQL; run others in Spark"
        raise UnsupportedExpressionError(f"the statement {name}", _INSTEAD.get(name, instead))
    columns = tuple(str(column._1()) for column in items(plan.userSpecifiedColumns()))
    query = str(plan.originalText().get())
    return CreatedView(str(plan.name().table()), query, columns, bool(plan.replace()), bool(plan.allowExisting()))


_RELATIONS = frozenset(
    {
        *("project", "filter", "join", "set_op", "sort", "limit", "offset", "aggregate", "sql", "range", "unpivot"),
        *("subquery_alias", "repartition", "repartition_by_expression", "to_df", "to_schema", "hint", "deduplicate"),
        *("local_relation", "sample", "with_relations", "collect_metrics", "tail"),
        *("lateral_join", "unresolved_table_valued_function"),
        *(
            "map_partitions",
            "group_map",
            "apply_in_pandas_with_state",
            "drop",
            "with_columns",
            "with_columns_renamed",
            "with_watermark",
            "fill_na",
            "drop_na",
            "replace",
        ),
    }
)
"""Kinds of relations whose analysis runs no code, except that ``read`` determines the columns of what it reads."""
_EXPRESSIONS = frozenset(
    {
        *("literal", "unresolved_attribute", "unresolved_function", "expression_string", "unresolved_star", "alias"),
        *("cast", "unresolved_regex", "sort_order", "lambda_function", "unresolved_named_lambda_variable", "window"),
        *("unresolved_extract_value", "update_fields", "call_function", "named_argument_expression"),
        *("common_inline_user_defined_function", "subquery_expression", "direct_shuffle_partition_id"),
    }
)
"""The same for expressions. User functions are Python functions named by a number: Spark deserializes others."""
_KINDS = {"Relation": ("rel_type", _RELATIONS), "Expression": ("expr_type", _EXPRESSIONS)}
_RUN_CODE = ("reflect", "java_method", "try_reflect")
"""Functions that call Java methods. Spark's analyzer evaluates some constants, and no program may run in the driver."""
_NOT_LOADED = ("from_avro", "to_avro", "schema_of_avro", "from_protobuf", "to_protobuf")
"""Functions of SQL whose package is not loaded, which Spark would advise to do. They are unknown instead."""


def _checked(kind: str, given: bytes) -> bytes:
    """Returns a message of Spark Connect of that kind.

    Raises UnsupportedExpressionError for one that may make Spark read, connect or run code.
    """
    from google.protobuf.message import DecodeError
    from pyspark.sql.connect import proto

    try:
        todo: list[Any] = [getattr(proto, kind).FromString(given)]
    except DecodeError as error:
        raise UnsupportedExpressionError("the plan", f"it is not a {kind} of Spark Connect: {error}") from None
    while todo:
        message = todo.pop()
        name = message.DESCRIPTOR.name
        if name == "UDT":  # Spark loads its class by name
            raise UnsupportedExpressionError("a user-defined type", "the engine does not support its values")
        if name == "CommonInlineUserDefinedFunction" and not message.python_udf.command.isdigit():
            raise UnsupportedExpressionError(
                "common_inline_user_defined_function", "only a submitted program can define Python functions"
            )
        if name in _KINDS:
            field, allowed = _KINDS[name]
            kind = message.WhichOneof(field)
            source = message.read if kind == "read" else None
            readable = source is not None and (not source.is_streaming or _is_placeholder(source.data_source))
            if readable:
                _check_read(source)
            if kind == "local_relation":
                _check_schema(message.local_relation.schema)
            if kind not in allowed and not readable:
                why = "the engine does not compute it for streams: call it in foreachBatch, whose frames are Spark's"
                raise UnsupportedExpressionError(f"{name.lower()} {kind}", why)
        todo += _parts(message)
    return given


def _parts(message: Any) -> list[Any]:
    """Returns the messages in a message."""
    found: list[Any] = []
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None:
            is_map = descriptor.message_type.GetOptions().map_entry
            several = value.values() if is_map else value if descriptor.is_repeated else (value,)
            found += [element for element in several if hasattr(element, "ListFields")]
    return found


def _is_placeholder(stream: Any) -> bool:
    """Whether a stream is one of those that stand for the sources of a program, which read nothing."""
    files = stream.format in ("parquet", "text") and list(stream.paths) == [PLACEHOLDER_FILES] and not stream.options
    return stream.format == "rate" or files


def _check_read(read: Any) -> None:
    """Raises UnsupportedExpressionError for a source that is named by a class, which Spark would load."""
    _check_format(read.data_source.format)
    _check_schema(read.data_source.schema)


def _check_format(name: str) -> None:
    if "." in name or "$" in name:
        raise UnsupportedExpressionError(f"the format {name}", "name it by its short name, not by its class")


def _check_schema(text: str) -> None:
    """Raises UnsupportedExpressionError for a schema in JSON with a user-defined type, whose class Spark would load."""
    try:
        todo: list[Any] = [json.loads(text)]
    except ValueError:
        return  # DDL, which has no such types
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            if part.get("type") == "udt":
                raise UnsupportedExpressionError("a user-defined type", "the engine does not support its values")
            todo += part.values()
        elif isinstance(part, list):
            todo += part


class _Planner:
    """Relations become analyzed plans of one Spark session."""

    def __init__(self, jvm: Any, session: Any, serial: int) -> None:
        connect = jvm.org.apache.spark.sql.connect
        registry = session.sessionState().functionRegistry()
        option = jvm.scala.Option
        place = (option.apply("builtin"), option.apply("system"))
        identifier = jvm.org.apache.spark.sql.catalyst.FunctionIdentifier
        for name in (*_RUN_CODE, *_NOT_LOADED):
            registry.dropFunction(identifier(name, *place))
        session.conf().set("spark.sql.runSQLOnFiles", "false")
        # Otherwise Spark replaces ${env:NAME} in SQL texts by a variable of the driver's environment.
        session.conf().set("spark.sql.variable.substitute", "false")
        holder = connect.service.SessionHolder("engine", f"00000000-0000-0000-0000-{serial:012}", session)
        self._planner = connect.planner.SparkConnectPlanner(holder, jvm.scala.Option.empty())
        self._jvm = jvm
        self._session = session

    def analyzed(self, relation: bytes) -> Any:
        """Returns the plan of a query."""
        return self._in_steps(self._checked_plan(relation), moves=True)

    def _checked_plan(self, relation: bytes) -> Any:
        from pyspark.sql.connect.proto import Relation

        message = Relation.FromString(_checked("Relation", relation))
        self._keep_marks(message)
        plan = self._resolved(message)
        self._session.sessionState().analyzer().checkAnalysis(plan)
        return plan

    def _resolved(self, relation: Any) -> Any:
        parsed = self._jvm.org.apache.spark.connect.proto.Relation.parseFrom(relation.SerializeToString())
        return self._session.sessionState().analyzer().execute(self._planner.transformRelation(parsed))

    def _keep_marks(self, message: Any) -> None:
        """Makes ``withColumn`` keep the marks of event time and windows, in place, as it does without Spark Connect.

        Spark Connect's planner replaces the metadata of each such column by those that the program has set, or by none.
        """
        for part in _parts(message):
            self._keep_marks(part)
        if message.DESCRIPTOR.name != "WithColumns":
            return
        marked = [
            alias for alias in message.aliases if not alias.HasField("metadata") and _may_be_marked(alias.expr, message)
        ]
        if marked:
            from pyspark.sql.connect.proto import Relation

            selected = Relation()
            selected.project.input.CopyFrom(message.input)
            for alias in marked:
                selected.project.expressions.add().alias.CopyFrom(alias)
            for alias, column in zip(marked, items(self._resolved(selected).output()), strict=True):
                alias.metadata = str(column.metadata().json())

    def _in_steps(self, plan: Any, *, moves: bool) -> Any:
        """Returns a plan with ``WITH`` inlined and subqueries that depend on rows as joins, by Spark's rules.

        Joins of streams get equalities from filters, ``SELECT DISTINCT`` becomes an aggregation, and the current user,
        catalog and database become constants, as in Spark.
        With ``moves``, filters are moved in front of watermarks, as Spark does before it makes joins of subqueries.
        """
        catalyst = self._jvm.org.apache.spark.sql.catalyst
        patterns = companion(catalyst.trees, "TreePattern")
        if plan.containsPattern(patterns.CTE()):
            plan = catalyst.optimizer.InlineCTE(True, False, False).apply(plan)
        in_predicate = plan.containsPattern(patterns.IN_SUBQUERY()) or plan.containsPattern(patterns.EXISTS_SUBQUERY())
        scalar = plan.containsPattern(patterns.SCALAR_SUBQUERY())
        if in_predicate or scalar:
            plan = companion(catalyst.optimizer, "PullupCorrelatedPredicates").apply(plan)
        plan = with_equalities_of_joins(self._jvm, patterns, plan)
        if moves:
            plan = with_moved_filters(self._jvm, patterns, plan)
        if in_predicate:
            plan = companion(catalyst.optimizer, "RewritePredicateSubquery").apply(plan)
        if scalar:
            _check_subqueries(plan)
            plan = companion(catalyst.optimizer, "RewriteCorrelatedScalarSubquery").apply(plan)
        if plan.containsPattern(patterns.DISTINCT_LIKE()):
            plan = companion(catalyst.optimizer, "ReplaceDistinctWithAggregate").apply(plan)
        if plan.containsPattern(patterns.CURRENT_LIKE()):
            manager = self._session.sessionState().catalogManager()
            plan = catalyst.optimizer.ReplaceCurrentLike(manager).apply(plan)
        return plan

    def table(self, request: TableRequest, relation: bytes, new: NewTables) -> CatalogTable:
        """Returns the table of the catalog that a stream reads, or that the rows of a relation are written to."""
        if not request.format:
            return table_to_read(self._session, request, new)
        return table_to_write(self._session, request, self._checked_plan(relation).schema(), new)

    def register_function(self, function: bytes) -> None:
        """Registers a Python function, so that SQL text may name it."""
        from pyspark.sql.connect.proto import CommonInlineUserDefinedFunction, Expression

        called = Expression()
        checked = _checked("CommonInlineUserDefinedFunction", function)
        called.common_inline_user_defined_function.MergeFrom(CommonInlineUserDefinedFunction.FromString(checked))
        name = called.common_inline_user_defined_function.function_name
        parsed = self._jvm.org.apache.spark.connect.proto.Expression.parseFrom(called.SerializeToString())
        read = self._planner.transformExpression(parsed)
        kind = self._jvm.org.apache.spark.sql.execution.python.UserDefinedPythonFunction
        facts = (read.func(), read.dataType(), read.evalType(), read.udfDeterministic())
        python = kind(name, *facts, self._jvm.java.util.ArrayList(), self._jvm.java.util.ArrayList())
        self._session.udf().registerPython(name, python)

    def register(self, name: str, relation: bytes, reader: PlanReader) -> None:
        """Registers a view. Its plan is read first, because Spark runs a command as soon as it makes a frame of it."""
        plan = self._checked_plan(relation)
        reader.read(self._in_steps(plan, moves=False))
        rows = self._jvm.org.apache.spark.sql.classic.Dataset.ofRows(self._session, plan)
        rows.createOrReplaceTempView(name)


_WINDOWS = frozenset({"window", "session_window", "window_time"})


def _may_be_marked(expression: Any, relation: Any) -> bool:
    """Whether the column of an expression may have marks: those of a window, or of a column that it copies."""
    copies = expression.WhichOneof("expr_type") in ("unresolved_attribute", "expression_string")
    return _makes_window(expression) or (copies and _makes_marks(relation.input))


def _makes_window(message: Any) -> bool:
    kind = message.WhichOneof("expr_type") if message.DESCRIPTOR.name == "Expression" else None
    calls = kind in ("unresolved_function", "call_function")
    return calls and getattr(message, str(kind)).function_name.lower() in _WINDOWS


def _makes_marks(message: Any) -> bool:
    """Whether a part of a message is a watermark, a window, or names what a view may have of both."""
    made = message.DESCRIPTOR.name in ("WithWatermark", "SQL", "NamedTable") or _makes_window(message)
    return made or any(map(_makes_marks, _parts(message)))


def _check_subqueries(plan: Any) -> None:
    """Raises UnsupportedExpressionError for a subquery for which Spark would collect the distinct rows of a stream."""
    if not plan.isStreaming():
        return
    for subquery in items(plan.subqueries()):
        if _contains(subquery, "DomainJoin"):
            raise UnsupportedExpressionError(
                "a scalar subquery that depends on the row",
                "it compares a column of the row with a column of its table by another operator than =: use only =, "
                "for instance with a key that both have",
            )
    for child in items(plan.children()):
        _check_subqueries(child)


def _contains(plan: Any, name: str) -> bool:
    return jvm_name(plan) == name or any(_contains(child, name) for child in items(plan.children()))
