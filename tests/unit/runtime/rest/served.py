"""The REST application on a real server and a free loopback port, in a thread of its own."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import FastAPI

from ckpt_runtime.rest import server


@contextmanager
def served(app: FastAPI, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """The base URL, while it is served."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="served")
    thread.start()
    try:
        running, port = asyncio.run_coroutine_threadsafe(server.start(app, "127.0.0.1", 0, tls=tls), loop).result(60)
        try:
            yield f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"
        finally:
            asyncio.run_coroutine_threadsafe(server.stop(running), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
