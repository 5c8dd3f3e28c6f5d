"""The checkpointing settings in force for a job, as the coordinator uses them. Values and their limits, no parsing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckpt_runtime.configuration.checkpoint_settings import CHECKPOINT_SETTINGS
from ckpt_runtime.configuration.checkpointing_options import MINIMAL_CHECKPOINT_TIME_MS as MINIMUM_MS
from ckpt_runtime.configuration.checkpointing_options import CheckpointRetention

__all__ = ["MINIMUM_MS", "CheckpointConfiguration", "CheckpointConfigurationError", "CheckpointRetention"]

_LEAST = {setting.field: setting.least for setting in CHECKPOINT_SETTINGS}


class CheckpointConfigurationError(ValueError):
    """A setting is outside its limits; the message names the setting, the value and the allowed range."""


@dataclass(frozen=True, slots=True)
class CheckpointConfiguration:
    """The effective settings. ``interval_ms`` is None if there are no periodic checkpoints.

    ``aligned_timeout_ms`` and ``max_inflight_data_bytes`` (per subtask; None means no limit, 0 means full alignment)
    have no effect unless ``unaligned_enabled``. Unlike in Flink, concurrent checkpoints may be unaligned.
    ``rescue_min_progress`` is in percent of the subtasks. ``transaction_timeout_ms`` is no setting of the job's: it
    comes from its sinks, whose target aborts a transaction that no checkpoint has committed for so long; None without
    such a sink. ``exactly_once`` is fixed at the submission.

    Raises :class:`CheckpointConfigurationError` if a value is outside its limits. :meth:`effective` additionally
    raises the interval to the minimum pause, as at submission, and checks it against the sinks' transactions.
    """

    interval_ms: int | None = None
    timeout_ms: int = 600_000
    min_pause_ms: int = 0
    max_concurrent: int = 1
    tolerable_failed_checkpoints: int = 0
    retained: int = 1
    retention: CheckpointRetention = CheckpointRetention.DELETE_ON_CANCELLATION
    unaligned_enabled: bool = False
    aligned_timeout_ms: int = 0
    max_inflight_data_bytes: int | None = None
    interval_during_backlog_ms: int | None = None
    checkpoints_after_tasks_finish: bool = True
    incremental: bool = False
    rescue_enabled: bool = False
    rescue_min_progress: int = 90
    rescue_extension_ms: int = 60_000
    rescue_max_extension_ms: int = 600_000
    transaction_timeout_ms: int | None = None
    exactly_once: bool = True

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if least is not None and value is not None and value < least:
                raise CheckpointConfigurationError(f"{name} is {value}; it must be at least {least}")

    def effective(self) -> CheckpointConfiguration:
        """The same settings with an interval of at least the minimum pause.

        Raises :class:`CheckpointConfigurationError` if transactions of sinks may be aborted before a checkpoint commits
        them, and for unaligned checkpoints of a job that does not align.
        """
        self._check_transactions()
        if self.unaligned_enabled and not self.exactly_once:
            raise CheckpointConfigurationError(
                "unaligned_enabled is true; it must be false with the mode AT_LEAST_ONCE, whose barriers wait for "
                "nothing that they could overtake"
            )
        if self.interval_ms is None or self.interval_ms >= self.min_pause_ms:
            return self
        return replace(self, interval_ms=self.min_pause_ms)

    def longest_interval_ms(self) -> int | None:
        """The longest time between two periodic checkpoints, while sources process a backlog or not; None without a
        limit."""
        if self.interval_ms is None or self.interval_during_backlog_ms == 0:
            return None
        return max(self.interval_ms, self.min_pause_ms, self.interval_during_backlog_ms or 0)

    def _check_transactions(self) -> None:
        if self.transaction_timeout_ms is None:
            return
        allowed = f"the {self.transaction_timeout_ms} ms after which Kafka's brokers abort a transaction of the job"
        interval_ms = self.longest_interval_ms()
        if interval_ms is None:
            during = "" if self.interval_ms is None else " while sources process a backlog"
            raise CheckpointConfigurationError(
                f"there would be no periodic checkpoint{during}, and one has to complete within {allowed}"
            )
        if interval_ms + self.timeout_ms >= self.transaction_timeout_ms:
            raise CheckpointConfigurationError(
                f"a checkpoint may begin {interval_ms} ms after the one before (interval_ms {self.interval_ms}, "
                f"min_pause_ms {self.min_pause_ms}, interval_during_backlog_ms {self.interval_during_backlog_ms}) and "
                f"take {self.timeout_ms} ms (timeout_ms): together these have to be less than {allowed}. Lower them, "
                "or start the job from a savepoint with a greater kafka.transaction.timeout.ms"
            )

    def discards_on(self, job_status: str) -> bool:
        """Whether the retained checkpoints are deleted when the job ends as ``job_status`` (a terminal JobStatus)."""
        if job_status == "FINISHED":
            return True
        if job_status == "CANCELED":
            return self.retention is not CheckpointRetention.RETAIN_ON_CANCELLATION
        if job_status == "FAILED":
            return self.retention is CheckpointRetention.NO_EXTERNALIZED_CHECKPOINTS
        return False
