"""``airflow dags test``: one process is everything, and runs the triggers where the tasks are."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

import pytest

from airflow_provider_ckpt import processes
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.snapshots.catalogue import list_savepoints
from demo.airflow_instance import AirflowInstanceError, LocalAirflow
from tests.support.outputs import assert_sequence
from tests.support.spark_sessions import free_port
from tests.system.airflow_instance import ROOT
from tests.system.conftest import Session

pytestmark = [pytest.mark.airflow, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


def opened(connections: dict[str, str], tmp_path: Path, **settings: str) -> LocalAirflow:
    environment = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'runtime'}",
        # No scheduler is there that could misread an early event.
        "AIRFLOW__CKPT__MIN_DEFERRAL": "0",
        **settings,
    }
    dags = Path(__file__).with_name("dags_to_test")
    airflow = LocalAirflow(tmp_path / "airflow", dags, connections, environment)
    airflow.create_database()
    return airflow


@pytest.mark.parametrize("deferrable", ["True", "False"])
def test_every_operator_and_sensor_in_one_process(session: Session, tmp_path: Path, deferrable: str) -> None:
    connection = json.dumps({"conn_type": "ckpt", "host": "127.0.0.1", "port": session.port})
    settings = {"AIRFLOW__CKPT__DEFERRABLE": deferrable, "AIRFLOW__CKPT__DEFER_AFTER": "0"}
    airflow = opened({"ckpt_default": connection}, tmp_path, **settings)
    known = session.jobs()
    airflow.run_command("dags", "test", "every_task", "--conf", json.dumps({"directory": str(tmp_path)}))
    ended = {session.cluster.status(job_id) for job_id in session.jobs() - known}
    assert ended == {JobStatus.FINISHED, JobStatus.CANCELED}
    assert len(list_savepoints(str(tmp_path / "savepoints"))) == 1
    assert not (tmp_path / "copy").exists()
    assert assert_sequence(tmp_path / "out", cancelled=True) > 0


@pytest.mark.spark
@pytest.mark.row("air.13")
def test_a_session_around_work_that_fails_is_ended(tmp_path: Path) -> None:
    connection = json.dumps({"conn_type": "ckpt", "host": "127.0.0.1", "port": free_port(), "password": "secret"})
    airflow = opened({"ckpt_session": connection}, tmp_path)
    with suppress(AirflowInstanceError):  # the run is to fail, with which `dags test` may fail as well
        airflow.run_command("dags", "test", "session_around_work", "--conf", json.dumps({"directory": str(tmp_path)}))
    [log] = (tmp_path / "logs").glob("*.log")
    said = airflow.log_tail("dags", 2000)
    assert f"the work with session {log.stem} fails" in said
    assert re.search("DagRun Finished: .* state=failed", said), "a teardown that succeeds hides the failure"
    assert processes.find(log.stem, str(log)) is None
