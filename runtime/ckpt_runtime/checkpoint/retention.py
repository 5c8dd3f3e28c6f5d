"""Decides which checkpoints are kept and when checkpoints, shared files and leftovers are deleted. Pure.

Owns the retained checkpoints, the registry of shared files and the order of deletions: first the pointer, which is in
the high-availability directory, and the files only after it is certainly removed. Pending checkpoints are not its
concern.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import (
    CompletedCheckpoint,
    SharedStateConflictError,
    SharedStateRegistry,
)
from ckpt_runtime.checkpoint.configuration import SettingsInForce
from ckpt_runtime.checkpoint.effects import DiscardCheckpoint, DiscardLocation, Effect, RemoveFromStore
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.statistics import CheckpointStatsTracker


@dataclass(frozen=True, slots=True)
class RetainedCheckpoint:
    """``owned``: its files are deleted when it is subsumed. A savepoint restored with NO_CLAIM is not owned."""

    checkpoint: CompletedCheckpoint
    owned: bool = True


_Discard = DiscardCheckpoint | DiscardLocation


class UnexpectedAnswerError(LookupError):
    """The storage answered a request that is not in progress. Nothing has changed."""


class CheckpointCleaner:
    """The only owner of deletions in the coordinator. Counts the checkpoints being cleaned: these delay triggers.

    ``emit`` takes the effects.
    """

    def __init__(self, emit: Callable[[Effect], None]) -> None:
        self._emit = emit
        self._removing: dict[int, tuple[_Discard | None, int]] = {}
        self._directories: dict[int, str] = {}
        self._deleting: Counter[int] = Counter()

    @property
    def busy(self) -> int:
        """How many checkpoints are being cleaned."""
        return len(self._removing) + self._deleting.total()

    @property
    def pointers_are_gone(self) -> bool:
        """Whether all pointers to the checkpoints being cleaned are certainly removed."""
        return not self._removing

    @property
    def pointed_to(self) -> tuple[str, ...]:
        """Directories of checkpoints whose pointers may still exist: the next driver would read them."""
        return tuple(self._directories.values())

    @property
    def retiring(self) -> tuple[int, ...]:
        """Checkpoints whose pointers may still exist, so none of their shared files is deleted yet."""
        return tuple(self._directories)

    def is_cleaning(self, checkpoint_id: int) -> bool:
        return checkpoint_id in self._removing or checkpoint_id in self._deleting

    def retire(self, checkpoint: CompletedCheckpoint, discard: bool) -> None:
        """Removes the pointer of a checkpoint and then, with ``discard``, its files."""
        self._directories[checkpoint.id] = checkpoint.directory
        self._remove(checkpoint.id, DiscardCheckpoint(checkpoint) if discard else None)

    def sweep(self, checkpoint_id: int, directory: str) -> None:
        """Deletes a leftover of an earlier driver, and the pointer that it may have written late."""
        self._remove(checkpoint_id, DiscardLocation(checkpoint_id, directory))

    def _remove(self, checkpoint_id: int, then: _Discard | None) -> None:
        self._removing[checkpoint_id] = (then, 0)
        self._emit(_removal(checkpoint_id, then, 0))

    def discard_location(self, checkpoint_id: int, directory: str) -> None:
        """Deletes the directory of an aborted checkpoint, which never had a pointer."""
        self._deleting[checkpoint_id] += 1
        self._emit(DiscardLocation(checkpoint_id, directory))

    def removed(self, checkpoint_id: int) -> None:
        """The pointer is removed. Raises :class:`UnexpectedAnswerError` if no removal was in progress."""
        discard, _ = self._removal_of(checkpoint_id)
        del self._removing[checkpoint_id]
        self._directories.pop(checkpoint_id, None)
        if discard is not None:
            self._deleting[checkpoint_id] += 1
            self._emit(discard)

    def remove_failed(self, checkpoint_id: int) -> None:
        """Tries the removal again. Raises :class:`UnexpectedAnswerError` if none was in progress."""
        discard, attempt = self._removal_of(checkpoint_id)
        self._removing[checkpoint_id] = (discard, attempt + 1)
        self._emit(_removal(checkpoint_id, discard, attempt + 1))

    def _removal_of(self, checkpoint_id: int) -> tuple[_Discard | None, int]:
        if checkpoint_id not in self._removing:
            raise UnexpectedAnswerError(checkpoint_id)
        return self._removing[checkpoint_id]

    def cleaned(self, checkpoint_id: int) -> None:
        """Files were deleted. Raises :class:`UnexpectedAnswerError` when nothing was being deleted."""
        if checkpoint_id not in self._deleting:
            raise UnexpectedAnswerError(checkpoint_id)
        self._deleting[checkpoint_id] -= 1
        self._deleting += Counter()  # drops zeros


def _removal(checkpoint_id: int, then: _Discard | None, attempt: int) -> RemoveFromStore:
    discards = then.checkpoint.directory if isinstance(then, DiscardCheckpoint) else None
    return RemoveFromStore(checkpoint_id, attempt, discards)


class Retention:
    """Owns the retained checkpoints, the savepoint that the job was restored from, and the savepoint of a stop.

    ``recovered`` come from an earlier driver, in any order; ``emit`` takes the effects. ``keeps_nothing`` is, after the
    end of the job, true if none of its checkpoints outlives it.
    """

    def __init__(
        self,
        job_id: str,
        in_force: SettingsInForce,
        recovered: Iterable[RetainedCheckpoint],
        statistics: CheckpointStatsTracker,
        emit: Callable[[Effect], None],
    ) -> None:
        self._job_id = job_id
        self._in_force = in_force
        self._stats = statistics
        self._emit = emit
        self._entries = sorted(recovered, key=lambda entry: entry.checkpoint.id)
        self._registry = SharedStateRegistry()
        self._cleaner = CheckpointCleaner(emit)
        self._fenced = False
        self._sought_leftovers = False
        self._searched_up_to = 0
        self._leftovers: tuple[tuple[int, str], ...] = ()
        self._leftover_shared: tuple[str, ...] = ()
        self._unused_shared: tuple[str, ...] = ()
        self._kept_shared: frozenset[str] | None = None
        self._outliving: frozenset[int] = frozenset()
        self._pinned: dict[int, int] = {}
        self.keeps_nothing = False
        for entry in self._entries:
            self._register_all(entry)

    @property
    def latest(self) -> CompletedCheckpoint | None:
        return self._entries[-1].checkpoint if self._entries else None

    @property
    def latest_id(self) -> int:
        """The id of the latest checkpoint; -1 if there is none."""
        return self._entries[-1].checkpoint.id if self._entries else -1

    @property
    def latest_is_owned(self) -> bool:
        """False after a restore from a snapshot that the user owns, until a checkpoint of this job is retained."""
        return not self._entries or self._entries[-1].owned

    @property
    def entries(self) -> tuple[RetainedCheckpoint, ...]:
        """The retained checkpoints, oldest first."""
        return tuple(self._entries)

    @property
    def directories(self) -> tuple[str, ...]:
        """Directories of the retained checkpoints and of those whose pointer may still exist."""
        return (*(entry.checkpoint.directory for entry in self._entries), *self._cleaner.pointed_to)

    @property
    def cleaning(self) -> int:
        """How many checkpoints are being cleaned."""
        return self._cleaner.busy

    def fence(self) -> None:
        """Another driver is the leader: from now on no file is touched."""
        self._fenced = True

    # --- state of tasks

    def register(self, event: on.Acknowledged) -> SharedStateConflictError | None:
        """Registers the shared files that an acknowledgement uses. Returns the conflict, if there is one."""
        try:
            self._registry.register(event.checkpoint_id, event.state)
        except SharedStateConflictError as error:
            return error
        return None

    def discard_state(self, event: on.Acknowledged) -> None:
        """Discards state that no checkpoint will use. Its shared files are deleted once they are unused."""
        if event.state.files():
            self._emit(out.DiscardState(event.checkpoint_id, event.directory, event.state))

    def discard_location(self, checkpoint_id: int, directory: str) -> None:
        """Deletes the directory of an aborted checkpoint."""
        if not self._fenced:
            self._cleaner.discard_location(checkpoint_id, directory)

    # --- savepoints that duplicate

    def pin(self, savepoint_id: int) -> None:
        """Protects shared files that existing or later checkpoints use from deletion until the savepoint has ended.

        This includes checkpoints being removed: a task may not know yet about the checkpoint that replaced them.
        """
        # 0 while nothing is retained: then no file is deleted at all.
        self._pinned[savepoint_id] = min((self._lowest_retained() or 0, *self._cleaner.retiring))

    def _lowest_retained(self) -> int | None:
        """The id of the first retained checkpoint whose files are the job's; a savepoint only if claimed."""
        kept = (entry for entry in self._entries if entry.owned or not entry.checkpoint.is_savepoint)
        return next((entry.checkpoint.id for entry in kept), None)

    def unpin(self, savepoint_id: int) -> None:
        """Does nothing for a savepoint that was not pinned."""
        if self._pinned.pop(savepoint_id, None) is not None:
            self.delete_unused_shared_files()

    # --- completed checkpoints

    def adopt(self, entry: RetainedCheckpoint) -> None:
        """Takes over the savepoint that the job starts from. It is the only retained snapshot."""
        self._register_all(entry)
        self._entries.append(entry)

    def _register_all(self, entry: RetainedCheckpoint) -> None:
        self._registry.register_all(entry.checkpoint.id, entry.checkpoint.states.values(), entry.owned)

    def add(self, entry: RetainedCheckpoint) -> None:
        """Adds a new checkpoint of this driver; removes the subsumed ones and the leftovers of earlier drivers.

        Raises ValueError if its id is not greater than the latest.
        """
        if entry.checkpoint.id <= self.latest_id:
            raise ValueError(f"checkpoint {entry.checkpoint.id} is not newer than {self.latest_id}")
        self._entries.append(entry)
        for subsumed in self._subsumed():
            self._retire(subsumed, subsumed.owned)
        # Not earlier: only a checkpoint of this driver is newer than any late pointer of an earlier driver.
        self._sweep_leftovers()
        self.delete_unused_shared_files()

    def _subsumed(self) -> list[RetainedCheckpoint]:
        """Takes out the oldest ones beyond the number that is retained; never the newest one."""
        retained = self._in_force.settings.retained
        subsumed, self._entries = self._entries[:-retained], self._entries[-retained:]
        return subsumed

    def _retire(self, entry: RetainedCheckpoint, discard: bool) -> None:
        if discard:
            self._stats.report_discarded(entry.checkpoint.id)
        self._cleaner.retire(entry.checkpoint, discard)

    # --- answers of the storage; the handlers raise UnexpectedAnswerError if there was no such request

    def on_store_removed(self, event: on.StoreRemoved, now: Instant) -> None:
        self._cleaner.removed(event.checkpoint_id)
        self.delete_unused_shared_files()

    def on_store_remove_failed(self, event: on.StoreRemoveFailed, now: Instant) -> None:
        self._cleaner.remove_failed(event.checkpoint_id)

    def on_cleanup_done(self, event: on.CleanupDone, now: Instant) -> None:
        self._cleaner.cleaned(event.checkpoint_id)

    def delete_unused_shared_files(self) -> None:
        """Deletes shared files that no retained checkpoint or pinned savepoint needs; waits for pointer removals."""
        if self._fenced or not self._cleaner.pointers_are_gone:
            return
        lowest = self._lowest_retained()
        paths: tuple[str, ...] = ()
        if self._kept_shared is not None:
            paths = self._registry.unregister_all(self._kept_shared)
        elif lowest is not None:
            paths = self._registry.unregister_unused(min((lowest, *self._pinned.values())))
        # Leftovers wait for the same moment: a pointer that is being removed may refer to them.
        paths += self._unused_shared
        self._unused_shared = ()
        if paths:
            self._emit(out.DeleteSharedFiles(paths))

    # --- what earlier drivers and killed workers left

    def find_leftovers(self, last_own_id: int) -> None:
        """Asks once for leftovers of earlier drivers, and after that for files of workers killed in the meantime.

        ``last_own_id`` is the last checkpoint that this driver has triggered; 0 before the first.
        """
        if not self._sought_leftovers:
            self._sought_leftovers = True
            self._emit(out.FindLeftovers())
        # If nothing was triggered since the last search, there can be no new leftovers.
        elif last_own_id > self._searched_up_to:
            self._searched_up_to = last_own_id
            self._emit(out.FindLeftovers(last_own_id + 1))

    def leftovers_found(self, event: on.LeftoversFound, first_own_id: int | None) -> None:
        """Records what may be deleted once another checkpoint of this driver is complete.

        Until then, the job could still be restored from a pointer that an earlier leader wrote late. Directories of
        this driver's own checkpoints (from ``first_own_id`` on) are not leftovers.
        """
        self._leftovers += tuple(
            (number, where) for number, where in event.checkpoints if first_own_id is None or number < first_own_id
        )
        self._leftover_shared = tuple(dict.fromkeys(self._leftover_shared + event.shared))

    def _sweep_leftovers(self) -> None:
        retained = {entry.checkpoint.id for entry in self._entries} | self._outliving
        found, self._leftovers = self._leftovers, ()
        for number, directory in found:
            if number not in retained and not self._cleaner.is_cleaning(number):
                self._cleaner.sweep(number, directory)
        shared, self._leftover_shared = self._leftover_shared, ()
        kept = self._kept_shared or frozenset()  # the registry has released these
        self._unused_shared += tuple(path for path in shared if path not in kept and not self._registry.knows(path))

    # --- the end of the job

    def release(self, job_status: str) -> None:
        """Releases all retained checkpoints and removes leftovers found since. May be called again.

        Files that an aborted checkpoint wrote next to the files of the kept checkpoints are deleted as well.
        """
        self._sweep_leftovers()
        if self._kept_shared is not None:
            return
        retained, self._entries = self._entries, []
        # The kept checkpoints are determined before any is deleted, because deleted ones may share files with them.
        discarded = [self._discards_at_end(entry, job_status, newest=entry is retained[-1]) for entry in retained]
        stay = [entry for entry, discards in zip(retained, discarded, strict=True) if not discards]
        self._outliving = frozenset(entry.checkpoint.id for entry in stay)
        self._kept_shared = frozenset(
            file.path for entry in stay for state in entry.checkpoint.states.values() for file in state.files()
        )
        self.keeps_nothing = self._in_force.settings.discards_on(job_status) and not any(entry.owned for entry in stay)
        for entry, discards in zip(retained, discarded, strict=True):
            self._retire(entry, discards)

    def _discards_at_end(self, entry: RetainedCheckpoint, job_status: str, *, newest: bool) -> bool:
        """Whether the entry is deleted. A claimed snapshot is kept unless the job finished or replaced it.

        The next run of a program that continues starts from the newest one, and would never delete the others.
        """
        if self._in_force.settings.continue_in is not None and not newest:
            return entry.owned
        claimed = entry.checkpoint.job_id != self._job_id
        if not entry.owned or (claimed and job_status != "FINISHED"):
            return False
        return self._in_force.settings.discards_on(job_status)
