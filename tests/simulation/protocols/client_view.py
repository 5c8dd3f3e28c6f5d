"""What clients of the configuration endpoint may rely on, and whether the job lives up to it (ARCHITECTURE, 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_runtime.checkpoint.coordinator import CoordinatorState
from ckpt_runtime.checkpoint.overrides import CheckpointOverrides
from tests.simulation.schedules.violation import Violation

if TYPE_CHECKING:
    from tests.simulation.protocols.driver import Driver
    from tests.simulation.protocols.world import World


_ENDING = (CoordinatorState.CLOSING, CoordinatorState.CLOSED)


class ClientView:
    """``possible`` are the overrides that may be stored: several while an answer is outstanding."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.possible: set[str | None] = {None}
        self._idle: set[str | None] = set()
        """Requests that would store what was stored already."""

    def sent(self, changes: CheckpointOverrides | None, document: str | None) -> None:
        """A request that passed the checks: from now on either may be stored. ``changes``: None drops all overrides."""
        stored = CheckpointOverrides.from_document(self._world.ha.overrides).given
        wanted = {} if changes is None else {**stored, **changes.given}
        given = CheckpointOverrides.from_document(document).given
        self._require(given == wanted, f"{document} is to be stored for {changes} beside {stored}")
        self.possible.add(document)
        if document == self._world.ha.overrides:
            self._idle.add(document)

    def confirmed(self, driver: Driver, document: str | None) -> None:
        """A 200: stored, and in force."""
        self._require(self._world.ha.overrides == document, f"200 for {document}, stored {self._world.ha.overrides}")
        self.possible = {document}
        self._idle.discard(document)
        if driver.coordinator.state not in _ENDING:
            self.in_force(driver)

    def refused(self, document: str | None) -> None:
        """An error that says "nothing has changed"."""
        self._require(
            len(self.possible) == 1 or self._world.ha.overrides != document or document in self._idle,
            f"error for {document}, but it is stored",
        )
        self.possible = {self._world.ha.overrides}
        self._idle.discard(document)

    def in_force(self, driver: Driver) -> None:
        """At the start of a driver and after each change: what is stored is what rules."""
        stored = self._world.ha.overrides
        self._require(stored in self.possible, f"stored {stored}, possible {sorted(map(str, self.possible))}")
        effective = CheckpointOverrides.from_document(stored).applied_to(self._world.scenario.submitted)
        rules = driver.coordinator.configuration
        self._require(rules == effective, f"{rules} is in force, stored is {effective}")

    def settled(self) -> None:
        """The driver that had an update in hand is gone: the client never hears of it."""
        self.possible = {self._world.ha.overrides}

    def _require(self, holds: bool, message: str) -> None:
        if not holds:
            raise Violation(f"configuration: {message}")
