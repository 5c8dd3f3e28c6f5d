"""Reads calls of aggregate functions in Spark's analyzed plans, with their further parts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from ckpt_runtime.expressions.functions.sketches import THETA_SIZES, sketch_library
from ckpt_runtime.expressions.nodes import Call, Expression, Literal, Mode
from ckpt_runtime.expressions.types import SparkType, UnsupportedExpressionError

TABLES = "tables"
"""Name of the setting with Spark's constants by name; they are not part of what an aggregate computes."""
TRIED = "tried"
"""Name of the setting of a sum of integers or durations that is null once it has exceeded 64 bits."""
FILTERED = "filtered"
"""Name of the setting of an aggregate whose last argument is the condition of its ``FILTER``."""
_IGNORES_NULLS = {"ignoreNulls": lambda jvm: bool(jvm.ignoreNulls())}
_DESCENDING = {"descending": lambda jvm: bool(jvm.reverse()) or None}
_ASKED: dict[str, dict[str, Callable[[Any], Any]]] = {
    "First": _IGNORES_NULLS,
    "Last": _IGNORES_NULLS,
    "AnyValue": _IGNORES_NULLS,
    "CollectList": _IGNORES_NULLS,
    "CollectSet": _IGNORES_NULLS,
    "Percentile": _DESCENDING,
    "PercentileDisc": _DESCENDING,
    "Sum": {TRIED: lambda jvm: str(jvm.evalContext().evalMode().toString()) == "TRY" or None},
    "MaxMinByK": {"k": lambda jvm: int(jvm.k()), "least": lambda jvm: bool(jvm.reverse())},
    # Of equally frequent values Spark takes the least or the greatest one, or any.
    "Mode": {"least": lambda jvm: bool(jvm.reverseOpt().get()) if jvm.reverseOpt().isDefined() else None},
}
"""Settings that the JSON text of a tree does not contain, by function; one that is None is not set."""
_COLUMNS = {"MaxMinByK": 2}
"""The number of arguments that are columns, of functions whose others are settings."""
_MODES: dict[str, Callable[[Any], Any]] = {
    "Sum": lambda jvm: jvm.evalContext().evalMode(),
    "Average": lambda jvm: jvm.evalMode(),
}
_EVAL_MODES: dict[str, Mode] = {"ANSI": "ansi", "LEGACY": "legacy", "TRY": "try"}
_SAME_WHEN_DISTINCT = frozenset(
    {
        *("Min", "Max", "BoolAnd", "BoolOr", "CollectSet", "BitAndAgg", "BitOrAgg"),
        *("BitmapConstructAgg", "BitmapOrAgg", "BitmapAndAgg"),
        *("HllSketchAgg", "HllUnionAgg", "ThetaSketchAgg", "ThetaUnionAgg", "ThetaIntersectionAgg"),
    }
)
_SKETCH_SIZES = {
    "HllSketchAgg": (4, 21),
    **dict.fromkeys(("ThetaSketchAgg", "ThetaUnionAgg", "ThetaIntersectionAgg"), THETA_SIZES),
    **{f"Kll{part}Agg{kind}": (8, 65535) for part in ("Sketch", "Merge") for kind in ("Bigint", "Float", "Double")},
}
"""The least and the greatest size of the sketches of an aggregate: the last argument, which may be missing."""

_PIVOTED: dict[str, Callable[[Any], str]] = {
    **dict.fromkeys(("byte", "short", "integer", "long"), str),
    "string": lambda text: str(text.toString()),
    "boolean": lambda given: str(given).lower(),
}
"""How constants are written by which a pivot may have its columns, by their types."""

REPLACED_AGGREGATES = frozenset({"RegrCount", "RegrAvgX", "RegrAvgY", "RegrSXX", "RegrSYY", "PercentileCont"})
"""Functions that Spark's optimizer replaces by other aggregates, which their nodes know."""


def aggregate_call(expression: Any, jvm: Any, function: Expression, condition: Expression | None) -> Call:
    """Returns the call of an aggregate, with the setting ``aggregate``.

    ``expression`` is Spark's ``AggregateExpression``, ``jvm`` the function in it or what replaces that function, and
    ``function`` the call of ``jvm``. Raises UnsupportedExpressionError for what the engine does not compute as Spark
    does.
    """
    assert isinstance(function, Call)
    name, arguments = function.function, function.arguments[: _COLUMNS.get(function.function)]
    settings: dict[str, Any] = {"aggregate": True}
    settings |= {key: value for key, read in _ASKED.get(name, {}).items() if (value := read(jvm)) is not None}
    if name == "ListAgg":
        arguments, listed = _listed(jvm, arguments)
        settings |= listed
    if name in _SKETCH_SIZES or name == "HllUnionAgg":
        settings |= _of_sketch(name, arguments[1:])
        arguments = arguments[:1]
    if expression.isDistinct() and name not in _SAME_WHEN_DISTINCT:
        name, arguments, distinct = _of_distinct(name, arguments)
        settings |= distinct
    if settings.get("ignoreNulls") is False and name in ("CollectList", "CollectSet"):
        raise UnsupportedExpressionError(f"{name} with RESPECT NULLS")
    if name == "HyperLogLogPlusPlus":
        # Spark chooses the number of bits of a register from the greatest relative standard deviation.
        settings["precision"] = math.ceil(2.0 * math.log(1.106 / jvm.relativeSD()) / math.log(2.0))
        arguments = (_hashed(arguments[0]),)
        settings[TABLES] = _tables(settings["precision"])
    if name in ("Percentile", "PercentileDisc"):
        settings["percentages"] = _percentages(arguments[1])
        if name == "Percentile" and not (isinstance(arguments[2], Literal) and arguments[2].value == "1"):
            arguments, settings["weighted"] = (_as_one((arguments[0], arguments[2])),), True
        arguments = arguments[:1]
    if name == "ApproximatePercentile":
        settings["percentages"], settings["accuracy"] = _percentages(arguments[1]), _constant(arguments[2])
        arguments = arguments[:1]
    if name == "HistogramNumeric":
        arguments, settings["bins"] = arguments[:1], int(_constant(arguments[1]))
    mode = function.mode
    if name in _MODES:
        mode = _EVAL_MODES[_MODES[name](jvm).toString()]
    if condition is not None:
        # Spark evaluates the arguments only for rows that count; other rows could make them fail.
        arguments = tuple(_only_if(condition, argument) for argument in arguments)
        arguments, settings[FILTERED] = (*arguments, condition), True
    return Call(name, arguments, function.type, mode, settings)


def pivoted(function: Expression, values: Sequence[Any]) -> Call:
    """Returns what Spark's ``PivotFirst`` computes: an array with the value of the row that has each of ``values`` in
    the pivot column. The grouping below it, by the pivot column too, has left one such row.

    Raises UnsupportedExpressionError for values of types whose constants Spark's plan does not show.
    """
    assert isinstance(function, Call)
    column, value = function.arguments
    if not isinstance(column.type, str) or column.type not in _PIVOTED:
        raise UnsupportedExpressionError(
            f"pivot by a column of type {column.type}", "cast it to a text or an integer, and its values too"
        )
    settings = {"aggregate": True, "ignoreNulls": True}
    parts = []
    for each in values:
        constant = Literal(None if each is None else _PIVOTED[column.type](each), column.type)
        has_value = Call("EqualNullSafe", (column, constant), "boolean")
        found = Call("If", (has_value, value, Literal(None, value.type)), value.type)
        parts.append(Call("First", (found,), value.type, settings=settings))
    return Call("CreateArray", tuple(parts), {"type": "array", "elementType": value.type, "containsNull": True})


def _of_distinct(name: str, arguments: tuple[Expression, ...]) -> tuple[str, tuple[Expression, ...], dict[str, Any]]:
    """Returns a function with DISTINCT as the engine has it: its name, arguments and settings."""
    if name == "Count":
        return "CountDistinct", (_as_one(arguments),), {}
    if len(arguments) != 1:
        raise UnsupportedExpressionError(f"{name} with DISTINCT", "only functions of one column take DISTINCT")
    return name, arguments, {"distinct": True}


def _as_one(arguments: tuple[Expression, ...], required: int | None = None) -> Expression:
    """Several arguments as one: a struct, which is null if one of the first ``required`` is; None means all."""
    if len(arguments) == 1:
        return arguments[0]
    fields = [
        {"name": str(at), "type": each.type, "nullable": True, "metadata": {}} for at, each in enumerate(arguments)
    ]
    named = [part for at, each in enumerate(arguments) for part in (Literal(str(at), "string"), each)]
    kind: SparkType = {"type": "struct", "fields": fields}
    struct: Expression = Call("CreateNamedStruct", tuple(named), kind)
    for each in arguments[:required]:
        struct = Call("If", (Call("IsNull", (each,), "boolean"), Literal(None, kind), struct), kind)
    return struct


def _listed(jvm: Any, arguments: tuple[Expression, ...]) -> tuple[tuple[Expression, ...], dict[str, Any]]:
    """The argument and the settings of ``listagg``: its separator (hexadecimal digits for binaries), and its order.

    If it is not ordered by its own values alone, the argument is a struct of the value and what orders it.
    """
    separator = arguments[1]
    while isinstance(separator, Call) and separator.function == "Cast":
        separator = separator.arguments[0]
    if not isinstance(separator, Literal) or not isinstance(separator.value, str | None):
        raise UnsupportedExpressionError("listagg", "its separator must be a constant")
    settings: dict[str, Any] = {"separator": separator.value or ""}
    orders = jvm.orderExpressions()
    if orders.size():
        [order, *more] = [orders.apply(at) for at in range(orders.size())]
        if more or not order.child().semanticEquals(jvm.child()):
            settings["orders"] = [
                [str(each.direction().toString()).lower(), str(each.nullOrdering().toString()).lower()]
                for each in (order, *more)
            ]
            by = tuple(each.arguments[0] for each in arguments[2:] if isinstance(each, Call))
            return (_as_one((arguments[0], *by), 1),), settings
        settings["order"] = str(order.direction().toString()).lower()
    return arguments[:1], settings


def _of_sketch(name: str, others: tuple[Expression, ...]) -> dict[str, Any]:
    """The settings of an aggregate of sketches, from its arguments behind the first one."""
    sketch_library(name)
    if name == "HllUnionAgg":
        [mixed] = others
        if not isinstance(mixed, Literal):
            raise UnsupportedExpressionError(name, "allowDifferentLgConfigK must be a constant")
        return {"mixed": bool(mixed.value)}
    least, most = _SKETCH_SIZES[name]
    size = int(_constant(others[0])) if others else None
    if size is not None and not least <= size <= most:
        raise UnsupportedExpressionError(name, f"the size of its sketch is {size}, allowed are {least} to {most}")
    return {} if size is None else {"size": size}


def _only_if(condition: Expression, argument: Expression) -> Expression:
    if isinstance(argument, Literal):
        return argument
    return Call("If", (condition, argument, Literal(None, argument.type)), argument.type)


def _percentages(shares: Expression) -> Any:
    while isinstance(shares, Call) and shares.function == "Cast":
        shares = shares.arguments[0]
    several = isinstance(shares, Call) and shares.function == "CreateArray"
    parts = shares.arguments if isinstance(shares, Call) and several else (shares,)
    constants = [_constant(part) for part in parts]
    return constants if several else constants[0]


def _constant(share: Expression) -> float:
    while isinstance(share, Call) and share.function == "Cast":
        share = share.arguments[0]
    if not isinstance(share, Literal) or not isinstance(share.value, str):
        raise UnsupportedExpressionError("an aggregate", "its percentages, accuracy and bins must be constants")
    return float(share.value)


def _hashed(value: Expression) -> Expression:
    """The hash by which Spark counts distinct values; null stays null."""
    digest = Call("XxHash64", (value,), "long", settings={"seed": 42})
    return Call("If", (Call("IsNull", (value,), "boolean"), Literal(None, "long"), digest), "long")


def _tables(precision: int) -> dict[str, list[float]]:
    """The constants with which Spark corrects an estimate, read from Spark itself."""
    from pyspark import SparkContext

    jvm: Any = SparkContext._jvm
    helper = getattr(jvm.org.apache.spark.sql.catalyst.util, "HyperLogLogPlusPlusHelper$")
    constants = getattr(helper, "MODULE$")
    at = precision - 4
    return {
        "thresholds": [constants.THRESHOLDS()[at]] if at < len(constants.THRESHOLDS()) else [],
        "estimates": json.loads(jvm.java.util.Arrays.toString(constants.RAW_ESTIMATE_DATA()[at])) if at < 15 else [],
        "biases": json.loads(jvm.java.util.Arrays.toString(constants.BIAS_DATA()[at])) if at < 15 else [],
    }
