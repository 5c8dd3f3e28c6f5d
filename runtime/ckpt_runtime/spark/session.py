"""A session: the Spark application whose driver hosts the dispatcher and its REST API.

The driver's main thread runs the event loop; Spark's own work (holding barrier stages) is done in other threads.

A watch detects that Spark's application has ended: its JVM has ended, or its master or the JVM itself has stopped it.
Otherwise the driver would keep running without slots, as a leader that no other session can replace.

The size of the session's output file is limited. Several processes write to it, in local mode user code as well. They
hold it open for appending, so renaming it would not redirect them. Its last part is copied to ``<file>.1`` and the file
is truncated; the next line is written at its beginning. Lines written between the two steps are lost. A file that is
not open for appending stays untouched.
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
import stat
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ckpt_runtime.client.private_files import PRIVATE_UMASK, append_private, write_private
from ckpt_runtime.client.process_id import ProcessId
from ckpt_runtime.client.session_command import TOKEN_VARIABLE
from ckpt_runtime.client.transport import InvalidToken, check_token
from ckpt_runtime.configuration.cluster_options import ConnectOptions, LoggingOptions, RestOptions
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.option import ConfigurationError, OptionScope
from ckpt_runtime.configuration.validation import validate
from ckpt_runtime.jobmaster.cluster import Cluster, ClusterSettings
from ckpt_runtime.jobmaster.slots import SlotTimes
from ckpt_runtime.network.tls import TlsFilesError, credentials, rest_context
from ckpt_runtime.processes.held_directory import LOCK, HeldDirectory, remove_tree
from ckpt_runtime.rest import server as rest_server
from ckpt_runtime.rest.app import create_app
from ckpt_runtime.rest.audit import audit_log
from ckpt_runtime.rest.server import BindingRefused, check_binding
from ckpt_runtime.spark.barrier_stage import BarrierStageProvider
from ckpt_runtime.spark.installation import (
    PySparkMismatchError,
    RuntimeNotInstalledError,
    check_pyspark,
    prefer_installed_pyspark,
)
from ckpt_runtime.spark.launch import TERMINATION, SessionInfo
from ckpt_runtime.spark.protection import SOCKET_DIRECTORY, UnprotectedSparkError, check_protected, protect
from ckpt_runtime.structured_log import PLAIN, LogSettings, start_logging

if TYPE_CHECKING:
    from pyspark import SparkContext

logger = logging.getLogger(__name__)


CHECK_INTERVAL_S = 1.0
_PRIVATE = 0o600


@contextmanager
def rotated_output(configuration: Configuration) -> Iterator[None]:
    """Rotate the log of this process during the block, if its output goes to a file."""
    file = output_file()
    if file is None:
        yield
        return
    max_bytes, max_files = configuration.get(LoggingOptions.MAX_SIZE), configuration.get(LoggingOptions.MAX_FILES)
    ended = threading.Event()

    def look_after() -> None:
        while not ended.wait(CHECK_INTERVAL_S):
            try:
                rotate(file, max_bytes, max_files)
            except OSError as error:
                logger.warning("the log %s cannot be rotated: %s", file, error)

    thread = threading.Thread(target=look_after, name="log-rotation", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def output_file(pid: int | None = None) -> Path | None:
    """The file to which this process or its parent appends: spark-submit's JVM writes the output of its program.

    None for a terminal, a pipe, or a file that is not open for appending only.
    """
    for process in (os.getpid(), os.getppid()) if pid is None else (pid,):
        for descriptor in (2, 1):
            file = _appended_file(process, descriptor)
            if file is not None:
                return file
    return None


def _appended_file(pid: int, descriptor: int) -> Path | None:
    """The file of a descriptor if it is open for appending. Linux only; other systems lack the directory."""
    try:
        file = Path(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
        is_same = os.path.samestat(file.stat(), Path(f"/proc/{pid}/fd/{descriptor}").stat())
        information = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text()
        flags = int(information.partition("flags:")[2].split()[0], 8)
    except (OSError, IndexError, ValueError):
        return None
    return file if is_same and stat.S_ISREG(file.stat().st_mode) and flags & os.O_APPEND else None


def rotate(file: Path, max_bytes: int, max_files: int) -> bool:
    """Rotate the file if it is larger than ``max_bytes``; returns whether it was.

    Raises OSError; the file then stays unchanged.
    """
    if file.stat().st_size <= max_bytes:
        return False
    draft = file.with_name(f".{file.name}.rotating")
    draft.unlink(missing_ok=True)
    try:
        with file.open("rb") as whole, open(draft, "xb", opener=_private) as last:
            whole.seek(-max_bytes, os.SEEK_END)
            # Includes what is written during the copy, but only up to a limit: the writer may be faster than the copy.
            last.write(whole.read(2 * max_bytes))
        # Truncated right after the copy: lines written between both steps are lost.
        os.truncate(file, 0)
        for number in range(max_files, 1, -1):
            older = _numbered(file, number - 1)
            if older.exists():
                older.replace(_numbered(file, number))
        draft.replace(_numbered(file, 1))
    finally:
        draft.unlink(missing_ok=True)
    return True


def _numbered(file: Path, number: int) -> Path:
    return file.with_name(f"{file.name}.{number}")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, _PRIVATE)


WATCH_INTERVAL_S = 1.0


class ApplicationWatch:
    """Asks the JVM every second, in a thread: a JVM that does not respond for a while does not count as ended.

    ``on_end(reason)`` is called once, from that thread.
    """

    def __init__(self, stopped: Callable[[], bool], on_end: Callable[[str], None]) -> None:
        """``stopped`` says whether the application was stopped, and raises if the JVM has ended."""
        self._stopped = stopped
        self._on_end = on_end
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="application-watch", daemon=True)

    @classmethod
    def of(cls, context: SparkContext, on_end: Callable[[str], None]) -> ApplicationWatch:
        return cls(context._jsc.sc().isStopped, on_end)  # noqa: SLF001 - PySpark has no other way to ask

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop watching: nothing is reported afterwards."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(WATCH_INTERVAL_S):
            reason = self._end()
            if reason and not self._closed.is_set():
                self._on_end(reason)
                return

    def _end(self) -> str:
        try:
            return "Spark has stopped the application" if self._stopped() else ""
        except Exception as error:
            return f"Spark's JVM is gone ({error})"


SPARK_SETTINGS = {
    "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
    "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": str((1 << 31) - 1),
    "spark.stage.maxConsecutiveAttempts": "1",
    "spark.task.maxFailures": "1",
    # A hanging agent of a failed stage delays the next one.
    "spark.python.task.killTimeout": "500ms",
    "spark.ui.showConsoleProgress": "false",
}
"""Spark's settings in every session. Spark never reruns a stage by itself, and never gives up on a stage that lacks
slots, because the slot pool decides how long a job waits for slots."""

_DAEMON = "spark.python.daemon.module"
_TOKEN_SOURCES = f"{TOKEN_VARIABLE}, rest.token-file or rest.token"


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Command line of :func:`main`.

    Without a ``work_directory`` the session uses a temporary one. The session writes a SessionInfo to ``ready_file``
    once it leads. ``properties_file`` held Spark's settings for the start. The output of spark-submit goes to
    ``log_file``.
    """

    rest_host: str
    rest_port: int
    work_directory: Path | None
    ready_file: Path | None
    properties_file: Path | None
    log_file: Path | None
    configuration: Configuration
    token: str | None


def main(arguments: list[str] | None = None) -> None:
    """Run a session until SIGTERM, SIGINT or ``DELETE /cluster``, or until Spark's application is over.

    Raises SystemExit if the session is refused or has lost Spark; the log has the reason. A signal that arrives before
    the session waits for its leadership ends it with code 128 plus the signal's number, a later one with 0.
    """
    for number in TERMINATION:
        signal.signal(number, _interrupted)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TERMINATION)
    start_logging(PLAIN, "driver")
    # Before any file is created: logs, uploads and addresses are private to the session's user.
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
        RuntimeNotInstalledError,
        TlsFilesError,
        UnprotectedSparkError,
    ) as error:
        sys.exit(f"the session does not start: {error}")
    finally:
        if options is not None and options.properties_file is not None:
            options.properties_file.unlink(missing_ok=True)
    if lost:
        # Written directly to the log, because this process's output passes through the JVM, which may have ended.
        text = f"the session has ended: {lost}"
        if options.log_file is None:
            logger.error(text)
        else:
            with append_private(options.log_file) as log:
                log.write(f"{text}\n".encode())
        sys.exit(1)


def _interrupted(number: int, _frame: object) -> None:
    """Handle a signal until the event loop does so: exit by an exception, so that context managers clean up."""
    sys.exit(128 + number)


def _work_directory(given: Path | None) -> contextlib.AbstractContextManager[Path | str]:
    return HeldDirectory("ckpt-session-", clean=_keep_snapshots) if given is None else contextlib.nullcontext(given)


def _keep_snapshots(work: Path) -> None:
    """Clean the work directory of an ended session: retained snapshots belong to the users and stay, uploads do not."""
    remove_tree(work / "uploads")
    with contextlib.suppress(OSError):  # the directory has snapshots, or does not exist
        (work / "checkpoints").rmdir()
    (work / LOCK).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        work.rmdir()


def _run(options: SessionOptions, sockets: str) -> str:
    context = _application(options, sockets)
    try:
        with rotated_output(options.configuration):
            return asyncio.run(serve(context, options))
    finally:
        with contextlib.suppress(Exception):  # the call fails if the JVM has ended
            context.stop()


def _application(options: SessionOptions, sockets: str) -> SparkContext:
    """A bare SparkContext: a SparkSession takes seconds longer to start, and barrier stages do not need it."""
    from pyspark import SparkConf, SparkContext

    # spark-submit's settings are in the JVM's properties; a SparkConf made before the JVM starts does not have them.
    SparkContext._ensure_initialized()  # noqa: SLF001 - as SparkContext itself does
    conf = SparkConf().setAll(list(SPARK_SETTINGS.items()))
    # Without a name from the user, spark-submit names the application after its file, or "pyspark-shell".
    if conf.get("spark.app.name") in (None, Path(sys.argv[0]).name, "pyspark-shell"):
        conf.setAppName("checkpointing stream engine")
    if options.properties_file is not None:
        options.properties_file.unlink(missing_ok=True)
    # If Spark distributes the engine's files, executors do not have them yet when Spark's daemon starts.
    if not conf.get("spark.submit.pyFiles"):
        conf.setIfMissing(_DAEMON, "ckpt_runtime.spark.agent_daemon")
    protect(conf)
    if (conf.get("spark.master") or "").startswith("local"):
        conf.set(SOCKET_DIRECTORY, sockets)  # executors on other hosts do not have it
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
    """Parse the command line. Raises SystemExit if it is malformed, ConfigurationError for a bad ``-D``."""
    parser = argparse.ArgumentParser(description="Runs a session cluster inside this Spark application.")
    parser.add_argument("--rest-host", help="address to bind the REST API to; takes precedence over rest.bind-address")
    parser.add_argument("--rest-port", type=int, help="0 takes any free port; takes precedence over rest.port")
    parser.add_argument("--work-dir", type=Path, help="uploaded pipelines and default checkpoint directory")
    parser.add_argument("--configuration-file", type=Path, help="options as a JSON object; read once, then deleted")
    parser.add_argument("--ready-file", type=Path, help="session file, written when the session is the leader")
    parser.add_argument("--properties-file", type=Path, help="Spark's settings; deleted once Spark has read them")
    parser.add_argument("--log-file", type=Path, help="file for spark-submit's output")
    parser.add_argument("-D", dest="properties", action="append", default=[], metavar="key=value")
    given = parser.parse_args(arguments)
    configuration = Configuration.merge(
        _configuration_of(given.configuration_file), Configuration.from_properties(given.properties)
    )
    validate(configuration, OptionScope.CLUSTER)
    return SessionOptions(
        rest_host=given.rest_host or configuration.get(RestOptions.BIND_ADDRESS),
        rest_port=configuration.get(RestOptions.PORT) if given.rest_port is None else given.rest_port,
        work_directory=None if given.work_dir is None else given.work_dir.absolute(),
        ready_file=given.ready_file,
        properties_file=given.properties_file,
        log_file=given.log_file,
        configuration=configuration,
        token=_token(configuration),
    )


def _configuration_of(file: Path | None) -> Configuration:
    """Read the options that must not be in the process list, and delete their file. Raises OSError."""
    if file is None:
        return Configuration()
    try:
        return Configuration(json.loads(file.read_text()))
    finally:
        file.unlink(missing_ok=True)


def _token(configuration: Configuration) -> str | None:
    """The token from the environment, a file, or the configuration, in this order."""
    # Removed, because the processes that this one starts inherit the environment.
    token = os.environ.pop(TOKEN_VARIABLE, None)
    if token:
        return token
    file = configuration.get(RestOptions.TOKEN_FILE)
    return configuration.get(RestOptions.TOKEN) if file is None else Path(file).read_text().strip()


async def serve(context: SparkContext, options: SessionOptions) -> str:
    """Run the session on a SparkContext until it is asked to end. Returns why Spark's application ended, if it did."""
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
    app = create_app(cluster.dispatcher, token=options.token, max_upload_bytes=limit, audit=audit)
    connections = options.configuration.get(RestOptions.MAX_CONNECTIONS)
    server, port = await rest_server.start(
        app, options.rest_host, options.rest_port, max_connections=connections, tls=tls
    )
    advertised = options.configuration.get(RestOptions.ADDRESS) or _reachable(options.rest_host)
    url = f"{'http' if tls is None else 'https'}://{_in_url(advertised)}:{port}"
    logger.info("CKPT_REST_URL %s", url)
    connect = None
    try:
        await _lead(cluster.lead(url, context.applicationId or "", options.token), stop)
        if options.configuration.get(ConnectOptions.ENABLED) and not stop.is_set():
            from ckpt_runtime.connect.server import ConnectServer
            from ckpt_runtime.frontend.spark_connect import spark_service

            connect = ConnectServer(cluster.dispatcher, options.configuration, options.token, spark_service)
            connect_port = cluster.dispatcher.connect_port = await connect.start(options.rest_host)
            logger.info("CKPT_CONNECT_URL sc://%s:%s", _in_url(advertised), connect_port)
        # Not before it leads, because processes that wait for the file continue at once.
        if options.ready_file is not None and not stop.is_set():
            _write_session(options.ready_file, url, options)
        await stop.wait()
    finally:
        logger.info("the session ends")
        # From here on the session itself ends the application, which need not be reported.
        watch.close()
        # Before the cluster, so that no request reaches a stopped dispatcher.
        if connect is not None:
            await connect.stop()
        await rest_server.stop(server)
        await cluster.stop()
        if options.ready_file is not None:
            options.ready_file.unlink(missing_ok=True)
    return lost[0] if lost else ""


async def _lead(lead: Coroutine[Any, Any, None], stop: asyncio.Event) -> None:
    """Wait for leadership, or for the end of the session."""
    leading = asyncio.ensure_future(lead)
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((leading, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if leading.done():
        leading.result()
    else:
        leading.cancel()


def _reachable(host: str) -> str:
    """An address to which clients can connect if the server listens on all addresses."""
    return socket.getfqdn() if host in ("0.0.0.0", "::", "[::]") else host


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _write_session(path: Path, url: str, options: SessionOptions) -> None:
    me = ProcessId.of(os.getpid())
    log = "" if options.log_file is None else str(options.log_file)
    write_private(path, msgspec.json.encode(SessionInfo(url, me, me, log, str(path), options.token)))
