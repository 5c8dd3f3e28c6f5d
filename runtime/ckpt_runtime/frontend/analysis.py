"""Asks Spark's analyzer for the types of a captured plan, in the JVM of the session's driver.

``SparkConnectPlanner`` turns the relation into a plan of Catalyst's, the analyzer resolves it; nothing is optimized
or run. A streaming source stands in the plan as typed nulls over Spark's ``rate``, so that no connector has to be
there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import msgspec

from ckpt_runtime.expressions.errors import UnsupportedExpressionError
from ckpt_runtime.expressions.nodes import Call, Column, Expression, rewritten
from ckpt_runtime.frontend.catalyst import ExpressionReader, function_number, jvm_name, spark_type
from ckpt_runtime.frontend.joins import HOW
from ckpt_runtime.frontend.typed_plan import (
    CONFIGURED,
    MOST_QUESTIONS,
    Aggregate,
    Analysis,
    AnalysisRequest,
    Filter,
    Generate,
    Join,
    MapPartitions,
    PlanNode,
    Project,
    Source,
    StatefulFunction,
    TypedAggregate,
    TypedColumn,
    Union,
    Watermark,
)
from ckpt_runtime.graph.schema import DocumentError

_PANDAS = 211
"""PySpark's number for processors of pandas frames."""
_SKIPPED = frozenset({"SubqueryAlias", "View", "ResolvedHint", "Repartition", "RepartitionByExpression"})
_PLACEHOLDERS = frozenset({"StreamingRelation", "StreamingRelationV2"})


class Analyzer:
    """Answers analysis requests with one Spark session, which the first call of a process starts if there is none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._serial = 0

    def answer(self, questions: str) -> dict[str, str]:
        """Returns the JSON texts of the answers to a JSON list of requests, by the requests' digests. Blocks.

        Raises DocumentError for a text that is no list of requests: a program could have written it.
        """
        try:
            texts = msgspec.json.decode(questions, type=list[msgspec.Raw])
            requests = [msgspec.json.decode(text, type=AnalysisRequest) for text in texts[: MOST_QUESTIONS + 1]]
        except msgspec.MsgspecError as error:
            raise DocumentError(f"the question to Spark is malformed: {error}") from error
        if len(requests) > MOST_QUESTIONS:
            raise DocumentError(f"Spark is asked more than {MOST_QUESTIONS} questions at once")
        return {
            sha256(bytes(text)).hexdigest(): msgspec.json.encode(self.analyze(request)).decode()
            for text, request in zip(texts, requests, strict=True)
        }

    def analyze(self, request: AnalysisRequest) -> Analysis:
        """Returns Spark's answer, errors of the author included. Blocks; calls from several threads take turns."""
        with self._lock:
            self._serial += 1
            return _analyze(spark_session(), request, self._serial)


ANALYZER = Analyzer()
"""That of this process: Spark has one session in it."""


def spark_session() -> Any:
    """Returns the driver's session. Outside of Spark it starts one, which runs nothing."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    if SparkContext._active_spark_context is None:
        builder = builder.master("local[1]").config("spark.ui.enabled", "false")
    return builder.getOrCreate()


def _analyze(spark: Any, request: AnalysisRequest, serial: int) -> Analysis:
    from py4j.protocol import Py4JError, Py4JJavaError
    from pyspark.errors.exceptions.base import PySparkException

    sessions = type(spark)._get_j_spark_session_class(spark._jvm)
    try:
        if request.ddl:
            return Analysis(parsed=spark_type(spark._jvm.org.apache.spark.sql.types.DataType.fromDDL(request.ddl)))
        session = spark._jsparkSession.newSession()
        if refused := set(request.configuration) - CONFIGURED:
            raise UnsupportedExpressionError(f"the option {min(refused)}", "a program cannot set it for the analyzer")
        for key, value in request.configuration.items():
            session.conf().set(key, value)
        # Spark's parser takes its options from the session that is active in its thread.
        sessions.setActiveSession(session)
        planner = _Planner(spark._jvm, session, serial)
        ansi = session.conf().get("spark.sql.ansi.enabled") == "true"
        for function in request.functions.values():
            planner.register_function(function)
        for name, relation in request.views.items():
            planner.register(name, relation, _PlanReader(spark._jvm, ansi))
        plan = planner.analyzed(request.relation)
        return _PlanReader(spark._jvm, ansi).read(plan)
    except UnsupportedExpressionError as error:
        return Analysis(unsupported=str(error))
    except Py4JJavaError as error:
        return Analysis(error=str(error.java_exception.getMessage()))
    except Py4JError as error:
        return Analysis(error=f"Spark's analyzer cannot be asked: {error}")
    except PySparkException as error:
        return Analysis(error=str(error.getMessage() or error))
    finally:
        sessions.setActiveSession(spark._jsparkSession)


_RELATIONS = frozenset(
    {
        *("project", "filter", "join", "set_op", "sort", "limit", "offset", "aggregate", "sql", "range", "unpivot"),
        *("subquery_alias", "repartition", "repartition_by_expression", "to_df", "to_schema", "hint", "deduplicate"),
        *(
            "map_partitions",
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
"""Kinds of relations whose analysis reads no file, asks no other system and runs no code."""
_EXPRESSIONS = frozenset(
    {
        *("literal", "unresolved_attribute", "unresolved_function", "expression_string", "unresolved_star", "alias"),
        *("cast", "unresolved_regex", "sort_order", "lambda_function", "unresolved_named_lambda_variable", "window"),
        *("unresolved_extract_value", "update_fields", "call_function", "named_argument_expression"),
        "common_inline_user_defined_function",
    }
)
"""The same of expressions. Functions of users are those of Python that a number names: Spark deserializes others."""
_KINDS = {"Relation": ("rel_type", _RELATIONS), "Expression": ("expr_type", _EXPRESSIONS)}
_RUN_CODE = ("reflect", "java_method", "try_reflect")
"""Functions that call Java methods. Spark's analyzer evaluates some constants, and no program may run in the driver."""


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
            raise UnsupportedExpressionError("a user-defined type", "the engine has no values of it")
        if name == "CommonInlineUserDefinedFunction" and not message.python_udf.command.isdigit():
            raise UnsupportedExpressionError(
                "common_inline_user_defined_function", "functions are those of Python in a program that is submitted"
            )
        if name in _KINDS:
            field, allowed = _KINDS[name]
            kind = message.WhichOneof(field)
            placeholder = kind == "read" and message.read.is_streaming and message.read.data_source.format == "rate"
            if kind not in allowed and not placeholder:
                raise UnsupportedExpressionError(f"{name.lower()} {kind}", "the engine does not have it yet")
        for descriptor, value in message.ListFields():
            if descriptor.message_type is not None:
                several = value.values() if hasattr(value, "values") else value if descriptor.is_repeated else (value,)
                todo += [element for element in several if hasattr(element, "ListFields")]
    return given


class _Planner:
    """Relations become analyzed plans of one Spark session."""

    def __init__(self, jvm: Any, session: Any, serial: int) -> None:
        connect = jvm.org.apache.spark.sql.connect
        registry = session.sessionState().functionRegistry()
        option = jvm.scala.Option
        for name in _RUN_CODE:
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
        return plan

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

    def register(self, name: str, relation: bytes, reader: _PlanReader) -> None:
        """Registers a view. Its plan is read first, because Spark runs a command as soon as a frame is made of it."""
        plan = self.analyzed(relation)
        reader.read(plan)
        rows = self._jvm.org.apache.spark.sql.classic.Dataset.ofRows(self._session, plan)
        rows.createOrReplaceTempView(name)


def _companion(package: Any, name: str) -> Any:
    """Returns the Scala object that lies beside a class."""
    return getattr(getattr(package, f"{name}$"), "MODULE$")


class _PlanReader:
    """Reads an analyzed plan from its leaves up."""

    def __init__(self, jvm: Any, ansi: bool) -> None:
        self._jvm = jvm
        self._ansi = ansi
        self._tag = _companion(jvm.org.apache.spark.sql.catalyst.plans.logical, "LogicalPlan").PLAN_ID_TAG()
        self._nodes: list[PlanNode] = []
        self._ids: list[tuple[int, ...]] = []
        self._places: dict[str, str] = {}

    def read(self, plan: Any) -> Analysis:
        self._node(plan)
        return Analysis(columns=self._nodes[-1].columns, nodes=tuple(self._nodes), places=self._places)

    def _node(self, plan: Any) -> int:
        """Adds the nodes of a plan and returns the position of its last one."""
        name = jvm_name(plan)
        if name == "Project" and jvm_name(plan.child()) in _PLACEHOLDERS:
            columns, ids = _output(plan.output())
            return self._add(Source(columns=columns, plan_id=self._plan_id(plan)), ids)
        inputs = tuple(self._node(child) for child in _items(plan.children()))
        if name in _SKIPPED:
            return inputs[0]
        plan_id = self._plan_id(plan)
        columns, ids = _output(plan.output())
        match name:
            case "Project":
                expressions = self._expressions(_items(plan.projectList()), inputs[0])
                return self._add(Project(columns=columns, inputs=inputs, plan_id=plan_id, expressions=expressions), ids)
            case "Filter":
                condition = self._expressions([plan.condition()], inputs[0])[0]
                return self._add(Filter(columns=columns, inputs=inputs, plan_id=plan_id, condition=condition), ids)
            case "EventTimeWatermark":
                column = self._expressions([plan.eventTime()], inputs[0])[0]
                assert isinstance(column, Column)
                event_times = _companion(self._jvm.org.apache.spark.sql.catalyst.plans.logical, "EventTimeWatermark")
                delay_ms = event_times.getDelayMs(plan.delay())
                return self._add(
                    Watermark(columns=columns, inputs=inputs, plan_id=plan_id, column=column.index, delay_ms=delay_ms),
                    ids,
                )
            case "Union":
                return self._add(Union(columns=columns, inputs=inputs, plan_id=plan_id), ids)
            case "Aggregate":
                return self._aggregate(plan, inputs[0], plan_id, columns, ids)
        return self._with_functions(name, plan, inputs, columns, ids)

    def _with_functions(
        self, name: str, plan: Any, inputs: tuple[int, ...], columns: tuple[TypedColumn, ...], ids: tuple[int, ...]
    ) -> int:
        """Adds a generator, or an operation that calls a function of the author."""
        match name:
            case "Generate":
                function = self._expressions([plan.generator()], inputs[0])[0]
                outer = bool(plan.outer())
                return self._add(Generate(columns=columns, inputs=inputs, function=function, outer=outer), ids)
            case "MapInPandas" | "MapInArrow" | "PythonMapInArrow":
                if plan.isBarrier():
                    raise UnsupportedExpressionError(
                        f"{name} with barrier", "tasks of a stream never wait for each other; leave barrier out"
                    )
                return self._add(
                    MapPartitions(
                        columns=columns,
                        inputs=inputs,
                        plan_id=self._plan_id(plan),
                        function=function_number(plan.functionExpr().func()),
                        in_pandas=name == "MapInPandas",
                    ),
                    ids,
                )
            case "TransformWithStateInPySpark" | "FlatMapGroupsInPandasWithState":
                return self._stateful(name, plan, inputs[0], columns, ids)
            case "Join":
                how = jvm_name(plan.joinType())
                if how not in HOW:
                    raise UnsupportedExpressionError(f"a join of type {how}", f"streams have {', '.join(HOW)}")
                both = self._ids[inputs[0]] + self._ids[inputs[1]]
                reader = ExpressionReader(
                    {id_: at for at, id_ in enumerate(both)}, ansi=self._ansi, places=self._places
                )
                condition = reader.read(plan.condition().get()) if plan.condition().isDefined() else None
                return self._add(
                    Join(columns=columns, inputs=inputs, how=how, condition=condition, plan_id=self._plan_id(plan)), ids
                )
            case "UpdateEventTimeWatermarkColumn":
                return self._with_event_time(plan, inputs[0])
        raise UnsupportedExpressionError(f"the operation {name}", "the engine does not run it on streams")

    def _stateful(
        self, name: str, plan: Any, input_: int, columns: tuple[TypedColumn, ...], ids: tuple[int, ...]
    ) -> int:
        """Adds an operator with the author's function. Spark puts the keys in front of the columns for it."""
        group_state = name == "FlatMapGroupsInPandasWithState"
        if not group_state and plan.hasInitialState():
            raise UnsupportedExpressionError("initialState", "start the job from a savepoint that holds the state")
        width = plan.groupingAttributes().size() if group_state else plan.groupingAttributesLen()
        project, known = self._nodes[input_], self._ids[input_]
        if missing := [at for at in range(width) if known[at] not in known[width:]]:
            column = project.columns[missing[0]].name
            raise UnsupportedExpressionError(
                f"groupBy of the expression {column}", "add it as a column first, and group by its name"
            )
        rows = input_
        if isinstance(project, Project):
            trees = project.expressions[width:]
            node = Project(columns=project.columns[width:], inputs=project.inputs, expressions=trees)
            self._nodes[input_], self._ids[input_] = node, known[width:]
        else:
            trees = tuple(Column(at, column.type) for at, column in enumerate(project.columns))[width:]
            rows = self._add(
                Project(columns=project.columns[width:], inputs=(input_,), expressions=trees), known[width:]
            )
        kind: Any = "group_state" if group_state else "pandas" if plan.functionExpr().evalType() == _PANDAS else "rows"
        return self._add(
            StatefulFunction(
                columns=columns,
                inputs=(rows,),
                plan_id=self._plan_id(plan),
                function=function_number(plan.functionExpr().func()),
                kind=kind,
                keys=tuple(self._ids[rows].index(id_) for id_ in known[:width]),
                output_mode=str(plan.outputMode().toString()),
                time=str((plan.timeout() if group_state else plan.timeMode()).toString()),
                state=spark_type(plan.stateType()) if group_state else "void",
            ),
            ids,
        )

    def _with_event_time(self, plan: Any, input_: int) -> int:
        """Marks the column of ``transformWithState`` that ``eventTimeColumnName`` names."""
        node = self._nodes[input_]
        column = self._expressions([plan.eventTime()], input_)[0]
        assert isinstance(node, StatefulFunction)
        assert isinstance(column, Column)
        if column.type not in ("timestamp", "timestamp_ntz"):
            raise UnsupportedExpressionError("eventTimeColumnName", "its column is not a timestamp")
        self._nodes[input_] = msgspec.structs.replace(node, event_time=column.index)
        return input_

    def _add(self, node: PlanNode, ids: tuple[int, ...]) -> int:
        self._nodes.append(node)
        self._ids.append(ids)
        return len(self._nodes) - 1

    def _plan_id(self, plan: Any) -> int | None:
        found = plan.getTagValue(self._tag)
        return int(found.get()) if found.isDefined() else None

    def _expressions(self, expressions: Sequence[Any], input_: int) -> tuple[Expression, ...]:
        columns = {id_: at for at, id_ in enumerate(self._ids[input_])}
        reader = ExpressionReader(columns, ansi=self._ansi, places=self._places)
        return tuple(reader.read(expression) for expression in expressions)

    def _aggregate(
        self, plan: Any, input_: int, plan_id: int | None, columns: tuple[TypedColumn, ...], ids: tuple[int, ...]
    ) -> int:
        """Adds three nodes: the keys and arguments, the aggregates, and what is computed from their results."""
        reader = ExpressionReader(
            {id_: at for at, id_ in enumerate(self._ids[input_])}, ansi=self._ansi, aggregates=True, places=self._places
        )
        keys = [reader.read(expression) for expression in _items(plan.groupingExpressions())]
        results = [reader.read(expression) for expression in _items(plan.aggregateExpressions())]
        calls: list[Call] = []
        for result in results:
            _collect(result, calls)
        arguments: list[Expression] = [*keys]
        aggregates = []
        for call in calls:
            positions = []
            for argument in call.arguments:
                if argument not in arguments:
                    arguments.append(argument)
                positions.append(arguments.index(argument))
            aggregates.append(TypedAggregate(call.function, tuple(positions), call.type))
        prepared = tuple(TypedColumn(f"_{at}", argument.type) for at, argument in enumerate(arguments))
        before = self._add(Project(columns=prepared, inputs=(input_,), expressions=tuple(arguments)), ())
        outcome = prepared[: len(keys)] + tuple(
            TypedColumn(f"_agg{at}", aggregate.type) for at, aggregate in enumerate(aggregates)
        )
        grouped = self._add(
            Aggregate(
                columns=outcome,
                inputs=(before,),
                plan_id=plan_id,
                keys=tuple(range(len(keys))),
                aggregates=tuple(aggregates),
            ),
            (),
        )
        known = [*keys, *calls]

        def computed(tree: Expression) -> Expression | None:
            if tree in known:
                return Column(known.index(tree), tree.type)
            if isinstance(tree, Column):
                raise UnsupportedExpressionError("an aggregation", "a result uses a column that is not one of its keys")
            return None

        finished = tuple(rewritten(result, computed) for result in results)
        return self._add(Project(columns=columns, inputs=(grouped,), expressions=finished), ids)


def _collect(tree: Expression, calls: list[Call]) -> None:
    if not isinstance(tree, Call):
        return
    if tree.settings.get("aggregate"):
        if tree not in calls:
            calls.append(tree)
        return
    for argument in tree.arguments:
        _collect(argument, calls)


def _items(sequence: Any) -> list[Any]:
    return [sequence.apply(at) for at in range(sequence.size())]


def _output(attributes: Any) -> tuple[tuple[TypedColumn, ...], tuple[int, ...]]:
    columns, ids = [], []
    for attribute in _items(attributes):
        columns.append(TypedColumn(attribute.name(), spark_type(attribute.dataType()), attribute.nullable()))
        ids.append(int(attribute.exprId().id()))
    return tuple(columns), tuple(ids)
