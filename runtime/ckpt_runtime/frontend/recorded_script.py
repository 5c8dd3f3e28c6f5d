"""Runs a script of ``ckpt run --client`` again, up to the start of one query, whose Python functions are then here.

The script itself runs once, as a client of Spark Connect. Workers of a query need the functions that its plan calls,
and nothing is unpickled: they run the script, too, and it gets the answers that the client had got before it started
the query, so that it builds the same plan. Its clock shows the time at which the client got them.

What Spark and the queries have answered is recorded. Requests about streams are answered by the capture, as for any
other program.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, SupportsIndex

import grpc
import msgspec

from ckpt_runtime.frontend.capture import Capture
from ckpt_runtime.frontend.connect_service import Service, reads_stream
from ckpt_runtime.frontend.program import run_script
from ckpt_runtime.graph.errors import PlanError

START = "write_stream_operation_start"
LISTENERS = "streaming_query_listener_bus_command"
ABOUT_QUERIES = frozenset({"streaming_query_command", "streaming_query_manager_command", LISTENERS})
_UNRECORDED = frozenset({LISTENERS, "register_data_source"})
"""Commands that a script which runs again does not send: its listeners and its classes of data sources are its own."""
_DEFINITION = re.compile(
    r"\s*(?:SET|DECLARE|CREATE\s+(?:OR\s+REPLACE\s+)?(?:LOCAL\s+)?TEMP(?:ORARY)?)\s", re.IGNORECASE
)
"""SQL that Spark carries out, and that defines options, variables, views and functions, which streams may use later."""
_now_s: Callable[[], float] = time.monotonic
"""The real clock, also while a script is shown another one."""
STATUS_KEY = "grpc-status-details-bin"
"""Metadata of an error of gRPC with its status, which has Spark's details."""
FILE_NAME = "recorded.json"
ENTRY = "connect_script"
PROGRAM = f'''"""A query of a script that runs as a client. {FILE_NAME} has what the script had read before it."""

from pathlib import Path

from ckpt_runtime.frontend.recorded_script import run_again
from pyspark.sql import SparkSession


def pipeline(spark: SparkSession) -> None:
    run_again(spark, Path(__file__).parent)
'''


def kind_of(request: Any) -> str:
    """Returns the kind of an ``AnalyzePlanRequest``, or of the command of an ``ExecutePlanRequest``, "" for a frame."""
    if request.DESCRIPTOR.name == "AnalyzePlanRequest":
        return str(request.WhichOneof("analyze"))
    return str(request.plan.command.WhichOneof("command_type")) if request.plan.HasField("command") else ""


def is_recorded(request: Any, views: Collection[str]) -> bool:
    """Returns whether the answer to a request is recorded: it is Spark's, or about queries. ``views`` are of streams.

    The requests are ``AnalyzePlanRequest`` and ``ExecutePlanRequest``; no others are recorded.
    """
    kind = kind_of(request)
    if kind in _UNRECORDED:
        return False
    return kind == START or kind in ABOUT_QUERIES or not reads_stream(request, views)


def _defines(request: Any) -> bool:
    """Returns whether a request that Spark has answered defines what streams may use later."""
    if kind_of(request) == "sql_command":
        given = request.plan.command.sql_command.input
        relation = given.with_relations.root if given.WhichOneof("rel_type") == "with_relations" else given
        return _DEFINITION.match(relation.sql.query) is not None
    return kind_of(request) in ("register_function", "create_dataframe_view")


class Answer(msgspec.Struct):
    """The answer to a request of ``kind``, ``after_s`` seconds after the session began: responses, or an error of gRPC.

    ``code`` is the number of the error, 0 without one; ``details`` is its status with Spark's details.
    """

    kind: str
    responses: list[bytes] = []
    after_s: float = 0.0
    code: int = 0
    message: str = ""
    details: bytes = b""


class RecordedScript(msgspec.Struct):
    """A script, ``module``, and the answers that it got before it started a query, whose ``options`` were added to."""

    module: str
    arguments: list[str]
    answers: list[Answer]
    options: dict[str, str] = {}


class _QueryReachedError(BaseException):
    """Ends the script at the start of the query. Not an ``Exception``, so that the script does not catch it."""


class _RecordedError(grpc.RpcError, grpc.Call):
    """An error of a call, as PySpark's client reads it."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def code(self) -> Any:
        return next(code for code in grpc.StatusCode if code.value[0] == self._answer.code)

    def details(self) -> str:
        return self._answer.message

    def trailing_metadata(self) -> Any:
        return ((STATUS_KEY, self._answer.details),) if self._answer.details else ()

    def _none(self, *_: Any) -> None:
        """What a call has besides, and an ended one does not need."""

    initial_metadata = is_active = time_remaining = cancel = add_callback = _none


class _RecordedService(Service):
    """Spark Connect's service over a capture, with the recorded answers of Spark and of earlier queries."""

    def __init__(self, capture: Capture, script: RecordedScript) -> None:
        super().__init__(capture)
        self._script = script
        self._left = iter(script.answers)
        self._began_s = _now_s()
        self.ahead_s = 0.0
        """How far the script's clock is ahead of the real one."""
        self.reached = False

    def answer(self, method: str, request: Any) -> Any:
        if method == "ReattachExecute":
            raise PlanError(
                "pipeline", "an answer that the script had got is incomplete: its client did not wait for it"
            )
        if method not in ("AnalyzePlan", "ExecutePlan", "Config", "ReleaseExecute", "ReleaseSession"):
            return _empty_response(method, request)
        views = self._capture.views.keys() - self._capture.static_views.keys()
        if method not in ("AnalyzePlan", "ExecutePlan") or not is_recorded(request, views):
            return super().answer(method, request)
        kind = kind_of(request)
        found = next(self._left, None)
        if found is None and kind == START:
            for key, value in self._script.options.items():
                request.plan.command.write_stream_operation_start.options[key] = value
            super().answer(method, request)
            self.reached = True
            raise _QueryReachedError
        if found is None or found.kind != kind:
            before = "the start of the query" if found is None else found.kind or "an action"
            raise PlanError(
                "pipeline",
                f"the script sends {kind or 'an action'} when it runs again, and sent {before} there as a client; up "
                "to the start of a query with Python functions it must not depend on time, random numbers or threads",
            )
        if _defines(request) and not found.code:
            with suppress(PlanError):  # what a plan cannot contain is missing only in streams that use it
                super().answer(method, request)
        self.ahead_s = max(self.ahead_s, found.after_s - (_now_s() - self._began_s))
        if found.code:
            raise _RecordedError(found)
        return self._responses(method, request, found)

    def _responses(self, method: str, request: Any, found: Answer) -> Any:
        """Returns the responses as those to this request: the ids of the client's session are not those of this one."""
        messages = self._proto
        kind = messages.AnalyzePlanResponse if method == "AnalyzePlan" else messages.ExecutePlanResponse
        responses = [kind.FromString(each) for each in found.responses]
        for response in responses:
            response.session_id = request.session_id
            response.ClearField("server_side_session_id")
            if method == "ExecutePlan":
                response.operation_id = request.operation_id
        return responses[0] if method == "AnalyzePlan" else iter(responses)

    @contextmanager
    def shown_time(self) -> Iterator[None]:
        """Lets clocks show the script's thread the time of the recorded answers, and only this one: the event loops of
        others would wait for ever. The script sleeps in no time."""
        sleep, now, monotonic, thread = time.sleep, time.time, time.monotonic, threading.get_ident()

        def ahead_s() -> float:
            return self.ahead_s if threading.get_ident() == thread else 0.0

        def slept(seconds: float | SupportsIndex, /) -> None:
            if threading.get_ident() == thread:
                self.ahead_s += float(seconds)
            else:
                sleep(seconds)

        time.sleep = slept
        time.time, time.monotonic = (lambda: now() + ahead_s()), (lambda: monotonic() + ahead_s())
        try:
            yield
        finally:
            time.sleep, time.time, time.monotonic = sleep, now, monotonic


def _empty_response(method: str, request: Any) -> Any:
    """Returns the response to a method whose effect, such as an artifact, is on the server already."""
    from pyspark.sql.connect.proto import base_pb2

    given = base_pb2.DESCRIPTOR.services_by_name["SparkConnectService"].methods_by_name[method]
    first = next(iter(request)) if given.client_streaming else request
    return getattr(base_pb2, given.output_type.name)(session_id=first.session_id)


def run_again(session: Any, directory: Path) -> None:
    """Runs the script of an unpacked archive until it starts its query, which the session's capture then has.

    Raises PlanError for a script that takes another way than before.
    """
    script = msgspec.json.decode((directory / FILE_NAME).read_bytes(), type=RecordedScript)
    capture = session.client._builder.capture
    capture.listens = True
    service = session.client._channel.service = _RecordedService(capture, script)
    with service.shown_time():
        try:
            run_script(directory, script.module, script.arguments)
        except BaseException:
            # Behind the start the script may fail in a clause that needs the query.
            if not service.reached:
                raise
    if not service.reached:
        raise PlanError("pipeline", "the script ends before it starts the query, which its client has started")
