"""Paths that users name lead to FIFOs, to storage that never answers, and to nowhere: a running job does not notice."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import httpx
import pytest
from fsspec import AbstractFileSystem

from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import SequenceJob, fast, program_of
from tests.support.patience import patient

pytestmark = pytest.mark.attack

TIMEOUT_S = patient(60)
STORAGE_TIMEOUT_S = 4


class SilentFileSystem(AbstractFileSystem):
    """Storage that never answers anything, as an address behind a firewall that drops packets."""

    protocol = "silent"
    release = threading.Event()

    def _silence(self, *arguments: Any, **options: Any) -> Any:
        self.release.wait(TIMEOUT_S)
        raise TimeoutError

    info = exists = isdir = ls = makedirs = cat_file = pipe_file = rm_file = _silence


@pytest.fixture(scope="module")
def session() -> Iterator[MiniCluster]:
    fsspec.register_implementation("silent", SilentFileSystem, clobber=True)
    with MiniCluster(rest=True, configuration={"jobmanager.storage.timeout": f"{STORAGE_TIMEOUT_S} s"}) as started:
        yield started
        SilentFileSystem.release.set()


@pytest.fixture(scope="module")
def client(session: MiniCluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=session.rest_url, timeout=TIMEOUT_S) as connected:
        yield connected


@pytest.fixture(scope="module")
def pipeline_id(client: httpx.Client) -> str:
    name, archive = pack_pipeline(program_of("sequence"))
    answer = client.post("/jars/upload", files={"jarfile": (name, archive)})
    return answer.json()["filename"].rsplit("/", 1)[-1]


@pytest.fixture(scope="module")
def job(session: MiniCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SequenceJob]:
    running = SequenceJob(session, tmp_path_factory.mktemp("attacked"))
    running.start(parallelism=1, rate=1000, configuration=fast())
    running.running()
    yield running
    running.end()


def restore(client: httpx.Client, pipeline_id: str, path: str) -> httpx.Response:
    return client.post(f"/jars/{pipeline_id}/run", json={"entryClass": "sequence:pipeline", "savepointPath": path})


def test_fifos_named_like_metadata_are_refused_at_once(
    session: MiniCluster, client: httpx.Client, pipeline_id: str, job: SequenceJob, tmp_path: Path
) -> None:
    for number in range(12):
        (tmp_path / str(number)).mkdir()
        os.mkfifo(tmp_path / str(number) / "_metadata")
    with ThreadPoolExecutor(12) as attackers:
        answers = attackers.map(lambda n: restore(client, pipeline_id, str(tmp_path / str(n))), range(12))
        for answer in answers:
            assert answer.status_code == 400, answer.text
            assert "it is a FIFO, and only files are read" in answer.text
    session.wait_for_checkpoints(job.job_id, 2)


def test_a_disposal_of_a_fifo_fails_by_name(client: httpx.Client, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "_metadata")
    trigger = client.post("/savepoint-disposal", json={"savepoint-path": str(tmp_path)}).json()["request-id"]
    MiniCluster.wait_until(
        lambda: client.get(f"/savepoint-disposal/{trigger}").json()["status"]["id"] == "COMPLETED", "the disposal"
    )
    assert "FIFO" in client.get(f"/savepoint-disposal/{trigger}").text


@pytest.mark.parametrize("url", ["memory://gone/x", "data://x", "local://x", "nosuch://x"])
def test_a_directory_from_which_no_job_can_resume_is_refused_before_anything_starts(
    session: MiniCluster, client: httpx.Client, job: SequenceJob, url: str
) -> None:
    for operation in ("stop", "savepoints"):
        answer = client.post(f"/jobs/{job.job_id}/{operation}", json={"target-directory": url})
        assert answer.status_code == 400, answer.text
        assert url in answer.text
        assert "s3" in answer.text
    session.wait_for_checkpoints(job.job_id, 1)


@pytest.mark.parametrize("option", ["execution.checkpointing.dir", "execution.checkpointing.savepoint-dir"])
def test_submission_is_refused_if_snapshots_would_be_kept_in_lost_storage(
    client: httpx.Client, pipeline_id: str, option: str, tmp_path: Path
) -> None:
    body = {
        "entryClass": "sequence:pipeline",
        "programArgsList": ["--output", str(tmp_path)],
        "flinkConfiguration": {option: "memory://x"},
    }
    answer = client.post(f"/jars/{pipeline_id}/run", json=body)
    assert answer.status_code == 400
    assert option in answer.text


def test_storage_that_never_answers_stops_no_other_job(
    session: MiniCluster, client: httpx.Client, pipeline_id: str, job: SequenceJob
) -> None:
    """The last of the tests: from then on other addresses are refused until these answer, local paths never."""
    with ThreadPoolExecutor(24) as attackers:
        answers = list(attackers.map(lambda n: restore(client, pipeline_id, f"silent://{n}/x"), range(24)))
    assert {answer.status_code for answer in answers} <= {400, 503}
    assert any(f"has not come back within {STORAGE_TIMEOUT_S} s" in answer.text for answer in answers)
    refused = restore(client, pipeline_id, "silent://25/x")
    assert refused.status_code == 503
    assert "at most 4 may hang" in refused.text
    assert restore(client, pipeline_id, "/nowhere").status_code == 400
    session.wait_for_checkpoints(job.job_id, 3)
    with httpx.Client(base_url=session.rest_url, timeout=TIMEOUT_S) as other:
        assert other.get("/overview").status_code == 200
    SilentFileSystem.release.set()
    session.wait_until(
        lambda: "may hang" not in restore(client, pipeline_id, "silent://25/x").text, "storage to answer"
    )
