"""A real Airflow for the system tests; its processes are those of the demonstration (``demo.airflow_instance``)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from demo.airflow_api import DagRun
from demo.airflow_instance import LocalAirflow

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
DAGS = Path(__file__).with_name("dags")


def make_airflow(home: Path, connections: dict[str, str], dags_folder: Path = DAGS) -> LocalAirflow:
    """An Airflow that imports the provider and the client from this tree."""
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'runtime'}", "CKPT_SAVEPOINT_SCHEDULE": "", "CKPT_DATA": str(home)}
    return LocalAirflow(home, dags_folder, connections, environment, progress=print)


def until(look: Callable[[], T | None], what: str, deadline: float = 300.0) -> T:
    """Poll until ``look`` gives something true.

    :raises AssertionError: naming ``what`` when the deadline, in seconds, has passed.
    """
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        found = look()
        if found:
            return found
        time.sleep(0.2)
    raise AssertionError(f"{what} did not happen within {deadline:.0f} s")


def wait_state(airflow: LocalAirflow, run: DagRun, task_id: str, *states: str) -> str:
    """Wait until a task is in one of the states."""

    def look() -> str | None:
        state = airflow.task_states(run).get(task_id)
        return state if state in states else None

    return until(look, f"{task_id} being {' or '.join(states)}")
