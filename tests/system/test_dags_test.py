"""``airflow dags test``: one process is everything, and runs the triggers where the tasks are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.snapshots.catalogue import list_savepoints
from demo.airflow_instance import LocalAirflow
from tests.support.outputs import assert_sequence
from tests.system.airflow_instance import ROOT
from tests.system.conftest import Session

pytestmark = [pytest.mark.airflow, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.mark.parametrize("deferrable", ["True", "False"])
def test_every_operator_and_sensor_in_one_process(session: Session, tmp_path: Path, deferrable: str) -> None:
    connection = json.dumps({"conn_type": "ckpt", "host": "127.0.0.1", "port": session.port})
    environment = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'runtime'}",
        "AIRFLOW__CKPT__DEFERRABLE": deferrable,
        "AIRFLOW__CKPT__DEFER_AFTER": "0",
        # No scheduler is there that could misread an early event.
        "AIRFLOW__CKPT__MIN_DEFERRAL": "0",
    }
    dags = Path(__file__).with_name("dags_to_test")
    airflow = LocalAirflow(tmp_path / "airflow", dags, {"ckpt_default": connection}, environment)
    airflow.create_database()
    known = session.jobs()
    airflow.run_command("dags", "test", "every_task", "--conf", json.dumps({"directory": str(tmp_path)}))
    ended = {session.cluster.status(job_id) for job_id in session.jobs() - known}
    assert ended == {JobStatus.FINISHED, JobStatus.CANCELED}
    assert len(list_savepoints(str(tmp_path / "savepoints"))) == 1
    assert not (tmp_path / "copy").exists()
    assert assert_sequence(tmp_path / "out", cancelled=True) > 0
