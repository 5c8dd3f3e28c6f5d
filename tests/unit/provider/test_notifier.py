"""The notifier: what its message says of a job, who gets it, and that it never makes a callback fail."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from airflow_provider_ckpt.notifications.ckpt import CkptNotifier
from airflow_provider_ckpt.operators.savepoint import TakeSavepointOperator
from airflow_provider_ckpt.operators.submit import SubmitJobOperator
from ckpt_runtime.failure_report import FailureCause
from ckpt_runtime.jobmaster.gateway_values import ExceptionEntry
from tests.unit.provider.conftest import JOB, Fault, JobManager, Task, TaskInstance

pytestmark = pytest.mark.row("air.17")
NAME = "contract-job"


class Recorded:
    """Stands for a notifier of another provider, which renders its text from the context."""

    def __init__(self) -> None:
        self.contexts: list[dict[str, Any]] = []

    def __call__(self, context: Any) -> None:
        self.contexts.append(context)

    @property
    def ckpt(self) -> dict[str, Any]:
        (context,) = self.contexts
        found: dict[str, Any] = context["ckpt"]
        return found


class Known(TaskInstance):
    """A task instance that has stored the id of its job."""

    def xcom_pull(self, *, task_ids: str, key: str, map_indexes: int) -> Any:
        assert (task_ids, map_indexes) == (self.task_id, self.map_index)
        return self.xcoms.get(key)


def reported(notifier: CkptNotifier, context: Any) -> dict[str, Any]:
    other = Recorded()
    notifier.notifiers = [other]
    notifier(context)
    return other.ckpt


def test_the_message_says_state_verdict_checkpoint_failure_task_and_link(job_manager: JobManager) -> None:
    job = job_manager.gateway.jobs[JOB]
    _, path = job_manager.gateway.complete_checkpoint(job)
    failure = FailureCause("ValueError", "no such customer", "ValueError: no such customer\n  File x\n")
    job.exceptions.append(ExceptionEntry(failure, job_manager.gateway.now))
    found = reported(CkptNotifier(job=NAME), Task().context())
    assert (found["job"], found["job_id"], found["state"]) == (NAME, JOB, "RUNNING")
    assert found["verdict"] == "UNHEALTHY"
    assert (found["checkpoint"]["id"], found["checkpoint"]["path"]) == (1, path)
    assert found["link"].endswith(f"/ckpt/ckpt_default/web/#/jobs/{JOB}/health")
    for words in (
        f"Job {NAME} is RUNNING, UNHEALTHY (",
        "Last completed checkpoint: 1, 20",
        path,
        "no such customer",
        "dag.t, run run",
    ):
        assert words in found["message"]
    assert found["message"].endswith(found["link"])


def test_the_job_is_that_of_the_task_unless_it_is_given(job_manager: JobManager) -> None:
    task = SubmitJobOperator(task_id="t", pipeline="/p", job_name=NAME)
    assert reported(CkptNotifier(), {"task": task, "ti": Known()})["job_id"] == JOB
    other = "2" * 32
    job_manager.gateway.add_job(other, "another")
    stored = Known(xcoms={"job_id": other})
    assert reported(CkptNotifier(), {"task": task, "ti": stored})["job_id"] == other
    assert reported(CkptNotifier(job="{{ params.which }}"), {"ti": stored, "params": {"which": NAME}})["job_id"] == JOB
    took = TakeSavepointOperator(task_id="t", job="another", ckpt_conn_id="ckpt_default")
    assert reported(CkptNotifier(), {"task": took})["job_id"] == other
    nothing = reported(CkptNotifier(), {})
    assert (nothing["job_id"], nothing["link"]) == (None, None)
    assert "does not say which job" in nothing["message"]


def test_notification_is_sent_without_the_job_if_the_job_manager_does_not_answer(
    job_manager: JobManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "does not know job 'elsewhere'" in reported(CkptNotifier(job="elsewhere"), {})["message"]
    job_manager.gateway.add_job("3" * 32, NAME)
    assert "is the name of 2 active jobs" in reported(CkptNotifier(job=NAME), {})["message"]
    monkeypatch.setattr("airflow_provider_ckpt.notifications.ckpt.RETRY_TIMEOUT_SECONDS", 0)
    job_manager.stop()
    away = reported(CkptNotifier(job=NAME), {})["message"]
    assert away.startswith(f"Job {NAME}. The job manager of the connection 'ckpt_default' does not answer: ")
    missing = reported(CkptNotifier(job=NAME, ckpt_conn_id="nosuch"), {})["message"]
    assert "nosuch" in missing


def test_a_server_without_verdicts_and_failures_is_reported_without_them(job_manager: JobManager) -> None:
    job_manager.faults = [Fault("/health", 404, times=9), Fault("/exceptions", 404, times=9)]
    found = reported(CkptNotifier(job=NAME), {})
    assert found["message"].startswith(f"Job {NAME} is RUNNING. No checkpoint has completed.")
    assert (found["verdict"], found["failure"]) == (None, None)


def test_own_message_is_a_template_and_one_that_fails_still_gives_a_message(job_manager: JobManager) -> None:
    given = CkptNotifier(job=NAME, message="{{ ckpt.job | upper }}: {{ params.who }}, look!")
    assert reported(given, {"params": {"who": "Ada"}})["message"] == "CONTRACT-JOB: Ada, look!"
    broken = reported(CkptNotifier(job=NAME, message="{{ nothing.at.all }}"), {})
    assert "The message cannot be rendered from its template" in broken["message"]
    assert JOB in broken["message"]


def test_a_notifier_that_fails_does_not_keep_the_message_from_the_others(job_manager: JobManager) -> None:
    def fails(context: Any) -> None:
        raise RuntimeError("the network is down")

    last = Recorded()
    CkptNotifier(job=NAME, notifiers=[fails, last])({})
    assert last.ckpt["job_id"] == JOB


def test_notifier_can_be_awaited_by_the_triggerer_for_a_deadline(job_manager: JobManager) -> None:
    other = Recorded()
    notifier = CkptNotifier(job=NAME, notifiers=[other])

    async def run() -> None:
        notifier.context = {}
        await notifier

    asyncio.run(run())
    assert other.ckpt["state"] == "RUNNING"


def test_the_link_leads_to_the_address_for_browsers(job_manager: JobManager, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = json.loads(job_manager.connection) | {"extra": {"browser_address": "https://ckpt.example.com"}}
    monkeypatch.setenv("AIRFLOW_CONN_CKPT_DEFAULT", json.dumps(fields))
    found = reported(CkptNotifier(job=NAME), {})
    assert found["link"] == f"https://ckpt.example.com/web/#/jobs/{JOB}/health"
