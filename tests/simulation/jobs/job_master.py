"""One simulated run of a job: the real job machine and checkpoint coordinator in a shell as small as can be.

It executes their effects in the order of the real job master. Storage calls run later, one at a time, and may fail;
messages to workers go through connections that keep their order. A new run (another parallelism, another savepoint) is
another job with an id of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.checkpoint.coordinator import CheckpointCoordinator, CoordinatorState
from ckpt_runtime.checkpoint.executions import ExecutionId, TaskState
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.properties import CheckpointOptions, CheckpointProperties, RestoreMode
from ckpt_runtime.checkpoint.state_assignment import assign_states
from ckpt_runtime.checkpoint.statistics import CheckpointType
from ckpt_runtime.graph.compiler import CompiledPlan
from ckpt_runtime.jobmaster.deployment_planner import RestoredState, SlotPlacement, plan_deployments
from ckpt_runtime.network.elements import CheckpointBarrier
from ckpt_runtime.scheduler import job_effects as job_out
from ckpt_runtime.scheduler import job_events as job_on
from ckpt_runtime.scheduler.deployment import Program
from ckpt_runtime.scheduler.job_machine import JobMachine
from ckpt_runtime.scheduler.job_status import JobState, JobStatus
from ckpt_runtime.scheduler.restart_strategies import Backoff, FixedDelay
from ckpt_runtime.storage.checkpoint_storage import CheckpointStorage
from ckpt_runtime.task.worker import describe_error
from tests.simulation.jobs.checkers import CheckpointLedger
from tests.simulation.jobs.file_system import ROOT
from tests.simulation.jobs.storage_shell import StorageShell
from tests.simulation.schedules.reported_checkpoints import ReportedCheckpoints
from tests.simulation.schedules.violation import Violation

if TYPE_CHECKING:
    from tests.simulation.jobs.worker import SimulatedWorker
    from tests.simulation.jobs.world import World

CAUSE = job_on.FailureInfo("SimulatedFailure", "simulated")
_PROGRAM = Program("", "", ())
SAVEPOINTS = f"{ROOT}/savepoints"


class JobMaster:
    """``origin`` is what the run starts from, ``number`` counts the runs from 1."""

    def __init__(
        self,
        world: World,
        number: int,
        plan: CompiledPlan,
        configuration: CheckpointConfiguration,
        origin: CompletedCheckpoint | None,
        mode: RestoreMode,
    ) -> None:
        self.world = world
        self.number = number
        self.job_id = f"{number:032x}"
        self.plan = plan
        self.graph = plan.job_graph
        self.origin = origin
        self.mode = mode
        self.restored: RestoredState | None = None
        self.deployment = -1
        self.ended: JobStatus | None = None
        self.closed = False
        self.stopped_at: str | None = None
        self.storage = StorageShell(self, CheckpointStorage(ROOT, self.job_id))
        self.ledger = CheckpointLedger(self)
        self.coordinator = CheckpointCoordinator(
            self.job_id,
            self.graph,
            configuration,
            first_delay_ms=world.choices.delay("first delay", 0, 40),
            statistics=ReportedCheckpoints(self.ledger),
        )
        subtasks = [(vertex.id, index) for vertex in self.graph.vertices for index in range(vertex.parallelism)]
        strategy = FixedDelay(1_000_000, world.choices.delay("restart", 0, 5))
        self.machine = JobMachine(subtasks, strategy, backoff=Backoff(2, 10, 1.5))
        self._slots: list[SimulatedWorker] = []
        self._timers: dict[Any, tuple[float, Callable[[], None]]] = {}
        self._earliest = float("inf")
        self._at_end_of_data: list[ExecutionId] = []
        self._alive: set[int] = set()
        self.options: dict[int, CheckpointOptions] = {}

    # --- the two machines

    def tell(self, event: on.CoordinatorEvent) -> None:
        self.world.note("%s", event)
        for effect in self.coordinator.handle(event, self._now()):
            self.world.note("  -> %s", effect)
            self._checkpoint_effect(effect)

    def tell_job(self, event: job_on.JobEvent) -> None:
        self.world.note("%s", event)
        for effect in self.machine.handle(event, self._now()):
            self.world.note("  -> %s", effect)
            self._job_effect(effect)

    def _now(self) -> Instant:
        return Instant(int(self.world.now), self.world.wall_ms(-1))

    # --- timers

    @property
    def next_timer(self) -> float | None:
        return min((at for at, _ in self._timers.values()), default=None)

    def fire_timers(self) -> None:
        """Those that are due, by their time."""
        now = int(self.world.now)
        if now < self._earliest:
            return
        due = sorted((at, str(key), key) for key, (at, _) in self._timers.items() if at <= now)
        later = (at for at, _ in self._timers.values() if at > now)
        self._earliest = min(later, default=float("inf"))
        for at, _, key in due:
            known = self._timers.get(key)
            if known is not None and known[0] == at:
                del self._timers[key]
                known[1]()

    def schedule(self, key: Any, at: float, action: Callable[[], None]) -> None:
        self._timers[key] = (at, action)
        self._earliest = min(self._earliest, at)

    # --- effects of the coordinator

    def _checkpoint_effect(self, effect: out.Effect) -> None:
        match effect:
            case out.ScheduleTimer(timer, generation, at_rel_ms):
                self.schedule(timer, at_rel_ms, lambda: self.tell(on.TimerFired(timer, generation)))
            case out.CancelTimer(timer):
                self._timers.pop(timer, None)
            case out.TriggerSources() | out.NotifyComplete() | out.NotifyAborted():
                self._tell_tasks(effect)
            case _:
                self._answer(effect)

    def _tell_tasks(self, effect: out.TriggerSources | out.NotifyComplete | out.NotifyAborted) -> None:
        match effect:
            case out.TriggerSources(checkpoint_id, timestamp, options, tasks):
                self.options[checkpoint_id] = options
                barrier = CheckpointBarrier(checkpoint_id, timestamp, options)
                if any(execution.subtask not in self._alive for execution in tasks):
                    self.world.later(self.tell, on.TriggerFailed(checkpoint_id, "a worker is gone"))
                    return
                for slot, mine in _by_slot(tasks):
                    self._send(slot, self._slots[slot].trigger, barrier, [execution.key for execution in mine])
            case out.NotifyComplete(checkpoint_id, _, tasks):
                for slot, mine in _by_slot(tasks):
                    keys = [execution.key for execution in mine]
                    self._send(slot, self._slots[slot].completed, checkpoint_id, keys)
            case out.NotifyAborted(checkpoint_id, _, latest, tasks):
                for slot, mine in _by_slot(tasks):
                    keys = [execution.key for execution in mine]
                    known = None if latest < 0 else latest
                    self._send(slot, self._slots[slot].aborted, checkpoint_id, known, keys)

    def _answer(self, effect: out.Effect) -> None:
        match effect:
            case out.RequestCompleted(request_id, checkpoint_id, path):
                if request_id.startswith("stop"):
                    self.world.savepoint_taken(self, checkpoint_id, path, stop=True)
                    self.tell_job(job_on.SavepointCompleted(request_id, path))
                elif request_id.startswith("savepoint"):
                    self.world.savepoint_taken(self, checkpoint_id, path, stop=False)
            case out.RequestFailed(request_id, _, message, _, reached_tasks):
                if request_id.startswith("stop"):
                    self.tell_job(job_on.SavepointFailed(request_id, message, reached_tasks))
            case out.RestoreFrom(_, checkpoint):
                self._restore_from(checkpoint)
            case out.RestoreFailed():
                self.tell_job(job_on.StateRestoreFailed(self.machine.attempt, CAUSE))
            case out.FailJob(_, _, times):
                self.tell_job(job_on.JobFailed(CAUSE, failed_checkpoints=times))
            case out.ShutdownComplete(keeps_nothing):
                self._timers.clear()
                self.storage.finish(keeps_nothing)
            case _:
                self.storage.execute(effect)

    def _restore_from(self, checkpoint: CompletedCheckpoint | None) -> None:
        self.world.restoring(self, checkpoint)
        if checkpoint is None:
            self.restored = None
        else:
            assigned = assign_states(checkpoint, self.graph)
            self.restored = RestoredState(
                checkpoint.id,
                checkpoint.directory,
                assigned.subtasks,
                assigned.finished_vertices,
                assigned.in_flight,
                owned=self.coordinator.latest_is_owned,
            )
        self.tell_job(job_on.StateRestored(self.machine.attempt))

    # --- effects of the job machine

    def _job_effect(self, effect: job_out.JobEffect) -> None:
        match effect:
            case job_out.AcquireSlots(attempt):
                self._slots = self.world.workers_for(self.graph.slots)
                self.world.later(self.tell_job, job_on.SlotsAcquired(attempt))
            case job_out.RestoreState(attempt):
                self.world.later(self._request_restore, attempt)
            case job_out.Deploy(executions):
                self._deploy(executions)
            case job_out.CancelTasks(executions):
                self._cancel(executions)
            case job_out.ScheduleRestart(generation, at):
                self.schedule("restart", at, lambda: self.tell_job(job_on.RestartTimerFired(generation)))
            case job_out.CancelRestart():
                self._timers.pop("restart", None)
            case job_out.StopCompleted() | job_out.StopFailed():
                self.stopped_at = effect.location
            case job_out.JobEnded(status):
                self.ended = status
                if self.coordinator.state is CoordinatorState.RUNNING:
                    self.tell(on.TasksLeftRunning())
                self.tell(on.Shutdown(status.value))
            case _:
                self._tell_coordinator(effect)

    def _cancel(self, executions: tuple[ExecutionId, ...]) -> None:
        for slot, mine in _by_slot(executions):
            if slot in self._alive:
                self._send(slot, self._slots[slot].cancel)
            else:
                for execution in mine:
                    self.tell_job(job_on.TaskCanceled(execution))

    def _tell_coordinator(self, effect: job_out.JobEffect) -> None:
        match effect:
            case job_out.AllTasksRunning(executions, finished):
                vertices = frozenset() if self.restored is None else self.restored.finished_vertices
                self.tell(on.JobRunning(executions, finished, vertices))
                waiting, self._at_end_of_data = self._at_end_of_data, []
                for execution in waiting:
                    self.tell(on.EndOfDataReached(execution))
            case job_out.TasksLeaveRunning():
                self._at_end_of_data = []
                self.tell(on.TasksLeftRunning())
            case job_out.StopPeriodicTrigger():
                self.tell(on.PeriodicTriggerStopped())
            case job_out.StartPeriodicTrigger():
                self.tell(on.PeriodicTriggerStarted())
            case job_out.TriggerSavepoint(request_id, drain, directory, savepoint_format):
                properties = CheckpointProperties(CheckpointType.SYNC_SAVEPOINT, savepoint_format, drain=drain)
                self.tell(on.TriggerRequested(request_id, properties, directory))

    def _request_restore(self, attempt: int) -> None:
        open_states = (CoordinatorState.CREATED, CoordinatorState.RESTORING)
        if attempt == self.machine.attempt and self.coordinator.state in open_states:
            self.tell(on.RestoreRequested(f"restore-{attempt}", self.origin, self.mode))

    def _deploy(self, executions: tuple[ExecutionId, ...]) -> None:
        world = self.world
        if any(not worker.alive for worker in self._slots):
            for execution in executions:
                self.tell_job(job_on.TaskFailed(execution, CAUSE))
            return
        self.deployment = world.next_deployment(self)
        self._alive = set(range(len(self._slots)))
        deployments = plan_deployments(
            self.job_id,
            self.graph,
            _PROGRAM,
            [SlotPlacement(("worker", worker.number)) for worker in self._slots],
            deployment=self.deployment,
            attempt=self.machine.attempt,
            restored=self.restored,
        )
        for slot, deployment in enumerate(deployments):
            world.to_worker(self._slots[slot], self._slots[slot].deploy, deployment, self.plan)

    def _send(self, slot: int, action: Callable[..., None], *arguments: Any) -> None:
        if slot in self._alive:
            self.world.to_worker(self._slots[slot], action, self.deployment, *arguments)

    # --- messages of workers

    def worker_lost(self, worker: SimulatedWorker) -> None:
        if worker in self._slots:
            slot = self._slots.index(worker)
            self._alive.discard(slot)
            for execution in [e for e in self.machine.tasks.alive if e.subtask == slot]:
                self.tell_job(job_on.TaskFailed(execution, CAUSE))

    def worker_message(
        self,
        worker: SimulatedWorker,
        kind: str,
        deployment: int,
        execution: ExecutionId | None,
        content: tuple[Any, ...],
    ) -> None:
        if deployment != self.deployment or worker not in self._slots:
            return
        slot = self._slots.index(worker)
        if slot not in self._alive:
            return
        if execution is None:
            if kind != "canceled":
                self._check_recoverable(*content)
            for alive in [e for e in self.machine.tasks.alive if e.subtask == slot]:
                gone = job_on.TaskCanceled(alive) if kind == "canceled" else job_on.TaskFailed(alive, CAUSE)
                self.tell_job(gone)
            return
        match kind:
            case "state":
                self._task_state(execution, *content)
            case "end of data":
                if self.machine.state is JobState.DEPLOYING:
                    self._at_end_of_data.append(execution)
                else:
                    self.tell(on.EndOfDataReached(execution))
            case "ack":
                checkpoint_id, directory, state, metrics, finished = content
                self.tell(on.Acknowledged(checkpoint_id, execution, directory, state, metrics, finished))
            case "decline":
                self.tell(on.Declined(content[0], execution, content[1], content[2]))

    def _task_state(self, execution: ExecutionId, state: TaskState, error: BaseException | None) -> None:
        match state:
            case TaskState.RUNNING:
                self.tell_job(job_on.TaskRunning(execution))
            case TaskState.FINISHED:
                self.tell(on.SubtaskFinished(execution))
                self.tell_job(job_on.TaskFinished(execution))
            case TaskState.CANCELED:
                self.tell_job(job_on.TaskCanceled(execution))
            case TaskState.FAILED:
                if error is not None:
                    self._check_recoverable(error)
                self.tell_job(job_on.TaskFailed(execution, CAUSE))
            case _:
                raise Violation(f"{execution} reports {state}: {error}")

    def _check_recoverable(self, error: BaseException) -> None:
        """As in production, what no restart can help ends the job."""
        if not describe_error(error).recoverable:
            self.world.note("hopeless: %s", error)
            self.tell_job(job_on.JobFailed(CAUSE, recoverable=False))

    # --- wishes

    def trigger(self, request_id: str, properties: CheckpointProperties) -> None:
        directory = SAVEPOINTS if properties.is_savepoint else None
        self.tell(on.TriggerRequested(request_id, properties, directory))

    def stop(self, request_id: str, drain: bool) -> None:
        self.tell_job(job_on.StopRequested(request_id, drain, SAVEPOINTS))

    def patch(self, configuration: CheckpointConfiguration) -> None:
        self.ledger.patched(configuration)
        self.tell(on.ConfigurationPatched(configuration))


def _by_slot(executions: tuple[ExecutionId, ...]) -> list[tuple[int, list[ExecutionId]]]:
    found: dict[int, list[ExecutionId]] = {}
    for execution in executions:
        found.setdefault(execution.subtask, []).append(execution)
    return sorted(found.items())
