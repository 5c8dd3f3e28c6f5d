"""A session: the Spark application whose driver hosts the dispatcher and its REST API.

The driver's main thread runs the event loop; Spark's own work (holding barrier stages) happens in threads beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ckpt_runtime.client.private_files import PRIVATE_UMASK, append_private, write_private
from ckpt_runtime.client.process_id import ProcessId
from ckpt_runtime.client.session_command import TOKEN_VARIABLE
from ckpt_runtime.client.transport import InvalidToken, check_token
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.errors import ConfigurationError
from ckpt_runtime.configuration.logging_options import LoggingOptions
from ckpt_runtime.configuration.option import OptionScope
from ckpt_runtime.configuration.rest_options import RestOptions
from ckpt_runtime.configuration.validation import validate
from ckpt_runtime.held_directory import LOCK, HeldDirectory, remove_tree
from ckpt_runtime.jobmaster.cluster import Cluster, ClusterSettings
from ckpt_runtime.jobmaster.slots import SlotTimes
from ckpt_runtime.network.tls import TlsFilesError, credentials, rest_context
from ckpt_runtime.rest import server as rest_server
from ckpt_runtime.rest.app import create_app
from ckpt_runtime.rest.audit import AuditedGateway, audit_log
from ckpt_runtime.rest.auth import BindingRefused, check_binding
from ckpt_runtime.spark.application_watch import ApplicationWatch
from ckpt_runtime.spark.barrier_stage import BarrierStageProvider
from ckpt_runtime.spark.import_path import prefer_installed_pyspark
from ckpt_runtime.spark.launch import TERMINATION, SessionInfo
from ckpt_runtime.spark.log_rotation import rotated_output
from ckpt_runtime.spark.protection import SOCKET_DIRECTORY, UnprotectedSparkError, check_protected, protect
from ckpt_runtime.spark.pyspark_guard import PySparkMismatchError, check_pyspark
from ckpt_runtime.structured_log import PLAIN, LogSettings, start_logging
from ckpt_runtime.web.flink_dashboard import FlinkDashboard

if TYPE_CHECKING:
    from pyspark import SparkContext

logger = logging.getLogger(__name__)

SPARK_SETTINGS = {
    "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
    "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": str((1 << 31) - 1),
    "spark.stage.maxConsecutiveAttempts": "1",
    "spark.task.maxFailures": "1",
    # An agent of a failed stage that hangs holds up the next one.
    "spark.python.task.killTimeout": "500ms",
    "spark.ui.showConsoleProgress": "false",
}
"""What every session asks of Spark: it never runs a stage again by itself, and never gives up on one that has no room:
how long a job waits for slots is for the slot pool to say."""

_DAEMON = "spark.python.daemon.module"
_TOKEN_SOURCES = f"{TOKEN_VARIABLE}, rest.token-file or rest.token"


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Command line of :func:`main`.

    Without a ``work_directory`` the session has a temporary one.
    ``ready_file`` gets a SessionInfo once it leads; ``properties_file`` held Spark's settings for its start;
    ``log_file`` is where the output of spark-submit goes.
    """

    rest_host: str
    rest_port: int
    work_directory: Path | None
    ready_file: Path | None
    properties_file: Path | None
    log_file: Path | None
    configuration: Configuration
    token: str | None
    flink_dashboard: FlinkDashboard | None = None


def main(arguments: list[str] | None = None) -> None:
    """Runs a session until SIGTERM, SIGINT or ``DELETE /cluster``, or until Spark's application is over.

    Raises SystemExit when a session is refused or lost Spark; the log says why. A signal that comes before the session
    waits for its leadership ends it with 128 and the signal's number, a later one with 0.
    """
    for number in TERMINATION:
        signal.signal(number, _interrupted)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TERMINATION)
    start_logging(PLAIN, "driver")
    # Before any file is made: logs, uploads and addresses are for the session's user alone.
    os.umask(PRIVATE_UMASK)
    options = None
    try:
        options = parse_arguments(arguments)
        start_logging(LogSettings(options.configuration.get(LoggingOptions.FORMAT)), "driver")
        check_token(options.token, _TOKEN_SOURCES)
        check_binding(options.rest_host, options.token, options.configuration.get(RestOptions.AUTHENTICATION))
        rest_context(options.configuration)
        credentials("", options.configuration)
        prefer_installed_pyspark()
        check_pyspark()
        with HeldDirectory("ckpt-sockets-") as sockets, _work_directory(options.work_directory) as work:
            lost = _run(replace(options, work_directory=Path(work)), sockets)
    except (
        BindingRefused,
        ConfigurationError,
        InvalidToken,
        PySparkMismatchError,
        TlsFilesError,
        UnprotectedSparkError,
    ) as error:
        sys.exit(f"the session does not start: {error}")
    finally:
        if options is not None and options.properties_file is not None:
            options.properties_file.unlink(missing_ok=True)
    if lost:
        _say_at_last(options.log_file, f"the session has ended: {lost}")
        sys.exit(1)


def _interrupted(number: int, _frame: object) -> None:
    """Lets contexts clean up behind a signal that comes before the event loop listens for it."""
    sys.exit(128 + number)


def _work_directory(given: Path | None) -> contextlib.AbstractContextManager[Path | str]:
    return HeldDirectory("ckpt-session-", clean=_keep_snapshots) if given is None else contextlib.nullcontext(given)


def _keep_snapshots(work: Path) -> None:
    """Of a session that is over: what its jobs have retained is their users', uploads are nobody's."""
    remove_tree(work / "uploads")
    with contextlib.suppress(OSError):  # there are some, or none has ever been taken
        (work / "checkpoints").rmdir()
    (work / LOCK).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        work.rmdir()


def _say_at_last(log_file: Path | None, text: str) -> None:
    """What this process logs goes through the JVM: when that is gone, the log is written to directly."""
    if log_file is None:
        logger.error(text)
    else:
        with append_private(log_file) as log:
            log.write(f"{text}\n".encode())


def _run(options: SessionOptions, sockets: str) -> str:
    context = _application(options, sockets)
    try:
        with rotated_output(options.configuration):
            return asyncio.run(serve(context, options))
    finally:
        with contextlib.suppress(Exception):  # nobody is left to be told when the JVM is gone
            context.stop()


def _application(options: SessionOptions, sockets: str) -> SparkContext:
    """A SparkContext alone: what a SparkSession adds takes seconds to start, and a barrier stage needs none of it."""
    from pyspark import SparkConf, SparkContext

    # What spark-submit was given is in the JVM's properties, which a configuration made before knows nothing of.
    SparkContext._ensure_initialized()  # noqa: SLF001 - as SparkContext itself does
    conf = SparkConf().setAll(list(SPARK_SETTINGS.items()))
    # Without a name from its user spark-submit calls an application by its file, or "pyspark-shell".
    if conf.get("spark.app.name") in (None, Path(sys.argv[0]).name, "pyspark-shell"):
        conf.setAppName("checkpointing stream engine")
    if options.properties_file is not None:
        options.properties_file.unlink(missing_ok=True)
    # An engine that Spark brings along is not there yet when Spark's daemon begins.
    if not conf.get("spark.submit.pyFiles"):
        conf.setIfMissing(_DAEMON, "ckpt_runtime.spark.agent_daemon")
    protect(conf)
    if (conf.get("spark.master") or "").startswith("local"):
        conf.set(SOCKET_DIRECTORY, sockets)  # executors elsewhere do not have it
    context = SparkContext(conf=conf)
    try:
        check_pyspark(context)
        check_protected(context)
        context.setLogLevel("WARN")
    except BaseException:
        context.stop()
        raise
    return context


def parse_arguments(arguments: list[str] | None) -> SessionOptions:
    """Raises SystemExit for a malformed command line, ConfigurationError for a bad ``-D``."""
    parser = argparse.ArgumentParser(description="Runs a session cluster inside this Spark application.")
    parser.add_argument("--rest-host", help="address to bind the REST API to; wins over rest.bind-address")
    parser.add_argument("--rest-port", type=int, help="0 takes any free port; wins over rest.port")
    parser.add_argument("--work-dir", type=Path, help="uploaded pipelines and default checkpoint directory")
    parser.add_argument("--configuration-file", type=Path, help="options as a JSON object; read once, then deleted")
    parser.add_argument("--ready-file", type=Path, help="session file to write once the session leads")
    parser.add_argument("--properties-file", type=Path, help="Spark's settings; deleted once Spark has read them")
    parser.add_argument("--log-file", type=Path, help="where spark-submit's output goes")
    parser.add_argument("-D", dest="properties", action="append", default=[], metavar="key=value")
    given = parser.parse_args(arguments)
    configuration = Configuration.merge(
        _configuration_of(given.configuration_file), Configuration.from_properties(given.properties)
    )
    validate(configuration, OptionScope.CLUSTER)
    dashboard = configuration.get(RestOptions.FLINK_DASHBOARD)
    return SessionOptions(
        rest_host=given.rest_host or configuration.get(RestOptions.BIND_ADDRESS),
        rest_port=configuration.get(RestOptions.PORT) if given.rest_port is None else given.rest_port,
        work_directory=None if given.work_dir is None else given.work_dir.absolute(),
        ready_file=given.ready_file,
        properties_file=given.properties_file,
        log_file=given.log_file,
        configuration=configuration,
        token=_token(configuration),
        flink_dashboard=None if dashboard is None else FlinkDashboard.of(dashboard),
    )


def _configuration_of(file: Path | None) -> Configuration:
    """Options that are not for the process list; nor for anybody who looks into the file later. Raises OSError."""
    if file is None:
        return Configuration()
    try:
        return Configuration(json.loads(file.read_text()))
    finally:
        file.unlink(missing_ok=True)


def _token(configuration: Configuration) -> str | None:
    """From the environment, a file, or the configuration, in this order."""
    # Taken out, since whatever this process starts inherits the environment.
    token = os.environ.pop(TOKEN_VARIABLE, None)
    if token:
        return token
    file = configuration.get(RestOptions.TOKEN_FILE)
    return configuration.get(RestOptions.TOKEN) if file is None else Path(file).read_text().strip()


async def serve(context: SparkContext, options: SessionOptions) -> str:
    """The session on a given SparkContext. Returns when it was told to end, or why Spark's application is over."""
    driver_host = context.getConf().get("spark.driver.host") or "127.0.0.1"
    log = LogSettings(options.configuration.get(LoggingOptions.FORMAT), context.applicationId or "")
    start_logging(log, "driver")
    audit = audit_log(options.configuration)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    lost: list[str] = []

    def application_ended(reason: str) -> None:
        logger.error("%s: the session ends", reason)
        lost.append(reason)
        loop.call_soon_threadsafe(stop.set)

    watch = ApplicationWatch.of(context, application_ended)
    watch.start()
    for number in TERMINATION:
        with contextlib.suppress(NotImplementedError, ValueError):
            loop.add_signal_handler(number, stop.set)
    assert options.work_directory is not None
    cluster = Cluster(
        BarrierStageProvider(context, driver_host, log),
        ClusterSettings(
            control_host=driver_host,
            work_directory=options.work_directory,
            configuration=options.configuration,
            slot_times=SlotTimes.of(options.configuration),
        ),
        on_shutdown=stop.set,
    )
    tls = rest_context(options.configuration)
    await cluster.start()
    limit = options.configuration.get(RestOptions.MAX_CONTENT_LENGTH)
    gateway = AuditedGateway.over(cluster.dispatcher, audit)
    dashboard = options.flink_dashboard
    app = create_app(gateway, token=options.token, max_upload_bytes=limit, flink_dashboard=dashboard)
    connections = options.configuration.get(RestOptions.MAX_CONNECTIONS)
    server, port = await rest_server.start(
        app, options.rest_host, options.rest_port, max_connections=connections, tls=tls
    )
    advertised = options.configuration.get(RestOptions.ADDRESS) or _reachable(options.rest_host)
    url = f"{'http' if tls is None else 'https'}://{_in_url(advertised)}:{port}"
    logger.info("CKPT_REST_URL %s", url)
    try:
        await _lead(cluster.lead(url, context.applicationId or "", options.token), stop)
        # Not before it leads: whoever waits for the file goes on at once.
        if options.ready_file is not None and not stop.is_set():
            _write_session(options.ready_file, url, options)
        await stop.wait()
    finally:
        logger.info("the session ends")
        # The end of the application that follows is this session's own, and no news.
        watch.close()
        # Before the cluster: no request may come to a dispatcher that has stopped.
        await rest_server.stop(server)
        await cluster.stop()
        if options.ready_file is not None:
            options.ready_file.unlink(missing_ok=True)
    return lost[0] if lost else ""


async def _lead(lead: Coroutine[Any, Any, None], stop: asyncio.Event) -> None:
    """Waits for leadership, or for the end of the session."""
    leading = asyncio.ensure_future(lead)
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((leading, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if leading.done():
        leading.result()
    else:
        leading.cancel()


def _reachable(host: str) -> str:
    """An address that clients can dial when the server listens on all of them."""
    return socket.getfqdn() if host in ("0.0.0.0", "::", "[::]") else host


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _write_session(path: Path, url: str, options: SessionOptions) -> None:
    me = ProcessId.of(os.getpid())
    log = "" if options.log_file is None else str(options.log_file)
    write_private(path, msgspec.json.encode(SessionInfo(url, me, me, log, str(path), options.token)))
