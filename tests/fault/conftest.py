"""A session without Spark that the tests of a module may harm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import SequenceJob


@pytest.fixture(scope="module")
def cluster() -> Iterator[MiniCluster]:
    with MiniCluster(heartbeat_interval_s=0.25) as started:
        yield started


@pytest.fixture
def job(cluster: MiniCluster, tmp_path: Path) -> Iterator[SequenceJob]:
    job = SequenceJob(cluster, tmp_path)
    yield job
    job.end()
