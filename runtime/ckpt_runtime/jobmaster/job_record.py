"""The durable state of a job, kept in the high-availability directory, or not at all without one.

A new job is stored before its submission is acknowledged.

Every call blocks and belongs in a pool thread; each raises StorageError (AmbiguousWriteError when the outcome is
unknown) and NotLeaderError once another driver leads. In that case the change may have been made, but the caller must
not act on it: only the new leader may change the job's state.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.configuration import CheckpointConfigurationError, OverridesChange
from ckpt_runtime.configuration.configuration import OwnConfiguration
from ckpt_runtime.configuration.registry import INTERNAL_PREFIX, JOB_CHECKPOINT_OVERRIDES
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.jobmaster.gateway_values import NotReady
from ckpt_runtime.scheduler import core_events as core
from ckpt_runtime.scheduler.core_events import JobInput
from ckpt_runtime.storage.checkpoint_pointer_store import CheckpointPointer
from ckpt_runtime.storage.checkpoint_storage import SnapshotDisposal
from ckpt_runtime.storage.driver_pools import crash_point
from ckpt_runtime.storage.errors import (
    AlreadyExistsError,
    AmbiguousWriteError,
    NotFoundError,
    NotLeaderError,
    StorageError,
)
from ckpt_runtime.storage.ha_store import HaStore
from ckpt_runtime.storage.job_store import StoredJob

logger = logging.getLogger(__name__)


class JobRecord:
    """One job's durable state. This base class is for a job that no later driver recovers: it writes nothing."""

    def __init__(self) -> None:
        self._overrides: str | None = None

    @property
    def cluster(self) -> str | None:
        """The URL of the cluster's high-availability directory; None without one."""
        return None

    def check(self) -> None:
        """Raises NotLeaderError when this driver may no longer change anything of the job."""

    def reserve(self, checkpoint_id: int) -> None:
        """Reserves an id that no later driver reuses. Called before any part of the checkpoint exists."""

    def begin_attempt(self, attempt: int) -> None:
        """Reserves an attempt number that no later driver reuses: sinks recognise leftovers of other attempts by it."""

    def keep_savepoint(self, checkpoint_id: int) -> None:
        """Records a savepoint owned by the user: later drivers keep the files that sinks have hidden for it."""

    def add(self, checkpoint: CompletedCheckpoint, owned: bool) -> None:
        """Adds the pointer that makes a checkpoint restorable. It may be added repeatedly."""

    def contains(self, checkpoint_id: int) -> bool:
        """Whether the checkpoint has a pointer."""
        return True

    def remove(self, checkpoint_id: int, disposal: SnapshotDisposal | None = None) -> None:
        """Removes a pointer, if present. A later driver finds ``disposal`` until it is settled."""

    def settle(self, checkpoint_id: int) -> None:
        """Records that the disposal that was stored with the removal is done, if there is one."""

    def expect_savepoint(self, checkpoint_id: int, directory: str) -> None:
        """Makes later drivers delete this directory if the savepoint is incomplete. Called before it is created."""

    def settle_savepoint(self, checkpoint_id: int) -> None:
        """Records that the savepoint is complete, or gone for good. Does nothing if none was expected."""

    def change_overrides(self, change: OverridesChange) -> str | None:
        """Fetches, modifies and writes under one lock; returns what is stored now. Raises as ``change``."""
        self._overrides = change(self._overrides)
        return self._overrides

    def settle_overrides(self) -> str | None:
        """Rewrites the stored overrides and returns them: after that no earlier write can take effect."""
        return self._overrides

    def store_plan(self, graph: JobGraph, own: OwnConfiguration) -> None:
        """Stores the graph and configuration that later drivers run: either both change, or neither."""

    def settle_plan(self, graph: JobGraph, own: OwnConfiguration) -> bool:
        """As :meth:`settle_overrides`; returns whether both are stored."""
        return True

    def keep_failures(self, failures: Sequence[Mapping[str, Any]]) -> None:
        """Replaces the exception history that a later driver shows."""

    def end(self, result: Mapping[str, Any]) -> None:
        """Stores the result of the job, so that no driver runs it again. It may be stored repeatedly."""

    def forget(self) -> None:
        """The last step: deletes everything but the result."""


class DurableRecord(JobRecord):
    """A job in the high-availability directory. The fence is checked before each write, and again after it."""

    def __init__(self, store: HaStore, job_id: str) -> None:
        """Does not access storage."""
        self._store = store
        self._job_id = job_id
        self._pointers = store.pointers(job_id)
        self._counters = store.counters(job_id)

    @property
    def cluster(self) -> str | None:
        return self._store.root.url

    def check(self) -> None:
        self._store.fence()

    def reserve(self, checkpoint_id: int) -> None:
        with self._writing():
            self._counters.reserve_checkpoint(checkpoint_id)

    def begin_attempt(self, attempt: int) -> None:
        with self._writing():
            self._counters.reserve_attempt(attempt)

    def keep_savepoint(self, checkpoint_id: int) -> None:
        with self._writing():
            self._counters.keep_savepoint(checkpoint_id)

    def add(self, checkpoint: CompletedCheckpoint, owned: bool) -> None:
        with self._writing():
            self._pointers.add(checkpoint.id, CheckpointPointer(checkpoint.directory, owned))

    def contains(self, checkpoint_id: int) -> bool:
        with self._writing():
            return checkpoint_id in self._pointers.list()

    def remove(self, checkpoint_id: int, disposal: SnapshotDisposal | None = None) -> None:
        with self._writing():
            self._pointers.remove(checkpoint_id, None if disposal is None else disposal.to_json())

    def settle(self, checkpoint_id: int) -> None:
        with self._writing():
            self._pointers.settle(checkpoint_id)

    def expect_savepoint(self, checkpoint_id: int, directory: str) -> None:
        with self._writing():
            self._pointers.expect_savepoint(checkpoint_id, directory)

    def settle_savepoint(self, checkpoint_id: int) -> None:
        with self._writing():
            self._pointers.settle_savepoint(checkpoint_id)

    def change_overrides(self, change: OverridesChange) -> str | None:
        def changed(job: StoredJob) -> StoredJob:
            configuration = dict(job.configuration)
            text = change(configuration.pop(JOB_CHECKPOINT_OVERRIDES, None))
            if text is not None:
                configuration[JOB_CHECKPOINT_OVERRIDES] = text
            return replace(job, configuration=configuration)

        with self._writing():
            return self._store.jobs.update(self._job_id, changed).checkpoint_overrides

    def settle_overrides(self) -> str | None:
        with self._writing():
            return self._store.jobs.update(self._job_id, lambda job: job, always=True).checkpoint_overrides

    def store_plan(self, graph: JobGraph, own: OwnConfiguration) -> None:
        with self._writing():
            self._store.jobs.update(self._job_id, lambda job: with_plan(job, graph, own))

    def settle_plan(self, graph: JobGraph, own: OwnConfiguration) -> bool:
        with self._writing():
            stored = self._store.jobs.update(self._job_id, lambda job: job, always=True)
        return stored.version == own.version and JobGraph.from_json(stored.graph) == graph

    def keep_failures(self, failures: Sequence[Mapping[str, Any]]) -> None:
        with self._writing():
            self._store.failures(self._job_id).change(lambda _: {"entries": [dict(entry) for entry in failures]})

    def end(self, result: Mapping[str, Any]) -> None:
        with self._writing():
            try:
                self._store.results.create_dirty(self._job_id, result)
            except AlreadyExistsError:
                logger.info("the result of job %s was already stored", self._job_id)

    def forget(self) -> None:
        with self._writing():
            self._store.jobs.remove(self._job_id)
            crash_point("forget-half")
            try:
                self._store.results.mark_clean(self._job_id)
            except NotFoundError:
                logger.info("the result of job %s was already forgotten", self._job_id)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Checks the fence after a write, or after reading one: the driver may have been paused during it."""
        yield
        try:
            self._store.fence()
        except NotLeaderError:
            raise
        except StorageError as error:
            message = f"the change was stored, but it is uncertain whether this driver is still the leader: {error}"
            raise AmbiguousWriteError(message, error.url, error) from error


def with_plan(job: StoredJob, graph: JobGraph, own: OwnConfiguration) -> StoredJob:
    """The job with a new plan. Internal options stay; a removed option must be in no copy that a driver reads."""
    internal = {key: value for key, value in job.configuration.items() if key.startswith(INTERNAL_PREFIX)}
    return replace(
        job,
        graph=graph.to_json(),
        configuration={**own.given.to_dict(), **internal},
        version=own.version,
        notes=own.notes,
        properties={**job.properties, "defaults": cluster_options(job)},
    )


def cluster_options(job: StoredJob) -> dict[str, str]:
    """The cluster's options at the time of the job's submission.

    Earlier versions stored them merged with the job's own. Keys that the job sets are left out: the cluster's value
    for them is unknown.
    """
    stored = job.properties.get("defaults")
    if stored is not None:
        return dict(stored)
    mixed = job.properties.get("cluster_configuration", {})
    return {key: value for key, value in mixed.items() if key not in job.configuration}


_ATTEMPTS = 5
_PAUSE_S = 0.2


def store_job(store: HaStore, job: StoredJob, archive: bytes) -> None:
    """Stores a new job. An unknown outcome is settled by storing it again, which detects an existing copy.

    Raises NotReady when the job is not stored (then it leaves no trace), when that is unknown, or when another driver
    may have looked for jobs before this one was stored.
    """
    unknown: StorageError | None = None
    for attempt in range(_ATTEMPTS):
        time.sleep(_PAUSE_S * attempt)
        try:
            if store.results.has(job.job_id):
                raise NotReady(f"job {job.job_id} has already ended; choose another id")
            store.jobs.put(job, archive)
            break
        except AlreadyExistsError as error:
            if unknown is not None and _is_same(store.jobs.get(job.job_id), job):
                break
            raise NotReady(f"job {job.job_id} is already stored: {error}") from error
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


UNKNOWN_PAUSE_MS = 200.0
_SETTLE_PAUSE_MS = 30_000.0

Order = core.StoreOverrides | core.SettleOverrides | core.StorePlan | core.SettlePlan


def carry_out(record: JobRecord, order: Order) -> JobInput:
    """Makes the change; call it in a pool thread. Raises NotLeaderError, and errors that :func:`unconfirmed` maps."""
    match order:
        case core.StoreOverrides(request_id, change):
            crash_point("patch-before")
            text = record.change_overrides(change)
            crash_point("patch-persisted")
            return core.OverridesStored(request_id, text)
        case core.SettleOverrides(request_id):
            return core.OverridesStored(request_id, record.settle_overrides())
        case core.StorePlan(request_id, graph, own):
            crash_point("plan-before")
            record.store_plan(graph, own)
            crash_point("plan-persisted")
            return core.PlanStored(request_id)
        case core.SettlePlan(request_id, graph, own):
            if record.settle_plan(graph, own):
                return core.PlanStored(request_id)
            return core.ChangeNotStored(request_id, "it was not stored", final=True)


def unconfirmed(order: Order, error: Exception) -> JobInput:
    """Maps an error of :func:`carry_out`, or of its pool, to an event."""
    match error:
        case CheckpointConfigurationError():
            return core.OverridesRefused(order.request_id, str(error))
        case AmbiguousWriteError():
            return core.ChangeUnknown(order.request_id, str(error))
        case StorageError():
            text = f"the change could not be stored, and nothing has changed: {error}"
            return core.ChangeNotStored(order.request_id, text, final=isinstance(error, NotFoundError))
    return core.ChangeUnknown(order.request_id, str(error))


def pause_before_ms(order: Order) -> float:
    """The pause in milliseconds, longer with each attempt; settling an unknown outcome may take longer."""
    if isinstance(order, core.StoreOverrides | core.StorePlan):
        return order.attempt * UNKNOWN_PAUSE_MS
    return float(min(_SETTLE_PAUSE_MS, UNKNOWN_PAUSE_MS * 2 ** min(order.attempt + 1, 10)))
