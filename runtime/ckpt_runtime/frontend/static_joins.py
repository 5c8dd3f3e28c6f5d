"""Joins of a stream with a static table: keys are read from Spark's condition, the rest of it is checked pair by pair.

The table's rows are those that Spark computed when the program was planned. As in Spark, every row of the stream is
compared with the whole table, and table rows without a match are never emitted: the stream has to be the side whose
rows an outer, semi or anti join keeps.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import pyarrow as pa

from ckpt_runtime.expressions.evaluation import compile_expression
from ckpt_runtime.expressions.nodes import Call, Expression, Lambda, moved
from ckpt_runtime.expressions.types import UnsupportedExpressionError
from ckpt_runtime.frontend.generators import columns_of
from ckpt_runtime.frontend.joins import all_of, parts_of
from ckpt_runtime.frontend.static_tables import path_of
from ckpt_runtime.frontend.typed_plan import Join, StaticTable, TypedColumn
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.specs import StaticJoinKey, StaticJoinSpec

STATIC_HOW = {
    "Inner": "inner",
    "Cross": "inner",
    "LeftOuter": "outer",
    "RightOuter": "outer",
    "LeftSemi": "semi",
    "LeftAnti": "anti",
    "ExistenceJoin": "existence",
}
"""The engine's join type for each of Spark's types of joins with a static table."""
_KEEPS_SIDE = {"LeftOuter": 0, "LeftSemi": 0, "LeftAnti": 0, "ExistenceJoin": 0, "RightOuter": 1}
"""The side that has to be the stream: left is 0, right is 1."""
_NOW = frozenset({"CurrentTimestamp", "Now", "CurrentDate", "LocalTimestamp"})
"""Functions of the time at which a row is joined, which is not known when the table is loaded."""


def static_join_spec(
    node: Join,
    sides: Sequence[tuple[TypedColumn, ...]],
    table: StaticTable,
    table_side: int,
    directory: str,
    schema: pa.Schema,
) -> StaticJoinSpec:
    """Returns the operator. ``sides`` are the columns of both inputs, ``schema`` is that of the result.

    Raises PlanError for a type of join that Spark does not have.
    """
    stream_side = 1 - table_side
    if _KEEPS_SIDE.get(node.how, stream_side) != stream_side:
        places = ("left", "right")
        raise PlanError(
            "join",
            f"{node.how} needs the stream on the {places[table_side]} and the static table on the "
            f"{places[stream_side]}, as in Spark: rows of the table without a match would wait for the end of the "
            "stream",
        )
    width = len(sides[stream_side])
    parts: list[Expression] = []
    if node.condition is not None:
        condition = node.condition
        if stream_side:  # over the stream's columns, then the table's
            left, right = map(len, sides)
            condition = moved(condition, lambda at: at + right if at < left else at - left)
        parts = parts_of(condition)
    keys, filters, rest = [], [], []
    for tree in parts:
        key = None if _calls(tree, _NOW) else _key(tree, width)
        if key is not None:
            keys.append(key)
        elif not _calls(tree, _NOW) and min(columns_of([tree]), default=-1) >= width:
            filters.append(moved(tree, lambda at: at - width))
        else:
            rest.append(tree)
    how = STATIC_HOW[node.how]
    both = tuple(range(width + len(table.columns)))
    table_columns = both[width:]
    stream_columns = both[:width]
    if how in ("semi", "anti", "existence"):
        output = stream_columns
    else:
        output = (*table_columns, *stream_columns) if table_side == 0 else (*stream_columns, *table_columns)
    return StaticJoinSpec(
        how, path_of(directory, table.digest), tuple(keys), tuple(filters), all_of(rest), width, output, schema
    )


def _key(tree: Expression, width: int) -> StaticJoinKey | None:
    """Returns the key of an equality between an expression of the stream and one of the table."""
    if not isinstance(tree, Call) or tree.function not in ("EqualTo", "EqualNullSafe"):
        return None
    one, other = tree.arguments
    if min(columns_of([one]), default=-1) >= width:
        one, other = other, one
    ours, theirs = columns_of([one]), columns_of([other])
    if not ours or not theirs or max(ours) >= width or min(theirs) < width or one.type != other.type:
        return None
    try:
        compile_expression(Call("XxHash64", (one,), "long"))
    except UnsupportedExpressionError:
        return None  # such as a map: it is compared pair by pair
    return StaticJoinKey(one, moved(other, lambda at: at - width), tree.function == "EqualNullSafe")


def _calls(tree: Expression, functions: Set[str]) -> bool:
    if isinstance(tree, Lambda):
        return _calls(tree.body, functions)
    if not isinstance(tree, Call):
        return False
    return tree.function in functions or any(_calls(argument, functions) for argument in tree.arguments)
