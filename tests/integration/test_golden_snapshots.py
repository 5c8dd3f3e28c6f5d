"""Snapshots that this and earlier versions wrote: each is whole, and a job starts from it at any parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from ckpt_runtime.snapshots.snapshot import open_snapshot
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.golden import DIRECTORY, KEPT, KINDS, PARALLELISM, SETS, expected, placed, restored


def test_the_latest_version_has_every_kind() -> None:
    assert {name for version, name in KEPT if version == SETS[-1]} == set(KINDS)


@pytest.mark.parametrize(("version", "name"), KEPT)
def test_a_kept_snapshot_is_whole(version: str, name: str, tmp_path: Path) -> None:
    snapshot = open_snapshot(str(placed(DIRECTORY / version / name, tmp_path)))
    assert snapshot.verify() == []
    assert snapshot.metadata.is_savepoint == KINDS[name].savepoint


def starts() -> Iterator[ParameterSet]:
    """Each snapshot with the parallelisms of the jobs that start from it. The suite has one of each second, in turn."""
    for number, (version, name) in enumerate(KEPT):
        parallelisms = (PARALLELISM, PARALLELISM - 1) if version == SETS[-1] else (PARALLELISM + 1,)
        for at, parallelism in enumerate(parallelisms):
            marks = () if number % 2 == 0 and at == number // 2 % len(parallelisms) else pytest.mark.long
            yield pytest.param(version, name, parallelism, marks=marks)


@pytest.mark.row("203.13")
@pytest.mark.parametrize(("version", "name", "parallelism"), [*starts()])
def test_jobs_resume_from_a_golden_snapshot(
    cluster: MiniCluster, version: str, name: str, parallelism: int, tmp_path: Path
) -> None:
    snapshot = DIRECTORY / version / name
    copy = placed(snapshot, tmp_path / "snapshot")
    wanted = expected(snapshot)
    (found,) = restored(cluster, copy, KINDS[name], tmp_path / "jobs", (parallelism,))
    for table in KINDS[name].tables:
        assert found[table] == wanted[table]
