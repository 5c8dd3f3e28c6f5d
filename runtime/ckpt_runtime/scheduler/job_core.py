"""One job as one pure machine: connects its lifecycle (``job_machine``) and its checkpoints (``coordinator``).

The only entry point is :meth:`JobCore.handle`. The two machines never see each other: they communicate through an
inner queue, and each event is processed completely before the next one. Only I/O leaves the core. The job's graph,
configuration, checkpoint settings and restart strategy are state of the core, which events replace: a stored change
(``durable_change``) takes effect here and nowhere else. Sources: Flink's adaptive scheduler and CheckpointCoordinator;
FLIP-147, FLIP-530, FLIP-571.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from ckpt_runtime.checkpoint import effects as checkpoint_out
from ckpt_runtime.checkpoint import events as checkpoint_on
from ckpt_runtime.checkpoint.channel_state_assignment import StateAssignmentError
from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.configuration import (
    CheckpointConfiguration,
    CheckpointConfigurationError,
    CheckpointOverrides,
)
from ckpt_runtime.checkpoint.coordinator import CheckpointCoordinator, CoordinatorState
from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.properties import CheckpointFailureReason as Reason
from ckpt_runtime.checkpoint.properties import CheckpointProperties, CheckpointType
from ckpt_runtime.checkpoint.state_assignment import assign_states
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.pipeline_options import PipelineOptions
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.scheduler import core_events as core
from ckpt_runtime.scheduler import job_effects as job_out
from ckpt_runtime.scheduler import job_events as job_on
from ckpt_runtime.scheduler.core_events import ChangeOutcome, JobInput, JobOutput, RestoredState
from ckpt_runtime.scheduler.deployment import JobPlan
from ckpt_runtime.scheduler.durable_change import (
    ANOTHER_LEADS,
    Next,
    PlanChange,
    PlanRequest,
    SettingsUpdate,
    checkpoint_request,
)
from ckpt_runtime.scheduler.job_events import FailureInfo
from ckpt_runtime.scheduler.job_machine import JobMachine
from ckpt_runtime.scheduler.job_status import JobState, JobStatus
from ckpt_runtime.scheduler.replacement import subtasks_of

_CLEARING = (JobState.CLEARING, JobState.FAILING, JobState.CANCELLING)
_TELLS_OF_THE_END = (job_out.StatusChanged, job_out.StopCompleted, job_out.StopFailed, job_out.JobEnded)


class JobCore:
    """Runs one job. The core takes over ``machine`` and ``coordinator``, both newly created for ``plan``.

    ``overrides`` are already in force. ``savepoint_id`` and ``lineage`` are given by earlier drivers, see
    :class:`~ckpt_runtime.scheduler.core_events.DeployTasks`.
    """

    def __init__(
        self,
        plan: JobPlan,
        machine: JobMachine,
        coordinator: CheckpointCoordinator,
        overrides: CheckpointOverrides | None = None,
        savepoint_id: int = 0,
        lineage: CompletedCheckpoint | None = None,
    ) -> None:
        self.machine = machine
        self.coordinator = coordinator
        self.savepoint_id = savepoint_id
        """The number of the user's last savepoint, 0 without one."""
        self.lineage = lineage or plan.savepoint
        """The snapshot that defines the sinks' identities."""
        self._restored: RestoredState | None = None
        self._at_end_of_data: list[checkpoint_on.EndOfDataReached] = []
        self._savepoint_requests: set[str] = set()
        self.plan = plan
        """The plan of the current deployment, including live changes that are in force."""
        self.accepted_plan = plan
        """The plan accepted last, which the next deployment runs."""
        self._update = SettingsUpdate(CheckpointOverrides() if overrides is None else overrides)
        self._change = PlanChange()
        self._redeploy_is_due = False
        self._stop_request: str | None = None
        self._cancel_request: str | None = None
        self._unanswered: list[JobOutput] = []
        self._end_is_stored = False
        self._result_attempts = 0
        self.is_fenced = False
        """Whether another driver is the leader; this one may then no longer change the job."""
        self._queue: deque[Callable[[], None]] = deque()
        self._outputs: list[JobOutput] = []
        self._now = Instant(0, 0)
        self._handlers = self._event_handlers()
        self._routes = self._effect_routes()

    def _event_handlers(self) -> dict[type[Any], Callable[[Any], None]]:
        """The events that the core or the machine takes; all others go to the coordinator."""
        return {
            **dict.fromkeys(get_args(job_on.JobEvent), self._to_machine),
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
            # The core's own handlers run after the machine's: a later entry takes precedence.
            job_on.TaskFinished: self._on_task_finished,
            job_on.TaskFailed: self._on_task_failed,
            job_on.SlotsFailed: self._on_slots_failed,
            job_on.StateRestoreFailed: self._on_state_restore_failed,
            job_on.JobFailed: self._on_job_failed,
            checkpoint_on.TriggerRequested: self._on_trigger_requested,
            checkpoint_on.EndOfDataReached: self._on_end_of_data,
            core.AttemptRecorded: self._on_attempt_recorded,
            core.AttemptNotRecorded: lambda event: self._on_state_restore_failed(
                job_on.StateRestoreFailed(event.attempt, event.cause)
            ),
            core.ResultStored: self._on_result_stored,
            core.ResultNotStored: self._on_result_not_stored,
            core.SavepointBeforeCancel: self._on_savepoint_before_cancel,
            core.LeadershipLost: self._on_leadership_lost,
        }

    def _effect_routes(self) -> dict[type[Any], Callable[[Any], None]]:
        """The machines' effects that the core turns into events; all others are its outputs."""
        return {
            job_out.AcquireSlots: self._acquire_slots,
            job_out.RestoreState: lambda effect: self._emit(core.RecordAttempt(effect.attempt)),
            job_out.Deploy: self._deploy,
            job_out.AllTasksRunning: self._all_tasks_running,
            job_out.TasksLeaveRunning: self._tasks_leave_running,
            job_out.StopPeriodicTrigger: lambda _: self._tell(checkpoint_on.PeriodicTriggerStopped()),
            job_out.StartPeriodicTrigger: self._start_periodic_trigger,
            job_out.TriggerSavepoint: self._trigger_savepoint,
            job_out.JobEnded: self._job_ended,
            checkpoint_out.RequestCompleted: self._request_completed,
            checkpoint_out.RequestFailed: self._request_failed,
            checkpoint_out.RestoreFrom: self._restore_from,
            checkpoint_out.RestoreFailed: self._restore_failed,
            checkpoint_out.FailJob: self._fail_job,
        }

    # --- what is in force

    @property
    def graph(self) -> JobGraph:
        """The graph of the current deployment, and of the next one unless it has been replaced."""
        return self.plan.graph

    @property
    def target_graph(self) -> JobGraph:
        """The graph that a change in progress requests, else the accepted one."""
        return (self._change.plan or self.accepted_plan).graph

    @property
    def configuration(self) -> Configuration:
        """The configuration of the current deployment; replaced together with :attr:`graph`."""
        return self.plan.configuration

    @property
    def settings(self) -> CheckpointConfiguration:
        """The checkpoint settings without overrides; the coordinator has the effective ones."""
        return self.plan.settings

    @property
    def overrides(self) -> CheckpointOverrides:
        """The overrides of FLIP-571."""
        return self._update.overrides

    @property
    def referenced(self) -> tuple[str, ...]:
        """Directories of the snapshots that the job may have to start from."""
        origin = self.plan.savepoint
        begins = () if origin is None or self.coordinator.latest_checkpoint is not None else (origin.directory,)
        return (*begins, *self.coordinator.referenced)

    # --- the entry point

    def handle(self, event: JobInput, now: Instant) -> list[JobOutput]:
        """Takes one event and everything that follows from it; returns the outputs to carry out, in order.

        Raises the machines' errors for events that they cannot take, which are bugs in the shell.
        """
        self._now = now
        try:
            self._take(event)
            while self._queue:
                self._queue.popleft()()
        # A partially processed event must not be carried out with the next one.
        except BaseException:
            self._queue.clear()
            self._outputs = []
            raise
        outputs, self._outputs = self._outputs, []
        return outputs

    def _take(self, event: JobInput) -> None:
        self._handlers.get(type(event), self._to_coordinator)(event)

    def _to_machine(self, event: Any) -> None:
        self._route(self.machine.handle(event, self._now))
        if self._change.needs_running_job and self.machine.state is not JobState.RUNNING:
            self._give_up_change(f"it is {self.machine.state.value}")

    def _to_coordinator(self, event: Any) -> None:
        self._route(self.coordinator.handle(event, self._now))

    def _route(self, effects: Iterable[Any]) -> None:
        for effect in effects:
            route = self._routes.get(type(effect))
            if route is not None:
                route(effect)
            elif isinstance(effect, _TELLS_OF_THE_END) and self._has_unreported_end:
                self._unanswered.append(effect)
            else:
                self._outputs.append(effect)

    def _tell(self, event: JobInput) -> None:
        """Queues an event for a machine, after the events that already wait."""
        self._queue.append(partial(self._take, event))

    def _emit(self, output: JobOutput) -> None:
        self._outputs.append(output)

    # --- from slots to running tasks

    def _acquire_slots(self, effect: job_out.AcquireSlots) -> None:
        """No task of an earlier deployment is left, so the accepted plan takes effect."""
        before, self.plan = self.plan, self.accepted_plan
        self._redeploy_is_due = False
        another = None if self.plan.graph is before.graph else self.plan.graph
        if another is not None:
            self._queue.append(partial(self._to_coordinator, checkpoint_on.GraphReplaced(another)))
        self._emit(effect)

    def _on_attempt_recorded(self, event: core.AttemptRecorded) -> None:
        restoring = self.machine.state is JobState.RESTORING and event.attempt == self.machine.attempt
        # During the write, the job may have been cancelled or another attempt may have begun.
        if restoring and self.coordinator.state in (CoordinatorState.CREATED, CoordinatorState.RESTORING):
            plan = self.plan
            request = checkpoint_on.RestoreRequested(f"restore-{event.attempt}", plan.savepoint, plan.restore_mode)
            self._to_coordinator(request)

    def _restore_from(self, effect: checkpoint_out.RestoreFrom) -> None:
        attempt = _attempt_of(effect.request_id)
        checkpoint = effect.checkpoint
        # Without a checkpoint, sinks keep their identity: under a new one they would not clean up their hidden files.
        self.lineage = checkpoint or self.lineage
        try:
            self._restored = None if checkpoint is None else self._assign(checkpoint)
        except StateAssignmentError as error:
            cause = FailureInfo(type(error).__name__, str(error))
            self._tell(job_on.StateRestoreFailed(attempt, cause, recoverable=False))
            return
        self._tell(job_on.StateRestored(attempt))

    def _assign(self, checkpoint: CompletedCheckpoint, graph: JobGraph | None = None) -> RestoredState:
        """Assigns the states of a snapshot to the subtasks of the current or a future ``graph`` of the plan.

        A job's own checkpoint may lack operators of the savepoint it began with; this was decided at submission. Raises
        StateAssignmentError if the states do not fit.
        """
        first = self.plan.savepoint is checkpoint
        allowed = self.plan.allow_non_restored_state or not first
        graph = graph or self.graph
        assignment = assign_states(checkpoint, graph, allowed, graph.fresh_operators if first else frozenset())
        return RestoredState(
            checkpoint.id,
            checkpoint.directory,
            assignment.subtasks,
            assignment.finished_vertices,
            assignment.in_flight,
            owned=self.coordinator.latest_is_owned,
        )

    def _restore_failed(self, effect: checkpoint_out.RestoreFailed) -> None:
        cause = FailureInfo("StateRestoreException", effect.message)
        self._tell(job_on.StateRestoreFailed(_attempt_of(effect.request_id), cause))

    def _deploy(self, effect: job_out.Deploy) -> None:
        plan = self.plan
        self._emit(
            core.DeployTasks(
                self.machine.attempt,
                effect.executions,
                plan.graph,
                plan.configuration,
                self._restored,
                self.lineage,
                self.savepoint_id,
            )
        )
        # The configuration may have changed since the attempt began.
        self._limit_sources(Configuration(plan.graph.configuration))

    def _limit_sources(self, before: Configuration) -> None:
        """Deployed sources get their new rates without a restart."""
        rates = self.plan.configuration.get(PipelineOptions.SOURCE_RATES)
        if rates != before.get(PipelineOptions.SOURCE_RATES):
            self._emit(core.LimitSources(rates or {}))

    def _all_tasks_running(self, effect: job_out.AllTasksRunning) -> None:
        """Starts the coordinator's deployment, then forwards the earlier EndOfDataReached events."""
        finished_vertices = frozenset[str]() if self._restored is None else self._restored.finished_vertices
        self._tell(checkpoint_on.JobRunning(effect.executions, effect.finished, finished_vertices))
        if self._cancel_request is not None:
            self._tell(checkpoint_on.PeriodicTriggerStopped())
        # After JobRunning; otherwise the coordinator would not know the tasks that these events are about.
        waiting, self._at_end_of_data = self._at_end_of_data, []
        for event in waiting:
            self._tell(event)

    def _tasks_leave_running(self, effect: job_out.TasksLeaveRunning) -> None:
        self._at_end_of_data = []
        self._tell(checkpoint_on.TasksLeftRunning())

    # --- tasks

    def _on_end_of_data(self, event: checkpoint_on.EndOfDataReached) -> None:
        if self.machine.state is not JobState.DEPLOYING:
            self._to_coordinator(event)
        elif event.execution in self.machine.tasks.alive:
            self._at_end_of_data.append(event)

    def _on_task_finished(self, event: job_on.TaskFinished) -> None:
        """The coordinator gets it first, because the machine may end the job, which stops checkpointing."""
        self._to_coordinator(checkpoint_on.SubtaskFinished(event.execution))
        # Queued, not called: the coordinator's decision on the event (a final checkpoint) precedes it.
        self._queue.append(partial(self._to_machine, event))

    # --- failures

    def _on_task_failed(self, event: job_on.TaskFailed) -> None:
        if event.execution in self.machine.tasks.alive:
            self._record_failure(event.cause, event.execution)
        self._to_machine(event)

    def _on_slots_failed(self, event: job_on.SlotsFailed) -> None:
        if self.machine.state is JobState.ACQUIRING and self.machine.attempt == event.attempt:
            self._record_failure(event.cause)
        self._to_machine(event)

    def _on_state_restore_failed(self, event: job_on.StateRestoreFailed) -> None:
        if self.machine.state is JobState.RESTORING and self.machine.attempt == event.attempt:
            self._record_failure(event.cause)
        self._to_machine(event)

    def _on_job_failed(self, event: job_on.JobFailed) -> None:
        if not self.machine.state.is_terminal:
            self._record_failure(event.cause)
        self._to_machine(event)

    def _fail_job(self, effect: checkpoint_out.FailJob) -> None:
        text = f"Exceeded checkpoint tolerable failure threshold. The latest checkpoint failed: {effect.message}"
        self._tell(job_on.JobFailed(FailureInfo("CheckpointException", text), failed_checkpoints=effect.times))

    def _record_failure(self, cause: FailureInfo, execution: ExecutionId | None = None) -> None:
        state = self.machine.state
        self._emit(core.RecordFailure(cause, execution, state in _CLEARING, durable=not state.is_terminal))

    # --- requested checkpoints and savepoints

    def _on_savepoint_before_cancel(self, event: core.SavepointBeforeCancel) -> None:
        # Of two such requests the first one cancels; the second fails like any other checkpoint request during that
        # time.
        if self._cancel_request is None and self.coordinator.state is CoordinatorState.RUNNING:
            self._cancel_request = event.trigger.request_id
            # Added first: pending savepoints end with the periodic trigger, and a redeployment that waits for them has
            # to wait for this one too.
            self._savepoint_requests.add(event.trigger.request_id)
            self._to_coordinator(checkpoint_on.PeriodicTriggerStopped())
        self._on_trigger_requested(event.trigger)

    def _on_trigger_requested(self, event: checkpoint_on.TriggerRequested) -> None:
        if self._cancel_request not in (None, event.request_id):
            message = "The job is being cancelled with a savepoint."
            self._request_failed(
                checkpoint_out.RequestFailed(event.request_id, Reason.CHECKPOINT_COORDINATOR_SUSPEND, message)
            )
            return
        if event.properties.is_savepoint and not event.properties.is_synchronous:
            self._savepoint_requests.add(event.request_id)
        self._to_coordinator(event)

    def _trigger_savepoint(self, effect: job_out.TriggerSavepoint) -> None:
        """Triggers the savepoint of a stop."""
        self._stop_request = effect.request_id
        properties = CheckpointProperties(CheckpointType.SYNC_SAVEPOINT, effect.savepoint_format, drain=effect.drain)
        self._tell(checkpoint_on.TriggerRequested(effect.request_id, properties, effect.target_directory))

    def _request_completed(self, effect: checkpoint_out.RequestCompleted) -> None:
        if effect.request_id == self._stop_request:
            self._tell(job_on.SavepointCompleted(effect.request_id, effect.external_path))
            return
        if self._change.awaits_checkpoint(effect.request_id):
            self._checkpoint_taken()
            return
        if effect.request_id in self._savepoint_requests:
            # Savepoints may complete out of order.
            self.savepoint_id = max(self.savepoint_id, effect.checkpoint_id)
            self._savepoint_ended(effect.request_id)
        self._emit(effect)

    def _request_failed(self, effect: checkpoint_out.RequestFailed) -> None:
        self._savepoint_ended(effect.request_id)
        if effect.request_id == self._cancel_request:
            # The job is not cancelled after all, so checkpoints resume if it is running.
            self._cancel_request = None
            if self.machine.state is JobState.RUNNING:
                self._start_periodic_trigger(job_out.StartPeriodicTrigger())
        if effect.request_id == self._stop_request:
            self._tell(job_on.SavepointFailed(effect.request_id, effect.message, effect.reached_tasks))
        elif self._change.awaits_checkpoint(effect.request_id):
            self._give_up_change(f"its checkpoint failed: {effect.message}")
        else:
            self._emit(effect)

    def _savepoint_ended(self, request_id: str) -> None:
        """Starts a waiting redeployment after a user's last savepoint, unless the job is to be cancelled after it."""
        if request_id in self._savepoint_requests:
            self._savepoint_requests.remove(request_id)
            if request_id != self._cancel_request:
                # Queued after a failure of the job that accompanies the savepoint's: the restart strategy decides
                # first.
                self._queue.append(self._redeploy_if_due)

    def _start_periodic_trigger(self, effect: job_out.StartPeriodicTrigger) -> None:
        """Resumes ticks and a waiting redeployment after a failed stop, unless a SavepointBeforeCancel is pending."""
        if self._cancel_request is not None:
            return
        self._tell(checkpoint_on.PeriodicTriggerStarted())
        self._redeploy_if_due()

    # --- settings of checkpoints (FLIP-571)

    def _on_patch_requested(self, event: core.PatchRequested) -> None:
        if self.is_fenced:
            self._emit(core.ChangeAnswered(event.request_id, ChangeOutcome.NOT_STORED, ANOTHER_LEADS))
        elif self._change.configures is not None:
            self._follow([core.ChangeAnswered(event.request_id, ChangeOutcome.BUSY)])
        else:
            self._follow(self._update.requested(event, self.accepted_plan.settings))

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
        """The stored overrides take effect, even if their sender got the answer that the outcome is unknown."""
        if self._update.concerns(event.request_id):
            outputs = self._update.stored(event)
            self._patch_coordinator()
            self._follow(outputs)

    def _patch_coordinator(self) -> None:
        effective = self._update.overrides.applied_to(self.accepted_plan.settings)
        self._to_coordinator(checkpoint_on.ConfigurationPatched(effective))

    # --- another parallelism, another configuration (FLIP-530)

    def _on_change_requested(self, event: PlanRequest) -> None:
        self._follow(self._refusal(event) or self._change.requested(event, self.accepted_plan, self.machine.state))

    def _refusal(self, event: PlanRequest) -> list[JobOutput]:
        """Returns the answer if refused. Overrides and configuration change one at a time and must be compatible."""
        request_id = event.request_id
        if self.is_fenced:
            return [core.ChangeAnswered(request_id, ChangeOutcome.NOT_STORED, ANOTHER_LEADS)]
        if self._redeploy_is_due and self.machine.state is JobState.RUNNING and self._needs_slots(event):
            return [core.ChangeAnswered(request_id, ChangeOutcome.BUSY)]  # slots are reserved until the redeployment
        if isinstance(event, core.RescaleRequested):
            return []
        if self._update.is_busy:
            return [core.ChangeAnswered(request_id, ChangeOutcome.BUSY)]
        try:
            self._update.overrides.applied_to(event.plan.settings)
        except CheckpointConfigurationError as error:
            text = f"the new configuration conflicts with the overrides: {error}"
            return [core.ChangeAnswered(request_id, ChangeOutcome.REFUSED, text)]
        return []

    def _needs_slots(self, event: PlanRequest) -> bool:
        present = self.accepted_plan.graph.vertices
        return isinstance(event, core.RescaleRequested) or event.plan.graph.vertices != present

    def _on_slots_reserved(self, event: core.SlotsReserved) -> None:
        self._follow(self._change.slots_reserved(event, self.accepted_plan))
        # If the reserved slots are the ones that the job already has, no checkpoint is awaited.
        request_id = checkpoint_request(event.request_id)
        if self._change.awaits_checkpoint(request_id):
            self._tell(checkpoint_on.TriggerRequested(request_id, CheckpointProperties()))

    def _on_slots_not_reserved(self, event: core.SlotsNotReserved) -> None:
        if self._change.needs_running_job and self._change.concerns(event.request_id):
            self._give_up_change(event.message)

    def _checkpoint_taken(self) -> None:
        """Stores the change next, after checking that the state can be restored at the new parallelism."""
        checkpoint, plan = self.coordinator.latest_checkpoint, self._change.plan
        assert checkpoint is not None
        assert plan is not None
        try:
            self._assign(checkpoint, plan.graph)
        except StateAssignmentError as error:
            self._give_up_change(str(error))
        else:
            self._follow(self._change.checkpoint_taken())

    def _on_plan_stored(self, event: core.PlanStored) -> None:
        plan, request = self._change.plan, self._change.configures
        if plan is None or not self._change.concerns(event.request_id):
            return
        # The change ends before it takes effect, because the following events may already begin another change.
        self._follow(self._change.stored())
        restarts = request.restarts if request else plan.graph.vertices != self.accepted_plan.graph.vertices
        self.accepted_plan = plan
        if request is not None:
            self._patch_coordinator()
            if request.strategy is not None:
                self._tell(job_on.RestartStrategyReplaced(request.strategy))
        if restarts:
            self._redeploy_is_due = True
            self._redeploy()
        elif not self._redeploy_is_due:
            before, self.plan = self.plan, replace(plan, graph=self.plan.graph)  # running tasks keep their graph
            self._limit_sources(before.configuration)

    def _give_up_change(self, reason: str) -> None:
        """Answers the requester and records the reason in the exception history, as requesters may disconnect."""
        message = f"{self._change.refusal}: {reason}"
        outputs = self._change.given_up(message)
        if outputs and not self.machine.state.is_terminal:
            self._record_failure(FailureInfo("RescaleException", message))
        self._follow(outputs)

    def _redeploy_if_due(self) -> None:
        """Starts the redeployment, if one has been waiting."""
        if self._redeploy_is_due:
            self._redeploy()

    def _redeploy(self) -> None:
        """Queued after the effects of new settings: if they fail the job, its restart strategy must decide.

        A savepoint that a user waits for is completed first.
        """
        subtasks = subtasks_of(self.accepted_plan.graph)
        self._tell(job_on.RedeployRequested(subtasks, at_once=not self._savepoint_requests))

    # --- the end

    @property
    def _has_unreported_end(self) -> bool:
        """Whether the end of the job is not stored yet. It is reported only after it is stored, because an ended job
        must never run again."""
        return self.machine.status.is_globally_terminal and not self.is_fenced and not self._end_is_stored

    def _follow(self, outputs: list[JobOutput]) -> None:
        """A change that races with the end of the job is answered with the end, whether it was stored or not."""
        for output in outputs:
            if isinstance(output, core.ChangeAnswered) and self.machine.status.is_globally_terminal:
                answers = self._unanswered if self._has_unreported_end else self._outputs
                answers.append(replace(output, outcome=ChangeOutcome.JOB_ENDED))
            else:
                self._emit(output)

    def _job_ended(self, effect: job_out.JobEnded) -> None:
        if not self._has_unreported_end:
            self._emit(effect)
            self._close(effect.status)
            return
        self._unanswered.append(effect)
        if self.coordinator.state is CoordinatorState.RUNNING:
            self._tell(checkpoint_on.TasksLeftRunning())
        self._emit(core.StoreResult(effect, self._result_attempts))

    def _on_result_stored(self, event: core.ResultStored) -> None:
        if self._has_unreported_end:
            self._end_is_stored = True
            self._outputs += self._unanswered
            self._unanswered = []
            self._close(self.machine.status)

    def _on_result_not_stored(self, event: core.ResultNotStored) -> None:
        if self._has_unreported_end:
            self._result_attempts += 1
            ended = next(output for output in self._unanswered if isinstance(output, job_out.JobEnded))
            self._emit(core.StoreResult(ended, self._result_attempts))

    def _close(self, status: JobStatus) -> None:
        if not self.is_fenced:
            self._tell(checkpoint_on.Shutdown(status.value))

    def _on_leadership_lost(self, event: core.LeadershipLost) -> None:
        """This driver gives up the job: the next leader sends the outstanding answers and does the writes."""
        if self.is_fenced:
            return
        had_ended = self._has_unreported_end
        self.is_fenced = True
        if self.coordinator.state is not CoordinatorState.CLOSED:
            self._to_coordinator(checkpoint_on.Shutdown(JobStatus.SUSPENDED.value, fenced=True))
        abandoned = [*self._update.abandoned(), *self._change.abandoned()]
        if had_ended:
            self._outputs += abandoned
            # The end was never reported: the next driver continues the job.
            for output in self._unanswered:
                if isinstance(output, job_out.StopCompleted | job_out.StopFailed):
                    message = "Another driver became the leader before the end of the job could be stored."
                    self._emit(job_out.StopFailed(output.request_id, message, output.location))
                elif isinstance(output, core.ChangeAnswered):
                    self._emit(replace(output, outcome=ChangeOutcome.UNKNOWN, message=ANOTHER_LEADS))
            self._emit(job_out.StatusChanged(JobStatus.SUSPENDED, self._now.abs_ms))
            self._emit(job_out.JobEnded(JobStatus.SUSPENDED, self._now.abs_ms))
        else:
            self._follow(abandoned)
            self._tell(job_on.SuspendRequested())


def _attempt_of(request_id: str) -> int:
    return int(request_id.rpartition("-")[2])
