"""One deployment inside a worker: its subtasks, threads and channels, from ``start`` to ``cancel`` or the end.

This is the only module that maps specs to operator classes.

A subtask with user code gets its own thread, since such code may block. The other subtasks of a slot share a thread:
they never block, and passing the interpreter lock from source to operator to sink costs more than it gains.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa

from ckpt_runtime.checkpoint.executions import SubtaskKey, TaskState
from ckpt_runtime.configuration.checkpointing_options import CheckpointingOptions
from ckpt_runtime.configuration.cluster_options import TaskManagerOptions
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.pipeline_options import ExecutionOptions
from ckpt_runtime.configuration.state_options import StateOptions
from ckpt_runtime.connectors.registry import create_connector
from ckpt_runtime.frontend.program import load_plan
from ckpt_runtime.graph import specs
from ckpt_runtime.graph.compiler import CompiledPlan
from ckpt_runtime.graph.event_time import uses_event_time
from ckpt_runtime.graph.job_graph import BATCHES, JobEdge, JobVertex, Partitioning
from ckpt_runtime.graph.key_groups import key_group_range
from ckpt_runtime.network.elements import CheckpointBarrier, EndOfData, EndOfPartition, Watermark
from ckpt_runtime.network.framing import channel_id
from ckpt_runtime.network.gate import InputChannel, InputGate
from ckpt_runtime.network.remote_subpartition import RemoteSubpartition
from ckpt_runtime.network.transport import DataTransport
from ckpt_runtime.operators.aggregate import AggregateOperator, DeduplicateOperator, SessionOperator
from ckpt_runtime.operators.arrow_processor import ArrowProcessorOperator
from ckpt_runtime.operators.groups import Combiner, GroupAggregates, GroupOperator
from ckpt_runtime.operators.join import JoinOperator
from ckpt_runtime.operators.observe import ObserveOperator
from ckpt_runtime.operators.operator import Operator, OperatorContext, OperatorStateStore, WaitingInput
from ckpt_runtime.operators.python_functions import MapInArrowOperator, PythonFunctionsOperator
from ckpt_runtime.operators.result_table import LatestOperator, LimitOperator, ResultTableOperator, SortOperator
from ckpt_runtime.operators.stateful_processor import StatefulProcessorOperator
from ckpt_runtime.operators.static_join import StaticJoinOperator
from ckpt_runtime.operators.typed_expressions import (
    ConditionOperator,
    EvaluateOperator,
    ExpandOperator,
    GenerateOperator,
)
from ckpt_runtime.operators.watermark import WatermarkOperator
from ckpt_runtime.scheduler.deployment import (
    Channel,
    Deployment,
    JobDescriptor,
    SubtaskDescriptor,
    input_channels,
    output_channels,
)
from ckpt_runtime.state.backend import BackendParameters, KeyedStateBackend, SharedHandles
from ckpt_runtime.storage.channel_state import ChannelStateReader
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.structured_log import about
from ckpt_runtime.task.chain import ChainEnd, OperatorChain
from ckpt_runtime.task.input_debloating import input_debloating
from ckpt_runtime.task.metrics import Activity
from ckpt_runtime.task.output import BufferLimits, LocalSubpartition, ResultPartition
from ckpt_runtime.task.restored_input import EdgeKeys, RestoredInput, check_schema, create_keyed_backend
from ckpt_runtime.task.subtask import Subtask, SubtaskHost
from ckpt_runtime.task.watermark_valve import InputTime

# A lock wait is limited to threading.TIMEOUT_MAX, and a user's timer may be centuries away.
LONGEST_SLEEP_S = 3600.0


class Wakeup:
    """Lets many threads wake one sleeping thread. A wake-up between :meth:`prepare` and :meth:`wait` is not lost."""

    __slots__ = ("_event", "_sleeping")

    def __init__(self) -> None:
        self._event = threading.Event()
        self._sleeping = False

    def wake(self) -> None:
        # A plain flag: nearly all wake-ups find the thread awake, and setting an event takes a lock.
        if self._sleeping:
            self._event.set()

    def prepare(self) -> None:
        """The sleeper is about to sleep; it must check for work again after this call."""
        # In this order: a wake-up between both lines sets the event of this sleep, not of the last one.
        self._event.clear()
        self._sleeping = True

    def cancel(self) -> None:
        """The sleeper found work after all."""
        self._sleeping = False

    def wait(self, timeout_s: float | None) -> None:
        """Sleeps until woken or until the timeout, which :data:`LONGEST_SLEEP_S` limits."""
        self._event.wait(None if timeout_s is None else min(timeout_s, LONGEST_SLEEP_S))
        self._sleeping = False


_LIVE = (TaskState.INITIALIZING, TaskState.RUNNING)


class TaskThread:
    """Runs its subtasks from ``open`` until all have ended. ``wakeup`` is shared with their gates and outputs."""

    def __init__(self, name: str, subtasks: Sequence[Subtask], wakeup: Wakeup) -> None:
        self.subtasks = list(subtasks)
        self._wakeup = wakeup
        # User code that never returns must not keep the process from ending.
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self.thread.start()

    def wake(self) -> None:
        self._wakeup.wake()

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread; returns whether it ended within the time."""
        self.thread.join(min(timeout_s, threading.TIMEOUT_MAX))
        return not self.thread.is_alive()

    def _run(self) -> None:
        """Runs the subtasks; a thread with one subtask, such as one with user code, adds it to its log lines."""
        alone = self.subtasks[0] if len(self.subtasks) == 1 else None
        with about(**({} if alone is None else {"vertex_id": alone.vertex_id, "subtask": alone.index})):
            self._advance()

    def _advance(self) -> None:
        for subtask in self.subtasks:
            try:
                if subtask.state is TaskState.INITIALIZING:
                    subtask.open()
            except BaseException as error:  # user code may call sys.exit()
                subtask.fail(error)
        clock = time.perf_counter_ns
        live = [subtask for subtask in self.subtasks if subtask.state in _LIVE]
        while live:
            progress = False
            now = clock()
            for subtask in live:
                # Entered before the step, so that a step that does not return counts as busy.
                subtask.metrics.timer.enter(Activity.BUSY, now)
                progress |= self._tried(subtask, subtask.step)
                now = clock()
                subtask.metrics.timer.enter(None, now)
            # Before the thread sleeps: until then, buffers may fill up.
            if not progress:
                for subtask in live:
                    progress |= self._tried(subtask, subtask.flush)
            if progress:
                if any(subtask.state not in _LIVE for subtask in live):
                    live = [subtask for subtask in live if subtask.state in _LIVE]
            else:
                self._sleep(live)

    @staticmethod
    def _tried(subtask: Subtask, work: Callable[[], bool]) -> bool:
        """Whether the work has changed anything; a subtask whose work raises an error has failed."""
        try:
            return work()
        except BaseException as error:
            subtask.fail(error)
            return True

    def _sleep(self, live: Sequence[Subtask]) -> None:
        # Called before the last check for work, so that work that arrives after the check ends the sleep.
        self._wakeup.prepare()
        if any(subtask.has_work for subtask in live):
            self._wakeup.cancel()
            return
        waits = [wait for wait in (subtask.wait_ms() for subtask in live) if wait is not None]
        start = time.perf_counter_ns()
        for subtask in live:
            subtask.metrics.timer.enter(Activity.BACKPRESSURED if subtask.backpressured else Activity.IDLE, start)
        self._wakeup.wait(min(waits) / 1000 if waits else None)
        end = time.perf_counter_ns()
        for subtask in live:
            subtask.metrics.timer.enter(None, end)


_OF_SPEC: dict[type, Callable[..., Operator]] = {
    specs.ConditionSpec: ConditionOperator,
    specs.ObserveSpec: ObserveOperator,
    specs.EvaluateSpec: EvaluateOperator,
    specs.ExpandSpec: ExpandOperator,
    specs.GenerateSpec: GenerateOperator,
    specs.PythonFunctionsSpec: PythonFunctionsOperator,
    specs.MapInArrowSpec: MapInArrowOperator,
    specs.WatermarkSpec: WatermarkOperator,
    specs.TableSpec: ResultTableOperator,
    specs.LatestSpec: LatestOperator,
    specs.SortSpec: SortOperator,
    specs.LimitSpec: LimitOperator,
    specs.DeduplicateSpec: DeduplicateOperator,
    specs.JoinSpec: JoinOperator,
    specs.StaticJoinSpec: StaticJoinOperator,
}
"""Operators that are created from their spec alone."""


def create_operator(spec: specs.OperatorSpec, input_schema: pa.Schema | None) -> Operator:
    """A new operator, not opened yet. ``input_schema`` is None for sources."""
    make = _OF_SPEC.get(type(spec))
    if make is not None:
        return make(spec)
    match spec:
        case specs.AggregateSpec():
            return AggregateOperator(spec, input_schema)
        case specs.GroupSpec():
            return GroupOperator(spec) if spec.session is None else SessionOperator(spec)
        case specs.ProcessSpec(in_arrow=True):
            return ArrowProcessorOperator(spec, input_schema)
        case specs.ProcessSpec():
            return StatefulProcessorOperator(spec, input_schema)
        case _:
            return create_connector(spec)


_KEYED = (
    specs.AggregateSpec | specs.GroupSpec | specs.TableSpec | specs.DeduplicateSpec | specs.ProcessSpec | specs.JoinSpec
)
"""The operators that keep state per key and therefore need a keyed backend."""


def waiting_input(gate: InputGate) -> WaitingInput:
    """Called from the subtask's thread; producers may append concurrently. Meant for gates that hold few elements.

    The barrier of a savepoint that stops the job with drain comes after the end of data: it waits for all rows before
    it. Other barriers do not wait.
    """
    found = WaitingInput.NOTHING
    for channel in gate.channels:
        for element in tuple(channel.queue):
            match element:
                case CheckpointBarrier(options=options) if options.properties.is_synchronous:
                    break
                case CheckpointBarrier() | EndOfData(drain=False) | EndOfPartition() | BaseException():
                    return WaitingInput.BARRIER
                case EndOfData() | Watermark():
                    continue
                case _:
                    found = WaitingInput.ROWS
    return found


ROW_MODE_BUFFER_ROWS = 512
"""A row-mode operator takes about 10 us per row: a few ms per buffer, tenths of a second for all in flight."""


class PlanMismatchError(RuntimeError):
    """The pipeline's entry point built a different plan here than in the driver: it is not deterministic."""


class DeployedJob:
    """Builds everything in the constructor (and may raise); nothing runs before :meth:`start`."""

    def __init__(
        self,
        job: JobDescriptor,
        deployment: Deployment,
        plan: CompiledPlan,
        transport: DataTransport,
        host: SubtaskHost,
        shared_handles: SharedHandles | None = None,
        spark_url: Callable[[], str] | None = None,
    ) -> None:
        self.deployment = deployment
        self.job_id = job.job_id
        self._graph = job.graph
        self._shared_handles = shared_handles
        self._spark_url = spark_url
        self.subtasks: dict[SubtaskKey, Subtask] = {}
        self._plan = plan
        self._greatest_watermark = any(
            isinstance(each, specs.WatermarkSpec) and each.greatest for each in plan.specs.values()
        )
        self._transport = transport
        self._host = host
        self.configuration = Configuration(job.graph.configuration)
        self._local: dict[int, InputChannel] = {}
        self._wakeups: dict[SubtaskKey, Wakeup] = {}
        self._gates: dict[SubtaskKey, InputGate] = {}
        shared = Wakeup()
        # All gates are built before the first output, because outputs inside this worker look up their receiving ends.
        for descriptor in deployment.subtasks:
            own = Wakeup() if self._has_user_code(descriptor) else shared
            self._build_gate(descriptor, own)
        self._backends: list[KeyedStateBackend] = []
        try:
            for descriptor in deployment.subtasks:
                self._build_subtask(descriptor)
        except BaseException:
            # Closed here: the subtasks that would close them are not built, and the worker keeps running.
            for backend in self._backends:
                backend.close()
            raise
        self.threads = self._threads(shared)

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def mail(self, key: SubtaskKey, action: Callable[[Subtask], None]) -> bool:
        """Puts an action into a subtask's mailbox; False when this deployment has no such subtask."""
        subtask = self.subtasks.get(key)
        if subtask is None:
            return False
        subtask.mail(lambda: action(subtask))
        self._wakeups[key].wake()
        return True

    def cancel(self, timeout_s: float) -> bool:
        """Ends all subtasks and forgets the channels; False when a thread did not end in time (stuck user code)."""
        for key in self.subtasks:
            self.mail(key, Subtask.cancel)
        deadline = time.monotonic() + timeout_s
        ended = [thread.join(max(0.0, deadline - time.monotonic())) for thread in self.threads]
        # Released after the threads, which send and poll until they have ended.
        self._transport.release(self.deployment.deployment)
        return all(ended)

    def _has_user_code(self, descriptor: SubtaskDescriptor) -> bool:
        vertex = self._graph.vertex(descriptor.vertex_id)
        return any(operator.user_code for operator in vertex.operators)

    def _build_gate(self, descriptor: SubtaskDescriptor, wakeup: Wakeup) -> None:
        key = (descriptor.vertex_id, descriptor.subtask_index)
        self._wakeups[key] = wakeup
        gate = self._gates[key] = InputGate(wakeup.wake)
        ranges = self._reads_ranges(descriptor.vertex_id)
        window = 1 if ranges else self.configuration.get(TaskManagerOptions.BUFFERS_PER_CHANNEL)
        for position, (edge, channels) in enumerate(input_channels(self._graph, *key)):
            forwarded = descriptor.subtask_index if edge.partitioning is Partitioning.FORWARD else None
            overtakes = self._graph.overtakes(edge)
            for channel in channels:
                receiver = gate.add_channel(position, window, peer=forwarded, overtakes=overtakes)
                if channel.peer == descriptor.subtask_index:
                    self._local[channel.index] = receiver
                else:
                    self._transport.register(channel_id(self.deployment.deployment, channel.index), receiver)

    def _build_subtask(self, descriptor: SubtaskDescriptor) -> None:
        key = (descriptor.vertex_id, descriptor.subtask_index)
        vertex = self._graph.vertex(descriptor.vertex_id)
        restored = self._restored_input(descriptor, vertex)
        end = ChainEnd(
            [
                self._build_output(edge, channels, descriptor.subtask_index, self._wakeups[key])
                for edge, channels in output_channels(self._graph, *key)
            ]
        )
        operators = [self._operator(node.uid) for node in vertex.operators]
        holder: list[Subtask] = []
        contexts = [
            replace(self._context(descriptor, vertex, position, holder), chain_time=end.time)
            for position in range(len(operators))
        ]
        subtask = Subtask(
            descriptor.vertex_id,
            descriptor.subtask_index,
            f"{vertex.name} ({descriptor.subtask_index + 1}/{vertex.parallelism})",
            self._host,
            self._gates[key],
            OperatorChain(operators, contexts, end),
            finished_on_restore=descriptor.finished,
            restored=restored,
        )
        head = vertex.operators[0]
        subtask.event_time = InputTime(
            [channel.input_index for channel in self._gates[key].channels],
            ended_hold=not self.configuration.get(ExecutionOptions.EVENT_TIME_ENDS),
            # A reader reports by itself which ranges it has read.
            in_step=(head.alignment_group or "").startswith(BATCHES) and head.kind != "range_reader",
            greatest=self._greatest_watermark,
        )
        after_finish = self.configuration.get(CheckpointingOptions.CHECKPOINTS_AFTER_TASKS_FINISH)
        subtask.checkpoints.end_with_all = not after_finish
        peers = [channel.peer for _, channels in input_channels(self._graph, *key) for channel in channels]
        local = [peer == descriptor.subtask_index for peer in peers]
        subtask.debloating = input_debloating(self.configuration, self._gates[key].channels, local)
        # User code may take seconds in a step, and rows are only sent after the step.
        subtask.fills_buffers = not self._has_user_code(descriptor)
        holder.append(subtask)
        self.subtasks[key] = subtask

    def _reads_ranges(self, vertex_id: str) -> bool:
        """Whether a buffer to that vertex may be hours of work: then few buffers are in flight, and rows are not
        gathered."""
        head = self._graph.vertex(vertex_id).operators[0]
        return isinstance(self._plan.specs[head.uid], specs.RangeReaderSpec)

    def _buffer_rows(self, target: str) -> int:
        """Rows per buffer to that vertex: fewer if each row costs a call, since barriers wait for buffers."""
        rows = self.configuration.get(TaskManagerOptions.BUFFER_ROWS)
        spec = self._plan.specs[self._graph.vertex(target).operators[0].uid]
        by_row = isinstance(spec, specs.ProcessSpec) and not spec.in_arrow
        return min(rows, ROW_MODE_BUFFER_ROWS) if by_row else rows

    def _threads(self, shared: Wakeup) -> list[TaskThread]:
        built_in = [subtask for key, subtask in self.subtasks.items() if self._wakeups[key] is shared]
        threads = [
            TaskThread(subtask.name, [subtask], self._wakeups[key])
            for key, subtask in self.subtasks.items()
            if self._wakeups[key] is not shared
        ]
        return [TaskThread("built-in operators", built_in, shared), *threads] if built_in else threads

    def _operator(self, uid: str) -> Operator:
        return create_operator(self._plan.specs[uid], self._plan.input_schemas.get(uid))

    def _restored_input(self, descriptor: SubtaskDescriptor, vertex: JobVertex) -> RestoredInput | None:
        """Raises UnreadableInFlightDataError when restored rows have a schema that the vertex no longer takes."""
        if not descriptor.in_flight:
            return None
        head = vertex.operators[0]
        spec = self._plan.specs[head.uid]
        also = GroupAggregates(spec).takes_partial if isinstance(spec, specs.GroupSpec) else None
        for stream in descriptor.in_flight:
            check_schema(stream, self._input_schema(head.uid, stream.edge), head.uid, also)
        location = resolve(self.deployment.snapshot_directory)
        edges = self._graph.inputs(vertex.id)
        return RestoredInput(
            head.uid,
            descriptor.in_flight,
            lambda stream: ChannelStateReader(location, stream, foreign=not self.deployment.snapshot_owned),
            [EdgeKeys(edge.keys, vertex.max_parallelism) for edge in edges],
        )

    def _input_schema(self, uid: str, gate: int) -> pa.Schema | None:
        """The schema that the head of a vertex takes from one of its inputs; None if the plan does not know it."""
        spec = self._plan.specs[uid]
        if isinstance(spec, specs.JoinSpec):
            return spec.sides[spec.side_of_gate(gate)].schema
        return self._plan.input_schemas.get(uid)

    def _build_output(self, edge: JobEdge, channels: Sequence[Channel], index: int, wakeup: Wakeup) -> ResultPartition:
        ranges = self._reads_ranges(edge.target)
        capacity = 1 if ranges else self.configuration.get(TaskManagerOptions.MAX_BUFFERS_PER_OUTPUT_CHANNEL)
        subpartitions: list[LocalSubpartition | RemoteSubpartition] = []
        for channel in channels:
            if channel.peer == index:
                subpartitions.append(LocalSubpartition(self._local[channel.index], capacity, wakeup.wake))
            else:
                wire = channel_id(self.deployment.deployment, channel.index)
                address = self.deployment.addresses[channel.peer]
                subpartitions.append(self._transport.connect(address, wire, capacity, wakeup.wake))
        partition = ResultPartition(
            edge.partitioning,
            edge.keys,
            self._graph.vertex(edge.target).max_parallelism,
            subpartitions,
            limits=BufferLimits(
                rows=self._buffer_rows(edge.target),
                bytes=self.configuration.get(TaskManagerOptions.BUFFER_BYTES),
                timeout_ms=0 if ranges else self.configuration.get(ExecutionOptions.BUFFER_TIMEOUT),
            ),
            now_ms=self._host.monotonic_ms,
            peers=[index] if edge.partitioning is Partitioning.FORWARD else None,
            overtakes=self._graph.overtakes(edge),
        )
        spec = self._plan.specs[self._graph.vertex(edge.target).operators[0].uid]
        if isinstance(spec, specs.GroupSpec) and Combiner.combines(spec):
            partition.combiner = Combiner(spec)
        partition.cut_by_ranges = self._use_event_time(edge.target)
        local = frozenset(at for at, each in enumerate(subpartitions) if isinstance(each, LocalSubpartition))
        if edge.partitioning in (Partitioning.FORWARD, Partitioning.HASH):
            partition.by_reference = local
        if edge.partitioning is Partitioning.FORWARD and local:
            partition.keeps_dictionaries = getattr(_OF_SPEC.get(type(spec)), "takes_dictionaries", False)
        for position, subpartition in enumerate(subpartitions):
            subpartition.buffer_size.listen(partial(partition.limit_bytes, position))
        return partition

    def _use_event_time(self, vertex_id: str) -> bool:
        """Whether an operator of that vertex, or of one behind it, uses event time."""
        uids = [operator.uid for operator in self._graph.vertex(vertex_id).operators]
        return any(uses_event_time(self._plan.specs[uid]) for uid in uids) or any(
            self._use_event_time(edge.target) for edge in self._graph.outputs(vertex_id)
        )

    def _context(
        self, descriptor: SubtaskDescriptor, vertex: JobVertex, position: int, holder: list[Subtask]
    ) -> OperatorContext:
        """``holder`` gets the subtask once it exists; operators set timers only after that."""
        node = vertex.operators[position]
        gate = self._gates[descriptor.vertex_id, descriptor.subtask_index]
        state = descriptor.state.get(node.uid)
        backend: KeyedStateBackend | None = None
        if isinstance(self._plan.specs[node.uid], _KEYED) and not descriptor.finished:
            backend = create_keyed_backend(
                self.configuration.get(StateOptions.BACKEND_TYPE),
                BackendParameters(
                    node.uid,
                    key_group_range(vertex.max_parallelism, vertex.parallelism, descriptor.subtask_index),
                    vertex.max_parallelism,
                    # The agent removes the temporary directory of a worker that has ended or was killed.
                    partial(tempfile.mkdtemp, prefix="ckpt-state-"),
                    self._graph.configuration,
                    self._shared_handles,
                ),
                () if state is None else state.keyed,
                self.deployment.snapshot_directory,
                owned=self.deployment.snapshot_owned,
            )
            self._backends.append(backend)
        return OperatorContext(
            job_id=self.job_id,
            uid=node.uid,
            name=node.name,
            subtask_index=descriptor.subtask_index,
            parallelism=vertex.parallelism,
            attempt=self.deployment.attempt,
            operator_state=OperatorStateStore(() if state is None else state.lists),
            now_ms=self._host.now_ms,
            monotonic_ms=self._host.monotonic_ms,
            set_timer=lambda at_ms: holder[0].set_timer(position, at_ms),
            configuration=self._graph.configuration,
            keyed_state=backend,
            restored_checkpoint_id=self.deployment.restored_checkpoint_id,
            waiting_input=partial(waiting_input, gate),
            sink=self.deployment.sinks.get(node.uid),
            spark_url=self._spark_url,
            report_progress=lambda progress: self._host.source_progress(holder[0], progress),
        )


def load_checked_plan(job: JobDescriptor, directory: str) -> CompiledPlan:
    """Runs the entry point and compares the plan with the driver's. Raises PlanMismatchError or the code's error."""
    program = job.program
    graph = job.graph
    plan = load_plan(Path(directory), program.entry, program.arguments, graph.configuration, analyses=graph.analyses)
    if plan.job_graph.fingerprint != job.graph.fingerprint:
        raise PlanMismatchError(
            f"the entry point {program.entry} built another plan in the worker than at submission; it must not depend "
            "on time, randomness, environment or files that change"
        )
    return plan
