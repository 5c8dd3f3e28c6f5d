"""Forged but well-formed documents over REST to a session with a running job: taken, or refused by a field's name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import httpx
import pytest

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.forging import EVERY_VALUE, forged
from tests.support.jobs import SequenceJob, fast, program_of
from tests.support.patience import patient

pytestmark = pytest.mark.slow

_DEEP: Any = []
for _ in range(40):
    _DEEP = {"x": [_DEEP]}
VALUES = (*EVERY_VALUE, 1e308, -(1 << 63), (1 << 31) - 1, "9" * 400, "\0", "../x", _DEEP)
_BARE = ("Error(", "Traceback", "KeyError", "TypeError", "ValueError", "IndexError", "AttributeError", "pydantic")


class Requests:
    """One of each request that takes a document, to a job that runs.

    What would start or end a job is refused as it stands, for a reason of its own: ``nothing`` is not a savepoint, and
    ``ended`` is a job that has ended.
    """

    def __init__(self, job: SequenceJob, ended: str, program: str) -> None:
        directory = job.directory
        path, nothing = f"/jobs/{job.job_id}", str(directory / "nothing")
        savepoint = job.cluster.savepoint(job.job_id, directory / "savepoints")
        submission = {
            "entryClass": "sequence:pipeline",
            "programArgsList": ["--output", str(directory / "other")],
            "parallelism": 1,
            "jobId": "1" * 32,
            "likeJob": job.job_id,
            "savepointPath": nothing,
            "allowNonRestoredState": True,
            "claimMode": "NO_CLAIM",
            "flinkConfiguration": {"execution.checkpointing.interval": "10s"},
            "fork": True,
        }
        options = {"execution.checkpointing.interval": "1 h", "execution.checkpointing.timeout": None}
        upgrade = {"owner": "a forged upgrade", "duration": 3_600_000, "ownJobs": ["5" * 32], "snapshot": savepoint}
        settings = {"checkpointInterval": 3_600_000, "checkpointTimeout": 900_000, "unalignedEnabled": True}
        triggered = {"target-directory": str(directory / "more"), "cancel-job": False, "formatType": "NATIVE"}
        stop = {"targetDirectory": str(directory / "more"), "drain": False, "formatType": "CANONICAL"}
        mark = {"savepoint-path": savepoint, "kind": "DRILL", "passed": True, "by": "ana", "detail": "-", "duration": 9}
        bounds = httpx.get(f"{job.cluster.rest_url}{path}/resource-requirements", timeout=60).json()
        self.all: dict[tuple[str, str], dict[str, Any]] = {
            ("PUT", f"{path}/config"): {"configuration": {"parallelism.default": "1"}, "version": 1},
            ("PATCH", f"{path}/config"): {"configuration": options},
            ("PUT", f"{path}/upgrade"): upgrade,
            ("PUT", f"{path}/resource-requirements"): bounds,
            ("PATCH", f"{path}/checkpoints/configuration"): settings,
            ("POST", f"{path}/checkpoints"): {"checkpointType": "FULL", "triggerId": "2" * 32},
            ("POST", f"{path}/savepoints"): {**triggered, "triggerId": "3" * 32},
            ("POST", f"/jobs/{ended}/stop"): {**stop, "triggerId": "4" * 32},
            ("POST", "/savepoints/marks"): mark,
            ("POST", "/savepoint-disposal"): {"savepoint-path": nothing, "triggerId": "5" * 32},
            ("POST", f"/jars/{program}/plan"): submission,
            ("POST", f"/jars/{program}/run"): submission,
            ("POST", f"/jars/{program}/drill"): submission,
        }


@pytest.fixture(scope="module")
def job(cluster: MiniCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SequenceJob]:
    """Takes a checkpoint when it is asked for one."""
    running = SequenceJob(cluster, tmp_path_factory.mktemp("forged"))
    running.start(rate=100, parallelism=1, configuration=fast(execution__checkpointing__interval="1h"))
    running.running()
    yield running
    cluster.call(cluster.dispatcher.release_lineage(running.job_id, None))
    running.end()


@pytest.fixture(scope="module")
def requests(cluster: MiniCluster, job: SequenceJob, tmp_path_factory: pytest.TempPathFactory) -> Requests:
    ended = SequenceJob(cluster, tmp_path_factory.mktemp("ended"))
    ended.start(parallelism=1)
    ended.canceled()
    with CkptClient(cluster.rest_url) as client:
        program = client.upload_pipeline(*pack_pipeline(program_of("sequence")))
    return Requests(job, ended.job_id, program)


def _would_start_a_job(path: str, change: str) -> bool:
    return path.endswith(("/run", "/drill", "/plan")) and change in ("savepointPath: missing", "savepointPath: None")


def _fault(answer: httpx.Response, change: str, unforged: httpx.Response) -> str | None:
    """What is wrong with the answer to a forged document."""
    if answer.status_code < 300 or answer.text == unforged.text:
        return None
    if not 400 <= answer.status_code < 500:
        return "this is no answer to a bad request"
    text = " ".join(answer.json()["errors"])
    if any(name in text for name in _BARE):
        return "the answer shows an error of Python"
    # A conflict is about what the session does, not about a field.
    named = answer.status_code == 409 or any(name in text for name in change.split(": ", maxsplit=1)[0].split("."))
    return None if named else "the answer does not name the field"


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)])
def test_each_forged_document_is_taken_or_refused_by_name_and_the_job_still_takes_checkpoints(
    cluster: MiniCluster, job: SequenceJob, requests: Requests, every: int
) -> None:
    """Or ``every`` n-th of them."""
    found, refused = [], 0
    restarts = cluster.restarts(job.job_id)
    with httpx.Client(base_url=cluster.rest_url, timeout=120) as http:
        for (method, path), document in requests.all.items():
            unforged = http.request(method, path, json=document)
            for change, changed in islice(forged(document, VALUES), None, None, every):
                if _would_start_a_job(path, change):
                    continue
                answer = http.request(method, path, content=json.dumps(changed))
                refused += answer.status_code >= 400
                if fault := _fault(answer, change, unforged):
                    found.append(f"{method} {path}, {change[:100]}: {answer.status_code}, {fault}: {answer.text[:300]}")
    assert not found, "\n".join(found)
    assert refused > 500 // every
    with CkptClient(cluster.rest_url) as client:
        client.reset_checkpoint_config(job.job_id)
        client.wait_for_operation(
            "checkpoint", client.trigger_checkpoint(job.job_id), job.job_id, timeout_s=patient(60)
        )
    assert cluster.restarts(job.job_id) == restarts
    assert cluster.failure(job.job_id) == ""
