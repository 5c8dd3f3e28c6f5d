"""A subtask run by hand: a host that only remembers, clocks that only tests move, channels that only tests fill."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import pyarrow as pa
import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import OperatorListState
from ckpt_runtime.checkpoint.properties import CheckpointOptions, CheckpointProperties, CheckpointType
from ckpt_runtime.graph.job_graph import Partitioning
from ckpt_runtime.network.elements import CheckpointBarrier, ControlElement, decode_element
from ckpt_runtime.network.framing import FrameKind, decode_header
from ckpt_runtime.network.gate import InputGate
from ckpt_runtime.network.output_queue import EncodedRows, InFlightData
from ckpt_runtime.network.remote_subpartition import RemoteSubpartition
from ckpt_runtime.operators.operator import (
    Operator,
    OperatorContext,
    OperatorStateStore,
    Output,
    SourceOperator,
    SourceStatus,
)
from ckpt_runtime.scheduler.watermark_alignment import Progress
from ckpt_runtime.state.backend import KeyedStateBackend
from ckpt_runtime.task.chain import ChainEnd, OperatorChain
from ckpt_runtime.task.in_flight import CapturedChannel
from ckpt_runtime.task.output import BufferLimits, ResultPartition, Subpartition
from ckpt_runtime.task.restored_input import RestoredInput
from ckpt_runtime.task.subtask import Subtask
from ckpt_runtime.task.subtask_checkpoints import OperatorSnapshot, SnapshotMeasures, SubtaskSnapshot


def rows(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(values, pa.int64())})


def encoded(*values: int) -> EncodedRows:
    """The same as they come from another worker."""
    batch = rows(*values)
    return EncodedRows(batch.schema, batch.serialize())


def barrier(
    checkpoint_id: int,
    kind: CheckpointType = CheckpointType.CHECKPOINT,
    *,
    drain: bool = False,
    directory: str = "dir",
    timestamp: int = 0,
) -> CheckpointBarrier:
    options = CheckpointOptions(CheckpointProperties(kind, drain=drain), directory)
    return CheckpointBarrier(checkpoint_id, timestamp, options)


def unaligned(
    checkpoint_id: int,
    *,
    timeout_ms: int = 0,
    limit: int | None = None,
    timestamp: int = 1_000,
    directory: str = "dir",
    shared: str = "",
) -> CheckpointBarrier:
    """A barrier that may overtake; triggered when the :class:`Host`'s clock began."""
    options = CheckpointOptions(
        CheckpointProperties(), directory, unaligned=True, aligned_timeout_ms=timeout_ms,
        max_inflight_data_bytes=limit, shared_directory=shared,
    )  # fmt: skip
    return CheckpointBarrier(checkpoint_id, timestamp, options)


def kept(captured: CapturedChannel) -> list[Any]:
    """What was caught of a channel: rows as lists of ints, watermarks as they are."""
    found: list[Any] = []
    for element in captured.elements:
        if isinstance(element, EncodedRows):
            found.append(pa.ipc.read_record_batch(element.message, element.schema).column(0).to_pylist())
        else:
            found.append(element.column(0).to_pylist() if isinstance(element, pa.RecordBatch) else element)
    return found


class Wire:
    """A sending channel as between two workers, without a socket: sends what credit allows, as soon as it may."""

    def __init__(self, capacity: int = 100) -> None:
        self.woken = 0
        self.error: BaseException | None = None
        self.elements: list[Any] = []
        self.schema: pa.Schema | None = None
        self.subpartition = RemoteSubpartition(0, capacity, self._wake)
        self.subpartition.attach(cast(Any, self))

    def _wake(self) -> None:
        self.woken += 1

    def ready(self, subpartition: RemoteSubpartition) -> None:
        out: deque[bytes | memoryview | pa.Buffer] = deque()
        subpartition.drain_into(out)
        while out:
            kind, body = decode_header(cast(bytes, out.popleft())).kind, out.popleft()
            if kind is FrameKind.SCHEMA:
                self.schema = pa.ipc.read_schema(pa.py_buffer(body))
            elif kind is FrameKind.DATA:
                self.elements.append(pa.ipc.read_record_batch(body, self.schema).column(0).to_pylist())
            else:
                self.elements.append(decode_element(cast(bytes, body)))

    def grant(self, count: int) -> None:
        """The receiver gives credit."""
        self.subpartition.grant(count)
        self.ready(self.subpartition)

    def take(self) -> list[Any]:
        elements, self.elements = self.elements, []
        return elements


class Sent:
    """A subpartition that keeps what it is given: rows as lists of ints, control elements as they are."""

    def __init__(self, capacity: int | None = None) -> None:
        self.elements: list[Any] = []
        self.batches: list[pa.RecordBatch] = []
        self.capacity = capacity
        self.error: BaseException | None = None

    @property
    def has_room(self) -> bool:
        return self.capacity is None or len(self.batches) < self.capacity

    def send_batch(self, batch: pa.RecordBatch) -> None:
        self.batches.append(batch)
        self.elements.append(batch.column(0).to_pylist())

    def send_control(self, element: ControlElement) -> None:
        self.elements.append(element)

    held = False
    is_drained = False
    is_empty = True

    def overtake(self, barrier: CheckpointBarrier, limit: int | None) -> list[InFlightData]:
        self.elements.append(barrier)
        return []

    def switch_to_unaligned(self, checkpoint_id: int, limit: int | None) -> list[InFlightData]:
        return []

    def holds_barrier(self, checkpoint_id: int) -> bool:
        return False

    def take(self) -> list[Any]:
        elements, self.elements = self.elements, []
        return elements


class Recorder(Operator):
    """Passes rows on and notes every call in ``calls``, which the operators of a chain share."""

    def __init__(self, name: str, calls: list[Any]) -> None:
        self.name = name
        self.calls = calls
        self.raises_in: set[str] = set()
        self.at: dict[str, Callable[[], None]] = {}
        self.full = self.commits = False

    @property
    def is_full(self) -> bool:
        return self.full

    @property
    def has_commits_left(self) -> bool:
        return self.commits

    def note(self, call: str, *details: Any) -> None:
        self.calls.append((self.name, call, *details))
        if call in self.at:
            self.at[call]()
        if call in self.raises_in:
            raise RuntimeError(f"{call} of {self.name}")

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        self.note("open")

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        self.note("batch", input_index, batch.column(0).to_pylist())
        self.output.emit(batch)

    def process_coming_watermark(self, timestamp_ms: int, batch: int) -> None:
        self.note("coming", timestamp_ms, batch)
        super().process_coming_watermark(timestamp_ms, batch)

    def process_watermark(self, timestamp_ms: int) -> None:
        self.note("watermark", timestamp_ms)
        super().process_watermark(timestamp_ms)

    def process_end_of_range(self) -> None:
        self.note("end of range")
        super().process_end_of_range()

    def on_processing_time(self, now_ms: int) -> None:
        self.note("timer", now_ms)

    def prepare_snapshot(self, checkpoint_id: int) -> None:
        self.note("prepare", checkpoint_id)

    def snapshot(self, checkpoint_id: int) -> None:
        self.note("snapshot", checkpoint_id)
        self.context.operator_state.put("position", [checkpoint_id])

    def notify_complete(self, checkpoint_id: int) -> None:
        self.note("complete", checkpoint_id)

    def notify_aborted(self, checkpoint_id: int) -> None:
        self.note("aborted", checkpoint_id)

    def finish(self) -> None:
        self.note("finish")

    def close(self) -> None:
        self.note("close")


class RecordingSource(Recorder, SourceOperator):
    """Emits what ``script`` says, poll by poll: rows, as many as it may, or a status."""

    def __init__(self, name: str, calls: list[Any], script: Sequence[pa.RecordBatch | SourceStatus]) -> None:
        super().__init__(name, calls)
        self.script = list(script)
        self.pause_ms = 10

    def poll(self) -> SourceStatus:
        following = self.script.pop(0) if self.script else SourceStatus.NOTHING_AVAILABLE
        if isinstance(following, SourceStatus):
            return following
        if following.num_rows > self.most_rows:
            self.script.insert(0, following.slice(self.most_rows))
        self.output.emit(following.slice(0, self.most_rows))
        return SourceStatus.MORE_AVAILABLE

    def idle_ms(self) -> int:
        return self.pause_ms


class Host:
    """What the worker would do, noted."""

    def __init__(self) -> None:
        self.wall_ms = 1_000
        self.mono_ms = 0.0
        self.states: list[str] = []
        self.errors: list[BaseException] = []
        self.ends_of_data = 0
        self.waits: bool | None = None
        self.declined: list[tuple[int, str]] = []
        self.snapshots: list[tuple[int, list[OperatorSnapshot], SnapshotMeasures]] = []
        self.written: list[SubtaskSnapshot] = []
        self.progress: list[Progress] = []

    def now_ms(self) -> int:
        return self.wall_ms

    def monotonic_ms(self) -> float:
        return self.mono_ms

    def state_changed(self, subtask: Subtask, error: BaseException | None = None) -> None:
        self.states.append(subtask.state.value)
        if error is not None:
            self.errors.append(error)

    def end_of_data(self, subtask: Subtask, waits: bool) -> None:
        self.ends_of_data += 1
        self.waits = waits

    def source_progress(self, subtask: Subtask, progress: Progress) -> None:
        self.progress.append(progress)

    def decline(self, subtask: Subtask, checkpoint_id: int, reason: str, message: str) -> None:
        self.declined.append((checkpoint_id, reason))

    def write_snapshot(self, subtask: Subtask, snapshot: SubtaskSnapshot) -> None:
        self.snapshots.append((snapshot.barrier.checkpoint_id, list(snapshot.operators), snapshot.measures))
        self.written.append(snapshot)

    @property
    def snapshot_ids(self) -> list[int]:
        return [checkpoint_id for checkpoint_id, _, _ in self.snapshots]


class Bench:
    """One subtask with its surroundings. ``channels`` input channels; output is one channel, sent at once.

    ``inputs`` tells of each input channel the edge and whether barriers overtake there; ``wires`` are the channels of a
    broadcast output. Each row takes ``row_ms``.
    """

    def __init__(
        self,
        *,
        channels: int = 1,
        operators: int = 1,
        source: Sequence[pa.RecordBatch | SourceStatus] | None = None,
        capacity: int | None = None,
        buffer_timeout_ms: int = 0,
        finished_on_restore: bool = False,
        inputs: Sequence[tuple[int, bool]] | None = None,
        wires: Sequence[Wire] = (),
        restored: RestoredInput | None = None,
        lists: tuple[OperatorListState, ...] = (),
    ) -> None:
        self.row_ms = 0.0
        self.host = Host()
        self.calls: list[Any] = []
        self.out = Sent(capacity)
        self.gate = InputGate(lambda: None)
        for edge, overtakes in [(0, True)] * channels if inputs is None else inputs:
            if source is None:
                self.gate.add_channel(edge, 4, overtakes=overtakes)
        self.operators: list[Recorder] = [Recorder(f"op{i}", self.calls) for i in range(operators)]
        if source is not None:
            self.operators[0] = RecordingSource("op0", self.calls, source)
        holder: list[Subtask] = []
        contexts = [
            context(f"op{i}", self.host, lambda at, i=i: holder[0].set_timer(i, at), lists=lists)
            for i in range(operators)
        ]
        for operator in self.operators:
            operator.at["batch"] = self._work
        outs: list[Subpartition] = [wire.subpartition for wire in wires] or [self.out]
        partition = ResultPartition(
            Partitioning.BROADCAST, (), 128, outs, limits=BufferLimits(100, 1 << 20, buffer_timeout_ms),
            now_ms=self.host.monotonic_ms,
        )  # fmt: skip
        self.chain = OperatorChain(self.operators, contexts, ChainEnd([partition]))
        self.subtask = Subtask(
            "v", 0, "op (1/1)", self.host, self.gate, self.chain,
            finished_on_restore=finished_on_restore, restored=restored,
        )  # fmt: skip
        holder.append(self.subtask)

    @property
    def head(self) -> Recorder:
        return self.operators[0]

    def open(self) -> Bench:
        self.subtask.open()
        self.calls.clear()
        self.host.states.clear()
        return self

    def _work(self) -> None:
        self.host.mono_ms += self.row_ms * len(self.calls[-1][3])

    def put(self, channel: int, *elements: Any) -> Bench:
        for element in elements:
            self.gate.channels[channel].put(element)
        return self

    def mail(self, action: Callable[[], None]) -> Bench:
        self.subtask.mail(action)
        return self

    def run(self) -> Bench:
        """Steps until there is nothing to do."""
        for _ in range(1_000):
            if not self.subtask.step():
                return self
        raise AssertionError("the subtask never comes to rest")

    def called(self, name: str) -> list[Any]:
        """Details of all calls of that name, in order."""
        return [call[2:] for call in self.calls if call[1] == name]


def context(
    uid: str,
    host: Host,
    set_timer: Callable[[int], None],
    keyed_state: KeyedStateBackend | None = None,
    lists: tuple[OperatorListState, ...] = (),
) -> OperatorContext:
    return OperatorContext(
        job_id="j", uid=uid, name=uid, subtask_index=0, parallelism=1, attempt=0,
            operator_state=OperatorStateStore(lists), now_ms=host.now_ms, monotonic_ms=host.monotonic_ms,
        set_timer=set_timer, keyed_state=keyed_state,
    )  # fmt: skip


class TaskKit:
    """The names above for the tests of this folder."""

    rows = staticmethod(rows)
    encoded = staticmethod(encoded)
    barrier = staticmethod(barrier)
    unaligned = staticmethod(unaligned)
    kept = staticmethod(kept)
    context = staticmethod(context)
    Bench = Bench
    Host = Host
    Sent = Sent
    Wire = Wire
    Recorder = Recorder


@pytest.fixture(scope="session")
def kit() -> TaskKit:
    return TaskKit()
