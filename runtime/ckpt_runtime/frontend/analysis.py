"""Asks Spark's analyzer for the types of a captured plan, in the JVM of the session's driver.

``SparkConnectPlanner`` converts the relation to a Catalyst plan, and the analyzer resolves it. A streaming source is
represented by typed nulls over Spark's ``rate``, so that no connector is needed. Parts of the plan without a stream are
static tables: Spark runs these, and nothing else.

In a join of two streams, the column that decides in Spark whether a row of a side is late is the first one with the
mark of event time among those that Spark's optimizer leaves to the join. It prunes a column that neither the join's
condition nor a later operator reads. A side without such a column has no late rows.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

import msgspec

from ckpt_runtime.expressions.nodes import Column, Expression
from ckpt_runtime.expressions.types import UnsupportedExpressionError
from ckpt_runtime.frontend.catalog_tables import NewTables, StaticTables, check_static, table_to_read, table_to_write
from ckpt_runtime.frontend.catalyst import (
    ExpressionReader,
    companion,
    function_number,
    items,
    jvm_name,
    output,
    spark_type,
)
from ckpt_runtime.frontend.joins import HOW
from ckpt_runtime.frontend.lateral import read_lateral
from ckpt_runtime.frontend.observe import read_observe
from ckpt_runtime.frontend.stateful_analysis import STATEFUL, event_window, is_event_time, read_stateful
from ckpt_runtime.frontend.static_joins import STATIC_HOW
from ckpt_runtime.frontend.typed_plan import (
    CONFIGURED,
    MOST_QUESTIONS,
    PLACEHOLDER_FILES,
    Analysis,
    AnalysisRequest,
    CatalogTable,
    CreatedView,
    Filter,
    Generate,
    Join,
    MapPartitions,
    PlanNode,
    Project,
    Repartition,
    Source,
    StatefulFunction,
    StaticTable,
    TableRequest,
    Union,
    Watermark,
)
from ckpt_runtime.graph.schema import DocumentError

_RULES = ("EliminateOuterJoin", "PushDownPredicates", "ColumnPruning")
"""Rules that decide which columns a join reads. They keep the joins of a plan and their order."""
_MOST_ROUNDS = 100  # Spark's own limit


def late_columns(optimizer: Any, plan: Any) -> Iterator[tuple[int | None, int | None]]:
    """Yields Spark's ids of these columns for each join of two streams of an analyzed plan, children first."""
    rules = [companion(optimizer, name) for name in _RULES]
    for _ in range(_MOST_ROUNDS):
        before = plan
        for rule in rules:
            plan = rule.apply(plan)
        if plan.fastEquals(before):
            break
    yield from _of_joins(plan)


def _of_joins(plan: Any) -> Iterator[tuple[int | None, int | None]]:
    for child in items(plan.children()):
        yield from _of_joins(child)
    if joins_streams(plan):
        yield _event_time_of(plan.left()), _event_time_of(plan.right())


def joins_streams(plan: Any) -> bool:
    """Whether a plan is a join of two streams."""
    return jvm_name(plan) == "Join" and all(side.isStreaming() for side in (plan.left(), plan.right()))


def _event_time_of(side: Any) -> int | None:
    marked = (attribute for attribute in items(side.output()) if is_event_time(attribute))
    return next((int(attribute.exprId().id()) for attribute in marked), None)


_MAPS = frozenset({"MapInPandas", "MapInArrow", "PythonMapInArrow"})
PROCESSORS = frozenset({"TransformWithStateInPySpark", "FlatMapGroupsInPandasWithState"})
"""The relations that keep state with a function of the author."""
FUNCTIONAL = _MAPS | PROCESSORS | {"Generate", "Join", "UpdateEventTimeWatermarkColumn"}
"""The relations that :func:`read_functional` reads."""
_PANDAS = (211, 212)
"""PySpark's numbers for processors of pandas frames, without and with an initial state."""


def has_initial_state(name: str, plan: Any) -> bool:
    """Returns whether a relation with a processor has an initial state, its second input."""
    return name == "TransformWithStateInPySpark" and bool(plan.hasInitialState())


def read_functional(reader: PlanReader, name: str, plan: Any, inputs: tuple[int, ...]) -> int:
    """Adds the nodes of a relation whose inputs are read, and returns the position of the last one."""
    if name in PROCESSORS:
        return _stateful(reader, name, plan, inputs)
    if name == "UpdateEventTimeWatermarkColumn":
        return _with_event_time(reader, plan, inputs[0])
    columns, ids = output(plan.output())
    plan_id = reader.plan_id(plan)
    if name == "Generate":
        [function] = reader.expressions([plan.generator()], inputs[0])
        outer = bool(plan.outer())
        return reader.add(Generate(columns=columns, inputs=inputs, function=function, outer=outer), ids)
    if name == "Join":
        how = jvm_name(plan.joinType())
        allowed = STATIC_HOW if any(isinstance(reader.nodes[at], StaticTable) for at in inputs) else HOW
        if how not in allowed:
            raise UnsupportedExpressionError(f"a join of type {how}", f"streams have {', '.join(allowed)}")
        conditions = [plan.condition().get()] if plan.condition().isDefined() else []
        condition = next(iter(reader.expressions(conditions, *inputs)), None)
        node = Join(columns=columns, inputs=inputs, plan_id=plan_id, how=how, condition=condition)
        left, right = event_window(plan.left()), event_window(plan.right())
        if left is not None and right is not None:
            node = msgspec.structs.replace(node, windows=(left, right))
        if joins_streams(plan):
            first, second = next(reader.late_columns)
            late = (_position(reader.ids[inputs[0]], first), _position(reader.ids[inputs[1]], second))
            node = msgspec.structs.replace(node, late=late)
        return reader.add(node, ids)
    if plan.isBarrier():
        raise UnsupportedExpressionError(
            f"{name} with barrier", "tasks of a stream never wait for each other; remove barrier"
        )
    partitions = MapPartitions(
        columns=columns,
        inputs=inputs,
        plan_id=plan_id,
        function=function_number(plan.functionExpr().func()),
        in_pandas=name == "MapInPandas",
    )
    return reader.add(partitions, ids)


def _position(ids: tuple[int, ...], wanted: int | None) -> int | None:
    """Returns the place of a column by Spark's id of it; None for one that the optimizer has made of a column."""
    return ids.index(wanted) if wanted in ids else None


def _stateful(reader: PlanReader, name: str, plan: Any, inputs: tuple[int, ...]) -> int:
    """Adds an operator with the author's function. Spark passes it the keys before the other columns."""
    columns, ids = output(plan.output())
    input_, initial = inputs[0], inputs[1:]
    group_state = name == "FlatMapGroupsInPandasWithState"
    if any(not isinstance(reader.nodes[at], StaticTable) for at in initial):
        raise UnsupportedExpressionError("initialState", "it must be a static frame, as in Spark")
    project, known = reader.nodes[input_], reader.ids[input_]
    keys = output(plan.groupingAttributes())[1] if group_state else known[: plan.groupingAttributesLen()]
    # The function's arguments are the frame's columns. Spark may have put the keys in front of them.
    width = len(known) - plan.functionExpr().children().size()
    if missing := [id_ for id_ in keys if id_ not in known[width:]]:
        column = project.columns[known.index(missing[0])].name
        raise UnsupportedExpressionError(
            f"groupBy of the expression {column}", "add it as a column first, and group by its name"
        )
    rows = input_
    if width and isinstance(project, Project):
        node = Project(columns=project.columns[width:], inputs=project.inputs, expressions=project.expressions[width:])
        reader.nodes[input_], reader.ids[input_] = node, known[width:]
    elif width:
        trees = tuple(Column(at, column.type) for at, column in enumerate(project.columns))[width:]
        node = Project(columns=project.columns[width:], inputs=(input_,), expressions=trees)
        rows = reader.add(node, known[width:])
    kind: Any = "group_state" if group_state else "pandas" if plan.functionExpr().evalType() in _PANDAS else "rows"
    return reader.add(
        StatefulFunction(
            columns=columns,
            inputs=(rows, *initial),
            plan_id=reader.plan_id(plan),
            function=function_number(plan.functionExpr().func()),
            kind=kind,
            keys=tuple(reader.ids[rows].index(id_) for id_ in keys),
            output_mode=str(plan.outputMode().toString()),
            time=str((plan.timeout() if group_state else plan.timeMode()).toString()),
            state=spark_type(plan.stateType()) if group_state else "void",
        ),
        ids,
    )


def _with_event_time(reader: PlanReader, plan: Any, input_: int) -> int:
    """Marks the column of ``transformWithState`` that ``eventTimeColumnName`` names."""
    node = reader.nodes[input_]
    [column] = reader.expressions([plan.eventTime()], input_)
    assert isinstance(node, StatefulFunction)
    assert isinstance(column, Column)
    if column.type not in ("timestamp", "timestamp_ntz"):
        raise UnsupportedExpressionError("eventTimeColumnName", "its column is not a timestamp")
    reader.nodes[input_] = msgspec.structs.replace(node, event_time=column.index)
    return input_


_SKIPPED = frozenset({"SubqueryAlias", "View", "ResolvedHint", "RepartitionByExpression", "LocalLimit", "PipeOperator"})
_PLACEHOLDERS = frozenset({"StreamingRelation", "StreamingRelationV2"})


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
            lasting = request.with_rows is True or request.table is not msgspec.UNSET
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
        if request.statement is not msgspec.UNSET:
            if _declares(session, request.statement):
                return Analysis()
            return Analysis(view=_created_view(session, request.statement))
        if refused := set(request.configuration) - CONFIGURED:
            raise UnsupportedExpressionError(
                f"the option {min(refused)}", "a program cannot set this option for the analyzer"
            )
        for key, value in request.configuration.items():
            session.conf().set(key, value)
        # Spark's parser takes its options from the session that is active in its thread.
        sessions.setActiveSession(session)
        planner = _Planner(spark._jvm, session, serial)
        ansi = session.conf().get("spark.sql.ansi.enabled") == "true"
        for function in request.functions.values():
            planner.register_function(function)
        for text in request.declarations or ():
            if not _declares(session, text):
                raise UnsupportedExpressionError(f"the statement {text}", "it declares no variable and no function")
            session.sql(text)
        with tables.limited(spark):  # Spark may have to open files to find their columns
            for name, relation in request.views.items():
                planner.register(name, relation, PlanReader(spark._jvm, ansi))
            if request.table is not msgspec.UNSET:
                return Analysis(table=planner.table(request.table, request.relation, tables.new))
            plan = planner.analyzed(request.relation)
        zone = str(session.conf().get("spark.sql.session.timeZone"))
        return PlanReader(spark._jvm, ansi, static, zone).read(plan)
    finally:
        sessions.setActiveSession(spark._jsparkSession)


def _declares(session: Any, statement: str) -> bool:
    """Returns whether a statement declares a variable or a temporary function of SQL, for which Spark runs no task."""
    plan = session.sessionState().sqlParser().parsePlan(statement)
    if jvm_name(plan) == "CreateVariable":
        return True
    # A function in Java names its class.
    return jvm_name(plan) == "CreateSQLFunctionCommand" and bool(plan.isTemp())


_INSTEAD = {
    "SetVariable": "declare the variable with its value: DECLARE OR REPLACE VARIABLE name = value",
    "SetCommand": "use spark.conf.set",
    "CreateViewCommand": "programs share no views: create a temporary view that is not global",
}
"""What to do instead of a statement, by the name of its command."""


def _created_view(session: Any, statement: str) -> CreatedView:
    """Parses a statement that creates a temporary view, which does not run. Raises UnsupportedExpressionError."""
    plan = session.sessionState().sqlParser().parsePlan(statement)
    if jvm_name(plan) != "CreateViewCommand" or jvm_name(plan.viewType()) != "LocalTempView":
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
        *("local_relation", "sample", "with_relations", "collect_metrics"),
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
        "common_inline_user_defined_function",
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
                raise UnsupportedExpressionError(f"{name.lower()} {kind}", "the engine does not support it yet")
        for descriptor, value in message.ListFields():
            if descriptor.message_type is not None:
                is_map = descriptor.message_type.GetOptions().map_entry
                several = value.values() if is_map else value if descriptor.is_repeated else (value,)
                todo += [element for element in several if hasattr(element, "ListFields")]
    return given


def _is_placeholder(stream: Any) -> bool:
    """Whether a stream is one of those that stand for the sources of a program, which read nothing."""
    files = stream.format in ("parquet", "text") and list(stream.paths) == [PLACEHOLDER_FILES] and not stream.options
    return stream.format == "rate" or files


def _check_read(read: Any) -> None:
    """Raises UnsupportedExpressionError for a source that is named by a class, which Spark would load."""
    kind = read.data_source.format
    if "." in kind or "$" in kind:
        raise UnsupportedExpressionError(f"the format {kind}", "name it by its short name, not by its class")
    _check_schema(read.data_source.schema)


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
        for name in (*_RUN_CODE, *_NOT_LOADED):
            place = (option.apply("builtin"), option.apply("system"))
            registry.dropFunction(jvm.org.apache.spark.sql.catalyst.FunctionIdentifier(name, *place))
        session.conf().set("spark.sql.runSQLOnFiles", "false")
        # Otherwise Spark replaces ${env:NAME} in SQL texts by a variable of the driver's environment.
        session.conf().set("spark.sql.variable.substitute", "false")
        holder = connect.service.SessionHolder("engine", f"00000000-0000-0000-0000-{serial:012}", session)
        self._planner = connect.planner.SparkConnectPlanner(holder, jvm.scala.Option.empty())
        self._jvm = jvm
        self._session = session

    def analyzed(self, relation: bytes) -> Any:
        parsed = self._jvm.org.apache.spark.connect.proto.Relation.parseFrom(_checked("Relation", relation))
        analyzer = self._session.sessionState().analyzer()
        plan = analyzer.execute(self._planner.transformRelation(parsed))
        analyzer.checkAnalysis(plan)
        return self._without_subqueries(plan)

    def _without_subqueries(self, plan: Any) -> Any:
        """Returns a plan with ``WITH`` inlined and subqueries that depend on rows as joins, by Spark's rules.

        ``SELECT DISTINCT`` becomes an aggregation, and the current user, catalog and database constants, as in Spark.
        """
        catalyst = self._jvm.org.apache.spark.sql.catalyst
        patterns = companion(catalyst.trees, "TreePattern")
        if plan.containsPattern(patterns.CTE()):
            plan = catalyst.optimizer.InlineCTE(True, False, False).apply(plan)
        if plan.containsPattern(patterns.IN_SUBQUERY()) or plan.containsPattern(patterns.EXISTS_SUBQUERY()):
            plan = companion(catalyst.optimizer, "PullupCorrelatedPredicates").apply(plan)
            plan = companion(catalyst.optimizer, "RewritePredicateSubquery").apply(plan)
        if plan.containsPattern(patterns.SCALAR_SUBQUERY()):
            plan = companion(catalyst.optimizer, "PullupCorrelatedPredicates").apply(plan)
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
        return table_to_write(self._session, request, self.analyzed(relation).schema(), new)

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
        plan = self.analyzed(relation)
        reader.read(plan)
        rows = self._jvm.org.apache.spark.sql.classic.Dataset.ofRows(self._session, plan)
        rows.createOrReplaceTempView(name)


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


class PlanReader:
    """Reads an analyzed plan, from its leaves to the root."""

    def __init__(self, jvm: Any, ansi: bool, static: dict[int, Any] | None = None, zone: str = "UTC") -> None:
        """``static`` gets the plans of static tables by the positions of their nodes. ``zone`` is the time zone."""
        self._jvm = jvm
        self._ansi = ansi
        self.zone = zone
        self._static = {} if static is None else static
        self._tag = companion(jvm.org.apache.spark.sql.catalyst.plans.logical, "LogicalPlan").PLAN_ID_TAG()
        self.nodes: list[PlanNode] = []
        self.ids: list[tuple[int, ...]] = []
        self._places: dict[str, str] = {}
        self.late_columns: Iterator[tuple[int | None, int | None]] = iter(())

    def read(self, plan: Any) -> Analysis:
        self.late_columns = late_columns(self._jvm.org.apache.spark.sql.catalyst.optimizer, plan)
        self._node(plan)
        return Analysis(columns=self.nodes[-1].columns, nodes=tuple(self.nodes), places=self._places)

    def _node(self, plan: Any) -> int:
        """Adds the nodes of a plan and returns the position of its last one."""
        name = jvm_name(plan)
        if not plan.isStreaming():
            while jvm_name(plan) == "ResolvedHint":  # Spark would warn that the hint does not apply to a join
                plan = plan.child()
            check_static(self._jvm, plan)
            columns, ids = output(plan.output())
            self._static[len(self.nodes)] = plan
            return self.add(StaticTable(columns=columns), ids)
        if name == "Project" and jvm_name(plan.child()) in _PLACEHOLDERS:
            columns, ids = output(plan.output())
            return self.add(Source(columns=columns, plan_id=self.plan_id(plan)), ids)
        children = items(plan.children())
        if name in PROCESSORS and not has_initial_state(name, plan):
            children = children[:1]  # Spark adds an empty initial state
        inputs = tuple(self._node(child) for child in children)
        if name == "LateralJoin":
            return read_lateral(self, plan, inputs[0])
        return inputs[0] if name in _SKIPPED else self._relation(name, plan, inputs)

    def _relation(self, name: str, plan: Any, inputs: tuple[int, ...]) -> int:
        """Adds the nodes of a relation whose inputs are read, and returns the position of the last one."""
        plan_id = self.plan_id(plan)
        columns, ids = output(plan.output())
        match name:
            case "Project":
                input_, expressions = self._with_subqueries(items(plan.projectList()), inputs[0])
                project = Project(columns=columns, inputs=(input_,), plan_id=plan_id, expressions=expressions)
                return self.add(project, ids)
            case "Filter" | "CollectMetrics":
                return self._filter(plan, inputs[0]) if name == "Filter" else read_observe(self, plan, inputs[0])
            case "EventTimeWatermark":
                column = self.expressions([plan.eventTime()], inputs[0])[0]
                assert isinstance(column, Column)
                event_times = companion(self._jvm.org.apache.spark.sql.catalyst.plans.logical, "EventTimeWatermark")
                delay_ms = event_times.getDelayMs(plan.delay())
                return self.add(
                    Watermark(columns=columns, inputs=inputs, plan_id=plan_id, column=column.index, delay_ms=delay_ms),
                    ids,
                )
            case "Union":
                return self.add(Union(columns=columns, inputs=inputs, plan_id=plan_id), ids)
            case "Repartition":
                if not plan.shuffle():  # coalesce, which sends no rows to other subtasks
                    return inputs[0]
                return self.add(Repartition(columns=columns, inputs=inputs, plan_id=plan_id), ids)
            case _ if name in STATEFUL:
                return read_stateful(self, name, plan, inputs[0])
            case _ if name in FUNCTIONAL:
                return read_functional(self, name, plan, inputs)
        raise UnsupportedExpressionError(f"the operation {name}", "the engine does not run it on streams")

    def _filter(self, plan: Any, below: int) -> int:
        """Adds a filter; the values of subqueries in its condition are dropped after it."""
        columns, ids = output(plan.output())
        input_, [condition] = self._with_subqueries([plan.condition()], below)
        wide = Filter(columns=self.nodes[input_].columns, inputs=(input_,), condition=condition)
        if input_ == below:
            narrow = msgspec.structs.replace(wide, columns=columns, plan_id=self.plan_id(plan))
            return self.add(narrow, ids)
        kept = self.add(wide, self.ids[input_])
        trees = tuple(Column(at, column.type) for at, column in enumerate(columns))
        return self.add(Project(columns=columns, inputs=(kept,), plan_id=self.plan_id(plan), expressions=trees), ids)

    def _with_subqueries(self, expressions: Sequence[Any], input_: int) -> tuple[int, tuple[Expression, ...]]:
        """Reads expressions that may have subqueries with one value over static tables.

        Returns the node that they are over: the input, or its join with the tables of those values.
        """
        subqueries: list[Any] = []
        trees = self.expressions(expressions, input_, subqueries=subqueries)
        for plan in subqueries:
            if plan.isStreaming():
                raise UnsupportedExpressionError("a scalar subquery", "it must read static tables, not a stream")
            if not plan.maxRows().isDefined() or int(plan.maxRows().get()) > 1:
                raise UnsupportedExpressionError(
                    "a scalar subquery", "it may have several rows: select an aggregate without GROUP BY, or LIMIT 1"
                )
            table = self._node(plan)
            columns, ids = (*self.nodes[input_].columns, *self.nodes[table].columns), self.ids[input_] + self.ids[table]
            joined = Join(columns=columns, inputs=(input_, table), how="LeftOuter", condition=None)
            input_ = self.add(joined, ids)
        return input_, trees

    def add(self, node: PlanNode, ids: tuple[int, ...]) -> int:
        """Adds a node whose columns have these ids of Spark's, and returns its position."""
        self.nodes.append(node)
        self.ids.append(ids)
        return len(self.nodes) - 1

    def plan_id(self, plan: Any) -> int | None:
        """The id of the captured relation that a plan represents."""
        found = plan.getTagValue(self._tag)
        return int(found.get()) if found.isDefined() else None

    def expressions(
        self,
        expressions: Sequence[Any],
        *inputs: int,
        aggregates: bool = False,
        subqueries: list[Any] | None = None,
    ) -> tuple[Expression, ...]:
        """Reads expressions over the columns of the nodes ``inputs``.

        ``subqueries`` receives the plans of subqueries with one value, which are columns after those of the inputs.
        """
        columns = [id_ for input_ in inputs for id_ in self.ids[input_]]
        positions = {id_: at for at, id_ in enumerate(columns)}
        reader = ExpressionReader(
            positions, ansi=self._ansi, aggregates=aggregates, places=self._places, subqueries=subqueries
        )
        return tuple(reader.read(expression) for expression in expressions)
