"""Partial rows: groups of one batch, aggregated in front of the shuffle.

A partial row has the keys of its group, the columns that each aggregate stores, and the number of its rows. So it has
the form of a row in state, and is combined with one as rows of state are combined with each other. Channels carry
either partial rows or the input's own ones, and so does in-flight data.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

PARTIAL_ROWS = "$rows"
"""The last column of partial rows: how many rows each stands for."""


def partial_schema(keys: Sequence[pa.Field], stored: Sequence[pa.Field]) -> pa.Schema:
    """The schema of partial rows with these keys, and these stored columns of aggregates."""
    return pa.schema([*keys, *stored, pa.field(PARTIAL_ROWS, pa.int64())])


def is_partial(schema: pa.Schema, rows: pa.Schema) -> bool:
    """Whether a batch of this schema has partial rows; ``rows`` is the schema of the input's own rows."""
    return bool(schema.names) and schema.names[-1] == PARTIAL_ROWS and PARTIAL_ROWS not in rows.names


def rows_in(batch: pa.RecordBatch) -> int:
    """The number of rows that a batch, of partial rows or not, stands for."""
    if batch.schema.names[-1] != PARTIAL_ROWS or not batch.num_rows:
        return int(batch.num_rows)
    return int(pc.sum(batch.column(batch.num_columns - 1)).as_py())
