"""Options under ``restart-strategy``: what happens after a failure. Declarations only."""

from __future__ import annotations

from enum import StrEnum

from ckpt_runtime.configuration.option import Changeability, ConfigOption
from ckpt_runtime.configuration.value_types import MAX_INT, DurationType, EnumType, FloatType, IntegerType


class RestartStrategyType(StrEnum):
    """How a failed job is restarted."""

    NONE = "none"
    FIXED_DELAY = "fixed-delay"
    EXPONENTIAL_DELAY = "exponential-delay"
    FAILURE_RATE = "failure-rate"


_MS = DurationType()


class RestartStrategyOptions:
    """The restart strategies and their limits."""

    TYPE = ConfigOption(
        "restart-strategy.type",
        EnumType(RestartStrategyType, {"off": RestartStrategyType.NONE, "disable": RestartStrategyType.NONE}),
        None,
        "The strategy. Not set: exponential-delay when periodic checkpoints are on at submission, none otherwise.",
        changeability=Changeability.LIVE,
        fallback_keys=("restart-strategy",),
    )
    FIXED_DELAY_ATTEMPTS = ConfigOption(
        "restart-strategy.fixed-delay.attempts",
        IntegerType(),
        1,
        "Number of restarts after which the job fails.",
        changeability=Changeability.LIVE,
    )
    FIXED_DELAY_DELAY = ConfigOption(
        "restart-strategy.fixed-delay.delay",
        _MS,
        1_000,
        "Pause before each restart.",
        changeability=Changeability.LIVE,
    )
    EXPONENTIAL_INITIAL_BACKOFF = ConfigOption(
        "restart-strategy.exponential-delay.initial-backoff",
        DurationType(1),
        50,
        "Pause before the first restart. Shorter than Flink's 1 s, since a warm worker takes over in milliseconds.",
        changeability=Changeability.LIVE,
    )
    EXPONENTIAL_MAX_BACKOFF = ConfigOption(
        "restart-strategy.exponential-delay.max-backoff",
        DurationType(1),
        60_000,
        "Greatest pause.",
        changeability=Changeability.LIVE,
    )
    EXPONENTIAL_MULTIPLIER = ConfigOption(
        "restart-strategy.exponential-delay.backoff-multiplier",
        FloatType(1.0, 1_000.0),
        1.5,
        "Factor from one pause to the next.",
        changeability=Changeability.LIVE,
    )
    EXPONENTIAL_RESET_THRESHOLD = ConfigOption(
        "restart-strategy.exponential-delay.reset-backoff-threshold",
        DurationType(1),
        3_600_000,
        "Time without a failure after which the pause and the number of attempts are reset.",
        changeability=Changeability.LIVE,
    )
    EXPONENTIAL_JITTER = ConfigOption(
        "restart-strategy.exponential-delay.jitter-factor",
        FloatType(0.0, 1.0),
        0.1,
        "Fraction of the pause by which it is randomly lengthened or shortened.",
        changeability=Changeability.LIVE,
    )
    EXPONENTIAL_ATTEMPTS = ConfigOption(
        "restart-strategy.exponential-delay.attempts-before-reset-backoff",
        IntegerType(minimum=1),
        MAX_INT,
        "Number of failures since the last reset after which the job fails.",
        changeability=Changeability.LIVE,
    )
    FAILURE_RATE_MAX_FAILURES = ConfigOption(
        "restart-strategy.failure-rate.max-failures-per-interval",
        IntegerType(minimum=1),
        1,
        "Number of failures within the interval that do not fail the job.",
        changeability=Changeability.LIVE,
    )
    FAILURE_RATE_INTERVAL = ConfigOption(
        "restart-strategy.failure-rate.failure-rate-interval",
        DurationType(1),
        60_000,
        "The interval in which failures are counted.",
        changeability=Changeability.LIVE,
    )
    FAILURE_RATE_DELAY = ConfigOption(
        "restart-strategy.failure-rate.delay",
        _MS,
        1_000,
        "Pause before each restart.",
        changeability=Changeability.LIVE,
    )
