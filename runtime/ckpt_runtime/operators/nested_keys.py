"""Keys of functions with state of which one is a struct, an array or a map.

State has keys of plain values only. Such a key is therefore as many columns as :func:`leaves_of` makes of it, and is
made again from them for the function.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any

import pyarrow as pa

import ckpt_runtime.expressions.functions  # noqa: F401 registers the functions
from ckpt_runtime.expressions.evaluation import Frame, compile_expression, evaluate
from ckpt_runtime.expressions.nodes import Column, Expression
from ckpt_runtime.expressions.types import SparkType, arrow_type
from ckpt_runtime.frontend.struct_keys import leaves_of, rebuilt
from ckpt_runtime.state import values
from ckpt_runtime.state.states import Key


class NestedKeys:
    """Keys with these names and types. ``hidden`` is the number of values that the nested ones are compared by."""

    def __init__(self, keys: Sequence[tuple[str, SparkType]]) -> None:
        self.names = tuple(name for name, _ in keys)
        leaves = [[leaf for _, leaf in leaves_of(Column(at, kind))] for at, (_, kind) in enumerate(keys)]
        self.hidden = sum(len(own) for own, (_, kind) in zip(leaves, keys, strict=True) if isinstance(kind, dict))
        places = count()
        self._flat = _Computed([leaf for own in leaves for leaf in own])
        self._whole = _Computed([rebuilt(kind, lambda: next(places)) for _, kind in keys])

    def flat(self, keys: Sequence[pa.Array], length: int) -> list[pa.Array]:
        """Returns the values that keys are compared by. ``keys`` are columns of this length, one for each name."""
        return self._flat.over(keys, length)

    def whole(self, keys: Iterable[Key]) -> pa.RecordBatch:
        """Returns the keys that have these values, a column for each name."""
        rows = list(keys)
        types = self._flat.types
        columns = [values.to_arrow([row[at] for row in rows], kind) for at, kind in enumerate(types)]
        return pa.RecordBatch.from_arrays(self._whole.over(columns, len(rows)), list(self.names))


def without_zones(keys: Sequence[pa.Array]) -> Iterator[Key]:
    """Yields keys as Spark gives them to timers: structs are rows, and times have no zone; ``keys`` are the columns."""
    columns = [pa.array([_naive(value) for value in values.from_arrow(key)], _without_zone(key.type)) for key in keys]
    return zip(*map(values.state_from_arrow, columns), strict=True)


def _naive(value: Any) -> Any:
    """A value of Arrow whose times are those of their zone's clocks."""
    if isinstance(value, dt.datetime):
        return value.replace(tzinfo=None)
    if isinstance(value, dict):
        return {name: _naive(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_naive, value))
    return value


def _without_zone(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.timestamp(kind.unit)
    if pa.types.is_list(kind):
        return pa.list_(_without_zone(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(_without_zone(kind.key_type), _without_zone(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_zone(field.type)) for field in kind])
    return kind


class _Computed:
    """Expressions over columns."""

    def __init__(self, trees: Sequence[Expression]) -> None:
        self.types = [arrow_type(tree.type) for tree in trees]
        self._evaluators = [compile_expression(tree) for tree in trees]

    def over(self, columns: Sequence[pa.Array], length: int) -> list[pa.Array]:
        frame = Frame(columns, length)
        return [evaluate(each, frame, kind) for each, kind in zip(self._evaluators, self.types, strict=True)]
