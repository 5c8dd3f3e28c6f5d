"""Fake subtasks: they take snapshots, pass barriers on, acknowledge, commit and end as real ones do, in virtual time.

A worker per subtask index holds a subtask of each vertex and has one connection to its driver, which keeps the order
of messages and is cut when the worker dies. Data is not simulated; what is, is which snapshots exist and which
transactions were committed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckpt_runtime.checkpoint.completed_checkpoint import KeyedStateHandle, OperatorSubtaskState, StateFile, SubtaskState
from ckpt_runtime.checkpoint.executions import ExecutionId, SubtaskKey, TaskState
from ckpt_runtime.checkpoint.properties import CheckpointFailureReason as Reason
from ckpt_runtime.checkpoint.properties import CheckpointOptions
from ckpt_runtime.checkpoint.statistics import CheckpointMetrics
from ckpt_runtime.graph.job_graph import Partitioning
from ckpt_runtime.graph.key_groups import KeyGroupRange, key_group_range
from ckpt_runtime.network.control_messages import (
    AcknowledgeCheckpoint,
    Canceled,
    DeclineCheckpoint,
    DeploymentMessage,
    EndOfDataReport,
    TaskFailure,
    TaskStateChanged,
)
from ckpt_runtime.scheduler.core_events import DeployTasks
from ckpt_runtime.scheduler.job_events import FailureInfo

if TYPE_CHECKING:
    from tests.simulation.protocols.driver import Driver
    from tests.simulation.protocols.host import Peer

CAUSE = FailureInfo("SimulatedFailure", "simulated")


class Subtask:
    """One attempt of one subtask. ``base`` are the shared files of the last checkpoint known to be complete.

    ``sources`` are those of them that a savepoint is duplicating, by its id.

    ``may_end``: it has committed for the last time, and only waits for what is upstream to end.
    """

    __slots__ = (
        "arrived",
        "base",
        "downstream",
        "end_of_data",
        "ended",
        "execution",
        "expected",
        "final_id",
        "key_groups",
        "last_id",
        "left_data",
        "may_end",
        "options",
        "reported",
        "running",
        "shared",
        "sources",
        "stopping",
        "uploading",
        "upstream_left",
    )

    def __init__(self, execution: ExecutionId, key_groups: KeyGroupRange) -> None:
        self.execution = execution
        self.key_groups = key_groups
        self.running = False
        self.ended = False
        self.end_of_data = False
        self.may_end = False
        self.downstream: list[Subtask] = []
        self.expected = 0
        self.upstream_left = 0
        self.left_data = 0
        self.arrived: dict[int, int] = {}
        self.options: dict[int, CheckpointOptions] = {}
        self.last_id = 0
        self.reported = 0
        self.final_id: int | None = None
        self.stopping: int | None = None
        self.uploading: set[int] = set()
        self.base: tuple[str, ...] = ()
        self.shared: dict[int, tuple[str, ...]] = {}
        self.sources: dict[int, tuple[str, ...]] = {}


class Deployment:
    """All subtasks of one attempt and their connections to one driver. What they restore is in ``order``."""

    def __init__(self, driver: Driver, order: DeployTasks) -> None:
        self.driver = driver
        self.world = driver.world
        self.graph = graph = order.graph
        self.base_id = 0 if order.restored is None else order.restored.checkpoint_id
        self.finished_vertices = frozenset() if order.restored is None else order.restored.finished_vertices
        self.number = self.world.next_number()
        self.attempt = order.attempt
        self.peers: list[Peer] = []
        self.tasks: dict[ExecutionId, Subtask] = {}
        self._restored = order.restored
        self._by_key: dict[SubtaskKey, Subtask] = {}
        self._last_in = [0] * graph.slots
        self._last_out = [0] * graph.slots
        self._sinks = {vertex.id for vertex in graph.vertices} - {edge.source for edge in graph.edges}
        self.data_ended_at: int | None = None
        for execution in order.executions:
            vertex = graph.vertex(execution.vertex_id)
            owned = key_group_range(vertex.max_parallelism, vertex.parallelism, execution.subtask)
            task = Subtask(execution, owned)
            self.tasks[execution] = self._by_key[execution.key] = task
            self._restore(task)
        for edge in graph.edges:
            self._connect(edge.source, edge.target, edge.partitioning)
        for task in self.tasks.values():
            task.left_data = task.expected

    def waits(self, task: Subtask) -> bool:
        """Whether it ends with a checkpoint only."""
        vertex_id, scenario = task.execution.vertex_id, self.world.scenario
        return (
            vertex_id in self._sinks
            or vertex_id in scenario.waits
            or task.stopping is not None
            or not scenario.submitted.checkpoints_after_tasks_finish
        )

    # --- the connections

    def send(self, index: int, action: Callable[..., None], *arguments: Any, checkpointing: bool = False) -> None:
        """From the driver to a worker. ``checkpointing`` messages may be lost on a lossy transport."""
        world = self.world
        if world.scenario.lossy and checkpointing:
            if world.choices.fault("message to a worker lost", 0.02):
                return
            world.loop.at(world.loop.now + world.choices.delay("to worker", 0, 25), None, action, *arguments)
            return
        at = max(self._last_in[index], world.loop.now + world.choices.delay("to worker", 0, 5))
        self._last_in[index] = at
        world.loop.at(at, None, action, *arguments)

    def report(self, index: int, action: Callable[..., None], *arguments: Any, checkpointing: bool = False) -> None:
        """From a worker to the driver. ``checkpointing`` messages may be lost and repeated on a lossy transport."""
        world = self.world
        if world.scenario.lossy and checkpointing:
            if world.choices.fault("message to the driver lost", 0.02):
                return
            for _ in range(2 if world.choices.fault("message to the driver repeated", 0.08) else 1):
                at = world.loop.now + world.choices.delay("to driver", 0, 40)
                world.loop.at(at, self.driver.process, action, *arguments)
            return
        at = max(self._last_out[index], world.loop.now + world.choices.delay("to driver", 0, 5))
        self._last_out[index] = at
        world.loop.at(at, self.driver.process, action, *arguments)

    def tell(self, index: int, message: DeploymentMessage, *, checkpointing: bool = False) -> None:
        """A message of the worker to its driver."""
        self.report(index, self.driver.worker_message, self, self.peers[index], message, checkpointing=checkpointing)

    def cut(self, index: int) -> None:
        """A worker dies with its connection; the driver learns it after what was sent before."""
        if index < len(self.peers) and self.peers[index].alive:
            self.peers[index].alive = False
            for task in self._in(index):
                self._stop(task)
            self.report(index, self.driver.worker_gone, self.peers[index])

    def _in(self, index: int) -> list[Subtask]:
        return [task for task in self.tasks.values() if task.execution.subtask == index]

    def die(self) -> None:
        """All workers die: their driver is gone."""
        for task in self.tasks.values():
            self._stop(task)

    # --- the life of subtasks

    def start(self, peer: Peer, index: int) -> None:
        """A worker gets its part; workers get theirs in the order of their slots."""
        assert index == len(self.peers)
        self.peers.append(peer)
        for task in self._in(index):
            fails = self.world.choices.fault("deployment fails", 0.006)
            self.send(index, self.fail if fails else self._run, task)

    def _restore(self, task: Subtask) -> None:
        if self._restored is not None:
            states = self._restored.states[task.execution.key].values()
            handles = (handle for state in states for handle in state.keyed)
            files = dict.fromkeys(file.path for handle in handles for file in handle.state_files())
            task.base = tuple(path for path in files if "://" in path)
        task.last_id = task.reported = self.base_id

    def _connect(self, source: str, target: str, partitioning: Partitioning) -> None:
        for index in range(self.graph.vertex(source).parallelism):
            upstream = self._by_key[source, index]
            if partitioning is Partitioning.FORWARD:
                targets = [self._by_key[target, index]]
            else:
                targets = [self._by_key[target, i] for i in range(self.graph.vertex(target).parallelism)]
            upstream.downstream += targets
            for task in targets:
                task.expected += 1

    def _run(self, task: Subtask) -> None:
        if task.ended or not self.peers[task.execution.subtask].alive:
            return
        task.running = True
        world = self.world
        self._tell_state(task, TaskState.RUNNING)
        if world.scenario.bounded and not task.expected:
            # A source that had ended in the restored snapshot has nothing more to give, and some have little.
            ended = task.execution.vertex_id in self.finished_vertices or world.choices.chance("little data", 0.15)
            at = world.loop.now + (1 if ended else world.choices.delay("data ends", 50, 500))
            world.loop.at(at, None, self._data_ends, task)

    def _data_ends(self, task: Subtask) -> None:
        if task.ended or task.stopping is not None:
            return
        task.end_of_data = True
        if not self.waits(task):
            self.world.loop.at(self.world.loop.now, None, self._finish, task)
        if all(other.end_of_data or other.ended for other in self.tasks.values()):
            self.data_ended_at = self.world.loop.now
        vertex_id, index = task.execution.key
        self.tell(index, EndOfDataReport(self.number, vertex_id, index, self.waits(task)))
        for target in task.downstream:
            target.left_data -= 1
            if not target.left_data:
                at = self.world.loop.now + self.world.choices.delay("end of data", 0, 5)
                self.world.loop.at(at, None, self._data_ends, target)

    def _stop(self, task: Subtask) -> None:
        """Whatever it was uploading stays behind or not."""
        if not task.ended:
            task.ended = True
            for number in sorted(task.uploading):
                if self.world.choices.chance("upload of a dead task stays", 0.5):
                    self.world.files.write(f"{task.options[number].directory}/{self._file(task)}")
            task.uploading.clear()

    def fail(self, task: Subtask) -> None:
        """Unless its worker has not got it: the driver died while it deployed."""
        if not task.ended and task.execution.subtask < len(self.peers):
            self._stop(task)
            self._tell_state(task, TaskState.FAILED)

    def cancel(self, index: int) -> None:
        for task in self._in(index):
            self._stop(task)
        self.tell(index, Canceled(self.number, True))

    def _tell_state(self, task: Subtask, state: TaskState) -> None:
        vertex_id, index = task.execution.key
        failure = TaskFailure(CAUSE) if state is TaskState.FAILED else None
        self.tell(index, TaskStateChanged(self.number, vertex_id, index, state, failure))

    def _finish(self, task: Subtask) -> None:
        """Behind everything upstream, as a gate that has to see the end of each of its channels.

        One that waits for no checkpoint leaves none that needs its snapshot.
        """
        task.may_end = True
        if task.ended or task.expected or (task.uploading and not self.waits(task)):
            return
        task.ended = True
        self._tell_state(task, TaskState.FINISHED)
        for target in task.downstream:
            target.expected -= 1
            for number in sorted(target.arrived):
                self._aligned(target, number)
            if target.may_end:
                self._finish(target)

    # --- checkpoints

    def trigger(self, task: Subtask, checkpoint_id: int, options: CheckpointOptions) -> None:
        """A trigger message of the coordinator."""
        if task.running and not task.ended:
            task.options[checkpoint_id] = options
            self._snapshot(task, checkpoint_id)

    def _barrier(self, task: Subtask, checkpoint_id: int, options: CheckpointOptions) -> None:
        if not task.ended and checkpoint_id > task.last_id:
            task.options[checkpoint_id] = options
            task.arrived[checkpoint_id] = task.arrived.get(checkpoint_id, 0) + 1
            self._aligned(task, checkpoint_id)

    def _aligned(self, task: Subtask, checkpoint_id: int) -> None:
        if not task.ended and task.running and task.arrived.get(checkpoint_id, 0) >= task.expected:
            self._snapshot(task, checkpoint_id)

    def _snapshot(self, task: Subtask, checkpoint_id: int) -> None:
        if checkpoint_id <= task.last_id:
            return
        task.last_id = checkpoint_id
        for known in [number for number in task.arrived if number <= checkpoint_id]:
            del task.arrived[known]
        world, choices, options = self.world, self.world.choices, task.options[checkpoint_id]
        if task.stopping is not None:
            self._decline(task, checkpoint_id, Reason.CHECKPOINT_DECLINED_TASK_NOT_READY)
            return
        if choices.fault("snapshot hangs", 0.015):
            return
        if choices.fault("snapshot declined", 0.012):
            self._decline(task, checkpoint_id, choices.pick("decline", _DECLINES))
            return
        if options.properties.is_synchronous:
            task.stopping = checkpoint_id
        covers = world.scenario.submitted.checkpoints_after_tasks_finish or options.final
        if task.end_of_data and task.final_id is None and covers:
            task.final_id = checkpoint_id
        task.uploading.add(checkpoint_id)
        if options.properties.is_savepoint and options.properties.is_incremental:
            task.sources[checkpoint_id] = tuple(filter(world.files.is_retained, task.base))
        now = world.loop.now
        slow = choices.fault("upload is slow", 0.05)
        at = now + choices.delay("upload", 1, 400 if slow else 30)
        world.loop.at(at, None, self._uploaded, task, checkpoint_id, options)
        for target in task.downstream:
            at = now + choices.delay("barrier", 0, 6)
            world.loop.at(at, None, self._barrier, target, checkpoint_id, options)

    def _decline(self, task: Subtask, checkpoint_id: int, reason: Reason) -> None:
        vertex_id, index = task.execution.key
        message = DeclineCheckpoint(self.number, vertex_id, index, checkpoint_id, reason.name, "simulated")
        self.tell(index, message, checkpointing=True)

    def _file(self, task: Subtask) -> str:
        execution = task.execution
        return f"{execution.vertex_id}-{execution.subtask}-{self.number}"

    def _uploaded(self, task: Subtask, checkpoint_id: int, options: CheckpointOptions) -> None:
        if task.ended or checkpoint_id not in task.uploading:
            return
        task.uploading.discard(checkpoint_id)
        if self.world.choices.fault("upload fails", 0.008):
            self._decline(task, checkpoint_id, Reason.CHECKPOINT_ASYNC_EXCEPTION)
            self._finish_if_due(task)
            return
        private = self._file(task)
        self.world.files.write(f"{options.directory}/{private}")
        self.world.checker.duplicated(self.driver, checkpoint_id, task.sources.pop(checkpoint_id, ()))
        shared = self._shared_files(task, checkpoint_id, options)
        files = (StateFile(path, 1, "x") for path in (private, *shared))
        handles = tuple(KeyedStateHandle(task.key_groups, file, ()) for file in files)
        state = SubtaskState({task.execution.vertex_id: OperatorSubtaskState(handles)}, 1)
        self.world.checker.snapshot_taken(checkpoint_id, task.execution, private)
        vertex_id, index = task.execution.key
        message = AcknowledgeCheckpoint(
            self.number, vertex_id, index, checkpoint_id, options.directory, state, CheckpointMetrics()
        )
        self.tell(index, message, checkpointing=True)
        self._finish_if_due(task)

    def _finish_if_due(self, task: Subtask) -> None:
        if task.may_end:
            self._finish(task)

    def _shared_files(self, task: Subtask, checkpoint_id: int, options: CheckpointOptions) -> tuple[str, ...]:
        """Incremental: a new file, and those of the last confirmed checkpoint except for what was compacted away."""
        if not options.properties.incremental or options.properties.is_savepoint:
            return ()
        new = f"{options.shared_directory}/chk-{checkpoint_id}-{self._file(task)}"
        old = task.base[-2:] if options.properties.is_incremental else ()
        files = (*old, new)
        self.world.files.write(new)
        task.shared[checkpoint_id] = files
        return files

    # --- notifications

    def completed(self, task: Subtask, checkpoint_id: int) -> None:
        """Commits; ends a task that waited for this."""
        if task.ended or checkpoint_id <= task.reported:
            return
        task.reported = checkpoint_id
        confirmed = task.shared.get(checkpoint_id)
        if confirmed is not None:
            task.base = confirmed
        for known in [number for number in task.shared if number <= checkpoint_id]:
            del task.shared[known]
        if task.execution.vertex_id in self._sinks:
            self.world.checker.committed(self, checkpoint_id)
        final = task.final_id is not None and checkpoint_id >= task.final_id
        if task.stopping == checkpoint_id or (final and task.stopping is None):
            fails = self.world.choices.fault("commit fails", 0.05)
            at = self.world.loop.now + self.world.choices.delay("end", 0, 10)
            self.world.loop.at(at, None, self.fail if fails else self._finish, task)

    def aborted(self, task: Subtask, checkpoint_id: int, latest_completed: int | None) -> None:
        """Heals a lost completion first. A task inside a synchronous savepoint that is aborted cannot continue."""
        if latest_completed is not None:
            self.completed(task, latest_completed)
        if task.ended:
            return
        task.shared.pop(checkpoint_id, None)
        task.arrived.pop(checkpoint_id, None)
        task.uploading.discard(checkpoint_id)
        task.sources.pop(checkpoint_id, None)
        if task.stopping == checkpoint_id:
            self.fail(task)
        else:
            self._finish_if_due(task)


_DECLINES = (
    Reason.CHECKPOINT_DECLINED,
    Reason.CHECKPOINT_DECLINED,
    Reason.CHECKPOINT_DECLINED_TASK_NOT_READY,
    Reason.CHECKPOINT_DECLINED_SUBSUMED,
    Reason.CHECKPOINT_DECLINED_ON_CANCELLATION_BARRIER,
    Reason.CHECKPOINT_DECLINED_TASK_NOT_READY,
    Reason.CHECKPOINT_DECLINED_TASK_NOT_READY,
)
