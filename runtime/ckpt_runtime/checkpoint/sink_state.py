"""What transactional sinks keep in snapshots, and what they are told about those that wrote before them. Pure.

Each subtask keeps the sink's id, so that any of them will do after rescaling, and the files that wait for their commit.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.state_handles import SubtaskState

SINK_ID = "sink"
PENDING = "pending"
DRILL_MARK = "restore-drill"
"""A state of every sink of a restore drill: no job may start from its checkpoints."""

_ID = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class SinkLineage:
    """What a transactional sink has to know about those that wrote before it.

    ``sink_id`` is kept over restores, whatever the job. ``ended_jobs`` wrote under it and write no more: what they have
    hidden and the restored snapshot does not cover is nobody's. A savepoint of the present job, up to number
    ``savepoint_id``, covers what may lie above the restored checkpoint.
    """

    sink_id: str
    ended_jobs: tuple[str, ...] = ()
    savepoint_id: int = 0


def new_sink_id(seed: str, uid: str) -> str:
    """The id of a sink that starts for the first time. ``seed`` is that of the job's submission, and no other's."""
    return hashlib.sha256(f"{seed}\0{uid}".encode()).hexdigest()[:16]


def restored_sink_ids(snapshot: CompletedCheckpoint) -> dict[str, str]:
    """Ids of the sinks in a snapshot, by operator uid. Snapshots of versions without them have none."""
    return {
        uid: item
        for uid, name, item in _items(snapshot.states.values())
        if name == SINK_ID and isinstance(item, str) and _ID.fullmatch(item)
    }


def pending_names(snapshots: Iterable[CompletedCheckpoint]) -> set[str]:
    """Names of the files that these snapshots cover and whose commit they may still have to repeat."""
    states = (state for snapshot in snapshots for state in snapshot.states.values())
    return {
        str(item["name"])
        for _, name, item in _items(states)
        if name == PENDING and isinstance(item, dict) and "name" in item
    }


def _items(states: Iterable[SubtaskState]) -> Iterable[tuple[str, str, object]]:
    for state in states:
        for uid, operator in state.operators.items():
            for entry in operator.lists:
                for item in entry.items:
                    yield uid, entry.name, item
