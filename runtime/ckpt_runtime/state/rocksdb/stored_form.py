"""Converts entries of the database to stored rows and back, by a state's catalog entry: the state need not be in use.

State moves between backends this way, in canonical form.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state import values
from ckpt_runtime.state.memory.aggregate_table import evolved_rows
from ckpt_runtime.state.rocksdb.catalog import StateEntry
from ckpt_runtime.state.rocksdb.codec import (
    BATCH,
    SPLIT,
    KeyCodec,
    Row,
    RowsCodec,
    SplitList,
    map_tail,
    number_tail,
    without_key,
)
from ckpt_runtime.state.rocksdb.columnar_rows import ChunkCodec, ChunksForm, ColumnarCodec
from ckpt_runtime.state.rocksdb.keyed_collections import MOST_ROWS
from ckpt_runtime.state.rocksdb.row_runs import RunCodec
from ckpt_runtime.state.states import Key
from ckpt_runtime.state.stored_rows import USER_KEY_PREFIX, schema_from_json

Entry: TypeAlias = tuple[bytes, bytes]


class StoredForm(Protocol):
    """The conversion of one state."""

    def batches(self, entries: Iterable[Entry]) -> Iterator[pa.RecordBatch]:
        """Stored rows in the present schema, in the order of the entries."""

    def entries(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Entry]:
        """Entries of stored rows in the present schema; rows of one key must be adjacent."""


def stored_form(name: str, entry: StateEntry, owned: KeyGroupRange, max_parallelism: int) -> StoredForm:
    """The conversion of the state ``entry``, whose rows may have been written in several schemas."""
    if entry.kind == "rows":
        chunks = ChunkCodec(name, entry.id, entry.schemas(), entry.current)
        runs = RunCodec(name, entry.id, entry.schemas(), entry.current, owned, max_parallelism)
        return ChunksForm(name, chunks, runs, owned, max_parallelism)
    if entry.kind == "aggregate":
        codec = ColumnarCodec(name, entry.id, entry.schemas(), entry.current, owned, max_parallelism)
        return _AggregateForm(entry, codec)
    return _RowsForm(entry, KeyCodec(schema_from_json(entry.descriptor.get("key_schema")), owned, max_parallelism))


class _RowsForm:
    """Values, lists, maps and timers."""

    def __init__(self, entry: StateEntry, keys: KeyCodec) -> None:
        schemas = entry.schemas()
        self._schema = schemas[entry.current]
        self._id = entry.id
        self._keys = keys
        self._rows = RowsCodec(
            {number: without_key(schema) for number, schema in schemas.items()}, entry.current, _no_stamp_yet
        )
        self._kind = entry.kind
        self._user_key = sum(name.startswith(USER_KEY_PREFIX) for name in self._schema.names)

    def batches(self, entries: Iterable[Entry]) -> Iterator[pa.RecordBatch]:
        rows = (
            (*self._keys.decode_element(key)[0], *row)
            for key, encoded in entries
            if not encoded.startswith(SPLIT)
            for row in self._rows.decode(encoded)
        )
        while piece := list(islice(rows, BATCH)):
            columns = zip(zip(*piece, strict=True), self._schema, strict=True)
            arrays = [values.to_arrow(column, field.type) for column, field in columns]
            yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def entries(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Entry]:
        rows = (row for batch in batches for row in self._rows_of(batch))
        short: list[tuple[Key, list[Row]]] = []
        for key, found in groupby(rows, itemgetter(0)):
            together = (row for _, row in found)
            first = list(islice(together, MOST_ROWS + 1))
            if len(first) > MOST_ROWS and self._kind in ("list", "map"):
                yield from self._split(key, chain(first, together))
                continue
            short.append((key, [*first, *together]))
            if len(short) == BATCH:
                yield from self._whole(short)
                short = []
        yield from self._whole(short)

    def _whole(self, short: list[tuple[Key, list[Row]]]) -> Iterator[Entry]:
        encoded = self._keys.encode(self._id, [key for key, _ in short], to_write=True)
        for key, (_, together) in zip(encoded, short, strict=True):
            yield key, self._rows.encode(together)

    def _split(self, key: Key, rows: Iterator[Row]) -> Iterator[Entry]:
        (prefix,) = self._keys.encode(self._id, [key], to_write=True)
        elements = 0
        is_list = self._kind == "list"
        while part := list(islice(rows, MOST_ROWS if is_list else 1)):
            tail = number_tail(elements) if is_list else map_tail(part[0][: self._user_key])
            yield prefix + tail, self._rows.encode(part)
            elements += 1
        yield prefix, SplitList(elements, elements).encode()

    def _rows_of(self, batch: pa.RecordBatch) -> Iterator[tuple[Key, Row]]:
        """Each row's key and its other columns."""
        width = len(self._keys)
        keys = zip(*[values.from_arrow(column) for column in batch.columns[:width]], strict=True)
        others = zip(*[values.state_from_arrow(column) for column in batch.columns[width:]], strict=True)
        return zip(map(values.canonical_key, keys), others, strict=True)


def _no_stamp_yet() -> Any:
    """No expiry time: rows that get a time to live start it when the state is used."""
    return None


class _AggregateForm:
    """One row per key."""

    def __init__(self, entry: StateEntry, codec: ColumnarCodec) -> None:
        self._descriptor = entry.descriptor
        self._current = entry.current
        self._codec = codec

    def batches(self, entries: Iterable[Entry]) -> Iterator[pa.RecordBatch]:
        entries = iter(entries)
        while piece := list(islice(entries, BATCH)):
            for schema_id, rows in self._codec.decode(piece):
                yield rows if schema_id == self._current else evolved_rows(self._descriptor, rows)

    def entries(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Entry]:
        for batch in batches:
            yield from self._codec.entries(batch)
