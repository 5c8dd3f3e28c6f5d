"""Options under ``execution.checkpointing`` and ``execution.state-recovery``, and which of them FLIP-571 changes.

The coordinator's configuration, the overrides, the REST API and its description are made from the table
:data:`CHECKPOINT_SETTINGS`; a test compares the client's own with it, since the client imports nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ckpt_runtime.configuration.option import (
    BOOLEAN,
    DURATION,
    MAX_INT,
    MAX_LONG,
    NON_EMPTY_STRING,
    Changeability,
    ConfigOption,
    DurationType,
    EnumType,
    IntegerType,
    MemorySizeType,
)

MINIMAL_CHECKPOINT_TIME_MS = 10
_WHAT_IT_BEGAN_WITH = "it is fixed when the job starts"


class CheckpointingMode(StrEnum):
    """What a restored job guarantees about its state."""

    EXACTLY_ONCE = "EXACTLY_ONCE"
    AT_LEAST_ONCE = "AT_LEAST_ONCE"


class CheckpointRetention(StrEnum):
    """What happens to the retained checkpoints when a job is cancelled or finally fails."""

    RETAIN_ON_CANCELLATION = "RETAIN_ON_CANCELLATION"
    DELETE_ON_CANCELLATION = "DELETE_ON_CANCELLATION"
    NO_EXTERNALIZED_CHECKPOINTS = "NO_EXTERNALIZED_CHECKPOINTS"


class RecoveryClaimMode(StrEnum):
    """Restore mode (FLIP-193): the owner of the snapshot that a job is restored from."""

    NO_CLAIM = "NO_CLAIM"
    CLAIM = "CLAIM"


class SavepointDuplication(StrEnum):
    """Whether a savepoint may share blocks on disk with a checkpoint."""

    FASTEST = "FASTEST"
    COPY = "COPY"


class CheckpointingOptions:
    """When checkpoints are taken, how, where they go and how many are kept."""

    INTERVAL = ConfigOption(
        "execution.checkpointing.interval",
        DurationType(MINIMAL_CHECKPOINT_TIME_MS),
        None,
        "Time between the starts of two periodic checkpoints. Not set: no periodic checkpoints.",
        changeability=Changeability.LIVE,
    )
    INTERVAL_DURING_BACKLOG = ConfigOption(
        "execution.checkpointing.interval-during-backlog",
        DURATION,
        None,
        "The interval instead of `execution.checkpointing.interval` while sources process a backlog; 0 ms: no "
        "periodic checkpoints then. Two-phase sinks also make their rows visible at this interval. Not set: a "
        "backlog has no effect.",
    )
    BACKLOG_PENDING_RECORDS = ConfigOption(
        "execution.checkpointing.backlog.pending-records",
        IntegerType(minimum=1),
        100_000,
        "Sources process a backlog from the time when this many rows wait in all of them together until half as many "
        "wait. Only sources that report `pendingRecords` count.",
    )
    TIMEOUT = ConfigOption(
        "execution.checkpointing.timeout",
        DurationType(MINIMAL_CHECKPOINT_TIME_MS),
        600_000,
        "A checkpoint that has not completed after this time is aborted.",
        changeability=Changeability.LIVE,
    )
    RESCUE_ENABLED = ConfigOption(
        "execution.checkpointing.rescue.enabled",
        BOOLEAN,
        False,
        "Gives a checkpoint more time automatically if it is nearly complete when its timeout passes.",
    )
    RESCUE_MIN_PROGRESS = ConfigOption(
        "execution.checkpointing.rescue.min-progress",
        IntegerType(minimum=1, maximum=100),
        90,
        "Percentage of the subtasks that must have acknowledged a checkpoint for it to be nearly complete.",
    )
    RESCUE_EXTENSION = ConfigOption(
        "execution.checkpointing.rescue.extension",
        DurationType(MINIMAL_CHECKPOINT_TIME_MS),
        60_000,
        "The timeout is extended by this time, repeatedly as long as more bytes are persisted.",
    )
    RESCUE_MAX_EXTENSION = ConfigOption(
        "execution.checkpointing.rescue.max-extension",
        DurationType(MINIMAL_CHECKPOINT_TIME_MS),
        600_000,
        "Maximum time by which a checkpoint may exceed its timeout, whatever its progress.",
    )
    MIN_PAUSE = ConfigOption(
        "execution.checkpointing.min-pause",
        DURATION,
        0,
        "Minimum time between the end of one periodic checkpoint and the start of the next.",
        changeability=Changeability.LIVE,
    )
    MAX_CONCURRENT_CHECKPOINTS = ConfigOption(
        "execution.checkpointing.max-concurrent-checkpoints",
        IntegerType(minimum=1),
        1,
        "Maximum number of checkpoints in progress at the same time.",
        changeability=Changeability.LIVE,
    )
    TOLERABLE_FAILED_CHECKPOINTS = ConfigOption(
        "execution.checkpointing.tolerable-failed-checkpoints",
        IntegerType(),
        0,
        "Number of consecutive failed checkpoints that do not fail the job.",
        changeability=Changeability.LIVE,
    )
    INCREMENTAL = ConfigOption(
        "execution.checkpointing.incremental",
        BOOLEAN,
        False,
        "Checkpoints write only the changes since the last completed one, and native savepoints duplicate the files "
        "that a completed checkpoint already has in storage. RocksDB's files are its tables; the in-memory backend "
        "writes a file with the keys that have changed. Without this option it writes all of its state each time.",
        fallback_keys=("state.backend.incremental",),
    )
    SAVEPOINT_DUPLICATION = ConfigOption(
        "execution.checkpointing.savepoint-duplication",
        EnumType(SavepointDuplication),
        SavepointDuplication.FASTEST,
        "How an incremental native savepoint duplicates files of checkpoints. FASTEST: the first that works of a "
        "reflink, a hard link, a copy within the object store, and a copy through the worker. COPY: never a link, "
        "so that damage to a file in the checkpoint directory does not damage the savepoint. Restores and new "
        "checkpoints link or copy RocksDB's local files in the same way.",
    )
    MODE = ConfigOption(
        "execution.checkpointing.mode",
        EnumType(CheckpointingMode),
        CheckpointingMode.EXACTLY_ONCE,
        "The guarantee of checkpoints. With AT_LEAST_ONCE, inputs do not wait for each other's barriers: after a "
        "failure, rows may be counted in state and sinks more than once, but none is lost. Savepoints are always "
        "exactly once.",
        changeability=Changeability.NEVER,
        fixed_because="stop the job with a savepoint, which is exactly once, and start it with the other mode",
    )
    UNALIGNED = ConfigOption(
        "execution.checkpointing.unaligned.enabled",
        BOOLEAN,
        False,
        "Lets barriers overtake queued data, which then becomes part of the checkpoint (FLIP-76).",
        changeability=Changeability.LIVE,
        fallback_keys=("execution.checkpointing.unaligned",),
    )
    ALIGNED_TIMEOUT = ConfigOption(
        "execution.checkpointing.aligned-checkpoint-timeout",
        DURATION,
        0,
        "With unaligned checkpoints on: how long a barrier may be aligned before it turns unaligned; 0 ms: at once.",
        changeability=Changeability.LIVE,
        fallback_keys=("execution.checkpointing.alignment-timeout",),
    )
    MAX_INFLIGHT_DATA = ConfigOption(
        "execution.checkpointing.unaligned.max-inflight-data",
        MemorySizeType(),
        None,
        "Maximum in-flight data that one subtask may add to an unaligned checkpoint; beyond it channels are aligned. "
        "Not set: no limit.",
        changeability=Changeability.LIVE,
    )
    CHECKPOINTS_DIRECTORY = ConfigOption(
        "execution.checkpointing.dir",
        NON_EMPTY_STRING,
        None,
        "Directory (path or URL) under which checkpoints are written, as `<dir>/<job id>/chk-<n>`.",
        changeability=Changeability.NEVER,
        fallback_keys=("state.checkpoints.dir",),
        fixed_because="a job's checkpoints share files, so they stay in the directory in which the job started",
    )
    CONTINUE_IN = ConfigOption(
        "execution.checkpointing.continue-in",
        NON_EMPTY_STRING,
        None,
        "Directory (path or URL) in which the runs of one program continue each other: a job writes its checkpoints "
        "there instead of in `execution.checkpointing.dir`, keeps the last one however it ends, and, unless a snapshot "
        "is given, starts from the newest one that it finds there, with CLAIM. A program whose triggers are all "
        "availableNow or once sets it to the first `checkpointLocation` of its queries, and a query of a client of "
        "Spark Connect to its own. It needs "
        "`execution.checkpointing.checkpoints-after-tasks-finish` false, and refuses `execution.stop-after`; that of "
        "the session has no effect on it.",
        changeability=Changeability.NEVER,
        fixed_because=_WHAT_IT_BEGAN_WITH,
    )
    SAVEPOINT_DIRECTORY = ConfigOption(
        "execution.checkpointing.savepoint-dir",
        NON_EMPTY_STRING,
        None,
        "Directory for savepoints whose request does not name one.",
        changeability=Changeability.LIVE,
        fallback_keys=("state.savepoints.dir",),
    )
    NUM_RETAINED = ConfigOption(
        "execution.checkpointing.num-retained",
        IntegerType(minimum=1),
        1,
        "Number of completed checkpoints that are kept.",
        changeability=Changeability.LIVE,
        fallback_keys=("state.checkpoints.num-retained",),
    )
    EXTERNALIZED_RETENTION = ConfigOption(
        "execution.checkpointing.externalized-checkpoint-retention",
        EnumType(CheckpointRetention),
        CheckpointRetention.DELETE_ON_CANCELLATION,
        "What happens to the retained checkpoints when the job is cancelled or fails. Unlike in Flink, the default "
        "keeps them when it fails.",
        changeability=Changeability.LIVE,
    )
    CHECKPOINTS_AFTER_TASKS_FINISH = ConfigOption(
        "execution.checkpointing.checkpoints-after-tasks-finish",
        BOOLEAN,
        True,
        "Continues to take checkpoints after some subtasks have finished (FLIP-147).",
        fallback_keys=("execution.checkpointing.checkpoints-after-tasks-finish.enabled",),
    )


class StateRecoveryOptions:
    """What a new job starts from."""

    PATH = ConfigOption(
        "execution.state-recovery.path",
        NON_EMPTY_STRING,
        None,
        "Savepoint or checkpoint (directory or its `_metadata` file) to restore from.",
        changeability=Changeability.NEVER,
        fallback_keys=("execution.savepoint.path",),
        default_equals_absence=True,
        fixed_because=_WHAT_IT_BEGAN_WITH,
    )
    CLAIM_MODE = ConfigOption(
        "execution.state-recovery.claim-mode",
        EnumType(RecoveryClaimMode),
        RecoveryClaimMode.NO_CLAIM,
        "Who owns the snapshot afterwards. With CLAIM the system owns it, and deletes it when it is subsumed.",
        changeability=Changeability.NEVER,
        fallback_keys=("execution.savepoint-restore-mode",),
        default_equals_absence=True,
        fixed_because=_WHAT_IT_BEGAN_WITH,
    )
    IGNORE_UNCLAIMED_STATE = ConfigOption(
        "execution.state-recovery.ignore-unclaimed-state",
        BOOLEAN,
        False,
        "Allows state in the snapshot that belongs to no operator of the job.",
        changeability=Changeability.NEVER,
        fallback_keys=("execution.savepoint.ignore-unclaimed-state",),
        default_equals_absence=True,
        fixed_because=_WHAT_IT_BEGAN_WITH,
    )


MAX_MILLISECONDS = 10 * 365 * 24 * 3600 * 1000
"""Ten years: a longer duration is a mistake, and its sum with a timestamp might not fit into a 64-bit integer."""
_TIMES = (MINIMAL_CHECKPOINT_TIME_MS, MAX_MILLISECONDS)


@dataclass(frozen=True, slots=True)
class CheckpointSetting:
    """``field`` is the attribute of ``CheckpointConfiguration``.

    ``patched_as`` is the field of FLIP-571's request, None for what cannot change while the job runs, and
    ``patch_range`` what that accepts, both ends included; None for true or false.
    """

    field: str
    option: ConfigOption[Any]
    patched_as: str | None = None
    patch_range: tuple[int, int] | None = None

    @property
    def least(self) -> int | None:
        """Gives the least value that a submission may set; None if it is not a number."""
        return getattr(self.option.type, "minimum", None)


CHECKPOINT_SETTINGS = (
    CheckpointSetting("interval_ms", CheckpointingOptions.INTERVAL, "checkpointInterval", _TIMES),
    CheckpointSetting("interval_during_backlog_ms", CheckpointingOptions.INTERVAL_DURING_BACKLOG),
    CheckpointSetting("timeout_ms", CheckpointingOptions.TIMEOUT, "checkpointTimeout", _TIMES),
    CheckpointSetting(
        "min_pause_ms", CheckpointingOptions.MIN_PAUSE, "minPauseBetweenCheckpoints", (0, MAX_MILLISECONDS)
    ),
    CheckpointSetting(
        "max_concurrent", CheckpointingOptions.MAX_CONCURRENT_CHECKPOINTS, "maxConcurrentCheckpoints", (1, MAX_INT)
    ),
    CheckpointSetting(
        "tolerable_failed_checkpoints",
        CheckpointingOptions.TOLERABLE_FAILED_CHECKPOINTS,
        "tolerableCheckpointFailureNumber",
        (0, MAX_INT),
    ),
    CheckpointSetting(
        "aligned_timeout_ms", CheckpointingOptions.ALIGNED_TIMEOUT, "alignedCheckpointTimeout", (0, MAX_MILLISECONDS)
    ),
    CheckpointSetting("unaligned_enabled", CheckpointingOptions.UNALIGNED, "unalignedEnabled"),
    CheckpointSetting(
        "max_inflight_data_bytes", CheckpointingOptions.MAX_INFLIGHT_DATA, "maxInflightDataBytes", (1, MAX_LONG)
    ),
    CheckpointSetting("incremental", CheckpointingOptions.INCREMENTAL),
    CheckpointSetting("rescue_enabled", CheckpointingOptions.RESCUE_ENABLED),
    CheckpointSetting("rescue_min_progress", CheckpointingOptions.RESCUE_MIN_PROGRESS),
    CheckpointSetting("rescue_extension_ms", CheckpointingOptions.RESCUE_EXTENSION),
    CheckpointSetting("rescue_max_extension_ms", CheckpointingOptions.RESCUE_MAX_EXTENSION),
    CheckpointSetting("retained", CheckpointingOptions.NUM_RETAINED),
    CheckpointSetting("retention", CheckpointingOptions.EXTERNALIZED_RETENTION),
    CheckpointSetting("continue_in", CheckpointingOptions.CONTINUE_IN),
    CheckpointSetting("checkpoints_after_tasks_finish", CheckpointingOptions.CHECKPOINTS_AFTER_TASKS_FINISH),
)

PATCHABLE: Mapping[str, CheckpointSetting] = {
    setting.patched_as: setting for setting in CHECKPOINT_SETTINGS if setting.patched_as is not None
}
"""Settings that can change while a job runs, by their name in FLIP-571's request."""
