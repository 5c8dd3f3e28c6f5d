"""A session without Spark in a process of its own, whose REST API counts its requests. Argument: the file READY.

READY gets two addresses: that of the counted API, and that of an uncounted one, which also serves the counts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from benchmarks.harness import START_TIMEOUT_S, BenchmarkError
from ckpt_runtime.rest import server as rest_server
from ckpt_runtime.rest.app import create_app
from ckpt_runtime.testing.mini_cluster import MiniCluster

_COUNTS = "/benchmark/requests"


class Counting:
    """An application, and how often it received each request, as ``GET /jobs/<id>``."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.requests: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.requests[f"{scope['method']} {scope['path'].removeprefix('/v1')}"] += 1
        await self._app(scope, receive, send)

    async def tell(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The same application uncounted, and the counts."""
        if scope["path"] == _COUNTS:
            await JSONResponse(self.requests)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


@dataclass(frozen=True)
class CountedSession:
    """``url`` serves the requests that are measured, ``uncounted_url`` those of the benchmark itself."""

    url: str
    uncounted_url: str

    def requests(self) -> Counter[str]:
        """The requests so far."""
        return Counter(httpx.get(self.uncounted_url + _COUNTS, timeout=60).raise_for_status().json())


@contextmanager
def counted_session(directory: Path) -> Iterator[CountedSession]:
    """Raises BenchmarkError when it does not start."""
    ready, log_file = directory / "session.json", directory / "session.log"
    with log_file.open("wb") as log:
        command = [sys.executable, "-m", "benchmarks.counted_session", str(ready)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise BenchmarkError(f"the session did not start: {log_file.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        yield CountedSession(*json.loads(ready.read_text()))
    finally:
        process.communicate()


def _serve(ready: Path) -> None:
    """Until its standard input ends."""
    with MiniCluster() as cluster:
        counting = Counting(create_app(cluster.dispatcher, token=None))
        urls = []
        for app in (counting, counting.tell):
            _, port = cluster.call(rest_server.start(app, "127.0.0.1", 0, interface="asgi3"))
            urls.append(f"http://127.0.0.1:{port}")
        partial = ready.with_suffix(".partial")
        partial.write_text(json.dumps(urls))
        partial.replace(ready)
        sys.stdin.read()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
