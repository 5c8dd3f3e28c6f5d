"""The REST API on jobs that run: changes hold at once, operations are started once, bad requests do no harm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import httpx
import pytest

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.contract.checkpoints import Checkpoint
from ckpt_runtime.contract.configuration import CheckpointConfigPatch
from ckpt_runtime.contract.jobs import RunOptions
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import SequenceJob, fast, program_of
from tests.support.outputs import assert_sequence
from tests.support.patience import patient

UNKNOWN_JOB = "0" * 32


@pytest.fixture(scope="module")
def live(cluster: MiniCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SequenceJob]:
    """One job for all tests of this module that leave it running; checkpoints once an hour."""
    job = SequenceJob(cluster, tmp_path_factory.mktemp("live"))
    job.start(parallelism=1, configuration=fast(execution__checkpointing__interval="1h"))
    job.running()
    yield job
    cluster.savepoint(job.job_id, job.directory / "savepoints", stop=True)
    assert_sequence(job.out)


def _completed(client: CkptClient, job_id: str) -> int:
    return client.checkpoint_statistics(job_id).counts.completed


@pytest.mark.row("571.1")
@pytest.mark.row("571.2")
@pytest.mark.row("571.4")
def test_a_patched_interval_holds_at_once(client: CkptClient, live: SequenceJob) -> None:
    before = _completed(client, live.job_id)
    shown = client.patch_checkpoint_config(live.job_id, CheckpointConfigPatch(interval_ms=100))
    assert shown.interval_ms == 100
    assert client.checkpoint_config(live.job_id) == shown
    live.cluster.wait_until(lambda: _completed(client, live.job_id) >= before + 3, "three checkpoints")
    client.patch_checkpoint_config(live.job_id, CheckpointConfigPatch(interval_ms=3_600_000))
    live.cluster.wait_until(
        lambda: client.checkpoint_statistics(live.job_id).counts.in_progress == 0, "the last checkpoint"
    )
    after = _completed(client, live.job_id)
    assert client.reset_checkpoint_config(live.job_id).overrides == ()
    assert _completed(client, live.job_id) == after


def test_a_job_whose_sink_commits_with_checkpoints_is_warned_of_until_it_takes_checkpoints(
    client: CkptClient, cluster: MiniCluster, job: SequenceJob
) -> None:
    program = client.upload_pipeline(*pack_pipeline(program_of("sequence")))
    arguments = ("--output", str(job.out), "--rate", "100", "--faults", str(job.faults))
    without = fast(execution__checkpointing__interval=None)
    options = RunOptions("sequence:pipeline", arguments, 1, without)
    assert client.plan_pipeline(program, replace(options, configuration=fast())).warnings == ()
    (warning,) = client.plan_pipeline(program, options).warnings
    assert "no execution.checkpointing.interval is set" in warning
    document = {"entryClass": "sequence:pipeline", "programArgsList": list(arguments), "parallelism": 1}
    answer = httpx.post(
        f"{cluster.rest_url}/jars/{program}/run", json=document | {"flinkConfiguration": without}, timeout=60
    )
    assert answer.json()["warnings"] == [warning]
    job.job_id = answer.json()["jobid"]
    job.running()
    assert client.job_details(job.job_id).warnings == (warning,)
    assert client.job_health(job.job_id).reasons == (warning,)
    client.patch_checkpoint_config(job.job_id, CheckpointConfigPatch(interval_ms=100))
    assert client.job_details(job.job_id).warnings == ()
    cluster.wait_for_checkpoints(job.job_id, 1)
    assert client.job_health(job.job_id).verdict == "HEALTHY"
    job.canceled()


@pytest.mark.long
def test_a_job_whose_user_code_is_held_up_shows_full_back_pressure_and_is_unhealthy_until_it_moves_again(
    client: CkptClient, cluster: MiniCluster, job: SequenceJob
) -> None:
    job.start(
        rate=0, parallelism=1, configuration={"execution.health.stall-timeout": "2s", "task.cancellation.timeout": "1s"}
    )
    job.running()
    job.hold("processor")
    job.stands_still(lambda: client.job_health(job.job_id).verdict == "UNHEALTHY", "a verdict on a job at a halt")
    source, held = _rates(cluster, job)
    assert source["backPressuredTimeMsPerSecond"] == pytest.approx(1_000, abs=50)
    assert held["busyTimeMsPerSecond"] == pytest.approx(1_000, abs=50)
    health = client.job_health(job.job_id)
    [reason] = [reason for reason in health.reasons if "no row" in reason]
    stuck = client.job_details(job.job_id).vertices[1].name
    assert reason.startswith(f"no row of the job has moved although work waits: {stuck} (1/1) for ")
    assert health.backpressure.ratio == pytest.approx(1, abs=0.02)
    _stuck_code_is_shown(client, cluster, job)
    job.release("processor")
    cluster.wait_until(lambda: client.job_health(job.job_id).verdict != "UNHEALTHY", "rows to move again")
    job.canceled()


def _stuck_code_is_shown(client: CkptClient, cluster: MiniCluster, job: SequenceJob) -> None:
    """A thread dump of its worker and a flame graph name the function that user code is in; the log can be read."""
    details = cluster.call(cluster.dispatcher.job_details(job.job_id))
    [agent] = {subtask.slot_agent_id for vertex in details.vertices for subtask in vertex.subtasks}
    dumped = "".join(info.text for info in client.thread_dump(agent))
    assert "sequence.SeenCounter.handleInputRows(sequence.py:" in dumped
    assert "sequence.SeenCounter.handleInputRows" not in "".join(info.text for info in client.thread_dump())
    assert " INFO " in client.recent_log(agent)
    url = f"{cluster.rest_url}/jobs/{job.job_id}/vertices/{_stuck(client, job)}/flamegraph"
    node, path = httpx.get(url, timeout=60).json()["data"], []
    assert node["value"] > 0
    while node["children"]:
        node = node["children"][0]
        path.append(node["name"].partition("(")[0])
    assert any(name.endswith("sequence.SeenCounter.handleInputRows") for name in path)
    assert "injected.act" in path


def _stuck(client: CkptClient, job: SequenceJob) -> str:
    return client.job_details(job.job_id).vertices[1].id


def _rates(cluster: MiniCluster, job: SequenceJob) -> list[Mapping[str, float]]:
    """The metrics of the first subtask of the first two vertices."""
    details = cluster.call(cluster.dispatcher.job_details(job.job_id))
    dispatcher = cluster.dispatcher
    return [cluster.call(dispatcher.vertex_metrics(job.job_id, vertex.vertex_id))[0] for vertex in details.vertices[:2]]


@pytest.mark.row("571.9")
def test_the_rescue_policy_saves_a_pending_checkpoint_by_itself(
    client: CkptClient, cluster: MiniCluster, job: SequenceJob
) -> None:
    job.start(
        rate=0,
        batch=64,
        configuration=fast(
            execution__checkpointing__interval="1h",
            execution__checkpointing__timeout="5s",
            execution__checkpointing__rescue__enabled="true",
            **{"execution__checkpointing__rescue__min-progress": "1"},
            execution__checkpointing__rescue__extension="5 min",
        ),
    )
    job.running()
    job.hold("processor")
    trigger = client.trigger_checkpoint(job.job_id)
    extension = 300_000

    def extended() -> bool:
        pending = _pending(client, job.job_id)
        return pending is not None and pending.timeout_extension_ms > 0

    cluster.wait_until(extended, "the checkpoint to get more time")
    pending = _pending(client, job.job_id)
    assert pending is not None
    assert pending.deadline_ms == pending.triggered_at_ms + 5_000 + pending.timeout_extension_ms
    assert pending.timeout_extension_ms >= extension
    job.release("processor")
    done = client.wait_for_operation("checkpoint", trigger, job.job_id, timeout_s=patient(180))
    statistics = client.checkpoint_statistics(job.job_id)
    assert statistics.counts.failed == 0
    (completed,) = [found for found in statistics.history if found.id == done.checkpoint_id]
    assert (completed.status, completed.timeout_extension_ms) == ("COMPLETED", pending.timeout_extension_ms)
    job.canceled()


@pytest.mark.row("571.3")
def test_a_patched_timeout_ends_a_pending_checkpoint(
    client: CkptClient, cluster: MiniCluster, job: SequenceJob
) -> None:
    """A barrier is held up; shortened, its checkpoint ends at once, and a savepoint can still be taken."""
    job.start(
        rate=0,
        batch=64,
        configuration=fast(
            execution__checkpointing__interval="1h", execution__checkpointing__tolerable_failed_checkpoints="1000"
        ),
    )
    job.running()
    (job.faults / "processor-slow").touch()
    cluster.wait_until(lambda: _back_pressured(client, job.job_id), "back-pressure")
    job.hold("processor")
    client.patch_checkpoint_config(job.job_id, CheckpointConfigPatch(timeout_ms=600_000))
    trigger = client.trigger_checkpoint(job.job_id)
    cluster.wait_until(lambda: client.checkpoint_statistics(job.job_id).counts.in_progress == 1, "a checkpoint")
    client.patch_checkpoint_config(job.job_id, CheckpointConfigPatch(timeout_ms=10))
    cluster.wait_until(lambda: client.checkpoint_statistics(job.job_id).counts.in_progress == 0, "its end", 120)
    failed = client.checkpoint_statistics(job.job_id).latest_failed
    assert failed is not None
    assert "expired" in (failed.failure_message or "")
    assert client.operation_status("checkpoint", trigger, job.job_id).failure is not None
    client.patch_checkpoint_config(job.job_id, CheckpointConfigPatch(timeout_ms=600_000))
    savepoint = client.trigger_savepoint(job.job_id, str(job.directory / "savepoints"))
    (job.faults / "processor-slow").unlink()
    job.release("processor")
    done = client.wait_for_operation("savepoint", savepoint, job.job_id, timeout_s=patient(180))
    assert done.location is not None
    job.canceled()


def _pending(client: CkptClient, job_id: str) -> Checkpoint | None:
    """The newest checkpoint while it is in progress."""
    history = client.checkpoint_statistics(job_id).history
    return history[0] if history and history[0].status == "IN_PROGRESS" else None


def _back_pressured(client: CkptClient, job_id: str) -> bool:
    source = next(vertex for vertex in client.job_details(job_id).vertices if "numbers" in vertex.name)
    pressure = client.vertex_backpressure(job_id, source.id)
    return any(subtask.backpressured > 0.5 for subtask in pressure.subtasks)


@pytest.mark.row("air.3")
def test_a_trigger_id_starts_one_savepoint_only(client: CkptClient, live: SequenceJob) -> None:
    directory = live.directory / "once"
    trigger = "a" * 32
    ids = {client.trigger_savepoint(live.job_id, str(directory), trigger_id=trigger) for _ in range(3)}
    assert ids == {trigger}
    done = client.wait_for_operation("savepoint", trigger, live.job_id, timeout_s=patient(180))
    assert client.trigger_savepoint(live.job_id, str(directory), trigger_id=trigger) == trigger
    assert [f"file://{path}" for path in directory.iterdir()] == [done.location]
    disposal = client.dispose_savepoint(str(done.location))
    client.wait_for_operation("savepoint-disposal", disposal, timeout_s=patient(180))
    assert list(directory.iterdir()) == []


@pytest.mark.row("air.3")
def test_a_job_id_starts_one_job_only(client: CkptClient, job: SequenceJob) -> None:
    pipeline = client.upload_pipeline(*pack_pipeline(program_of("sequence")))
    arguments = ("--output", str(job.out), "--rows", "1000", "--faults", str(job.faults))
    options = RunOptions(entry_point="sequence:pipeline", arguments=arguments, parallelism=1)
    ids = {client.run_pipeline(pipeline, options, job_id="b" * 32) for _ in range(2)}
    assert ids == {"b" * 32}
    client.wait_for_state("b" * 32, ["FINISHED"], timeout_s=patient(180))
    assert_sequence(job.out, 1000)


BAD = [
    ("PATCH", "/jobs/{job}/checkpoints/configuration", {"checkpointInterval": 0}, 400),
    ("PATCH", "/jobs/{job}/checkpoints/configuration", {"checkpointInterval": "10"}, 400),
    ("PATCH", "/jobs/{job}/checkpoints/configuration", {"checkpointTimeout": -1}, 400),
    ("PATCH", "/jobs/{job}/checkpoints/configuration", {"checkpointInterval": 1.5}, 400),
    ("PATCH", "/jobs/{job}/checkpoints/configuration", {"interval": 10}, 400),
    ("PATCH", "/jobs/{job}/checkpoints/configuration", {}, 400),
    ("PATCH", "/jobs/{job}/checkpoints/configuration", b"{", 400),
    ("PATCH", "/jobs/nonsense/checkpoints/configuration", {"checkpointInterval": 1000}, 400),
    ("PATCH", f"/jobs/{UNKNOWN_JOB}/checkpoints/configuration", {"checkpointInterval": 1000}, 404),
    ("POST", "/jobs/{job}/savepoints", {"target-directory": "/tmp/x", "formatType": "UNKNOWN"}, 400),
    ("POST", "/jobs/{job}/savepoints", {"target-directory": "relative/place"}, 400),
    ("POST", "/jobs/{job}/stop", {"drain": "perhaps"}, 400),
    ("GET", "/jobs/{job}/savepoints/" + "c" * 32, None, 404),
    ("GET", "/jobs/{job}/vertices/" + "d" * 32, None, 404),
    ("GET", "/jobs/{job}/checkpoints/details/99999", None, 404),
]


@pytest.mark.row("571.1")
def test_bad_requests_change_nothing(client: CkptClient, live: SequenceJob) -> None:
    before = client.checkpoint_config(live.job_id)
    for method, path, body, status in BAD:
        url = client.url + path.replace("{job}", live.job_id)
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        answer = httpx.request(method, url, headers={"Content-Type": "application/json"}, **content, timeout=60)
        assert answer.status_code == status, (method, path, body, answer.text)
        assert answer.json()["errors"], path
    assert client.checkpoint_config(live.job_id) == before
    assert client.job_status(live.job_id) == "RUNNING"
    live.cluster.wait_until(lambda: client.checkpoint_statistics(live.job_id).counts.in_progress == 0, "no checkpoint")


@pytest.mark.row("571.1")
def test_a_job_that_has_ended_takes_no_changes(client: CkptClient, job: SequenceJob) -> None:
    job.start(parallelism=1)
    job.running()
    job.canceled()
    url = f"{client.url}/jobs/{job.job_id}"
    patch = httpx.patch(f"{url}/checkpoints/configuration", json={"checkpointInterval": 1000}, timeout=60)
    stop = httpx.post(f"{url}/stop", json={"drain": False, "targetDirectory": str(job.directory)}, timeout=60)
    assert (patch.status_code, stop.status_code) == (409, 409)


def test_bytes_written_by_a_subtask_are_measured(client: CkptClient, live: SequenceJob) -> None:
    def measured() -> bool:
        vertices = httpx.get(f"{live.cluster.rest_url}/jobs/{live.job_id}", timeout=60).json()["vertices"]
        source = next(vertex for vertex in vertices if "numbers" in vertex["name"])
        return bool(source["metrics"]["write-bytes-complete"]) and source["metrics"]["write-bytes"] > 0

    live.cluster.wait_until(measured, "a heartbeat")
