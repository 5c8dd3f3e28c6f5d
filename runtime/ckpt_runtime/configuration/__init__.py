"""Options, their values and how they may change. Standard library only; reads neither files nor the environment."""

from ckpt_runtime.configuration.checkpointing_options import (
    CheckpointingMode,
    CheckpointingOptions,
    ExternalizedCheckpointRetention,
    RecoveryClaimMode,
    StateRecoveryOptions,
)
from ckpt_runtime.configuration.cluster_options import (
    CpuPinning,
    HeartbeatOptions,
    JobManagerOptions,
    SlotOptions,
    TaskManagerOptions,
)
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.errors import (
    ConfigurationError,
    InvalidConfigurationError,
    InvalidOptionError,
    UnknownOptionError,
)
from ckpt_runtime.configuration.high_availability_options import HighAvailabilityOptions, HighAvailabilityType
from ckpt_runtime.configuration.option import Changeability, ConfigOption, OptionScope
from ckpt_runtime.configuration.pipeline_options import ExecutionOptions, PipelineOptions
from ckpt_runtime.configuration.registry import (
    INTERNAL_PREFIX,
    JOB_CHECKPOINT_OVERRIDES,
    OPTIONS,
    RESTORED_MAX_PARALLELISM,
    find_option,
)
from ckpt_runtime.configuration.rest_options import RestOptions
from ckpt_runtime.configuration.restart_strategy_options import RestartStrategyOptions, RestartStrategyType
from ckpt_runtime.configuration.state_options import StateBackendType, StateOptions
from ckpt_runtime.configuration.validation import find_problems, validate

__all__ = [
    "INTERNAL_PREFIX",
    "JOB_CHECKPOINT_OVERRIDES",
    "OPTIONS",
    "RESTORED_MAX_PARALLELISM",
    "Changeability",
    "CheckpointingMode",
    "CheckpointingOptions",
    "ConfigOption",
    "Configuration",
    "ConfigurationError",
    "CpuPinning",
    "ExecutionOptions",
    "ExternalizedCheckpointRetention",
    "HeartbeatOptions",
    "HighAvailabilityOptions",
    "HighAvailabilityType",
    "InvalidConfigurationError",
    "InvalidOptionError",
    "JobManagerOptions",
    "OptionScope",
    "PipelineOptions",
    "RecoveryClaimMode",
    "RestOptions",
    "RestartStrategyOptions",
    "RestartStrategyType",
    "SlotOptions",
    "StateBackendType",
    "StateOptions",
    "StateRecoveryOptions",
    "TaskManagerOptions",
    "UnknownOptionError",
    "find_option",
    "find_problems",
    "validate",
]
