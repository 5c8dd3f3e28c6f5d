"""Channels between workers: one listening socket and one I/O thread per worker, and the mapping of channels to sockets.

A worker connects to each peer that it sends to. On that connection data flows in one direction, credit and requested
buffer sizes in the other; all channels from one worker to another share it. The thread that deploys opens connections;
the I/O thread handles the handshakes of connections that peers open, and does not wait for any of them.

An unauthenticated connection costs a socket and some bytes, for some seconds at most. Their number is bounded; a new
one replaces the oldest, since a peer that knows the secret finishes its handshake in milliseconds.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from ckpt_runtime.network.connections import HANDSHAKE_TIMEOUT_S, ChannelLostError, authenticate
from ckpt_runtime.network.data_connection import DataConnection
from ckpt_runtime.network.framing import (
    PREFACE_BYTES,
    PROOF_BYTES,
    AuthenticationError,
    FrameKind,
    Handshake,
    deployment_of,
    encode_buffer_size,
    encode_credit,
)
from ckpt_runtime.network.gate import InputChannel
from ckpt_runtime.network.remote_subpartition import RemoteSubpartition
from ckpt_runtime.network.tls import AnySocket, TlsSocket, internal_context, secured

logger = logging.getLogger(__name__)


MAX_HANDSHAKES = 128


@dataclass(eq=False, slots=True)
class _Handshaking:
    socket: AnySocket
    name: str
    handshake: Handshake
    deadline: float
    received: bytearray = field(default_factory=bytearray)
    preface: bytes = b""
    greeted: bool = False


class IncomingHandshakes:
    """``accepted`` gets each socket whose peer has proved the secret, unregistered. One thread uses this object."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        secret: str,
        purpose: str,
        accepted: Callable[[AnySocket, str], None],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._selector = selector
        self._secret = secret
        self._purpose = purpose
        self._accepted = accepted
        self._tls = tls
        self._handshaking: dict[_Handshaking, None] = {}

    def add(self, connection: socket.socket, name: str) -> None:
        """Registers a connection: its owner calls the selector's data, without arguments, when it is readable."""
        if len(self._handshaking) >= MAX_HANDSHAKES:
            self.drop_oldest("there are too many")
        connection.setblocking(False)
        handshake = Handshake(self._secret, "server", self._purpose)
        guest: AnySocket = connection if self._tls is None else TlsSocket(connection, self._tls, "server")
        peer = _Handshaking(guest, name, handshake, time.monotonic() + HANDSHAKE_TIMEOUT_S)
        self._handshaking[peer] = None
        self._selector.register(guest, selectors.EVENT_READ, partial(self._serve, peer))
        self._attempt(peer, lambda: self._handshake(peer))

    def expire(self) -> None:
        """Drops connections whose time for the handshake is over."""
        now = time.monotonic()
        for peer in [known for known in self._handshaking if known.deadline < now]:
            self._drop(peer, "the handshake took too long")

    def drop_oldest(self, why: str) -> None:
        """Drops the oldest connection, if any, to make room for another one."""
        peer = next(iter(self._handshaking), None)
        if peer is not None:
            self._drop(peer, why)

    def close(self) -> None:
        for peer in list(self._handshaking):
            self._drop(peer, "the worker ends")

    def _serve(self, peer: _Handshaking) -> None:
        # The selector does not report the rest of a TLS record a second time.
        while peer in self._handshaking and self._attempt(peer, lambda: self._advance(peer)):
            pass

    def _attempt(self, peer: _Handshaking, step: Callable[[], None]) -> bool:
        """Runs a step; returns whether another one may be possible at once."""
        try:
            step()
        except BlockingIOError:
            return False
        except OSError as error:  # AuthenticationError is one
            self._drop(peer, str(error))
            return False
        return True

    def _advance(self, peer: _Handshaking) -> None:
        if peer.greeted:
            self._read(peer)
        else:
            self._handshake(peer)

    def _handshake(self, peer: _Handshaking) -> None:
        if isinstance(peer.socket, TlsSocket):
            peer.socket.do_handshake()
        peer.greeted = True
        _send(peer.socket, peer.handshake.preface())

    def _read(self, peer: _Handshaking) -> None:
        wanted = PROOF_BYTES if peer.preface else PREFACE_BYTES
        data = peer.socket.recv(wanted - len(peer.received))
        if not data:
            raise ConnectionError("the peer closed the connection")
        peer.received += data
        if len(peer.received) < wanted:
            return
        received = bytes(peer.received)
        peer.received.clear()
        if not peer.preface:
            peer.preface = received
            _send(peer.socket, peer.handshake.proof(received))
            return
        peer.handshake.verify(peer.preface, received)
        # Its new owner registers the socket again, perhaps with this selector.
        self._forget(peer)
        self._accepted(peer.socket, peer.name)

    def _forget(self, peer: _Handshaking) -> None:
        del self._handshaking[peer]
        self._selector.unregister(peer.socket)

    def _drop(self, peer: _Handshaking, why: str) -> None:
        logger.warning("refused a data connection from %s: %s", peer.name, why)
        self._forget(peer)
        peer.socket.close()


def _send(connection: AnySocket, content: bytes) -> None:
    """Sends a few bytes, which fit into the empty buffer of a new socket."""
    if connection.send(content) < len(content):
        raise ConnectionError("the peer takes no bytes")


_PURPOSE = "data"
ACCEPT_PAUSE_S = 0.1
"""Pause before a process that ran out of descriptors accepts connections again."""
Address = tuple[str, int]


def _listening(host: str, ports: tuple[int, int] | None) -> socket.socket:
    if ports is None:
        return socket.create_server((host, 0), backlog=128)
    first, last = ports
    for port in range(first, last + 1):
        try:
            return socket.create_server((host, port), backlog=128)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(
        errno.EADDRINUSE,
        f"no port from {first} to {last} is free on {host}: set taskmanager.data.port-count to at least three for "
        "each slot of a host",
    )


class DataTransport:
    """Channels of one worker to and from its peers.

    ``register`` announces a receiving channel, ``connect`` opens a sending one; in either order. ``release``
    forgets a deployment's channels: data that arrives for them afterwards is dropped.
    """

    def __init__(self, host: str, secret: str, ports: tuple[int, int] | None = None) -> None:
        """Listens at the first free port of ``ports`` (first, last), or at any port. Raises OSError if none is free."""
        self._secret = secret
        self._listener = _listening(host, ports)
        self._listener.setblocking(False)
        self.address: Address = (host, self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._wake_receive, self._wake_send = os.pipe()
        os.set_blocking(self._wake_receive, False)
        os.set_blocking(self._wake_send, False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._accept_again_at: float | None = None
        tls = internal_context(secret, "server")
        self._incoming = IncomingHandshakes(
            self._selector,
            secret,
            _PURPOSE,
            lambda accepted, peer: self._add(DataConnection(self, accepted, peer)),
            tls,
        )
        self._selector.register(self._wake_receive, selectors.EVENT_READ, self._drain_wake)
        self._connections: set[DataConnection] = set()
        self._dialled: dict[Address, DataConnection] = {}
        self._dial_lock = threading.Lock()
        self._registered: dict[int, InputChannel] = {}
        self._opened: dict[int, DataConnection] = {}
        self._released = -1
        self._channel_lock = threading.Lock()
        self._notified: deque[DataConnection] = deque()
        self._tasks: deque[Callable[[], None]] = deque()
        self._sleeping = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="data-io", daemon=True)
        self._thread.start()

    # Any thread.

    def register(self, channel: int, receiver: InputChannel) -> None:
        """Binds the receiver to ``channel``: it gets the peer's data, and the peer gets its credit window."""
        with self._channel_lock:
            # Both under one lock, so that the peer's OPEN is handled before or after both steps, never in between.
            self._registered[channel] = receiver
            connection = self._opened.pop(channel, None)
        if connection is not None:
            self._post(lambda: self._bind(connection, channel, receiver))

    def connect(self, peer: Address, channel: int, capacity: int, wake: Callable[[], None]) -> RemoteSubpartition:
        """Opens a sending channel to the worker at ``peer``.

        Raises ChannelLostError when it cannot be reached, AuthenticationError when it belongs to another session.
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
        # A thread that has ended no longer removes channels, but adds no data to them either.
        while self._thread.is_alive() and not forgotten.wait(0.1):
            pass

    def close(self) -> None:
        self._closing = True
        self._wake()
        self._thread.join(timeout=5)

    def notify(self, connection: DataConnection) -> None:
        """Makes the I/O thread send the queue of the connection."""
        self._notified.append(connection)
        if self._sleeping:
            self._wake()

    def _post(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):
            # An error does no harm: a full pipe wakes the thread as well, and a closed one means that it has ended.
            os.write(self._wake_send, b"w")

    def _dial(self, peer: Address) -> DataConnection:
        with self._dial_lock:
            # The lock is held while dialling: subtasks that are deployed at once share one connection to a peer.
            connection = self._dialled.get(peer)
            if connection is not None and connection.error is None:
                return connection
            plain = self._dialled_socket(peer)
            connection = DataConnection(self, plain, f"{peer[0]}:{peer[1]}")
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

    def channel_opened(self, connection: DataConnection, channel: int) -> None:
        """The peer requests credit on a channel; it gets credit as soon as the channel's receiver is registered."""
        with self._channel_lock:
            if deployment_of(channel) <= self._released:
                return
            receiver = self._registered.get(channel)
            if receiver is None:
                self._opened[channel] = connection
                return
        self._bind(connection, channel, receiver)

    @staticmethod
    def _open(connection: DataConnection, channel: int, subpartition: RemoteSubpartition) -> None:
        connection.subpartitions[channel] = subpartition
        # Only after the entry above: the answer is the first credit, which may arrive at once.
        connection.send_frame(channel, FrameKind.OPEN, b"")
        if connection.error is not None:
            subpartition.failed()

    def _bind(self, connection: DataConnection, channel: int, receiver: InputChannel) -> None:
        if connection.error is not None:
            receiver.put(connection.error)
            return
        # Set first: the credit below lets the peer send the first buffer.
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

    def _add(self, connection: DataConnection) -> None:
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
            # Without descriptors or memory the listener stays readable: avoid a busy loop.
            logger.warning("cannot accept a data connection: %s", error)
            self._incoming.drop_oldest("there are no descriptors left")
            self._selector.unregister(self._listener)
            self._accept_again_at = time.monotonic() + ACCEPT_PAUSE_S
            return
        self._incoming.add(plain, f"{peer[0]}:{peer[1]}")

    def _drain_wake(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake_receive, 4096)

    def _run(self) -> None:
        while not self._closing:
            while self._tasks:
                self._tasks.popleft()()
            while self._notified:
                self._flush(self._notified.popleft())
            # Set before the last look at the queues: a thread that adds to them from here on writes to the pipe.
            self._sleeping = True
            pause = 1.0 if self._accept_again_at is None else ACCEPT_PAUSE_S
            events = self._selector.select(0 if self._notified or self._tasks else pause)
            self._sleeping = False
            self._incoming.expire()
            if self._accept_again_at is not None and self._accept_again_at <= time.monotonic():
                self._accept_again_at = None
                self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            for key, mask in events:
                if isinstance(key.data, DataConnection):
                    self._serve(key.data, mask)
                else:
                    key.data()
        # Once more: the thread that posted the last task (a release) may be waiting for it.
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

    def _serve(self, connection: DataConnection, mask: int) -> None:
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

    def _read_what_is_left(self, connection: DataConnection) -> None:
        """Reads the rest of a TLS record that has arrived as a whole: the selector does not report it again."""
        if isinstance(connection.socket, TlsSocket) and connection.error is None and connection.socket.pending():
            self._tasks.append(lambda: self._serve(connection, selectors.EVENT_READ))

    def _flush(self, connection: DataConnection) -> None:
        if connection.error is not None or connection not in self._connections:
            return
        try:
            self._send(connection)
        except OSError as error:
            self._drop(connection, error)

    def _send(self, connection: DataConnection) -> None:
        left = connection.send()
        if left != connection.watches_write:
            connection.watches_write = left
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if left else 0)
            self._selector.modify(connection.socket, events, connection)

    def _drop(self, connection: DataConnection, error: Exception) -> None:
        # Before the socket is closed: a closed one has no descriptor that could be unregistered.
        self._selector.unregister(connection.socket)
        self._connections.discard(connection)
        with self._dial_lock:
            self._dialled = {a: c for a, c in self._dialled.items() if c is not connection}
        connection.fail(error)
