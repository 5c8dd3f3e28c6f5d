"""The gRPC endpoint for PySpark clients: Spark Connect's service in front of the dispatcher and of Spark's own service.

Requests about streams are answered here; all others are passed on to Spark as they are. Every call has to carry the
session's token. Neither plans nor files that clients send are unpickled in this process: plans that contain Python
functions are recognized by their message types only.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from grpc_status.rpc_status import to_status
from pyspark.errors import IllegalArgumentException
from pyspark.sql.connect.proto import Command, StreamingQueryListenerEventsResult
from pyspark.sql.connect.proto import base_pb2 as messages
from pyspark.sql.connect.types import proto_schema_to_pyspark_data_type
from pyspark.sql.types import LongType

from ckpt_runtime.configuration.cluster_options import ConnectOptions, SecurityOptions
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.option import ConfigurationError
from ckpt_runtime.connect.queries import Queries, Query, QueryFailedError, QueryNotStoppedError
from ckpt_runtime.connect.sessions import CONDITION, ClientSession, ClientSessions, ListenerBus, started_event
from ckpt_runtime.frontend.batch_writers import MEMORY_BATCH, MEMORY_VIEW
from ckpt_runtime.frontend.connect_service import SETTING, STATEMENT, STREAM_ACTION, check_name
from ckpt_runtime.frontend.mapping import location_of
from ckpt_runtime.frontend.spark_connect import SparkService
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.jobmaster.dispatcher import Dispatcher
from ckpt_runtime.jobmaster.gateway_values import GatewayError

_CODE = frozenset(
    {
        *("common_inline_user_defined_function", "common_inline_user_defined_table_function", "map_partitions"),
        *("group_map", "co_group_map", "apply_in_pandas_with_state", "typed_aggregate"),
        *("common_inline_user_defined_data_source", "foreach_writer", "foreach_batch", "transform_with_state_info"),
    }
)
"""Fields of Spark Connect's messages that carry serialized code."""


def reads_stream(message: Any, views: Collection[str]) -> bool:
    """Returns whether a plan reads a stream, through a reader or through one of the given views of streams."""
    names = "|".join(re.escape(view) for view in views)
    pattern = re.compile(rf"(?<![\w`]){'`?'}(?:{names}){'`?'}(?![\w`])", re.IGNORECASE) if views else None
    for name, part in _parts(message):
        if name == "read":
            table = part.named_table.unparsed_identifier.strip("`")
            if part.is_streaming or table.lower() in {view.lower() for view in views}:
                return True
        elif name == "sql" and pattern is not None and pattern.search(part.query):
            return True
    return False


def code_in(message: Any) -> str:
    """Returns the name of the first field that carries serialized code, or an empty text."""
    return next((name for name, _ in _parts(message) if name in _CODE), "")


def _parts(message: Any) -> Iterator[tuple[str, Any]]:
    """Yields the names of all fields that are set, with each message in them, at any depth."""
    todo = [message]
    while todo:
        for descriptor, value in todo.pop().ListFields():
            if descriptor.message_type is None:
                continue
            is_map = descriptor.message_type.GetOptions().map_entry
            several = value.values() if is_map else value if descriptor.is_repeated else (value,)
            for element in several:
                if hasattr(element, "ListFields"):
                    yield descriptor.name, element
                    todo.append(element)


logger = logging.getLogger(__name__)

_SERVICE = "/spark.connect.SparkConnectService/"
_METHODS = {method.name: method for method in messages.DESCRIPTOR.services_by_name["SparkConnectService"].methods}
_GREATEST_MESSAGE = 128 << 20
_OPTIONS = [("grpc.max_receive_message_length", _GREATEST_MESSAGE), ("grpc.max_send_message_length", _GREATEST_MESSAGE)]
_GRACE_S = 2.0
_REFUSALS = (PlanError, ConfigurationError, GatewayError)
"""Errors that a client's request causes, with a message for its author."""
_NO_CODE = (
    "a plan from a client contains {code}, which is serialized code; the engine takes functions only from programs: "
    "submit the program with `ckpt run`"
)

_CREATES_VIEW = re.compile(r"\s*CREATE\s+(?:OR\s+REPLACE\s+)?(?:LOCAL\s+)?TEMP(?:ORARY)?\s+VIEW\s", re.IGNORECASE)
_DROPS_VIEW = re.compile(r"\s*DROP\s+VIEW\s+(?:IF\s+EXISTS\s+)?(?:(\w+)|`([^`]+)`)\s*;?\s*", re.IGNORECASE)
_ABOUT_QUERIES = frozenset(
    {"streaming_query_command", "streaming_query_manager_command", "streaming_query_listener_bus_command"}
)

Call: TypeAlias = Any
"""gRPC's ``ServicerContext`` of a call; gRPC has no types."""
Respond = Callable[[Any, Call], Awaitable[Any]]


class ConnectServer:
    """``spark`` returns Spark's own service and blocks until it runs; the first request for Spark calls it."""

    def __init__(
        self, dispatcher: Dispatcher, configuration: Configuration, token: str | None, spark: Callable[[], SparkService]
    ) -> None:
        self._configuration = configuration
        self._authorization = None if token is None else f"Bearer {token}".encode()
        self._spark = spark
        self._sessions = ClientSessions()
        self._queries = Queries(dispatcher, configuration)
        self._channel: grpc.aio.Channel | None = None
        # No other process may listen on the same port and take some of the calls. PySpark's client pings each minute
        # while it waits for an answer, such as that of awaitTermination; gRPC's default would end the connection.
        alive = [("grpc.http2.max_ping_strikes", 0), ("grpc.http2.min_ping_interval_without_data_ms", 10_000)]
        self._server = grpc.aio.server(options=[*_OPTIONS, ("grpc.so_reuseport", 0), *alive])
        self._server.add_generic_rpc_handlers((_Handlers(self),))

    async def start(self, host: str) -> int:
        """Listens on a host and the configured port; returns the port. Raises OSError if it cannot be bound."""
        get = self._configuration.get
        address = f"{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{get(ConnectOptions.PORT)}"
        try:
            if get(SecurityOptions.REST_ENABLED):
                key = await asyncio.to_thread(Path(get(SecurityOptions.REST_KEY) or "").read_bytes)
                certificate = await asyncio.to_thread(Path(get(SecurityOptions.REST_CERTIFICATE) or "").read_bytes)
                credentials = grpc.ssl_server_credentials([(key, certificate)])
                port = self._server.add_secure_port(address, credentials)
            else:
                port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"{ConnectOptions.PORT.key}: {address} cannot be bound: {error}") from error
        await self._server.start()
        return int(port)

    async def stop(self) -> None:
        """Ends all calls after a short grace period, and closes the connection to Spark. Jobs continue to run."""
        await self._server.stop(_GRACE_S)
        if self._channel is not None:
            await self._channel.close()

    def admits(self, authorization: str | bytes) -> bool:
        """Returns whether a call carries the session's token."""
        if self._authorization is None:
            return True
        given = authorization.encode() if isinstance(authorization, str) else authorization
        return hmac.compare_digest(given, self._authorization)

    def own(self, name: str) -> Respond | None:
        """Returns the handler of a method that may concern streams; None for a method that only Spark handles."""
        answers: dict[str, Respond] = {
            "AnalyzePlan": self._analyze,
            "Config": self._config,
            "ReleaseExecute": self._release_execute,
            "ReleaseSession": self._release_session,
        }
        return answers.get(name)

    async def pass_on(self, name: str, request: Any, call: Call) -> Any:
        """Returns Spark's answer to a call with one request and one response. Raises AioRpcError for its errors."""
        invoke, options = await self._spark_method(name, call)
        return await invoke(request, **options)

    async def pass_on_stream(self, name: str, request: Any, call: Call) -> AsyncIterator[bytes]:
        """Yields Spark's answers, as they arrive. Raises AioRpcError for its errors."""
        invoke, options = await self._spark_method(name, call)
        responses = invoke(request, **options)
        try:
            async for response in responses:
                yield response
        finally:
            responses.cancel()

    async def _spark_method(self, name: str, call: Call) -> tuple[Any, dict[str, Any]]:
        service = await asyncio.to_thread(self._spark)
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(service.target, options=_OPTIONS)
        method = _METHODS[name]
        kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
        metadata = (("authorization", f"Bearer {service.token}"),)
        return getattr(self._channel, kind)(_SERVICE + name), {"metadata": metadata, "timeout": call.time_remaining()}

    async def _spark_session(self, request: Any, call: Call) -> str:
        """Returns Spark's own id of a client's session.

        A client takes it from the first response that it gets, so the engine's own responses have to carry it.
        """
        if request.HasField("client_observed_server_side_session_id"):
            return str(request.client_observed_server_side_session_id)
        asked = messages.ConfigRequest(session_id=request.session_id, user_context=request.user_context)
        asked.operation.get_option.keys.append("spark.sql.ansi.enabled")
        answer = await self.pass_on("Config", asked.SerializeToString(), call)
        return str(messages.ConfigResponse.FromString(answer).server_side_session_id)

    async def _analyze(self, request: Any, call: Call) -> Any:
        session = self._sessions.of(request, call)
        if not reads_stream(request, session.views):
            return await self.pass_on("AnalyzePlan", request.SerializeToString(), call)
        if code := code_in(request):
            raise PlanError("query", _NO_CODE.format(code=code))
        response = await session.analyzed(request)
        response.server_side_session_id = await self._spark_session(request, call)
        return response

    async def _config(self, request: Any, call: Call) -> Any:
        """Sets and reads options. All options are kept here; Spark's own are also passed on to Spark."""
        operation = request.operation
        kind = operation.WhichOneof("op_type")
        named = getattr(operation, kind)
        pairs = [*getattr(named, "pairs", ())]
        keys = [pair.key for pair in pairs] or [*getattr(named, "keys", ())]
        session = self._sessions.of(request, call)
        if kind == "set":
            for pair in pairs:
                session.configure(pair.key, pair.value)
        elif kind == "unset":
            for key in keys:
                session.unset(key)
        if not keys or any(key.startswith("spark.") for key in keys):
            return await self.pass_on("Config", request.SerializeToString(), call)
        spark_session = await self._spark_session(request, call)
        response = messages.ConfigResponse(session_id=request.session_id, server_side_session_id=spark_session)
        for key in keys:
            if kind == "is_modifiable":
                response.pairs.add(key=key, value="true")
            elif kind != "set":
                response.pairs.add(key=key, value=session.options.get(key))
        return response

    async def _release_execute(self, request: Any, call: Call) -> Any:
        operations = self._sessions.of(request, call).operations
        if request.operation_id not in operations:
            return await self.pass_on("ReleaseExecute", request.SerializeToString(), call)
        if request.WhichOneof("release") == "release_all":
            operations.discard(request.operation_id)
        return messages.ReleaseExecuteResponse(session_id=request.session_id, operation_id=request.operation_id)

    async def _release_session(self, request: Any, call: Call) -> Any:
        self._sessions.release(request)
        return await self.pass_on("ReleaseSession", request.SerializeToString(), call)

    async def execute(self, request: Any, call: Call) -> AsyncIterator[Any]:
        """Yields the responses to an ``ExecutePlanRequest``: the engine's for streams and queries, Spark's
        otherwise."""
        session = self._sessions.of(request, call)
        kind = request.plan.command.WhichOneof("command_type") if request.plan.HasField("command") else ""
        if not await self._concerns_streams(session, kind, request, call):
            async for response in self.pass_on_stream("ExecutePlan", request.SerializeToString(), call):
                yield response
            return
        if kind not in _ABOUT_QUERIES and (code := code_in(request)):
            raise PlanError("query", _NO_CODE.format(code=code))
        request.operation_id = request.operation_id or str(uuid.uuid4())
        session.operations.add(request.operation_id)
        spark_session = await self._spark_session(request, call)
        ids = {"session_id": request.session_id, "server_side_session_id": spark_session}
        ids["operation_id"] = request.operation_id
        response = messages.ExecutePlanResponse(**ids, response_id=str(uuid.uuid4()))
        last = messages.ExecutePlanResponse(**ids, response_id=str(uuid.uuid4()))
        last.result_complete.SetInParent()
        if kind == "streaming_query_listener_bus_command":
            async for events in self._listener_bus(session, request.plan.command.streaming_query_listener_bus_command):
                response = messages.ExecutePlanResponse(**ids, response_id=str(uuid.uuid4()))
                response.streaming_query_listener_events_result.CopyFrom(events)
                yield response
            yield last
            return
        await self._answer(session, kind, request, call, response)
        yield response
        yield last

    async def _concerns_streams(self, session: ClientSession, kind: str, request: Any, call: Call) -> bool:
        """Returns whether the engine answers a request to execute a plan.

        The session follows what Spark is asked to change: options, and views that take or lose the name of a stream's.
        """
        if kind in _ABOUT_QUERIES or kind == "write_stream_operation_start":
            return True
        if (dropped := _dropped_view(request.plan)) and session.forget_view(dropped):
            # Spark then answers the request as it does for a view of its own, which is dropped with it.
            await self._run_in_spark(request, call, _view_command(dropped, "SELECT 1"))
        statement = request.plan.command.sql_command.input.sql.query
        if setting := SETTING.fullmatch(statement):
            session.configure(setting[1], setting[2].strip())
        if STATEMENT.match(statement) and not _CREATES_VIEW.match(statement):
            return False
        if reads_stream(request, session.views):
            return True
        if kind == "create_dataframe_view":
            session.forget_view(request.plan.command.create_dataframe_view.name)
        return False

    async def _answer(self, session: ClientSession, kind: str, request: Any, call: Call, response: Any) -> None:
        """Fills the response to a request about streams or queries. Raises PlanError for one that has no answer."""
        match kind:
            case "write_stream_operation_start":
                await self._start(session, request, call, response.write_stream_operation_start_result)
            case "streaming_query_command":
                command = request.plan.command.streaming_query_command
                await self._query(session, command, response.streaming_query_command_result)
            case "streaming_query_manager_command":
                manager = request.plan.command.streaming_query_manager_command
                await self._manager(session, manager, response.streaming_query_manager_command_result)
            case "sql_command" if _CREATES_VIEW.match(request.plan.command.sql_command.input.sql.query):
                await session.add_view(request)
                response.sql_command_result.relation.local_relation.SetInParent()
            case "sql_command":
                response.sql_command_result.relation.CopyFrom(request.plan.command.sql_command.input)
            case "create_dataframe_view":
                await session.add_view(request)
            case "":
                raise PlanError("query", STREAM_ACTION)
            case _:
                message = f"{kind} needs a batch; the result of a stream is written by a query that writeStream starts"
                raise PlanError("query", message)

    async def _listener_bus(self, session: ClientSession, command: Any) -> AsyncIterator[Any]:
        """Yields the events of the session's queries until the client removes its last listener."""
        if session.listeners is not None:
            session.listeners.remove()
            session.listeners = None
        if command.WhichOneof("command") == "remove_listener_bus_listener":
            return
        bus = session.listeners = ListenerBus(self._queries, session.queries)
        await bus.skip_earlier()
        yield StreamingQueryListenerEventsResult(listener_bus_listener_added=True)
        async for events in bus.events():
            result = StreamingQueryListenerEventsResult()
            for event in events:
                result.events.add(event_type=event.kind, event_json=event.text)
            yield result

    async def _start(self, session: ClientSession, request: Any, call: Call, result: Any) -> None:
        start = request.plan.command.write_stream_operation_start
        again = str(uuid.UUID(request.operation_id))  # the id of the run that an earlier try may have started
        location = location_of(start, session.settings)
        async with session.starting:
            others = [query for query in session.queries.values() if query.run_id != again]
            active = [query for query in others if await self._queries.is_active(query)]
            check_name(start.query_name, [query.name for query in active])
            for query in active:
                if location is not None and query.location == location:
                    await self._queries.stop(query)  # as in Spark, the new run replaces this one
            if start.format.lower() == "memory":
                if location is not None and again not in session.queries:
                    await self._queries.check_recovers(start, location)
                await self._make_table(session, request, call)
            query = await self._queries.start(
                request.operation_id,
                start.query_name,
                session.commands_of(request.plan.command),
                session.settings,
                session.options.effective.to_dict(),
            )
            session.queries[query.run_id] = query
            session.starts[query.run_id] = start
        result.query_started_event_json = started_event(query)
        result.query_id.id, result.query_id.run_id = query.id, query.run_id
        result.name = query.name

    async def _make_table(self, session: ClientSession, request: Any, call: Call) -> None:
        """Creates the empty table of a query with format ``memory`` in Spark.

        The query fills a global view; the client's session gets a view of it that has the query's name.
        """
        start = request.plan.command.write_stream_operation_start
        if not start.query_name:
            raise PlanError("queryName", "format memory needs it as the name of the table")
        analyze = messages.AnalyzePlanRequest(session_id=request.session_id)
        analyze.schema.plan.root.CopyFrom(start.input)
        columns = await session.analyzed(analyze)
        kind: Any = proto_schema_to_pyspark_data_type(columns.schema.schema)
        view = start.options[MEMORY_VIEW] = f"ckpt_{uuid.UUID(request.operation_id).hex}"
        empty = Command()
        empty.create_dataframe_view.name = view
        empty.create_dataframe_view.is_global = empty.create_dataframe_view.replace = True
        empty.create_dataframe_view.input.local_relation.schema = kind.add(MEMORY_BATCH, LongType()).json()
        names = ", ".join(_quoted(name) for name in kind.names if name != MEMORY_BATCH)
        named = _view_command(start.query_name, f"SELECT {names} FROM global_temp.{view}")
        session.forget_view(start.query_name)
        for command in (empty, named):
            await self._run_in_spark(request, call, command)

    async def _run_in_spark(self, request: Any, call: Call, command: Any) -> None:
        """Runs a command in the Spark session of a request's client."""
        execution = messages.ExecutePlanRequest(session_id=request.session_id, operation_id=str(uuid.uuid4()))
        execution.user_context.CopyFrom(request.user_context)
        execution.plan.command.CopyFrom(command)
        async for _ in self.pass_on_stream("ExecutePlan", execution.SerializeToString(), call):
            pass

    async def _query(self, session: ClientSession, command: Any, result: Any) -> None:
        """Answers requests about one query."""
        query = session.queries.get(command.query_id.run_id)
        if query is None:
            raise PlanError("query", f"this session has started no run {command.query_id.run_id} of a query")
        result.query_id.CopyFrom(command.query_id)
        queries = self._queries
        match command.WhichOneof("command"):
            case "status":
                result.status.status_message, result.status.is_active = await queries.status(query)
                result.status.is_data_available = result.status.is_trigger_active = result.status.is_active
            case "last_progress":
                result.recent_progress.recent_progress_json.extend((await queries.progress(query))[-1:])
            case "recent_progress":
                result.recent_progress.recent_progress_json.extend(await queries.progress(query))
            case "stop":
                await queries.stop(query)
            case "exception":
                if (failure := await queries.failure(query)) is not None:
                    # PySpark shows what follows the first colon.
                    result.exception.exception_message = f"StreamingQueryException: {failure}"
            case "await_termination":
                result.await_termination.terminated = await queries.wait([query], _seconds(command.await_termination))
            case "process_all_available":
                await queries.process_all(query)
            case "explain":
                start = session.starts[query.run_id]
                result.explain.result = await session.explained(start, extended=command.explain.extended)
            case other:
                raise PlanError("query", f"{other} is not supported")

    async def _manager(self, session: ClientSession, command: Any, result: Any) -> None:
        """Answers ``spark.streams``. PySpark requires a result, even one without a value."""
        result.SetInParent()
        queries = self._queries
        match command.WhichOneof("command"):
            case "active":
                active = [query for query in session.queries.values() if await queries.is_active(query)]
                result.active.active_queries.extend([_instance(query) for query in active])
            case "get_query":
                for query in session.queries.values():
                    if query.id == command.get_query and await queries.is_active(query):
                        result.query.CopyFrom(_instance(query))
            case "await_any_termination":
                seconds = _seconds(command.await_any_termination)
                every = [query for key, query in session.queries.items() if key not in session.reset]
                result.await_any_termination.terminated = await queries.wait(every, seconds) if every else True
            case "reset_terminated":
                session.reset |= {key for key, query in session.queries.items() if not await queries.is_active(query)}
            case other:
                raise PlanError("streams", f"{other} is not supported; the event stream of the REST API has all events")


def _dropped_view(plan: Any) -> str:
    """Returns the name of the temporary view that a plan drops, or an empty text."""
    if plan.root.catalog.HasField("drop_temp_view"):
        return str(plan.root.catalog.drop_temp_view.view_name)
    dropped = _DROPS_VIEW.fullmatch(plan.command.sql_command.input.sql.query)
    return (dropped[1] or dropped[2]) if dropped else ""


def _view_command(name: str, query: str) -> Command:
    """Returns the command that makes a temporary view in Spark."""
    command = Command()
    command.sql_command.input.sql.query = f"CREATE OR REPLACE TEMPORARY VIEW {_quoted(name)} AS {query}"
    return command


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


def _seconds(command: Any) -> float | None:
    return command.timeout_ms / 1000 if command.HasField("timeout_ms") else None


def _instance(query: Query) -> Any:
    from pyspark.sql.connect.proto import StreamingQueryManagerCommandResult

    instance = StreamingQueryManagerCommandResult.StreamingQueryInstance(name=query.name)
    instance.id.id, instance.id.run_id = query.id, query.run_id
    return instance


class _Handlers(grpc.GenericRpcHandler):
    """Finds the handler of a call, after its token has been checked."""

    def __init__(self, server: ConnectServer) -> None:
        self._server = server

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        path = handler_call_details.method
        name = path.removeprefix(_SERVICE)
        if not path.startswith(_SERVICE) or name not in _METHODS:
            return None
        metadata = dict(handler_call_details.invocation_metadata)
        admitted = self._server.admits(metadata.get("authorization", ""))
        method = _METHODS[name]
        if method.client_streaming:
            return grpc.stream_unary_rpc_method_handler(self._guarded(name, admitted))
        if name == "ExecutePlan":
            return grpc.unary_stream_rpc_method_handler(
                self._guarded_stream(name, admitted), messages.ExecutePlanRequest.FromString, _encoded
            )
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(self._guarded_stream(name, admitted))
        own = self._server.own(name)
        decode = None if own is None else getattr(messages, method.input_type.name).FromString
        return grpc.unary_unary_rpc_method_handler(self._guarded(name, admitted), decode, _encoded)

    def _guarded(self, name: str, admitted: bool) -> Callable[[Any, Call], Awaitable[Any]]:
        own = self._server.own(name)

        async def answer(request: Any, call: Call) -> Any:
            if not admitted:
                await _refuse(call)
            try:
                return await (self._server.pass_on(name, request, call) if own is None else own(request, call))
            except Exception as error:
                await _abort(call, name, error)

        return answer

    def _guarded_stream(self, name: str, admitted: bool) -> Callable[[Any, Call], AsyncIterator[Any]]:
        async def answer(request: Any, call: Call) -> AsyncIterator[Any]:
            if not admitted:
                await _refuse(call)
            own = name == "ExecutePlan"
            server = self._server
            responses = server.execute(request, call) if own else server.pass_on_stream(name, request, call)
            try:
                async for response in responses:
                    yield response
            except Exception as error:
                await _abort(call, name, error)

        return answer


async def _refuse(call: Call) -> NoReturn:
    message = "the session's token is missing or wrong: sc://host:port/;token=..."
    await call.abort(grpc.StatusCode.UNAUTHENTICATED, message)
    raise AssertionError("abort raises")


def _encoded(message: Any) -> bytes:
    """Serializes the engine's own messages; those of Spark are forwarded unchanged."""
    return message if isinstance(message, bytes) else message.SerializeToString()


async def _abort(call: Call, name: str, error: Exception) -> NoReturn:
    """Ends a call with an error as PySpark's client reads it."""
    if isinstance(error, grpc.aio.AioRpcError):  # Spark's own error, with its further details
        await call.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
    elif isinstance(error, QueryFailedError | QueryNotStoppedError):
        await call.abort_with_status(_status("org.apache.spark.sql.streaming.StreamingQueryException", str(error)))
    elif isinstance(error, IllegalArgumentException):
        await call.abort_with_status(_status("java.lang.IllegalArgumentException", str(error)))
    elif isinstance(error, _REFUSALS):
        await call.abort_with_status(_status("org.apache.spark.sql.AnalysisException", str(error)))
    logger.error("%s failed", name, exc_info=error)
    await call.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
    raise AssertionError("abort raises")


def _status(kind: str, message: str) -> Any:
    """Returns the status that PySpark turns into its own exception for Java's class ``kind``.

    It has Spark's condition that the message names, such as ``PATH_NOT_FOUND``.
    """
    metadata = {"classes": json.dumps([kind])}
    if condition := CONDITION.search(message):
        metadata["errorClass"] = condition[1]
    info = ErrorInfo(reason=kind, metadata=metadata)
    detail = AnyMessage()
    detail.Pack(info)
    return to_status(Status(code=grpc.StatusCode.INVALID_ARGUMENT.value[0], message=message, details=[detail]))
