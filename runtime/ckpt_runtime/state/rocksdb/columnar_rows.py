"""Buffered rows as entries of the database. Pure.

They are stored in *chunks*. One entry holds the rows of one key group that arrived between two snapshots, in order. A
second entry, once some of them have matched or were removed, holds a byte for each row. A chunk without live rows is
deleted, and one with less than half of its rows is rewritten. Rows that do not fit into memory are in runs instead
(``row_runs.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.columns import AnyArray, arrow_from_numpy
from ckpt_runtime.state.errors import CorruptStateError, reading
from ckpt_runtime.state.hashing import hash_arrays, key_groups_of
from ckpt_runtime.state.kernels.row_buffer_kernels import ALIVE, MATCHED
from ckpt_runtime.state.rocksdb.codec import ID_BYTES, PREFIX_BYTES, state_prefix
from ckpt_runtime.state.rocksdb.row_runs import COUNTS, RUNS, RunCodec
from ckpt_runtime.state.schema_evolution import evolve
from ckpt_runtime.state.stored_rows import KEY_PREFIX, check_owned
from ckpt_runtime.state.stored_rows import MATCHED as IS_MATCHED

POSITION = "position"
"""The column of a stored chunk with the index of each row's flag."""

_NUMBER_BYTES = 8
_ROWS, _FLAGS = b"\0", b"\1"
_RUNS_AT_ONCE = 2_048


Decoded: TypeAlias = tuple[int, pa.RecordBatch, AnyArray, AnyArray]
"""A chunk's number, its live rows in the current schema, their positions, and its flags if there are any."""


class ChunkCodec:
    """Chunks of one state as entries: ``schemas`` of stored rows by their ids, of which ``current`` is written."""

    def __init__(self, name: str, state_id: int, schemas: Mapping[int, pa.Schema], current: int) -> None:
        self._name = name
        self.id = state_id
        self._schemas = schemas
        self._header = current.to_bytes(ID_BYTES, "big")
        self.schema = schemas[current]

    def keys(self, key_group: int, number: int) -> tuple[bytes, bytes]:
        """The keys of a chunk's rows and of its flags."""
        key = state_prefix(key_group, self.id) + number.to_bytes(_NUMBER_BYTES, "big")
        return key + _ROWS, key + _FLAGS

    def encode_rows(self, rows: pa.RecordBatch, positions: AnyArray) -> bytes:
        """Stored rows with their positions in the chunk."""
        batch = rows.append_column(POSITION, arrow_from_numpy(pa.uint32(), positions))
        return b"".join((self._header, memoryview(batch.serialize())))

    def encode_flags(self, flags: AnyArray) -> bytes:
        """A byte for each row that the chunk was made with."""
        return self._header + flags.tobytes()

    def decode(self, entries: Iterable[tuple[bytes, bytes]]) -> Iterator[Decoded]:
        """The chunks, in order. Raises CorruptStateError."""
        waiting: tuple[int, bytes] | None = None
        for key, value in entries:
            number, kind = int.from_bytes(key[-1 - _NUMBER_BYTES : -1], "big"), key[-1:]
            if kind == _ROWS:
                if waiting is not None:
                    yield self._chunk(*waiting, None)
                waiting = (number, value)
            elif kind != _FLAGS or waiting is None or waiting[0] != number:
                raise CorruptStateError(f"state {self._name!r} has the entry {key!r}, which belongs to no rows")
            else:
                yield self._chunk(*waiting, value)
                waiting = None
        if waiting is not None:
            yield self._chunk(*waiting, None)

    def _chunk(self, number: int, rows: bytes, flags: bytes | None) -> Decoded:
        batch = self._read(rows)
        positions = batch.column(POSITION).to_numpy()
        stored = evolve(self._name, batch.drop_columns([POSITION]), self.schema)
        if flags is None:
            return number, stored, positions, np.empty(0, dtype=np.uint8)
        known = np.frombuffer(flags, dtype=np.uint8, offset=ID_BYTES)
        if len(positions) and int(positions.max()) >= len(known):
            raise CorruptStateError(f"state {self._name!r} has a chunk of rows with {len(known)} flags")
        own = known[positions]
        matched = arrow_from_numpy(pa.uint8(), own & MATCHED).cast(pa.bool_())
        place = stored.schema.get_field_index(IS_MATCHED)
        stored = stored.set_column(place, stored.schema.field(place), matched)
        alive = (own & ALIVE).astype(bool)
        return number, stored.filter(pa.array(alive)), positions[alive], known

    def _read(self, rows: bytes) -> pa.RecordBatch:
        schema = self._schemas.get(int.from_bytes(rows[:ID_BYTES], "big"))
        if schema is None:
            raise CorruptStateError(f"state {self._name!r} has an entry with an unknown schema")
        with reading(f"an entry of state {self._name!r}"):
            message = pa.ipc.read_message(pa.py_buffer(rows)[ID_BYTES:])
            batch = pa.ipc.read_record_batch(message, schema.append(pa.field(POSITION, pa.uint32())))
            batch.validate(full=True)
        return batch


class ChunksForm:
    """Converts chunks and runs to stored rows, and stored rows to chunks, also for a state that is not in use."""

    def __init__(
        self, name: str, codec: ChunkCodec, runs: RunCodec, owned: KeyGroupRange, max_parallelism: int
    ) -> None:
        self._name = name
        self._codec = codec
        self._runs = runs
        self._owned = owned
        self._max_parallelism = max_parallelism

    def batches(self, entries: Iterable[tuple[bytes, bytes]]) -> Iterator[pa.RecordBatch]:
        """Live rows in the present schema, in the order of the entries."""
        entries = iter(entries)
        others: list[tuple[bytes, bytes]] = []
        for _, rows, _, _ in self._codec.decode(chunks_of(entries, others)):
            yield rows
        runs = (value for key, value in chain(others, entries) if key[PREFIX_BYTES] == RUNS)
        while part := list(islice(runs, _RUNS_AT_ONCE)):
            for _, rows in self._runs.decode(part):
                yield rows

    def entries(self, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[bytes, bytes]]:
        """Chunks of stored rows in the present schema, in which the rows of a key are in order."""
        names = [name for name in self._codec.schema.names if name.startswith(KEY_PREFIX)]
        for number, batch in enumerate(batches):
            hashes = hash_arrays(batch.columns[: len(names)], names)
            groups = key_groups_of(hashes, self._max_parallelism)
            check_owned(self._name, groups, self._owned)
            for group, rows in rows_by(groups, np.arange(batch.num_rows)):
                own = batch.take(arrow_from_numpy(pa.int64(), rows))
                positions = np.arange(len(rows), dtype=np.uint32)
                yield self._codec.keys(group, number)[0], self._codec.encode_rows(own, positions)


def chunks_of(
    entries: Iterator[tuple[bytes, bytes]], others: list[tuple[bytes, bytes]] | None = None
) -> Iterator[tuple[bytes, bytes]]:
    """The entries of chunks, which come first in a key group; the first other entry is added to ``others``."""
    for entry in entries:
        if entry[0][PREFIX_BYTES] >= COUNTS:
            if others is not None:
                others.append(entry)
            return
        yield entry


def rows_by(values: AnyArray, rows: AnyArray) -> Iterator[tuple[int, AnyArray]]:
    """Groups row numbers by the rows' values, in order."""
    ordered = rows[np.argsort(values[rows], kind="stable")]
    found, starts = np.unique(values[ordered], return_index=True)
    ends = [*starts[1:].tolist(), len(ordered)]
    for value, start, end in zip(found.tolist(), starts.tolist(), ends, strict=False):
        yield value, ordered[start:end]
