"""Planted bugs of leases, of lost writes, of what a takeover brings back, and of cancelling with a savepoint."""

from __future__ import annotations

from ckpt_runtime.jobmaster.leadership import OwnLease, Watch
from ckpt_runtime.scheduler import core_events as core
from ckpt_runtime.scheduler.job_core import JobCore
from tests.simulation.planted.registry import bug
from tests.simulation.protocols import driver as simulated_driver
from tests.simulation.protocols.driver_storage import Outcome, StorageShell
from tests.simulation.protocols.leases import LeaseHolder
from tests.simulation.protocols.plan_endpoint import PlanEndpoint

# --- leases


@bug("a deposed driver writes by its own clock, which stood still", "invariant 3", seed=22)
def _():
    fence = simulated_driver.Driver.fence

    def by_the_clock(self):
        return fence(self) if self.lease is None else self.lease.holds or None

    return [(simulated_driver.Driver, "fence", by_the_clock)]


bug("a sign of life that was lost is taken for given", "invariant 11", LeaseHolder, "believes", seed=33)(
    staticmethod(lambda how: how == "is lost")
)


@bug("a leader counts on its lease for as long as a challenger waits", "invariant 11", seed=45)
def _():
    init = OwnLease.__init__
    return [(OwnLease, "__init__", lambda self, lease_time: init(self, lease_time * 3 / 2))]


@bug("a challenger does not look at signs of life", "invariant 11")
def _():
    saw = Watch.saw

    def once(self, epoch, sequence, *, released, begun):
        saw(self, epoch, 0, released=released, begun=begun)

    return [(Watch, "saw", once)]


# --- writes that are lost


def _lost_is_done(kind):
    original = StorageShell._answered

    def answered(self, what, answer, told, refused, fenced):
        if what.startswith(kind) and told is Outcome.UNKNOWN:
            told = Outcome.DONE
        original(self, what, answer, told, refused, fenced)

    return [(StorageShell, "_answered", answered)]


@bug("a lost removal of a pointer is taken for done", "K13")
def _():
    return _lost_is_done("removal")


@bug("lost overrides are taken for stored", "571.6, K13", seed=15)
def _():
    return _lost_is_done("overrides")


@bug("a lost configuration or graph is taken for stored", "530.5, K13", PlanEndpoint, "_written", seed=29)
def _(original, self, order, outcome):
    if outcome is Outcome.UNKNOWN:
        self._driver.tell(core.PlanStored(order.request_id))
    else:
        original(self, order, outcome)


@bug("a lost result is taken for stored", "K13")
def _():
    return _lost_is_done("result")


# --- changes of the configuration


@bug("a configuration is answered before it is stored", "530.5", JobCore, "_on_change_requested")
def _(original, self, event):
    if isinstance(event, core.ConfigurationRequested):
        self._emit(core.ChangeAnswered(event.request_id, core.ChangeOutcome.APPLIED))
    original(self, event)


@bug("overrides come back from the copy that a standby read before it led", "530.9, after a takeover")
def _():
    init = simulated_driver.Driver.__init__

    def stale(self, world, *arguments):
        stored = world.ha.overrides
        world.ha.overrides = getattr(world, "read_early", stored)
        try:
            init(self, world, *arguments)
        finally:
            world.ha.overrides = world.read_early = stored

    return [(simulated_driver.Driver, "__init__", stale)]


# --- cancelling with a savepoint


bug(
    "the periodic trigger goes on until the job is cancelled", "147.7", JobCore, "_on_savepoint_before_cancel", seed=36
)(lambda self, event: self._on_trigger_requested(event.trigger))


@bug("users' checkpoints go on until the job is cancelled", "147.7", JobCore, "_on_trigger_requested", seed=36)
def _(original, self, event):
    present, self._cancel_request = self._cancel_request, None
    try:
        original(self, event)
    finally:
        self._cancel_request = present


@bug("a restart before the cancellation starts the periodic trigger", "147.7", JobCore, "_all_tasks_running", seed=386)
def _(original, self, effect):
    present, self._cancel_request = self._cancel_request, None
    try:
        original(self, effect)
    finally:
        self._cancel_request = present


@bug(
    "the periodic trigger stays off when the savepoint of a cancellation fails",
    "147.7",
    JobCore,
    "_request_failed",
    seed=154,
)
def _(original, self, effect):
    start, self._start_periodic_trigger = self._start_periodic_trigger, lambda effect: None
    try:
        original(self, effect)
    finally:
        self._start_periodic_trigger = start
