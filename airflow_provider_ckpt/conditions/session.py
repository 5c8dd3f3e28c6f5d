"""Conditions on a session cluster: it leads, or it no longer answers."""

from __future__ import annotations

from dataclasses import dataclass

from airflow_provider_ckpt.conditions.base import Condition, Json, KilledTask, Status, Verdict
from airflow_provider_ckpt.processes import SessionProcess
from ckpt_runtime.client.clients import AsyncCalls
from ckpt_runtime.client.errors import Unreachable
from ckpt_runtime.client.models import ClusterOverview


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
        return "the session to answer and to lead"

    async def poll(self, client: AsyncCalls) -> Verdict | None:
        if self.process is not None and self.process.is_here and not self.process.is_alive:
            return Verdict(Status.FAILED, "the session's process has ended")
        overview = await client.cluster_overview()
        await client.list_jobs()
        return Verdict(Status.DONE, result=session_facts(overview))

    async def on_kill(self, task: KilledTask) -> None:
        """End the session that was being started if asked to and no other try continues with it."""
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
        return "the session's REST API to be gone"

    async def poll(self, client: AsyncCalls) -> Verdict | None:
        try:
            await client.cluster_overview()
        except Unreachable:
            return Verdict(Status.DONE)
        self.standing = "it still answers"
        return None


def session_facts(overview: ClusterOverview) -> Json:
    """What tasks return about a session."""
    return {
        "slots_total": overview.slots_total,
        "slots_available": overview.slots_available,
        "jobs_running": overview.jobs_running,
        "version": overview.version,
    }
