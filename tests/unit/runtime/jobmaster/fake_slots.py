"""Slot agents and workers that are coroutines: they dial the real control endpoint and speak the real protocol.

What a worker answers is written down here; everything on the driver's side of the socket is real.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ckpt_runtime.checkpoint.completed_checkpoint import (
    CompletedCheckpoint,
    KeyedStateHandle,
    OperatorSubtaskState,
    StateFile,
    SubtaskState,
)
from ckpt_runtime.checkpoint.executions import TaskState
from ckpt_runtime.checkpoint.statistics import CheckpointMetrics
from ckpt_runtime.configuration.checkpointing_options import RecoveryClaimMode
from ckpt_runtime.configuration.configuration import Configuration, OwnConfiguration
from ckpt_runtime.graph.job_graph import JobEdge, JobGraph, JobVertex, OperatorNode, Partitioning
from ckpt_runtime.graph.key_groups import key_group_range
from ckpt_runtime.jobmaster.control_endpoint import ControlEndpoint
from ckpt_runtime.jobmaster.job_master import JobMaster
from ckpt_runtime.jobmaster.job_record import DurableRecord, JobRecord, store_job
from ckpt_runtime.jobmaster.slot_pool import SlotPool
from ckpt_runtime.jobmaster.slots import SlotEnded, SlotTimes
from ckpt_runtime.jobmaster.submission import JobSubmission
from ckpt_runtime.network.agent_messages import (
    TO_AGENT,
    AgentCommand,
    KillWorker,
    ProcessIdentity,
    RegisterAgent,
    RegisterWorker,
    Registration,
    SpawnWorker,
)
from ckpt_runtime.network.connections import (
    LENGTH_BYTES,
    ControlConnection,
    Message,
    MessageDecoder,
    framed,
    message_length,
)
from ckpt_runtime.network.control_messages import (
    TO_WORKER,
    AcknowledgeCheckpoint,
    CancelDeployment,
    Canceled,
    DeploySubtasks,
    TaskFailure,
    TaskStateChanged,
    TriggerCheckpoint,
    WorkerCommand,
)
from ckpt_runtime.network.framing import PREFACE_BYTES, PROOF_BYTES, Handshake
from ckpt_runtime.scheduler.deployment import Deployment
from ckpt_runtime.scheduler.job_events import FailureInfo
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.snapshots.job_claims import JobClaims
from ckpt_runtime.storage.driver_pools import DriverPools
from ckpt_runtime.storage.ha_store import HaStore

M = TypeVar("M")
TIMEOUT_S = 60
NOWHERE = ProcessIdentity("", 1, 0)
"""The identity of a process that does not exist, which no job can hold."""

JOB = "0123456789abcdef" * 2
SOURCE = JobVertex("s", (OperatorNode("numbers", "numbers", "source"),), 2)
COUNT = JobVertex("k", (OperatorNode("count", "count", "aggregate", stateful=True),), 2)
GRAPH = JobGraph("job", (SOURCE, COUNT), (JobEdge("s", "k", Partitioning.HASH, ("key",)),))


class FakePeer:
    """The far end of one control connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, registration: Registration) -> None:
        self.registration = registration
        self.received: list[AgentCommand | WorkerCommand] = []
        self._door: MessageDecoder[Any] = TO_AGENT if isinstance(registration, RegisterAgent) else TO_WORKER
        self._reader = reader
        self._writer = writer

    @classmethod
    async def dial(cls, port: int, secret: str, registration: Registration) -> FakePeer:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        handshake = Handshake(secret, "client", ControlConnection.PURPOSE)
        try:
            writer.write(handshake.preface())
            preface = await reader.readexactly(PREFACE_BYTES)
            writer.write(handshake.proof(preface))
            handshake.verify(preface, await reader.readexactly(PROOF_BYTES))
        except BaseException:
            writer.close()
            raise
        peer = cls(reader, writer, registration)
        peer.send(registration)
        return peer

    def send(self, message: Message) -> None:
        self._writer.write(framed(message))

    def send_raw(self, body: bytes) -> None:
        """Something that may be not a message."""
        self._writer.write(struct.pack("<I", len(body)) + body)

    async def receive(self) -> AgentCommand | WorkerCommand:
        length = message_length(await self._reader.readexactly(LENGTH_BYTES))
        message: AgentCommand | WorkerCommand = self._door.decode(await self._reader.readexactly(length))
        self.received.append(message)
        return message

    def close(self) -> None:
        self._writer.close()

    def of(self, kind: type[M]) -> list[M]:
        return [message for message in self.received if isinstance(message, kind)]


@dataclass
class FakeWorker:
    """Runs what it is given at once, acknowledges every checkpoint with one file per stateful subtask.

    ``behaviour`` may take a message and return True: then nothing else is done with it.
    """

    peer: FakePeer
    behaviour: Callable[[FakeWorker, WorkerCommand], bool]
    deployments: list[Deployment] = field(default_factory=list)

    @property
    def graph(self) -> JobGraph:
        """The newest that it was sent."""
        return next(sent.job.graph for sent in reversed(self.peer.of(DeploySubtasks)) if sent.job is not None)

    @property
    def deployment(self) -> Deployment:
        """The newest."""
        return self.deployments[-1]

    @property
    def index(self) -> int:
        """Of its subtasks; that of its slot before the first deployment, which gets slots in their order."""
        return self.deployment.subtasks[0].subtask_index if self.deployments else int(self.peer.registration.slot)

    @property
    def number(self) -> int:
        """Of the deployment; -1 before the first."""
        return self.deployment.deployment if self.deployments else -1

    @property
    def subtasks(self) -> list[tuple[str, int]]:
        return [(task.vertex_id, task.subtask_index) for task in self.deployment.subtasks]

    def state(self, state: TaskState, failure: TaskFailure | None = None, only: str | None = None) -> None:
        for vertex_id, subtask in self.subtasks:
            if only in (None, vertex_id):
                self.peer.send(TaskStateChanged(self.number, vertex_id, subtask, state, failure))

    def fail(self, message: str = "boom", recoverable: bool = True, only: str | None = None) -> None:
        self.state(TaskState.FAILED, TaskFailure(FailureInfo("ValueError", message), recoverable), only)

    async def run(self) -> None:
        try:
            while True:
                message: Any = await self.peer.receive()
                if not self.behaviour(self, message):
                    self.obey(message)
        except (OSError, EOFError):
            return

    def obey(self, message: WorkerCommand) -> None:
        match message:
            case DeploySubtasks():
                self.deployments.append(message.deployment)
                self.state(TaskState.INITIALIZING)
                self.state(TaskState.RUNNING)
            case TriggerCheckpoint():
                self.acknowledge(message)
            case CancelDeployment():
                self.peer.send(Canceled(self.number, ended=True))

    def acknowledge(self, message: TriggerCheckpoint) -> None:
        directory = message.options.directory
        for vertex_id, subtask in self.subtasks:
            state = SubtaskState()
            if vertex_id == "k":
                name = f"state-{subtask}"
                (Path(directory.removeprefix("file://")) / name).write_bytes(b"state")
                groups = key_group_range(128, self.graph.vertex(vertex_id).parallelism, subtask)
                handle = KeyedStateHandle(groups, StateFile(name, 5, "xxh64:0"), ())
                state = SubtaskState({"count": OperatorSubtaskState((handle,))}, 5)
            self.peer.send(
                AcknowledgeCheckpoint(
                    self.number, vertex_id, subtask, message.checkpoint_id, directory, state, CheckpointMetrics()
                )
            )


class FakeSlots:
    """A ``SlotProvider`` whose agents and workers are tasks of this loop."""

    def __init__(self, behaviour: Callable[[FakeWorker, WorkerCommand], bool]) -> None:
        self.behaviour = behaviour
        self.workers: list[FakeWorker] = []
        self.agents: list[FakePeer] = []
        self.launched: list[str] = []
        self.launch_error: Exception | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def launch(self, slot_id: str, control_port: int, secret: str, ended: SlotEnded) -> None:
        if self.launch_error is not None:
            raise self.launch_error
        self.launched.append(slot_id)
        self.spawn(self._agent(slot_id, control_port, secret))

    capacity = None

    def watch_capacity(self, changed: Callable[[], None]) -> None:
        return

    def cancel(self, slot_id: str) -> None:
        return

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _agent(self, slot: str, port: int, secret: str) -> None:
        agent = await FakePeer.dial(port, secret, RegisterAgent(slot, "127.0.0.1", (0, 1), NOWHERE))
        self.agents.append(agent)
        own: dict[str, FakeWorker] = {}
        try:
            while True:
                message = await agent.receive()
                if isinstance(message, SpawnWorker):
                    self.spawn(self._worker(own, slot, message.worker, port, secret))
                elif isinstance(message, KillWorker) and message.worker in own:
                    own[message.worker].peer.close()
        except (OSError, EOFError):
            return

    async def _worker(self, own: dict[str, FakeWorker], slot: str, worker_id: str, port: int, secret: str) -> None:
        registration = RegisterWorker(slot, worker_id, ("127.0.0.1", 9), NOWHERE, "")
        worker = FakeWorker(await FakePeer.dial(port, secret, registration), self.behaviour)
        own[worker_id] = worker
        self.workers.append(worker)
        await worker.run()

    async def stop(self) -> None:
        for peer in [*self.agents, *(worker.peer for worker in self.workers)]:
            peer.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class World:
    """A control endpoint, a slot pool, and workers that do what ``behaviour`` leaves to them."""

    def __init__(self, directory: Path, pool: ThreadPoolExecutor) -> None:
        self.directory = directory
        self.pool = DriverPools(own=pool, deletions=pool, paths=lambda _: pool, planning=pool)
        self.archive = b"archive"
        self.ignored: tuple[type, ...] = ()
        self.on_message: Callable[[FakeWorker, WorkerCommand], bool] = lambda worker, message: False
        self.slots = FakeSlots(
            lambda worker, message: isinstance(message, self.ignored) or self.on_message(worker, message)
        )

    @classmethod
    @asynccontextmanager
    async def start(cls, directory: Path, **times: float) -> AsyncIterator[World]:
        with ThreadPoolExecutor(2) as pool:
            world = cls(directory, pool)
            defaults = {
                "heartbeat_interval_s": 60, "heartbeat_timeout_s": 60, "idle_timeout_s": 60, "request_timeout_s": 10,
                "loss_grace_s": 0,
            }  # fmt: skip
            world.slot_pool = SlotPool(world.slots, "secret", SlotTimes(**{**defaults, **times}))
            endpoint = ControlEndpoint("127.0.0.1", "secret", world.slot_pool)
            world.slot_pool.start(await endpoint.start())
            world.jobs, world.closing = [], []
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    yield world
            finally:
                for job in world.jobs:
                    job.suspend()
                for job in world.closing:
                    job.close()
                if world.slot_pool._watch is not None:
                    world.slot_pool._watch.cancel()
                await world.slots.stop()
                await endpoint.stop()

    slot_pool: SlotPool
    jobs: list[JobMaster]
    closing: list[JobMaster]

    def submission(
        self,
        *,
        savepoint: CompletedCheckpoint | None = None,
        graph: JobGraph = GRAPH,
        record: JobRecord | None = None,
        claim_mode: RecoveryClaimMode = RecoveryClaimMode.NO_CLAIM,
        claims: JobClaims | None = None,
        **options: str,
    ) -> JobSubmission:
        """Options as keywords: double underscores stand for dots, single ones for dashes."""
        given = Configuration({key.replace("__", ".").replace("_", "-"): value for key, value in options.items()})
        return JobSubmission(
            job_id=JOB,
            graph=graph,
            defaults=Configuration(),
            own=OwnConfiguration(given),
            archive=self.archive,
            program_id="program",
            entry="module:pipeline",
            arguments=(),
            default_checkpoint_directory=str(self.directory / "checkpoints"),
            savepoint=savepoint,
            claim_mode=claim_mode,
            claims=claims,
            record=JobRecord() if record is None else record,
        )

    def start_job(self, **arguments: Any) -> JobMaster:
        job = JobMaster(self.submission(**arguments), self.slot_pool, self.pool)
        job.prepare_storage()
        self.jobs.append(job)
        job.start()
        return job

    def submit_durably(self, store: HaStore, **arguments: Any) -> JobMaster:
        """As the dispatcher does it, with the checkpoint directory of the others. Raises NotReady."""
        arguments["execution__checkpointing__dir"] = str(self.directory / "checkpoints")
        submission = self.submission(**{"record": DurableRecord(store, JOB), **arguments})
        job = JobMaster(submission, self.slot_pool, self.pool)
        store_job(store, submission.to_stored(job.prepare_storage()), submission.archive)
        self.jobs.append(job)
        job.start()
        return job

    def recover_job(self, submission: JobSubmission) -> JobMaster:
        """As a new driver does it."""
        job = JobMaster(submission, self.slot_pool, self.pool)
        self.jobs.append(job)
        job.start()
        return job

    def finish_job(self, submission: JobSubmission, status: JobStatus) -> None:
        """As a new driver does it with a job that ended before everything of it was cleaned up."""
        job = JobMaster(submission, self.slot_pool, self.pool)
        self.closing.append(job)
        job.clean_up_after(status)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Lets the loop run until it holds; the test's own time limit ends it otherwise."""
        while not condition():
            await asyncio.sleep(0.001)

    async def status(self, job: JobMaster, status: JobStatus) -> None:
        await self.until(lambda: job.status is status)

    async def running(self, job: JobMaster) -> None:
        """All subtasks run."""
        await self.until(lambda: set(job.executions.counts()) == {"RUNNING"})

    def active(self) -> list[FakeWorker]:
        """The workers with the newest deployment, by subtask index."""
        newest = max((worker.number for worker in self.slots.workers), default=-1)
        present = [worker for worker in self.slots.workers if worker.number == newest >= 0]
        return sorted(present, key=lambda worker: worker.index)


@asynccontextmanager
async def running_job(directory: Path, **options: Any) -> AsyncIterator[tuple[World, JobMaster]]:
    """A job of an own world that runs."""
    async with World.start(directory) as world:
        job = world.start_job(**options)
        await world.running(job)
        yield world, job
