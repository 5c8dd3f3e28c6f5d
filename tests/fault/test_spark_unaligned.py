"""A job in Spark that slow user code holds back: killed under every policy, rescaled from an unaligned checkpoint."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.errors import Conflict
from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.contract.checkpoints import Checkpoint
from ckpt_runtime.contract.configuration import CheckpointConfigPatch
from ckpt_runtime.contract.jobs import RunOptions
from ckpt_runtime.spark.launch import SessionInfo, start_session, stop_session
from tests.support.jobs import ROCKSDB, UNALIGNED, program_of
from tests.support.outputs import assert_sequence, visible
from tests.support.patience import patient
from tests.support.processes import living
from tests.support.spark_sessions import wait_until

ROWS = 120_000
SEED = 76
POLICIES = {
    "unaligned": CheckpointConfigPatch(unaligned=True, aligned_timeout_ms=0),
    "aligned, unaligned after 20 ms": CheckpointConfigPatch(unaligned=True, aligned_timeout_ms=20),
    "unaligned up to 20 kB": CheckpointConfigPatch(
        unaligned=True, aligned_timeout_ms=0, max_inflight_data_bytes=20_000
    ),
    "aligned": CheckpointConfigPatch(unaligned=False),
}


@dataclass
class HeldBackJob:
    """The ``sequence`` pipeline, which sleeps for each row."""

    client: CkptClient
    directory: Path
    job_id: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    def start(self, parallelism: int, *, sleep_ms: float, savepoint: str | None = None) -> None:
        faults = self.directory / "faults"
        faults.mkdir(exist_ok=True)
        arguments = ["--output", str(self.directory / "out"), "--rows", str(ROWS), "--batch", "64"]
        arguments += ["--faults", str(faults), "--sleep-ms", str(sleep_ms)]
        options = RunOptions(
            entry_point="sequence:pipeline",
            arguments=tuple(arguments),
            parallelism=parallelism,
            configuration={
                **UNALIGNED,
                "execution.checkpointing.dir": str(self.directory / "checkpoints"),
                **self.options,
            },
            savepoint_path=savepoint,
        )
        self.job_id = self.client.run_pipeline(
            self.client.upload_pipeline(*pack_pipeline(program_of("sequence"))), options
        )
        # One that holds nothing back may have run already.
        self.client.wait_for_state(self.job_id, ["RUNNING", "FINISHED"], timeout_s=patient(180))

    def workers(self) -> list[int]:
        """Processes that run the job's user code."""
        signed = (int(file.name.removeprefix("process-")) for file in self.directory.glob("faults/process-*"))
        return sorted(living(list(signed)))

    def restarts(self) -> int:
        return int(self.client.job_metrics(self.job_id, ("numRestarts",))["numRestarts"])

    def completed(self) -> list[Checkpoint]:
        """Newest first."""
        history = self.client.checkpoint_statistics(self.job_id).history
        return [checkpoint for checkpoint in history if checkpoint.status == "COMPLETED"]

    def wait_for_checkpoints(self, count: int) -> None:
        """So many more than now."""
        wanted = self.client.checkpoint_statistics(self.job_id).counts.completed + count
        wait_until(
            lambda: self.client.checkpoint_statistics(self.job_id).counts.completed >= wanted, f"{count} checkpoints"
        )

    def wait_for_in_flight_data(self) -> None:
        wait_until(lambda: any(known.persisted_data > 0 for known in self.completed()), "in-flight data")

    def cancelled(self) -> str:
        """The directory of the last checkpoint."""
        self.client.cancel_job(self.job_id)
        self.client.wait_for_state(self.job_id, ["CANCELED"], timeout_s=patient(180))
        path = self.completed()[0].external_path
        assert path is not None
        return path


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionInfo]:
    log = tmp_path_factory.mktemp("session") / "session.log"
    started = start_session("local", 3, conf={"slot.request.timeout": "60 s"}, log_file=log)
    yield started
    stop_session(started)


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.row("76.1", "76.6", "571.8")
@pytest.mark.timeout(600)
def test_kills_and_rescales_with_the_policies_mixed(session: SessionInfo, tmp_path: Path) -> None:
    choice = random.Random(SEED)
    with CkptClient(session.rest_url, token=session.token) as client:
        job = HeldBackJob(client, tmp_path)
        savepoint: str | None = None
        for parallelism in (2, 3):
            job.start(parallelism, sleep_ms=0.2, savepoint=savepoint)
            job.wait_for_in_flight_data()
            policies = list(POLICIES)
            choice.shuffle(policies)
            for kills, name in enumerate(policies, start=1):
                client.patch_checkpoint_config(job.job_id, POLICIES[name])
                job.wait_for_checkpoints(1)
                os.kill(choice.choice(job.workers()), signal.SIGKILL)
                wait_until(lambda kills=kills: job.restarts() >= kills, f"the restart after the kill under: {name}")
            client.patch_checkpoint_config(job.job_id, POLICIES["unaligned"])
            job.wait_for_checkpoints(2)
            savepoint = job.cancelled()
            assert job.completed()[0].kind == "UNALIGNED_CHECKPOINT"
        assert len(visible(job.directory / "out" / "order")) < ROWS
        job.start(1, sleep_ms=0, savepoint=savepoint)
        client.wait_for_state(job.job_id, ["FINISHED"], timeout_s=patient(180))
    assert assert_sequence(tmp_path / "out", cancelled=True) == ROWS


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.row("203.14")
@pytest.mark.timeout(600)
def test_a_live_rescale_gets_the_slots_that_the_session_has(session: SessionInfo, tmp_path: Path) -> None:
    """The session has three slots: the job grows into all of them, cannot have a fourth, and leaves two of them.

    On RocksDB, with increments and data in flight; a worker is killed at each parallelism.
    """
    with CkptClient(session.rest_url, token=session.token) as client:
        job = HeldBackJob(client, tmp_path, options=ROCKSDB)
        job.start(2, sleep_ms=1)
        job.wait_for_in_flight_data()
        vertices = client.resource_requirements(job.job_id)
        restarts = job.restarts()
        with pytest.raises(Conflict, match="keeps its parallelism"):
            client.rescale(job.job_id, dict.fromkeys(vertices, 4))
        assert job.restarts() == restarts
        for lower, upper, expected in ((1, 8, 3), (1, 1, 1)):
            restarts = job.restarts()
            client.rescale(job.job_id, dict.fromkeys(vertices, (lower, upper)), timeout_s=patient(180))
            client.wait_for_state(job.job_id, ["RUNNING"], timeout_s=patient(180))
            assert job.restarts() == restarts + 1
            assert set(client.parallelism_bounds(job.job_id).values()) == {(lower, upper)}
            assert {vertex.parallelism for vertex in client.job_details(job.job_id).vertices} == {expected}
            job.wait_for_checkpoints(1)
            # One that it has left may still be ending: nothing would restart for that one's sake.
            wait_until(lambda expected=expected: len(job.workers()) == expected, "its own workers alone")  # type: ignore[misc]
            os.kill(job.workers()[0], signal.SIGKILL)
            wait_until(lambda restarts=restarts: job.restarts() > restarts + 1, "the restart after the kill")
            client.wait_for_state(job.job_id, ["RUNNING"], timeout_s=patient(180))
            job.wait_for_checkpoints(2)

        def one_is_taken() -> bool:
            overview = client.cluster_overview()
            return overview.slots_available == overview.slots_total - 1

        wait_until(one_is_taken, "the other slots to be free")
        path = job.cancelled()
        job.start(3, sleep_ms=0, savepoint=path)
        client.wait_for_state(job.job_id, ["FINISHED"], timeout_s=patient(180))
    assert assert_sequence(tmp_path / "out", cancelled=True) == ROWS
