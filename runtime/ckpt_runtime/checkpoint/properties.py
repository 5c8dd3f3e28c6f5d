"""The kind of a snapshot, and the options that its barriers carry to the tasks. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ckpt_runtime.checkpoint.statistics import CheckpointType


class SavepointFormat(StrEnum):
    """The backend's own files, or the format that every backend reads (FLIP-203)."""

    NATIVE = "NATIVE"
    CANONICAL = "CANONICAL"


@dataclass(frozen=True, slots=True)
class CheckpointProperties:
    """``full`` requests a snapshot that shares no file with an earlier one; ``drain`` is for sync savepoints.

    ``incremental`` is the job's option for keyed state; it does not affect in-flight data.
    """

    type: CheckpointType = CheckpointType.CHECKPOINT
    savepoint_format: SavepointFormat | None = None
    full: bool = False
    drain: bool = False
    incremental: bool = True

    @property
    def is_savepoint(self) -> bool:
        return self.type in (CheckpointType.SAVEPOINT, CheckpointType.SYNC_SAVEPOINT)

    @property
    def is_synchronous(self) -> bool:
        return self.type is CheckpointType.SYNC_SAVEPOINT

    @property
    def is_incremental(self) -> bool:
        """Whether keyed state may reuse files of completed checkpoints (FLIP-203).

        A checkpoint refers to them; a native savepoint, which shares nothing, duplicates them.
        """
        return self.incremental and not self.full and self.savepoint_format is not SavepointFormat.CANONICAL

    @property
    def notifies_and_subsumes(self) -> bool:
        """Whether completion is notified to tasks and subsumes checkpoints; False for a plain savepoint."""
        return self.type is not CheckpointType.SAVEPOINT


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """The options that trigger messages and barriers carry.

    ``directory`` is where the tasks write; a task repeats it in its acknowledgement. ``shared_directory`` takes the
    files that later checkpoints may refer to (empty for savepoints, which share nothing). ``unaligned`` and
    ``aligned_timeout_ms`` are the alignment policy of this one checkpoint (savepoints are always aligned). ``final``:
    when it was triggered, every subtask had ended or had reached the end of its data. Without ``exactly_once`` the
    barriers are counted and block no channel (savepoints are always exactly once).
    """

    properties: CheckpointProperties
    directory: str
    unaligned: bool = False
    aligned_timeout_ms: int = 0
    max_inflight_data_bytes: int | None = None
    shared_directory: str = ""
    final: bool = False
    exactly_once: bool = True
