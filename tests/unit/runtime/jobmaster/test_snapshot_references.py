"""Snapshots that living jobs refer to are known by their place, however their path is written."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckpt_runtime.jobmaster.gateway import SnapshotInUse
from ckpt_runtime.jobmaster.snapshot_references import References, SnapshotReferences
from ckpt_runtime.storage.errors import InvalidLocationError


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
