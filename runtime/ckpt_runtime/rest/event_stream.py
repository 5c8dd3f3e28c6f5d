"""Server-sent events from the session's event log, and the end of all streams when the server stops.

A stream keeps only its position in the log. While its client does not read, nothing is written to the socket; if the
log drops events during that time, the stream reports this by ``reset`` and ends. An event's id is the session's id and
a number.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp

from ckpt_runtime.jobmaster.event_log import EventLog, EventReader, EventsMissedError

KEEP_ALIVE_S = 15.0
"""After this time without an event, a comment is sent, with the id up to which there was no event."""


class EventStreamResponse(StreamingResponse):
    """A response that is not cached, and not buffered by proxies that honour its header."""

    media_type = "text/event-stream"

    def __init__(self, content: AsyncIterator[bytes], **options: Any) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(content, headers=headers, **options)


class EventStreams:
    """The open streams of one server."""

    def __init__(self) -> None:
        self._wakes: set[Callable[[], None]] = set()
        self.ended = False

    def end(self) -> None:
        """End all streams, each with an ``end`` event; later streams end at once."""
        self.ended = True
        # A copy, since a stream that ends leaves the set.
        for wake in tuple(self._wakes):
            wake()

    async def follow(
        self, log: EventLog, jobs: frozenset[str] | None, last_event_id: str | None
    ) -> AsyncIterator[bytes]:
        """Yield the bytes of one stream."""
        due = asyncio.Event()
        # Before the position in the log is read; otherwise an event in between would be delayed until the next one.
        silence = log.listen(due.set)
        self._wakes.add(due.set)
        try:
            reader, reset = _open(log, jobs, last_event_id)
            yield reset + _frame("start", {"session": log.session_id}, reader.last_event_id)
            async for frame in self._frames(log, reader, due):
                yield frame
        finally:
            silence()
            self._wakes.discard(due.set)

    async def _frames(self, log: EventLog, reader: EventReader, due: asyncio.Event) -> AsyncIterator[bytes]:
        while True:
            # Cleared before reading, so that an event that arrives afterwards sets it again.
            due.clear()
            try:
                events = reader.take()
            except EventsMissedError as error:
                yield _reset(log, error)
                return
            if events:
                yield b"".join(_frame(event.type, event.data, log.event_id(event.number)) for event in events)
            elif self.ended:
                yield _frame("end", {"reason": "the session ends"}, reader.last_event_id)
                return
            elif not await _occurs_within(due, KEEP_ALIVE_S):
                yield f": keep-alive\nid: {reader.last_event_id}\n\n".encode("ascii")


def end_streams(app: ASGIApp) -> None:
    """End the event streams of an application, if it has any, so that clients are notified and the server can stop."""
    state = app.state if isinstance(app, FastAPI) else None
    streams = getattr(state, "event_streams", None)
    if isinstance(streams, EventStreams):
        streams.end()


def _open(log: EventLog, jobs: frozenset[str] | None, last_event_id: str | None) -> tuple[EventReader, bytes]:
    try:
        return EventReader(log, jobs, last_event_id), b""
    except EventsMissedError as error:
        return EventReader(log, jobs), _reset(log, error)


def _reset(log: EventLog, error: EventsMissedError) -> bytes:
    """A ``reset`` frame with the newest event's id: the client must read all earlier state again."""
    return _frame("reset", {"reason": str(error)}, log.event_id(log.newest))


def _frame(kind: str, data: Any, event_id: str) -> bytes:
    return f"id: {event_id}\nevent: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode("ascii")


async def _occurs_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False
