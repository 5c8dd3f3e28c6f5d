"""The provider's operators on a running job and on its savepoints: real processes, real files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest

from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import SequenceJob, fast, program_of
from tests.support.outputs import assert_sequence
from tests.support.patience import patient
from tests.unit.provider.conftest import Task

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator

NAME = "orders of the operators"
FAST = {"deferrable": False, "poll_interval": 0.05}


@pytest.fixture(autouse=True)
def connection(cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = urlsplit(cluster.rest_url)
    document = {"conn_type": "ckpt", "host": parts.hostname, "port": parts.port}
    monkeypatch.setenv("AIRFLOW_CONN_CKPT_DEFAULT", json.dumps(document))


def run(operator: BaseOperator) -> Any:
    return operator.execute(Task().context())  # type: ignore[arg-type]


def local(path: str) -> Path:
    return Path(url2pathname(urlsplit(path).path))


@pytest.fixture
def named(job: SequenceJob) -> SequenceJob:
    job.start(configuration=fast(pipeline__name=NAME, state__storage__fs__memory_threshold="0 b"))
    job.running()
    job.has_output()
    return job


@pytest.mark.row("air.2")
def test_a_running_job_gets_another_configuration_and_parallelism_by_name(named: SequenceJob) -> None:
    from airflow_provider_ckpt.exceptions import CkptRequestRejected
    from airflow_provider_ckpt.operators.job_config import UpdateJobConfigOperator
    from airflow_provider_ckpt.operators.rescale import RescaleJobOperator
    from airflow_provider_ckpt.operators.stop import StopWithSavepointOperator
    from airflow_provider_ckpt.sensors.health import CheckpointHealthSensor

    changed = {"execution.checkpointing.interval": "300 ms", "execution.checkpointing.rescue.enabled": True}
    update = run(UpdateJobConfigOperator(task_id="t", job=NAME, configuration=changed, **FAST))
    assert (update["job_id"], update["restart"]) == (named.job_id, True)
    assert {key: change["change"] for key, change in update["changes"].items()} == {
        "execution.checkpointing.interval": "live",
        "execution.checkpointing.rescue.enabled": "restart",
    }
    assert run(UpdateJobConfigOperator(task_id="t", job=NAME, configuration=changed, **FAST))["changes"] == {}
    live = {"execution.checkpointing.interval": "350 ms"}
    for changes in ([*live], []):
        assert (
            list(run(UpdateJobConfigOperator(task_id="t", job=NAME, configuration=live, **FAST))["changes"]) == changes
        )
    with pytest.raises(CkptRequestRejected, match="execution.checkpointing.interval.*'soon'"):
        run(UpdateJobConfigOperator(task_id="t", job=NAME, configuration={next(iter(changed)): "soon"}, **FAST))
    rescaled = run(RescaleJobOperator(task_id="t", job=NAME, parallelism=1, **FAST))
    assert set(rescaled["parallelism"].values()) == {1}
    healthy = CheckpointHealthSensor(
        task_id="t", job=NAME, expected=["HEALTHY", "DEGRADED"], mode="poke", poke_interval=0.05, timeout=patient(60)
    )
    assert run(healthy)["job_id"] == named.job_id
    run(StopWithSavepointOperator(task_id="t", job=NAME, target_directory=str(named.directory / "sp"), **FAST))
    assert_sequence(named.out)


@pytest.mark.long
@pytest.mark.row("air.2")
def test_savepoints_are_verified_copied_kept_and_deleted(named: SequenceJob) -> None:
    from airflow_provider_ckpt.exceptions import CkptSnapshotDamaged
    from airflow_provider_ckpt.hooks.ckpt import CkptHook
    from airflow_provider_ckpt.operators.dispose import DisposeSavepointOperator
    from airflow_provider_ckpt.operators.retention import CleanUpSavepointsOperator
    from airflow_provider_ckpt.operators.savepoint import TakeSavepointOperator
    from airflow_provider_ckpt.operators.snapshots import CopySavepointOperator, VerifySavepointOperator

    directory = str(named.directory / "savepoints")
    take = TakeSavepointOperator(task_id="t", job=NAME, target_directory=directory, **FAST)
    paths = [run(take)["savepoint_path"] for _ in range(3)]
    copy = CopySavepointOperator(task_id="t", savepoint_path=paths[0], target=str(named.directory / "copy"))
    copied = run(copy)
    assert run(copy)["savepoint_path"].endswith("/copy")

    # The newest one is damaged: the last good one stays, whatever the limit says.
    next(file for file in sorted(local(paths[2]).iterdir()) if file.name != "_metadata").write_bytes(b"damage")
    with pytest.raises(CkptSnapshotDamaged, match="is damaged and cannot be relied on"):
        run(VerifySavepointOperator(task_id="t", savepoint_path=paths[2]))
    cleaned = run(CleanUpSavepointsOperator(task_id="t", directory=directory, keep=1, **FAST))
    assert cleaned["deleted"] == [paths[0]]
    assert cleaned["kept"] == {paths[1]: "the newest of its lineage that is intact", paths[2]: "one of the newest 1"}
    assert [local(path).exists() for path in paths] == [False, True, True]
    noted = {item.location: item.verified for item in CkptHook().savepoints(directory)}
    assert [mark is not None and mark.passed for mark in map(noted.get, paths[1:])] == [True, False]
    assert run(CleanUpSavepointsOperator(task_id="t", directory=directory, job="another", keep=1, **FAST))["kept"] == {}
    run(DisposeSavepointOperator(task_id="t", savepoint_path=copied, **FAST))
    assert not local(copied["savepoint_path"]).exists()


def test_a_savepoint_directory_that_cannot_be_written_to_is_named(named: SequenceJob) -> None:
    from airflow_provider_ckpt.exceptions import CkptOperationFailed, CkptRequestRejected
    from airflow_provider_ckpt.operators.savepoint import TakeSavepointOperator

    (named.directory / "file").touch()
    target = str(named.directory / "file" / "savepoints")
    with pytest.raises((CkptOperationFailed, CkptRequestRejected), match=str(named.directory / "file")):
        run(TakeSavepointOperator(task_id="t", job=NAME, target_directory=target, **FAST))


@pytest.mark.row("air.2")
def test_a_job_resumes_from_the_latest_snapshot_of_its_name_and_writes_nothing_twice(job: SequenceJob) -> None:
    from airflow_provider_ckpt.exceptions import CkptJobRunning
    from airflow_provider_ckpt.operators.stop import StopWithSavepointOperator
    from airflow_provider_ckpt.operators.submit import SubmitJobOperator

    name, rows = "orders that continue", 4000
    arguments = ["--output", str(job.out), "--rows", str(rows), "--batch", "64"]

    def submit(rate: int = 100, **given: Any) -> SubmitJobOperator:
        return SubmitJobOperator(
            task_id="t",
            pipeline=str(program_of("sequence")),
            entry="sequence:pipeline",
            args=[*arguments, "--rate", str(rate), "--faults", str(job.faults), "--uids=", "--sleep-ms", "0"],
            parallelism=2,
            configuration={"execution.checkpointing.dir": str(job.checkpoints), **fast()},
            job_name=name,
            **given,
            **FAST,
        )

    first = run(submit(from_latest_of=name, if_no_snapshot="start"))
    assert first["started_from"] is None
    job.job_id = first["job_id"]
    job.has_output()
    with pytest.raises(CkptJobRunning, match=first["job_id"]):
        run(submit())
    assert run(submit(if_running="reuse"))["job_id"] == first["job_id"]
    stopped = run(StopWithSavepointOperator(task_id="t", job=name, target_directory=str(job.directory / "sp"), **FAST))
    second = run(submit(0, from_latest_of=name, if_running="wait", wait_for_completion=True))
    assert (second["started_from"], second["status"]) == (stopped["savepoint_path"], "FINISHED")
    job.job_id = second["job_id"]
    assert_sequence(job.out, rows)
