"""Requests that hang until their sender is gone: any process can be killed in the middle of one."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send


@dataclass(frozen=True)
class Hanging:
    """Of requests that match ``pattern``: ``carried_out`` but never answered, or never arrived."""

    pattern: str
    carried_out: bool
    came: threading.Event = field(default_factory=threading.Event)


async def _discarded(_: Message) -> None:
    """An answer that is lost."""


class Watched:
    """An application, how often each request came to it (``GET /jobs/<id>``), and those that hang."""

    def __init__(self, application: ASGIApp) -> None:
        self._application = application
        self._hanging: list[Hanging] = []
        self.requests: Counter[str] = Counter()

    @contextmanager
    def hanging(self, pattern: str, *, carried_out: bool = False) -> Iterator[Hanging]:
        """From now on such requests hang, until the end."""
        found = Hanging(pattern, carried_out)
        self._hanging.append(found)
        try:
            yield found
        finally:
            self._hanging.remove(found)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        line = f"{scope['method']} {scope['path']}"
        self.requests[line] += 1
        hanging = next((hanging for hanging in self._hanging if re.fullmatch(hanging.pattern, line)), None)
        if hanging is None:
            await self._application(scope, receive, send)
            return
        if hanging.carried_out:
            await self._application(scope, receive, _discarded)
        hanging.came.set()
        while (await receive())["type"] != "http.disconnect":
            pass
