"""Spark's functions beside the engine's: every example in Spark's own catalogue of functions, computed by both.

``python -m tests.support.parity`` prints the page of the documentation that says which functions the engine has.
"""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

import ckpt_runtime.expressions.functions  # noqa: F401 registers the functions
from ckpt_runtime.expressions.evaluation import RANDOM, Frame, compile_expression, evaluate
from ckpt_runtime.expressions.nodes import Call, Column, Expression, Literal
from ckpt_runtime.expressions.types import EvaluationError, UnsupportedExpressionError, arrow_type
from ckpt_runtime.frontend.catalyst import ExpressionReader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_EXAMPLE = re.compile(r"> (SELECT .*?);\n", re.S)
OTHER_GROUPS = frozenset(
    {
        *("agg_funcs", "window_funcs", "generator_funcs", "sketch_funcs", "variant_funcs", "xml_funcs", "st_funcs"),
        *("avro_funcs", "protobuf_funcs"),
    }
)
"""Functions that are no expressions over one row, or over types that streams of the engine do not have."""
_CHUNK = 40


@dataclass(slots=True)
class Example:
    """One example of a function. ``kind`` is equal, clock, random, refused or differs; ``note`` says why not equal."""

    function: str
    group: str
    query: str
    kind: str = ""
    note: str = ""
    values: list[Any] | None = None
    failure: str = ""


def compare_examples(spark: SparkSession, every: int = 1) -> list[Example]:
    """Computes the examples of all functions of one row, or of ``every`` n-th one.

    Aggregates, generators and tables are left out.
    """
    found = [each for each in catalogue(spark) if each[1] not in OTHER_GROUPS]
    chosen = set(sorted({name for name, _, _ in found})[::every])
    examples = [Example(*each) for each in found if each[0] in chosen]
    computed = []
    for example in examples:
        expressions = _in_columns(spark, example)
        if expressions is None:
            continue
        _compute(example, expressions)
        computed.append(example)
    for example in computed:
        if "regular expression" in example.note and _refuses_pattern(spark, example.query):
            example.kind = "equal"  # Spark cannot compute it either
    comparable = [example for example in computed if not example.kind]
    for at in range(0, len(comparable), _CHUNK):
        _compare(spark, comparable[at : at + _CHUNK])
    return computed


def _refuses_pattern(spark: SparkSession, query: str) -> bool:
    """Whether Spark fails with a query because Java does not read a regular expression in it."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        spark.sql(query)._jdf.head()
    except (PySparkException, Py4JJavaError) as error:
        return "INVALID_PARAMETER_VALUE.PATTERN" in str(error) or "PatternSyntaxException" in str(error)
    return False


def catalogue(spark: SparkSession) -> Iterator[tuple[str, str, str]]:
    """Yields function, group and query of each example of Spark's catalogue of functions."""
    registry = spark._jsparkSession.sessionState().functionRegistry()
    names = registry.listFunction()
    for at in range(names.size()):
        found = registry.lookupFunction(names.apply(at))
        if found.isDefined():
            info = found.get()
            for query in _EXAMPLE.findall(info.getExamples()):
                yield info.getName(), info.getGroup(), query


def _expressions(spark: SparkSession, query: str) -> list[Any] | None:
    """Returns the expressions that a query without a table selects; None for other queries."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        plan = spark.sql(query)._jdf.queryExecution().analyzed()
    except (PySparkException, Py4JJavaError):
        return None  # an example of an error, or of something that is not installed
    if plan.nodeName() != "Project" or plan.child().nodeName() != "OneRowRelation":
        return None
    selected = of_session(spark, plan).projectList()
    return [selected.apply(at) for at in range(selected.size())]


def _in_columns(spark: SparkSession, example: Example) -> list[Any] | None:
    """Returns the selected expressions. An interval, which no column holds, is added to a time in the example."""
    expressions = _expressions(spark, example.query)
    if expressions is not None and len(expressions) == 1 and _is_interval(expressions[0]):
        example.query = f"SELECT {_TIME} + ({example.query.removeprefix('SELECT ')})"
        return _expressions(spark, example.query)
    return expressions


_TIME = "TIMESTAMP_NTZ'2001-01-31 04:05:06'"


def _is_interval(expression: Any) -> bool:
    name = str(expression.dataType().typeName())
    return name == "interval" or name.startswith(("interval year", "interval month"))


def of_session(spark: SparkSession, plan: Any) -> Any:
    """Returns a plan with the current user, catalog and database as constants, as the planner reads it."""
    assert spark._jvm is not None
    manager = spark._jsparkSession.sessionState().catalogManager()
    return spark._jvm.org.apache.spark.sql.catalyst.optimizer.ReplaceCurrentLike(manager).apply(plan)


def _compute(example: Example, expressions: Sequence[Any]) -> None:
    """Evaluates the constants of an example as constants, then as columns: both have to give the same."""
    try:
        trees = [ExpressionReader({}, ansi=True).read(expression) for expression in expressions]
        constants = [_evaluated(tree, Frame([], 1, moment=_MOMENT, random_bytes=os.urandom)) for tree in trees]
        for kind, names in (("clock", _CLOCKS), ("random", RANDOM | {"AesEncrypt"})):
            if any(_calls(tree, names) for tree in trees):
                example.kind = kind
                return
    except UnsupportedExpressionError as error:
        example.kind, example.note = "refused", str(error)
        return
    except EvaluationError as error:
        example.failure = str(error)
        return
    example.values = constants
    for tree, constant in zip(trees, constants, strict=True):
        columns: list[pa.Array] = []
        varying = _with_columns(tree, columns)
        try:
            value = _evaluated(varying, Frame(columns, 3, moment=_MOMENT))
        except UnsupportedExpressionError:
            continue  # patterns, units and names of zones have to be constant
        if shown(value) != shown(constant):
            example.kind, example.note = "differs", f"constants give {constant}, columns {value}"


_CLOCKS = frozenset({"CurrentTimestamp", "Now", "CurrentDate", "LocalTimestamp"})
_MOMENT = 1_600_000_000_000_000


def _calls(tree: Expression, names: frozenset[str]) -> bool:
    if not isinstance(tree, Call):
        return False
    return tree.function in names or any(_calls(argument, names) for argument in tree.arguments)


def _evaluated(tree: Expression, frame: Frame) -> Any:
    values = evaluate(compile_expression(tree), frame, arrow_type(tree.type)).to_pylist()
    assert all(shown(value) == shown(values[0]) for value in values)
    return values[0]


def _with_columns(tree: Expression, columns: list[pa.Array]) -> Expression:
    """Returns the tree with a column of three equal values in place of each constant but names of fields."""
    if isinstance(tree, Literal):
        from ckpt_runtime.expressions.evaluation import literal_scalar

        columns.append(pa.repeat(literal_scalar(tree), 5).slice(1, 3))  # a part of a batch, as operators get it
        return Column(len(columns) - 1, tree.type)
    if not isinstance(tree, Call):
        return tree
    named = tree.function == "CreateNamedStruct"
    arguments = [
        argument if named and at % 2 == 0 else _with_columns(argument, columns)
        for at, argument in enumerate(tree.arguments)
    ]
    return Call(tree.function, tuple(arguments), tree.type, tree.mode, tree.settings)


def _compare(spark: SparkSession, examples: Sequence[Example]) -> None:
    """Has Spark compute examples, many in one query; one by one where some of them fail."""
    from pyspark.errors import PySparkException

    passing = [example for example in examples if not example.failure]
    for group in [passing, *([example] for example in examples if example.failure)]:
        if not group:
            continue
        try:
            rows = [_spark_values(spark, group)]
        except PySparkException as error:
            if len(group) > 1:
                for example in group:
                    _compare(spark, [example])
                continue
            if not group[0].failure:
                group[0].kind, group[0].note = "differs", f"Spark fails: {str(error).splitlines()[0]}"
            continue
        at = 0
        for example in group:
            if example.failure:
                example.kind, example.note = "differs", f"Spark does not fail: {example.failure}"
                continue
            assert example.values is not None
            wanted = rows[0][at : at + len(example.values)]
            at += len(example.values)
            if shown(wanted) != shown(example.values):
                example.kind, example.note = "differs", f"Spark gives {wanted}, the engine {example.values}"
    for example in examples:
        example.kind = example.kind or "equal"


def _spark_values(spark: SparkSession, examples: Sequence[Example]) -> list[Any]:
    selected = ", ".join(example.query.removeprefix("SELECT ") for example in examples)
    table = spark.sql(f"SELECT {selected}").toArrow()
    return [column.to_pylist()[0] for column in table.columns]


def shown(value: Any) -> Any:
    """Returns a value in a form whose equality is that of results: NaN equals NaN, doubles to twelve digits."""
    if isinstance(value, float):
        return "NaN" if value != value else float(f"{value:.12g}")
    if isinstance(value, dict):
        return {key: shown(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [shown(element) for element in value]
    return value


def statuses(examples: Sequence[Example]) -> dict[str, dict[str, str]]:
    """Returns by group, then by function: equal, refused (all examples are), partly, or differs."""
    kinds: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for example in examples:
        kinds[example.group][example.function].add(example.kind)
    return {
        group: {name: _status(found) for name, found in sorted(functions.items())}
        for group, functions in sorted(kinds.items())
    }


def _status(found: set[str]) -> str:
    if "differs" in found:
        return "differs"
    if found == {"equal", "clock"}:
        return "clock"
    if len(found) == 1:
        return next(iter(found))
    return "partly"


def page(examples: Sequence[Example]) -> str:
    """Returns the page of the documentation."""
    lines = [_HEAD]
    for group, functions in statuses(examples).items():
        lines.append(f"\n## {group.removesuffix('_funcs').capitalize()}\n")
        for status in ("equal", "partly", "clock", "random", "refused"):
            names = [f"`{name}`" for name, found in functions.items() if found == status]
            if names:
                lines.append(f"{status.capitalize()}: {', '.join(names)}.\n")
    return "\n".join(lines).rstrip() + "\n"


_HEAD = """\
# Functions of Spark in PySpark programs

This page is generated: every example of Spark's own catalogue of functions is computed by Spark and by the engine.
*Equal* functions have Spark's results for all of their examples. *Partly* available ones have them for some; for the
others the plan is refused. *Clock* functions give the time at which an operator gets a batch of rows, the same for all
of its rows; a recovery computes rows again with the time that it is then, as Spark does. *Random* functions give other
values for each row, whatever their seed, as in Spark's streams, which replace the seed for each batch; a recovery gives
the rows that it computes again other values. *Refused* functions are refused when the plan is made; nothing is computed
in another way. An example that fails in Spark, too, is equal; so is a regular expression that neither Java nor the
engine reads. Intervals of months, which no column holds, are compared by adding them to a time.
Aggregates, generators and functions of variants, XML, sketches and geometry are not on this page.
"""


def main() -> None:
    """Prints the page."""
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    examples = compare_examples(spark)
    for example in examples:
        if example.kind == "differs":
            print(f"{example.query}: {example.note}", file=sys.stderr)
    print(page(examples), end="")
    spark.stop()


if __name__ == "__main__":
    main()
