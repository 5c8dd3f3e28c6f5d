"""The sessions of Spark Connect clients: their views of streams, options and queries.

Also the events of queries for their listeners (``spark.streams.addListener``). A client has one stream of events for
all of its listeners. PySpark's client makes the event of a start itself, from the answer to the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

import msgspec
from pyspark.sql.connect.proto import Command, StreamingQueryEventType

from ckpt_runtime.configuration.pipeline_options import PipelineOptions
from ckpt_runtime.configuration.registry import DEFAULT_CHECKPOINTS_DIRECTORY
from ckpt_runtime.connect.queries import Queries, Query
from ckpt_runtime.connect.script import SUBMITTED_OPTIONS
from ckpt_runtime.frontend.analysis import ANALYZER, views_read
from ckpt_runtime.frontend.capture import Capture, CapturedQuery
from ckpt_runtime.frontend.connect_service import Service
from ckpt_runtime.frontend.explain import explanation
from ckpt_runtime.frontend.job import DataSources, JobOptions
from ckpt_runtime.frontend.mapping import spark_columns
from ckpt_runtime.frontend.typed_plan import Analysis, AnalysisNeeded
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.jobmaster.progress import spark_time

_LOOK_S = 1.0
_IDLE_MS = 10_000
"""The time between two events of a query that reads nothing, as in Spark by default."""


class Event(NamedTuple):
    """One event: PySpark's number of its type, and its values as JSON."""

    kind: int
    text: str


class _Watched:
    """The state of one query as reported to a client's listeners."""

    def __init__(self, query: Query) -> None:
        self.query = query
        self.seen = -1
        self._event_time: object = {}
        self._posted_at_ms = 0

    def of_report(self, text: str) -> Event | None:
        """Returns the event of a report that is new: of progress, or of idleness if nothing was read."""
        report = json.loads(text)
        if report["batchId"] <= self.seen:
            return None
        self.seen = report["batchId"]
        now_ms = round(datetime.fromisoformat(report["timestamp"]).timestamp() * 1000)
        event_time = report.get("eventTime", {})
        moved, self._event_time = event_time != self._event_time, event_time
        if report["numInputRows"] or moved:
            event = Event(StreamingQueryEventType.QUERY_PROGRESS_EVENT, json.dumps({"progress": report}))
        elif now_ms - self._posted_at_ms >= _IDLE_MS:
            idle = {"id": self.query.id, "runId": self.query.run_id, "timestamp": report["timestamp"]}
            event = Event(StreamingQueryEventType.QUERY_IDLE_EVENT, json.dumps(idle))
        else:
            return None
        self._posted_at_ms = now_ms
        return event


class ListenerBus:
    """The stream of events of one client, from when it adds its first listener until it removes the last one."""

    def __init__(self, queries: Queries, started: Mapping[str, Query]) -> None:
        self._queries = queries
        self._started = started
        self._changed = asyncio.Event()
        self._removed = False
        self._watched = {run_id: _Watched(query) for run_id, query in started.items()}
        self._ended: set[str] = set()

    async def skip_earlier(self) -> None:
        """Leaves out queries that have ended, and progress that was made, before the client had a listener."""
        for run_id, watched in self._watched.items():
            for text in await self._queries.progress(watched.query):
                watched.seen = json.loads(text)["batchId"]
            if not await self._queries.is_active(watched.query):
                self._ended.add(run_id)

    def remove(self) -> None:
        """Ends the stream after the events that have happened."""
        self._removed = True
        self._changed.set()

    async def events(self) -> AsyncIterator[Sequence[Event]]:
        """Yields events as they happen: progress with each completed checkpoint, and the ends of queries."""
        stop_listening = await self._queries.listen(self._changed.set)
        try:
            while True:
                self._changed.clear()
                removed = self._removed
                if events := [event for query in [*self._started.values()] for event in await self._new(query)]:
                    yield events
                if removed:
                    return
                # A completed checkpoint is not an event of the log.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), _LOOK_S)
        finally:
            stop_listening()

    async def _new(self, query: Query) -> Sequence[Event]:
        if query.run_id in self._ended:
            return ()
        watched = self._watched.setdefault(query.run_id, _Watched(query))
        result = await self._queries.result(query)
        events = [event for text in await self._queries.progress(query) if (event := watched.of_report(text))]
        if result.status is not None:
            self._ended.add(query.run_id)
            failure = await self._queries.failure(query)
            reason = None if failure is None else failure.reason
            condition = CONDITION.search(reason or "")
            ids = {"id": query.id, "runId": query.run_id}
            end = {**ids, "exception": reason, "errorClassOnException": condition and condition[1]}
            events.append(Event(StreamingQueryEventType.QUERY_TERMINATED_EVENT, json.dumps(end)))
        return events


def started_event(query: Query) -> str:
    """Returns the event of a query's start, from which PySpark's client calls ``onQueryStarted``."""
    now = spark_time(round(datetime.now(UTC).timestamp() * 1000))
    ids: dict[str, Any] = {"id": query.id, "runId": query.run_id}
    return json.dumps({**ids, "name": query.name or None, "timestamp": now, "jobTags": []})


T = TypeVar("T")

CONDITION = re.compile(r"\[([A-Z][A-Z0-9_]*(?:\.[A-Z0-9_]+)*)\] ")
"""Spark's condition in a message, such as ``[PATH_NOT_FOUND]``."""

MOST_SESSIONS = 200
"""Maximum number of sessions. Beyond it the least recently used one is dropped; its jobs continue to run."""


class ClientSession:
    """The state of one client's session.

    ``submitted`` are options of the engine for its queries that override those which the client sets.

    ``views`` holds the commands that made views of streams, by the views' names, ``queries`` the runs of queries that
    the client has started and ``starts`` the commands that started them, by the ids of the runs, and ``operations`` the
    ids of the operations that are answered here and that the client has not released. ``listeners`` is the stream of
    events while the client has listeners. ``reset`` has the ids of the ended runs for which ``awaitAnyTermination``
    does not return any more. ``starting`` is held while a query is started.
    """

    def __init__(self, submitted: Mapping[str, str]) -> None:
        self.options = JobOptions(submitted)
        self.settings: dict[str, str] = {}
        self.views: dict[str, Any] = {}
        self.queries: dict[str, Query] = {}
        self.reset: set[str] = set()
        self.starts: dict[str, Any] = {}
        self.listeners: ListenerBus | None = None
        self.operations: set[str] = set()
        self._analyses: dict[str, str] = {}
        self._capture = Capture(
            self._analyses,
            lambda source: spark_columns(source, DataSources().resolve),
            self.options.set,
            # A plan that is only shown stages no rows there.
            option=lambda key: "/" if key == DEFAULT_CHECKPOINTS_DIRECTORY else self.options.get(key),
            explain=self._explain,
        )
        self._service = Service(self._capture)
        self.starting = asyncio.Lock()
        self._lock = asyncio.Lock()

    def configure(self, key: str, value: str) -> None:
        """Sets an option. Raises PlanError, InvalidOptionError or UnknownOptionError; an error changes nothing."""
        self._service.set(key, value)
        if key.startswith("spark."):
            self.settings[key] = value

    def unset(self, key: str) -> None:
        """Removes an option of Spark. Raises PlanError for one of the engine."""
        self._service.unset(key)
        self.settings.pop(key, None)

    async def analyzed(self, request: Any) -> Any:
        """Answers an ``AnalyzePlanRequest`` about a stream. Raises PlanError for one that cannot be answered."""
        return await self._with_spark(lambda: self._service.answer("AnalyzePlan", request))

    async def explained(self, start: Any, *, extended: bool) -> str:
        """Returns the plan of a query by the command that started it. Raises PlanError."""

        def explain() -> str:
            capture = self._capture
            query = CapturedQuery(start, capture.analysis_of(capture.request_of(start.input)))
            return self._explain(capture, query, extended)

        return await self._with_spark(explain)

    def _explain(self, capture: Capture, of: Analysis | CapturedQuery, extended: bool) -> str:
        capture.explained.clear()
        parallelism = self.options.effective.get(PipelineOptions.PARALLELISM)
        return explanation(capture, of, DataSources().resolve, parallelism, extended=extended)

    async def add_view(self, request: Any) -> None:
        """Keeps the view of a stream that an ``ExecutePlanRequest`` makes. Raises PlanError for an invalid one."""
        command, before = Command(), dict(self._capture.views)
        command.CopyFrom(request.plan.command)  # the answer replaces a statement by the query of its view
        await self._with_spark(lambda: self._service.answer("ExecutePlan", request))
        for name in [name for name, view in self._capture.views.items() if before.get(name) is not view]:
            self.views.pop(name, None)  # it may read views that are newer than the one before it
            self.views[name] = command

    def forget_view(self, name: str) -> bool:
        """Forgets the view of a stream, which was dropped or replaced; returns whether there was one."""
        known = [view for view in self.views if view.lower() == name.lower()]
        for view in known:
            del self.views[view]
            self._capture.views.pop(view, None)
        return bool(known)

    def commands_of(self, command: Any) -> list[Any]:
        """Returns the commands that make a command's views, in their order, and then the command itself."""
        views = {name: view.SerializeToString() for name, view in self.views.items()}
        return [*(self.views[name] for name in views_read([command.SerializeToString()], views)), command]

    async def _with_spark(self, answer: Callable[[], T]) -> T:
        """Runs ``answer`` repeatedly, with the answers that it needs from Spark, until none is missing."""

        def complete() -> T:
            while True:
                try:
                    return answer()
                except AnalysisNeeded as needed:
                    self._analyses.update(ANALYZER.answer(needed.text))
                    self._capture.forget_questions()

        async with self._lock:
            return await asyncio.to_thread(complete)


def _submitted(call: Any) -> Mapping[str, str]:
    """Raises PlanError for metadata of another form."""
    text = dict(call.invocation_metadata()).get(SUBMITTED_OPTIONS, "{}")
    try:
        return msgspec.json.decode(text, type=dict[str, str])
    except msgspec.DecodeError as error:
        raise PlanError(SUBMITTED_OPTIONS, f"it is not a JSON object of texts: {error}") from error


class ClientSessions:
    """The sessions by the ids of user and session that each request carries."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[tuple[str, str], ClientSession] = OrderedDict()

    def of(self, request: Any, call: Any) -> ClientSession:
        """Returns the session of a request, a new one for a new id, with the options that come with the call."""
        key = (request.user_context.user_id, request.session_id)
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = ClientSession(_submitted(call))
        self._sessions.move_to_end(key)
        if len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return session

    def release(self, request: Any) -> None:
        """Drops a session. Its jobs continue to run."""
        session = self._sessions.pop((request.user_context.user_id, request.session_id), None)
        if session is not None and session.listeners is not None:
            session.listeners.remove()
