"""The submission requests by job id: the same request twice starts one job, and a retired id starts none.

A request to start a job may be delayed for a long time. A client that gives up on it and is about to start another job
in its place retires the job id first: from then on no job starts under that id, on this driver or, with high
availability, on a later one. An id is retired only while no job lives under it: no running job has a retired id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Executor
from functools import partial

from ckpt_runtime.jobmaster.gateway_errors import Conflict, JobAlreadyExists, NotReady
from ckpt_runtime.jobmaster.gateway_values import RunRequest
from ckpt_runtime.storage.errors import StorageError
from ckpt_runtime.storage.ha_store import RetiredIdStore


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
        self._submitting: dict[str, asyncio.Future[None]] = {}
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

        Raises JobAlreadyExists, JobIdRetired, and what submit raises.
        """
        self.check_not_retired(job_id)
        known = self._requests.get(job_id)
        if known is not None:
            if known != request:
                raise JobAlreadyExists(job_id)
            submitting = self._submitting.get(job_id)
            if submitting is not None:
                # Shielded: a waiter that gives up must not cancel the first caller's submission.
                await asyncio.shield(submitting)
            return
        # Before anything is awaited: an identical request that arrives in the meantime must find it.
        self._requests[job_id] = request
        done = self._submitting[job_id] = asyncio.get_running_loop().create_future()
        try:
            await submit(job_id, request)
        except BaseException as error:
            del self._requests[job_id]
            done.set_exception(error)
            # Retrieved, or the loop would report an exception that was never awaited.
            done.exception()
            raise
        finally:
            del self._submitting[job_id]
            if not done.done():
                done.set_result(None)

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
