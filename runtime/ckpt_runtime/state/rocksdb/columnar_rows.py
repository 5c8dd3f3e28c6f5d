"""Buffered rows as entries of the database. Pure.

They are stored in *chunks*. One entry holds the rows of one key group that arrived between two snapshots, in order. A
second entry, once some of them have matched or were removed, holds a byte for each row. A chunk without live rows is
deleted, and one with less than half of its rows is rewritten. Rows that do not fit into memory are in runs instead
(``row_runs.py``).

Stored rows with one row per key are entries, too, which are encoded and decoded in bulk. A key is its key group and
its state's id, two bytes each, big endian, then the key's columns; its value is the id of a schema, two bytes, and
the other columns. Columns have the form of ``stored_rows``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.columns import AnyArray, arrow_from_numpy
from ckpt_runtime.state.errors import CorruptStateError, reading
from ckpt_runtime.state.hashing import hash_arrays, key_groups_of
from ckpt_runtime.state.kernels.key_codec_kernels import order_words
from ckpt_runtime.state.kernels.row_buffer_kernels import ALIVE, MATCHED
from ckpt_runtime.state.rocksdb.codec import BATCH, ID_BYTES, PREFIX_BYTES, state_prefix
from ckpt_runtime.state.rocksdb.row_runs import COUNTS, RUNS, RunCodec
from ckpt_runtime.state.schema_evolution import evolve
from ckpt_runtime.state.stored_rows import KEY_PREFIX, alike_bytes, check_encoded, check_owned, decode_rows, encode_rows
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


class ColumnarCodec:
    """The codec of one state: ``schemas`` of stored rows by their ids, of which ``current`` is written."""

    def __init__(
        self,
        name: str,
        state_id: int,
        schemas: Mapping[int, pa.Schema],
        current: int,
        owned: KeyGroupRange,
        max_parallelism: int,
    ) -> None:
        self._name = name
        self._id = state_id
        self._schemas = schemas
        self._current = current
        self._owned = owned
        self._max_parallelism = max_parallelism
        self._key_fields = [field for field in schemas[current] if field.name.startswith(KEY_PREFIX)]
        self._alike = alike_bytes(self._key_fields[0].type)

    def ordered_keys(self, arrays: Sequence[pa.Array]) -> tuple[list[pa.Array], list[bytes]]:
        """Keys by their columns, roughly in the order of the database: the columns, and the encoded keys.

        Raises CorruptStateError for keys of another subtask.
        """
        offsets, data = self._encoded_keys(arrays)
        order = self._order(offsets, data)
        taken = pa.array(order)
        return [array.take(taken) for array in arrays], list(_pieces(offsets, data, order))

    def _encoded_keys(self, arrays: Sequence[pa.Array]) -> tuple[AnyArray, AnyArray]:
        names = [field.name for field in self._key_fields]
        groups = key_groups_of(hash_arrays(arrays, names), self._max_parallelism)
        check_owned(self._name, groups, self._owned)
        offsets, data = encode_rows(arrays, names, header=PREFIX_BYTES, keys=True)
        starts = offsets[:-1]
        for byte, part in enumerate((groups >> 8, groups & 255, self._id >> 8, self._id & 255)):
            data[starts + byte] = part
        return offsets, data

    def _order(self, offsets: AnyArray, data: AnyArray) -> AnyArray:
        """Roughly the order of the database: by key group and the first six bytes after the part that all keys share.

        It shortens RocksDB's searches from one entry to the next, and costs a tenth of sorting the bytes.
        """
        words = np.empty(len(offsets) - 1, dtype=np.uint64)
        order_words(read_only(data), read_only(offsets), PREFIX_BYTES, self._alike, words)
        return np.argsort(words)

    def entries(self, rows: pa.RecordBatch) -> Iterator[tuple[bytes, bytes]]:
        """Entries of stored rows in the current schema, roughly in the order of the database."""
        keys = len(self._key_fields)
        names = rows.schema.names[keys:]
        offsets, data = encode_rows(rows.columns[keys:], names, header=ID_BYTES)
        starts = offsets[:-1]
        data[starts], data[starts + 1] = self._current >> 8, self._current & 255
        key_offsets, key_data = self._encoded_keys(rows.columns[:keys])
        order = self._order(key_offsets, key_data)
        return zip(_pieces(key_offsets, key_data, order), _pieces(offsets, data, order), strict=True)

    def rows(self, keys: Sequence[pa.Array], found: Sequence[bytes | None]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Stored rows of the keys that were found, by schema. Raises CorruptStateError."""
        places = np.array([place for place, value in enumerate(found) if value is not None], dtype=np.int64)
        values = [value for value in found if value is not None]
        for schema_id, at, arrays in self._decoded(values):
            taken = pa.array(places[at])
            yield schema_id, self._batch(schema_id, [*(key.take(taken) for key in keys), *arrays])

    def decode(self, entries: Sequence[tuple[bytes, bytes]]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Stored rows of encoded entries, by schema. Raises CorruptStateError."""
        keys = self._decoded_keys([key for key, _ in entries])
        yield from self.rows(keys, [value for _, value in entries])

    def hashes(self, keys: Sequence[bytes]) -> AnyArray:
        """The stable hashes of encoded keys. Raises CorruptStateError."""
        return hash_arrays(self._decoded_keys(keys), [field.name for field in self._key_fields])

    def _decoded_keys(self, keys: Sequence[bytes]) -> list[pa.Array]:
        offsets, data = _joined(keys)
        kinds = [field.type for field in self._key_fields]
        starts = read_only(offsets[:-1] + PREFIX_BYTES)
        check_encoded(kinds, data, starts, read_only(offsets[1:]))
        return decode_rows(kinds, data, starts)

    def _decoded(self, values: Sequence[bytes]) -> Iterator[tuple[int, AnyArray, list[pa.Array]]]:
        if not values:
            return
        offsets, data = _joined(values)
        starts, ends = offsets[:-1], offsets[1:]
        if int((ends - starts).min()) < ID_BYTES:
            raise CorruptStateError(f"state {self._name!r} has an entry without a schema")
        schema_ids = data[starts].astype(np.int64) << 8 | data[starts + 1]
        for schema_id in np.unique(schema_ids).tolist():
            schema = self._schemas.get(schema_id)
            if schema is None:
                raise CorruptStateError(f"state {self._name!r} has an entry with the unknown schema {schema_id}")
            kinds = schema.types[len(self._key_fields) :]
            at = np.flatnonzero(schema_ids == schema_id)
            begin = read_only(starts[at] + ID_BYTES)
            check_encoded(kinds, data, begin, read_only(ends[at]))
            yield schema_id, at, decode_rows(kinds, data, begin)

    def _batch(self, schema_id: int, arrays: list[pa.Array]) -> pa.RecordBatch:
        with reading(f"an entry of state {self._name!r}"):
            batch = pa.RecordBatch.from_arrays(arrays, schema=self._schemas[schema_id])
            batch.validate(full=True)
        return batch


def _joined(parts: Sequence[bytes]) -> tuple[AnyArray, AnyArray]:
    """Offsets (one more than parts) and bytes."""
    offsets = np.zeros(len(parts) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, parts), dtype=np.int64, count=len(parts)), out=offsets[1:])
    return offsets, np.frombuffer(b"".join(parts), dtype=np.uint8)


def _pieces(offsets: AnyArray, data: AnyArray, order: AnyArray) -> Iterator[bytes]:
    """The parts, in this order; the objects of :data:`BATCH` of them are made at a time."""
    lengths = np.diff(offsets)
    width = int(lengths[0]) if len(lengths) else 0
    batches = (order[start : start + BATCH] for start in range(0, len(order), BATCH))
    if width and (lengths == width).all():  # NumPy makes the bytes, six times as fast
        alike = data.view(np.dtype((np.void, width)))
        return chain.from_iterable(alike[batch].tolist() for batch in batches)
    whole, ends = data.tobytes(), offsets.tolist()
    return (whole[ends[place] : ends[place + 1]] for batch in batches for place in batch.tolist())
