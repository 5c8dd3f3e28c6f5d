"""Airflow's own triggerer with very many waits: what a session hears of them, and that each ends for its own event."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.triggerer import Described, Triggerer, triggerer
from ckpt_runtime.client.clients import CkptClient
from tests.support.jobs import SequenceJob, fast
from tests.support.patience import patient
from tests.system.conftest import TOKEN, Session, open_session

pytestmark = [pytest.mark.airflow, pytest.mark.slow, pytest.mark.timeout(600)]

WAIT: dict[str, Any] = {"ckpt_conn_id": "ckpt_default", "deadline": None, "poll_interval": 1.0, "memo": {}}
CHECKPOINTS = 3
STREAM = "GET /events"
MANY = 500


def checkpoint(job: SequenceJob, number: int) -> Described:
    condition = {"type": "CheckpointCondition", "job_id": job.job_id, "goal": {"checkpoint_id": number}}
    return "airflow_provider_ckpt.triggers.wait.CkptTrigger", {**WAIT, "condition": condition}


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """No other client sends requests to it: they are counted."""
    with open_session() as opened:
        yield opened


class Uncounted:
    """The same session, asked in a way that is not counted."""

    def __init__(self, client: CkptClient, job_id: str) -> None:
        self._client = client
        self._job_id = job_id

    def newest(self) -> int:
        return max((item.id for item in self._client.checkpoint_statistics(self._job_id).history), default=0)

    def checkpoint(self) -> None:
        trigger = self._client.trigger_checkpoint(self._job_id)
        self._client.wait_for_operation(
            "checkpoint", trigger, self._job_id, timeout_s=patient(120), poll_interval_s=0.05
        )


def requests_of(session: Session, job: SequenceJob, unseen: Uncounted, airflow: Triggerer, waiting: int) -> int:
    """How many requests so many waits make while checkpoints complete, one of which each of them waits for."""
    run_id, first = f"{waiting}-waits", unseen.newest() + 1
    wanted = [first + index % CHECKPOINTS for index in range(waiting)]
    streams = session.requests[STREAM]
    airflow.defer(run_id, [checkpoint(job, number) for number in wanted])
    airflow.until("all tasks to wait", lambda: airflow.waiting(run_id) == waiting)
    assert airflow.resumed(run_id) == {}
    before = session.requests.total()
    for number in range(first, first + CHECKPOINTS):
        unseen.checkpoint()
        ending = {index for index, of in enumerate(wanted) if of <= number}
        airflow.until("the end of waits", partial(has_resumed, airflow, run_id, ending))
    made = session.requests.total() - before
    events = {index: resumed.event for index, resumed in airflow.resumed(run_id).items()}
    assert {event["status"] for event in events.values()} == {"done"}
    assert [events[index]["result"]["checkpoint_id"] for index in range(waiting)] == wanted
    assert session.requests[STREAM] == streams + 1
    return made


def has_resumed(airflow: Triggerer, run_id: str, expected: set[int]) -> bool:
    """Whether these were resumed, and no others."""
    found = set(airflow.resumed(run_id))
    assert found <= expected
    return found == expected


@pytest.mark.long
@pytest.mark.row("air.11")
def test_the_waits_of_a_triggerer_are_one_stream_and_ask_as_much_as_a_few(
    session: Session, job: SequenceJob, tmp_path: Path
) -> None:
    job.start(rate=100, configuration=fast(execution__checkpointing__interval="1d"))
    job.running()
    with (
        CkptClient(f"http://127.0.0.1:{session.guarded_port}", token=TOKEN) as client,
        triggerer(tmp_path / "airflow", f"http://127.0.0.1:{session.port}", print) as airflow,
    ):
        unseen = Uncounted(client, job.job_id)
        few = requests_of(session, job, unseen, airflow, 4)
        many = requests_of(session, job, unseen, airflow, 200)
    # Two for each look: without sharing them it would be hundreds.
    assert many <= few + 8 * CHECKPOINTS, (few, many)


@pytest.mark.long
@pytest.mark.row("air.3", "air.11")
@pytest.mark.timeout(1200)
def test_500_waits_whose_triggerer_is_killed_all_end_right_and_none_twice(
    session: Session, job: SequenceJob, tmp_path: Path
) -> None:
    """It is killed while it hands over events, and again while it waits; a checkpoint completes while there is none."""
    job.start(rate=100, configuration=fast(execution__checkpointing__interval="1d"))
    job.running()
    run_id, steps = "killed-waits", 5
    with (
        CkptClient(f"http://127.0.0.1:{session.guarded_port}", token=TOKEN) as client,
        triggerer(tmp_path / "airflow", f"http://127.0.0.1:{session.port}", print) as airflow,
    ):
        unseen = Uncounted(client, job.job_id)
        first = unseen.newest() + 1
        wanted = [first + index % steps for index in range(MANY)]
        airflow.count_resumptions()
        airflow.defer(run_id, [checkpoint(job, number) for number in wanted])
        airflow.until("all tasks to wait", lambda: airflow.waiting(run_id) == MANY, patient(300))

        def complete(*numbers: int) -> None:
            for _ in numbers:
                unseen.checkpoint()

        def ended(step: int) -> None:
            ending = {index for index, number in enumerate(wanted) if number < first + step}
            airflow.until(
                f"the end of {len(ending)} waits", partial(has_resumed, airflow, run_id, ending), patient(300)
            )

        complete(1)
        airflow.until("the first event", lambda: bool(airflow.resumed(run_id)), patient(120))
        airflow.kill()
        complete(2)  # of which no triggerer hears
        airflow.start_again()
        ended(2)
        airflow.kill()
        airflow.start_again()
        complete(3)
        ended(3)
        complete(4, 5)
        ended(5)
        events = {index: resumed.event for index, resumed in airflow.resumed(run_id).items()}
        assert {event["status"] for event in events.values()} == {"done"}
        assert airflow.resumptions(run_id) == dict.fromkeys(range(MANY), 1)
    assert all(events[index]["result"]["checkpoint_id"] == wanted[index] for index in range(MANY))
    job.stopped()
