"""Snapshots that this and earlier versions wrote: each is whole, and a job goes on from it at any parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_runtime.snapshots.snapshot import open_snapshot
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.golden import DIRECTORY, KINDS, PARALLELISM, TABLES, expected, placed, restored

SETS = sorted(path.name for path in DIRECTORY.iterdir())


@pytest.mark.parametrize("version", SETS)
@pytest.mark.parametrize("name", KINDS)
def test_a_kept_snapshot_is_whole(version: str, name: str, tmp_path: Path) -> None:
    snapshot = open_snapshot(str(placed(DIRECTORY / version / name, tmp_path)))
    assert snapshot.verify() == []
    assert snapshot.metadata.is_savepoint == KINDS[name].savepoint


@pytest.mark.parametrize("version", SETS)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("parallelism", [PARALLELISM, PARALLELISM - 1])
def test_a_job_goes_on_from_a_kept_snapshot(
    cluster: MiniCluster, version: str, name: str, parallelism: int, tmp_path: Path
) -> None:
    snapshot = DIRECTORY / version / name
    copy = placed(snapshot, tmp_path / "snapshot")
    found, wanted = restored(cluster, copy, KINDS[name], parallelism, tmp_path / "job"), expected(snapshot)
    for table in TABLES:
        assert found[table] == wanted[table]
