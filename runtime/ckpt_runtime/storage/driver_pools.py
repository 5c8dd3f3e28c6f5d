"""The driver's thread pools, kept apart so that slow storage or a slow plan of one job blocks no other work.

Each call has a deadline that begins when it is submitted. A call that waits in the queue until its deadline is refused.
A thread in a system call cannot be killed: a running call that passes its deadline fails for its caller, but continues
in its thread, and the pool starts another thread in its place. While ``max_hanging`` calls hang, new calls are refused
at once. A pool never has more than ``threads + max_hanging`` threads, and storage that never answers blocks only the
calls of its own pool. The threads are daemons: a call that hangs does not prevent the driver from ending.

Between these calls the driver passes crash points: named places at which a test kills it, to prove that it always
leaves consistent data behind. Outside tests :func:`crash_point` is an empty function. The environment variable
:data:`VARIABLE`, the path of a file, arms a process from its start: the process dies at the point whose name the file
holds at that time.
"""

from __future__ import annotations

import heapq
import itertools
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future, InvalidStateError
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

from ckpt_runtime.configuration.cluster_options import JobManagerOptions
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.storage.errors import PoolExhaustedError, StorageError, StorageTimeoutError
from ckpt_runtime.storage.filesystem import address_of

T = TypeVar("T")
P = ParamSpec("P")

_IDLE_S = 60.0
"""How long an idle thread lives. It does not end at once, because file systems keep connections per thread."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Call:
    """One call: it has either returned (``finished``) or passed its deadline (``late``) first."""

    call: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)
    finished: bool = False
    late: bool = False


class BoundedPool(Executor):
    """``name`` describes the calls in errors, for example "storage calls for paths that users name"."""

    def __init__(
        self, name: str, threads: int, *, deadline_s: float, max_hanging: int, max_waiting: int | None = None
    ) -> None:
        """A deadline counts from a call's submission. If ``max_waiting`` calls wait, further calls are refused."""
        self._name = name
        self._limit = threads
        self._deadline_s = deadline_s
        self._max_hanging = max_hanging
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._waiting: dict[_Call, None] = {}
        self.hanging = 0
        """The number of calls that have passed their deadline and have not returned."""
        self._threads = 0
        self._idle = 0
        self._numbers = itertools.count()
        self._closed = False

    @property
    def is_idle(self) -> bool:
        """Whether the pool has neither calls nor threads."""
        with self._changed:
            return not self._threads and not self._waiting

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Starts a call as soon as a thread is free. Never raises: a refusal is the future's error.

        The error is :class:`PoolExhaustedError` when the call was not begun (in time), :class:`StorageTimeoutError`
        when it has not returned in time: then its outcome is unknown.
        """
        call = _Call(lambda: fn(*args, **kwargs))
        with self._changed:
            refusal = self._refusal()
            if refusal is None:
                self._waiting[call] = None
                refusal = self._see_to_threads()
                if refusal is not None:
                    del self._waiting[call]
        if refusal is None:
            _DEADLINES.add(time.monotonic() + self._deadline_s, self, call)
        else:
            # Outside the lock: a callback of the future may run here and submit again.
            call.future.set_exception(PoolExhaustedError(refusal, self._name))
        return call.future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = True) -> None:
        """Starts no further calls and cancels waiting ones; never waits for running calls."""
        with self._changed:
            self._closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        for call in waiting:
            call.future.cancel()

    def _refusal(self) -> str | None:
        if self._closed:
            return f"the driver ends: no more {self._name}"
        if self.hanging >= self._max_hanging:
            return (
                f"{self.hanging} {self._name} have not come back within {self._deadline_s:g} s and still hang; "
                f"no more are begun until one of them does (at most {self._max_hanging} may hang)"
            )
        if self._max_waiting is not None and len(self._waiting) >= self._max_waiting + self._idle:
            return f"{len(self._waiting)} {self._name} wait already; at most {self._max_waiting} may wait, try again"
        return None

    @property
    def _thread_limit(self) -> int:
        return self._limit + min(self.hanging, self._max_hanging)

    def _see_to_threads(self) -> str | None:
        """Provides a thread for a queued call. Returns the reason when no thread can take it."""
        if self._idle < len(self._waiting) and self._threads < self._thread_limit:
            name = f"{self._name}-{next(self._numbers)}"
            try:
                threading.Thread(target=self._work, name=name, daemon=True).start()
            except RuntimeError as error:  # the system refuses to start another thread
                # Hanging threads will not take the call; a working thread will take it later.
                if self._threads <= self.hanging:
                    return f"no thread for {self._name}: {error}"
            else:
                self._threads += 1
        self._changed.notify()
        return None

    def _work(self) -> None:
        while (call := self._next()) is not None:
            result: Any = None
            failure: BaseException | None = None
            try:
                result = call.call()
            except BaseException as error:
                failure = error
            if self._note_returned(call):
                _settle(call.future, result, failure)
            # An idle thread must not keep the result of a call alive.
            del call, result, failure

    def _next(self) -> _Call | None:
        """The next call; None when this thread ends."""
        with self._changed:
            # Threads that replaced hanging ones end when the hanging calls have returned.
            if self._threads <= self._thread_limit:
                self._idle += 1
                self._changed.wait_for(lambda: self._waiting or self._closed, _IDLE_S)
                self._idle -= 1
                while self._waiting:
                    call = next(iter(self._waiting))
                    del self._waiting[call]
                    # Under the lock, so that its deadline finds it either waiting or running.
                    if call.future.set_running_or_notify_cancel():
                        return call
            self._threads -= 1
            return None

    def _note_returned(self, call: _Call) -> bool:
        """Notes that the call has returned. Returns whether its caller still waits for it."""
        with self._changed:
            call.finished = True
            if call.late:
                self.hanging -= 1
            return not call.late

    def _deadline_passed(self, call: _Call) -> None:
        message, unserved = "", list[_Call]()
        with self._changed:
            # The call returned before its deadline, or while the deadline's thread waited for the lock.
            if call.finished:
                return
            if call in self._waiting:
                del self._waiting[call]
                failure: StorageError = PoolExhaustedError(
                    f"not begun: the {self._name} before this one took {self._deadline_s:g} s, "
                    f"{self.hanging} of them hang; try again",
                    self._name,
                )
            else:
                call.late = True
                self.hanging += 1
                message = (
                    f"one of the {self._name} has not come back within {self._deadline_s:g} s and is left to itself; "
                    f"{self.hanging} hang now, and from {self._max_hanging} on no more are begun"
                )
                failure = StorageTimeoutError(message, self._name)
                if self._waiting:
                    self._see_to_threads()
                if self.hanging >= self._threads:  # no thread is left to take them
                    unserved = list(self._waiting)
                    self._waiting.clear()
        _settle(call.future, None, failure)
        for waiting in unserved:
            _settle(waiting.future, None, PoolExhaustedError(f"not begun: {message}", self._name))


def _settle(future: Future[Any], result: Any, failure: BaseException | None) -> None:
    try:
        if failure is None:
            future.set_result(result)
        else:
            future.set_exception(failure)
    except InvalidStateError:  # cancelled in the meantime
        pass


class _Deadlines:
    """One thread for the deadlines of all pools of this process. It keeps no returned call alive."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int, BoundedPool, weakref.ref[_Call]]] = []
        self._numbers = itertools.count()
        self._started = False

    def add(self, at: float, pool: BoundedPool, call: _Call) -> None:
        """Notifies ``pool`` at the monotonic time ``at``."""
        with self._changed:
            # The number prevents a comparison of pools when two times are equal.
            heapq.heappush(self._heap, (at, next(self._numbers), pool, weakref.ref(call)))
            if not self._started:
                self._started = True
                threading.Thread(target=self._watch, name="deadlines", daemon=True).start()
            # Only a new first deadline shortens the wait of the thread.
            elif self._heap[0][0] == at:
                self._changed.notify()

    def _watch(self) -> None:
        while True:
            pool, reference = self._next()
            call = reference()
            if call is not None:
                pool._deadline_passed(call)  # noqa: SLF001 the other half of the pool
            del pool, call

    def _next(self) -> tuple[BoundedPool, weakref.ref[_Call]]:
        """Waits for the next deadline."""
        with self._changed:
            while not self._heap or self._heap[0][0] > time.monotonic():
                self._changed.wait(self._heap[0][0] - time.monotonic() if self._heap else None)
            _, _, pool, reference = heapq.heappop(self._heap)
            return pool, reference


_DEADLINES = _Deadlines()


_DELETION_PATIENCE = 10
"""A deletion may cover a whole directory: its deadline is this many times that of other calls."""

_PLANNING_GRACE_S = 30.0
"""The deadline of a planning call is the time limit of its process plus this."""


_MAX_ADDRESSES = 16
"""Maximum number of addresses with a pool of their own at a time. Further addresses share one pool."""


class AddressPools:
    """The pool for the address of a URL that a user names: one that hangs blocks no other. Thread-safe."""

    def __init__(self, deadline_s: float, made: WeakSet[BoundedPool]) -> None:
        """Adds each new pool to ``made``, whose owner shuts the pools down."""
        self._deadline_s = deadline_s
        self._made = made
        self._lock = Lock()
        self._pools: dict[str, BoundedPool] = {}
        self._others = self._pool(f"hosts and buckets beyond the {_MAX_ADDRESSES} in use")

    def __call__(self, url: str) -> BoundedPool:
        address = address_of(url)
        with self._lock:
            if address not in self._pools:
                self._pools = {known: pool for known, pool in self._pools.items() if not pool.is_idle}
                if len(self._pools) >= _MAX_ADDRESSES:
                    return self._others
                self._pools[address] = self._pool(address)
            return self._pools[address]

    def _pool(self, address: str) -> BoundedPool:
        name = f"storage calls to {address}"
        pool = BoundedPool(name, 4, deadline_s=self._deadline_s, max_hanging=4, max_waiting=64)
        self._made.add(pool)
        return pool


@dataclass(frozen=True, slots=True)
class DriverPools:
    """``own`` is for the high-availability directory, and in a job's set for the job's own checkpoints.

    ``deletions`` deletes snapshots. ``paths`` gives the pool for a URL that a user names: savepoints to take, to start
    from and to dispose of, and directories that are used for the first time. ``planning`` waits for the processes that
    read programs.
    """

    own: Executor
    deletions: Executor
    paths: Callable[[str], Executor]
    planning: Executor
    storage_deadline_s: float | None = None
    made: WeakSet[BoundedPool] = field(default_factory=WeakSet)
    """The pools of jobs and of addresses."""

    @classmethod
    def create(cls, configuration: Configuration) -> DriverPools:
        """Creates the session's pools."""
        deadline_s = configuration.get(JobManagerOptions.STORAGE_TIMEOUT) / 1000
        planning_s = configuration.get(JobManagerOptions.PLANNING_TIMEOUT) / 1000 + _PLANNING_GRACE_S
        made: WeakSet[BoundedPool] = WeakSet()
        return cls(
            own=BoundedPool("storage calls of the session", 8, deadline_s=deadline_s, max_hanging=8),
            deletions=_deletions("deletions of the session", deadline_s),
            paths=AddressPools(deadline_s, made),
            planning=BoundedPool("plans", 2, deadline_s=planning_s, max_hanging=2, max_waiting=32),
            storage_deadline_s=deadline_s,
            made=made,
        )

    def of_job(self, job_id: str) -> DriverPools:
        """Creates a job's pools: if its storage is unavailable, no other job is affected. Their idle threads end."""
        deadline_s = self.storage_deadline_s
        if deadline_s is None:
            return self
        own = BoundedPool(f"storage calls of job {job_id}", 4, deadline_s=deadline_s, max_hanging=4)
        deletions = _deletions(f"deletions of job {job_id}", deadline_s)
        self.made.update((own, deletions))
        return replace(self, own=own, deletions=deletions)

    def shutdown(self) -> None:
        """Shuts all pools down, also those of jobs, without waiting for running calls."""
        for pool in (self.own, self.deletions, self.planning, *self.made):
            pool.shutdown(wait=False, cancel_futures=True)


def _deletions(name: str, deadline_s: float) -> BoundedPool:
    return BoundedPool(name, 4, deadline_s=_DELETION_PATIENCE * deadline_s, max_hanging=4)


VARIABLE = "CKPT_CRASH_POINT_FILE"


def _pass(point: str) -> None:
    """The crash point of a process that is not armed: does nothing."""


def crasher(file: Path) -> Callable[[str], None]:
    """The :func:`crash_point` of an armed process. It deletes the file first, so that a successor survives."""

    def reach_armed(point: str) -> None:
        try:
            wanted = file.read_text().strip()
        except FileNotFoundError:
            return
        if wanted == point:
            file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    return reach_armed


_file = os.environ.get(VARIABLE)
crash_point = _pass if not _file else crasher(Path(_file))
"""``crash_point(point)`` marks a place; a point is named after the step that just happened or is about to."""
