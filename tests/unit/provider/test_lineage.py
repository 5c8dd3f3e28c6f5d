"""What tasks tell OpenLineage, taken from them as its listener takes it, in its own classes."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_ckpt.assets import create_asset
from airflow_provider_ckpt.exceptions import CkptJobFailed, CkptSnapshotDamaged
from airflow_provider_ckpt.lineage import ReportsLineage, convert_asset_to_openlineage, dataset_name
from airflow_provider_ckpt.operators.dispose import DisposeSavepointOperator
from airflow_provider_ckpt.operators.savepoint import TakeSavepointOperator
from airflow_provider_ckpt.operators.snapshots import CopySavepointOperator, VerifySavepointOperator
from airflow_provider_ckpt.operators.stop import StopWithSavepointOperator
from airflow_provider_ckpt.operators.submit import SubmitJobOperator
from airflow_provider_ckpt.operators.suspend import SuspendJobOperator
from airflow_provider_ckpt.operators.upgrade import UpgradeJobOperator
from airflow_provider_ckpt.upgrades.record import DesiredUpgrade, Goal, Mode, Outcome, Step, Upgrade
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.storage.metadata import METADATA_NAME
from tests.support.golden import DIRECTORY
from tests.unit.provider.conftest import JOB, JobManager, Task, finish

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage
    from airflow.sdk import BaseOperator

FAST: dict[str, Any] = {"defer_after": 0, "poll_interval": 0.01, "wait_timeout": 10}

SAVEPOINT = DIRECTORY / "format-2" / "rocksdb"

pytestmark = pytest.mark.row("air.2")


def extracted(operator: BaseOperator, state: str = "success") -> OperatorLineage[Any, Any]:
    """As the listener does it when the task has ended."""
    from airflow.providers.openlineage.extractors.manager import ExtractorManager
    from airflow.utils.state import TaskInstanceState

    run: Any = SimpleNamespace(run_id="run")
    found: OperatorLineage[Any, Any] = ExtractorManager().extract_metadata(
        run, operator, TaskInstanceState(state), SimpleNamespace(task=operator)
    )
    return found


def names(datasets: list[Any]) -> list[tuple[str, str]]:
    return [(dataset.namespace, dataset.name) for dataset in datasets]


def job_of(found: OperatorLineage[Any, Any]) -> tuple[str, str]:
    facet: Any = found.run_facets["externalQuery"]
    return facet.source, facet.externalQueryId


@pytest.mark.parametrize("operator", [TakeSavepointOperator, StopWithSavepointOperator])
@pytest.mark.parametrize("deferrable", [True, False])
def test_a_savepoint_is_an_output_and_its_job_is_named(
    job_manager: JobManager, task: Task, operator: type[Any], deferrable: bool
) -> None:
    taking = operator(task_id="t", job=JOB, target_directory="/sp", deferrable=deferrable, **FAST)
    path = finish(taking, task.context())["savepoint_path"]
    found = extracted(taking)
    assert names(found.outputs) == [dataset_name(path)]
    assert found.inputs == []
    assert job_of(found) == ("ckpt", JOB)


def test_a_program_and_its_savepoint_are_the_inputs_of_a_submission(
    job_manager: JobManager, task: Task, tmp_path: Path
) -> None:
    pipeline = tmp_path / "flights.py"
    pipeline.write_text("def pipeline(spark): ...\n")
    operator = SubmitJobOperator(task_id="t", pipeline=str(pipeline), savepoint_path="s3a://bucket/sp/1", **FAST)
    result = finish(operator, task.context())
    found = extracted(operator)
    assert names(found.inputs) == [("file", str(pipeline)), ("s3://bucket", "sp/1")]
    assert job_of(found) == ("ckpt", result["job_id"])

    again = SubmitJobOperator(task_id="t", pipeline_id=result["pipeline_id"], **FAST)
    finish(again, Task().context())
    assert names(extracted(again).inputs) == [("ckpt://ckpt_default", f"pipelines/{result['pipeline_id']}")]


def test_failed_task_reports_no_lineage(job_manager: JobManager, task: Task) -> None:
    job_manager.gateway.move(JOB, JobStatus.FAILED)
    operator = TakeSavepointOperator(task_id="t", job=JOB, target_directory="/sp", **FAST)
    with pytest.raises(CkptJobFailed, match="can no longer take a savepoint"):
        finish(operator, task.context())
    found = extracted(operator, "failed")
    assert (found.inputs, found.outputs, found.run_facets) == ([], [], {})


@pytest.mark.usefixtures("commands_in_this_process")
def test_a_copy_has_an_input_and_an_output_with_its_size(tmp_path: Path) -> None:
    source, target = SAVEPOINT, tmp_path / "copy"
    operator = CopySavepointOperator(task_id="t", savepoint_path=str(source), target=target.as_uri())
    size = operator.execute({})["bytes"]
    found = extracted(operator)
    assert names(found.inputs) == [("file", str(source))]
    assert names(found.outputs) == [("file", str(target))]
    (output,) = found.outputs
    assert output.outputFacets["outputStatistics"].size == size


@pytest.mark.usefixtures("commands_in_this_process")
def test_lineage_of_a_damaged_savepoint_names_it_as_an_input(tmp_path: Path) -> None:
    path = tmp_path / "savepoint"
    shutil.copytree(SAVEPOINT, path)
    next(file for file in path.iterdir() if file.name != METADATA_NAME).write_bytes(b"")
    operator = VerifySavepointOperator(task_id="t", savepoint_path=path.as_uri())
    with pytest.raises(CkptSnapshotDamaged):
        operator.execute({})
    assert names(extracted(operator, "failed").inputs) == [("file", str(path))]


def test_a_deleted_savepoint_is_dropped(job_manager: JobManager, task: Task) -> None:
    taking = TakeSavepointOperator(task_id="t", job=JOB, target_directory="/sp", **FAST)
    path = finish(taking, task.context())["savepoint_path"]
    operator = DisposeSavepointOperator(task_id="t", savepoint_path=path, **FAST)
    finish(operator, Task().context())
    (output,) = extracted(operator).outputs
    assert names([output]) == [dataset_name(path)]
    assert output.facets["lifecycleStateChange"].lifecycleStateChange.value == "DROP"


def record(outcome: Outcome | None, **fields: Any) -> Upgrade:
    desired = DesiredUpgrade(
        goal=fields.pop("goal", Goal.UPGRADE), job=JOB, program="new", mode=fields.pop("mode", Mode.SAVEPOINT)
    )
    ids = {"series": "s", "new_job": "1" * 32, "restarted_job": "2" * 32, "owner": "o", "old_program": "old"}
    return Upgrade(desired=desired, step=Step.ENDED, outcome=outcome, snapshot="file:/sp/1", **ids, **fields)


SP, NEW, OLD = ("file", "/sp/1"), ("ckpt://ckpt_default", "pipelines/new"), ("ckpt://ckpt_default", "pipelines/old")


@pytest.mark.parametrize(
    ("reported", "inputs", "outputs"),
    [
        (record(Outcome.UPGRADED), [NEW, SP], [SP]),
        (record(Outcome.ROLLED_BACK), [OLD, SP], [SP]),
        (record(Outcome.UPGRADED, falls_back=True), [NEW, SP], []),
        (record(Outcome.UPGRADED, mode=Mode.LAST_STATE), [NEW, SP], []),
        (record(Outcome.SUSPENDED, goal=Goal.SUSPEND), [], [SP]),
        (record(Outcome.SUSPENDED, goal=Goal.SUSPEND, mode=Mode.LAST_STATE), [SP], []),
        (record(Outcome.RESUMED, goal=Goal.RESUME), [OLD, SP], []),
        (record(None), [], [SP]),
    ],
)
def test_upgrade_reports_its_snapshot_as_read_and_its_savepoint_as_written(
    reported: Upgrade,
    inputs: list[tuple[str, str]],
    outputs: list[tuple[str, str]],
    task: Task,
    job_manager: JobManager,
) -> None:
    made: UpgradeJobOperator | SuspendJobOperator = UpgradeJobOperator(
        task_id="t", job=JOB, pipeline_id="new", fail_on_rollback=False
    )
    if reported.desired.goal is Goal.SUSPEND:
        made = SuspendJobOperator(task_id="t", job=JOB)
    made._ended(task.context(), reported)  # type: ignore[arg-type]
    found = extracted(made)
    assert (names(found.inputs), names(found.outputs)) == (inputs, outputs)


@pytest.mark.parametrize(
    ("location", "namespace", "name"),
    [
        ("/data/sp 1/", "file", "/data/sp 1"),
        ("file:/data/sp%201", "file", "/data/sp 1"),
        ("file:///data/sp", "file", "/data/sp"),
        ("file://host/data/sp", "file://host", "/data/sp"),
        ("s3a://bucket/a/b", "s3://bucket", "a/b"),
        ("gs://bucket/a/b", "gs://bucket", "a/b"),
        ("hdfs://node:8020/a/b", "hdfs://node:8020", "/a/b"),
        ("abfss://c@account.dfs.core.windows.net/a", "abfss://c@account.dfs.core.windows.net", "/a"),
    ],
)
def test_datasets_have_the_names_of_openlineages_convention(location: str, namespace: str, name: str) -> None:
    from openlineage.client.naming.dataset import ABFSS, GCS, HDFS, S3, LocalFileSystem, RemoteFileSystem

    found = dataset_name(location)
    assert found == (namespace, name)
    conventional = {
        "s3a": S3("bucket", name),
        "gs": GCS("bucket", name),
        "hdfs": HDFS("node", "8020", name),
        "abfss": ABFSS("c", "account", name),
    }.get(location.partition("://")[0], RemoteFileSystem("host", name) if "host" in location else LocalFileSystem(name))
    assert found == (conventional.get_namespace(), conventional.get_name())


def test_an_asset_is_a_dataset_too() -> None:
    """Found by the provider's metadata, as OpenLineage finds it for inlets and outlets."""
    from airflow.providers.openlineage.utils.utils import translate_airflow_asset

    asset = create_asset(ckpt_conn_id="prod", job="flights a/b")
    found = translate_airflow_asset(asset, None)
    assert found == convert_asset_to_openlineage(asset, None)
    assert names([found]) == [("ckpt://prod", "flights a/b/savepoints")]


def test_operators_that_read_or_write_snapshots_report_lineage() -> None:
    from airflow_provider_ckpt.operators.base import CkptOperator
    from airflow_provider_ckpt.operators.snapshots import CkptSnapshotOperator

    assert issubclass(CkptOperator, ReportsLineage)
    assert issubclass(CkptSnapshotOperator, ReportsLineage)
