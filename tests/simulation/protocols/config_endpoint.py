"""FLIP-571's endpoint in the simulation: hands requests to the core and carries out what it asks of the stored plan."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ckpt_runtime.checkpoint.configuration import CheckpointConfigurationError, CheckpointOverrides
from ckpt_runtime.scheduler import core_events as core
from tests.simulation.protocols.driver_storage import Outcome

if TYPE_CHECKING:
    from tests.simulation.protocols.driver import Driver

_PAUSE_MS = 15


class ConfigEndpoint:
    """Of one driver."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._world = driver.world

    def patch(self, changes: CheckpointOverrides | None) -> None:
        """``None`` is DELETE: back to the submitted values."""
        request_id = self._world.checker.clients.asks(self._driver, changes)
        self._driver.tell(core.PatchRequested(request_id, changes))

    def answered(self, answer: core.ChangeAnswered) -> None:
        """The client hears of it."""
        if answer.outcome is core.ChangeOutcome.JOB_ENDED:
            self._driver.checker.told_of_the_end()
        if answer.outcome is core.ChangeOutcome.APPLIED:
            self._world.crash_point(self._driver, "before the answer")
        self._world.checker.clients.hears(self._driver, answer)

    # --- the stored plan

    def store(self, order: core.StoreOverrides) -> None:
        """Fetches, modifies and writes by compare-and-set; one that is tried again meets storage that is still bad."""
        self._world.checker.clients.begins(order.request_id)
        if order.attempt == 0:
            self._store(order)
        else:
            at = self._world.loop.now + _PAUSE_MS * order.attempt
            self._world.loop.at(at, self._driver.process, self._store, order)

    def _store(self, order: core.StoreOverrides) -> None:
        ha = self._world.ha
        try:
            document = order.change(ha.overrides)
        except CheckpointConfigurationError as error:
            self._tell_later(core.OverridesRefused(order.request_id, str(error)))
            return
        self._world.checker.clients.stores(order.request_id, document)
        if order.attempt and document == ha.overrides and ha.job_is_stored:
            self._tell_later(core.OverridesStored(order.request_id, document))  # what was unknown has been done
            return
        self._driver.storage.write(
            "overrides",
            partial(self._write, document, ha.revision),
            partial(self._written, order.request_id, document),
            faults=0.06 if order.attempt == 0 else 0.6,
        )

    def _write(self, document: str | None, revision: int) -> bool:
        ha = self._world.ha
        if ha.revision != revision or not ha.job_is_stored:
            return False
        self._world.checker.clients.written(document)
        ha.overrides = document
        ha.revision += 1
        return True

    def _written(self, request_id: str, document: str | None, outcome: Outcome) -> None:
        if outcome is Outcome.DONE:
            self._driver.tell(core.OverridesStored(request_id, document))
        elif outcome is Outcome.UNKNOWN:
            self._driver.tell(core.ChangeUnknown(request_id, "simulated"))
        else:
            gone = not self._world.ha.job_is_stored
            self._driver.tell(core.ChangeNotStored(request_id, "simulated", gone))

    def settle(self, order: core.SettleOverrides) -> None:
        at = self._world.loop.now + _PAUSE_MS * (order.attempt + 1)
        self._world.loop.at(at, self._driver.process, self._settle, order.request_id)

    def _settle(self, request_id: str) -> None:
        """As it is, under a new revision: no earlier write can take effect after that."""
        ha = self._world.ha
        write = partial(self._write, ha.overrides, ha.revision)
        answer = partial(self._written, request_id, ha.overrides)
        self._driver.storage.write("overrides", write, answer, faults=0.3)

    def _tell_later(self, event: core.OverridesStored | core.OverridesRefused) -> None:
        self._world.loop.at(self._world.loop.now + 1, self._driver.process, self._driver.tell, event)
