"""Who leads, by leases: a driver that renews its own and a standby that watches it, each by a clock of its own.

The rules are production's (``jobmaster/leadership.py``). Simulated are the clocks, which go at their own pace and stand
still while a machine is suspended, and storage, which for a while fails, is slow, loses signs of life, or answers
long after it has taken them.

What is checked: a standby decides to claim no lease of a driver whose signs of life come in, and at the moment of a
claim the former leader's own clock has counted it out, unless that clock stood still, or a sign of life came behind the
look.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ckpt_runtime.jobmaster.leadership import OwnLease, Watch
from tests.simulation.protocols.event_loop import EventLoop, SimulatedProcess
from tests.simulation.schedules.violation import Violation

if TYPE_CHECKING:
    from tests.simulation.protocols.driver import Driver
    from tests.simulation.protocols.world import World

LEASE_MS = 250
_RENEW_MS, _LOOK_MS = LEASE_MS // 5, LEASE_MS // 10
_LOOK_TAKES_MS = 16
_WRONG = ("fails", "is lost", "is lost", "is slow", "answers late")
_PACES = (0.9, 0.95, 1.0, 1.0, 1.05, 1.1)
_FASTEST = max(_PACES)


class LeaseClock:
    """A monotonic clock with an origin and a pace of its own."""

    def __init__(self, loop: EventLoop, origin: int, pace: float) -> None:
        self._loop = loop
        self._origin = origin
        self._pace = pace
        self._lost = 0
        self._stopped_at = self._goes_on_at = 0
        self.stood_still = False

    @property
    def now(self) -> float:
        loop = self._loop
        ahead = max(0, self._goes_on_at - loop.now)  # which is counted as lost already
        return self._origin + self._pace * (loop.now + ahead - self._lost)

    def stand_still(self, until: int) -> None:
        """From now on."""
        loop = self._loop
        self.stood_still = True
        if not self._stopped_at <= loop.now < self._goes_on_at:
            self._stopped_at = self._goes_on_at = loop.now
        self._lost += until - self._goes_on_at
        self._goes_on_at = until


class LeaseHolder:
    """A driver's side. ``begun``: by its clock, when it began to claim."""

    def __init__(self, world: World, clock: LeaseClock, begun: float) -> None:
        self.clock = clock
        self._world = world
        self._own = OwnLease(LEASE_MS)
        self._own.renewed(begun)
        self._how, self._bad_until = "well", 0

    @property
    def holds(self) -> bool:
        return self._own.holds(self.clock.now)

    def renew(self, driver: Driver) -> None:
        """Gives a sign of life, and the next one when that is answered."""
        if driver.shut_down:
            return
        loop, choices, begun = self._world.loop, self._world.choices, self.clock.now
        if self._bad_until <= loop.now:
            self._how = "well"
            if choices.fault("signs of life go wrong", 0.05):
                self._how = choices.pick("how signs of life go wrong", _WRONG)
                self._bad_until = loop.now + choices.delay("how long signs of life go wrong", 1, 400)
        how = self._how
        landing = loop.now + choices.delay("sign of life", 1, 10)
        landing += choices.delay("slow sign of life", 20, 150) if how == "is slow" else 0
        answer = landing + (choices.delay("late answer", 20, 150) if how == "answers late" else 1)
        is_taken = how in ("well", "is slow", "answers late")
        if is_taken:
            loop.at(landing, None, self._land, driver)
        loop.at(answer, driver.process, self._answered, driver, begun, is_taken or self.believes(how))

    @staticmethod
    def believes(how: str) -> bool:
        """Whether a sign of life that storage did not take counts for its driver."""
        return False

    def _land(self, driver: Driver) -> None:
        ha = self._world.ha
        if driver.leads:
            ha.signs += 1
            ha.last_sign = self._world.loop.now

    def _answered(self, driver: Driver, begun: float, is_taken: bool) -> None:
        now = self.clock.now
        in_time = now - begun <= max(_RENEW_MS, self._own.valid_until - begun)
        if not driver.leads:
            driver.lost_leadership()
            return
        if is_taken and in_time:
            self._own.renewed(begun)
        elif not self.holds:
            driver.lost_leadership()
            return
        self._world.loop.at(self._world.loop.now + _RENEW_MS, driver.process, self.renew, driver)


class Standby:
    """A driver that waits to lead."""

    def __init__(self, world: World) -> None:
        self._world = world
        choices = world.choices
        self.process = SimulatedProcess("standby")
        self.clock = new_clock(world)
        self._watch = Watch(LEASE_MS)
        world.loop.at(world.loop.now + choices.delay("standby", 0, 100), self.process, self._look)

    def _look(self) -> None:
        world, begun = self._world, self.clock.now
        if not world.ha.job_is_stored:
            return
        landing = world.loop.now + world.choices.delay("look", 1, _LOOK_TAKES_MS // 2)
        if world.choices.fault("a look fails", 0.05):
            world.loop.at(landing, self.process, self._look_again)
        else:
            world.loop.at(landing, None, self._read, begun)

    def _look_again(self) -> None:
        self._world.loop.at(self._world.loop.now + _LOOK_MS, self.process, self._look)

    def _read(self, begun: float) -> None:
        ha, world = self._world.ha, self._world
        seen = partial(self._seen, ha.epoch, ha.signs, ha.released, begun)
        world.loop.at(world.loop.now + world.choices.delay("look", 1, _LOOK_TAKES_MS // 2), self.process, seen)

    def _seen(self, epoch: int, signs: int, released: bool, begun: float) -> None:
        self._watch.saw(epoch, signs, released=released, begun=begun)
        if not self._watch.may_claim(self.clock.now):
            self._look_again()
            return
        world = self._world
        silent = world.loop.now - world.ha.last_sign
        if not released and world.ha.signs == signs and silent < LEASE_MS / _FASTEST - _LOOK_TAKES_MS:
            raise Violation(f"a lease is to be claimed whose last sign of life came {silent} ms ago")
        claim = partial(self._claim, epoch, signs, released, self.clock.now)
        world.loop.at(world.loop.now + world.choices.delay("claim", 1, 10), None, claim)

    def _claim(self, epoch: int, signs: int, released: bool, begun: float) -> None:
        """By creation of the next epoch's document: one is the first."""
        world = self._world
        if world.ha.epoch != epoch or not world.ha.job_is_stored or world.choices.fault("a claim fails", 0.1):
            world.loop.at(world.loop.now + 1, self.process, self._look_again)
            return
        if not released and world.ha.signs == signs:
            self._check(world.present)
        world.claim()
        Standby(world)
        if world.choices.fault("a standby dies when it has claimed", 0.05):
            return
        holder = LeaseHolder(world, self.clock, begun)
        at = world.loop.now + world.choices.delay("adoption", 0, 80)
        world.loop.at(at, None, world.take_up, world.ha.epoch, holder)

    def _check(self, former: Driver) -> None:
        holder = former.lease
        alive = former.process.alive and former.epoch == self._world.ha.epoch
        if alive and holder is not None and holder.holds and not holder.clock.stood_still:
            raise Violation(f"driver {former.epoch} counts on its lease when another one claims it")


def new_clock(world: World) -> LeaseClock:
    """Of a machine of its own."""
    choices = world.choices
    pace = choices.pick("the pace of a clock", _PACES)
    return LeaseClock(world.loop, choices.delay("the origin of a clock", 0, 1 << 40), pace)
