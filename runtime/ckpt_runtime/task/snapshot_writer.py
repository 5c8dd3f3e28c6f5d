"""The asynchronous part of a subtask's snapshot: writes keyed state to the snapshot's directory, then acknowledges."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from ckpt_runtime.checkpoint.state_handles import (
    KeyedStateHandle,
    OperatorSubtaskState,
    SubtaskState,
)
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.storage.errors import StorageError
from ckpt_runtime.storage.filesystem import delete_file, resolve
from ckpt_runtime.storage.state_file_writer import StateFileWriter
from ckpt_runtime.task.subtask import OperatorSnapshot


@dataclass(frozen=True, slots=True)
class WrittenSnapshot:
    """What the acknowledgement carries. ``written_bytes`` is what this snapshot added to the storage or metadata."""

    state: SubtaskState
    written_bytes: int


def write_snapshot(
    directory: str,
    operators: list[OperatorSnapshot],
    key_groups: KeyGroupRange,
    inline_threshold: int,
) -> WrittenSnapshot:
    """Writes all keyed states of a subtask into one file of ``directory`` (a URL), or into the handles when small.

    Releases the frozen states whatever happens. Raises what the storage raises; nothing is left behind then.
    """
    states: dict[str, OperatorSubtaskState] = {}
    total = 0
    try:
        location = resolve(directory)
        for snapshot in operators:
            keyed: tuple[KeyedStateHandle, ...] = ()
            if snapshot.keyed is not None:
                with StateFileWriter(location, inline_threshold) as writer:
                    sections = snapshot.keyed.write(writer.stream, 0)
                    file = writer.finish()
                total += file.length
                if sections:
                    keyed = (KeyedStateHandle(key_groups, file, tuple(sections)),)
            if keyed or snapshot.lists:
                states[snapshot.uid] = OperatorSubtaskState(keyed, snapshot.lists)
    except BaseException:
        for written in SubtaskState(states).files():
            with suppress(StorageError):
                delete_file(location.child(written.path))
        raise
    finally:
        for snapshot in operators:
            if snapshot.keyed is not None:
                snapshot.keyed.release()
    return WrittenSnapshot(SubtaskState(states, total), total)
