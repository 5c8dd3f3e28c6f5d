"""Answers that several waits share: the same question is sent once, however many ask it after the same event."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from ckpt_runtime.client.requests import Call

T = TypeVar("T")

MAX_AGE_SECONDS = 1.0
AT_A_TIME = 8
"""Requests under way at most."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """``since`` is the change after which it was sent."""

    since: int
    at: float
    answer: asyncio.Task[Any]

    @property
    def is_usable(self) -> bool:
        """An error goes to the waits that asked together, and not to later ones."""
        task = self.answer
        return not task.done() or (not task.cancelled() and task.exception() is None)


class SharedAnswers:
    """Of one job manager. ``changed`` makes what was asked before useless for that job."""

    def __init__(self, execute: Callable[[Call[Any]], Awaitable[Any]]) -> None:
        self._execute = execute
        self._asked: dict[tuple[object, ...], _Asked] = {}
        self._changes: dict[str, int] = {}
        self._all_changes = 0
        self._free = asyncio.Semaphore(AT_A_TIME)
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Called when no wait needs an answer."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def changed(self, job_id: str | None = None) -> None:
        """Something has happened to the job, or may have happened to all of them."""
        if job_id is None:
            self._all_changes += 1
        else:
            self._changes[job_id] = self._changes.get(job_id, 0) + 1

    def forget(self, job_id: str) -> None:
        """No wait is left for the job, so its changes are not counted."""
        self._changes.pop(job_id, None)
        for key in [key for key in self._asked if key[0] == job_id]:
            del self._asked[key]

    async def get(self, call: Call[T], job_id: str) -> T:
        """Raises what the call raises. A wait that stops waiting does not cancel the answer for the others."""
        if call.method != "GET":
            result: T = await self._execute(call)
            return result
        now = asyncio.get_running_loop().time()
        since = self._all_changes + self._changes.get(job_id, 0)
        key = (job_id, call.path, *sorted(call.query.items()))
        known = self._asked.get(key)
        if known is None or known.since != since or now - known.at > MAX_AGE_SECONDS or not known.is_usable:
            self._drop_old(now)
            known = self._asked[key] = _Asked(since, now, self._begin(call))
        answer: T = await asyncio.shield(known.answer)
        return answer

    def _begin(self, call: Call[Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(self._ask(call))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def _ask(self, call: Call[Any]) -> Any:
        async with self._free:
            return await self._execute(call)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the waits that asked may be gone

    def _drop_old(self, now: float) -> None:
        old = [key for key, asked in self._asked.items() if now - asked.at > MAX_AGE_SECONDS and asked.answer.done()]
        for key in old:
            del self._asked[key]
