"""Stores a submitted job in the high-availability directory before its submission is acknowledged. Blocking calls."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace

from ckpt_runtime.jobmaster.gateway_errors import NotReady
from ckpt_runtime.jobmaster.submission import JobSubmission
from ckpt_runtime.storage.errors import AlreadyExistsError, AmbiguousWriteError, StorageError
from ckpt_runtime.storage.ha_store import HaStore
from ckpt_runtime.storage.job_store import StoredJob

logger = logging.getLogger(__name__)

_ATTEMPTS = 5
_PAUSE_S = 0.2


def store_job(store: HaStore, submission: JobSubmission, first_checkpoint_id: int) -> None:
    """Stores a new job. An unknown outcome is settled by storing it again, which detects an existing copy.

    Raises NotReady when the job is not stored (then it leaves no trace), when that is unknown, or when another driver
    may have looked for jobs before this one was stored.
    """
    job = submission.to_stored(first_checkpoint_id)
    unknown: StorageError | None = None
    for attempt in range(_ATTEMPTS):
        time.sleep(_PAUSE_S * attempt)
        try:
            if store.results.has(job.job_id):
                raise NotReady(f"job {job.job_id} has ended before; choose another id")
            store.jobs.put(job, submission.archive)
            break
        except AlreadyExistsError as error:
            if unknown is not None and _is_same(store.jobs.get(job.job_id), job):
                break
            raise NotReady(f"job {job.job_id} is stored already: {error}") from error
        except AmbiguousWriteError as error:
            unknown = error
        except StorageError as error:
            if unknown is None:
                raise NotReady(f"the job could not be stored: {error}") from error
    else:
        raise NotReady(
            f"it is unknown whether job {job.job_id} is stored; if it is, the next driver runs it: {unknown}"
        ) from unknown
    try:
        store.fence()  # a successor that looked for jobs before this one was stored does not run it
    except StorageError as error:
        raise NotReady(f"job {job.job_id} is stored, but this driver may not run it: {error}") from error


def _is_same(stored: StoredJob, job: StoredJob) -> bool:
    """Compares the JSON forms, in which tuples are lists."""
    expected = replace(job, epoch=stored.epoch, archive_checksum=stored.archive_checksum)
    return json.dumps(stored.to_json(), sort_keys=True) == json.dumps(expected.to_json(), sort_keys=True)


def forget_result(store: HaStore, job_id: str) -> None:
    """Drops the result of a job that ended long ago; if that fails, the next driver finds the result."""
    try:
        if job_id not in store.jobs.list_ids():
            store.results.remove(job_id)
    except StorageError as error:
        logger.warning("cannot forget the result of job %s: %s", job_id, error)
