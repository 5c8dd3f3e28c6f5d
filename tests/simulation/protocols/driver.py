"""A simulated driver process: the real job core in a shell as small as can be.

It executes the core's outputs in their order and loses everything in memory when it crashes. Storage is
``driver_storage``'s, the stored overrides are ``config_endpoint``'s. As in production an event that comes up while
outputs are executed waits for its turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.configuration import CheckpointOverrides
from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.triggering import CheckpointIdUnavailableError
from ckpt_runtime.configuration.checkpointing_options import RecoveryClaimMode
from ckpt_runtime.scheduler import core_events as core_out
from ckpt_runtime.scheduler import job_effects as job_out
from ckpt_runtime.scheduler import job_events as job_on
from ckpt_runtime.scheduler.core_events import JobInput, LeadershipLost
from ckpt_runtime.scheduler.deployment import JobPlan
from ckpt_runtime.scheduler.job_core import JobCore
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.scheduler.replacement import subtasks_of
from ckpt_runtime.scheduler.restart_strategies import BackoffSettings
from tests.simulation.protocols.config_endpoint import ConfigEndpoint
from tests.simulation.protocols.driver_checker import DriverChecker
from tests.simulation.protocols.driver_storage import StorageShell
from tests.simulation.protocols.event_loop import SimulatedProcess
from tests.simulation.protocols.leases import LeaseHolder
from tests.simulation.protocols.observed import ObservedCoordinator, ObservedMachine, ObservedStrategy
from tests.simulation.protocols.plan_endpoint import PlanEndpoint
from tests.simulation.protocols.plan_model import PlanModel
from tests.simulation.protocols.scenario import STRATEGIES
from tests.simulation.protocols.tasks import CAUSE, Deployment, Subtask
from tests.simulation.schedules.reported_checkpoints import ReportedCheckpoints
from tests.simulation.schedules.violation import Violation

if TYPE_CHECKING:
    from tests.simulation.protocols.world import World

_RENEW_MS = 80
BACKOFF = BackoffSettings(15, 40, 2.0)


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

    def __init__(self, world: World, epoch: int, lease: LeaseHolder | None = None) -> None:
        """``lease`` None: it leads until it is gone, and somebody starts another one."""
        self.world = world
        self.epoch = epoch
        self.lease = lease
        self.origin = world.choices.delay("the origin of a clock", 0, 1 << 30)
        self.skew = world.choices.delay("the skew of a clock", 0, 240_000) - 120_000
        self.process = SimulatedProcess(f"driver {epoch}")
        self.deployment: Deployment | None = None
        self.storage: StorageShell = StorageShell(self)
        self.endpoint: ConfigEndpoint = ConfigEndpoint(self)
        self.changes: PlanEndpoint = PlanEndpoint(self)
        self.ended: job_out.JobEnded | None = None
        self.shut_down = False
        self.backlog = False
        self._inbox: deque[JobInput] = deque()
        self._busy = False
        self._timers: dict[on.TimerId, int] = {}
        self._timer_token = 0
        scenario = world.scenario
        overrides = CheckpointOverrides.from_document(world.ha.overrides)
        own = world.options.read(world.ha.document)
        meaning = world.options.meaning(own.given)
        mode = scenario.restored or RecoveryClaimMode.NO_CLAIM
        graph = world.ha.graph
        plan = JobPlan(graph, world.options.effective(own.given), meaning.settings, world.origin, mode, own=own)
        self.plan = PlanModel(self, plan)
        self.checker = DriverChecker(self)
        self.coordinator = ObservedCoordinator(
            "job",
            graph,
            overrides.applied_to(meaning.settings),
            _HaIds(self),
            list(world.ha.pointers.values()),
            first_delay_ms=world.choices.delay("first delay", 0, 200),
            statistics=ReportedCheckpoints(self.checker),
        )
        strategy = self.plan.strategy = ObservedStrategy(STRATEGIES[meaning.strategy], self.plan)
        self.machine = ObservedMachine(subtasks_of(graph), strategy, world.ha.attempts, BACKOFF)
        self.coordinator.driver = self.machine.driver = self
        self.core = JobCore(plan, self.machine, self.coordinator, overrides)
        self.failures = self._earlier_failures()
        self.plan.earlier_failures = len(self.failures)

    @property
    def leads(self) -> bool:
        """Whether nobody has claimed a later epoch. A driver cannot see this but by asking high availability."""
        return self.world.ha.epoch == self.epoch

    def fence(self) -> bool | None:
        """What it can know itself before or behind a write: None while it cannot be sure, without its lease renewed."""
        if self.lease is not None and not self.lease.holds:
            return None
        return self.leads

    def _earlier_failures(self) -> list[int]:
        return list(self.world.ha.failures)

    def start(self) -> None:
        """Goes on with the job, or finishes cleaning up after it."""
        self._renew()
        self.storage.dispose()
        result = self.world.ha.result
        self.tell(job_on.Start() if result is None else on.Shutdown(result.status))

    def _renew(self) -> None:
        if self.lease is not None:
            self.lease.renew(self)
        elif not self.leads:
            self.lost_leadership()
        elif not self.shut_down:
            self.world.loop.at(self.world.loop.now + _RENEW_MS, self.process, self._renew)

    def lost_leadership(self) -> None:
        """Another driver leads: nothing may be written or deleted any more."""
        if self.process.alive:
            self.world.note(self, "lost leadership")
            self.tell(LeadershipLost())

    def die(self) -> None:
        """The process is gone, and its workers with it, though not at once."""
        self.process.alive = False
        if self.deployment is not None:
            at = self.world.loop.now + self.world.choices.delay("workers outlive their driver", 0, 150)
            self.world.loop.at(at, None, self.deployment.die)

    # --- events in, outputs out

    def tell(self, event: JobInput) -> None:
        self._inbox.append(event)
        if self._busy:
            return
        self._busy = True
        world = self.world
        try:
            while self._inbox:
                event = self._inbox.popleft()
                if world.tracing and type(event).__module__ == core_out.__name__:
                    world.note(self, event)
                self.changes.before()
                for output in self.core.handle(event, world.loop.instant(self.origin, self.skew)):
                    if world.tracing and type(output).__module__ == core_out.__name__:
                        world.note(self, output)
                    _EXECUTE[type(output)](self, output)
                self.plan.check()
                self.changes.check()
        finally:
            self._busy = False
        if self.core.is_fenced and self.process.alive:
            self.die()

    # --- slots, attempts, tasks

    def _acquire_slots(self, effect: job_out.AcquireSlots) -> None:
        self.plan.acquires(effect.attempt)
        self.changes.acquires()
        fails = self.world.choices.fault("no slots", 0.05)
        event = job_on.SlotsFailed(effect.attempt, CAUSE) if fails else job_on.SlotsAcquired(effect.attempt)
        at = self.world.loop.now + self.world.choices.delay("slots", 0, 15)
        self.world.loop.at(at, self.process, self.tell, event)

    def _deploy(self, order: core_out.DeployTasks) -> None:
        self.checker.deploys(order)
        self.plan.deploys(order)
        self.changes.deploys(order.graph)
        if self.deployment is not None:
            self.checker.replaced(self.deployment)
        self.deployment = Deployment(self, order)
        self.world.checker.deployed(self.deployment)
        self.deployment.start(order.executions)

    def _cancel_tasks(self, effect: job_out.CancelTasks) -> None:
        self.changes.cancels()
        deployment = self.deployment
        if deployment is None or not deployment.tasks.keys() >= set(effect.executions):
            raise Violation(f"tasks are to be cancelled that were not deployed: {effect.executions}")
        for execution in effect.executions:
            if deployment.lives(execution.subtask):
                deployment.send(execution.subtask, deployment.cancel, deployment.tasks[execution])
            else:
                self.tell(job_on.TaskCanceled(execution))

    def _stop_ended(self, effect: job_out.StopCompleted | job_out.StopFailed) -> None:
        if effect.location is not None:
            self.checker.told_of_the_end()
        self.checker.stop_ended(effect)

    def _status_changed(self, effect: job_out.StatusChanged) -> None:
        if effect.status.is_globally_terminal:
            self.checker.told_of_the_end()

    def _schedule_restart(self, effect: job_out.ScheduleRestart) -> None:
        at = max(self.world.loop.now, effect.at_rel_ms - self.origin)
        self.world.loop.at(at, self.process, self.tell, job_on.RestartTimerFired(effect.generation))

    def _record_failure(self, effect: core_out.RecordFailure) -> None:
        self.failures.append(self.world.next_failure())
        if effect.durable:
            self.storage.keep_failures()

    def _job_ended(self, effect: job_out.JobEnded) -> None:
        """The result is durable before anything of the job is deleted: it must never be run again from nothing."""
        self.ended = effect
        self.checker.told_of_the_end()
        self.checker.job_ended(effect, strategy_refused=self.plan.strategy_refused)

    def _change_answered(self, answer: core_out.ChangeAnswered) -> None:
        endpoint = self.endpoint if answer.request_id.startswith("patch") else self.changes
        endpoint.answered(answer)

    def _request_ended(self, effect: out.RequestCompleted | out.RequestFailed) -> None:
        self.changes.savepoints.discard(effect.request_id)
        if isinstance(effect, out.RequestFailed):
            self.checker.cancellation_failed(effect.request_id)
        elif self.checker.cancellation_due(effect.request_id, effect.checkpoint_id):
            at = self.world.loop.now + self.world.choices.delay("cancellation", 1, 150)
            self.world.loop.at(at, self.process, self._cancel)

    def _cancel(self) -> None:
        """Who asked for a savepoint first."""
        if not self.shut_down and self.ended is None and self.world.ha.result is None:
            self.tell(job_on.CancelRequested())

    def _nothing(self, effect: Any) -> None:
        """For effects that only inform."""

    # --- effects of the coordinator

    def _schedule_timer(self, effect: out.ScheduleTimer) -> None:
        self._timer_token += 1
        self._timers[effect.timer] = self._timer_token
        at = max(self.world.loop.now, effect.at_rel_ms - self.origin) + self.world.choices.delay("timer", 0, 2)
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
                self.tell(on.TriggerFailed(effect.checkpoint_id, "simulated"))
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

    def _shutdown_complete(self, effect: out.ShutdownComplete) -> None:
        self.shut_down = True
        if self.core.is_fenced:
            return
        if self.ended is not None and self.ended.status is JobStatus.SUSPENDED:
            self.die()
            self.world.released(self)
        elif self.leads:
            at = self.world.loop.now + 15  # behind the deletions that nobody waits for
            self.world.loop.at(at, self.process, self.storage.clean_up, effect.keeps_nothing)

    # --- messages of workers

    def checkpoint_message(self, deployment: Deployment, event: on.CoordinatorEvent) -> None:
        """Acknowledgements and declines. On a lossy transport those of earlier attempts arrive as well."""
        if (deployment is self.deployment or self.world.scenario.lossy) and not self.shut_down:
            self.tell(event)

    def end_of_data(self, deployment: Deployment, task: Subtask) -> None:
        if deployment is self.deployment and not self.shut_down:
            self.tell(on.EndOfDataReached(task.execution, waits=deployment.waits(task)))

    def task_running(self, deployment: Deployment, task: Subtask) -> None:
        if deployment is self.deployment:
            self.tell(job_on.TaskRunning(task.execution))

    def task_finished(self, deployment: Deployment, task: Subtask) -> None:
        if deployment is self.deployment and not self.shut_down:
            self.checker.finished(task.execution)
            self.tell(job_on.TaskFinished(task.execution))

    def task_canceled(self, deployment: Deployment, task: Subtask) -> None:
        if deployment is self.deployment:
            self.tell(job_on.TaskCanceled(task.execution))

    def task_failed(self, deployment: Deployment, task: Subtask) -> None:
        if deployment is self.deployment:
            self.tell(job_on.TaskFailed(task.execution, CAUSE))

    def worker_lost(self, deployment: Deployment, index: int) -> None:
        if deployment is self.deployment:
            for execution in self._alive_in(index):
                self.tell(job_on.TaskFailed(execution, CAUSE))

    def _alive_in(self, index: int) -> list[ExecutionId]:
        return [execution for execution in self.machine.tasks.alive if execution.subtask == index]


_EXECUTE: dict[type[Any], Callable[[Driver, Any], None]] = {
    job_out.StatusChanged: Driver._status_changed,
    job_out.AcquireSlots: Driver._acquire_slots,
    job_out.CancelTasks: Driver._cancel_tasks,
    job_out.StopCompleted: Driver._stop_ended,
    job_out.StopFailed: Driver._stop_ended,
    job_out.ScheduleRestart: Driver._schedule_restart,
    job_out.CancelRestart: Driver._nothing,
    job_out.JobEnded: Driver._job_ended,
    core_out.DeployTasks: Driver._deploy,
    core_out.RecordFailure: Driver._record_failure,
    core_out.RecordAttempt: lambda driver, order: driver.storage.record_attempt(order),
    core_out.StoreResult: lambda driver, order: driver.storage.store_result(order),
    core_out.StoreOverrides: lambda driver, order: driver.endpoint.store(order),
    core_out.SettleOverrides: lambda driver, order: driver.endpoint.settle(order),
    core_out.ChangeAnswered: Driver._change_answered,
    core_out.ReserveSlots: lambda driver, order: driver.changes.reserve(order),
    core_out.ReleaseReserve: lambda driver, order: driver.changes.release(order),
    core_out.StorePlan: lambda driver, order: driver.changes.store(order),
    core_out.SettlePlan: lambda driver, order: driver.changes.settle(order),
    out.ScheduleTimer: Driver._schedule_timer,
    out.CancelTimer: Driver._cancel_timer,
    out.TriggerSources: Driver._trigger_sources,
    out.NotifyComplete: Driver._notify_complete,
    out.NotifyAborted: Driver._notify_aborted,
    out.RequestCompleted: Driver._request_ended,
    out.RequestFailed: Driver._request_ended,
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
