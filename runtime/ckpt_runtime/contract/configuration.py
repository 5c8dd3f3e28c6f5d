"""The configuration of a job (FLIP-530), its checkpoint settings (FLIP-571) and its parallelism."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field, structs, to_builtins

from ckpt_runtime.contract import spelling

PERIODIC_OFF = 2**63 - 1
"""The interval that Flink shows if periodic checkpoints are off."""


class ConfigVersion(Struct, frozen=True):
    """A version of a job's configuration: its author, its time (ms since the epoch) and the changed options."""

    version: int
    timestamp: int
    by: str
    options: tuple[str, ...]


class EffectiveOption(Struct, frozen=True):
    """An option with the value in effect, None if it is not set, and where the value comes from."""

    key: str
    value: str | None
    origin: str


class JobConfig(Struct, frozen=True, kw_only=True, rename=spelling.JOB_CONFIG):
    """``/jobs/:jobid/config``. On a Flink without FLIP-530, ``configuration`` is empty and ``version`` is None.

    ``configuration`` has options given at submission or changed later, never those of the cluster. ``version`` was
    accepted last; the tasks run with ``running_version``, which is an older one until their restart. ``effective`` has
    all options with their values in effect, from any source.
    """

    job_id: str
    name: str
    execution_config: dict[str, Any]
    configuration: dict[str, str] = {}
    version: int | None = None
    running_version: int | None = None
    pipeline_id: str | None = None
    changes: tuple[ConfigVersion, ...] = ()
    effective: tuple[EffectiveOption, ...] = ()


class OptionChange(Struct, frozen=True, rename="kebab"):
    """One changed option; a value of None means that it is not set. ``change`` is ``live`` or ``restart``.

    ``hidden_by_override`` is the field of the FLIP-571 override that takes precedence over the option.
    """

    before: str | None
    after: str | None
    change: str
    hidden_by_override: str | None = None


class ConfigChange(Struct, frozen=True, rename="kebab"):
    """The effect that a change of a job's configuration had, or (``dry_run``) would have; empty ``changes`` means
    nothing.
    """

    version: int
    restart: bool
    dry_run: bool
    changes: dict[str, OptionChange]


class Externalization(Struct, frozen=True):
    """Whether checkpoints outlive a job, and whether a cancellation deletes them."""

    enabled: bool = True
    delete_on_cancellation: bool = True


class CheckpointConfig(Struct, frozen=True, kw_only=True, rename=spelling.CHECKPOINT_CONFIG):
    """The checkpoint settings in effect. ``overrides`` names the overridden ones, by their fields in FLIP-571.

    ``interval`` is :data:`PERIODIC_OFF` if periodic checkpoints are off; :attr:`interval_ms` is None then.
    """

    mode: str
    interval: int
    timeout_ms: int
    min_pause_ms: int
    max_concurrent: int
    tolerable_failed_checkpoints: int
    aligned_timeout_ms: int
    unaligned: bool
    max_inflight_data_bytes: int | None = None
    checkpoints_after_tasks_finish: bool = False
    externalization: Externalization = Externalization()
    state_backend: str
    checkpoint_storage: str
    state_changelog_enabled: bool = False
    changelog_periodic_materialization_interval: int = 0
    changelog_storage: str = "none"
    overrides: tuple[str, ...] = ()

    @property
    def interval_ms(self) -> int | None:
        """The interval in milliseconds, None if periodic checkpoints are off."""
        return None if self.interval == PERIODIC_OFF else self.interval

    @property
    def deleted_on_cancellation(self) -> bool:
        return self.externalization.delete_on_cancellation

    def flat(self) -> dict[str, Any]:
        """The settings for scripts, with None for an interval that is off."""
        own = structs.asdict(self)
        del own["interval"], own["externalization"]
        return own | {"interval_ms": self.interval_ms, "deleted_on_cancellation": self.deleted_on_cancellation}


class CheckpointConfigPatch(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """FLIP-571: the fields to change; a field that is None stays unchanged. Durations in milliseconds."""

    interval_ms: int | None = field(name="checkpointInterval", default=None)
    timeout_ms: int | None = field(name="checkpointTimeout", default=None)
    min_pause_ms: int | None = field(name="minPauseBetweenCheckpoints", default=None)
    max_concurrent: int | None = field(name="maxConcurrentCheckpoints", default=None)
    tolerable_failed_checkpoints: int | None = field(name="tolerableCheckpointFailureNumber", default=None)
    aligned_timeout_ms: int | None = field(name="alignedCheckpointTimeout", default=None)
    unaligned: bool | None = field(name="unalignedEnabled", default=None)
    max_inflight_data_bytes: int | None = field(name="maxInflightDataBytes", default=None)

    def to_json(self) -> dict[str, Any]:
        """The request's body: the fields that are set, by their names on the wire."""
        body: dict[str, Any] = to_builtins(self)
        return body


Bounds = tuple[int, int]
"""The lower and the upper bound of a vertex's parallelism: the least the job runs with, and the most it uses."""


class ParallelismRange(Struct, frozen=True, rename=spelling.PARALLELISM_BOUNDS):
    """The lower and the upper bound of a vertex's parallelism."""

    lower: int
    upper: int


class VertexRequirements(Struct, frozen=True):
    """The resource requirements of one vertex."""

    parallelism: ParallelismRange
