"""Handshakes of incoming connections, on the owner's I/O thread: no thread waits for an unauthenticated peer.

An unauthenticated connection costs a socket and some bytes, for some seconds at most. Their number is bounded; a new
one replaces the oldest, since a peer that knows the secret finishes its handshake in milliseconds.
"""

from __future__ import annotations

import logging
import selectors
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ckpt_runtime.network.authentication import PREFACE_BYTES, PROOF_BYTES, Handshake
from ckpt_runtime.network.connections import HANDSHAKE_TIMEOUT_S
from ckpt_runtime.network.tls import AnySocket, TlsSocket

logger = logging.getLogger(__name__)

MAX_HANDSHAKES = 128


@dataclass(eq=False, slots=True)
class _Stranger:
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
        self._strangers: dict[_Stranger, None] = {}

    def add(self, connection: socket.socket, name: str) -> None:
        """Registers a connection: its owner calls the selector's data, without arguments, when it is readable."""
        if len(self._strangers) >= MAX_HANDSHAKES:
            self.drop_oldest("there are too many")
        connection.setblocking(False)
        handshake = Handshake(self._secret, "server", self._purpose)
        guest: AnySocket = connection if self._tls is None else TlsSocket(connection, self._tls, "server")
        stranger = _Stranger(guest, name, handshake, time.monotonic() + HANDSHAKE_TIMEOUT_S)
        self._strangers[stranger] = None
        self._selector.register(guest, selectors.EVENT_READ, partial(self._serve, stranger))
        self._attempt(stranger, lambda: self._greet(stranger))

    def expire(self) -> None:
        """Drops connections whose time for the handshake is over."""
        now = time.monotonic()
        for stranger in [known for known in self._strangers if known.deadline < now]:
            self._drop(stranger, "the handshake took too long")

    def drop_oldest(self, why: str) -> None:
        """Drops the oldest connection, if any, to make room for another one."""
        stranger = next(iter(self._strangers), None)
        if stranger is not None:
            self._drop(stranger, why)

    def close(self) -> None:
        for stranger in list(self._strangers):
            self._drop(stranger, "the worker ends")

    def _serve(self, stranger: _Stranger) -> None:
        # The selector does not report the rest of a TLS record a second time.
        while stranger in self._strangers and self._attempt(stranger, lambda: self._advance(stranger)):
            pass

    def _attempt(self, stranger: _Stranger, step: Callable[[], None]) -> bool:
        """Runs a step; returns whether another one may be possible at once."""
        try:
            step()
        except BlockingIOError:
            return False
        except OSError as error:  # AuthenticationError is one
            self._drop(stranger, str(error))
            return False
        return True

    def _advance(self, stranger: _Stranger) -> None:
        if stranger.greeted:
            self._read(stranger)
        else:
            self._greet(stranger)

    def _greet(self, stranger: _Stranger) -> None:
        if isinstance(stranger.socket, TlsSocket):
            stranger.socket.do_handshake()
        stranger.greeted = True
        _send(stranger.socket, stranger.handshake.preface())

    def _read(self, stranger: _Stranger) -> None:
        wanted = PROOF_BYTES if stranger.preface else PREFACE_BYTES
        data = stranger.socket.recv(wanted - len(stranger.received))
        if not data:
            raise ConnectionError("the peer closed the connection")
        stranger.received += data
        if len(stranger.received) < wanted:
            return
        received = bytes(stranger.received)
        stranger.received.clear()
        if not stranger.preface:
            stranger.preface = received
            _send(stranger.socket, stranger.handshake.proof(received))
            return
        stranger.handshake.verify(stranger.preface, received)
        # Its new owner registers the socket again, perhaps with this selector.
        self._forget(stranger)
        self._accepted(stranger.socket, stranger.name)

    def _forget(self, stranger: _Stranger) -> None:
        del self._strangers[stranger]
        self._selector.unregister(stranger.socket)

    def _drop(self, stranger: _Stranger, why: str) -> None:
        logger.warning("refused a data connection from %s: %s", stranger.name, why)
        self._forget(stranger)
        stranger.socket.close()


def _send(connection: AnySocket, content: bytes) -> None:
    """Sends a few bytes, which fit into the empty buffer of a new socket."""
    if connection.send(content) < len(content):
        raise ConnectionError("the peer takes no bytes")
