"""Expressions over Spark's whole catalogue of functions with generated rows, computed by Spark and by the engine.

An expression is an example of Spark's own in which some constants became columns of a generated table, or other
examples. Spark's analyzer says which of them have a meaning. An expression is equal, or the engine refuses it.
"""

from __future__ import annotations

import datetime
import decimal
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from hypothesis import strategies as st

import ckpt_runtime.expressions.functions  # noqa: F401 registers the functions
from ckpt_runtime.expressions.evaluation import Evaluator, Frame, compile_expression, evaluate
from ckpt_runtime.expressions.nodes import Call, Expression, Lambda
from ckpt_runtime.expressions.types import EvaluationError, UnsupportedExpressionError, arrow_type
from ckpt_runtime.frontend.catalyst import ExpressionReader
from tests.support.parity import OF_ROWS, catalogue

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_UTC = datetime.UTC
_TEXTS = (
    *("", " ", "a", "Spark", "SPARK sql", "  x ", "1", "-7", "3.5", "1e3", "NaN", "2020-02-29", "1500-01-01 10:00:00"),
    *("été", "ß", "😀b", "a,b,c", "%_\\", '{"a":1,"b":[1,2]}', "http://u@h.org:8/p?q=1#f", "x" * 70, "true", "UTC"),
)
_INTS = (0, 1, -1, 2, 3, 7, 100, -(1 << 31), (1 << 31) - 1)
_LONGS = (*_INTS, -(1 << 63), (1 << 63) - 1, 1 << 40)
_DOUBLES = (0.0, -0.0, 1.0, -1.5, 0.1, 2.5, 1e10, 1e300, -1e-300, float("nan"), float("inf"), float("-inf"))
_DATES = tuple(datetime.date(*d) for d in [(1970, 1, 1), (2020, 2, 29), (1582, 10, 4), (1500, 1, 31), (2021, 12, 31)])
_TIMES = tuple(
    datetime.datetime(*t)  # type: ignore[arg-type]
    for t in [
        (1970, 1, 1),
        (1969, 12, 31, 23, 59, 59, 999999),
        (2020, 3, 29, 1, 30),
        (2020, 10, 25, 0, 30, 0, 1),
        (1500, 1, 1, 12),
        (2024, 2, 29, 23, 59, 59, 500000),
    ]
)
_some_text, _some_int = st.sampled_from(_TEXTS), st.sampled_from(_INTS)

COLUMNS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "s": (pa.string(), _some_text),
    "t": (pa.string(), _some_text | st.text(max_size=8)),
    "i": (pa.int32(), _some_int | st.integers(-(1 << 31), (1 << 31) - 1)),
    "j": (pa.int32(), st.integers(-3, 5)),
    "l": (pa.int64(), st.sampled_from(_LONGS)),
    "y": (pa.int8(), st.integers(-128, 127)),
    "d": (pa.float64(), st.sampled_from(_DOUBLES) | st.floats()),
    "f": (pa.float32(), st.sampled_from(_DOUBLES[:6]) | st.floats(width=32)),
    "p": (
        pa.decimal128(12, 2),
        st.decimals(-(10**9), 10**9, places=2) | st.sampled_from([decimal.Decimal("2.50"), decimal.Decimal("-0.05")]),
    ),
    "k": (pa.date32(), st.sampled_from(_DATES)),
    "u": (pa.timestamp("us", "UTC"), st.sampled_from([t.replace(tzinfo=_UTC) for t in _TIMES])),
    "n": (pa.timestamp("us"), st.sampled_from(_TIMES)),
    "b": (pa.bool_(), st.booleans()),
    "x": (pa.binary(), st.sampled_from([b"", b"abc", b"\x00\x7f"])),
    "ai": (pa.list_(pa.int32()), st.lists(st.none() | st.integers(-2, 3), max_size=4)),
    "at": (pa.list_(pa.string()), st.lists(st.none() | _some_text, max_size=3)),
    "m": (pa.map_(pa.string(), pa.int32()), st.dictionaries(_some_text, st.none() | _some_int, max_size=3)),
}
_DDL = (
    "s STRING, t STRING, i INT, j INT, l BIGINT, y TINYINT, d DOUBLE, f FLOAT, p DECIMAL(12,2), k DATE, u TIMESTAMP,"
    " n TIMESTAMP_NTZ, b BOOLEAN, x BINARY, ai ARRAY<INT>, at ARRAY<STRING>, m MAP<STRING, INT>, id INT"
)
_KINDS = {
    "text": ("s", "t"),
    "whole": ("i", "j", "l", "y", "p"),
    "point": ("d", "f", "p"),
    "date": ("k", "u", "n"),
    "timestamp": ("u", "n", "k"),
    "flag": ("b",),
    "bytes": ("x",),
    "numbers": ("ai",),
    "texts": ("at",),
    "map": ("m",),
}
_CONSTANT = re.compile(
    r"""(?P<interval>\binterval\b\s*-?\s*('[^']*'|\d+))|(?P<bytes>\b[xX]\s?'[^']*')|(?P<date>\b(?i:date)\s?'[^']*')"""
    r"""|(?P<timestamp>\b(?i:timestamp(?:_ntz|_ltz)?)\s?'[^']*')|(?P<other>\b\w+\s?'[^']*')"""
    r"""|(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
    r"""|(?P<numbers>\barray\([-\d, ]+\))|(?P<texts>\barray\((?:'[^']*'(?:, )?)+\))|(?P<map>\bmap\('[^()]*\))"""
    r"""|(?P<point>(?<![\w.'])\d+\.\d+\w*)|(?P<whole>(?<![\w.'])\d+\w?\b)|(?P<flag>\b(?i:true|false)\b)"""
)
_SIZES = re.compile(r"space|repeat|pad|sequence|array_insert|format_number")
"""Functions with a size among their arguments: large ones would fill the memory of both systems."""
_LEFT_OUT = frozenset({"current_date", "curdate", "now", "unix_timestamp", "localtimestamp", "current_timestamp"})


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """Draws a table of all columns, a third of whose values are null."""
    count = draw(st.integers(6, 14))
    arrays = []
    for kind, values in COLUMNS.values():
        optional = st.one_of(st.none(), values, values)
        drawn = draw(st.lists(optional, min_size=count, max_size=count))
        arrays.append(pa.array([list(v.items()) if isinstance(v, dict) else v for v in drawn], kind))
    return pa.table(arrays, names=list(COLUMNS))


def examples_of(spark: SparkSession, functions: Iterable[str]) -> list[str]:
    """Returns the selected text of each example of the functions."""
    wanted = set(functions) - _LEFT_OUT
    found = [
        query.removeprefix("SELECT ")
        for name, group, query in catalogue(spark)
        if name in wanted and group not in OF_ROWS and " FROM VALUES " not in query
    ]
    return sorted(set(found))


@st.composite
def expressions(draw: st.DrawFn, examples: Sequence[str], depth: int = 1) -> str:
    """Draws an example with columns, or with examples, in place of some of its constants."""
    text = draw(st.sampled_from(examples))
    parts: list[str] = []
    at = 0
    kinds = {**_KINDS, "whole": ("j", "y")} if _SIZES.search(text) else _KINDS
    for found in _CONSTANT.finditer(text):
        parts.append(text[at : found.start()])
        at = found.end()
        columns = kinds.get(found.lastgroup or "")
        choice = draw(st.integers(0, 9))
        if columns is None or choice < 3:
            parts.append(found[0])
        elif choice == 9 and depth:
            parts.append(f"({draw(expressions(examples, depth - 1))})")
        else:
            parts.append(draw(st.sampled_from(columns)))
    return "".join([*parts, text[at:]])


@dataclass(slots=True)
class Outcome:
    """What a run has found. ``differences`` has the expression and both results."""

    equal: int = 0
    refused: int = 0
    meaningless: int = 0
    functions: set[str] = field(default_factory=set)
    differences: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Prepared:
    text: str
    type: pa.DataType
    evaluator: Evaluator
    functions: frozenset[str]


def compare(spark: SparkSession, table: pa.Table, texts: Sequence[str], *, ansi: bool, zone: str) -> Outcome:
    """Computes expressions over a table in both systems."""
    spark.conf.set("spark.sql.ansi.enabled", str(ansi).lower())
    spark.conf.set("spark.sql.session.timeZone", zone)
    numbered = table.append_column("id", pa.array(range(len(table)), pa.int32()))
    frame = spark.createDataFrame(numbered, _DDL)
    outcome = Outcome()
    prepared = [
        found for at, text in enumerate(texts) if (found := _prepared(frame, f"{text} AS c{at}", ansi, outcome))
    ]
    batch = pa.concat_tables([numbered.slice(0, 1), numbered]).combine_chunks().to_batches()[0].slice(1)
    results: dict[str, list[Any] | None] = {}
    for each in prepared:
        try:
            results[each.text] = _evaluated(each, batch)
        except EvaluationError:
            continue
        except UnsupportedExpressionError:
            outcome.refused += 1
            results[each.text] = None
        except OverflowError:
            results[each.text] = None  # years that Python has no dates of
        except Exception as error:
            outcome.differences.append(f"{each.text}: the engine breaks: {type(error).__name__}: {error}")
            results[each.text] = None
    clean = [each for each in prepared if results.get(each.text) is not None]
    _compare_clean(frame, clean, results, outcome)
    for each in prepared:
        if each.text not in results:
            _compare_failing(frame, each, batch, outcome)
    return outcome


def _prepared(frame: DataFrame, text: str, ansi: bool, outcome: Outcome) -> _Prepared | None:
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        plan = frame.selectExpr(text)._jdf.queryExecution().analyzed()
    except (PySparkException, Py4JJavaError):
        outcome.meaningless += 1
        return None
    output = plan.child().output()
    columns = {output.apply(at).exprId().id(): at for at in range(output.size())}
    try:
        tree = ExpressionReader(columns, ansi=ansi).read(plan.projectList().apply(0))
        found = _Prepared(text, arrow_type(tree.type), compile_expression(tree), frozenset(_functions(tree)))
    except UnsupportedExpressionError:
        outcome.refused += 1
        return None
    except Exception as error:
        outcome.differences.append(f"{text}: the plan breaks: {type(error).__name__}: {error}")
        return None
    outcome.functions |= found.functions
    return found


def _functions(tree: Expression) -> Iterable[str]:
    if isinstance(tree, Lambda):
        yield from _functions(tree.body)
    elif isinstance(tree, Call):
        yield tree.function
        for argument in tree.arguments:
            yield from _functions(argument)


def _evaluated(each: _Prepared, batch: pa.RecordBatch) -> list[Any]:
    return evaluate(each.evaluator, Frame(batch.columns, batch.num_rows), each.type).to_pylist()  # type: ignore[no-any-return]


def _compare_clean(frame: DataFrame, clean: Sequence[_Prepared], results: dict[str, Any], outcome: Outcome) -> None:
    """Compares expressions that fail for no row in the engine, many in one query of Spark's."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    if not clean:
        return
    try:
        found = frame.selectExpr(*[each.text for each in clean]).toArrow()
    except (PySparkException, Py4JJavaError) as error:
        if len(clean) == 1:
            outcome.differences.append(f"{clean[0].text}: only Spark fails: {str(error).splitlines()[0][:200]}")
            return
        half = len(clean) // 2
        _compare_clean(frame, clean[:half], results, outcome)
        _compare_clean(frame, clean[half:], results, outcome)
        return
    for each, column in zip(clean, found.columns, strict=True):
        _judge(each.text, column, results[each.text], outcome)


def _compare_failing(frame: DataFrame, each: _Prepared, batch: pa.RecordBatch, outcome: Outcome) -> None:
    """Compares the rows for which the engine does not fail, and asks Spark for the first one for which it does."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    values: dict[int, Any] = {}
    failing: list[int] = []
    message = ""
    for at in range(batch.num_rows):
        try:
            values[at] = _evaluated(each, batch.slice(at, 1))[0]
        except OverflowError:
            return
        except EvaluationError as error:
            failing.append(at)
            message = str(error)
    if "DATETIME_OVERFLOW" in message:
        return  # years that the engine does not have
    if not failing:
        outcome.differences.append(f"{each.text}: the engine fails for the rows together only")
        return
    try:
        found = frame.where(f"id = {failing[-1]}").selectExpr(each.text).toArrow().columns[0]
        outcome.differences.append(f"{each.text}: Spark gives {found}, the engine fails: {message}")
        return
    except (PySparkException, Py4JJavaError):
        pass
    kept = ", ".join(map(str, values)) or "-1"
    try:
        rows = frame.where(f"id IN ({kept})").selectExpr(each.text).toArrow().columns[0]
    except (PySparkException, Py4JJavaError) as error:
        outcome.differences.append(f"{each.text}: only Spark fails: {str(error).splitlines()[0][:200]}")
        return
    _judge(each.text, rows, list(values.values()), outcome)


_NOTHING = {int: 0, str: "", float: 0.0, bool: False}


def _judge(text: str, wanted: pa.ChunkedArray, found: list[Any], outcome: Outcome) -> None:
    try:
        values = wanted.to_pylist()
    except (ValueError, OverflowError):
        return  # years that Python has no dates of
    for at, (a, b) in enumerate(zip(values, found, strict=True)):
        if b is None and a == _NOTHING.get(type(a)):
            continue  # Spark takes element_at and its kin for never null, and gives what lies in memory
        if shown(a) != shown(b):
            outcome.differences.append(f"{text}: row {at}: Spark gives {a!r}, the engine {b!r}")
            return
    outcome.equal += 1


def shown(value: Any) -> Any:
    """Returns a value in a form whose equality is that of results, with the sign of zero."""
    if isinstance(value, float):
        if math.isnan(value):
            return "NaN"
        return repr(value) if value == 0 else float(f"{value:.12g}")
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        return value.astimezone(_UTC)
    if isinstance(value, dict):
        return {key: shown(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [shown(element) for element in value]
    return value
