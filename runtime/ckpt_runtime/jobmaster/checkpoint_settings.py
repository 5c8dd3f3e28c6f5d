"""The checkpointing settings of a job: from its options, through FLIP-571 overrides, to what REST shows. Pure."""

from __future__ import annotations

from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.checkpoint.overrides import CheckpointOverrides
from ckpt_runtime.configuration.checkpoint_settings import CHECKPOINT_SETTINGS
from ckpt_runtime.configuration.checkpointing_options import CheckpointingMode, CheckpointingOptions
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.state_options import StateBackendType, StateOptions
from ckpt_runtime.jobmaster.gateway_values import EffectiveCheckpointConfig

_BACKEND_NAMES = {
    StateBackendType.HASHMAP: "HashMapStateBackend",
    StateBackendType.ROCKSDB: "EmbeddedRocksDBStateBackend",
}


def submitted_settings(configuration: Configuration) -> CheckpointConfiguration:
    """The settings from the job's options. Raises InvalidOptionError or CheckpointConfigurationError."""
    return CheckpointConfiguration(
        **{setting.field: configuration.get(setting.option) for setting in CHECKPOINT_SETTINGS}
    )


def shown_settings(
    settings: CheckpointConfiguration, configuration: Configuration, overrides: CheckpointOverrides
) -> EffectiveCheckpointConfig:
    """The settings that ``GET /jobs/:jobid/checkpoints/config`` shows."""
    return EffectiveCheckpointConfig(
        settings,
        exactly_once=configuration.get(CheckpointingOptions.MODE) is CheckpointingMode.EXACTLY_ONCE,
        state_backend=_BACKEND_NAMES[configuration.get(StateOptions.BACKEND_TYPE)],
        checkpoint_storage="FileSystemCheckpointStorage",
        overrides=tuple(overrides.given),
    )


def overridden_options(overrides: CheckpointOverrides) -> dict[str, str | None]:
    """The options that FLIP-571 overrides: their keys and new values, spelled as a user would write them."""
    options = {setting.field: setting.option for setting in CHECKPOINT_SETTINGS}
    return {options[field].key: options[field].format(value) for field, value in overrides.given.items()}
