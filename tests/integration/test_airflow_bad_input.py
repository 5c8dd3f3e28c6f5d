"""Every operator and sensor against a real session with what does not fit: the message says what to do."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import SequenceJob, fast, program_of
from tests.unit.provider.conftest import Task, finish

UNKNOWN = "2" * 32
TOKEN = "the-token-of-the-session"
NAME = "one of two"


@dataclass(frozen=True)
class Asked:
    """A task by its class and its arguments, with the argument that names the job."""

    kind: str
    given: dict[str, Any]
    job: str | None = "job"
    """None where a task names none."""

    def made(self, directory: Path, job: str, seconds: float) -> Any:
        from airflow.sdk.module_loading import import_string

        kind = import_string(f"airflow_provider_ckpt.{self.kind}")
        timeout = "timeout" if ".sensors." in f".{self.kind}" else "wait_timeout"
        pause = "poke_interval" if timeout == "timeout" else "poll_interval"
        given = {name: _filled(value, directory) for name, value in self.given.items()}
        named = {} if self.job is None else {self.job: job}
        return kind(task_id="t", deferrable=False, **{timeout: seconds, pause: 0.01}, **given, **named)


def _filled(value: Any, directory: Path) -> Any:
    return str(directory / value[1:]) if isinstance(value, str) and value.startswith("@") else value


PROGRAM = {"pipeline": str(program_of("sequence")), "entry": "sequence:pipeline"}
SAVEPOINTS = {"target_directory": "@savepoints"}
DRILL = Asked("operators.drill.RestoreDrillOperator", PROGRAM | {"directory": "@savepoints"}, "latest_of")
"""It means a job of the catalogue, which may have ended long ago."""
TASKS = [
    Asked("operators.cancel.CancelJobOperator", {}),
    Asked("operators.checkpoint.TriggerCheckpointOperator", {}),
    Asked("operators.checkpoint_config.PatchCheckpointConfigOperator", {"interval": 5}),
    Asked("operators.job_config.UpdateJobConfigOperator", {"configuration": {"pipeline.name": "another"}}),
    Asked("operators.rescale.RescaleJobOperator", {"parallelism": 3}),
    Asked("operators.savepoint.TakeSavepointOperator", SAVEPOINTS),
    Asked("operators.stop.StopWithSavepointOperator", SAVEPOINTS),
    Asked("operators.suspend.SuspendJobOperator", SAVEPOINTS),
    Asked("operators.suspend.ResumeJobOperator", {}),
    Asked("operators.upgrade.UpgradeJobOperator", PROGRAM | SAVEPOINTS),
    Asked("operators.submit.SubmitJobOperator", PROGRAM, "from_latest_of"),
    DRILL,
    Asked("sensors.job.JobStatusSensor", {"expected": "FINISHED"}),
    Asked("sensors.checkpoint.CheckpointCompletedSensor", {}),
    Asked("sensors.checkpoint.SavepointCompletedSensor", {}),
    Asked("sensors.health.CheckpointHealthSensor", {}),
]
ON_SAVEPOINTS = [
    Asked("operators.dispose.DisposeSavepointOperator", {"savepoint_path": "@nothing"}, None),
    Asked("operators.retention.CleanUpSavepointsOperator", {"directory": "@savepoints", "keep": 1}, None),
]
STOP_SESSION = Asked("operators.session.StopSessionOperator", {}, None)


def _id(asked: Asked) -> str:
    return asked.kind.rpartition(".")[2]


every_task_of_a_job = pytest.mark.parametrize("asked", TASKS, ids=_id)
every_task_of_a_living_job = pytest.mark.parametrize("asked", [task for task in TASKS if task is not DRILL], ids=_id)
every_task = pytest.mark.parametrize("asked", [*TASKS, *ON_SAVEPOINTS, STOP_SESSION], ids=_id)
pytestmark = pytest.mark.row("air.2")


def connect(monkeypatch: pytest.MonkeyPatch, url: str, **more: Any) -> None:
    parts = urlsplit(url)
    document = {"conn_type": "ckpt", "host": parts.hostname, "port": parts.port, **more}
    monkeypatch.setenv("AIRFLOW_CONN_CKPT_DEFAULT", json.dumps(document))


@pytest.fixture(scope="module")
def two_jobs(cluster: MiniCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SequenceJob]]:
    """Of the same name; nothing in this module ends them."""
    jobs = [SequenceJob(cluster, tmp_path_factory.mktemp("job")) for _ in range(2)]
    for job in jobs:
        job.start(rate=100, parallelism=1, configuration=fast(pipeline__name=NAME))
    for job in jobs:
        job.running()
    yield jobs
    for job in jobs:
        job.end()


@pytest.fixture(autouse=True)
def unchanged(cluster: MiniCluster, two_jobs: list[SequenceJob]) -> Iterator[None]:
    """Whatever was asked, both jobs run on, and there is no third one."""
    before = {line.job_id for line in cluster.call(cluster.dispatcher.list_jobs())}
    yield
    assert {line.job_id for line in cluster.call(cluster.dispatcher.list_jobs())} == before
    assert [cluster.status(job.job_id) for job in two_jobs] == [JobStatus.RUNNING] * 2


def says(asked: Asked, directory: Path, job: str, seconds: float = 60) -> str:
    """What a task's log ends with."""
    from airflow.sdk.exceptions import AirflowException

    (directory / "savepoints").mkdir(exist_ok=True)
    with pytest.raises(AirflowException) as failure:
        finish(asked.made(directory, job, seconds), Task().context())
    return str(failure.value)


@every_task_of_a_job
def test_an_unknown_job(asked: Asked, cluster: MiniCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, cluster.rest_url)
    message = says(asked, tmp_path, UNKNOWN)
    assert UNKNOWN in message
    assert re.search("Check the (id|connection|name)", message), message


@every_task_of_a_living_job
def test_a_name_that_no_job_has_is_refused(
    asked: Asked, cluster: MiniCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(monkeypatch, cluster.rest_url)
    message = says(asked, tmp_path, "nobody")
    assert "nobody" in message
    assert "Check the connection and the name" in message
    assert NAME in message, "the jobs that are there"


@every_task_of_a_living_job
def test_a_name_that_two_jobs_have(
    asked: Asked, cluster: MiniCluster, two_jobs: list[SequenceJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(monkeypatch, cluster.rest_url)
    message = says(asked, tmp_path, NAME)
    for job in two_jobs:
        assert job.job_id in message
    assert "Give the id of one of them" in message


def test_a_job_without_a_savepoint(cluster: MiniCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, cluster.rest_url)
    message = says(DRILL, tmp_path, "nobody")
    assert "no good savepoint of job nobody" in message
    assert "Check the name and the directory" in message


@pytest.mark.parametrize("asked", [TASKS[0], TASKS[-1], ON_SAVEPOINTS[-1]], ids=_id)  # they share what connects
def test_a_connection_to_a_port_without_a_server_fails_with_the_address(
    asked: Asked, two_jobs: list[SequenceJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:  # bound, so that no other process listens there
        taken.bind(("127.0.0.1", 0))
        connect(monkeypatch, f"http://127.0.0.1:{taken.getsockname()[1]}")
        message = says(asked, tmp_path, two_jobs[0].job_id, 1)
    assert "cannot be reached" in message
    assert "Check host, port and scheme of the connection 'ckpt_default'" in message


@pytest.fixture(scope="module")
def guarded(cluster: MiniCluster) -> Iterator[str]:
    """The same session behind a token."""
    from ckpt_runtime.rest import server as rest_server
    from ckpt_runtime.rest.app import create_app

    server, port = cluster.call(rest_server.start(create_app(cluster.dispatcher, token=TOKEN), "127.0.0.1", 0))
    yield f"http://127.0.0.1:{port}"
    cluster.call(rest_server.stop(server))


@every_task
@pytest.mark.parametrize("token", [None, "another"])
def test_a_token_that_is_refused(
    asked: Asked,
    token: str | None,
    guarded: str,
    two_jobs: list[SequenceJob],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connect(monkeypatch, guarded, **({} if token is None else {"password": token}))
    message = says(asked, tmp_path, two_jobs[0].job_id)
    assert "required. Set the field Bearer token (password) of the connection 'ckpt_default'" in message


@pytest.mark.parametrize("asked", [each for each in TASKS if "target_directory" in each.given], ids=_id)
def test_a_savepoint_directory_that_cannot_be_written(
    asked: Asked, cluster: MiniCluster, two_jobs: list[SequenceJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below a file: that holds for every user."""
    connect(monkeypatch, cluster.rest_url)
    (tmp_path / "file").write_text("a file")
    asked = replace(asked, given={**asked.given, "target_directory": "@file"})
    message = says(asked, tmp_path, two_jobs[0].job_id)
    assert f"cannot create {(tmp_path / 'file').as_uri()}/savepoint-" in message
    assert "must be able to write there: give another directory" in message
