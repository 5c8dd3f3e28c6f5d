"""What kind of snapshot a checkpoint is, and what its barriers tell the tasks. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ckpt_runtime.checkpoint.statistics import CheckpointType


class SavepointFormat(StrEnum):
    """FLIP-203: the backend's own files, or the format every backend reads."""

    NATIVE = "NATIVE"
    CANONICAL = "CANONICAL"


@dataclass(frozen=True, slots=True)
class CheckpointProperties:
    """``full`` asks for a snapshot that shares no file with an earlier one; ``drain`` concerns a sync savepoint.

    ``incremental`` is what the job's options say about keyed state; in-flight data does not depend on it.
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
        """Whether keyed state may build upon files of completed checkpoints (FLIP-203).

        A checkpoint refers to them; a native savepoint, which shares nothing, duplicates them.
        """
        return self.incremental and not self.full and self.savepoint_format is not SavepointFormat.CANONICAL

    @property
    def notifies_and_subsumes(self) -> bool:
        """A plain savepoint tells no task that it is complete and replaces nothing."""
        return self.type is not CheckpointType.SAVEPOINT


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """Travels in trigger messages and barriers.

    ``directory`` is where the tasks write; a task names it again in its acknowledgement. ``shared_directory`` takes the
    files that later checkpoints may refer to (empty for savepoints, which share nothing). ``unaligned`` and
    ``aligned_timeout_ms`` are the alignment policy of this one checkpoint (savepoints are always aligned). ``final``:
    when it was triggered every subtask had ended, or seen the end of its data.
    """

    properties: CheckpointProperties
    directory: str
    unaligned: bool = False
    aligned_timeout_ms: int = 0
    max_inflight_data_bytes: int | None = None
    shared_directory: str = ""
    final: bool = False
