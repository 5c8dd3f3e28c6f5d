"""The checkpointing settings of a job: from its options, through FLIP-571 overrides, to what REST shows. Pure."""

from __future__ import annotations

from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration, CheckpointRetention
from ckpt_runtime.checkpoint.overrides import CheckpointOverrides
from ckpt_runtime.configuration.checkpointing_options import CheckpointingMode, CheckpointingOptions
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.state_options import StateBackendType, StateOptions
from ckpt_runtime.jobmaster.gateway import CheckpointConfigPatch, EffectiveCheckpointConfig

_BACKEND_NAMES = {
    StateBackendType.HASHMAP: "HashMapStateBackend",
    StateBackendType.ROCKSDB: "EmbeddedRocksDBStateBackend",
}
_PATCH_FIELDS = {"tolerable_failures": "tolerable_failed_checkpoints", "unaligned_enabled": "unaligned"}
"""Settings that a patch spells in another way."""


def submitted_settings(configuration: Configuration) -> CheckpointConfiguration:
    """What the job's options say. Raises InvalidOptionError or CheckpointConfigurationError."""
    get = configuration.get
    return CheckpointConfiguration(
        interval_ms=get(CheckpointingOptions.INTERVAL),
        timeout_ms=get(CheckpointingOptions.TIMEOUT),
        min_pause_ms=get(CheckpointingOptions.MIN_PAUSE),
        max_concurrent=get(CheckpointingOptions.MAX_CONCURRENT_CHECKPOINTS),
        tolerable_failures=get(CheckpointingOptions.TOLERABLE_FAILED_CHECKPOINTS),
        retained=get(CheckpointingOptions.NUM_RETAINED),
        retention=CheckpointRetention(get(CheckpointingOptions.EXTERNALIZED_RETENTION).value),
        unaligned_enabled=get(CheckpointingOptions.UNALIGNED),
        aligned_timeout_ms=get(CheckpointingOptions.ALIGNED_TIMEOUT),
        max_inflight_data_bytes=get(CheckpointingOptions.MAX_INFLIGHT_DATA),
        checkpoints_after_tasks_finish=get(CheckpointingOptions.CHECKPOINTS_AFTER_TASKS_FINISH),
    )


def overrides_of(patch: CheckpointConfigPatch) -> CheckpointOverrides:
    """A patch of the REST API as overrides."""
    return CheckpointOverrides(
        interval_ms=patch.interval_ms,
        timeout_ms=patch.timeout_ms,
        min_pause_ms=patch.min_pause_ms,
        max_concurrent=patch.max_concurrent,
        tolerable_failures=patch.tolerable_failed_checkpoints,
        aligned_timeout_ms=patch.aligned_timeout_ms,
        unaligned_enabled=patch.unaligned,
        max_inflight_data_bytes=patch.max_inflight_data_bytes,
    )


def shown_settings(
    settings: CheckpointConfiguration, configuration: Configuration, overrides: CheckpointOverrides
) -> EffectiveCheckpointConfig:
    """What ``GET /jobs/:jobid/checkpoints/config`` shows."""
    return EffectiveCheckpointConfig(
        exactly_once=configuration.get(CheckpointingOptions.MODE) is CheckpointingMode.EXACTLY_ONCE,
        interval_ms=settings.interval_ms,
        timeout_ms=settings.timeout_ms,
        min_pause_ms=settings.min_pause_ms,
        max_concurrent=settings.max_concurrent,
        tolerable_failed_checkpoints=settings.tolerable_failures,
        unaligned=settings.unaligned_enabled,
        aligned_timeout_ms=settings.aligned_timeout_ms,
        max_inflight_data_bytes=settings.max_inflight_data_bytes,
        externalized=settings.retention is not CheckpointRetention.NO_EXTERNALIZED_CHECKPOINTS,
        delete_on_cancellation=settings.retention is not CheckpointRetention.RETAIN_ON_CANCELLATION,
        state_backend=_BACKEND_NAMES[configuration.get(StateOptions.BACKEND_TYPE)],
        checkpoint_storage="FileSystemCheckpointStorage",
        overrides=tuple(_PATCH_FIELDS.get(name, name) for name in overrides.given),
    )
