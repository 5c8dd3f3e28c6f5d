"""Snapshots that living jobs refer to are known by their place, however their path is written."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckpt_runtime.jobmaster.gateway_values import SnapshotInUse, SnapshotNotFound
from ckpt_runtime.jobmaster.snapshot_references import References, SnapshotReferences
from ckpt_runtime.snapshots.job_claims import JobClaims
from ckpt_runtime.storage.claims import Claim, Claimant, acquire, read_claim
from ckpt_runtime.storage.errors import InvalidLocationError
from ckpt_runtime.storage.filesystem import resolve
from tests.support.snapshots import write_snapshot


def snapshot(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "_metadata").touch()
    return directory


def dispose(path: str, *living: References) -> bool:
    """Begins and ends a disposal; whether it was under way in between."""

    async def inside() -> bool:
        with ThreadPoolExecutor(1) as pool:
            references = SnapshotReferences(lambda: living, lambda _: pool)
            begun = await references.begin_disposal(path, "this")
            under_way = await references.is_being_disposed(path)
            references.end_disposal(begun)
            assert not await references.is_being_disposed(path)
            return under_way

    return asyncio.run(inside())


@pytest.fixture
def savepoint(tmp_path: Path) -> Path:
    return snapshot(tmp_path / "savepoints" / "savepoint-1")


@pytest.mark.parametrize("spelling", ["{0}", "{0}/", "//{0}", "file:{0}", "file://{0}", "{0}/_metadata", "{1}"])
def test_snapshot_of_a_job_is_recognized_in_all_its_spellings(tmp_path: Path, savepoint: Path, spelling: str) -> None:
    link = tmp_path / "link"
    link.symlink_to(savepoint)
    path = spelling.format(savepoint, link)
    job = References("j", "RUNNING", (tmp_path / "j").as_uri(), (savepoint.as_uri(),))
    with pytest.raises(SnapshotInUse, match="cannot be disposed of while job j is RUNNING: that job would start from"):
        dispose(path, job)
    assert dispose(path)


def test_a_job_that_was_given_another_spelling_keeps_its_snapshot_as_well(tmp_path: Path, savepoint: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(savepoint.parent)
    with pytest.raises(SnapshotInUse):
        dispose(str(savepoint), References("j", "being submitted", None, (str(link / savepoint.name / "_metadata"),)))


@pytest.mark.parametrize("by_link", [False, True])
def test_every_checkpoint_in_the_directory_of_a_living_job_is_its_own(tmp_path: Path, by_link: bool) -> None:
    checkpoint = snapshot(tmp_path / "checkpoints" / "j" / "chk-3")
    other = snapshot(tmp_path / "checkpoints" / "ended" / "chk-3")
    link = tmp_path / "link"
    link.symlink_to(checkpoint)
    job = References("j", "RESTARTING", checkpoint.parent.as_uri())
    with pytest.raises(SnapshotInUse, match="while job j is RESTARTING: it is a checkpoint of that job"):
        dispose(str(link if by_link else checkpoint), job)
    assert dispose(str(other), job)


def test_snapshots_are_not_deleted_while_the_references_of_a_job_are_unknown(savepoint: Path) -> None:
    with pytest.raises(SnapshotInUse, match="it is unknown which snapshots that job refers to"):
        dispose(str(savepoint), References("j", "not recovered yet", is_known=False))


def test_other_snapshots_may_be_deleted_and_unreadable_ones_do_not_block(tmp_path: Path, savepoint: Path) -> None:
    living = References("j", "RUNNING", "nosuch://x", ((tmp_path / "gone").as_uri(), "nosuch://y"))
    assert dispose(str(savepoint), living)
    with pytest.raises(InvalidLocationError):
        dispose("relative", living)


@pytest.mark.row("203.12")
def test_directory_without_a_snapshot_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SnapshotNotFound, match="cannot be disposed of: it is not a checkpoint or savepoint"):
        dispose(str(tmp_path))
    assert dispose(str(tmp_path / "gone")), "which its deletion will say"


@pytest.mark.row("203.12")
def test_the_checkpoint_of_a_job_that_another_cluster_may_be_running_is_refused(tmp_path: Path) -> None:
    checkpoint = snapshot(tmp_path / ("ab" * 16) / "chk-3")
    owner = checkpoint.parent / "owner"
    owner.write_text("s3://ha/flights")
    with pytest.raises(SnapshotInUse, match="the job of this id in the cluster s3://ha/flights; if that cluster no"):
        dispose(str(checkpoint))
    owner.write_text("this")
    assert dispose(str(checkpoint))


@pytest.mark.row("203.12")
@pytest.mark.parametrize(
    ("cluster", "known"),
    [
        ("this", "while job 1+ is RUNNING"),
        ("this", "is at its end"),
        ("s3://ha", "is a job of s3://ha, which is unknown"),
    ],
)
def test_claimed_snapshot_is_refused_with_the_facts_about_its_claim(savepoint: Path, cluster: str, known: str) -> None:
    owner = Claimant("1" * 32, cluster, "file:///checkpoints/x")
    acquire(resolve(str(savepoint)), Claim(owner, savepoint.as_uri()))
    living = [References(owner.job_id, "RUNNING")] if "RUNNING" in known else []
    with pytest.raises(SnapshotInUse, match=f"{known}.*it has claimed the snapshot; .*snapshot release .*savepoint-1"):
        dispose(str(savepoint), *living)


CLAIMS = """
import sys
from ckpt_runtime.processes.process_mark import own_mark
from ckpt_runtime.storage.claims import Claim, Claimant, acquire
from ckpt_runtime.storage.filesystem import resolve

owner = Claimant("1" * 32, "session a", "file:///checkpoints/x", own_mark())
acquire(resolve(sys.argv[1]), Claim(owner, sys.argv[1]))
print("claimed", flush=True)
sys.stdin.read()
"""


@pytest.mark.row("203.12")
def test_a_claim_goes_to_the_next_job_when_the_session_of_its_owner_is_dead(savepoint: Path) -> None:
    savepoint.joinpath("_metadata").unlink()
    snapshot = write_snapshot(resolve(str(savepoint)))

    def claim(job_id: str, cluster: str) -> JobClaims:

        async def inside() -> JobClaims:
            with ThreadPoolExecutor(1) as pool:
                references = SnapshotReferences(lambda: (), lambda _: pool)
                return await references.claim(snapshot, job_id, savepoint.parent.as_uri(), cluster)

        return asyncio.run(inside())

    session = subprocess.Popen(
        [sys.executable, "-c", CLAIMS, savepoint.as_uri()], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert session.stdout is not None
        assert session.stdout.readline() == b"claimed\n"
        with pytest.raises(SnapshotInUse, match="a job of session a, which is unknown here"):
            claim("2" * 32, "session b")
        os.kill(session.pid, signal.SIGSTOP)
        with pytest.raises(SnapshotInUse):
            claim("2" * 32, "session b")
    finally:
        session.kill()
        session.communicate()
    assert claim("2" * 32, "session b").places == (savepoint.as_uri(),)
    with pytest.raises(SnapshotInUse, match="a job of session b"):
        claim("3" * 32, "file:///ha/default")
    found = read_claim(resolve(str(savepoint)))
    assert found is not None
    assert (found.owner.job_id, [job.job_id for job in found.earlier]) == ("2" * 32, ["1" * 32])
    assert [path.name for path in savepoint.iterdir() if path.name.startswith("claim")] == ["claim"]


@pytest.mark.row("203.12")
def test_end_of_a_process_proves_nothing_with_high_availability(savepoint: Path) -> None:
    savepoint.joinpath("_metadata").unlink()
    snapshot = write_snapshot(resolve(str(savepoint)))

    async def inside() -> JobClaims:
        with ThreadPoolExecutor(1) as pool:
            references = SnapshotReferences(lambda: (), lambda _: pool)
            return await references.claim(snapshot, "1" * 32, savepoint.parent.as_uri(), "file:///ha/default")

    assert asyncio.run(inside()).claimant.process is None


@pytest.mark.row("203.12")
def test_a_claim_looks_at_living_jobs_but_not_at_those_that_claim_as_well(savepoint: Path) -> None:
    def check(*living: References, lineage: str | None = None) -> tuple[str, ...]:
        async def inside() -> tuple[str, ...]:
            with ThreadPoolExecutor(1) as pool:
                references = SnapshotReferences(lambda: living, lambda _: pool)
                return await references.check_claimable(str(savepoint), "own", lineage)

        return asyncio.run(inside())

    here = (savepoint.as_uri(),)
    with pytest.raises(SnapshotInUse, match="cannot be claimed while job j is RUNNING: that job would start from it"):
        check(References("j", "RUNNING", snapshots=here))
    rival = References("j", "being submitted", snapshots=here, claims=True)
    assert check(References("own", "being submitted", snapshots=here), rival) == ()
    with pytest.raises(SnapshotInUse, match="it is a checkpoint of that job"):
        check(References("j", "RUNNING", savepoint.parent.as_uri()))
    assert check(References("j", "RUNNING", "file:///elsewhere")) == ("file:///elsewhere",)
    suspended = References("j", "suspended", snapshots=here, kept_for="lineage")
    assert check(suspended, lineage="lineage") == ()
    with pytest.raises(SnapshotInUse, match="cannot be claimed while job j is suspended"):
        check(suspended, lineage="another")
