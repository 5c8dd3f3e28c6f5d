"""Blocking helpers on one socket: exact reads, the handshake, and the control messages.

Each receiver uses the :class:`MessageDecoder` of its direction: a message that does not belong to that direction or has
another shape raises a :class:`MalformedMessageError`, which names the message and the fault. All other code gets typed
messages only.

The wire form is MessagePack. It carries the archive of a program and the inline state of an acknowledgement as bytes,
which JSON would need in base64: 20 MB are encoded in 2 ms instead of 29. An acknowledgement with 3000 files takes
equally long in both forms (2 ms to encode, 7 ms to decode), and is a quarter smaller in MessagePack.
"""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from contextlib import suppress
from typing import Any, Generic, TypeVar, get_args

import msgspec
from msgspec import Struct

from ckpt_runtime.failure_report import printable
from ckpt_runtime.graph.schema import DocumentError, malformed
from ckpt_runtime.network.framing import PREFACE_BYTES, PROOF_BYTES, AuthenticationError, Handshake
from ckpt_runtime.network.tls import AnySocket, TlsSocket, internal_context, secured

M = TypeVar("M")


_MAX_FAULT_CHARS = 400


class Message(Struct, frozen=True, tag=True, tag_field="type"):
    """Each message names its type on the wire. Receivers ignore unknown fields."""


class MalformedMessageError(ValueError):
    """A peer sent a message that is invalid, or not allowed in its direction or state. The text names the connection
    and the reason.
    """


class MessageDecoder(Generic[M]):
    """Decodes and validates messages from one kind of ``sender``; ``messages`` is the union of their types."""

    def __init__(self, sender: str, messages: Any) -> None:
        self._sender = sender
        self._names = frozenset(kind.__name__ for kind in get_args(messages))
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(messages)

    def decode(self, body: bytes) -> M:
        """The message in ``body``. Raises MalformedMessageError."""
        try:
            with malformed():
                return self._decoder.decode(body)
        except DocumentError as error:
            raise MalformedMessageError(self._described(body, error)) from error

    def _described(self, body: bytes, error: DocumentError) -> str:
        fault = printable(str(error), _MAX_FAULT_CHARS)
        try:
            with malformed():
                name = _TAG.decode(body).type
        except DocumentError:
            return f"{self._sender} sent bytes that are not a message: {fault}"
        if name in self._names:
            return f"the message {name} of {self._sender} is malformed: {fault}"
        return f"{self._sender} may not send message {printable(name, 100)!r} here"


class _Tag(Struct):
    type: str


_TAG = msgspec.msgpack.Decoder(_Tag)
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """The wire form. Raises :class:`DocumentError` if there is none: invalid Unicode, an integer beyond 64 bits."""
    with malformed():
        return _ENCODER.encode(message)


HANDSHAKE_TIMEOUT_S = 30.0
"""This is generous because a machine may stall for seconds, and a lost connection restarts jobs."""
SILENCE_S = 60
"""Time without any acknowledgement from a peer's machine until the connection is lost; above the default heartbeat
timeout."""
# A deployment's message is the largest: it may carry the program's archive.
MAX_MESSAGE_BYTES = 256 << 20
_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size


class ChannelLostError(ConnectionError):
    """The connection to another worker is lost, usually because that worker has ended."""


def receive_exactly(connection: AnySocket, count: int) -> bytes:
    """Receives ``count`` bytes. Raises ConnectionError when the peer closes first."""
    content = bytearray(count)
    view = memoryview(content)
    while view:
        received = connection.recv_into(view)
        if received == 0:
            raise ConnectionError("the peer closed the connection")
        view = view[received:]
    return bytes(content)


def end_in_silence(connection: AnySocket) -> None:
    """Makes the kernel end the connection when nothing has arrived from the peer for :data:`SILENCE_S`.

    Lost packets alone cause no error: by default, the kernel retransmits them for a quarter of an hour, and an idle
    connection stays open for ever. Only Linux can set this time; other systems use their own default.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    times = {"TCP_USER_TIMEOUT": SILENCE_S * 1000, "TCP_KEEPIDLE": SILENCE_S // 3, "TCP_KEEPINTVL": SILENCE_S // 6}
    for name, value in times.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def authenticate(connection: AnySocket, secret: str, role: str, purpose: str) -> None:
    """Runs the handshake on a blocking socket. Raises AuthenticationError, TimeoutError or ConnectionError."""
    connection.settimeout(HANDSHAKE_TIMEOUT_S)
    handshake = Handshake(secret, role, purpose)
    try:
        connection.sendall(handshake.preface())
        peer_preface = receive_exactly(connection, PREFACE_BYTES)
        connection.sendall(handshake.proof(peer_preface))
        handshake.verify(peer_preface, receive_exactly(connection, PROOF_BYTES))
    except AuthenticationError:
        raise
    except (ConnectionError, ssl.SSLError) as error:
        if not isinstance(connection, TlsSocket):
            raise
        # With TLS 1.3, a refusal of the client's certificate is reported at this point, if at all.
        reason = "it may have rejected this side's certificate"
        raise AuthenticationError(f"no TLS connection (security.ssl.internal), {reason}: {error}") from error
    connection.settimeout(None)


def framed(message: Message) -> bytes:
    """A control message with its length prefix. Raises ValueError if it cannot be encoded or is too large."""
    body = encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"control message of {len(body)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    return _LENGTH.pack(len(body)) + body


def message_length(prefix: bytes) -> int:
    """The body length in a prefix. Raises MalformedMessageError above MAX_MESSAGE_BYTES."""
    length: int = _LENGTH.unpack(prefix)[0]
    if length > MAX_MESSAGE_BYTES:
        raise MalformedMessageError(
            f"a message of {length} bytes was announced; at most {MAX_MESSAGE_BYTES} are allowed"
        )
    return length


class ControlConnection:
    """The blocking end of a control connection to the driver, held by slot agents and workers.

    Any thread may send; one thread receives.
    """

    PURPOSE = "control"

    def __init__(self, connection: AnySocket) -> None:
        self._connection = connection
        self._send_lock = threading.Lock()

    @classmethod
    def dial(cls, address: tuple[str, int], secret: str) -> ControlConnection:
        """Connects and authenticates. Raises OSError (AuthenticationError is one)."""
        plain = socket.create_connection(address, timeout=HANDSHAKE_TIMEOUT_S)
        connection: AnySocket = plain
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = secured(plain, internal_context(secret, "client"), "client")
            authenticate(connection, secret, "client", cls.PURPOSE)
        except BaseException:
            connection.close()
            raise
        return cls(connection)

    @property
    def local_host(self) -> str:
        """The address of this host on the network interface to the driver; peers can reach the host there."""
        host: str = self._connection.getsockname()[0]
        return host

    def send(self, message: Message) -> None:
        """Sends a message. Raises OSError when the driver has ended, ValueError as :func:`framed`."""
        content = framed(message)
        with self._send_lock:
            self._connection.sendall(content)

    def receive(self, decoder: MessageDecoder[M]) -> M:
        """Blocks for the next message. Raises ConnectionError when the driver has ended, MalformedMessageError."""
        length = message_length(receive_exactly(self._connection, LENGTH_BYTES))
        return decoder.decode(receive_exactly(self._connection, length))

    def close(self) -> None:
        """Closes the connection and wakes a thread blocked in :meth:`receive`."""
        with suppress(OSError):
            # Closing alone does not wake a thread that reads from this descriptor.
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
