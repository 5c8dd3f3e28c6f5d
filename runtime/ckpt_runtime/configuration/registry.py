"""Registry of all options, used to read, check and document a configuration. Holds no values."""

from __future__ import annotations

from typing import Any

from ckpt_runtime.configuration.checkpointing_options import CheckpointingOptions, StateRecoveryOptions
from ckpt_runtime.configuration.cluster_options import (
    ConnectOptions,
    HeartbeatOptions,
    HighAvailabilityOptions,
    JobManagerOptions,
    LoggingOptions,
    RestOptions,
    SecurityOptions,
    SlotOptions,
    TaskManagerOptions,
)
from ckpt_runtime.configuration.option import ConfigOption
from ckpt_runtime.configuration.pipeline_options import ExecutionOptions, PipelineOptions, RestartStrategyOptions
from ckpt_runtime.configuration.state_options import RocksDBOptions, StateOptions

GROUPS: tuple[tuple[str, type], ...] = (
    ("Checkpoints", CheckpointingOptions),
    ("State recovery", StateRecoveryOptions),
    ("State", StateOptions),
    ("RocksDB", RocksDBOptions),
    ("Restart strategy", RestartStrategyOptions),
    ("Pipeline", PipelineOptions),
    ("Execution", ExecutionOptions),
    ("Workers and network", TaskManagerOptions),
    ("Job manager", JobManagerOptions),
    ("Heartbeats", HeartbeatOptions),
    ("Slots", SlotOptions),
    ("REST", RestOptions),
    ("Spark Connect", ConnectOptions),
    ("Security", SecurityOptions),
    ("Logs", LoggingOptions),
    ("High availability", HighAvailabilityOptions),
)

INTERNAL_PREFIX = "$internal."
"""Keys that the system itself stores beside a job's options; a user may not give them."""

JOB_CHECKPOINT_OVERRIDES = INTERNAL_PREFIX + "job-checkpoint-overrides"
"""Key of the FLIP-571 overrides inside a stored execution plan's job configuration."""

RESTORED_MAX_PARALLELISM = INTERNAL_PREFIX + "restored-max-parallelism"
"""JSON object: for each operator uid, the number of key groups in the snapshot that the job starts from."""

VERTEX_PARALLELISM = INTERNAL_PREFIX + "vertex-parallelism"
"""JSON object: the parallelism by vertex id, for a job that was rescaled since its submission."""

VERTEX_BOUNDS = INTERNAL_PREFIX + "vertex-bounds"
"""JSON object: the declared bounds of parallelism by vertex id, for a job that was rescaled since its submission."""

DEFAULT_CHECKPOINTS_DIRECTORY = INTERNAL_PREFIX + "default-checkpoints-directory"
"""The session's checkpoint directory for jobs that configure none: planning needs it for data beside checkpoints."""

RESTORE_DRILL = INTERNAL_PREFIX + "restore-drill"
"""Whether the job is a restore drill: it is planned without sinks that write and sources that acknowledge."""

IMPLICIT_RESTART_STRATEGY = INTERNAL_PREFIX + "implicit-restart-strategy"
"""The restart strategy of a job that sets none. It is stored among the cluster's options that the job keeps."""


def options_of(group: type) -> tuple[ConfigOption[Any], ...]:
    """Lists the options of one group, in the order of their declaration."""
    return tuple(value for value in vars(group).values() if isinstance(value, ConfigOption))


OPTIONS: dict[str, ConfigOption[Any]] = {option.key: option for _, group in GROUPS for option in options_of(group)}
_CANONICAL_KEYS: dict[str, str] = {
    fallback: option.key for option in OPTIONS.values() for fallback in option.fallback_keys
}
NAMESPACES: frozenset[str] = frozenset(key.split(".", 1)[0] for key in OPTIONS)
"""First segments of the system's own keys: an unknown key that begins with one of them is refused."""


def canonical_key(key: str) -> str:
    """Returns the current spelling of a key, without surrounding blanks; unknown keys are returned as they are."""
    spelled = key.strip()
    return _CANONICAL_KEYS.get(spelled, spelled)


def find_option(key: str) -> ConfigOption[Any] | None:
    """Finds the option that a key, present or older, belongs to; None for keys which the system does not know."""
    return OPTIONS.get(canonical_key(key))
