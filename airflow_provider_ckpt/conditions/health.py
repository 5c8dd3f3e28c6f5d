"""Conditions on health: the verdict on a job, a restore drill's checkpoints, the start and the end of a session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import to_builtins

from airflow_provider_ckpt.conditions.base import Condition, Json, KilledTask, Status, Verdict
from airflow_provider_ckpt.conditions.job import JobCondition
from airflow_provider_ckpt.processes import SessionProcess
from ckpt_runtime.client.clients import AsyncCalls
from ckpt_runtime.client.errors import Unreachable
from ckpt_runtime.contract.checkpoints import CheckpointStatistics
from ckpt_runtime.contract.cluster import ClusterOverview
from ckpt_runtime.contract.jobs import TERMINAL_STATES, JobDetails, SubtaskTimes

VERDICTS: Final = ("HEALTHY", "DEGRADED", "UNHEALTHY")
_WITHOUT_SLOTS = ("CREATED", "SCHEDULED")
_RESTORING = ("DEPLOYING", "INITIALIZING")


@dataclass(eq=False)
class HealthCondition(JobCondition):
    """Done when the verdict is one of ``expected`` and ``ended`` checkpoints have ended; FAILED when it is one of
    ``failing``, or the job has ended in an unintended way.

    ``times``: how many polls in a row have to find it.
    """

    expected: Sequence[str]
    failing: Sequence[str] = ()
    ended_checkpoints: int = 1
    times: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._found = 0

    @property
    def _names(self) -> str:
        return " or ".join(sorted(self.expected))

    @property
    def subject(self) -> str:
        return f"job {self.job_id} to be {self._names}"

    async def look(self, client: AsyncCalls) -> Verdict | None:
        health = await client.job_health(self.job_id)
        reasons = "; ".join(health.reasons) or "no reasons"
        result = {"job_id": self.job_id, **to_builtins(health)}
        good = health.verdict in self.expected and health.checkpoints.ended >= self.ended_checkpoints
        self._found = self._found + 1 if good else 0
        if self._found >= self.times:
            return Verdict(Status.DONE, result=result)
        if health.verdict in self.failing:
            return Verdict(Status.FAILED, f"job {self.job_id} is {health.verdict}: {reasons}", result)
        if health.state in TERMINAL_STATES and not good:
            job = await self.details(client)
            return await self.ended(client, job, f"job {self.job_id} is {job.state}, it was not {self._names}", result)
        self._state = health.state
        self.standing = f"it is {health.verdict} ({reasons}), {health.checkpoints.ended} checkpoints have ended"
        return None


@dataclass(eq=False)
class DrillCondition(JobCondition):
    """Done when all subtasks run and ``checkpoints`` have completed, or the job is FINISHED; the result has the
    durations."""

    checkpoints: int

    @property
    def subject(self) -> str:
        plural = "s" if self.checkpoints > 1 else ""
        return f"{self.checkpoints} checkpoint{plural} of the restore drill {self.job_id}"

    async def look(self, client: AsyncCalls) -> Verdict | None:
        job = await self.details(client)
        statistics = await client.checkpoint_statistics(self.job_id)
        completed = statistics.counts.completed
        if completed >= self.checkpoints or job.state == "FINISHED":
            return Verdict(Status.DONE, result=await _measured(client, job, statistics))
        if job.state in TERMINAL_STATES:
            text = f"the restore drill {self.job_id} is {job.state} after {completed} checkpoints"
            return await self.ended(client, job, text, {"status": job.state})
        self._state = job.state
        self.standing = f"{completed} of {self.checkpoints} completed, {progress_of_restore(job)}"
        return None

    async def on_kill(self, task: KilledTask) -> None:
        await task.cancel(self.job_id, "drill")


def progress_of_restore(job: JobDetails) -> str:
    """The progress of the restore of a job's state."""
    tasks = [state for vertex in job.vertices for state, number in vertex.tasks.items() if number]
    if not job.vertices or any(state in tasks for state in _WITHOUT_SLOTS):
        return "it waits for slots"
    return "its state is being restored" if any(state in tasks for state in _RESTORING) else "its state is restored"


def has_slots(job: JobDetails) -> bool:
    """Whether the job has begun to read its snapshot: failures from then on count against the snapshot."""
    return progress_of_restore(job) != "it waits for slots"


async def _measured(client: AsyncCalls, job: JobDetails, statistics: CheckpointStatistics) -> Json:
    """Times from the submission on: until the last subtask ran, and until the last of the counted checkpoints."""
    times: list[SubtaskTimes] = []
    for vertex in job.vertices:
        times += await client.subtask_times(job.job_id, vertex.id)
    running_at = max((found.timestamps_ms.get("RUNNING", 0) for found in times), default=0)
    ends = [item.triggered_at_ms + item.duration_ms for item in statistics.history if item.status == "COMPLETED"]
    return {
        "job_id": job.job_id,
        "name": job.name,
        "status": job.state,
        "checkpoints": statistics.counts.completed,
        "restored_after_ms": max(0, running_at - job.start_time_ms) if running_at else None,
        "healthy_after_ms": max(0, max(ends, default=job.start_time_ms) - job.start_time_ms),
    }


@dataclass(eq=False)
class SessionReadyCondition(Condition):
    """Done when the session leads: it answers about jobs then. FAILED when its process is seen to have ended.

    A session that waits for another one's lease already answers its overview, but 503 to requests about jobs.
    ``process`` is watched where it runs on this machine; with ``terminate_on_kill`` it is ended when a person marks the
    waiting task failed.
    """

    process: SessionProcess | None = None
    terminate_on_kill: bool = False

    @property
    def subject(self) -> str:
        return "the session to answer as the leader"

    async def poll(self, client: AsyncCalls) -> Verdict | None:
        if self.process is not None and self.process.is_here and not self.process.is_alive:
            return Verdict(Status.FAILED, "the session's process has ended")
        overview = await client.cluster_overview()
        await client.list_jobs()
        return Verdict(Status.DONE, result=session_facts(overview))

    async def on_kill(self, task: KilledTask) -> None:
        """End the session that was being started, if this is configured and no other try continues with it."""
        if self.process is None:
            return
        name = f"session {self.process.session_id} (pid {self.process.pid} on {self.process.hostname})"
        if not self.terminate_on_kill or not await task.is_given_up():
            task.log.warning("The task was killed; %s keeps running.", name)
        elif not self.process.is_here:
            task.log.error("The task was killed; %s runs on another machine and keeps running.", name)
        else:
            self.process.signal(15)
            task.log.warning("The task was killed; %s was sent SIGTERM.", name)


@dataclass(eq=False)
class SessionGoneCondition(Condition):
    """Done when the REST API no longer answers."""

    @property
    def subject(self) -> str:
        return "the end of the session's REST API"

    async def poll(self, client: AsyncCalls) -> Verdict | None:
        try:
            await client.cluster_overview()
        except Unreachable:
            return Verdict(Status.DONE)
        self.standing = "it still answers"
        return None


def session_facts(overview: ClusterOverview) -> Json:
    """The result of tasks about a session."""
    return {
        "slots_total": overview.slots_total,
        "slots_available": overview.slots_available,
        "jobs_running": overview.jobs_running,
        "version": overview.version,
    }
