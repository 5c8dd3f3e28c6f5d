"""Server-sent events from the session's event log, and the end of all streams with the server.

A stream keeps a place in the log and nothing else. While its client does not read, the socket is not written to; what
the log drops meanwhile is told by ``reset``, with which the stream ends. An event's id is the session's with a number.
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
"""After so long without an event a comment is sent, with the id up to which there was none."""


class EventStreamResponse(StreamingResponse):
    """Is not kept by caches, nor held back by proxies that listen to this header."""

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
        """Each stream says so and ends; later ones at once."""
        self.ended = True
        # A copy, since a stream that ends leaves the set.
        for wake in tuple(self._wakes):
            wake()

    async def follow(
        self, log: EventLog, jobs: frozenset[str] | None, last_event_id: str | None
    ) -> AsyncIterator[bytes]:
        """The bytes of one stream."""
        due = asyncio.Event()
        # Before the place in the log is taken, or an event in between would not be told until the next one.
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
            # Before the look: an event that comes behind it sets it again.
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
            elif not await _happens(due, KEEP_ALIVE_S):
                yield f": keep-alive\nid: {reader.last_event_id}\n\n".encode("ascii")


def end_streams(app: ASGIApp) -> None:
    """Of an application that has any: those who follow them are told, and the server can stop."""
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
    """Goes on behind the newest event; everything before it has to be read anew."""
    return _frame("reset", {"reason": str(error)}, log.event_id(log.newest))


def _frame(kind: str, data: Any, event_id: str) -> bytes:
    return f"id: {event_id}\nevent: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode("ascii")


async def _happens(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False
