"""The native format of in-memory keyed state: what lies in a snapshot's file and how it is found again.

A file is a run of *sections*, one per named state. A section is a run of *key-group blocks* in key-group order, empty
groups left out. A block is a run of Arrow IPC record batch messages (encapsulated form: continuation marker, metadata
length, metadata, body; 8-byte aligned relative to the block), without schema messages and uncompressed. Offsets of
blocks count from the file's start and stand in :class:`~ckpt_runtime.checkpoint.state_handles.KeyedSection`.

The section's descriptor (JSON) makes a section readable without the job:

* ``format``: 1; ``kind``: ``aggregate``, ``value``, ``list``, ``map``, ``timers`` or ``rows``
* ``schema``: the Arrow schema of every batch in the section, ``key_schema``: of the key alone. A schema is
  ``{"arrow": base64 of the IPC schema message, "fields": ["name: type", …]}``; ``fields`` is for people
* aggregate: columns ``key.<name>`` then each aggregate's stored columns; ``aggregates``: list of ``{alias, function,
  column, input_type, result_type, stored: [column names]}``. One row per key. An average stores a sum and a count
* value: ``key.<name>``, ``value.<name>``; one row per key
* list: the same, one row per element, elements of a key in order and in one block
* map: ``key.<name>``, ``user_key.<name>``, ``value.<name>``; one row per entry
* value, list and map with time to live also have ``expires_at`` (int64, ms since epoch)
* timers: ``key.<name>``, ``time`` (int64 ms); one row per timer
* rows: ``key.<name>``, ``value.<name>``, ``matched`` (bool); rows of a key in order and in one block; ``rows``:
  ``{event_time: the column by which rows are forgotten or null, keeps_matched: whether matched rows stay}``

A row's key group comes from the stable hash of its key columns (``state/hashing.py``). Nothing here is pickled, and
bytes that do not fit their descriptor raise :class:`CorruptStateError`.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from ckpt_runtime.checkpoint.state_handles import KeyedSection
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state import columns
from ckpt_runtime.state.columns import AnyArray
from ckpt_runtime.state.errors import CorruptStateError
from ckpt_runtime.state.kernels.compiler import read_only
from ckpt_runtime.state.kernels.split_kernels import order_by_group

FORMAT_VERSION = 1
KEY_PREFIX = "key."
USER_KEY_PREFIX = "user_key."
VALUE_PREFIX = "value."
EXPIRES_AT = "expires_at"
TIME = "time"
MATCHED = "matched"


def schema_to_json(schema: pa.Schema) -> dict[str, Any]:
    """The JSON form of a schema; metadata of the schema and its fields is left out."""
    bare = schema.remove_metadata()
    return {
        "arrow": b64encode(bare.serialize().to_pybytes()).decode(),
        "fields": [f"{field.name}: {field.type}{'' if field.nullable else ' not null'}" for field in bare],
    }


def schema_from_json(document: Any) -> pa.Schema:
    """The inverse of :func:`schema_to_json`."""
    try:
        return pa.ipc.read_schema(pa.py_buffer(b64decode(document["arrow"], validate=True)))
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise CorruptStateError(f"a state descriptor holds no readable schema: {error}") from error


def prefixed(schema: pa.Schema, prefix: str) -> list[pa.Field]:
    """The fields under the names that they have in stored batches."""
    return [field.with_name(prefix + field.name).remove_metadata() for field in schema]


def without_prefix(schema: pa.Schema, prefix: str) -> pa.Schema:
    """The fields that carry ``prefix``, under their own names."""
    fields = [field for field in schema if field.name.startswith(prefix)]
    return pa.schema([field.with_name(field.name.removeprefix(prefix)) for field in fields])


def descriptor_of(kind: str, key_schema: pa.Schema, schema: pa.Schema, **extra: Any) -> dict[str, Any]:
    """A section's descriptor."""
    return {
        "format": FORMAT_VERSION,
        "kind": kind,
        "key_schema": schema_to_json(key_schema),
        "schema": schema_to_json(schema),
        **extra,
    }


def check_descriptor(name: str, descriptor: dict[str, Any]) -> None:
    """Raises :class:`CorruptStateError` for a descriptor that this version cannot read."""
    version = descriptor.get("format")
    if version != FORMAT_VERSION:
        raise CorruptStateError(f"state {name!r} has native format {version!r}, this version reads {FORMAT_VERSION}")
    if descriptor.get("kind") not in ("aggregate", "value", "list", "map", "timers", "rows"):
        raise CorruptStateError(f"state {name!r} has the unknown kind {descriptor.get('kind')!r}")


class SectionWriter:
    """Writes sections to a stream one after another and remembers where each block went."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._offset = 0
        self.sections: list[KeyedSection] = []

    def write_blocks(self, name: str, descriptor: dict[str, Any], blocks: Iterable[tuple[int, Iterable[Any]]]) -> None:
        """Writes blocks that are already encoded; each comes as pieces of bytes, in key-group order."""
        offsets = []
        for key_group, pieces in blocks:
            start = self._offset
            for piece in pieces:
                self._stream.write(piece)
                self._offset += len(piece)
            if self._offset > start:
                offsets.append((key_group, start, self._offset - start))
        self.sections.append(KeyedSection(name, descriptor, tuple(offsets)))

    def write_table(
        self, name: str, descriptor: dict[str, Any], table: pa.Table, groups: AnyArray, owned: KeyGroupRange
    ) -> None:
        """Sorts rows by key group (stable) and writes them; ``groups`` holds each row's key group.

        Raises :class:`CorruptStateError` for a row of another subtask's key groups.
        """
        # The kernel has no bounds: such a row would be counted in memory that is not its own.
        if groups.size and not owned.first <= groups.min() <= groups.max() <= owned.last:
            raise CorruptStateError(
                f"state {name!r} has rows of key groups {groups.min()} to {groups.max()}; "
                f"{owned.first} to {owned.last} are its own"
            )
        self.write_blocks(name, descriptor, _encoded_blocks(table, groups, owned))


def _encoded_blocks(table: pa.Table, groups: AnyArray, owned: KeyGroupRange) -> Iterator[tuple[int, Iterable[Any]]]:
    if table.num_rows == 0:
        return
    ends = np.zeros(len(owned), dtype=np.int64)
    order = np.empty(len(groups), dtype=np.int64)
    order_by_group(read_only(groups), owned.first, ends, order)
    start = 0
    for index, end in enumerate(ends.tolist()):
        if end > start:  # one group at a time: all of them in order would be a second table
            batches = table.take(columns.arrow_from_numpy(pa.int64(), order[start:end])).to_batches()
            yield owned.first + index, [memoryview(batch.serialize()) for batch in batches]
        start = end


def read_block(name: str, schema: pa.Schema, block: bytes | memoryview | pa.Buffer) -> Iterator[pa.RecordBatch]:
    """The batches of one block, checked in full. Raises :class:`CorruptStateError`."""
    try:
        reader = pa.BufferReader(block)
        size = reader.size()
        while reader.tell() < size:
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(reader), schema)
            batch.validate(full=True)
            yield batch
    except (pa.ArrowException, OSError, EOFError, ValueError, TypeError) as error:
        raise CorruptStateError(f"a block of state {name!r} cannot be read: {error}") from error
