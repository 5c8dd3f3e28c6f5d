"""Reading server-sent events: the request, parsing lines into events, and when to reconnect. No I/O and no clock.

A stream begins with ``start`` and ends with ``end``. ``reset`` says that events were missed: a reader that follows jobs
by events then has to read their state again. Event ids begin with the session's id, so events of another driver are
recognised.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import httpx

from ckpt_runtime.client.errors import CkptClientError, UnexpectedAnswer, is_passing
from ckpt_runtime.client.requests import Call
from ckpt_runtime.client.transport import read_answer

READ_TIMEOUT_S = 45.0
"""Three times the server's keep-alive interval."""
FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 5.0

START, RESET, END = "start", "reset", "end"
_MEDIA_TYPE = "text/event-stream"


@dataclass(frozen=True, slots=True)
class StreamedEvent:
    """``docs/rest.md`` describes ``data``. ``start``, ``reset`` and ``end`` are events of the stream itself."""

    id: str
    type: str
    data: Mapping[str, Any]

    @property
    def job_id(self) -> str | None:
        """The job that the event belongs to."""
        found = self.data.get("jobid")
        return found if isinstance(found, str) else None

    @property
    def session_id(self) -> str:
        """The session (driver) that sent the event."""
        return self.id.rpartition("-")[0]


class EventFeed:
    """Follows events over one connection after the other.

    The next connection continues after ``last_event_id``; with None, it continues with new events only.
    """

    def __init__(self, jobs: Collection[str] | None = None, last_event_id: str | None = None) -> None:
        query = "" if jobs is None else "?" + urlencode([("job", job_id) for job_id in jobs])
        self.call: Call[None] = Call("GET", "/events", lambda _: None, feature="streams of events")
        self._url = self.call.path + query
        self.last_event_id = last_event_id
        self._pause = FIRST_PAUSE_S
        self._away_since: float | None = None
        self._id, self._kind = last_event_id, ""
        self._data: list[str] = []

    def request(self, timeout_s: float) -> dict[str, Any]:
        """Arguments of ``httpx``'s ``stream``."""
        headers = {"Accept": _MEDIA_TYPE}
        if self.last_event_id is not None:
            headers["Last-Event-ID"] = self.last_event_id
        # A partial event of the previous connection is dropped and requested again.
        self._id, self._kind, self._data = self.last_event_id, "", []
        timeout = httpx.Timeout(timeout_s, read=READ_TIMEOUT_S)
        return {"method": "GET", "url": self._url, "headers": headers, "timeout": timeout}

    def is_stream(self, response: httpx.Response) -> bool:
        """Whether events follow. If not, :meth:`refused` returns the reason after the answer has been read."""
        return response.status_code == 200 and response.headers.get("content-type", "").startswith(_MEDIA_TYPE)

    def refused(self, response: httpx.Response) -> CkptClientError:
        """Return the error that says why the answer is not a stream."""
        try:
            read_answer(self.call, response)
        except CkptClientError as error:
            return error
        return UnexpectedAnswer(response.status_code, ["GET /events: the answer is not a stream of events"])

    def take(self, line: str) -> Iterator[StreamedEvent]:
        """Take the next line of the stream; yields an event once it is complete. Raises :class:`UnexpectedAnswer`."""
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "id":
            self._id = value
        elif name == "event":
            self._kind = value
        elif name == "data":
            self._data.append(value)
        elif not line:
            # An event is complete only with the blank line: one that breaks off before it does not count as seen.
            kind, data, self.last_event_id = self._kind, self._data, self._id
            self._kind, self._data = "", []
            if data:
                self._pause, self._away_since = FIRST_PAUSE_S, None
                try:
                    found = json.loads("\n".join(data))
                except ValueError as error:
                    raise UnexpectedAnswer(200, [f"GET /events: an event's data is not JSON: {error}"]) from error
                if not isinstance(found, dict):
                    raise UnexpectedAnswer(200, ["GET /events: an event's data is not an object"])
                yield StreamedEvent(self.last_event_id or "", kind, found)

    def pause_after(self, error: CkptClientError | None, now: float, retry_timeout_s: float) -> float:
        """Seconds until the next connection; ``error`` is None after a stream that has ended.

        Raises ``error`` if it is not transient, or if no event came for ``retry_timeout_s`` since the first such pause.
        """
        self._away_since = now if self._away_since is None else self._away_since
        if error is not None and (not is_passing(error) or now - self._away_since >= retry_timeout_s):
            raise error
        pause, self._pause = self._pause, min(self._pause * 2, MAX_PAUSE_S)
        return pause
