"""A whole job with every socket in TLS, found by its leader's signed address: lost worker, savepoint, restore."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.contract.jobs import RunOptions
from ckpt_runtime.leader_retrieval import LeaderDirectory
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.certificates import Authority, internal_options, rest_options
from tests.support.driver_processes import high_availability
from tests.support.jobs import UNRIVALLED_S, fast, program_of, wait_for_restarts
from tests.support.outputs import assert_sequence, visible
from tests.support.patience import patient

TOKEN = "the-token"
PORTS = range(23_000, 23_400)
"""Below the ports that the system gives to other sockets, and more than all tests need that run at the same time."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[MiniCluster]:
    authority = Authority(tmp_path)
    options = rest_options(authority.issue("rest")) | internal_options(authority.issue("internal"), authority)
    options |= high_availability(tmp_path)
    first = PORTS.start
    options |= {"taskmanager.data.port": str(first), "taskmanager.data.port-count": str(len(PORTS))}
    with MiniCluster(configuration=options, rest=True, token=TOKEN, lease_timeout_s=UNRIVALLED_S) as running:
        yield running


def run(client: CkptClient, directory: Path, savepoint: str | None = None) -> str:
    options = RunOptions(
        entry_point="sequence:pipeline",
        arguments=("--output", str(directory / "out"), "--rows", "0", "--rate", "2000", "--batch", "64"),
        parallelism=2,
        configuration=fast(),
        savepoint_path=savepoint,
    )
    job_id = client.run_pipeline(client.upload_pipeline(*pack_pipeline(program_of("sequence"))), options)
    client.wait_for_state(job_id, ["RUNNING"], timeout_s=patient(60))
    return job_id


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_job_runs_whole_with_everything_on(cluster: MiniCluster, tmp_path: Path) -> None:
    source = LeaderDirectory(str(tmp_path / "ha"), token=TOKEN)
    with CkptClient(source, token=TOKEN, verify=str(tmp_path / "authority.pem")) as client:
        job_id = run(client, tmp_path)
        assert client.url == cluster.rest_url
        assert client.url.startswith("https://")
        cluster.wait_for_checkpoints(job_id, 1)
        vertices = cluster.call(cluster.dispatcher.job_details(job_id)).vertices
        endpoints = {subtask.endpoint for vertex in vertices for subtask in vertex.subtasks}
        assert all(int(endpoint.rpartition(":")[2]) in PORTS for endpoint in endpoints)
        os.kill(cluster.worker_pids(job_id)[0], signal.SIGKILL)
        wait_for_restarts(cluster, job_id, 1)
        cluster.wait_for_checkpoints(job_id, 2)
        trigger = client.stop_with_savepoint(job_id, str(tmp_path / "savepoints"))
        done = client.wait_for_operation("savepoint", trigger, job_id, timeout_s=patient(60))
        client.wait_for_state(job_id, ["FINISHED"], timeout_s=patient(60))
        before = assert_sequence(tmp_path / "out")
        known = len(visible(tmp_path / "out" / "order"))
        resumed = run(client, tmp_path, done.location)
        cluster.wait_until(lambda: len(visible(tmp_path / "out" / "order")) > known, "more rows")
        trigger = client.stop_with_savepoint(resumed, str(tmp_path / "savepoints"))
        client.wait_for_operation("savepoint", trigger, resumed, timeout_s=patient(60))
        client.wait_for_state(resumed, ["FINISHED"], timeout_s=patient(60))
        assert assert_sequence(tmp_path / "out") > before
