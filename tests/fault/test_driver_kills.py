"""The driver is killed; a new one with the same high-availability directory takes over. Output is exact to the row."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ckpt_runtime.client import requests
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.errors import CkptApiError, Unreachable
from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.contract.configuration import CheckpointConfigPatch
from ckpt_runtime.contract.jobs import RunOptions
from ckpt_runtime.spark.launch import start_session, stop_session
from tests.support.driver_processes import Sessions, high_availability
from tests.support.flights import assert_carriers, assert_rotations, read_flights, write_slice
from tests.support.jobs import fast, program_of
from tests.support.outputs import assert_sequence, hidden, visible
from tests.support.patience import patient
from tests.support.processes import children, command_line, living
from tests.support.spark_sessions import FlightsJob, wait_until


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[Sessions]:
    started = Sessions(tmp_path)
    yield started
    started.end()


def submit(client: CkptClient, directory: Path) -> str:
    """A job that runs until it is stopped, however long its drivers take to die and to come back."""
    arguments = ("--output", str(directory / "out"), "--rows", "0", "--rate", "2000", "--batch", "64")
    arguments += ("--faults", str(directory))
    options = RunOptions(
        entry_point="sequence:pipeline",
        arguments=arguments,
        parallelism=2,
        configuration=fast(execution__checkpointing__num_retained="2"),
    )
    job_id = client.run_pipeline(client.upload_pipeline(*pack_pipeline(program_of("sequence"))), options)
    client.wait_for_state(job_id, ["RUNNING"], timeout_s=patient(180))
    return job_id


def wait_for_checkpoints(client: CkptClient, job_id: str) -> None:
    """Two more than now."""
    known = client.checkpoint_statistics(job_id).counts.completed
    wait_until(lambda: client.checkpoint_statistics(job_id).counts.completed > known + 1, "checkpoints")


def stop(client: CkptClient, job_id: str, directory: Path) -> None:
    """With a savepoint, and after rows that came since the last restart; what has come out is exact then."""
    wait_for_checkpoints(client, job_id)
    trigger = client.stop_with_savepoint(job_id, str(directory / "end"))
    client.wait_for_operation("savepoint", trigger, job_id, timeout_s=patient(180))
    client.wait_for_state(job_id, ["FINISHED"], timeout_s=patient(180))
    wait_until(lambda: hidden(directory / "out") == [], "the clean-up of the sinks")
    assert assert_sequence(directory / "out") > 0


@pytest.mark.slow
@pytest.mark.row("571.5")
@pytest.mark.timeout(600)
def test_killed_drivers_lose_no_job_no_patch_and_no_row(sessions: Sessions, tmp_path: Path) -> None:
    client = sessions.start()
    job_id = submit(client, tmp_path)
    client.patch_checkpoint_config(job_id, CheckpointConfigPatch(interval_ms=300, timeout_ms=77_000))
    for _ in range(2):
        wait_for_checkpoints(client, job_id)
        sessions.kill()
        client = sessions.start()
        client.wait_for_state(job_id, ["RUNNING"], timeout_s=patient(180))
        shown = client.checkpoint_config(job_id)
        assert (shown.interval_ms, shown.timeout_ms) == (300, 77_000)
        assert client.checkpoint_statistics(job_id).counts.restored == 1
    stop(client, job_id, tmp_path)
    snapshots = tmp_path / "ha" / "default" / "snapshots"
    wait_until(lambda: not (snapshots / job_id).exists(), "the clean-up")
    sessions.kill()
    client = sessions.start()
    assert [job.state for job in client.list_jobs()] == ["FINISHED"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.row("571.7")
@pytest.mark.timeout(600)
def test_a_cancelled_job_stays_cancelled(sessions: Sessions, tmp_path: Path) -> None:
    client = sessions.start()
    job_id = submit(client, tmp_path)
    client.cancel_job(job_id)
    client.wait_for_state(job_id, ["CANCELED"], timeout_s=patient(180))
    sessions.kill()
    client = sessions.start()
    assert client.job_status(job_id) == "CANCELED"


def has_savepoint(pointers: str) -> bool:
    """Whether the pointers include a savepoint. A key such as ``"savepoint-3"`` is that of an incomplete one."""
    return "savepoint-" in pointers and re.search(r'"savepoint-\d+"', pointers) is None


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_driver_killed_between_a_stop_s_savepoint_and_the_end_commits_nothing_twice(
    sessions: Sessions, tmp_path: Path
) -> None:
    """The tasks have heard of the savepoint and cannot end; the next driver restores it, and nothing older."""
    client = sessions.start()
    job_id = submit(client, tmp_path)
    wait_for_checkpoints(client, job_id)
    held = tmp_path / "close-held"
    held.touch()
    client.stop_with_savepoint(job_id, str(tmp_path / "savepoints"))
    pointers = tmp_path / "ha" / "default" / "jobs" / job_id / "checkpoints"
    wait_until(lambda: any(has_savepoint(text) for text in contents(pointers)), "the savepoint's pointer")
    sessions.kill()
    held.unlink()
    client = sessions.start()
    client.wait_for_state(job_id, ["RUNNING"], timeout_s=patient(180))
    restored = client.checkpoint_statistics(job_id).latest_restored
    assert restored is not None
    assert restored.is_savepoint
    (savepoint,) = (tmp_path / "savepoints").iterdir()
    assert restored.external_path == savepoint.as_uri()
    stop(client, job_id, tmp_path)
    assert (savepoint / "_metadata").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_driver_that_is_frozen_beyond_its_lease_changes_nothing_when_it_wakes(
    sessions: Sessions, tmp_path: Path
) -> None:
    """Its standby leads by then. Its tasks went on for a while, and nothing of theirs was committed."""
    sessions.lease_timeout_s = 20.0  # which the standby waits for
    client = sessions.start()
    job_id = submit(client, tmp_path)
    wait_for_checkpoints(client, job_id)
    frozen, frozen_log = sessions.processes[-1], tmp_path / f"session-{sessions.number}.log"
    ready = sessions.launch()
    log = tmp_path / f"session-{sessions.number}.log"
    wait_until(lambda: "waiting for the leadership" in log.read_text(), "the standby")
    frozen.send_signal(signal.SIGSTOP)
    try:
        wait_until(ready.exists, "the standby to lead")
        with CkptClient(ready.read_text()) as successor:
            successor.wait_for_state(job_id, ["RUNNING"], timeout_s=patient(120))
            wait_for_checkpoints(successor, job_id)
            frozen.send_signal(signal.SIGCONT)
            wait_until(lambda: "this driver has lost its leadership" in frozen_log.read_text(), "the end of its time")
            # By a connection of its own: the driver closes those that were idle while it was frozen. It ends meanwhile.
            with CkptClient(client.url) as late, pytest.raises((CkptApiError, Unreachable)) as refused:
                late.execute(requests.cancel_job(job_id), retry_timeout_s=0)
            assert not isinstance(refused.value, CkptApiError) or refused.value.status == 503
            assert successor.job_status(job_id) == "RUNNING"
            stop(successor, job_id, tmp_path)
    finally:
        orphans = children(frozen.pid)
        frozen.kill()
        frozen.wait()
        wait_until(lambda: not living(orphans), "the slots of the frozen driver to end")


def contents(directory: Path) -> list[str]:
    """Of documents that come and go."""
    found = []
    for path in directory.glob("*.json"):
        with suppress(FileNotFoundError):
            found.append(path.read_text())
    return found


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.row("571.5")
@pytest.mark.timeout(600)
def test_a_killed_driver_in_spark(tmp_path: Path) -> None:
    source = write_slice(tmp_path / "flights.parquet", 20_000)
    configuration = high_availability(tmp_path)
    first = start_session("local", 2, log_file=tmp_path / "first.log", conf=configuration)
    try:
        with CkptClient(first.rest_url, token=first.token) as client:
            job = FlightsJob(first, client, source, tmp_path)
            job.start(1000)
            client.patch_checkpoint_config(job.job_id, CheckpointConfigPatch(timeout_ms=77_000))
            job.wait_for_checkpoint()
            job.wait_for_checkpoint()
    finally:
        processes = [first.pid, *children(first.pid)]
        drivers = [pid for pid in processes if "main.py" in command_line(pid) and "java" not in command_line(pid)]
        for pid in drivers or [first.pid]:
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not living(processes), "the processes of the killed session to end", 120)
    second = start_session("local", 2, log_file=tmp_path / "second.log", conf=configuration)
    try:
        with CkptClient(second.rest_url, token=second.token) as client:
            client.wait_for_state(job.job_id, ["RUNNING"], timeout_s=patient(180))
            assert client.checkpoint_config(job.job_id).timeout_ms == 77_000
            job = FlightsJob(second, client, source, tmp_path, job.job_id)
            job.wait_for_checkpoint()
            job.finished()
    finally:
        stop_session(second)
    flights = read_flights(source)
    assert hidden(job.out) == []
    assert_rotations(visible(job.out / "rotations"), flights)
    assert_carriers(visible(job.out / "carrier_delays"), flights)
