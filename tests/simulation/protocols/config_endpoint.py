"""FLIP-571's endpoint in the simulation: refuse, persist, apply, answer, in this order. One update at a time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.configuration import CheckpointConfigurationError
from ckpt_runtime.checkpoint.overrides import CheckpointOverrides
from tests.simulation.protocols.driver_storage import Outcome

if TYPE_CHECKING:
    from tests.simulation.protocols.driver import Driver


class ConfigEndpoint:
    """Of one driver."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._world = driver.world
        self._updating = False

    def patch(self, changes: CheckpointOverrides | None) -> None:
        """``None`` is DELETE: back to the submitted values."""
        driver, world = self._driver, self._world
        clients = world.checker.clients
        if self._updating or driver.machine.state.is_terminal:
            return
        stored = CheckpointOverrides.from_document(world.ha.overrides)
        overrides = CheckpointOverrides() if changes is None else stored.merged_with(changes)
        try:
            overrides.applied_to(world.scenario.submitted)
        except CheckpointConfigurationError:
            return
        document = overrides.to_document() if overrides.given else None
        clients.sent(changes, document)
        self._updating = True
        self._persist(document, world.ha.revision)

    def _persist(self, document: str | None, revision: int) -> None:
        self._driver.storage.write(
            "overrides", partial(self._store, document, revision), partial(self._persisted, document, revision)
        )

    def _store(self, document: str | None, revision: int) -> bool:
        """By compare-and-set."""
        ha = self._world.ha
        if ha.revision != revision or not ha.job_is_stored:
            return False
        ha.overrides = document
        ha.revision += 1
        return True

    def _persisted(self, document: str | None, revision: int, outcome: Outcome) -> None:
        ha = self._world.ha
        if outcome is Outcome.UNKNOWN:
            # Writing something else settles it: the first attempt can no longer take effect after that.
            if ha.revision == revision:
                ha.revision += 1
                outcome = Outcome.FAILED
            else:
                outcome = Outcome.DONE
        if outcome is Outcome.DONE:
            self.apply(document)
            self._world.crash_point(self._driver, "before the answer")
            self._world.checker.clients.confirmed(self._driver, document)
        else:
            self._world.checker.clients.refused(document)
        self._updating = False

    def apply(self, document: str | None) -> None:
        """Puts what is stored in force."""
        overrides = CheckpointOverrides.from_document(document)
        self._driver.tell(on.ConfigurationPatched(overrides.applied_to(self._world.scenario.submitted)))
