"""What clients of the configuration endpoint may rely on, and whether the job lives up to it (ARCHITECTURE, 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_runtime.checkpoint.configuration import CheckpointOverrides
from ckpt_runtime.checkpoint.coordinator import CoordinatorState
from ckpt_runtime.scheduler.core_events import ChangeAnswered, ChangeOutcome

if TYPE_CHECKING:
    from tests.simulation.protocols.driver import Driver
    from tests.simulation.protocols.world import World


_ENDING = (CoordinatorState.CLOSING, CoordinatorState.CLOSED)


@dataclass(slots=True)
class _Request:
    """``documents`` are what it may have stored; ``idle`` when the last of them was stored before it was asked for."""

    changes: CheckpointOverrides | None
    documents: set[str | None]
    idle: bool = False
    answered: bool = False


class ClientView:
    """``possible`` are the overrides that may be stored: several while an answer is outstanding."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.possible: set[str | None] = {None}
        self._requests: dict[str, _Request] = {}
        self._storing: str | None = None
        """The request that the driver is busy with, perhaps for longer than its client waits."""
        self._asked = 0

    @property
    def waiting(self) -> list[str]:
        """Requests to the present driver without an answer."""
        return [name for name, request in self._requests.items() if not request.answered]

    @property
    def is_storing(self) -> bool:
        """Whether the present driver is busy with a request, answered or not."""
        return self._storing is not None

    def asks(self, driver: Driver, changes: CheckpointOverrides | None) -> str:
        """A new request; ``changes``: None drops all overrides."""
        self._asked += 1
        request_id = f"patch-{self._asked}"
        if driver.leads:
            self._requests[request_id] = _Request(changes, set())
        return request_id

    def begins(self, request_id: str) -> None:
        """The driver takes it up: one at a time."""
        if request_id in self._requests:
            # An answer that would tell of the end waits until that is stored; the change itself is settled by then.
            alone = self._storing in (None, request_id) or self._world.job_has_ended
            self._require(alone, f"{request_id} is stored beside {self._storing}")
            self._storing = request_id

    def stores(self, request_id: str, document: str | None) -> None:
        """A request that passed the checks: from now on either may be stored."""
        request = self._requests.get(request_id)
        if request is None:
            return
        stored = CheckpointOverrides.from_document(self._world.ha.overrides).given
        wanted = {} if request.changes is None else {**stored, **request.changes.given}
        given = CheckpointOverrides.from_document(document).given
        self._require(given == wanted, f"{document} is to be stored for {request.changes} beside {stored}")
        if not request.documents:
            request.idle = document == self._world.ha.overrides
        request.documents.add(document)
        self.possible.add(document)

    def written(self, document: str | None) -> None:
        """A write takes effect, perhaps long after its answer: the driver must still be at it."""
        harmless = document == self._world.ha.overrides or self._world.job_has_ended
        self._require(harmless or self._storing is not None, f"{document} is stored when the change is settled")

    def hears(self, driver: Driver, answer: ChangeAnswered) -> None:
        """Each request is answered once, with the truth."""
        if not driver.leads:
            return  # the answer is not used: the fence is checked first
        request = self._requests.get(answer.request_id)
        known = request is not None and not request.answered
        if request is None or not known:
            text = f"{answer.request_id} is answered again, with {answer.outcome.value}"
            raise self._world.broke(f"configuration: {text}")
        request.answered = True
        stored = self._world.ha.overrides
        match answer.outcome:
            case ChangeOutcome.APPLIED:
                self._require(stored in request.documents, f"200 for {request.documents}, stored {stored}")
                self._known(driver)
            case ChangeOutcome.BUSY:
                busy = self._storing not in (None, answer.request_id) or driver.changes.is_configuring
                self._require(busy, "busy, and nothing is being stored")
            case ChangeOutcome.REFUSED:
                self._require(not request.documents, f"{request.documents} are refused after they were accepted")
                self._storing = None
            case ChangeOutcome.NOT_STORED:
                self._require(request.idle or stored not in request.documents, f"error, but {stored} is stored")
                self._known(driver, in_force=False)
            case ChangeOutcome.JOB_ENDED:
                self._require(driver.machine.state.is_terminal, "reported to have ended, which the job has not")
                self._storing = None if self._storing == answer.request_id else self._storing
            case ChangeOutcome.UNKNOWN:
                pass  # the driver continues with it

    def _known(self, driver: Driver, *, in_force: bool = True) -> None:
        self._storing = None
        self.possible = {self._world.ha.overrides}
        if in_force and driver.coordinator.state not in _ENDING:
            self.in_force(driver)

    def in_force(self, driver: Driver) -> None:
        """At the start of a driver and after each change: what is submitted or replaced, then what is stored."""
        stored = self._world.ha.overrides
        self._require(stored in self.possible, f"stored {stored}, possible {sorted(map(str, self.possible))}")
        effective = CheckpointOverrides.from_document(stored).applied_to(driver.plan.settings)
        rules = driver.coordinator.configuration
        self._require(rules == effective, f"{rules} is in force, stored is {effective}")
        storing = None if self._storing is None else self._requests[self._storing]
        if storing is not None and storing.answered:  # its client got the answer "unknown"; now the driver knows
            self._storing = None
            self.possible = {stored}

    def settled(self) -> None:
        """The driver that had an update in hand is gone: the client never hears of it."""
        self.possible = {self._world.ha.overrides}
        self._storing = None
        self._requests.clear()

    def _require(self, holds: bool, message: str) -> None:
        if not holds:
            raise self._world.broke(f"configuration: {message}")
