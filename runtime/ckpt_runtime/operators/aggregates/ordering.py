"""Ranks of values by Spark's order, nested types included.

Arrow orders plain values only. Structs are compared field by field, arrays element by element and then by length.
Inside of both, null is less than every value, NaN is the greatest number, and 0.0 equals -0.0.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.state.columns import AnyArray, plain


def ranks(values: pa.Array) -> AnyArray:
    """Returns a number for each value, so that numbers compare as the values do. Nulls get numbers without meaning."""
    values = plain(values)
    kind = values.type
    if pa.types.is_struct(kind):
        return _of_structs(values)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _of_lists(values)
    if pa.types.is_null(kind):
        return np.zeros(len(values), dtype=np.int64)
    if pa.types.is_floating(kind):
        values = pc.add(values, pa.scalar(0.0, kind))
    result: AnyArray = pc.rank(values, sort_keys="ascending", tiebreaker="dense").cast(pa.int64()).to_numpy()
    return result


def _nulls_first(values: pa.Array) -> AnyArray:
    """Ranks whose least number, 0, is that of nulls alone."""
    found = ranks(values) + 1
    if values.null_count:
        found[np.asarray(values.is_null())] = 0
    return found


def _refined(order: AnyArray, next_order: AnyArray) -> AnyArray:
    """Returns ranks by ``order``, and by ``next_order`` where that is equal."""
    width = int(next_order.max()) + 1
    result: AnyArray = np.unique(order * width + next_order, return_inverse=True)[1].astype(np.int64)
    return result


def _of_structs(values: pa.Array) -> AnyArray:
    order = np.zeros(len(values), dtype=np.int64)
    if len(values):
        for field in values.flatten():
            order = _refined(order, _nulls_first(field))
    return order


def _of_lists(values: pa.Array) -> AnyArray:
    lengths = np.asarray(pc.fill_null(pc.list_value_length(values), 0), dtype=np.int64)
    order = np.zeros(len(values), dtype=np.int64)
    if not len(values) or not lengths.max():
        return order
    elements = _nulls_first(pc.list_flatten(values)) + 1
    starts = np.cumsum(lengths) - lengths
    for place in range(int(lengths.max())):
        reaches = lengths > place
        element = np.zeros(len(values), dtype=np.int64)  # the end of an array is less than every element
        element[reaches] = elements[starts[reaches] + place]
        order = _refined(order, element)
    return order
