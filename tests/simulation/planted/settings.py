"""Planted bugs of what is to be triggered when: deadlines, live settings, requests, and failures that count."""

from __future__ import annotations

from dataclasses import replace

from ckpt_runtime.checkpoint import triggering
from ckpt_runtime.checkpoint.completion import CheckpointFailureManager, CheckpointFailures, TriggerRequest
from ckpt_runtime.checkpoint.configuration import CheckpointOverrides
from ckpt_runtime.checkpoint.coordinator import CheckpointCoordinator
from ckpt_runtime.checkpoint.properties import CheckpointFailureReason as Reason
from ckpt_runtime.checkpoint.properties import CheckpointProperties, CheckpointType
from ckpt_runtime.checkpoint.schedule import CheckpointSchedule
from ckpt_runtime.checkpoint.triggering import CheckpointRequestDecider, Triggering
from ckpt_runtime.scheduler import core_events as core
from ckpt_runtime.scheduler.durable_change import SettingsUpdate
from ckpt_runtime.scheduler.job_core import JobCore
from tests.simulation.planted.registry import bug, nothing
from tests.simulation.protocols.driver import Driver

# --- deadlines and settings


@bug("an old canceller kills an extended checkpoint", "571.3", Triggering, "_expire", seed=151)
def _(self, checkpoint_id, generation, now):
    pending = self._pending.get(checkpoint_id)
    if pending is not None and pending.can_abort:
        self._failures.abort(pending, Reason.CHECKPOINT_EXPIRED, now)


@bug("a checkpoint is rescued for ever", "571.9", triggering, "rescued_until", seed=17)
def _(pending, configuration, now_ms):
    return now_ms + 50 if configuration.rescue_enabled and pending.acknowledged else None


bug("a checkpoint that is nearly done expires", "571.9", triggering, "rescued_until", seed=28)(
    lambda pending, configuration, now_ms: None
)


@bug("a checkpoint is rescued although the policy is off", "571.9", triggering, "rescued_until", seed=8)
def _(original, pending, configuration, now_ms):
    return original(pending, replace(configuration, rescue_enabled=True, rescue_min_progress=1), now_ms)


@bug("a new timeout counts from the change", "571.3", Triggering, "move_deadlines", seed=28)
def _(self, now):
    for pending in self._pending.abortable():
        self._pending.move_deadline(pending, now.rel_ms + self._in_force.settings.timeout_ms)
        self._schedule_canceller(pending)


bug("a new timeout leaves pending checkpoints alone", "571.3", Triggering, "move_deadlines", seed=28)(nothing)

bug("a checkpoint without a deadline", "1.1, step 5", Triggering, "_schedule_canceller", seed=8)(nothing)


@bug("deadlines by the wall clock", "FLINK-17073, reliability 2.4 b", CheckpointCoordinator, "handle", seed=5)
def _(original, self, event, now):
    return original(self, event, type(now)(now.abs_ms - 1_700_000_000_000, now.abs_ms))


@bug("a longer interval waits for the next tick", "571.4", CheckpointSchedule, "_rephase", seed=25)
def _(original, self, now):
    before = self._next_at
    if before is None or self.interval_ms is None or self._base + self.interval_ms <= before:
        original(self, now)


@bug("a new interval counts from the change", "571.4", CheckpointSchedule, "_rephase", seed=5)
def _(original, self, now):
    self._base = now.rel_ms
    original(self, now)


@bug("overrides are applied before they are stored", "571.5", JobCore, "_on_patch_requested", seed=1)
def _(original, self, event):
    before = self._update.overrides
    dropped = event.overrides is None
    self._update.overrides = CheckpointOverrides() if dropped else before.merged_with(event.overrides)
    self._patch_coordinator()
    self._update.overrides = before
    original(self, event)


@bug("overrides are answered before they are stored", "571.6", JobCore, "_on_patch_requested", seed=1)
def _(original, self, event):
    self._emit(core.ChangeAnswered(event.request_id, core.ChangeOutcome.APPLIED))
    original(self, event)


bug("overrides are lost with their driver", "571.5", Driver, "_stored_overrides", seed=1)(lambda self: None)


bug("overrides are stored and not applied", "571.2", JobCore, "_patch_coordinator", seed=1)(nothing)

bug("one override drops the others", "571.1", CheckpointOverrides, "merged_with", seed=5)(lambda self, later: later)


@bug("an unknown outcome of storing overrides is an error", "I8", SettingsUpdate, "answered", seed=72)
def _(original, self, event):
    if isinstance(event, core.ChangeUnknown):
        event = core.ChangeNotStored(event.request_id, event.message)
    return original(self, event)


# --- requests


@bug("too many at the same time", "1.2", CheckpointRequestDecider, "next", seed=149)
def _(original, self, load, now):
    return original(self, replace(load, savepoints_wait=False), now)


bug("triggers do not wait for clean-up", "1.2", CheckpointRequestDecider, "next", seed=50)(
    lambda original, self, load, now: original(self, replace(load, cleaning=0), now)
)

bug("two trigger cycles at once", "1.1", CheckpointRequestDecider, "next", seed=8)(
    lambda original, self, load, now: original(self, replace(load, triggering=False), now)
)

bug("no pause between checkpoints", "FLINK-18856", CheckpointSchedule, "pause_ends_at", seed=18)(
    property(lambda self: 0)
)

bug("the pause does not begin with a completion", "FLINK-18856", CheckpointSchedule, "completed", seed=18)(nothing)


@bug("ticks of earlier schedules live on", "protocols 10.14", CheckpointSchedule, "tick", seed=37)
def _(original, self, generation, now):
    due = self.is_running and self.has_tick
    if due:
        original(self, self._generation, type(now)(max(now.rel_ms, self._next_at), now.abs_ms))
    return due


bug("savepoints wait behind checkpoints", "1.2", TriggerRequest, "priority", seed=5)(
    property(lambda self: (self.requested_at, self.sequence))
)


@bug("periodic checkpoints go before those of users", "1.2", seed=5)
def _():
    def priority(self):
        return (not self.properties.is_savepoint, not self.periodic, self.requested_at, self.sequence)

    return [(TriggerRequest, "priority", property(priority))]


bug(
    "a savepoint does not wait while unaligned checkpoints are on",
    "1.2, 3.6",
    CheckpointRequestDecider,
    "next",
    seed=149,
)(lambda original, self, load, now: original(self, replace(load, savepoints_wait=False), now))


@bug("queued requests are forgotten when the tasks leave", "1.3", CheckpointRequestDecider, "drain", seed=9)
def _(original, self):
    original(self)
    return []


bug("a failed request is not answered", "every request ends", CheckpointFailures, "fail_request")(nothing)


# --- failures


bug("every failure counts", "1.5", Reason, "is_counted", seed=22)(property(lambda self: True))


@bug("expired checkpoints do not count", "1.5", seed=22)
def _():
    original = Reason.is_counted.fget
    return [(Reason, "is_counted", property(lambda self: self is not Reason.CHECKPOINT_EXPIRED and original(self)))]


bug("a success does not reset the count", "1.5", CheckpointFailureManager, "on_success", seed=76)(nothing)


@bug("a restart does not reset the count", "1.5", seed=64)
def _():
    def on_failure(self, *arguments, **more):
        return _ON_FAILURE(self, *arguments, **more)

    return [(CheckpointFailureManager, "on_restart", nothing), (CheckpointFailureManager, "on_failure", on_failure)]


_ON_FAILURE = CheckpointFailureManager.on_failure


@bug("one failure too many is tolerated", "1.5", CheckpointFailureManager, "on_failure", seed=22)
def _(self, *arguments, **more):
    settings = self._in_force.settings
    self._in_force.settings = replace(settings, tolerable_failed_checkpoints=settings.tolerable_failed_checkpoints + 1)
    try:
        return _ON_FAILURE(self, *arguments, **more)
    finally:
        self._in_force.settings = settings


@bug("failed savepoints count", "1.5", CheckpointFailureManager, "on_failure", seed=17)
def _(self, reason, properties, checkpoint_id=None, **more):
    return _ON_FAILURE(self, reason, CheckpointProperties(), checkpoint_id, **more)


@bug("a declined savepoint of a stop is tolerated", "1.5, 6.3", CheckpointFailureManager, "on_failure", seed=17)
def _(self, reason, properties, checkpoint_id=None, **more):
    if properties.is_synchronous:
        properties = CheckpointProperties(CheckpointType.SAVEPOINT)
    return _ON_FAILURE(self, reason, properties, checkpoint_id, **more)
