"""The host of a job's shell, which provides its time, timers, threads and slots; and what the job holds of these: its
timers, its slots, and the deletions that it has begun.

The driver uses :class:`LoopHost`. The simulation of whole jobs uses a host whose time and step order come from a seed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Hashable
from concurrent.futures import Executor
from contextvars import copy_context
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar

from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.failure_report import name_of
from ckpt_runtime.jobmaster.slot_pool import SlotPool
from ckpt_runtime.jobmaster.slots import Slot, SlotOwner, SlotsUnavailableError
from ckpt_runtime.scheduler import core_events as core
from ckpt_runtime.scheduler.core_events import JobInput
from ckpt_runtime.scheduler.job_events import FailureInfo, SlotsAcquired, SlotsFailed
from ckpt_runtime.storage.driver_pools import DriverPools
from ckpt_runtime.storage.errors import CorruptFileError, InvalidLocationError, NotFoundError, NotLeaderError
from ckpt_runtime.storage.versioned_document import Fence, no_fence

logger = logging.getLogger(__name__)
T = TypeVar("T")
Result = Callable[[], T]
"""Returns the result of a call, or raises its exception."""
SlotAnswer = Callable[[Result[list[Slot]]], None]


class Pool(Enum):
    """The thread pools for blocking calls: separate ones, so that hanging calls of one kind do not stop the other."""

    OWN = "the job's directories"
    DELETIONS = "deletions"


class Cancellable(Protocol):
    """A timer or a request that can be cancelled."""

    def cancel(self) -> object: ...


class JobHost(Protocol):
    """Callbacks are called one at a time, and never from within the call that requests them."""

    def now(self) -> Instant: ...

    def token(self) -> str:
        """Returns a text that makes a name unique."""

    def next_deployment(self) -> int:
        """Returns a number that no deployment of this driver has used: late frames and messages are recognised by
        it."""

    def call_later(self, delay_ms: float, call: Callable[[], None]) -> Cancellable: ...

    def in_pool(self, pool: Pool | str, call: Callable[[], T], answer: Callable[[Result[T]], None]) -> None:
        """Runs ``call`` in a thread and passes its result to ``answer``; StorageError if the call never ran or hangs.

        If ``pool`` is a text, it is a URL that a user named: the pool is that of its address.
        """

    def acquire_slots(
        self, owner: SlotOwner, count: int, held: list[Slot], answer: SlotAnswer, least: int | None = None
    ) -> Cancellable:
        """As ``SlotPool.acquire``. A cancelled request gets no answer."""

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
        self, owner: SlotOwner, count: int, held: list[Slot], answer: SlotAnswer, least: int | None = None
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
        answer: SlotAnswer,
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
        done.exception()  # a job that has closed reads no result, and asyncio would log its error as never retrieved
        answer(done.result)


class SupervisedHost:
    """A host whose callbacks never raise: ``failed`` gets each exception that a callback raises, with the name of the
    callback.

    Every call in a pool gets an answer, even if the pool does not accept it.
    """

    def __init__(self, host: JobHost, failed: Callable[[str, Exception], None]) -> None:
        self._host = host
        self._failed = failed
        self.now, self.token = host.now, host.token
        self.next_deployment, self.bind_slots = host.next_deployment, host.bind_slots

    def run(self, call: Callable[..., object], *arguments: Any) -> None:
        """Calls the function; never raises."""
        try:
            call(*arguments)
        except Exception as error:
            self._failed(name_of(call), error)

    def call_later(self, delay_ms: float, call: Callable[[], None]) -> Cancellable:
        return self._host.call_later(delay_ms, partial(self.run, call))

    def in_pool(self, pool: Pool | str, call: Callable[[], T], answer: Callable[[Result[T]], None]) -> None:
        try:
            self._host.in_pool(pool, call, partial(self.run, answer))
        except Exception as error:
            self.call_later(0, partial(answer, partial(raised, error)))

    def acquire_slots(
        self, owner: SlotOwner, count: int, held: list[Slot], answer: SlotAnswer, least: int | None = None
    ) -> Cancellable:
        return self._host.acquire_slots(owner, count, held, partial(self.run, answer), least)

    def release_slot(self, slot: Slot) -> None:
        self.run(self._host.release_slot, slot)

    def replace_worker(self, slot: Slot) -> None:
        self.run(self._host.replace_worker, slot)


def raised(error: Exception) -> NoReturn:
    """A :data:`Result` of a call that raised this error."""
    raise error


class JobTimers:
    """The timers of a job by name; starting a timer again replaces it."""

    def __init__(self, host: SupervisedHost) -> None:
        self._host = host
        self._started: dict[Hashable, Cancellable] = {}

    def __contains__(self, timer: Hashable) -> bool:
        return timer in self._started

    def start(self, timer: Hashable, delay_ms: float, call: Callable[[], None]) -> None:
        """Calls after that time, or as soon as possible if the time has passed."""
        self.cancel(timer)
        self._started[timer] = self._host.call_later(max(0, delay_ms), partial(self._fire, timer, call))

    def _fire(self, timer: Hashable, call: Callable[[], None]) -> None:
        self._started.pop(timer, None)
        call()

    def cancel(self, timer: Hashable) -> None:
        started = self._started.pop(timer, None)
        if started is not None:
            started.cancel()

    def cancel_all(self) -> None:
        for timer in list(self._started):
            self.cancel(timer)


class JobSlots:
    """The slots that a job runs in, and those reserved for its next deployment.

    ``owner`` is notified of losses and messages; ``tell`` receives the answers to requests.
    """

    def __init__(self, host: JobHost, owner: SlotOwner, tell: Callable[[JobInput], None]) -> None:
        self.held: list[Slot] = []
        """The slots in deployment order: slot ``i`` hosts subtask ``i`` of every vertex."""
        self._host = host
        self._owner = owner
        self._tell = tell
        self._acquiring: Cancellable | None = None
        self._reserved: list[Slot] = []
        self._reserved_for = ""
        self._reserving: Cancellable | None = None

    def acquire(self, attempt: int, count: int) -> None:
        """Acquires the slots for a new deployment. Slots that it does not need are released."""
        self._stop_acquiring()
        # The reserved ones as well: they were reserved for the restart after a stored rescale.
        held = [*self.held, *self._reserved]
        self._acquiring = self._host.acquire_slots(self._owner, count, held, partial(self._acquired, attempt))

    def _acquired(self, attempt: int, result: Result[list[Slot]]) -> None:
        self._acquiring = None
        try:
            slots = result()
        except SlotsUnavailableError as error:
            # All or nothing: keeping a part of the slots would block the start of another job.
            self._release(self.held)
            self.held = []
            self._tell(SlotsFailed(attempt, FailureInfo("NoResourceAvailableException", str(error))))
            return
        surplus = [slot for slot in (*self.held, *self._reserved) if slot not in slots]
        self.held, self._reserved = slots, []
        self._release(surplus)
        self._tell(SlotsAcquired(attempt))

    def reserve(self, order: core.ReserveSlots) -> None:
        """Reserves slots in addition to those that the job runs in."""
        self._reserved_for = order.request_id
        answer = partial(self._reserve_answered, order.request_id)
        self._reserving = self._host.acquire_slots(self._owner, order.count, self.held, answer, order.least)

    def _reserve_answered(self, request_id: str, result: Result[list[Slot]]) -> None:
        self._reserving = None
        try:
            slots = result()
        except SlotsUnavailableError as error:
            self._tell(core.SlotsNotReserved(request_id, str(error)))
            return
        # The present `held`: slots may have been lost before the answer arrived.
        self._reserved = [slot for slot in slots if slot not in self.held]
        self._tell(core.SlotsReserved(request_id, len(slots)))

    def release_reserve(self) -> None:
        self._stop_reserving()
        reserved, self._reserved = self._reserved, []
        self._release(reserved)

    def lost(self, slot: Slot, reason: str) -> None:
        self.held = [known for known in self.held if known is not slot]
        if slot in self._reserved:
            self._reserved.remove(slot)
            self._tell(core.SlotsNotReserved(self._reserved_for, reason))

    def close(self) -> None:
        """Cancels pending requests; held slots stay held."""
        self._stop_acquiring()
        self._stop_reserving()

    def release_all(self) -> None:
        """The job has ended."""
        self._stop_acquiring()
        self.release_reserve()
        held, self.held = self.held, []
        self._release(held)

    def _stop_acquiring(self) -> None:
        if self._acquiring is not None:
            self._acquiring.cancel()
            self._acquiring = None

    def _stop_reserving(self) -> None:
        if self._reserving is not None:
            self._reserving.cancel()
            self._reserving = None

    def _release(self, slots: list[Slot]) -> None:
        for slot in slots:
            if not slot.lost:
                self._host.release_slot(slot)


DELETION_PAUSE_MS = 500.0
MAX_DELETION_PAUSE_MS = 30_000.0
MAX_WAITING = 10_000
"""Maximum number of waiting deletions; beyond it the oldest is given up and named in the log."""


@dataclass(slots=True, eq=False)
class _Deletion:
    what: str
    delete: Callable[[], None]
    attempted: Callable[[], None] | None = None
    failures: int = 0


class SnapshotDeletions:
    """The deletions of one job, on its host's loop and in its pool for deletions. Others decide what may be deleted.

    If storage is unavailable when a checkpoint is subsumed or aborted, its files must not stay forever. A failed
    deletion is retried with growing pauses, at once when a later checkpoint shows that storage answers again, and also
    after the end of the job.

    ``fence`` is called in the pool before each deletion and raises when this driver may not delete anything.
    """

    def __init__(self, host: JobHost, fence: Fence = no_fence) -> None:
        self._host = host
        self._fence = fence
        self._running = 0
        self._waiting: list[_Deletion] = []
        self._timer: Cancellable | None = None
        self._due_ms = 0.0
        self._when_done: Callable[[], None] | None = None
        self._closed = False

    @property
    def unfinished(self) -> tuple[str, ...]:
        """The deletions that have failed so far and wait for their next attempt."""
        return tuple(deletion.what for deletion in self._waiting)

    def submit(self, what: str, delete: Callable[[], None], attempted: Callable[[], None] | None = None) -> None:
        """Deletes in the background. ``delete`` may be called again after a failure and then continues.

        ``attempted`` is called on the loop after the first attempt, for any outcome: no caller waits for a retry.
        """
        self._start([_Deletion(what, delete, attempted)])

    def retry(self) -> None:
        """Retries all waiting deletions now, because storage answers."""
        waiting, self._waiting = self._waiting, []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if waiting:
            self._start(waiting)

    def when_done(self, call: Callable[[], None]) -> None:
        """Calls ``call`` once as soon as no deletion runs or waits, perhaps at once; never after :meth:`close`."""
        self._when_done = call
        self._check_done()

    def close(self) -> None:
        """Starts no more deletions. The waiting ones are named in the log; a later driver may perform them."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for deletion in self._waiting:
            logger.warning("could not %s before the end of this driver", deletion.what)
        self._waiting.clear()

    def _start(self, deletions: list[_Deletion]) -> None:
        if self._closed:
            return
        self._running += 1
        self._host.in_pool(Pool.DELETIONS, partial(self._attempt, deletions), partial(self._attempted, deletions))

    def _attempt(self, deletions: list[_Deletion]) -> list[_Deletion]:
        """Runs in a pool thread. Returns the deletions that failed and may succeed later."""
        return [deletion for deletion in deletions if not self._is_settled(deletion)]

    def _is_settled(self, deletion: _Deletion) -> bool:
        try:
            self._fence()
            deletion.delete()
        # Already deleted by an attempt whose answer was lost.
        except NotFoundError:
            return True
        except (NotLeaderError, InvalidLocationError, CorruptFileError) as error:
            logger.warning("will not %s: %s", deletion.what, error)
        except OSError as error:
            logger.warning("could not %s, will try again: %s", deletion.what, error)
            return False
        except Exception:
            logger.exception("will not %s", deletion.what)
        return True

    def _attempted(self, deletions: list[_Deletion], result: Result[list[_Deletion]]) -> None:
        self._running -= 1
        if self._closed:
            return
        try:
            failed = result()
        except Exception as error:  # the pool's own: not begun, or still hanging
            logger.warning("will try %d deletions again: %s", len(deletions), error)
            failed = deletions
        for deletion in deletions:
            # Called after the first attempt only: no caller waits for a retry.
            answer, deletion.attempted = deletion.attempted, None
            if answer is not None:
                answer()
        if failed:
            self._wait(failed)
        self._check_done()

    def _wait(self, failed: list[_Deletion]) -> None:
        for deletion in failed:
            deletion.failures += 1
        self._waiting.extend(failed)
        for given_up in self._waiting[:-MAX_WAITING]:
            logger.error("cannot %s: too many deletions are waiting", given_up.what)
        del self._waiting[:-MAX_WAITING]
        # The lowest failure count sets the pause: a deletion that has failed for hours must not delay a fresh one.
        least = min(deletion.failures for deletion in failed)
        pause = min(MAX_DELETION_PAUSE_MS, DELETION_PAUSE_MS * 2 ** min(least - 1, 16))
        due_ms = self._host.now().rel_ms + pause
        if self._timer is not None:
            if self._due_ms <= due_ms:
                return
            self._timer.cancel()
        self._due_ms = due_ms
        self._timer = self._host.call_later(pause, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self.retry()

    def _check_done(self) -> None:
        if self._when_done is not None and not self._running and not self._waiting and not self._closed:
            call, self._when_done = self._when_done, None
            call()
