"""Data connections between simulated workers: the real sending ends and input channels, frames in a queue between them.

A frame moves when the scheduler says so; those of one connection keep their order, in each direction. What a socket
would hold is ``in_flight``: it cannot be overtaken any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from ckpt_runtime.network.elements import CheckpointBarrier, decode_element
from ckpt_runtime.network.framing import (
    FrameKind,
    decode_credit,
    decode_header,
    deployment_of,
    encode_credit,
)
from ckpt_runtime.network.gate import InputChannel
from ckpt_runtime.network.output_queue import EncodedRows
from ckpt_runtime.network.remote_subpartition import RemoteSubpartition
from ckpt_runtime.scheduler.deployment import Address
from tests.simulation.schedules.violation import Violation

if TYPE_CHECKING:
    from tests.simulation.jobs.worker import SimulatedWorker

Frame = tuple[int, FrameKind, Any]


class Connection:
    """From one worker to another. Data goes forward, credit back."""

    def __init__(self, sender: SimulatedWorker, receiver: SimulatedWorker) -> None:
        self.sender = sender
        self.receiver = receiver
        self.error: BaseException | None = None
        self.subpartitions: dict[int, RemoteSubpartition] = {}
        self.inputs: dict[int, InputChannel] = {}
        self.in_flight: deque[Frame] = deque()
        self.returning: deque[tuple[int, int]] = deque()
        self.ready_to_send: deque[RemoteSubpartition] = deque()
        self._barriers: dict[int, int] = {}

    # What a RemoteSubpartition wants of its connection.

    def ready(self, subpartition: RemoteSubpartition) -> None:
        """A subtask queued something; it is sent later."""
        self.ready_to_send.append(subpartition)

    # The scheduler's.

    @property
    def busy(self) -> bool:
        return bool(self.ready_to_send or self.in_flight or self.returning)

    def step(self, choice: float) -> None:
        """One piece of work: takes over what credit allows, delivers a frame, or brings credit back."""
        work: list[Callable[[], None]] = []
        if self.ready_to_send:
            work.append(self._collect)
        if self.in_flight:
            work.append(self._deliver)
        if self.returning:
            work.append(self._credit)
        work[int(choice * len(work))]()

    def _collect(self) -> None:
        out: deque[Any] = deque()
        self.ready_to_send.popleft().drain_into(out)
        while out:
            header = decode_header(cast(bytes, out.popleft()))
            body = out.popleft() if header.length else b""
            self.in_flight.append((header.channel, header.kind, body))

    def _deliver(self) -> None:
        channel, kind, body = self.in_flight.popleft()
        if kind is FrameKind.OPEN:
            self.receiver.transport.opened(self, channel)
            return
        receiver = self.inputs.get(channel)
        if receiver is None:
            return
        if kind is FrameKind.DATA:
            receiver.put_encoded(body if isinstance(body, pa.Buffer) else pa.py_buffer(body))
            window = receiver.credit.window
            # Control elements need no credit, and there are more of them than buffers: count only when it may matter.
            held = len(receiver.queue)
            if held > window:
                held = sum(isinstance(element, EncodedRows) for element in receiver.queue)
            if held > window:
                raise Violation(f"a channel holds {held} buffers, more than its {window}")
        elif kind is FrameKind.CONTROL:
            element = decode_element(body)
            if isinstance(element, CheckpointBarrier):
                if self._barriers.get(channel, 0) >= element.checkpoint_id:
                    raise Violation(
                        f"barrier {element.checkpoint_id} comes after {self._barriers[channel]} on a channel"
                    )
                self._barriers[channel] = element.checkpoint_id
            receiver.put(element)
        elif kind is FrameKind.SCHEMA:
            changes = receiver.schema is not None
            receiver.schema = pa.ipc.read_schema(pa.py_buffer(body))
            if changes:  # no step of its own: the rows follow at once
                self._deliver()

    def _credit(self) -> None:
        channel, count = self.returning.popleft()
        subpartition = self.subpartitions.get(channel)
        if subpartition is not None:
            subpartition.grant(decode_credit(encode_credit(count)))
            self.ready_to_send.append(subpartition)

    def fail(self) -> None:
        """One of the two workers is gone."""
        if self.error is not None:
            return
        self.error = ConnectionError("simulated: the connection is lost")
        self.in_flight.clear()
        self.returning.clear()
        self.ready_to_send.clear()
        for channel in self.inputs.values():
            channel.put(self.error)
        for subpartition in self.subpartitions.values():
            subpartition.failed()


class SimulatedTransport:
    """One worker's channels to and from its peers, with the interface of ``DataTransport``."""

    def __init__(self, worker: SimulatedWorker) -> None:
        self._worker = worker
        self._registered: dict[int, InputChannel] = {}
        self._opened: dict[int, Connection] = {}
        self._released = -1

    def register(self, channel: int, receiver: InputChannel) -> None:
        self._registered[channel] = receiver
        connection = self._opened.pop(channel, None)
        if connection is not None:
            self._bind(connection, channel, receiver)

    def connect(self, peer: Address, channel: int, capacity: int, wake: Callable[[], None]) -> RemoteSubpartition:
        """Raises ConnectionError when the peer is gone."""
        connection = self._worker.world.connection(self._worker, peer)
        subpartition = RemoteSubpartition(channel, capacity, wake)
        subpartition.attach(cast(Any, connection))
        connection.subpartitions[channel] = subpartition
        connection.in_flight.append((channel, FrameKind.OPEN, b""))
        return subpartition

    def release(self, deployment: int) -> None:
        self._released = max(self._released, deployment)
        self._registered = {c: r for c, r in self._registered.items() if deployment_of(c) > deployment}
        self._opened = {c: r for c, r in self._opened.items() if deployment_of(c) > deployment}
        for connection in self._worker.world.connections_of(self._worker):
            mine = connection.inputs if connection.receiver is self._worker else connection.subpartitions
            for channel in [c for c in mine if deployment_of(c) <= deployment]:
                del mine[channel]

    def opened(self, connection: Connection, channel: int) -> None:
        """A peer asks for credit."""
        if deployment_of(channel) <= self._released:
            return
        receiver = self._registered.get(channel)
        if receiver is None:
            self._opened[channel] = connection
        else:
            self._bind(connection, channel, receiver)

    def _bind(self, connection: Connection, channel: int, receiver: InputChannel) -> None:
        if connection.error is not None:
            receiver.put(connection.error)
            return
        connection.inputs[channel] = receiver
        receiver.on_credit(lambda count: connection.returning.append((channel, count)))
        connection.returning.append((channel, receiver.credit.window))
