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
from collections.abc import AsyncIterator, Awaitable, Callable
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
from ckpt_runtime.connect.queries import (
    Queries,
    Query,
    QueryFailedError,
    QueryNotStoppedError,
    program_of_commands,
    program_of_script,
)
from ckpt_runtime.connect.sessions import CONDITION, ClientSession, ClientSessions, Failure, ListenerBus, started_event
from ckpt_runtime.frontend.batch_writers import MEMORY_BATCH, MEMORY_VIEW
from ckpt_runtime.frontend.connect_service import SETTING, STATEMENT, STREAM_ACTION, check_name, parts, reads_stream
from ckpt_runtime.frontend.mapping import location_of
from ckpt_runtime.frontend.recorded_script import ABOUT_QUERIES, LISTENERS, START, is_recorded, kind_of
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


def code_in(message: Any) -> str:
    """Returns the name of the first field that carries serialized code, or an empty text."""
    return next((name for name, _ in parts(message) if name in _CODE), "")


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
    "submit the program with `ckpt run`, or run a script with `ckpt run --client`"
)

_CREATES_VIEW = re.compile(r"\s*CREATE\s+(?:OR\s+REPLACE\s+)?(?:LOCAL\s+)?TEMP(?:ORARY)?\s+VIEW\s", re.IGNORECASE)
_DROPS_VIEW = re.compile(r"\s*DROP\s+VIEW\s+(?:IF\s+EXISTS\s+)?(?:(\w+)|`([^`]+)`)\s*;?\s*", re.IGNORECASE)
_COMPRESSION = "spark.connect.session.planCompression.threshold"
"""Spark's option: the size in bytes above which a client compresses a plan; negative for never."""

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

    def own_stream(self, name: str) -> Callable[[Any, Call], AsyncIterator[Any]] | None:
        """As :meth:`own`, for a method with several responses."""
        return {"ExecutePlan": self.execute, "ReattachExecute": self.reattach}.get(name)

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
        if not reads_stream(request, session.stream_views):
            answer = self.pass_on("AnalyzePlan", request.SerializeToString(), call)
            if not session.script.program:
                return await answer
            return await anext(self._recorded(session, request, str(uuid.uuid4()), _only(answer)))
        session.number_functions(request)
        self._check_code(session, request)
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
            answer = await self.pass_on("Config", request.SerializeToString(), call)
            return _without_compression(answer) if _COMPRESSION in keys else answer
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
        request.operation_id = request.operation_id or str(uuid.uuid4())
        responses = self._responses(session, request, call)
        if session.script.program and is_recorded(request, session.stream_views):
            responses = self._recorded(session, request, request.operation_id, responses)
        async for response in responses:
            yield response

    async def reattach(self, request: Any, call: Call) -> AsyncIterator[Any]:
        """Yields further responses to an ``ExecutePlanRequest`` that Spark answers."""
        recording = self._sessions.of(request, call).recording
        async for response in self.pass_on_stream("ReattachExecute", request.SerializeToString(), call):
            recording.add(request.operation_id, _id_of(response), response)
            yield response

    async def _recorded(
        self, session: ClientSession, request: Any, operation_id: str, responses: AsyncIterator[Any]
    ) -> AsyncIterator[Any]:
        """Yields responses, and records them for other runs of the client's script."""
        recording, analyzes = session.recording, isinstance(request, messages.AnalyzePlanRequest)
        recording.begin(operation_id, kind_of(request))
        try:
            async for response in responses:
                encoded = _encoded(response)
                recording.add(operation_id, "" if analyzes else _id_of(encoded), encoded)
                yield response
        except Exception as error:
            recording.fail(operation_id, failure_of(error))
            raise

    def _check_code(self, session: ClientSession, request: Any) -> None:
        """Raises PlanError for a client's functions, unless the client is a script, in which workers find them."""
        if not session.script.program and (code := code_in(request)):
            raise PlanError("query", _NO_CODE.format(code=code))

    async def _responses(self, session: ClientSession, request: Any, call: Call) -> AsyncIterator[Any]:
        kind = kind_of(request)
        if not await self._concerns_streams(session, kind, request, call):
            async for response in self.pass_on_stream("ExecutePlan", request.SerializeToString(), call):
                yield response
            return
        if kind not in ABOUT_QUERIES:
            self._check_code(session, request)
        session.operations.add(request.operation_id)
        spark_session = await self._spark_session(request, call)
        ids = {"session_id": request.session_id, "server_side_session_id": spark_session}
        ids["operation_id"] = request.operation_id
        response = messages.ExecutePlanResponse(**ids, response_id=str(uuid.uuid4()))
        last = messages.ExecutePlanResponse(**ids, response_id=str(uuid.uuid4()))
        last.result_complete.SetInParent()
        if kind == LISTENERS:
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
        if kind in ABOUT_QUERIES or kind == START:
            return True
        if (dropped := _dropped_view(request.plan)) and session.forget_view(dropped):
            # Spark then answers the request as it does for a view of its own, which is dropped with it.
            await self._run_in_spark(request, call, _view_command(dropped, "SELECT 1"))
        statement = request.plan.command.sql_command.input.sql.query
        if setting := SETTING.fullmatch(statement):
            session.configure(setting[1], setting[2].strip())
        if STATEMENT.match(statement) and not _CREATES_VIEW.match(statement):
            return False
        if reads_stream(request, session.stream_views):
            return True
        await session.keep(request)
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
            options: dict[str, str] = {}
            if start.format.lower() == "memory":
                if location is not None and again not in session.queries:
                    await self._queries.check_recovers(start, location)
                options = {MEMORY_VIEW: await self._make_table(session, request, call)}
            commands = session.commands_of(request.plan.command)
            for command in commands:
                self._check_code(session, command)
            if session.defines_functions or any(map(code_in, commands)):
                answers = session.recording.before(request.operation_id)
                script = session.script
                archive = await self._queries.script(script.program)
                program = program_of_script(archive, script.module, script.arguments, answers, options)
            else:
                program = program_of_commands(commands, session.settings)
            own = session.options.effective.to_dict()
            query = await self._queries.start(request.operation_id, start, program, location, own)
            session.queries[query.run_id] = query
            session.starts[query.run_id] = start
        result.query_started_event_json = started_event(query)
        result.query_id.id, result.query_id.run_id = query.id, query.run_id
        result.name = query.name

    async def _make_table(self, session: ClientSession, request: Any, call: Call) -> str:
        """Creates the empty table of a query with format ``memory`` in Spark, and returns the name of its view.

        The query fills a global view; the client's session gets a view of it that has the query's name.
        """
        start = request.plan.command.write_stream_operation_start
        if not start.query_name:
            raise PlanError("queryName", "format memory needs it as the name of the table")
        analyze = messages.AnalyzePlanRequest(session_id=request.session_id)
        analyze.schema.plan.root.CopyFrom(start.input)
        session.number_functions(analyze)
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
        return view

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
                result.await_termination.terminated = await queries.wait(
                    lambda: [query], _seconds(command.await_termination)
                )
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
                result.await_any_termination.terminated = await queries.wait(
                    lambda: [query for key, query in session.queries.items() if key not in session.reset],
                    _seconds(command.await_any_termination),
                )
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


def _without_compression(answer: bytes) -> Any:
    """Returns the answer by which a client never compresses plans, as the kind of a compressed one is not known."""
    response = messages.ConfigResponse.FromString(answer)
    for pair in response.pairs:
        if pair.key == _COMPRESSION:
            pair.value = "-1"
    return response


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
        if method.server_streaming:
            own_stream = self._server.own_stream(name)
            decode = None if own_stream is None else getattr(messages, method.input_type.name).FromString
            return grpc.unary_stream_rpc_method_handler(self._guarded_stream(name, admitted), decode, _encoded)
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
        own = self._server.own_stream(name)

        async def answer(request: Any, call: Call) -> AsyncIterator[Any]:
            if not admitted:
                await _refuse(call)
            server = self._server
            responses = own(request, call) if own is not None else server.pass_on_stream(name, request, call)
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


async def _only(response: Awaitable[Any]) -> AsyncIterator[Any]:
    yield await response


def _id_of(response: bytes) -> str:
    """Returns the id of an ``ExecutePlanResponse``."""
    return str(messages.ExecutePlanResponse.FromString(response).response_id)


def _encoded(message: Any) -> bytes:
    """Serializes the engine's own messages; those of Spark are forwarded unchanged."""
    return message if isinstance(message, bytes) else message.SerializeToString()


async def _abort(call: Call, name: str, error: Exception) -> NoReturn:
    """Ends a call with an error as PySpark's client reads it."""
    failure = failure_of(error)
    if failure.code is grpc.StatusCode.INTERNAL and not isinstance(error, grpc.aio.AioRpcError):
        logger.error("%s failed", name, exc_info=error)
    await call.abort(failure.code, failure.message, failure.metadata)
    raise AssertionError("abort raises")


def failure_of(error: Exception) -> Failure:
    """Returns an error as PySpark's client reads it."""
    if isinstance(error, grpc.aio.AioRpcError):  # Spark's own error, with its further details
        return Failure(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
    if isinstance(error, QueryFailedError | QueryNotStoppedError):
        return _failure("org.apache.spark.sql.streaming.StreamingQueryException", str(error))
    if isinstance(error, IllegalArgumentException):
        return _failure("java.lang.IllegalArgumentException", str(error))
    if isinstance(error, _REFUSALS):
        return _failure("org.apache.spark.sql.AnalysisException", str(error))
    return Failure(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}", ())


def _failure(kind: str, message: str) -> Failure:
    """Returns the error that PySpark turns into its own exception for Java's class ``kind``.

    It has Spark's condition that the message names, such as ``PATH_NOT_FOUND``.
    """
    metadata = {"classes": json.dumps([kind])}
    if condition := CONDITION.search(message):
        metadata["errorClass"] = condition[1]
    info = ErrorInfo(reason=kind, metadata=metadata)
    detail = AnyMessage()
    detail.Pack(info)
    status = to_status(Status(code=grpc.StatusCode.INVALID_ARGUMENT.value[0], message=message, details=[detail]))
    return Failure(status.code, status.details, status.trailing_metadata)
