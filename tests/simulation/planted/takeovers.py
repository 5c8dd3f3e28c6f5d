"""Planted bugs of leases, of lost writes, of what a takeover brings back, and of cancelling with a savepoint."""

from __future__ import annotations

from functools import partial
from operator import eq

from ckpt_runtime.jobmaster.leadership import OwnLease, Watch
from ckpt_runtime.scheduler import core_events as core
from ckpt_runtime.scheduler.job_core import JobCore
from tests.simulation.planted.registry import bug
from tests.simulation.planted.storage import leaves_open
from tests.simulation.protocols.driver import Driver
from tests.simulation.protocols.leases import LeaseHolder
from tests.simulation.protocols.record import HaRecord

# --- leases


@bug("a deposed driver writes by its own clock, which stood still", "invariant 3", seed=63)
def _():
    fence = Driver.fence

    def by_the_clock(self):
        return fence(self) if self.lease is None else self.lease.holds or None

    return [(Driver, "fence", by_the_clock), leaves_open("pointers")]


bug("a sign of life that was lost is taken for given", "invariant 11", LeaseHolder, "believes", seed=33)(
    staticmethod(lambda how: how == "is lost")
)


@bug("a leader counts on its lease for as long as a challenger waits", "invariant 11", seed=45)
def _():
    init = OwnLease.__init__
    return [(OwnLease, "__init__", lambda self, lease_time: init(self, lease_time * 3 / 2))]


@bug("a challenger does not look at signs of life", "invariant 11", seed=7)
def _():
    saw = Watch.saw

    def once(self, epoch, sequence, *, released, begun):
        saw(self, epoch, 0, released=released, begun=begun)

    return [(Watch, "saw", once)]


# --- writes that are lost


for _what, _seed in (("removal", 29), ("overrides", 15), ("graph", 33), ("result", 1)):
    bug(f"a write without an answer is taken for done: {_what}", "K13, 571.6, 530.5", HaRecord, "believes", seed=_seed)(
        staticmethod(partial(eq, _what))
    )


# --- changes of the configuration


@bug("a configuration is answered before it is stored", "530.5", JobCore, "_on_change_requested", seed=1)
def _(original, self, event):
    if isinstance(event, core.ConfigurationRequested):
        self._emit(core.ChangeAnswered(event.request_id, core.ChangeOutcome.APPLIED))
    original(self, event)


@bug("overrides come back from the copy that a standby read before it led", "530.9, after a takeover", seed=1)
def _():
    def stale(self):
        world = self.world
        stored = world.ha.overrides
        early, world.read_early = getattr(world, "read_early", stored), stored
        return early

    return [(Driver, "_stored_overrides", stale)]


# --- cancelling with a savepoint


bug(
    "the periodic trigger continues until the job is cancelled",
    "147.7",
    JobCore,
    "_on_savepoint_before_cancel",
    seed=36,
)(lambda self, event: self._on_trigger_requested(event.trigger))


@bug("users' checkpoints continue until the job is cancelled", "147.7", JobCore, "_on_trigger_requested", seed=36)
def _(original, self, event):
    present, self._cancel_request = self._cancel_request, None
    try:
        original(self, event)
    finally:
        self._cancel_request = present


@bug("a restart before the cancellation starts the periodic trigger", "147.7", JobCore, "_all_tasks_running", seed=470)
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
    seed=450,
)
def _(original, self, effect):
    start, self._start_periodic_trigger = self._start_periodic_trigger, lambda effect: None
    try:
        original(self, effect)
    finally:
        self._start_periodic_trigger = start
