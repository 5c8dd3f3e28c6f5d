"""A running job at another parallelism, one change after the other: slots first, then a fresh checkpoint, then stored.

Stored, it takes effect: the present deployment ends for one at the new parallelism, from that checkpoint or a later
one. Until it is stored the job goes on as it is, whatever fails. A job that does not run has nothing to lose: its new
parallelism is stored at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.scheduler import core_events as core
from ckpt_runtime.scheduler.core_events import ChangeOutcome, JobOutput
from ckpt_runtime.scheduler.durable_change import ANOTHER_LEADS, OUTCOME_UNKNOWN, DurableChange, Next
from ckpt_runtime.scheduler.job_status import JobState
from ckpt_runtime.scheduler.replacement import ReplacementRefusedError, check_bounds, check_replaceable, rescaled

NOT_RESCALED = "The job keeps its parallelism"


class _Step(Enum):
    """What is waited for."""

    SLOTS = "slots"
    CHECKPOINT = "checkpoint"
    STORED = "stored"


@dataclass(slots=True)
class _Wish:
    """``graph`` is at the upper bounds until it is known which slots there are."""

    request: core.RescaleRequested
    graph: JobGraph
    step: _Step
    writes: DurableChange = field(default_factory=DurableChange)


class Rescale:
    """The rescale in progress, if any. Answers of earlier ones are ignored."""

    def __init__(self) -> None:
        self._wish: _Wish | None = None

    @property
    def graph(self) -> JobGraph | None:
        """What the job is being brought to."""
        return None if self._wish is None else self._wish.graph

    @property
    def needs_running_job(self) -> bool:
        """Whether it is over when the job runs no more."""
        return self._wish is not None and self._wish.step is not _Step.STORED

    def awaits_checkpoint(self, request_id: str | None) -> bool:
        """Whether that is the request for the fresh checkpoint."""
        wish = self._wish
        return wish is not None and wish.step is _Step.CHECKPOINT and request_id == checkpoint_request(wish.request)

    def concerns(self, request_id: str) -> bool:
        return self._wish is not None and self._wish.request.request_id == request_id

    def requested(self, event: core.RescaleRequested, present: JobGraph, state: JobState) -> list[JobOutput]:
        """``present`` is what the job runs, or is about to."""
        request_id = event.request_id
        if self._wish is not None:
            return [core.ChangeAnswered(request_id, ChangeOutcome.BUSY)]
        try:
            check_replaceable(state, "parallelism")
        except ReplacementRefusedError as error:
            return [core.ChangeAnswered(request_id, ChangeOutcome.NOT_NOW, str(error))]
        try:
            check_bounds(present, event.bounds)
        except ReplacementRefusedError as error:
            return [core.ChangeAnswered(request_id, ChangeOutcome.REFUSED, str(error))]
        count = max(bounds.upper for bounds in event.bounds.values())
        graph = rescaled(present, event.bounds, count)
        if graph.vertices == present.vertices:
            return [core.ChangeAnswered(request_id, ChangeOutcome.APPLIED)]
        if state is not JobState.RUNNING:
            self._wish = _Wish(event, graph, _Step.STORED)
            return [core.StoreGraph(request_id, graph, 0)]
        self._wish = _Wish(event, graph, _Step.SLOTS)
        return [core.ReserveSlots(request_id, count, max(bounds.lower for bounds in event.bounds.values()))]

    def slots_reserved(self, event: core.SlotsReserved, present: JobGraph) -> list[JobOutput]:
        """A fresh checkpoint is next, unless the slots are no more than the job has."""
        wish = self._wish
        if wish is None or wish.step is not _Step.SLOTS or not self.concerns(event.request_id):
            return []
        wish.graph = rescaled(present, wish.request.bounds, event.slots)
        wish.step = _Step.CHECKPOINT
        return self._end(ChangeOutcome.APPLIED) if wish.graph.vertices == present.vertices else []

    def checkpoint_taken(self) -> list[JobOutput]:
        assert self._wish is not None
        self._wish.step = _Step.STORED
        return [core.StoreGraph(self._wish.request.request_id, self._wish.graph, 0)]

    def stored(self) -> list[JobOutput]:
        """It is in force. The slots stay: they are the next deployment's."""
        return self._end(ChangeOutcome.APPLIED)[1:]

    def unconfirmed(self, event: core.ChangeNotStored | core.ChangeUnknown) -> tuple[Next, list[JobOutput]]:
        """Storing has failed, or nobody knows. With GIVE_UP nothing is stored and :meth:`given_up` is next."""
        wish = self._wish
        assert wish is not None
        final = isinstance(event, core.ChangeNotStored) and event.final
        request_id, writes = wish.request.request_id, wish.writes
        match following := writes.failed(unknown=isinstance(event, core.ChangeUnknown), final=final):
            case Next.STORE_AGAIN:
                return following, [core.StoreGraph(request_id, wish.graph, writes.attempt)]
            case Next.SETTLE:
                told = core.ChangeAnswered(request_id, ChangeOutcome.UNKNOWN, OUTCOME_UNKNOWN)
                settle = core.SettleGraph(request_id, wish.graph, writes.settle_attempt)
                return following, [told, settle] if writes.settle_attempt == 0 else [settle]
        return following, []

    def given_up(self, message: str) -> list[JobOutput]:
        return self._end(ChangeOutcome.NOT_STORED, message)

    def abandoned(self) -> list[JobOutput]:
        """Another driver leads and reads what is stored. No answer that is still to come changes anything here."""
        return self._end(ChangeOutcome.UNKNOWN, ANOTHER_LEADS)

    def _end(self, outcome: ChangeOutcome, message: str = "") -> list[JobOutput]:
        wish, self._wish = self._wish, None
        if wish is None:
            return []
        answer = core.ChangeAnswered(wish.request.request_id, outcome, message)
        return [core.ReleaseReserve()] if wish.writes.is_answered else [core.ReleaseReserve(), answer]


def checkpoint_request(event: core.RescaleRequested | core.SlotsReserved) -> str:
    """Asks for the fresh checkpoint of a rescale."""
    return f"rescale-{event.request_id}"
