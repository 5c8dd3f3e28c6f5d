"""One Airflow and one session of the engine for all tests that need no other: both take from others' time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from ckpt_runtime.rest import server as rest_server
from ckpt_runtime.rest.app import create_app
from ckpt_runtime.testing.mini_cluster import MiniCluster
from demo.airflow_instance import COMPONENTS, LocalAirflow
from tests.support.jobs import SequenceJob, fast
from tests.system.airflow_instance import make_airflow, until
from tests.system.lost_requests import Hanging, Watched

TOKEN = "a-token-that-no-browser-sees"
SLOWLY: dict[str, Any] = {"rate": 50, "batch": 8, "parallelism": 1}
"""For ``SequenceJob.start``: a job runs, and costs processor time, for as long as Airflow needs for its tasks."""


@dataclass
class Session:
    """A session without Spark, and the requests to its REST API."""

    cluster: MiniCluster
    port: int
    watched: Watched
    guarded_port: int
    """Of the same session behind :data:`TOKEN`."""

    @property
    def requests(self) -> Counter[str]:
        """How often each request came (``GET /jobs/<id>``)."""
        return self.watched.requests

    def hanging(self, pattern: str, *, carried_out: bool = False) -> AbstractContextManager[Hanging]:
        """See :meth:`Watched.hanging`."""
        return self.watched.hanging(pattern, carried_out=carried_out)

    def jobs(self) -> set[str]:
        return {job.job_id for job in self.cluster.call(self.cluster.dispatcher.list_jobs())}

    def job_after(self, known: set[str]) -> str:
        """Waits for one more job."""
        return until(lambda: next(iter(self.jobs() - known), None), "a job")


def every_second(**changes: str | None) -> dict[str, str]:
    """The options of a job that takes a checkpoint every second, with changes as in ``fast``."""
    return fast(**{"execution__checkpointing__interval": "1 s", **changes})


@contextmanager
def open_session() -> Iterator[Session]:
    """A session of its own."""
    with MiniCluster() as cluster:
        watched = Watched(create_app(cluster.dispatcher, token=None))

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            await watched.serve(scope, receive, send)

        server, port = cluster.call(rest_server.start(serve, "127.0.0.1", 0, interface="asgi3"))
        guarded, guarded_port = cluster.call(
            rest_server.start(create_app(cluster.dispatcher, token=TOKEN), "127.0.0.1", 0)
        )
        yield Session(cluster, port, watched, guarded_port)
        cluster.call(rest_server.stop(guarded))
        cluster.call(rest_server.stop(server))


@pytest.fixture(scope="session")
def session() -> Iterator[Session]:
    with open_session() as opened:
        yield opened


@pytest.fixture
def job(session: Session, tmp_path: Path) -> Iterator[SequenceJob]:
    """Not yet started."""
    job = SequenceJob(session.cluster, tmp_path)
    yield job
    job.release("processor")
    job.end()


@pytest.fixture(scope="session")
def airflow(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalAirflow]:
    """A healthy Airflow whose connection ``ckpt_default`` leads to the session."""
    connection = json.dumps({"conn_type": "ckpt", "host": "127.0.0.1", "port": session.port})
    with make_airflow(tmp_path_factory.mktemp("airflow"), {"ckpt_default": connection}) as instance:
        instance.wait_healthy(300)
        yield instance
        # Nothing runs any more: Airflow's processes would take a quarter of a minute to end by themselves.
        for name in COMPONENTS:
            instance.kill_component(name)
