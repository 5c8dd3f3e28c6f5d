"""Python functions run once for each distinct value: for what Arrow has no kernel of, or one unlike Spark's.

Also reads arrays of lists and maps, even if they are slices of other arrays or have elements at null positions.
"""

from __future__ import annotations

import decimal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.expressions.types import EvaluationError

Value: TypeAlias = "pa.Array | pa.Scalar"


EXACT = decimal.Context(prec=1000)
"""Precise enough for all decimal operations of Spark and Java; only non-terminating divisions are rounded."""


_noted: ContextVar[list[Callable[..., Any]] | None] = ContextVar("noted", default=None)


@contextmanager
def noted_kernels() -> Iterator[list[Callable[..., Any]]]:
    """Collects the Python functions that :func:`per_row` gets meanwhile: what a compiled expression may call."""
    noted: list[Callable[..., Any]] = []
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def per_row(compute: Callable[..., Any], result: pa.DataType, *, nulls: bool = False) -> Callable[..., Value]:
    """Returns a kernel that calls ``compute`` with the Python values of a row; null where an argument is null.

    Only one argument that is not constant: ``compute`` runs for its distinct values. With ``nulls`` it gets None.
    """

    noted = _noted.get()
    if noted is not None:
        noted.append(compute)

    def call(*row: Any) -> Any:
        if not nulls and None in row:
            return None
        try:
            return compute(*row)
        except OverflowError:
            raise EvaluationError(
                "DATETIME_OVERFLOW", "a date or time is outside of the years 1 to 9999, which the engine supports"
            ) from None

    def run(*values: Value) -> Value:
        varying = [at for at, value in enumerate(values) if not isinstance(value, pa.Scalar)]
        constants = [value.as_py() if isinstance(value, pa.Scalar) else None for value in values]
        if not varying:
            return pa.scalar(call(*constants), result)
        if len(varying) == 1:
            at = varying[0]
            column = values[at]
            encoded = _distinct(column)
            if encoded is not None:
                distinct, indices = encoded
                row = list(constants)
                results = []
                for value in distinct.to_pylist():
                    row[at] = value
                    results.append(call(*row))
                return pa.array(results, result).take(indices)
        length = len(values[varying[0]])
        columns = [
            [constant] * length if isinstance(value, pa.Scalar) else value.to_pylist()
            for value, constant in zip(values, constants, strict=True)
        ]
        return pa.array([call(*row) for row in zip(*columns, strict=True)], result)

    return run


def _distinct(column: pa.Array) -> tuple[pa.Array, pa.Array] | None:
    """Returns distinct values, and the position of each row's value; None for types that Arrow cannot encode."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()  # a dictionary may hold values that no row has
    if pa.types.is_nested(column.type) or pa.types.is_null(column.type) or pa.types.is_floating(column.type):
        return None
    encoded = pc.dictionary_encode(column, null_encoding="encode")
    return encoded.dictionary, encoded.indices


def as_list(array: pa.Array) -> pa.Array:
    """Returns maps as lists of structs ``key``, ``value``, and lists as they are."""
    if not isinstance(array, pa.MapArray):
        return array
    return array.cast(pa.list_(pa.struct([("key", array.type.key_type), ("value", array.type.item_type)])))


def with_elements(array: pa.Array, elements: pa.Array, kind: pa.DataType) -> pa.Array:
    """Returns lists of the lengths of ``array`` with other elements: one for each of ``array.flatten()``."""
    return pa.ListArray.from_arrays(_offsets(array), elements.cast(kind.value_type), mask=array.is_null()).cast(kind)


def with_entries(array: pa.Array, keys: pa.Array, items: pa.Array, kind: pa.DataType) -> pa.Array:
    """Returns maps of the lengths of ``array`` with other entries: one for each of ``array.flatten()``."""
    typed = keys.cast(kind.key_type), items.cast(kind.item_type)
    return pa.MapArray.from_arrays(_offsets(array), *typed, kind, mask=array.is_null())


def _offsets(array: pa.Array) -> pa.Array:
    lengths = pc.fill_null(pc.list_value_length(array), 0).cast(pa.int64())
    return pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(lengths)]).cast(pa.int32())
