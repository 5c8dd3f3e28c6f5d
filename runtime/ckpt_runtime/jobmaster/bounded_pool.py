"""Threads for blocking calls of one kind, each call with a deadline that begins when it is submitted.

A call that waits in the queue until its deadline is refused. A thread in a system call cannot be killed: a running
call that passes its deadline fails for its caller and is left to itself; a new thread replaces its thread, until
``max_hanging`` calls hang. From then on calls are refused at once, until a hanging call returns. A pool never has
more than ``threads + max_hanging`` threads, and storage that never answers blocks only the calls of its own pool.

The threads are daemons: a call that hangs does not keep the driver from ending.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from ckpt_runtime.storage.errors import PoolExhaustedError, StorageError, StorageTimeoutError

T = TypeVar("T")
P = ParamSpec("P")

_IDLE_S = 60.0
"""How long an idle thread lives. File systems keep their connections per thread, so it does not end at once."""


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
        self._hanging = 0
        self._threads = 0
        self._idle = 0
        self._numbers = itertools.count()
        self._closed = False

    @property
    def is_idle(self) -> bool:
        """Whether it has neither calls nor threads."""
        with self._changed:
            return not self._threads and not self._waiting

    @property
    def hanging(self) -> int:
        """The number of calls that have passed their deadline and have not returned."""
        return self._hanging

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
        """Begins no more calls and cancels waiting ones; never waits for running calls."""
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
        if self._hanging >= self._max_hanging:
            return (
                f"{self._hanging} {self._name} have not come back within {self._deadline_s:g} s and still hang; "
                f"no more are begun until one of them does (at most {self._max_hanging} may hang)"
            )
        if self._max_waiting is not None and len(self._waiting) >= self._max_waiting + self._idle:
            return f"{len(self._waiting)} {self._name} wait already; at most {self._max_waiting} may wait, try again"
        return None

    @property
    def _thread_limit(self) -> int:
        return self._limit + min(self._hanging, self._max_hanging)

    def _see_to_threads(self) -> str | None:
        """Provides a thread for a queued call. Returns the reason when no thread can take it."""
        if self._idle < len(self._waiting) and self._threads < self._thread_limit:
            name = f"{self._name}-{next(self._numbers)}"
            try:
                threading.Thread(target=self._work, name=name, daemon=True).start()
            except RuntimeError as error:  # the system gives no more threads
                # Hanging threads will not take the call; a working thread will take it later.
                if self._threads <= self._hanging:
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
            if self._came_back(call):
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

    def _came_back(self, call: _Call) -> bool:
        """Notes that the call has returned. Returns whether its caller still waits for it."""
        with self._changed:
            call.finished = True
            if call.late:
                self._hanging -= 1
            return not call.late

    def _deadline_passed(self, call: _Call) -> None:
        message, unserved = "", list[_Call]()
        with self._changed:
            # It returned before its deadline, or while the deadline's thread waited for the lock.
            if call.finished:
                return
            if call in self._waiting:
                del self._waiting[call]
                failure: StorageError = PoolExhaustedError(
                    f"not begun: the {self._name} before this one took {self._deadline_s:g} s, "
                    f"{self._hanging} of them hang; try again",
                    self._name,
                )
            else:
                call.late = True
                self._hanging += 1
                message = (
                    f"one of the {self._name} has not come back within {self._deadline_s:g} s and is left to itself; "
                    f"{self._hanging} hang now, and from {self._max_hanging} on no more are begun"
                )
                failure = StorageTimeoutError(message, self._name)
                if self._waiting:
                    self._see_to_threads()
                if self._hanging >= self._threads:  # no thread is left to take them
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
    except InvalidStateError:  # cancelled meanwhile
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
