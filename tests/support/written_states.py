"""States that are written without a job, and what is read of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from ckpt_runtime.snapshots.authoring import NewState, open_write, publish_savepoint, write_part
from ckpt_runtime.snapshots.keyed_states import keyed_states
from ckpt_runtime.snapshots.snapshot import Snapshot, open_snapshot
from ckpt_runtime.state.stored_rows import descriptor_of
from ckpt_runtime.storage.filesystem import Location

KEY = pa.schema([("id", pa.int64())])
PREFIX = "write-"


def new_state(
    kind: str = "value", max_parallelism: int = 16, user_key: pa.DataType | None = None, key: pa.DataType | None = None
) -> NewState:
    """A state of the operator ``op`` with one key column and one value column."""
    key_schema = KEY if key is None else pa.schema([("id", key)])
    fields = [key_schema.field("id").with_name("key.id")]
    fields += [pa.field("user_key.name", user_key or pa.string())] if kind == "map" else []
    fields += [pa.field("value.v", pa.int64()) if kind != "timers" else pa.field("time", pa.int64(), nullable=False)]
    schema = pa.schema(fields)
    return NewState("op", "state", descriptor_of(kind, key_schema, schema), schema, max_parallelism)


def table(state: NewState, rows: Sequence[tuple[Any, ...]]) -> pa.Table:
    """Rows as tuples of the stored columns."""
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(state.schema)
    return pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, state.schema, strict=True)], state.schema
    )


def write(
    target: Location, state: NewState, parts: Sequence[Sequence[tuple[Any, ...]]], base: Snapshot | None = None
) -> Snapshot:
    """A savepoint of these parts."""
    open_write(target, PREFIX)
    handles = [write_part(target, PREFIX, state, table(state, rows)) for rows in parts]
    url = publish_savepoint(target, PREFIX, state, [handle for handle in handles if handle], base, 1234)
    return open_snapshot(url)


def content(snapshot: Snapshot, uid: str = "op", name: str = "state") -> list[tuple[Any, ...]]:
    """The stored rows of a state, in the order of key groups."""
    (state,) = [state for state in keyed_states(snapshot, uid) if state.name == name]
    return [tuple(row.values()) for _, batch in state.rows(state.key_groups) for row in batch.to_pylist()]
