"""Connects the ``SparkSession`` of a captured program to a real Spark, in the worker that calls the program's function.

The program was run to find its functions, with a session whose channel is not connected. From now on this session's
channel is connected to the server, so that a function finds Spark through the variable ``spark`` that it closes over,
and through ``SparkSession.builder.getOrCreate()``. Its frames belong to another session, that of the query, which has
the static views and the functions of the program. Frames of the program may be combined with them.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from itertools import chain, count
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ckpt_runtime.graph.options import duration_ms

if TYPE_CHECKING:
    import pyarrow as pa

REMOTE_MODE = {"SPARK_CONNECT_MODE_ENABLED": "1", "SPARK_REMOTE": "sc://in-process"}
"""PySpark's variables for a remote Spark; they make ``builder.getOrCreate()`` return a program's captured session."""
_MOST_BYTES = 128 << 20
_TIMEOUT = "spark.connect.session.manager.defaultSessionTimeout"
"""Spark's option: for how long a session may be without requests before the server ends it."""
_MOST_PAUSE_S = 60.0
_CONNECTING = threading.Lock()
_OF_TWO_FRAMES = (
    *("join", "crossJoin", "lateralJoin", "union", "unionByName", "intersect", "intersectAll", "subtract", "exceptAll"),
)
"""Methods of frames that take another one."""
logger = logging.getLogger(__name__)
_SESSIONS = uuid.UUID("8f4c5d5e-2f0b-4a53-9a55-6b0d2c5f6a11")


class RealChannel:
    """A connection to a server of Spark Connect whose calls carry the token."""

    def __init__(self, url: str) -> None:
        """``url`` is ``sc://host:port/;token=...``."""
        import grpc

        self.url = url
        parts = urlsplit(f"http{url[2:]}")
        token = parts.path.partition("token=")[2]
        self._metadata = (("authorization", f"Bearer {token}"),)
        limits = [("grpc.max_send_message_length", _MOST_BYTES), ("grpc.max_receive_message_length", _MOST_BYTES)]
        self._channel = grpc.insecure_channel(parts.netloc, options=limits)

    def method(self, kind: str, path: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Callable[..., Any]:
        """Returns a method of the service, as a gRPC channel does."""
        call = getattr(self._channel, kind)(path, *arguments, **named)

        def called(request: Any, metadata: Any = (), **options: Any) -> Any:
            return call(request, metadata=(*(metadata or ()), *self._metadata), **options)

        return called

    def close(self) -> None:
        self._channel.close()


def session_of_query(program: Any, url: str, job_id: str, uid: str, configuration: Mapping[str, str]) -> Any:
    """Returns a session of Spark for one query, and connects the program's own session if it is not connected yet.

    As in Spark, a query has a session of its own: views that its function creates are not visible to other queries,
    and those of the program are visible in it. A session has the same id in every attempt, unless the server has ended
    it. Operations of an earlier attempt that still run in it are interrupted: their function did not return, and will
    be called again.
    """
    from pyspark.sql.connect.session import SparkSession

    with _CONNECTING:
        os.environ.update(REMOTE_MODE)
        live = program.client._channel.live
        if live is None or live.url != url or _has_ended(program):
            _connect(program, url, job_id, configuration)
        SparkSession._set_default_and_active_session(program)
        query = type(program)(program.client._builder)
        query.program = program
        query.configuration = configuration
        _connect(query, url, f"{job_id}/{uid}", configuration)
        _let_frames_meet()
        return query


@contextmanager
def frame_of(query: Any, rows: pa.Table, schema: Any, name: str) -> Iterator[Any]:
    """Yields rows as a frame of a query's session, with Spark's ``schema``. Afterwards Spark forgets the rows.

    Rows that are too large for a plan are in a view of the application, ``name``, for so long. An attempt that dies
    leaves the view, which the next one replaces.
    """
    # The types in which a client sends rows may take twice the bytes.
    if 2 * rows.nbytes < int(query.conf.get("spark.sql.session.localRelationCacheThreshold")):
        yield query.createDataFrame(rows, schema)
        return
    put_view(query, rows, schema, name, sender=name)
    try:
        yield query.table(f"{query.conf.get('spark.sql.globalTempDatabase')}.{name}")
    finally:
        query.catalog.dropGlobalTempView(name)


def put_view(query: Any, rows: pa.Table, schema: Any, name: str, *, sender: str) -> None:
    """Makes rows a view that all sessions of Spark's application see, or replaces the rows of the view.

    The server keeps rows that are too large for a plan until the session ends that has sent them, which is therefore
    one of its own, ``sender``. That of an attempt that has died is used and ended by the next one.
    """
    session = type(query)(query.client._builder)
    _open(session, query.client._channel.live.url, sender)
    try:
        _configure(session, query.configuration)
        session.createDataFrame(rows, schema).createOrReplaceGlobalTempView(name)
    finally:
        session.client.release_session()
        session.client._channel.live.close()


class SessionsInUse:
    """The sessions of this process, by the identities of their queries, which a thread keeps in use.

    The server ends those that get no request for an hour, with the views that functions have made, and calls may be
    days apart. ``ask`` asks a session for something.
    """

    def __init__(self, ask: Callable[[Any], object]) -> None:
        self._ask = ask
        self._sessions: dict[str, Any] = {}
        self._pause_s = math.inf
        self._shorter = threading.Event()

    def add(self, identity: str, session: Any, pause_s: float) -> None:
        """Asks a session, and all others, at least each ``pause_s`` seconds from now on. One thread calls it at a time.

        Servers may differ in their time limits; the shortest pause counts.
        """
        self._sessions[identity] = session
        if pause_s < self._pause_s:
            is_first, self._pause_s = math.isinf(self._pause_s), pause_s
            self._shorter.set()
            if is_first:
                threading.Thread(target=self._keep, name="sessions in use", daemon=True).start()

    def _keep(self) -> None:
        while True:  # the thread ends with the process
            if self._shorter.wait(self._pause_s):
                self._shorter.clear()
                continue
            for session in list(self._sessions.values()):
                try:
                    self._ask(session)
                except Exception as error:  # the next call of the function meets it, too
                    logger.info("a session of Spark does not answer: %s", error)


@cache
def _let_frames_meet() -> None:
    """Lets methods of two frames take one of a query and one of its program, as in Spark: the result is the query's.

    A copy of a query's frame on the server is the query's, too; PySpark takes it for one of the active session.
    """
    from pyspark.sql.connect.dataframe import DataFrame

    def meeting(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def called(*frames: Any, **named: Any) -> Any:
            both = [each for each in (*frames, *named.values()) if isinstance(each, DataFrame)]
            of: Any = next((each._session for each in both if hasattr(each._session, "program")), None)

            def moved(each: Any) -> Any:
                is_programs = isinstance(each, DataFrame) and of is not None and each._session is of.program
                return DataFrame(each._plan, of) if is_programs else each

            return method(*map(moved, frames), **{name: moved(each) for name, each in named.items()})

        return called

    def copying(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def called(frame: Any, *arguments: Any, **named: Any) -> Any:
            copy = method(frame, *arguments, **named)._plan
            copy._spark_session = frame._session  # which also removes it
            return DataFrame(copy, frame._session)

        return called

    for name in _OF_TWO_FRAMES:
        setattr(DataFrame, name, meeting(getattr(DataFrame, name)))
    for name in ("checkpoint", "localCheckpoint"):
        setattr(DataFrame, name, copying(getattr(DataFrame, name)))


def _open(session: Any, url: str, identity: str) -> None:
    """Connects a session of PySpark to the server's session of this identity, or of the next one if it has ended."""
    client = session.client
    if client._channel.live is not None:
        client._channel.live.close()
    client._channel.live = RealChannel(url)
    for name in chain([identity], (f"{identity}/{number}" for number in count(1))):
        client._session_id = str(uuid.uuid5(_SESSIONS, name))
        client._artifact_manager._session_id = client._session_id
        client._server_session_id = None
        if not _has_ended(session):
            return


def _configure(session: Any, configuration: Mapping[str, str]) -> None:
    for key, value in configuration.items():
        session.conf.set(key, value)


def _has_ended(session: Any) -> bool:
    """Asks the server for something, and returns whether it has ended the session. Its id is not accepted again."""
    from pyspark.errors import PySparkException

    try:
        session.conf.get("spark.sql.session.timeZone")
    except PySparkException as error:
        if error.getCondition() != "INVALID_HANDLE.SESSION_CLOSED":
            raise
        return True
    return False


_IN_USE = SessionsInUse(_has_ended)


def _connect(session: Any, url: str, identity: str, configuration: Mapping[str, str]) -> None:
    from pyspark.errors import PySparkException

    _open(session, url, identity)
    session.interruptAll()
    _configure(session, configuration)
    timeout = session.conf.get(_TIMEOUT, "1h")
    if timeout != "-1":  # with which sessions never end
        _IN_USE.add(identity, session, min(_MOST_PAUSE_S, duration_ms(timeout) / 4_000))
    for name, command in _commands(session.client._builder.capture):
        try:
            session.client.execute_command(command)
        except PySparkException as error:
            logger.warning("%s of the program is not there in functions of foreachBatch: %s", name, error)


def _commands(capture: Any) -> Iterator[tuple[str, Any]]:
    """Yields what gives a session the program's functions and static views, each with its name; not its variables.

    If Spark refuses one, functions that use it get Spark's error. Python functions are pickled for Spark's own workers.
    """
    from pyspark.serializers import CloudPickleSerializer
    from pyspark.sql.connect.proto import Command
    from pyspark.sql.connect.types import proto_schema_to_pyspark_data_type

    for name, given in capture.registered.items():
        command = Command()
        command.register_function.ParseFromString(given)
        python = command.register_function.python_udf
        function = capture.called.of_number(int(python.command))
        kind = proto_schema_to_pyspark_data_type(python.output_type)
        python.command = CloudPickleSerializer().dumps((function, kind))
        yield f"function {name!r}", command
    for statement in capture.declarations:
        if statement.split(maxsplit=1)[0].upper() != "CREATE":
            continue  # the session of Spark's queries has no variables
        command = Command()
        command.sql_command.input.sql.query = statement
        yield repr(statement), command
    for name, relation in capture.static_views.items():
        command = Command()
        command.create_dataframe_view.name, command.create_dataframe_view.replace = name, True
        command.create_dataframe_view.input.ParseFromString(relation)
        yield f"view {name!r}", command
