"""The driver dies at each step of what it does to a job's checkpoints; the next one finds nothing lost, nothing over.

Each case crashes one driver after the other at the points of one procedure, with the same job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.errors import CkptClientError
from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.contract.configuration import CheckpointConfigPatch
from ckpt_runtime.contract.jobs import RunOptions
from ckpt_runtime.storage.metadata import METADATA_NAME, read_metadata
from tests.support.driver_processes import Sessions
from tests.support.jobs import fast, program_of
from tests.support.outputs import assert_sequence
from tests.support.patience import patient
from tests.support.spark_sessions import wait_until

START_INTERVAL_MS = 200


@dataclass
class Job:
    """One job and the driver that runs it now."""

    sessions: Sessions
    directory: Path
    client: CkptClient
    id: str = ""

    @property
    def out(self) -> Path:
        return self.directory / "out"

    @property
    def snapshots(self) -> Path:
        return self.directory / "ha" / "default" / "snapshots" / self.id

    def start(self) -> None:
        arguments = ("--output", str(self.out), "--rows", "0", "--rate", "1000", "--batch", "64")
        configuration = fast(
            execution__checkpointing__interval=f"{START_INTERVAL_MS} ms",
            state__storage__fs__memory_threshold="0",
            execution__checkpointing__num_retained="2",
        )
        options = RunOptions(
            entry_point="sequence:pipeline", arguments=arguments, parallelism=1, configuration=configuration
        )
        self.id = self.client.run_pipeline(self.client.upload_pipeline(*pack_pipeline(program_of("sequence"))), options)
        self.running()
        self.next_checkpoints(3)

    def running(self) -> None:
        self.client.wait_for_state(self.id, ["RUNNING"], timeout_s=patient(180), poll_interval_s=0.05)

    def next_checkpoints(self, number: int = 1) -> None:
        known = self.client.checkpoint_statistics(self.id).counts.completed
        wait_until(lambda: self.client.checkpoint_statistics(self.id).counts.completed >= known + number, "checkpoints")

    def crash(self, point: str, act: Callable[[], object] | None = None) -> None:
        """Lets the driver die at the point; ``act`` makes it get there, and its caller hears of no success."""
        self.sessions.arm(point)
        if act is not None:
            with pytest.raises(CkptClientError):
                act()
        self.sessions.crashed()
        self.check_latest()
        self.client = self.sessions.start()

    def check_latest(self) -> None:
        """With no driver alive: every checkpoint that has a pointer is readable, and all its files are there."""
        for pointer in self.sessions.store.pointers(self.id).list().values():
            self._assert_complete(pointer.directory)

    def recovered(self) -> None:
        """The job runs from its latest checkpoint, takes the next one, and nothing of the dead driver is left."""
        self.running()
        assert self.client.checkpoint_statistics(self.id).latest_restored is not None
        self.next_checkpoints()
        wait_until(self._nothing_is_over, "the files of checkpoints to be those that the pointers lead to", 120)

    def _nothing_is_over(self) -> bool:
        """Checkpoints come and go meanwhile: says yes when pointers and files agree at one moment."""
        pointers = self.sessions.store.pointers(self.id)
        before = [pointer.directory for pointer in pointers.list().values()]
        names = sorted(entry.name for entry in self.snapshots.iterdir() if entry.name.startswith("chk-"))
        after = [pointer.directory for pointer in pointers.list().values()]
        own = sorted(directory.rpartition("/")[2] for directory in before if str(self.snapshots) in directory)
        if before != after or own != names:
            return False
        try:
            for directory in before:
                self._assert_complete(directory)
        except (OSError, AssertionError):  # subsumed meanwhile, perhaps halfway through the look at its files
            return False
        others = [entry for name in ("shared", "taskowned") for entry in (self.snapshots / name).iterdir()]
        return not others

    @staticmethod
    def _assert_complete(directory: str) -> None:
        """The directory holds exactly the files that its metadata refers to."""
        found = read_metadata(directory)
        checkpoint = CompletedCheckpoint.from_json(found.document, found.directory.url)
        files = {file.path for state in checkpoint.states.values() for file in state.files()}
        path = Path(found.directory.path)
        present = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
        assert {name for name in present if not name.startswith("catalogue/")} == files | {METADATA_NAME}

    def patch(self, timeout_ms: int) -> None:
        self.client.patch_checkpoint_config(self.id, CheckpointConfigPatch(timeout_ms=timeout_ms))

    def pause_checkpoints(self) -> None:
        """Until :meth:`resume_checkpoints`, by the next driver perhaps."""
        self.client.patch_checkpoint_config(self.id, CheckpointConfigPatch(interval_ms=3_600_000))
        wait_until(lambda: self.client.checkpoint_statistics(self.id).counts.in_progress == 0, "the last checkpoint")

    def resume_checkpoints(self) -> None:
        self.client.reset_checkpoint_config(self.id)

    def stop(self) -> None:
        trigger = self.client.stop_with_savepoint(self.id, str(self.directory / "savepoints"))
        self.client.wait_for_operation("savepoint", trigger, self.id, timeout_s=patient(180), poll_interval_s=0.05)

    def stop_unheard(self) -> None:
        """Never hears of its success. Raises Unreachable when the driver is gone."""
        trigger = self.client.stop_with_savepoint(self.id, str(self.directory / "savepoints"))
        while True:
            assert not self.client.operation_status("savepoint", trigger, self.id).done
            time.sleep(0.05)

    def stopped(self) -> None:
        """Ends the job in order: every row came out once, and nothing of the job is left but its savepoint."""
        self.stop()
        self.finished()

    def finished(self) -> None:
        self.client.wait_for_state(self.id, ["FINISHED"], timeout_s=patient(180), poll_interval_s=0.05)
        wait_until(lambda: not self.snapshots.exists(), "the clean-up")
        wait_until(lambda: self.id not in self.sessions.store.jobs.list_ids(), "the job to be forgotten")
        assert_sequence(self.out)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    sessions = Sessions(tmp_path, options={"jobmanager.execution.dynamic-configuration.allow-list": "*"})
    try:
        started = Job(sessions, tmp_path, sessions.start())
        started.start()
        yield started
    finally:
        sessions.end()


@pytest.mark.slow
@pytest.mark.row("571.5")
@pytest.mark.row("571.6")
@pytest.mark.timeout(600)
def test_a_patch_is_there_or_not(job: Job) -> None:
    """A patch leaves no trace before it is stored and holds from then on; its caller never gets a success."""
    holds = job.client.checkpoint_config(job.id).timeout_ms
    for timeout_ms, point, is_stored in (
        (71_000, "patch-before", False),
        (72_000, "patch-persisted", True),
        (73_000, "patch-applied", True),
    ):
        job.crash(point, partial(job.patch, timeout_ms))
        holds = timeout_ms if is_stored else holds
        assert job.client.checkpoint_config(job.id).timeout_ms == holds, point
        job.recovered()
    job.stopped()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.row("203.14")
@pytest.mark.timeout(600)
def test_a_rescale_is_there_or_not(job: Job) -> None:
    """As a patch is: the next driver runs the job at the old parallelism or at the new one, which all vertices have."""
    for point, is_stored in (("plan-before", False), ("plan-persisted", True)):
        present = job.client.resource_requirements(job.id)
        wanted = {vertex: parallelism + 1 for vertex, parallelism in present.items()}
        job.crash(point, partial(job.client.update_resource_requirements, job.id, wanted))
        assert job.client.resource_requirements(job.id) == (wanted if is_stored else present), point
        job.recovered()
        found = {vertex.id: vertex.parallelism for vertex in job.client.job_details(job.id).vertices}
        assert found == (wanted if is_stored else present), point
    job.stopped()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.row("530.5")
@pytest.mark.timeout(600)
def test_a_configuration_is_there_or_not(job: Job) -> None:
    """As a patch is: the next driver has the old one or the new one, with its version, and so have its tasks."""
    interval = "execution.checkpointing.interval"
    for millis, point, is_stored in (
        (201, "plan-before", False),
        (202, "plan-persisted", True),
        (203, "configuration-applied", True),
    ):
        present = job.client.job_config(job.id)
        wanted = {**present.configuration, interval: f"{millis} ms"}
        assert present.version is not None
        job.crash(point, partial(job.client.replace_job_config, job.id, wanted, present.version))
        found = job.client.job_config(job.id)
        assert found.configuration == (wanted if is_stored else present.configuration), point
        assert found.version == present.version + is_stored, point
        job.recovered()
        assert job.client.checkpoint_config(job.id).interval_ms == (millis if is_stored else START_INTERVAL_MS), point
        assert job.client.replace_job_config(job.id, found.configuration, 1).changes == {}
    job.stopped()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.row("530.5")
@pytest.mark.timeout(600)
def test_a_configuration_that_needs_a_restart_is_there_or_not(job: Job) -> None:
    """From its receipt to the deployment for it. The answer goes before that: it may have come, and then it is true."""
    key = "execution.buffer-timeout.interval"
    points = ("configuration-received", "configuration-validated", "plan-before", "plan-persisted", "deploy-before")
    for number, point in enumerate(points):
        present = job.client.job_config(job.id)
        assert present.version is not None
        wanted = {**present.configuration, key: f"{40 + number} ms"}
        job.sessions.arm(point)
        answered = False
        with suppress(CkptClientError):
            answered = job.client.replace_job_config(job.id, wanted, present.version).restart
        job.sessions.crashed()
        job.check_latest()
        job.client = job.sessions.start()
        found = job.client.job_config(job.id)
        is_stored = point in ("plan-persisted", "deploy-before")
        assert is_stored or not answered, point
        assert found.configuration == (wanted if is_stored else present.configuration), point
        assert found.version == present.version + is_stored, point
        job.recovered()
        assert job.client.job_config(job.id).running_version == found.version, point
    job.stopped()


COMPLETION = ("metadata-before", "metadata-after", "pointer-after")
SUBSUMPTION = ("removal-before", "removal-after", "checkpoint-half-deleted", "checkpoint-deleted")
MORE = ("checkpoint-reserved", "checkpoint-located", "pointer-before", "notify-before", "notify-after")
"""Between two points of the completion nothing durable happens but to other things."""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.row("571.6")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "points",
    [
        pytest.param(COMPLETION, id="completion"),
        pytest.param(SUBSUMPTION, id="subsumption"),
        pytest.param(MORE, id="more"),
    ],
)
def test_checkpoint_is_complete_or_removed_after_a_crash(job: Job, points: tuple[str, ...]) -> None:
    for point in points:
        job.crash(point)
        job.recovered()
    job.stopped()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.row("571.5")
@pytest.mark.timeout(600)
def test_a_recovery_that_crashes_is_recovered(job: Job) -> None:
    job.patch(74_000)
    for point in ("recovery-plan-adopted", "recovery-adopted", "attempt-recorded", "deploy-before"):
        job.sessions.kill()
        job.sessions.arm(point)
        job.sessions.launch()
        job.sessions.crashed()
        job.check_latest()
        job.client = job.sessions.start()
        job.recovered()
        assert job.client.checkpoint_config(job.id).timeout_ms == 74_000, point
    job.stopped()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.row("147.5")
@pytest.mark.timeout(600)
def test_a_stop_whose_savepoint_is_not_complete_has_not_happened(job: Job) -> None:
    """The periodic checkpoints are off meanwhile, so that it is the savepoint that gets to the point."""
    for point in ("metadata-before", "metadata-after"):
        job.pause_checkpoints()
        job.crash(point, job.stop_unheard)
        job.resume_checkpoints()
        job.recovered()
    job.stopped()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.row("147.5")
@pytest.mark.timeout(600)
def test_a_job_resumes_from_the_complete_savepoint_of_a_stop(job: Job) -> None:
    """Its sinks may have committed: rows that came out before the crash must not come out again."""
    for point in ("pointer-after", "notify-before", "notify-after", "end-before"):
        job.pause_checkpoints()
        job.crash(point, job.stop_unheard)
        job.running()
        restored = job.client.checkpoint_statistics(job.id).latest_restored
        assert restored is not None
        assert restored.is_savepoint, point
        job.resume_checkpoints()
        job.recovered()
    job.stopped()


@pytest.mark.slow
@pytest.mark.row("571.7")
@pytest.mark.timeout(600)
@pytest.mark.long
@pytest.mark.parametrize("point", ["end-stored", "forget-half"])
def test_a_job_whose_end_is_stored_does_not_run_again(job: Job, point: str) -> None:
    job.pause_checkpoints()
    job.sessions.arm(point)
    job.client.stop_with_savepoint(job.id, str(job.directory / "savepoints"))
    job.sessions.crashed()
    job.client = job.sessions.start()
    job.finished()
    assert [known.state for known in job.client.list_jobs()] == ["FINISHED"]
