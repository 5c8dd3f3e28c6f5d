"""Jobs whose checkpoints, savepoints and high-availability directory lie in an object store, over real HTTP (S3)."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from ckpt_runtime.checkpoint.properties import SavepointFormat
from ckpt_runtime.cli.framework import ExitCode
from ckpt_runtime.cli.main import main
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.errors import CkptApiError, is_passing
from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.contract.configuration import CheckpointConfigPatch
from ckpt_runtime.contract.jobs import RunOptions
from ckpt_runtime.jobmaster.gateway_values import SnapshotInUse
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.snapshots.copying import copy_snapshot
from ckpt_runtime.snapshots.snapshot import Snapshot, open_snapshot
from ckpt_runtime.storage import publish
from ckpt_runtime.storage.filesystem import read_bytes, resolve
from ckpt_runtime.storage.ha_store import HaStore
from ckpt_runtime.storage.state_files import locate
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.driver_processes import Sessions
from tests.support.golden import take_checkpoint
from tests.support.jobs import ROCKSDB, UNRIVALLED_S, SequenceJob, fast, program_of
from tests.support.object_store import ObjectStore, keys, object_store
from tests.support.outputs import assert_sequence
from tests.support.patience import patient
from tests.support.spark_sessions import wait_until

ROWS = 20_000
TIMEOUT = {"checkpointTimeout": 88_000}
OUTAGES = [("GET", "outage-savepoints"), ("PUT", "outage-savepoints"), ("PUT", "outage-checkpoints")]


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
    with MiniCluster(rest=True, configuration=configuration, lease_timeout_s=UNRIVALLED_S) as started:
        yield started


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


@pytest.mark.long
def test_upload_in_progress_is_removed_when_its_job_is_cancelled(
    cluster: MiniCluster, store: ObjectStore, bucket: str, job: SequenceJob
) -> None:
    """The store serves the last requests of the workers when everything else of the job has gone."""
    configuration = fast(execution__checkpointing__dir=f"{bucket}/cancelled") | dict(ROCKSDB)
    job_id = job.start(configuration=configuration)
    job.running()
    cluster.wait_for_checkpoints(job_id, 1)
    with store.holding(lambda method, path: method == "PUT" and f"{job_id}/shared/" in path) as held:
        assert held.arrived.wait(patient(60))
        job.canceled()
        wait_for_clean_up(cluster, bucket, job_id)
    cluster.wait_until(lambda: held.served == held.met, "the last requests to be served")
    wait_for_clean_up(cluster, bucket, job_id)


@pytest.mark.row("571.5")
@pytest.mark.slow
def test_a_job_lives_in_an_object_store(
    cluster: MiniCluster, client: CkptClient, bucket: str, job: SequenceJob
) -> None:
    """Patched, checkpointed, killed, restored, stopped with a savepoint, resumed from it, and exact to the row."""
    checkpoints = fast(
        execution__checkpointing__dir=f"{bucket}/checkpoints",
        execution__checkpointing__interval="2 s",
        state__storage__fs__memory_threshold="0b",
    )
    job_id = job.start(rows=ROWS, rate=200, configuration=checkpoints)
    job.running()
    client.patch_checkpoint_config(job_id, CheckpointConfigPatch(interval_ms=700, timeout_ms=77_000))
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


@pytest.mark.long
@pytest.mark.slow
def test_in_flight_data_is_stored_in_an_object_store(cluster: MiniCluster, bucket: str, job: SequenceJob) -> None:
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


@pytest.mark.long
@pytest.mark.row("571.5")
@pytest.mark.slow
def test_change_of_unknown_outcome_is_applied_when_the_store_confirms_it(
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
        return cluster.of_job(job_id, lambda job: job.checkpoint_statistics()).counts.failed

    known = failed()
    with (
        store.failing(lambda method, path: "/failing/" in path and method == "PUT", times=15, takes_effect=True),
        store.failing(lambda method, path: "/failing/" in path and method == "PUT"),
    ):
        cluster.wait_until(lambda: failed() >= known + 2, "failed checkpoints")
    with (
        store.failing(lambda method, path: "/failing/" in path and method == "PUT", status=403, code="AccessDenied"),
        pytest.raises(AssertionError, match=f"{bucket}/failing/savepoints/.*AccessDenied"),
    ):
        cluster.savepoint(job_id, f"{bucket}/failing/savepoints")
    assert keys(f"{bucket}/failing/savepoints") == []
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
@pytest.mark.timeout(600)
def test_the_job_of_a_killed_driver_continues_from_an_object_store(store: ObjectStore, tmp_path: Path) -> None:
    bucket = store.bucket()
    sessions = Sessions(tmp_path, f"{bucket}/ha", lease_timeout_s=6)
    try:
        client = sessions.start()
        arguments = ("--output", str(tmp_path / "out"), "--rate", "1000", "--batch", "64")
        options = RunOptions(entry_point="sequence:pipeline", arguments=arguments, parallelism=2, configuration=fast())
        job_id = client.run_pipeline(client.upload_pipeline(*pack_pipeline(program_of("sequence"))), options)
        client.wait_for_state(job_id, ["RUNNING"], timeout_s=patient(180))
        client.patch_checkpoint_config(job_id, CheckpointConfigPatch(interval_ms=300, timeout_ms=77_000))
        wait_until(lambda: client.checkpoint_statistics(job_id).counts.completed > 1, "checkpoints")
        sessions.kill()
        assert sessions.store.leader.current() is not None
        client = sessions.start()
        present = sessions.store.leader.current()
        assert present is not None
        assert present.epoch == 2
        client.wait_for_state(job_id, ["RUNNING"], timeout_s=patient(180))
        shown = client.checkpoint_config(job_id)
        assert (shown.interval_ms, shown.timeout_ms) == (300, 77_000)
        assert client.checkpoint_statistics(job_id).counts.restored == 1
        wait_until(lambda: client.checkpoint_statistics(job_id).counts.completed > 0, "a checkpoint of the new driver")
        client.stop_with_savepoint(job_id, f"{bucket}/savepoints")
        client.wait_for_state(job_id, ["FINISHED"], timeout_s=patient(180))
        assert assert_sequence(tmp_path / "out") > 0

        def owned() -> list[str]:
            return [key for key in keys(bucket) if job_id in key and "/results/" not in key]

        wait_until(lambda: owned() == [], "the clean-up")
    finally:
        sessions.end()


@dataclass(frozen=True)
class Stopped:
    """A job on RocksDB, stopped with a native savepoint; ``asked`` is what the store was asked for meanwhile."""

    job: SequenceJob
    checkpoint: Snapshot
    savepoint: Snapshot
    asked: list[tuple[str, str, str]]


@pytest.fixture(scope="module")
def stopped(
    cluster: MiniCluster, store: ObjectStore, bucket: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stopped]:
    job = SequenceJob(cluster, tmp_path_factory.mktemp("rocksdb"))
    try:
        job_id = job.start(rows=ROWS, rate=200, configuration=rocksdb(f"{bucket}/rocksdb"))
        job.running()
        job.has_rows()
        for _ in range(2):
            taken = take_checkpoint(cluster, job_id)
        checkpoint = open_snapshot(taken)
        before = len(store.log)
        savepoint = cluster.savepoint(job_id, f"{bucket}/savepoints", stop=True)
        asked = store.log[before:]
        job.finished()
        wait_for_clean_up(cluster, bucket, job_id)
        yield Stopped(job, checkpoint, open_snapshot(savepoint), asked)
    finally:
        job.end()


def rocksdb(directory: str, **changes: str) -> dict[str, str]:
    """Checkpoints when they are asked for."""
    own = fast(
        execution__checkpointing__dir=directory,
        execution__checkpointing__interval="1h",
        execution__checkpointing__tolerable_failed_checkpoints="1000",
        pipeline__max_parallelism="64",
        **changes,
    )
    return {**own, **ROCKSDB}


def files_of(snapshot: Snapshot) -> dict[str, str]:
    """Path in the server by file, of all files of a snapshot, each with its checksum."""
    files = [file for state in snapshot.metadata.states.values() for file in state.files()]
    return {f"/{locate(snapshot.directory, file.path).path}": file.checksum for file in files}


@pytest.mark.long
def test_a_restart_on_the_same_workers_fetches_no_table(
    cluster: MiniCluster, store: ObjectStore, bucket: str, job: SequenceJob
) -> None:
    job.start(rate=200, configuration=rocksdb(f"{bucket}/local", execution__state_recovery__from_local="true"))
    job.running()
    job.has_rows()
    for _ in range(2):
        take_checkpoint(cluster, job.job_id)
    tables = [key for key in keys(f"{bucket}/local/{job.job_id}") if "shared/" in key]
    assert tables
    before = len(store.log)
    job.inject("map-raise")
    job.restarted(1)
    fetched = [path for method, path, _ in store.log[before:] if method == "GET" and f"/{job.job_id}/" in path]
    assert fetched, "the manifests are the checkpoint's"
    assert not [path for path in fetched if "/shared/" in path]
    job.stopped()


@pytest.mark.long
@pytest.mark.row("203.2")
@pytest.mark.row("203.3")
@pytest.mark.slow
def test_an_incremental_savepoint_is_copied_within_the_store(client: CkptClient, stopped: Stopped) -> None:
    """No byte of the files that checkpoints have passes through a worker or the driver."""
    shared = files_of(stopped.checkpoint)
    earlier = [name for path in shared if (name := path.rpartition("/")[2]).startswith("chk-1-")]
    assert earlier, "the checkpoint refers to files of the one before it"
    copied = {target: source for method, target, source in stopped.asked if method == "COPY"}
    own = files_of(stopped.savepoint)
    assert copied
    assert copied.keys() < own.keys()
    assert {target: own[target] for target in copied} == {
        target: shared[f"/{source.lstrip('/')}"] for target, source in copied.items()
    }
    touched = {path for method, path, _ in stopped.asked if method in ("GET", "PUT")}
    assert not touched & copied.keys()
    assert not touched & {f"/{source.lstrip('/')}" for source in copied.values()}
    taken = client.checkpoint_statistics(stopped.job.job_id).latest_savepoint
    assert taken is not None
    assert taken.incremental
    assert 0 < taken.reused_size <= taken.state_size


@pytest.mark.row("203.10")
@pytest.mark.slow
@pytest.mark.long
def test_the_tools_work_in_an_object_store(
    cluster: MiniCluster, client: CkptClient, bucket: str, stopped: Stopped, capsys: pytest.CaptureFixture[str]
) -> None:
    savepoint, copy, canonical = stopped.savepoint.directory.url, f"{bucket}/tools/copy", f"{bucket}/tools/canonical"

    def run(*command: str) -> Any:
        capsys.readouterr()
        assert main(["snapshot", *command]) == 0
        return json.loads(capsys.readouterr().out) if "--json" in command else None

    assert run("show", savepoint, "--json")["state_backend"] == "rocksdb"
    run("copy", savepoint, copy)
    run("convert", savepoint, canonical, "--format", "canonical")
    listed = run("list", f"{bucket}/tools", "--json")
    assert {entry["location"]: entry["format"] for entry in listed} == {copy: "NATIVE", canonical: "CANONICAL"}
    for url in (savepoint, copy, canonical):
        run("verify", url)
    lost = next(iter(files_of(open_snapshot(copy))))
    location = resolve(f"s3:/{lost}")
    whole = read_bytes(location, 1 << 20)
    publish.replace(location, bytes([*whole[:-1], whole[-1] ^ 1]))
    assert main(["snapshot", "verify", copy]) == ExitCode.FAILED
    assert location.name in capsys.readouterr().out
    for url in (copy, canonical):
        client.wait_for_operation("savepoint-disposal", client.dispose_savepoint(url), timeout_s=patient(180))
    assert keys(f"{bucket}/tools") == []
    assert keys(savepoint)


@pytest.mark.long
@pytest.mark.row("203.5")
@pytest.mark.row("203.6")
@pytest.mark.slow
def test_a_claimed_savepoint_in_an_object_store(
    cluster: MiniCluster, store: ObjectStore, bucket: str, stopped: Stopped
) -> None:
    """One job claims it, restores it file by file, and in the end deletes it; its state continues in memory."""
    place = f"{bucket}/claimed"
    copy_snapshot(stopped.savepoint.directory, resolve(place))
    files = files_of(open_snapshot(place))
    claiming = rocksdb(f"{bucket}/heir", execution__state_recovery__claim_mode="CLAIM")
    job = stopped.job
    before = len(store.log)
    job_id = job.start(rows=ROWS, rate=200, savepoint=place, configuration=claiming)
    assert "claim" in keys(place)
    rival = SequenceJob(cluster, job.directory / "rival")
    with pytest.raises(SnapshotInUse, match=job_id):
        rival.start(savepoint=place, configuration=claiming, fork=True)
    job.running()
    assert {path for method, path, _ in store.log[before:] if method == "GET"} >= files.keys()
    # It stands upon files of the savepoint, unless RocksDB has already merged all of them with newer ones.
    inherited = files_of(open_snapshot(take_checkpoint(cluster, job_id))).keys() & files.keys()
    before = len(store.log)
    os.kill(cluster.worker_pids(job_id)[0], signal.SIGKILL)
    job.restarted(1)
    assert {path for method, path, _ in store.log[before:] if method == "GET"} >= inherited
    take_checkpoint(cluster, job_id)
    cluster.wait_until(lambda: "_metadata" not in keys(place), "the end of the savepoint as one")
    canonical = cluster.savepoint(job_id, f"{bucket}/savepoints", stop=True, savepoint_format=SavepointFormat.CANONICAL)
    job.finished()
    cluster.wait_until(lambda: keys(place) == [], "the last of its files, and the claim, to go")
    wait_for_clean_up(cluster, bucket, job_id)
    in_memory = fast(execution__checkpointing__dir=f"{bucket}/memory", state__backend__type="hashmap")
    job.start(rows=ROWS, rate=0, parallelism=3, savepoint=canonical, configuration=in_memory)
    job.finished()
    assert_sequence(job.out, rows=ROWS)


@pytest.mark.long
@pytest.mark.row("203.2")
@pytest.mark.slow
def test_checkpoint_that_cannot_be_stored_fails_by_name_and_leaves_no_files(
    store: ObjectStore, cluster: MiniCluster, client: CkptClient, bucket: str, job: SequenceJob
) -> None:
    """The first files are written although their writer gets no answer."""
    place = f"{bucket}/failing"
    job_id = job.start(configuration=rocksdb(f"{place}/checkpoints"))
    job.running()
    first = open_snapshot(take_checkpoint(cluster, job_id))

    def puts(method: str, path: str) -> bool:
        return method == "PUT" and "/failing/" in path

    with store.failing(puts, times=3, takes_effect=True), store.failing(puts):
        assert take_checkpoint(cluster, job_id) == first.directory.url, "it is still the latest one"
        with pytest.raises(AssertionError, match="as the test wants it"):
            cluster.savepoint(job_id, f"{place}/savepoints")
    assert cluster.status(job_id) is JobStatus.RUNNING
    assert cluster.restarts(job_id) == 0
    statistics = client.checkpoint_statistics(job_id)
    assert statistics.counts.failed == 2, "the checkpoint and the savepoint"
    assert statistics.latest_failed is not None
    assert "as the test wants it" in (statistics.latest_failed.failure_message or "")
    # Of several subtasks the first failure is reported; the others give up their own.
    cluster.wait_until(lambda: keys(f"{place}/savepoints") == [], "all files of the savepoint to go")
    second = open_snapshot(take_checkpoint(cluster, job_id))
    assert files_of(second).keys() & files_of(first).keys(), "a failed checkpoint does not end the row of increments"
    assert second.verify() == []
    cluster.savepoint(job_id, f"{place}/savepoints", stop=True)
    job.finished()
    wait_for_clean_up(cluster, bucket, job_id)
    assert keys(f"{place}/checkpoints") == []
    assert_sequence(job.out)


@pytest.mark.long
def test_a_submission_that_storage_fails_may_be_made_again(
    store: ObjectStore, cluster: MiniCluster, client: CkptClient, bucket: str, job: SequenceJob
) -> None:
    """503 says that storage is to blame, whatever needed it; a place that does not exist is the user's error."""
    job.start(rows=ROWS, rate=2_000)
    job.running()
    stopped = cluster.savepoint(job.job_id, f"{bucket}/outage-savepoints", stop=True)
    job.finished()
    program = client.upload_pipeline(*pack_pipeline(program_of("sequence")))
    options = RunOptions(
        entry_point="sequence:pipeline",
        arguments=("--output", str(job.out), "--rows", str(ROWS), "--rate", "0", "--batch", "64"),
        parallelism=2,
        configuration=fast(execution__checkpointing__dir=f"{bucket}/outage-checkpoints"),
        savepoint_path=stopped,
        claim_mode="CLAIM",
    )
    job.job_id = "f0" * 16
    for method, place in OUTAGES:
        with (
            store.failing(lambda asked, path, method=method, place=place: asked == method and place in path) as fault,  # type: ignore[misc]
            pytest.raises(CkptApiError, match=place) as failed,
        ):
            client.run_pipeline(program, options, job_id=job.job_id)
        assert fault.met
        assert failed.value.status == 503
        assert is_passing(failed.value)
    with pytest.raises(CkptApiError, match="-missing") as refused:
        client.run_pipeline(program, replace(options, savepoint_path=f"{stopped}-missing"), job_id=job.job_id)
    assert refused.value.status == 400
    assert client.run_pipeline(program, options, job_id=job.job_id) == job.job_id
    job.finished()
    assert_sequence(job.out, rows=ROWS)
