"""One Airflow and one session of the engine for the tests of a module, ended with it: both take from others' time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from ckpt_runtime.rest import server as rest_server
from ckpt_runtime.rest.app import create_app
from ckpt_runtime.testing.mini_cluster import MiniCluster
from demo.airflow_instance import LocalAirflow
from tests.support.jobs import SequenceJob
from tests.system.airflow_instance import make_airflow, until

TOKEN = "a-token-that-no-browser-sees"


@dataclass
class Session:
    """A session without Spark, and how often each request came to its REST API (``GET /jobs/<id>``)."""

    cluster: MiniCluster
    port: int
    requests: Counter[str]
    guarded_port: int
    """Of the same session behind :data:`TOKEN`."""

    def jobs(self) -> set[str]:
        return {job.job_id for job in self.cluster.call(self.cluster.dispatcher.list_jobs())}

    def job_after(self, known: set[str]) -> str:
        """Waits for one more job."""
        return until(lambda: next(iter(self.jobs() - known), None), "a job")


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    requests: Counter[str] = Counter()
    with MiniCluster() as cluster:
        application = create_app(cluster.dispatcher, token=None)

        async def counting(scope: Scope, receive: Receive, send: Send) -> None:
            requests[f"{scope['method']} {scope['path']}"] += 1
            await application(scope, receive, send)

        server, port = cluster.call(rest_server.start(counting, "127.0.0.1", 0, interface="asgi3"))
        guarded, guarded_port = cluster.call(
            rest_server.start(create_app(cluster.dispatcher, token=TOKEN), "127.0.0.1", 0)
        )
        yield Session(cluster, port, requests, guarded_port)
        cluster.call(rest_server.stop(guarded))
        cluster.call(rest_server.stop(server))


@pytest.fixture
def job(session: Session, tmp_path: Path) -> Iterator[SequenceJob]:
    """Not yet started."""
    job = SequenceJob(session.cluster, tmp_path)
    yield job
    job.release("processor")
    job.end()


@pytest.fixture(scope="module")
def airflow(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalAirflow]:
    """A healthy Airflow whose connection ``ckpt_default`` leads to the session."""
    connection = json.dumps({"conn_type": "ckpt", "host": "127.0.0.1", "port": session.port})
    with make_airflow(tmp_path_factory.mktemp("airflow"), {"ckpt_default": connection}) as instance:
        instance.wait_healthy(300)
        yield instance
