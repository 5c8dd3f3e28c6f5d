"""Submitting as a task: one job whatever happens, found again while it lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowTaskTerminated, AirflowTaskTimeout, TaskDeferred

from airflow_provider_ckpt.exceptions import (
    CkptArgumentInvalid,
    CkptJobFailed,
    CkptJobNotResumable,
    CkptRequestRejected,
    CkptWaitTimeout,
)
from airflow_provider_ckpt.operators.submit import SubmitJobOperator
from ckpt_runtime.graph.job_graph import JobVertex, OperatorNode
from ckpt_runtime.scheduler.job_status import JobStatus
from tests.unit.provider.conftest import JOB, Fault, JobManager, Task, deferral, finish, fire
from tests.unit.runtime.rest.fake_gateway import FakeJob

FAST = {"defer_after": 0, "poll_interval": 0.01, "wait_timeout": 10}


def submission(pipeline: str, **more: Any) -> SubmitJobOperator:
    """An operator of one try; ``more`` are its other arguments."""
    return SubmitJobOperator(task_id="t", pipeline=pipeline, **FAST | more)


@pytest.fixture
def pipeline(tmp_path: Path) -> str:
    path = tmp_path / "flights.py"
    path.write_text("def pipeline(spark): ...\n")
    return str(path)


@pytest.mark.row("air.2")
@pytest.mark.parametrize("deferrable", [True, False])
def test_submission_waits_until_the_job_runs_and_passes_all_arguments(
    job_manager: JobManager, task: Task, pipeline: str, deferrable: bool
) -> None:
    operator = submission(
        pipeline,
        entry="flights:pipeline",
        args=["--rows", 7],
        parallelism="2",
        configuration={"execution.checkpointing.interval": timedelta(seconds=5), "flag": True},
        savepoint_path="file:/data/sp",
        allow_non_restored_state="true",
        claim_mode="claim",
        deferrable=deferrable,
    )
    context = task.context()
    result = finish(operator, context)
    job = job_manager.gateway.jobs[result["job_id"]]
    assert result["status"] == "RUNNING"
    assert result["pipeline_id"] == job.request.pipeline_id
    assert job.request.entry_point == "flights:pipeline"
    assert job.request.arguments == ("--rows", "7")
    assert job.request.parallelism == 2
    assert job.request.configuration == {"execution.checkpointing.interval": "5000 ms", "flag": "true"}
    assert job.request.savepoint_path == "file:/data/sp"
    assert job.request.allow_non_restored_state is True
    assert job.request.claim_mode.value == "CLAIM"
    assert context["ti"].xcoms["_link_CkptJobLink"].endswith(f"/jobs/{result['job_id']}/health")


def test_warnings_of_the_job_manager_are_logged_by_the_task(
    job_manager: JobManager, task: Task, pipeline: str, capsys: pytest.CaptureFixture[str]
) -> None:
    add_job = job_manager.gateway.add_job

    def without_checkpoints(job_id: str, name: str) -> FakeJob:
        job = add_job(job_id, name)
        committer = JobVertex("f" * 32, (OperatorNode("c", "orders commit", "committer"),), 1)
        job.graph = replace(job.graph, vertices=(*job.graph.vertices, committer))
        job.submitted = replace(job.submitted, settings=replace(job.submitted.settings, interval_ms=None))
        return job

    job_manager.gateway.add_job = without_checkpoints  # type: ignore[method-assign, assignment]
    deferral(submission(pipeline), task.context())
    said = capsys.readouterr()
    assert "no execution.checkpointing.interval is set, and rows of 'orders commit' are" in said.out + said.err


@pytest.mark.row("air.3")
def test_crash_before_the_request_arrived_repeats_it_with_the_same_ids_and_uploads_a_pipeline_that_is_gone(
    job_manager: JobManager, task: Task, pipeline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = submission(pipeline)

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(operator, "ask", crash)
    with pytest.raises(KeyboardInterrupt):
        operator.execute(task.context())
    assert task.store is not None
    written = dict(task.store["ckpt_job"])
    result = finish(submission(pipeline), task.context())
    assert {key: result[key] for key in ("job_id", "pipeline_id")}.items() <= written.items()
    assert job_manager.count("POST /jars/upload") == 1
    job_manager.gateway.pipelines.clear()
    assert finish(submission(pipeline), task.context())["status"] == "RUNNING"


@pytest.mark.row("air.3")
def test_retry_reports_a_job_that_finished_in_the_meantime(job_manager: JobManager, task: Task, pipeline: str) -> None:
    first = deferral(submission(pipeline), task.context())
    job_manager.gateway.move(first.trigger.condition.job_id, JobStatus.FINISHED)
    result = submission(pipeline).execute(task.context())
    assert result["job_id"] == first.trigger.condition.job_id
    assert result["status"] == "FINISHED"


@pytest.mark.row("air.3")
def test_a_clear_that_cancels_the_inherited_job_leads_to_a_new_one(
    job_manager: JobManager, task: Task, pipeline: str
) -> None:
    deferral(submission(pipeline), task.context())
    context = task.context()
    operator = submission(pipeline, wait_for_completion=True)
    inherited = deferral(operator, context)
    job_manager.gateway.move(inherited.trigger.condition.job_id, JobStatus.CANCELED)
    event = fire(inherited)
    with pytest.raises(TaskDeferred) as again:
        operator.resume_execution("execute_complete", {"event": event}, context)
    assert again.value.trigger.condition.job_id != inherited.trigger.condition.job_id
    assert again.value.trigger.memo["inherited"] is False


def failed_after_checkpoints(job_manager: JobManager, task: Task, pipeline: str, **kwargs: Any) -> Any:
    """A first try whose job has completed two checkpoints and failed; returns the job."""
    gateway, context = job_manager.gateway, task.context()
    operator = submission(pipeline, wait_for_completion=True, **kwargs)
    deferred = deferral(operator, context)
    job = gateway.jobs[deferred.trigger.condition.job_id]
    gateway.complete_checkpoint(job)
    gateway.complete_checkpoint(job)
    gateway.move(job.job_id, JobStatus.FAILED)
    with pytest.raises(CkptJobFailed):
        operator.resume_execution("execute_complete", {"event": fire(deferred)}, context)
    return job


@pytest.mark.row("air.3")
def test_a_retry_resumes_the_failed_job_and_owns_its_checkpoint(
    job_manager: JobManager, task: Task, pipeline: str
) -> None:
    failed = failed_after_checkpoints(job_manager, task, pipeline)
    second = submission(pipeline, wait_for_completion=True)
    context = task.context()
    deferred = deferral(second, context)
    job = job_manager.gateway.jobs[deferred.trigger.condition.job_id]
    assert job.job_id != failed.job_id
    assert job.request.savepoint_path == "file:/data/chk-2"
    assert job.request.claim_mode.value == "CLAIM"
    # It fails before a checkpoint of its own: the third try starts from the same one.
    job_manager.gateway.move(job.job_id, JobStatus.FAILED)
    with pytest.raises(CkptJobFailed):
        second.resume_execution("execute_complete", {"event": fire(deferred)}, context)
    third = deferral(submission(pipeline, wait_for_completion=True), context)
    request = job_manager.gateway.jobs[third.trigger.condition.job_id].request
    assert (request.savepoint_path, request.claim_mode.value) == ("file:/data/chk-2", "CLAIM")


@pytest.mark.row("ends.7")
def test_positions_of_sources_are_set_once_and_not_by_a_retry_that_resumes(
    job_manager: JobManager, task: Task, pipeline: str
) -> None:
    given: dict[str, Any] = {"orders": {"topic": {"0": 7}}, "clicks": "{{ 'earliest' }}"}

    def operator() -> SubmitJobOperator:
        options = {"savepoint_path": "file:/data/sp", "source_positions": given, "wait_for_completion": True}
        made = submission(pipeline, **options)
        made.render_template_fields(task.context())
        return made

    context = task.context()
    requests = []
    for try_ in range(4):
        started = operator()
        deferred = deferral(started, context)
        job = job_manager.gateway.jobs[deferred.trigger.condition.job_id]
        requests.append((job.request.savepoint_path, dict(job.request.source_positions)))
        if try_ == 1:
            for _ in range(2):
                job_manager.gateway.complete_checkpoint(job)
        job_manager.gateway.move(job.job_id, JobStatus.FAILED)
        with pytest.raises(CkptJobFailed):
            started.resume_execution("execute_complete", {"event": fire(deferred)}, context)
    set_ = {"orders": '{"topic": {"0": 7}}', "clicks": "earliest"}
    # The first job had no checkpoint; the second one had some, and the third one none of its own.
    assert requests == [("file:/data/sp", set_)] * 2 + [("file:/data/chk-2", {})] * 2


@pytest.mark.row("air.3")
def test_retry_that_would_repeat_output_is_refused_without_start_over(
    job_manager: JobManager, task: Task, pipeline: str
) -> None:
    failed = failed_after_checkpoints(job_manager, task, pipeline)
    for checkpoint_id in (1, 2):
        failed.tracker.report_discarded(checkpoint_id)
    known = len(job_manager.gateway.jobs)
    with pytest.raises(CkptJobNotResumable, match=f"{failed.job_id}.*start_over"):
        submission(pipeline).execute(task.context())
    assert len(job_manager.gateway.jobs) == known
    again = submission(pipeline, start_over="true")
    result = finish(again, task.context())
    assert job_manager.gateway.jobs[result["job_id"]].request.savepoint_path is None


@pytest.mark.row("air.3")
def test_single_answer_without_checkpoints_is_looked_up_again(
    job_manager: JobManager, task: Task, pipeline: str
) -> None:
    failed = failed_after_checkpoints(job_manager, task, pipeline)
    job_manager.faults.append(Fault(f"/jobs/{failed.job_id}/checkpoints", 404))
    result = finish(submission(pipeline), task.context())
    assert job_manager.gateway.jobs[result["job_id"]].request.savepoint_path == "file:/data/chk-2"


@pytest.mark.row("air.3")
def test_job_that_was_seen_counts_as_started_after_any_crash(
    job_manager: JobManager, task: Task, pipeline: str
) -> None:
    assert task.store is not None
    deferral(submission(pipeline), task.context())
    del task.store["ckpt_job"]["started"]
    deferred = deferral(submission(pipeline), task.context())
    del job_manager.gateway.jobs[deferred.trigger.condition.job_id]
    with pytest.raises(CkptJobNotResumable, match="no longer known"):
        submission(pipeline).execute(task.context())


@pytest.mark.row("air.3")
def test_a_checkpoint_that_cannot_be_read_is_named_and_a_person_gives_another(
    job_manager: JobManager, task: Task, pipeline: str
) -> None:
    failed = failed_after_checkpoints(job_manager, task, pipeline)
    job_manager.faults.append(Fault("POST /jars/.*/run", 400))
    for _ in range(2):
        with pytest.raises(CkptRequestRejected, match="a fault of the test"):
            submission(pipeline).execute(task.context())
        job_manager.faults.append(Fault("POST /jars/.*/run", 400))
    job_manager.faults.clear()
    given = submission(pipeline, savepoint_path="file:/data/sp")
    request = job_manager.gateway.jobs[finish(given, task.context())["job_id"]].request
    assert (request.savepoint_path, request.claim_mode.value) == ("file:/data/sp", "NO_CLAIM")
    assert request.job_id != failed.job_id


@pytest.mark.row("air.3")
def test_a_session_that_forgot_the_job_starts_no_second_one(job_manager: JobManager, task: Task, pipeline: str) -> None:
    failed = failed_after_checkpoints(job_manager, task, pipeline)
    del job_manager.gateway.jobs[failed.job_id]
    with pytest.raises(CkptJobNotResumable, match="no longer known"):
        submission(pipeline).execute(task.context())


def test_jobs_of_a_task_instance_are_found_by_their_ids_without_a_state_store(
    job_manager: JobManager, pipeline: str
) -> None:
    def submit(map_index: int) -> Any:
        operator = SubmitJobOperator(task_id="t", pipeline=pipeline, poll_interval=0.01)
        return operator.execute(Task(store=None, map_index=map_index).context())

    first = submit(0)
    assert submit(0)["job_id"] == first["job_id"]
    assert submit(1)["job_id"] != first["job_id"]
    gateway = job_manager.gateway
    gateway.complete_checkpoint(gateway.jobs[first["job_id"]])
    gateway.move(first["job_id"], JobStatus.FAILED)
    resumed = submit(0)
    assert gateway.jobs[resumed["job_id"]].request.savepoint_path == "file:/data/chk-1"
    assert submit(0)["job_id"] == resumed["job_id"]


@pytest.mark.row("air.3")
def test_a_submission_whose_answer_was_lost_starts_one_job(job_manager: JobManager, task: Task, pipeline: str) -> None:
    job_manager.faults.append(Fault("POST /jars/.*/run", 502, carried_out=True))
    assert finish(submission(pipeline), task.context())["status"] == "RUNNING"
    assert len([line for line in job_manager.received if line.endswith("/run")]) == 1


def test_completion_is_waited_for_without_a_limit(job_manager: JobManager, task: Task, pipeline: str) -> None:
    operator = SubmitJobOperator(
        task_id="t", pipeline=pipeline, wait_for_completion=True, defer_after=0, poll_interval=0.01
    )
    deferred = deferral(operator, task.context())
    assert deferred.trigger.deadline is None
    assert deferred.timeout is None
    job_manager.gateway.move(deferred.trigger.condition.job_id, JobStatus.FINISHED)
    assert fire(deferred)["status"] == "done"


@pytest.mark.row("air.3")
def test_job_past_the_deadline_keeps_running_and_is_found_by_the_next_attempt(
    job_manager: JobManager, task: Task, pipeline: str
) -> None:
    limited = {"wait_for_completion": True, "defer_after": 0, "poll_interval": 0.01, "wait_timeout": 0.1}
    with pytest.raises(CkptWaitTimeout, match="keeps running; the next try attaches"):
        finish(submission(pipeline, **limited), task.context())
    (job,) = [job for job in job_manager.gateway.jobs.values() if job.job_id != JOB]
    assert job.status is JobStatus.RUNNING
    with pytest.raises(CkptWaitTimeout):
        finish(submission(pipeline, **limited), task.context())
    assert len(job_manager.gateway.jobs) == 2


@pytest.mark.parametrize("cancel", [True, False])
def test_deadline_cancels_the_job_if_configured(
    job_manager: JobManager, task: Task, pipeline: str, cancel: bool
) -> None:
    operator = submission(pipeline, wait_for_completion=True, cancel_on_timeout=cancel, wait_timeout=0.1)
    with pytest.raises(CkptWaitTimeout, match="being cancelled" if cancel else "keeps running"):
        finish(operator, task.context())
    (job,) = [job for job in job_manager.gateway.jobs.values() if job.job_id != JOB]
    assert job.status is (JobStatus.CANCELED if cancel else JobStatus.RUNNING)


KILLS = [(True, "failed", True), (False, "failed", False), (True, "success", False), (True, "restarting", False)]
"""What was given, what Airflow says of the killed task, and whether the job is cancelled."""


@pytest.mark.row("air.3")
@pytest.mark.parametrize(("given", "state", "cancels"), [*KILLS, (True, None, True)])
@pytest.mark.parametrize("where", ["in the worker", "deferred"])
def test_killed_task_cancels_its_job_if_configured_and_given_up(
    job_manager: JobManager,
    task: Task,
    pipeline: str,
    airflow_says: Callable[[str | None], None],
    given: bool,
    state: str | None,
    cancels: bool,
    where: str,
) -> None:
    operator, context = submission(pipeline, cancel_on_kill=given), task.context()
    trigger = deferral(operator, context).trigger
    airflow_says(state)
    if where == "deferred":
        trigger.task_instance = context["ti"]
        asyncio.run(trigger.on_kill())
    else:
        operator.on_kill()
    assert job_manager.gateway.jobs[trigger.condition.job_id].status is (
        JobStatus.CANCELED if cancels else JobStatus.RUNNING
    )


def test_a_killed_task_that_waits_in_the_worker_starts_no_other_job(
    job_manager: JobManager, task: Task, pipeline: str, airflow_says: Callable[[str | None], None]
) -> None:
    """Airflow calls ``on_kill`` beside the wait, which sees the job's end while its process still lives."""
    first = submission(pipeline, wait_for_completion=True)
    job_id = deferral(first, task.context()).trigger.condition.job_id
    second = SubmitJobOperator(
        task_id="t", pipeline=pipeline, wait_for_completion=True, deferrable=False, poll_interval=0.01
    )
    airflow_says("failed")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(second.execute, task.context())
        seen = job_manager.count(f"GET /jobs/{job_id}")
        while job_manager.count(f"GET /jobs/{job_id}") < seen + 3:
            assert not running.done()
        second.on_kill()
        with pytest.raises(AirflowTaskTerminated):
            running.result(60)
    assert {job.status for job in job_manager.gateway.jobs.values() if job.job_id != JOB} == {JobStatus.CANCELED}


def test_job_keeps_running_when_airflow_does_not_report_the_task_state(
    job_manager: JobManager, task: Task, pipeline: str
) -> None:
    operator = submission(pipeline)
    job_id = deferral(operator, task.context()).trigger.condition.job_id
    operator.on_kill()
    assert job_manager.gateway.jobs[job_id].status is JobStatus.RUNNING


@pytest.mark.row("air.3")
@pytest.mark.parametrize("cancel", [True, False])
def test_airflows_execution_timeout_is_a_limit_as_the_deadline(
    job_manager: JobManager, task: Task, pipeline: str, cancel: bool
) -> None:
    """Deferred, where Airflow does not look at it, and where a request hangs in the worker until Airflow does."""
    limited = SubmitJobOperator(
        task_id="t", pipeline=pipeline, wait_for_completion=True, cancel_on_timeout=cancel,
        execution_timeout=timedelta(seconds=0.2), defer_after=0, poll_interval=0.01,
    )  # fmt: skip
    with pytest.raises(CkptWaitTimeout, match="being cancelled" if cancel else "keeps running"):
        finish(limited, task.context())
    hanging = submission(pipeline, cancel_on_timeout=cancel)
    deferral(hanging, Task().context())
    try:
        raise AirflowTaskTimeout
    except AirflowTaskTimeout:
        hanging.on_kill()
    states = {job.status for job in job_manager.gateway.jobs.values() if job.job_id != JOB}
    assert states == {JobStatus.CANCELED if cancel else JobStatus.RUNNING}


@pytest.mark.row("air.3")
def test_failed_task_has_published_the_job_that_it_started(job_manager: JobManager, task: Task, pipeline: str) -> None:
    """For a task that cleans up, whose ``job`` is ``submit.job_id``."""
    operator, context = submission(pipeline, wait_for_completion=True, wait_timeout=0.1), task.context()
    with pytest.raises(CkptWaitTimeout):
        finish(operator, context)
    assert context["ti"].xcoms["job_id"] in set(job_manager.gateway.jobs) - {JOB}


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({}, "pipeline"),
        ({"pipeline": "a.py", "pipeline_id": "x"}, "pipeline"),
        ({"pipeline": "/nowhere/a.py"}, "pipeline"),
        ({"pipeline_id": "x", "args": "one text"}, "args"),
        ({"pipeline_id": "x", "parallelism": 0}, "parallelism"),
        ({"pipeline_id": "x", "configuration": ["a"]}, "configuration"),
        ({"pipeline_id": "x", "configuration": {"a": None}}, "configuration"),
        ({"pipeline_id": "x", "args": {"--rows": 7}}, "args"),
        ({"pipeline_id": "x", "claim_mode": "LEGACY"}, "claim_mode"),
        ({"pipeline_id": "x", "source_positions": ["a"]}, "source_positions"),
        ({"pipeline_id": "x", "source_positions": {"orders": "earliest"}}, "source_positions"),
        ({"pipeline_id": "x", "start_over": "maybe"}, "start_over"),
        ({"pipeline_id": "x", "latest_kind": "NEWEST"}, "latest_kind"),
        ({"pipeline_id": "x", "if_no_snapshot": "skip"}, "if_no_snapshot"),
        ({"pipeline_id": "x", "allow_non_restored_state": "maybe"}, "allow_non_restored_state"),
    ],
)
def test_a_bad_argument_is_named(job_manager: JobManager, task: Task, arguments: Any, name: str) -> None:
    with pytest.raises(CkptArgumentInvalid, match=f"^{name}"):
        SubmitJobOperator(task_id="t", **arguments).execute(task.context())
    assert not [line for line in job_manager.received if line.startswith("POST")]


def test_quick_submission_is_not_deferred(job_manager: JobManager, task: Task, pipeline: str) -> None:
    operator = SubmitJobOperator(task_id="t", pipeline=pipeline, poll_interval=0.01)
    assert operator.execute(task.context())["status"] == "RUNNING"


def test_slow_submission_is_deferred_after_a_while(job_manager: JobManager, task: Task, pipeline: str) -> None:
    operator = SubmitJobOperator(
        task_id="t", pipeline=pipeline, wait_for_completion=True, defer_after=1, poll_interval=0.01
    )
    deferral(operator, task.context())
    (job,) = [job for job in job_manager.gateway.jobs if job != JOB]
    assert job_manager.count(f"GET /jobs/{job}") > 1
