"""One data socket between two workers: frames in and out, and the channels that share it.

Bodies are received straight into Arrow buffers, so that a record batch is read without a copy, and sent by
scatter-gather. The transport (``transport``) watches the socket and knows what a channel belongs to.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from itertools import islice
from typing import Protocol

import pyarrow as pa

from ckpt_runtime.network.connections import ChannelLostError, end_in_silence
from ckpt_runtime.network.elements import decode_element
from ckpt_runtime.network.framing import (
    HEADER_BYTES,
    FrameHeader,
    FrameKind,
    decode_buffer_size,
    decode_credit,
    decode_header,
    encode_header,
)
from ckpt_runtime.network.gate import InputChannel
from ckpt_runtime.network.remote_subpartition import RemoteSubpartition
from ckpt_runtime.network.tls import AnySocket

# Far below the system's limit (IOV_MAX), and more than a socket accepts at once.
_MAX_VECTORS = 64


class Exchange(Protocol):
    """The services that a connection needs from the transport."""

    def notify(self, connection: DataConnection) -> None:
        """The connection has something to send. Called by any thread."""
        ...

    def channel_opened(self, connection: DataConnection, channel: int) -> None:
        """The peer requests credit on a channel. Called by the I/O thread."""
        ...


class DataConnection:
    """One socket: incremental reading by the I/O thread, queued writing, and the channels that use it.

    A thread that queues data sends it itself if no other thread is sending and the socket accepts it: waking the I/O
    thread for each buffer would cost two switches between threads that share one interpreter. The I/O thread sends the
    data that remains and the data that is queued while another thread sends.
    """

    def __init__(self, transport: Exchange, connection: AnySocket, peer: str) -> None:
        connection.setblocking(False)
        # Credit and barriers are small and urgent: they must not wait for further data.
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
        # No thread sends before the I/O thread watches the socket: otherwise the rest that a full socket does not take
        # would never be sent.
        self.served = False
        self.watches_write = False

    def ready(self, subpartition: RemoteSubpartition) -> None:
        """A subtask has queued something. Called by any thread."""
        # Queued before the lock is tried: the sending thread sends this as well, or the I/O thread is notified below.
        self._ready.append(subpartition)
        if not self._send_here():
            self._transport.notify(self)

    def send_frame(self, channel: int, kind: FrameKind, body: bytes) -> None:
        """Queues a frame outside flow control (OPEN, CREDIT, BUFFER_SIZE). Called by any thread."""
        self._frames.append((channel, kind, body))
        if not self._send_here():
            self._transport.notify(self)

    def _send_here(self) -> bool:
        """Sends in the calling thread; False when the I/O thread has to continue (it also gets the error, if any)."""
        # While the socket is full the I/O thread waits for it; an attempt here would only cost a system call.
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
        """I/O thread: sends as much as the socket accepts; returns whether something is left. Raises OSError."""
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

        Raises OSError when the peer has ended, ValueError when it sent data that cannot be decoded.
        """
        # One busy peer must not keep the thread from serving the others.
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
                # Unknown channels belong to a released deployment: data that arrives for them is dropped.
                channel = self.inputs.get(frame.channel)
                if channel is not None and body is not None:
                    channel.put_encoded(body)
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
                    # The caller sends as soon as everything that has arrived is read.
                    self._ready.append(subpartition)
            case FrameKind.BUFFER_SIZE:
                subpartition = self.subpartitions.get(frame.channel)
                if subpartition is not None and body is not None:
                    subpartition.buffer_size.announce(decode_buffer_size(memoryview(body)))
            case FrameKind.OPEN:
                self._transport.channel_opened(self, frame.channel)

    def fail(self, error: BaseException) -> None:
        """Reports the error to every channel on this connection; the subtasks see it when they poll or send."""
        # Set before any thread is woken, since a woken thread reads it.
        failure = self.error = ChannelLostError(f"connection to worker {self.peer} lost: {error}")
        self.served = False
        for channel in self.inputs.values():
            channel.put(failure)
        for subpartition in self.subpartitions.values():
            subpartition.failed()
        self.inputs.clear()
        self.socket.close()
