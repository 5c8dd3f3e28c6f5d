"""Starts a session cluster as a detached Spark application, and ends one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.sdk.configuration import conf

from airflow_provider_ckpt import arguments, processes
from airflow_provider_ckpt.arguments import Templated, shown_command
from airflow_provider_ckpt.conditions.base import Json, Once, Status, Verdict
from airflow_provider_ckpt.conditions.health import SessionGoneCondition, SessionReadyCondition, session_facts
from airflow_provider_ckpt.exceptions import (
    CkptArgumentInvalid,
    CkptNotFound,
    CkptOperationFailed,
    CkptRequestRejected,
    CkptSessionFailed,
    CkptUnavailable,
)
from airflow_provider_ckpt.hooks.ckpt import Endpoint
from airflow_provider_ckpt.operators.base import CkptOperator
from airflow_provider_ckpt.processes import STOP_GRACE_SECONDS, SessionProcess, submission
from airflow_provider_ckpt.tasks import Journal, is_over_time, new_id
from airflow_provider_ckpt.triggers.wait import is_given_up
from ckpt_runtime.client import requests
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.errors import CkptClientError, Unreachable, is_passing
from ckpt_runtime.client.private_files import write_private
from ckpt_runtime.client.session_command import (
    TOKEN_VARIABLE,
    SessionCommandError,
    SessionFiles,
    application_file,
    configuration_text,
    properties_text,
    session_arguments,
    session_command,
    session_environment,
)

if TYPE_CHECKING:
    from airflow.sdk import Context

_RECORD = "ckpt_session"
DEFAULT_MASTER = "local[2]"


class StartSessionOperator(CkptOperator):
    """Starts a session with ``spark-submit`` on the worker's machine, detached, and waits until it leads.

    The session listens where the connection points to, outlives the task, and is ended by
    :class:`StopSessionOperator`. Its id is recorded before the start, so a retry finds a process that an earlier try
    has started, wherever that try died. A session that already answers at the connection's address is used as it is.

    A try that fails ends the session that it has started: so a failed setup, after which Airflow runs no teardown,
    leaves none. A process on another machine than the one that resumes the task cannot be ended; the log names it.

    Returns ``{"session_id", "hostname", "pid", "start_ticks", "log_file", "base_url", "reused", "slots_total",
    "slots_available", "jobs_running", "version"}``; the first five are ``None`` for a session that was found running.

    :param master: Spark's master URL; default ``local[2]``. (templated)
    :param spark_conn_id: a connection of Airflow's Spark provider instead of ``master``: the session is started with
        the settings of its submit hook (master, deploy mode, queue, binary, keytab, principal, Kubernetes namespace),
        so that it runs where the team's other Spark jobs run. The deploy mode has to be client. (templated)
    :param spark_conf: Spark's settings. (templated)
    :param configuration: the session's options. (templated)
    :param work_directory: holds uploaded pipelines and, unless configured otherwise, checkpoints. (templated)
    :param rest_host: the address to bind to; default the connection's host. (templated)
    :param application: the file given to ``spark-submit``; default the installed runtime's. (templated)
    :param command: the whole command instead; ``master`` to ``application`` are then ignored. (templated)
    :param log_directory: where the session writes its log; default ``ckpt-sessions`` below Airflow's logs. (templated)
    :param env: additional environment variables of the session. (templated)
    :param reuse_running: use a session that already answers; otherwise such a session is a failure.
    :param terminate_on_kill: end the session when a person marks this task failed while it waits.
    :raises CkptSessionFailed: the process ended before it led (the message has the end of its log); it never answered;
        or another session answers and ``reuse_running`` is off
    """

    template_fields: Collection[str] = (
        *CkptOperator.template_fields,
        "master",
        "spark_conn_id",
        "spark_conf",
        "configuration",
        "work_directory",
        "rest_host",
        "application",
        "command",
        "log_directory",
        "env",
    )

    def __init__(  # noqa: PLR0913 - keyword arguments of a DAG author
        self,
        *,
        master: str | None = None,
        spark_conn_id: str | None = None,
        spark_conf: Mapping[str, Any] | None = None,
        configuration: Mapping[str, Any] | None = None,
        work_directory: str | None = None,
        rest_host: str | None = None,
        application: str | None = None,
        command: Sequence[str] | None = None,
        log_directory: str | None = None,
        env: Mapping[str, str] | None = None,
        reuse_running: bool = True,
        terminate_on_kill: bool = True,
        **kwargs: Any,
    ) -> None:
        # Spark alone takes longer to start than a deferral does.
        kwargs.setdefault("defer_after", 0)
        super().__init__(**kwargs)
        self.master = master
        self.spark_conn_id = spark_conn_id
        self.spark_conf = spark_conf
        self.configuration = configuration
        self.work_directory = work_directory
        self.rest_host = rest_host
        self.application = application
        self.command = command
        self.log_directory = log_directory
        self.env = env
        self.reuse_running = arguments.flag("reuse_running", reuse_running)
        self.terminate_on_kill = arguments.flag("terminate_on_kill", terminate_on_kill)
        self._process: SessionProcess | None = None
        self._instance: Any = None

    def execute(self, context: Context) -> Any:
        self._instance = context["ti"]
        endpoint, deadline = self.hook.endpoint(), self.deadline()
        process = self._started_earlier(context)
        if process is None:
            with self.connected() as client:
                answers = _overview(client) is not None
            if answers and not self.reuse_running:
                raise CkptSessionFailed(f"a session already answers at {self.hook.base_url()}")
            if answers and (verdict := self._probe_session()) is not None:
                return self._reuse(self.hook.base_url(), verdict.result)
            process = None if answers else self._launch(context, endpoint)
        self._process = process
        with self._ending_on_failure(context):
            return self.wait_for(context, SessionReadyCondition(process, self.terminate_on_kill), deadline)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Continue after a deferral, which may have ended with a failure of the trigger itself."""
        with self._ending_on_failure(context):
            return super().resume_execution(next_method, next_kwargs, context)

    @contextmanager
    def _ending_on_failure(self, context: Context) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._restore_process(context)
            if self._process is not None and (self._process.is_alive or not self._process.is_here):
                self.log.warning("The start failed. %s", self._end())
            raise

    def _restore_process(self, context: Context) -> None:
        """Identify the process in another process than the one that started it."""
        record = Journal(context, _RECORD).read()
        if self._process is None and "pid" in record:
            self._process = SessionProcess.from_json(record)

    def _probe_session(self) -> Verdict | None:
        """The verdict on a session that answers; ``None`` when it is not the leader yet."""
        with self.connected() as client:
            try:
                return client.run(SessionReadyCondition().poll(Once(client.calls)))
            except CkptClientError as error:
                if not is_passing(error):
                    raise
                self.log.info("The session that answers is not ready: %s", error)
                return None

    def _started_earlier(self, context: Context) -> SessionProcess | None:
        record = Journal(context, _RECORD).read()
        if not record:
            return None
        process = processes.find(record["session_id"], record["log_file"])
        if process is not None:
            self.log.info("Attaching to session %s (pid %d) of an earlier try", process.session_id, process.pid)
        return process

    def _reuse(self, base_url: str, facts: Json) -> Json:
        self.log.info("The session that already answered at %s is ready: %s", base_url, facts)
        unknown = dict.fromkeys(("session_id", "hostname", "pid", "start_ticks", "log_file"))
        return {**unknown, "base_url": base_url, "reused": True, **facts}

    def _launch(self, context: Context, endpoint: Endpoint) -> SessionProcess:
        session_id = new_id(context, "session")
        log_file = self._log_directory() / f"{session_id}.log"
        files = SessionFiles(
            properties=str(log_file.with_suffix(".spark.conf")),
            log=str(log_file),
            work=arguments.optional_text("work_directory", self.work_directory),
            configuration=str(log_file.with_suffix(".options.json")),
        )
        command, environment, master = self.command_line(endpoint, files)
        journal = Journal(context, _RECORD)
        # Recorded before the start: if this process dies right after it, the next try finds the session by its id.
        journal.write(session_id=session_id, log_file=str(log_file))
        if not self.command:
            # Both files are for the session alone, which deletes them after reading.
            spark_conf = arguments.options("spark_conf", self.spark_conf)
            configuration = endpoint.options | arguments.options("configuration", self.configuration)
            write_private(Path(files.properties), properties_text(master, spark_conf))
            write_private(Path(files.configuration or ""), configuration_text(configuration))
        try:
            process = processes.launch(command, session_id, log_file, environment)
        except BaseException:
            # No process is left that would read and delete the files, and they may hold secrets.
            for file in (files.properties, files.configuration):
                if file is not None:
                    Path(file).unlink(missing_ok=True)
            raise
        journal.write(**process.to_json())
        shown = shown_command(command)
        self.log.info("Started session %s (pid %d), log in %s: %s", session_id, process.pid, log_file, shown)
        return process

    def command_line(self, endpoint: Endpoint, files: SessionFiles) -> tuple[list[str], dict[str, str], str]:
        """Return the command, the environment variables that it needs, and Spark's master.

        :raises CkptArgumentInvalid: naming the argument, its value and what is allowed.
        """
        given = {str(key): str(value) for key, value in (self.env or {}).items()}
        if self.command:
            token = {TOKEN_VARIABLE: endpoint.token} if endpoint.token else {}
            return [str(part) for part in self.command], {**token, **given}, ""
        configuration = arguments.options("configuration", self.configuration)
        if not endpoint.token and (configuration or {}).get("rest.authentication", "").upper() != "NONE":
            raise CkptArgumentInvalid(
                "password of the connection",
                None,
                "it must be the token for the session; configuration={'rest.authentication': 'NONE'} starts one that "
                "every user of its machine may use",
            )
        rest_host = arguments.optional_text("rest_host", self.rest_host) or endpoint.host
        command, master = self._spark_command(rest_host, endpoint.port, files)
        return command, {**session_environment(master, endpoint.token), **given}, master

    def _spark_command(self, rest_host: str, rest_port: int, files: SessionFiles) -> tuple[list[str], str]:
        master = arguments.optional_text("master", self.master)
        spark_conn_id = arguments.optional_text("spark_conn_id", self.spark_conn_id)
        given = arguments.optional_text("application", self.application)
        application = application_file() if given is None else Path(given)
        if spark_conn_id is not None:
            if master is not None:
                raise CkptArgumentInvalid("master", master, "it must not be set, because spark_conn_id names one")
            rest = session_arguments(rest_host=rest_host, rest_port=rest_port, files=files)
            spark_conf = arguments.options("spark_conf", self.spark_conf)
            submitted = submission(spark_conn_id, spark_conf, files.properties, str(application), rest)
            return submitted.command, submitted.master
        master = master or DEFAULT_MASTER
        try:
            command = session_command(
                master, rest_host=rest_host, rest_port=rest_port, files=files, application=application
            )
        except SessionCommandError as error:
            raise CkptArgumentInvalid("master", master, str(error)) from error
        return command, master

    def _log_directory(self) -> Path:
        given = arguments.optional_text("log_directory", self.log_directory)
        return Path(given or Path(conf.get("logging", "base_log_folder")) / "ckpt-sessions").absolute()

    def execute_complete(self, context: Context, event: Json | None = None) -> Any:
        event = event or {}
        base_url, document = self.hook.base_url(), event["trigger"]["condition"]["process"]
        if document is None:
            if Status(event["status"]) is not Status.DONE:
                raise self.failure(context, event, CkptSessionFailed)
            return self._reuse(base_url, event["result"])
        self._process = process = SessionProcess.from_json(document)
        if Status(event["status"]) is Status.FAILED or (process.is_here and not process.is_alive):
            Journal(context, _RECORD).forget()
            raise CkptSessionFailed(f"session {process.session_id} ended; its log ends with\n{process.log_tail()}")
        if Status(event["status"]) is not Status.DONE:
            raise self.failure(context, event, CkptSessionFailed)
        result = process.to_json() | {"base_url": base_url, "reused": False, **event["result"]}
        self.log.info("Session %s is ready: %s", process.session_id, result)
        return result

    def after_timeout(self, context: Context, event: Json | None) -> str:
        self._restore_process(context)
        return self._end() if event is None or event["trigger"]["condition"]["process"] is not None else ""

    def on_kill(self) -> None:
        """End the session that was being started, if this is configured."""
        if self._process is None:
            return
        if is_over_time() or (self.terminate_on_kill and is_given_up(self._instance, self.log)):
            self.log.warning("The task was killed. %s", self._end())

    def _end(self) -> str:
        process = self._process
        if process is None:
            return "No session of this task is known"
        name = f"Session {process.session_id} (pid {process.pid} on {process.hostname})"
        if not process.is_here:
            return f"{name} runs on another machine and keeps running"
        tail = process.log_tail()
        process.terminate()
        return f"{name} was ended; the last lines of its log:\n{tail}"


class StopSessionOperator(CkptOperator):
    """Ends the session that the connection points to; jobs that still run are suspended. Repeating it is harmless.

    Standbys of a high-availability session that wait for its lease end with it, so that none of them takes over its
    jobs. A session that is started later does take them over. If the connection points to a standby, only that standby
    ends.

    Returns ``{"base_url", "was_running"}``; where no session answers, the task succeeds with ``was_running`` false.

    :param session: what :class:`StartSessionOperator` returned; used to end the process if it does not end by itself in
        time, or cannot be asked to, for example because the connection has another token by now. (templated)
    :raises CkptSessionFailed: the session still answers
    """

    template_fields: Collection[str] = (*CkptOperator.template_fields, "session")

    def __init__(self, *, session: Templated[Mapping[str, Any]] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.session = session

    def execute(self, context: Context) -> Any:
        deadline = self.deadline()
        self._known_process()  # a bad argument is reported before anything is sent
        try:
            asked = self._ask_to_end()
        except (CkptRequestRejected, CkptNotFound, CkptOperationFailed, CkptUnavailable) as error:
            if not self._end_process(0):
                raise
            self.log.warning("The session could not be asked to end, so its process was ended: %s", error)
            return self._result(was_running=True)
        if asked:
            return self.wait_for(context, SessionGoneCondition(), deadline)
        return self._result(was_running=self._end_process(STOP_GRACE_SECONDS))

    def _ask_to_end(self) -> bool:
        """Ask the session that answers to end; false when none answers."""
        with self.connected() as client:
            if _overview(client) is None:
                return False
            try:
                # Not repeated, because the client would wait for a session that has just ended.
                client.execute(requests.shutdown_cluster(), retry_timeout_s=0)
            except Unreachable as error:
                self.log.info("The session ended before it answered the request to end: %s", error)
            return True

    def execute_complete(self, context: Context, event: Json | None = None) -> Any:
        event = event or {}
        if Status(event["status"]) is not Status.DONE:
            failure = self.failure(context, event, CkptSessionFailed)
            self._end_process(0)
            raise failure
        # Its REST API stops first; Spark, and the directories that it shares with workers, follow.
        self._end_process(STOP_GRACE_SECONDS)
        return self._result(was_running=True)

    def after_timeout(self, context: Context, event: Json | None) -> str:
        self._end_process(0)
        process = self._known_process()
        ended = process is not None and process.is_here
        return "The session's process was ended" if ended else "The session was asked to end and may still be ending"

    def _known_process(self) -> SessionProcess | None:
        given: Any = self.session
        if given in (None, "", "None"):
            return None
        if not isinstance(given, Mapping) or "pid" not in given:
            raise CkptArgumentInvalid("session", given, "it must be the whole result of StartSessionOperator")
        return None if given["pid"] is None else SessionProcess.from_json(given)

    def _end_process(self, timeout: float) -> bool:
        """Wait ``timeout`` seconds for the process to end by itself, then end it; false if that was not needed."""
        process = self._known_process()
        if process is None or process.ends_within(timeout):
            return False
        self.log.info("Ending the session's process %d", process.pid)
        process.terminate()
        return True

    def _result(self, *, was_running: bool) -> Json:
        return {"base_url": self.hook.base_url(), "was_running": was_running}


def _overview(client: CkptClient) -> Json | None:
    """Return facts about the session that answers, if one does."""
    try:
        return session_facts(client.execute(requests.cluster_overview(), retry_timeout_s=0))
    except Unreachable:
        return None
