"""The rows of a key as one entry of the database: a *run*, encoded and decoded for many keys at once. Pure.

Besides chunks (``columnar_rows.py``), whose keys begin with small numbers, a state of rows has three kinds of entries
in each key group:

* ``RUNS``, the key's columns: the id of a schema, the earliest event time, the number of rows, a byte for each row
  that says whether it has matched, and the rows. If all columns are plain, the rows are lengths and rows in the form
  of ``stored_rows``, otherwise an Arrow record batch
* ``TIMES``, that event time, the key's columns: an empty value. This entry finds runs by time
* ``COUNTS``: the number of rows in runs
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state import columns
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.columns import AnyArray, arrow_from_numpy
from ckpt_runtime.state.errors import CorruptStateError, reading
from ckpt_runtime.state.hashing import hash_arrays, key_groups_of
from ckpt_runtime.state.rocksdb.codec import ID_BYTES, PREFIX_BYTES, state_prefix
from ckpt_runtime.state.schema_evolution import evolve
from ckpt_runtime.state.stored_rows import KEY_PREFIX, MATCHED, check_encoded, check_owned, decode_rows, encode_rows

COUNTS, TIMES, RUNS = 0xFD, 0xFE, 0xFF
_KEY = PREFIX_BYTES + 1
_TIME_BYTES = 8
_head = struct.Struct("<qI")
_HEAD = ID_BYTES + _head.size


def _is_plain(field: pa.Field) -> bool:
    kind = field.type
    return bool(
        columns.is_integer_like(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_decimal128(kind)
    )


class RunCodec:
    """The runs of one state: ``schemas`` of stored rows by their ids, of which ``current`` is written."""

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
        self._bare = {number: pa.schema([f for f in schema if f.name != MATCHED]) for number, schema in schemas.items()}
        self._plain = {number: all(map(_is_plain, schema)) for number, schema in self._bare.items()}
        self._matched = schemas[current].field(MATCHED)
        self._schema = schemas[current]
        self._current = current
        self._header = current.to_bytes(ID_BYTES, "big")
        self._owned = owned
        self._max_parallelism = max_parallelism
        self._key_fields = [field for field in schemas[current] if field.name.startswith(KEY_PREFIX)]

    @property
    def key_width(self) -> int:
        """The number of columns of a key."""
        return len(self._key_fields)

    def keys(self, arrays: Sequence[pa.Array]) -> tuple[AnyArray, list[bytes]]:
        """Key groups, and keys of runs. Raises CorruptStateError for keys of another subtask."""
        names = [field.name for field in self._key_fields]
        groups = key_groups_of(hash_arrays(arrays, names), self._max_parallelism)
        check_owned(self._name, groups, self._owned)
        offsets, data = encode_rows(arrays, names, keys=True)
        prefixes = {group: state_prefix(group, self._id) + bytes([RUNS]) for group in np.unique(groups).tolist()}
        whole = data.tobytes()
        bounds = zip(groups.tolist(), pairwise(offsets.tolist()), strict=True)
        return groups, [prefixes[group] + whole[start:end] for group, (start, end) in bounds]

    def key_columns(self, keys: Sequence[bytes]) -> list[pa.Array]:
        """The inverse. Raises CorruptStateError."""
        kinds = [field.type for field in self._key_fields]
        data, offsets = _joined([key[_KEY:] for key in keys])
        check_encoded(kinds, data, read_only(offsets[:-1]), read_only(offsets[1:]))
        return decode_rows(kinds, data, read_only(offsets[:-1]))

    def times_prefix(self, key_group: int) -> bytes:
        """The prefix of the keys of ``TIMES`` in a key group."""
        return state_prefix(key_group, self._id) + bytes([TIMES])

    def runs_prefix(self, key_group: int) -> bytes:
        """The prefix of the keys of runs in a key group."""
        return state_prefix(key_group, self._id) + bytes([RUNS])

    def spilled_range(self, key_group: int) -> tuple[bytes, bytes]:
        """The range of the keys of runs and their times, end exclusive."""
        return self.times_prefix(key_group), state_prefix(key_group, self._id + 1)

    def count_key(self, key_group: int) -> bytes:
        """The key of the number of rows in runs."""
        return state_prefix(key_group, self._id) + bytes([COUNTS])

    def encode_count(self, rows: int) -> bytes:
        """The value of that entry. Like all values it begins with a schema id, which merging databases translates."""
        return self._header + rows.to_bytes(8, "big")

    def decode_count(self, value: bytes) -> int:
        """The inverse. Raises CorruptStateError."""
        rows = int.from_bytes(value[ID_BYTES:], "big")
        if len(value) != ID_BYTES + 8 or rows >= 1 << 62:
            raise self._corrupt(f"the number {rows} of rows in runs")
        return rows

    def time_key(self, key: bytes, least: int) -> bytes:
        """The key of ``TIMES`` for a run with this earliest event time."""
        time = (least + (1 << 63)).to_bytes(_TIME_BYTES, "big")
        return b"".join((key[:PREFIX_BYTES], bytes([TIMES]), time, key[_KEY:]))

    def found_by_time(self, time_key: bytes) -> tuple[int, bytes]:
        """The event time and the run's key, from a key of ``TIMES``."""
        end = _KEY + _TIME_BYTES
        time = int.from_bytes(time_key[_KEY:end], "big") - (1 << 63)
        return time, time_key[:PREFIX_BYTES] + bytes([RUNS]) + time_key[end:]

    def encode(self, rows: pa.RecordBatch, starts: AnyArray, least: AnyArray) -> Iterator[bytes]:
        """Runs of stored rows in the current schema; the runs begin at ``starts``."""
        flags = rows.column(MATCHED).cast(pa.uint8()).to_numpy().tobytes()
        bare = rows.select([field.name for field in self._bare[self._current]])
        bounds = pairwise([*starts.tolist(), rows.num_rows])
        if self._plain[self._current]:
            offsets, data = encode_rows(bare.columns, bare.schema.names)
            sizes, whole, places = np.diff(offsets).astype("<u4").tobytes(), data.tobytes(), offsets.tolist()
        for (start, end), time in zip(bounds, least.tolist(), strict=True):
            head = self._header + _head.pack(time, end - start) + flags[start:end]
            if self._plain[self._current]:
                yield b"".join((head, sizes[4 * start : 4 * end], whole[places[start] : places[end]]))
            else:
                yield b"".join((head, memoryview(bare.slice(start, end - start).serialize())))

    def size(self, run: bytes) -> tuple[int, int]:
        """The earliest event time and the number of rows. Raises CorruptStateError."""
        if len(run) < _HEAD:
            raise self._corrupt("a run that is too short")
        time, rows = _head.unpack_from(run, ID_BYTES)
        if not rows or len(run) < _HEAD + rows:
            raise self._corrupt(f"a run of {rows} rows in {len(run)} bytes")
        return time, rows

    def decode(self, runs: Sequence[bytes]) -> Iterator[tuple[AnyArray, pa.RecordBatch]]:
        """Stored rows in the current schema, with the position of each row's run. Raises CorruptStateError."""
        by_schema: dict[int, list[int]] = {}
        for place, run in enumerate(runs):
            by_schema.setdefault(int.from_bytes(run[:ID_BYTES], "big"), []).append(place)
        for number, places in by_schema.items():
            if number not in self._bare:
                raise self._corrupt(f"an entry with the unknown schema {number}")
            own = [runs[place] for place in places]
            sizes = [self.size(run)[1] for run in own]
            flags = np.frombuffer(b"".join(run[_HEAD : _HEAD + n] for run, n in zip(own, sizes, strict=True)), np.uint8)
            bodies = [memoryview(run)[_HEAD + n :] for run, n in zip(own, sizes, strict=True)]
            batch = self._read(number, bodies, sizes)
            matched = arrow_from_numpy(pa.uint8(), flags & 1).cast(pa.bool_())
            stored = batch.append_column(self._matched, matched)
            yield np.repeat(np.array(places), sizes), evolve(self._name, stored, self._schema)

    def _read(self, number: int, bodies: list[memoryview], sizes: list[int]) -> pa.RecordBatch:
        schema = self._bare[number]
        with reading(f"a run of state {self._name!r}"):
            if self._plain[number]:
                arrays = self._decoded(schema, bodies, sizes)
                batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
            else:
                parts = [pa.ipc.read_record_batch(pa.ipc.read_message(pa.py_buffer(b)), schema) for b in bodies]
                if [part.num_rows for part in parts] != sizes:
                    raise self._corrupt("a run with another number of rows than it says")
                batch = pa.concat_batches(parts)
            batch.validate(full=True)
        return batch

    def _decoded(self, schema: pa.Schema, bodies: list[memoryview], sizes: list[int]) -> list[pa.Array]:
        lengths = np.frombuffer(b"".join([b[: 4 * n] for b, n in zip(bodies, sizes, strict=True)]), dtype=np.uint8)
        rows = [body[4 * n :] for body, n in zip(bodies, sizes, strict=True)]
        offsets = np.zeros(1 + sum(sizes), dtype=np.int64)
        if len(lengths) == 4 * (len(offsets) - 1):
            np.cumsum(lengths.view("<u4"), out=offsets[1:])
        ends = np.cumsum(np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)))
        if not np.array_equal(offsets[np.cumsum(sizes)], ends):
            raise self._corrupt("a run whose rows are not as long as it says")
        data = np.frombuffer(b"".join(rows), dtype=np.uint8)
        check_encoded(schema.types, data, read_only(offsets[:-1]), read_only(offsets[1:]))
        return decode_rows(schema.types, data, read_only(offsets[:-1]))

    def _corrupt(self, what: str) -> CorruptStateError:
        return CorruptStateError(f"state {self._name!r} has {what}")


def _joined(parts: Sequence[bytes]) -> tuple[AnyArray, AnyArray]:
    """Bytes, and offsets, one more than parts."""
    offsets = np.zeros(len(parts) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, parts), dtype=np.int64, count=len(parts)), out=offsets[1:])
    return np.frombuffer(b"".join(parts), dtype=np.uint8), offsets
