"""Expressions over dictionary-encoded text: the same values and errors as over plain text, whatever the dictionary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt_runtime.expressions.functions  # noqa: F401 registers the functions
from ckpt_runtime.expressions.dictionaries import decoded
from ckpt_runtime.expressions.evaluation import Frame, compile_all, compile_encoded, compile_expression, evaluate
from ckpt_runtime.expressions.nodes import Call, Column, Expression, Literal
from ckpt_runtime.expressions.types import EvaluationError, arrow_type

TEXT, OTHER, NUMBER = Column(0, "string"), Column(1, "string"), Column(2, "long")


def call(function: str, type_: str, *arguments: Expression, **settings: Any) -> Call:
    return Call(function, arguments, type_, "ansi", settings)


def text(value: str) -> Literal:
    return Literal(value, "string")


UPPER = call("Upper", "string", TEXT)
PARSED = call("Cast", "long", TEXT, zone="UTC")
IS_A = call("EqualTo", "boolean", call("Lower", "string", TEXT), text("a"))
TREES: list[Expression] = [
    TEXT,
    UPPER,
    PARSED,
    IS_A,
    call("Length", "integer", call("Concat", "string", UPPER, text("x"))),
    call("IsNull", "boolean", TEXT),
    call("Coalesce", "string", TEXT, text("none")),
    call("Coalesce", "string", TEXT, OTHER),
    call("Concat", "string", UPPER, call("Lower", "string", OTHER)),
    call("CaseWhen", "string", IS_A, text("first"), call("IsNull", "boolean", OTHER), UPPER, OTHER),
    call("CaseWhen", "long", call("IsNull", "boolean", OTHER), PARSED, NUMBER),
    call("In", "boolean", TEXT, text("a"), text("7")),
    call("RegExpReplace", "string", TEXT, text("[ab]"), text("-"), Literal("1", "integer")),
]


def outcome(compute: Callable[[], pa.Array]) -> list[Any] | str:
    try:
        return compute().to_pylist()  # type: ignore[no-any-return]
    except EvaluationError as error:
        return error.condition if hasattr(error, "condition") else type(error).__name__


def plain(value: pa.Array) -> pa.Array:
    return value.dictionary_decode() if isinstance(value, pa.DictionaryArray) else value


@st.composite
def encoded_columns(draw: st.DrawFn) -> pa.DictionaryArray:
    """A slice of a column; the dictionary may have nulls, equal values, and values that no row has."""
    values = draw(st.lists(st.sampled_from(["a", "A", "b", "7", "", "ä", None]), min_size=1, max_size=6))
    places = st.none() | st.integers(0, len(values) - 1)
    indices = draw(st.lists(places, min_size=3, max_size=12))
    column = pa.DictionaryArray.from_arrays(pa.array(indices, pa.int32()), pa.array(values, pa.string()))
    return column.slice(draw(st.integers(0, 2)))


@given(encoded_columns(), st.lists(st.sampled_from(["a", "B", "9", None]), min_size=12, max_size=12), st.booleans())
def test_expressions_over_dictionaries_give_what_they_give_over_plain_text(
    column: pa.DictionaryArray, others: list[str | None], again: bool
) -> None:
    length = len(column)
    other, numbers = pa.array(others[:length], pa.string()), pa.array(range(length))
    for tree in TREES:
        kind = arrow_type(tree.type)
        reference = compile_expression(tree)
        wanted = outcome(lambda: evaluate(reference, Frame([plain(column), other, numbers], length), kind))  # noqa: B023
        compiled, (encoded,) = compile_expression(tree), compile_encoded([tree])
        for _ in range(1 + again):  # the second time, the dictionary is known
            frame = Frame([column, other, numbers], length)
            assert outcome(lambda: evaluate(compiled, frame, kind)) == wanted  # noqa: B023
            assert outcome(lambda: plain(encoded(frame))) == wanted  # noqa: B023


def test_error_of_a_value_is_raised_if_a_row_has_it() -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0, 0, 0]), pa.array(["7", "no number"]))
    assert evaluate(compile_expression(PARSED), Frame([column], 3), pa.int64()).to_pylist() == [7, 7, 7]
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), pa.array(["7", "no number"]))
    with pytest.raises(EvaluationError):
        evaluate(compile_expression(PARSED), Frame([column], 3), pa.int64())


def test_text_stays_encoded_and_one_dictionary_is_evaluated_once() -> None:
    words = pa.array(["a", "b"])
    (upper,) = compile_encoded([UPPER])
    results = []
    for indices in ([0, 1, None], [1, 1, 0]):
        column = pa.DictionaryArray.from_arrays(pa.array(indices, pa.int32()), words)
        results.append(upper(Frame([column], 3)))
    assert [result.to_pylist() for result in results] == [["A", "B", None], ["B", "B", "A"]]
    places = {result.dictionary.buffers()[2].address for result in results}
    assert len(places) == 1


def test_a_field_of_structs_with_dictionaries_is_null_where_the_struct_is() -> None:
    words = pa.DictionaryArray.from_arrays(pa.array([0, 1, 1], pa.int32()), pa.array(["a", "b"]))
    structs = pa.StructArray.from_arrays([words, pa.array([1, 2, 3])], ["w", "n"], mask=pa.array([False, True, False]))
    kind = "struct<w:string,n:bigint>"
    word = call("GetStructField", "string", Column(0, kind), ordinal=0)
    number = call("GetStructField", "long", Column(0, kind), ordinal=1)
    for rows in (structs, structs.slice(1)):
        frame = Frame([rows], len(rows))
        expected = [None if row is None else row["w"] for row in rows.to_pylist()]
        assert evaluate(compile_expression(word), frame, pa.string()).to_pylist() == expected
        kept = frame.part(pa.array([True] * (len(rows) - 1) + [False]))
        assert plain(compile_encoded([word])[0](kept)).to_pylist() == expected[:-1]
        found = evaluate(compile_expression(number), frame, pa.int64())
        assert found.to_pylist() == [None if row is None else row["n"] for row in rows.to_pylist()]
        assert found.validate(full=True) is None


def test_expression_that_several_trees_share_is_evaluated_once_for_each_frame() -> None:
    doubled = call("Add", "long", NUMBER, NUMBER)
    first, second = compile_all([doubled, call("Multiply", "long", doubled, doubled)])
    frame = Frame([pa.nulls(2), pa.nulls(2), pa.array([1, 2])], 2)
    assert first(frame) is first(frame)
    assert second(frame).to_pylist() == [4, 16]
    other = Frame([pa.nulls(2), pa.nulls(2), pa.array([5, 6])], 2)
    assert first(other).to_pylist() == [10, 12]


def test_dictionaries_inside_structs_lists_and_maps_are_decoded() -> None:
    words = pa.DictionaryArray.from_arrays(pa.array([0, 1, None], pa.int32()), pa.array(["a", "b"]))
    structs = pa.StructArray.from_arrays([words], ["w"], mask=pa.array([False, True, False]))
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 3]), words)
    maps = pa.MapArray.from_arrays(pa.array([0, 1, 2]), pa.array(["x", "y"]), words.slice(0, 2))
    for column in (words, structs, structs.slice(1), lists, maps):
        plain_column = decoded(column)
        plain_column.validate(full=True)
        assert "dictionary" not in str(plain_column.type)
        assert plain_column.to_pylist() == column.to_pylist()


def test_a_huge_dictionary_is_not_evaluated_for_a_few_rows_however_often_it_comes() -> None:
    words = pa.array([f"w{at}" for at in range(70_000)])
    (upper,) = compile_encoded([UPPER])
    for _ in range(3):
        column = pa.DictionaryArray.from_arrays(pa.array([1, 69_999], pa.int32()), words)
        found = upper(Frame([column], 2))
        assert found.type == pa.string()
        assert found.to_pylist() == ["W1", "W69999"]
