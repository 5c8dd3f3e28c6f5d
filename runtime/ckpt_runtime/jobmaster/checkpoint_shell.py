"""Runs the pure checkpoint coordinator: executes its effects (timers, storage, messages) and feeds the answers back.

One event loop; blocking storage calls go to a pool thread and come back as events. What a storage error means for the
protocol is decided here once: certainly failed, or unknown.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any, Protocol

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.coordinator import CheckpointCoordinator
from ckpt_runtime.checkpoint.effects import Effect
from ckpt_runtime.checkpoint.events import CoordinatorEvent, TimerId
from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.properties import CheckpointOptions
from ckpt_runtime.storage.checkpoint_storage import CheckpointStorage, initialize_savepoint
from ckpt_runtime.storage.disposal import (
    delete_checkpoint,
    delete_job_directory,
    delete_state_file,
    dispose_snapshot,
)
from ckpt_runtime.storage.errors import AmbiguousWriteError, StorageError
from ckpt_runtime.storage.filesystem import Location, delete_tree, resolve
from ckpt_runtime.storage.snapshot_metadata import has_metadata, write_metadata
from ckpt_runtime.storage.state_file_reader import locate

logger = logging.getLogger(__name__)

_RETRY_BASE_S = 0.2
_RETRY_MAX_S = 30.0


class CheckpointPointers(Protocol):
    """The durable list of retained checkpoints. Blocking; raises StorageError (AmbiguousWriteError when unknown)."""

    def add(self, checkpoint: CompletedCheckpoint, owned: bool) -> None: ...

    def contains(self, checkpoint_id: int) -> bool: ...

    def remove(self, checkpoint_id: int) -> None: ...


class NoPointers:
    """Without high availability a new driver recovers nothing, so there is nothing to point at."""

    def add(self, checkpoint: CompletedCheckpoint, owned: bool) -> None:
        return

    def contains(self, checkpoint_id: int) -> bool:
        return True

    def remove(self, checkpoint_id: int) -> None:
        return


class CheckpointListener(Protocol):
    """The job master: what reaches it of the coordinator's decisions."""

    def send_trigger(
        self, checkpoint_id: int, timestamp: int, options: CheckpointOptions, tasks: tuple[ExecutionId, ...]
    ) -> None: ...

    def send_complete(self, checkpoint_id: int, tasks: tuple[ExecutionId, ...]) -> None: ...

    def send_aborted(self, checkpoint_id: int, latest_completed: int, tasks: tuple[ExecutionId, ...]) -> None: ...

    def checkpoint_answer(self, effect: Effect) -> None:
        """RequestCompleted, RequestFailed, RestoreFrom, RestoreFailed, FailJob or ShutdownComplete."""


def present_instant() -> Instant:
    """Now, on the monotonic and on the wall clock."""
    return Instant(time.monotonic_ns() // 1_000_000, time.time_ns() // 1_000_000)


class CheckpointShell:
    """One job's coordinator with its clock, storage and listener."""

    def __init__(
        self,
        job_id: str,
        coordinator: CheckpointCoordinator,
        storage: CheckpointStorage,
        pointers: CheckpointPointers,
        listener: CheckpointListener,
        pool: Executor,
    ) -> None:
        self.coordinator = coordinator
        self._job_id = job_id
        self._storage = storage
        self._pointers = pointers
        self._listener = listener
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._timers: dict[TimerId, asyncio.TimerHandle] = {}
        self._closed = False

    def handle(self, event: CoordinatorEvent) -> None:
        """Hands one event to the coordinator and starts what it decides."""
        for effect in self.coordinator.handle(event, present_instant()):
            self._execute(effect)

    def prepare_storage(self) -> None:
        """Makes the job's checkpoint directory, in a pool thread. Raises StorageError when it cannot be used."""
        self._storage.initialize()

    def finish(self, *, clean_up: bool) -> None:
        """Closes after the coordinator has shut down.

        ``clean_up`` only for a job that never runs again: another driver may be writing a suspended one's checkpoints.
        """
        if clean_up:
            what = f"clean up {self._storage.location.url}"
            self._loop.run_in_executor(self._pool, _best_effort, what, self._clean_up)
        self.close()

    def close(self) -> None:
        """Drops timers; storage answers that still come are ignored."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _execute(self, effect: Effect) -> None:
        match effect:
            case out.ScheduleTimer(timer, generation, at_rel_ms):
                self._schedule(timer, generation, at_rel_ms)
            case out.CancelTimer(timer):
                handle = self._timers.pop(timer, None)
                if handle is not None:
                    handle.cancel()
            case out.TriggerSources():
                self._listener.send_trigger(effect.checkpoint_id, effect.timestamp, effect.options, effect.tasks)
            case out.NotifyComplete():
                self._listener.send_complete(effect.checkpoint_id, effect.tasks)
            case out.NotifyAborted():
                self._listener.send_aborted(effect.checkpoint_id, effect.latest_completed, effect.tasks)
            case (
                out.RequestCompleted()
                | out.RequestFailed()
                | out.RestoreFrom()
                | out.RestoreFailed()
                | out.FailJob()
                | out.ShutdownComplete()
            ):
                self._listener.checkpoint_answer(effect)
            case _:
                self._execute_io(effect)

    def _execute_io(self, effect: Effect) -> None:
        match effect:
            case out.InitializeLocation():
                self._in_pool(lambda: self._initialize(effect))
            case out.WriteMetadata(checkpoint):
                self._in_pool(lambda: self._write_metadata(checkpoint))
            case out.ResolveMetadata(checkpoint, attempt):
                self._in_pool(lambda: self._resolve_metadata(checkpoint), _backoff(attempt))
            case out.AddToStore(checkpoint, owned):
                self._in_pool(lambda: self._add_pointer(checkpoint, owned))
            case out.ResolveStore(checkpoint, attempt, owned):
                self._in_pool(lambda: self._resolve_pointer(checkpoint, owned), _backoff(attempt))
            case out.RemoveFromStore(checkpoint_id, attempt):
                self._in_pool(lambda: self._remove_pointer(checkpoint_id), _backoff(attempt))
            case out.DiscardCheckpoint(checkpoint):
                self._in_pool(lambda: self._discard_checkpoint(checkpoint))
            case out.DiscardLocation(checkpoint_id, directory):
                self._in_pool(lambda: self._discard_location(checkpoint_id, directory))
            case out.DiscardState():
                self._in_pool(lambda: self._discard_state(effect))
            case out.DeleteSharedFiles(paths):
                self._in_pool(lambda: self._delete_shared(paths))

    def _schedule(self, timer: TimerId, generation: int, at_rel_ms: int) -> None:
        known = self._timers.pop(timer, None)
        if known is not None:
            known.cancel()
        delay = max(0.0, (at_rel_ms - present_instant().rel_ms) / 1000)
        self._timers[timer] = self._loop.call_later(delay, self._fire, timer, generation)

    def _fire(self, timer: TimerId, generation: int) -> None:
        self._timers.pop(timer, None)
        self.handle(on.TimerFired(timer, generation))

    def _in_pool(self, call: Callable[[], CoordinatorEvent | None], delay_s: float = 0.0) -> None:
        if delay_s:
            self._loop.call_later(delay_s, self._in_pool, call)
            return
        if self._closed:
            return
        future = self._loop.run_in_executor(self._pool, call)
        future.add_done_callback(self._answered)

    def _answered(self, future: asyncio.Future[CoordinatorEvent | None]) -> None:
        if self._closed or future.cancelled():
            return
        event = future.result()
        if event is not None:
            self.handle(event)

    # Pool threads, from here on. Each returns its answer as an event whatever goes wrong: the coordinator waits for it.

    def _initialize(self, effect: out.InitializeLocation) -> CoordinatorEvent:
        try:
            if effect.properties.is_savepoint:
                location = initialize_savepoint(effect.target_directory or "", self._job_id)
            else:
                location = self._storage.initialize_checkpoint(effect.checkpoint_id)
        except Exception as error:
            return on.LocationFailed(effect.checkpoint_id, str(error))
        return on.LocationReady(effect.checkpoint_id, location.url)

    def _write_metadata(self, checkpoint: CompletedCheckpoint) -> CoordinatorEvent:
        try:
            write_metadata(resolve(checkpoint.directory), checkpoint.to_json())
        except AmbiguousWriteError as error:
            return on.MetadataUnknown(checkpoint.id, str(error))
        except Exception as error:
            return on.MetadataFailed(checkpoint.id, str(error))
        return on.MetadataWritten(checkpoint.id)

    def _resolve_metadata(self, checkpoint: CompletedCheckpoint) -> CoordinatorEvent:
        try:
            if has_metadata(resolve(checkpoint.directory)):
                return on.MetadataWritten(checkpoint.id)
        except StorageError as error:
            return on.MetadataUnknown(checkpoint.id, str(error))
        return self._write_metadata(checkpoint)

    def _add_pointer(self, checkpoint: CompletedCheckpoint, owned: bool) -> CoordinatorEvent:
        try:
            self._pointers.add(checkpoint, owned)
        except AmbiguousWriteError as error:
            return on.StoreUnknown(checkpoint.id, str(error))
        except Exception as error:
            return on.StoreFailed(checkpoint.id, str(error))
        return on.StoreAdded(checkpoint.id)

    def _resolve_pointer(self, checkpoint: CompletedCheckpoint, owned: bool) -> CoordinatorEvent:
        try:
            if self._pointers.contains(checkpoint.id):
                return on.StoreAdded(checkpoint.id)
        except StorageError as error:
            return on.StoreUnknown(checkpoint.id, str(error))
        return self._add_pointer(checkpoint, owned)

    def _remove_pointer(self, checkpoint_id: int) -> CoordinatorEvent:
        try:
            self._pointers.remove(checkpoint_id)
        except Exception as error:
            return on.StoreRemoveFailed(checkpoint_id, str(error))
        return on.StoreRemoved(checkpoint_id)

    def _discard_checkpoint(self, checkpoint: CompletedCheckpoint) -> CoordinatorEvent:
        def discard() -> None:
            own = self._storage.checkpoint(checkpoint.id)
            if resolve(checkpoint.directory) == own:
                delete_checkpoint(self._storage, checkpoint.id)
            else:
                dispose_snapshot(checkpoint.directory)

        _best_effort(f"discard checkpoint {checkpoint.id}", discard)
        return on.CleanupDone(checkpoint.id)

    def _discard_location(self, checkpoint_id: int, directory: str) -> CoordinatorEvent:
        _best_effort(f"discard {directory}", lambda: delete_tree(resolve(directory)))
        return on.CleanupDone(checkpoint_id)

    def _discard_state(self, effect: out.DiscardState) -> None:
        directory = resolve(effect.directory)
        for file in effect.state.files():
            _best_effort(f"delete {file.path}", partial(_delete_file, directory, file.path))

    def _clean_up(self) -> None:
        """Deletes what aborted checkpoints left behind while storage failed, then the directory, if it is empty."""
        for checkpoint_id in self._storage.list_checkpoints():
            if not has_metadata(self._storage.checkpoint(checkpoint_id)):
                delete_checkpoint(self._storage, checkpoint_id)
        delete_job_directory(self._storage)

    def _delete_shared(self, paths: tuple[str, ...]) -> None:
        for path in paths:
            _best_effort(f"delete {path}", partial(delete_state_file, self._storage.location, resolve(path)))


def _delete_file(directory: Location, path: str) -> None:
    delete_state_file(directory, locate(directory, path))


def _backoff(attempt: int) -> float:
    return 0.0 if attempt <= 0 else min(_RETRY_MAX_S, _RETRY_BASE_S * 2 ** (attempt - 1))


def _best_effort(what: str, action: Callable[[], Any]) -> None:
    """Deletions that fail leave files, never a wrong state; they are logged with their names."""
    try:
        action()
    except OSError as error:
        logger.warning("could not %s: %s", what, error)
