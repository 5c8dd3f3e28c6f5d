"""The ``SparkSession`` of a program that runs without Spark: PySpark's own classes build its plan.

PySpark's Connect client sends requests through a gRPC channel; here that channel is an object of this process, and
:class:`Service` answers them from a capture.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, SupportsIndex

import grpc
from pyspark.sql.connect.client.core import ChannelBuilder
from pyspark.sql.connect.plan import LogicalPlan
from pyspark.sql.connect.session import SparkSession
from pyspark.sql.connect.streaming import readwriter
from pyspark.sql.connect.streaming.query import StreamingQueryManager
from pyspark.sql.session import SparkSession as ClassicSession

from ckpt_runtime.frontend.capture import Capture
from ckpt_runtime.frontend.connect_service import Service
from ckpt_runtime.frontend.live_session import REMOTE_MODE, RealChannel
from ckpt_runtime.graph.errors import PlanError


class _Channel(grpc.Channel):
    """A gRPC channel whose calls are answered in this process, by the name of the method and the request."""

    live: RealChannel | None = None
    """The connection that ``live_session`` sets, which takes all calls from then on."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def _method(self, kind: str, path: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Callable[..., Any]:
        def call(request: Any, **options: Any) -> Any:
            if self.live is not None:
                return self.live.method(kind, path, arguments, named)(request, **options)
            return self.service.answer(path.rsplit("/", 1)[-1], request)

        return call

    def unary_unary(self, path: str, *arguments: Any, **named: Any) -> Any:
        return self._method("unary_unary", path, arguments, named)

    def unary_stream(self, path: str, *arguments: Any, **named: Any) -> Any:
        return self._method("unary_stream", path, arguments, named)

    def stream_unary(self, path: str, *arguments: Any, **named: Any) -> Any:
        return self._method("stream_unary", path, arguments, named)

    def stream_stream(self, path: str, *arguments: Any, **named: Any) -> Any:
        return self._method("stream_stream", path, arguments, named)

    def subscribe(self, callback: Any, try_to_connect: bool = False) -> None:
        """Does nothing: there is no connection."""

    def unsubscribe(self, callback: Any) -> None:
        """Does nothing: there is no connection."""

    def close(self) -> None:
        """Does nothing: there is no connection."""


class _Builder(ChannelBuilder):
    """Connects PySpark's client to a capture."""

    def __init__(self, capture: Capture, register: Callable[[type], None]) -> None:
        super().__init__()
        self.capture = capture
        self.register = register

    def toChannel(self) -> Any:  # noqa: N802 PySpark's name
        return _Channel(Service(self.capture))

    @property
    def host(self) -> str:
        return "in-process"


class _Streams(StreamingQueryManager):
    def addListener(self, listener: Any) -> None:  # noqa: N802 PySpark's name
        if self._session._connection.capture.listens:
            return
        # Here, because PySpark's own method turns errors into warnings.
        raise PlanError(
            "spark.streams.addListener",
            "a program ends before its queries have events: run the script by `ckpt run --client`, or use "
            "`ckpt events`, metrics and the REST API for a job's progress and end",
        )

    def removeListener(self, listener: Any) -> None:  # noqa: N802 PySpark's name
        if not self._session._connection.capture.listens:
            super().removeListener(listener)


class _DataSources:
    """``spark.dataSource``."""

    def __init__(self, register: Callable[[type], None]) -> None:
        self._register = register

    def register(self, dataSource: type) -> None:  # noqa: N803 PySpark's name
        self._register(dataSource)


class ContextWithoutJava:
    """What a program without Spark's Java machine has of ``sparkContext``."""

    def setLogLevel(self, logLevel: str) -> None:  # noqa: N802, N803 PySpark's names
        """Does nothing: the program prints no messages of Spark, and the job logs as its session does."""

    def __getattr__(self, name: str) -> Any:
        raise PlanError(
            f"sparkContext.{name}",
            "a program runs without Spark's Java machine, as with Spark Connect; use functions of the SparkSession, "
            "such as spark.createDataFrame, spark.conf and spark.version",
        )


class _Session(SparkSession):
    @property
    def _connection(self) -> _Builder:
        builder: Any = self.client._builder
        return builder  # type: ignore[no-any-return]

    @property
    def sparkContext(self) -> Any:  # noqa: N802 PySpark's name
        return ContextWithoutJava()

    @property
    def dataSource(self) -> Any:  # noqa: N802 PySpark's name
        return _DataSources(self._connection.register)

    @property
    def streams(self) -> Any:
        return _Streams(self)

    def stop(self) -> None:
        """Ends no job: queries continue, unless the program has waited for them."""
        self._connection.capture.clock.stop_session()


def let_scripts_name_masters() -> None:
    """Gives a program's master no effect: PySpark refuses a builder with both a remote Spark and a master."""
    builders: Any = ClassicSession.Builder
    builders._validate_startup_urls = lambda self: None  # noqa: ARG005


@contextmanager
def captured_session(capture: Capture, register: Callable[[type], None]) -> Iterator[Any]:
    """Yields a ``SparkSession`` whose programs are captured; in this context ``pyspark.sql.functions`` builds plans.

    ``register`` takes the classes that the program gives to ``spark.dataSource.register``.
    """
    with _remote_mode(capture):
        # Ids of relations count from 0 for each program, because they are part of the requests to Spark.
        LogicalPlan._nextPlanId = 0
        connection: Any = _Builder(capture, register)
        session = _Session(connection)
        SparkSession._set_default_and_active_session(session)
        capture.session = session
        try:
            with kept_functions(capture.functions), capture.called.named_in_plans():
                yield session
        finally:
            SparkSession._active_session.session = None
            SparkSession._default_session = None


@contextmanager
def kept_functions(functions: list[Any]) -> Iterator[None]:
    """Makes writers keep the function of ``foreach`` and ``foreachBatch``, and send its position, not a pickle."""
    writers: Any = readwriter.DataStreamWriter

    def keeping(field: str) -> Callable[[Any, Any], Any]:
        def keep(self: Any, function: Any) -> Any:
            getattr(self._write_proto, field).python_function.command = str(len(functions)).encode()
            functions.append(function)
            return self

        return keep

    before = writers.foreachBatch, writers.foreach
    writers.foreachBatch, writers.foreach = keeping("foreach_batch"), keeping("foreach_writer")
    try:
        yield
    finally:
        writers.foreachBatch, writers.foreach = before


@contextmanager
def _remote_mode(capture: Capture) -> Iterator[None]:
    """Sets PySpark's variables for a remote Spark. ``time.sleep`` returns at once after a query was started."""
    builders: Any = ClassicSession.Builder
    checked = builders._validate_startup_urls
    let_scripts_name_masters()
    before = {name: os.environ.get(name) for name in (*REMOTE_MODE, "MASTER")}
    sleep, thread = time.sleep, threading.get_ident()

    def wait(seconds: float | SupportsIndex, /) -> None:
        """Does not wait for queries, which the program's job will run."""
        if not capture.queries or threading.get_ident() != thread:
            sleep(seconds)
        else:
            capture.clock.wait(float(seconds))

    time.sleep = wait
    os.environ.update(REMOTE_MODE)
    os.environ.pop("MASTER", None)  # spark-submit sets it, and PySpark takes either a master or a remote Spark
    try:
        yield
    finally:
        builders._validate_startup_urls = checked
        time.sleep = sleep
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
