"""Spark's generators: ``explode`` and similar functions make a row of each element of a row.

A generator is compiled to a function from a frame to its elements: how many each row has, and the columns of all of
them, row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from ckpt_runtime.expressions.evaluation import Frame, compile_expression, evaluate
from ckpt_runtime.expressions.json_reader import MalformedJson, Members, json_text, read_json
from ckpt_runtime.expressions.nodes import Call, Expression, Literal
from ckpt_runtime.expressions.types import UnsupportedExpressionError, arrow_type

IntArray: TypeAlias = "np.ndarray[Any, Any]"


@dataclass(frozen=True, slots=True)
class Elements:
    """``starts`` and ``counts`` locate the elements of each row; ``columns`` are indexed by these."""

    starts: IntArray
    counts: IntArray
    columns: list[pa.Array]
    positions: bool = False
    """Whether the first column is the position of the element within its row."""


Generator: TypeAlias = "Callable[[Frame], Elements]"


def compile_generator(tree: Expression) -> Generator:
    """Returns the function that a generator is compiled to.

    Raises UnsupportedExpressionError for a generator, function or type that the engine does not have.
    """
    if isinstance(tree, Call):
        match tree.function:
            case "Explode" | "PosExplode" | "Inline":
                return _elements_of(tree)
            case "Stack":
                return _stack(tree)
            case "JsonTuple":
                return _json_tuple(tree)
    name = tree.function if isinstance(tree, Call) else "the expression"
    raise UnsupportedExpressionError(
        f"the generator {name}", "the engine has explode, posexplode, inline, stack and json_tuple"
    )


def _elements_of(tree: Call) -> Generator:
    """Explodes an array or a map; the elements of an array of structs have a column for each field with ``inline``."""
    compute = compile_expression(tree.arguments[0])
    type_ = arrow_type(tree.arguments[0].type)
    inline, positions = tree.function == "Inline", tree.function == "PosExplode"

    def generate(frame: Frame) -> Elements:
        array = evaluate(compute, frame, type_)
        offsets = array.offsets.to_numpy()
        counts = np.diff(offsets).astype(np.int64)
        if array.null_count:
            counts[array.is_null().to_numpy(zero_copy_only=False)] = 0
        if pa.types.is_map(type_):
            columns = [array.keys, array.items]
        else:
            columns = array.values.flatten() if inline else [array.values]
        return Elements(offsets[:-1].astype(np.int64), counts, columns, positions)

    return generate


def _stack(tree: Call) -> Generator:
    """``stack(n, values...)`` makes ``n`` rows; the last columns of the last row are null if values are missing."""
    compute = compile_expression(tree.arguments[0])
    rows = int(evaluate(compute, Frame([], 1), pa.int32())[0].as_py())
    given = [compile_expression(argument) for argument in tree.arguments[1:]]
    assert isinstance(tree.type, dict)
    made = tree.type["elementType"] if tree.type["type"] == "array" else tree.type
    types = [arrow_type(field["type"]) for field in made["fields"]]

    def generate(frame: Frame) -> Elements:
        columns: list[pa.Array] = []
        for position, kind in enumerate(types):
            parts = [
                evaluate(given[at], frame, kind) if at < len(given) else pa.nulls(frame.length, kind)
                for at in range(position, rows * len(types), len(types))
            ]
            # The parts hold the k-th output rows of all input rows, so the rows of one input row are ``frame.length``
            # apart.
            order = np.arange(frame.length * rows).reshape(rows, frame.length).T.ravel()
            columns.append(pa.concat_arrays(parts).take(pa.array(order)))
        counts = np.full(frame.length, rows, dtype=np.int64)
        return Elements(np.arange(frame.length, dtype=np.int64) * rows, counts, columns)

    return generate


def _json_tuple(tree: Call) -> Generator:
    """``json_tuple(text, names...)`` makes one row with the texts of an object's members."""
    compute = compile_expression(tree.arguments[0])
    names = [name.value for name in tree.arguments[1:] if isinstance(name, Literal)]
    if len(names) < len(tree.arguments) - 1:
        raise UnsupportedExpressionError("json_tuple with names that are not constant")

    def generate(frame: Frame) -> Elements:
        found = [_members(text, names) for text in evaluate(compute, frame, pa.string()).to_pylist()]
        columns = [pa.array([row.get(name) for row in found], pa.string()) for name in names]
        every = np.arange(frame.length, dtype=np.int64)
        return Elements(every, np.ones(frame.length, dtype=np.int64), columns)

    return generate


def _members(text: str | None, names: Collection[Any]) -> dict[Any, str]:
    """Returns the members of an object as texts: of equal names the last one that is not null."""
    try:
        document = None if text is None else read_json(text, non_numeric=False)
    except MalformedJson:
        return {}
    if not isinstance(document, Members):
        return {}
    wanted = [(name, value) for name, value in document if name in names and value is not None]
    return {name: str(value) if type(value) is str else json_text(value) for name, value in wanted}
