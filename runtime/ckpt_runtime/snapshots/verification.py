"""Proves a snapshot restorable as far as it can be proven without a job: every byte, and every row of keyed state."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ckpt_runtime.snapshots.keyed_states import StoredState, keyed_states
from ckpt_runtime.snapshots.snapshot import Problem, Snapshot
from ckpt_runtime.state.errors import StateError, UnsupportedBackendError
from ckpt_runtime.state.hashing import hash_arrays, key_groups_of
from ckpt_runtime.state.stored_rows import KEY_PREFIX


def verify_snapshot(snapshot: Snapshot) -> list[Problem]:
    """What is wrong with it; an empty list says that nothing is.

    Lengths and checksums of all files come first. When they hold, every row is decoded, and its key group compared
    with that of its key: what forged or mixed-up metadata could make of intact files. Rows that only a backend reads
    which is not here are left at that: it is no damage. Raises :class:`StorageError` while storage is away, which
    proves no damage either.
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
            yield Problem(where, f"{wrong.size} of {batch.num_rows} rows stored in key group {group} belong to others")
            return
