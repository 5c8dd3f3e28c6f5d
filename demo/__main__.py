"""``python -m demo``: the whole product on this machine, from nothing to a verified answer.

Starts a session (a Spark application in local mode) and a real Airflow, runs the DAG ``ckpt_lifecycle``, tells what
happens at each step, and ends with one line: ``demo: OK, N rows, 0 lost, 0 duplicated``. ``KEEP=1`` leaves both up.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.spark.launch import SessionInfo, start_session, stop_session
from demo.airflow_api import DagRun
from demo.airflow_instance import LocalAirflow

ROOT: Final = Path(__file__).resolve().parent.parent
HOME: Final = Path(os.environ.get("DEMO_HOME", ROOT / ".demo")).resolve()
SLOTS: Final = 4
DEADLINE_S: Final = 900.0
TICK_S: Final = 1.0
SPINNER: Final = "|/-\\"

STEPS: Final = {
    "submit_v1": "submit the flights pipeline, version 1",
    "checkpoint_of_v1": "wait for a completed checkpoint",
    "patch_interval_and_timeout": "patch the checkpoint interval and timeout of the running job",
    "assert_patched": "read the effective values back",
    "native_savepoint": "take a native savepoint",
    "stop_v1_with_savepoint": "stop version 1 with a savepoint",
    "resume_v2": "resume as version 2 from that savepoint",
    "checkpoint_of_v2": "wait for a checkpoint of version 2",
    "end_of_v2": "let version 2 run to the end of its input",
    "verify": "compare the results with the answer of Spark SQL",
}


TOLD: Final = ("name", "status", "checkpoint_id", "interval_ms", "timeout_ms", "savepoint_path", "rows")


class Console:
    """Lines with the time since the start; on a terminal also one line that shows what is being waited for."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._turn = 0
        self._live = sys.stdout.isatty()

    def say(self, text: str) -> None:
        self._erase()
        sys.stdout.write(f"[{time.monotonic() - self._start:6.1f} s] {text}\n")
        sys.stdout.flush()

    def waiting(self, text: str) -> None:
        if self._live:
            self._turn += 1
            self._erase()
            sys.stdout.write(f"  {SPINNER[self._turn % len(SPINNER)]} {text}")
            sys.stdout.flush()

    def _erase(self) -> None:
        if self._live:
            sys.stdout.write("\r\033[K")


def prepare_input(console: Console) -> Path:
    """A fresh home with the flights as a Parquet file."""
    shutil.rmtree(HOME, ignore_errors=True)
    data = HOME / "data"
    data.mkdir(parents=True)
    target = data / "flights.parquet"
    script = ROOT / "pipelines" / "prepare_flights.py"
    done = subprocess.run([sys.executable, str(script), str(target)], capture_output=True, text=True, check=True)
    console.say(done.stdout.strip())
    return data


def start_runtime(console: Console) -> SessionInfo:
    """A session in local mode."""
    console.say(f"starting the runtime: spark-submit, local mode, {SLOTS} task slots")
    session = start_session("local", SLOTS, log_file=HOME / "runtime.log", work_directory=HOME / "work")
    console.say(f"the runtime answers at {session.rest_url}")
    return session


def new_airflow(console: Console, session: SessionInfo, data: Path) -> LocalAirflow:
    """An Airflow whose connection leads to the session; not started yet."""
    address = urlsplit(session.rest_url)
    connection = {"conn_type": "ckpt", "schema": "http", "host": address.hostname, "port": address.port}
    connection["password"] = session.token
    return LocalAirflow(
        HOME / "airflow",
        ROOT / "dags",
        {"ckpt_default": json.dumps(connection)},
        {"CKPT_DATA": str(data), "AIRFLOW__CKPT__POLL_INTERVAL": "1"},
        progress=console.say,
    )


def run_dag(console: Console, airflow: LocalAirflow, client: CkptClient, data: Path) -> DagRun:
    """Runs the DAG to its end, telling each task's success. Raises SystemExit with a report when the run fails."""
    run = airflow.trigger_dag("ckpt_lifecycle")
    console.say(f"DAG ckpt_lifecycle runs as {run.run_id}; results go to a directory of its own in {data / 'output'}")
    told: set[str] = set()
    deadline = time.monotonic() + DEADLINE_S
    while True:
        states = airflow.task_states(run)
        for task_id, title in STEPS.items():
            if states.get(task_id) == "success" and task_id not in told:
                told.add(task_id)
                console.say(f"done: {title}{_detail(airflow, run, task_id)}")
        state = airflow.api.run_state(run)
        if state == "success":
            return run
        if state == "failed" or time.monotonic() > deadline:
            console.say(f"the DAG run is {state}")
            sys.stderr.write(airflow.failure_report(run) + "\n")
            raise SystemExit("demo: FAILED")
        console.waiting(_progress(client, next((STEPS[s] for s in STEPS if s not in told), "the end of the run")))
        time.sleep(TICK_S)


def _detail(airflow: LocalAirflow, run: DagRun, task_id: str) -> str:
    """The telling parts of what the task returned."""
    value: Any = airflow.api.xcom(run, task_id)
    if isinstance(value, dict):
        shown = [f"{key} {value[key]}" for key in TOLD if value.get(key) is not None]
        return f" ({', '.join(shown)})" if shown else ""
    return ""


def _progress(client: CkptClient, waiting_for: str) -> str:
    """The step being waited for and what the newest job is doing."""
    jobs = client.list_jobs()
    if not jobs:
        return waiting_for
    job = jobs[0]
    statistics = client.checkpoint_statistics(job.job_id)
    return f"{waiting_for} - {job.name} {job.state}, {statistics.counts.completed} checkpoints completed"


def main() -> None:
    """Runs the demonstration; a non-zero exit status unless the results are exact."""
    console = Console()
    keep = os.environ.get("KEEP", "") not in ("", "0")
    data = prepare_input(console)
    session = start_runtime(console)
    airflow = new_airflow(console, session, data)
    try:
        console.say("starting Airflow: database, API server, scheduler, DAG processor, triggerer")
        airflow.start()
        airflow.wait_healthy()
        console.say(f"Airflow answers at {airflow.base_url}")
        with CkptClient(session.rest_url, token=session.token) as client:
            run = run_dag(console, airflow, client, data)
        found = airflow.api.xcom(run, "verify")
        if keep:
            console.say(f"still up: Airflow {airflow.base_url}, runtime {session.rest_url}; end them with Ctrl-C")
            _wait_for_interrupt()
    finally:
        airflow.stop()
        stop_session(session)
    if found["lost"] or found["duplicated"] or found["wrong"]:
        raise SystemExit(f"demo: FAILED, {found}")
    sys.stdout.write(f"demo: OK, {found['rows']} rows, {found['lost']} lost, {found['duplicated']} duplicated\n")


def _wait_for_interrupt() -> None:
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    main()
