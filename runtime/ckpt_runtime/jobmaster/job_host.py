"""The host of a job's shell, which provides its time, timers, threads and slots.

The driver uses :class:`LoopHost`. The simulation of whole jobs uses a host whose time and step order come from a seed.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import copy_context
from enum import Enum
from functools import partial
from typing import Protocol, TypeVar

from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.jobmaster.slot_pool import SlotPool
from ckpt_runtime.jobmaster.slots import Slot, SlotOwner
from ckpt_runtime.storage.driver_pools import DriverPools

T = TypeVar("T")
Result = Callable[[], T]
"""Returns what a call returned, or raises what it raised."""


class Pool(Enum):
    """Threads for blocking calls, kept apart by whose storage they wait for."""

    OWN = "the job's directories"
    DELETIONS = "deletions"


class Cancellable(Protocol):
    """A timer or a request that can be cancelled."""

    def cancel(self) -> object: ...


class JobHost(Protocol):
    """All callbacks come one at a time, and never from within the call that asks for them."""

    def now(self) -> Instant: ...

    def token(self) -> str:
        """Returns a text that makes a name unique."""

    def next_deployment(self) -> int:
        """Returns a number unused by this driver's deployments: it identifies late frames and messages."""

    def call_later(self, delay_ms: float, call: Callable[[], None]) -> Cancellable: ...

    def in_pool(self, pool: Pool | str, call: Callable[[], T], answer: Callable[[Result[T]], None]) -> None:
        """Calls in a thread, then ``answer``. The result raises StorageError when the call was not begun or hangs.

        If ``pool`` is a text, it is a URL that a user named: the pool is that of its address.
        """

    def acquire_slots(
        self,
        owner: SlotOwner,
        count: int,
        held: list[Slot],
        answer: Callable[[Result[list[Slot]]], None],
        least: int | None = None,
    ) -> Cancellable:
        """As ``SlotPool.acquire``. No answer comes after a cancellation."""

    def release_slot(self, slot: Slot) -> None: ...

    def replace_worker(self, slot: Slot) -> None: ...

    def bind_slots(self, slots: list[Slot]) -> list[int | None]:
        """As ``SlotPool.bind``."""


_deployments = itertools.count(1)


class LoopHost:
    """The host on the driver's event loop, with the pools of one job."""

    def __init__(self, slots: SlotPool, pools: DriverPools) -> None:
        self._loop = asyncio.get_running_loop()
        self._slots = slots
        self._pools = {Pool.OWN: pools.own, Pool.DELETIONS: pools.deletions}
        self._paths = pools.paths
        self._tasks: set[asyncio.Task[list[Slot]]] = set()

    def now(self) -> Instant:
        return Instant(time.monotonic_ns() // 1_000_000, time.time_ns() // 1_000_000)

    def token(self) -> str:
        return uuid.uuid4().hex[:12]

    def next_deployment(self) -> int:
        return next(_deployments)

    def call_later(self, delay_ms: float, call: Callable[[], None]) -> Cancellable:
        return self._loop.call_later(max(0.0, delay_ms / 1000), call)

    def in_pool(self, pool: Pool | str, call: Callable[[], T], answer: Callable[[Result[T]], None]) -> None:
        executor: Executor = self._pools[pool] if isinstance(pool, Pool) else self._paths(pool)
        future = self._loop.run_in_executor(executor, copy_context().run, call)
        future.add_done_callback(partial(_pass_on, answer))

    def acquire_slots(
        self,
        owner: SlotOwner,
        count: int,
        held: list[Slot],
        answer: Callable[[Result[list[Slot]]], None],
        least: int | None = None,
    ) -> Cancellable:
        task = self._loop.create_task(self._slots.acquire(owner, count, held, least))
        self._tasks.add(task)  # the loop itself keeps no strong reference
        task.add_done_callback(self._tasks.discard)
        return _SlotRequest(task, self._slots, owner, held, answer)

    def release_slot(self, slot: Slot) -> None:
        self._slots.release(slot)

    def replace_worker(self, slot: Slot) -> None:
        self._slots.replace_worker(slot)

    def bind_slots(self, slots: list[Slot]) -> list[int | None]:
        return self._slots.bind(slots)


class _SlotRequest:
    """One request for slots. Slots that arrive despite its cancellation are released."""

    def __init__(
        self,
        task: asyncio.Task[list[Slot]],
        slots: SlotPool,
        owner: SlotOwner,
        held: list[Slot],
        answer: Callable[[Result[list[Slot]]], None],
    ) -> None:
        self._task = task
        self._slots = slots
        self._owner = owner
        self._held = held
        self._answer = answer
        self._cancelled = False
        task.add_done_callback(self._done)

    def cancel(self) -> None:
        self._cancelled = True
        self._task.cancel()

    def _done(self, task: asyncio.Future[list[Slot]]) -> None:
        if not self._cancelled:
            _pass_on(self._answer, task)
        elif not task.cancelled() and task.exception() is None:
            for slot in task.result():
                if slot.owner is self._owner and slot not in self._held:
                    self._slots.release(slot)


def _pass_on(answer: Callable[[Result[T]], None], done: asyncio.Future[T]) -> None:
    if not done.cancelled():
        answer(done.result)
