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
from airflow_provider_ckpt.upgrades.actions import (
    Accepted,
    Action,
    Answer,
    Claim,
    Look,
    Lost,
    Newest,
    Refused,
    Release,
    Seen,
    SnapshotFit,
    Stop,
    StopSeen,
)
from airflow_provider_ckpt.upgrades.executor import UpgradeCondition, _options, perform
from airflow_provider_ckpt.upgrades.record import DesiredUpgrade, Goal, Mode, Outcome, Step, Upgrade
from airflow_provider_ckpt.upgrades.steps import WATCHES, begin, drive, take_step
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.scheduler.job_status import JobStatus
from tests.unit.provider.conftest import JOB, Fault, JobManager, Task
from tests.unit.runtime.rest.fake_gateway import FakeJob

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
        ({"source_positions": {"orders": "latest"}, "mode": "stateless"}, "source_positions: .* starts without state"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_sent(
    job_manager: JobManager, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(CkptArgumentInvalid, match=message):
        upgrade(**arguments).execute(Task().context())
    assert job_manager.received == []


@pytest.mark.row("ends.7")
def test_positions_of_sources_apply_to_the_new_version_only(job_manager: JobManager) -> None:
    desired = upgrade(source_positions={"orders": {"topic": {"0": 7}}}).desired(JOB, None)
    assert desired.options["source_positions"] == {"orders": '{"topic": {"0": 7}}'}
    assert desired.rollback_options == {}
    assert _options(desired.options, JOB, "/sp").source_positions == desired.options["source_positions"]
    # The plan is shown before there is a snapshot.
    assert _options(desired.options, JOB, None).source_positions == {}


def test_upgrade_without_a_task_state_store_is_not_started(job_manager: JobManager) -> None:
    with pytest.raises(CkptOperationFailed, match="task state store"):
        upgrade().execute(Task(store=None).context())
    assert job_manager.received == []


def test_missing_program_stops_nothing(job_manager: JobManager) -> None:
    with pytest.raises(CkptUpgradeRefused, match="no uploaded pipeline 'p'"):
        upgrade().execute(Task().context())
    assert job_manager.gateway.jobs[JOB].status is JobStatus.RUNNING


def test_server_that_does_not_report_the_program_is_refused(job_manager: JobManager) -> None:
    """As a Flink cluster, which has no holds and no likeJob either."""
    with pytest.raises(CkptUpgradeRefused, match="does not report which program"):
        SuspendJobOperator(task_id="t", job=JOB, **FAST).execute(Task().context())
    assert job_manager.gateway.jobs[JOB].status is JobStatus.RUNNING
    with pytest.raises(CkptUpgradeRefused, match="does not report which program"):
        ResumeJobOperator(task_id="t", job=JOB, **FAST).execute(Task().context())


def seen(**changes: Any) -> Seen:
    return Seen(**{"state": "RUNNING", "ready": True, "program": "old", "newest": Newest("/c", 0), **changes})


class Answers:
    """A job manager that answers each kind of request with what it was given, the next one each time; else Accepted."""

    def __init__(self, **given: Answer | list[Answer]) -> None:
        self.given = given
        self.requests: list[Action] = []

    async def ask(self, action: Action) -> Answer:
        self.requests.append(action)
        found = self.given.get(type(action).__name__, Accepted())
        if isinstance(found, list):
            return found.pop(0) if len(found) > 1 else found[0]
        return found

    def drive(self, record: Upgrade) -> Upgrade:
        """Until the upgrade has to wait, or has ended."""
        return drive(record, lambda current: asyncio.run(take_step(current, self.ask, 0)), lambda _: None)

    def made(self, kind: type[Action]) -> list[Action]:
        return [action for action in self.requests if isinstance(action, kind)]


def begun(**desired: Any) -> Upgrade:
    return begin(DesiredUpgrade(**{"goal": Goal.UPGRADE, "job": JOB, "program": "p", **desired}), "series")


def paused() -> Upgrade:
    ended = seen(state="FINISHED", has_ended=True, newest=Newest("/s", 1, is_stop=True))
    fits: list[Answer] = [SnapshotFit(), SnapshotFit(diff=("changed: state x",))]
    stops: list[Answer] = [StopSeen(seen(), known=False), StopSeen(ended, path="/s")]
    answers = Answers(Look=seen(), Preview=fits, ReadStop=stops)
    record = answers.drive(begun(pauses=True))
    assert (record.step, len(answers.made(Stop))) == (Step.SAVEPOINT, 1)
    record = answers.drive(record)
    assert record.step is Step.PAUSED
    return record


@pytest.mark.parametrize(("state", "how"), [("FINISHED", "stopped"), ("CANCELED", "cancelled")])
def test_end_by_another_client_does_not_count_as_that_of_the_upgrade(state: str, how: str) -> None:
    newest = Newest("/s", 1, is_stop=state == "FINISHED")
    answers = Answers(Look=[seen(), seen(state=state, has_ended=True, newest=newest)], Preview=SnapshotFit())
    record = answers.drive(begun(fallback_age=10**9))
    assert (record.step, record.outcome) == (Step.ENDED, Outcome.REFUSED)
    assert f"was {how} by another client" in record.why


def test_stop_that_a_new_driver_has_forgotten_is_requested_again_under_the_same_id() -> None:
    running, stopping = StopSeen(seen(), known=False), StopSeen(seen(state="RESTARTING", ready=False), known=False)
    answers = Answers(Look=seen(), Preview=SnapshotFit(), ReadStop=[running, stopping, running])
    record = answers.drive(begun())
    for _ in range(2):
        record = answers.drive(record)
    assert record.step is Step.SAVEPOINT
    first, second = answers.made(Stop)
    assert first == second


def test_stop_that_is_refused_three_times_leaves_the_job_running() -> None:
    answers = Answers(
        Look=seen(), Preview=SnapshotFit(), ReadStop=StopSeen(seen(), known=False), Stop=Refused("no such directory")
    )
    record = answers.drive(begun())
    assert (record.outcome, len(answers.made(Stop))) == (Outcome.REFUSED, 3)
    assert record.why == f"the stop of job {JOB} failed: no such directory. The job keeps running"


def test_suspension_of_a_suspended_job_is_refused_and_leaves_its_program_held() -> None:
    ended = seen(state="FINISHED", has_ended=True, newest=Newest("/s", 1, is_stop=True))
    answers = Answers(Look=ended)
    record = answers.drive(begun(goal=Goal.SUSPEND, program=None))
    assert (record.outcome, "can be resumed" in record.why) == (Outcome.REFUSED, True)
    (release,) = answers.made(Release)
    assert isinstance(release, Release)
    assert release.programs == ()


def test_job_that_another_client_upgrades_is_refused_before_anything_is_held(job_manager: JobManager) -> None:
    job_manager.faults = [Fault("PUT .*/upgrade", 409)]
    with pytest.raises(CkptUpgradeRefused):
        upgrade().execute(Task().context())
    changing = [line for line in job_manager.received if not line.startswith("GET")]
    assert [line for line in changing if line.startswith("PUT")] == [f"PUT /jobs/{JOB}/upgrade"]
    assert job_manager.gateway.jobs[JOB].status is JobStatus.RUNNING


def test_lost_lineage_ends_the_upgrade_at_every_step_without_stranding() -> None:
    for step in Step:
        if step not in (Step.CLEAN, Step.ENDED):
            answers = Answers(Claim=Lost("another client has it"))
            record = answers.drive(structs.replace(paused(), step=step))
            assert (record.step, record.outcome, record.why) == (Step.ENDED, Outcome.REFUSED, "another client has it")
            claim, release = answers.requests
            assert isinstance(claim, Claim)
            assert isinstance(release, Release)
            assert release.programs == ("old", "p")


def test_every_step_that_waits_looks_at_the_job_before_it_requests_anything() -> None:
    for step in WATCHES:
        answers = Answers(Look=seen(), ReadStop=StopSeen(seen()))
        answers.drive(structs.replace(paused(), step=step, deadline=10**15))
        assert [type(action).__name__ for action in answers.requests[:2]] in (["Claim", "Look"], ["Claim", "ReadStop"])


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
        monkeypatch.setattr(job, "metrics", lambda: {**FakeJob.metrics(job), "numRestarts": "11"})
        gateway.move(JOB, JobStatus.RESTARTING)
        gateway.move(JOB, JobStatus.RUNNING)
        gateway.complete_checkpoint(job)
        assert look().completed == 1
    gate = structs.replace(begun(), step=Step.GATE, deadline=10**15)
    assert Answers(Look=seen(completed=1, ailment="it has restarted 11 times")).drive(gate) is gate
    assert Answers(Look=seen(completed=1)).drive(gate).outcome is Outcome.UPGRADED


def test_last_state_is_refused_where_nothing_would_be_retained() -> None:
    record = Answers(Look=seen(retainable=False)).drive(begun(mode=Mode.LAST_STATE))
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
    with pytest.raises(CkptArgumentInvalid, match="it must be one that is PAUSED"):
        finish(begun().to_json()).execute(Task().context())
    assert job_manager.received == []
    assert finish({"upgrade": paused().to_json()})._paused() == paused()


def test_killed_upgrade_logs_its_step(capsys: pytest.CaptureFixture[str]) -> None:
    trigger = CkptTrigger(ckpt_conn_id="c", condition=UpgradeCondition(paused()), deadline=None, poll_interval=1)
    asyncio.run(trigger.on_kill())
    assert (
        f"PAUSED: job {JOB} has ended, and nothing runs; /s is the snapshot from which to continue"
        in capsys.readouterr().out
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


def test_new_version_is_approved_if_no_approval_is_configured() -> None:
    module = import_module("airflow_provider_ckpt.dags.upgrade")
    approval = module.UpgradeApproval(task_id="t", subject="s", body="b", ask=False)
    assert approval.execute({})["chosen_options"] == [module.APPROVE]


def test_upgrade_dag_can_be_installed_by_one_line() -> None:
    from airflow_provider_ckpt import dags

    assert "ckpt_upgrade" in dags.names()
    assert dags.ckpt_upgrade.dag_id == "ckpt_upgrade"
