"""Upgrades of jobs that run: what becomes of both versions, and of every row."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from ckpt_runtime.jobmaster.gateway_values import Conflict
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import SequenceJob, fast, program_of
from tests.support.outputs import assert_sequence, visible
from tests.unit.provider.conftest import Task

FAST = {"deferrable": False, "poll_interval": 0.05}
pytestmark = pytest.mark.row("air.4")


@pytest.fixture(autouse=True)
def connection(cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = urlsplit(cluster.rest_url)
    document = {"conn_type": "ckpt", "host": parts.hostname, "port": parts.port}
    monkeypatch.setenv("AIRFLOW_CONN_CKPT_DEFAULT", json.dumps(document))


@dataclass
class Upgraded:
    """A job, its next version's files, and the task that replaces it."""

    job: SequenceJob
    task: Task = field(default_factory=Task)

    def __post_init__(self) -> None:
        self.version = self.job.directory / "version"
        shutil.copytree(program_of("sequence"), self.version)
        self.edit("", "# another version\n")
        self.old = self.job.start(rate=500)
        self.job.running()
        self.job.has_output()

    def edit(self, before: str, after: str) -> None:
        file = self.version / "sequence.py"
        source = file.read_text()
        assert before in source
        file.write_text(source.replace(before, after, 1) if before else source + after)

    def upgrade(self, **arguments: Any) -> dict[str, Any]:
        from airflow_provider_ckpt.operators.upgrade import UpgradeJobOperator

        operator = UpgradeJobOperator(
            task_id="t",
            job=self.old,
            pipeline=str(self.version),
            **{"target_directory": str(self.job.directory / "savepoints"), **FAST, **arguments},
        )
        try:
            result: dict[str, Any] = operator.execute(self.task.context())
        finally:
            self.job.job_id = self.living()
        return result

    def living(self) -> str:
        """The version that runs, if any; that it is one is a promise of its own."""
        cluster = self.job.cluster
        lines = cluster.call(cluster.dispatcher.list_jobs())
        found = [line.job_id for line in lines if not line.status.is_globally_terminal]
        assert len(found) <= 1, lines
        return found[0] if found else ""

    def program_of(self, job_id: str) -> str | None:
        cluster = self.job.cluster
        return cluster.of_job(job_id, lambda job: job.config_info()).pipeline_id

    def holds(self) -> list[str]:
        cluster = self.job.cluster
        return [owner for program in cluster.call(cluster.dispatcher.list_pipelines()) for owner in program.holds]


@pytest.fixture
def upgraded(job: SequenceJob) -> Iterator[Upgraded]:
    yield Upgraded(job)
    job.end()


@pytest.mark.parametrize("mode", ["savepoint", pytest.param("last-state", marks=pytest.mark.long)])
def test_a_healthy_version_continues_where_the_old_one_ended(upgraded: Upgraded, mode: str) -> None:
    job = upgraded.job
    job.cluster.wait_for_checkpoints(job.job_id, 1)
    result = upgraded.upgrade(mode=mode)
    assert (result["outcome"], result["job_id"]) == ("UPGRADED", job.job_id)
    assert job.job_id != upgraded.old
    assert upgraded.program_of(job.job_id) == result["pipeline_id"] != result["old_pipeline_id"]
    assert upgraded.holds() == []
    job.stopped()


@pytest.mark.parametrize(
    ("edit", "arguments", "why"),
    [
        pytest.param(
            ('act(self._faults, "processor")', 'raise ValueError("a bad version")'),
            {"configuration": {"restart-strategy.type": "none"}},
            "a bad version",
            id="crashes",
        ),
        pytest.param(
            ("", "# nothing else\n"),
            {"configuration": {"execution.checkpointing.interval": "1 h"}, "healthy_timeout": "3 s"},
            "RUNNING and has completed 0 of 1 checkpoints in time",
            id="never checkpoints",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ('"seen BIGINT")', '"seen BIGINT") if session_is_there else None'),
            {"configuration": {"restart-strategy.type": "none"}},
            "session_is_there",
            id="fails when it opens its state",
            marks=pytest.mark.long,
        ),
    ],
)
def test_an_unhealthy_version_is_rolled_back_and_no_row_is_lost_or_repeated(
    upgraded: Upgraded, edit: tuple[str, str], arguments: dict[str, Any], why: str
) -> None:
    from airflow_provider_ckpt.exceptions import CkptUpgradeRefused, CkptUpgradeRolledBack

    upgraded.edit(*edit)
    program = upgraded.program_of(upgraded.old)
    with pytest.raises((CkptUpgradeRolledBack, CkptUpgradeRefused), match=why) as failure:
        upgraded.upgrade(**arguments)
    assert upgraded.program_of(upgraded.job.job_id) == program
    assert failure.type is CkptUpgradeRolledBack or upgraded.job.job_id == upgraded.old
    assert upgraded.holds() == []
    upgraded.job.stopped()


@pytest.mark.long
def test_other_clients_cannot_start_or_end_a_job_whose_upgrade_waits_for_approval(
    upgraded: Upgraded, tmp_path: Path
) -> None:
    """A second upgrade, a resumption, submissions by name and from the savepoint, and the old id after the upgrade."""
    from airflow_provider_ckpt.exceptions import CkptUpgradeRefused
    from airflow_provider_ckpt.operators.suspend import ResumeJobOperator
    from airflow_provider_ckpt.operators.upgrade import FinishUpgradeOperator, UpgradeJobOperator

    job, old = upgraded.job, upgraded.old
    paused = upgraded.upgrade(pause_before_start=True)
    held = sorted(upgraded.holds())

    def second() -> UpgradeJobOperator:
        return UpgradeJobOperator(task_id="second", job=old, pipeline=str(upgraded.version), **FAST)

    def resume() -> ResumeJobOperator:
        return ResumeJobOperator(task_id="resume", job=old, **FAST)

    for rival in (second(), resume()):
        with pytest.raises(CkptUpgradeRefused, match=f"Job {old} is being upgraded by airflow: "):
            rival.execute(Task().context())
    with pytest.raises(Conflict, match="is being upgraded by"):
        job.start(savepoint=paused["savepoint_path"])
    with pytest.raises(Conflict, match="is being upgraded by"):
        job.start(configuration=fast(pipeline__name=paused["name"], pipeline__unique_name="true"))
    with pytest.raises(Conflict, match="the upgrade may continue from it"):
        job.cluster.call(job.cluster.dispatcher.dispose_savepoint(paused["savepoint_path"], None))
    assert (upgraded.living(), sorted(upgraded.holds())) == ("", held)

    finish = FinishUpgradeOperator(task_id="finish", upgrade=paused, approve=True, **FAST)
    result = finish.execute(Task().context())
    job.job_id = upgraded.living()
    assert (result["outcome"], result["job_id"]) == ("UPGRADED", job.job_id)
    for rival in (second(), resume()):
        with pytest.raises(CkptUpgradeRefused, match=f"is {job.job_id}, which is RUNNING as incarnation 2"):
            rival.execute(Task().context())
    again = FinishUpgradeOperator(task_id="finish", upgrade=paused, approve=True, **FAST)
    with pytest.raises(CkptUpgradeRefused, match="does not hold the lineage"):
        again.execute(Task().context())
    with pytest.raises(Conflict, match=f"Job {job.job_id}, which is RUNNING, also has the lineage {old}"):
        SequenceJob(job.cluster, tmp_path / "retried").start(savepoint=paused["savepoint_path"])
    assert upgraded.living() == job.job_id
    assert upgraded.holds() == []
    job.stopped()


def test_a_version_whose_state_does_not_fit_stops_nothing(upgraded: Upgraded) -> None:
    from airflow_provider_ckpt.exceptions import CkptUpgradeRefused

    job = upgraded.job
    job.cluster.wait_for_checkpoints(job.job_id, 1)
    upgraded.edit('.hint("uid", f"order{options.uids}")', '.hint("uid", "another")')
    with pytest.raises(CkptUpgradeRefused, match="does not fit the new version"):
        upgraded.upgrade()
    assert job.job_id == upgraded.old
    assert upgraded.holds() == []
    job.stopped()


@pytest.mark.long
def test_rollback_repeats_only_rows_that_the_new_version_has_committed(upgraded: Upgraded) -> None:
    """The new version marks its rows: none of the old one's comes twice."""
    from airflow_provider_ckpt.exceptions import CkptUpgradeRolledBack

    upgraded.edit("yield Row(source=key[0], n=row.n, seen=seen)", "yield Row(source=key[0], n=row.n, seen=-seen)")
    with pytest.raises(CkptUpgradeRolledBack, match="of 100000 checkpoints"):
        upgraded.upgrade(healthy_checkpoints=100_000, healthy_timeout="4 s")
    job = upgraded.job
    job.running()
    job.has_rows()
    job.cluster.wait_for_checkpoints(job.job_id, 2)
    job.cluster.savepoint(job.job_id, job.directory / "savepoints", stop=True)
    order = visible(job.out / "order")
    of_old, of_new = order[order.seen > 0], order[order.seen < 0]
    assert len(of_new) > 0
    assert not of_old.duplicated(["source", "n"]).any()
    assert (of_old.seen == of_old.n + 1).all()
    assert (of_old.groupby("source").n.max() + 1 == of_old.groupby("source").n.count()).all()
    assert not of_new.duplicated(["source", "n"]).any()
    first = of_new.groupby("source").n.min()
    assert (of_new.groupby("source").n.count() == of_new.groupby("source").n.max() - first + 1).all()


def test_upgrade_attempt_that_dies_after_any_step_repeats_nothing(
    upgraded: Upgraded, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow_provider_ckpt.tasks import Journal

    class Dead(BaseException):
        """As if the worker's process were gone."""

    write, written = Journal.write, []

    def dying(journal: Journal, **fields: Any) -> dict[str, Any]:
        found = write(journal, **fields)
        if "step" in fields:
            written.append(fields["step"])
            raise Dead
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "write", dying)
        while not written or written[-1] != "ENDED":
            with pytest.raises(Dead):
                upgraded.upgrade()
    # The second SAVEPOINT records, before the request, that a stop will be requested.
    assert written == ["PREPARE", "SAVEPOINT", "SAVEPOINT", "CHECK", "SUBMIT", "GATE", "CLEAN", "ENDED"]
    assert upgraded.upgrade()["job_id"] == upgraded.job.job_id
    assert upgraded.holds() == []
    upgraded.job.stopped()


def test_a_suspended_job_is_resumed_with_its_program(upgraded: Upgraded) -> None:
    from airflow_provider_ckpt.exceptions import CkptUpgradeRefused
    from airflow_provider_ckpt.operators.suspend import ResumeJobOperator, SuspendJobOperator
    from ckpt_runtime.jobmaster.gateway_values import PipelineInUse

    job = upgraded.job
    job.cluster.wait_for_checkpoints(job.job_id, 1)
    suspend = SuspendJobOperator(task_id="t", job=job.job_id, mode="last-state", **FAST)
    result = suspend.execute(Task().context())
    assert (result["outcome"], job.cluster.status(job.job_id)) == ("SUSPENDED", JobStatus.CANCELED)
    with pytest.raises(PipelineInUse, match=f"held by suspended-{job.job_id}"):
        job.cluster.call(job.cluster.dispatcher.delete_pipeline(result["old_pipeline_id"]))
    task = Task()
    for _ in range(2):  # the second one is a cleared success
        resumed = ResumeJobOperator(task_id="t", job=result["job_id"], **FAST).execute(task.context())
        job.job_id = upgraded.living()
        assert (resumed["outcome"], resumed["job_id"]) == ("RESUMED", job.job_id)
    with pytest.raises(CkptUpgradeRefused, match="it is not suspended"):
        ResumeJobOperator(task_id="t", job=job.job_id, **FAST).execute(Task().context())
    assert upgraded.holds() == []
    assert job.stopped() == assert_sequence(job.out)


@pytest.mark.long
def test_two_runs_of_a_task_that_find_a_changed_program_at_once_make_one_upgrade(
    job: SequenceJob, tmp_path: Path
) -> None:
    """As in a backfill: the run that comes second waits, and attaches to the new version."""
    from airflow_provider_ckpt.operators.deploy import DeployJobOperator

    version = tmp_path / "version"
    shutil.copytree(program_of("sequence"), version)

    def deploy(run: str) -> dict[str, Any]:
        operator = DeployJobOperator(
            task_id="t",
            job_name="deployed",
            pipeline=str(version),
            entry="sequence:pipeline",
            args=["--output", str(job.out), "--rate", "500", "--faults", str(job.faults)],
            parallelism=2,
            configuration={**fast(), "execution.checkpointing.dir": str(job.checkpoints)},
            target_directory=str(job.directory / "savepoints"),
            **FAST,
        )
        context = Task().context()
        context["ti"].run_id = run
        result: dict[str, Any] = operator.execute(context)
        return result

    job.job_id = deploy("first")["job_id"]
    job.running()
    job.has_output()
    with (version / "sequence.py").open("a") as file:
        file.write("# another version\n")
    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(deploy, ["second", "third"]))
    assert sorted(found["change"] for found in results) == ["UNCHANGED", "UPGRADED"]
    (job.job_id,) = {found["job_id"] for found in results}
    cluster = job.cluster
    lines = cluster.call(cluster.dispatcher.list_jobs())
    assert len([line for line in lines if line.name == "deployed"]) == 2
    assert len(list((job.directory / "savepoints").iterdir())) == 1
    job.stopped()


@pytest.mark.long
def test_the_savepoint_of_a_paused_upgrade_or_a_suspended_job_is_not_cleaned_up(job: SequenceJob) -> None:
    """A newer one of the lineage is intact, but it is a plain savepoint, from which no job is resumed."""
    from airflow_provider_ckpt.exceptions import CkptUpgradeRolledBack
    from airflow_provider_ckpt.operators.retention import CleanUpSavepointsOperator
    from airflow_provider_ckpt.operators.suspend import ResumeJobOperator, SuspendJobOperator
    from airflow_provider_ckpt.operators.upgrade import FinishUpgradeOperator, UpgradeJobOperator

    cluster, directory = job.cluster, job.directory / "savepoints"
    job.start(rate=500)
    job.running()
    job.has_output()
    start = cluster.savepoint(job.job_id, directory, stop=True)
    job.start(rate=500, savepoint=start, configuration=fast(execution__checkpointing__interval="1 h"))
    job.running()
    newer = cluster.savepoint(job.job_id, directory)

    def clean_up() -> dict[str, Any]:
        clean_up = CleanUpSavepointsOperator(task_id="t", directory=str(directory), keep=1, poll_interval=0.05)
        result: dict[str, Any] = clean_up.execute(Task().context())
        assert (result["deleted"], set(result["kept"]), set(result["refused"])) == ([], {newer}, {start})
        return result["refused"]

    upgrade = UpgradeJobOperator(
        task_id="t",
        job=job.job_id,
        pipeline=str(program_of("sequence")),
        mode="last-state",
        pause_before_start=True,
        **FAST,
    )
    paused = upgrade.execute(Task().context())
    assert paused["savepoint_path"] == start
    assert "is being upgraded by" in clean_up()[start]
    with pytest.raises(CkptUpgradeRolledBack):
        FinishUpgradeOperator(task_id="t", upgrade=paused, approve=False, **FAST).execute(Task().context())

    job.job_id = paused["upgrade"]["restarted_job"]
    suspended = SuspendJobOperator(task_id="t", job=job.job_id, mode="last-state", **FAST).execute(Task().context())
    assert suspended["savepoint_path"] == start
    release = f"ckpt program release {suspended['old_pipeline_id']} --owner suspended-{job.job_id}"
    assert release in clean_up()[start]
    resume = ResumeJobOperator(
        task_id="t", job=suspended, configuration={"execution.checkpointing.interval": "250 ms"}, **FAST
    )
    job.job_id = resume.execute(Task().context())["job_id"]
    cluster.savepoint(job.job_id, directory, stop=True)
    assert_sequence(job.out, cancelled=True)
    cluster.call(cluster.dispatcher.dispose_savepoint(start, None))
