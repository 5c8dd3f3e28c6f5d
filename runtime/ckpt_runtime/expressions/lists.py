"""Arrays of lists and maps, also if they are slices of other arrays or have elements at null positions."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc


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
