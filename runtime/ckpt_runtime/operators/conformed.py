"""Brings batches into the schema that the plan has for them, for operator state and for results of user functions."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from ckpt_runtime.operators.errors import OutputSchemaError, output_schema_error
from ckpt_runtime.state.columns import in_type


def conformed(batch: pa.RecordBatch, schema: pa.Schema, uid: str) -> pa.RecordBatch:
    """Returns the batch in ``schema``; dictionary-encoded columns are decoded if need be. Raises OutputSchemaError."""
    if batch.schema is schema or batch.schema.equals(schema):
        return batch
    try:
        arrays = [in_type(column, field.type) for column, field in zip(batch.columns, schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)
    except (pa.ArrowException, ValueError) as error:
        raise output_schema_error(uid, batch.schema, schema) from error


def conformed_result(batch: pa.RecordBatch, schema: pa.Schema, uid: str) -> pa.RecordBatch:
    """Returns a user function's result in the declared ``schema``: columns match by position, not by name, as in Spark.

    Other forms of the same values are accepted: large and dictionary-encoded strings, another time zone, a smaller
    decimal, a column of only nulls. Any other type raises OutputSchemaError; so do columns in another order, which
    Spark would mix up.
    """
    if batch.schema is schema:
        return batch
    names = batch.schema.names
    fits = len(names) == len(schema) and (names == schema.names or set(names) != set(schema.names))
    if not fits or not all(_same_values(column.type, field.type) for column, field in zip(batch, schema, strict=True)):
        raise output_schema_error(uid, batch.schema, schema)
    try:
        arrays = [in_type(column, field.type) for column, field in zip(batch, schema, strict=True)]
    except pa.ArrowException as error:
        raise output_schema_error(uid, batch.schema, schema) from error
    for column, field in zip(arrays, schema, strict=True):
        if not field.nullable and column.null_count:
            raise OutputSchemaError(
                f"operator {uid!r} returned null in column {field.name!r}, which is declared not null"
            )
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


_FORMS: tuple[tuple[Callable[[pa.DataType], bool], ...], ...] = (
    (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
    (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view),
)


def _same_values(given: pa.DataType, declared: pa.DataType) -> bool:
    """Whether every value of the given type is also a value of the declared type, possibly in another form."""
    if given == declared or pa.types.is_null(given):
        return True
    if pa.types.is_dictionary(given):
        return _same_values(given.value_type, declared)
    if pa.types.is_timestamp(given) and pa.types.is_timestamp(declared):
        return bool(given.unit == declared.unit)
    if pa.types.is_decimal(given) and pa.types.is_decimal(declared):
        whole = given.precision - given.scale <= declared.precision - declared.scale
        return bool(whole and given.scale <= declared.scale)
    if pa.types.is_struct(given) and pa.types.is_struct(declared):
        pairs = [(given.field(i), declared.field(i)) for i in range(min(given.num_fields, declared.num_fields))]
        same = all(one.name == other.name and _same_values(one.type, other.type) for one, other in pairs)
        return same and given.num_fields == declared.num_fields
    if pa.types.is_map(given) and pa.types.is_map(declared):
        return _same_values(given.key_type, declared.key_type) and _same_values(given.item_type, declared.item_type)
    if _is_list(given) and _is_list(declared):
        return _same_values(given.value_type, declared.value_type)
    return any(any(form(given) for form in forms) and any(form(declared) for form in forms) for forms in _FORMS)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))
