"""Snapshots as assets: URIs, watchers, and events that continue where another triggerer has ended."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import pytest
from airflow.sdk import DAG, Asset
from airflow.serialization.serialized_objects import DagSerialization

from airflow_provider_ckpt.assets import checkpoints_of, create_asset, sanitize_uri, savepoints_of
from airflow_provider_ckpt.triggers import watching
from airflow_provider_ckpt.triggers.snapshots import CkptSnapshotsTrigger
from ckpt_runtime.checkpoint.properties import CheckpointType
from ckpt_runtime.jobmaster.event_log import EventType
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.snapshots.catalogue import CataloguedSavepoint
from ckpt_runtime.storage.savepoint_entry import SavepointEntry
from tests.support.patience import patient
from tests.unit.provider.conftest import JOB, Fault, JobManager, run_at_hubs, until

NAME = "contract-job"
OTHER = "1" * 32


@pytest.fixture(autouse=True)
def handed_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are handed over without the pause that Airflow needs."""
    monkeypatch.setattr(watching, "HANDOVER_SECONDS", 0.0)


class AssetStore:
    """An asset's state store, as a trigger sees it: values go through JSON."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    async def aget(self, key: str) -> Any:
        return self.values.get(key)

    async def aset(self, key: str, value: Any) -> None:
        self.values[key] = json.loads(json.dumps(value))


class Triggerer:
    """Runs one trigger; ``next`` gives its next event."""

    def __init__(self, store: AssetStore, snapshots: str = "savepoints") -> None:
        trigger = CkptSnapshotsTrigger(ckpt_conn_id="ckpt_default", job=NAME, snapshots=snapshots, poll_interval=0.01)
        path, arguments = trigger.serialize()
        assert path.endswith("CkptSnapshotsTrigger")
        self.trigger = CkptSnapshotsTrigger(**json.loads(json.dumps(arguments)))
        self.trigger.asset_state_store = store  # type: ignore[assignment]
        self._events = self.trigger.run()

    async def next(self) -> dict[str, Any]:
        event = await asyncio.wait_for(anext(self._events), patient(20))
        payload: dict[str, Any] = event.payload
        return payload

    async def has_looked(self, store: AssetStore) -> asyncio.Task[dict[str, Any]]:
        """Waits for its first look; the task is that of the next event."""
        waiting = asyncio.create_task(self.next())
        while not store.values and not waiting.done():
            await asyncio.sleep(0.01)
        return waiting

    async def end(self) -> None:
        await self._events.aclose()  # type: ignore[attr-defined]


def take(
    job_manager: JobManager, job_id: str = JOB, kind: CheckpointType = CheckpointType.SAVEPOINT
) -> tuple[int, str]:
    return job_manager.gateway.complete_checkpoint(job_manager.gateway.jobs[job_id], kind, "NATIVE")


@pytest.mark.row("air.5")
def test_new_savepoint_gives_one_event_with_all_its_facts(job_manager: JobManager) -> None:
    async def run() -> None:
        store = AssetStore()
        take(job_manager)  # there before anybody looked
        first = Triggerer(store)
        waiting = await first.has_looked(store)
        job_manager.faults = [Fault("GET", 503, times=3)]  # away for a moment
        number, path = take(job_manager)
        event = await waiting
        assert (event["id"], event["path"], event["job"], event["job_id"]) == (number, path, NAME, JOB)
        assert event["size"] > 0
        assert event["duration_ms"] > 0
        later = asyncio.create_task(first.next())
        while store.values["ckpt_watch"]["id"] != number:
            await asyncio.sleep(0.01)
        later.cancel()
        with suppress(asyncio.CancelledError):
            await later
        await first.end()
        # Another triggerer continues from there: a stop that no triggerer saw, and the next job of the name.
        stopped = take(job_manager, kind=CheckpointType.SYNC_SAVEPOINT)
        job_manager.gateway.move(JOB, JobStatus.FINISHED)
        job_manager.gateway.add_job(OTHER, NAME)
        resumed = take(job_manager, OTHER)
        second = Triggerer(store)
        events = [await second.next(), await second.next()]
        assert [(found["job_id"], found["id"], found["path"]) for found in events] == [
            (JOB, *stopped), (OTHER, *resumed)
        ]  # fmt: skip
        await second.end()

    run_at_hubs(run())


@pytest.mark.row("air.5")
def test_event_that_airflow_may_not_have_stored_is_given_again(
    job_manager: JobManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow takes events from a triggerer once a second: they end with it until then."""
    monkeypatch.setattr(watching, "HANDOVER_SECONDS", 3600.0)

    async def run() -> None:
        store = AssetStore()
        first = Triggerer(store)
        waiting = await first.has_looked(store)
        number, _ = take(job_manager)
        assert (await waiting)["id"] == number
        looks = job_manager.count("GET /jobs/overview")
        later = asyncio.create_task(first.next())
        await until(lambda: job_manager.count("GET /jobs/overview") > looks + 1)
        later.cancel()
        with suppress(asyncio.CancelledError):
            await later
        await first.end()
        second = Triggerer(store)
        assert (await second.next())["id"] == number
        await second.end()

    run_at_hubs(run())


@pytest.mark.row("air.5")
def test_the_first_savepoint_of_a_job_that_began_later_is_new(job_manager: JobManager) -> None:
    """Although both were there when the job was seen for the first time."""

    async def run() -> None:
        job_manager.gateway.jobs.pop(JOB)
        store = AssetStore()
        watching = Triggerer(store)
        waiting = await watching.has_looked(store)
        job_manager.gateway.add_job(OTHER, NAME)
        number, path = take(job_manager, OTHER)
        event = await waiting
        assert (event["job_id"], event["id"], event["path"]) == (OTHER, number, path)
        await watching.end()

    run_at_hubs(run())


@pytest.mark.row("air.5", "air.11")
def test_watch_with_an_event_stream_polls_nothing(job_manager: JobManager) -> None:
    """Watchers and waits share it; a look follows an event that concerns the job, and no other."""
    job_manager.streams = True

    async def run() -> None:
        stores = [AssetStore() for _ in range(20)]
        watching = [Triggerer(store) for store in stores]
        waiting = [await one.has_looked(store) for one, store in zip(watching, stores, strict=True)]
        await until(lambda: job_manager.gateway.events.listeners == 1)
        job_manager.gateway.add_job(OTHER, "another")
        looks = job_manager.count("GET /jobs/overview")
        for _ in range(2):
            job_manager.happens(EventType.SAVEPOINT_COMPLETED, OTHER)
            job_manager.happens(EventType.CHECKPOINT_COMPLETED)
        number, path = take(job_manager)
        job_manager.happens(EventType.SAVEPOINT_COMPLETED)
        assert {((event := await one)["id"], event["path"]) for one in waiting} == {(number, path)}
        assert job_manager.count("GET /events") == 1
        assert job_manager.count("GET /jobs/overview") - looks <= 3
        # The next job of the name is seen as soon as it is announced.
        later = [asyncio.create_task(one.next()) for one in watching]
        await until(lambda: all(store.values["ckpt_watch"]["id"] == number for store in stores))
        job_manager.gateway.move(JOB, JobStatus.FINISHED)
        job_manager.gateway.add_job("2" * 32, NAME)
        resumed = take(job_manager, "2" * 32)
        job_manager.happens(EventType.JOB_STATUS, "2" * 32)
        assert {((event := await one)["id"], event["path"]) for one in later} == {resumed}
        for one in watching:
            await one.end()

    run_at_hubs(run())


@pytest.mark.row("air.5", "air.10")
def test_savepoints_taken_while_no_process_watched_are_found_in_the_catalogue(job_manager: JobManager) -> None:
    """More than the history shows, and of a job that has gone."""

    def kept(job_id: str, number: int, at_ms: int, problem: str | None = None) -> CataloguedSavepoint:
        entry = SavepointEntry(job_id, number, at_ms - 5, at_ms, "NATIVE", "hashmap", 7, 1, job_name=NAME)
        return CataloguedSavepoint(f"file:///sp/{job_id[:4]}-{number}", entry, problem)

    async def run() -> None:
        store, late = AssetStore(), job_manager.gateway.now + 10_000
        store.values["ckpt_watch"] = {"job_id": JOB, "id": 4, "at_ms": late}
        known = [(JOB, 3, late - 10), (JOB, 4, late), (OTHER, 1, late - 5)]
        missed = [(JOB, 5, late + 10), (OTHER, 2, late + 20)]
        found = [kept(*which) for which in (*missed, *known)]
        job_manager.gateway.catalogue = [*found, kept(OTHER, 3, late + 30, "it is being deleted")]
        watching = Triggerer(store)
        events = [await watching.next() for _ in missed]
        assert [(event["job_id"], event["id"]) for event in events] == [which[:2] for which in missed]
        assert events[0] == {
            "job": NAME,
            "job_id": JOB,
            "id": 5,
            "path": f"file:///sp/{JOB[:4]}-5",
            "kind": "SAVEPOINT",
            "format": "NATIVE",
            "size": 7,
            "checkpointed_size": 7,
            "triggered_at_ms": late + 5,
            "duration_ms": 5,
        }
        await watching.end()

    run_at_hubs(run())


def test_ambiguous_job_name_does_not_end_the_watch(job_manager: JobManager, capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        store = AssetStore()
        job_manager.gateway.add_job(OTHER, NAME)
        watching = Triggerer(store)
        waiting, said = asyncio.create_task(watching.next()), ""
        while "2 active jobs" not in said:
            await asyncio.sleep(0.01)
            said += capsys.readouterr().out
        job_manager.gateway.move(OTHER, JobStatus.CANCELED)
        while not store.values:
            await asyncio.sleep(0.01)
        number, _ = take(job_manager)
        assert (await waiting)["id"] == number
        await watching.end()

    run_at_hubs(run())


@pytest.mark.row("air.5")
def test_a_dag_that_waits_for_them_can_be_stored() -> None:
    assets = [savepoints_of("orders of today"), checkpoints_of("orders", ckpt_conn_id="other", name="orders")]
    assert assets[0].uri == "ckpt://ckpt_default/orders%20of%20today/savepoints"
    assert (assets[1].uri, assets[1].name) == ("ckpt://other/orders/checkpoints", "orders")
    assert create_asset(ckpt_conn_id="ckpt_default", job="orders of today") == Asset(
        name=assets[0].name, uri=assets[0].uri, group="ckpt"
    )
    with DAG(dag_id="d", schedule=assets) as dag:
        pass
    document = json.loads(json.dumps(DagSerialization.to_dict(dag)))
    assert "CkptSnapshotsTrigger" in json.dumps(document)
    assert DagSerialization.from_dict(document).dag_id == "d"


def test_uris_have_one_form() -> None:
    from urllib.parse import urlsplit

    found = sanitize_uri(urlsplit("ckpt://ckpt_default/orders of today/savepoints/?a=1#b"))
    assert found.geturl() == "ckpt://ckpt_default/orders%20of%20today/savepoints"
    for wrong in ("ckpt:///orders/savepoints", "ckpt://c/orders", "ckpt://c/orders/jobs", "ckpt://c//savepoints"):
        with pytest.raises(ValueError, match="it must be ckpt://<connection id>/<job>/"):
            sanitize_uri(urlsplit(wrong))
