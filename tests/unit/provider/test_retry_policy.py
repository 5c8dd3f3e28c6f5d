"""Which failures are retried: by the tasks of the provider, and by other tasks that use its hook."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from airflow.sdk import DAG, ExceptionRetryPolicy, RetryAction
from airflow.sdk.exceptions import AirflowFailException

from airflow_provider_ckpt.exceptions import CkptArgumentInvalid, CkptConflict, CkptOperationFailed, CkptUnavailable
from airflow_provider_ckpt.hooks.ckpt import CkptHook
from airflow_provider_ckpt.operators.cancel import CancelJobOperator
from airflow_provider_ckpt.operators.job_config import UpdateJobConfigOperator
from airflow_provider_ckpt.operators.submit import SubmitJobOperator
from airflow_provider_ckpt.retry import CkptRetryPolicy
from airflow_provider_ckpt.sensors.job import JobStatusSensor
from ckpt_runtime.client import requests
from tests.unit.provider.conftest import JOB, Fault, JobManager, Task

INTERVAL = "execution.checkpointing.interval"
STATUSES = {
    400: RetryAction.FAIL,
    401: RetryAction.FAIL,
    403: RetryAction.FAIL,
    409: RetryAction.FAIL,
    413: RetryAction.FAIL,
    404: RetryAction.DEFAULT,  # one answer "not found" may come from a driver that has not recovered its jobs yet
    500: RetryAction.DEFAULT,
    429: RetryAction.RETRY,
    502: RetryAction.RETRY,
    503: RetryAction.RETRY,
    504: RetryAction.RETRY,
}


def failure_of(job_manager: JobManager) -> BaseException:
    """What a task of its own gets from the hook."""
    with CkptHook().get_conn(retry_timeout=0) as client, pytest.raises(Exception) as caught:
        client.execute(requests.job_details(JOB), retry_timeout_s=0)
    return caught.value


@pytest.mark.row("air.14")
@pytest.mark.parametrize(("status", "action"), STATUSES.items())
def test_request_of_the_hook_is_retried_while_the_session_does_not_answer(
    job_manager: JobManager, status: int, action: RetryAction
) -> None:
    job_manager.faults = [Fault(f"/jobs/{JOB}", status, times=99, says="as the test says")]
    decision = CkptRetryPolicy().evaluate(failure_of(job_manager), 1, 3)
    assert decision.action is action
    assert ("as the test says" in (decision.reason or "")) == (action is not RetryAction.DEFAULT)


@pytest.mark.row("air.14")
def test_a_session_that_does_not_answer_is_retried_after_the_given_delay(job_manager: JobManager) -> None:
    job_manager.stop()
    policy = CkptRetryPolicy(retry_delay=timedelta(seconds=20))
    decision = policy.evaluate(failure_of(job_manager), 1, 3)
    assert (decision.action, decision.retry_delay) == (RetryAction.RETRY, timedelta(seconds=20))
    assert CkptRetryPolicy().evaluate(CkptUnavailable("away"), 1, 3).retry_delay is None


@pytest.mark.row("air.14")
def test_refusal_by_the_job_manager_is_not_retried(job_manager: JobManager, task: Task) -> None:
    """A stale version is a conflict, an interval that is not a duration a bad request."""
    stale = UpdateJobConfigOperator(task_id="t", job=JOB, configuration={INTERVAL: "7 s"}, version=9)
    with pytest.raises(CkptConflict, match="version") as conflict:
        stale.execute(task.context())
    assert stale.retry_policy is not None
    assert stale.retry_policy.evaluate(conflict.value, 1, 3).action is RetryAction.FAIL
    assert CkptRetryPolicy(retry_conflicts=True).evaluate(conflict.value, 1, 3).action is RetryAction.DEFAULT
    malformed = UpdateJobConfigOperator(task_id="u", job=JOB, configuration={INTERVAL: "soon"})
    with pytest.raises(AirflowFailException, match="soon"):
        malformed.execute(Task().context())


def test_failures_that_another_try_may_cure_are_retried_as_the_task_says() -> None:
    failures: list[Exception] = [CkptOperationFailed("disk full"), RuntimeError("of the user's own")]
    assert {CkptRetryPolicy().evaluate(failure, 1, 3).action for failure in failures} == {RetryAction.DEFAULT}


def test_every_task_has_the_policy_unless_it_or_its_dag_names_another() -> None:
    arguments: dict[str, Any] = {"task_id": "t", "job": "j"}
    own = ExceptionRetryPolicy(rules=[])
    for kind in (CancelJobOperator, JobStatusSensor):
        assert isinstance(kind(**arguments).retry_policy, CkptRetryPolicy)
        assert kind(retry_policy=own, **arguments).retry_policy is own
        with DAG("d", schedule=None, default_args={"retry_policy": own}):
            assert kind(**arguments).retry_policy is own
    mapped = SubmitJobOperator.partial(task_id="m", pipeline="/p").expand(args=[["1"], ["2"]])
    assert isinstance(mapped.unmap({"args": ["1"]}).retry_policy, CkptRetryPolicy)


def test_the_policy_survives_its_serialized_form() -> None:
    for policy in (CkptRetryPolicy(), CkptRetryPolicy(retry_delay=timedelta(minutes=2), retry_conflicts=True)):
        again = CkptRetryPolicy.deserialize(policy.serialize())
        assert (again.retry_delay, again.retry_conflicts) == (policy.retry_delay, policy.retry_conflicts)


def test_retry_policy_refuses_an_argument_that_is_not_a_flag() -> None:
    with pytest.raises(CkptArgumentInvalid, match="retry_conflicts"):
        CkptRetryPolicy(retry_conflicts="yes")  # type: ignore[arg-type]
