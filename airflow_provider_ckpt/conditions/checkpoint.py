"""The condition that the requested checkpoints of a job have completed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from airflow_provider_ckpt.conditions.base import POLL, Status, Verdict
from airflow_provider_ckpt.conditions.job import JobCondition, failure_of
from ckpt_runtime.client.clients import AsyncCalls
from ckpt_runtime.client.errors import NotFound
from ckpt_runtime.client.event_stream import StreamedEvent
from ckpt_runtime.contract.checkpoints import Checkpoint, CheckpointStatistics
from ckpt_runtime.contract.jobs import TERMINAL_STATES, JobDetails

_EVENTS = (
    *("checkpoint-completed", "checkpoint-failed", "savepoint-completed", "savepoint-failed"),
    *("job-status", POLL),
)


@dataclass(frozen=True, slots=True)
class CheckpointGoal:
    """The completed checkpoints that count; every given field must hold.

    ``checkpoint_id``: exactly this one. ``since_id``: ids above it only. ``after_ms``: triggered at or after this
    moment (milliseconds since the epoch). ``count``: their number. ``savepoints``: savepoints count as well, or with
    ``checkpoints=False`` alone.
    """

    checkpoint_id: int | None = None
    since_id: int | None = None
    after_ms: int | None = None
    count: int = 1
    savepoints: bool = False
    checkpoints: bool = True

    def accepts(self, item: Checkpoint) -> bool:
        """Whether an entry of the job's checkpoint history counts towards the goal."""
        return (
            item.status == "COMPLETED"
            and (self.savepoints if item.is_savepoint else self.checkpoints)
            and (self.checkpoint_id is None or item.id == self.checkpoint_id)
            and (self.since_id is None or item.id > self.since_id)
            and (self.after_ms is None or item.triggered_at_ms >= self.after_ms)
        )

    def __str__(self) -> str:
        noun = "checkpoint" if self.checkpoints else "savepoint"
        parts = [f"{self.count} completed {noun}{'s' if self.count > 1 else ''}"]
        parts += [f"with id {self.checkpoint_id}"] if self.checkpoint_id is not None else []
        parts += [f"newer than {self.since_id}"] if self.since_id is not None else []
        parts += [f"triggered at or after {self.after_ms} ms"] if self.after_ms is not None else []
        return " ".join(parts)


@dataclass(eq=False)
class CheckpointCondition(JobCondition):
    """Done when enough wanted checkpoints completed; FAILED when the job ended, or the wanted one failed or is
    forgotten.

    The job manager shows only the newest entries, so an instance remembers the entries that it has seen.
    """

    goal: CheckpointGoal

    def __post_init__(self) -> None:
        super().__post_init__()
        self._seen: dict[int, Checkpoint] = {}

    @property
    def subject(self) -> str:
        return f"{self.goal} of job {self.job_id}"

    def concerns(self, event: StreamedEvent) -> bool:
        return event.type in _EVENTS

    async def look(self, client: AsyncCalls) -> Verdict | None:
        # The state is read first: if the job had ended by then, the history that is read next is complete.
        job = await self.details(client)
        statistics = await client.checkpoint_statistics(self.job_id)
        self._seen.update({item.id: item for item in _entries(statistics) if self.goal.accepts(item)})
        if len(self._seen) >= self.goal.count:
            newest = self._seen[max(self._seen)]
            result = {
                "job_id": self.job_id,
                "checkpoint_id": newest.id,
                "checkpoint_type": newest.kind,
                "external_path": newest.external_path,
                "triggered_at_ms": newest.triggered_at_ms,
                "duration_ms": newest.duration_ms,
                "state_size": newest.state_size,
                "checkpointed_size": newest.checkpointed_size,
                "checkpoint_ids": sorted(self._seen),
            }
            return Verdict(Status.DONE, result=result)
        if job.state in TERMINAL_STATES:
            return await self._ended(client, job, statistics)
        self._state = job.state
        self.standing = f"{len(self._seen)} of {self.goal.count} completed, the job is {job.state}"
        return self._failed(statistics) or await self._forgotten(client, statistics)

    def _failed(self, statistics: CheckpointStatistics) -> Verdict | None:
        """The checkpoint that is wanted by its id has ended, but does not match the goal."""
        item = next((item for item in _entries(statistics) if item.id == self.goal.checkpoint_id), None)
        if item is None or item.status == "IN_PROGRESS":
            return None
        reason = f"failed: {item.failure_message or 'no reason given'}"
        if item.status == "COMPLETED":
            noun = "savepoint" if item.is_savepoint else "checkpoint"
            reason = f"is a {noun} triggered at {item.triggered_at_ms} ms, which the other arguments exclude"
        return Verdict(Status.FAILED, f"checkpoint {item.id} of job {self.job_id} {reason}")

    async def _forgotten(self, client: AsyncCalls, statistics: CheckpointStatistics) -> Verdict | None:
        """The checkpoint wanted by its id has left the history, which has later ones: its result is unknown."""
        wanted = self.goal.checkpoint_id
        shown = [item.id for item in statistics.history]
        if wanted is None or wanted in shown or max(shown, default=0) < wanted:
            return None
        try:
            # A pending checkpoint may be missing in Flink's list.
            await client.checkpoint_details(self.job_id, wanted)
        except NotFound:
            text = f"checkpoint {wanted} of job {self.job_id} is no longer in its history, which is at {max(shown)}"
            ways = "Ask for since_checkpoint_id instead, or have the session keep more (web.checkpoints.history)"
            return Verdict(Status.FAILED, f"{text}; it is unknown whether it has completed. {ways}")
        return None

    async def _ended(self, client: AsyncCalls, job: JobDetails, statistics: CheckpointStatistics) -> Verdict:
        cause = await failure_of(client, job)
        failed = self._failed(statistics)
        if failed is not None:
            return replace(failed, trace=cause.trace)
        found = f"{len(self._seen)} of {self.goal.count}" if self._seen else "none"
        text = f"job {self.job_id} is {job.state} and completes no more checkpoints; {found} of those wanted completed"
        return Verdict(Status.FAILED, f"{text}{cause.clause}", trace=cause.trace)


def _entries(statistics: CheckpointStatistics) -> list[Checkpoint]:
    """The checkpoints of the history, and the latest ones, which a short history may no longer have."""
    latest = (statistics.latest_completed, statistics.latest_savepoint)
    return [*statistics.history, *(item for item in latest if item is not None)]


def newest_id(statistics: CheckpointStatistics) -> int:
    """The highest id of an ended checkpoint or savepoint so far; 0 when there is none."""
    return max((item.id for item in _entries(statistics) if item.status != "IN_PROGRESS"), default=0)
