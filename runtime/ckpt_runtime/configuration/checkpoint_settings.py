"""The table of a job's checkpointing settings: option, name in REST responses, and how FLIP-571 changes it.

The coordinator's configuration, the overrides, the REST API and its description are made from this table; a test
compares the client's own with it, since the client imports nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_runtime.configuration.checkpointing_options import MINIMAL_CHECKPOINT_TIME_MS
from ckpt_runtime.configuration.checkpointing_options import CheckpointingOptions as Options
from ckpt_runtime.configuration.option import ConfigOption
from ckpt_runtime.configuration.value_types import MAX_INT, MAX_LONG

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
    CheckpointSetting("interval_ms", Options.INTERVAL, "checkpointInterval", _TIMES),
    CheckpointSetting("interval_during_backlog_ms", Options.INTERVAL_DURING_BACKLOG),
    CheckpointSetting("timeout_ms", Options.TIMEOUT, "checkpointTimeout", _TIMES),
    CheckpointSetting("min_pause_ms", Options.MIN_PAUSE, "minPauseBetweenCheckpoints", (0, MAX_MILLISECONDS)),
    CheckpointSetting(
        "max_concurrent",
        Options.MAX_CONCURRENT_CHECKPOINTS,
        "maxConcurrentCheckpoints",
        (1, MAX_INT),
    ),
    CheckpointSetting(
        "tolerable_failed_checkpoints",
        Options.TOLERABLE_FAILED_CHECKPOINTS,
        "tolerableCheckpointFailureNumber",
        (0, MAX_INT),
    ),
    CheckpointSetting(
        "aligned_timeout_ms",
        Options.ALIGNED_TIMEOUT,
        "alignedCheckpointTimeout",
        (0, MAX_MILLISECONDS),
    ),
    CheckpointSetting("unaligned_enabled", Options.UNALIGNED, "unalignedEnabled"),
    CheckpointSetting(
        "max_inflight_data_bytes",
        Options.MAX_INFLIGHT_DATA,
        "maxInflightDataBytes",
        (1, MAX_LONG),
    ),
    CheckpointSetting("incremental", Options.INCREMENTAL),
    CheckpointSetting("rescue_enabled", Options.RESCUE_ENABLED),
    CheckpointSetting("rescue_min_progress", Options.RESCUE_MIN_PROGRESS),
    CheckpointSetting("rescue_extension_ms", Options.RESCUE_EXTENSION),
    CheckpointSetting("rescue_max_extension_ms", Options.RESCUE_MAX_EXTENSION),
    CheckpointSetting("retained", Options.NUM_RETAINED),
    CheckpointSetting("retention", Options.EXTERNALIZED_RETENTION),
    CheckpointSetting("checkpoints_after_tasks_finish", Options.CHECKPOINTS_AFTER_TASKS_FINISH),
)

PATCHABLE: Mapping[str, CheckpointSetting] = {
    setting.patched_as: setting for setting in CHECKPOINT_SETTINGS if setting.patched_as is not None
}
"""Settings that can change while a job runs, by their name in FLIP-571's request."""
