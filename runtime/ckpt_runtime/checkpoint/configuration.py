"""The checkpointing settings in force for a job, as the coordinator uses them. Values and their limits, no parsing.

Overrides (FLIP-571) are the settings that were changed while the job ran. Their document is stored in the plan's job
configuration under ``JOB_CHECKPOINT_OVERRIDES``. Its keys are the field names of the REST request, its values JSON
integers and booleans; unknown keys are rejected, not dropped, since dropping one would silently change how a job
runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckpt_runtime.configuration.checkpointing_options import CHECKPOINT_SETTINGS, PATCHABLE, CheckpointRetention
from ckpt_runtime.configuration.checkpointing_options import MINIMAL_CHECKPOINT_TIME_MS as MINIMUM_MS
from ckpt_runtime.configuration.registry import JOB_CHECKPOINT_OVERRIDES

__all__ = ["MINIMUM_MS", "CheckpointConfiguration", "CheckpointConfigurationError", "CheckpointRetention"]

_LEAST = {setting.field: setting.least for setting in CHECKPOINT_SETTINGS}


class CheckpointConfigurationError(ValueError):
    """A setting is outside its limits; the message names the setting, the value and the allowed range."""


@dataclass(frozen=True, slots=True)
class CheckpointConfiguration:
    """The effective settings. ``interval_ms`` is None if there are no periodic checkpoints.

    ``aligned_timeout_ms`` and ``max_inflight_data_bytes`` (per subtask; None means no limit, 0 means full alignment)
    have no effect unless ``unaligned_enabled``. Unlike in Flink, concurrent checkpoints may be unaligned.
    ``rescue_min_progress`` is in percent of the subtasks. ``transaction_timeout_ms`` is not a setting of the job: it is
    the time after which the target of a sink aborts a transaction that no checkpoint has committed; None without such a
    sink. ``exactly_once`` is fixed at the submission. With ``continue_in`` the last checkpoints outlive the job: the
    next run of its program starts from them.

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
    continue_in: str | None = None
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

    @property
    def schedule(self) -> tuple[int | None, ...]:
        """The settings that say when periodic checkpoints are due."""
        return self.interval_ms, self.min_pause_ms, self.interval_during_backlog_ms

    def effective(self) -> CheckpointConfiguration:
        """The same settings with an interval of at least the minimum pause.

        Raises :class:`CheckpointConfigurationError` if transactions of sinks may be aborted before a checkpoint commits
        them, and for unaligned checkpoints of a job that does not align.
        """
        self._check_transactions()
        if self.unaligned_enabled and not self.exactly_once:
            raise CheckpointConfigurationError(
                "unaligned_enabled is true; it must be false with the mode AT_LEAST_ONCE, in which barriers are not "
                "aligned"
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
                f"no periodic checkpoint would be taken{during}, and one has to complete within {allowed}"
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
        if self.continue_in is not None:
            return False
        if job_status == "FINISHED":
            return True
        if job_status == "CANCELED":
            return self.retention is not CheckpointRetention.RETAIN_ON_CANCELLATION
        if job_status == "FAILED":
            return self.retention is CheckpointRetention.NO_EXTERNALIZED_CHECKPOINTS
        return False


@dataclass(slots=True)
class SettingsInForce:
    """A coordinator's effective settings, which its parts read at each decision. Only the coordinator replaces them."""

    settings: CheckpointConfiguration


_NAMES = {setting.field: name for name, setting in PATCHABLE.items()}


class CheckpointOverrides:
    """Holds the overridden fields of :class:`CheckpointConfiguration` and their values. Immutable.

    A field that is None or not given leaves the submitted value in force.
    """

    __slots__ = ("given",)
    given: Mapping[str, int | bool]

    def __init__(self, **fields: int | bool | None) -> None:
        unknown = fields.keys() - _NAMES
        if unknown:
            raise TypeError(f"{', '.join(sorted(unknown))}: cannot be overridden; allowed are {', '.join(_NAMES)}")
        # in the table's order, so that the output does not depend on the order of requests
        self.given = {name: value for name in _NAMES if (value := fields.get(name)) is not None}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CheckpointOverrides) and self.given == other.given

    def __hash__(self) -> int:
        return hash(tuple(self.given.items()))

    def __repr__(self) -> str:
        return f"CheckpointOverrides({', '.join(f'{name}={value}' for name, value in self.given.items())})"

    @property
    def request_fields(self) -> dict[str, int | bool]:
        """The overridden values by the names of the REST request."""
        return {_NAMES[name]: value for name, value in self.given.items()}

    def merged_with(self, later: CheckpointOverrides) -> CheckpointOverrides:
        """Merges both; ``later`` takes precedence."""
        return CheckpointOverrides(**{**self.given, **later.given})

    def applied_to(self, submitted: CheckpointConfiguration) -> CheckpointConfiguration:
        """Returns the effective settings, which have the same limits as at submission.

        Raises :class:`CheckpointConfigurationError` if a value, or the combination, is outside them. Overrides must
        pass this check before they are stored; otherwise the next start of the job would fail.
        """
        changes: dict[str, Any] = {**self.given}
        return replace(submitted, **changes).effective()

    def to_document(self) -> str:
        """Returns the stored form, which is the same for equal overrides."""
        return json.dumps(self.request_fields, sort_keys=True)

    @classmethod
    def from_document(cls, document: str | None) -> CheckpointOverrides:
        """Reads the stored form; None (a job stored without overrides) means no override.

        Raises :class:`CheckpointConfigurationError` on anything else.
        """
        if document is None:
            return cls()
        try:
            values = json.loads(document)
        except ValueError as error:
            raise CheckpointConfigurationError(f"{JOB_CHECKPOINT_OVERRIDES} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointConfigurationError(f"{JOB_CHECKPOINT_OVERRIDES} is {values!r}; it must be an object")
        for name, value in values.items():
            if name not in PATCHABLE:
                raise CheckpointConfigurationError(f"{name!r} is not a known field; allowed are {', '.join(PATCHABLE)}")
            if type(value) is not (int if PATCHABLE[name].patch_range else bool):
                kind = "an integer" if PATCHABLE[name].patch_range else "true or false"
                raise CheckpointConfigurationError(f"{name} is {value!r}; it must be {kind}")
        return cls(**{PATCHABLE[name].field: value for name, value in values.items()})


@dataclass(frozen=True, slots=True)
class OverridesChange:
    """How a patch changes the stored overrides, regardless of their value at the time of the write."""

    overrides: CheckpointOverrides | None
    settings: CheckpointConfiguration

    def __call__(self, text: str | None) -> str | None:
        """Returns the text to store. Raises CheckpointConfigurationError if the result could not be used.

        Overrides that would make the next start of the job fail are never stored.
        """
        known = CheckpointOverrides.from_document(text)
        overrides = CheckpointOverrides() if self.overrides is None else known.merged_with(self.overrides)
        overrides.applied_to(self.settings)
        return overrides.to_document() if overrides.given else None
