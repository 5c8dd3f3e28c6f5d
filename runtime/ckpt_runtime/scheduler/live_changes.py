"""Replaces checkpoint settings, parallelism and configuration of a job while it lives.

Part of the core (``job_core``), which reports when the tasks of an earlier deployment are gone and passes on the events
that concern a change. A stored change takes effect here and nowhere else. Sources: FLIP-571, FLIP-530.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from ckpt_runtime.checkpoint import events as checkpoint_on
from ckpt_runtime.checkpoint.channel_state_assignment import StateAssignmentError
from ckpt_runtime.checkpoint.configuration import CheckpointConfigurationError
from ckpt_runtime.checkpoint.coordinator import CheckpointCoordinator
from ckpt_runtime.checkpoint.overrides import CheckpointOverrides
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.scheduler import core_events as core
from ckpt_runtime.scheduler import job_events as job_on
from ckpt_runtime.scheduler.core_events import ChangeOutcome, JobInput, JobOutput
from ckpt_runtime.scheduler.durable_change import ANOTHER_LEADS, Next
from ckpt_runtime.scheduler.job_events import FailureInfo
from ckpt_runtime.scheduler.job_machine import JobMachine
from ckpt_runtime.scheduler.job_plan import JobPlan
from ckpt_runtime.scheduler.job_status import JobState
from ckpt_runtime.scheduler.plan_change import PlanChange, checkpoint_request
from ckpt_runtime.scheduler.replacement import subtasks_of
from ckpt_runtime.scheduler.restored_state import restored_state
from ckpt_runtime.scheduler.settings_update import SettingsUpdate


@dataclass(frozen=True, slots=True)
class Ways:
    """The callbacks from the changes into the rest of the core.

    ``follow`` emits outputs, but answers a change that races with the end of the job with that end. ``tell`` queues an
    event after the waiting ones; ``to_coordinator`` delivers it at once.
    """

    emit: Callable[[JobOutput], None]
    follow: Callable[[list[JobOutput]], None]
    tell: Callable[[JobInput], None]
    to_coordinator: Callable[[Any], None]
    record_failure: Callable[[FailureInfo], None]


class LiveChanges:
    """Holds the plan in force, the accepted plan and the overrides, and changes them one at a time.

    ``savepoints`` is the core's live view of the savepoint requests that users wait for.
    """

    def __init__(
        self,
        plan: JobPlan,
        overrides: CheckpointOverrides,
        machine: JobMachine,
        coordinator: CheckpointCoordinator,
        savepoints: Collection[str],
        ways: Ways,
    ) -> None:
        self._machine = machine
        self._coordinator = coordinator
        self._savepoints = savepoints
        self._plan = self._next_plan = plan
        self._update = SettingsUpdate(overrides)
        self._change = PlanChange()
        self._redeploy_is_due = False
        self._fenced = False
        self._emit = ways.emit
        self._follow = ways.follow
        self._tell = ways.tell
        self._to_coordinator = ways.to_coordinator
        self._record_failure = ways.record_failure
        self.handlers: dict[type[Any], Callable[[Any], None]] = {
            core.PatchRequested: self._on_patch_requested,
            core.OverridesStored: self._on_overrides_stored,
            core.OverridesRefused: self._on_overrides_answer,
            core.ChangeNotStored: self._on_unconfirmed_change,
            core.ChangeUnknown: self._on_unconfirmed_change,
            core.RescaleRequested: self._on_change_requested,
            core.ConfigurationRequested: self._on_change_requested,
            core.SlotsReserved: self._on_slots_reserved,
            core.SlotsNotReserved: self._on_slots_not_reserved,
            core.PlanStored: self._on_plan_stored,
        }

    # --- what is in force

    @property
    def plan(self) -> JobPlan:
        """The plan of the current deployment, including live changes that are in force."""
        return self._plan

    @property
    def accepted_plan(self) -> JobPlan:
        """The plan accepted last, which the next deployment runs."""
        return self._next_plan

    @property
    def wanted_graph(self) -> JobGraph:
        """The graph that a change in progress requests, else the accepted one."""
        return (self._change.plan or self._next_plan).graph

    @property
    def overrides(self) -> CheckpointOverrides:
        """The overrides of FLIP-571."""
        return self._update.overrides

    # --- calls from the core

    def come_into_force(self) -> JobGraph | None:
        """No old task is left, so the accepted plan takes effect. Returns its graph if it is another one."""
        before, self._plan = self._plan, self._next_plan
        self._redeploy_is_due = False
        return None if self._plan.graph is before.graph else self._plan.graph

    def check_state(self) -> None:
        """The machine has taken an event: a rescale is abandoned if the job is no longer running."""
        if self._change.needs_running_job and self._machine.state is not JobState.RUNNING:
            self._give_up_change(f"it is {self._machine.state.value}")

    def awaits_checkpoint(self, request_id: str | None) -> bool:
        """Whether ``request_id`` is the request for a change's fresh checkpoint."""
        return self._change.awaits_checkpoint(request_id)

    def release(self) -> list[JobOutput]:
        """Another driver leads: returns the answers to the outstanding change requests."""
        self._fenced = True
        return [*self._update.abandoned(), *self._change.abandoned()]

    # --- settings of checkpoints (FLIP-571)

    def _on_patch_requested(self, event: core.PatchRequested) -> None:
        if self._fenced:
            self._emit(core.ChangeAnswered(event.request_id, ChangeOutcome.NOT_STORED, ANOTHER_LEADS))
        elif self._change.configures is not None:
            self._follow([core.ChangeAnswered(event.request_id, ChangeOutcome.BUSY)])
        else:
            self._follow(self._update.requested(event, self._next_plan.settings))

    def _on_overrides_answer(self, event: core.OverridesRefused | core.ChangeNotStored | core.ChangeUnknown) -> None:
        self._follow(self._update.answered(event))

    def _on_unconfirmed_change(self, event: core.ChangeNotStored | core.ChangeUnknown) -> None:
        if not self._change.concerns(event.request_id):
            self._on_overrides_answer(event)
            return
        following, outputs = self._change.unconfirmed(event)
        self._follow(outputs)
        if following is Next.GIVE_UP:
            self._give_up_change(event.message)

    def _on_overrides_stored(self, event: core.OverridesStored) -> None:
        """The stored overrides take effect, even if their sender was told that the outcome is unknown."""
        if self._update.concerns(event.request_id):
            outputs = self._update.stored(event)
            self._patch_coordinator()
            self._follow(outputs)

    def _patch_coordinator(self) -> None:
        effective = self._update.overrides.applied_to(self._next_plan.settings)
        self._to_coordinator(checkpoint_on.ConfigurationPatched(effective))

    # --- another parallelism, another configuration (FLIP-530)

    def _on_change_requested(self, event: core.RescaleRequested | core.ConfigurationRequested) -> None:
        self._follow(self._refusal(event) or self._change.requested(event, self._next_plan, self._machine.state))

    def _refusal(self, event: core.RescaleRequested | core.ConfigurationRequested) -> list[JobOutput]:
        """Returns the answer if refused. Overrides and configuration change one at a time and must be compatible."""
        request_id = event.request_id
        if self._fenced:
            return [core.ChangeAnswered(request_id, ChangeOutcome.NOT_STORED, ANOTHER_LEADS)]
        if self._redeploy_is_due and self._machine.state is JobState.RUNNING and self._needs_slots(event):
            return [core.ChangeAnswered(request_id, ChangeOutcome.BUSY)]  # slots are reserved until the redeployment
        if isinstance(event, core.RescaleRequested):
            return []
        if self._update.is_busy:
            return [core.ChangeAnswered(request_id, ChangeOutcome.BUSY)]
        try:
            self._update.overrides.applied_to(event.plan.settings)
        except CheckpointConfigurationError as error:
            text = f"the new settings do not go with the overrides in force: {error}"
            return [core.ChangeAnswered(request_id, ChangeOutcome.REFUSED, text)]
        return []

    def _needs_slots(self, event: core.RescaleRequested | core.ConfigurationRequested) -> bool:
        present = self._next_plan.graph.vertices
        return isinstance(event, core.RescaleRequested) or event.plan.graph.vertices != present

    def _on_slots_reserved(self, event: core.SlotsReserved) -> None:
        self._follow(self._change.slots_reserved(event, self._next_plan))
        # If the slots turned out to be those that the job has already, no checkpoint is awaited.
        request_id = checkpoint_request(event)
        if self._change.awaits_checkpoint(request_id):
            self._tell(checkpoint_on.TriggerRequested(request_id, CheckpointProperties()))

    def _on_slots_not_reserved(self, event: core.SlotsNotReserved) -> None:
        if self._change.needs_running_job and self._change.concerns(event.request_id):
            self._give_up_change(event.message)

    def checkpoint_taken(self) -> None:
        """Stores the change next, after checking that the state can be restored at the new parallelism."""
        checkpoint, plan = self._coordinator.latest_checkpoint, self._change.plan
        assert checkpoint is not None
        assert plan is not None
        try:
            restored_state(checkpoint, self._plan, plan.graph, owned=self._coordinator.latest_is_owned)
        except StateAssignmentError as error:
            self._give_up_change(str(error))
        else:
            self._follow(self._change.checkpoint_taken())

    def checkpoint_failed(self, message: str) -> None:
        """Abandons the change; the job continues unchanged."""
        self._give_up_change(f"its checkpoint failed: {message}")

    def _on_plan_stored(self, event: core.PlanStored) -> None:
        plan, request = self._change.plan, self._change.configures
        if plan is None or not self._change.concerns(event.request_id):
            return
        # The change ends before it takes effect, because what follows may already begin another change.
        self._follow(self._change.stored())
        restarts = request.restarts if request else plan.graph.vertices != self._next_plan.graph.vertices
        self._next_plan = plan
        if request is not None:
            self._patch_coordinator()
            if request.strategy is not None:
                self._tell(job_on.RestartStrategyReplaced(request.strategy))
        if restarts:
            self._redeploy_is_due = True
            self._redeploy()
        elif not self._redeploy_is_due:
            self._plan = replace(plan, graph=self._plan.graph)  # the change does not affect running tasks

    def _give_up_change(self, reason: str) -> None:
        """Answers the requester and records the reason in the exception history, for requesters that have gone."""
        message = f"{self._change.refusal}: {reason}"
        outputs = self._change.given_up(message)
        if outputs and not self._machine.state.is_terminal:
            self._record_failure(FailureInfo("RescaleException", message))
        self._follow(outputs)

    def redeploy_if_due(self) -> None:
        """Starts the redeployment, if one has been waiting."""
        if self._redeploy_is_due:
            self._redeploy()

    def _redeploy(self) -> None:
        """Queued after the effects of new settings: if they fail the job, its restart strategy must decide.

        A savepoint that a user waits for is completed first.
        """
        subtasks = subtasks_of(self._next_plan.graph)
        self._tell(job_on.RedeployRequested(subtasks, at_once=not self._savepoints))
