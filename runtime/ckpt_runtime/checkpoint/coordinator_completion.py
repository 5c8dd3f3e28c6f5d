"""From acknowledgements to a published checkpoint, and what replaces, restores or outlives it. Pure.

A layer of ``coordinator.CheckpointCoordinator``; see ``coordinator_base``. Order of a completion: metadata, pointer,
statistics and result, pointers of subsumed checkpoints, notifications; files go last of all.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.completed_checkpoint_store import RetainedCheckpoint
from ckpt_runtime.checkpoint.coordinator_base import CoordinatorState, UnexpectedEventError
from ckpt_runtime.checkpoint.coordinator_triggering import TriggeringLayer
from ckpt_runtime.checkpoint.events import TimerId, TimerKind
from ckpt_runtime.checkpoint.failure_reason import CheckpointFailureReason as Reason
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.pending_checkpoint import AckResult, PendingCheckpoint, PendingState
from ckpt_runtime.checkpoint.properties import RestoreMode
from ckpt_runtime.checkpoint.shared_state_registry import SharedStateConflictError
from ckpt_runtime.checkpoint.state_handles import SubtaskState
from ckpt_runtime.checkpoint.statistics import SubtaskStats

SUSPENDED = "SUSPENDED"


@dataclass(slots=True)
class _Restore:
    """A restore that waits. ``adding`` is a savepoint whose pointer is being written."""

    request_id: str
    savepoint: CompletedCheckpoint | None
    owned: bool
    adding: bool = False
    attempts: int = 0


class CompletionLayer(TriggeringLayer):
    """From the messages of tasks to the answers of the storage."""

    _restore: _Restore | None = None
    _sought_leftovers: bool = False
    _leftovers: tuple[tuple[int, str], ...] = ()
    _leftover_shared: tuple[str, ...] = ()
    _unused_shared: tuple[str, ...] = ()
    _keeps_nothing: bool = False
    _kept_shared: frozenset[str] | None = None
    _job_status: str = ""

    # --- messages of tasks

    def _on_acknowledged(self, event: on.Acknowledged, now: Instant) -> None:
        pending = self._pending.get(event.checkpoint_id)
        if pending is None:
            self._on_late_acknowledgement(event)
            return
        result = pending.classify(event.execution) if event.directory == pending.directory else AckResult.UNKNOWN
        if result is AckResult.DUPLICATE:
            return
        if result is AckResult.UNKNOWN:
            if event.directory == pending.directory and not pending.request.properties.is_savepoint:
                self._register(event)  # so that its shared files go with the checkpoint's
            self._discard_state(event)
            return
        conflict = None if pending.request.properties.is_savepoint else self._register(event)
        if conflict is not None:
            self._discard_state(event)
            self._abort(pending, Reason.CHECKPOINT_ASYNC_EXCEPTION, now, conflict)
            self._decide(now)
            return
        pending.acknowledge(event.execution, event.state, event.finished_operators)
        self._report_subtask(event, now, completed=True)
        self._finalize_ready(now)
        self._decide(now)

    def _on_late_acknowledgement(self, event: on.Acknowledged) -> None:
        """After an abort the state goes. An acknowledgement of a completed one is a repetition: its files are used."""
        if event.checkpoint_id not in self._aborted:
            return
        self._register(event)
        self._discard_state(event)

    def _register(self, event: on.Acknowledged) -> str | None:
        """What is wrong with the state's shared files, if anything."""
        try:
            self._registry.register(event.checkpoint_id, event.state)
        except SharedStateConflictError as error:
            return str(error)
        return None

    def _discard_state(self, event: on.Acknowledged) -> None:
        if event.state.files():
            self._emit(out.DiscardState(event.checkpoint_id, event.directory, event.state))

    def _on_declined(self, event: on.Declined, now: Instant) -> None:
        pending = self._pending.get(event.checkpoint_id)
        if pending is None or not pending.can_abort or event.execution not in pending.plan.to_wait_for:
            return
        self._abort(pending, event.reason, now, event.message, event.execution)
        self._decide(now)

    def _on_progress(self, event: on.ProgressReported, now: Instant) -> None:
        pending = self._pending.get(event.checkpoint_id)
        if pending is not None and event.execution in pending.awaited:
            self._report_subtask(event, now, completed=False)

    def _report_subtask(self, event: on.Acknowledged | on.ProgressReported, now: Instant, completed: bool) -> None:
        metrics = event.metrics
        state = event.state if isinstance(event, on.Acknowledged) else SubtaskState()
        self._stats.report_subtask(
            event.checkpoint_id,
            event.execution.vertex_id,
            SubtaskStats(
                index=event.execution.subtask,
                ack_timestamp=now.abs_ms,
                state_size=state.bytes,
                checkpointed_size=metrics.checkpointed_size,
                sync_duration=metrics.sync_duration,
                async_duration=metrics.async_duration,
                alignment_buffered=metrics.alignment_buffered,
                processed_data=metrics.processed_data,
                persisted_data=metrics.persisted_data,
                alignment_duration=metrics.alignment_duration,
                start_delay=metrics.start_delay,
                unaligned=metrics.unaligned,
                completed=completed,
            ),
        )

    # --- finalising

    def _decide(self, now: Instant) -> None:
        """Also goes on with what has waited for a checkpoint that is gone now."""
        self._finalize_ready(now)
        super()._decide(now)

    def _finalize_ready(self, now: Instant) -> None:
        """Starts what is complete: plain savepoints at once, all others one at a time and oldest first.

        One at a time, because a later checkpoint whose pointer came first would make completed ids fall, and because
        nothing may be added to the store while the fate of an earlier pointer is unknown. For the same reason what was
        triggered behind a stop's savepoint, which no checkpoint subsumes, waits until that is complete or aborted.
        """
        behind_stop = False
        for pending in self._abortable():
            properties = pending.request.properties
            if pending.state is not PendingState.PENDING or pending.awaited:
                behind_stop = behind_stop or properties.is_synchronous
                continue
            if properties.notifies_and_subsumes and (behind_stop or self._is_finalizing()):
                continue
            vertex = pending.partly_finished_union_state(self._vertices)
            if vertex is None:
                pending.state = PendingState.WRITING
                self._emit(out.CancelTimer(TimerId(TimerKind.CANCELLER, pending.id)))
                self._emit(out.WriteMetadata(pending.complete(self._job_id, self._vertices, self._edges, now.abs_ms)))
            else:
                detail = f"only some subtasks of {vertex!r}, which has union list state, have finished"
                self._abort(pending, Reason.CHECKPOINT_DECLINED_TASK_CLOSING, now, detail)

    def _finalizing(self, checkpoint_id: int, state: PendingState, event: object) -> PendingCheckpoint:
        pending = self._pending.get(checkpoint_id)
        if pending is None or pending.state is not state:
            raise UnexpectedEventError(self._state, event)
        return pending

    def _on_metadata_written(self, event: on.MetadataWritten, now: Instant) -> None:
        pending = self._finalizing(event.checkpoint_id, PendingState.WRITING, event)
        if not pending.request.properties.notifies_and_subsumes:
            self._complete(pending, now)
            return
        pending.state = PendingState.STORING
        pending.resolve_attempts = 0
        self._emit(out.AddToStore(pending.metadata, _owned(pending)))

    def _on_metadata_failed(self, event: on.MetadataFailed, now: Instant) -> None:
        pending = self._finalizing(event.checkpoint_id, PendingState.WRITING, event)
        self._fail_finalizing(pending, event.message, now)

    def _on_metadata_unknown(self, event: on.MetadataUnknown, now: Instant) -> None:
        pending = self._finalizing(event.checkpoint_id, PendingState.WRITING, event)
        pending.resolve_attempts += 1
        self._emit(out.ResolveMetadata(pending.metadata, pending.resolve_attempts))

    def _on_store_added(self, event: on.StoreAdded, now: Instant) -> None:
        restore = self._adding_savepoint(event.checkpoint_id)
        if restore is None or restore.savepoint is None:
            self._complete(self._finalizing(event.checkpoint_id, PendingState.STORING, event), now)
            return
        entry = RetainedCheckpoint(restore.savepoint, restore.owned)
        self._adopt(entry)
        self._store.add(entry)
        restore.adding, restore.savepoint = False, None
        self._after_finalizing(now)

    def _on_store_failed(self, event: on.StoreFailed, now: Instant) -> None:
        restore = self._adding_savepoint(event.checkpoint_id)
        if restore is None:
            pending = self._finalizing(event.checkpoint_id, PendingState.STORING, event)
            self._fail_finalizing(pending, event.message, now)
            return
        self._restore = None
        if self._state is CoordinatorState.RESTORING:
            self._state = CoordinatorState.CREATED
            self._emit(out.RestoreFailed(restore.request_id, event.message))
        self._after_finalizing(now)

    def _on_store_unknown(self, event: on.StoreUnknown, now: Instant) -> None:
        restore = self._adding_savepoint(event.checkpoint_id)
        if restore is not None and restore.savepoint is not None:
            restore.attempts += 1
            self._emit(out.ResolveStore(restore.savepoint, restore.attempts, restore.owned))
            return
        pending = self._finalizing(event.checkpoint_id, PendingState.STORING, event)
        pending.resolve_attempts += 1
        self._emit(out.ResolveStore(pending.metadata, pending.resolve_attempts, _owned(pending)))

    def _fail_finalizing(self, pending: PendingCheckpoint, message: str, now: Instant) -> None:
        self._abort(pending, Reason.FINALIZE_CHECKPOINT_FAILURE, now, message)
        self._after_finalizing(now)

    def _complete(self, pending: PendingCheckpoint, now: Instant) -> None:
        checkpoint = pending.metadata
        del self._pending[pending.id]
        self._failures.on_success(pending.id)
        self._stats.report_completed(pending.id, checkpoint.directory)
        self._periodic.completed(now.rel_ms)
        if pending.request.request_id is not None:
            self._emit(out.RequestCompleted(pending.request.request_id, pending.id, checkpoint.directory))
        if checkpoint.properties.notifies_and_subsumes:
            for entry in self._store.add(RetainedCheckpoint(checkpoint, _owned(pending))):
                self._retire(entry, entry.owned)
            self._sweep_leftovers()
            self._delete_unused_shared_files()
            for older in self._abortable():
                if older.id < pending.id and not older.request.properties.is_savepoint:
                    self._abort(older, Reason.CHECKPOINT_SUBSUMED, now)
            self._emit(out.NotifyComplete(pending.id, pending.timestamp, pending.plan.to_wait_for))
        self._after_finalizing(now)

    def _after_finalizing(self, now: Instant) -> None:
        self._finalize_ready(now)
        self._continue_restore(now)
        self._continue_closing()
        self._decide(now)

    # --- cleaning

    def _retire(self, entry: RetainedCheckpoint, discard: bool) -> None:
        if discard:
            self._stats.report_discarded(entry.checkpoint.id)
        self._cleaner.retire(entry.checkpoint, discard)

    def _on_store_removed(self, event: on.StoreRemoved, now: Instant) -> None:
        if not self._cleaner.removed(event.checkpoint_id):
            raise UnexpectedEventError(self._state, event)
        self._delete_unused_shared_files()
        self._continue_closing()
        self._decide(now)

    def _delete_unused_shared_files(self) -> None:
        """Not before the last pointer to a checkpoint that uses them is gone."""
        if not self._cleaner.pointers_are_gone:
            return
        lowest = self._store.lowest_retained()
        paths: tuple[str, ...] = ()
        if self._kept_shared is not None:
            paths = self._registry.unregister_all(self._kept_shared)
        elif lowest is not None:
            paths = self._registry.unregister_unused(lowest)
        paths += self._unused_shared
        self._unused_shared = ()
        if paths:
            self._emit(out.DeleteSharedFiles(paths))

    def _on_store_remove_failed(self, event: on.StoreRemoveFailed, now: Instant) -> None:
        if not self._cleaner.remove_failed(event.checkpoint_id):
            raise UnexpectedEventError(self._state, event)

    def _on_cleanup_done(self, event: on.CleanupDone, now: Instant) -> None:
        if not self._cleaner.cleaned(event.checkpoint_id):
            raise UnexpectedEventError(self._state, event)
        self._continue_closing()
        self._decide(now)

    # --- what earlier drivers left

    def _on_leftovers_found(self, event: on.LeftoversFound, now: Instant) -> None:
        """Notes what may be deleted once another checkpoint of this driver is complete.

        Until then a pointer that an earlier leader wrote too late could still be restored from. What this driver's
        own checkpoints may have made by now is no leftover.
        """
        own = self._first_own_id
        self._leftovers += tuple((number, where) for number, where in event.checkpoints if own is None or number < own)
        self._leftover_shared = tuple(dict.fromkeys(self._leftover_shared + event.shared))

    def _sweep_leftovers(self) -> None:
        retained = {entry.checkpoint.id for entry in self._store.entries}
        found, self._leftovers = self._leftovers, ()
        for number, directory in found:
            if number not in retained and not self._cleaner.is_cleaning(number):
                self._cleaner.sweep(number, directory)
        shared, self._leftover_shared = self._leftover_shared, ()
        kept = self._kept_shared or frozenset()  # which the registry has let go of
        self._unused_shared += tuple(path for path in shared if path not in kept and not self._registry.knows(path))

    # --- restore

    def _on_restore_requested(self, event: on.RestoreRequested, now: Instant) -> None:
        """A later request replaces one that has not been answered yet."""
        if not self._sought_leftovers:
            self._sought_leftovers = True
            self._emit(out.FindLeftovers())
        elif self._last_own_id > self._searched_up_to:
            self._searched_up_to = self._last_own_id
            self._emit(out.FindLeftovers(self._last_own_id + 1))
        self._state = CoordinatorState.RESTORING
        if self._restore is None:
            self._restore = _Restore(event.request_id, event.savepoint, event.mode is RestoreMode.CLAIM)
        self._restore.request_id = event.request_id
        self._continue_restore(now)

    def _continue_restore(self, now: Instant) -> None:
        """The latest checkpoint is only known once no checkpoint can complete any more."""
        restore = self._restore
        if restore is None or restore.adding or self._is_finalizing():
            return
        if restore.savepoint is not None and self._store.latest is None and self._state is CoordinatorState.RESTORING:
            restore.adding = True
            self._ids.advance_to(restore.savepoint.id + 1)
            self._emit(out.AddToStore(restore.savepoint, restore.owned))
            return
        self._restore = None
        if self._state is not CoordinatorState.RESTORING:
            return
        self._state = CoordinatorState.CREATED
        latest = self._store.latest
        if latest is not None:
            self._stats.report_restored(latest.id, now.abs_ms, latest.is_savepoint, latest.directory)
        self._emit(out.RestoreFrom(restore.request_id, latest))

    def _adding_savepoint(self, checkpoint_id: int) -> _Restore | None:
        """The restore whose savepoint's pointer is being written, if it is this one."""
        restore = self._restore
        if restore is None or not restore.adding or restore.savepoint is None:
            return None
        return restore if restore.savepoint.id == checkpoint_id else None

    # --- shutdown

    def _on_shutdown(self, event: on.Shutdown, now: Instant) -> None:
        if self._state is CoordinatorState.CLOSING and not event.fenced:
            raise UnexpectedEventError(self._state, event)
        self._state = CoordinatorState.CLOSING
        self._job_status = event.job_status
        self._fenced = event.fenced
        self._executions.gone()
        self._emit(out.CancelTimer(TimerId(TimerKind.FINAL_CHECKPOINT)))
        self._stop_periodic(Reason.CHECKPOINT_COORDINATOR_SHUTDOWN, now)
        if not self._fenced:
            self._continue_closing()
            return
        for pending in self._pending.values():
            self._fail_request(pending.request.request_id, Reason.CHECKPOINT_COORDINATOR_SHUTDOWN, "", pending)
        self._pending.clear()
        self._state = CoordinatorState.CLOSED
        self._emit(out.ShutdownComplete())

    def _discards_at_end(self, entry: RetainedCheckpoint) -> bool:
        """A claimed snapshot of another job outlives one that ends before a checkpoint of its own has replaced it."""
        claimed = entry.checkpoint.job_id != self._job_id
        if not entry.owned or (claimed and self._job_status != "FINISHED"):
            return False
        return self._configuration.discards_on(self._job_status)

    def _continue_closing(self) -> None:
        """Once nothing is being written, lets go of the retained checkpoints; then waits for the clean-up."""
        if self._state is not CoordinatorState.CLOSING or self._pending or self._locating:
            return
        if self._restore is not None and self._restore.adding:
            return
        self._restore = None
        if self._job_status != SUSPENDED:
            self._sweep_leftovers()
            if self._kept_shared is None:
                self._let_go()
        if self._cleaner.busy == 0:
            self._delete_unused_shared_files()
            self._state = CoordinatorState.CLOSED
            self._emit(out.ShutdownComplete(self._keeps_nothing))

    def _let_go(self) -> None:
        """Of all that is retained. What an aborted checkpoint put beside the files of those that stay goes as well."""
        retained = self._store.clear()
        stay = [entry for entry in retained if not self._discards_at_end(entry)]
        self._kept_shared = frozenset(
            file.path for entry in stay for state in entry.checkpoint.states.values() for file in state.files()
        )
        self._keeps_nothing = self._configuration.discards_on(self._job_status) and not any(
            entry.owned for entry in stay
        )
        for entry in retained:
            self._retire(entry, self._discards_at_end(entry))


def _owned(pending: PendingCheckpoint) -> bool:
    """The savepoint of a stop is the user's. It has a pointer all the same: what it commits must never be undone."""
    return not pending.request.properties.is_savepoint
