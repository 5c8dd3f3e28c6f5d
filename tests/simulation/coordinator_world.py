"""A simulated job: real coordinator and job machine, fake tasks, storage and network, one seed, one thread.

The fakes delay, reorder, repeat and lose messages; storage fails, or does the work and says it does not know. The
checkers in ``ProtocolChecker`` look at every step. Nothing here reads a clock; the same seed gives the same trace.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.completed_checkpoint_store import RetainedCheckpoint
from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration, CheckpointRetention
from ckpt_runtime.checkpoint.coordinator import CheckpointCoordinator
from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.failure_reason import CheckpointFailureReason as Reason
from ckpt_runtime.checkpoint.id_counter import CheckpointIdCounter
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.properties import CheckpointOptions, CheckpointProperties, SavepointFormat
from ckpt_runtime.checkpoint.state_handles import KeyedStateHandle, OperatorSubtaskState, StateFile, SubtaskState
from ckpt_runtime.checkpoint.statistics import CheckpointType
from ckpt_runtime.graph.job_graph import JobEdge, JobGraph, JobVertex, OperatorNode, Partitioning
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.scheduler import job_effects as job_out
from ckpt_runtime.scheduler import job_events as job_on
from ckpt_runtime.scheduler.job_machine import JobMachine
from ckpt_runtime.scheduler.job_status import JobState
from ckpt_runtime.scheduler.restart_strategies import ExponentialDelay

CHAOS_MS = 2_500
CALM_MS = 1_800
EPOCH = 1_700_000_000_000
CAUSE = job_on.FailureInfo("RuntimeError", "simulated")


_DETAILS = frozenset({"checkpoint", "state", "metrics", "options", "configuration", "executions", "tasks", "finished"})


class Violation(AssertionError):
    """The protocol was broken."""


@dataclass(slots=True)
class Storage:
    """What is really there: files by directory (the metadata is one of them) and pointers by checkpoint id."""

    directories: dict[str, set[str]] = field(default_factory=dict)
    pointers: dict[int, RetainedCheckpoint] = field(default_factory=dict)
    savepoints: dict[int, CompletedCheckpoint] = field(default_factory=dict)
    wanted: dict[int, set[str]] = field(default_factory=dict)

    def holds(self, checkpoint: CompletedCheckpoint) -> bool:
        wanted = self.wanted.get(checkpoint.id)
        if wanted is None:
            wanted = {file.path for state in checkpoint.states.values() for file in state.files()} | {"_metadata"}
            self.wanted[checkpoint.id] = wanted
        return wanted <= self.directories.get(checkpoint.directory, set())


@dataclass(slots=True)
class Task:
    """A fake subtask. ``stopping`` is the synchronous savepoint that it is inside of."""

    execution: ExecutionId
    running: bool = False
    ended: bool = False
    ended_data_at: int | None = None
    stopping: int | None = None
    latest: int = 0


def random_graph(rng: random.Random) -> JobGraph:
    """One source, perhaps a middle, one sink."""
    names = ["source", "middle", "sink"][: rng.choice([2, 3])] if rng.random() < 0.8 else ["source"]
    parallelism = rng.randint(1, 3)
    vertices = tuple(
        JobVertex(f"v-{name}", (OperatorNode(name, name, "source" if name == "source" else "map"),), parallelism)
        for name in names
    )
    edges = tuple(
        JobEdge(a.id, b.id, rng.choice([Partitioning.FORWARD, Partitioning.HASH])) for a, b in pairwise(vertices)
    )
    return JobGraph("job", vertices, edges)


def random_configuration(rng: random.Random) -> CheckpointConfiguration:
    return CheckpointConfiguration(
        interval_ms=rng.choice([None, 50, 200, 500]),
        timeout_ms=rng.choice([60, 300, 2_000]),
        min_pause_ms=rng.choice([0, 0, 30, 100]),
        max_concurrent=rng.choice([1, 1, 2, 3]),
        tolerable_failures=rng.choice([0, 3, 1_000]),
        retained=rng.choice([1, 2, 3]),
        retention=rng.choice(list(CheckpointRetention)),
    )


class World:
    """Runs one seed; ``run`` returns the trace's hash and raises :class:`Violation` when a checker objects."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.graph = random_graph(self.rng)
        self.configuration = random_configuration(self.rng)
        self.bounded = self.rng.random() < 0.3
        self.now = 0
        self.chaos = True
        self.storage = Storage()
        self.ids = CheckpointIdCounter()
        self.tasks: dict[ExecutionId, Task] = {}
        self.queue: list[tuple[int, float, int, int, Callable[[], None]]] = []
        self.sequence = 0
        self.driver = 0
        self.timers: dict[on.TimerId, int] = {}
        self.requests = 0
        self.trace = hashlib.sha256()
        self.steps = 0
        self.ended: job_out.JobEnded | None = None
        self.shut_down = False
        self.orphans: set[str] = set()
        self.checker = ProtocolChecker(self)
        self.start_driver(first_attempt=0)

    # --- time

    def later(self, action: Callable[[], None], low: int = 0, high: int = 20) -> None:
        self.at(self.now + self.rng.randint(low, high), action)

    def at(self, time: int, action: Callable[[], None]) -> None:
        self.sequence += 1
        entry = (time, self.rng.random(), self.sequence, self.driver, action)
        heapq.heappush(self.queue, entry)

    def run(self) -> str:
        self.at(0, self.user)
        self.until(CHAOS_MS)
        self.chaos = False
        if self.ended is None:
            self.calm()
        self.until(CHAOS_MS + CALM_MS)
        self.checker.check_liveness()
        if self.ended is None:
            self.tell_job(job_on.CancelRequested())
        self.until(CHAOS_MS + 20_000)
        self.checker.check_quiet()
        return self.trace.hexdigest()

    def calm(self) -> None:
        """Faults have ended, and settings under which checkpoints can complete."""
        self.configuration = replace(
            self.configuration, interval_ms=100, timeout_ms=1_000, min_pause_ms=0, tolerable_failures=1_000
        )
        self.tell(on.ConfigurationPatched(self.configuration))

    def until(self, time: int) -> None:
        while self.queue and self.queue[0][0] <= time:
            self.now, _, _, driver, action = heapq.heappop(self.queue)
            if driver == self.driver:
                action()
        self.now = time

    @property
    def instant(self) -> Instant:
        return Instant(self.now, EPOCH + self.now)

    # --- the two machines

    def start_driver(self, first_attempt: int) -> None:
        self.coordinator = CheckpointCoordinator(
            "job",
            self.graph,
            self.configuration,
            self.ids,
            list(self.storage.pointers.values()),
            first_delay_ms=self.rng.randint(0, 500),
        )
        strategy = ExponentialDelay(10, 200, 1.5, 5_000)
        keys = [(vertex.id, i) for vertex in self.graph.vertices for i in range(vertex.parallelism)]
        self.machine = JobMachine(keys, strategy, first_attempt)
        self.tell_job(job_on.Start())

    def crash_driver(self) -> None:
        """A new driver process: messages to the old one are lost, what storage did stays done."""
        self.driver += 1
        self.timers.clear()
        referenced = {entry.checkpoint.directory for entry in self.storage.pointers.values()}
        referenced |= {savepoint.directory for savepoint in self.storage.savepoints.values()}
        self.orphans |= set(self.storage.directories) - referenced
        self.tasks = {}
        self.checker.driver_crashed()
        self.start_driver(self.machine.attempt + 1)
        self.at(self.now + 50, self.user)

    def note(self, what: Any) -> None:
        """Adds a step to the trace: time, type and the fields that are cheap to spell."""
        self.steps += 1
        fields = [getattr(what, name) for name in what.__slots__ if name not in _DETAILS]
        self.trace.update(f"{self.now} {type(what).__name__} {fields}".encode())

    def tell(self, event: on.CoordinatorEvent) -> None:
        self.note(event)
        effects = self.coordinator.handle(event, self.instant)
        self.checker.after_step(event, effects)
        for effect in effects:
            self.note(effect)
            getattr(self, f"do_{type(effect).__name__}")(effect)

    def tell_job(self, event: job_on.JobEvent) -> None:
        self.note(event)
        for effect in self.machine.handle(event, self.instant):
            self.note(effect)
            getattr(self, f"job_{type(effect).__name__}")(effect)

    def hurts(self, probability: float) -> bool:
        return self.chaos and self.rng.random() < probability

    # --- the user

    def user(self) -> None:
        if not self.chaos or self.ended is not None:
            return
        action = self.rng.random()
        if action < 0.25:
            self.request(CheckpointProperties())
        elif action < 0.4:
            self.request(CheckpointProperties(CheckpointType.SAVEPOINT, SavepointFormat.CANONICAL))
        elif action < 0.55:
            self.patch()
        elif action < 0.7:
            self.break_something()
        elif action < 0.74:
            self.crash_driver()
            return
        elif action < 0.77:
            self.requests += 1
            self.tell_job(job_on.StopRequested(f"stop-{self.requests}", drain=self.rng.random() < 0.5))
        elif action < 0.78:
            self.tell_job(job_on.CancelRequested())
        elif action < 0.8:
            self.tell_job(job_on.RedeployRequested(self.machine._subtasks))
        self.later(self.user, 10, 300)

    def request(self, properties: CheckpointProperties) -> None:
        self.requests += 1
        request_id = f"r{self.requests}"
        self.checker.open_requests.add(request_id)
        self.tell(on.TriggerRequested(request_id, properties, "savepoints"))

    def patch(self) -> None:
        rng = self.rng
        knob = rng.choice(["interval_ms", "timeout_ms", "min_pause_ms", "max_concurrent", "tolerable_failures"])
        value = {
            "interval_ms": rng.choice([None, 20, 100, 1_000]),
            "timeout_ms": rng.choice([10, 40, 400, 4_000]),
            "min_pause_ms": rng.choice([0, 50, 200]),
            "max_concurrent": rng.randint(1, 3),
            "tolerable_failures": rng.choice([0, 1, 1_000]),
        }[knob]
        self.configuration = replace(self.configuration, **{knob: value})
        self.tell(on.ConfigurationPatched(self.configuration))

    def break_something(self) -> None:
        alive = [task for task in self.tasks.values() if not task.ended]
        if alive:
            self.end_task(self.rng.choice(alive), job_on.TaskFailed)

    # --- tasks

    def end_task(self, task: Task, kind: Callable[..., job_on.JobEvent]) -> None:
        if task.ended:
            return
        task.ended = True
        if kind is job_on.TaskFinished:
            self.tell(on.SubtaskFinished(task.execution))
        self.tell_job(kind(task.execution, CAUSE) if kind is job_on.TaskFailed else kind(task.execution))

    def task_running(self, task: Task) -> None:
        if task.ended:
            return
        task.running = True
        self.tell_job(job_on.TaskRunning(task.execution))
        if self.bounded:
            self.later(lambda: self.end_of_data(task), 500, 5_000)

    def end_of_data(self, task: Task) -> None:
        if not task.ended:
            task.ended_data_at = self.now
            self.tell(on.EndOfDataReached(task.execution))

    def barrier(self, task: Task, effect: out.TriggerSources) -> None:
        """The barrier reaches a task: it writes its file, then acknowledges; or something goes wrong."""
        if task.ended or not task.running or effect.checkpoint_id <= task.latest:
            return
        task.latest = effect.checkpoint_id
        if task.stopping is not None:
            reason = Reason.TASK_CHECKPOINT_FAILURE
            self.later(lambda: self.tell(on.Declined(effect.checkpoint_id, task.execution, reason)))
            return
        if self.hurts(0.03):
            return
        if self.hurts(0.03):
            reason = self.rng.choice([Reason.CHECKPOINT_DECLINED, Reason.CHECKPOINT_DECLINED_TASK_NOT_READY])
            self.later(lambda: self.tell(on.Declined(effect.checkpoint_id, task.execution, reason)))
            return
        if effect.options.properties.is_synchronous:
            task.stopping = effect.checkpoint_id
        self.later(lambda: self.acknowledge(task, effect.checkpoint_id, effect.options), 0, 80)

    def acknowledge(self, task: Task, checkpoint_id: int, options: CheckpointOptions) -> None:
        execution = task.execution
        path = f"{execution.vertex_id}-{execution.subtask}-{execution.attempt}"
        self.storage.directories.setdefault(options.directory, set()).add(path)
        handle = KeyedStateHandle(KeyGroupRange(0, 127), StateFile(path, 1, "x"), ())
        state = SubtaskState({execution.vertex_id: OperatorSubtaskState((handle,))}, 1)
        event = on.Acknowledged(checkpoint_id, execution, options.directory, state)
        for _ in range(2 if self.hurts(0.1) else 1):
            self.later(lambda: self.tell(event), 0, 40 if self.chaos else 5)

    def notify(self, task: Task, checkpoint_id: int, timestamp: int) -> None:
        if task.ended:
            return
        final = task.ended_data_at is not None and timestamp >= EPOCH + task.ended_data_at
        if task.stopping == checkpoint_id or final:
            kind = job_on.TaskFailed if self.hurts(0.1) else job_on.TaskFinished
            self.later(lambda: self.end_task(task, kind))

    # --- effects of the job machine

    def job_StatusChanged(self, effect: job_out.StatusChanged) -> None:
        pass

    def job_AcquireSlots(self, effect: job_out.AcquireSlots) -> None:
        event = job_on.SlotsFailed(effect.attempt, CAUSE) if self.hurts(0.1) else job_on.SlotsAcquired(effect.attempt)
        self.later(lambda: self.tell_job(event))

    def job_RestoreState(self, effect: job_out.RestoreState) -> None:
        self.tell(on.RestoreRequested(str(effect.attempt)))

    def job_Deploy(self, effect: job_out.Deploy) -> None:
        self.checker.deploying()
        self.tasks = {execution: Task(execution) for execution in effect.executions}
        for task in self.tasks.values():
            if self.hurts(0.01):
                self.later(lambda task=task: self.end_task(task, job_on.TaskFailed))
            else:
                self.later(lambda task=task: self.task_running(task))

    def job_CancelTasks(self, effect: job_out.CancelTasks) -> None:
        for execution in effect.executions:
            task = self.tasks.get(execution)
            if task is not None:
                self.later(lambda task=task: self.end_task(task, job_on.TaskCanceled))

    def job_AllTasksRunning(self, effect: job_out.AllTasksRunning) -> None:
        self.tell(on.JobRunning(effect.executions, effect.finished))

    def job_TasksLeaveRunning(self, effect: job_out.TasksLeaveRunning) -> None:
        self.tell(on.TasksLeftRunning())

    def job_StopPeriodicTrigger(self, effect: job_out.StopPeriodicTrigger) -> None:
        self.tell(on.PeriodicTriggerStopped())

    def job_StartPeriodicTrigger(self, effect: job_out.StartPeriodicTrigger) -> None:
        self.tell(on.PeriodicTriggerStarted())

    def job_TriggerSavepoint(self, effect: job_out.TriggerSavepoint) -> None:
        kind = CheckpointProperties(CheckpointType.SYNC_SAVEPOINT, effect.savepoint_format, drain=effect.drain)
        self.checker.open_requests.add(effect.request_id)
        self.tell(on.TriggerRequested(effect.request_id, kind, effect.target_directory))

    def job_StopCompleted(self, effect: job_out.StopCompleted) -> None:
        self.checker.stop_answered(effect.request_id)

    def job_StopFailed(self, effect: job_out.StopFailed) -> None:
        self.checker.stop_answered(effect.request_id)

    def job_ScheduleRestart(self, effect: job_out.ScheduleRestart) -> None:
        self.at(effect.at_rel_ms, lambda: self.tell_job(job_on.RestartTimerFired(effect.generation)))

    def job_CancelRestart(self, effect: job_out.CancelRestart) -> None:
        pass

    def job_JobEnded(self, effect: job_out.JobEnded) -> None:
        self.ended = effect
        self.tell(on.Shutdown(effect.status.value))

    # --- effects of the coordinator

    def do_ScheduleTimer(self, effect: out.ScheduleTimer) -> None:
        self.timers[effect.timer] = effect.generation
        self.at(max(self.now, effect.at_rel_ms), lambda: self.fire(effect))

    def fire(self, effect: out.ScheduleTimer) -> None:
        """Some shells cancel late: stale generations are delivered too."""
        self.tell(on.TimerFired(effect.timer, effect.generation))

    def do_CancelTimer(self, effect: out.CancelTimer) -> None:
        self.timers.pop(effect.timer, None)

    def do_InitializeLocation(self, effect: out.InitializeLocation) -> None:
        number = effect.checkpoint_id
        directory = f"sp-{number}" if effect.properties.is_savepoint else f"chk-{number}"
        if self.hurts(0.05):
            self.later(lambda: self.tell(on.LocationFailed(number, "simulated")))
            return
        self.storage.directories.setdefault(directory, set())
        self.later(lambda: self.tell(on.LocationReady(number, directory)), 0, 60 if self.chaos else 5)

    def do_TriggerSources(self, effect: out.TriggerSources) -> None:
        if self.hurts(0.02):
            self.later(lambda: self.tell(on.TriggerFailed(effect.checkpoint_id, "simulated")))
            return
        for task in list(self.tasks.values()):
            self.later(lambda task=task: self.barrier(task, effect), 0, 40)

    def do_WriteMetadata(self, effect: out.WriteMetadata) -> None:
        number = effect.checkpoint.id
        if not self.hurts(0.1):
            self.write_metadata(effect.checkpoint)
            self.later(lambda: self.tell(on.MetadataWritten(number)))
        elif self.rng.random() < 0.5:
            self.later(lambda: self.tell(on.MetadataFailed(number, "simulated")))
        else:
            if self.rng.random() < 0.5:
                self.write_metadata(effect.checkpoint)
            self.later(lambda: self.tell(on.MetadataUnknown(number)), 0, 200)

    def write_metadata(self, checkpoint: CompletedCheckpoint) -> None:
        files = self.storage.directories.get(checkpoint.directory)
        if files is None or "_metadata" in files:
            raise Violation(f"metadata of {checkpoint.id} written into {files}")
        files.add("_metadata")
        if checkpoint.is_savepoint:
            self.storage.savepoints[checkpoint.id] = checkpoint

    def do_ResolveMetadata(self, effect: out.ResolveMetadata) -> None:
        number = effect.checkpoint.id
        if self.hurts(0.3):
            self.later(lambda: self.tell(on.MetadataUnknown(number)))
        elif "_metadata" in self.storage.directories[effect.checkpoint.directory]:
            self.later(lambda: self.tell(on.MetadataWritten(number)))
        else:
            self.later(lambda: self.tell(on.MetadataFailed(number, "absent")))

    def do_AddToStore(self, effect: out.AddToStore) -> None:
        checkpoint = effect.checkpoint
        if not self.hurts(0.1):
            self.storage.pointers[checkpoint.id] = RetainedCheckpoint(checkpoint, effect.owned)
            self.later(lambda: self.tell(on.StoreAdded(checkpoint.id)))
        elif self.rng.random() < 0.5:
            self.later(lambda: self.tell(on.StoreFailed(checkpoint.id, "simulated")))
        else:
            if self.rng.random() < 0.5:
                self.storage.pointers[checkpoint.id] = RetainedCheckpoint(checkpoint, effect.owned)
            self.later(lambda: self.tell(on.StoreUnknown(checkpoint.id)), 0, 200)

    def do_ResolveStore(self, effect: out.ResolveStore) -> None:
        number = effect.checkpoint.id
        if self.hurts(0.3):
            self.later(lambda: self.tell(on.StoreUnknown(number)))
        elif number in self.storage.pointers:
            self.later(lambda: self.tell(on.StoreAdded(number)))
        else:
            self.later(lambda: self.tell(on.StoreFailed(number, "absent")))

    def do_RemoveFromStore(self, effect: out.RemoveFromStore) -> None:
        if not self.hurts(0.1):
            self.storage.pointers.pop(effect.checkpoint_id, None)
            self.later(lambda: self.tell(on.StoreRemoved(effect.checkpoint_id)))
            return
        if self.rng.random() < 0.5:
            self.storage.pointers.pop(effect.checkpoint_id, None)
        self.later(lambda: self.tell(on.StoreRemoveFailed(effect.checkpoint_id)))

    def do_DiscardCheckpoint(self, effect: out.DiscardCheckpoint) -> None:
        self.storage.directories.pop(effect.checkpoint.directory, None)
        self.later(lambda: self.tell(on.CleanupDone(effect.checkpoint.id)))

    def do_DiscardLocation(self, effect: out.DiscardLocation) -> None:
        self.storage.directories.pop(effect.directory, None)
        self.storage.savepoints.pop(effect.checkpoint_id, None)
        self.later(lambda: self.tell(on.CleanupDone(effect.checkpoint_id)))

    def do_DiscardState(self, effect: out.DiscardState) -> None:
        files = self.storage.directories.get(effect.directory)
        if files is not None:
            files -= {file.path for file in effect.state.files()}
            if not files:
                del self.storage.directories[effect.directory]

    def do_DeleteSharedFiles(self, effect: out.DeleteSharedFiles) -> None:
        raise Violation("no task writes shared files here")

    def do_NotifyComplete(self, effect: out.NotifyComplete) -> None:
        for execution in effect.tasks:
            task = self.tasks.get(execution)
            # A lost completion is healed by the next one, which does not come after the savepoint of a stop.
            if task is not None and (task.stopping == effect.checkpoint_id or not self.hurts(0.05)):
                self.later(lambda task=task: self.notify(task, effect.checkpoint_id, effect.timestamp))

    def do_NotifyAborted(self, effect: out.NotifyAborted) -> None:
        """A task inside a synchronous savepoint that is aborted cannot go on."""
        for execution in effect.tasks:
            task = self.tasks.get(execution)
            if task is not None and task.stopping == effect.checkpoint_id:
                self.later(lambda task=task: self.end_task(task, job_on.TaskFailed))

    def do_RequestCompleted(self, effect: out.RequestCompleted) -> None:
        self.checker.request_ended(effect.request_id)
        if effect.request_id.startswith("stop"):
            self.checker.stopped = effect.request_id
            self.tell_job(job_on.SavepointCompleted(effect.request_id, effect.external_path))

    def do_RequestFailed(self, effect: out.RequestFailed) -> None:
        self.checker.request_ended(effect.request_id)
        if effect.request_id.startswith("stop"):
            self.tell_job(job_on.SavepointFailed(effect.request_id, effect.message, effect.reached_tasks))

    def do_RestoreFrom(self, effect: out.RestoreFrom) -> None:
        self.checker.restoring(effect.checkpoint)
        self.later(lambda: self.tell_job(job_on.StateRestored(int(effect.request_id))))

    def do_RestoreFailed(self, effect: out.RestoreFailed) -> None:
        self.tell_job(job_on.StateRestoreFailed(int(effect.request_id), CAUSE))

    def do_FailJob(self, effect: out.FailJob) -> None:
        self.tell_job(job_on.JobFailed(CAUSE))

    def do_ShutdownComplete(self, effect: out.ShutdownComplete) -> None:
        self.shut_down = True


@dataclass(slots=True)
class _Trigger:
    started_at: int
    writing: bool = False


class ProtocolChecker:
    """What must hold at every step, whatever the faults."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.open_requests: set[str] = set()
        self.open_triggers: dict[int, _Trigger] = {}
        self.completed: list[int] = []
        self.last_id = 0
        self.last_completion = -1_000_000
        self.stopped: str | None = None
        self.answered_stops: set[str] = set()

    def require(self, holds: bool, message: str) -> None:
        if not holds:
            raise Violation(f"at {self.world.now}: {message}")

    def driver_crashed(self) -> None:
        self.open_requests.clear()
        self.open_triggers.clear()
        self.last_completion = -1_000_000
        self.stopped = None
        # A pointer whose confirmation was lost counts as completed for the next driver.
        self.completed += [number for number in self.world.storage.pointers if number > self.newest]

    @property
    def newest(self) -> int:
        return max(self.completed, default=0)

    def after_step(self, event: Any, effects: list[out.Effect]) -> None:
        pending = set(self.world.coordinator.pending_ids)
        for effect in effects:
            match effect:
                case out.InitializeLocation():
                    self.triggered(effect, pending)
                case out.WriteMetadata():
                    self.open_triggers[effect.checkpoint.id].writing = True
                case out.NotifyComplete():
                    self.require(effect.checkpoint_id > self.newest, f"{effect.checkpoint_id} after {self.newest}")
                    self.completed.append(effect.checkpoint_id)
        for number in [number for number in self.open_triggers if number not in pending]:
            self.trigger_ended(number, event, effects)
        self.require(pending <= set(self.open_triggers), f"{pending} pending, but {set(self.open_triggers)} triggered")
        self.check_deadlines()
        self.check_files()

    def triggered(self, effect: out.InitializeLocation, pending: set[int]) -> None:
        world = self.world
        number = effect.checkpoint_id
        self.require(number > self.last_id, f"id {number} after {self.last_id}")
        self.last_id = number
        self.open_triggers[number] = _Trigger(world.now)
        if not effect.properties.is_savepoint:
            limit = world.configuration.max_concurrent
            self.require(len(pending) <= limit, f"{len(pending)} pending, at most {limit}")

    def trigger_ended(self, number: int, event: Any, effects: list[out.Effect]) -> None:
        trigger = self.open_triggers.pop(number)
        completed = isinstance(event, on.StoreAdded | on.MetadataWritten) and event.checkpoint_id == number
        aborted = any(
            isinstance(effect, out.CancelTimer) and effect.timer == on.TimerId(on.TimerKind.CANCELLER, number)
            for effect in effects
        )
        self.require(completed != aborted, f"checkpoint {number} completed: {completed}, aborted: {aborted}")
        for effect in effects:
            if isinstance(effect, out.RequestFailed) and effect.checkpoint_id == number:
                expired = effect.reason is Reason.CHECKPOINT_EXPIRED
                due = trigger.started_at + self.world.configuration.timeout_ms
                self.require(not expired or self.world.now >= due, f"{number} expired before {due}")

    def check_deadlines(self) -> None:
        timeout = self.world.configuration.timeout_ms
        for number, trigger in self.open_triggers.items():
            self.require(
                trigger.writing or self.world.now <= trigger.started_at + timeout,
                f"checkpoint {number} of {trigger.started_at} outlives its timeout {timeout}",
            )

    def check_files(self) -> None:
        storage = self.world.storage
        for entry in storage.pointers.values():
            self.require(storage.holds(entry.checkpoint), f"pointer to incomplete checkpoint {entry.checkpoint.id}")
        for savepoint in storage.savepoints.values():
            self.require(storage.holds(savepoint), f"savepoint {savepoint.id} lost files")

    def request_ended(self, request_id: str) -> None:
        self.require(request_id in self.open_requests, f"request {request_id} ended twice")
        self.open_requests.discard(request_id)

    def stop_answered(self, request_id: str) -> None:
        self.require(request_id not in self.answered_stops, f"stop {request_id} answered twice")
        self.answered_stops.add(request_id)

    def restoring(self, checkpoint: CompletedCheckpoint | None) -> None:
        pointers = self.world.storage.pointers
        newest = max(pointers, default=None)
        self.require((checkpoint.id if checkpoint else None) == newest, f"restores {checkpoint}, newest is {newest}")

    def deploying(self) -> None:
        self.require(self.stopped is None, f"deployed again after the savepoint of {self.stopped}")

    def check_liveness(self) -> None:
        """A while after the last fault the job has ended, or runs and completes checkpoints."""
        world = self.world
        if world.ended is not None:
            return
        self.require(world.machine.state is JobState.RUNNING, f"job stuck in {world.machine.state}")
        latest = world.coordinator.statistics().latest_completed
        since = world.now - 2 * 100 - 1_000
        alive = latest is not None and latest.latest_ack_timestamp >= EPOCH + since
        self.require(alive, f"no checkpoint since {since}: {latest}")

    def check_quiet(self) -> None:
        """At the end nothing is open and storage holds what is referenced and nothing else."""
        world = self.world
        self.require(world.ended is not None and world.shut_down, "the job has not ended")
        self.require(not self.open_requests, f"requests without an answer: {self.open_requests}")
        self.require(not self.open_triggers, f"checkpoints without an end: {self.open_triggers}")
        self.require(not world.storage.pointers, f"pointers of an ended job: {sorted(world.storage.pointers)}")
        kept = {savepoint.directory for savepoint in world.storage.savepoints.values()}
        assert world.ended is not None
        if not world.coordinator.configuration.discards_on(world.ended.status.value):
            kept |= {f"chk-{number}" for number in self.completed}
        leaked = set(world.storage.directories) - kept - world.orphans
        self.require(not leaked, f"leaked {sorted(leaked)}")
