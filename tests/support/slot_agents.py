"""A real slot agent in a thread, at a real control endpoint; the driver's side is the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from ckpt_runtime.jobmaster.control_endpoint import ControlEndpoint, Peer
from ckpt_runtime.spark.slot_agent import AgentParameters, SlotAgent
from ckpt_runtime.spark.worker_processes import WorkerStarter

TIMEOUT_S = 60


@asynccontextmanager
async def running_agent(
    welcome: Callable[[Peer], None], starter: WorkerStarter | None = None
) -> AsyncIterator[SlotAgent]:
    """Gives the agent once it has connected, and waits in the end until it is gone: the test tells it to go."""
    connected = asyncio.Event()

    def welcome_first(peer: Peer) -> None:
        welcome(peer)
        connected.set()

    endpoint = ControlEndpoint("127.0.0.1", "secret", welcome_first)
    port = await endpoint.start()
    agent = SlotAgent(AgentParameters("127.0.0.1", port, "secret", 3), 1, starter)
    running = asyncio.get_running_loop().run_in_executor(None, agent.run)
    try:
        await asyncio.wait_for(connected.wait(), TIMEOUT_S)
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
