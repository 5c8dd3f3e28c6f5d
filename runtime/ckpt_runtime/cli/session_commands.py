"""``ckpt session start | stop | status``: a session cluster on Spark, and the file that describes it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ckpt_runtime.cli import framework
from ckpt_runtime.cli.framework import Cli, CommandError, ExitCode, path_beside, session_path, write_session
from ckpt_runtime.client.errors import Unreachable
from ckpt_runtime.client.session_command import SessionCommandError
from ckpt_runtime.configuration.cluster_options import RestAuthentication
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.option import ConfigurationError, OptionScope
from ckpt_runtime.configuration.validation import validate
from ckpt_runtime.spark.installation import RuntimeNotInstalledError, check_runtime
from ckpt_runtime.spark.launch import (
    LOOPBACK,
    TERMINATION,
    SessionInfo,
    SessionSettings,
    SessionStartError,
    become_session,
    start_session,
    stop_session,
)
from ckpt_runtime.spark.protection import AUTHENTICATION_SECRET

DEFAULT_READY_TIMEOUT = "2 min"


def start(  # noqa: PLR0913 -- one parameter for each option
    cli: Cli,
    master: Annotated[str, typer.Option(help="Spark master URL.")] = "local",
    slots: Annotated[
        int | None, typer.Option(min=1, help="Task slots. Default: 2 on local, all cores of a standalone master.")
    ] = None,
    rest_host: Annotated[str, typer.Option(help="Address to listen on; any but loopback needs a token.")] = LOOPBACK,
    rest_port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 0,
    no_token: Annotated[
        bool,
        typer.Option(
            "--no-token", help="Accept requests without a token: every user of this machine may run code as you."
        ),
    ] = False,
    define: Annotated[
        list[str] | None,
        typer.Option("-D", metavar="KEY=VALUE|@FILE", help="Configuration of the cluster; repeatable."),
    ] = None,
    spark_conf: Annotated[
        list[str] | None, typer.Option("--conf", metavar="KEY=VALUE|@FILE", help="Spark configuration; repeatable.")
    ] = None,
    work_dir: Annotated[
        Path | None,
        typer.Option(help="Directory of uploads, and of the checkpoints of jobs that configure no directory."),
    ] = None,
    log_file: Annotated[Path | None, typer.Option(help="Log file of the session.")] = None,
    ready_timeout: Annotated[
        str | None, typer.Option(metavar="DURATION", help=f"Maximum time of the start ({DEFAULT_READY_TIMEOUT}).")
    ] = None,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Run the session in this process until SIGTERM or SIGINT ends it.")
    ] = False,
) -> None:
    """Start a session, detached, and wait until its REST API answers; or run it in the foreground."""
    timeout_s = framework.timeout_s("--ready-timeout", ready_timeout or DEFAULT_READY_TIMEOUT) or 0.0
    conf, spark = framework.pairs("-D", define or ()), framework.pairs("--conf", spark_conf or ())
    _check_options(conf)
    _refuse_secrets(spark)
    for option, given in (("--log-file", log_file), ("--ready-timeout", ready_timeout)):
        if foreground and given is not None:
            raise CommandError(f"{option}: it cannot be given together with --foreground", ExitCode.USAGE)
    if no_token:
        _check_no_token(rest_host, cli.settings.token)
    known = cli.session()
    if known is not None and known.is_alive:
        raise CommandError(f"a session already runs at {known.rest_url} (pid {known.pid})", ExitCode.CONFLICT)
    path = session_path().absolute()
    log = log_file or path_beside(path, ".log")
    settings: SessionSettings = {
        "rest_host": rest_host,
        "rest_port": rest_port,
        "token": cli.settings.token,
        "authenticated": not no_token,
        "conf": conf,
        "spark_conf": spark,
        "work_directory": (work_dir or path_beside(path, ".work")).absolute(),
    }
    if foreground:
        try:
            check_runtime()
            become_session(master, slots, session_file=path, **settings)
        except (SessionStartError, SessionCommandError, RuntimeNotInstalledError, OSError) as error:
            raise CommandError(str(error), ExitCode.FAILED) from error
    info = _started(cli, master, slots, log, timeout_s, settings)
    write_session(path, info)
    document = {"rest_url": info.rest_url, "pid": info.pid, "log_file": str(log), "session_file": str(path)}
    cli.output.result(document, f"Session {info.rest_url} (pid {info.pid}), token in {path}, log in {log}")


def _started(
    cli: Cli, master: str, slots: int | None, log: Path, timeout_s: float, settings: SessionSettings
) -> SessionInfo:
    """Start a detached session. Raises CommandError, also when a signal ends the wait for it."""
    received: list[int] = []
    try:
        with _signals_in(received), cli.output.progress() as show:
            show(f"starting a session on {master}, log in {log}")
            return start_session(
                master, slots, log_file=log, ready_timeout_s=timeout_s, is_given_up=lambda: bool(received), **settings
            )
    except (SessionStartError, SessionCommandError, RuntimeNotInstalledError, OSError) as error:
        code = ExitCode(128 + received[0]) if received else ExitCode.FAILED
        raise CommandError(str(error), code) from error


@contextmanager
def _signals_in(received: list[int]) -> Iterator[None]:
    """Collect SIGTERM and SIGINT, so that neither interrupts between the start of a process and its recording."""
    before = [signal.signal(number, lambda number, _: received.append(number)) for number in TERMINATION]
    try:
        yield
    finally:
        for number, handler in zip(TERMINATION, before, strict=True):
            signal.signal(number, handler)


def _check_options(conf: dict[str, str]) -> None:
    try:
        validate(Configuration(conf), OptionScope.CLUSTER)
    except ConfigurationError as error:
        raise CommandError(f"-D: {error}", ExitCode.USAGE) from error


def _check_no_token(host: str, token: str | None) -> None:
    from ckpt_runtime.rest.server import BindingRefused, check_binding

    if token:
        raise CommandError("--no-token: a token is given, by --token or the environment", ExitCode.USAGE)
    try:
        check_binding(host, None, RestAuthentication.NONE)
    except BindingRefused as error:
        raise CommandError(f"--no-token: {error}", ExitCode.USAGE) from error


def _refuse_secrets(spark: dict[str, str]) -> None:
    if AUTHENTICATION_SECRET in spark:
        raise CommandError(
            f"--conf: {AUTHENTICATION_SECRET} is not acceptable, because other users can read a command line; put it "
            "into spark-defaults.conf, readable only by you",
            ExitCode.USAGE,
        )


def stop(cli: Cli) -> None:
    """Stop the session; its jobs are suspended. With --url or --ha-dir, ask that one to end over REST."""
    if cli.is_given:
        cli.client().shutdown_cluster()
        url = cli.client().url
        cli.output.result({"rest_url": url}, f"Session {url} is ending.")
        return
    record = cli.session()
    if record is None:
        raise CommandError("no session is known; give --url or --ha-dir to end another one", ExitCode.NOT_FOUND)
    was_running = stop_session(record)
    session_path().unlink(missing_ok=True)
    said = "is stopped" if was_running else "was gone already"
    cli.output.result({"rest_url": record.rest_url, "was_running": was_running}, f"Session {record.rest_url} {said}.")


def status(cli: Cli) -> ExitCode:
    """Show the session: where it is, its slots and jobs."""
    record = None if cli.is_given else cli.session()
    try:
        overview = cli.client().cluster_overview()
    except Unreachable:
        if record is not None and not record.is_alive:
            gone = f"the processes {record.pid} and {record.driver.pid} of the session have ended"
            cli.output.note(f"{gone}; its log is {record.log_file}" if record.log_file else gone)
        raise
    process = "" if record is None else f" (pid {record.pid}, log {record.log_file or 'on its terminal'})"
    document = {
        "rest_url": cli.client().url,
        "pid": None if record is None else record.pid,
        "log_file": None if record is None else record.log_file,
        "overview": overview,
    }
    cli.output.result(
        document,
        f"Session:  {cli.client().url}{process}",
        f"Version:  {overview.version}",
        f"Slots:    {overview.slots_available} free of {overview.slots_total}",
        f"Jobs:     {overview.jobs_running} running, {overview.jobs_finished} finished, "
        f"{overview.jobs_cancelled} canceled, {overview.jobs_failed} failed",
    )
    return ExitCode.OK
