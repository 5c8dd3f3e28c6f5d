"""A job's checkpoint settings and restart strategy, from its options, through FLIP-571 overrides, to what REST shows.

Randomness for the jitter of restarts is injected here, to keep strategies pure.
"""

from __future__ import annotations

import random

from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration, CheckpointOverrides
from ckpt_runtime.configuration.checkpointing_options import (
    CHECKPOINT_SETTINGS,
    CheckpointingMode,
    CheckpointingOptions,
)
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.pipeline_options import RestartStrategyOptions, RestartStrategyType
from ckpt_runtime.configuration.registry import IMPLICIT_RESTART_STRATEGY
from ckpt_runtime.configuration.state_options import StateBackendType
from ckpt_runtime.scheduler.restart_strategies import (
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    NoRestart,
    RestartStrategy,
)


def strategy_type(configuration: Configuration) -> RestartStrategyType:
    """The configured strategy; without one, exponential-delay for jobs with periodic checkpoints, else none.

    For a job it is fixed at its submission (:func:`with_implicit_strategy`).
    """
    configured = configuration.get(RestartStrategyOptions.TYPE)
    if configured is not None:
        return configured
    settled = configuration.get_text(IMPLICIT_RESTART_STRATEGY)
    if settled is not None:
        return RestartStrategyType(settled)
    if configuration.get(CheckpointingOptions.INTERVAL) is not None:
        return RestartStrategyType.EXPONENTIAL_DELAY
    return RestartStrategyType.NONE


def with_implicit_strategy(defaults: Configuration, given: Configuration) -> Configuration:
    """The cluster's options as a job stores them: a later change of the interval does not switch its strategy."""
    periodic = Configuration.merge(defaults, given).get(CheckpointingOptions.INTERVAL) is not None
    kind = RestartStrategyType.EXPONENTIAL_DELAY if periodic else RestartStrategyType.NONE
    return Configuration.merge(defaults, Configuration({IMPLICIT_RESTART_STRATEGY: kind.value}))


def create_restart_strategy(configuration: Configuration) -> RestartStrategy:
    """A fresh strategy with the job's limits. Raises InvalidOptionError."""
    get = configuration.get
    options = RestartStrategyOptions
    match strategy_type(configuration):
        case RestartStrategyType.NONE:
            return NoRestart()
        case RestartStrategyType.FIXED_DELAY:
            return FixedDelay(get(options.FIXED_DELAY_ATTEMPTS), get(options.FIXED_DELAY_DELAY))
        case RestartStrategyType.FAILURE_RATE:
            return FailureRate(
                get(options.FAILURE_RATE_MAX_FAILURES),
                get(options.FAILURE_RATE_INTERVAL),
                get(options.FAILURE_RATE_DELAY),
            )
        case RestartStrategyType.EXPONENTIAL_DELAY:
            return ExponentialDelay(
                get(options.EXPONENTIAL_INITIAL_BACKOFF),
                get(options.EXPONENTIAL_MAX_BACKOFF),
                get(options.EXPONENTIAL_MULTIPLIER),
                get(options.EXPONENTIAL_RESET_THRESHOLD),
                get(options.EXPONENTIAL_JITTER),
                get(options.EXPONENTIAL_ATTEMPTS),
                lambda: random.uniform(-1, 1),
            )


BACKEND_NAMES = {
    StateBackendType.HASHMAP: "HashMapStateBackend",
    StateBackendType.ROCKSDB: "EmbeddedRocksDBStateBackend",
}


def submitted_settings(
    configuration: Configuration, transaction_timeout_ms: int | None = None
) -> CheckpointConfiguration:
    """The settings from the job's options, and from the transactions of its sinks.

    Raises InvalidOptionError or CheckpointConfigurationError.
    """
    return CheckpointConfiguration(
        **{setting.field: configuration.get(setting.option) for setting in CHECKPOINT_SETTINGS},
        transaction_timeout_ms=transaction_timeout_ms,
        exactly_once=configuration.get(CheckpointingOptions.MODE) is CheckpointingMode.EXACTLY_ONCE,
    )


def processes_backlog(pending_rows: int, before: bool, configuration: Configuration) -> bool:
    """Whether sources process a backlog, given the rows that wait now; ``before`` says whether they did so far.

    A backlog begins at a higher number of rows than it ends at, so that a fluctuating number does not change the
    checkpoint interval with each heartbeat.
    """
    limit = configuration.get(CheckpointingOptions.BACKLOG_PENDING_RECORDS)
    return pending_rows >= limit if not before else 2 * pending_rows > limit


def overridden_options(overrides: CheckpointOverrides) -> dict[str, str | None]:
    """The options that FLIP-571 overrides: their keys and new values, spelled as a user would write them."""
    options = {setting.field: setting.option for setting in CHECKPOINT_SETTINGS}
    return {options[field].key: options[field].format(value) for field, value in overrides.given.items()}
