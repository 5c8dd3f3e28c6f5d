"""Reads what earlier drivers left in the high-availability directory, and fences them off. Starts nothing.

Unreadable data is never skipped: an older checkpoint, or none, in place of an unreadable one would silently repeat
or lose rows. Such a job is left as it is, and is shown with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tenacity import Retrying, before_sleep_log, retry_if_exception, stop_after_attempt, wait_exponential

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.retention import RetainedCheckpoint
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.errors import ConfigurationError
from ckpt_runtime.graph.schema import DocumentError, checked
from ckpt_runtime.jobmaster.executions import wall_clock_ms
from ckpt_runtime.jobmaster.gateway_values import ExceptionEntry
from ckpt_runtime.jobmaster.job_record import DurableRecord
from ckpt_runtime.jobmaster.request_checks import positions_of
from ckpt_runtime.jobmaster.submission import JobHistory, JobSubmission, StoredProperties, submission_of
from ckpt_runtime.snapshots.positions import repositioned
from ckpt_runtime.snapshots.snapshot import open_snapshot
from ckpt_runtime.storage.crash_points import crash_point
from ckpt_runtime.storage.disposal import SnapshotDisposal
from ckpt_runtime.storage.errors import (
    CorruptFileError,
    InvalidLocationError,
    NotFoundError,
    NotLeaderError,
    StorageError,
)
from ckpt_runtime.storage.ha_store import HaStore

T = TypeVar("T")
SnapshotReader = Callable[[str], CompletedCheckpoint]
logger = logging.getLogger(__name__)

_ATTEMPTS = 5
_PAUSE_S = 0.5
_LASTING = (CorruptFileError, InvalidLocationError, NotLeaderError)
_PERMANENT = (NotFoundError, *_LASTING)


class RecoveryError(RuntimeError):
    """A job cannot be recovered now; its message names the file and the problem.

    ``may_pass``: no file is proven damaged, so that a retry may help.
    """

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
            _drop(store, job_id)
        elif job_id not in clean:
            result = ended[job_id].result if job_id in ended else None
            job = ended[job_id] = find_job(store, job_id, cluster, result, read or read_snapshot)
    for job in found:
        if job.job_id not in clean and ended[job.job_id] is job:  # only the note of the pending clean-up is left
            DurableRecord(store, job.job_id).forget()
    return list(ended.values())


def _drop(store: HaStore, job_id: str) -> None:
    """Drops a job that was stored after its id was retired: its submission was never acknowledged."""
    logger.warning("job %s is not run: its id was retired before it was stored", job_id)
    with suppress(StorageError):  # the next driver tries again
        store.jobs.remove(job_id)


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
    """Finds one job that is still stored, with its ``result`` if it has ended. Blocks; raises nothing."""
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
    """The exception history, which is for display only: a job runs on without it."""
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
