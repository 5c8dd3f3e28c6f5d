"""Operators of upgrades: what they refuse before anything is asked for, and what they say; and the DAG."""

from __future__ import annotations

import asyncio
import json
from importlib import import_module
from typing import Any

import pytest
from airflow.sdk.exceptions import ParamValidationError
from airflow.serialization.serialized_objects import DagSerialization

from airflow_provider_ckpt.exceptions import CkptArgumentInvalid, CkptOperationFailed, CkptUpgradeRefused
from airflow_provider_ckpt.operators.suspend import ResumeJobOperator, SuspendJobOperator
from airflow_provider_ckpt.operators.upgrade import FinishUpgradeOperator, UpgradeJobOperator
from airflow_provider_ckpt.triggers.upgrade import CkptUpgradeTrigger
from airflow_provider_ckpt.upgrades.actions import Accepted, Fits, Newest, Seen
from airflow_provider_ckpt.upgrades.machine import advance, begin
from airflow_provider_ckpt.upgrades.record import Goal, Mode, Outcome, Step, Upgrade, Wish
from ckpt_runtime.scheduler.job_status import JobStatus
from tests.unit.provider.conftest import JOB, JobManager, Task

FAST = {"deferrable": False, "poll_interval": 0.01}


def upgrade(**arguments: Any) -> UpgradeJobOperator:
    return UpgradeJobOperator(**{"task_id": "t", "job": JOB, "pipeline_id": "p", **FAST, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "newest"}, "mode: 'newest' .* SAVEPOINT, LAST_STATE, STATELESS"),
        ({"mode": None}, "mode: None"),
        ({"pipeline": "/x"}, "pipeline: '/x' .* either pipeline"),
        ({"pipeline_id": None}, "pipeline: None .* either pipeline"),
        ({"healthy_checkpoints": 0}, "healthy_checkpoints: 0"),
        ({"healthy_timeout": "soon"}, "healthy_timeout: 'soon'"),
        ({"savepoint_timeout": 0}, "savepoint_timeout: 0"),
        ({"last_state_max_age": "0 s"}, "last_state_max_age: '0 s'"),
        ({"savepoint_format": "XML"}, "savepoint_format: 'XML'"),
        ({"args": "a b"}, "args: 'a b'"),
        ({"configuration": {"s3.secret-key": "x"}}, "configuration: 's3.secret-key' .* not written down"),
        ({"pause_before_start": "perhaps"}, "pause_before_start: 'perhaps'"),
    ],
)
def test_bad_arguments_are_told_before_anything_is_sent(
    job_manager: JobManager, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(CkptArgumentInvalid, match=message):
        upgrade(**arguments).execute(Task().context())
    assert job_manager.received == []


def test_without_a_task_state_store_nothing_is_begun(job_manager: JobManager) -> None:
    with pytest.raises(CkptOperationFailed, match="task state store"):
        upgrade().execute(Task(store=None).context())
    assert job_manager.received == []


def test_a_program_that_is_not_there_stops_nothing(job_manager: JobManager) -> None:
    with pytest.raises(CkptUpgradeRefused, match="no uploaded pipeline 'p'"):
        upgrade().execute(Task().context())
    assert job_manager.gateway.jobs[JOB].status is JobStatus.RUNNING


def test_a_server_that_does_not_say_what_runs_is_told_so(job_manager: JobManager) -> None:
    """As a Flink cluster, which has no holds and no likeJob either."""
    with pytest.raises(CkptUpgradeRefused, match="does not say which program"):
        SuspendJobOperator(task_id="t", job=JOB, **FAST).execute(Task().context())
    assert job_manager.gateway.jobs[JOB].status is JobStatus.RUNNING
    with pytest.raises(CkptUpgradeRefused, match="does not say which program"):
        ResumeJobOperator(task_id="t", job=JOB, **FAST).execute(Task().context())


def seen(**changes: Any) -> Seen:
    return Seen(**{"state": "RUNNING", "ready": True, "program": "old", "newest": Newest("/c", 0), **changes})


def paused() -> Upgrade:
    record = begin(Wish(goal=Goal.UPGRADE, job=JOB, program="p", pauses=True), "series")
    ended = seen(state="FINISHED", has_ended=True, newest=Newest("/s", 1, is_stop=True))
    for answer in (Accepted(), seen(), Accepted(), Fits(), ended, Fits(diff=("changed: state x",))):
        record = advance(record, answer, 0)
    assert record.step is Step.PAUSED
    return record


def test_last_state_is_refused_where_nothing_would_be_retained() -> None:
    wish = Wish(goal=Goal.UPGRADE, job=JOB, program="p", mode=Mode.LAST_STATE)
    record = advance(begin(wish, "series"), Accepted(), 0)
    record = advance(record, seen(retainable=False), 0)
    assert record.outcome is Outcome.REFUSED
    assert "externalized-checkpoint-retention" in record.why


def test_a_paused_upgrade_is_needed_to_finish_one(job_manager: JobManager) -> None:
    def finish(given: Any) -> FinishUpgradeOperator:
        return FinishUpgradeOperator(task_id="t", upgrade=given, approve=True, **FAST)

    for given in (None, {}, {"upgrade": None}, "text"):
        with pytest.raises(CkptArgumentInvalid, match="upgrade: .* what a paused one gives"):
            finish(given).execute(Task().context())
    with pytest.raises(CkptArgumentInvalid, match="upgrade: None .* that task has returned nothing"):
        finish(None).execute(Task().context())
    begun = begin(Wish(goal=Goal.UPGRADE, job=JOB, program="p"), "s").to_json()
    with pytest.raises(CkptArgumentInvalid, match="it must be one that is PAUSED"):
        finish(begun).execute(Task().context())
    assert job_manager.received == []
    assert finish({"upgrade": paused().to_json()})._paused() == paused()


def test_a_killed_task_says_where_it_stood(capsys: pytest.CaptureFixture[str]) -> None:
    trigger = CkptUpgradeTrigger(ckpt_conn_id="c", deadline=None, poll_interval=1, record=paused().to_json())
    assert CkptUpgradeTrigger(**trigger.serialize()[1]).serialize() == trigger.serialize()
    asyncio.run(trigger.on_kill())
    assert f"PAUSED: job {JOB} has ended, and nothing runs; /s is what to go on from" in capsys.readouterr().out


# --- the DAG


def test_the_dag_is_whole_and_its_form_is_checked() -> None:
    dag = import_module("airflow_provider_ckpt.dags.upgrade").ckpt_upgrade
    assert [task.task_id for task in dag.topological_sort()] == ["stop_with_savepoint", "approval", "start_and_watch"]
    document = json.loads(json.dumps(DagSerialization.to_dict(dag)))
    assert DagSerialization.from_dict(document).dag_id == "ckpt_upgrade"
    bad = {"healthy_timeout": "soon", "mode": "newest", "healthy_checkpoints": 0, "job": "", "entry": "x y"}
    for name, value in bad.items():
        with pytest.raises(ParamValidationError):
            dag.params.get_param(name).resolve(value=value)
    for name in set(dag.params) - {"job"}:
        dag.params.get_param(name).resolve()


def test_without_a_question_the_new_version_is_approved() -> None:
    module = import_module("airflow_provider_ckpt.dags.upgrade")
    approval = module.UpgradeApproval(task_id="t", subject="s", body="b", ask=False)
    assert approval.execute({})["chosen_options"] == [module.APPROVE]


def test_it_can_be_installed_by_one_line() -> None:
    from airflow_provider_ckpt import dags

    assert "ckpt_upgrade" in dags.names()
    assert dags.ckpt_upgrade.dag_id == "ckpt_upgrade"
