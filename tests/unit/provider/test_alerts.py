"""Alerts on a job: when each is given, that it is given once, and that another triggerer does not repeat it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any
from urllib.parse import urlsplit

import pytest
from airflow.sdk import DAG
from airflow.serialization.serialized_objects import DagSerialization
from airflow.triggers.base import TriggerEvent

from airflow_provider_ckpt.assets import lag_above, no_checkpoint_for, no_savepoint_for, sanitize_uri
from airflow_provider_ckpt.exceptions import CkptArgumentInvalid
from airflow_provider_ckpt.hooks.ckpt import CkptHook
from airflow_provider_ckpt.triggers import watching
from airflow_provider_ckpt.triggers.alerts import AlertWatch, CkptAlertTrigger
from ckpt_runtime.checkpoint.properties import CheckpointType
from ckpt_runtime.client.clients import AsyncCkptClient
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.snapshots.catalogue import CataloguedSavepoint
from ckpt_runtime.storage.savepoint_entry import SavepointEntry
from tests.unit.provider.conftest import JOB, JobManager, run_at_hubs
from tests.unit.provider.test_assets import AssetStore
from tests.unit.runtime.rest.fake_gateway import START_MS, VERTICES, FakeGateway

pytestmark = pytest.mark.row("air.16")
NAME = "contract-job"
OTHER = "1" * 32
MINUTE = 60_000


def looking(work: Callable[[AsyncCkptClient], Coroutine[Any, Any, None]]) -> None:
    """Run it with a client of the job manager."""

    async def whole() -> None:
        async with await CkptHook().aget_conn(retry_timeout=0) as client:
            await work(client)

    asyncio.run(whole())


async def next_of(events: AsyncIterator[TriggerEvent]) -> Any:
    """The payload of the next event."""
    return (await anext(events)).payload


def watch(alert: str, *, above: int = 0, mark: dict[str, Any] | None = None) -> AlertWatch:
    """One that allows ten minutes."""
    return AlertWatch(NAME, alert, 600, above, mark)


def complete(job_manager: JobManager, kind: CheckpointType = CheckpointType.CHECKPOINT) -> int:
    """Complete a checkpoint or savepoint; return when it has completed."""
    format_ = None if kind is CheckpointType.CHECKPOINT else "NATIVE"
    job_manager.gateway.complete_checkpoint(job_manager.gateway.jobs[JOB], kind, format_)
    return job_manager.gateway.now


def test_a_checkpoint_that_does_not_come_gives_one_alert_until_the_next_one_has_come(job_manager: JobManager) -> None:
    async def run(client: AsyncCkptClient) -> None:
        seen = watch("no-checkpoint")
        at = complete(job_manager)
        assert await seen.look(client, at + 9 * MINUTE) is None
        found = await seen.look(client, at + 11 * MINUTE)
        assert found is not None
        assert (found["job"], found["job_id"], found["state"], found["last_id"]) == (NAME, JOB, "RUNNING", 1)
        assert (found["alert"], found["since_ms"], found["last_path"]) == ("no-checkpoint", at, "file:/data/chk-1")
        assert found["health"]["verdict"] in ("HEALTHY", "DEGRADED", "UNHEALTHY")
        assert "No checkpoint has completed for more than 600 s" in found["message"]
        assert json.loads(json.dumps(found)) == found
        assert await seen.look(client, at + 12 * MINUTE) is None
        another = watch("no-checkpoint", mark=json.loads(json.dumps(seen.mark)))  # another triggerer
        assert await another.look(client, at + 13 * MINUTE) is None
        at = complete(job_manager)
        assert await another.look(client, at + 1 * MINUTE) is None
        again = await another.look(client, at + 11 * MINUTE)
        assert again is not None
        assert again["last_id"] == 2

    looking(run)


def test_alert_of_missing_checkpoints_ignores_savepoints_and_waits_for_the_first_checkpoint(
    job_manager: JobManager,
) -> None:
    async def run(client: AsyncCkptClient) -> None:
        seen = watch("no-checkpoint")
        assert await seen.look(client, START_MS + 9 * MINUTE) is None
        complete(job_manager, CheckpointType.SAVEPOINT)
        found = await seen.look(client, START_MS + 11 * MINUTE)
        assert found is not None
        assert "has completed none since it started" in found["message"]

    looking(run)


def test_a_failed_job_gives_the_alert_and_one_that_has_ended_as_intended_does_not(job_manager: JobManager) -> None:
    async def run(client: AsyncCkptClient) -> None:
        for state, alerts in ((JobStatus.FAILED, True), (JobStatus.FINISHED, False), (JobStatus.CANCELED, False)):
            job_manager.reset()
            at = complete(job_manager)
            job_manager.gateway.move(JOB, state)
            found = await watch("no-checkpoint").look(client, at + 11 * MINUTE)
            assert (found is not None) == alerts, state

    looking(run)


def test_a_job_that_is_missing_and_a_session_that_does_not_answer_give_the_alert(job_manager: JobManager) -> None:
    async def run(client: AsyncCkptClient) -> None:
        seen = watch("no-checkpoint")
        at = complete(job_manager)
        assert await seen.look(client, at + 1 * MINUTE) is None
        job_manager.gateway.jobs.pop(JOB)
        assert await seen.look(client, at + 9 * MINUTE) is None
        found = await seen.look(client, at + 11 * MINUTE)
        assert found is not None
        assert (found["job_id"], found["state"]) == (JOB, None)
        assert f"no job is named '{NAME}'" in found["message"]
        away = watch("no-checkpoint")
        assert away.no_answer("connection refused", at) is None
        assert away.no_answer("connection refused", at + 9 * MINUTE) is None
        found = away.no_answer("connection refused", at + 11 * MINUTE)
        assert found is not None
        assert "the session does not answer: connection refused" in found["message"]

    looking(run)


def test_alert_gives_the_next_job_of_a_name_the_whole_time(job_manager: JobManager) -> None:
    async def run(client: AsyncCkptClient) -> None:
        seen = watch("no-checkpoint")
        at = complete(job_manager)
        assert await seen.look(client, at + 9 * MINUTE) is None
        job_manager.gateway.move(JOB, JobStatus.FINISHED)
        job_manager.gateway.now = at + 9 * MINUTE
        next_job = job_manager.gateway.add_job(OTHER, NAME)
        job_manager.gateway.complete_checkpoint(next_job)
        assert await seen.look(client, at + 18 * MINUTE) is None
        found = await seen.look(client, at + 20 * MINUTE)
        assert found is not None
        assert found["job_id"] == OTHER

    looking(run)


def test_alert_counts_savepoints_that_only_the_catalogue_has(job_manager: JobManager) -> None:
    async def run(client: AsyncCkptClient) -> None:
        seen = watch("no-savepoint")
        complete(job_manager)  # a checkpoint is no savepoint
        found = await seen.look(client, START_MS + 11 * MINUTE)
        assert found is not None
        assert "has none" in found["message"]
        at = complete(job_manager, CheckpointType.SAVEPOINT)
        assert await seen.look(client, at + 9 * MINUTE) is None
        taken = at + 5 * MINUTE
        entry = SavepointEntry(JOB, 7, taken - 5, taken, "NATIVE", "hashmap", 7, 1, job_name=NAME)
        job_manager.gateway.catalogue = [CataloguedSavepoint("file:///data/catalogued", entry, None)]
        assert await seen.look(client, at + 14 * MINUTE) is None
        found = await seen.look(client, at + 16 * MINUTE)
        assert found is not None
        assert found["last_path"] == "file:///data/catalogued"

    looking(run)


def test_a_lag_gives_the_alert_only_if_it_lasts(job_manager: JobManager, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = [300, 700]

    async def vertex_metrics(_: FakeGateway, job_id: str, vertex_id: str) -> Mapping[int, Mapping[str, str]]:
        if vertex_id != VERTICES[0]:
            return {0: {"count.numRecordsIn": "5"}}
        return {index: {"Source__src.pendingRecords": str(rows)} for index, rows in enumerate(waiting)}

    monkeypatch.setattr(FakeGateway, "vertex_metrics", vertex_metrics)

    async def run(client: AsyncCkptClient) -> None:
        seen = watch("lag", above=999)
        assert await seen.look(client, START_MS) is None
        assert await seen.look(client, START_MS + 9 * MINUTE) is None
        waiting[0] = 299
        assert await seen.look(client, START_MS + 10 * MINUTE) is None
        waiting[0] = 4000
        assert await seen.look(client, START_MS + 11 * MINUTE) is None
        assert seen.no_answer("away", START_MS + 15 * MINUTE) is None
        found = await seen.look(client, START_MS + 22 * MINUTE)
        assert found is not None
        assert (found["lag"], found["above"], found["since_ms"]) == (4700, 999, START_MS + 11 * MINUTE)
        assert await seen.look(client, START_MS + 23 * MINUTE) is None

    looking(run)


def test_sources_that_do_not_report_what_waits_give_no_alert(job_manager: JobManager) -> None:
    async def run(client: AsyncCkptClient) -> None:
        seen = watch("lag")
        for minute in (0, 20, 40):
            assert await seen.look(client, START_MS + minute * MINUTE) is None

    looking(run)


def test_trigger_survives_a_lost_session_and_its_successor_does_not_repeat_the_alert(
    job_manager: JobManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "HANDOVER_SECONDS", 0.0)

    def trigger(store: AssetStore, longer_than: float) -> CkptAlertTrigger:
        first = CkptAlertTrigger(
            ckpt_conn_id="ckpt_default", job=NAME, alert="no-checkpoint", longer_than=longer_than, poll_interval=0.01
        )
        path, arguments = first.serialize()
        assert path.endswith(".CkptAlertTrigger")
        made = CkptAlertTrigger(**json.loads(json.dumps(arguments)))
        made.asset_state_store = store  # type: ignore[assignment]
        return made

    async def run() -> None:
        store = AssetStore()
        job_manager.stop()
        events = trigger(store, 600).run()
        waiting = asyncio.ensure_future(next_of(events))
        while not store.values:
            await asyncio.sleep(0.01)
        assert not waiting.done()
        job_manager.start()
        event = await asyncio.wait_for(waiting, 60)
        assert (event["job_id"], event["ckpt_conn_id"]) == (JOB, "ckpt_default")
        later = asyncio.ensure_future(next_of(events))
        while not store.values["ckpt_alert"]["given"]:
            await asyncio.sleep(0.01)
        later.cancel()
        await asyncio.gather(later, return_exceptions=True)
        await events.aclose()  # type: ignore[attr-defined]
        second = trigger(store, 600).run()
        silent = asyncio.ensure_future(next_of(second))
        looks = job_manager.count("GET /jobs/overview")
        while job_manager.count("GET /jobs/overview") < looks + 3:
            await asyncio.sleep(0.01)
        assert not silent.done()
        silent.cancel()
        await asyncio.gather(silent, return_exceptions=True)
        await second.aclose()  # type: ignore[attr-defined]

    run_at_hubs(run())


def test_a_dag_that_is_scheduled_on_alerts_is_serialized_with_its_triggers() -> None:
    made = [no_checkpoint_for("a/b", "10 min"), no_savepoint_for("a/b", "1 d"), lag_above("a/b", 5000, "90 s")]
    with DAG("d", schedule=made) as dag:
        pass
    DagSerialization.from_dict(DagSerialization.to_dict(dag))
    assert [asset.uri for asset in made] == [
        "ckpt://ckpt_default/a%2Fb/no-checkpoint/600s",
        "ckpt://ckpt_default/a%2Fb/no-savepoint/86400s",
        "ckpt://ckpt_default/a%2Fb/lag/5000-rows-90s",
    ]
    for asset in made:
        assert sanitize_uri(urlsplit(asset.uri)).geturl() == asset.uri


def test_values_that_no_alert_can_have_are_refused() -> None:
    for refused in (
        lambda: no_checkpoint_for("j", "soon"),
        lambda: no_checkpoint_for("j", 0),
        lambda: lag_above("j", -1, 60),
        lambda: no_savepoint_for("j", "1 d", poll_interval=0),
        lambda: CkptAlertTrigger(ckpt_conn_id="c", job="j", alert="no-fun", longer_than=1),
    ):
        with pytest.raises(CkptArgumentInvalid):
            refused()
