"""Snapshots that living jobs refer to are known by their place, however their path is written."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckpt_runtime.jobmaster.gateway import NoSnapshot, SnapshotInUse
from ckpt_runtime.jobmaster.snapshot_references import References, SnapshotReferences
from ckpt_runtime.storage.claims import Claim, Claimant, acquire
from ckpt_runtime.storage.errors import InvalidLocationError
from ckpt_runtime.storage.filesystem import resolve


def snapshot(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "_metadata").touch()
    return directory


def dispose(path: str, *living: References) -> bool:
    """Begins and ends a disposal; whether it was under way in between."""

    async def inside() -> bool:
        with ThreadPoolExecutor(1) as pool:
            references = SnapshotReferences(lambda: living, pool)
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
def test_what_a_job_starts_from_is_known_by_all_its_spellings(tmp_path: Path, savepoint: Path, spelling: str) -> None:
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


def test_while_it_is_not_known_what_a_job_refers_to_nothing_goes(savepoint: Path) -> None:
    with pytest.raises(SnapshotInUse, match="it is not known what that job refers to"):
        dispose(str(savepoint), References("j", "not recovered yet", is_known=False))


def test_other_snapshots_may_go_and_what_cannot_be_looked_at_hinders_nobody(tmp_path: Path, savepoint: Path) -> None:
    living = References("j", "RUNNING", "nosuch://x", ((tmp_path / "gone").as_uri(), "nosuch://y"))
    assert dispose(str(savepoint), living)
    with pytest.raises(InvalidLocationError):
        dispose("relative", living)


@pytest.mark.row("203.12")
def test_a_directory_that_is_no_snapshot_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoSnapshot, match="cannot be disposed of: it holds no checkpoint or savepoint"):
        dispose(str(tmp_path))
    assert dispose(str(tmp_path / "gone")), "which its deletion will say"


@pytest.mark.row("203.12")
def test_the_checkpoint_of_a_job_that_another_cluster_may_be_running_is_refused(tmp_path: Path) -> None:
    checkpoint = snapshot(tmp_path / ("ab" * 16) / "chk-3")
    owner = checkpoint.parent / "owner"
    owner.write_text("s3://ha/flights")
    with pytest.raises(SnapshotInUse, match="the job of this id in the cluster s3://ha/flights; if that cluster is no"):
        dispose(str(checkpoint))
    owner.write_text("this")
    assert dispose(str(checkpoint))


@pytest.mark.row("203.12")
@pytest.mark.parametrize(
    ("cluster", "known"),
    [
        ("this", "while job 1+ is RUNNING"),
        ("this", "is at its end"),
        ("s3://ha", "is a job of s3://ha, of which nothing"),
    ],
)
def test_a_snapshot_that_a_job_has_claimed_is_refused_with_what_is_known_of_it(
    savepoint: Path, cluster: str, known: str
) -> None:
    owner = Claimant("1" * 32, cluster, "file:///checkpoints/x")
    acquire(resolve(str(savepoint)), Claim(owner, savepoint.as_uri()))
    living = [References(owner.job_id, "RUNNING")] if "RUNNING" in known else []
    with pytest.raises(SnapshotInUse, match=f"{known}.*it has claimed the snapshot; .*delete .*savepoint-1/claim"):
        dispose(str(savepoint), *living)


@pytest.mark.row("203.12")
def test_a_claim_looks_at_living_jobs_but_not_at_those_that_claim_as_well(savepoint: Path) -> None:
    def check(*living: References) -> tuple[str, ...]:
        async def inside() -> tuple[str, ...]:
            with ThreadPoolExecutor(1) as pool:
                return await SnapshotReferences(lambda: living, pool).check_claimable(str(savepoint), "own")

        return asyncio.run(inside())

    here = (savepoint.as_uri(),)
    with pytest.raises(SnapshotInUse, match="cannot be claimed while job j is RUNNING: that job would start from it"):
        check(References("j", "RUNNING", snapshots=here))
    rival = References("j", "being submitted", snapshots=here, claims=True)
    assert check(References("own", "being submitted", snapshots=here), rival) == ()
    with pytest.raises(SnapshotInUse, match="it is a checkpoint of that job"):
        check(References("j", "RUNNING", savepoint.parent.as_uri()))
    assert check(References("j", "RUNNING", "file:///elsewhere")) == ("file:///elsewhere",)
