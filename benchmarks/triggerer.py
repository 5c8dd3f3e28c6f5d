"""Airflow's triggerer alone: its process, its database, tasks that wait in it, and when each of them was resumed.

There is no scheduler, so that a resumed task stays as the triggerer has left it, and nothing else takes time.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]

from benchmarks.harness import BenchmarkError
from benchmarks.process_tree import processes_of, resident_mb
from demo.airflow_instance import LocalAirflow

ROOT = Path(__file__).resolve().parent.parent
DAGS = ROOT / "benchmarks" / "dags"
_DAG_ID, _TASK_ID = "benchmark_waits", "wait"

Described = tuple[str, dict[str, Any]]
"""A trigger as it serializes itself."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """A task that the triggerer has resumed: when its event was written, and its content."""

    at_ms: float
    event: dict[str, Any]


class Triggerer:
    """Use :func:`triggerer`."""

    def __init__(self, airflow: LocalAirflow) -> None:
        self._airflow = airflow

    @property
    def pid(self) -> int:
        return self._airflow.pid("triggerer")

    def defer(self, run_id: str, triggers: Sequence[Described]) -> None:
        """One task for each, known by its place. Raises BenchmarkError."""
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.deferred_tasks", run_id],
            input=json.dumps(triggers),
            env=self._airflow.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise BenchmarkError(f"nothing could be deferred: {done.stderr[-2000:]}")

    def waiting(self, run_id: str) -> int:
        """How many triggers of a run have written to their tasks' logs, as each waiting one does."""
        return len(list(self._airflow.home.glob(f"logs/dag_id={_DAG_ID}/run_id={run_id}/*/*/*.trigger.*.log")))

    def resumed(self, run_id: str) -> dict[int, Resumed]:
        """By the places of their triggers."""
        query = (
            "SELECT map_index, scheduled_dttm, next_kwargs FROM task_instance"
            " WHERE run_id = ? AND map_index >= 0 AND state = 'scheduled'"
        )
        with closing(sqlite3.connect(self._airflow.home / "airflow.db", timeout=60)) as database:
            rows = database.execute(query, (run_id,)).fetchall()
        return {index: Resumed(_epoch_ms(at), json.loads(kwargs)["event"]) for index, at, kwargs in rows}

    def until(self, what: str, condition: Callable[[], bool], timeout_s: float = 300.0) -> None:
        """Raises BenchmarkError when the triggerer ends, or the time is over before the condition holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if not processes_of(self.pid):
                raise BenchmarkError(f"the triggerer has ended: {self.log_tail()}")
            if time.monotonic() > deadline:
                raise BenchmarkError(f"waited {timeout_s:g} s for {what}: {self.log_tail()}")
            time.sleep(0.1)

    def kill(self) -> None:
        """End it by SIGKILL, with all of its processes."""
        self._airflow.kill_component("triggerer")

    def start_again(self) -> None:
        """Start the next one after :meth:`kill`; it adopts the waits once the killed one is missed."""
        self._airflow.start_component("triggerer")

    def count_resumptions(self) -> None:
        """From now on the database counts how often each task is resumed, for :meth:`resumptions`."""
        script = (
            "CREATE TABLE resumptions (run_id TEXT, map_index INTEGER);"
            "CREATE TRIGGER counts_resumptions AFTER UPDATE ON task_instance"
            " WHEN NEW.state = 'scheduled' AND (OLD.state IS NOT NEW.state OR OLD.next_kwargs IS NOT NEW.next_kwargs)"
            " BEGIN INSERT INTO resumptions VALUES (NEW.run_id, NEW.map_index); END;"
        )
        with closing(sqlite3.connect(self._airflow.home / "airflow.db", timeout=60)) as database:
            database.executescript(script)

    def resumptions(self, run_id: str) -> Counter[int]:
        """How often each task was resumed since :meth:`count_resumptions`, by the places of their triggers."""
        with closing(sqlite3.connect(self._airflow.home / "airflow.db", timeout=60)) as database:
            rows = database.execute("SELECT map_index FROM resumptions WHERE run_id = ?", (run_id,)).fetchall()
        return Counter(index for (index,) in rows)

    def blocked(self) -> int:
        """How often Airflow has noticed that something kept its loop, and with it every trigger, waiting."""
        return self._airflow.log_path("triggerer").read_text(errors="replace").count("async thread was blocked")

    def log_tail(self) -> str:
        return self._airflow.log_tail("triggerer")

    def cpu_s(self) -> float:
        """Processor seconds of all its processes so far."""
        total = 0.0
        for process in processes_of(self.pid):
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            total += times.user + times.system
        return total

    def rss_mb(self) -> float:
        return resident_mb(self.pid)


def _epoch_ms(text: str) -> float:
    """What Airflow stores in SQLite is UTC without saying so."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000


@contextmanager
def triggerer(home: Path, url: str, progress: Callable[[str], None]) -> Iterator[Triggerer]:
    """A triggerer whose connection ``ckpt_default`` leads to ``url``; its database is below ``home``."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    connection = json.dumps({"conn_type": "ckpt", "host": host, "port": int(port)})
    environment = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'runtime'}",
        # How soon one that was killed is missed; a living one heartbeats every 2 s.
        "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "8",
    }
    airflow = LocalAirflow(home, DAGS, {"ckpt_default": connection}, environment, progress=progress)
    try:
        airflow.create_database()
        airflow.run_command("dags", "reserialize")
        airflow.start_component("triggerer")
        yield Triggerer(airflow)
    finally:
        airflow.stop()
