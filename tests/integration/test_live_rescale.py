"""A running job at another parallelism, through REST and the command: its output is exact, its slots come and go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import httpx
import pytest

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.errors import BadRequest, Conflict
from ckpt_runtime.jobmaster.slots import SlotEnded
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import UNALIGNED, SequenceJob
from tests.support.outputs import assert_sequence, visible
from tests.support.patience import patient

pytestmark = pytest.mark.row("203.14")


def all_at(client: CkptClient, job: SequenceJob, parallelism: int) -> dict[str, int]:
    return dict.fromkeys(client.resource_requirements(job.job_id), parallelism)


def rescale(client: CkptClient, job: SequenceJob, parallelism: int) -> None:
    """Returns when all subtasks run at the new parallelism."""
    client.rescale(job.job_id, all_at(client, job, parallelism), timeout_s=patient(180))
    job.running()
    assert {vertex.parallelism for vertex in client.job_details(job.job_id).vertices} == {parallelism}
    assert set(client.resource_requirements(job.job_id).values()) == {parallelism}


def held_slots(cluster: MiniCluster) -> int:
    async def held() -> int:
        return sum(slot.owner is not None for slot in cluster.cluster.slots.all())

    return cluster.call(held())


ALIGNED = {**UNALIGNED, "execution.checkpointing.unaligned.enabled": "false"}


@pytest.mark.parametrize(
    "policy",
    [pytest.param(ALIGNED, id="aligned"), pytest.param(UNALIGNED, id="unaligned", marks=pytest.mark.long)],
)
def test_up_and_down_under_load(
    client: CkptClient, cluster: MiniCluster, job: SequenceJob, policy: Mapping[str, str]
) -> None:
    """Rows are on their way all the time; with unaligned checkpoints they are part of what is rescaled."""
    job.start(rate=0, batch=16, sleep_ms=0.2, parallelism=2, configuration=policy)
    job.has_output()
    for parallelism in (4, 1):
        known = len(visible(job.out / "order"))
        rescale(client, job, parallelism)
        cluster.wait_until(lambda known=known: len(visible(job.out / "order")) > known, "more output")  # type: ignore[misc]
        cluster.wait_until(lambda wanted=parallelism: held_slots(cluster) == wanted, "its slots alone to be held")  # type: ignore[misc]
    assert client.job_exceptions(job.job_id, 5).entries == ()
    job.stopped()
    cluster.wait_until(lambda: held_slots(cluster) == 0, "its slots to be free")


def test_declared_bounds_are_kept_and_shown(client: CkptClient, job: SequenceJob) -> None:
    job.start(parallelism=2)
    job.running()
    place = f"{client.url}/jobs/{job.job_id}/resource-requirements"
    before = httpx.get(place, timeout=60).json()
    assert {(b["parallelism"]["lowerBound"], b["parallelism"]["upperBound"]) for b in before.values()} == {(2, 2)}
    declared = {vertex: {"parallelism": {"lowerBound": 1, "upperBound": 2}} for vertex in before}
    assert httpx.put(place, json=declared, timeout=120).status_code == 200
    assert httpx.get(place, timeout=60).json() == declared
    assert client.job_metrics(job.job_id, ("numRestarts",))["numRestarts"] == "0"
    job.inject("map-raise")
    job.restarted(1)
    assert httpx.get(place, timeout=60).json() == declared
    job.stopped()


def test_impossible_rescale_is_refused_and_changes_nothing(client: CkptClient, job: SequenceJob) -> None:
    job.start(parallelism=2)
    job.running()
    vertex = next(iter(client.resource_requirements(job.job_id)))
    with pytest.raises(BadRequest, match=f"129 for the job vertex {vertex} exceeds its maximum parallelism 128"):
        client.rescale(job.job_id, {**all_at(client, job, 2), vertex: 129})
    with pytest.raises(BadRequest, match=f"missing job vertex .{vertex}. resource requirements"):
        client.rescale(job.job_id, {name: 2 for name in all_at(client, job, 2) if name != vertex})
    answer = httpx.put(f"{client.url}/jobs/{job.job_id}/resource-requirements", json={}, timeout=60)
    assert (answer.status_code, answer.json()) == (
        400,
        {"errors": ["Request body does not specify resource requirements."]},
    )
    client.rescale(job.job_id, all_at(client, job, 2))
    assert client.job_metrics(job.job_id, ("numRestarts",))["numRestarts"] == "0"


def test_a_job_that_has_ended(client: CkptClient, job: SequenceJob) -> None:
    job.start(rows=100, rate=0)
    job.finished()
    with pytest.raises(Conflict, match="FINISHED"):
        client.rescale(job.job_id, {"0" * 32: 1})


def test_a_worker_is_killed_after_the_rescale(client: CkptClient, cluster: MiniCluster, job: SequenceJob) -> None:
    """The restart is one at the new parallelism."""
    job.start(parallelism=1)
    job.has_output()
    rescale(client, job, 2)
    job.inject("processor-exit")
    job.restarted(2)
    assert {vertex.parallelism for vertex in client.job_details(job.job_id).vertices} == {2}
    job.stopped()


def test_slots_that_do_not_come(client: CkptClient, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The job has not stopped for a moment; the reason stays among its exceptions."""
    with MiniCluster(rest=True) as small, CkptClient(small.rest_url) as own:
        job = SequenceJob(small, tmp_path_factory.mktemp("job"))
        job.start(parallelism=2)
        job.has_output()
        slots = small.cluster.slots
        slots._times = replace(slots._times, request_timeout_s=1)  # now that the job has its own
        launched: dict[str, SlotEnded] = {}
        small.provider.launch = lambda slot_id, *more: launched.update({slot_id: more[-1]})  # type: ignore[method-assign,assignment]
        with pytest.raises(Conflict, match="keeps its parallelism: 3 slots were not available within 1 s"):
            own.rescale(job.job_id, all_at(own, job, 3))
        assert len(launched) == 1
        (entry,) = own.job_exceptions(job.job_id, 5).entries
        assert "3 slots were not available" in entry.stack_trace
        assert own.job_metrics(job.job_id, ("numRestarts",))["numRestarts"] == "0"
        assert set(own.resource_requirements(job.job_id).values()) == {2}
        own.rescale(job.job_id, all_at(own, job, 1))
        job.running()
        small.savepoint(job.job_id, job.directory / "savepoints", stop=True)
        job.finished()
        assert_sequence(job.out)
