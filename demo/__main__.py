"""``python -m demo``: the whole product on this machine, from nothing to a verified answer.

Starts a Kafka broker, a session (a Spark application in local mode) and a real Airflow. People place orders while the
DAG ``orders_demo`` runs the job that sums them up by minute and country, rescales it and upgrades it. The demonstration
describes each step, and ends with one line: ``demo: OK, N orders in M rows, 0 lost, 0 duplicated``. ``KEEP=1`` leaves
everything running.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.spark.launch import SessionInfo, start_session, stop_session
from demo.airflow_api import DagRun
from demo.airflow_instance import LocalAirflow
from demo.orders import CUSTOMERS, Broker, Shop, write_customers

ROOT: Final = Path(__file__).resolve().parent.parent
HOME: Final = Path(os.environ.get("DEMO_HOME", ROOT / ".demo")).resolve()
SLOTS: Final = 4
DEADLINE_S: Final = 900.0
TICK_S: Final = 1.0
SPINNER: Final = "|/-\\"

STEPS: Final = {
    "submit_v1": "submit the pipeline: orders from Kafka, with their countries from Parquet, by minute, into Delta",
    "checkpoint_of_v1": "wait for a completed checkpoint",
    "rescale": "rescale the running job from 1 to 2",
    "patch_interval": "patch the checkpoint interval of the running job",
    "upgrade_to_v2": "upgrade to version 2: savepoint, new program with one more column, health check",
    "checkpoint_of_v2": "wait for a checkpoint of version 2",
    "all_minutes": "close the shop, and wait until the table has every minute",
    "stop": "stop the job with a savepoint",
    "verify": "compare the table with the orders that were sent",
}
CLOSING_STEP: Final = "checkpoint_of_v2"
"""The step behind which no more orders are placed."""
REPORTED: Final = ("name", "status", "checkpoint_id", "interval_ms", "outcome", "savepoint_path", "orders", "rows")


class Console:
    """Lines with the time since the start; on a terminal also one line that shows the current wait."""

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


def new_airflow(console: Console, session: SessionInfo, data: Path, servers: str) -> LocalAirflow:
    """An Airflow whose connection leads to the session; not started yet."""
    address = urlsplit(session.rest_url)
    connection = {"conn_type": "ckpt", "schema": "http", "host": address.hostname, "port": address.port}
    connection["password"] = session.token
    return LocalAirflow(
        HOME / "airflow",
        ROOT / "demo" / "dags",
        {"ckpt_default": json.dumps(connection)},
        {"CKPT_DATA": str(data), "DEMO_KAFKA": servers, "AIRFLOW__CKPT__POLL_INTERVAL": "1"},
        progress=console.say,
    )


def run_dag(console: Console, airflow: LocalAirflow, client: CkptClient, shop: Shop, data: Path) -> DagRun:
    """Runs the DAG to its end, and prints a line when a task has succeeded. Raises SystemExit with a report if the run
    fails.
    """
    run = airflow.trigger_dag("orders_demo")
    console.say(f"DAG orders_demo runs as {run.run_id}; the results go to the Delta table {data / 'revenue'}")
    said: set[str] = set()
    deadline = time.monotonic() + DEADLINE_S
    while True:
        states = airflow.task_states(run)
        for task_id, title in STEPS.items():
            if states.get(task_id) == "success" and task_id not in said:
                said.add(task_id)
                console.say(f"done: {title}{_detail(airflow, run, task_id)}")
                if task_id == CLOSING_STEP:
                    shop.close(data / "sent.parquet")
                    console.say(f"the shop has closed: {shop.placed} orders were placed")
        state = airflow.api.run_state(run)
        if state == "success":
            return run
        if state == "failed" or time.monotonic() > deadline:
            console.say(f"the DAG run is {state}")
            sys.stderr.write(airflow.failure_report(run) + "\n")
            raise SystemExit("demo: FAILED")
        console.waiting(_progress(client, next((STEPS[s] for s in STEPS if s not in said), "the end of the run")))
        time.sleep(TICK_S)


def _detail(airflow: LocalAirflow, run: DagRun, task_id: str) -> str:
    """The parts of a task's result that are of interest to a reader."""
    value: Any = airflow.api.xcom(run, task_id)
    if isinstance(value, dict):
        shown = [f"{key} {value[key]}" for key in REPORTED if value.get(key) is not None]
        return f" ({', '.join(shown)})" if shown else ""
    return ""


def _progress(client: CkptClient, waiting_for: str) -> str:
    """The step being waited for, and the state of the newest job."""
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
    shutil.rmtree(HOME, ignore_errors=True)
    data = HOME / "data"
    data.mkdir(parents=True)
    write_customers(data / "customers.parquet")
    console.say(f"{CUSTOMERS} customers with their countries are in {data / 'customers.parquet'}")
    with ExitStack() as running:
        broker = Broker(HOME / "kafka.log")
        running.callback(broker.stop)
        console.say(f"starting the runtime: spark-submit, local mode, {SLOTS} task slots")
        session = start_session("local", SLOTS, log_file=HOME / "runtime.log", work_directory=HOME / "work")
        console.say(f"the runtime answers at {session.rest_url}")
        running.callback(stop_session, session)
        broker.create_topic()
        console.say(f"Kafka answers at {broker.servers}")
        airflow = new_airflow(console, session, data, broker.servers)
        running.callback(airflow.stop)
        console.say("starting Airflow: database, API server, scheduler, DAG processor, triggerer")
        airflow.start()
        airflow.wait_healthy()
        console.say(f"Airflow answers at {airflow.base_url}")
        shop = Shop(broker.servers)
        shop.open()
        console.say("the shop is open: people place 500 orders per second")
        with CkptClient(session.rest_url, token=session.token) as client:
            run = run_dag(console, airflow, client, shop, data)
        found = airflow.api.xcom(run, "verify")
        if keep:
            console.say(f"still up: Airflow {airflow.base_url}, runtime {session.rest_url}; end them with Ctrl-C")
            _wait_for_interrupt()
    if found["lost"] or found["duplicated"] or found["wrong"]:
        raise SystemExit(f"demo: FAILED, {found}")
    sys.stdout.write(
        f"demo: OK, {found['orders']} orders in {found['rows']} rows, "
        f"{found['lost']} lost, {found['duplicated']} duplicated\n"
    )


def _wait_for_interrupt() -> None:
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    main()
