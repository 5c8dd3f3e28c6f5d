"""Operators of upgrades: what they refuse before anything is asked for, and what they say; and the DAG."""

from __future__ import annotations

import asyncio
import json
from importlib import import_module
from typing import Any

import pytest
from airflow.sdk.exceptions import ParamValidationError
from airflow.serialization.serialized_objects import DagSerialization
from msgspec import structs

from airflow_provider_ckpt.exceptions import CkptArgumentInvalid, CkptOperationFailed, CkptUpgradeRefused
from airflow_provider_ckpt.operators.suspend import ResumeJobOperator, SuspendJobOperator
from airflow_provider_ckpt.operators.upgrade import FinishUpgradeOperator, UpgradeJobOperator
from airflow_provider_ckpt.triggers.wait import CkptTrigger
from airflow_provider_ckpt.upgrades.actions import Accepted, Fits, Look, Lost, Newest, Release, Seen, StopSeen
from airflow_provider_ckpt.upgrades.condition import UpgradeCondition
from airflow_provider_ckpt.upgrades.executor import perform
from airflow_provider_ckpt.upgrades.machine import action_of, advance, begin
from airflow_provider_ckpt.upgrades.record import DesiredUpgrade, Goal, Mode, Outcome, Step, Upgrade
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.scheduler.job_status import JobStatus
from tests.unit.provider.conftest import JOB, Fault, JobManager, Task

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
        ({"configuration": {"s3.secret-key": "x"}}, "configuration: 's3.secret-key' .* not recorded"),
        ({"pause_before_start": "perhaps"}, "pause_before_start: 'perhaps'"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_sent(
    job_manager: JobManager, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(CkptArgumentInvalid, match=message):
        upgrade(**arguments).execute(Task().context())
    assert job_manager.received == []


def test_without_a_task_state_store_nothing_is_begun(job_manager: JobManager) -> None:
    with pytest.raises(CkptOperationFailed, match="task state store"):
        upgrade().execute(Task(store=None).context())
    assert job_manager.received == []


def test_missing_program_stops_nothing(job_manager: JobManager) -> None:
    with pytest.raises(CkptUpgradeRefused, match="no uploaded pipeline 'p'"):
        upgrade().execute(Task().context())
    assert job_manager.gateway.jobs[JOB].status is JobStatus.RUNNING


def test_server_that_does_not_report_the_program_is_refused(job_manager: JobManager) -> None:
    """As a Flink cluster, which has no holds and no likeJob either."""
    with pytest.raises(CkptUpgradeRefused, match="does not say which program"):
        SuspendJobOperator(task_id="t", job=JOB, **FAST).execute(Task().context())
    assert job_manager.gateway.jobs[JOB].status is JobStatus.RUNNING
    with pytest.raises(CkptUpgradeRefused, match="does not say which program"):
        ResumeJobOperator(task_id="t", job=JOB, **FAST).execute(Task().context())


def seen(**changes: Any) -> Seen:
    return Seen(**{"state": "RUNNING", "ready": True, "program": "old", "newest": Newest("/c", 0), **changes})


def paused() -> Upgrade:
    record = begin(DesiredUpgrade(goal=Goal.UPGRADE, job=JOB, program="p", pauses=True), "series")
    ended = seen(state="FINISHED", has_ended=True, newest=Newest("/s", 1, is_stop=True))
    stopped = StopSeen(ended, path="/s")
    check = Fits(diff=("changed: state x",))
    for answer in (Accepted(), seen(), Accepted(), Fits(), seen(), Accepted(), stopped, check):
        record = advance(record, answer, 0)
    assert record.step is Step.PAUSED
    return record


@pytest.mark.parametrize(("state", "how"), [("FINISHED", "stopped"), ("CANCELED", "cancelled")])
def test_end_by_another_client_is_not_taken_for_that_of_the_upgrade(state: str, how: str) -> None:
    record = begin(DesiredUpgrade(goal=Goal.UPGRADE, job=JOB, program="p", fallback_age=10**9), "series")
    newest = Newest("/s", 1, is_stop=state == "FINISHED")
    for answer in (Accepted(), seen(), Accepted(), Fits(), seen(state=state, has_ended=True, newest=newest)):
        record = advance(record, answer, 0)
    assert (record.step, record.outcome) == (Step.RELEASE, Outcome.REFUSED)
    assert f"was {how} by another client" in record.why


def test_job_that_another_client_upgrades_is_refused_before_anything_is_held(job_manager: JobManager) -> None:
    job_manager.faults = [Fault("PUT .*/upgrade", 409)]
    with pytest.raises(CkptUpgradeRefused):
        upgrade().execute(Task().context())
    changing = [line for line in job_manager.received if not line.startswith("GET")]
    assert [line for line in changing if line.startswith("PUT")] == [f"PUT /jobs/{JOB}/upgrade"]
    assert job_manager.gateway.jobs[JOB].status is JobStatus.RUNNING


def test_lost_lineage_ends_the_upgrade_at_every_step_without_stranding() -> None:
    for step in Step:
        if step not in (Step.RELEASE, Step.ENDED):
            record = advance(structs.replace(paused(), step=step), Lost("somebody has it"), 0)
            assert (record.step, record.outcome, record.why) == (Step.RELEASE, Outcome.REFUSED, "somebody has it")
            action = action_of(record)
            assert isinstance(action, Release)
            assert action.programs == ("old", "p")


def test_checkpoints_of_the_gate_count_since_the_last_restart_and_a_degraded_job_is_not_healthy(
    job_manager: JobManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, client = job_manager.gateway, CkptClient(f"http://127.0.0.1:{job_manager.port}")
    job = gateway.jobs[JOB]

    def look() -> Seen:
        answer = client.run(perform(client.calls, Look(JOB, judged=True), 0))
        assert isinstance(answer, Seen)
        return answer

    with client:
        for _ in range(3):
            gateway.complete_checkpoint(job)
        assert look().completed == 3
        assert "the last checkpoint is" in look().ailment
        done = gateway.job_metrics

        async def restarted(job_id: str) -> dict[str, str]:
            return {**await done(job_id), "numRestarts": "11"}

        monkeypatch.setattr(gateway, "job_metrics", restarted)
        gateway.move(JOB, JobStatus.RESTARTING)
        gateway.move(JOB, JobStatus.RUNNING)
        gateway.complete_checkpoint(job)
        assert look().completed == 1
    record = begin(DesiredUpgrade(goal=Goal.UPGRADE, job=JOB, program="p", checkpoints=1), "series")
    gate = structs.replace(record, step=Step.GATE, deadline=10**15)
    assert advance(gate, seen(completed=1, ailment="it has restarted 11 times"), 0) is gate
    assert advance(gate, seen(completed=1), 0).outcome is Outcome.UPGRADED


def test_last_state_is_refused_where_nothing_would_be_retained() -> None:
    desired = DesiredUpgrade(goal=Goal.UPGRADE, job=JOB, program="p", mode=Mode.LAST_STATE)
    record = advance(begin(desired, "series"), Accepted(), 0)
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
    begun = begin(DesiredUpgrade(goal=Goal.UPGRADE, job=JOB, program="p"), "s").to_json()
    with pytest.raises(CkptArgumentInvalid, match="it must be one that is PAUSED"):
        finish(begun).execute(Task().context())
    assert job_manager.received == []
    assert finish({"upgrade": paused().to_json()})._paused() == paused()


def test_killed_upgrade_logs_its_step(capsys: pytest.CaptureFixture[str]) -> None:
    trigger = CkptTrigger(ckpt_conn_id="c", condition=UpgradeCondition(paused()), deadline=None, poll_interval=1)
    asyncio.run(trigger.on_kill())
    assert (
        f"PAUSED: job {JOB} has ended, and nothing runs; /s is the snapshot to continue from" in capsys.readouterr().out
    )


# --- the DAG


def test_upgrade_dag_loads_and_its_form_is_checked() -> None:
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
