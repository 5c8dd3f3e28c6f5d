"""Waiting for completed checkpoints of a job."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

from airflow_provider_ckpt.conditions.base import POLL, Json, Poll, Status, Verdict
from airflow_provider_ckpt.conditions.job import JobCondition
from airflow_provider_ckpt.conditions.job_log import failure_of
from ckpt_runtime.client import requests
from ckpt_runtime.client.checkpoint_models import Checkpoint, CheckpointStatistics
from ckpt_runtime.client.errors import NotFound
from ckpt_runtime.client.event_stream import StreamedEvent
from ckpt_runtime.client.models import TERMINAL_STATES, JobDetails

_TOLD_BY = (
    *("checkpoint-completed", "checkpoint-failed", "savepoint-completed", "savepoint-failed"),
    *("job-status", POLL),
)


@dataclass(frozen=True, slots=True)
class CheckpointGoal:
    """Which completed checkpoints are wanted; every given field must hold.

    ``checkpoint_id``: exactly this one. ``since_id``: ids above it only. ``after_ms``: triggered at or after this
    moment (milliseconds since the epoch). ``count``: so many of them. ``savepoints``: savepoints count as well, or with
    ``checkpoints=False`` alone.
    """

    checkpoint_id: int | None = None
    since_id: int | None = None
    after_ms: int | None = None
    count: int = 1
    savepoints: bool = False
    checkpoints: bool = True

    def accepts(self, item: Checkpoint) -> bool:
        """Whether one entry of the job's checkpoint history is wanted."""
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


class CheckpointCondition(JobCondition):
    """Done when enough wanted checkpoints completed; FAILED when the job ended, or the wanted one failed or is
    forgotten.

    The job manager shows only the newest entries, so what was seen is remembered over the life of one instance.
    """

    def __init__(self, job_id: str, goal: CheckpointGoal) -> None:
        super().__init__(job_id)
        self._goal = goal
        self._seen: dict[int, Checkpoint] = {}

    @property
    def subject(self) -> str:
        return f"{self._goal} of job {self._job_id}"

    def concerns(self, event: StreamedEvent) -> bool:
        return event.type in _TOLD_BY

    def look(self) -> Poll:
        # The state first: a job that had ended before its history was read has all of its history written.
        job: JobDetails = yield requests.job_details(self._job_id)
        statistics: CheckpointStatistics = yield requests.checkpoint_statistics(self._job_id)
        self._seen.update({item.id: item for item in _entries(statistics) if self._goal.accepts(item)})
        if len(self._seen) >= self._goal.count:
            return Verdict(Status.DONE, result=self._result())
        if job.state in TERMINAL_STATES:
            return (yield from self._ended(job, statistics))
        self._state = job.state
        self.standing = f"{len(self._seen)} of {self._goal.count} came, the job is {job.state}"
        return self._failed(statistics) or (yield from self._forgotten(statistics))

    def _failed(self, statistics: CheckpointStatistics) -> Verdict | None:
        """The checkpoint that is wanted by its id has ended, but does not match the goal."""
        item = next((item for item in _entries(statistics) if item.id == self._goal.checkpoint_id), None)
        if item is None or item.status == "IN_PROGRESS":
            return None
        reason = f"failed: {item.failure_message or 'no reason given'}"
        if item.status == "COMPLETED":
            noun = "savepoint" if item.is_savepoint else "checkpoint"
            reason = f"is a {noun} triggered at {item.triggered_at_ms} ms, which the other arguments exclude"
        return Verdict(Status.FAILED, f"checkpoint {item.id} of job {self._job_id} {reason}")

    def _forgotten(self, statistics: CheckpointStatistics) -> Poll:
        """The checkpoint wanted by its id has left the history, which has later ones: its result is unknown."""
        wanted = self._goal.checkpoint_id
        shown = [item.id for item in statistics.history]
        if wanted is None or wanted in shown or max(shown, default=0) < wanted:
            return None
        try:
            yield requests.checkpoint_details(self._job_id, wanted)  # one that is pending may not be in Flink's list
        except NotFound:
            text = f"checkpoint {wanted} of job {self._job_id} is not in its history any more, which is at {max(shown)}"
            ways = "Ask for since_checkpoint_id instead, or have the session keep more (web.checkpoints.history)"
            return Verdict(Status.FAILED, f"{text}; whether it has completed is not known. {ways}")
        return None

    def _ended(self, job: JobDetails, statistics: CheckpointStatistics) -> Generator[requests.Call[Any], Any, Verdict]:
        cause = yield from failure_of(job)
        failed = self._failed(statistics)
        if failed is not None:
            return replace(failed, trace=cause.trace)
        found = f"{len(self._seen)} of {self._goal.count}" if self._seen else "none"
        text = f"job {self._job_id} is {job.state} and completes no more checkpoints; {found} of those wanted came"
        return Verdict(Status.FAILED, f"{text}{cause.clause}", trace=cause.trace)

    def _result(self) -> Json:
        newest = self._seen[max(self._seen)]
        return checkpoint_facts(self._job_id, newest) | {"checkpoint_ids": sorted(self._seen)}


def _entries(statistics: CheckpointStatistics) -> list[Checkpoint]:
    """The history and the latest ones, which may have left a short history already."""
    latest = (statistics.latest_completed, statistics.latest_savepoint)
    return [*statistics.history, *(item for item in latest if item is not None)]


def checkpoint_facts(job_id: str, item: Checkpoint) -> Json:
    """What tasks return about a completed checkpoint."""
    return {
        "job_id": job_id,
        "checkpoint_id": item.id,
        "checkpoint_type": item.kind,
        "external_path": item.external_path,
        "triggered_at_ms": item.triggered_at_ms,
        "duration_ms": item.duration_ms,
        "state_size": item.state_size,
        "checkpointed_size": item.checkpointed_size,
    }


def newest_id(statistics: CheckpointStatistics) -> int:
    """The highest id of an ended checkpoint or savepoint so far; 0 when there is none."""
    return max((item.id for item in _entries(statistics) if item.status != "IN_PROGRESS"), default=0)
