"""What a job runs with, and what replaces it while the job lives: settings of checkpoints, parallelism, configuration.

Part of the core (``job_core``), which says when tasks of an earlier deployment are gone and hands on the events that
concern a change. What is stored comes into force here, and nowhere else. Sources: FLIP-571, FLIP-530.
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
    """Out of the changes into the rest of the core.

    ``follow`` emits outputs, but answers a change that races with the end of the job with that end. ``tell`` queues an
    event behind what waits already; ``to_coordinator`` has it taken at once.
    """

    emit: Callable[[JobOutput], None]
    follow: Callable[[list[JobOutput]], None]
    tell: Callable[[JobInput], None]
    to_coordinator: Callable[[Any], None]
    record_failure: Callable[[FailureInfo], None]


class LiveChanges:
    """Holds the plan in force and the accepted one, and the overrides; changes them one after the other.

    ``savepoints`` is the core's live view of the requests for savepoints that a user waits for.
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
        """What the present deployment runs; what a live change has replaced is replaced here."""
        return self._plan

    @property
    def accepted_plan(self) -> JobPlan:
        """What was accepted last, and the next deployment runs."""
        return self._next_plan

    @property
    def wanted_graph(self) -> JobGraph:
        """What the job is being brought to, else what it runs or is about to."""
        return (self._change.plan or self._next_plan).graph

    @property
    def overrides(self) -> CheckpointOverrides:
        """FLIP-571's."""
        return self._update.overrides

    # --- what the core tells

    def come_into_force(self) -> JobGraph | None:
        """No task of an earlier deployment is left: the accepted plan is the present one. Its graph, if another one."""
        before, self._plan = self._plan, self._next_plan
        self._redeploy_is_due = False
        return None if self._plan.graph is before.graph else self._plan.graph

    def check_state(self) -> None:
        """The machine has taken an event: a rescale of a job that runs no more is over."""
        if self._change.needs_running_job and self._machine.state is not JobState.RUNNING:
            self._give_up_change(f"it is {self._machine.state.value}")

    def awaits_checkpoint(self, request_id: str | None) -> bool:
        """Whether that is the request for the fresh checkpoint of a change."""
        return self._change.awaits_checkpoint(request_id)

    def release(self) -> list[JobOutput]:
        """Another driver leads: returns the answers to those who wait for a change."""
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
        """What is stored comes into force, also when its sender was told that nobody knows."""
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
        """Overrides and configuration change one after the other, and have to go together."""
        request_id = event.request_id
        if self._fenced:
            return [core.ChangeAnswered(request_id, ChangeOutcome.NOT_STORED, ANOTHER_LEADS)]
        if self._redeploy_is_due and self._machine.state is JobState.RUNNING and self._needs_slots(event):
            return [core.ChangeAnswered(request_id, ChangeOutcome.BUSY)]  # others are reserved until its redeployment
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
        # Asked as well when the slots turned out to be those that there are: then no checkpoint is awaited.
        request_id = checkpoint_request(event)
        if self._change.awaits_checkpoint(request_id):
            self._tell(checkpoint_on.TriggerRequested(request_id, CheckpointProperties()))

    def _on_slots_not_reserved(self, event: core.SlotsNotReserved) -> None:
        if self._change.needs_running_job and self._change.concerns(event.request_id):
            self._give_up_change(event.message)

    def checkpoint_taken(self) -> None:
        """The change is stored next. What cannot be restored at the new parallelism is found before anything stops."""
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
        """The job goes on as it is."""
        self._give_up_change(f"its checkpoint failed: {message}")

    def _on_plan_stored(self, event: core.PlanStored) -> None:
        plan, request = self._change.plan, self._change.configures
        if plan is None or not self._change.concerns(event.request_id):
            return
        # Ended before it is put in force: what follows may already begin another change.
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
            self._plan = replace(plan, graph=self._plan.graph)  # nothing that tasks run with has changed

    def _give_up_change(self, reason: str) -> None:
        """Whoever asked is told, and the exception history keeps it for those who have gone."""
        message = f"{self._change.refusal}: {reason}"
        outputs = self._change.given_up(message)
        if outputs and not self._machine.state.is_terminal:
            self._record_failure(FailureInfo("RescaleException", message))
        self._follow(outputs)

    def redeploy_if_due(self) -> None:
        """What a redeployment has waited for is over."""
        if self._redeploy_is_due:
            self._redeploy()

    def _redeploy(self) -> None:
        """Behind what new settings have set off: a job that fails by them must not restart without its strategy.

        A savepoint that a user waits for goes first.
        """
        subtasks = subtasks_of(self._next_plan.graph)
        self._tell(job_on.RedeployRequested(subtasks, at_once=not self._savepoints))
