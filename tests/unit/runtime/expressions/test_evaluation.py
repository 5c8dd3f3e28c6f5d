"""Typed expressions over Arrow batches: which rows a branch sees, and what each mode does where there is no result."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa
import pytest

import ckpt_runtime.expressions.functions  # noqa: F401 registers the functions
from ckpt_runtime.expressions.evaluation import Frame, compile_expression, evaluate, field_of
from ckpt_runtime.expressions.nodes import Call, Column, Expression, Lambda, Literal, Variable
from ckpt_runtime.expressions.patterns import read, tokens_of
from ckpt_runtime.expressions.regex import compile_java
from ckpt_runtime.expressions.texts import interval_text
from ckpt_runtime.expressions.types import EvaluationError, UnsupportedExpressionError, arrow_type

A, B = Column(0, "double"), Column(1, "double")
ONE, ZERO = Literal("1.0", "double"), Literal("0.0", "double")


def computed(tree: Expression, *columns: pa.Array) -> list[Any]:
    length = len(columns[0]) if columns else 1
    return evaluate(compile_expression(tree), Frame(columns, length), arrow_type(tree.type)).to_pylist()  # type: ignore[no-any-return]


def call(function: str, type_: str, *arguments: Expression, mode: Any = "ansi", **settings: Any) -> Call:
    return Call(function, arguments, type_, mode, settings)


QUOTIENT = call("Divide", "double", ONE, A)
IS_ZERO = call("EqualTo", "boolean", A, ZERO)


def test_branch_that_fails_for_some_rows_is_evaluated_for_the_rows_that_take_it_only() -> None:
    guarded = call("CaseWhen", "double", IS_ZERO, ZERO, QUOTIENT)
    assert computed(guarded, pa.array([0.0, 2.0, None])) == [0.0, 0.5, None]
    with pytest.raises(EvaluationError, match="DIVIDE_BY_ZERO"):
        computed(QUOTIENT, pa.array([0.0, 2.0]))


@pytest.mark.parametrize("rows", [[2.0, 4.0], [2.0, None], [None, None], []])
def test_branches_of_nested_values_are_taken_by_all_rows_or_some_or_none(rows: list[float | None]) -> None:
    doubles = {"type": "array", "elementType": "double", "containsNull": True}
    branch, other = (call("CreateArray", doubles, item) for item in (QUOTIENT, ZERO))  # type: ignore[arg-type]
    cases = call("CaseWhen", doubles, call("IsNotNull", "boolean", A), branch, other)  # type: ignore[arg-type]
    assert computed(cases, pa.array(rows, pa.float64())) == [[0.0 if x is None else 1 / x] for x in rows]


@pytest.mark.parametrize("kept", [[True] * 9, [True] + [None] * 9, [True, False, None] * 3, [True] * 9 + [False]])
def test_frame_of_a_mask_has_the_rows_and_fields_that_a_filter_keeps(kept: list[bool | None]) -> None:
    rows, mask = len(kept), pa.array(kept, pa.bool_())
    numbers, texts = pa.array(range(rows)), pa.array([f"{row % 3}" for row in range(rows)]).dictionary_encode()
    structs = pa.StructArray.from_arrays([numbers, texts], ["a", "b"], mask=pa.array([row == 1 for row in range(rows)]))
    part = Frame([numbers, texts, structs], rows).part(mask)
    assert part.length == kept.count(True)
    for index, column in enumerate((numbers, texts, structs)):
        assert part.columns[index].to_pylist() == column.filter(mask).to_pylist()
    for ordinal, name in enumerate("ab"):
        wanted = [row and row[name] for row in structs.filter(mask).to_pylist()]
        assert field_of(part.columns, 2, ordinal).to_pylist() == wanted


def test_later_operands_are_evaluated_where_the_first_one_does_not_decide() -> None:
    both = call("And", "boolean", call("Not", "boolean", IS_ZERO), call("GreaterThan", "boolean", QUOTIENT, ZERO))
    assert computed(both, pa.array([0.0, 4.0, None])) == [False, True, None]
    assert computed(call("Coalesce", "double", B, QUOTIENT), pa.array([0.0, 2.0]), pa.array([7.0, None])) == [7.0, 0.5]


@pytest.mark.parametrize(("mode", "wanted"), [("legacy", [-128, 3]), ("try", [None, 3])])
def test_overflow_of_integers_wraps_or_gives_null_or_fails_by_mode(mode: str, wanted: list[int | None]) -> None:
    values = pa.array([127, 2], pa.int8()), pa.array([1, 1], pa.int8())
    total = [Column(0, "byte"), Column(1, "byte")]
    assert computed(call("Add", "byte", *total, mode=mode), *values) == wanted
    with pytest.raises(EvaluationError, match="ARITHMETIC_OVERFLOW"):
        computed(call("Add", "byte", *total), *values)


def test_product_of_decimals_is_exact_and_rounded_half_up() -> None:
    kind = "decimal(38,18)"
    columns = [pa.array([Decimal("1.000000000000000001"), None], pa.decimal128(38, 18))] * 2
    product = call("Multiply", "decimal(38,6)", Column(0, kind), Column(1, kind))
    assert computed(product, *columns) == [Decimal("1.000000"), None]


def test_decimals_that_hold_every_result_have_all_of_its_digits() -> None:
    whole = [2**63 - 1, None, -(2**63), 0, -1] * 13
    small = [Decimal("0.908"), Decimal("-9.999"), None, Decimal("0.001")] * 17
    longs, decimals = pa.array(whole, pa.int64())[3:], pa.array(small[: len(whole)], pa.decimal128(4, 3))[3:]
    rows = list(zip(whole[3:], small[3:], strict=False))
    widened = call("Cast", "decimal(20,0)", Column(0, "long"))
    scaled = call("Cast", "decimal(24,5)", Column(0, "long"))
    finer = call("Cast", "decimal(8,5)", Column(1, "decimal(4,3)"))
    for tree in (widened, scaled):
        assert computed(tree, longs, decimals) == [None if value is None else Decimal(value) for value, _ in rows]
    assert computed(finer, longs, decimals) == [value for _, value in rows]
    for function, kind, of in (
        ("Multiply", "decimal(25,3)", Decimal.__mul__),
        ("Add", "decimal(24,3)", Decimal.__add__),
        ("Subtract", "decimal(24,3)", Decimal.__sub__),
    ):
        tree = call(function, kind, widened, Column(1, "decimal(4,3)"))
        exact = [None if a is None or b is None else of(Decimal(a), b) for a, b in rows]
        assert computed(tree, longs, decimals) == exact


def test_not_a_number_equals_itself_and_is_greater_than_infinity() -> None:
    nan, infinity = float("nan"), float("inf")
    values = pa.array([nan, nan, infinity]), pa.array([nan, infinity, nan])
    assert computed(call("EqualTo", "boolean", A, B), *values) == [True, False, False]
    assert computed(call("GreaterThan", "boolean", A, B), *values) == [False, True, False]


def test_lambda_sees_the_columns_of_its_row() -> None:
    array = {"type": "array", "elementType": "double", "containsNull": True}
    element = Variable(1, "double")
    plus = Lambda(call("Add", "double", element, B), (element,))
    tree = Call("ArrayTransform", (Column(0, array), plus), array)
    lists = pa.array([[1.0, 2.0], None, [], [None]], pa.list_(pa.float64()))
    assert computed(tree, lists, pa.array([10.0, 20.0, 30.0, 40.0])) == [[11.0, 12.0], None, [], [None]]


INTEGERS = {"type": "array", "elementType": "integer", "containsNull": True}
TEXTS = {"type": "array", "elementType": "string", "containsNull": True}


def test_cast_of_nested_values_keeps_nulls_and_looks_at_the_rows_of_a_slice_only() -> None:
    lists = pa.array([["bad"], ["1", None], None, []], pa.list_(pa.string())).slice(1)
    assert computed(call("Cast", INTEGERS, Column(0, TEXTS)), lists) == [[1, None], None, []]  # type: ignore[arg-type]
    texts = {"type": "map", "keyType": "string", "valueType": "string", "valueContainsNull": True}
    numbers = {"type": "map", "keyType": "string", "valueType": "integer", "valueContainsNull": True}
    maps = pa.array([[("a", "bad")], [("b", "2")], None], pa.map_(pa.string(), pa.string())).slice(1)
    assert computed(call("Cast", numbers, Column(0, texts)), maps) == [[("b", 2)], None]  # type: ignore[arg-type]


def test_value_of_a_dictionary_that_no_row_has_does_not_fail_a_cast() -> None:
    column = pa.array(["bad", "2"]).dictionary_encode().slice(1)
    assert computed(call("Cast", "integer", Column(0, "string")), column) == [2]


def test_lambda_over_a_slice_sees_the_elements_of_its_rows() -> None:
    element, position = Variable(1, "integer"), Variable(2, "integer")
    plus = Lambda(call("Add", "integer", element, position), (element, position))
    lists = pa.array([[9], [1, 2], None, [5]], pa.list_(pa.int32())).slice(1)
    assert computed(Call("ArrayTransform", (Column(0, INTEGERS), plus), INTEGERS), lists) == [[1, 3], None, [5]]


def test_trees_survive_their_stored_form_and_unknown_functions_and_types_are_refused() -> None:
    tree: Expression = call("CaseWhen", "double", IS_ZERO, Literal(None, "double"), QUOTIENT, zone="UTC")
    assert msgspec.json.decode(msgspec.json.encode(tree), type=Expression) == tree
    with pytest.raises(UnsupportedExpressionError, match="Uniform"):
        compile_expression(call("Uniform", "double"))
    with pytest.raises(UnsupportedExpressionError, match="interval year"):
        arrow_type("interval year")


@pytest.mark.parametrize("pattern", [r"\p{L}+", "[a&&[b]]", "(?m)^a$", "a(?i)b", r"\R", "(unclosed"])
def test_regular_expression_that_python_reads_in_another_way_is_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedExpressionError, match="regular expression"):
        compile_java(pattern)


@pytest.mark.parametrize("texts", [["", "abcdef", None, "ab"], ["", "äbcdéf", None, "a€"], [None]])
def test_text_is_cut_and_counted_by_characters_whether_it_is_ascii_or_not(texts: list[str | None]) -> None:
    rows = pa.array(["ß", *texts], pa.string()).slice(1)
    part = Call("Substring", (Column(0, "string"), Literal("2", "integer"), Literal("3", "integer")), "string")
    joined = Call("Concat", (Column(0, "string"), Literal("-", "string"), part), "string")
    assert computed(part, rows) == [text and text[1:4] for text in texts]
    assert computed(Call("Length", (part,), "integer"), rows) == [
        None if text is None else len(text[1:4]) for text in texts
    ]
    assert computed(joined, rows) == [None if text is None else f"{text}-{text[1:4]}" for text in texts]
    assert computed(Call("Upper", (Column(0, "string"),), "string"), rows) == [text and text.upper() for text in texts]


def test_dot_and_dollar_know_the_line_ends_of_java() -> None:
    assert compile_java("a.b").search("a\rb") is None
    assert compile_java("b$").search("ab\r\n") is not None
    assert compile_java(r"\Qa.b\E").search("a.b") is not None


@pytest.mark.parametrize("pattern", ["GGGG", "yyyyyyy", "[HH", "HH][", "XXX"])
def test_date_pattern_with_unknown_letters_is_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedExpressionError, match="date pattern"):
        tokens_of(pattern)


@pytest.mark.parametrize("text", ["2026-02-30", "2026-1-01", "x", "2026-01-01 "])
def test_text_that_does_not_fit_a_date_pattern_gives_nothing(text: str) -> None:
    assert read(text, tokens_of("yyyy-MM-dd")) is None


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("day to second", 93_784_500_000, "'1 02:03:04.5' DAY TO SECOND"),
        ("day to second", -1, "'-0 00:00:00.000001' DAY TO SECOND"),
        ("day", 172_800_000_000, "'2' DAY"),
        ("day to hour", -97_200_000_000, "'-1 03' DAY TO HOUR"),
        ("hour to second", 360_061_000_000, "'100:01:01' HOUR TO SECOND"),
        ("minute", 60_000_000, "'01' MINUTE"),
        ("second", 7_500_000, "'07.5' SECOND"),
        ("second", 1_234_000_000, "'1234' SECOND"),
        ("year to month", -14, "'-1-2' YEAR TO MONTH"),
        ("year", 24, "'2' YEAR"),
        ("month", 25, "'25' MONTH"),
    ],
)
def test_intervals_are_written_with_the_fields_of_their_types(kind: str, value: int, text: str) -> None:
    assert interval_text(value, f"interval {kind}") == f"INTERVAL {text}"
    if kind == "day to second":
        cast = call("Cast", "string", Column(0, f"interval {kind}"))
        assert computed(cast, pa.array([value, None], pa.duration("us"))) == [f"INTERVAL {text}", None]
