"""The checkpointing settings of a job: from its options, through FLIP-571 overrides, to what REST shows. Pure."""

from __future__ import annotations

from dataclasses import replace

from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration, CheckpointRetention
from ckpt_runtime.configuration.checkpointing_options import CheckpointingMode, CheckpointingOptions
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.state_options import StateBackendType, StateOptions
from ckpt_runtime.jobmaster.gateway import CheckpointConfigPatch, EffectiveCheckpointConfig

_BACKEND_NAMES = {
    StateBackendType.HASHMAP: "HashMapStateBackend",
    StateBackendType.ROCKSDB: "EmbeddedRocksDBStateBackend",
}
_FIELDS = {
    "interval_ms": "interval_ms",
    "timeout_ms": "timeout_ms",
    "min_pause_ms": "min_pause_ms",
    "max_concurrent": "max_concurrent",
    "tolerable_failed_checkpoints": "tolerable_failures",
    "aligned_timeout_ms": "aligned_timeout_ms",
    "unaligned": "unaligned_enabled",
    "max_inflight_data_bytes": "max_inflight_data_bytes",
}
"""Fields of a patch, and the setting that each one overrides."""


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
    )


def merge_patches(earlier: CheckpointConfigPatch, later: CheckpointConfigPatch) -> CheckpointConfigPatch:
    """The overrides after another patch: a field that the later one leaves alone keeps its value."""
    given = {name: value for name in _FIELDS if (value := getattr(later, name)) is not None}
    return replace(earlier, **given)


def overridden_fields(overrides: CheckpointConfigPatch) -> tuple[str, ...]:
    """Names of the fields that an override rules, as a patch spells them."""
    return tuple(name for name in _FIELDS if getattr(overrides, name) is not None)


def with_overrides(submitted: CheckpointConfiguration, overrides: CheckpointConfigPatch) -> CheckpointConfiguration:
    """Effective settings: submitted, then overrides. Raises CheckpointConfigurationError when they clash."""
    changes = {_FIELDS[name]: getattr(overrides, name) for name in overridden_fields(overrides)}
    return replace(submitted, **changes)


def shown_settings(
    settings: CheckpointConfiguration, configuration: Configuration, overrides: CheckpointConfigPatch
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
        overrides=overridden_fields(overrides),
    )
