"""A slot pool whose provider, agents and workers are played by hand."""

from __future__ import annotations

import asyncio
import time
from asyncio import Task
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from ckpt_runtime.jobmaster.control_endpoint import AgentPeer, WorkerPeer
from ckpt_runtime.jobmaster.slot_pool import SlotPool
from ckpt_runtime.jobmaster.slots import Slot, SlotEnded, SlotTimes, Worker
from ckpt_runtime.network.agent_messages import (
    AgentCommand,
    ProcessIdentity,
    RegisterAgent,
    RegisterWorker,
    ShutdownAgent,
    SpawnWorker,
)
from ckpt_runtime.network.control_messages import (
    DeploymentMessage,
    EndOfDataReport,
    FollowAgent,
    Following,
    WorkerCommand,
)

LONG_AGO = -1e9
ENDED = EndOfDataReport(1, "v", 0)
M = TypeVar("M")
TIMEOUT_S = 60


class Notes:
    """Instead of a socket: notes what is sent."""

    sent: list[AgentCommand | WorkerCommand]

    def __init__(self, registration: RegisterAgent | RegisterWorker) -> None:
        super().__init__(None, registration)  # type: ignore[call-arg]
        self.sent = []

    def send(self, message: AgentCommand | WorkerCommand) -> None:
        self.sent.append(message)

    def close(self) -> None:
        self.closed = True

    def of(self, kind: type[M]) -> list[M]:
        return [message for message in self.sent if isinstance(message, kind)]


class FakeAgent(Notes, AgentPeer):
    """A slot agent."""


class FakeWorker(Notes, WorkerPeer):
    """A worker."""


class Owner:
    """A job that notes what happens to its slots."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, object]] = []
        self.changed = asyncio.Event()
        self.waits: list[str] = []

    def worker_message(self, slot: Slot, message: DeploymentMessage) -> None:
        self.events.append(("message", slot.slot_id, message))
        self.changed.set()

    def worker_lost(self, slot: Slot, reason: str) -> None:
        self.events.append(("worker lost", slot.slot_id, reason))
        self.changed.set()

    def slot_lost(self, slot: Slot, reason: str) -> None:
        self.events.append(("slot lost", slot.slot_id, reason))
        self.changed.set()

    def slots_awaited(self, reason: str) -> None:
        self.waits.append(reason)


class World:
    """A pool and its provider. ``automatic`` answers launches and spawns at once."""

    def __init__(self, automatic: bool = True, machine: str = "", **settings: Any) -> None:
        self.automatic = automatic
        self.machine = machine
        self.cpus: tuple[int, ...] = (0, 1)
        self.launched: list[str] = []
        self.cancelled: list[str] = []
        self.ended: dict[str, SlotEnded] = {}
        self.agents: dict[str, FakeAgent] = {}
        self.workers: dict[str, FakeWorker] = {}
        self.launch_error: Exception | None = None
        times = {"heartbeat_interval_s": 60, "heartbeat_timeout_s": 5, "idle_timeout_s": 50, "request_timeout_s": 10}
        times |= {"spare_pause_s": 0, "loss_grace_s": 0}
        clock = settings.pop("clock", time.monotonic)
        self.pool = SlotPool(self, "secret", SlotTimes(**{**times, **settings}), clock)
        self.pool.start(1234)

    def requests_wait(self, timeout_s: float) -> None:
        """From now on: on a busy machine the requests before take longer than one that fails should."""
        self.pool._times = replace(self.pool._times, request_timeout_s=timeout_s)

    def watch_capacity(self, changed: Callable[[], None]) -> None:
        self.capacity_changed = changed

    def launch(self, slot_id: str, control_port: int, secret: str, ended: SlotEnded) -> None:
        assert (control_port, secret) == (1234, "secret")
        if self.launch_error is not None:
            raise self.launch_error
        self.launched.append(slot_id)
        self.ended[slot_id] = ended
        if self.automatic:
            self.agent(slot_id)

    capacity: int | None = None

    def cancel(self, slot_id: str) -> None:
        self.cancelled.append(slot_id)

    def agent(self, slot_id: str = "0") -> FakeAgent:
        process = ProcessIdentity(self.machine, 1 + len(self.agents), 1)
        peer = FakeAgent(RegisterAgent(slot_id, "h", self.cpus, process))
        self.agents[peer.slot] = peer
        if self.automatic:
            peer.send = lambda message: self.obey(peer, message)  # type: ignore[method-assign]
        self.pool.peer_registered(peer)
        return peer

    def obey(self, agent: FakeAgent, message: AgentCommand) -> None:
        agent.sent.append(message)
        loop = asyncio.get_running_loop()
        if isinstance(message, SpawnWorker):
            loop.call_soon(self.worker, agent.slot, message.worker)
        elif isinstance(message, ShutdownAgent):
            loop.call_soon(self.ended[agent.slot], agent.slot, None)

    def worker(self, slot: str, worker_id: str) -> FakeWorker:
        process = ProcessIdentity(self.machine, 1000 + len(self.workers), 2)
        peer = self.workers[worker_id] = FakeWorker(RegisterWorker(slot, worker_id, ("h", 9), process, "/w"))
        if self.automatic:
            peer.send = lambda message: self.work(peer, message)  # type: ignore[method-assign]
        self.pool.peer_registered(peer)
        return peer

    def work(self, worker: FakeWorker, message: WorkerCommand) -> None:
        worker.sent.append(message)
        if isinstance(message, FollowAgent):
            asyncio.get_running_loop().call_soon(self.pool.peer_message, worker, Following())

    def lose(self, peer: FakeAgent | FakeWorker, reason: str = "gone", *, explained: bool = False) -> None:
        """As the endpoint does: a peer that was closed on this side is not reported."""
        if not peer.closed:
            peer.closed = True
            self.pool.peer_lost(peer, reason, explained=explained)

    def held(self, slot: Slot) -> tuple[Worker, Worker]:
        """The slot's worker and its spare."""
        assert slot.worker is not None
        assert slot.spare is not None
        return slot.worker, slot.spare

    def request(self, count: int, owner: Owner | None = None, held: list[Slot] | None = None) -> Task[list[Slot]]:
        return asyncio.create_task(self.pool.acquire(owner or Owner(), count, held or []))

    async def requested(
        self, count: int, owner: Owner | None = None, held: list[Slot] | None = None
    ) -> Task[list[Slot]]:
        """A request that waits."""
        request = self.request(count, owner, held)
        await settle()
        return request

    def spawned(self, slot_id: str = "0", number: int = 0) -> FakeWorker:
        """The worker that the slot's agent has to start registers."""
        return self.worker(slot_id, self.agents[slot_id].of(SpawnWorker)[number].worker)

    async def spawn_again(self, slot_id: str = "0", count: int = 2) -> None:
        """Waits until the agent has orders to start that many."""
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.agents[slot_id].of(SpawnWorker)) < count:
                await asyncio.sleep(0.001)


async def settle() -> None:
    """Lets everything that is ready run."""
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def opened(**settings: Any) -> AsyncIterator[World]:
    world = World(**settings)
    yield world
    if world.pool._watch is not None:
        world.pool._watch.cancel()


@asynccontextmanager
async def holding(**times: Any) -> AsyncIterator[tuple[World, Owner, Slot]]:
    """A world in which an owner holds the only slot, whose worker and spare are ready."""
    async with opened(**times) as world:
        owner = Owner()
        (slot,) = await world.pool.acquire(owner, 1, [])
        await settle()
        yield world, owner, slot


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def opened_idle(**settings: Any) -> AsyncIterator[tuple[World, Clock]]:
    """Stages may be idle for 50 s; heartbeats do not matter."""
    clock = Clock()
    async with opened(heartbeat_timeout_s=1e9, clock=clock, **settings) as world:
        yield world, clock
