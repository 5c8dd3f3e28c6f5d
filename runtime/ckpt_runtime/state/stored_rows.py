"""Stored rows: the columnar form of keyed state that backends, formats and tools share.

A state consists of its name, a *descriptor* and rows, in record batches per key group. The descriptor (JSON) makes
the rows readable without the job:

* ``format``: 1; ``kind``: ``aggregate``, ``value``, ``list``, ``map``, ``timers`` or ``rows``
* ``schema``: the Arrow schema of every batch of the state, ``key_schema``: of the key alone. A schema is
  ``{"arrow": base64 of the IPC schema message, "fields": ["name: type", …]}``; ``fields`` is for human readers
* aggregate: columns ``key.<name>`` then each aggregate's stored columns; ``aggregates``: list of ``{alias, function,
  column, input_type, result_type, stored: [column names]}``. One row per key. An average stores a sum and a count
* value: ``key.<name>``, ``value.<name>``; one row per key
* list: the same, one row per element, elements of a key are in order and in one block
* map: ``key.<name>``, ``user_key.<name>``, ``value.<name>``; one row per entry
* value, list and map with time to live also have ``expires_at`` (int64, ms since epoch)
* timers: ``key.<name>``, ``time`` (int64 ms); one row per timer
* rows: ``key.<name>``, ``value.<name>``, ``matched`` (bool); rows of a key are in order and in one block;
  ``rows``: ``{event_time: the column by which rows expire or null, keeps_matched: whether matched rows stay}``

A row's key group comes from the stable hash of its key columns (``state/hashing.py``). Nothing here is pickled, and
rows that do not match their descriptor raise :class:`CorruptStateError`.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable
from typing import Any, Protocol

import pyarrow as pa
from msgspec import Struct

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.graph.schema import DocumentError, checked
from ckpt_runtime.state.columns import AnyArray
from ckpt_runtime.state.errors import CorruptStateError

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
    """The fields under their names in stored batches."""
    return [field.with_name(prefix + field.name).remove_metadata() for field in schema]


def without_prefix(schema: pa.Schema, prefix: str) -> pa.Schema:
    """The fields that carry ``prefix``, under their own names."""
    fields = [field for field in schema if field.name.startswith(prefix)]
    return pa.schema([field.with_name(field.name.removeprefix(prefix)) for field in fields])


def descriptor_of(kind: str, key_schema: pa.Schema, schema: pa.Schema, **extra: Any) -> dict[str, Any]:
    """A state's descriptor."""
    return {
        "format": FORMAT_VERSION,
        "kind": kind,
        "key_schema": schema_to_json(key_schema),
        "schema": schema_to_json(schema),
        **extra,
    }


class _Schema(Struct):
    arrow: str


class _Aggregate(Struct):
    """One aggregate of a descriptor; its other fields are only compared."""

    alias: str
    function: str
    stored: tuple[str, ...]


class _Descriptor(Struct):
    key_schema: _Schema
    schema: _Schema
    aggregates: tuple[_Aggregate, ...] | None = None
    rows: dict[str, Any] | None = None


def check_descriptor(name: str, descriptor: dict[str, Any]) -> None:
    """Raises :class:`CorruptStateError` for a descriptor that this version cannot read."""
    version = descriptor.get("format")
    if version != FORMAT_VERSION:
        message = f"state {name!r} has stored rows of version {version!r}, this version reads {FORMAT_VERSION}"
        raise CorruptStateError(message)
    if descriptor.get("kind") not in ("aggregate", "value", "list", "map", "timers", "rows"):
        raise CorruptStateError(f"state {name!r} has the unknown kind {descriptor.get('kind')!r}")
    try:
        found = checked(descriptor, _Descriptor)
    except DocumentError as error:
        raise CorruptStateError(f"state {name!r} has a malformed descriptor: {error}") from error
    schema_from_json(descriptor["key_schema"])
    columns = schema_from_json(descriptor["schema"]).names
    if descriptor["kind"] == "aggregate" and found.aggregates is None:
        raise CorruptStateError(f"state {name!r} has a descriptor without aggregates")
    if descriptor["kind"] == "rows" and found.rows is None:
        raise CorruptStateError(f"state {name!r} has a descriptor that does not say how its rows end")
    unknown = [column for entry in found.aggregates or () for column in entry.stored if column not in columns]
    if unknown:
        raise CorruptStateError(f"state {name!r} has aggregates of columns that its schema does not have: {unknown}")


def check_owned(name: str, groups: AnyArray, owned: KeyGroupRange) -> None:
    """Raises :class:`CorruptStateError` for rows of key groups that another subtask owns."""
    if groups.size and not owned.first <= groups.min() <= groups.max() <= owned.last:
        raise CorruptStateError(
            f"state {name!r} has rows of key groups {groups.min()} to {groups.max()}; "
            f"{owned.first} to {owned.last} are its own"
        )


class StateWriter(Protocol):
    """The target to which a frozen state is written: the files of its backend, or the canonical form."""

    def write_table(
        self, name: str, descriptor: dict[str, Any], table: pa.Table, groups: AnyArray, owned: KeyGroupRange
    ) -> None:
        """Writes rows in any order of their keys; ``groups`` holds each row's key group. Equal keys keep their order.

        Raises :class:`CorruptStateError` for a row outside ``owned``.
        """

    def write_batches(
        self, name: str, descriptor: dict[str, Any], schema: pa.Schema, batches: Iterable[tuple[int, pa.RecordBatch]]
    ) -> None:
        """Writes a stream of rows that are ordered by key group, ascending."""
