"""Requests made from the OpenAPI document to a session with a job that runs: documented answers, and the job runs on.

Requests that write to a directory, start processes or end the job or session are left to the dispatcher in memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from schemathesis import checks
from schemathesis.specs.openapi import checks as openapi_checks

from ckpt_runtime.rest import server as rest_server
from ckpt_runtime.rest.app import create_app
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.fuzz.budget import ANSWER_S, LONG, budget
from tests.support.jobs import SequenceJob, fast
from tests.unit.runtime.rest.fake_gateway import FakeGateway

pytestmark = [pytest.mark.timeout(7200 if LONG else 900), pytest.mark.slow]

SCHEMA = schemathesis.openapi.from_dict(create_app(FakeGateway(), token=None).openapi())
READS = SCHEMA.include(method="GET")
CONFIGURATION = SCHEMA.include(path="/jobs/{jobid}/checkpoints/configuration", method=["PATCH", "DELETE"])
CHECKS = (
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SequenceJob]:
    """One that runs, has had checkpoints and a savepoint, and tolerates failed ones."""
    with MiniCluster() as cluster:
        running = SequenceJob(cluster, tmp_path_factory.mktemp("live"))
        running.start(rate=100, configuration=fast(execution__checkpointing__tolerable_failed_checkpoints="1000000"))
        running.running()
        cluster.wait_for_checkpoints(running.job_id, 2)
        cluster.savepoint(running.job_id, running.directory / "savepoints")
        yield running
        running.canceled()


@pytest.fixture(scope="module")
def url(job: SequenceJob) -> Iterator[str]:
    """Where the session is served. A stream of events ends with what there is, as when the session ends.

    A client that waits for the end of a body would follow it until its time is over, a minute for each request.
    """
    app = create_app(job.cluster.dispatcher, token=None)
    app.state.event_streams.end()
    server, port = job.cluster.call(rest_server.start(app, "127.0.0.1", 0))
    yield f"http://127.0.0.1:{port}"
    job.cluster.call(rest_server.stop(server))


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    """One client for all: each would load the certificates of all authorities, which takes as long as ten requests."""
    with httpx.Client(base_url=url, timeout=ANSWER_S) as client:
        yield client


@pytest.fixture(scope="module")
def known(job: SequenceJob, http: httpx.Client) -> dict[str, str]:
    """Ids that exist."""
    vertices = http.get(f"/jobs/{job.job_id}").json()["vertices"]
    return {"jobid": job.job_id, "vertexid": vertices[0]["id"], "checkpointid": "1"}


def exchange(case: schemathesis.Case, job: SequenceJob, url: str, known: dict[str, str]) -> None:
    """Aims at what exists, sends, and checks the answer and the job."""
    for name, value in list(case.path_parameters.items()):
        if name in known and str(value)[:1] not in "ef":
            case.path_parameters[name] = known[name]
    response = case.call(base_url=f"{url}/v1", timeout=ANSWER_S)
    case.validate_response(response, checks=CHECKS)
    assert job.cluster.status(job.job_id) is JobStatus.RUNNING


@READS.parametrize()
@budget(1)
def test_reads(case: schemathesis.Case, job: SequenceJob, url: str, known: dict[str, str]) -> None:
    exchange(case, job, url, known)


@pytest.mark.row("571.8")
@CONFIGURATION.parametrize()
@budget(12)
def test_checkpoint_configuration(
    case: schemathesis.Case, job: SequenceJob, url: str, known: dict[str, str], http: httpx.Client
) -> None:
    try:
        exchange(case, job, url, known)
    finally:
        assert http.delete(f"/jobs/{job.job_id}/checkpoints/configuration").json()["overrides"] == []


def test_the_job_continues(job: SequenceJob) -> None:
    job.cluster.wait_for_checkpoints(job.job_id, 2)
