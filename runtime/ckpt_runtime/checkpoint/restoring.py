"""Answers what the next deployment starts from, once no further checkpoint can complete. Pure.

Owns the waiting request. A savepoint that the job starts from gets its pointer before the request is answered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.effects import Effect
from ckpt_runtime.checkpoint.id_counter import CheckpointIdSource
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.pending_checkpoint import PendingCheckpoints
from ckpt_runtime.checkpoint.retention import RetainedCheckpoint, Retention
from ckpt_runtime.checkpoint.statistics_tracker import CheckpointStatsTracker
from ckpt_runtime.configuration.checkpointing_options import RecoveryClaimMode


@dataclass(slots=True)
class _Restore:
    """A waiting restore request; ``savepoint`` is the one that the job was submitted with, until it is stored.

    ``adding``: the savepoint's pointer is being written. ``abandoned``: the answer is no longer awaited.
    """

    request_id: str
    savepoint: CompletedCheckpoint | None
    owned: bool
    adding: bool = False
    attempts: int = 0
    abandoned: bool = False


class Restoring:
    """Answers restore requests; ``emit`` takes the effects."""

    def __init__(
        self,
        ids: CheckpointIdSource,
        pending: PendingCheckpoints,
        retention: Retention,
        statistics: CheckpointStatsTracker,
        emit: Callable[[Effect], None],
    ) -> None:
        self._ids = ids
        self._pending = pending
        self._retention = retention
        self._stats = statistics
        self._emit = emit
        self._restore: _Restore | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether a request has not been answered yet."""
        return self._restore is not None

    @property
    def is_adding(self) -> bool:
        """Whether the pointer of a savepoint is being written."""
        return self._restore is not None and self._restore.adding

    def request(self, event: on.RestoreRequested) -> None:
        """A later request replaces one that has not been answered yet."""
        if self._restore is None:
            self._restore = _Restore(event.request_id, event.savepoint, event.mode is RecoveryClaimMode.CLAIM)
        self._restore.request_id = event.request_id

    def abandon(self) -> None:
        """The job ends: the answer is no longer awaited, but a pointer may still be being written."""
        if self._restore is not None and self._restore.adding:
            self._restore.abandoned = True
        else:
            self._restore = None

    def answer_when_known(self, now: Instant) -> None:
        """Answers the request; the latest checkpoint is only known once no further checkpoint can complete."""
        restore = self._restore
        if restore is None or restore.adding or self._pending.is_finalizing:
            return
        latest = self._retention.latest
        if restore.savepoint is not None and latest is None:
            # The pointer is written first: after a crash before the first checkpoint, the job must restore from this
            # savepoint only.
            restore.adding = True
            # Before the job takes a checkpoint: one with a smaller id would count as older than the savepoint.
            self._ids.advance_to(restore.savepoint.id + 1)
            self._emit(out.AddToStore(restore.savepoint, restore.owned))
            return
        self._restore = None
        if latest is not None:
            self._stats.report_restored(latest.id, now.abs_ms, latest.is_savepoint, latest.directory)
        self._emit(out.RestoreFrom(restore.request_id, latest))

    # --- answers about the savepoint's pointer; the methods return False if the answer is about something else

    def store_added(self, checkpoint_id: int) -> bool:
        if (adding := self._adding(checkpoint_id)) is None:
            return False
        restore, savepoint = adding
        self._retention.adopt(RetainedCheckpoint(savepoint, restore.owned))
        # Answered by `answer_when_known`, which now finds the savepoint as the latest checkpoint.
        restore.adding, restore.savepoint = False, None
        if restore.abandoned:
            self._restore = None
        return True

    def store_failed(self, checkpoint_id: int, message: str) -> bool:
        if (adding := self._adding(checkpoint_id)) is None:
            return False
        restore, _ = adding
        self._restore = None
        if not restore.abandoned:
            self._emit(out.RestoreFailed(restore.request_id, message))
        return True

    def store_unknown(self, checkpoint_id: int) -> bool:
        if (adding := self._adding(checkpoint_id)) is None:
            return False
        restore, savepoint = adding
        restore.attempts += 1
        self._emit(out.ResolveStore(savepoint, restore.attempts, restore.owned))
        return True

    def _adding(self, checkpoint_id: int) -> tuple[_Restore, CompletedCheckpoint] | None:
        """The restore and its savepoint, if the pointer being written has this id."""
        restore = self._restore
        if restore is None or not restore.adding or restore.savepoint is None or restore.savepoint.id != checkpoint_id:
            return None
        return restore, restore.savepoint
