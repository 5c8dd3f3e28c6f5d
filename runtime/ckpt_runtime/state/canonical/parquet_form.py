"""The canonical form of keyed state (FLIP-203): Parquet files that every backend writes and every Parquet tool reads.

One file holds one named state of one operator, for one range of key groups:

* columns: ``key_group`` (int32, not null), then those of the stored rows (``state/stored_rows.py``), in Parquet's own
  types. No Arrow schema is stored: a duration is an integer, an encoded column its plain values
* rows: sorted by ``key_group``; rows of one key are adjacent, elements of a list and rows of a join in their order
* row groups: at most :data:`ROWS_PER_GROUP` rows; the handle lists the key groups of each, so that a reader can skip
  the others
* compression: zstd
* key-value metadata ``ckpt.state``: JSON with ``format`` (1), ``operator``, ``state``, ``key_groups`` (first and last)
  and ``descriptor``

A reader takes the types from the descriptor, and rejects a file with other types.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.errors import StateSchemaError, schema_text

FORMAT_VERSION = 1
SUFFIX = ".parquet"
KEY_GROUP = "key_group"
METADATA_KEY = b"ckpt.state"
ROWS_PER_GROUP = 1 << 17
BYTES_PER_GROUP = 32 << 20
"""Maximum size of a row group in memory; a larger row gets its own row group."""

parquet_writer = partial(pq.ParquetWriter, compression="zstd", store_schema=False)


def file_schema(stored: pa.Schema) -> pa.Schema:
    """The columns of a file with these stored rows."""
    return pa.schema([pa.field(KEY_GROUP, pa.int32(), nullable=False), *stored]).remove_metadata()


def schema_as_read(stored: pa.Schema) -> pa.Schema:
    """The schema that Parquet returns for these columns. Raises ArrowException when it cannot hold them."""
    sink = pa.BufferOutputStream()
    parquet_writer(sink, file_schema(stored)).close()
    return pq.read_schema(pa.BufferReader(sink.getvalue())).remove_metadata()


def check_storable(stored: pa.Schema, what: str) -> None:
    """Raises :class:`StateSchemaError` for columns that Parquet cannot hold: structs without fields."""
    try:
        schema_as_read(stored)
    except pa.ArrowException as error:
        raise StateSchemaError(f"{what} has no canonical form: {error}; it has [{schema_text(stored)}]") from error


def description(operator: str, name: str, key_groups: KeyGroupRange, descriptor: dict[str, Any]) -> bytes:
    """The key-value metadata of a file."""
    document = {
        "format": FORMAT_VERSION,
        "operator": operator,
        "state": name,
        "key_groups": [key_groups.first, key_groups.last],
        "descriptor": descriptor,
    }
    return json.dumps(document, sort_keys=True).encode()
