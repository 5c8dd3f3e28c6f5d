"""One session without Spark for the folder, and a client of it for each module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import SequenceJob


@pytest.fixture(scope="session")
def cluster() -> Iterator[MiniCluster]:
    configuration = {"jobmanager.execution.dynamic-configuration.allow-list": "*"}
    with MiniCluster(rest=True, configuration=configuration) as started:
        yield started


@pytest.fixture(scope="module")
def client(cluster: MiniCluster) -> Iterator[CkptClient]:
    with CkptClient(cluster.rest_url) as connected:
        yield connected


@pytest.fixture
def job(cluster: MiniCluster, tmp_path: Path) -> Iterator[SequenceJob]:
    job = SequenceJob(cluster, tmp_path)
    yield job
    job.end()
