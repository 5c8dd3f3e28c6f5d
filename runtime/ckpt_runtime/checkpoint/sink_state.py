"""The snapshot state of transactional sinks, and the facts about earlier writers that they need. Pure.

Each subtask keeps the files that wait for their commit, and the sink's id, so that any subtask's copy suffices after
rescaling.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from msgspec import Struct

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint, SubtaskState
from ckpt_runtime.graph.schema import DocumentError, NonNegative, checked, decoded

SINK_ID = "sink"
PENDING = "pending"
MESSAGES = "messages"
"""Name of a single committer's list state. An item holds the committables of a checkpoint as texts, by subtask."""
NEXT_BATCH = "next batch"
"""Name of a single committer's list state. Its item is the batch id of the first checkpoint without one."""
DRILL_MARK = "restore-drill"
"""Marks the state of every sink of a restore drill: no job may start from the drill's checkpoints."""

_ID = re.compile("[0-9a-f]{16}")


class _NamedFile(Struct):
    """A committable. Only the name of its file, if it has one, is read."""

    name: str | None = None


class _Messages(Struct):
    """The texts of a checkpoint's committables, each with its subtask."""

    messages: tuple[tuple[NonNegative, object], ...]


@dataclass(frozen=True, slots=True)
class SinkLineage:
    """The facts about earlier writers that a transactional sink needs.

    ``sink_id`` is kept across restores, also by another job. ``ended_jobs`` wrote under it and no longer do: their
    hidden files that the restored snapshot does not cover are orphaned. A savepoint of the current job, up to number
    ``savepoint_id``, covers files that may be newer than the restored checkpoint. ``continues``: the sink is one of the
    restored snapshot's.
    """

    sink_id: str
    ended_jobs: tuple[str, ...] = ()
    savepoint_id: int = 0
    continues: bool = False


def new_sink_id(seed: str, uid: str) -> str:
    """Returns the id of a sink that starts for the first time. ``seed`` is unique to the job's submission."""
    return hashlib.sha256(f"{seed}\0{uid}".encode()).hexdigest()[:16]


def restored_sink_ids(snapshot: CompletedCheckpoint) -> dict[str, str]:
    """Ids of the sinks in a snapshot, by operator uid. Snapshots of versions without sink ids have none."""
    return {
        uid: item
        for uid, name, item in _items(snapshot.states.values())
        if name == SINK_ID and isinstance(item, str) and _ID.fullmatch(item)
    }


def pending_names(snapshots: Iterable[CompletedCheckpoint]) -> set[str]:
    """Names of the files in these snapshots whose commit may still have to be repeated.

    Raises DocumentError for a state that no sink wrote: files that it names would otherwise be deleted as orphans.
    """
    states = (state for snapshot in snapshots for state in snapshot.states.values())
    found = list(_items(states))
    pending = [item for _, name, item in found if name == PENDING and isinstance(item, dict)]
    # Earlier releases stored each committable by itself; before the protocol of sinks, the fields of its file alone.
    each = [item.get("committables", [item.get("committable", item)]) for item in pending]
    names = [named.name for committables in each for named in checked(committables, list[_NamedFile])]
    messages = [checked(item, _Messages) for _, name, item in found if name == MESSAGES and isinstance(item, dict)]
    names += [_name_in(text) for message in messages for _, text in message.messages]
    return {name for name in names if name is not None}


def _name_in(text: object) -> str | None:
    """The file that a committable's text names; None for the message of a PySpark writer, which need not be JSON."""
    if not isinstance(text, str):
        return None
    try:
        return decoded(text.encode(), _NamedFile).name
    except DocumentError:
        return None


def _items(states: Iterable[SubtaskState]) -> Iterable[tuple[str, str, object]]:
    for state in states:
        for uid, operator in state.operators.items():
            for entry in operator.lists:
                for item in entry.items:
                    yield uid, entry.name, item
