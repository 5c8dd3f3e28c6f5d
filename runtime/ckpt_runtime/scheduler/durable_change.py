"""Makes changes of a running job durable: checkpoint settings and the plan, one change of each kind at a time.

A change takes effect once it is stored, never before; until then the job continues unchanged, regardless of failures.
An unknown outcome of a write is settled by storing the change again, which reads first. If this does not succeed soon,
the sender is notified, and the stored state is rewritten unchanged until that succeeds. A read alone would not suffice:
an earlier write that is still in progress could take effect after the read, and this driver would never apply it.
Sources: FLIP-571, FLIP-530.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import Enum

from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration, CheckpointOverrides, OverridesChange
from ckpt_runtime.scheduler import core_events as core
from ckpt_runtime.scheduler.core_events import ChangeOutcome, JobOutput
from ckpt_runtime.scheduler.deployment import JobPlan
from ckpt_runtime.scheduler.job_status import JobState
from ckpt_runtime.scheduler.replacement import (
    ReplacementRefusedError,
    check_bounds,
    check_replaceable,
    declared_bounds,
    rescaled,
)

ANOTHER_LEADS = "another driver is the leader, ask it what is stored"
OUTCOME_UNKNOWN = (
    "it is unknown whether the change is stored; it is looked up as soon as storage answers, and applied if "
    "it is; look at the configuration, or repeat the request then"
)
MAX_ATTEMPTS = 5
"""Number of attempts to store a change before its sender gets the answer that the outcome is unknown."""
NOT_RESCALED = "The job keeps its parallelism"
NOT_RECONFIGURED = "The job keeps its configuration"

PlanRequest = core.RescaleRequested | core.ConfigurationRequested


class Next(Enum):
    """The next step after a write that was not confirmed."""

    GIVE_UP = "nothing has changed"
    STORE_AGAIN = "store it again"
    SETTLE = "write again what is stored"


class _Step(Enum):
    """The step that a change is waiting for."""

    SLOTS = "slots"
    CHECKPOINT = "checkpoint"
    STORED = "stored"


@dataclass(slots=True)
class _Change:
    """A requested change. A rescale's plan has its upper bounds until the available slots are known.

    ``unknown``: one of its ``attempt`` writes may have been done.
    """

    request: core.PatchRequested | PlanRequest
    stores: OverridesChange | JobPlan
    step: _Step = _Step.STORED
    attempt: int = 0
    unknown: bool = False

    @property
    def is_answered(self) -> bool:
        """Whether the sender got the answer that the outcome is unknown."""
        return self.attempt >= MAX_ATTEMPTS


class DurableChange(ABC):
    """The change of one kind that is in progress, if any. Answers to earlier changes are ignored."""

    def __init__(self) -> None:
        self._change: _Change | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a change is in progress."""
        return self._change is not None

    def concerns(self, request_id: str) -> bool:
        """Whether ``request_id`` is the change in progress."""
        return self._change is not None and self._change.request.request_id == request_id

    @abstractmethod
    def _order(self, change: _Change, *, settles: bool) -> JobOutput:
        """The order to store the change; with ``settles``, to rewrite the stored document."""

    def failed(self, *, unknown: bool, final: bool = False) -> Next:
        """A write failed (``final``: so did all earlier ones), or its outcome is unknown."""
        change = self._change
        assert change is not None
        if not unknown and (final or not change.unknown):
            return Next.GIVE_UP
        # Once a write may have taken effect, a later failure does not disprove it.
        change.unknown |= unknown
        change.attempt += 1
        return Next.SETTLE if change.is_answered else Next.STORE_AGAIN

    def unconfirmed(self, event: core.ChangeNotStored | core.ChangeUnknown) -> tuple[Next, list[JobOutput]]:
        """Storing failed or its outcome is unknown. After GIVE_UP, nothing is stored and :meth:`given_up` is next."""
        change = self._change
        assert change is not None
        final = isinstance(event, core.ChangeNotStored) and event.final
        match following := self.failed(unknown=isinstance(event, core.ChangeUnknown), final=final):
            case Next.STORE_AGAIN:
                return following, [self._order(change, settles=False)]
            case Next.SETTLE:
                settle = self._order(change, settles=True)
                answer = core.ChangeAnswered(change.request.request_id, ChangeOutcome.UNKNOWN, OUTCOME_UNKNOWN)
                return following, [answer, settle] if change.attempt == MAX_ATTEMPTS else [settle]
        return following, []

    def given_up(self, message: str) -> list[JobOutput]:
        """Ends the change; nothing of it is stored."""
        return self._end(ChangeOutcome.NOT_STORED, message)

    def abandoned(self) -> list[JobOutput]:
        """Another driver leads and reads the stored state. Later answers change nothing here."""
        return self._end(ChangeOutcome.UNKNOWN, ANOTHER_LEADS)

    def _end(self, outcome: ChangeOutcome, message: str = "") -> list[JobOutput]:
        change, self._change = self._change, None
        if change is None or change.is_answered:
            return []
        return [core.ChangeAnswered(change.request.request_id, outcome, message)]


class SettingsUpdate(DurableChange):
    """Changes ``overrides``, the checkpoint settings in force over those of the configuration (FLIP-571)."""

    def __init__(self, overrides: CheckpointOverrides) -> None:
        super().__init__()
        self.overrides = overrides

    def requested(self, event: core.PatchRequested, settings: CheckpointConfiguration) -> list[JobOutput]:
        """Begins a change; ``settings`` are the job's checkpoint settings without overrides."""
        if self._change is not None:
            return [core.ChangeAnswered(event.request_id, ChangeOutcome.BUSY)]
        self._change = _Change(event, OverridesChange(event.overrides, settings))
        return [self._order(self._change, settles=False)]

    def _order(self, change: _Change, *, settles: bool) -> JobOutput:
        assert isinstance(change.stores, OverridesChange)
        request_id = change.request.request_id
        if settles:
            return core.SettleOverrides(request_id, change.attempt - MAX_ATTEMPTS)
        return core.StoreOverrides(request_id, change.stores, change.attempt)

    def stored(self, event: core.OverridesStored) -> list[JobOutput]:
        """The change in progress is settled: :attr:`overrides` now equals the stored overrides."""
        # The stored value, not the requested one: an earlier write may have taken effect as well.
        self.overrides = CheckpointOverrides.from_document(event.text)
        return self._end(ChangeOutcome.APPLIED)

    def answered(self, event: core.OverridesRefused | core.ChangeNotStored | core.ChangeUnknown) -> list[JobOutput]:
        """Storing or settling failed, or its outcome is unknown."""
        if not self.concerns(event.request_id):
            return []
        if isinstance(event, core.OverridesRefused):
            return self._end(ChangeOutcome.REFUSED, event.message)
        following, outputs = self.unconfirmed(event)
        return self.given_up(event.message) if following is Next.GIVE_UP else outputs


class PlanChange(DurableChange):
    """Replaces a job's plan while it lives: another parallelism or configuration (FLIP-530).

    To change the parallelism of a running job, slots are reserved first, then a fresh checkpoint is taken; then, as for
    every change, the new plan is stored. The new plan of a job that is not running is stored at once.
    """

    @property
    def plan(self) -> JobPlan | None:
        """The plan that the change in progress requests."""
        plan = None if self._change is None else self._change.stores
        return plan if isinstance(plan, JobPlan) else None

    @property
    def configures(self) -> core.ConfigurationRequested | None:
        """The configuration change in progress, which includes checkpoint settings."""
        request = None if self._change is None else self._change.request
        return request if isinstance(request, core.ConfigurationRequested) else None

    @property
    def needs_running_job(self) -> bool:
        """Whether the change is abandoned if the job stops running."""
        return self._change is not None and self._change.step is not _Step.STORED

    @property
    def refusal(self) -> str:
        """The beginning of the message that nothing has changed."""
        return NOT_RESCALED if self.configures is None else NOT_RECONFIGURED

    def awaits_checkpoint(self, request_id: str | None) -> bool:
        """Whether ``request_id`` is the request for the fresh checkpoint."""
        change = self._change
        return (
            change is not None
            and change.step is _Step.CHECKPOINT
            and request_id == checkpoint_request(change.request.request_id)
        )

    def requested(self, event: PlanRequest, present: JobPlan, state: JobState) -> list[JobOutput]:
        """Begins a change; ``present`` is the accepted plan, which the job runs or is about to run."""
        request_id = event.request_id
        if self._change is not None:
            return [core.ChangeAnswered(request_id, ChangeOutcome.BUSY)]
        try:
            check_replaceable(state, "parallelism" if isinstance(event, core.RescaleRequested) else "configuration")
        except ReplacementRefusedError as error:
            return [core.ChangeAnswered(request_id, ChangeOutcome.NOT_NOW, str(error))]
        if isinstance(event, core.RescaleRequested):
            return self._rescale(event, present, state)
        return self._configure(event, present, state)

    def _rescale(self, event: core.RescaleRequested, present: JobPlan, state: JobState) -> list[JobOutput]:
        try:
            check_bounds(present.graph, event.bounds)
        except ReplacementRefusedError as error:
            return [core.ChangeAnswered(event.request_id, ChangeOutcome.REFUSED, str(error))]
        count = max(bounds.upper for bounds in event.bounds.values())
        graph = rescaled(present.graph, event.bounds, count)
        at_once = state is not JobState.RUNNING
        if graph.vertices == present.graph.vertices:
            if declared_bounds(graph) == declared_bounds(present.graph):
                return [core.ChangeAnswered(event.request_id, ChangeOutcome.APPLIED)]
            at_once = True  # only the declared bounds change
        least = max(bounds.lower for bounds in event.bounds.values())
        return self._begin(event, replace(present, graph=graph), least, at_once=at_once)

    def _configure(self, event: core.ConfigurationRequested, present: JobPlan, state: JobState) -> list[JobOutput]:
        # Compared by identity: with an equal plan of another version, a version number would be assigned twice.
        if event.base is not present:
            return [core.ChangeAnswered(event.request_id, ChangeOutcome.STALE)]
        graph = event.plan.graph
        at_once = state is not JobState.RUNNING or graph.vertices == present.graph.vertices
        return self._begin(event, event.plan, graph.slots, at_once=at_once)

    def _begin(self, event: PlanRequest, plan: JobPlan, least_slots: int, *, at_once: bool) -> list[JobOutput]:
        change = self._change = _Change(event, plan, _Step.STORED if at_once else _Step.SLOTS)
        if at_once:
            return [self._order(change, settles=False)]
        return [core.ReserveSlots(event.request_id, plan.graph.slots, least_slots)]

    def _order(self, change: _Change, *, settles: bool) -> JobOutput:
        plan = change.stores
        assert isinstance(plan, JobPlan)
        if settles:
            attempt = change.attempt - MAX_ATTEMPTS
            return core.SettlePlan(change.request.request_id, plan.graph, plan.own, attempt)
        return core.StorePlan(change.request.request_id, plan.graph, plan.own, change.attempt)

    def slots_reserved(self, event: core.SlotsReserved, present: JobPlan) -> list[JobOutput]:
        """Continues with a fresh checkpoint; if no vertex changes, a rescale only stores its declared bounds."""
        change = self._change
        if change is None or change.step is not _Step.SLOTS or not self.concerns(event.request_id):
            return []
        change.step = _Step.CHECKPOINT
        if not isinstance(change.request, core.RescaleRequested):
            return []
        graph = rescaled(present.graph, change.request.bounds, event.slots)
        change.stores = replace(present, graph=graph)
        if graph.vertices != present.graph.vertices:
            return []
        if declared_bounds(graph) == declared_bounds(present.graph):
            return self._end(ChangeOutcome.APPLIED)
        return [core.ReleaseReserve(), *self.checkpoint_taken()]

    def checkpoint_taken(self) -> list[JobOutput]:
        """Stores the plan next."""
        change = self._change
        assert change is not None
        change.step = _Step.STORED
        return [self._order(change, settles=False)]

    def stored(self) -> list[JobOutput]:
        """The change is in force. The reserved slots are kept for the next deployment."""
        # Without the leading ReleaseReserve, see _end.
        return self._end(ChangeOutcome.APPLIED)[1:]

    def _end(self, outcome: ChangeOutcome, message: str = "") -> list[JobOutput]:
        return [core.ReleaseReserve(), *super()._end(outcome, message)] if self.is_busy else []


def checkpoint_request(request_id: str) -> str:
    """The id of the request for the fresh checkpoint of a change of the plan."""
    return f"rescale-{request_id}"
