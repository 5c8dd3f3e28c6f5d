"""Which savepoints go, and which stay."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_ckpt.exceptions import CkptArgumentInvalid, CkptNotFound
from airflow_provider_ckpt.operators.retention import (
    CleanUpSavepointsOperator,
    StoredSavepoint,
    decide,
    savepoints_of,
    spared,
)
from ckpt_runtime.snapshots.catalogue import CataloguedSavepoint
from tests.support.golden import DIRECTORY
from tests.support.rest_examples import RUNNING, SNAPSHOT, catalogue
from tests.unit.provider.conftest import Fault, JobManager, Task

HOUR = 3_600_000
FAST: dict[str, Any] = {"poll_interval": 0.01, "wait_timeout": 30}


def stored(*ages: int) -> list[StoredSavepoint]:
    """Savepoints of so many hours before the present, which is hour 100."""
    documents = [
        {"location": f"/sp/{age}", "kind": "SAVEPOINT", "completion_timestamp": (100 - age) * HOUR} for age in ages
    ]
    return savepoints_of(documents)


@pytest.mark.parametrize(
    ("keep", "hours", "deleted"),
    [
        (2, None, ["/sp/9", "/sp/5"]),
        (9, None, []),
        (None, 4, ["/sp/9", "/sp/5"]),
        (1, 6, ["/sp/9"]),
        (3, 2, ["/sp/9"]),
        (None, 0, ["/sp/9", "/sp/5", "/sp/3", "/sp/1"]),
    ],
)
def test_unprotected_savepoints_are_deleted_oldest_first(
    keep: int | None, hours: int | None, deleted: list[str]
) -> None:
    limit = None if hours is None else hours * HOUR
    decision = decide(stored(5, 1, 9, 3), keep=keep, keep_for_ms=limit, now_ms=100 * HOUR)
    assert decision.deleted == deleted
    assert {*decision.kept, *decision.deleted} == {"/sp/1", "/sp/3", "/sp/5", "/sp/9"}


@given(st.sets(st.integers(0, 50), min_size=1), st.integers(1, 60), st.data())
def test_spared_savepoint_is_never_deleted(ages: set[int], keep: int, data: st.DataObject) -> None:
    found = stored(*ages)
    good = data.draw(st.sampled_from(found))
    decision = spared(decide(found, keep=keep, keep_for_ms=None, now_ms=100 * HOUR), good.path, "good")
    assert good.path in decision.kept
    assert good.path not in decision.deleted
    assert len(decision.kept) + len(decision.deleted) == len(found)


def test_checkpoints_and_unreadable_savepoints_are_not_counted() -> None:
    documents: list[dict[str, Any]] = [
        {"location": "/chk", "kind": "CHECKPOINT", "completion_timestamp": 3},
        {"location": "/bad", "error": "damaged"},
        {"location": "/stop", "kind": "SYNC_SAVEPOINT", "completion_timestamp": 2},
    ]
    assert [item.path for item in savepoints_of(documents)] == ["/stop"]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({}, "keep"),
        ({"keep": 0}, "keep"),
        ({"keep_for": "soon"}, "keep_for"),
        ({"keep": 1, "directory": ""}, "directory"),
        ({"keep": 1, "directory": None}, "directory"),
        ({"keep": 1, "job": ""}, "job"),
        ({"keep": 1, "job": "None"}, "job"),
    ],
)
def test_bad_limits_are_named(arguments: dict[str, Any], name: str) -> None:
    operator = CleanUpSavepointsOperator(task_id="t", **{"directory": "/data"} | arguments)
    with pytest.raises(CkptArgumentInvalid, match=f"^{name}: "):
        operator.limits()


@pytest.fixture
def savepoints(job_manager: JobManager) -> JobManager:
    """A proven one, one that failed, an old one, and one that cannot be read."""
    job_manager.gateway.catalogue = catalogue(job_manager.gateway.now)
    return job_manager


def clean(**arguments: Any) -> Any:
    return CleanUpSavepointsOperator(**{"task_id": "t", **FAST, **arguments}).execute(Task().context())  # type: ignore[arg-type]


@pytest.mark.row("air.2", "air.10")
def test_catalogue_lists_savepoints_and_proves_those_that_the_worker_cannot_read(savepoints: JobManager) -> None:
    result = clean(directory="/data/savepoints", keep=1)
    assert result["kept"] == {SNAPSHOT: "the newest of its lineage that is intact"}
    assert result["deleted"] == [f"{SNAPSHOT}-old", f"{SNAPSHOT}-failed"]
    assert result["unreadable"] == [f"{SNAPSHOT}-damaged"]
    assert savepoints.count("POST /savepoint-disposal") == 2


@pytest.mark.usefixtures("commands_in_this_process")
def test_newest_good_savepoint_of_each_lineage_is_kept(savepoints: JobManager) -> None:
    """One job is suspended, and resumes from its last savepoint; another one, which lives, takes newer ones."""
    gateway = savepoints.gateway
    proven = gateway.catalogue[0].entry
    assert proven is not None

    def taken(job_id: str, name: str, hours_ago: int, lineage: str | None = None, **marks: Any) -> str:
        path = f"file:/data/savepoints/{name}"
        at = gateway.now - hours_ago * HOUR
        entry = replace(proven, job_id=job_id, lineage=lineage, completed_at_ms=at, **marks)
        gateway.catalogue.append(CataloguedSavepoint(path, entry))
        return path

    gateway.catalogue.clear()
    first, second, third = "1" * 32, "2" * 32, "3" * 32
    newest = [taken(third, f"living-{hours}", hours) for hours in (1, 2, 3)]
    suspended = taken(second, "suspended", 10, lineage=first)
    old = taken(first, "of-the-job-before", 20)
    result = clean(directory="/data/savepoints", keep=1)
    assert result["kept"] == {
        newest[0]: "the newest of its lineage that is intact",
        suspended: "the newest of its lineage that is intact",
    }
    assert result["deleted"] == [old, newest[2], newest[1]]


@pytest.mark.usefixtures("commands_in_this_process")
def test_a_lineage_without_a_good_savepoint_keeps_all_it_has(savepoints: JobManager) -> None:
    found = savepoints.gateway.catalogue
    failed = found[1]
    assert failed.entry is not None
    found[1] = replace(failed, entry=replace(failed.entry, job_id="2" * 32))
    result = clean(directory="/data/savepoints", keep=1)
    assert result["kept"] == {
        SNAPSHOT: "the newest of its lineage that is intact",
        failed.location: "no savepoint of its lineage is intact",
    }
    assert result["deleted"] == [f"{SNAPSHOT}-old"]


@pytest.mark.usefixtures("commands_in_this_process")
def test_only_savepoints_of_the_job_are_deleted(savepoints: JobManager) -> None:
    """The old one has no name in its entry."""
    assert clean(job="flights", keep=1)["deleted"] == [f"{SNAPSHOT}-failed"]
    assert clean(job=RUNNING, keep=1, preview=True)["deleted"] == [f"{SNAPSHOT}-old", f"{SNAPSHOT}-failed"]
    assert clean(job="another", keep=1)["deleted"] == []


@pytest.mark.usefixtures("commands_in_this_process")
def test_clean_up_without_a_verified_savepoint_deletes_nothing(savepoints: JobManager) -> None:
    found = savepoints.gateway.catalogue
    assert found[0].entry is not None
    found[0] = replace(found[0], entry=replace(found[0].entry, verifications=(), drills=()))
    with pytest.raises(CkptNotFound, match=SNAPSHOT.removeprefix("file:")):
        clean(directory="/data/savepoints", keep=1)
    assert savepoints.count("POST /savepoint-disposal") == 0


@pytest.mark.usefixtures("commands_in_this_process")
def test_worker_reads_the_directory_of_a_server_without_catalogue(job_manager: JobManager, tmp_path: Path) -> None:
    """As against Flink."""
    for name in ("one", "two"):
        shutil.copytree(DIRECTORY / "format-2" / "rocksdb", tmp_path / name)
    job_manager.faults = [Fault("/savepoints", 404, times=100, says="Not found: /savepoints")]
    result = clean(directory=str(tmp_path), keep=1, preview=True)
    assert [Path(path).name for path in (*result["kept"], *result["deleted"])] == ["one", "two"]
    for wrong, name in (({"job": "flights"}, "directory"), ({"job": "a", "directory": str(tmp_path)}, "job")):
        with pytest.raises(CkptArgumentInvalid, match=f"^{name}: "):
            clean(**wrong, keep=1)
    assert clean(job="0" * 32, directory=str(tmp_path), keep=1, preview=True)["kept"] == {}
