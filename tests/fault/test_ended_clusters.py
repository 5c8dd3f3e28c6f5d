"""A session is ended by its operator while its standby waits: both end, and a later session takes over the jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_provider_ckpt.operators.session import StopSessionOperator
from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.contract.jobs import RunOptions
from tests.support.driver_processes import Sessions
from tests.support.jobs import fast, program_of
from tests.support.patience import patient
from tests.support.spark_sessions import wait_until
from tests.unit.provider.conftest import Task

TOKEN = "the-token-of-both-drivers"


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[Sessions]:
    started = Sessions(tmp_path, token=TOKEN, lease_timeout_s=20.0)
    yield started
    started.end()


@pytest.mark.slow
@pytest.mark.row("air.2")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "by_directory", [pytest.param(True, id="HA directory"), pytest.param(False, id="address", marks=pytest.mark.long)]
)
def test_a_standby_ends_with_the_session_that_it_waits_for(
    sessions: Sessions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_directory: bool
) -> None:
    client = sessions.start()
    arguments = ("--output", str(tmp_path / "out"), "--rows", "0", "--rate", "500", "--faults", str(tmp_path))
    options = RunOptions(entry_point="sequence:pipeline", arguments=arguments, parallelism=1, configuration=fast())
    job_id = client.run_pipeline(client.upload_pipeline(*pack_pipeline(program_of("sequence"))), options)
    client.wait_for_state(job_id, ["RUNNING"], timeout_s=patient(180))
    ready, log = sessions.launch(), tmp_path / f"session-{sessions.number}.log"
    wait_until(lambda: "waiting for the leadership" in log.read_text(errors="replace"), "the standby to wait", 120)
    address, _, port = client.url.removeprefix("http://").partition(":")
    place = {"extra": {"ha_dir": str(tmp_path / "ha")}} if by_directory else {"host": address, "port": int(port)}
    monkeypatch.setenv("AIRFLOW_CONN_CKPT_DEFAULT", json.dumps({"conn_type": "ckpt", "password": TOKEN, **place}))
    operator = StopSessionOperator(task_id="stop", deferrable=False, poll_interval=0.2, wait_timeout=patient(180))
    assert operator.execute(Task().context())["was_running"] is True
    leader, standby = sessions.processes
    wait_until(lambda: leader.poll() is not None and standby.poll() is not None, "both to end", 120)
    assert (leader.returncode, standby.returncode) == (0, 0)
    assert not ready.exists(), "it has led"
    assert StopSessionOperator(task_id="again", deferrable=False).execute(Task().context())["was_running"] is False
    client = sessions.start()
    client.wait_for_state(job_id, ["RUNNING"], timeout_s=patient(180))
