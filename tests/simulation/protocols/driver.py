"""A simulated driver process: the real job machine and checkpoint coordinator in a shell as small as can be.

It executes their effects in the order and nesting of the job master, and loses everything in memory when it crashes.
Storage is ``driver_storage``'s, changes of the configuration are ``config_endpoint``'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.coordinator import CheckpointCoordinator
from ckpt_runtime.checkpoint.id_counter import CheckpointIdUnavailableError
from ckpt_runtime.checkpoint.overrides import CheckpointOverrides
from ckpt_runtime.checkpoint.properties import CheckpointProperties, RestoreMode
from ckpt_runtime.checkpoint.statistics import CheckpointType
from ckpt_runtime.scheduler import job_effects as job_out
from ckpt_runtime.scheduler import job_events as job_on
from ckpt_runtime.scheduler.job_machine import JobMachine
from ckpt_runtime.scheduler.job_status import JobState, JobStatus
from ckpt_runtime.scheduler.restart_strategies import Backoff, RestartStrategy
from tests.simulation.protocols.config_endpoint import ConfigEndpoint
from tests.simulation.protocols.driver_checker import DriverChecker
from tests.simulation.protocols.driver_storage import StorageShell
from tests.simulation.protocols.event_loop import SimulatedProcess
from tests.simulation.protocols.tasks import CAUSE, Deployment, Subtask
from tests.simulation.schedules.reported_checkpoints import ReportedCheckpoints

if TYPE_CHECKING:
    from tests.simulation.protocols.world import World

LEASE_MS = 250
_RENEW_MS = 80
BACKOFF = Backoff(15, 40, 2.0)


class ObservedStrategy:
    """A restart strategy; ``refused`` once it has said that the job must fail."""

    def __init__(self, strategy: RestartStrategy) -> None:
        self._strategy = strategy
        self.refused = False

    def on_failure(self, now: int) -> int | None:
        delay = self._strategy.on_failure(now)
        self.refused = self.refused or delay is None
        return delay


class _HaIds:
    """Checkpoint ids out of high availability: durable before they are used."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def next_id(self) -> int:
        driver = self._driver
        ha = driver.world.ha
        if not driver.leads or driver.world.choices.fault("no checkpoint id", 0.004):
            driver.checker.no_id()
            raise CheckpointIdUnavailableError("simulated")
        ha.counter += 1
        return ha.counter - 1

    def advance_to(self, at_least: int) -> None:
        if self._driver.leads:
            self._driver.world.ha.counter = max(self._driver.world.ha.counter, at_least)


class Driver:
    """One process that leads in ``epoch`` until somebody else does."""

    def __init__(self, world: World, epoch: int) -> None:
        self.world = world
        self.epoch = epoch
        self.process = SimulatedProcess(f"driver {epoch}")
        self.deployment: Deployment | None = None
        self.checker = DriverChecker(self)
        self.storage = StorageShell(self)
        self.endpoint = ConfigEndpoint(self)
        self.ended: job_out.JobEnded | None = None
        self.shut_down = False
        self.backlog = False
        self._timers: dict[on.TimerId, int] = {}
        self._timer_token = 0
        self._restart_token = 0
        self.restored: CompletedCheckpoint | None = None
        self.subtasks = [(v.id, i) for v in world.scenario.graph.vertices for i in range(v.parallelism)]
        submitted = world.scenario.submitted
        overrides = CheckpointOverrides.from_document(world.ha.overrides)
        self.coordinator = CheckpointCoordinator(
            "job",
            world.scenario.graph,
            overrides.applied_to(submitted),
            _HaIds(self),
            list(world.ha.pointers.values()),
            first_delay_ms=world.choices.delay("first delay", 0, 200),
            statistics=ReportedCheckpoints(self.checker),
        )
        self.strategy = ObservedStrategy(world.scenario.restart_strategy())
        self.machine = JobMachine(self.subtasks, self.strategy, backoff=BACKOFF)
        self.failures = self._earlier_failures()

    @property
    def leads(self) -> bool:
        """Whether nobody has claimed a later epoch. A driver cannot see this but by asking high availability."""
        return self.world.ha.epoch == self.epoch

    def _earlier_failures(self) -> list[int]:
        return list(self.world.ha.failures)

    def start(self) -> None:
        """Goes on with the job, or finishes cleaning up after it."""
        self._renew()
        self.storage.dispose()
        result = self.world.ha.result
        if result is None:
            self.tell_job(job_on.Start())
        else:
            self.tell(on.Shutdown(result.status))

    def _renew(self) -> None:
        if not self.leads:
            self.lost_leadership()
        elif not self.shut_down:
            self.world.loop.at(self.world.loop.now + _RENEW_MS, self.process, self._renew)

    def lost_leadership(self) -> None:
        """Another driver leads: nothing may be written or deleted any more."""
        if not self.process.alive:
            return
        self.world.note(self, "lost leadership")
        if not self.shut_down:
            self.tell(on.Shutdown("SUSPENDED", fenced=True))
        self.machine.handle(job_on.SuspendRequested(), self.world.loop.instant)
        self.die()

    def die(self) -> None:
        """The process is gone, and its workers with it, though not at once."""
        self.process.alive = False
        if self.deployment is not None:
            at = self.world.loop.now + self.world.choices.delay("workers outlive their driver", 0, 150)
            self.world.loop.at(at, None, self.deployment.die)

    # --- the two machines

    def tell(self, event: on.CoordinatorEvent) -> None:
        world = self.world
        world.note(self, event)
        self.checker.before(event)
        effects = self.coordinator.handle(event, world.loop.instant)
        self.checker.after(event, effects)
        for effect in effects:
            if world.tracing:
                world.note(self, effect)
            _EXECUTE[type(effect)](self, effect)

    def tell_job(self, event: job_on.JobEvent) -> None:
        world = self.world
        world.note(self, event)
        for effect in self.machine.handle(event, world.loop.instant):
            if world.tracing:
                world.note(self, effect)
            _EXECUTE[type(effect)](self, effect)
        if type(event) in _FAILURES:
            self.failures.append(world.next_failure())
            if self.process.alive and not self.machine.state.is_terminal:
                self.storage.keep_failures()

    # --- effects of the job machine

    def _acquire_slots(self, effect: job_out.AcquireSlots) -> None:
        fails = self.world.choices.fault("no slots", 0.05)
        event = job_on.SlotsFailed(effect.attempt, CAUSE) if fails else job_on.SlotsAcquired(effect.attempt)
        at = self.world.loop.now + self.world.choices.delay("slots", 0, 15)
        self.world.loop.at(at, self.process, self.tell_job, event)

    def _restore_state(self, effect: job_out.RestoreState) -> None:
        if self.world.choices.fault("storage is away at a restore", 0.03):
            failed = job_on.StateRestoreFailed(effect.attempt, CAUSE)
            self.world.loop.at(self.world.loop.now + 1, self.process, self.tell_job, failed)
            return
        mode = self.world.scenario.restored
        request_id = f"restore-{effect.attempt}"
        self.tell(on.RestoreRequested(request_id, self.world.origin, mode or RestoreMode.NO_CLAIM))

    def _deploy(self, effect: job_out.Deploy) -> None:
        self.checker.restarts()
        if self.deployment is not None:
            self.checker.replaced(self.deployment)
        self.deployment = Deployment(self, self.world.scenario.graph, self.restored)
        self.checker.deployed()
        self.world.checker.deployed(self.deployment)
        self.deployment.start(effect.executions)

    def _cancel_tasks(self, effect: job_out.CancelTasks) -> None:
        deployment = self.deployment
        if deployment is not None:
            for execution in effect.executions:
                deployment.send(execution.subtask, deployment.cancel, deployment.tasks[execution])

    def _all_tasks_running(self, effect: job_out.AllTasksRunning) -> None:
        restored = frozenset[str]() if self.restored is None else self.restored.fully_finished_vertices
        self.tell(on.JobRunning(effect.executions, effect.finished, restored))
        if self.deployment is not None:
            for task in self.deployment.tasks.values():
                if task.end_of_data and not task.ended:
                    self.tell(on.EndOfDataReached(task.execution))

    def _tasks_leave_running(self, effect: job_out.TasksLeaveRunning) -> None:
        self.tell(on.TasksLeftRunning())

    def _stop_periodic(self, effect: job_out.StopPeriodicTrigger) -> None:
        self.tell(on.PeriodicTriggerStopped())

    def _start_periodic(self, effect: job_out.StartPeriodicTrigger) -> None:
        self.tell(on.PeriodicTriggerStarted())

    def _trigger_savepoint(self, effect: job_out.TriggerSavepoint) -> None:
        kind = CheckpointProperties(CheckpointType.SYNC_SAVEPOINT, effect.savepoint_format, drain=effect.drain)
        self.tell(on.TriggerRequested(effect.request_id, kind, effect.target_directory))

    def _stop_ended(self, effect: job_out.StopCompleted | job_out.StopFailed) -> None:
        self.checker.stop_ended(effect)

    def _schedule_restart(self, effect: job_out.ScheduleRestart) -> None:
        self._restart_token += 1
        self.world.loop.at(max(self.world.loop.now, effect.at_rel_ms), self.process, self._restart, effect.generation)

    def _restart(self, generation: int) -> None:
        self.tell_job(job_on.RestartTimerFired(generation))

    def _job_ended(self, effect: job_out.JobEnded) -> None:
        """The result is durable before anything of the job is deleted: it must never be run again from nothing."""
        self.ended = effect
        self.checker.job_ended(effect, strategy_refused=self.strategy.refused)
        if effect.status is JobStatus.SUSPENDED:
            self.tell(on.Shutdown(effect.status.value))
        else:
            self.storage.store_result(effect.status.value, self._result_stored)

    def _result_stored(self) -> None:
        assert self.ended is not None
        self.tell(on.Shutdown(self.ended.status.value))

    def _nothing(self, effect: Any) -> None:
        """For effects that only inform."""

    # --- effects of the coordinator

    def _schedule_timer(self, effect: out.ScheduleTimer) -> None:
        self._timer_token += 1
        self._timers[effect.timer] = self._timer_token
        at = max(self.world.loop.now, effect.at_rel_ms) + self.world.choices.delay("timer", 0, 2)
        self.world.loop.at(at, self.process, self._fire, effect.timer, effect.generation, self._timer_token)

    def _fire(self, timer: on.TimerId, generation: int, token: int) -> None:
        """With late timers, one that was cancelled or replaced fires all the same."""
        if self._timers.get(timer) == token:
            del self._timers[timer]
        elif not self.world.scenario.late_timers:
            return
        self.tell(on.TimerFired(timer, generation))

    def _cancel_timer(self, effect: out.CancelTimer) -> None:
        self._timers.pop(effect.timer, None)

    def _trigger_sources(self, effect: out.TriggerSources) -> None:
        deployment = self.deployment
        undelivered = self.world.choices.fault("trigger undelivered", 0.01)
        for execution in effect.tasks:
            task = None if deployment is None else deployment.tasks.get(execution)
            if deployment is None or task is None or undelivered:
                event = on.TriggerFailed(effect.checkpoint_id, "simulated")
                self.world.loop.at(self.world.loop.now, self.process, self.tell, event)
                return
            arguments = (task, effect.checkpoint_id, effect.options)
            deployment.send(execution.subtask, deployment.trigger, *arguments, checkpointing=True)

    def _notify_complete(self, effect: out.NotifyComplete) -> None:
        deployment = self.deployment
        if deployment is not None:
            for execution in effect.tasks:
                task = deployment.tasks.get(execution)
                # What ends a stopped job is not lost: no later completion would heal it.
                if task is not None and task.stopping == effect.checkpoint_id:
                    at = self.world.loop.now + self.world.choices.delay("to worker", 0, 5)
                    self.world.loop.at(at, None, deployment.completed, task, effect.checkpoint_id)
                elif task is not None:
                    arguments = (task, effect.checkpoint_id)
                    deployment.send(execution.subtask, deployment.completed, *arguments, checkpointing=True)

    def _notify_aborted(self, effect: out.NotifyAborted) -> None:
        deployment = self.deployment
        if deployment is not None:
            for execution in effect.tasks:
                task = deployment.tasks.get(execution)
                if task is not None:
                    arguments = (task, effect.checkpoint_id, effect.latest_completed)
                    deployment.send(execution.subtask, deployment.aborted, *arguments, checkpointing=True)

    def _request_completed(self, effect: out.RequestCompleted) -> None:
        if effect.request_id.startswith("stop"):
            self.tell_job(job_on.SavepointCompleted(effect.request_id, effect.external_path))

    def _request_failed(self, effect: out.RequestFailed) -> None:
        if effect.request_id.startswith("stop"):
            self.tell_job(job_on.SavepointFailed(effect.request_id, effect.message, effect.reached_tasks))
            goes_on = effect.reached_tasks and self.machine.state is JobState.RUNNING
            self.checker.require(not goes_on, "the job goes on with tasks whose sources may have stopped")

    def _restore_from(self, effect: out.RestoreFrom) -> None:
        self.checker.restoring(effect.checkpoint)
        self.restored = effect.checkpoint
        self.tell_job(job_on.StateRestored(int(effect.request_id.rpartition("-")[2])))

    def _restore_failed(self, effect: out.RestoreFailed) -> None:
        self.tell_job(job_on.StateRestoreFailed(int(effect.request_id.rpartition("-")[2]), CAUSE))

    def _fail_job(self, effect: out.FailJob) -> None:
        self.checker.failed_by_checkpoints()
        self.tell_job(job_on.JobFailed(CAUSE, failed_checkpoints=effect.times))

    def _shutdown_complete(self, effect: out.ShutdownComplete) -> None:
        self.shut_down = True
        if self.ended is not None and self.ended.status is JobStatus.SUSPENDED:
            self.die()
            self.world.driver_gone()
        elif self.leads:
            at = self.world.loop.now + 15  # behind the deletions that nobody waits for
            self.world.loop.at(at, self.process, self.storage.clean_up, effect.keeps_nothing)

    # --- messages of workers

    def checkpoint_message(self, deployment: Deployment, event: on.CoordinatorEvent) -> None:
        """Acknowledgements and declines. On a lossy transport those of earlier attempts arrive as well."""
        if (deployment is self.deployment or self.world.scenario.lossy) and not self.shut_down:
            self.tell(event)

    def end_of_data(self, deployment: Deployment, task: Subtask) -> None:
        if deployment is self.deployment and self.machine.state is not JobState.DEPLOYING and not self.shut_down:
            self.tell(on.EndOfDataReached(task.execution))

    def task_running(self, deployment: Deployment, task: Subtask) -> None:
        if deployment is self.deployment:
            self.tell_job(job_on.TaskRunning(task.execution))

    def task_finished(self, deployment: Deployment, task: Subtask) -> None:
        if deployment is self.deployment and not self.shut_down:
            self.checker.finished(task.execution)
            self.tell(on.SubtaskFinished(task.execution))
            self.tell_job(job_on.TaskFinished(task.execution))

    def task_canceled(self, deployment: Deployment, task: Subtask) -> None:
        if deployment is self.deployment:
            self.tell_job(job_on.TaskCanceled(task.execution))

    def task_failed(self, deployment: Deployment, task: Subtask) -> None:
        if deployment is self.deployment:
            self.tell_job(job_on.TaskFailed(task.execution, CAUSE))

    def worker_lost(self, deployment: Deployment, index: int) -> None:
        if deployment is self.deployment:
            for execution in self.machine.tasks.alive:
                if execution.subtask == index:
                    self.tell_job(job_on.TaskFailed(execution, CAUSE))


_FAILURES = (job_on.TaskFailed, job_on.SlotsFailed, job_on.StateRestoreFailed, job_on.JobFailed)
_EXECUTE: dict[type[Any], Callable[[Driver, Any], None]] = {
    job_out.StatusChanged: Driver._nothing,
    job_out.AcquireSlots: Driver._acquire_slots,
    job_out.RestoreState: Driver._restore_state,
    job_out.Deploy: Driver._deploy,
    job_out.CancelTasks: Driver._cancel_tasks,
    job_out.AllTasksRunning: Driver._all_tasks_running,
    job_out.TasksLeaveRunning: Driver._tasks_leave_running,
    job_out.StopPeriodicTrigger: Driver._stop_periodic,
    job_out.StartPeriodicTrigger: Driver._start_periodic,
    job_out.TriggerSavepoint: Driver._trigger_savepoint,
    job_out.StopCompleted: Driver._stop_ended,
    job_out.StopFailed: Driver._stop_ended,
    job_out.ScheduleRestart: Driver._schedule_restart,
    job_out.CancelRestart: Driver._nothing,
    job_out.JobEnded: Driver._job_ended,
    out.ScheduleTimer: Driver._schedule_timer,
    out.CancelTimer: Driver._cancel_timer,
    out.TriggerSources: Driver._trigger_sources,
    out.NotifyComplete: Driver._notify_complete,
    out.NotifyAborted: Driver._notify_aborted,
    out.RequestCompleted: Driver._request_completed,
    out.RequestFailed: Driver._request_failed,
    out.RestoreFrom: Driver._restore_from,
    out.RestoreFailed: Driver._restore_failed,
    out.FailJob: Driver._fail_job,
    out.ShutdownComplete: Driver._shutdown_complete,
    out.InitializeLocation: lambda driver, effect: driver.storage.initialize_location(effect),
    out.WriteMetadata: lambda driver, effect: driver.storage.write_metadata(effect),
    out.ResolveMetadata: lambda driver, effect: driver.storage.resolve_metadata(effect),
    out.AddToStore: lambda driver, effect: driver.storage.add_to_store(effect),
    out.ResolveStore: lambda driver, effect: driver.storage.resolve_store(effect),
    out.RemoveFromStore: lambda driver, effect: driver.storage.remove_from_store(effect),
    out.DiscardCheckpoint: lambda driver, effect: driver.storage.discard_checkpoint(effect),
    out.DiscardLocation: lambda driver, effect: driver.storage.discard_location(effect),
    out.DiscardState: lambda driver, effect: driver.storage.discard_state(effect),
    out.DeleteSharedFiles: lambda driver, effect: driver.storage.delete_shared(effect),
    out.FindLeftovers: lambda driver, effect: driver.storage.find_leftovers(effect),
}
