"""Options of a job's plan, of its subtasks, and of what happens after a failure. Declarations only."""

from __future__ import annotations

from enum import StrEnum

from ckpt_runtime.configuration.option import (
    BOOLEAN,
    DURATION,
    MAP,
    MAX_INT,
    NON_EMPTY_STRING,
    Changeability,
    ConfigOption,
    DurationType,
    EnumType,
    FloatType,
    IntegerType,
)

UPPER_BOUND_MAX_PARALLELISM = 32_768


class ProcessorTrigger(StrEnum):
    """When buffered rows of a key are passed to a stateful processor."""

    BUFFER = "BUFFER"
    CHECKPOINT = "CHECKPOINT"
    PROCESSING_TIME = "PROCESSING_TIME"


class BadRowsMode(StrEnum):
    """What happens to a row for which an expression fails."""

    FAIL = "FAIL"
    DROP = "DROP"
    DEAD_LETTER = "DEAD_LETTER"


class PipelineOptions:
    """The plan."""

    PARALLELISM = ConfigOption(
        "parallelism.default",
        IntegerType(minimum=1, maximum=UPPER_BOUND_MAX_PARALLELISM),
        1,
        "Parallelism of vertices for which the pipeline sets none. A change rescales the running job: it gets its "
        "slots and takes a checkpoint first.",
    )
    NAME = ConfigOption(
        "pipeline.name",
        NON_EMPTY_STRING,
        None,
        "The job's name. Not set: the pipeline's own.",
        changeability=Changeability.NEVER,
        default_equals_absence=True,
        fixed_because="it is part of the plan to which state belongs",
    )
    UNIQUE_NAME = ConfigOption(
        "pipeline.unique-name",
        BOOLEAN,
        False,
        "The job is refused while another active job has its name. Of several jobs that are started at the same "
        "time, one is accepted.",
        changeability=Changeability.NEVER,
        fixed_because="it only matters at the start",
    )
    GLOBAL_JOB_PARAMETERS = ConfigOption(
        "pipeline.global-job-parameters",
        MAP,
        None,
        "Labels of the job, which its configuration shows as user-config. They have no effect.",
        changeability=Changeability.NEVER,
        default_equals_absence=True,
        fixed_because="it only matters at the start",
    )
    MAX_PARALLELISM = ConfigOption(
        "pipeline.max-parallelism",
        IntegerType(minimum=-1, maximum=UPPER_BOUND_MAX_PARALLELISM),
        -1,
        "Number of key groups, which is the maximum parallelism that the job can ever have. -1: derived from the "
        "parallelism.",
        changeability=Changeability.NEVER,
        default_equals_absence=True,
        fixed_because="keyed state is divided into this number of key groups",
    )
    OPERATOR_CHAINING = ConfigOption(
        "pipeline.operator-chaining.enabled",
        BOOLEAN,
        True,
        "Runs operators without an exchange between them in one thread.",
        changeability=Changeability.NEVER,
        fallback_keys=("pipeline.operator-chaining",),
        fixed_because="other chains would be other vertices than those of the checkpoints",
    )
    IDLE_TIMEOUT = ConfigOption(
        "pipeline.source.idle-timeout",
        DURATION,
        0,
        "A subtask of withWatermark without a row for this time is idle: event time does not wait for it until its "
        "next row. 0: event time waits for all subtasks.",
    )
    SOURCE_RATES = ConfigOption(
        "pipeline.source.rates",
        MAP,
        None,
        "Maximum rows per second that sources read (all subtasks of a source together), by the uids of sources: "
        "orders:1000,clicks:0. 0 pauses a source. Sources that are not named read as fast as they can.",
        changeability=Changeability.LIVE,
    )


class ExecutionOptions:
    """How subtasks run and end."""

    BUFFER_TIMEOUT = ConfigOption(
        "execution.buffer-timeout.interval",
        DURATION,
        100,
        "A partly filled buffer is sent after this time, or as soon as its receiver has processed all buffers before "
        "it and, for built-in operators, its sender has nothing else to do; 0 sends after each batch.",
        fallback_keys=("execution.buffer-timeout",),
    )
    TASK_CANCELLATION_TIMEOUT = ConfigOption(
        "task.cancellation.timeout",
        DURATION,
        10_000,
        "A worker whose subtask has not ended this long after its cancellation is replaced; 0 waits for ever.",
    )
    STALL_TIMEOUT = ConfigOption(
        "execution.health.stall-timeout",
        DURATION,
        60_000,
        "A job is not HEALTHY if one of its subtasks has processed no row for this time although work waits. 0 "
        "switches this check off. Set it above the duration of the slowest call of your code.",
        changeability=Changeability.LIVE,
    )
    BAD_ROWS_MODE = ConfigOption(
        "execution.bad-rows.mode",
        EnumType(BadRowsMode),
        BadRowsMode.FAIL,
        "What happens to a row for which an expression or a Python function of select, withColumn, where and the "
        "like raises an error, as in Spark's ANSI mode. FAIL fails the job. DROP drops the row and counts it in "
        "numBadRecordsDropped. DEAD_LETTER also writes it, with the reason, to execution.bad-rows.directory. The "
        "same applies to records that a source in the mode FAILFAST cannot read, unless the source has badRows.",
    )
    BAD_ROWS_DIRECTORY = ConfigOption(
        "execution.bad-rows.directory",
        NON_EMPTY_STRING,
        None,
        "Directory (path or URL), shared by all workers, for the Parquet files of bad rows.",
    )
    PROCESSOR_TRIGGER = ConfigOption(
        "execution.stateful-processor.trigger.type",
        EnumType(ProcessorTrigger),
        ProcessorTrigger.BUFFER,
        "What one call of handleInputRows covers: the rows of its key in one input buffer, since the last "
        "checkpoint, or since the interval began. Rows that wait for the end of an interval are part of "
        "checkpoints. A program whose triggers are all availableNow or once, without limits of their batches, sets "
        "it to CHECKPOINT.",
    )
    PROCESSOR_TRIGGER_INTERVAL = ConfigOption(
        "execution.stateful-processor.trigger.interval",
        DurationType(minimum=1),
        1_000,
        "Length of the intervals of PROCESSING_TIME triggers, counted from the epoch as in Spark.",
    )
    EVENT_TIME_ENDS = ConfigOption(
        "execution.event-time.ends-with-data",
        BOOLEAN,
        True,
        "Whether event time ends with the data: then all event-time timers fire, and outer joins emit all rows "
        "without a match. false: only what the watermark of the data has reached, as in Spark. A program whose "
        "triggers are all availableNow or once sets it to false.",
        fallback_keys=("execution.stateful-processor.fire-timers-at-end",),
    )
    STOP_AFTER = ConfigOption(
        "execution.stop-after",
        DURATION,
        None,
        "The job is stopped with a savepoint this long after it first runs, and FINISHED; after a failover of the "
        "driver the time begins again. The savepoint is written to execution.checkpointing.savepoint-dir, otherwise "
        "to the directory of checkpoints. If it fails, the job runs on and the stop is tried again. A script that "
        "calls query.stop() sets it.",
    )


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
        "restart-strategy.fixed-delay.delay", _MS, 1_000, "Pause before each restart.", changeability=Changeability.LIVE
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
