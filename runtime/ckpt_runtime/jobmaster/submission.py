"""The data that a job starts from: a submission, or its state left by an earlier driver. Also its stored form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import Struct, to_builtins

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.retention import RetainedCheckpoint
from ckpt_runtime.configuration.checkpointing_options import RecoveryClaimMode
from ckpt_runtime.configuration.configuration import Configuration, OwnConfiguration
from ckpt_runtime.configuration.option import OptionScope
from ckpt_runtime.configuration.registry import INTERNAL_PREFIX, find_option
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.graph.schema import NonNegative, malformed
from ckpt_runtime.jobmaster.executions import wall_clock_ms
from ckpt_runtime.jobmaster.gateway_values import ExceptionEntry, LineagePlace, RunRequest
from ckpt_runtime.jobmaster.job_record import JobRecord, cluster_options
from ckpt_runtime.snapshots.job_claims import JobClaims
from ckpt_runtime.storage.disposal import SnapshotDisposal
from ckpt_runtime.storage.job_store import StoredJob


@dataclass(frozen=True, slots=True)
class JobHistory:
    """What happened to a job under earlier drivers; the defaults are those of a new job.

    ``overrides`` is the stored text (FLIP-571). Ids from ``first_checkpoint_id`` on are the job's own, and those below
    ``next_checkpoint_id`` may have been used, as may attempts below ``next_attempt``. ``savepoint_id`` is that of the
    last savepoint, 0 without one. ``disposals`` are deletions that are not known to be done, by checkpoint id, and
    ``savepoints`` the directories of savepoints that are not known to be complete.
    ``failures`` are the exception history.
    """

    overrides: str | None = None
    checkpoints: tuple[RetainedCheckpoint, ...] = ()
    first_checkpoint_id: int = 1
    next_checkpoint_id: int = 1
    next_attempt: int = 0
    savepoint_id: int = 0
    disposals: Mapping[int, SnapshotDisposal] = field(default_factory=dict)
    savepoints: Mapping[int, str] = field(default_factory=dict)
    failures: tuple[ExceptionEntry, ...] = ()


class StoredProperties(Struct):
    """The properties that :meth:`JobSubmission.to_stored` adds to a stored plan."""

    program_id: str
    entry: str
    arguments: tuple[str, ...]
    claim_mode: RecoveryClaimMode
    allow_non_restored_state: bool
    first_checkpoint_id: NonNegative
    submitted_at_ms: int
    request: RunRequest | None = None
    claims: JobClaims | None = None
    defaults: dict[str, str] | None = None
    lineage: LineagePlace | None = None
    cluster_configuration: dict[str, str] = {}
    """Written by earlier versions, see :func:`~ckpt_runtime.jobmaster.job_record.cluster_options`."""


@dataclass(frozen=True, slots=True)
class JobSubmission:
    """Everything that a job starts from.

    ``own`` is the job's configuration: options of the request or of later changes override those that its pipeline
    set. ``defaults`` are the cluster's options, which ``own`` overrides.
    ``archive`` is the zip of the pipeline's files. ``ended_jobs`` took the savepoint, or had its sinks before, and
    certainly no longer write. ``claims`` make the job the owner of the savepoint, with CLAIM. ``lineage`` is None
    for the first job of a lineage.
    """

    job_id: str
    graph: JobGraph
    defaults: Configuration
    own: OwnConfiguration
    archive: bytes
    program_id: str
    entry: str
    arguments: tuple[str, ...]
    default_checkpoint_directory: str
    savepoint: CompletedCheckpoint | None = None
    claim_mode: RecoveryClaimMode = RecoveryClaimMode.NO_CLAIM
    claims: JobClaims | None = None
    allow_non_restored_state: bool = False
    request: RunRequest | None = None
    record: JobRecord = field(default_factory=JobRecord)
    history: JobHistory = field(default_factory=JobHistory)
    submitted_at_ms: int = field(default_factory=wall_clock_ms)
    ended_jobs: tuple[str, ...] = ()
    lineage: LineagePlace | None = None

    @property
    def place(self) -> LineagePlace:
        """The job's place in its lineage."""
        return self.lineage or LineagePlace(self.job_id)

    @property
    def configuration(self) -> Configuration:
        """The job's own options over the cluster's."""
        return Configuration.merge(self.defaults, self.own.given)

    @property
    def is_drill(self) -> bool:
        """Whether it is a restore drill: nothing outside the job may be touched."""
        return self.request is not None and self.request.drill

    @property
    def seed(self) -> str:
        """A text unique to this submission, even under the same job id, and stable under later drivers."""
        return f"{self.job_id}@{self.submitted_at_ms}"

    def to_stored(self, first_checkpoint_id: int) -> StoredJob:
        """The execution plan in its stored form; the archive is stored next to it."""
        properties = StoredProperties(
            program_id=self.program_id,
            entry=self.entry,
            arguments=self.arguments,
            claim_mode=self.claim_mode,
            allow_non_restored_state=self.allow_non_restored_state,
            defaults=options_of_jobs(self.defaults),
            first_checkpoint_id=first_checkpoint_id,
            submitted_at_ms=self.submitted_at_ms,
            request=self.request,
            claims=self.claims,
            lineage=self.lineage,
        )
        given = self.own.given.to_dict()
        return StoredJob(self.job_id, self.graph.to_json(), given, properties=to_builtins(properties))


def submission_of(
    stored: StoredJob,
    properties: StoredProperties,
    cluster: Configuration,
    archive: bytes,
    record: JobRecord,
    history: JobHistory,
    savepoint: CompletedCheckpoint | None,
    default_checkpoint_directory: str,
) -> JobSubmission:
    """The job of a stored plan. Raises :class:`DocumentError` for a plan of another shape."""
    with malformed():
        given = Configuration(stored.configuration).without(INTERNAL_PREFIX)
        defaults = Configuration.merge(cluster, Configuration(cluster_options(stored)))
    return JobSubmission(
        job_id=stored.job_id,
        graph=JobGraph.from_json(stored.graph),
        defaults=defaults,
        own=OwnConfiguration(given, stored.version, stored.notes),
        archive=archive,
        program_id=properties.program_id,
        entry=properties.entry,
        arguments=properties.arguments,
        default_checkpoint_directory=default_checkpoint_directory,
        savepoint=savepoint,
        claim_mode=properties.claim_mode,
        claims=properties.claims,
        allow_non_restored_state=properties.allow_non_restored_state,
        request=properties.request,
        record=record,
        history=history,
        submitted_at_ms=properties.submitted_at_ms,
        lineage=properties.lineage,
    )


def options_of_jobs(configuration: Configuration) -> dict[str, str]:
    """The options that affect how jobs run. Each driver has its own cluster options; secrets are never stored."""

    def concerns_jobs(key: str) -> bool:
        option = find_option(key)
        return option is None or (option.scope is OptionScope.JOB and not option.secret)

    return {key: value for key, value in configuration.items() if concerns_jobs(key)}
