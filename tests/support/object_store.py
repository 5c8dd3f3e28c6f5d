"""An S3 server on this machine (moto, real HTTP), found by all processes of a test, that fails on request."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote
from uuid import uuid4

import pytest
from fsspec.config import conf
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from s3fs import S3FileSystem
from werkzeug.serving import make_server

from ckpt_runtime.storage.filesystem import Location, resolve
from tests.support.patience import patient

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
Wanted = Callable[[str, str], bool]
"""By method and path, ``/bucket/key``."""

IMPATIENT_S = 1.5
"""For tests of requests that get no answer: those of busy processes may well take longer."""


def _settings(read_timeout_s: float) -> dict[str, Any]:
    """As ``FSSPEC_S3`` gives them to s3fs."""
    return {
        "config_kwargs": {"connect_timeout": 10, "read_timeout": read_timeout_s},
        "default_block_size": 5 << 20,  # the smallest part of an upload in parts
    }


@dataclass
class _Fault:
    wanted: Wanted
    times: int
    status: int
    code: str
    takes_effect: bool
    silent: bool
    cut: bool
    met: int = 0


@dataclass
class Held:
    """Requests that have arrived, and are served when the test releases them. ``served`` counts those."""

    wanted: Wanted
    arrived: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    met: int = 0
    served: int = 0


@dataclass
class ObjectStore:
    """One server. ``requests`` counts what it was asked for, by method and status; copies within it are a COPY.

    ``log`` has the method and path of each request that it has answered, and of a COPY what was copied.
    """

    url: str = ""
    honours_conditions: bool = True
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    log: list[tuple[str, str, str]] = field(default_factory=list)
    _application: Application = field(default_factory=lambda: DomainDispatcherApplication(create_backend_app))
    _faults: list[_Fault] = field(default_factory=list)
    _held: Held | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _conditional: threading.Lock = field(default_factory=threading.Lock)
    _patience: threading.Event = field(default_factory=threading.Event)

    def __call__(self, environment: dict[str, Any], respond: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environment["REQUEST_METHOD"], environment["PATH_INFO"]
        if not self.honours_conditions:
            environment.pop("HTTP_IF_NONE_MATCH", None)
        held = self._held
        if held is not None and held.wanted(method, path):
            return self._served_later(held, environment, respond)
        fault = self._next_fault(method, path)
        if fault is not None and fault.cut:
            return self._cut_off(environment, respond, takes_effect=fault.takes_effect)
        if fault is None or fault.takes_effect:
            answer = self._served(environment, respond, heard=fault is None)
            if fault is None:
                return answer
        if fault.silent:
            # Until the client has given up.
            self._patience.wait(IMPATIENT_S * 4)
        self._count(method, str(fault.status))
        respond(f"{fault.status} {fault.code}", [("Content-Type", "application/xml")])
        text = f"<Error><Code>{fault.code}</Code><Message>as the test wants it</Message></Error>"
        return [] if method == "HEAD" else [text.encode()]

    def _served_later(self, held: Held, environment: dict[str, Any], respond: Callable[..., Any]) -> Iterable[bytes]:
        with self._lock:
            held.met += 1
        held.arrived.set()
        held.go_on.wait(patient(120))
        try:
            return self._served(environment, respond, heard=True)
        finally:
            with self._lock:
                held.served += 1

    @contextmanager
    def holding(self, wanted: Wanted) -> Iterator[Held]:
        """What is wanted is served behind the block, whether its client still waits or not."""
        self._held = held = Held(wanted)
        try:
            yield held
        finally:
            self._held = None
            held.go_on.set()

    def _served(self, environment: dict[str, Any], respond: Callable[..., Any], *, heard: bool) -> Iterable[bytes]:
        source = unquote(environment.get("HTTP_X_AMZ_COPY_SOURCE", ""))
        method = "COPY" if source else environment["REQUEST_METHOD"]

        def noted(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            if heard:
                self._count(method, status.partition(" ")[0])
                self.log.append((method, environment["PATH_INFO"], source))
                return respond(status, headers, *more)
            return lambda _: None

        if "HTTP_IF_NONE_MATCH" in environment:
            with self._conditional:  # moto looks first and writes then
                return list(self._application(environment, noted))
        return list(self._application(environment, noted))

    def _cut_off(
        self, environment: dict[str, Any], respond: Callable[..., Any], *, takes_effect: bool
    ) -> Iterable[bytes]:
        """The connection ends without an answer, or in the middle of the body of one."""
        if takes_effect:
            (body,) = self._served(environment, respond, heard=True)
            yield body[: len(body) // 2]
        with suppress(OSError):
            environment["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionAbortedError("as the test wants it")

    def _next_fault(self, method: str, path: str) -> _Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.met < fault.times and fault.wanted(method, path):
                    fault.met += 1
                    return fault
        return None

    def _count(self, method: str, status: str) -> None:
        with self._lock:
            self.requests[method, status] += 1

    @contextmanager
    def failing(
        self,
        wanted: Wanted,
        *,
        times: int = 1_000_000,
        status: int = 503,
        code: str = "ServiceUnavailable",
        takes_effect: bool = False,
        silent: bool = False,
        cut: bool = False,
    ) -> Iterator[_Fault]:
        """Answers requests with an error: those that took effect as well, and at once unless it is ``silent``.

        ``cut``: the connection ends instead of an answer, or in the middle of it when the request takes effect.
        """
        fault = _Fault(wanted, times, status, code, takes_effect, silent, cut)
        with self._lock:
            self._faults.append(fault)
        try:
            yield fault
        finally:
            with self._lock:
                self._faults.remove(fault)
            self._patience.set()
            self._patience = threading.Event()

    def bucket(self) -> str:
        """The URL of a new bucket."""
        name = f"bucket-{uuid4().hex}"
        S3FileSystem(use_listings_cache=False).mkdir(name)
        return f"s3://{name}"


def keys(url: str) -> list[str]:
    """All keys below a URL, relative to it."""
    location = resolve(url)
    found = location.filesystem.find(location.path)
    return sorted(key.removeprefix(location.path + "/") for key in found)


def unfinished_uploads(location: Location) -> list[str]:
    """Keys of uploads in parts that were begun and neither completed nor given up."""
    answer = location.filesystem.call_s3("list_multipart_uploads", Bucket=location.path.partition("/")[0])
    return [upload["Key"] for upload in answer.get("Uploads", [])]


class _Quiet(MotoRequestHandler):
    def log_request(self, *_: object) -> None:
        """The counts tell more."""


@contextmanager
def object_store(read_timeout_s: float = 20) -> Iterator[ObjectStore]:
    """A server, with the environment that leads this process and those that it starts to it, as users would set it."""
    store = ObjectStore()
    server = make_server("127.0.0.1", 0, store, threaded=True, request_handler=_Quiet)
    thread = threading.Thread(target=server.serve_forever, name="object-store")
    thread.start()
    store.url = f"http://127.0.0.1:{server.port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", store.url)
        patch.setenv("AWS_ALLOW_HTTP", "true")  # that of deltalake, which allows TLS alone by default
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_MAX_ATTEMPTS", "2")
        settings = _settings(read_timeout_s)
        patch.setenv("FSSPEC_S3", json.dumps(settings))
        patch.setitem(conf, "s3", settings)  # read from the environment when a process starts
        S3FileSystem.clear_instance_cache()
        try:
            yield store
        finally:
            S3FileSystem.clear_instance_cache()
            server.shutdown()
            thread.join()
            server.server_close()
