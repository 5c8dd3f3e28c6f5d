"""State files that are damaged or swapped are refused by name, and nothing changes; missing ones are waited for."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt_runtime.jobmaster.gateway_values import CheckpointKind
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import SequenceJob, fast
from tests.support.outputs import assert_sequence

FILES = fast(
    state__storage__fs__memory_threshold="0",
    execution__checkpointing__externalized_checkpoint_retention="RETAIN_ON_CANCELLATION",
)
MANUAL = {**FILES, "execution.checkpointing.interval": "600 s"}
"""Only the tests take checkpoints."""

DEFAULTS = {"execution.checkpointing.interval": "250 ms", "state.storage.fs.memory-threshold": "0"}
"""The restart strategy, retention and tolerance that a job has when nothing is said about them."""


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def _append(file: Path) -> None:
    with file.open("ab") as stream:
        stream.write(b"\0")


def _swap(file: Path) -> None:
    """With the file of another subtask."""
    other = next(path for path in _state_files(file.parent) if path.name != file.name)
    aside = file.with_name("aside")
    file.rename(aside)
    other.rename(file)
    aside.rename(other)


def _directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flipped": _flip,
    "truncated": _truncate,
    "empty": lambda file: os.truncate(file, 0),
    "longer": _append,
    "swapped": _swap,
    "directory": _directory,
}


def _state_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.name not in ("_metadata", "catalogue"))


def _content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def _checkpoint(job: SequenceJob) -> Path:
    """Takes checkpoints until both subtasks have state in one, because both have had rows."""
    cluster = job.cluster

    def taken() -> Path:
        before = cluster.completed_checkpoints(job.job_id)
        cluster.call(cluster.dispatcher.trigger_checkpoint(job.job_id, CheckpointKind.CONFIGURED, None))
        cluster.wait_until(lambda: cluster.completed_checkpoints(job.job_id) > before, "the checkpoint")
        return max((job.checkpoints / job.job_id).glob("chk-*"), key=lambda path: int(path.name.removeprefix("chk-")))

    while len(_state_files(found := taken())) < 4:
        pass
    return found


def _assert_refused(job: SequenceJob, names: list[str]) -> None:
    job.cluster.wait_for_status(job.job_id, JobStatus.FAILED)
    failure = job.cluster.of_job(job.job_id, lambda job: job.result()).failure
    assert failure is not None
    assert "StateRestoreError" in failure.exception
    assert any(name in failure.message for name in names), failure.message
    assert "operator 'order'" in failure.message or "operator 'counts'" in failure.message


@pytest.fixture(scope="module")
def bystander(cluster: MiniCluster, tmp_path_factory: pytest.TempPathFactory) -> SequenceJob:
    """A job that runs all the time in the same session."""
    job = SequenceJob(cluster, tmp_path_factory.mktemp("bystander"))
    job.start(parallelism=1, rate=200)
    job.running()
    return job


@pytest.fixture(scope="module")
def savepoint(cluster: MiniCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A savepoint of the ``sequence`` pipeline at parallelism 2 with a file for each keyed state."""
    job = SequenceJob(cluster, tmp_path_factory.mktemp("savepoint"))
    job.start(configuration=MANUAL)
    job.running()
    _checkpoint(job)
    found = Path(cluster.savepoint(job.job_id, job.directory / "savepoints", stop=True).removeprefix("file://"))
    assert len(_state_files(found)) == 4
    return found


@pytest.mark.row("203.10")
@pytest.mark.parametrize(
    "damage",
    [name if name in ("flipped", "swapped") else pytest.param(name, marks=pytest.mark.long) for name in DAMAGES],
)
def test_damaged_savepoint_is_refused_by_name_and_not_changed(
    job: SequenceJob, bystander: SequenceJob, savepoint: Path, damage: str
) -> None:
    copy = job.directory / "copy"
    shutil.copytree(savepoint, copy)
    victim = _state_files(copy)[0]
    DAMAGES[damage](victim)
    names = [path.name for path in _state_files(savepoint)] if damage == "swapped" else [victim.name]
    before = _content(copy)
    job.start(configuration=FILES, savepoint=str(copy))
    _assert_refused(job, names)
    assert job.cluster.restarts(job.job_id) == 0
    assert _content(copy) == before
    assert not list(job.out.rglob("*.parquet"))
    assert bystander.cluster.status(bystander.job_id) is JobStatus.RUNNING
    bystander.cluster.wait_for_checkpoints(bystander.job_id, 1)


@pytest.mark.row("203.10")
@pytest.mark.parametrize(
    "retention", [pytest.param("NO_EXTERNALIZED_CHECKPOINTS", marks=pytest.mark.long), "RETAIN_ON_CANCELLATION"]
)
def test_damaged_savepoint_is_not_changed_by_a_claim(job: SequenceJob, savepoint: Path, retention: str) -> None:
    copy = job.directory / "copy"
    shutil.copytree(savepoint, copy)
    victim = _state_files(copy)[0]
    _flip(victim)
    before = _content(copy)
    own = {
        "execution.state-recovery.claim-mode": "CLAIM",
        "execution.checkpointing.externalized-checkpoint-retention": retention,
    }
    job.start(configuration={**FILES, **own}, savepoint=str(copy))
    _assert_refused(job, [victim.name])
    job.assert_retained()
    job.cluster.wait_until(lambda: not (copy / "claim").exists(), "the end of the claim")
    assert _content(copy) == before


@pytest.mark.row("203.10")
def test_the_same_savepoint_undamaged_restores(job: SequenceJob, savepoint: Path) -> None:
    before = _content(savepoint)
    job.start(rows=3000, rate=2_000, configuration=FILES, savepoint=str(savepoint))
    job.finished()
    assert _content(savepoint) == before


def _assert_waits_for(job: SequenceJob, file: Path) -> None:
    """The job names the missing file, keeps trying, and continues when the file is there again."""
    job.cluster.wait_until(lambda: job.cluster.restarts(job.job_id) >= 2, "two failed attempts")
    failure = job.cluster.of_job(job.job_id, lambda job: job.exception_history(1)).entries[0].failure
    assert "StateUnavailableError" in failure.exception
    assert file.name in failure.message
    assert not job.cluster.status(job.job_id).is_globally_terminal


def test_a_file_of_a_savepoint_that_is_missing_is_waited_for(job: SequenceJob, savepoint: Path) -> None:
    copy = job.directory / "copy"
    shutil.copytree(savepoint, copy)
    victim = _state_files(copy)[0]
    aside = victim.rename(job.directory / "aside")
    job.start(rows=3000, rate=2_000, configuration=DEFAULTS, savepoint=str(copy))
    _assert_waits_for(job, victim)
    aside.rename(victim)
    job.finished()


def test_a_file_of_the_latest_checkpoint_that_is_missing_is_waited_for(job: SequenceJob) -> None:
    job.start(configuration={**DEFAULTS, "execution.checkpointing.interval": "600 s"})
    job.running()
    checkpoint = _checkpoint(job)
    victim = _state_files(checkpoint)[-1]
    aside = victim.rename(job.directory / "aside")
    job.inject("map-raise")
    _assert_waits_for(job, victim)
    aside.rename(victim)
    job.stopped()


@pytest.mark.parametrize("damage", [pytest.param("flipped", marks=pytest.mark.long), "truncated"])
def test_a_running_job_whose_latest_checkpoint_is_damaged_fails_by_name_and_keeps_it(
    job: SequenceJob, savepoint: Path, tmp_path: Path, damage: str
) -> None:
    job.start(configuration=MANUAL)
    job.running()
    checkpoint = _checkpoint(job)
    victim = _state_files(checkpoint)[-1]
    DAMAGES[damage](victim)
    before = _content(checkpoint)
    assert job.cluster.status(job.job_id) is JobStatus.RUNNING
    job.inject("map-raise")
    _assert_refused(job, [victim.name])
    assert _content(checkpoint) == before


def test_the_bystander_lost_nothing(bystander: SequenceJob) -> None:
    bystander.cluster.savepoint(bystander.job_id, bystander.directory / "savepoints", stop=True)
    assert_sequence(bystander.out)
