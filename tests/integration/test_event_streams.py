"""Streams of events on running jobs: they say what REST shows, resume where they were cut, and delay no job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.event_stream import START, StreamedEvent
from ckpt_runtime.contract.checkpoints import CheckpointStatistics
from ckpt_runtime.contract.configuration import CheckpointConfigPatch
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import SequenceJob, fast
from tests.support.patience import patient

ENDED = ("checkpoint-completed", "checkpoint-failed", "savepoint-completed", "savepoint-failed")
Events = Iterator[StreamedEvent]


@contextmanager
def stream(client: CkptClient, *jobs: str, after: str | None = None) -> Iterator[Events]:
    """One stream that has begun."""
    with closing(client.follow_events(jobs or None, last_event_id=after)) as events:  # type: ignore[type-var]
        assert next(events).type == START
        yield events


def until(events: Events, kind: str, **expected: object) -> list[StreamedEvent]:
    """What comes, up to an event of that kind. The test's own limit of time ends it."""
    seen: list[StreamedEvent] = []
    for event in events:
        seen.append(event)
        if event.type == kind and all(event.data.get(name) == value for name, value in expected.items()):
            return seen
    raise AssertionError("the stream has ended")


def history(statistics: CheckpointStatistics) -> dict[int, tuple[str, str | None]]:
    return {item.id: (item.status, item.external_path) for item in statistics.history}


@pytest.mark.row("air.11")
def test_event_stream_reports_the_entries_of_the_history(
    client: CkptClient, cluster: MiniCluster, job: SequenceJob
) -> None:
    """From the submission to the stop, with settings that change and a task that fails."""
    with stream(client) as of_all_jobs:
        job.start(rate=500, configuration=fast(execution__checkpointing__interval="1h"))
        events = (event for event in of_all_jobs if event.job_id == job.job_id)
        begun = until(events, "tasks-running")
        statuses = [event.data["status"] for event in begun if event.type == "job-status"]
        assert statuses == ["CREATED", "RUNNING"]
        assert client.job_details(job.job_id).state == "RUNNING"

        trigger = client.trigger_checkpoint(job.job_id)
        seen = until(events, "operation", **{"request-id": trigger})
        assert [event.type for event in seen] == ["checkpoint-triggered", "checkpoint-completed", "operation"]
        assert client.operation_status("checkpoint", trigger, job.job_id).checkpoint_id == seen[-1].data["id"]

        client.patch_checkpoint_config(job.job_id, CheckpointConfigPatch(timeout_ms=700_000))
        (patched,) = until(events, "checkpoint-configuration")
        assert patched.data["overrides"] == {"checkpointTimeout": 700_000}
        (job.faults / "processor-raise").touch()
        failed = until(events, "tasks-running", attempt=begun[-1].data["attempt"] + 1)
        assert [event.data["status"] for event in failed if event.type == "job-status"] == ["RESTARTING", "RUNNING"]
        assert any(event.type == "failure" and event.data["task"] for event in failed)
        (deployed,) = [event for event in failed if event.type == "deployment"]
        assert deployed.data["restored_checkpoint"] == seen[-1].data["id"]

        stop = client.stop_with_savepoint(job.job_id, str(job.directory / "savepoints"))
        ended = until(events, "operation", **{"request-id": stop})
        (savepoint,) = [event.data for event in ended if event.type == "savepoint-completed"]
        assert ended[-1].data["location"] == savepoint["external_path"]
        assert [event.data["status"] for event in ended if event.type == "job-status"] == ["FINISHED"]
        from_events = {
            event.data["id"]: (event.type.rpartition("-")[2].upper(), event.data.get("external_path"))
            for event in (*begun, *seen, *failed, *ended)
            if event.type in ENDED
        }
        assert from_events == history(client.checkpoint_statistics(job.job_id))
        numbers = [int(event.id.rpartition("-")[2]) for event in (*begun, *seen, patched, *failed, *ended)]
        assert numbers == sorted(set(numbers))


@pytest.mark.row("air.11")
def test_a_stream_that_was_cut_continues_where_it_was(
    client: CkptClient, cluster: MiniCluster, job: SequenceJob
) -> None:
    """Nothing twice, nothing lost, over a connection that is cut after every event, beside one that is not."""
    job.start(rate=500, configuration=fast(execution__checkpointing__interval="100ms"))
    job.running()
    with stream(client, job.job_id) as events:
        last = until(events, "checkpoint-completed")[-1].id
        cut: list[str] = []
        for _ in range(6):
            with stream(client, job.job_id, after=last) as again:
                last = next(again).id
                cut.append(last)
        whole = [next(events) for _ in range(6)]
    assert cut == [event.id for event in whole]
    job.canceled()


def test_changes_of_configuration_and_parallelism_are_events(
    client: CkptClient, cluster: MiniCluster, job: SequenceJob
) -> None:
    job.start(rate=500, parallelism=1)
    job.running()
    cluster.wait_for_checkpoints(job.job_id, 1)
    with stream(client, job.job_id) as events:
        client.patch_job_config(job.job_id, {"execution.buffer-timeout.interval": "10 ms"})
        earlier = until(events, "tasks-running")
        (changed,) = [event.data for event in earlier if event.type == "configuration"]
        assert (changed["version"], changed["options"]) == (2, ["execution.buffer-timeout.interval"])
        wanted = dict.fromkeys(client.resource_requirements(job.job_id), 2)
        client.rescale(job.job_id, wanted, timeout_s=patient(60))
        (rescaled,) = [event.data for event in until(events, "tasks-running") if event.type == "rescale"]
        assert rescaled["parallelism"] == wanted == client.resource_requirements(job.job_id)
    job.canceled()
