"""Replaces a job's plan while it lives, one change at a time: another parallelism or configuration.

To change the parallelism of a running job, slots are reserved first, then a fresh checkpoint is taken; then, as for
every change, the new plan is stored. Once stored, it takes effect; until then the job continues unchanged, regardless
of failures. The new plan of a job that is not running is stored at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from ckpt_runtime.scheduler import core_events as core
from ckpt_runtime.scheduler.core_events import ChangeOutcome, JobOutput
from ckpt_runtime.scheduler.durable_change import ANOTHER_LEADS, OUTCOME_UNKNOWN, DurableChange, Next
from ckpt_runtime.scheduler.job_plan import JobPlan
from ckpt_runtime.scheduler.job_status import JobState
from ckpt_runtime.scheduler.replacement import (
    ReplacementRefusedError,
    check_bounds,
    check_replaceable,
    declared_bounds,
    rescaled,
)

NOT_RESCALED = "The job keeps its parallelism"
NOT_RECONFIGURED = "The job keeps its configuration"

Request = core.RescaleRequested | core.ConfigurationRequested


class _Step(Enum):
    """The step that the change is waiting for."""

    SLOTS = "slots"
    CHECKPOINT = "checkpoint"
    STORED = "stored"


@dataclass(slots=True)
class _Wish:
    """A requested change. ``plan`` has a rescale's upper bounds until the available slots are known."""

    request: Request
    plan: JobPlan
    step: _Step
    writes: DurableChange = field(default_factory=DurableChange)


class PlanChange:
    """The change in progress, if any. Answers to earlier changes are ignored."""

    def __init__(self) -> None:
        self._desired: _Wish | None = None

    @property
    def plan(self) -> JobPlan | None:
        """The plan that the change in progress requests."""
        return None if self._desired is None else self._desired.plan

    @property
    def configures(self) -> core.ConfigurationRequested | None:
        """The configuration change in progress, which includes checkpoint settings."""
        request = None if self._desired is None else self._desired.request
        return request if isinstance(request, core.ConfigurationRequested) else None

    @property
    def needs_running_job(self) -> bool:
        """Whether the change is abandoned if the job stops running."""
        return self._desired is not None and self._desired.step is not _Step.STORED

    @property
    def refusal(self) -> str:
        """The beginning of the message that nothing has changed."""
        return NOT_RESCALED if self.configures is None else NOT_RECONFIGURED

    def awaits_checkpoint(self, request_id: str | None) -> bool:
        """Whether ``request_id`` is the request for the fresh checkpoint."""
        desired = self._desired
        return (
            desired is not None
            and desired.step is _Step.CHECKPOINT
            and request_id == checkpoint_request(desired.request)
        )

    def concerns(self, request_id: str) -> bool:
        return self._desired is not None and self._desired.request.request_id == request_id

    def requested(self, event: Request, present: JobPlan, state: JobState) -> list[JobOutput]:
        """Begins a change; ``present`` is the accepted plan, which the job runs or is about to run."""
        request_id = event.request_id
        if self._desired is not None:
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

    def _begin(self, event: Request, plan: JobPlan, least_slots: int, *, at_once: bool) -> list[JobOutput]:
        self._desired = _Wish(event, plan, _Step.STORED if at_once else _Step.SLOTS)
        if at_once:
            return [core.StorePlan(event.request_id, plan.graph, plan.own, 0)]
        return [core.ReserveSlots(event.request_id, plan.graph.slots, least_slots)]

    def slots_reserved(self, event: core.SlotsReserved, present: JobPlan) -> list[JobOutput]:
        """Continues with a fresh checkpoint; if no vertex changes, a rescale only stores its declared bounds."""
        desired = self._desired
        if desired is None or desired.step is not _Step.SLOTS or not self.concerns(event.request_id):
            return []
        desired.step = _Step.CHECKPOINT
        if isinstance(desired.request, core.ConfigurationRequested):
            return []
        graph = rescaled(present.graph, desired.request.bounds, event.slots)
        desired.plan = replace(present, graph=graph)
        if graph.vertices != present.graph.vertices:
            return []
        if declared_bounds(graph) == declared_bounds(present.graph):
            return self._end(ChangeOutcome.APPLIED)
        return [core.ReleaseReserve(), *self.checkpoint_taken()]

    def checkpoint_taken(self) -> list[JobOutput]:
        desired = self._desired
        assert desired is not None
        desired.step = _Step.STORED
        return [core.StorePlan(desired.request.request_id, desired.plan.graph, desired.plan.own, 0)]

    def stored(self) -> list[JobOutput]:
        """The change is in force. The reserved slots are kept for the next deployment."""
        # Without the leading ReleaseReserve, see _end.
        return self._end(ChangeOutcome.APPLIED)[1:]

    def unconfirmed(self, event: core.ChangeNotStored | core.ChangeUnknown) -> tuple[Next, list[JobOutput]]:
        """Storing failed or its outcome is unknown. After GIVE_UP, nothing is stored and :meth:`given_up` is next."""
        desired = self._desired
        assert desired is not None
        final = isinstance(event, core.ChangeNotStored) and event.final
        request_id, plan, writes = desired.request.request_id, desired.plan, desired.writes
        match following := writes.failed(unknown=isinstance(event, core.ChangeUnknown), final=final):
            case Next.STORE_AGAIN:
                return following, [core.StorePlan(request_id, plan.graph, plan.own, writes.attempt)]
            case Next.SETTLE:
                told = core.ChangeAnswered(request_id, ChangeOutcome.UNKNOWN, OUTCOME_UNKNOWN)
                settle = core.SettlePlan(request_id, plan.graph, plan.own, writes.settle_attempt)
                return following, [told, settle] if writes.settle_attempt == 0 else [settle]
        return following, []

    def given_up(self, message: str) -> list[JobOutput]:
        return self._end(ChangeOutcome.NOT_STORED, message)

    def abandoned(self) -> list[JobOutput]:
        """Another driver leads and reads the stored state. Later answers change nothing here."""
        return self._end(ChangeOutcome.UNKNOWN, ANOTHER_LEADS)

    def _end(self, outcome: ChangeOutcome, message: str = "") -> list[JobOutput]:
        desired, self._desired = self._desired, None
        if desired is None:
            return []
        answer = core.ChangeAnswered(desired.request.request_id, outcome, message)
        return [core.ReleaseReserve()] if desired.writes.is_answered else [core.ReleaseReserve(), answer]


def checkpoint_request(event: Request | core.SlotsReserved) -> str:
    """The id of the request for a rescale's fresh checkpoint."""
    return f"rescale-{event.request_id}"
