"""Waiting for a restore drill to show that the snapshot can be restored and checkpoints complete with its state."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from airflow_provider_ckpt.conditions.base import Json, Poll, Status, Verdict
from airflow_provider_ckpt.conditions.job import JobCondition
from airflow_provider_ckpt.conditions.job_log import failure_of
from ckpt_runtime.client import requests
from ckpt_runtime.client.checkpoint_models import CheckpointStatistics
from ckpt_runtime.client.models import TERMINAL_STATES, JobDetails, SubtaskTimes
from ckpt_runtime.client.requests import Call

_WITHOUT_SLOTS = ("CREATED", "SCHEDULED")
_RESTORING = ("DEPLOYING", "INITIALIZING")


class DrillCondition(JobCondition):
    """Done when all subtasks run and so many checkpoints have completed, or the job has FINISHED before; FAILED when it
    ended otherwise. The result says how long it took.
    """

    def __init__(self, job_id: str, checkpoints: int) -> None:
        super().__init__(job_id)
        self._checkpoints = checkpoints

    @property
    def subject(self) -> str:
        return (
            f"{self._checkpoints} checkpoint{'s' if self._checkpoints > 1 else ''} of the restore drill {self._job_id}"
        )

    def look(self) -> Poll:
        job = yield from self._details()
        statistics: CheckpointStatistics = yield requests.checkpoint_statistics(self._job_id)
        completed = statistics.counts.completed
        if completed >= self._checkpoints or job.state == "FINISHED":
            return Verdict(Status.DONE, result=(yield from _measured(job, statistics)))
        if job.state in TERMINAL_STATES:
            cause = yield from failure_of(job)
            text = f"the restore drill {self._job_id} is {job.state} after {completed} checkpoints{cause.clause}"
            return Verdict(Status.FAILED, text, {"status": job.state}, cause.trace)
        self._state = job.state
        self.standing = f"{completed} of {self._checkpoints} came, {progress_of_restore(job)}"
        return None


def progress_of_restore(job: JobDetails) -> str:
    """How far a job has come with what it starts from."""
    tasks = [state for vertex in job.vertices for state, number in vertex.tasks.items() if number]
    if not job.vertices or any(state in tasks for state in _WITHOUT_SLOTS):
        return "it waits for slots"
    return "its state is being restored" if any(state in tasks for state in _RESTORING) else "its state is restored"


def has_slots(job: JobDetails) -> bool:
    """Whether the job has got as far as to its snapshot: what comes of it from then on says something about that."""
    return progress_of_restore(job) != "it waits for slots"


def _measured(job: JobDetails, statistics: CheckpointStatistics) -> Generator[Call[Any], Any, Json]:
    """Times from the submission on: until the last subtask ran, and until the last of the counted checkpoints."""
    times: list[SubtaskTimes] = []
    for vertex in job.vertices:
        found: Sequence[SubtaskTimes] = yield requests.subtask_times(job.job_id, vertex.id)
        times += found
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
