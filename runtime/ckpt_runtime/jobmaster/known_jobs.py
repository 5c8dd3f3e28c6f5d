"""The jobs of a session: running, ended, and unrecovered ones. The recovery of unrecovered jobs is retried, because
their storage may become available again. After a take-over these are the jobs that earlier drivers left in the
high-availability directory; the dispatcher adds submitted ones.

Unreadable data is never skipped: an older checkpoint, or none, in place of an unreadable one would silently repeat
or lose rows. Such a job is left as it is, and is shown with the reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from tenacity import Retrying, before_sleep_log, retry_if_exception, stop_after_attempt, wait_exponential

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.properties import CheckpointType
from ckpt_runtime.checkpoint.retention import RetainedCheckpoint
from ckpt_runtime.configuration.checkpointing_options import RecoveryClaimMode
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.option import ConfigurationError
from ckpt_runtime.graph.schema import DocumentError, checked
from ckpt_runtime.jobmaster.ended_job import EndedJob
from ckpt_runtime.jobmaster.event_log import EventLog
from ckpt_runtime.jobmaster.executions import wall_clock_ms
from ckpt_runtime.jobmaster.gateway_values import NOT_YET, Conflict, ExceptionEntry, JobNotFound, JobOverview, NotReady
from ckpt_runtime.jobmaster.job_master import JobMaster
from ckpt_runtime.jobmaster.job_record import DurableRecord, forget_result
from ckpt_runtime.jobmaster.request_checks import positions_of
from ckpt_runtime.jobmaster.slot_pool import SlotPool
from ckpt_runtime.jobmaster.snapshot_references import References
from ckpt_runtime.jobmaster.submission import JobHistory, JobSubmission, StoredProperties, Submissions, submission_of
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.snapshots.positions import repositioned
from ckpt_runtime.snapshots.snapshot import open_snapshot
from ckpt_runtime.storage.checkpoint_storage import SnapshotDisposal
from ckpt_runtime.storage.driver_pools import DriverPools, crash_point
from ckpt_runtime.storage.errors import (
    CorruptFileError,
    InvalidLocationError,
    NotFoundError,
    NotLeaderError,
    StorageError,
)
from ckpt_runtime.storage.ha_store import HaStore
from ckpt_runtime.storage.leader_store import LeaderInfo

T = TypeVar("T")
SnapshotReader = Callable[[str], CompletedCheckpoint]
logger = logging.getLogger(__name__)

_ATTEMPTS = 5
_PAUSE_S = 0.5
_LASTING = (CorruptFileError, InvalidLocationError, NotLeaderError)
_PERMANENT = (NotFoundError, *_LASTING)


class RecoveryError(RuntimeError):
    """Names the file that prevents a recovery, and the problem. ``may_pass``: no damage is proven; a retry may help."""

    def __init__(self, message: str, *, may_pass: bool) -> None:
        super().__init__(message)
        self.may_pass = may_pass


@dataclass(frozen=True, slots=True)
class FoundJob:
    """A job of an earlier driver.

    ``result`` is set when it has ended; ``submission`` when it is still to be run or cleaned up; ``failure`` when it
    should have a submission, but a file needed for it cannot be read; ``may_pass`` when storage may be unavailable, so
    that :func:`find_job` may find the job later.
    """

    job_id: str
    submission: JobSubmission | None = None
    result: Mapping[str, Any] | None = None
    failure: str | None = None
    may_pass: bool = False


def find_jobs(store: HaStore, cluster: Configuration, read: SnapshotReader | None = None) -> list[FoundJob]:
    """Finds all jobs: ended ones come first, the oldest first as far as known. Blocks.

    ``read`` is :func:`read_snapshot`, or a form of it with a deadline: the snapshots of one job may lie on storage that
    never answers, which must not prevent the recovery of other jobs.
    Raises StorageError when the directory itself cannot be read.
    """
    retired = _retry(store.retired.read)
    left = _retry(store.jobs.list_ids)
    for job_id in left:
        with suppress(CorruptFileError):  # an earlier driver cannot change an unreadable file either
            _retry(partial(store.results.adopt, job_id))
    found = [_ended(store, job_id) for job_id in _retry(store.results.list_ids)]
    found.sort(key=lambda job: _end_time(job.result))
    clean = {job.job_id for job in found if job.result is None or not store.results.is_dirty(job.job_id)}
    ended = {job.job_id: job for job in found}
    for job_id in left:
        if job_id in retired and job_id not in ended:
            # It was stored after its id was retired, so its submission was never acknowledged.
            logger.warning("job %s is not run: its id was retired before it was stored", job_id)
            with suppress(StorageError):  # the next driver tries again
                store.jobs.remove(job_id)
        elif job_id not in clean:
            result = ended[job_id].result if job_id in ended else None
            job = ended[job_id] = find_job(store, job_id, cluster, result, read or read_snapshot)
    for job in found:
        if job.job_id not in clean and ended[job.job_id] is job:  # only the note of the pending clean-up is left
            DurableRecord(store, job.job_id).forget()
    return list(ended.values())


def _ended(store: HaStore, job_id: str) -> FoundJob:
    """Reads a result. Even an unreadable one proves that the job has ended."""
    try:
        return FoundJob(job_id, result=_retry(lambda: store.results.get(job_id)))
    except CorruptFileError as error:
        logger.error("the result of job %s cannot be read: %s", job_id, error)
        return FoundJob(job_id, failure=str(error))


def _end_time(result: Mapping[str, Any] | None) -> int:
    """When the job ended, as far as its result says."""
    with suppress(DocumentError):
        return max(checked((result or {}).get("timestamps", {}), dict[str, int]).values(), default=0)
    return 0


def find_job(
    store: HaStore, job_id: str, cluster: Configuration, result: Mapping[str, Any] | None, read: SnapshotReader
) -> FoundJob:
    """Finds one job that is still stored, with its ``result`` if it has ended. Blocks; never raises."""
    may_pass = False
    try:
        return FoundJob(job_id, _recover(store, job_id, cluster, read, has_ended=result is not None), result)
    except RecoveryError as error:
        failure, may_pass = str(error), error.may_pass
    except StorageError as error:
        failure, may_pass = str(error), not isinstance(error, _LASTING)
    except ConfigurationError as error:
        failure = str(error)
    except DocumentError as error:
        failure = f"the stored plan has an unexpected form: {error}"
    logger.error("job %s cannot be recovered: %s", job_id, failure)
    return FoundJob(job_id, None, result, failure, may_pass)


def _recover(
    store: HaStore, job_id: str, cluster: Configuration, read: SnapshotReader, *, has_ended: bool
) -> JobSubmission:
    """Adopts first, then reads: after the adoption no earlier driver can change the data."""
    stored = _retry(lambda: store.jobs.adopt(job_id))
    crash_point("recovery-plan-adopted")
    counters = _retry(store.counters(job_id).adopt)
    pointers = _retry(store.pointers(job_id).adopt)
    crash_point("recovery-adopted")
    checkpoints = tuple(_retained(read(found.directory), found.owned) for found in pointers.values())
    properties = checked(stored.properties, StoredProperties)
    history = JobHistory(
        overrides=stored.checkpoint_overrides,
        checkpoints=checkpoints,
        first_checkpoint_id=properties.first_checkpoint_id,
        next_checkpoint_id=max([counters.next_checkpoint_id, *(entry.checkpoint.id + 1 for entry in checkpoints)]),
        next_attempt=counters.next_attempt,
        savepoint_id=counters.savepoint_id,
        disposals=_disposals(store, job_id),
        savepoints=_retry(store.pointers(job_id).pending_savepoints),
        failures=_failures(store, job_id),
    )
    archive = _retry(lambda: store.jobs.read_archive(stored))
    has_own = bool(checkpoints) or has_ended  # until then it starts from its submission's snapshot
    return submission_of(
        stored,
        properties,
        cluster,
        archive or b"",
        DurableRecord(store, job_id),
        history,
        None if has_own else _submitted_with(properties, read),
        store.snapshots.url,
    )


def _submitted_with(properties: StoredProperties, read: SnapshotReader) -> CompletedCheckpoint | None:
    """The snapshot that the job was submitted with, if any, with the positions of sources that the request has set."""
    request = properties.request
    if request is None or request.savepoint_path is None:
        return None
    snapshot = repositioned(read(request.savepoint_path), positions_of(request, wall_clock_ms()))
    return _retained(snapshot, properties.claims is not None).checkpoint


def _retained(checkpoint: CompletedCheckpoint, owned: bool) -> RetainedCheckpoint:
    return RetainedCheckpoint(checkpoint.claimed() if owned else checkpoint, owned)


def _disposals(store: HaStore, job_id: str) -> dict[int, SnapshotDisposal]:
    """The pending disposals. Files that cannot be deleted safely stay."""
    found = {}
    for checkpoint_id, document in _retry(store.pointers(job_id).disposals).items():
        try:
            found[checkpoint_id] = SnapshotDisposal.from_json(document)
        except ValueError as error:  # a malformed document, or invalid places
            logger.warning("job %s: checkpoint %d will not be deleted: %r", job_id, checkpoint_id, error)
    return found


def _failures(store: HaStore, job_id: str) -> tuple[ExceptionEntry, ...]:
    """The exception history, which is for display only: a job also runs without it."""
    try:
        return checked(store.failures(job_id).read().get("entries", ()), tuple[ExceptionEntry, ...])
    except (StorageError, DocumentError) as error:
        logger.warning("the exception history of job %s cannot be read: %r", job_id, error)
        return ()


def read_snapshot(url: str) -> CompletedCheckpoint:
    """Reads a snapshot's metadata. Raises RecoveryError naming the snapshot."""
    try:
        return _retry(lambda: open_snapshot(url)).metadata
    except StorageError as error:
        raise RecoveryError(str(error), may_pass=not isinstance(error, _LASTING)) from error


def _retry(read: Callable[[], T]) -> T:
    """Retries, since storage may be unavailable for a moment; missing or damaged files are not retried."""
    attempts = Retrying(
        retry=retry_if_exception(lambda error: isinstance(error, StorageError) and not isinstance(error, _PERMANENT)),
        stop=stop_after_attempt(_ATTEMPTS),
        wait=wait_exponential(_PAUSE_S),
        before_sleep=before_sleep_log(logger, logging.WARNING),
        reraise=True,
    )
    return attempts(read)


_FIRST_PAUSE_S = 5.0
_MAX_PAUSE_S = 60.0
_FACTOR = 1.5


class OrphanedJobs(dict[str, str]):
    """The reason for each unrecovered job: the file and its problem.

    A recovery that may succeed is retried until it does or damage is proven; the other jobs stay unrecovered until a
    user acts and another driver leads.
    """

    def __init__(self, look: Callable[[FoundJob], FoundJob], recovered: Callable[[FoundJob], None]) -> None:
        """``look`` blocks, and is called in a thread; ``recovered`` gets each found job on the event loop."""
        super().__init__()
        self._look = look
        self._recovered = recovered
        self._looking: asyncio.Task[None] | None = None

    def look_for(self, jobs: list[FoundJob]) -> None:
        """Starts retrying the recovery of these jobs."""
        waiting = {job.job_id: job for job in jobs}
        if waiting:
            self._looking = asyncio.create_task(self._retry_recovery(waiting))

    def close(self) -> None:
        """Stops the retries."""
        if self._looking is not None:
            self._looking.cancel()

    async def _retry_recovery(self, waiting: dict[str, FoundJob]) -> None:
        pause = _FIRST_PAUSE_S
        while waiting:
            await asyncio.sleep(pause)
            pause = min(pause * _FACTOR, _MAX_PAUSE_S)
            for earlier in list(waiting.values()):
                found = await asyncio.to_thread(self._look, earlier)
                if found.failure is None or not found.may_pass:
                    del waiting[found.job_id]
                self._take(found)

    def _take(self, found: FoundJob) -> None:
        if found.failure is not None:
            self[found.job_id] = found.failure
            return
        del self[found.job_id]
        logger.info("job %s can be recovered now", found.job_id)
        self._recovered(found)


MAX_ENDED_JOBS = 100


class KnownJobs(dict[str, JobMaster | EndedJob]):
    """The known jobs by id, oldest first. All methods run on the driver's event loop.

    An unknown id raises JobNotFound, or NotReady if the job could not be recovered. While this driver does not lead it
    knows no jobs, and any id raises NotReady.
    """

    def __init__(
        self,
        configuration: Configuration,
        slots: SlotPool,
        pools: DriverPools,
        events: EventLog,
        submissions: Submissions,
        *,
        leads: bool = True,
    ) -> None:
        super().__init__()
        self.leads = leads
        self.leader_elsewhere: LeaderInfo | None = None
        self._configuration = configuration
        self._slots = slots
        self._pools = pools
        self._submissions = submissions
        self._store: HaStore | None = None
        self._orphaned = OrphanedJobs(self._look_again, self._take_over_job)
        self._cleaning: list[JobMaster] = []
        self.create = partial(JobMaster, slots=slots, pools=pools, events=events)
        """Creates the master of a submission, which is not listed before :meth:`add`."""

    def newest_first(self) -> Iterator[JobMaster | EndedJob]:
        """Yields jobs, without those that could not be recovered."""
        return reversed(self.values())

    def add(self, job_id: str, job: JobMaster) -> None:
        """Adds and starts an accepted job. If too many jobs have ended, the oldest of them are forgotten."""
        self[job_id] = job
        job.start()
        self._forget_old_jobs()

    def check_leads(self) -> None:
        """Raises NotReady, which names the leader, while this driver does not lead."""
        if not self.leads:
            other = self.leader_elsewhere
            where = "" if other is None else f" ({other.rest} of application {other.app_id} is the leader)"
            raise NotReady(f"this driver is not the leader, or is still recovering; retry{where}")

    def __missing__(self, job_id: str) -> JobMaster | EndedJob:
        self.check_leads()
        if job_id in self._orphaned:
            raise NotReady(f"job {job_id} cannot be recovered: {self._orphaned[job_id]}")
        raise JobNotFound(job_id)

    def overviews(self) -> tuple[JobOverview, ...]:
        """All jobs; those that could not be recovered come first."""
        unrecovered = (_unrecovered(job_id) for job_id in self._orphaned if job_id not in self)
        return (*unrecovered, *(job.overview() for job in self.newest_first()))

    def running_archive(self, pipeline_id: str) -> bytes | None:
        """The archive of a program from a job that has not ended, if one runs it."""
        masters = (job for job in self.values() if isinstance(job, JobMaster) and not job.has_ended)
        return next((job.program().archive for job in masters if job.config_info().pipeline_id == pipeline_id), None)

    def of_lineage(self, lineage: str) -> list[JobOverview]:
        """The known jobs of the lineage, the latest first."""
        overviews = [job.overview() for job in self.newest_first()]
        found = [(job.lineage.incarnation, job) for job in overviews if job.lineage and job.lineage.id == lineage]
        return [job for _, job in sorted(found, key=lambda numbered: numbered[0], reverse=True)]

    def named(self, name: str) -> list[JobOverview]:
        """The jobs of this name, newest first, without restore drills."""
        return [job for job in (job.overview() for job in self.newest_first()) if job.name == name and not job.drill]

    def check_recovered(self, job_id: str) -> None:
        """Raises Conflict for an unrecovered job, which may continue once its storage is back."""
        if job_id in self._orphaned and job_id not in self:
            reason = self._orphaned[job_id]
            raise Conflict(
                f"Job {job_id} of the same lineage cannot be recovered now, but may continue later: {reason}. If it "
                "must never continue, start this one with fork"
            )

    def latest_snapshots(self, lineage: str) -> list[str]:
        """The last checkpoint and savepoint of the lineage's latest job, if they still exist."""
        latest = [self[job.job_id].checkpoint_statistics() for job in self.of_lineage(lineage)[:1]]
        taken = [last for each in latest for last in (each.latest_completed, each.latest_savepoint) if last is not None]
        return [last.external_path for last in taken if last.external_path is not None and not last.discarded]

    def lineage_ended_by(self, job_id: str) -> str | None:
        """The lineage of a job, if it has ended and is the latest one of that lineage."""
        job = self.get(job_id)
        place = None if job is None or not job.status.is_globally_terminal else job.overview().lineage
        return place.id if place is not None and self.of_lineage(place.id)[0].job_id == job_id else None

    def to_resume_from(self, job_id: str) -> str | None:
        """The last snapshot up to which a job has committed its output; without one, the one it was restored from."""
        statistics = self[job_id].checkpoint_statistics()
        completed = [last for last in (statistics.latest_completed, statistics.latest_savepoint) if last is not None]
        committed = [last for last in completed if last.checkpoint_type is not CheckpointType.SAVEPOINT]
        began = statistics.latest_restored
        if committed:
            return max(committed, key=lambda last: last.id).external_path
        return None if began is None else began.external_path

    def ended_before(self, savepoint: CompletedCheckpoint | None) -> tuple[str, ...]:
        """The job that took a snapshot, if it is known to have ended. Jobs of other sessions are not known."""
        job = None if savepoint is None else self.get(savepoint.job_id)
        return (savepoint.job_id,) if savepoint and job is not None and job.status.is_globally_terminal else ()

    def _forget_old_jobs(self) -> None:
        ended = [job_id for job_id, job in self.items() if job.status.is_globally_terminal]
        # The dictionary is in order of submission, so that the oldest are removed first.
        for job_id in ended[: max(0, len(ended) - MAX_ENDED_JOBS)]:
            del self[job_id]
            self._submissions.forget(job_id)
            if self._store is not None:
                asyncio.get_running_loop().run_in_executor(self._pools.own, forget_result, self._store, job_id)

    def references(self) -> list[References]:
        """The snapshots that this session may still need and that must not be disposed of."""
        living = [job.references() for job in self.values() if isinstance(job, JobMaster) and not job.has_ended]
        for job_id, request in self._submissions.in_progress():
            snapshots = () if request.savepoint_path is None else (request.savepoint_path,)
            claims = request.claim_mode is RecoveryClaimMode.CLAIM
            living.append(References(job_id, "being submitted", snapshots=snapshots, claims=claims))
        return [*living, *(References(job_id, "not recovered yet", is_known=False) for job_id in self._orphaned)]

    def settled(self) -> frozenset[str]:
        """Jobs that have ended and have nothing more to delete: they no longer need the snapshots they claimed."""
        cleaning = {job.job_id for job in self._cleaning if not job.cleaned_up}
        return frozenset(
            job_id
            for job_id, job in self.items()
            if (job.status.is_globally_terminal if isinstance(job, EndedJob) else job.cleaned_up)
            and job_id not in cleaning
        )

    def stop_retrying(self) -> None:
        """Stops the retries for jobs that could not be recovered."""
        self._orphaned.close()

    def suspend_all(self, *, fenced: bool) -> None:
        """Suspends all running jobs; with ``fenced`` nothing may be changed, and they are forgotten."""
        for cleaning in self._cleaning:
            cleaning.close()
        for job in self.values():
            if isinstance(job, JobMaster):
                job.suspend(fenced=fenced)
        if fenced:
            self.clear()

    # --- what earlier drivers have left

    async def find(self, store: HaStore) -> list[FoundJob]:
        """Finds the jobs of earlier drivers. Raises StorageError for an unreadable directory."""
        self._store = store
        return await asyncio.to_thread(find_jobs, store, self._configuration, self._read_snapshot)

    def take_over(self, jobs: list[FoundJob]) -> None:
        """Takes the jobs over. Jobs whose storage is unavailable now are retried later."""
        for found in jobs:
            self._take_over_job(found)
        self._orphaned.look_for([job for job in jobs if job.may_pass])
        logger.info("recovered %d jobs, %d could not be recovered", len(self), len(self._orphaned))

    def _read_snapshot(self, url: str) -> CompletedCheckpoint:
        return self._pools.paths(url).submit(read_snapshot, url).result()

    def _look_again(self, earlier: FoundJob) -> FoundJob:
        assert self._store is not None
        return find_job(self._store, earlier.job_id, self._configuration, earlier.result, self._read_snapshot)

    def _take_over_job(self, found: FoundJob) -> None:
        try:
            if found.failure is not None:
                self._orphaned[found.job_id] = found.failure
            request = None
            if found.result is not None:
                ended = self[found.job_id] = EndedJob(found.result)
                request = ended.request
                if found.submission is not None:
                    self._finish_clean_up(found.submission, ended)
            elif found.submission is not None:
                request = found.submission.request
                submission = replace(found.submission, ended_jobs=self.ended_before(found.submission.savepoint))
                job = self[found.job_id] = self.create(submission)
                job.start()
            if request is not None:
                self._submissions.remember(found.job_id, request)
        # One broken stored job must not prevent the recovery of the others.
        except (ConfigurationError, KeyError, TypeError, ValueError) as error:
            logger.exception("job %s cannot be recovered", found.job_id)
            self._orphaned[found.job_id] = f"{type(error).__name__}: {error}"

    def _finish_clean_up(self, submission: JobSubmission, ended: EndedJob) -> None:
        """Finishes the clean-up after the job's end, before whose completion its driver died."""
        # Without the session's events: the job has ended, and an earlier driver announced its end.
        job = JobMaster(submission, self._slots, self._pools)
        # Kept here: it is in no list of jobs, and the end of the session must stop its deletions.
        self._cleaning.append(job)
        kept = not ended.checkpoint_config().settings.discards_on(JobStatus.CANCELED)
        job.clean_up_after(ended.status, retain=kept)


def _unrecovered(job_id: str) -> JobOverview:
    now = wall_clock_ms()
    return JobOverview(job_id, "(cannot be recovered)", JobStatus.RECONCILING, NOT_YET, NOT_YET, now, {})
