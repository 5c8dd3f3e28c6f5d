"""A real Airflow for the system tests; its processes are those of the demonstration (``demo.airflow_instance``)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from demo.airflow_api import DagRun
from demo.airflow_instance import LocalAirflow
from tests.support.patience import deadline

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
DAGS = Path(__file__).with_name("dags")
WRITTEN_DAGS = "written"
"""Folder, below Airflow's home, of DAG files that tests write; the name of its bundle as well."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 0.7
DATABASE = Path(sys.prefix) / f"airflow-{version('apache-airflow')}.db"
"""A fresh metadata database, which the first run makes: to make one takes eight processor seconds, to copy it none."""


class TestedAirflow(LocalAirflow):
    """Its metadata database is a copy of one that was made before."""

    __test__ = False

    def create_database(self) -> None:
        own = self.home / "airflow.db"
        if DATABASE.exists():
            (self.home / "logs").mkdir(parents=True, exist_ok=True)
            (self.home / "plugins").mkdir(exist_ok=True)
            shutil.copyfile(DATABASE, own)
            return
        super().create_database()
        new = DATABASE.with_suffix(f".{os.getpid()}")
        shutil.copyfile(own, new)
        new.replace(DATABASE)


def make_airflow(
    home: Path,
    connections: dict[str, str],
    dags_folder: Path = DAGS,
    *,
    more_bundles: Sequence[Mapping[str, Any]] = (),
    more_environment: Mapping[str, str] | None = None,
) -> TestedAirflow:
    """An Airflow that imports the provider and the client from this tree."""
    written = home / WRITTEN_DAGS
    written.mkdir(parents=True, exist_ok=True)
    local = "airflow.dag_processing.bundles.local.LocalDagBundle"
    bundles = [
        {"name": "dags-folder", "classpath": local, "kwargs": {}},
        {"name": WRITTEN_DAGS, "classpath": local, "kwargs": {"path": str(written)}},
        *more_bundles,
    ]
    environment = {
        "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST": json.dumps(bundles),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'runtime'}",
        "CKPT_SAVEPOINT_SCHEDULE": "",
        "CKPT_DATA": str(home),
        # How soon a triggerer or a worker that was killed is missed; a living one heartbeats every 2 s and 5 s.
        "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "8",
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "40",
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "3",
        **(more_environment or {}),
    }
    return TestedAirflow(home, dags_folder, connections, environment, progress=print)


def kill_task(airflow: LocalAirflow, run: DagRun, task_id: str, *, worker: bool = False) -> None:
    """End the process of a task that runs; with ``worker`` the one that watches it for the executor too."""
    pid = until(lambda: _pid_of(airflow, run, task_id), f"a process of {task_id}")
    stat = Path(f"/proc/{pid}/stat").read_text()
    parent = int(stat[stat.rindex(")") + 2 :].split()[1])
    assert b"LocalExecutor" in Path(f"/proc/{parent}/cmdline").read_bytes()
    for each in (parent, pid) if worker else (pid,):
        os.kill(each, signal.SIGKILL)


def _pid_of(airflow: LocalAirflow, run: DagRun, task_id: str) -> int | None:
    for instance in airflow.api.task_instances(run):
        if instance["task_id"] == task_id and instance["state"] == "running":
            return int(instance["pid"]) if instance["pid"] else None
    return None


def until(look: Callable[[], T | None], what: str, deadline_s: float = 300.0) -> T:
    """Poll until ``look`` gives something true: less often what takes long, for each look takes from Airflow's time.

    :raises AssertionError: naming ``what`` when the deadline, in seconds of a quiet machine, has passed.
    """
    begun, is_over = time.monotonic(), deadline(deadline_s)
    pause_s = FIRST_PAUSE_S
    while not (found := look()):
        assert not is_over(), f"{what} did not happen within {time.monotonic() - begun:.0f} s"
        time.sleep(pause_s)
        pause_s = min(LONGEST_PAUSE_S, pause_s * 1.1)
    return found


def wait_state(airflow: LocalAirflow, run: DagRun, task_id: str, *states: str) -> str:
    """Wait until a task is in one of the states."""

    def look() -> str | None:
        state = airflow.task_states(run).get(task_id)
        return state if state in states else None

    return until(look, f"{task_id} being {' or '.join(states)}")
