"""The coordinator's storage effects, carried out with the real storage layer on simulated files.

Each call is one step that the scheduler takes when it likes; it may fail, and an outcome may be unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.jobmaster.snapshot_clean_up import JobCleanUp, delete_file_of, delete_location, delete_shared_file
from ckpt_runtime.jobmaster.snapshot_leftovers import find_unused_shared_files
from ckpt_runtime.snapshots.snapshot import disposal_of
from ckpt_runtime.storage.checkpoint_pointer_store import FIRST_CHECKPOINT_ID
from ckpt_runtime.storage.checkpoint_storage import CheckpointStorage, initialize_savepoint
from ckpt_runtime.storage.disposal import (
    SnapshotDisposal,
    delete_checkpoint,
)
from ckpt_runtime.storage.errors import (
    AmbiguousWriteError,
    CorruptFileError,
    InvalidLocationError,
    NotFoundError,
    StorageError,
)
from ckpt_runtime.storage.filesystem import check_directory, resolve
from ckpt_runtime.storage.snapshot_metadata import has_metadata, write_metadata

if TYPE_CHECKING:
    from tests.simulation.jobs.job_master import JobMaster

_SETTLED = (NotFoundError, InvalidLocationError, CorruptFileError)


class StorageShell:
    """One job's; modelled on ``jobmaster/checkpoint_shell.py``, with deletions that are repeated until they succeed."""

    def __init__(self, master: JobMaster, storage: CheckpointStorage) -> None:
        self._master = master
        self._world = master.world
        self._storage = storage
        self._world.files.make_directories(storage.shared.path)
        self._deleting = 0
        self._keeps_nothing: bool | None = None
        self._disposals: dict[int, SnapshotDisposal] = {}

    def execute(self, effect: out.Effect) -> None:
        match effect:
            case out.InitializeLocation():
                self._answer(self._initialize, effect)
            case out.WriteMetadata(checkpoint):
                self._answer(self._write_metadata, checkpoint)
            case out.ResolveMetadata(checkpoint, _):
                self._answer(self._resolve_metadata, checkpoint)
            case out.AddToStore(checkpoint, owned):
                self._answer(self._add_pointer, checkpoint, owned)
            case out.ResolveStore(checkpoint, _, owned):
                self._answer(self._resolve_pointer, checkpoint, owned)
            case out.RemoveFromStore(checkpoint_id, _, discards):
                self._answer(self._remove_pointer, checkpoint_id, discards)
            case out.FindLeftovers(below):
                self._answer(self._find_leftovers, below)
            case _:
                self._delete(effect)

    def _answer(self, call: Callable[..., on.CoordinatorEvent | None], *arguments: Any) -> None:
        def answer() -> None:
            event = call(*arguments)
            if event is not None:
                self._master.tell(event)

        self._world.asynchronously("storage", answer)

    # --- writes

    def _initialize(self, effect: out.InitializeLocation) -> on.CoordinatorEvent:
        if self._world.choices.fault("no location", 0.01):
            return on.LocationFailed(effect.checkpoint_id, "simulated")
        shared = ""
        try:
            if effect.properties.is_savepoint:
                target = effect.target_directory or ""
                token = f"{self._master.number:06x}{effect.checkpoint_id:06x}"
                location = initialize_savepoint(target, self._master.job_id, lambda: token)
            else:
                location = self._storage.initialize_checkpoint(effect.checkpoint_id)
                shared = self._storage.shared.url
        except StorageError as error:
            return on.LocationFailed(effect.checkpoint_id, str(error))
        return on.LocationReady(effect.checkpoint_id, location.url, shared)

    def _write_metadata(self, checkpoint: CompletedCheckpoint) -> on.CoordinatorEvent:
        try:
            write_metadata(resolve(checkpoint.directory), checkpoint.to_json())
        except AmbiguousWriteError as error:
            return on.MetadataUnknown(checkpoint.id, str(error))
        except StorageError as error:
            return on.MetadataFailed(checkpoint.id, str(error))
        return on.MetadataWritten(checkpoint.id)

    def _find_leftovers(self, below: int | None) -> on.CoordinatorEvent | None:
        """Looks until storage answers. There is no earlier driver; workers that died may have left something."""
        if below is None or self._master.closed:
            return on.LeftoversFound(())
        retained = self._master.coordinator.retained
        states = [state for entry in retained for state in entry.checkpoint.states.values()]
        try:
            check_directory(self._storage.location)
            return on.LeftoversFound((), find_unused_shared_files(self._storage, range(1, below), states))
        except StorageError:
            self._answer(self._find_leftovers, below)
            return None

    def _resolve_metadata(self, checkpoint: CompletedCheckpoint) -> on.CoordinatorEvent:
        directory = resolve(checkpoint.directory)
        try:
            check_directory(directory.parent)
            if not has_metadata(directory):
                write_metadata(directory, checkpoint.to_json())
        except _SETTLED as error:
            return on.MetadataFailed(checkpoint.id, str(error))
        except StorageError as error:
            return on.MetadataUnknown(checkpoint.id, str(error))
        return on.MetadataWritten(checkpoint.id)

    # --- pointers

    def _add_pointer(self, checkpoint: CompletedCheckpoint, owned: bool) -> on.CoordinatorEvent:
        choices = self._world.choices
        if choices.fault("no pointer", 0.01):
            return on.StoreFailed(checkpoint.id, "simulated")
        happens = not choices.fault("pointer unknown and absent", 0.005)
        if happens:
            self._world.snapshots.point_to(self._master, checkpoint)
        if not happens or choices.fault("pointer unknown", 0.01):
            return on.StoreUnknown(checkpoint.id, "simulated")
        return on.StoreAdded(checkpoint.id)

    def _resolve_pointer(self, checkpoint: CompletedCheckpoint, owned: bool) -> on.CoordinatorEvent:
        self._world.snapshots.point_to(self._master, checkpoint)
        return on.StoreAdded(checkpoint.id)

    def _remove_pointer(self, checkpoint_id: int, discards: str | None) -> on.CoordinatorEvent:
        if self._world.choices.fault("removal fails", 0.01):
            return on.StoreRemoveFailed(checkpoint_id, "simulated")
        if discards is not None and resolve(discards) != self._storage.checkpoint(checkpoint_id):
            with suppress(*_SETTLED):
                try:
                    self._disposals[checkpoint_id] = disposal_of(discards)
                except StorageError as error:
                    if not isinstance(error, _SETTLED):
                        return on.StoreRemoveFailed(checkpoint_id, str(error))
                    raise
        self._world.snapshots.forget(self._master, checkpoint_id, retained=discards is None)
        return on.StoreRemoved(checkpoint_id)

    # --- deletions

    def _delete(self, effect: out.Effect) -> None:
        match effect:
            case out.DiscardCheckpoint(checkpoint):
                self._repeat(lambda: self._discard(checkpoint), on.CleanupDone(checkpoint.id))
            case out.DiscardLocation(checkpoint_id, directory):
                self._repeat(lambda: delete_location(directory), on.CleanupDone(checkpoint_id))
            case out.DiscardState(_, directory, state):
                for file in state.files():
                    self._repeat(lambda path=file.path: delete_file_of(directory, path))  # type: ignore[misc]
            case out.DeleteSharedFiles(paths):
                for path in paths:
                    self._repeat(lambda path=path: delete_shared_file(self._storage, path))  # type: ignore[misc]
            case _:
                raise AssertionError(effect)

    def _discard(self, checkpoint: CompletedCheckpoint) -> None:
        if resolve(checkpoint.directory) == self._storage.checkpoint(checkpoint.id):
            delete_checkpoint(self._storage, checkpoint.id)
            return
        disposal = self._disposals.get(checkpoint.id)
        (disposal or disposal_of(checkpoint.directory)).execute()

    def _repeat(self, call: Callable[[], None], answer: on.CoordinatorEvent | None = None) -> None:
        """The coordinator goes on after the first attempt; the deletion is repeated until it succeeds."""
        self._deleting += 1
        self._world.asynchronously("deletion", self._attempt, call, answer)

    def _attempt(self, call: Callable[[], None], answer: on.CoordinatorEvent | None) -> None:
        try:
            call()
            self._deleting -= 1
        except _SETTLED:
            self._deleting -= 1
        except StorageError:
            self._world.asynchronously("deletion", self._attempt, call, None)
        if answer is not None and not self._master.closed:
            self._master.tell(answer)
        self._finish_when_done()

    def finish(self, keeps_nothing: bool) -> None:
        """After the coordinator's shutdown: deletions end, then the job's directory goes as the real shell does it."""
        self._keeps_nothing = keeps_nothing
        self._finish_when_done()

    def _finish_when_done(self) -> None:
        if self._keeps_nothing is None or self._deleting or self._master.closed:
            return
        self._master.closed = True
        clean_up = JobCleanUp(self._storage, FIRST_CHECKPOINT_ID, self._keeps_nothing, directory_known=True)
        self._world.asynchronously("deletion", self._clean_up, clean_up)

    def _clean_up(self, clean_up: JobCleanUp) -> None:
        try:
            clean_up()
        except StorageError:
            self._world.asynchronously("deletion", self._clean_up, clean_up)
            return
        self._world.job_closed(self._master)
