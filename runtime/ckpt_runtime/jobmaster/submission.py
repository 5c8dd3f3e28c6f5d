"""The data that a job starts from: a submission, or its state left by an earlier driver. Also its stored form.

The same request twice starts one job, and a retired id starts none. A request to start a job may be delayed for a long
time. A client that gives up on it and is about to start another job in its place retires the job id first: from then on
no job starts under that id, on this driver or, with high availability, on a later one. An id is retired only while no
job lives under it: no running job has a retired id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial

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
from ckpt_runtime.jobmaster.gateway_values import (
    Conflict,
    ExceptionEntry,
    JobAlreadyExists,
    LineagePlace,
    NotReady,
    RunRequest,
)
from ckpt_runtime.jobmaster.job_record import JobRecord, cluster_options
from ckpt_runtime.snapshots.job_claims import JobClaims
from ckpt_runtime.storage.checkpoint_storage import SnapshotDisposal
from ckpt_runtime.storage.errors import StorageError
from ckpt_runtime.storage.ha_store import RetiredIdStore
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


class JobIdRetired(Conflict):
    """The request's job id was retired because a client gave up on starting the job."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"The job id {job_id} is retired: no job can be started with it; choose another id")


class JobStillRunning(Conflict):
    """The id of a job that has not ended is not retired."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"Job {job_id} has not ended, so its id cannot be retired; cancel it first")


class Submissions:
    """All methods run on the driver's event loop."""

    def __init__(self) -> None:
        self._requests: dict[str, RunRequest] = {}
        self._submitting: dict[str, asyncio.Task[None]] = {}
        self._retired: dict[str, int] = {}
        self._store: RetiredIdStore | None = None

    async def take_over(self, store: RetiredIdStore) -> None:
        """Adopts the ids that earlier drivers retired. Raises StorageError for an unreadable directory."""
        self._retired |= await asyncio.to_thread(store.adopt)
        self._store = store

    def known(self, job_id: str) -> RunRequest | None:
        """The request by which a job was, or is being, submitted."""
        return self._requests.get(job_id)

    def remember(self, job_id: str, request: RunRequest) -> None:
        """Remembers the request of a job that an earlier driver accepted."""
        self._requests[job_id] = request

    def forget(self, job_id: str) -> None:
        """Forgets the request of a job that ended long ago."""
        self._requests.pop(job_id, None)

    def in_progress(self) -> Iterator[tuple[str, RunRequest]]:
        """The requests that have no job yet."""
        return ((job_id, self._requests[job_id]) for job_id in self._submitting)

    def check_not_retired(self, job_id: str) -> None:
        """Raises JobIdRetired."""
        if job_id in self._retired:
            raise JobIdRetired(job_id)

    async def once(
        self, job_id: str, request: RunRequest, submit: Callable[[str, RunRequest], Awaitable[None]]
    ) -> None:
        """Submits the request, or waits for the submission of the same request that is already in progress.

        A submission ends even if its callers disconnect: its program may be writing, and must not write again for the
        same request. Raises JobAlreadyExists, JobIdRetired, and what submit raises.
        """
        self.check_not_retired(job_id)
        known = self._requests.get(job_id)
        if known is not None:
            if known != request:
                raise JobAlreadyExists(job_id)
            submitting = self._submitting.get(job_id)
            if submitting is not None:
                await asyncio.shield(submitting)
            return
        # Before anything is awaited: an identical request that arrives in the meantime must find it.
        self._requests[job_id] = request
        task = self._submitting[job_id] = asyncio.ensure_future(self._submitted(job_id, submit(job_id, request)))
        # Retrieved, or the loop would report an exception that was never awaited.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(task)

    async def _submitted(self, job_id: str, submission: Awaitable[None]) -> None:
        try:
            await submission
        except BaseException:
            del self._requests[job_id]
            raise
        finally:
            del self._submitting[job_id]

    # --- retired ids

    def retired(self) -> Mapping[str, int]:
        """The retired ids with the times of retirement, in milliseconds since the epoch."""
        return dict(self._retired)

    async def retire(self, job_id: str, lives: Callable[[str], bool], now_ms: int, storage: Executor) -> None:
        """Retires the id after waiting for any submission under it in progress. Repeating the call is fine.

        Raises JobStillRunning, and NotReady when it is not sure that a later driver will know.
        """
        # A loop: while one submission is awaited, the next may have begun.
        while (submitting := self._submitting.get(job_id)) is not None:
            await asyncio.wait((submitting,))
        if lives(job_id):
            raise JobStillRunning(job_id)
        self._retired.setdefault(job_id, now_ms)  # from now on this driver starts nothing with it
        if self._store is None:
            return
        try:
            await asyncio.get_running_loop().run_in_executor(storage, partial(self._store.retire, job_id, now_ms))
        except StorageError as error:
            raise NotReady(f"it could not be stored that job id {job_id} is retired: {error}") from error
