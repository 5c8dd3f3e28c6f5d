"""A session whose REST API is away for a minute, in time that passes at once: every wait continues and polls rarely."""

from __future__ import annotations

import asyncio
import logging

import pytest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from airflow_provider_ckpt.conditions.base import MAX_PAUSE_SECONDS, Condition, Wait
from airflow_provider_ckpt.conditions.checkpoint import CheckpointCondition, CheckpointGoal
from airflow_provider_ckpt.conditions.job import JobStatusCondition, ReadyForSnapshotCondition
from airflow_provider_ckpt.event_hub import MAX_PAUSE_SECONDS as MAX_HUB_PAUSE_SECONDS
from airflow_provider_ckpt.event_hub import EventHub
from ckpt_runtime.client.clients import AsyncCkptClient
from ckpt_runtime.jobmaster.event_log import EventLog
from ckpt_runtime.rest.app import create_app
from ckpt_runtime.scheduler.job_status import JobStatus
from tests.support.virtual_time import InLoopServer, run_virtually
from tests.unit.provider.conftest import JOB
from tests.unit.runtime.rest.fake_gateway import FakeGateway

MINUTE, INTERVAL = 60.0, 2.0
LONGEST = {"stream": 1.2 * MAX_HUB_PAUSE_SECONDS + 1, "poll": 1.2 * MAX_HUB_PAUSE_SECONDS + INTERVAL + 1}
"""Seconds from the session's return to the end of waits whose condition is met by then; its own connection: a pause."""
WAITS = 20

pytestmark = pytest.mark.row("air.3", "air.11")


def conditions() -> list[Condition]:
    return [
        JobStatusCondition(JOB, ["FINISHED"]),
        CheckpointCondition(JOB, CheckpointGoal(count=1)),
        ReadyForSnapshotCondition(JOB),
    ]


def without_streams(application: ASGIApp) -> ASGIApp:
    """As Flink."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        found = Response("{}", 404) if scope["path"] == "/events" else application
        await found(scope, receive, send)

    return serve


class Minute:
    """Waits, of which one kind only can be met before the session comes back, and what they ask meanwhile."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.gateway = FakeGateway()
        self.gateway.add_job(JOB)
        self.gateway.move(JOB, JobStatus.RESTARTING)
        application = create_app(self.gateway, token=None)
        self.server = InLoopServer(application if way == "stream" else without_streams(application))
        self.ended: list[float] = []
        self.deadline: float | None = None

    def client(self) -> AsyncCkptClient:
        return AsyncCkptClient("http://127.0.0.1:8081", transport=self.server, retry_timeout_s=0)

    async def wait(self, condition: Condition, hub: EventHub | None) -> str:
        loop = asyncio.get_running_loop()
        log = logging.getLogger("wait")
        wait = Wait(condition, self.deadline, INTERVAL, log, loop.time, loop.time)
        if hub is None:
            async with self.client() as client:
                found = await wait.until_verdict(client)
        else:
            member = hub.join(condition, JOB, INTERVAL)
            found = await wait.until_verdict(member)
            hub.leave(member)
        self.ended.append(loop.time())
        return found.status.value

    async def go_away(self, waits: list[asyncio.Task[str]]) -> float:
        """For a minute, in which everything happens that is waited for. Returns when it is back."""
        await asyncio.sleep(3)
        assert not any(wait.done() for wait in waits)
        self.server.away = True
        await asyncio.sleep(MINUTE / 2)
        job = self.gateway.jobs[JOB]
        self.gateway.complete_checkpoint(job)
        self.gateway.move(JOB, JobStatus.RUNNING)
        self.gateway.move(JOB, JobStatus.FINISHED)
        self.gateway.events = EventLog("another-driver")
        await asyncio.sleep(MINUTE / 2)
        assert not any(wait.done() for wait in waits)
        self.server.away = False
        return asyncio.get_running_loop().time()

    async def run(self) -> tuple[list[str], float]:
        hub = None if self.way == "own connection" else EventHub(self.client())
        kinds = [each for _ in range(1 if hub is None else WAITS) for each in conditions()]
        waits = [asyncio.create_task(self.wait(condition, hub)) for condition in kinds]
        back = await self.go_away(waits)
        found = await asyncio.gather(*waits)
        if hub is not None:
            assert hub.is_idle
            hub.close()
            await asyncio.gather(hub._watching, return_exceptions=True)
        assert self.server.streams == set()
        return found, back


@pytest.mark.parametrize("way", ["stream", "poll", "own connection"])
def test_wait_continues_after_the_session_did_not_answer_for_a_minute(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its end comes a pause after the session's return; until then it is asked seldom, however many wait."""
    minute = Minute(way)
    with caplog.at_level(logging.INFO, logger="wait"):
        found, back = run_virtually(minute.run())
    assert set(found) == {"done"}
    assert max(minute.ended) - back <= LONGEST.get(way, 1.2 * MAX_PAUSE_SECONDS + INTERVAL)
    asked = [line for at, line in minute.server.requests if back - MINUTE <= at < back]
    assert 3 < len(asked) <= 45, asked
    lines = [record.getMessage() for record in caplog.records]
    assert sum("the session is away" in line for line in lines) >= len(found) * 2
