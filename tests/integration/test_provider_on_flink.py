"""The provider's tasks against a real Flink session cluster: all that its REST API has; what it lacks is named."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.flink_cluster import FlinkCluster, absent, assert_numbered
from tests.support.patience import patient
from tests.unit.provider.conftest import Task, finish

pytestmark = [
    pytest.mark.flink,
    pytest.mark.slow,
    pytest.mark.row("air.8"),
    pytest.mark.skipif(bool(absent("java", "javac")), reason=absent("java", "javac")),
]

ROWS = 20_000
RUNNING = {
    "execution.checkpointing.interval": "500 ms",
    "restart-strategy.type": "none",
    "pipeline.name": "numbered rows",
}
WITHOUT_END = 10_000_000


@pytest.fixture(scope="module")
def flink(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlinkCluster]:
    cluster = FlinkCluster(tmp_path_factory.mktemp("flink"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def jar(flink: FlinkCluster) -> Path:
    return flink.jar()


@pytest.fixture(autouse=True)
def connection(flink: FlinkCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    document = {"conn_type": "ckpt", "host": "127.0.0.1", "port": flink.port}
    monkeypatch.setenv("AIRFLOW_CONN_CKPT_DEFAULT", json.dumps(document))


@dataclass
class Job:
    """A job of the test's program, and the tasks that a DAG would have for it."""

    jar: Path
    directory: Path
    job_id: str = ""

    @property
    def out(self) -> Path:
        return self.directory / "out"

    def submission(self, rows: int, rows_per_s: int, *more: str, **arguments: Any) -> Any:
        """A task that submits it; a checkpoint every half second."""
        from airflow_provider_ckpt.operators.submit import SubmitJobOperator

        return SubmitJobOperator(
            task_id="submit",
            pipeline=str(self.jar),
            args=[str(self.out), rows, rows_per_s, *more],
            parallelism=2,
            poll_interval=0.1,
            **{"configuration": RUNNING, **arguments},
        )

    def submit(self, rows: int, rows_per_s: int, *more: str, **arguments: Any) -> Any:
        found = finish(self.submission(rows, rows_per_s, *more, **arguments), Task().context())
        self.job_id = found["job_id"]
        return found

    def run(self, kind: type[Any], **arguments: Any) -> Any:
        """What a task of the job returns. The triggerer's part runs as well."""
        task = kind(task_id="t", job=self.job_id, poll_interval=0.1, **arguments)
        return finish(task, Task().context())

    def sense(self, kind: type[Any], **arguments: Any) -> Any:
        sensor = kind(task_id="t", job=self.job_id, poke_interval=0.1, deferrable=True, **arguments)
        return finish(sensor, Task().context())


@pytest.fixture
def job(jar: Path, tmp_path: Path) -> Iterator[Job]:
    from airflow_provider_ckpt.operators.cancel import CancelJobOperator

    job = Job(jar, tmp_path)
    yield job
    if job.job_id:
        job.run(CancelJobOperator)


def test_connection_test_shows_the_version_of_flink(flink: FlinkCluster) -> None:
    from airflow_provider_ckpt.hooks.ckpt import CkptHook

    works, message = CkptHook().test_connection()
    assert works
    assert "version 2.3" in message


def test_the_life_of_a_job_without_a_lost_or_repeated_row(job: Job) -> None:
    from airflow_provider_ckpt.operators.checkpoint import TriggerCheckpointOperator
    from airflow_provider_ckpt.operators.savepoint import TakeSavepointOperator
    from airflow_provider_ckpt.operators.stop import StopWithSavepointOperator
    from airflow_provider_ckpt.sensors.checkpoint import CheckpointCompletedSensor
    from airflow_provider_ckpt.sensors.job import JobStatusSensor

    assert job.submit(ROWS, 2000)["status"] == "RUNNING"
    assert job.sense(JobStatusSensor, expected="RUNNING")["status"] == "RUNNING"
    completed = job.sense(CheckpointCompletedSensor, count=2)
    assert len(completed["checkpoint_ids"]) >= 2
    assert job.run(TriggerCheckpointOperator)["checkpoint_id"] > completed["checkpoint_id"]
    target = job.directory / "savepoints"
    for savepoint_format in ("NATIVE", "CANONICAL"):
        taken = job.run(TakeSavepointOperator, target_directory=str(target), savepoint_format=savepoint_format)
        assert Path(taken["savepoint_path"].removeprefix("file:"), "_metadata").is_file()
    stopped = job.run(StopWithSavepointOperator, target_directory=str(target))
    assert job.sense(JobStatusSensor, expected="FINISHED")["status"] == "FINISHED"
    resumed = job.submit(ROWS, 20_000, savepoint_path=stopped["savepoint_path"], wait_for_completion=True)
    assert resumed["status"] == "FINISHED"
    assert_numbered(job.out, ROWS)


def test_tasks_that_wait_in_the_triggerer_hear_of_a_jobs_state_although_flink_answers_from_copies(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wait begins with a look, from when on Flink answers about that job with the same for up to 3 s.

    A wait that hears of nothing looks once more at its deadline, and ends well then: so none may come near to it.
    """
    from airflow_provider_ckpt.operators.cancel import CancelJobOperator
    from airflow_provider_ckpt.sensors.job import JobStatusSensor

    monkeypatch.setenv("AIRFLOW__CKPT__DEFER_AFTER", "0")
    deadline = 120.0
    took: list[float] = []
    for _ in range(3):
        for task, state in (
            (lambda: job.submit(WITHOUT_END, 1000, wait_timeout=deadline), "RUNNING"),
            (lambda: job.sense(JobStatusSensor, expected="RUNNING", timeout=deadline), "RUNNING"),
            (lambda: job.run(CancelJobOperator, wait_timeout=deadline), "CANCELED"),
        ):
            begun = time.monotonic()
            assert task()["status"] == state
            took.append(time.monotonic() - begun)
    assert max(took) < deadline / 2, took


def test_a_task_that_is_tried_again_attaches_to_its_job_and_its_savepoint(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow_provider_ckpt.operators.savepoint import TakeSavepointOperator

    task = Task()
    first = finish(job.submission(WITHOUT_END, 1000), task.context())
    job.job_id = first["job_id"]
    assert finish(job.submission(WITHOUT_END, 1000), task.context())["job_id"] == job.job_id

    def savepoint() -> TakeSavepointOperator:
        target = str(job.directory / "savepoints")
        return TakeSavepointOperator(task_id="t", job=job.job_id, target_directory=target, poll_interval=0.1)

    task, first_try = Task(), savepoint()

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(first_try, "_wait_for_operation", die)  # the savepoint was started before the worker died
    with pytest.raises(KeyboardInterrupt):
        first_try.execute(task.context())
    taken = finish(savepoint(), task.context())
    assert [Path(taken["savepoint_path"].removeprefix("file:"))] == list((job.directory / "savepoints").iterdir())


def test_the_reason_of_a_failed_job_is_reported(job: Job) -> None:
    from airflow_provider_ckpt.exceptions import CkptJobFailed

    with pytest.raises(CkptJobFailed, match="asked to fail"):
        job.submit(ROWS, 2000, "fail", wait_for_completion=True)


def test_a_named_job_is_rescaled_and_resumed_from_its_latest_snapshot_and_its_savepoint_is_disposed_of(
    job: Job,
) -> None:
    from airflow_provider_ckpt.operators.dispose import DisposeSavepointOperator
    from airflow_provider_ckpt.operators.rescale import RescaleJobOperator
    from airflow_provider_ckpt.operators.savepoint import TakeSavepointOperator
    from airflow_provider_ckpt.operators.stop import StopWithSavepointOperator

    job.submit(ROWS, 500, configuration=RUNNING | {"pipeline.name": "named"})
    rescaled = finish(RescaleJobOperator(task_id="t", job="named", parallelism=1, poll_interval=0.1), Task().context())
    assert set(rescaled["parallelism"].values()) == {1}
    target = str(job.directory / "savepoints")
    taken = job.run(TakeSavepointOperator, target_directory=target)
    job.run(StopWithSavepointOperator, target_directory=target)
    resumed = job.submit(ROWS, 20_000, from_latest_of="named", latest_kind="savepoint", wait_for_completion=True)
    assert resumed["status"] == "FINISHED"
    assert_numbered(job.out, ROWS)
    dispose = DisposeSavepointOperator(task_id="t", savepoint_path=taken["savepoint_path"], poll_interval=0.1)
    finish(dispose, Task().context())
    assert not Path(taken["savepoint_path"].removeprefix("file:")).exists()


class Store:
    """What Airflow keeps of an asset."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    async def aget(self, key: str) -> Any:
        return self.values.get(key)

    async def aset(self, key: str, value: Any) -> None:
        self.values[key] = value


@dataclass
class Watched:
    """An asset's watcher, and the events that it has given so far."""

    snapshots: str
    store: Store = field(default_factory=Store)
    events: list[dict[str, Any]] = field(default_factory=list)

    async def until(self, job: str, enough: Callable[[list[dict[str, Any]]], bool]) -> None:
        """As in a triggerer that lives for so long."""
        from airflow_provider_ckpt.triggers.snapshots import CkptSnapshotsTrigger

        trigger = CkptSnapshotsTrigger(
            ckpt_conn_id="ckpt_default", job=job, snapshots=self.snapshots, poll_interval=0.1
        )
        trigger.asset_state_store = self.store  # type: ignore[assignment]
        events = trigger.run()
        async with asyncio.timeout(patient(90)):
            while not enough(self.events):
                self.events.append((await anext(events)).payload)

    async def begins(self, job: str) -> None:
        """Its first look, which gives nothing: what is there already is not new."""
        looking = asyncio.create_task(self.until(job, bool))
        async with asyncio.timeout(patient(90)):
            while not self.store.values:
                await asyncio.sleep(0.05)
        looking.cancel()


@pytest.mark.row("air.5")
def test_asset_watcher_sees_snapshots_of_every_job_that_has_the_name(job: Job) -> None:
    from airflow_provider_ckpt.operators.savepoint import TakeSavepointOperator
    from airflow_provider_ckpt.operators.stop import StopWithSavepointOperator

    name, target = "watched", str(job.directory / "savepoints")
    job.submit(WITHOUT_END, 500, configuration=RUNNING | {"pipeline.name": name})
    savepoints, checkpoints = Watched("savepoints"), Watched("checkpoints")
    asyncio.run(savepoints.begins(name))
    asyncio.run(checkpoints.until(name, lambda events: len(events) >= 2))
    assert [event["id"] for event in checkpoints.events] == sorted({event["id"] for event in checkpoints.events})
    assert {event["job"] for event in checkpoints.events} == {name}
    taken = job.run(TakeSavepointOperator, target_directory=target)["savepoint_path"]
    asyncio.run(savepoints.until(name, lambda events: any(each["path"] == taken for each in events)))
    event = next(each for each in savepoints.events if each["path"] == taken)
    assert (event["path"], event["job_id"], event["kind"]) == (taken, job.job_id, "SAVEPOINT")
    assert event["size"] > 0
    stopped = job.run(StopWithSavepointOperator, target_directory=target)["savepoint_path"]
    first = job.job_id
    job.submit(WITHOUT_END, 500, configuration=RUNNING | {"pipeline.name": name}, savepoint_path=stopped)
    again = job.run(TakeSavepointOperator, target_directory=target)["savepoint_path"]
    asyncio.run(savepoints.until(name, lambda events: events[-1]["path"] == again))
    # At least once: a triggerer that ends behind an event has not written it down.
    found = list(dict.fromkeys((event["job_id"], event["path"]) for event in savepoints.events))
    wanted = [(first, taken), (first, stopped), (job.job_id, again)]  # a slow one may have been taken twice
    assert [each for each in found if each in wanted] == wanted


def test_features_that_flink_lacks_are_named(job: Job) -> None:
    from airflow.sdk.exceptions import AirflowException

    from airflow_provider_ckpt.exceptions import CkptRequestRejected
    from airflow_provider_ckpt.operators.checkpoint_config import PatchCheckpointConfigOperator
    from airflow_provider_ckpt.operators.drill import RestoreDrillOperator
    from airflow_provider_ckpt.operators.job_config import UpdateJobConfigOperator
    from airflow_provider_ckpt.operators.upgrade import UpgradeJobOperator
    from airflow_provider_ckpt.sensors.health import CheckpointHealthSensor
    from airflow_provider_ckpt.sensors.job import JobStatusSensor

    job.submit(WITHOUT_END, 1000)
    lacking: list[tuple[type[Any], str, dict[str, Any]]] = [
        (PatchCheckpointConfigOperator, "FLIP-571", {"interval": "2 s"}),
        (UpdateJobConfigOperator, "FLIP-530", {"configuration": {"execution.checkpointing.interval": "2 s"}}),
    ]
    for kind, lack, arguments in lacking:
        with pytest.raises(CkptRequestRejected, match=lack):
            job.run(kind, **arguments)
    with pytest.raises(CkptRequestRejected, match="health"):
        job.sense(CheckpointHealthSensor)
    drill = RestoreDrillOperator(task_id="t", pipeline=str(job.jar), savepoint_path="/nowhere", poll_interval=0.1)
    with pytest.raises(CkptRequestRejected, match="drill"):
        finish(drill, Task().context())
    with pytest.raises(AirflowException, match="Flink|does not"):
        job.run(UpgradeJobOperator, pipeline=str(job.jar))
    assert job.sense(JobStatusSensor, expected="RUNNING")["status"] == "RUNNING"


@pytest.mark.row("air.16", "air.17", "air.18")
def test_alerts_the_notifier_and_the_listing_work_on_flink(job: Job) -> None:
    """A lag is not reported by the test's program, so that its alert stays silent."""
    from airflow_provider_ckpt.hooks.ckpt import CkptHook
    from airflow_provider_ckpt.notifications.ckpt import CkptNotifier
    from airflow_provider_ckpt.operators.listing import ListJobsOperator
    from airflow_provider_ckpt.operators.savepoint import TakeSavepointOperator
    from airflow_provider_ckpt.sensors.checkpoint import CheckpointCompletedSensor, SavepointCompletedSensor
    from airflow_provider_ckpt.triggers.alerts import AlertWatch

    job.submit(WITHOUT_END, 2000)
    job.sense(CheckpointCompletedSensor, count=2)
    taken = job.run(TakeSavepointOperator, target_directory=str(job.directory / "savepoints"))["savepoint_path"]
    job.sense(SavepointCompletedSensor, since_checkpoint_id=0)  # Flink shows checkpoints seconds later

    async def looks(now_ms: int) -> dict[str, Any]:
        async with await CkptHook().aget_conn() as client:
            return {
                alert: await AlertWatch("numbered rows", alert, 3600).look(client, now_ms)
                for alert in ("no-checkpoint", "no-savepoint", "lag")
            }

    now_ms = round(time.time() * 1000)
    assert set(asyncio.run(looks(now_ms)).values()) == {None}
    late = asyncio.run(looks(now_ms + 2 * 3_600_000))
    assert (late["no-checkpoint"]["job_id"], late["no-checkpoint"]["health"]) == (job.job_id, None)
    assert late["no-checkpoint"]["last_id"] >= 2
    assert late["no-savepoint"]["last_path"] == taken
    assert late["lag"] is None
    messages: list[dict[str, Any]] = []
    notifier = CkptNotifier(job="numbered rows", notifiers=[lambda context: messages.append(context["ckpt"])])  # type: ignore[typeddict-item]
    notifier({})
    assert messages[0]["message"].startswith("Job numbered rows is RUNNING. Last completed checkpoint: ")
    listed = ListJobsOperator(task_id="t", name="numbered*").execute(Task().context())  # type: ignore[arg-type]
    assert [entry["job_id"] for entry in listed] == [job.job_id]


@pytest.mark.long
@pytest.mark.airflow
@pytest.mark.row("air.6")
@pytest.mark.timeout(900)
def test_the_delivered_dags_do_on_flink_what_it_has_and_name_what_it_lacks(job: Job, flink: FlinkCluster) -> None:
    from demo.airflow_instance import AirflowInstanceError, LocalAirflow

    dags = job.directory / "dags"
    dags.mkdir()
    (dags / "delivered.py").write_text("from airflow_provider_ckpt.dags import *\n")
    connection = json.dumps({"conn_type": "ckpt", "host": "127.0.0.1", "port": flink.port})
    root = Path(__file__).parents[2]
    environment = {"PYTHONPATH": f"{root}:{root / 'runtime'}", "AIRFLOW__CKPT__MIN_DEFERRAL": "0"}
    airflow = LocalAirflow(job.directory / "airflow", dags, {"ckpt_default": connection}, environment)
    airflow.create_database()
    job.submit(WITHOUT_END, 1000)
    directory = job.directory / "savepoints"

    def run(dag_id: str, **conf: Any) -> str:
        """What the run says; it may fail."""
        airflow.log_path("dags").unlink(missing_ok=True)
        with suppress(AirflowInstanceError):
            airflow.run_command("dags", "test", dag_id, "--conf", json.dumps({"job": job.job_id} | conf))
        return airflow.log_tail("dags", 5000)

    said = run("ckpt_savepoint_now", directory=str(directory), verify=False)
    assert re.search("DagRun Finished: .* state=success", said), said[-3000:]
    (savepoint,) = directory.iterdir()
    assert (savepoint / "_metadata").is_file()
    said = run("ckpt_patch", interval="2 s")
    assert re.search("DagRun Finished: .* state=failed", said), said[-3000:]
    assert "FLIP-571" in said
    said = run("ckpt_restore_drill", savepoint=savepoint.as_uri(), pipeline=str(job.jar))
    assert re.search("DagRun Finished: .* state=failed", said), said[-3000:]
    assert "restore drills" in said
