"""What a try does about the job of an earlier one: the whole table, without Airflow's machinery or a server."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ckpt.exceptions import CkptJobNotResumable
from airflow_provider_ckpt.jobs import EarlierJob, NextStep, Plan, plan
from ckpt_runtime.contract.checkpoints import Checkpoint, CheckpointCounts, CheckpointStatistics, LatestCheckpoints

JOB = "ab" * 16
STARTED = {"job_id": JOB, "started": True, "given": None, "snapshot": None}
REPORTED = STARTED | {"reported": True}
LIVING = ["CREATED", "RUNNING", "RESTARTING", "RECONCILING", "CANCELLING", "SUSPENDED"]


def checkpoint(checkpoint_id: int, kind: str = "CHECKPOINT", *, discarded: bool = False) -> Checkpoint:
    return Checkpoint(
        id=checkpoint_id, status="COMPLETED", kind=kind, is_savepoint="SAVEPOINT" in kind, savepoint_format=None,
        triggered_at_ms=0, latest_ack_ms=0, state_size=0, checkpointed_size=0, duration_ms=0, num_subtasks=1,
        num_acknowledged=1, processed_data=0, persisted_data=0, external_path=f"file:/chk-{checkpoint_id}",
        discarded=discarded,
    )  # fmt: skip


def statistics(*history: Checkpoint, completed: int | None = None) -> CheckpointStatistics:
    counts = CheckpointCounts(0, 0, 0, len(history) if completed is None else completed, 0)
    return CheckpointStatistics(counts, {}, LatestCheckpoints(), history)


def planned(
    record: dict[str, Any],
    state: str | None,
    *history: Checkpoint,
    given: str | None = None,
    start_over: bool = False,
    completed: int | None = None,
) -> Plan:
    known = None if state is None else statistics(*history, completed=completed)
    return plan(EarlierJob(record, state, known), given, start_over=start_over)


@pytest.mark.parametrize("record", [STARTED, REPORTED])
@pytest.mark.parametrize("start_over", [True, False])
@pytest.mark.parametrize("state", LIVING)
def test_later_try_attaches_to_a_living_job(record: dict[str, Any], state: str, start_over: bool) -> None:
    assert planned(record, state, start_over=start_over).step is NextStep.ATTACH


def test_a_request_that_never_arrived_is_repeated_as_it_was() -> None:
    record = {"job_id": JOB, "snapshot": "file:/chk-3", "resumes": True}
    found = planned(record, None)
    assert (found.step, found.snapshot, found.resumes) == (NextStep.REPEAT, "file:/chk-3", True)


def test_refused_request_is_repeated_with_the_given_arguments() -> None:
    record = {"job_id": JOB, "given": "file:/sp", "snapshot": "file:/chk-3", "resumes": True}
    other = planned(record, None, given="file:/other")
    assert (other.step, other.snapshot, other.resumes) == (NextStep.REPEAT, "file:/other", False)
    over = planned(record, None, given="file:/sp", start_over=True)
    assert (over.step, over.snapshot, over.resumes) == (NextStep.REPEAT, "file:/sp", False)


def test_retry_reports_a_job_that_finished_in_the_meantime() -> None:
    assert planned(STARTED, "FINISHED", checkpoint(1), start_over=True).step is NextStep.REPORT


@pytest.mark.parametrize("state", ["FAILED", "CANCELED"])
def test_retry_resumes_from_the_latest_retained_checkpoint(state: str) -> None:
    found = planned(STARTED, state, checkpoint(4), checkpoint(7), checkpoint(6))
    assert (found.step, found.snapshot, found.resumes) == (NextStep.START, "file:/chk-7", True)


def test_savepoints_count_when_output_was_committed_with_them() -> None:
    history = (checkpoint(9, "SAVEPOINT"), checkpoint(8, "SYNC_SAVEPOINT"), checkpoint(7))
    assert planned(STARTED, "FAILED", *history).snapshot == "file:/chk-8"


@pytest.mark.parametrize("history", [(checkpoint(7, discarded=True),), ()])
def test_committed_output_without_a_retained_checkpoint_is_not_written_again(history: tuple[Checkpoint, ...]) -> None:
    with pytest.raises(CkptJobNotResumable, match="none of them is retained.*start_over=True") as caught:
        planned(STARTED, "FAILED", *history, completed=7)
    assert JOB in str(caught.value)


def test_a_job_without_a_checkpoint_is_started_as_it_was() -> None:
    plain = planned(STARTED | {"snapshot": "file:/sp", "given": "file:/sp"}, "FAILED", given="file:/sp")
    assert (plain.step, plain.snapshot, plain.resumes) == (NextStep.START, "file:/sp", False)
    resumed = planned(STARTED | {"snapshot": "file:/chk-7", "resumes": True}, "FAILED", checkpoint(8, "SAVEPOINT"))
    assert (resumed.snapshot, resumed.resumes) == ("file:/chk-7", True)


def test_a_job_that_the_job_manager_has_forgotten_is_not_started_again() -> None:
    for record in (STARTED, REPORTED):
        with pytest.raises(CkptJobNotResumable, match=f"no longer known.*below {JOB}.*savepoint_path"):
            planned(record, None)


@pytest.mark.parametrize("state", ["FAILED", "CANCELED", None])
def test_a_person_can_start_over_or_name_another_snapshot(state: str | None) -> None:
    over = planned(STARTED | {"given": "file:/sp"}, state, checkpoint(1), given="file:/sp", start_over=True)
    assert (over.step, over.snapshot, over.resumes) == (NextStep.START, "file:/sp", False)
    other = planned(STARTED | {"given": "file:/sp"}, state, checkpoint(1), given="file:/other")
    assert (other.step, other.snapshot, other.resumes) == (NextStep.START, "file:/other", False)


@pytest.mark.parametrize("state", ["FINISHED", "CANCELED"])
def test_a_success_that_is_cleared_is_done_again_when_its_job_ended_as_wanted(state: str) -> None:
    found = planned(REPORTED, state, checkpoint(3))
    assert (found.step, found.snapshot) == (NextStep.START, None)
    assert "cleared" in found.why


def test_cleared_success_whose_job_failed_later_resumes() -> None:
    assert planned(REPORTED, "FAILED", checkpoint(3)).snapshot == "file:/chk-3"
