"""Planted bugs between the first acknowledgement and the notification: completion, subsumption, files of tasks."""

from __future__ import annotations

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint.completed_checkpoint import SharedStateRegistry, is_shared
from ckpt_runtime.checkpoint.completion import (
    AckResult,
    CheckpointFailures,
    Completion,
    PendingCheckpoint,
    PendingCheckpoints,
    PendingState,
)
from ckpt_runtime.checkpoint.coordinator import CheckpointCoordinator
from ckpt_runtime.checkpoint.properties import CheckpointFailureReason as Reason
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.checkpoint.retention import CheckpointCleaner, Retention
from tests.simulation.planted.registry import also, bug, nothing

# --- completion, subsumption, unknown outcomes


bug("a checkpoint that is being published can be aborted", "FLINK-16770", PendingCheckpoint, "can_abort", seed=8)(
    property(lambda self: True)
)


@bug("an unknown pointer is taken for a failure", "FLINK-22494", CheckpointCoordinator, "_on_store_unknown", seed=53)
def _(self, event, now):
    self._on_store_failed(event, now)


@bug("an unknown pointer is taken for a success", "FLINK-28265", CheckpointCoordinator, "_on_store_unknown", seed=1)
def _(self, event, now):
    self._on_store_added(event, now)


@bug("unknown metadata is taken for a success", "I8", Completion, "on_metadata_unknown", seed=8)
def _(self, event, now):
    self.on_metadata_written(event, now)


@bug("completed without its pointer", "1.4", Completion, "on_metadata_written", seed=1)
def _(self, event, now):
    self._complete(self._finalizing(event.checkpoint_id, PendingState.WRITING), now)


@bug(
    "the savepoint of a stop leaves no pointer", "FLINK-26783, with a crash", Completion, "on_metadata_written", seed=12
)
def _(original, self, event, now):
    pending = self._finalizing(event.checkpoint_id, PendingState.WRITING)
    if pending.request.properties.is_synchronous:
        self._complete(pending, now)
    else:
        original(self, event, now)


@bug("complete without everybody's acknowledgement", "I7", PendingCheckpoint, "acknowledge", seed=5)
def _(original, self, execution, state):
    original(self, execution, state)
    if len(self.awaited) == 1 and len(self.acknowledged) > 1:
        self.awaited.clear()


@bug("older pending checkpoints are not subsumed", "I6", CheckpointFailures, "abort", seed=113)
def _(original, self, pending, reason, *rest):
    if reason is not Reason.CHECKPOINT_SUBSUMED:
        original(self, pending, reason, *rest)


@bug("a newer checkpoint subsumes savepoints", "1.3", seed=57)
def _():
    def extra(self, pending, now):
        if pending.request.properties.notifies_and_subsumes:
            for older in self._pending.abortable():
                if older.id < pending.id:
                    self._failures.abort(older, Reason.CHECKPOINT_SUBSUMED, now)

    return [also(Completion, "_complete", extra)]


@bug("a completed checkpoint subsumes younger ones", "1.3", seed=15)
def _():
    def extra(self, pending, now):
        if pending.request.properties.notifies_and_subsumes:
            for other in self._pending.abortable():
                if not other.request.properties.is_savepoint:
                    self._failures.abort(other, Reason.CHECKPOINT_SUBSUMED, now)

    return [also(Completion, "_complete", extra)]


bug("a plain savepoint notifies and subsumes", "FLINK-25191", CheckpointProperties, "notifies_and_subsumes", seed=5)(
    property(lambda self: True)
)

bug(
    "restore and publishing do not wait for writes in flight",
    "protocols 10.4",
    PendingCheckpoints,
    "is_finalizing",
    seed=31,
)(property(lambda self: False))

bug("an abort names itself as the latest completed", "FLINK-10377", Retention, "latest_id", seed=1)(
    property(lambda self: self._entries[-1].checkpoint.id + 1 if self._entries else -1)
)


# --- acknowledgements and files


bug("late state leaks", "protocols 10.7", Retention, "discard_state", seed=72)(nothing)


@bug("a repeated acknowledgement discards state in use", "protocols 10.7", PendingCheckpoint, "classify", seed=28)
def _(original, self, execution):
    result = original(self, execution)
    return AckResult.UNKNOWN if result is AckResult.DUPLICATE else result


bug(
    "a repetition after completion discards state in use", "protocols 10.7", PendingCheckpoints, "was_aborted", seed=13
)(lambda self, number: True)


@bug("an aborted checkpoint takes shared files along", "FLINK-25395", seed=6)
def _():
    def extra(self, pending, reason, now, detail="", reporter=None):
        files = [f.path for s in pending.acknowledged.values() for f in s.files() if is_shared(f)]
        if files:
            self._emit(out.DeleteSharedFiles(tuple(sorted(files))))

    return [also(CheckpointFailures, "abort", extra)]


@bug("a late acknowledgement's shared files are deleted", "FLINK-25395", seed=6)
def _():
    def extra(self, event):
        files = tuple(sorted(file.path for file in event.state.files() if is_shared(file)))
        if self._pending.was_aborted(event.checkpoint_id) and files:
            self._emit(out.DeleteSharedFiles(files))

    return [also(Completion, "_on_late_acknowledgement", extra)]


@bug(
    "shared files go that only older retained checkpoints use",
    "protocols 10.11",
    Retention,
    "_lowest_retained",
    seed=11,
)
def _(self):
    return self._entries[-1].checkpoint.id if self._entries else None


bug(
    "shared files of a recovered checkpoint are not registered",
    "FLINK-26985, FLINK-7268",
    SharedStateRegistry,
    "register_all",
    seed=11,
)(nothing)


@bug("shared files go before the pointer", "2.1", seed=6)
def _():
    return [
        (CheckpointCleaner, "pointers_are_gone", property(lambda self: True)),
        also(Retention, "_retire", lambda self, entry, discard: self.delete_unused_shared_files()),
    ]


bug("no checkpoint after NO_CLAIM is full", "protocols 10.12", Retention, "latest_is_owned", seed=6)(
    property(lambda self: True)
)


@bug("checkpoints may refer to a snapshot of the user's", "protocols 2.3", seed=6)
def _():
    original = SharedStateRegistry._conflict

    return [
        (Retention, "latest_is_owned", property(lambda self: True)),
        (SharedStateRegistry, "_conflict", lambda self, file, entry, deletable: original(self, file, entry, False)),
    ]


bug("files go while a savepoint duplicates them", "FLIP-203", Retention, "pin", seed=171)(nothing)


@bug("files go once a savepoint has all acknowledgements but one", "FLIP-203", seed=1217)
def _():
    def extra(self, event, now):
        self._retention.unpin(event.checkpoint_id)

    return [also(Completion, "on_acknowledged", extra)]


bug("a task builds on files that are gone", "2.2, placeholders", SharedStateRegistry, "_conflict", seed=87)(
    lambda self, file, entry, deletable: None
)

bug("a snapshot restored with NO_CLAIM is deleted", "I16", CheckpointCleaner, "retire")(
    lambda original, self, checkpoint, discard: original(self, checkpoint, True)
)
