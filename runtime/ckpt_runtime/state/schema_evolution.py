"""Decides which schema changes of a keyed state are safe, and converts stored batches to the requested schema.

Fields are matched by name. Added fields are null (they must be nullable), removed ones are dropped, integers and floats
may be widened, non-null fields may become nullable. Keys must stay as they are. Everything else is refused.
"""

from __future__ import annotations

import pyarrow as pa

from ckpt_runtime.state.errors import reading, schema_mismatch
from ckpt_runtime.state.stored_rows import EXPIRES_AT, VALUE_PREFIX


def check_evolution(uid: str, name: str, stored: pa.Schema, wanted: pa.Schema) -> None:
    """Raises StateSchemaError unless batches of ``stored`` can be read as ``wanted`` (both with prefixes)."""
    for field in wanted:
        index = stored.get_field_index(field.name)
        if index < 0:
            if not field.name.startswith(VALUE_PREFIX) and field.name != EXPIRES_AT:
                raise schema_mismatch(uid, name, f"the key has no column {field.name!r}", stored, wanted)
            if not field.nullable:
                raise schema_mismatch(uid, name, f"the added field {field.name!r} must be nullable", stored, wanted)
            continue
        before = stored.field(index)
        fixed = not field.name.startswith(VALUE_PREFIX)
        if before.type != field.type and (fixed or not _is_widening(before.type, field.type)):
            reason = f"field {field.name!r} cannot change from {before.type} to {field.type}"
            raise schema_mismatch(uid, name, reason, stored, wanted)
        if before.nullable and not field.nullable and not fixed:
            raise schema_mismatch(uid, name, f"field {field.name!r} cannot become not null", stored, wanted)
    _check_removed(uid, name, stored, wanted)


def _check_removed(uid: str, name: str, stored: pa.Schema, wanted: pa.Schema) -> None:
    for field in stored:
        removable = field.name.startswith(VALUE_PREFIX) or field.name == EXPIRES_AT
        if not removable and wanted.get_field_index(field.name) < 0:
            raise schema_mismatch(uid, name, f"the key column {field.name!r} is gone", stored, wanted)


def _is_widening(before: pa.DataType, after: pa.DataType) -> bool:
    if pa.types.is_floating(before) and pa.types.is_floating(after):
        return bool(after.bit_width > before.bit_width)
    if pa.types.is_signed_integer(before) and pa.types.is_signed_integer(after):
        return bool(after.bit_width > before.bit_width)
    if pa.types.is_unsigned_integer(before) and pa.types.is_integer(after):
        return bool(after.bit_width > before.bit_width)
    wide_text = pa.types.is_string(before) and pa.types.is_large_string(after)
    return bool(wide_text or (pa.types.is_binary(before) and pa.types.is_large_binary(after)))


def evolve(name: str, batch: pa.RecordBatch, wanted: pa.Schema) -> pa.RecordBatch:
    """The batch in the wanted schema; call :func:`check_evolution` first."""
    if batch.schema.equals(wanted):
        return batch
    arrays = []
    for field in wanted:
        index = batch.schema.get_field_index(field.name)
        if index < 0:
            arrays.append(pa.nulls(batch.num_rows, field.type))
        else:
            column = batch.column(index)
            arrays.append(column if column.type == field.type else column.cast(field.type))
    with reading(f"state {name!r}, in the schema that is asked for,"):
        return pa.RecordBatch.from_arrays(arrays, schema=wanted)
