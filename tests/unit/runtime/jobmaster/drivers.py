"""Drivers one after the other on one directory: a job in high availability, its driver's end, what the next finds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ckpt_runtime.configuration.configuration import Configuration, OwnConfiguration
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.jobmaster import job_host, job_record, known_jobs, storage_effects
from ckpt_runtime.jobmaster.gateway_values import AfterSavepoint, CheckpointKind, SavepointRequest
from ckpt_runtime.jobmaster.job_master import JobMaster
from ckpt_runtime.jobmaster.job_record import DurableRecord
from ckpt_runtime.jobmaster.known_jobs import FoundJob, find_jobs
from ckpt_runtime.jobmaster.submission import JobSubmission
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.storage.errors import AmbiguousWriteError
from ckpt_runtime.storage.ha_store import HaStore
from tests.unit.runtime.jobmaster.fake_slots import JOB, World


def make_hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pauses before a retry are short."""
    monkeypatch.setattr(storage_effects, "RETRY_BASE_MS", 1)
    monkeypatch.setattr(job_host, "DELETION_PAUSE_MS", 1)
    monkeypatch.setattr(job_record, "UNKNOWN_PAUSE_MS", 1)
    monkeypatch.setattr(job_record, "_PAUSE_S", 0.001)
    monkeypatch.setattr(known_jobs, "_PAUSE_S", 0.001)


class UnsurePlan(DurableRecord):
    """Stores nothing and cannot send; what is settled is sent."""

    def store_plan(self, graph: JobGraph, own: OwnConfiguration) -> None:
        raise AmbiguousWriteError("the outcome is unknown", "plan")


def driver(directory: Path, epoch: int = 1) -> HaStore:
    return HaStore(str(directory / "ha"), epoch=epoch)


@asynccontextmanager
async def stored_job(directory: Path, **options: Any) -> AsyncIterator[tuple[World, JobMaster, HaStore]]:
    """A job that runs, and that the first driver has stored."""
    async with World.start(directory) as world:
        store = driver(directory)
        job = world.submit_durably(store, **options)
        await world.running(job)
        yield world, job, store


def found_by(store: HaStore) -> FoundJob:
    """The only job that a new driver finds."""
    (found,) = find_jobs(store, Configuration())
    return found


def submission_found_by(store: HaStore) -> JobSubmission:
    """Of the only job, which can continue."""
    submission = found_by(store).submission
    assert submission is not None
    return submission


async def taken_over(world: World, store: HaStore) -> JobMaster:
    """The only job as a new driver continues it; running."""
    job = world.recover_job(submission_found_by(store))
    await world.running(job)
    return job


async def crash(job: JobMaster) -> None:
    """The driver is gone: nothing that it still wants to do happens."""
    job.suspend(fenced=True)


async def checkpoint(job: JobMaster) -> int:
    done = await job.trigger_checkpoint(CheckpointKind.CONFIGURED)
    assert done.checkpoint_id is not None
    return done.checkpoint_id


def names(directory: Path) -> list[str]:
    root = directory / "checkpoints" / JOB
    return sorted(path.name for path in root.glob("chk-*")) if root.exists() else []


def files_in(directory: Path) -> list[str]:
    """Names of all files below a directory."""
    return sorted(path.name for path in directory.rglob("*") if path.is_file())


async def canceled_with_savepoint(world: World, directory: Path) -> str:
    """The location of a savepoint whose job is over, with everything of its own."""
    job = world.start_job()
    await world.running(job)
    done = await job.take_savepoint(SavepointRequest(str(directory / "savepoints"), AfterSavepoint.CANCEL))
    await world.status(job, JobStatus.CANCELED)
    assert done.location is not None
    await world.until(lambda: not (directory / "checkpoints" / JOB).exists())
    return done.location
