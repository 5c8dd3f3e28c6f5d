"""The driver's end of the control connections: agents and workers connect, authenticate, and register.

All incoming messages are decoded here. A peer that breaks the protocol loses its connection, and the listener is
notified which message was wrong and how; other peers are not affected. The driver also asks workers for thread dumps,
logs and stack samples.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from ckpt_runtime.failure_report import log_failure, summary_of
from ckpt_runtime.jobmaster.gateway_values import NotReady
from ckpt_runtime.network.agent_messages import (
    FROM_AGENT,
    FROM_UNREGISTERED,
    AgentCommand,
    AgentMessage,
    RegisterAgent,
    RegisterWorker,
    Registration,
)
from ckpt_runtime.network.connections import (
    HANDSHAKE_TIMEOUT_S,
    LENGTH_BYTES,
    ControlConnection,
    MalformedMessageError,
    framed,
    message_length,
)
from ckpt_runtime.network.control_messages import (
    FROM_WORKER,
    RecentLog,
    SampledStacks,
    ThreadDump,
    WorkerAnswer,
    WorkerCommand,
    WorkerMessage,
    WorkerQuestion,
)
from ckpt_runtime.network.framing import PREFACE_BYTES, PROOF_BYTES, Handshake
from ckpt_runtime.network.tls import internal_context

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=Registration)
C = TypeVar("C", bound=AgentCommand | WorkerCommand)

MAX_HANDSHAKES = 256
"""Maximum number of connections that have not registered yet; one more replaces the oldest."""


class Peer(Generic[R, C]):
    """One registered connection. ``slot`` is the id of its slot, which changes when another agent adopts the worker.

    ``last_heard`` is in seconds of the monotonic clock.
    """

    def __init__(self, writer: asyncio.StreamWriter, registration: R) -> None:
        self.registration = registration
        self.slot = registration.slot
        self.last_heard = time.monotonic()
        self.closed = False
        self._writer = writer

    def send(self, command: C) -> None:
        """Queues a command. A command for a closed connection is dropped: the listener is notified of the closing."""
        if not self.closed:
            self._writer.write(framed(command))

    def close(self) -> None:
        """Closes the connection; the listener gets no more calls for it."""
        if not self.closed:
            self.closed = True
            self._writer.close()


class AgentPeer(Peer[RegisterAgent, AgentCommand]):
    """A slot agent."""


class WorkerPeer(Peer[RegisterWorker, WorkerCommand]):
    """A worker process."""


AnyPeer = AgentPeer | WorkerPeer


class PeerListener(Protocol):
    """The owner of the peers: it gets their messages and losses, in order, on the event loop."""

    def peer_registered(self, peer: AnyPeer) -> None:
        """Called before any message of the peer."""

    def peer_message(self, peer: AnyPeer, message: AgentMessage | WorkerMessage) -> None:
        """Raises MalformedMessageError for a message that is not valid in the peer's present state."""

    def peer_lost(self, peer: AnyPeer, reason: str, *, explained: bool) -> None:
        """``explained``: ``reason`` is the cause of the loss; otherwise it only says that the connection ended."""


class ControlEndpoint:
    """Listens for agents and workers."""

    def __init__(self, host: str, secret: str, listener: PeerListener, port: int = 0) -> None:
        """With ``port`` 0 it listens on any free port."""
        self._host = host
        self._port = port
        self._secret = secret
        self._tls = internal_context(secret, "server")
        self._listener = listener
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._handshakes: dict[asyncio.Task[None], None] = {}

    async def start(self) -> int:
        """Returns the port. Raises OSError naming the option if the given one cannot be used."""
        try:
            self._server = await asyncio.start_server(self._accept, self._host, self._port, limit=1 << 20)
        except OSError as error:
            if not self._port:
                raise
            message = f"jobmanager.rpc.port: {self._port} cannot be used at {self._host}: {error.strerror}"
            raise OSError(error.errno, message) from error
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
        if len(self._handshakes) >= MAX_HANDSHAKES:
            # The oldest is dropped: silent connections must not exclude valid peers, which register within
            # milliseconds.
            next(iter(self._handshakes)).cancel()
        self._handshakes[task] = None
        try:
            peer = await self._registered(reader, writer)
            # A registered connection must not be cancelled in favour of a new one.
            self._handshakes.pop(task)
            if peer is not None:
                await self._serve(peer, reader)
        except asyncio.CancelledError:
            pass
        finally:
            self._connections.discard(task)
            self._handshakes.pop(task, None)
            writer.close()

    async def _registered(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> AnyPeer | None:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                if self._tls is not None:
                    await writer.start_tls(self._tls)
                handshake = Handshake(self._secret, "server", ControlConnection.PURPOSE)
                writer.write(handshake.preface())
                peer_preface = await reader.readexactly(PREFACE_BYTES)
                writer.write(handshake.proof(peer_preface))
                handshake.verify(peer_preface, await reader.readexactly(PROOF_BYTES))
                registration = FROM_UNREGISTERED.decode(await _receive(reader))
        except (OSError, EOFError, TimeoutError, MalformedMessageError) as error:
            logger.warning("refused a control connection from %s: %s", writer.get_extra_info("peername"), error)
            return None
        if isinstance(registration, RegisterAgent):
            return AgentPeer(writer, registration)
        return WorkerPeer(writer, registration)

    async def _serve(self, peer: AnyPeer, reader: asyncio.StreamReader) -> None:
        reason, explained = "the connection was closed", False
        try:
            self._listener.peer_registered(peer)
            decoder = FROM_AGENT if isinstance(peer, AgentPeer) else FROM_WORKER
            while not peer.closed:
                body = await _receive(reader)
                if not peer.closed:
                    peer.last_heard = time.monotonic()
                    self._listener.peer_message(peer, decoder.decode(body))
        except EOFError:
            logger.debug("slot %s: a connection was closed", peer.slot)
        except OSError as error:
            reason = str(error) or reason
        except MalformedMessageError as error:
            reason, explained = str(error), True
            logger.warning("slot %s: %s", peer.slot, error)
        except Exception as error:
            reason, explained = f"handling its message failed: {summary_of(error)}", True
            log_failure(logger, logging.ERROR, f"slot {peer.slot}: handling a control message failed", error)
        finally:
            # The listener is notified only of ends that it did not cause by closing the peer itself.
            was_closed, peer.closed = peer.closed, True
            if not was_closed:
                self._listener.peer_lost(peer, reason, explained=explained)


async def _receive(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(message_length(await reader.readexactly(LENGTH_BYTES)))


A = TypeVar("A", ThreadDump, RecentLog, SampledStacks)

ANSWER_TIMEOUT_S = 10.0


class WorkerQuestions:
    """Asks workers for information, and keeps the questions that have no answer yet."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[
            int, tuple[WorkerPeer, type[ThreadDump | RecentLog | SampledStacks], asyncio.Future[WorkerAnswer]]
        ] = {}

    async def ask(
        self,
        peer: WorkerPeer,
        question: Callable[[int], WorkerQuestion],
        answer: type[A],
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> A:
        """``question`` makes the message from its number. Raises NotReady if the worker does not answer or is lost."""
        number = next(self._numbers)
        future: asyncio.Future[WorkerAnswer] = asyncio.get_running_loop().create_future()
        self._open[number] = (peer, answer, future)
        worker = peer.registration.worker
        try:
            peer.send(question(number))
            async with asyncio.timeout(timeout_s):
                given = await future
        except TimeoutError:
            raise NotReady(f"worker {worker} has not answered within {timeout_s:g} s") from None
        finally:
            del self._open[number]
        assert isinstance(given, answer)
        return given

    def answered(self, peer: AnyPeer, answer: WorkerAnswer) -> None:
        """Takes an answer; a late one is dropped. Raises MalformedMessageError if the peer was not asked for it."""
        if answer.question not in self._open:
            return
        asked, expected, future = self._open[answer.question]
        if asked is not peer or not isinstance(answer, expected):
            raise MalformedMessageError(f"the message {type(answer).__name__} does not answer a request to this worker")
        if not future.done():
            future.set_result(answer)

    def lost(self, peer: AnyPeer) -> None:
        """Fails the questions to a lost peer with NotReady."""
        for asked, _, future in self._open.values():
            if asked is peer and not future.done():
                future.set_exception(NotReady(f"worker {asked.registration.worker} was lost"))
