"""``@task.ckpt`` on jobs that run: later versions of a function of a DAG file, and every row."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

import pytest

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import PIPELINES, SequenceJob, fast, program_of
from tests.support.outputs import assert_sequence
from tests.unit.provider.conftest import Task

pytestmark = pytest.mark.row("air.12")
FILES = [str(PIPELINES / "sequence.py"), str(PIPELINES / "injected.py")]


@pytest.fixture(autouse=True)
def connection(cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = urlsplit(cluster.rest_url)
    document = {"conn_type": "ckpt", "host": parts.hostname, "port": parts.port}
    monkeypatch.setenv("AIRFLOW_CONN_CKPT_DEFAULT", json.dumps(document))


def numbers(spark: Any, out: str, faults: str, rate: int) -> None:
    from sequence import pipeline

    pipeline(spark, "--output", out, "--faults", faults, "--rate", str(rate), "--batch", "64")


def numbers_of_another_version(spark: Any, out: str, faults: str, rate: int) -> None:
    # The same rows by another program.
    from sequence import pipeline

    pipeline(spark, "--output", out, "--faults", faults, "--rate", str(rate), "--batch", "64")


def fails_when_it_runs(spark: Any, out: str, faults: str, rate: int) -> None:
    from sequence import SeenCounter, pipeline

    def fails(self, handle):  # type: ignore[no-untyped-def]
        raise RuntimeError("this version does not start")

    SeenCounter.init = fails
    pipeline(spark, "--output", out, "--faults", faults, "--rate", str(rate), "--batch", "64")


def name_of(job: SequenceJob) -> str:
    """Another one for each test: the first job of a name starts from what the last one of this name has left."""
    return f"numbers of {job.directory.name}"


def deploy(job: SequenceJob, function: Any, task: Task | None = None, **given: Any) -> dict[str, Any]:
    """A run of the DAG, or another try of one, with this version of its function."""
    from airflow_provider_ckpt.decorators.ckpt import ckpt_task

    decorated = ckpt_task(
        function,
        task_id="t",
        job_name=name_of(job),
        files=FILES,
        parallelism=2,
        configuration={"execution.checkpointing.dir": str(job.checkpoints), **fast()},
        target_directory=str(job.directory / "savepoints"),
        deferrable=False,
        poll_interval=0.05,
        **given,
    )
    operator = decorated(str(job.out), faults=str(job.faults), rate=500).operator
    result: dict[str, Any] = operator.execute((task or Task()).context())
    job.job_id = result["job_id"]
    return result


def test_a_changed_function_is_an_upgrade_that_loses_and_repeats_nothing(job: SequenceJob) -> None:
    first = deploy(job, numbers)
    job.running()
    job.has_output()
    assert deploy(job, numbers)["change"] == "UNCHANGED"
    second = deploy(job, numbers_of_another_version)
    assert (second["change"], second["status"], second["name"]) == ("UPGRADED", "RUNNING", name_of(job))
    assert second["job_id"] != first["job_id"]
    assert str(job.directory / "savepoints") in second["started_from"]
    assert set(second) == set(first)
    again = deploy(job, numbers_of_another_version)
    assert (again["change"], again["job_id"], again["pipeline_id"]) == (
        "UNCHANGED",
        second["job_id"],
        second["pipeline_id"],
    )
    job.stopped()
    third = deploy(job, numbers_of_another_version)
    assert (third["change"], "savepoint" in third["started_from"]) == ("STARTED", True)
    job.stopped()


@pytest.mark.long
def test_a_version_that_was_rolled_back_is_tried_again_only_by_a_person(job: SequenceJob) -> None:
    from airflow_provider_ckpt.exceptions import CkptUpgradeRefused, CkptUpgradeRolledBack

    given = {"healthy_timeout": 6}
    deploy(job, numbers)
    job.running()
    job.has_output()
    failed = Task()
    with pytest.raises(CkptUpgradeRolledBack, match="the new version is not healthy"):
        deploy(job, fails_when_it_runs, failed, **given)
    with pytest.raises(CkptUpgradeRefused, match="and rolled back"):
        deploy(job, fails_when_it_runs, **given)
    kept = deploy(job, fails_when_it_runs, fail_on_rollback=False, **given)
    assert (kept["change"], kept["status"]) == ("ROLLED_BACK", "RUNNING")
    with pytest.raises(CkptUpgradeRolledBack):
        deploy(job, fails_when_it_runs, failed, **given)
    assert deploy(job, numbers)["change"] == "UNCHANGED"
    assert deploy(job, numbers_of_another_version)["change"] == "UPGRADED"
    job.stopped()


@pytest.mark.long
def test_a_program_that_a_person_has_put_in_its_place_is_replaced_again(job: SequenceJob) -> None:
    from airflow_provider_ckpt.operators.upgrade import UpgradeJobOperator

    deploy(job, numbers)
    job.running()
    job.has_output()
    by_hand = UpgradeJobOperator(
        task_id="t",
        job=name_of(job),
        pipeline=str(program_of("sequence")),
        entry="sequence:pipeline",
        args=["--output", str(job.out), "--faults", str(job.faults), "--rate", "500", "--batch", "64"],
        target_directory=str(job.directory / "savepoints"),
        deferrable=False,
        poll_interval=0.05,
    )
    job.job_id = by_hand.execute(Task().context())["job_id"]  # type: ignore[arg-type]
    assert deploy(job, numbers, on_change="ignore")["change"] == "IGNORED"
    assert deploy(job, numbers)["change"] == "UPGRADED"
    job.stopped()
    assert job.cluster.status(job.job_id) is JobStatus.FINISHED
    assert assert_sequence(job.out) > 0
