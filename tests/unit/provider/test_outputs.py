"""Outputs of tasks as arguments of others: rendered, expanded, and stored by Airflow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.execution_time import task_runner
from airflow.sdk.execution_time.comms import (
    GetXComCount,
    GetXComSequenceItem,
    XComCountResponse,
    XComSequenceIndexResult,
)
from airflow.serialization.serialized_objects import DagSerialization

from airflow_provider_ckpt.exceptions import CkptArgumentInvalid
from airflow_provider_ckpt.operators.cancel import CancelJobOperator
from airflow_provider_ckpt.operators.checkpoint import TriggerCheckpointOperator
from airflow_provider_ckpt.operators.savepoint import TakeSavepointOperator
from airflow_provider_ckpt.operators.stop import StopWithSavepointOperator
from airflow_provider_ckpt.operators.submit import SubmitJobOperator
from airflow_provider_ckpt.sensors.checkpoint import CheckpointCompletedSensor
from ckpt_runtime.scheduler.job_status import JobStatus
from tests.unit.provider.conftest import JobManager, Task, finish

FAST = {"defer_after": 0, "poll_interval": 0.01, "wait_timeout": 30}
SENSOR = {"defer_after": 0, "poke_interval": 0.01, "timeout": 30}


class Run:
    """One run of a DAG: every task is rendered and expanded by Airflow, and its results are kept as Airflow does."""

    def __init__(self, dag: DAG) -> None:
        self.dag = dag
        self._results: dict[str, dict[int, Any]] = {}

    def task(self, task_id: str, map_index: int = -1) -> Any:
        """Run one task, or one index of a mapped one; its result."""
        context: Any = Task(map_index=map_index).context()
        context |= {"dag": self.dag, "dag_run": SimpleNamespace(conf={})}
        ti = context["ti"]
        ti.xcom_pull, ti.task_id, ti.get_relevant_upstream_map_indexes = self.pull, task_id, lambda **_: None
        self.dag.get_task(task_id).render_template_fields(context)
        operator = context.get("task") or self.dag.get_task(task_id)
        result = json.loads(json.dumps(finish(operator, context)))
        self._results.setdefault(task_id, {})[map_index] = result
        return result

    def pull(self, *, task_ids: str, key: str, default: Any, map_indexes: Any) -> Any:
        result = self._results[task_ids][-1]
        return result if key == "return_value" else result.get(key, default)

    def send(self, message: Any) -> Any:
        """The answers of a task's supervisor, about results of mapped tasks."""
        results = self._results[message.task_id]
        if isinstance(message, GetXComCount):
            return XComCountResponse(len=len(results))
        assert isinstance(message, GetXComSequenceItem)
        return XComSequenceIndexResult(root=results[message.offset])


@pytest.fixture
def run(job_manager: JobManager, monkeypatch: pytest.MonkeyPatch) -> Callable[[DAG], Run]:
    def start(dag: DAG) -> Run:
        started = Run(dag)
        monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", started, raising=False)
        return started

    return start


@pytest.fixture
def pipeline(tmp_path: Path) -> str:
    path = tmp_path / "flights.py"
    path.write_text("def pipeline(spark, region): ...\n")
    return str(path)


def test_outputs_are_arguments(run: Callable[[DAG], Run], pipeline: str, job_manager: JobManager) -> None:
    with DAG(dag_id="one", schedule=None) as dag:
        submit = SubmitJobOperator(task_id="submit", pipeline=pipeline, **FAST)
        trigger = TriggerCheckpointOperator(task_id="trigger", job=submit.job_id, **FAST)
        sensor = CheckpointCompletedSensor(
            task_id="sensor", job=submit.job_id, checkpoint_id=trigger.checkpoint_id, **SENSOR
        )
        savepoint = TakeSavepointOperator(task_id="savepoint", job=submit.job_id, target_directory="/data", **FAST)
        stop = StopWithSavepointOperator(task_id="stop", job=submit.job_id, target_directory="/data", **FAST)
        for name, path in (("a", sensor.external_path), ("b", savepoint.savepoint_path), ("c", stop.savepoint_path)):
            SubmitJobOperator(task_id=name, pipeline=pipeline, savepoint_path=path, **FAST)
    assert dag.get_task("sensor").upstream_task_ids == {"submit", "trigger"}
    running = run(dag)
    results = {name: running.task(name) for name in ("submit", "trigger", "sensor", "savepoint", "stop", "a", "b", "c")}
    assert results["sensor"]["checkpoint_id"] == results["trigger"]["checkpoint_id"]
    wanted = [results["sensor"]["external_path"], *(results[name]["savepoint_path"] for name in ("savepoint", "stop"))]
    assert len(set(wanted)) == 3
    jobs = job_manager.gateway.jobs
    assert [jobs[results[name]["job_id"]].request.savepoint_path for name in "abc"] == wanted


def test_the_results_of_a_mapped_task_are_expanded_over(
    run: Callable[[DAG], Run], pipeline: str, job_manager: JobManager
) -> None:
    with DAG(dag_id="mapped", schedule=None) as dag:
        submits = SubmitJobOperator.partial(task_id="submit", pipeline=pipeline, **FAST).expand(args=[["eu"], ["us"]])
        stops = StopWithSavepointOperator.partial(task_id="stop", target_directory="/data", **FAST).expand(
            job=submits.output
        )
        SubmitJobOperator.partial(task_id="resume", pipeline=pipeline, **FAST).expand(savepoint_path=stops.output)
    assert dag.get_task("stop").upstream_task_ids == {"submit"}
    document = json.loads(json.dumps(DagSerialization.to_dict(dag)))
    assert set(DagSerialization.from_dict(document).task_ids) == {"submit", "stop", "resume"}
    running, jobs = run(dag), job_manager.gateway.jobs
    submitted, stopped, resumed = ([running.task(name, index) for index in (0, 1)] for name in dag.task_ids)
    assert [list(jobs[result["job_id"]].request.arguments) for result in submitted] == [["eu"], ["us"]]
    assert [result["job_id"] for result in stopped] == [result["job_id"] for result in submitted]
    assert {jobs[result["job_id"]].status for result in stopped} == {JobStatus.FINISHED}
    paths = [result["savepoint_path"] for result in stopped]
    assert [jobs[result["job_id"]].request.savepoint_path for result in resumed] == paths


def test_a_list_of_outputs_is_expanded_over(run: Callable[[DAG], Run], pipeline: str, job_manager: JobManager) -> None:
    with DAG(dag_id="listed", schedule=None) as dag:
        one = SubmitJobOperator(task_id="one", pipeline=pipeline, **FAST)
        other = SubmitJobOperator(task_id="other", pipeline=pipeline, **FAST)
        CancelJobOperator.partial(task_id="cancel", **FAST).expand(job=[one.output, other.output])
    assert dag.get_task("cancel").upstream_task_ids == {"one", "other"}
    document = json.loads(json.dumps(DagSerialization.to_dict(dag)))
    assert DagSerialization.from_dict(document).get_task("cancel").upstream_task_ids == {"one", "other"}
    running = run(dag)
    jobs = [running.task(name)["job_id"] for name in ("one", "other")]
    assert [running.task("cancel", index)["job_id"] for index in (0, 1)] == jobs
    assert {job_manager.gateway.jobs[job_id].status for job_id in jobs} == {JobStatus.CANCELED}


def test_a_sensor_takes_a_result_and_a_job_resumes_from_its_checkpoint(
    run: Callable[[DAG], Run], pipeline: str, job_manager: JobManager
) -> None:
    with DAG(dag_id="results", schedule=None) as dag:
        submit = SubmitJobOperator(task_id="submit", pipeline=pipeline, **FAST)
        trigger = TriggerCheckpointOperator(task_id="trigger", job=submit.output, **FAST)
        sensor = CheckpointCompletedSensor(task_id="sensor", job=submit.output, checkpoint_id=trigger.output, **SENSOR)
        SubmitJobOperator(task_id="next", pipeline_id=submit.output, savepoint_path=sensor.output, **FAST)
    running = run(dag)
    submitted, _, seen, following = [running.task(name) for name in dag.task_ids]
    assert following["pipeline_id"] == submitted["pipeline_id"]
    assert job_manager.gateway.jobs[following["job_id"]].request.savepoint_path == seen["external_path"]


def test_result_without_the_needed_field_is_refused() -> None:
    operator = CancelJobOperator(task_id="t", job={"savepoint_path": "/d"})  # type: ignore[arg-type]
    with pytest.raises(CkptArgumentInvalid, match="^job: .* a task's result must have job_id"):
        operator.execute(Task().context())
