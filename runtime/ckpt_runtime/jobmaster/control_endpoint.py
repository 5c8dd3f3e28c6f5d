"""The driver's end of the control connections: agents and workers dial in, prove the secret, and say who they are."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import orjson

from ckpt_runtime.network.authentication import PREFACE_BYTES, PROOF_BYTES, Handshake
from ckpt_runtime.network.connections import HANDSHAKE_TIMEOUT_S, ControlConnection, encode_message, message_length

logger = logging.getLogger(__name__)

Message = dict[str, Any]

MAX_HANDSHAKES = 256
"""Connections that have not proved the secret yet; one too many takes the place of the oldest."""


class PeerListener(Protocol):
    """Who owns a peer: gets its messages and its end, in order, on the event loop."""

    def peer_message(self, peer: Peer, message: Message) -> None: ...

    def peer_lost(self, peer: Peer, reason: str) -> None: ...


class Peer:
    """One authenticated connection. ``hello`` is its first message; ``last_heard`` is monotonic seconds."""

    def __init__(self, writer: asyncio.StreamWriter, hello: Message) -> None:
        self.hello = hello
        self.last_heard = time.monotonic()
        self.listener: PeerListener | None = None
        self.closed = False
        self._writer = writer

    @property
    def role(self) -> str:
        role: str = self.hello["role"]
        return role

    def send(self, message: Message) -> None:
        """Queues a message; silently dropped on a closed connection, whose end the listener learns of anyway."""
        if not self.closed:
            self._writer.write(encode_message(message))

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._writer.close()


class ControlEndpoint:
    """Listens for agents and workers. ``welcome(peer)`` is called for each one, before its further messages."""

    def __init__(self, host: str, secret: str, welcome: Callable[[Peer], None]) -> None:
        self._host = host
        self._secret = secret
        self._welcome = welcome
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._strangers: dict[asyncio.Task[None], None] = {}

    async def start(self) -> int:
        """Returns the port."""
        self._server = await asyncio.start_server(self._accept, self._host, 0, limit=1 << 20)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        if len(self._strangers) >= MAX_HANDSHAKES:
            next(iter(self._strangers)).cancel()
        self._strangers[task] = None
        try:
            await self._serve(reader, writer)
        except asyncio.CancelledError:
            pass
        finally:
            self._connections.discard(task)
            self._strangers.pop(task, None)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await self._authenticate(reader, writer)
                peer = Peer(writer, await _receive(reader))
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            logger.warning("refused a control connection from %s: %s", writer.get_extra_info("peername"), error)
            return
        task = asyncio.current_task()
        assert task is not None
        self._strangers.pop(task, None)
        self._welcome(peer)
        reason = "the connection was closed"
        try:
            while True:
                message = await _receive(reader)
                peer.last_heard = time.monotonic()
                if peer.listener is not None:
                    peer.listener.peer_message(peer, message)
        except EOFError:
            logger.debug("a %s closed its connection", peer.role)
        except OSError as error:
            reason = str(error) or reason
        except Exception as error:
            logger.exception("a control message broke its handler")
            reason = f"{type(error).__name__}: {error}"
        finally:
            was_closed, peer.closed = peer.closed, True
            if peer.listener is not None and not was_closed:
                peer.listener.peer_lost(peer, reason)

    async def _authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handshake = Handshake(self._secret, "server", ControlConnection.PURPOSE)
        writer.write(handshake.preface())
        peer_preface = await reader.readexactly(PREFACE_BYTES)
        writer.write(handshake.proof(peer_preface))
        handshake.verify(peer_preface, await reader.readexactly(PROOF_BYTES))


async def _receive(reader: asyncio.StreamReader) -> Message:
    length = message_length(await reader.readexactly(4))
    message: Message = orjson.loads(await reader.readexactly(length))
    return message
