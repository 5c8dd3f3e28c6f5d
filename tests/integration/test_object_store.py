"""Jobs whose checkpoints, savepoints and high-availability directory lie in an object store, over real HTTP (S3)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ckpt_runtime.client.checkpoint_models import CheckpointConfigPatch
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.models import RunOptions
from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.jobmaster.gateway import JobStatus
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.storage.ha_store import HaStore
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.driver_processes import Sessions
from tests.support.jobs import PIPELINES, SequenceJob, fast
from tests.support.object_store import ObjectStore, keys, object_store
from tests.support.outputs import assert_sequence, visible
from tests.support.spark_sessions import wait_until

ROWS = 20_000
TIMEOUT = {"checkpointTimeout": 88_000}


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as started:
        yield started


@pytest.fixture(scope="module")
def bucket(store: ObjectStore) -> str:
    return store.bucket()


@pytest.fixture(scope="module")
def cluster(bucket: str) -> Iterator[MiniCluster]:
    """With high availability in the store, and so the checkpoints of jobs that name no directory."""
    configuration = {"high-availability.type": "filesystem", "high-availability.storageDir": f"{bucket}/ha"}
    with MiniCluster(rest=True, configuration=configuration) as started:
        yield started


@pytest.fixture(scope="module")
def client(cluster: MiniCluster) -> Iterator[CkptClient]:
    with CkptClient(cluster.rest_url) as connected:
        yield connected


@pytest.fixture
def job(cluster: MiniCluster, tmp_path: Path) -> Iterator[SequenceJob]:
    job = SequenceJob(cluster, tmp_path)
    yield job
    job.end()


def wait_for_clean_up(cluster: MiniCluster, bucket: str, job_id: str) -> None:
    """Of an ended job its result alone is left."""

    def left() -> list[str]:
        return [key for key in keys(bucket) if job_id in key and not key.startswith("ha/default/results/")]

    cluster.wait_until(lambda: left() == [], f"the clean-up of {left()}")


@pytest.mark.row("571.5")
@pytest.mark.slow
def test_a_job_lives_in_an_object_store(
    cluster: MiniCluster, client: CkptClient, bucket: str, job: SequenceJob
) -> None:
    """Patched, checkpointed, killed, restored, stopped with a savepoint, resumed from it, and exact to the row."""
    checkpoints = fast(execution__checkpointing__dir=f"{bucket}/checkpoints", state__storage__fs__memory_threshold="0b")
    job_id = job.start(rows=ROWS, rate=200, configuration=checkpoints)
    job.running()
    client.patch_checkpoint_config(job_id, CheckpointConfigPatch(interval_ms=300, timeout_ms=77_000))
    assert HaStore(f"{bucket}/ha").jobs.get(job_id).checkpoint_overrides is not None
    cluster.wait_for_checkpoints(job_id, 2)
    assert any(key.startswith(f"{job_id}/chk-") for key in keys(f"{bucket}/checkpoints"))
    os.kill(cluster.worker_pids(job_id)[0], signal.SIGKILL)
    job.restarted(1)
    cluster.wait_for_checkpoints(job_id, 1)
    savepoint = cluster.savepoint(job_id, f"{bucket}/savepoints")
    stopped = cluster.savepoint(job_id, f"{bucket}/savepoints", stop=True)
    job.finished()
    wait_for_clean_up(cluster, bucket, job_id)
    assert "_metadata" in keys(savepoint)
    job.start(rows=ROWS, rate=0, savepoint=stopped, configuration=checkpoints)
    job.finished()
    assert_sequence(job.out, rows=ROWS)
    wait_for_clean_up(cluster, bucket, job.job_id)
    assert keys(f"{bucket}/checkpoints") == []
    assert "_metadata" in keys(stopped)


@pytest.mark.slow
def test_data_in_flight_lies_in_an_object_store(cluster: MiniCluster, bucket: str, job: SequenceJob) -> None:
    """Unaligned checkpoints under back-pressure, whose shared files go when nothing needs them any more."""
    configuration = fast(
        execution__checkpointing__dir=f"{bucket}/unaligned",
        execution__checkpointing__unaligned__enabled="true",
        execution__checkpointing__num_retained="2",
        state__storage__fs__memory_threshold="0b",
        taskmanager__network__buffer__max_rows="512",
    )
    job_id = job.start(rate=0, sleep_ms=0.1, configuration=configuration)
    job.running()
    snapshots = f"{bucket}/unaligned/{job_id}"
    cluster.wait_until(lambda: any(key.startswith("shared/chk-") for key in keys(snapshots)), "data in flight")
    cluster.wait_for_checkpoints(job_id, 1)
    os.kill(cluster.worker_pids(job_id)[0], signal.SIGKILL)
    job.restarted(1)
    cluster.wait_for_checkpoints(job_id, 2)
    cluster.savepoint(job_id, f"{bucket}/savepoints", stop=True)
    job.finished()
    wait_for_clean_up(cluster, bucket, job_id)
    assert keys(f"{bucket}/unaligned") == []
    assert assert_sequence(job.out) > 0


@pytest.mark.row("571.5")
@pytest.mark.slow
def test_a_change_whose_outcome_the_store_does_not_tell_is_applied_when_it_does(
    store: ObjectStore, cluster: MiniCluster, client: CkptClient, bucket: str, job: SequenceJob
) -> None:
    job_id = job.start()
    job.running()
    with store.failing(lambda method, path: f"{job_id}/plan/{2:020}" in path, takes_effect=True) as fault:
        answer = httpx.patch(f"{client.url}/jobs/{job_id}/checkpoints/configuration", json=TIMEOUT, timeout=60)
        assert answer.status_code == 503
        assert "it is unknown whether the change is stored" in answer.text
        assert fault.met > 1
    assert HaStore(f"{bucket}/ha").jobs.get(job_id).checkpoint_overrides is not None
    cluster.wait_until(lambda: client.checkpoint_config(job_id).timeout_ms == 88_000, "the change to be applied")
    job.canceled()
    wait_for_clean_up(cluster, bucket, job_id)


@pytest.mark.slow
@pytest.mark.long
def test_a_store_that_fails_for_a_while_costs_checkpoints_and_no_row(
    store: ObjectStore, cluster: MiniCluster, bucket: str, job: SequenceJob
) -> None:
    """Half of the files of checkpoints that cannot be written were written all the same."""
    configuration = fast(
        execution__checkpointing__dir=f"{bucket}/failing",
        execution__checkpointing__tolerable_failed_checkpoints="1000",
        state__storage__fs__memory_threshold="0b",
    )
    job_id = job.start(rows=ROWS, rate=200, configuration=configuration)
    job.running()
    cluster.wait_for_checkpoints(job_id, 1)

    def failed() -> int:
        return cluster.call(cluster.dispatcher.checkpoint_statistics(job_id)).counts.failed

    known = failed()
    with (
        store.failing(lambda method, path: "/failing/" in path and method == "PUT", times=15, takes_effect=True),
        store.failing(lambda method, path: "/failing/" in path and method == "PUT"),
    ):
        cluster.wait_until(lambda: failed() >= known + 2, "failed checkpoints")
    cluster.wait_for_checkpoints(job_id, 2)
    stopped = cluster.savepoint(job_id, f"{bucket}/savepoints", stop=True)
    job.finished()
    wait_for_clean_up(cluster, bucket, job_id)
    job.start(rows=ROWS, rate=0, savepoint=stopped, configuration=configuration)
    job.finished()
    assert_sequence(job.out, rows=ROWS)


def test_a_job_for_a_bucket_that_is_not_there_fails_by_name(cluster: MiniCluster, job: SequenceJob) -> None:
    with pytest.raises(Exception, match="s3://no-such-bucket"):
        job.start(configuration=fast(execution__checkpointing__dir="s3://no-such-bucket/checkpoints"))
        job.running()


@pytest.mark.row("571.5")
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_killed_driver_s_job_goes_on_from_an_object_store(store: ObjectStore, tmp_path: Path) -> None:
    bucket = store.bucket()
    sessions = Sessions(tmp_path, f"{bucket}/ha", lease_timeout_s=6)
    try:
        client = sessions.start()
        arguments = ("--output", str(tmp_path / "out"), "--rate", "1000", "--batch", "64")
        options = RunOptions(entry_point="sequence:pipeline", arguments=arguments, parallelism=2, configuration=fast())
        job_id = client.run_pipeline(client.upload_pipeline(*pack_pipeline(PIPELINES)), options)
        client.wait_for_state(job_id, ["RUNNING"], timeout_s=60)
        client.patch_checkpoint_config(job_id, CheckpointConfigPatch(interval_ms=300, timeout_ms=77_000))
        wait_until(lambda: client.checkpoint_statistics(job_id).counts.completed > 1, "checkpoints")
        sessions.kill()
        assert sessions.store.leader.current() is not None
        client = sessions.start()
        present = sessions.store.leader.current()
        assert present is not None
        assert present.epoch == 2
        client.wait_for_state(job_id, ["RUNNING"], timeout_s=60)
        shown = client.checkpoint_config(job_id)
        assert (shown.interval_ms, shown.timeout_ms) == (300, 77_000)
        assert client.checkpoint_statistics(job_id).counts.restored == 1
        wait_until(lambda: client.checkpoint_statistics(job_id).counts.completed > 0, "a checkpoint of the new driver")
        client.stop_with_savepoint(job_id, f"{bucket}/savepoints")
        client.wait_for_state(job_id, ["FINISHED"], timeout_s=60)
        assert assert_sequence(tmp_path / "out") > 0

        def owned() -> list[str]:
            return [key for key in keys(bucket) if job_id in key and "/results/" not in key]

        wait_until(lambda: owned() == [], "the clean-up")
    finally:
        sessions.end()


@pytest.mark.row("203.4")
@pytest.mark.slow
def test_an_incremental_savepoint_is_copied_within_the_store(
    cluster: MiniCluster, client: CkptClient, store: ObjectStore, bucket: str, tmp_path: Path
) -> None:
    """The job goes on from it elsewhere in the store, without any of the checkpoints that its files came from."""
    out = tmp_path / "out"
    configuration = fast(
        execution__checkpointing__dir=f"{bucket}/incremental",
        execution__checkpointing__incremental="true",
        state__storage__fs__memory_threshold="0b",
        pipeline__max_parallelism="64",
    )

    def start(rate: str, savepoint: str | None = None) -> str:
        return cluster.submit(
            PIPELINES,
            entry="file_backed:pipeline",
            arguments=[str(out), str(ROWS), rate],
            configuration=configuration,
            parallelism=2,
            savepoint=savepoint,
        )

    job_id = start("500")
    cluster.wait_for_checkpoints(job_id, 5)
    first = cluster.savepoint(job_id, f"{bucket}/savepoints", stop=True)
    job_id = start("10", savepoint=first)  # hardly anything changes from here on
    cluster.wait_for_checkpoints(job_id, 2)
    copies = store.requests["COPY", "200"]
    savepoint = cluster.savepoint(job_id, f"{bucket}/savepoints", stop=True)
    taken = client.checkpoint_statistics(job_id).latest_savepoint
    assert taken is not None
    assert taken.incremental
    assert 0 < taken.reused_size <= taken.state_size
    assert store.requests["COPY", "200"] > copies
    cluster.wait_until(lambda: keys(f"{bucket}/incremental") == [], "the end of the checkpoints")
    location = resolve(savepoint)
    for name in keys(savepoint):
        location.filesystem.mv(f"{location.path}/{name}", f"{location.path}-moved/{name}")
    job_id = start("5000", savepoint=f"{savepoint}-moved")
    cluster.wait_for_status(job_id, JobStatus.FINISHED)
    seen = visible(out / "seen")
    assert len(seen) == ROWS
    assert (seen.seen == seen.n % 200 + 1).all(), "keyed state lost or repeated rows"
