"""Describes the content of a snapshot, and verifies that it can be restored, as far as that is possible without a job.

:func:`states_of` lists the operators' states with schemas, sizes and counts, for display. :func:`verify_snapshot` reads
every byte, then every row of keyed state.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import numpy as np
import pyarrow as pa
from msgspec import Struct

from ckpt_runtime.snapshots.keyed_states import StoredState, keyed_states
from ckpt_runtime.snapshots.positions import repositions_of
from ckpt_runtime.snapshots.snapshot import Problem, Snapshot
from ckpt_runtime.state.errors import StateError, UnsupportedBackendError
from ckpt_runtime.state.hashing import hash_arrays, key_groups_of
from ckpt_runtime.state.stored_rows import KEY_PREFIX, schema_to_json
from ckpt_runtime.storage.state_files import is_relative


class SnapshotSummary(Struct, frozen=True):
    """A summary of one snapshot.

    ``bytes`` is the number of bytes that a restore reads. ``written_by`` is the release that wrote it; None if the
    snapshot is older than this field. ``repositioned`` maps the uids of sources to the positions that a user has set.
    """

    location: str
    kind: str
    format: str
    state_backend: str
    written_by: str | None
    job_id: str
    checkpoint_id: int
    completion_timestamp: int
    bytes: int
    files: int
    self_contained: bool
    repositioned: dict[str, str]


class StateDescription(Struct, frozen=True):
    """One named state; ``schema`` is for keyed state, ``keys`` for counted ones. A list state's items are ``rows``."""

    operator: str
    state: str
    kind: str
    parallelism: int
    max_parallelism: int
    bytes: int | None = None
    rows: int | None = None
    keys: int | None = None
    schema: tuple[str, ...] = ()


def summarized(snapshot: Snapshot) -> SnapshotSummary:
    """Summarises the metadata; reads no file."""
    metadata = snapshot.metadata
    states = metadata.states.values()
    paths = {file.path for state in states for file in state.files()}
    return SnapshotSummary(
        location=snapshot.directory.url,
        kind=metadata.properties.type.value,
        format=metadata.format.value,
        state_backend=metadata.state_backend,
        written_by=metadata.written_by,
        job_id=metadata.job_id,
        checkpoint_id=metadata.id,
        completion_timestamp=metadata.completion_timestamp,
        bytes=sum(state.bytes for state in states),
        files=len(paths),
        self_contained=all(map(is_relative, paths)),
        repositioned=repositions_of(metadata),
    )


def states_of(snapshot: Snapshot, *, count: bool) -> Iterator[StateDescription]:
    """The keyed and list states, ordered by vertex and operator. With ``count``, reads all keyed state.

    Raises the errors of :func:`~ckpt_runtime.snapshots.keyed_states.keyed_states` and of reading rows.
    """
    for vertex in snapshot.metadata.vertices:
        for uid in vertex.operator_uids:
            for state in keyed_states(snapshot, uid):
                rows, keys = _counted(state) if count else (None, None)
                schema = tuple(schema_to_json(state.schema)["fields"])
                yield StateDescription(
                    uid, state.name, state.kind, vertex.parallelism, vertex.max_parallelism, state.bytes, rows, keys,
                    schema,
                )  # fmt: skip
            items: dict[tuple[str, str], int] = {}
            for subtask in snapshot.states(uid):
                for entry in subtask.lists:
                    key = (entry.name, f"list ({entry.mode.value.lower()})")
                    items[key] = items.get(key, 0) + len(entry.items)
            for (name, kind), number in sorted(items.items()):
                yield StateDescription(uid, name, kind, vertex.parallelism, vertex.max_parallelism, rows=number)


def _counted(state: StoredState) -> tuple[int, int]:
    """The numbers of rows and keys. Keys are counted per key group, because all rows of a key are in one key group."""
    names = [name for name in state.schema.names if name.startswith(KEY_PREFIX)]
    rows = keys = 0
    for _, group in groupby(state.rows(state.key_groups), key=lambda found: found[0]):
        batches = [batch for _, batch in group]
        rows += sum(batch.num_rows for batch in batches)
        keys += pa.Table.from_batches(batches).select(names).group_by(names).aggregate([]).num_rows
    return rows, keys


def verify_snapshot(snapshot: Snapshot) -> list[Problem]:
    """Returns the problems found; an empty list means that the snapshot is intact.

    Lengths and checksums of all files are verified first. If they are correct, every row is decoded, and the key group
    under which it is stored is compared with that of its key: forged or mixed-up metadata could refer to intact files
    wrongly. Rows that can only be read by a backend that is not installed are not checked, because this is not damage.
    Raises :class:`StorageError` while storage is unavailable, which does not prove damage either.
    """
    problems = snapshot.verify()
    if problems:
        return problems
    for vertex in snapshot.metadata.vertices:
        for uid in vertex.operator_uids:
            try:
                for state in keyed_states(snapshot, uid):
                    problems += _misplaced(state)
            except UnsupportedBackendError:
                continue
            except StateError as error:
                problems.append(Problem(f"operator {uid!r}", str(error)))
    return problems


def _misplaced(state: StoredState) -> Iterator[Problem]:
    keys = [name for name in state.schema.names if name.startswith(KEY_PREFIX)]
    where = f"operator {state.uid!r}, state {state.name!r}"
    if not keys:
        yield Problem(where, "its rows have no key")
        return
    for group, batch in state.rows(state.key_groups):
        hashes = hash_arrays([batch.column(name) for name in keys], keys)
        wrong = np.flatnonzero(key_groups_of(hashes, state.vertex.max_parallelism) != group)
        if wrong.size:
            yield Problem(
                where, f"{wrong.size} of {batch.num_rows} rows stored in key group {group} belong to other key groups"
            )
            return
