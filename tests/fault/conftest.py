"""A session without Spark that the tests of a module may harm, and a disk that they may fill."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import SequenceJob, skip_unless_root


@pytest.fixture(scope="module")
def cluster() -> Iterator[MiniCluster]:
    with MiniCluster(heartbeat_interval_s=0.25) as started:
        yield started


@pytest.fixture
def job(cluster: MiniCluster, tmp_path: Path) -> Iterator[SequenceJob]:
    job = SequenceJob(cluster, tmp_path)
    yield job
    job.end()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    skip_unless_root()
    place = tmp_path / "checkpoints"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a file system here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)
