"""Events of streaming queries for the listeners of Spark Connect clients (``spark.streams.addListener``).

A client has one stream of events for all of its listeners. PySpark's client makes the event of a start itself, from the
answer to the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from pyspark.sql.connect.proto import StreamingQueryEventType

from ckpt_runtime.connect.queries import Queries, Query
from ckpt_runtime.jobmaster.progress import spark_time

_LOOK_S = 1.0
_IDLE_MS = 10_000
"""The time between two events of a query that reads nothing, as in Spark by default."""


class Event(NamedTuple):
    """One event: PySpark's number of its type, and its values as JSON."""

    kind: int
    text: str


class _Watched:
    """What the listeners of a client know about one query."""

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
            idle = {"id": self.query.id, "runId": self.query.id, "timestamp": report["timestamp"]}
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
        self._watched = {id_: _Watched(query) for id_, query in started.items()}
        self._ended: set[str] = set()

    async def skip_earlier(self) -> None:
        """Leaves out queries that have ended, and progress that was made, before the client had a listener."""
        for id_, watched in self._watched.items():
            for text in await self._queries.progress(watched.query):
                watched.seen = json.loads(text)["batchId"]
            if not await self._queries.is_active(watched.query):
                self._ended.add(id_)

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
                # A completed checkpoint is no event of the log.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), _LOOK_S)
        finally:
            stop_listening()

    async def _new(self, query: Query) -> Sequence[Event]:
        if query.id in self._ended:
            return ()
        watched = self._watched.setdefault(query.id, _Watched(query))
        result = await self._queries.result(query)
        events = [event for text in await self._queries.progress(query) if (event := watched.of_report(text))]
        if result.status is not None:
            self._ended.add(query.id)
            failure = await self._queries.failure(query) or None
            end = {"id": query.id, "runId": query.id, "exception": failure, "errorClassOnException": None}
            events.append(Event(StreamingQueryEventType.QUERY_TERMINATED_EVENT, json.dumps(end)))
        return events


def started_event(query: Query) -> str:
    """Returns the event of a query's start, from which PySpark's client calls ``onQueryStarted``."""
    now = spark_time(round(datetime.now(UTC).timestamp() * 1000))
    ids: dict[str, Any] = {"id": query.id, "runId": query.id}
    return json.dumps({**ids, "name": query.name or None, "timestamp": now, "jobTags": []})
