"""Reading streams of events: lines, where the next connection continues, and what is no stream."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from ckpt_runtime.client.clients import AsyncCkptClient, CkptClient
from ckpt_runtime.client.errors import NotServed, UnexpectedAnswer, Unreachable
from ckpt_runtime.client.event_stream import EventFeed, StreamedEvent

STREAM = {"content-type": "text/event-stream; charset=utf-8"}
FIRST = 'id: s-1\nevent: start\ndata: {"session":"s"}\n\nid: s-2\nevent: job-status\ndata: {"jobid":"j"}\n\n'


class Server:
    """Answers with these streams, one after the other, and remembers where each was asked to begin."""

    def __init__(self, *answers: httpx.Response | str) -> None:
        self._answers: Iterator[httpx.Response | str] = iter(answers)
        self.asked: list[tuple[str, str | None]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((str(request.url.raw_path, "ascii"), request.headers.get("last-event-id")))
        answer = next(self._answers, None)
        if answer is None:
            raise httpx.ConnectError("gone")
        return httpx.Response(200, headers=STREAM, text=answer) if isinstance(answer, str) else answer


def followed(server: Server, *jobs: str) -> list[StreamedEvent]:
    events: list[StreamedEvent] = []
    with CkptClient("http://there:1", transport=httpx.MockTransport(server)) as client, pytest.raises(Unreachable):
        events.extend(client.follow_events(jobs or None, retry_timeout_s=0))
    return events


def test_next_connection_continues_after_the_last_event() -> None:
    again = ': keep-alive\nid: s-9\n\nevent: reset\ndata: {"reason":"why"}\nid: t-1\n\n: cut\nid: t'
    server = Server(FIRST, again)
    events = followed(server, "a" * 32, "b" * 32)
    assert [(event.id, event.type, event.job_id) for event in events] == [
        ("s-1", "start", None),
        ("s-2", "job-status", "j"),
        ("t-1", "reset", None),
    ]
    assert events[-1].session_id == "t"
    path = f"/events?job={'a' * 32}&job={'b' * 32}"
    assert server.asked == [(path, None), (path, "s-2"), (path, "t-1")]


def test_the_asynchronous_client_does_the_same() -> None:
    server = Server(FIRST, FIRST)

    async def follow() -> list[str]:
        seen: list[str] = []
        async with AsyncCkptClient("http://there:1", transport=httpx.MockTransport(server)) as client:
            with pytest.raises(Unreachable):
                async for event in client.follow_events(retry_timeout_s=0):
                    seen += [event.id]
        return seen

    assert asyncio.run(follow()) == ["s-1", "s-2"] * 2
    assert server.asked == [("/events", None), ("/events", "s-2"), ("/events", "s-2")]


@pytest.mark.parametrize("lines", ["data: [1]", "data: nonsense"])
def test_data_that_is_no_event_is_refused(lines: str) -> None:
    feed = EventFeed()
    assert list(feed.take(lines)) == []
    with pytest.raises(UnexpectedAnswer):
        list(feed.take(""))


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (httpx.Response(404, json={"errors": ["Not found: /events"]}), NotServed),
        (httpx.Response(200, text="<html>"), UnexpectedAnswer),
    ],
)
def test_server_without_streams_is_reported_at_once(answer: httpx.Response, error: type[Exception]) -> None:
    server = Server(answer)
    with CkptClient("http://there:1", transport=httpx.MockTransport(server)) as client, pytest.raises(error):
        next(client.follow_events())
    assert len(server.asked) == 1


def test_pauses_grow_until_an_event_comes() -> None:
    feed = EventFeed()
    away = Unreachable("http://there:1", "gone")
    pauses = [feed.pause_after(away, 0, 60) for _ in range(8)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == pauses[-2]
    for line in ("id: s-1", "data: {}", ""):
        list(feed.take(line))
    assert feed.pause_after(away, 1_000, 60) == pauses[0]
    with pytest.raises(Unreachable):
        feed.pause_after(away, 1_060, 60)
    assert feed.pause_after(None, 1_060, 60) > 0
