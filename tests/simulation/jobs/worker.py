"""A simulated worker: the real :class:`DeployedJob` without its threads, and what ``task/worker.py`` does around it.

The scheduler advances the subtasks; they sleep and are woken as a task thread sleeps and is woken, so that a wake-up
which is missing shows. Messages to and from the driver go through queues that keep their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from ckpt_runtime.checkpoint.executions import SubtaskKey, TaskState
from ckpt_runtime.checkpoint.statistics import CheckpointMetrics
from ckpt_runtime.configuration.state_options import StateOptions
from ckpt_runtime.graph.compiler import CompiledPlan
from ckpt_runtime.graph.job_graph import JobEdge
from ckpt_runtime.network.control_messages import (
    AcknowledgeCheckpoint,
    CancelDeployment,
    Canceled,
    DeclineCheckpoint,
    DeploymentFailed,
    DeploymentMessage,
    DeploySubtasks,
    EndOfDataReport,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    SourceProgress,
    TaskStateChanged,
    TriggerCheckpoint,
    WorkerCommand,
)
from ckpt_runtime.network.elements import CheckpointBarrier
from ckpt_runtime.operators.operator import Operator
from ckpt_runtime.scheduler.deployment import Channel, Deployment, JobDescriptor, SubtaskDescriptor
from ckpt_runtime.scheduler.watermark_alignment import Progress
from ckpt_runtime.storage.errors import StorageError
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.task.deployed_job import DeployedJob, TaskThread, Wakeup
from ckpt_runtime.task.output import ResultPartition
from ckpt_runtime.task.snapshot_files import WrittenSnapshot, write_snapshot
from ckpt_runtime.task.subtask import Subtask
from ckpt_runtime.task.subtask_checkpoints import SubtaskSnapshot
from ckpt_runtime.task.worker import describe_error
from tests.simulation.jobs.network import SimulatedTransport
from tests.simulation.jobs.observation import ObservedSubpartition
from tests.simulation.jobs.operators import OPERATORS, Place, Probe, RowSource, SimulatedError
from tests.simulation.schedules.violation import Violation
from tests.simulation.simulated_driver import worker_registration

if TYPE_CHECKING:
    from tests.simulation.jobs.world import World

LIVE = (TaskState.INITIALIZING, TaskState.RUNNING)
EXPECTED_FAILURES = (SimulatedError, ConnectionError, StorageError)
"""What may end a subtask in a schedule with faults; anything else that is raised is a finding."""


class SimulatedWakeup(Wakeup):
    """Awake or not; no thread really sleeps."""

    __slots__ = ("awake",)

    def __init__(self) -> None:
        self.awake = True

    def wake(self) -> None:
        self.awake = True


class Runner:
    """What a task thread does for one subtask."""

    __slots__ = ("due", "probe", "subtask", "vertex", "wakeup", "worker")

    def __init__(
        self, worker: SimulatedWorker, subtask: Subtask, wakeup: SimulatedWakeup, probe: Probe, vertex: str
    ) -> None:
        self.worker = worker
        self.subtask = subtask
        self.wakeup = wakeup
        self.probe = probe
        self.vertex = vertex
        self.due: float | None = None

    @property
    def live(self) -> bool:
        return self.subtask.state in LIVE

    def step(self) -> None:
        """One step; goes to sleep when there was nothing to do."""
        subtask = self.subtask
        self.due = None
        try:
            if subtask.state is TaskState.INITIALIZING:
                subtask.open()
                return
            worked = subtask.step() or subtask.flush()
        except EXPECTED_FAILURES as error:
            subtask.fail(error)
            return
        if not worked and not subtask.has_work:
            self.wakeup.awake = False
            wait = subtask.wait_ms()
            self.due = None if wait is None else self.worker.world.now + wait


class SimulatedJob(DeployedJob):
    """The real deployment with simulated operators; its probes say what was processed."""

    def __init__(self, worker: SimulatedWorker, job: JobDescriptor, deployment: Deployment, plan: CompiledPlan) -> None:
        self._worker = worker
        self._own_wakeups: dict[SubtaskKey, SimulatedWakeup] = {}
        self._probes: dict[SubtaskKey, Probe] = {}
        self._key: SubtaskKey = ("", 0)
        super().__init__(job, deployment, plan, cast(Any, worker.transport), worker)
        self.inline_threshold = self.configuration.get(StateOptions.FS_MEMORY_THRESHOLD)
        names = worker.world.names
        self.runners = [
            Runner(worker, subtask, self._own_wakeups[key], self._probes[key], names[key[0]])
            for key, subtask in self.subtasks.items()
        ]

    def _build_gate(self, descriptor: SubtaskDescriptor, wakeup: Wakeup) -> None:
        key = (descriptor.vertex_id, descriptor.subtask_index)
        own = self._own_wakeups[key] = SimulatedWakeup()
        super()._build_gate(descriptor, own)

    def _build_subtask(self, descriptor: SubtaskDescriptor) -> None:
        self._key = (descriptor.vertex_id, descriptor.subtask_index)
        probe = self._probes[self._key] = Probe(f"{descriptor.vertex_id[:4]}/{descriptor.subtask_index}")
        observation = self._worker.world.observation
        observation.probes[self._key] = probe
        if descriptor.in_flight:
            with self._worker.world.without_faults():
                observation.give(self._key, descriptor.in_flight, self.deployment.snapshot_directory)
        super()._build_subtask(descriptor)

    def _build_output(self, edge: JobEdge, channels: Sequence[Channel], index: int, wakeup: Wakeup) -> ResultPartition:
        partition = super()._build_output(edge, channels, index, wakeup)
        observation = self._worker.world.observation
        partition._subpartitions = [
            ObservedSubpartition(subpartition, observation.log(edge, index, peer))
            for subpartition, peer in zip(partition._subpartitions, partition._peers, strict=True)
        ]
        return partition

    def _input_schema(self, uid: str, gate: int) -> pa.Schema | None:
        return None  # any order of columns is taken

    def _operator(self, uid: str) -> Operator:
        world = self._worker.world
        kind, name = uid.split("-", 1)
        topology = world.topology
        vertex = next(vertex for vertex in topology.vertices if vertex.name == name)
        gates = sum(edge[1] == name for edge in topology.edges)
        head = vertex.operators[0] == kind
        ordered = tuple(world.keeps_order(name, gate) for gate in range(gates))
        probe = self._probes[self._key] if head and gates else None
        cost = vertex.cost_ms if head else 0.0
        waits = uid in world.scenario.waits
        place = Place(world, topology.sources, ordered, cost, probe, vertex.source, waits)
        if kind == "source":
            return RowSource(place, world.scenario.source_rows)
        return OPERATORS[kind](place)

    def _threads(self, shared: Wakeup) -> list[TaskThread]:
        return []


class SimulatedPeer:
    """The driver's end of a worker's connection."""

    def __init__(self, worker: SimulatedWorker) -> None:
        self._worker = worker
        self.registration = worker_registration(f"slot-{worker.slot}", worker.number)

    def send(self, command: WorkerCommand) -> None:
        self._worker.world.to_worker(self._worker, command)


class SimulatedWorker:
    """One slot's process. ``number`` tells it from the ones that had the slot before and come after."""

    def __init__(self, world: World, slot: int, number: int) -> None:
        self.world = world
        self.slot = slot
        self.number = number
        self.alive = True
        self.job: SimulatedJob | None = None
        self._descriptor: JobDescriptor | None = None
        self.transport = SimulatedTransport(self)
        self.peer = SimulatedPeer(self)
        self._aborted: set[tuple[int, int]] = set()

    @property
    def runners(self) -> list[Runner]:
        return [] if self.job is None else self.job.runners

    # --- commands of the driver

    def obey(self, command: WorkerCommand) -> None:
        match command:
            case DeploySubtasks(deployment, job):
                self._descriptor = job or self._descriptor
                self._deploy(deployment)
            case CancelDeployment(deployment):
                self._cancel(deployment)
            case TriggerCheckpoint():
                self._trigger(command)
            case NotifyCheckpointComplete():
                self._mail(command, lambda task: task.notify_complete(command.checkpoint_id))
            case NotifyCheckpointAborted(_, _, checkpoint_id, latest):
                self._mail(command, lambda task: self._notify_aborted(task, checkpoint_id, latest))

    def _deploy(self, deployment: Deployment) -> None:
        self._aborted.clear()
        try:
            assert self._descriptor is not None
            self.job = SimulatedJob(self, self._descriptor, deployment, self.world.plans[self._descriptor.job_id])
        except EXPECTED_FAILURES as error:
            self._report(DeploymentFailed(deployment.deployment, describe_error(error)))
            return
        self.world.runners_changed()

    def _cancel(self, deployment: int) -> None:
        job, self.job = self.job, None
        if job is not None:
            for runner in job.runners:
                runner.subtask.cancel()
            job.cancel(0.0)
            self.world.runners_changed()
        self._report(Canceled(deployment, True))

    def _trigger(self, command: TriggerCheckpoint) -> None:
        barrier = CheckpointBarrier(command.checkpoint_id, command.timestamp, command.options)
        job = self._current(command.deployment)
        for key in command.tasks:
            if job is None or not job.mail(key, lambda task: task.trigger_checkpoint(barrier)):
                raise AssertionError("a trigger for a subtask that is not here")

    def _mail(
        self, command: NotifyCheckpointComplete | NotifyCheckpointAborted, action: Callable[[Subtask], None]
    ) -> None:
        job = self._current(command.deployment)
        for key in command.tasks if job is not None else ():
            assert job is not None
            job.mail(key, action)

    def _notify_aborted(self, subtask: Subtask, checkpoint_id: int, latest: int | None) -> None:
        subtask.notify_aborted(checkpoint_id, latest)
        self._aborted.add((id(subtask), checkpoint_id))

    def _current(self, deployment: int) -> SimulatedJob | None:
        job = self.job
        return job if job is not None and job.deployment.deployment == deployment else None

    # --- SubtaskHost

    def now_ms(self) -> int:
        return self.world.wall_ms(self.slot)

    def monotonic_ms(self) -> float:
        return self.world.now

    def state_changed(self, subtask: Subtask, error: BaseException | None = None) -> None:
        if subtask.state not in LIVE:
            self.world.runners_changed()
        if subtask.state is TaskState.INITIALIZING:
            return
        failure = None if error is None else describe_error(error)
        if (sender := self._sender(subtask)) is not None:
            self._report(TaskStateChanged(*sender, subtask.state, failure, subtask.last_intervals))

    def end_of_data(self, subtask: Subtask, waits: bool) -> None:
        if (sender := self._sender(subtask)) is not None:
            self._report(EndOfDataReport(*sender, waits))

    def source_progress(self, subtask: Subtask, progress: Progress) -> None:
        if (sender := self._sender(subtask)) is not None:
            self._report(SourceProgress(*sender, progress.event_time, progress.idle))

    def decline(self, subtask: Subtask, checkpoint_id: int, reason: str, message: str) -> None:
        if (sender := self._sender(subtask)) is not None:
            self._report(DeclineCheckpoint(*sender, checkpoint_id, reason, message))

    def write_snapshot(self, subtask: Subtask, snapshot: SubtaskSnapshot) -> None:
        if (id(subtask), snapshot.barrier.checkpoint_id) in self._aborted:
            raise Violation(f"a snapshot of an aborted checkpoint is written by {subtask.name}")
        self.world.note("snapshot %s of %s", snapshot.barrier.checkpoint_id, subtask.name)
        slow = snapshot.barrier.options.properties.is_savepoint and self.world.scenario.shares
        steps = self.world.choices.delay("a savepoint is slow", 0, 40) if slow else 0
        self.world.asynchronously("snapshot", self._write_and_tell, subtask, snapshot, steps, owner=self)

    def _write_and_tell(self, subtask: Subtask, snapshot: SubtaskSnapshot, steps: int = 0) -> None:
        """``steps`` are how often it is put off before."""
        if steps and self.alive and self.world.choices.chaos:
            self.world.asynchronously("snapshot", self._write_and_tell, subtask, snapshot, steps - 1, owner=self)
            return
        job = self.job
        if job is None or not self._is_awaited(subtask):
            snapshot.release()
            self._tell_written(subtask, snapshot)
            return
        # What has begun is not stopped, whatever becomes of the job until its requests are served.
        slow = self.world.chance("an upload is slow", 0.1)
        self._upload(job.inline_threshold, subtask, snapshot, 60 if slow else 0)

    def _upload(self, threshold: int, subtask: Subtask, snapshot: SubtaskSnapshot, steps: int) -> None:
        """``steps`` are how often it is put off."""
        if steps and self.alive and self.world.choices.chaos:
            self.world.asynchronously("snapshot", self._upload, threshold, subtask, snapshot, steps - 1, owner=self)
            return
        barrier = snapshot.barrier
        if not self.alive and not self.world.cleans_up(resolve(barrier.options.directory).path):
            return  # no process would delete what a dead worker left there
        try:
            written = write_snapshot(snapshot, threshold, subtask.checkpoints.persisted)
        except StorageError as error:
            self.decline(subtask, barrier.checkpoint_id, "IO_EXCEPTION", str(error))
        else:
            if self._is_awaited(subtask):
                self._send_acknowledgement(subtask, snapshot, written)
            elif self.alive:
                self.world.seen["snapshots given up"] += 1
                written.files.discard()
        self._tell_written(subtask, snapshot)

    def _tell_written(self, subtask: Subtask, snapshot: SubtaskSnapshot) -> None:
        job, key = self.job, (subtask.vertex_id, subtask.index)
        if job is not None and job.subtasks.get(key) is subtask:
            job.mail(key, lambda task: task.snapshot_written(snapshot.barrier.checkpoint_id))

    def _is_awaited(self, subtask: Subtask) -> bool:
        job, key = self.job, (subtask.vertex_id, subtask.index)
        return job is not None and job.subtasks.get(key) is subtask and subtask.state is TaskState.RUNNING

    def _send_acknowledgement(self, subtask: Subtask, snapshot: SubtaskSnapshot, written: WrittenSnapshot) -> None:
        barrier, measures = snapshot.barrier, snapshot.measures
        metrics = CheckpointMetrics(
            checkpointed_size=written.written_bytes,
            processed_data=measures.processed_bytes,
            persisted_data=written.in_flight_bytes,
            alignment_duration=measures.alignment_ms,
            start_delay=measures.start_delay_ms,
            unaligned=measures.unaligned,
        )
        sender = self._sender(subtask)
        if sender is not None:
            where, state = barrier.options.directory, written.state
            self._report(
                AcknowledgeCheckpoint(*sender, barrier.checkpoint_id, where, state, metrics, snapshot.intervals)
            )

    def _sender(self, subtask: Subtask) -> tuple[int, str, int] | None:
        """None for a subtask of an earlier deployment, whose snapshot may still be written."""
        job = self.job
        key = (subtask.vertex_id, subtask.index)
        if job is None or (job.subtasks and job.subtasks.get(key) is not subtask):
            return None
        return job.deployment.deployment, *key

    def _report(self, message: DeploymentMessage) -> None:
        if self.alive:
            self.world.to_driver(self, message)
