"""The lifecycle of one job: slots, state, deployment, failures, restarts, cancelling, stop with savepoint. Pure.

The only entry point is :meth:`JobMachine.handle`. It has no clock, no thread and no I/O; it deploys nothing itself and
takes no checkpoint. Sources: Flink's adaptive scheduler, FLIP-147's stop with savepoint, FLIP-530's restart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ckpt_runtime.checkpoint.executions import ExecutionId, SubtaskKey
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.scheduler import job_effects as out
from ckpt_runtime.scheduler import job_events as on
from ckpt_runtime.scheduler.job_effects import JobEffect
from ckpt_runtime.scheduler.job_events import FailureInfo, JobEvent
from ckpt_runtime.scheduler.job_status import JobState, JobStatus
from ckpt_runtime.scheduler.restart_strategies import FAILED_CHECKPOINTS, BackoffSettings, Restarts, RestartStrategy

_ONLY_IN: dict[type[Any], frozenset[JobState]] = {on.Start: frozenset({JobState.INITIALIZING})}


class UnexpectedJobEventError(RuntimeError):
    """The job machine cannot take the event in its current state: a bug in the shell. Nothing has changed."""

    def __init__(self, state: JobState, event: object) -> None:
        super().__init__(f"{event!r} is not possible in state {state.value}")


class DeployedTaskState(Enum):
    """The states of a task that matter to the job."""

    DEPLOYING = "deploying"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELED = "canceled"
    FAILED = "failed"

    @property
    def is_terminal(self) -> bool:
        return self in (DeployedTaskState.FINISHED, DeployedTaskState.CANCELED, DeployedTaskState.FAILED)


class DeployedTasks:
    """The executions of one attempt, all DEPLOYING at first."""

    def __init__(self, subtasks: Iterable[SubtaskKey], attempt: int) -> None:
        self._states = {ExecutionId(vertex, index, attempt): DeployedTaskState.DEPLOYING for vertex, index in subtasks}

    @property
    def executions(self) -> tuple[ExecutionId, ...]:
        return tuple(self._states)

    @property
    def alive(self) -> tuple[ExecutionId, ...]:
        return tuple(execution for execution, state in self._states.items() if not state.is_terminal)

    @property
    def finished(self) -> frozenset[ExecutionId]:
        return frozenset(execution for execution, state in self._states.items() if state is DeployedTaskState.FINISHED)

    @property
    def all_up(self) -> bool:
        """Whether every task runs or has finished."""
        return all(state in (DeployedTaskState.RUNNING, DeployedTaskState.FINISHED) for state in self._states.values())

    @property
    def all_finished(self) -> bool:
        return all(state is DeployedTaskState.FINISHED for state in self._states.values())

    def move(self, execution: ExecutionId, state: DeployedTaskState) -> bool:
        """Records a change; returns False for an unknown, ended or unchanged execution."""
        present = self._states.get(execution)
        if present is None or present.is_terminal or present is state:
            return False
        self._states[execution] = state
        return True


@dataclass(slots=True)
class _Stop:
    """A stop with savepoint. ``location`` is set once the savepoint is complete."""

    request_id: str
    location: str | None = None


class JobMachine:
    """``subtasks`` of the job graph are in deployment order. ``first_attempt`` continues an earlier driver's count.

    ``backoff`` only applies to failures by checkpoints: a new deployment does not help if storage cannot be written.

    Messages of executions outside the current deployment and late answers change nothing.

    ``state``, ``status`` (the one that users see), ``attempt`` (the number of the current deployment, -1 before the
    first) and ``tasks`` (those of the current deployment) are public to read.
    """

    def __init__(
        self,
        subtasks: Iterable[SubtaskKey],
        restart_strategy: RestartStrategy,
        first_attempt: int = 0,
        backoff: BackoffSettings = FAILED_CHECKPOINTS,
    ) -> None:
        self._subtasks = tuple(subtasks)
        self._restarts = Restarts(restart_strategy)
        self._backoff = backoff
        # Incremented when slots are acquired, which is how each deployment begins.
        self.attempt = first_attempt - 1
        self.state = JobState.INITIALIZING
        self.status = JobStatus.INITIALIZING
        self._first_deployment = True
        self.tasks = DeployedTasks((), first_attempt)
        self._stop: _Stop | None = None
        self._cause: FailureInfo | None = None
        self._restart_at = 0
        self._generation = 0
        self._effects: list[JobEffect] = []
        self._handlers: dict[type[Any], Callable[[Any, Instant], None]] = {
            on.Start: lambda _, now: self._acquire(now),
            on.CancelRequested: self._on_cancel,
            on.SuspendRequested: self._on_suspend,
            on.StopRequested: self._on_stop,
            on.RedeployRequested: self._on_redeploy,
            on.RestartStrategyReplaced: self._on_restart_strategy_replaced,
            on.SlotsAcquired: self._on_slots_acquired,
            on.SlotsFailed: self._on_slots_failed,
            on.StateRestored: self._on_state_restored,
            on.StateRestoreFailed: self._on_state_restore_failed,
            on.SavepointCompleted: self._on_savepoint_completed,
            on.SavepointFailed: self._on_savepoint_failed,
            on.RestartTimerFired: self._on_restart_timer,
            on.TaskRunning: self._on_task_running,
            on.TaskFinished: self._on_task_finished,
            on.TaskCanceled: self._on_task_canceled,
            on.TaskFailed: self._on_task_failed,
            on.JobFailed: self._on_job_failed,
        }

    def handle(self, event: JobEvent, now: Instant) -> list[JobEffect]:
        """Takes one event and returns the effects to carry out, in order.

        Raises :class:`UnexpectedJobEventError` if the state does not allow the event; nothing has changed then.
        """
        handler = self._handlers.get(type(event))
        only_in = _ONLY_IN.get(type(event))
        if handler is None or (only_in is not None and self.state not in only_in):
            raise UnexpectedJobEventError(self.state, event)
        if not self.state.is_terminal:
            handler(event, now)
        elif isinstance(event, on.StopRequested):
            self._emit(out.StopFailed(event.request_id, f"The job is {self.status.value}."))
        effects, self._effects = self._effects, []
        return effects

    def _emit(self, effect: JobEffect) -> None:
        self._effects.append(effect)

    def _enter(self, state: JobState, now: Instant, cause: FailureInfo | None = None) -> None:
        self.state = state
        status = state.status(self._first_deployment)
        if status is not self.status:
            self.status = status
            self._emit(out.StatusChanged(status, now.abs_ms, cause))

    # --- deployment

    def _acquire(self, now: Instant) -> None:
        self.attempt += 1
        # Cleared already here: messages of the previous attempt must not count for tasks of this one.
        self.tasks = DeployedTasks((), self.attempt)
        self._enter(JobState.ACQUIRING, now)
        self._emit(out.AcquireSlots(self.attempt))

    def _on_slots_acquired(self, event: on.SlotsAcquired, now: Instant) -> None:
        if self.state is JobState.ACQUIRING and event.attempt == self.attempt:
            self._enter(JobState.RESTORING, now)
            self._emit(out.RestoreState(self.attempt))

    def _on_slots_failed(self, event: on.SlotsFailed, now: Instant) -> None:
        if self.state is JobState.ACQUIRING and event.attempt == self.attempt:
            self._fail(event.cause, now)

    def _on_state_restored(self, event: on.StateRestored, now: Instant) -> None:
        if self.state is JobState.RESTORING and event.attempt == self.attempt:
            # Created only now, with the current subtasks: the plan may have been replaced during the wait for slots.
            self.tasks = DeployedTasks(self._subtasks, self.attempt)
            self._enter(JobState.DEPLOYING, now)
            # Users see a job that waits for slots as CREATED before its first deployment, as RESTARTING after it.
            self._first_deployment = False
            self._emit(out.Deploy(self.tasks.executions))

    def _on_state_restore_failed(self, event: on.StateRestoreFailed, now: Instant) -> None:
        if self.state is JobState.RESTORING and event.attempt == self.attempt:
            self._fail(event.cause, now, event.recoverable)

    # --- tasks

    def _on_task_running(self, event: on.TaskRunning, now: Instant) -> None:
        if self.tasks.move(event.execution, DeployedTaskState.RUNNING):
            self._check_all_up(now)

    def _check_all_up(self, now: Instant) -> None:
        if self.state is JobState.DEPLOYING and self.tasks.all_up:
            self._enter(JobState.RUNNING, now)
            self._emit(out.AllTasksRunning(self.tasks.executions, self.tasks.finished))

    def _on_task_finished(self, event: on.TaskFinished, now: Instant) -> None:
        if not self.tasks.move(event.execution, DeployedTaskState.FINISHED):
            return
        if self.state in (JobState.CLEARING, JobState.FAILING, JobState.CANCELLING):
            self._check_all_gone(now)
        # A task may finish while others deploy: RUNNING then only waits for the rest to be up.
        elif not self.tasks.all_finished:
            self._check_all_up(now)
        elif self.state is not JobState.STOPPING:
            self._end(JobState.FINISHED, now)

    def _on_task_canceled(self, event: on.TaskCanceled, now: Instant) -> None:
        """A task that reports its cancellation without a request counts as failed."""
        if self.state in (JobState.CLEARING, JobState.FAILING, JobState.CANCELLING):
            if self.tasks.move(event.execution, DeployedTaskState.CANCELED):
                self._check_all_gone(now)
        elif self.tasks.move(event.execution, DeployedTaskState.FAILED):
            self._fail(FailureInfo("TaskCanceled", f"{event.execution} was cancelled by itself"), now)

    def _on_task_failed(self, event: on.TaskFailed, now: Instant) -> None:
        if not self.tasks.move(event.execution, DeployedTaskState.FAILED):
            return
        if self.state in (JobState.CLEARING, JobState.FAILING, JobState.CANCELLING):
            self._check_all_gone(now)
        else:
            self._fail(event.cause, now)

    def _on_job_failed(self, event: on.JobFailed, now: Instant) -> None:
        # Tasks are being cancelled for a restart that would no longer help.
        if self.state is JobState.CLEARING and not event.recoverable:
            self._cause = event.cause
            self._enter(JobState.FAILING, now, event.cause)
        elif self.state not in (JobState.CLEARING, JobState.FAILING, JobState.CANCELLING):
            self._fail(event.cause, now, event.recoverable, self._backoff.pause_ms(event.failed_checkpoints))

    # --- failure and restart

    def _fail(self, cause: FailureInfo, now: Instant, recoverable: bool = True, pause_ms: int = 0) -> None:
        """Handles a failure while nothing is being cleared: consults the strategy, then clears the deployment.

        ``pause_ms`` is the minimum time until the restart, regardless of the strategy.
        """
        self._cause = cause
        if self._stop is not None and self._stop.location is not None:
            # The savepoint's effects are committed: restarting from an older checkpoint would commit them twice.
            recoverable = False
            self._cause = cause = _failed_after_savepoint(self._stop.location, cause)
        delay = self._restarts.on_failure(now.rel_ms) if recoverable else None
        if delay is None:
            self._clear(JobState.FAILING, now, cause)
        else:
            self._restart_at = now.rel_ms + max(delay, pause_ms)
            self._clear(JobState.CLEARING, now, cause)

    def _clear(self, state: JobState, now: Instant, cause: FailureInfo | None = None) -> None:
        """Enters CLEARING, FAILING or CANCELLING; leaves it at once when no task is left."""
        had_tasks = self.state.has_tasks
        if self.state is JobState.BACKING_OFF:
            # The timer may have fired already and its event be queued.
            self._generation += 1
            self._emit(out.CancelRestart())
        # Tasks are cancelled only once: cancelling a failing job only changes its final state.
        already_clearing = self.state in (JobState.CLEARING, JobState.FAILING, JobState.CANCELLING)
        self._enter(state, now, cause)
        if had_tasks and not already_clearing:
            self._emit(out.TasksLeaveRunning())
            if self.tasks.alive:
                self._emit(out.CancelTasks(self.tasks.alive))
        self._check_all_gone(now)

    def _check_all_gone(self, now: Instant) -> None:
        if self.tasks.alive:
            return
        if self.state is JobState.CANCELLING:
            self._end(JobState.CANCELED, now)
        elif self._stop is not None and self._stop.location is None:
            return  # the outcome of the savepoint decides whether the job may restart
        elif self.state is JobState.FAILING:
            self._end(JobState.FAILED, now)
        elif self.state is JobState.CLEARING:
            self._back_off(now)

    def _back_off(self, now: Instant) -> None:
        if now.rel_ms >= self._restart_at:
            self._acquire(now)
            return
        self._enter(JobState.BACKING_OFF, now)
        self._generation += 1
        self._emit(out.ScheduleRestart(self._generation, self._restart_at))

    def _on_restart_timer(self, event: on.RestartTimerFired, now: Instant) -> None:
        if self.state is not JobState.BACKING_OFF or event.generation != self._generation:
            return
        if now.rel_ms < self._restart_at:
            self._emit(out.ScheduleRestart(self._generation, self._restart_at))
        else:
            self._acquire(now)

    def _on_redeploy(self, event: on.RedeployRequested, now: Instant) -> None:
        """Without tasks, the next deployment uses the new plan; a stop or an end takes precedence."""
        self._subtasks = event.subtasks
        if self.state in (JobState.DEPLOYING, JobState.RUNNING):
            if event.at_once:
                self._restart_at = now.rel_ms
                self._clear(JobState.CLEARING, now)
        # Nothing is deployed: slots are requested again under a new attempt number, so that late answers do not count.
        elif self.state in (JobState.ACQUIRING, JobState.RESTORING):
            self._acquire(now)

    def _on_restart_strategy_replaced(self, event: on.RestartStrategyReplaced, now: Instant) -> None:
        """The new strategy continues with the failures so far. A planned restart keeps its time."""
        self._restarts.strategy = event.strategy

    # --- end

    def _on_cancel(self, event: on.CancelRequested, now: Instant) -> None:
        if self.state is not JobState.CANCELLING:
            self._clear(JobState.CANCELLING, now)

    def _on_suspend(self, event: on.SuspendRequested, now: Instant) -> None:
        if self.state is JobState.BACKING_OFF:
            self._emit(out.CancelRestart())
        if self.tasks.alive:
            self._emit(out.TasksLeaveRunning())
            self._emit(out.CancelTasks(self.tasks.alive))
        self._end(JobState.SUSPENDED, now)

    def _end(self, state: JobState, now: Instant) -> None:
        cause = self._cause if state is JobState.FAILED else None
        self._enter(state, now, cause)
        location = None if self._stop is None else self._stop.location
        if self._stop is not None:
            if state is JobState.FINISHED and location is not None:
                self._emit(out.StopCompleted(self._stop.request_id, location))
            else:
                reason = f"The job ended as {self.status.value} before it was stopped."
                self._emit(out.StopFailed(self._stop.request_id, reason if cause is None else cause.message, location))
            self._stop = None
        self._emit(out.JobEnded(self.status, now.abs_ms, cause, location))

    # --- stop with savepoint

    def _on_stop(self, event: on.StopRequested, now: Instant) -> None:
        if self.state is not JobState.RUNNING:
            reason = "Another stop is in progress." if self._stop is not None else "The job is not running."
            if self.state is JobState.DEPLOYING:
                reason = "Some tasks of the job are not running yet."
            self._emit(out.StopFailed(event.request_id, reason))
            return
        self._stop = _Stop(event.request_id)
        self._enter(JobState.STOPPING, now)
        # In this order, so that no further checkpoint is triggered before the savepoint.
        self._emit(out.StopPeriodicTrigger())
        self._emit(out.TriggerSavepoint(event.request_id, event.drain, event.target_directory, event.savepoint_format))

    def _on_savepoint_completed(self, event: on.SavepointCompleted, now: Instant) -> None:
        if self._stop is None or event.request_id != self._stop.request_id:
            return
        self._stop.location = event.location
        if self.state is JobState.STOPPING:
            self._enter(JobState.ENDING, now)
            if self.tasks.all_finished:
                self._end(JobState.FINISHED, now)
        elif self.state is JobState.CLEARING:
            assert self._cause is not None
            # A restart was planned, but the savepoint is complete: restarting would commit twice.
            self._cause = _failed_after_savepoint(event.location, self._cause)
            self._enter(JobState.FAILING, now, self._cause)
            self._check_all_gone(now)
        elif self.state is JobState.FAILING:
            self._check_all_gone(now)

    def _on_savepoint_failed(self, event: on.SavepointFailed, now: Instant) -> None:
        if self._stop is None or event.request_id != self._stop.request_id:
            return
        self._stop = None
        self._emit(out.StopFailed(event.request_id, event.message))
        if self.state is not JobState.STOPPING:
            self._check_all_gone(now)
        # All data was processed before the stop took effect: there is nothing left to stop.
        elif self.tasks.all_finished:
            self._end(JobState.FINISHED, now)
        elif event.reached_tasks:
            # Sources may have stopped for good: the job restarts from its latest checkpoint, not asking the strategy.
            self._restart_at = now.rel_ms
            self._clear(JobState.CLEARING, now)
        else:
            self._enter(JobState.RUNNING, now)
            self._emit(out.StartPeriodicTrigger())


def _failed_after_savepoint(location: str, cause: FailureInfo) -> FailureInfo:
    message = (
        f"A savepoint was created at {location}, but the job did not finish after it; "
        f"resume from the savepoint: {cause.message}"
    )
    return FailureInfo("StopWithSavepointStoppingException", message, cause.stack_trace)
