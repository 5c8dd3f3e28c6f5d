"""A real slot agent in a thread, at a real control endpoint; the driver's side is the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from ckpt_runtime.jobmaster.control_endpoint import AgentPeer, AnyPeer, ControlEndpoint, PeerListener, WorkerPeer
from ckpt_runtime.network.agent_messages import (
    AgentCommand,
    AgentHeartbeat,
    AgentMessage,
    Ping,
    SpawnWorker,
    WorkerExited,
)
from ckpt_runtime.network.control_messages import WorkerMessage
from ckpt_runtime.spark.slot_agent import AgentParameters, SlotAgent
from ckpt_runtime.spark.worker_processes import WorkerStarter
from tests.support.patience import patient

TIMEOUT_S = patient(60)


class SlotListener(PeerListener):
    """The driver's side of slots: their agents and workers as they register, and what the agents say.

    ``agent`` is the one that registered last, ``agents`` are all of them.
    """

    def __init__(self) -> None:
        self.agent: AgentPeer | None = None
        self.agents: list[AgentPeer] = []
        self.workers: dict[str, WorkerPeer] = {}
        self.exits: asyncio.Queue[WorkerExited] = asyncio.Queue()
        self.heartbeats = 0
        self.progress: dict[str, int] = {}
        self.lost: list[AnyPeer] = []
        self.registered = asyncio.Event()

    def peer_registered(self, peer: AnyPeer) -> None:
        if isinstance(peer, AgentPeer):
            self.agent = peer
            self.agents.append(peer)
            self.registered.set()
        else:
            self.workers[peer.registration.worker] = peer

    def peer_message(self, peer: AnyPeer, message: AgentMessage | WorkerMessage) -> None:
        if isinstance(message, WorkerExited):
            self.exits.put_nowait(message)
        elif isinstance(message, AgentHeartbeat):
            self.heartbeats += 1
            self.progress = message.progress

    def peer_lost(self, peer: AnyPeer, reason: str, *, explained: bool) -> None:
        self.lost.append(peer)

    def send(self, command: AgentCommand) -> None:
        assert self.agent is not None
        self.agent.send(command)

    async def exited(self) -> WorkerExited:
        """The next exit that the agent reports."""
        return await asyncio.wait_for(self.exits.get(), TIMEOUT_S)

    async def started(self, *names: str) -> list[int]:
        """Has workers started; returns their process ids once they have registered."""
        for name in names:
            self.send(SpawnWorker(name))
        await until(lambda: all(name in self.workers for name in names))
        return [self.workers[name].registration.process.pid for name in names]

    async def code_of(self, name: str) -> int | None:
        """The exit code that the agent reports next, which is this worker's."""
        exited = await self.exited()
        assert exited.worker == name
        return exited.code

    async def answers(self, *starting: str) -> bool:
        """Whether the agent answers a ping; ``progress`` is what it says of these workers."""
        before = self.heartbeats
        self.send(Ping(starting))
        await until(lambda: self.heartbeats > before)
        return True


@asynccontextmanager
async def running_agent(listener: SlotListener, starter: WorkerStarter | None = None) -> AsyncIterator[SlotAgent]:
    """Yields the agent once it has registered, and waits in the end until it is gone; the test makes it end."""
    endpoint = ControlEndpoint("127.0.0.1", "secret", listener)
    port = await endpoint.start()
    agent = SlotAgent(AgentParameters("127.0.0.1", port, "secret", "3-1"), starter)
    running = asyncio.get_running_loop().run_in_executor(None, agent.run)
    try:
        await asyncio.wait_for(listener.registered.wait(), TIMEOUT_S)
        yield agent
        await asyncio.wait_for(running, TIMEOUT_S)
    finally:
        await endpoint.stop()


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that another process does."""
    deadline = asyncio.get_running_loop().time() + TIMEOUT_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it never happened"
        await asyncio.sleep(0.005)
