"""Data sockets, but for the handshake of those that others open: one listening socket and one I/O thread per worker.

A worker dials each peer that it sends to; data flows one way on that connection, credit and wanted buffer sizes the
other. All channels
between two workers share it. Bodies are received straight into Arrow buffers, so that a record batch is read without a
copy, and sent by scatter-gather. Dialling happens in the thread that deploys.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice

import pyarrow as pa

from ckpt_runtime.network.authentication import AuthenticationError
from ckpt_runtime.network.buffer_debloater import BufferSizeWish
from ckpt_runtime.network.connections import HANDSHAKE_TIMEOUT_S, ChannelLostError, authenticate, end_in_silence
from ckpt_runtime.network.credit import SenderCredit
from ckpt_runtime.network.elements import CheckpointBarrier, ControlElement, EndOfData, decode_element, encode_element
from ckpt_runtime.network.framing import (
    HEADER_BYTES,
    FrameHeader,
    FrameKind,
    decode_buffer_size,
    decode_credit,
    decode_header,
    deployment_of,
    encode_buffer_size,
    encode_credit,
    encode_header,
)
from ckpt_runtime.network.gate import InputChannel
from ckpt_runtime.network.incoming import IncomingHandshakes
from ckpt_runtime.network.output_queue import InFlightData, OutputQueue, QueuedElement
from ckpt_runtime.network.tls import AnySocket, TlsSocket, internal_context, secured

logger = logging.getLogger(__name__)

_PURPOSE = "data"
_MAX_VECTORS = 64
ACCEPT_PAUSE_S = 0.1
"""How long nothing is accepted by a process that has no descriptors left."""
Address = tuple[str, int]


class RemoteSubpartition:
    """The sending end of a channel whose consumer lives in another worker.

    The subtask's thread queues elements; whoever holds the connection's send lock moves them on as credit allows. The
    producer is woken when there is room again, when a barrier that might yet turn unaligned has left the queue, and
    when nothing is left in it after the end of data: a subtask that ends waits for that.
    """

    def __init__(self, channel: int, capacity: int, wake_producer: Callable[[], None]) -> None:
        self.channel = channel
        self.buffer_size = BufferSizeWish()
        self._wake_producer = wake_producer
        self._queue = OutputQueue(capacity)
        self._moving = threading.Lock()
        self._credit = SenderCredit()
        self._schema: pa.Schema | None = None
        self._opened = False
        self._ends = False
        self._connection: _Connection | None = None

    @property
    def has_room(self) -> bool:
        return self._queue.has_room

    @property
    def is_empty(self) -> bool:
        """Whether everything has been handed to the connection."""
        return self._queue.is_empty

    @property
    def schema(self) -> pa.Schema | None:
        """Of the rows sent so far; None before the first."""
        return self._schema

    @property
    def error(self) -> BaseException | None:
        """Why nothing can be sent any more; None while all is well."""
        return None if self._connection is None else self._connection.error

    def attach(self, connection: _Connection) -> None:
        self._connection = connection

    def send_batch(self, batch: pa.RecordBatch) -> None:
        """Queues a batch (in the subtask's thread: serialisation is its work, not the I/O thread's)."""
        if self._schema is None:
            self._schema = batch.schema
            self._queue.add_schema(batch.schema.serialize().to_pybytes())
        self._queue.add_rows(batch.serialize())
        self._notify()

    def send_control(self, element: ControlElement) -> None:
        self._ends = self._ends or isinstance(element, EndOfData)
        self._queue.add_control(element)
        self._notify()

    def overtake(self, barrier: CheckpointBarrier, limit: int | None) -> list[InFlightData]:
        """Sends the barrier in front of what is queued; see :meth:`OutputQueue.add_barrier`."""
        with self._moving:
            overtaken = self._queue.add_barrier(barrier, limit)
        self._notify()
        return overtaken

    def turn_unaligned(self, checkpoint_id: int, limit: int | None) -> list[InFlightData]:
        """Moves a barrier that is still queued to the front; see :meth:`OutputQueue.turn_unaligned`."""
        with self._moving:
            overtaken = self._queue.turn_unaligned(checkpoint_id, limit)
        self._notify()
        return overtaken

    def holds_barrier(self, checkpoint_id: int) -> bool:
        return self._queue.holds_barrier(checkpoint_id)

    def _notify(self) -> None:
        assert self._connection is not None
        self._connection.ready(self)

    def grant(self, count: int) -> None:
        """I/O thread. The first grant also says that the receiver is there: nothing may be sent before."""
        self._opened = True
        self._credit.grant(count)

    def drain_into(self, out: deque[bytes | memoryview | pa.Buffer]) -> None:
        """Moves what credit allows."""
        if not self._opened:
            return
        turnable = emptied = False
        with self._moving:
            before = self._queue.taken
            for element in self._queue.take(self._credit):
                kind, body = _frame_of(element)
                out.append(encode_header(self.channel, len(memoryview(body)), kind))
                out.append(body)
                turnable = turnable or (isinstance(element, CheckpointBarrier) and element.options.unaligned)
                emptied = self._ends and self._queue.is_empty
        # Looked at afterwards: a producer that filled the channel during the loop sleeps as well.
        if turnable or emptied or self._queue.was_full(self._queue.taken - before):
            self._wake_producer()

    def failed(self) -> None:
        """The connection is lost: the producer looks at :attr:`error`."""
        self._wake_producer()


def _frame_of(element: QueuedElement) -> tuple[FrameKind, pa.Buffer | bytes]:
    if isinstance(element, pa.Buffer):
        return FrameKind.DATA, element
    if isinstance(element, bytes):
        return FrameKind.SCHEMA, element
    return FrameKind.CONTROL, encode_element(element)


class _Connection:
    """One socket: incremental reading by the I/O thread, queued writing, and the channels that use it.

    Whoever has something to send sends it in its own thread when nobody else is sending and the socket takes it: a
    wake-up of the I/O thread for each buffer costs two switches of threads that share one interpreter. What is left
    over, or comes while another thread sends, is the I/O thread's.
    """

    def __init__(self, transport: DataTransport, connection: AnySocket, peer: str) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end_in_silence(connection)
        self.socket = connection
        self.peer = peer
        self.subpartitions: dict[int, RemoteSubpartition] = {}
        self.inputs: dict[int, InputChannel] = {}
        self.error: ChannelLostError | None = None
        self._transport = transport
        self._ready: deque[RemoteSubpartition] = deque()
        self._frames: deque[tuple[int, FrameKind, bytes]] = deque()
        self._out: deque[bytes | memoryview | pa.Buffer] = deque()
        self._header = bytearray(HEADER_BYTES)
        self._header_filled = 0
        self._frame: FrameHeader | None = None
        self._body: pa.Buffer | None = None
        self._body_view = memoryview(b"")
        self._send_lock = threading.Lock()
        self.served = False
        self.watches_write = False

    def ready(self, subpartition: RemoteSubpartition) -> None:
        """A subtask queued something; any thread."""
        self._ready.append(subpartition)
        if not self._send_here():
            self._transport.notify(self)

    def send_frame(self, channel: int, kind: FrameKind, body: bytes) -> None:
        """Queues a frame outside flow control (OPEN, CREDIT, BUFFER_SIZE); any thread."""
        self._frames.append((channel, kind, body))
        if not self._send_here():
            self._transport.notify(self)

    def _send_here(self) -> bool:
        """Sends in the calling thread; False when the I/O thread has to go on (it also meets the error, if any)."""
        # While the socket is full the I/O thread waits for it; a try here would only cost a system call each time.
        if not self.served or self.watches_write or not self._send_lock.acquire(blocking=False):
            return False
        try:
            self._collect()
            self._write()
            return not self._out
        except OSError:
            return False
        finally:
            self._send_lock.release()

    def send(self) -> bool:
        """I/O thread: sends as much as the socket takes; whether something is left. Raises OSError."""
        with self._send_lock:
            self._collect()
            self._write()
            return bool(self._out)

    def _collect(self) -> None:
        while self._frames:
            channel, kind, body = self._frames.popleft()
            self._out.append(encode_header(channel, len(body), kind))
            if body:
                self._out.append(body)
        while self._ready:
            self._ready.popleft().drain_into(self._out)

    def _write(self) -> None:
        while self._out:
            vectors = [memoryview(part) for part in islice(self._out, _MAX_VECTORS)]
            try:
                sent = self.socket.sendmsg(vectors)
            except BlockingIOError:
                return
            self._advance(sent)

    def _advance(self, sent: int) -> None:
        while sent:
            part = memoryview(self._out[0])
            if sent >= part.nbytes:
                sent -= part.nbytes
                self._out.popleft()
            else:
                self._out[0] = part.cast("B")[sent:]
                sent = 0

    def read(self) -> None:
        """Reads until the socket is empty or a fair share was read.

        Raises OSError when the peer is gone, ValueError when it sent what cannot be decoded.
        """
        for _ in range(32):
            try:
                if self._frame is None and not self._read_header():
                    continue
                if self._body_view:
                    count = self.socket.recv_into(self._body_view)
                    if count == 0:
                        raise ConnectionError("the peer closed the connection")
                    self._body_view = self._body_view[count:]
                if not self._body_view:
                    self._dispatch()
            except BlockingIOError:
                return

    def _read_header(self) -> bool:
        count = self.socket.recv_into(memoryview(self._header)[self._header_filled :])
        if count == 0:
            raise ConnectionError("the peer closed the connection")
        self._header_filled += count
        if self._header_filled < HEADER_BYTES:
            return False
        self._header_filled = 0
        self._frame = decode_header(self._header)
        if self._frame.length:
            self._body = pa.allocate_buffer(self._frame.length)
            self._body_view = memoryview(self._body).cast("B")
        return True

    def _dispatch(self) -> None:
        frame, body = self._frame, self._body
        self._frame = self._body = None
        assert frame is not None
        match frame.kind:
            case FrameKind.DATA:
                channel = self.inputs.get(frame.channel)
                if channel is not None and body is not None:
                    channel.put(body)
            case FrameKind.CONTROL:
                channel = self.inputs.get(frame.channel)
                if channel is not None and body is not None:
                    channel.put(decode_element(memoryview(body)))
            case FrameKind.SCHEMA:
                channel = self.inputs.get(frame.channel)
                if channel is not None and body is not None:
                    channel.schema = pa.ipc.read_schema(body)
            case FrameKind.CREDIT:
                subpartition = self.subpartitions.get(frame.channel)
                if subpartition is not None and body is not None:
                    subpartition.grant(decode_credit(memoryview(body)))
                    # The caller sends as soon as all that has arrived is read.
                    self._ready.append(subpartition)
            case FrameKind.BUFFER_SIZE:
                subpartition = self.subpartitions.get(frame.channel)
                if subpartition is not None and body is not None:
                    subpartition.buffer_size.announce(decode_buffer_size(memoryview(body)))
            case FrameKind.OPEN:
                self._transport.channel_opened(self, frame.channel)

    def fail(self, error: BaseException) -> None:
        """Tells every channel on this connection; the subtasks see it when they poll or send."""
        failure = self.error = ChannelLostError(f"connection to worker {self.peer} lost: {error}")
        self.served = False
        for channel in self.inputs.values():
            channel.put(failure)
        for subpartition in self.subpartitions.values():
            subpartition.failed()
        self.inputs.clear()
        self.socket.close()


class DataTransport:
    """Channels of one worker to and from its peers.

    ``register`` announces a receiving channel, ``connect`` opens a sending one; both may come first. ``release``
    forgets a deployment's channels: what arrives for them afterwards is dropped.
    """

    def __init__(self, host: str, secret: str) -> None:
        self._secret = secret
        self._listener = socket.create_server((host, 0), backlog=128)
        self._listener.setblocking(False)
        self.address: Address = (host, self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._wake_receive, self._wake_send = os.pipe()
        os.set_blocking(self._wake_receive, False)
        os.set_blocking(self._wake_send, False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._accept_again_at: float | None = None
        tls = internal_context(secret, "server")
        self._incoming = IncomingHandshakes(self._selector, secret, _PURPOSE, self._welcome, tls)
        self._selector.register(self._wake_receive, selectors.EVENT_READ, self._drain_wake)
        self._connections: set[_Connection] = set()
        self._dialled: dict[Address, _Connection] = {}
        self._dial_lock = threading.Lock()
        self._registered: dict[int, InputChannel] = {}
        self._opened: dict[int, _Connection] = {}
        self._released = -1
        self._channel_lock = threading.Lock()
        self._notified: deque[_Connection] = deque()
        self._tasks: deque[Callable[[], None]] = deque()
        self._sleeping = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="data-io", daemon=True)
        self._thread.start()

    # Any thread.

    def register(self, channel: int, receiver: InputChannel) -> None:
        """The receiver gets what the peer sends on ``channel``, and the peer gets the receiver's credit window."""
        with self._channel_lock:
            self._registered[channel] = receiver
            connection = self._opened.pop(channel, None)
        if connection is not None:
            self._post(lambda: self._bind(connection, channel, receiver))

    def connect(self, peer: Address, channel: int, capacity: int, wake: Callable[[], None]) -> RemoteSubpartition:
        """Opens a sending channel to the worker at ``peer``.

        Raises ChannelLostError when it cannot be reached, AuthenticationError when it is of another session.
        """
        connection = self._dial(peer)
        subpartition = RemoteSubpartition(channel, capacity, wake)
        subpartition.attach(connection)
        self._post(lambda: self._open(connection, channel, subpartition))
        return subpartition

    def release(self, deployment: int) -> None:
        """Forgets the channels of all deployments up to and including this one; they get nothing after this call."""
        with self._channel_lock:
            self._released = max(self._released, deployment)
            self._registered = {c: r for c, r in self._registered.items() if deployment_of(c) > deployment}
            self._opened = {c: r for c, r in self._opened.items() if deployment_of(c) > deployment}
        forgotten = threading.Event()
        self._post(lambda: self._forget(deployment, forgotten))
        # A thread that has ended forgets nothing any more, but puts nothing into a channel either.
        while self._thread.is_alive() and not forgotten.wait(0.1):
            pass

    def close(self) -> None:
        self._closing = True
        self._wake()
        self._thread.join(timeout=5)

    def notify(self, connection: _Connection) -> None:
        """The connection has something to send."""
        self._notified.append(connection)
        if self._sleeping:
            self._wake()

    def _post(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):
            os.write(self._wake_send, b"w")

    def _dial(self, peer: Address) -> _Connection:
        with self._dial_lock:
            connection = self._dialled.get(peer)
            if connection is not None and connection.error is None:
                return connection
            plain = self._dialled_socket(peer)
            connection = _Connection(self, plain, f"{peer[0]}:{peer[1]}")
            self._dialled[peer] = connection
            self._post(lambda: self._add(connection))
            return connection

    def _dialled_socket(self, peer: Address) -> AnySocket:
        try:
            plain = socket.create_connection(peer, timeout=HANDSHAKE_TIMEOUT_S)
            connection: AnySocket = plain
            try:
                connection = secured(plain, internal_context(self._secret, "client"), "client")
                authenticate(connection, self._secret, "client", _PURPOSE)
            except BaseException:
                connection.close()
                raise
        except AuthenticationError:
            raise
        except OSError as error:
            raise ChannelLostError(f"worker {peer[0]}:{peer[1]} cannot be reached: {error}") from error
        return connection

    # I/O thread.

    def channel_opened(self, connection: _Connection, channel: int) -> None:
        """The peer asks for credit on a channel; it gets it as soon as the channel's receiver is registered."""
        with self._channel_lock:
            if deployment_of(channel) <= self._released:
                return
            receiver = self._registered.get(channel)
            if receiver is None:
                self._opened[channel] = connection
                return
        self._bind(connection, channel, receiver)

    @staticmethod
    def _open(connection: _Connection, channel: int, subpartition: RemoteSubpartition) -> None:
        connection.subpartitions[channel] = subpartition
        # Only after the entry above: the answer is the first credit, which may come at once.
        connection.send_frame(channel, FrameKind.OPEN, b"")
        if connection.error is not None:
            subpartition.failed()

    def _bind(self, connection: _Connection, channel: int, receiver: InputChannel) -> None:
        if connection.error is not None:
            receiver.put(connection.error)
            return
        # First of all: the credit below invites the first buffer.
        connection.inputs[channel] = receiver
        receiver.on_credit(lambda count: connection.send_frame(channel, FrameKind.CREDIT, encode_credit(count)))
        connection.send_frame(channel, FrameKind.CREDIT, encode_credit(receiver.credit.window))
        receiver.buffer_size.listen(
            lambda size: connection.send_frame(channel, FrameKind.BUFFER_SIZE, encode_buffer_size(size))
        )

    def _forget(self, deployment: int, forgotten: threading.Event) -> None:
        for connection in self._connections:
            for channels in (connection.inputs, connection.subpartitions):
                for channel in [c for c in channels if deployment_of(c) <= deployment]:
                    del channels[channel]
        forgotten.set()

    def _add(self, connection: _Connection) -> None:
        if connection.socket.fileno() < 0:
            return
        self._connections.add(connection)
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        connection.served = True
        self._flush(connection)
        self._read_what_is_left(connection)

    def _accept(self) -> None:
        try:
            plain, peer = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            # Without descriptors or memory the listener stays readable: do not turn in circles.
            logger.warning("cannot accept a data connection: %s", error)
            self._incoming.drop_oldest("there are no descriptors left")
            self._selector.unregister(self._listener)
            self._accept_again_at = time.monotonic() + ACCEPT_PAUSE_S
            return
        self._incoming.add(plain, f"{peer[0]}:{peer[1]}")

    def _welcome(self, accepted: AnySocket, peer: str) -> None:
        self._add(_Connection(self, accepted, peer))

    def _look_after_the_door(self) -> None:
        self._incoming.expire()
        if self._accept_again_at is not None and self._accept_again_at <= time.monotonic():
            self._accept_again_at = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _drain_wake(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake_receive, 4096)

    def _run(self) -> None:
        while not self._closing:
            while self._tasks:
                self._tasks.popleft()()
            while self._notified:
                self._flush(self._notified.popleft())
            # Before the last look at the queues: whoever adds to them from here on sees it, and writes to the pipe.
            self._sleeping = True
            pause = 1.0 if self._accept_again_at is None else ACCEPT_PAUSE_S
            events = self._selector.select(0 if self._notified or self._tasks else pause)
            self._sleeping = False
            self._look_after_the_door()
            for key, mask in events:
                if isinstance(key.data, _Connection):
                    self._serve(key.data, mask)
                else:
                    key.data()
        while self._tasks:
            self._tasks.popleft()()
        self._incoming.close()
        for connection in list(self._connections):
            connection.socket.close()
        self._connections.clear()
        self._listener.close()
        self._selector.close()
        os.close(self._wake_receive)
        os.close(self._wake_send)

    def _serve(self, connection: _Connection, mask: int) -> None:
        if connection.error is not None:
            return
        try:
            if mask & selectors.EVENT_READ:
                connection.read()
            self._send(connection)
        except (OSError, ValueError) as error:
            self._drop(connection, error)
        else:
            self._read_what_is_left(connection)

    def _read_what_is_left(self, connection: _Connection) -> None:
        """Of a record of TLS that has come as a whole: no selector tells of it again."""
        if isinstance(connection.socket, TlsSocket) and connection.error is None and connection.socket.pending():
            self._tasks.append(lambda: self._serve(connection, selectors.EVENT_READ))

    def _flush(self, connection: _Connection) -> None:
        if connection.error is not None or connection not in self._connections:
            return
        try:
            self._send(connection)
        except OSError as error:
            self._drop(connection, error)

    def _send(self, connection: _Connection) -> None:
        left = connection.send()
        if left != connection.watches_write:
            connection.watches_write = left
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if left else 0)
            self._selector.modify(connection.socket, events, connection)

    def _drop(self, connection: _Connection, error: Exception) -> None:
        self._selector.unregister(connection.socket)
        self._connections.discard(connection)
        with self._dial_lock:
            self._dialled = {a: c for a, c in self._dialled.items() if c is not connection}
        connection.fail(error)
