"""A whole session in this process: dispatcher, job masters and slot pool on a loop of their own, agents as processes.

It has the same dispatcher, agents, workers and transport as in a Spark application; only the start of agents differs.
No part is a mock. Its methods block, for tests and notebooks; it is not for production. Every wait has a deadline; its
error names the awaited event. A wait fails at once when the job ends in another state. Leaving the context ends every
process that it started except the template of its agents: the next cluster uses it, and it ends with this process.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self, TypeVar

import msgspec

from ckpt_runtime.checkpoint.properties import SavepointFormat
from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.configuration.cluster_options import LoggingOptions
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.jobmaster.cluster import Cluster, ClusterSettings
from ckpt_runtime.jobmaster.dispatcher import Dispatcher
from ckpt_runtime.jobmaster.ended_job import EndedJob
from ckpt_runtime.jobmaster.gateway_values import (
    AfterSavepoint,
    OperationKind,
    OperationStatus,
    RunRequest,
    SavepointRequest,
)
from ckpt_runtime.jobmaster.job_master import JobMaster
from ckpt_runtime.jobmaster.leadership import LEASE_TIMEOUT_S
from ckpt_runtime.jobmaster.slots import SlotEnded, SlotTimes
from ckpt_runtime.network.tls import rest_context
from ckpt_runtime.processes import handles
from ckpt_runtime.processes.held_directory import HeldDirectory
from ckpt_runtime.rest import server as rest_server
from ckpt_runtime.rest.app import create_app
from ckpt_runtime.rest.audit import audit_log
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.spark.slot_agent import AgentParameters
from ckpt_runtime.structured_log import PLAIN, LogSettings
from ckpt_runtime.testing.agent_template import forked_agent

_HOST = "127.0.0.1"


class Agent(Protocol):
    """The process of an agent, with the interface of :class:`subprocess.Popen`."""

    @property
    def pid(self) -> int:
        """The pid; 0 as long as there is no process."""

    @property
    def returncode(self) -> int | None: ...

    def kill(self) -> None: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


StartAgent = Callable[[AgentParameters], Agent]


def spawned_agent(parameters: AgentParameters) -> Agent:
    """Start an agent in a cold interpreter; works on every system. Raises OSError."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    agent = subprocess.Popen(
        [sys.executable, "-m", "ckpt_runtime.testing.local_slot_main"], stdin=subprocess.PIPE, env=environment
    )
    assert agent.stdin is not None
    agent.stdin.write(msgspec.json.encode(parameters) + b"\n")
    agent.stdin.close()
    return agent


class LocalSlotProvider:
    """A ``SlotProvider`` that starts a process for each slot, without a limit."""

    capacity = None

    def __init__(self, start_agent: StartAgent | None = None, log: LogSettings = PLAIN) -> None:
        self._log = log
        self._start_agent = start_agent or (forked_agent if handles.machine() else spawned_agent)
        self._agents: dict[str, Agent] = {}

    def watch_capacity(self, changed: Callable[[], None]) -> None:
        """Does nothing: the capacity has no limit and never changes."""

    def launch(self, slot_id: str, control_port: int, secret: str, ended: SlotEnded) -> None:
        agent = self._start_agent(AgentParameters(_HOST, control_port, secret, slot_id, self._log))
        self._agents[slot_id] = agent
        threading.Thread(target=self._watch, args=(slot_id, agent, ended), daemon=True).start()

    def cancel(self, slot_id: str) -> None:
        agent = self._agents.get(slot_id)
        if agent is not None:
            agent.kill()

    def agent_pids(self) -> list[int]:
        """Process ids of the living agents."""
        agents = list(self._agents.values())  # a copy, because each agent is removed by a thread of its own
        return [agent.pid for agent in agents if agent.poll() is None and agent.pid]

    def _watch(self, slot_id: str, agent: Agent, ended: SlotEnded) -> None:
        code = agent.wait()
        self._agents.pop(slot_id, None)
        ended(slot_id, RuntimeError(f"the slot agent ended with {code}") if code != 0 else None)


T = TypeVar("T")

APPLICATION_ID = "mini-cluster"
DEFAULT_TIMEOUT_S = 120.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.05


class ClusterTimeoutError(AssertionError):
    """The awaited event did not happen in time."""


def _deadline(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


class MiniCluster:
    """Use as a context manager. ``rest_url`` is set if ``rest`` is true; REST requires ``token`` if one is given."""

    rest_url = ""
    time_limit: ClassVar[Callable[[float], float]] = staticmethod(lambda seconds: seconds)
    """Returns how long a call with this limit in seconds may take. Tests make it longer on busy machines."""
    deadline: ClassVar[Callable[[float], Callable[[], bool]]] = staticmethod(_deadline)
    """Begins a wait of at most this many seconds, and returns a function that says whether they are over."""

    def __init__(
        self,
        *,
        configuration: Mapping[str, str] | None = None,
        rest: bool = False,
        token: str | None = None,
        heartbeat_timeout_s: float = 50.0,
        heartbeat_interval_s: float = 1.0,
        lease_timeout_s: float = LEASE_TIMEOUT_S,
        on_shutdown: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_shutdown`` is called when the end of the cluster is requested over REST."""
        self._rest = rest
        self._on_shutdown = on_shutdown
        self._token = token
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mini-cluster", daemon=True)
        self._directory = HeldDirectory("ckpt-mini-cluster-")
        self._settings = ClusterSettings(
            control_host="127.0.0.1",
            work_directory=self._directory.path,
            configuration=Configuration(configuration or {}),
            slot_times=SlotTimes(heartbeat_interval_s, heartbeat_timeout_s),
            lease_timeout_s=lease_timeout_s,
        )
        log = LogSettings(self._settings.configuration.get(LoggingOptions.FORMAT), APPLICATION_ID)
        self.provider = LocalSlotProvider(log=log)

    def __enter__(self) -> Self:
        self._thread.start()
        self.call(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()
        self._directory.remove()

    async def _start(self) -> None:
        self.cluster = Cluster(self.provider, self._settings, on_shutdown=self._on_shutdown)
        await self.cluster.start()
        self._server = None
        if self._rest:
            audit, tls = audit_log(self._settings.configuration), rest_context(self._settings.configuration)
            app = create_app(self.dispatcher, token=self._token, audit=audit)
            self._server, port = await rest_server.start(app, "127.0.0.1", 0, tls=tls)
            self.rest_url = f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"
        await self.cluster.lead(self.rest_url, APPLICATION_ID, self._token)

    async def _stop(self) -> None:
        if self._server is not None:
            await rest_server.stop(self._server)
        await self.cluster.stop()

    @property
    def dispatcher(self) -> Dispatcher:
        return self.cluster.dispatcher

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float = DEFAULT_TIMEOUT_S) -> T:
        """Run a coroutine on the cluster's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(type(self).time_limit(timeout_s))

    def of_job(self, job_id: str, read: Callable[[JobMaster | EndedJob], T]) -> T:
        """Reads something of a job on the cluster's loop."""

        async def found() -> T:
            return read(self.dispatcher.jobs[job_id])

        return self.call(found())

    def upload(self, pipeline: Path) -> str:
        """Upload a pipeline, a file or a directory; returns its id."""
        name, archive = pack_pipeline(pipeline)

        async def content() -> AsyncIterator[bytes]:
            yield archive

        return self.call(self.dispatcher.store_pipeline(name, content())).id

    def submit(
        self,
        pipeline: Path,
        *,
        arguments: Sequence[str] = (),
        configuration: Mapping[str, str] | None = None,
        parallelism: int | None = None,
        entry: str | None = None,
        savepoint: str | None = None,
        allow_non_restored_state: bool = False,
        job_id: str | None = None,
        fork: bool = False,
    ) -> str:
        """Upload and run a pipeline, a file or a directory; returns the job id."""
        request = RunRequest(
            pipeline_id=self.upload(pipeline),
            entry_point=entry,
            arguments=tuple(arguments),
            configuration=dict(configuration or {}),
            parallelism=parallelism,
            savepoint_path=savepoint,
            allow_non_restored_state=allow_non_restored_state,
            job_id=job_id,
            fork=fork,
        )
        return self.call(self.dispatcher.run_pipeline(request))

    def status(self, job_id: str) -> JobStatus:
        return self.of_job(job_id, lambda job: job.status)

    def wait_for_status(
        self, job_id: str, *wanted: JobStatus, timeout_s: float = DEFAULT_TIMEOUT_S, clean_up: bool = True
    ) -> JobStatus:
        """Wait for one of the states; fails at once if the job ends in another one.

        The end of a job is visible before its files, claims and records have been removed. This waits for their removal
        as well, unless it cannot happen because storage is unavailable.
        """

        def reached() -> bool:
            status = self.status(job_id)
            if status.is_globally_terminal and status not in wanted:
                raise AssertionError(f"job {job_id} is {status.value}: {self.failure(job_id)}")
            return status in wanted

        self.wait_until(reached, f"job {job_id} to be {' or '.join(wanted)}", timeout_s)
        status = self.status(job_id)
        if clean_up and status.is_globally_terminal:
            self.wait_for_clean_up(job_id)
        return status

    def wait_for_clean_up(self, job_id: str) -> None:
        """Wait until the clean-up after the end of a job is done."""
        self.wait_until(lambda: self.of_job(job_id, lambda job: job.cleaned_up), f"the clean-up of job {job_id}")

    def wait_for_checkpoints(self, job_id: str, count: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Wait until ``count`` more checkpoints than now have completed; returns the total.

        Fails at once if the job ends before.
        """
        target = self.completed_checkpoints(job_id) + count

        def completed() -> bool:
            ended = self.status(job_id).is_globally_terminal  # read first: its last checkpoint counts
            if self.completed_checkpoints(job_id) >= target:
                return True
            assert not ended, f"job {job_id} is {self.status(job_id).value}: {self.failure(job_id)}"
            return False

        self.wait_until(completed, f"{count} completed checkpoints", timeout_s)
        return self.completed_checkpoints(job_id)

    def completed_checkpoints(self, job_id: str) -> int:
        return self.of_job(job_id, lambda job: job.checkpoint_statistics()).counts.completed

    def restarts(self, job_id: str) -> int:
        """Counts how often the job was deployed again."""
        return int(self.of_job(job_id, lambda job: job.metrics())["numRestarts"])

    def savepoint(
        self,
        job_id: str,
        directory: Path | str,
        *,
        stop: bool = False,
        drain: bool = False,
        savepoint_format: SavepointFormat = SavepointFormat.NATIVE,
    ) -> str:
        """Take a savepoint, or stop with one and wait for the job's clean-up; returns its URL."""
        ends = AfterSavepoint.DRAIN if drain else AfterSavepoint.STOP
        request = SavepointRequest(str(directory), ends if stop else AfterSavepoint.CONTINUE, savepoint_format)
        trigger_id = self.call(self.dispatcher.take_savepoint(job_id, request))
        outcome: list[OperationStatus] = []

        def done() -> bool:
            status = self.call(self.dispatcher.operation_status(OperationKind.SAVEPOINT, trigger_id, job_id))
            if status.completed:
                outcome.append(status)
            return status.completed

        self.wait_until(done, "the savepoint")
        location, failure = outcome[0].location, outcome[0].failure
        assert location is not None, f"{failure}; the job's latest failure: {self.failure(job_id)}"
        if stop:
            self.wait_for_clean_up(job_id)
        return location

    def failure(self, job_id: str) -> str:
        """Returns the newest failure: its stack trace, or its message if it has none; empty without a failure."""
        entries = self.of_job(job_id, lambda job: job.exception_history(1)).entries
        if not entries:
            return ""
        failure = entries[0].failure
        return failure.stack_trace or f"{failure.exception}: {failure.message}"

    def worker_pids(self, job_id: str | None = None) -> list[int]:
        """Returns the pids of the active workers, in slot order; with ``job_id``, only of the workers that run it."""

        async def pids() -> list[int]:
            slots = list(self.cluster.slots.all())
            if job_id is not None:
                details = await self.dispatcher.job_details(job_id)
                used = {subtask.slot_agent_id for vertex in details.vertices for subtask in vertex.subtasks}
                slots = [slot for slot in slots if slot.slot_id in used]
            return [slot.worker.pid for slot in slots if slot.worker is not None]

        return self.call(pids())

    def spare_pids(self) -> list[int]:
        """Returns the process ids of the spare workers that are ready."""

        async def pids() -> list[int]:
            return [slot.spare.pid for slot in self.cluster.slots.all() if slot.spare is not None]

        return self.call(pids())

    @classmethod
    def wait_until(cls, condition: Callable[[], bool], what: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Poll every few milliseconds, and less often as time passes. Raises ClusterTimeoutError.

        A condition that reads files may take as long as a pause: the pauses are at least four times as long.
        """
        begun, is_over = time.monotonic(), cls.deadline(timeout_s)
        pause_s, used_s = _FIRST_PAUSE_S, time.thread_time()
        while not condition():
            if is_over():
                raise ClusterTimeoutError(f"timed out after {time.monotonic() - begun:.0f} s waiting for {what}")
            time.sleep(max(pause_s, 4 * (time.thread_time() - used_s)))
            pause_s, used_s = min(_LONGEST_PAUSE_S, pause_s * 1.1), time.thread_time()
