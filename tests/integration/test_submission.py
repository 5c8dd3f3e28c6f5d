"""What is refused at submission, with a clear reason and before anything starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckpt_runtime.jobmaster.gateway_values import Conflict, HoldRequest, Precondition, SubmissionFailed
from ckpt_runtime.jobmaster.lineages import LineageHeld, LineageLives, LineageNotHeld, NotTheLatest
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.snapshots.snapshot import open_snapshot
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import PIPELINES, SequenceJob, fast, program_of
from tests.support.outputs import assert_sequence


@pytest.fixture
def nothing_starts(cluster: MiniCluster) -> Iterator[None]:
    """No job more than before is known afterwards."""
    before = cluster.call(cluster.dispatcher.list_jobs())
    yield
    assert len(cluster.call(cluster.dispatcher.list_jobs())) == len(before)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("broken:raises", r"LookupError.*table of ports(.|\n)*broken.py"),
        ("broken:exits", "ended with code 7"),
        ("broken:same_uids", "twice"),
        ("broken:missing", "missing"),
        ("nowhere:pipeline", "nowhere"),
    ],
)
@pytest.mark.usefixtures("nothing_starts")
def test_a_pipeline_without_a_plan(cluster: MiniCluster, entry: str, reason: str) -> None:
    with pytest.raises(SubmissionFailed, match=reason):
        cluster.submit(PIPELINES, entry=entry)


def test_a_plan_that_changes_from_process_to_process_fails_the_job(cluster: MiniCluster) -> None:
    job_id = cluster.submit(
        program_of("broken"), entry="broken:changes", configuration={"restart-strategy.type": "none"}
    )
    cluster.wait_for_status(job_id, JobStatus.FAILED)
    failure = cluster.of_job(job_id, lambda job: job.result()).failure
    assert failure is not None
    assert "PlanMismatchError" in failure.exception
    assert "must not depend on time, randomness" in failure.message


@pytest.mark.parametrize("place", ["file in its place", "relative"])
@pytest.mark.usefixtures("nothing_starts")
def test_a_checkpoint_directory_that_cannot_be_used(job: SequenceJob, place: str) -> None:
    if place == "relative":
        configuration = fast(execution__checkpointing__dir="checkpoints")
    else:
        job.checkpoints.touch()
        configuration = fast()
    with pytest.raises(SubmissionFailed, match="checkpoints"):
        job.start(configuration=configuration)
    assert not job.out.exists()


@pytest.fixture(scope="module")
def savepoint(cluster: MiniCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A savepoint of the ``sequence`` pipeline at parallelism 1, with 128 key groups."""
    job = SequenceJob(cluster, tmp_path_factory.mktemp("savepoint"))
    job.start(parallelism=1, configuration=fast(pipeline__max_parallelism="128"))
    job.running()
    job.has_output()
    return Path(cluster.savepoint(job.job_id, job.directory / "savepoints", stop=True).removeprefix("file://"))


@pytest.mark.row("203.4")
@pytest.mark.row("203.10")
@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("damage", ["missing", "truncated", "altered", "no metadata"])
def test_a_savepoint_that_is_not_whole(job: SequenceJob, savepoint: Path, tmp_path: Path, damage: str) -> None:
    copy = tmp_path / "copy"
    if damage != "missing":
        shutil.copytree(savepoint, copy)
        metadata = copy / "_metadata"
        content = metadata.read_bytes()
        if damage == "truncated":
            metadata.write_bytes(content[: len(content) // 2])
        elif damage == "altered":
            metadata.write_bytes(content[:-40] + bytes(byte ^ 1 for byte in content[-40:]))
        else:
            metadata.unlink()
    with pytest.raises(SubmissionFailed, match="cannot restore from"):
        job.start(savepoint=str(copy))


@pytest.mark.row("203.7")
@pytest.mark.usefixtures("nothing_starts")
def test_a_savepoint_of_other_operators(job: SequenceJob, savepoint: Path) -> None:
    with pytest.raises(SubmissionFailed, match="order"):
        job.start(savepoint=str(savepoint), uids="-renamed")


@pytest.mark.row("203.7")
def test_state_of_other_operators_can_be_left_behind(job: SequenceJob, savepoint: Path) -> None:
    job.start(rows=500, savepoint=str(savepoint), uids="-renamed", allow_non_restored_state=True)
    job.finished()
    assert_sequence(job.out, 500)


@pytest.mark.row("203.7")
@pytest.mark.usefixtures("nothing_starts")
def test_a_savepoint_with_another_number_of_key_groups(job: SequenceJob, savepoint: Path) -> None:
    with pytest.raises(SubmissionFailed, match=r"(?i)max.?parallelism"):
        job.start(savepoint=str(savepoint), configuration=fast(pipeline__max_parallelism="64"))


@pytest.mark.row("203.7")
def test_a_job_that_would_derive_more_key_groups_takes_over_the_snapshots(job: SequenceJob, tmp_path: Path) -> None:
    job.start(configuration=fast(pipeline__max_parallelism="64"))
    job.running()
    job.has_output()
    stopped = job.cluster.savepoint(job.job_id, tmp_path / "savepoints", stop=True)
    rows = assert_sequence(job.out) + 3000
    job.start(rows=rows, rate=0, savepoint=stopped)
    job.finished()
    details = job.cluster.call(job.cluster.dispatcher.job_details(job.job_id))
    keyed = [vertex.max_parallelism for vertex in details.vertices if "order" in vertex.name or "counts" in vertex.name]
    assert keyed == [64, 64]
    assert_sequence(job.out, rows)


@pytest.mark.row("203.4")
def test_a_savepoint_moves(job: SequenceJob, savepoint: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(savepoint, moved)
    assert str(savepoint) not in json.dumps(
        [file.read_text(errors="replace") for file in moved.rglob("*") if file.is_file()]
    )
    job.start(
        rows=3000, rate=2_000, savepoint=str(moved / "_metadata"), configuration=fast(pipeline__max_parallelism="128")
    )
    job.finished()


def test_a_job_that_starts_from_a_snapshot_joins_its_lineage(
    cluster: MiniCluster, job: SequenceJob, savepoint: Path, tmp_path: Path
) -> None:
    first = open_snapshot(str(savepoint)).metadata.job_id
    job.start(savepoint=str(savepoint), configuration=fast(pipeline__max_parallelism="128"))
    job.running()
    taken = cluster.savepoint(job.job_id, tmp_path / "savepoints", stop=True)
    overview = cluster.call(cluster.dispatcher.job_details(job.job_id)).overview
    assert overview.lineage is not None
    assert overview.lineage.id == first
    assert overview.lineage.incarnation > 1
    assert open_snapshot(taken).metadata.lineage_id == first
    listed = cluster.call(cluster.dispatcher.list_savepoints(str(tmp_path / "savepoints"), None)).savepoints
    assert [found.entry and found.entry.lineage_id for found in listed] == [first]


def _ended(cluster: MiniCluster, job_id: str) -> None:
    cluster.call(cluster.dispatcher.cancel_job(job_id))
    cluster.wait_for_status(job_id, JobStatus.CANCELED)


def test_one_of_several_jobs_that_start_at_once_from_one_lineage_runs(
    cluster: MiniCluster, savepoint: Path, tmp_path: Path
) -> None:
    configuration = fast(pipeline__max_parallelism="128")

    def start(number: int) -> str | LineageLives:
        job = SequenceJob(cluster, tmp_path / str(number))
        try:
            return job.start(parallelism=1, savepoint=str(savepoint), configuration=configuration)
        except LineageLives as error:
            return error

    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(start, range(3)))
    (started,) = (answer for answer in answers if isinstance(answer, str))
    refusals = [str(answer) for answer in answers if isinstance(answer, LineageLives)]
    assert len(refusals) == 2
    assert all(text.startswith(f"Job {started}, which is ") and "fork" in text for text in refusals)
    fork = SequenceJob(cluster, tmp_path / "fork")
    forked = fork.start(parallelism=1, savepoint=str(savepoint), configuration=configuration, fork=True)
    place = cluster.call(cluster.dispatcher.job_details(forked)).overview.lineage
    assert place is not None
    assert place.id == forked
    for job_id in (started, forked):
        _ended(cluster, job_id)
    assert isinstance(start(4), str), "the lineage is free once its job has ended"
    (living,) = (line for line in cluster.call(cluster.dispatcher.list_jobs()) if not line.status.is_globally_terminal)
    _ended(cluster, living.job_id)


def test_other_clients_cannot_start_or_end_a_job_of_a_lineage_during_an_upgrade(
    cluster: MiniCluster, job: SequenceJob, tmp_path: Path
) -> None:
    gateway, mine = cluster.dispatcher, Precondition("upgrade-1")
    old = job.start(parallelism=1)
    job.running()
    job.has_output()
    request = HoldRequest("upgrade-1", 3_600_000, ("f" * 32,))
    first = cluster.call(gateway.hold_lineage(old, request))
    again = cluster.call(gateway.hold_lineage(old, request))
    assert again.since_ms == first.since_ms, "the same owner keeps its own hold"
    with pytest.raises(LineageHeld, match="upgrade-1.*ckpt lineage release"):
        cluster.call(gateway.hold_lineage(old, HoldRequest("upgrade-2", 1_000)))
    with pytest.raises(LineageHeld):
        cluster.call(gateway.cancel_job(old))
    with pytest.raises(LineageHeld):
        cluster.savepoint(old, tmp_path / "savepoints", stop=True)
    with pytest.raises(LineageHeld):
        cluster.call(gateway.cancel_job(old, condition=Precondition("upgrade-2")))
    with pytest.raises(NotTheLatest):
        cluster.call(gateway.cancel_job(old, condition=Precondition("upgrade-1", 7)))
    assert cluster.call(gateway.job_details(old)).overview.status is JobStatus.RUNNING

    taken = cluster.savepoint(old, tmp_path / "savepoints")
    cluster.call(gateway.cancel_job(old, condition=mine))
    cluster.wait_for_status(old, JobStatus.CANCELED)
    cluster.call(gateway.hold_lineage(old, HoldRequest("upgrade-1", 3_600_000, ("f" * 32,), taken)))
    with pytest.raises(Conflict, match="being upgraded by upgrade-1"):
        cluster.call(gateway.dispose_savepoint(taken, None))
    with pytest.raises(LineageHeld):
        SequenceJob(cluster, tmp_path / "unrelated").start(parallelism=1, savepoint=taken)

    cluster.call(gateway.release_lineage(old, None))
    with pytest.raises(LineageNotHeld):
        cluster.call(gateway.cancel_job(old, condition=mine))
    other = SequenceJob(cluster, tmp_path / "other").start(parallelism=1, savepoint=taken)
    with pytest.raises(LineageNotHeld):
        cluster.call(gateway.hold_lineage(old, request))
    for ends in (True, False):
        with pytest.raises(NotTheLatest, match=other):
            cluster.call(gateway.hold_lineage(old, HoldRequest("upgrade-3", 1_000)))
        if ends:
            _ended(cluster, other)


@pytest.mark.row("air.2")
def test_one_of_several_jobs_of_one_name_that_start_at_once_runs(cluster: MiniCluster, tmp_path: Path) -> None:
    """None of them is known while the others are planned."""

    def start(number: int, unique: bool = True) -> str | LineageLives:
        job = SequenceJob(cluster, tmp_path / str(number))
        configuration = fast(pipeline__name="the only one", pipeline__unique_name=str(unique).lower())
        try:
            return job.start(parallelism=1, configuration=configuration)
        except LineageLives as error:
            return error

    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(start, range(3)))
    (started,) = (answer for answer in answers if isinstance(answer, str))
    refusals = [str(answer) for answer in answers if not isinstance(answer, str)]
    assert len(refusals) == 2
    assert all(text.startswith(f"Job {started}, which is ") and "'the only one'" in text for text in refusals)
    another = start(3, unique=False)
    assert isinstance(another, str), "one that does not ask for it may share its name"
    for job_id in (started, another):
        assert isinstance(start(4), LineageLives)
        cluster.call(cluster.dispatcher.cancel_job(job_id))
        cluster.wait_for_status(job_id, JobStatus.CANCELED)
    last = start(5)
    assert isinstance(last, str)
    cluster.call(cluster.dispatcher.cancel_job(last))
    cluster.wait_for_status(last, JobStatus.CANCELED)
