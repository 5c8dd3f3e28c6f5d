"""Batches in the schema that a plan has for them, for operators that keep rows as columns."""

from __future__ import annotations

import pyarrow as pa

from ckpt_runtime.operators.errors import output_schema_error
from ckpt_runtime.state.columns import plain


def conformed(batch: pa.RecordBatch, schema: pa.Schema, uid: str) -> pa.RecordBatch:
    """The batch in ``schema``: columns that came dictionary encoded after all are decoded. Raises OutputSchemaError."""
    if batch.schema is schema or batch.schema.equals(schema):
        return batch
    try:
        arrays = [
            column if column.type == field.type else plain(column).cast(field.type)
            for column, field in zip(batch.columns, schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)
    except (pa.ArrowException, ValueError) as error:
        raise output_schema_error(uid, batch.schema, schema) from error
