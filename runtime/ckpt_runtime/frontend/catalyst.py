"""Reads Spark's analyzed plans: converts the trees of Catalyst's expressions in the driver's JVM to typed trees.

The structure is read from ``TreeNode.toJSON``, one text for a whole expression; types, constants and evaluation modes,
which that text lacks, are read node by node (``TreeNode.apply(n)`` numbers the same nodes in the same order). Analyzed
plans are read, not optimized ones: their nodes are Spark's functions, while the optimizer replaces them by calls of
Spark's internal classes.

Spark expresses the end of a session window as a timestamp plus a calendar interval. The interval is often a cast text,
or one of several texts that CASE selects: then it becomes microseconds, whose sum has a kernel of Arrow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

import ckpt_runtime.expressions.functions  # noqa: F401 registers the functions
from ckpt_runtime.expressions.evaluation import FUNCTIONS, RANDOM
from ckpt_runtime.expressions.nodes import Call, Column, Expression, Lambda, Literal, Mode, Variable, rewritten
from ckpt_runtime.expressions.texts import parse_interval
from ckpt_runtime.expressions.types import SparkType, UnsupportedExpressionError
from ckpt_runtime.frontend.aggregate_calls import REPLACED_AGGREGATES, aggregate_call, pivoted
from ckpt_runtime.frontend.typed_plan import PlanNode, TypedColumn

_DAY = 86_400_000_000
_UTC = frozenset({"UTC", "Etc/UTC", "GMT", "Z", "+00:00"})


def with_gap(call: Call) -> Call:
    """Returns a ``TimestampAddInterval`` with microseconds in place of its calendar interval, if this is possible.

    It is not for an interval that is computed, has months, or has days of a zone in which these differ in length.
    """
    time, interval = call.arguments
    gap = _microseconds(interval, call.settings.get("zone", "")) if interval.type == "interval" else None
    if gap is None:
        return call
    start = Call("PreciseTimestampConversion", (time,), "long")
    return Call("PreciseTimestampConversion", (Call("Add", (start, gap), "long"),), "timestamp")


def _microseconds(tree: Expression, zone: str) -> Expression | None:
    """Returns the length of an interval, None if it is not made of constants of equal length."""
    if isinstance(tree, Literal):
        return _length(tree, zone)
    if not isinstance(tree, Call):
        return None
    if tree.function == "Cast":
        return _microseconds(tree.arguments[0], zone)
    if tree.function not in ("CaseWhen", "If", "Coalesce"):
        return None
    arguments = [
        _microseconds(argument, zone) if _is_value(tree, at) else argument for at, argument in enumerate(tree.arguments)
    ]
    known = tuple(argument for argument in arguments if argument is not None)
    return msgspec.structs.replace(tree, arguments=known, type="long") if len(known) == len(arguments) else None


def _is_value(tree: Call, at: int) -> bool:
    """Whether an argument is a result and not a condition."""
    if tree.function == "If":
        return at > 0
    return tree.function == "Coalesce" or at % 2 == 1 or at == len(tree.arguments) - 1


def _length(literal: Literal, zone: str) -> Literal | None:
    if literal.value is None:
        return Literal(None, "long")
    if literal.type == "interval":
        months, days, micros = map(int, str(literal.value).split(","))
    else:
        parsed = parse_interval(str(literal.value))
        if parsed is None:
            return Literal(None, "long")  # as in Spark, whose cast gives null
        months, days, micros = parsed["months"], parsed["days"], parsed["micros"]
    if months or (days and zone not in _UTC):
        return None
    return Literal(str(days * _DAY + micros), "long")


_MODES: dict[str, Mode] = {"ANSI": "ansi", "LEGACY": "legacy", "TRY": "try"}
_HAS_EVAL_MODE = frozenset({"Cast", "Add", "Subtract", "Multiply", "Divide", "IntegralDivide", "Remainder", "Pmod"})
_CAN_FAIL: dict[str, bool] = {}
"""Whether expressions of a class say if an error fails the query. It is found out once per process."""
_PREDICATES = frozenset(
    {
        *("And", "Or", "Not", "IsNull", "IsNotNull", "EqualTo", "EqualNullSafe"),
        *("LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual"),
    }
)
"""Expressions of type boolean that depend on no setting of the session."""
_WRITTEN_IN_FULL = ("boolean", "byte", "short", "integer", "long", "string", "void")
"""Types whose constants have their complete value in the text of a tree."""
_TRANSPARENT = frozenset({"SQLScalarFunction", "Alias", "KnownNullable", "KnownNotNull"})
_READ_AS: dict[str, Callable[[Any], Any]] = {
    "UpdateFields": lambda jvm: jvm.evalExpr(),
    "OuterReference": lambda jvm: jvm.e(),
    "VariableReference": lambda jvm: jvm.varDef().currentValue(),
    "Uniform": lambda jvm: jvm.replacement(),
}
"""Expressions that stand for others: a struct with other fields, a column of the row of a lateral join, a variable, a
random number of a range."""
_SETTINGS = (
    *("key", "ordinal", "legacySizeOfNull", "followThreeValuedLogic", "failOnError", "seed", "prettyName", "funcName"),
    "unit",
)
_FOLDED = frozenset({"SchemaOfJson", "SchemaOfCsv", "TypeOf", "SparkVersion", "CurrentTimeZone", "Collation"})
"""Functions whose arguments are constant or irrelevant: Spark computes them when the program is planned."""
_ASKED: dict[str, dict[str, Callable[[Any], Any]]] = {
    "Like": {"escapeChar": lambda jvm: str(jvm.escapeChar())},
    "ILike": {"escapeChar": lambda jvm: str(jvm.escapeChar())},
    **{name: {"patterns": lambda jvm: _patterns(jvm)} for name in ("LikeAny", "LikeAll", "NotLikeAny", "NotLikeAll")},  # noqa: PLW0108
    "JsonToStructs": {"options": lambda jvm: _options(jvm)},  # noqa: PLW0108 defined below
    "StructsToJson": {"options": lambda jvm: _options(jvm)},  # noqa: PLW0108
    "CsvToStructs": {"options": lambda jvm: _options(jvm)},  # noqa: PLW0108
    "StructsToCsv": {"options": lambda jvm: _options(jvm)},  # noqa: PLW0108
    "PythonUDF": {
        "name": lambda jvm: str(jvm.name()),
        "number": lambda jvm: function_number(jvm.func()),
        "eval_type": lambda jvm: int(jvm.evalType()),
        "deterministic": lambda jvm: bool(jvm.udfDeterministic()),
    },
    "ParseToDate": {"failOnError": lambda jvm: bool(jvm.ansiEnabled())},
    "AtLeastNNonNulls": {"n": lambda jvm: int(jvm.n())},
}
"""Settings that the JSON text of a tree does not contain, by function."""


class ExpressionReader:
    """Reads expressions over the columns of one operator's input.

    ``columns`` maps Spark's ids of attributes to positions; ``ansi`` is the session's ``spark.sql.ansi.enabled``. With
    ``aggregates``, calls of aggregate functions are read, too, and have the setting ``aggregate``. ``places`` gets
    the author's file and line for each function that the engine may lack. ``subqueries`` gets the plans of subqueries
    with one value: their values are columns after the others.
    """

    def __init__(
        self,
        columns: Mapping[int, int],
        *,
        ansi: bool,
        aggregates: bool = False,
        places: dict[str, str] | None = None,
        subqueries: list[Any] | None = None,
    ) -> None:
        self._columns = columns
        self._subqueries = subqueries
        self._aggregates = aggregates
        self._definitions: list[tuple[int, Expression]] = []
        self._places: dict[str, str] = {} if places is None else places
        self._mode: Mode = "ansi" if ansi else "legacy"

    def read(self, expression: Any) -> Expression:
        """Returns the typed tree of an expression in the JVM.

        Raises UnsupportedExpressionError, which names what the engine cannot compute as Spark does.
        """
        nodes = json.loads(expression.toJSON())
        tree, end = self._tree(nodes, 0, expression)
        if end != len(nodes):
            raise UnsupportedExpressionError(_name(nodes[0]), "Spark's text of its tree has an unknown form")
        return tree

    def _tree(self, nodes: Sequence[dict[str, Any]], at: int, root: Any) -> tuple[Expression, int]:
        node = nodes[at]
        name = _name(node)
        if name in _READ_AS:
            # The parts of some of these have no type, and all that is read stands in what they stand for.
            return self.read(_READ_AS[name](root.apply(at))), _end_of(nodes, at)
        children: list[Expression] = []
        end = at + 1
        for _ in range(node["num-children"]):
            child, end = self._tree(nodes, end, root)
            children.append(child)
        if name in _TRANSPARENT or "replacement" in node:
            # A function that Spark itself replaces by others is read as its replacement, which is its only child.
            return children[0], end
        # Questions to the JVM take most of the time of planning. The text of these nodes says everything.
        if name == "AttributeReference" and node["exprId"]["id"] in self._columns:
            return self._column(node, _type_of(node)), end
        if name == "Literal" and node["dataType"] in _WRITTEN_IN_FULL:
            type_, value = node["dataType"], node["value"]
            return Literal(value == "true" if type_ == "boolean" and value else value, type_), end
        if name in _PREDICATES:
            return Call(name, tuple(children), "boolean", self._mode, _settings(node)), end
        if name == "With":
            definitions = dict(self._definitions[1 - len(children) :])
            del self._definitions[1 - len(children) :]
            defined = rewritten(
                children[0], lambda tree: definitions.get(tree.id) if isinstance(tree, Variable) else None
            )
            return defined, end
        jvm = root.apply(at)
        if jvm_name(jvm) != name:
            raise UnsupportedExpressionError(name, "Spark numbers the nodes of its tree in an unknown order")
        try:
            found = self._of_node(name, node, jvm, children)
        except UnsupportedExpressionError as error:
            raise error.called_in(_place_of(jvm)) from None
        if isinstance(found, Call) and found.function not in FUNCTIONS and name not in self._places:
            self._places[name] = _place_of(jvm)
        return found, end

    def _of_node(self, name: str, node: Mapping[str, Any], jvm: Any, children: list[Expression]) -> Expression:
        """Returns the tree of a node whose children are read."""
        if name == "AggregateExpression":
            if not self._aggregates:
                raise UnsupportedExpressionError("an aggregate function", "it is used outside of an aggregation")
            function = jvm.aggregateFunction()
            if jvm_name(function) in REPLACED_AGGREGATES:
                function = function.replacement()
                children = [self.read(function), *children[1:]]
            if jvm_name(function) == "PivotFirst":
                return pivoted(children[0], items(function.pivotColumnValues()))
            return aggregate_call(jvm, function, children[0], children[1] if len(children) > 1 else None)
        if name == "CommonExpressionDef":
            self._definitions.append((_common_id(jvm), children[0]))
            return children[0]
        if name == "LambdaFunction":
            body, *parameters = children
            return Lambda(body, tuple(p for p in parameters if isinstance(p, Variable)))
        type_ = _type_of(node) if node.get("dataType") else spark_type(jvm.dataType())
        if name in ("AttributeReference", "ScalarSubquery"):
            return self._subquery(jvm, type_) if name == "ScalarSubquery" else self._column(node, type_)
        if name in ("NamedLambdaVariable", "CommonExpressionRef"):
            return Variable(_common_id(jvm) if name == "CommonExpressionRef" else node["exprId"]["id"], type_)
        # Texts have no other collation than the default one in the engine, and expressions with one are refused.
        has_collation = name == "Collation" and children[0].type != "string"
        if name == "Literal" or (name in _FOLDED and not has_collation):
            return _literal(_constant(name, jvm), type_)
        if name in RANDOM:  # Spark chooses another seed each time that it analyzes the plan, and for each batch
            node, children = {}, children[: name in ("RandStr", "Shuffle")]
        settings = {**_settings(node), **{key: read(jvm) for key, read in _ASKED.get(name, {}).items()}}
        call = Call(name, tuple(children), type_, self._mode_of(name, jvm), settings)
        return with_gap(call) if name == "TimestampAddInterval" else call

    def _subquery(self, jvm: Any, type_: SparkType) -> Column:
        if self._subqueries is None or jvm.children().size():
            raise UnsupportedExpressionError("a scalar subquery", "select its value as a column first")
        self._subqueries.append(jvm.plan())
        return Column(max(self._columns.values(), default=-1) + len(self._subqueries), type_)

    def _column(self, node: Mapping[str, Any], type_: SparkType) -> Column:
        position = self._columns.get(node["exprId"]["id"])
        if position is None:
            raise UnsupportedExpressionError(f"the column {node['name']}", "it is not a column of the operator's input")
        return Column(position, type_)

    def _mode_of(self, name: str, jvm: Any) -> Mode:
        if name in _HAS_EVAL_MODE:
            return _MODES[jvm.evalMode().toString()]
        if name not in _CAN_FAIL:
            _CAN_FAIL[name] = "failOnError" in dir(jvm)
        if _CAN_FAIL[name]:
            return "ansi" if jvm.failOnError() else "legacy"
        return self._mode


def _end_of(nodes: Sequence[Mapping[str, Any]], at: int) -> int:
    """Returns the place behind the nodes of a tree."""
    missing = 1
    while missing:
        missing += nodes[at]["num-children"] - 1
        at += 1
    return at


def _place_of(jvm: Any) -> str:
    """Returns file and line of the author's call that made a node; empty for SQL text and nodes that Spark adds."""
    found = jvm.origin().pysparkErrorContext()
    return str(found.get()._2()) if found.isDefined() else ""


def spark_type(jvm: Any) -> SparkType:
    """Returns a data type of the JVM in JSON form, without the default collation that Spark adds to some strings."""
    return _without_default(str(jvm.json()))


def _type_of(node: Mapping[str, Any]) -> SparkType:
    """Returns the type of a node of an expression's JSON text."""
    return _without_default(json.dumps(node["dataType"]))


def _without_default(text: str) -> SparkType:
    type_: SparkType = json.loads(text.replace('"string collate UTF8_BINARY"', '"string"'))
    return type_


def function_number(jvm: Any) -> int:
    """Returns the number that represents a Python function in a plan."""
    return int(bytes(int(byte) for byte in jvm.command().mkString(",").split(",")))


def _constant(name: str, jvm: Any) -> Any:
    """Returns the value of a constant, or of a function that Spark computes when the program is planned."""
    from py4j.java_gateway import JavaClass

    if name == "CurrentTimeZone":  # of the session that is active in this thread of the JVM
        return JavaClass("org.apache.spark.sql.internal.SQLConf", jvm._gateway_client).get().sessionLocalTimeZone()
    return jvm.value() if name == "Literal" else jvm.eval(None)


def _common_id(jvm: Any) -> int:
    """Returns the id of an expression that is used several times; negative, unlike those of lambda variables."""
    return -1 - int(jvm.id().id())


def jvm_name(jvm: Any) -> str:
    """Returns the name of the case class or case object of a node in the JVM."""
    return str(jvm.productPrefix())


def _patterns(jvm: Any) -> list[str | None]:
    """Returns the constant patterns of ``LIKE ANY`` and ``LIKE ALL``."""
    return [None if each is None else str(each.toString()) for each in items(jvm.patterns())]


def _options(jvm: Any) -> dict[str, str]:
    """Returns the options of a function of JSON or CSV."""
    pairs = jvm.options().toSeq()
    return {str(pairs.apply(at)._1()): str(pairs.apply(at)._2()) for at in range(pairs.size())}


def _name(node: Mapping[str, Any]) -> str:
    return str(node["class"]).rsplit(".", 1)[-1].rstrip("$")


def _settings(node: Mapping[str, Any]) -> dict[str, Any]:
    settings = {key: node[key] for key in _SETTINGS if node.get(key) is not None}
    if node.get("timeZoneId"):
        settings["zone"] = node["timeZoneId"]
    return settings


def _literal(value: Any, type_: SparkType) -> Literal:
    from py4j.java_gateway import get_field

    if value is None or isinstance(value, bool):
        return Literal(value, type_)
    if isinstance(value, bytes | bytearray):
        return Literal(bytes(value).hex(), type_)
    if isinstance(type_, dict):
        raise UnsupportedExpressionError(f"a constant of type {type_['type']}")
    if type_ == "interval":
        parts = (get_field(value, name) for name in ("months", "days", "microseconds"))
        return Literal(",".join(map(str, parts)), type_)
    if isinstance(value, int | str):
        return Literal(str(value), type_)
    return Literal(repr(value) if isinstance(value, float) else str(value.toString()), type_)


def companion(package: Any, name: str) -> Any:
    """Returns the companion object of a Scala class."""
    return getattr(getattr(package, f"{name}$"), "MODULE$")


def items(sequence: Any) -> list[Any]:
    """The elements of a Scala sequence."""
    return [sequence.apply(at) for at in range(sequence.size())]


def output(attributes: Any) -> tuple[tuple[TypedColumn, ...], tuple[int, ...]]:
    """The typed columns of a plan's output, and Spark's ids of them."""
    from py4j.java_gateway import JavaClass

    # One text for all of them: the columns are the children of the array's node.
    array = JavaClass("org.apache.spark.sql.catalyst.expressions.CreateArray", attributes._gateway_client)
    [_, *nodes] = json.loads(array(attributes, False).toJSON())
    columns = tuple(TypedColumn(node["name"], _type_of(node), node["nullable"]) for node in nodes)
    return columns, tuple(int(node["exprId"]["id"]) for node in nodes)


class PlanNodes:
    """The typed nodes that were read from an analyzed plan, and Spark's ids of the columns of each."""

    def __init__(self, jvm: Any, ansi: bool, zone: str) -> None:
        """``ansi`` is the session's ``spark.sql.ansi.enabled``, and ``zone`` its time zone."""
        self._ansi = ansi
        self.zone = zone
        self._tag = companion(jvm.org.apache.spark.sql.catalyst.plans.logical, "LogicalPlan").PLAN_ID_TAG()
        self.nodes: list[PlanNode] = []
        self.ids: list[tuple[int, ...]] = []
        self.places: dict[str, str] = {}
        """The author's file and line for each function that the engine may lack."""

    def add(self, node: PlanNode, ids: tuple[int, ...]) -> int:
        """Adds a node whose columns have these ids of Spark's, and returns its position."""
        self.nodes.append(node)
        self.ids.append(ids)
        return len(self.nodes) - 1

    def represent(self, kind: type[PlanNode], plan: Any, /, *inputs: int, **fields: Any) -> int:
        """Adds the node of a relation of the plan, and returns its position."""
        columns, ids = output(plan.output())
        return self.add(kind(columns=columns, inputs=inputs, plan_id=self.plan_id(plan), **fields), ids)

    def with_values(self, subqueries: Sequence[Any], input_: int) -> int:
        """Adds joins of a node with the values of subqueries, which are columns after those of the node."""
        raise NotImplementedError

    def plan_id(self, plan: Any) -> int | None:
        """The id of the captured relation that a plan represents."""
        found = plan.getTagValue(self._tag)
        return int(found.get()) if found.isDefined() else None

    def expressions(
        self, expressions: Sequence[Any], *inputs: int, aggregates: bool = False, subqueries: list[Any] | None = None
    ) -> tuple[Expression, ...]:
        """Reads expressions over the columns of the nodes ``inputs``.

        ``subqueries`` receives the plans of subqueries with one value, which are columns after those of the inputs.
        """
        columns = [id_ for input_ in inputs for id_ in self.ids[input_]]
        positions = {id_: at for at, id_ in enumerate(columns)}
        reader = ExpressionReader(
            positions, ansi=self._ansi, aggregates=aggregates, places=self.places, subqueries=subqueries
        )
        return tuple(reader.read(expression) for expression in expressions)
