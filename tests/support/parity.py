"""Spark's functions beside the engine's: every example in Spark's own catalogue of functions, computed by both.

``python -m tests.support.parity`` prints the page of the documentation that says which functions the engine has.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

import ckpt_runtime.expressions.functions  # noqa: F401 registers the functions
from ckpt_runtime.expressions.evaluation import RANDOM, Frame, compile_expression, evaluate
from ckpt_runtime.expressions.generators import compile_generator
from ckpt_runtime.expressions.nodes import Call, Column, Expression, Literal, rewritten
from ckpt_runtime.expressions.types import EvaluationError, UnsupportedExpressionError, arrow_type
from ckpt_runtime.frontend.catalyst import ExpressionReader
from ckpt_runtime.graph.aggregates import AGGREGATES, GroupAggregate, accepts
from ckpt_runtime.operators.aggregates.accumulator import AggregateFailedError, Rows
from ckpt_runtime.operators.aggregates.registry import accumulator_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_EXAMPLE = re.compile(r"> (SELECT .*?);\n", re.S)
OF_ROWS = frozenset({"agg_funcs", "generator_funcs"})
"""Groups of functions that read or make several rows."""
_OTHER_GROUPS = frozenset({"window_funcs", "avro_funcs", "protobuf_funcs"})
"""Functions over an order of all rows, and those of Spark's libraries of formats."""
_UNORDERED = frozenset({"collect_set", "collect_union"})
"""Aggregates whose results are sets, which Spark writes in the order of its hashes; so are lists of distinct texts."""
_SEVERAL_RESULTS = frozenset({"SELECT mode(col, false) FROM VALUES (-10), (0), (10) AS tab(col)"})
"""Examples of which each of several results is right."""
_PREVIEW = "Spark has their types only with a setting that is off"
_WHOLE = "they need an order of all rows, which a stream without an end does not have"
_PARTS = "they make a column, a function or an order, which other functions and operations take"
NOT_ON_STREAMS = {
    **dict.fromkeys(("cume_dist", "dense_rank", "lag", "lead", "nth_value", "ntile", "percent_rank"), _WHOLE),
    **dict.fromkeys(("rank", "row_number", "counter_diff"), _WHOLE),
    **dict.fromkeys(
        ("asc", "asc_nulls_first", "asc_nulls_last", "desc", "desc_nulls_first", "desc_nulls_last"), _PARTS
    ),
    **dict.fromkeys(("years", "months", "days", "hours", "bucket"), "they partition a table that Spark creates"),
    "broadcast": "a hint for a join of tables",
    **dict.fromkeys(("col", "column", "lit", "expr", "call_function", "call_udf", "unwrap_udt"), _PARTS),
    **dict.fromkeys(("udf", "arrow_udf", "pandas_udf", "udtf", "arrow_udtf"), _PARTS),
    **dict.fromkeys(("make_time", "time_diff", "time_trunc", "to_time", "try_to_time", "unix_nanos"), _PREVIEW),
    **{f"time_from_{unit}": _PREVIEW for unit in ("micros", "millis", "seconds")},
    **{f"time_to_{unit}": _PREVIEW for unit in ("micros", "millis", "seconds")},
}
"""Functions of ``pyspark.sql.functions`` without a meaning on streams, and why."""
_IN_QUERIES = (
    *("grouping", "grouping_id", "product", "session_window", "window", "window_time"),
    *(f"kll_sketch_{what}_{kind}" for what in ("agg", "merge") for kind in ("bigint", "double", "float")),
)
"""Functions that are compared in queries of their own: an example without keys does not show them, or the examples
call a function that is refused."""
_IN_SQL = {
    "negate": "negative",
    "bitwise_not": "~",
    "create_map": "map",
    "count_distinct": "count",
    "sum_distinct": "sum",
    "listagg_distinct": "listagg",
    "string_agg_distinct": "string_agg",
    "timestamp_add": "dateadd",
    "timestamp_diff": "datediff",
}
"""The name in SQL of each function of ``pyspark.sql.functions`` that has another one there."""
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
    """Computes the examples of all functions, or of each ``every``-th one, except tables and aggregates by keys."""
    found = [each for each in catalogue(spark) if each[1] not in _OTHER_GROUPS and each[2] not in _SEVERAL_RESULTS]
    chosen = set(sorted({name for name, _, _ in found})[::every])
    examples = [Example(*each) for each in found if each[0] in chosen]
    computed = []
    for example in examples:
        expressions = _in_columns(spark, example)
        if expressions is not None:
            _compute(example, expressions)
        elif not _compare_rows(spark, example):
            continue
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


def _compare_rows(spark: SparkSession, example: Example) -> bool:
    """Computes an example that makes rows, or that aggregates all rows of a table, in both systems.

    Returns false for examples of another kind.
    """
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        plan = of_session(spark, spark.sql(example.query)._jdf.queryExecution().analyzed())
        while plan.nodeName() == "Project":
            plan = plan.child()
        if plan.nodeName() == "Generate" and plan.child().nodeName() == "OneRowRelation":
            found = _generated(plan)
        elif plan.nodeName() == "Aggregate" and not plan.groupingExpressions().size():
            found = _aggregated(spark, plan)
        else:
            return False
    except UnsupportedExpressionError as error:
        example.kind, example.note = "refused", str(error)
        return True
    except (EvaluationError, AggregateFailedError) as error:
        found, example.failure = [], str(error)
    except (PySparkException, Py4JJavaError):
        return False
    try:
        wanted = [list(row.values()) for row in spark.sql(example.query).toArrow().to_pylist()]
    except PySparkException as error:
        example.kind, example.note = "equal" if example.failure else "differs", f"Spark fails: {error}"
        return True
    if example.function in _UNORDERED or re.search(r"(?i)(listagg|string_agg)\(DISTINCT", example.query):
        found, wanted = ([[sorted(value) for value in row] for row in rows] for rows in (found, wanted))
    example.kind = "differs" if example.failure or shown(found) != shown(wanted) else "equal"
    example.note = f"Spark gives {wanted}, the engine {example.failure or found}"
    return True


def _generated(plan: Any) -> list[list[Any]]:
    tree = ExpressionReader({}, ansi=True).read(plan.generator())
    elements = compile_generator(tree)(Frame([], 1))
    [start], [count] = elements.starts, elements.counts
    columns = [each.slice(start, count).to_pylist() for each in elements.columns]
    if elements.positions:
        columns.insert(0, list(range(count)))
    return [list(row) for row in zip(*columns, strict=True)]


def _aggregated(spark: SparkSession, plan: Any) -> list[list[Any]]:
    from pyspark.sql.classic.dataframe import DataFrame

    assert spark._jvm is not None
    rows = spark._jvm.org.apache.spark.sql.classic.Dataset.ofRows(spark._jsparkSession, plan.child())
    output, selected = plan.child().output(), plan.aggregateExpressions()
    places = {output.apply(at).exprId().id(): at for at in range(output.size())}
    reader = ExpressionReader(places, ansi=True, aggregates=True)
    trees = [reader.read(selected.apply(at)) for at in range(selected.size())]
    table = DataFrame(rows, spark).toArrow().combine_chunks()
    frame = Frame([column.combine_chunks() for column in table.columns], len(table))
    results: list[pa.Array] = []

    def result(tree: Expression) -> Expression | None:
        if not isinstance(tree, Call) or not tree.settings.get("aggregate"):
            return None
        results.append(_result(tree, frame))
        return Column(len(results) - 1, tree.type)

    behind = [rewritten(tree, result) for tree in trees]
    return [[_evaluated(tree, Frame(results, 1)) for tree in behind]]


def _result(call: Call, frame: Frame) -> pa.Array:
    """Returns the result of an aggregate over all rows."""
    arguments = {str(at): (tree, arrow_type(tree.type)) for at, tree in enumerate(call.arguments)}
    filtered = bool(call.settings.get("filtered"))
    kinds = tuple(kind for _, kind in arguments.values())[: len(arguments) - filtered]
    if call.function not in AGGREGATES or not accepts(
        call.function, kinds, distinct=bool(call.settings.get("distinct"))
    ):
        raise UnsupportedExpressionError(f"the aggregate {call.function}")
    values = [evaluate(compile_expression(tree), frame, kind) for tree, kind in arguments.values()]
    if filtered:
        values = [column.filter(values[-1]) for column in values[:-1]]
    settings, kind = call.settings, arrow_type(call.type)
    aggregate = GroupAggregate(call.function, tuple(arguments), "a", kind, call.mode == "ansi", filtered, settings)
    accumulator = accumulator_for(aggregate, pa.schema([(name, kind) for name, (_, kind) in arguments.items()]))
    nothing = Rows(np.empty(0, dtype=np.uint32), [pa.array([], field.type) for field in accumulator.stored])
    rows = Rows(np.zeros(len(values[0]) if values else frame.length, dtype=np.uint32), values)
    return accumulator.result(accumulator.combined(1, nothing, rows)).cast(kind)


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
        if example.function not in _IN_QUERIES:
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


def pyspark_functions() -> list[str]:
    """Returns the names of the functions of ``pyspark.sql.functions``."""
    from pyspark.sql import functions

    return [name for name in functions.__all__ if not inspect.isclass(getattr(functions, name))]


def page(examples: Sequence[Example]) -> str:
    """Returns the page of the documentation."""
    groups = statuses(examples)
    known = {name: found for functions in groups.values() for name, found in functions.items()}
    streamed = [name for name in pyspark_functions() if name not in NOT_ON_STREAMS]
    there = [
        name
        for name in streamed
        if name in _IN_QUERIES or known.get(_IN_SQL.get(name, name), "refused") not in ("refused", "differs")
    ]
    share = f"{100 * len(there) / len(streamed):.0f} % ({len(there)} of {len(streamed)})"
    lines = [_HEAD.replace("SHARE", share)]
    for group, functions in groups.items():
        lines.append(f"\n## {group.removesuffix('_funcs').capitalize()}\n")
        for status in ("equal", "partly", "clock", "random", "refused"):
            names = [f"`{name}`" for name, found in functions.items() if found == status]
            if names:
                lines.append(f"{status.capitalize()}: {', '.join(names)}.\n")
    lines.append("\n## Others\n")
    lines.append(f"Compared in queries: {', '.join(f'`{name}`' for name in _IN_QUERIES)}.\n")
    renamed = ", ".join(f"`{name}` (`{other}`)" for name, other in _IN_SQL.items())
    lines.append(f"These have another name in SQL: {renamed}.\n")
    lines.append("These have no meaning on streams by themselves, and are not counted:\n")
    for reason in dict.fromkeys(NOT_ON_STREAMS.values()):
        names = [f"`{name}`" for name, why in NOT_ON_STREAMS.items() if why == reason]
        lines.append(f"- {', '.join(names)}: {reason}.")
    return "\n".join(lines).rstrip() + "\n"


_HEAD = """\
# Functions of Spark in PySpark programs

The engine computes SHARE of the functions of `pyspark.sql.functions` that have a meaning on streams.

This page is generated: every example of Spark's own catalogue of functions is computed by Spark and by the engine.
*Equal* functions have Spark's results for all of their examples. *Partly* available ones have them for some; for the
others the plan is refused. *Clock* functions give the time at which an operator gets a batch of rows, the same for all
of its rows; a recovery computes rows again with the time that it is then, as Spark does. *Random* functions give other
values for each row, whatever their seed, as in Spark's streams, which replace the seed for each batch; a recovery gives
the rows that it computes again other values. *Refused* functions are refused when the plan is made; nothing is computed
in another way. An example that fails in Spark, too, is equal; so is a regular expression that neither Java nor the
engine reads. Intervals of months, which no column holds, are compared by adding them to a time. Aggregates are compared
over all rows of an example's table.
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
