"""A private Airflow of this virtual environment: scheduler, DAG processor, triggerer and API server.

Used by the demonstration and by the system tests. Everything lives below one home directory (SQLite, logs, secrets),
listens on the loopback interface only, and ends with ``stop()``. It never touches another Airflow, never installs
anything and never changes the environment of the calling process.
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

from demo.airflow_api import AirflowApi, AirflowApiError, DagRun

COMPONENTS: Final = ("api-server", "dag-processor", "scheduler", "triggerer")
"""Names of the processes, which are also the sub-commands of ``airflow``."""

STOP_GRACE_SECONDS: Final = 15.0
POLL_SECONDS: Final = 0.5
LOOKS_AT_TASKS: Final = 4
"""One of so many looks at a run asks for the states of its tasks as well."""

Progress = Callable[[str], None]


class AirflowInstanceError(RuntimeError):
    """The instance could not be started, or one of its processes ended; the message carries the end of its log."""


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _session_members(session_id: int) -> list[int]:
    """Pids of the living processes in a session: each Airflow task has a process group of its own, so a group is not
    enough, and a process that a task detached on purpose is in another session and is not listed."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if os.getsid(int(entry.name)) == session_id and not _is_zombie(entry):
                members.append(int(entry.name))
    return members


def _is_zombie(proc_entry: Path) -> bool:
    stat = (proc_entry / "stat").read_text()
    return stat[stat.rindex(")") + 2] == "Z"


class LocalAirflow:
    """Starts, watches and stops an Airflow.

    :param home: becomes ``AIRFLOW_HOME``; created when missing, may be reused by a later instance.
    :param dags_folder: folder that the DAG processor reads.
    :param connections: connection id -> URI or JSON, passed as ``AIRFLOW_CONN_<ID>``.
    :param extra_env: further environment of all processes; wins over everything that is set here.
    :param progress: called with one line for each thing that happened.
    :param parallelism: task processes at the same time.
    """

    def __init__(
        self,
        home: Path,
        dags_folder: Path,
        connections: Mapping[str, str] | None = None,
        extra_env: Mapping[str, str] | None = None,
        *,
        progress: Progress | None = None,
        parallelism: int = 4,
    ) -> None:
        self.home = Path(home).resolve()
        self.dags_folder = Path(dags_folder).resolve()
        self.port = _free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._say: Progress = progress or (lambda _line: None)
        self._env = self._environment(dict(connections or {}), dict(extra_env or {}), parallelism)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: dict[str, IO[bytes]] = {}
        self._api: AirflowApi | None = None

    # -- environment -------------------------------------------------------------------------------------------

    def _environment(self, connections: dict[str, str], extra_env: dict[str, str], parallelism: int) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("AIRFLOW")}
        bin_dir = str(Path(sys.executable).parent)
        settings = {
            "AIRFLOW_HOME": str(self.home),
            "AIRFLOW__CORE__DAGS_FOLDER": str(self.dags_folder),
            "AIRFLOW__CORE__PLUGINS_FOLDER": str(self.home / "plugins"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
            "AIRFLOW__CORE__PARALLELISM": str(parallelism),
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{self.base_url}/execution/",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
            "AIRFLOW__CORE__TEST_CONNECTION": "Enabled",
            "AIRFLOW__CORE__DAGBAG_IMPORT_TIMEOUT": "120",
            # Four processes write to one file: on a loaded machine SQLite's own 5 s are over before it is their turn.
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{self.home / 'airflow.db'}?timeout=30",
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__PORT": str(self.port),
            "AIRFLOW__API__BASE_URL": self.base_url,
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__API__EXPOSE_STACKTRACE": "True",
            # Every process signs and checks tokens with the same secrets, also after a partial restart.
            "AIRFLOW__API__SECRET_KEY": secrets.token_hex(16),
            "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(32),
            "AIRFLOW__CORE__FERNET_KEY": base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
            "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "5",
            # A file that has changed is read at the next refresh; one that has not, hardly ever again.
            "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "600",
            "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "2",
            # A triggerer builds its access to the execution API at the first request, which on a busy machine may take
            # longer than the 30 s that a killed wait has for its last actions.
            "AIRFLOW__TRIGGERER__ON_KILL_TIMEOUT": "300",
            # The default of 5 s makes tasks fail before they start when the machine is loaded.
            "AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT": "120",
            "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
            "PATH": f"{bin_dir}{os.pathsep}{os.environ.get('PATH', '')}",
            "NO_COLOR": "1",
            "PYTHONUNBUFFERED": "1",
        }
        named = {f"AIRFLOW_CONN_{conn_id.upper()}": value for conn_id, value in connections.items()}
        return {**inherited, **settings, **named, **extra_env}

    @property
    def api(self) -> AirflowApi:
        """The client of the public REST API.

        :raises AirflowInstanceError: before ``wait_healthy`` has returned.
        """
        if self._api is None:
            raise AirflowInstanceError("the API is reachable only after wait_healthy()")
        return self._api

    @property
    def environment(self) -> dict[str, str]:
        """The common parts of all processes; for one more that is to find the same database."""
        return dict(self._env)

    # -- life cycle --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Create the database and start the processes; returns before they are healthy.

        :raises AirflowInstanceError: when it was started already, or the database cannot be created.
        """
        if self._processes:
            raise AirflowInstanceError("this instance was started already")
        self.create_database()
        for name in COMPONENTS:
            self.start_component(name)

    def create_database(self) -> None:
        """The first half of ``start``, for who starts only some of the processes.

        :raises AirflowInstanceError: when it cannot be created.
        """
        (self.home / "logs").mkdir(parents=True, exist_ok=True)
        (self.home / "plugins").mkdir(exist_ok=True)
        self._say("creating the metadata database")
        self.run_command("db", "migrate")

    def run_command(self, *command: str) -> None:
        """A sub-command of ``airflow``, to its end.

        :raises AirflowInstanceError: when it fails.
        """
        with self.log_path(command[0]).open("ab") as log:
            done = subprocess.run(
                [*self._airflow(), *command],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if done.returncode != 0:
            text = f"airflow {' '.join(command)} ended with {done.returncode}"
            raise AirflowInstanceError(f"{text}:\n{self.log_tail(command[0])}")

    def pid(self, name: str) -> int:
        """Of a process that has been started; it leads a session of its own."""
        return self._processes[name].pid

    def start_component(self, name: str) -> None:
        """Start one process, for instance again after ``kill_component``."""
        if name not in COMPONENTS:
            raise ValueError(f"component {name!r} is unknown; allowed: {', '.join(COMPONENTS)}")
        log = self.log_path(name).open("ab")
        self._logs[name] = log
        self._processes[name] = subprocess.Popen(
            [*self._airflow(), name],
            env=self._env,
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._say(f"{name} started (pid {self._processes[name].pid})")

    def kill_component(self, name: str) -> None:
        """End one process and its children at once, as a crash would."""
        process = self._processes.pop(name)
        self._signal_session(process, signal.SIGKILL)
        process.wait(timeout=STOP_GRACE_SECONDS)
        self._logs.pop(name).close()
        self._say(f"{name} killed")

    def stop(self) -> None:
        """End all processes with everything that they started in their sessions; safe to call twice."""
        if self._api is not None:
            self._api.close()
            self._api = None
        for process in self._processes.values():
            self._signal_session(process, signal.SIGTERM)
        deadline = time.monotonic() + STOP_GRACE_SECONDS
        for process in self._processes.values():
            self._await_session_end(process, deadline)
        for log in self._logs.values():
            log.close()
        if self._processes:
            self._say("Airflow stopped")
        self._processes.clear()
        self._logs.clear()

    def _await_session_end(self, process: subprocess.Popen[bytes], deadline: float) -> None:
        while time.monotonic() < deadline:
            process.poll()
            if not _session_members(process.pid):
                return
            time.sleep(0.1)
        self._signal_session(process, signal.SIGKILL)
        process.wait(timeout=STOP_GRACE_SECONDS)

    @staticmethod
    def _signal_session(process: subprocess.Popen[bytes], signum: int) -> None:
        for pid in _session_members(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # -- health ------------------------------------------------------------------------------------------------

    def wait_healthy(self, deadline: float = 300.0) -> None:
        """Wait until scheduler, triggerer and DAG processor report themselves healthy to the API server.

        :param deadline: seconds to wait at most.
        :raises AirflowInstanceError: when a process ended, or the time is over.
        """
        until = time.monotonic() + deadline
        missing: set[str] = {"api-server"}
        while time.monotonic() < until:
            self._raise_if_a_process_ended()
            now_missing = self._unhealthy()
            if now_missing != missing:
                missing = now_missing
                self._say(f"waiting for {', '.join(sorted(missing))}" if missing else f"healthy at {self.base_url}")
            if not missing:
                return
            time.sleep(POLL_SECONDS)
        tails = "\n".join(f"== {name}\n{self.log_tail(name, 15)}" for name in COMPONENTS)
        raise AirflowInstanceError(f"not healthy after {deadline:.0f} s, missing {sorted(missing)}\n{tails}")

    def _unhealthy(self) -> set[str]:
        try:
            if self._api is None:
                self._api = AirflowApi.connect(self.base_url)
            health = self._api.health()
        except AirflowApiError:
            return {"api-server"}
        names = {"scheduler": "scheduler", "triggerer": "triggerer", "dag_processor": "dag-processor"}
        return {name for key, name in names.items() if (health.get(key) or {}).get("status") != "healthy"}

    def _raise_if_a_process_ended(self) -> None:
        if not self._processes:
            raise AirflowInstanceError("the instance is not started")
        for name, process in self._processes.items():
            if (code := process.poll()) is not None:
                raise AirflowInstanceError(f"{name} ended with {code}:\n{self.log_tail(name)}")

    # -- DAG runs ----------------------------------------------------------------------------------------------

    def trigger_dag(self, dag_id: str, conf: Mapping[str, Any] | None = None, deadline: float = 120.0) -> DagRun:
        """Unpause a DAG and start a run of it, once the DAG processor has seen its file.

        :param deadline: seconds to wait for the DAG to appear.
        :raises AirflowInstanceError: when it does not appear; the message carries the import errors.
        """
        until = time.monotonic() + deadline
        while not self.api.has_dag(dag_id):
            self._raise_if_a_process_ended()
            if time.monotonic() >= until:
                errors = "\n".join(self.api.import_errors()) or "no import errors"
                raise AirflowInstanceError(f"DAG {dag_id!r} did not appear within {deadline:.0f} s; {errors}")
            time.sleep(POLL_SECONDS)
        self.api.unpause(dag_id)
        run = self.api.trigger(dag_id, dict(conf or {}))
        self._say(f"run {run.run_id} of {dag_id} started")
        return run

    def task_states(self, run: DagRun) -> dict[str, str | None]:
        """Task id -> state of a run; ``None`` is "not scheduled yet", a mapped task has its index in the id."""
        return self.api.task_states(run)

    def wait_run(self, run: DagRun, deadline: float) -> str:
        """Wait for a run's end, reporting every change of a task's state.

        :param deadline: seconds to wait at most.
        :returns: ``success`` or ``failed``.
        :raises AirflowInstanceError: when a process ended, or the time is over.
        """
        until = time.monotonic() + deadline
        seen: dict[str, str | None] = {}
        looks = 0
        while time.monotonic() < until:
            self._raise_if_a_process_ended()
            state = self.api.run_state(run)
            has_ended = state in ("success", "failed")
            if has_ended or looks % LOOKS_AT_TASKS == 0:  # these take much longer to answer than the run's state
                states = self.api.task_states(run)
                for task_id, of_task in states.items():
                    if seen.get(task_id) != of_task and of_task is not None:
                        self._say(f"{task_id}: {of_task}")
                seen = states
            if has_ended:
                return state
            looks += 1
            time.sleep(POLL_SECONDS)
        raise AirflowInstanceError(f"run {run.run_id} of {run.dag_id} did not end within {deadline:.0f} s: {seen}")

    def failure_report(self, run: DagRun, lines: int = 40) -> str:
        """The end of the log of each failed task of a run, for a message to a person."""
        parts = []
        for task_id, state in self.api.task_states(run).items():
            if state == "failed":
                parts.append(f"== {task_id}\n{self._task_log_tail(run, task_id, lines)}")
        return "\n".join(parts) or "no failed task"

    def _task_log_tail(self, run: DagRun, task_id: str, lines: int) -> str:
        try:
            return "\n".join(self.api.task_log(run, task_id).splitlines()[-lines:])
        except AirflowApiError as error:  # of a mapped task, for one
            return f"there is no log: {error}"

    # -- logs --------------------------------------------------------------------------------------------------

    def log_tail(self, name: str, lines: int = 40) -> str:
        """The last lines that a process wrote (``db`` for the database's creation)."""
        path = self.log_path(name)
        if not path.exists():
            return ""
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])

    def log_path(self, name: str) -> Path:
        """The log file of a process."""
        self.home.mkdir(parents=True, exist_ok=True)
        return self.home / f"{name}.log"

    @staticmethod
    def _airflow() -> list[str]:
        return [sys.executable, "-m", "airflow"]
