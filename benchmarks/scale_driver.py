"""What a job of many subtasks costs the driver while it runs: for ``benchmarks.scale``.

The driver's parts are real: control endpoint, slot pool, job master, checkpoints and REST. Its agents and workers are
coroutines of another process, which answer over sockets, beat every second and acknowledge each checkpoint.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped, unused-ignore]

from benchmarks.harness import BenchmarkError, percentile
from ckpt_runtime.configuration.configuration import Configuration, OwnConfiguration
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.jobmaster.control_endpoint import ControlEndpoint
from ckpt_runtime.jobmaster.gateway_values import JobDetails
from ckpt_runtime.jobmaster.job_master import JobMaster
from ckpt_runtime.jobmaster.slot_pool import SlotPool
from ckpt_runtime.jobmaster.slots import SlotEnded, SlotTimes
from ckpt_runtime.jobmaster.submission import JobSubmission
from ckpt_runtime.network.agent_messages import AgentHeartbeat
from ckpt_runtime.network.control_messages import SubtaskMeasures, WorkerHeartbeat
from ckpt_runtime.rest import server
from ckpt_runtime.rest.app import create_app
from ckpt_runtime.storage.driver_pools import DriverPools
from tests.unit.runtime.jobmaster.fake_slots import FakeSlots, FakeWorker

JOB = "0" * 32
REQUEST_EVERY_S = 0.05
START_TIMEOUT_S = 300.0
STARTING = 50
"""Slots that start at the same time: the driver gives up handshakes when there are too many, and those do not retry."""
_MEGABYTE = 1 << 20


class FarSlots:
    """A ``SlotProvider`` that lets the other process start what it launches."""

    capacity = None

    def __init__(self, launches: Connection, process: BaseProcess) -> None:
        self._launches = launches
        self.process = process

    def watch_capacity(self, changed: Callable[[], None]) -> None:
        """Does nothing: there is no limit."""

    def launch(self, slot_id: str, control_port: int, secret: str, ended: SlotEnded) -> None:
        self._launches.send((slot_id, control_port, secret))

    def cancel(self, slot_id: str) -> None:
        """Does nothing: no slot is idle or silent."""


async def _far_ends(launches: Connection) -> None:
    """The other process: agents and workers, until it is killed."""
    slots = FakeSlots(lambda *_: False)
    slots.spawn(_beat(slots))
    while True:
        slot_id, port, secret = await asyncio.to_thread(launches.recv)
        slots.launch(slot_id, port, secret, lambda *_: None)
        await _until(
            lambda: len(slots.launched) <= STARTING + len({worker.peer.registration.slot for worker in slots.workers})
        )


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def _beat(slots: FakeSlots) -> None:
    while True:
        await asyncio.sleep(1.0)
        for agent in slots.agents:
            agent.send(AgentHeartbeat())
        for worker in slots.workers:
            worker.peer.send(WorkerHeartbeat(worker.number, _measures(worker)))


def _measures(worker: FakeWorker) -> tuple[SubtaskMeasures, ...]:
    """Of subtasks that are half busy."""
    now_ms = time.monotonic() * 1000
    given = worker.subtasks if worker.deployments else []
    return tuple(
        SubtaskMeasures(vertex, index, 1, 1, 1, 1, 0, now_ms / 2, now_ms / 2, 0.0, now_ms) for vertex, index in given
    )


def measure(graph: JobGraph, directory: Path, seconds: float) -> dict[str, Any]:
    """Share of a processor and memory of the driver, and milliseconds of requests, with a checkpoint per second.

    Raises BenchmarkError if no checkpoint completes, or a request is refused.
    """
    # Each slot has three connections, and the usual limit is 1,024.
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    forking = get_context("fork")
    theirs, ours = forking.Pipe(duplex=False)
    process = forking.Process(target=lambda: asyncio.run(_far_ends(theirs)), daemon=True)
    process.start()
    return asyncio.run(_measure(graph, directory, seconds, FarSlots(ours, process)))


async def _measure(graph: JobGraph, directory: Path, seconds: float, slots: FarSlots) -> dict[str, Any]:
    async with _running_job(graph, directory, slots) as (job, pool), asyncio.timeout(START_TIMEOUT_S):
        await _until(lambda: set(job.executions.counts()) == {"RUNNING"})
        await _until(lambda: all(slot.spare is not None for slot in pool.all()))
        app = create_app(_Jobs(job), token=None)  # type: ignore[arg-type]
        serving, port = await server.start(app, "127.0.0.1", 0)
        completed, cpu, begun = job.checkpoint_statistics().counts.completed, _cpu_s(), time.monotonic()
        latencies = await asyncio.to_thread(_requests, f"http://127.0.0.1:{port}/jobs/{JOB}", graph, seconds)
        took, cpu = time.monotonic() - begun, _cpu_s() - cpu
        await server.stop(serving)
        if job.checkpoint_statistics().counts.completed <= completed:
            raise BenchmarkError(f"no checkpoint completed in {took:.1f} s")
        return {
            "driver_cpu": round(cpu / took, 3),
            "driver_mb": psutil.Process().memory_info().rss // _MEGABYTE,
            "rest_ms_p95": round(percentile(latencies, 0.95) or 0.0, 2),
        }


class _Jobs:
    """What REST reads of a dispatcher with one job."""

    def __init__(self, job: JobMaster) -> None:
        self.jobs = {JOB: job}

    async def job_details(self, job_id: str) -> JobDetails:
        return self.jobs[job_id].details()


def _requests(url: str, graph: JobGraph, seconds: float) -> list[float]:
    """The milliseconds of each."""
    paths = ("", "/checkpoints", *(f"/vertices/{vertex.id}" for vertex in graph.vertices))
    latencies, end = [], time.monotonic() + seconds
    with httpx.Client(timeout=START_TIMEOUT_S) as client:
        while time.monotonic() < end:
            for path in paths:
                begun = time.monotonic()
                answer = client.get(url + path)
                latencies.append((time.monotonic() - begun) * 1000)
                if answer.status_code != httpx.codes.OK:
                    raise BenchmarkError(f"{path or '/'}: {answer.status_code} {answer.text[:200]}")
                time.sleep(REQUEST_EVERY_S)
    return latencies


def _cpu_s() -> float:
    times = psutil.Process().cpu_times()
    return float(times.user + times.system)


@asynccontextmanager
async def _running_job(graph: JobGraph, directory: Path, slots: FarSlots) -> AsyncIterator[tuple[JobMaster, SlotPool]]:
    with ThreadPoolExecutor(2) as pool:
        pools = DriverPools(own=pool, deletions=pool, paths=lambda _: pool, planning=pool)
        slot_pool = SlotPool(slots, "secret", SlotTimes(heartbeat_timeout_s=60.0))
        endpoint = ControlEndpoint("127.0.0.1", "secret", slot_pool)
        slot_pool.start(await endpoint.start())
        given = Configuration({"execution.checkpointing.interval": "1 s", "restart-strategy.type": "none"})
        submission = JobSubmission(
            job_id=JOB,
            graph=graph,
            defaults=Configuration(),
            own=OwnConfiguration(given),
            archive=b"",
            program_id="program",
            entry="module:pipeline",
            arguments=(),
            default_checkpoint_directory=str(directory),
        )
        job = JobMaster(submission, slot_pool, pools)
        try:
            job.prepare_storage()
            job.start()
            yield job, slot_pool
        finally:
            job.suspend()
            slots.process.kill()
            slots.process.join()
            await endpoint.stop()
