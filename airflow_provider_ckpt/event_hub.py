"""The hub of all waits of one process at one job manager, which wakes them.

The hub has one stream of events, or one poll where there is no stream. A wait polls when it begins, when an event
concerns its condition, and otherwise rarely, together with all other waits for its job. Simultaneous polls share their
requests, and no request is sent while the job manager is known not to answer. The hub lives as long as any wait does.
All its times are those of the event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeAlias, TypeVar

from airflow_provider_ckpt.conditions import base
from airflow_provider_ckpt.conditions.base import POLL, MissingPolicy, Once, jittered
from ckpt_runtime.client import requests
from ckpt_runtime.client.clients import AsyncCkptClient
from ckpt_runtime.client.errors import CkptClientError, is_passing
from ckpt_runtime.client.event_stream import RESET, START, EventFeed, StreamedEvent
from ckpt_runtime.client.requests import Call
from ckpt_runtime.contract.jobs import JobDetails, JobLine

if TYPE_CHECKING:
    from airflow_provider_ckpt.hooks.ckpt import CkptHook

T = TypeVar("T")
_Standing: TypeAlias = tuple[str, Counter[str]]
"""A job's state, and how many of its subtasks are in which state."""
logger = logging.getLogger(__name__)

FALLBACK_POLL_SECONDS = 300.0
"""Seconds between two polls of a wait that gets all events, so that a lost event cannot hang a task."""
WAITS_PER_FALLBACK_POLL = 128
"""Up to this many waits poll at that interval; twice as many poll half as often, which limits their requests."""
ANY_JOB: Final = "*"
"""Stands in for a job id: waits for events of any job."""
LINES_PER_SECOND = 4.0
"""Repeated lines of all waits of the process together: Airflow's triggerer takes 4 kB of its triggers' logs at a time,
between queries to its database. Triggers that log faster than this are throttled, which delays all triggers."""
GAP_SECONDS = 0.25
"""Minimum time between two polls of one wait, however fast events come."""
STARTING_SECONDS = 5.0
"""How long a stream may take to begin: it begins at once, unless a proxy delays it."""
SETTLING_SECONDS = 2.0
"""How long a first poll waits for the stream to begin: later changes then arrive as events."""
STREAM_AGAIN_SECONDS = 60.0
"""After this time, a stream is requested again from a job manager that did not offer one."""
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.2, 5.0


MAX_AGE_SECONDS = 1.0
"""Maximum age of an answer that a second wait shares."""
AT_A_TIME = 8
"""Maximum number of concurrent requests."""


class Interest(Protocol):
    """The subject of a wait, such as a condition."""

    absence: MissingPolicy

    def concerns(self, event: StreamedEvent) -> bool:
        """Whether an event is a reason for another poll."""


class Member(Once):
    """The polls of one wait at a hub. It is called when an event has arrived since the last poll."""

    def __init__(self, hub: EventHub, condition: Interest, job_id: str, interval: float) -> None:
        self._hub = hub
        self.condition = condition
        self.job_id = job_id
        self.interval = interval
        self._call = asyncio.Event()
        self._looked_at = -GAP_SECONDS
        self._seen: _Standing | None = None
        """The job's state and subtask counts in the details that this wait got last."""

    def call(self) -> None:
        self._call.set()

    @property
    def called(self) -> bool:
        return self._call.is_set()

    def begins(self) -> None:
        self._call.clear()
        self._looked_at = _now()

    def has_seen_another(self, line: JobLine) -> bool:
        """Whether the details that this wait got last contradict the job's line in the list of jobs.

        Flink answers with details that may be as old as ``web.refresh-interval``, and with a list that is current.
        A wait that polls because the list has changed may therefore get details from before the change, and polls
        again.
        """
        return self._seen is not None and self._seen != _standing_of(line.state, [line.tasks])

    def pace(self) -> float:
        notifies = self._hub.streams if self.job_id == ANY_JOB else self._hub.notifies
        if self.condition.absence.in_doubt or not notifies:
            return jittered(self.interval)
        return self._hub.seconds_until_polled(self.job_id)

    def repeat_interval(self) -> float:
        return max(base.INTERVAL_SECONDS, sum(hub.waiting for hub in _hubs.values()) / LINES_PER_SECOND)

    async def settled(self) -> None:
        """Wait until it is known whether a stream or a poll wakes the waits; at most :data:`SETTLING_SECONDS`."""
        await self._hub.settled(SETTLING_SECONDS)

    async def execute(self, call: Call[T], *, retry_timeout_s: float | None = None) -> T:
        """Send the call once, or share the answer of another wait that has just sent the same."""
        answer = await self._hub.ask(call, self.job_id)
        if isinstance(answer, JobDetails) and answer.job_id == self.job_id:
            self._seen = _standing_of(answer.state, [vertex.tasks for vertex in answer.vertices])
        return answer

    async def rest(self, seconds: float) -> None:
        await _set_within(self._call, seconds)
        if self.called:
            await asyncio.sleep(max(0.0, self._looked_at + GAP_SECONDS - _now()))


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request in progress or its answer; ``since`` is the number of the last change before the request."""

    since: int
    at: float
    answer: asyncio.Task[Any]

    @property
    def is_usable(self) -> bool:
        """An error is raised in the waits that shared the request, and not in later ones."""
        task = self.answer
        return not task.done() or (not task.cancelled() and task.exception() is None)


class SharedAnswers:
    """Answers of one job manager that several waits share: after an event the same call is sent once for all of them.

    ``changed`` makes answers from before useless for that job.
    """

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
        """Invalidates earlier answers about the job, or about all jobs."""
        if job_id is None:
            self._all_changes += 1
        else:
            self._changes[job_id] = self._changes.get(job_id, 0) + 1

    def forget(self, job_id: str) -> None:
        """Stops counting the changes of a job for which no wait is left."""
        self._changes.pop(job_id, None)
        for key in [key for key in self._asked if key[0] == job_id]:
            del self._asked[key]

    async def get(self, call: Call[T], job_id: str) -> T:
        """Raises the errors of the call. A wait that stops waiting does not cancel the answer for the others."""
        if call.method != "GET":
            result: T = await self._execute(call)
            return result
        now = asyncio.get_running_loop().time()
        since = self._all_changes + self._changes.get(job_id, 0)
        key = (job_id, call.path, *sorted(call.query.items()))
        known = self._asked.get(key)
        if known is None or known.since != since or now - known.at > MAX_AGE_SECONDS or not known.is_usable:
            self._drop_old(now)
            task = asyncio.get_running_loop().create_task(self._ask(call))
            self._tasks.add(task)
            task.add_done_callback(self._ended)
            known = self._asked[key] = _Asked(since, now, task)
        answer: T = await asyncio.shield(known.answer)
        return answer

    async def _ask(self, call: Call[Any]) -> Any:
        async with self._free:
            return await self._execute(call)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the waits that shared the request may have ended

    def _drop_old(self, now: float) -> None:
        old = [key for key, asked in self._asked.items() if now - asked.at > MAX_AGE_SECONDS and asked.answer.done()]
        for key in old:
            del self._asked[key]


class EventHub:
    """Use :func:`joined`."""

    def __init__(self, client: AsyncCkptClient) -> None:
        self._client = client
        self._members: dict[str, set[Member]] = {}
        self._begun: dict[str, float] = {}
        """For each job, the time at which its waits could first have polled."""
        self.waiting = 0
        self._answers = SharedAnswers(client.execute)
        self._away: CkptClientError | None = None
        self._settled = asyncio.Event()
        self.notifies = self.streams = False
        # Not in the context of the trigger that comes first: lines logged here belong to no task's log.
        loop = asyncio.get_running_loop()
        self._watching = loop.create_task(self._watch(), name="ckpt-event-hub", context=contextvars.Context())

    # --- for waits

    def join(self, condition: Interest, job_id: str, interval: float) -> Member:
        member = Member(self, condition, job_id, interval)
        if job_id not in self._members:
            self._members[job_id] = set()
            # At a random moment of a period: jobs that are joined together must not all be looked at together.
            self._begun[job_id] = _now() - random.uniform(0, FALLBACK_POLL_SECONDS)
        self._members[job_id].add(member)
        self.waiting += 1
        return member

    def leave(self, member: Member) -> None:
        members = self._members[member.job_id]
        members.discard(member)
        self.waiting -= 1
        if not members:
            del self._members[member.job_id], self._begun[member.job_id]
            self._answers.forget(member.job_id)

    @property
    def is_idle(self) -> bool:
        return not self._members

    def close(self) -> None:
        """Closes the hub; its connections close as soon as the event loop runs."""
        self._watching.cancel()

    def seconds_until_polled(self, job_id: str) -> float:
        """Seconds until all waits for a job poll together."""
        return seconds_until_polled(_now() - self._begun[job_id], self.waiting)

    async def settled(self, seconds: float) -> None:
        """Waits until it is known whether a stream or a poll wakes the waits."""
        await _set_within(self._settled, seconds)

    async def ask(self, call: Call[T], job_id: str) -> T:
        if self._away is not None:
            raise self._away
        return await self._answers.get(call, job_id)

    # --- what wakes them

    def _notify(self, event: StreamedEvent) -> None:
        for job_id in (event.job_id or "", ANY_JOB):
            members = self._members.get(job_id, ())
            if members:
                # Before the calls: a wait that looks because of the event must not get an answer from before it.
                self._answers.changed(job_id)
            for member in members:
                if member.condition.concerns(event):
                    member.call()

    def _notifications_begin(self) -> None:
        """Events arrive from now on; events from before a break follow, or the stream is reset."""
        missed = not self.notifies or self._away is not None
        self.notifies, self._away = True, None
        self._settled.set()
        if missed:
            self._call_all()

    def _call_all(self) -> None:
        self._answers.changed()
        for members in self._members.values():
            for member in members:
                member.call()

    def _is_away(self, error: CkptClientError) -> None:
        """Tells the other waits that the job manager is away, so that they send no requests."""
        news = self._away is None
        self._away = error
        self._settled.set()
        if news:
            self._call_all()

    # --- the one stream, or the one poll

    async def _watch(self) -> None:
        async with self._client, self._answers:
            while True:
                try:
                    await self._notify_by_stream_or_poll()
                except Exception:  # a mistake here may cost time, but must not fail a task
                    logger.exception(
                        "the event hub of %s failed; its waits poll on their own until it is restarted",
                        self._client.url,
                    )
                    self.notifies, self.streams, self._away = False, False, None
                    self._settled.set()
                    self._call_all()
                    await asyncio.sleep(STREAM_AGAIN_SECONDS)

    async def _notify_by_stream_or_poll(self) -> None:
        feed, pause = EventFeed(), FIRST_PAUSE_SECONDS
        while True:
            begun, lost = await self._stream(feed)
            if not begun and (trouble := await self._trouble(lost)) is None:
                await self._poll(STREAM_AGAIN_SECONDS)
                feed, pause = EventFeed(), FIRST_PAUSE_SECONDS
                continue
            if begun:
                pause = FIRST_PAUSE_SECONDS
            else:
                self._is_away(trouble)  # type: ignore[arg-type]
            # Spread out, since all triggerers lose a driver at the same moment.
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))
            pause = min(pause * 2, MAX_PAUSE_SECONDS)

    async def _stream(self, feed: EventFeed) -> tuple[bool, CkptClientError | None]:
        """Run one connection; return whether the stream has begun, and the error that has ended it."""
        begun = False
        try:
            async with asyncio.timeout(STARTING_SECONDS) as limit:
                async for event in self._client.stream_events(feed):
                    begun = True
                    # It has begun; from now on repeat_interval is for the client's read timeout to notice.
                    limit.reschedule(None)
                    if event.type == START:
                        self.streams = True
                        self._notifications_begin()
                    elif event.type == RESET:
                        self._call_all()
                    elif event.job_id is not None:
                        self._notify(event)
        except TimeoutError:
            return begun, None
        except CkptClientError as error:
            return begun, error
        return begun, None

    async def _trouble(self, lost: CkptClientError | None) -> CkptClientError | None:
        """Return the error that keeps all requests from being served; None when only the stream is unavailable."""
        if lost is not None and not is_passing(lost):
            return None
        try:
            await self._client.execute(requests.list_jobs())
        except CkptClientError as error:
            return error if is_passing(error) else None
        return None

    async def _poll(self, seconds: float) -> None:
        """Ask about all jobs in one request; what it cannot show is looked at equally often."""
        end, known = _now() + seconds, dict[str, JobLine]()
        self.notifies = self.streams = False
        while _now() < end:
            try:
                jobs = await self._client.execute(requests.list_jobs())
            except CkptClientError as error:
                if is_passing(error):
                    self._is_away(error)
                else:
                    self._notifications_begin()
                    self._call_all()  # each of them is refused individually
            else:
                self._notifications_begin()
                present = {line.job_id: line for line in jobs}
                self._compare(known, present)
                known = present
            await asyncio.sleep(
                min((member.interval for members in self._members.values() for member in members), default=1.0)
            )

    def _compare(self, before: dict[str, JobLine], now: dict[str, JobLine]) -> None:
        for job_id in tuple(self._members):
            line, earlier = now.get(job_id), before.get(job_id)
            if (
                line is None
                or earlier is None
                or _looks(line) != _looks(earlier)
                or any(member.has_seen_another(line) for member in self._members[job_id])
            ):
                self._notify(StreamedEvent("", "job-status", {"jobid": job_id}))
            self._notify(StreamedEvent("", POLL, {"jobid": job_id}))


def _standing_of(state: str, counts: Iterable[Mapping[str, int]]) -> _Standing:
    """The list has the counts of subtasks once for the whole job, the details have them for each vertex."""
    tasks = Counter[str]()
    for each in counts:
        tasks.update({name.lower(): number for name, number in each.items() if name != "total"})
    return state, tasks


def _looks(line: JobLine) -> tuple[object, ...]:
    """Return all fields but the duration, which always grows."""
    return line.state, line.last_modification_ms, line.tasks


def _now() -> float:
    return asyncio.get_running_loop().time()


def seconds_until_polled(passed: float, waiting: int) -> float:
    """Return the seconds until the next of the regular moments, counted from the same origin as ``passed``.

    The period grows with the number of waits. The moments of a longer period are also moments of a shorter one.
    """
    period = FALLBACK_POLL_SECONDS
    while period < FALLBACK_POLL_SECONDS * waiting / WAITS_PER_FALLBACK_POLL:
        period *= 2
    left = period - passed % period
    return left if left > GAP_SECONDS else left + period


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass


_hubs: Final[dict[tuple[object, ...], EventHub]] = {}


@asynccontextmanager
async def joined(hook: CkptHook, condition: Interest, job_id: str, interval: float) -> AsyncIterator[Member]:
    """Give a place at this process's hub for a connection's job manager. The last member to leave closes the hub."""
    # The loop is part of the key: connections belong to one loop, and a process may run several in sequence.
    key = (asyncio.get_running_loop(), await hook.aendpoint())
    if key not in _hubs:
        client = await hook.aget_conn(retry_timeout=0)
        if key in _hubs:  # another trigger was faster
            await client.close()
        else:
            _hubs[key] = EventHub(client)
    hub = _hubs[key]
    member = hub.join(condition, job_id, interval)
    try:
        yield member
    finally:
        hub.leave(member)
        if hub.is_idle:
            del _hubs[key]
            hub.close()
