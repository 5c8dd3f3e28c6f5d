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
