"""A changed configuration in the high-availability directory: what a new driver reads, also of an earlier version's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_runtime.checkpoint.configuration import CheckpointOverrides
from ckpt_runtime.configuration.configuration import ChangeNote, Configuration
from ckpt_runtime.configuration.registry import JOB_CHECKPOINT_OVERRIDES
from ckpt_runtime.jobmaster.gateway_values import NotReady
from ckpt_runtime.jobmaster.job_master import JobMaster
from ckpt_runtime.jobmaster.job_settings import submitted_settings
from tests.unit.runtime.jobmaster.drivers import UnsurePlan, crash, driver, make_hasty, submission_found_by, taken_over
from tests.unit.runtime.jobmaster.fake_slots import JOB, World

TIMEOUT, DIRECTORY = "execution.checkpointing.timeout", "execution.checkpointing.dir"
NOTE = ChangeNote(2, 7, "somebody", (TIMEOUT,))


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    make_hasty(monkeypatch)


async def change(job: JobMaster, *, restarts: bool = False, **options: str | None) -> None:
    """Of options by their last words."""
    base = job.accepted_plan
    own = base.own
    wanted = {{"timeout": TIMEOUT}.get(name, f"my.{name}"): value for name, value in options.items()}
    given = own.given.with_values(wanted)
    configuration = Configuration.merge(job.defaults, given)
    note = replace(NOTE, version=own.version + 1)
    settings = submitted_settings(configuration)
    graph = replace(base.graph, configuration=configuration.to_dict())
    plan = replace(base, graph=graph, configuration=configuration, settings=settings, own=own.changed(given, note))
    await job.change_configuration(plan, base, None, restarts=restarts)


@pytest.mark.row("530.5")
@pytest.mark.row("530.9")
async def test_a_new_driver_continues_with_configuration_graph_version_and_overrides(tmp_path: Path) -> None:
    async with World.start(tmp_path) as world:
        job = world.submit_durably(driver(tmp_path), my__mark="a")
        await world.running(job)
        await job.patch_checkpoint_config(CheckpointOverrides(interval_ms=77_000))
        await change(job, timeout="50 s", mark="b")
        await change(job, timeout=None, restarts=True)
        await crash(job)
        stored = driver(tmp_path).jobs.get(JOB)
        assert stored.version == 3
        assert JOB_CHECKPOINT_OVERRIDES in stored.configuration
        assert TIMEOUT not in str((stored.configuration, stored.graph, stored.properties))
        job = await taken_over(world, driver(tmp_path, 2))
        found = job.config_info()
        assert (found.version, found.running_version, [note.version for note in found.changes]) == (3, 3, [2, 3])
        assert found.configuration["my.mark"] == "b"
        assert job.graph.configuration["my.mark"] == "b"
        assert (job.checkpoint_config().settings.timeout_ms, job.checkpoint_config().settings.interval_ms) == (
            600_000, 77_000,
        )  # fmt: skip
        settings = (await job.patch_checkpoint_config(None)).settings
        assert settings.interval_ms is None


@pytest.mark.row("530.5")
async def test_configuration_that_was_not_stored_is_not_in_force(tmp_path: Path) -> None:
    async with World.start(tmp_path) as world:
        store = driver(tmp_path)
        job = world.submit_durably(store, record=UnsurePlan(store, JOB))
        await world.running(job)
        with pytest.raises(NotReady, match="unknown whether the change is stored"):
            await change(job, timeout="50 s", restarts=True)
        await world.until(lambda: job._shell.core._change.plan is None)
        assert job.config_info().version == 1
        assert job.checkpoint_config().settings.timeout_ms == 600_000
        assert job.metrics()["numRestarts"] == "0"


def as_stored_before(store: Any, **configuration: str) -> None:
    """What an earlier version had: the cluster's options mixed with the job's, no version, no notes."""

    def earlier(job: Any) -> Any:
        mixed = {"of.cluster": "c", **job.configuration}
        properties = {key: value for key, value in job.properties.items() if key != "defaults"}
        return replace(job, properties={**properties, "cluster_configuration": mixed})

    store.jobs.update(JOB, earlier)


@pytest.mark.row("530.9")
async def test_a_job_of_an_earlier_version_has_version_1_and_what_is_removed_stays_so(tmp_path: Path) -> None:
    async with World.start(tmp_path) as world:
        job = world.submit_durably(driver(tmp_path), execution__checkpointing__timeout="50 s")
        await world.running(job)
        await crash(job)
        as_stored_before(driver(tmp_path))
        job = await taken_over(world, driver(tmp_path, 2))
        assert (job.config_info().version, job.config_info().changes) == (1, ())
        assert job.configuration["of.cluster"] == "c"
        assert job.checkpoint_config().settings.timeout_ms == 50_000
        await change(job, timeout=None)
        assert job.checkpoint_config().settings.timeout_ms == 600_000
        await crash(job)
        job = await taken_over(world, driver(tmp_path, 3))
        assert job.checkpoint_config().settings.timeout_ms == 600_000
        assert job.configuration["of.cluster"] == "c"
        assert job.config_info().version == 2


@pytest.mark.row("530.9")
async def test_clusters_value_applies_after_the_jobs_option_is_removed(tmp_path: Path) -> None:
    async with World.start(tmp_path) as world:
        store = driver(tmp_path)
        job = world.submit_durably(store, execution__checkpointing__timeout="50 s")
        await world.running(job)
        await crash(job)

        def says(job: Any) -> Any:
            return replace(job, properties={**job.properties, "defaults": {TIMEOUT: "40 s"}})

        store.jobs.update(JOB, says)
        job = await taken_over(world, driver(tmp_path, 2))
        assert job.checkpoint_config().settings.timeout_ms == 50_000
        await change(job, timeout=None)
        await crash(job)
        submission = submission_found_by(driver(tmp_path, 3))
        assert submission.configuration[TIMEOUT] == "40 s"
        assert TIMEOUT not in submission.own.given
