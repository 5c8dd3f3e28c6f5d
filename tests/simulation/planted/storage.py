"""Planted bugs of what is durable: the store of checkpoints, its clean-up, and drivers that take over."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as checkpoint_on
from ckpt_runtime.checkpoint.completion import PendingCheckpoints
from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.checkpoint.coordinator import CheckpointCoordinator
from ckpt_runtime.checkpoint.retention import CheckpointCleaner, Retention
from ckpt_runtime.checkpoint.statistics import CheckpointStatsTracker
from ckpt_runtime.checkpoint.triggering import CheckpointIdCounter, Triggering
from ckpt_runtime.jobmaster.storage_effects import StorageEffects
from ckpt_runtime.scheduler.job_core import JobCore
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.storage.errors import StorageError
from tests.simulation.planted.registry import bug, nothing
from tests.simulation.protocols.driver import Driver
from tests.simulation.protocols.record import HaRecord
from tests.simulation.protocols.world import World

# --- the store and its clean-up


@bug("files go before the pointer", "2.1", CheckpointCleaner, "retire", seed=1)
def _(original, self, checkpoint, discard):
    if discard:
        self._deleting[checkpoint.id] += 1
        self._emit(out.DiscardCheckpoint(checkpoint))
    original(self, checkpoint, False)


@bug("a pointer whose removal failed counts as gone", "I8", Retention, "on_store_remove_failed", seed=70)
def _(self, event, now):
    self.on_store_removed(event, now)


bug("a snapshot that the job refers to is disposed of", "invariant 10", CheckpointCoordinator, "referenced", seed=33)(
    property(lambda self: ())
)

bug("subsumed checkpoints are not deleted", "I15", CheckpointCleaner, "retire", seed=5)(
    lambda original, self, checkpoint, discard: original(self, checkpoint, False)
)


@bug("one retained checkpoint too few", "retention", Retention, "_subsumed", seed=1)
def _(original, self):
    subsumed = original(self)
    if len(self._entries) > 1 or self._in_force.settings.retained == 1:
        subsumed.append(self._entries.pop(0))
    return subsumed


bug("aborted checkpoints stay", "I15, FLINK-35784", CheckpointCleaner, "discard_location", seed=51)(nothing)


@bug("a directory that was made too late stays", "1.1, step 6", Triggering, "on_location_ready", seed=34)
def _(original, self, event, now):
    if self._pending.get(event.checkpoint_id) is not None:
        original(self, event, now)


bug("what an earlier driver left stays", "2.1, the gaps", Retention, "_sweep_leftovers", seed=11)(nothing)


bug("retention on cancellation is ignored", "retention", CheckpointConfiguration, "discards_on", seed=28)(
    lambda self, status: True
)

bug("nothing is deleted at the end", "retention", CheckpointConfiguration, "discards_on", seed=5)(
    lambda self, status: False
)


@bug(
    "the end of the job does not wait for writes in flight", "1.7", CheckpointCoordinator, "_continue_closing", seed=163
)
def _(original, self):
    pending, self._pending = self._pending, PendingCheckpoints(CheckpointStatsTracker())
    original(self)
    self._pending = pending


# --- drivers


def leaves_open(document):
    """A new leader does not adopt it: without this the fence alone would not be needed."""
    adopt = World._adopt

    def adopts(self, known, epoch):
        if known != document:
            adopt(self, known, epoch)

    return World, "_adopt", adopts


bug("checkpoint ids are not recorded", "protocols 10.5", HaRecord, "reserve", seed=34)(nothing)

bug("the counter is not moved past a restored id", "protocols 10.5", CheckpointIdCounter, "advance_to", seed=6)(nothing)


@bug("a new driver ignores the recovered checkpoints", "FLINK-34518, K13", CheckpointCoordinator, "__init__", seed=1)
def _(original, self, job_id, graph, configuration, ids, recovered, **more):
    original(self, job_id, graph, configuration, ids, (), **more)


def _only_savepoints(self):
    own = [entry.checkpoint for entry in self._entries]
    return own[0] if own else None


bug("the savepoint of the submission beats recovered checkpoints", "1.7", Retention, "latest", seed=6)(
    property(_only_savepoints)
)


@bug("a driver that lost its lease completes checkpoints", "FLINK-9494, K14", seed=63)
def _():
    return [(HaRecord, "check", nothing), leaves_open("pointers")]


@bug("a savepoint is complete before its leader has recorded it", "a driver that was paused meanwhile", seed=63)
def _():
    def written(self, checkpoint):
        if checkpoint.properties.is_savepoint:
            with suppress(StorageError):
                self._record.settle_savepoint(checkpoint.id)
        return checkpoint_on.MetadataWritten(checkpoint.id)

    return [(StorageEffects, "_metadata_written", written)]


@bug("an aborted savepoint is forgotten when it is deleted", "state that a task wrote late", seed=118)
def _():
    original = StorageEffects._delete_location

    def deleted(self, checkpoint_id, directory):
        original(self, checkpoint_id, directory)
        if self._aborted_savepoints.pop(checkpoint_id, None):
            self._record.settle_savepoint(checkpoint_id)

    return [(StorageEffects, "_delete_location", deleted)]


bug("a driver that lost its lease tidies up", "I12", CheckpointCoordinator, "_on_shutdown", seed=6)(
    lambda original, self, event, now: original(self, replace(event, fenced=False), now)
)


@bug("the job's files go before its result is stored", "K13", seed=1)
def _():
    original = JobCore._job_ended

    def ended(self, effect):
        original(self, effect)
        if effect.status is not JobStatus.SUSPENDED:
            self._close(effect.status)

    def stored(self, event):
        self._end_is_stored = True
        self._outputs += self._unanswered

    return [(JobCore, "_job_ended", ended), (JobCore, "_on_result_stored", stored)]


bug("a new leader does not close the results to the old one", "K13, I12", World, "_adopt_results", seed=47)(nothing)


@bug("a new leader reads the result before it closes it to the old one", "K13, I12", seed=160)
def _():
    lead, start = World._lead, Driver.start

    def early(self):
        self.early = self.ha.result
        lead(self)

    def starts(self):
        world = self.world
        world.ha.result, stored = getattr(world, "early", None), world.ha.result
        try:
            start(self)
        finally:
            world.ha.result = stored

    return [(World, "_lead", early), (Driver, "start", starts)]


bug("a new driver starts with an empty history of failures", "the job record", Driver, "_earlier_failures", seed=1)(
    lambda self: ()
)
