"""Streaming queries of Spark Connect clients: starts them as jobs, and answers requests about them.

The id of a query's run is its job's id, and both are the id of the operation that started it, so that a repeated
request does not start a second job. A query with a ``checkpointLocation`` continues there, and its id is that of its
first run. Its program is stored like any other: it consists of the client's commands that describe the query, and a
small module that sends them to the planning session; or, if the client is a script and the query calls Python
functions, of the script and what it has read before.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import uuid
import zipfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from google.protobuf.json_format import MessageToDict

from ckpt_runtime.configuration.checkpointing_options import CheckpointingOptions
from ckpt_runtime.configuration.cluster_options import ConnectOptions, QueryStop
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.pipeline_options import ExecutionOptions, PipelineOptions, RestartStrategyOptions
from ckpt_runtime.failure_report import failure_reason
from ckpt_runtime.frontend.recorded_script import ENTRY, FILE_NAME, PROGRAM, Answer, RecordedScript
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.jobmaster.dispatcher import Dispatcher
from ckpt_runtime.jobmaster.gateway_values import (
    AfterSavepoint,
    ExecutionResult,
    JobTerminated,
    LineagePlace,
    OperationKind,
    RunRequest,
    SavepointRequest,
)
from ckpt_runtime.jobmaster.operations import OperationFailure
from ckpt_runtime.scheduler.job_status import JobStatus

logger = logging.getLogger(__name__)

_LEAST_PAUSE_S, _GREATEST_PAUSE_S = 0.2, 2.0
"""Between checkpoints that show whether sources have looked for data and found none."""
_DEFAULT_INTERVAL = "1 s"
"""Between the checkpoints of a query without a trigger, whose rows Spark shows as soon as possible."""
_MODULE = "connect_query"
_PROGRAM = '''"""A query that a Spark Connect client started. Its commands are in commands.json."""

import json
from pathlib import Path

from google.protobuf.json_format import ParseDict
from pyspark.sql import SparkSession
from pyspark.sql.connect.proto import Command


def pipeline(spark: SparkSession) -> None:
    program = json.loads(Path(__file__).with_name("commands.json").read_text())
    for key, value in program["settings"].items():
        spark.conf.set(key, value)
    for command in program["commands"]:
        spark.client.execute_command(ParseDict(command, Command()))
'''


class Program(NamedTuple):
    """The zip of a query's program, and its entry point."""

    archive: bytes
    entry: str


def program_of_commands(commands: Sequence[Any], settings: Mapping[str, str]) -> Program:
    """Returns a program that sends ``commands``, the last of which starts the query, with ``settings`` of Spark."""
    program = {"settings": dict(settings), "commands": [MessageToDict(command) for command in commands]}
    files = {f"{_MODULE}.py": _PROGRAM.encode(), "commands.json": json.dumps(program, sort_keys=True).encode()}
    return Program(_archive(files), f"{_MODULE}:pipeline")


def program_of_script(
    archive: bytes, module: str, arguments: Sequence[str], answers: list[Answer], options: dict[str, str]
) -> Program:
    """Returns a program that runs a script again, up to the start of the query that follows ``answers``.

    ``archive`` is a zip of the script, which is ``module``, and of modules that it imports. ``options`` are added to
    those of the query. Raises PlanError if the archive has no such module.
    """
    with zipfile.ZipFile(io.BytesIO(archive)) as packed:
        files = {name: packed.read(name) for name in packed.namelist()}
    if f"{module}.py" not in files:
        raise PlanError("script", f"{module!r} is none of the modules that were uploaded: {', '.join(sorted(files))}")
    recorded = RecordedScript(module, list(arguments), answers, options)
    files |= {f"{ENTRY}.py": PROGRAM.encode(), FILE_NAME: msgspec.json.encode(recorded)}
    return Program(_archive(files), f"{ENTRY}:pipeline")


def _archive(files: Mapping[str, bytes]) -> bytes:
    """Returns a zip whose entries have a fixed time, so that equal requests give equal archives."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in files.items():
            packed.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return archive.getvalue()


@dataclass(frozen=True, slots=True)
class Query:
    """A run of a query. Its ``id`` is that of its first run, its ``location`` where the next one continues."""

    job_id: str
    name: str
    id: str
    location: str | None

    @property
    def run_id(self) -> str:
        return str(uuid.UUID(self.job_id))


class QueryFailedError(Exception):
    """A query has failed. The message is Spark's, ``reason`` the first line of the failure."""

    def __init__(self, query: Query, reason: str) -> None:
        super().__init__(
            f"[STREAM_FAILED] Query [id = {query.id}, runId = {query.run_id}] terminated with exception: {reason}"
        )
        self.reason = reason


class QueryNotStoppedError(Exception):
    """A query could not be stopped with a savepoint and continues to run."""


class Queries:
    """Starts and controls the jobs of queries through the dispatcher. ``configuration`` is the session's."""

    def __init__(self, dispatcher: Dispatcher, configuration: Configuration) -> None:
        self._dispatcher = dispatcher
        self._configuration = configuration

    async def start(
        self, operation_id: str, start: Any, program: Program, location: str | None, own: Mapping[str, str]
    ) -> Query:
        """Submits the job of a query, which continues in its ``location``.

        ``start`` is the message that starts it, and ``own`` has options of the engine. Raises what
        :meth:`Dispatcher.run_pipeline` raises; then there is no job.
        """
        job_id, name = uuid.UUID(operation_id).hex, start.query_name
        stored = await self._dispatcher.store_pipeline(f"{name or _MODULE}.zip", _once(program.archive))
        configuration = {PipelineOptions.NAME.key: name or f"query-{job_id[:8]}", **own}
        if location is not None and ExecutionOptions.STOP_AFTER.key not in own:
            configuration.setdefault(CheckpointingOptions.CONTINUE_IN.key, location)
            configuration.setdefault(CheckpointingOptions.CHECKPOINTS_AFTER_TASKS_FINISH.key, "false")
        options = Configuration.merge(self._configuration, Configuration(dict(own)))
        if start.WhichOneof("trigger") is None and options.get(CheckpointingOptions.INTERVAL) is None:
            configuration[CheckpointingOptions.INTERVAL.key] = _DEFAULT_INTERVAL
        if options.get(RestartStrategyOptions.TYPE) is None:  # as in Spark, its first failure ends the query
            configuration[RestartStrategyOptions.TYPE.key] = "none"
        await self._dispatcher.run_pipeline(
            RunRequest(stored.id, program.entry, configuration=configuration, job_id=job_id)
        )
        place = self._dispatcher.jobs[job_id].overview().lineage or LineagePlace(job_id)
        return Query(job_id, name, place.query_id, location)

    async def check_recovers(self, start: Any, location: str) -> None:
        """Raises PlanError, as Spark does, for a query to ``memory`` whose table would lack the rows of earlier runs.

        ``start`` is Spark's request.
        """
        complete = start.output_mode.lower() == "complete"
        if not complete and await self._dispatcher.newest_checkpoint(location) is not None:
            raise PlanError(
                "option 'checkpointLocation'",
                f"This query does not support recovering from checkpoint location. Delete {location} to start over.",
            )

    async def script(self, program_id: str) -> bytes:
        """Returns the zip of a stored program. Raises PipelineNotFound."""
        return await self._dispatcher.stored_archive(program_id)

    async def listen(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Calls ``wake`` after each event of any job until the returned function is called."""
        return (await self._dispatcher.event_log()).listen(wake)

    async def result(self, query: Query) -> ExecutionResult:
        """Returns the job's result; its status is None while the job has not ended."""
        return self._dispatcher.jobs[query.job_id].result()

    async def is_active(self, query: Query) -> bool:
        """Returns whether the query has not ended."""
        return (await self.result(query)).status is None

    async def status(self, query: Query) -> tuple[str, bool]:
        """Returns a sentence and whether the query has not ended."""
        status = self._dispatcher.jobs[query.job_id].status
        details = await self._dispatcher.job_details(query.job_id)
        reason = f": {details.status_reason}" if details.status_reason else ""
        return f"Job {query.job_id} is {status}{reason}", not status.is_globally_terminal

    async def wait(self, queries: Callable[[], Iterable[Query]], timeout_s: float | None) -> bool:
        """Waits until one of the queries has ended; returns False if none ends in time.

        ``queries`` is called again after each event, as queries may be started meanwhile. If some of those that have
        ended have failed, raises the QueryFailedError of the last one.
        """
        changed = asyncio.Event()
        log = await self._dispatcher.event_log()
        stop_listening = log.listen(changed.set)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    changed.clear()
                    ended = [query for query in queries() if not await self.is_active(query)]
                    times = {query: (await self.result(query)).end_time_ms for query in ended}
                    for query in sorted(ended, key=times.__getitem__, reverse=True):
                        if (failure := await self.failure(query)) is not None:
                            raise failure
                    if ended:
                        return True
                    await changed.wait()
        except TimeoutError:
            return False
        finally:
            stop_listening()

    async def process_all(self, query: Query) -> None:
        """Waits until all data that exists now has been processed and committed, or until the query has ended.

        Raises QueryFailedError if it fails.
        """
        since, pause_s = None, _LEAST_PAUSE_S
        while True:
            try:
                taken, processed = await self._dispatcher.jobs[query.job_id].living().processed_all(since)
                if processed:
                    return
                since = taken if since is None else since
            except (JobTerminated, OperationFailure) as error:
                logger.debug("query %s: %s", query.id, error)
            if await self.wait(lambda: [query], pause_s):
                return
            pause_s = min(2 * pause_s, _GREATEST_PAUSE_S)

    async def stop(self, query: Query) -> None:
        """Ends a query, with a savepoint if the session is configured so, and waits for its end.

        A query that continues in its location needs none: its last checkpoint stays.

        Raises QueryNotStoppedError if the savepoint failed; the query then continues to run.
        """
        try:
            continues = self._dispatcher.jobs[query.job_id].configuration.get(CheckpointingOptions.CONTINUE_IN)
            if continues is None and self._configuration.get(ConnectOptions.STOP) is QueryStop.SAVEPOINT:
                await self._stop_with_savepoint(query)
            else:
                await self._dispatcher.cancel_job(query.job_id)
        except JobTerminated:
            return
        try:
            await self.wait(lambda: [query], None)
        except QueryFailedError:
            return  # stop() does not raise in Spark; exception() has the failure

    async def _stop_with_savepoint(self, query: Query) -> None:
        directory = self._dispatcher.jobs[query.job_id].configuration.get(CheckpointingOptions.SAVEPOINT_DIRECTORY)
        if directory is None:
            option = CheckpointingOptions.SAVEPOINT_DIRECTORY.key
            raise QueryNotStoppedError(
                f"there is no directory for the savepoint, and the query keeps running: set {option}"
            )
        log = await self._dispatcher.event_log()
        changed = asyncio.Event()
        stop_listening = log.listen(changed.set)
        try:
            wanted = SavepointRequest(directory, AfterSavepoint.STOP)
            trigger = await self._dispatcher.take_savepoint(query.job_id, wanted)
            while True:
                changed.clear()
                status = await self._dispatcher.operation_status(OperationKind.SAVEPOINT, trigger, query.job_id)
                if status.failure is not None:
                    raise QueryNotStoppedError(
                        f"the savepoint failed, and the query keeps running: {status.failure.message}"
                    )
                if status.completed:
                    return
                await changed.wait()
        finally:
            stop_listening()

    async def failure(self, query: Query) -> QueryFailedError | None:
        """Returns the failure that ended the query; None if it has not failed."""
        result = await self.result(query)
        if result.status is not JobStatus.FAILED:
            return None
        return QueryFailedError(query, failure_reason(result.failure) or "the query failed")

    async def progress(self, query: Query) -> list[str]:
        """Returns the reports of progress, oldest first, in Spark's JSON form: one for each completed checkpoint."""
        return [json.dumps(report) for report in await self._dispatcher.jobs[query.job_id].progress()]


async def _once(content: bytes) -> AsyncIterator[bytes]:
    yield content
