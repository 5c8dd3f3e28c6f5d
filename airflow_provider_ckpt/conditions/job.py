"""Waiting for a state of a job."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Generator
from typing import Any, Final

from airflow_provider_ckpt.conditions.base import POLL, Condition, Json, Poll, Status, Verdict
from airflow_provider_ckpt.conditions.job_log import failure_of, progress_of
from airflow_provider_ckpt.job_names import living
from ckpt_runtime.client import requests
from ckpt_runtime.client.checkpoint_models import CheckpointStatistics
from ckpt_runtime.client.errors import NotFound
from ckpt_runtime.client.event_stream import StreamedEvent
from ckpt_runtime.client.models import TERMINAL_STATES, JobDetails
from ckpt_runtime.client.requests import Call

STATES: Final = (
    *("INITIALIZING", "CREATED", "RUNNING", "RESTARTING", "RECONCILING", "FAILING", "CANCELLING", "SUSPENDED"),
    *sorted(TERMINAL_STATES),
)
_STATES_TOLD_BY: Final = ("job-status", "deployment", "tasks-running")
_ON_THEIR_WAY: Final = ("CREATED", "SCHEDULED", "DEPLOYING", "INITIALIZING", "RECONCILING")


class JobCondition(Condition):
    """Base of what is waited for at one job. ``look`` may meet "not found" anywhere; ``_state`` is what it last saw."""

    def __init__(self, job_id: str) -> None:
        super().__init__()
        self._job_id = job_id
        self._state = ""

    @property
    def job(self) -> str:
        return self._job_id

    def poll(self) -> Poll:
        try:
            verdict = yield from self.look()
        except NotFound as error:
            return self.absence.missing(str(error))
        self.absence.seen()
        return verdict

    @abstractmethod
    def look(self) -> Poll:
        """Looks once at the job."""

    def detail(self) -> Generator[Call[Any], Any, str]:
        return (yield from progress_of(self._job_id, self._state))

    def _details(self) -> Generator[Call[Any], Any, JobDetails]:
        job: JobDetails = yield requests.job_details(self._job_id)
        self.absence.seen()  # regardless of the requests that follow
        return job


class JobStatusCondition(JobCondition):
    """Done when the job is in one of ``expected``; FAILED when it ended in another state, MISSING when it is unknown.

    With ``all_tasks``, RUNNING counts only when no task is still on its way: a job is RUNNING in name before its tasks
    are, and a checkpoint that is triggered then fails.
    """

    def __init__(self, job_id: str, expected: Collection[str], *, all_tasks: bool = False) -> None:
        super().__init__(job_id)
        self._expected = frozenset(expected)
        self._all_tasks = all_tasks

    @property
    def subject(self) -> str:
        return f"job {self._job_id} to be {' or '.join(sorted(self._expected))}"

    def concerns(self, event: StreamedEvent) -> bool:
        return event.type in _STATES_TOLD_BY

    def look(self) -> Poll:
        job = yield from self._details()
        if job.state in self._expected and not (job.state == "RUNNING" and self._all_tasks and is_starting(job)):
            return Verdict(Status.DONE, result=job_facts(job))
        if job.state not in TERMINAL_STATES:
            self.standing, self._state = _standing(job), job.state
            return None
        cause = yield from failure_of(job)
        expected = " or ".join(sorted(self._expected))
        text = f"job {self._job_id} is {job.state}, not {expected}{cause.clause}"
        return Verdict(Status.FAILED, text, job_facts(job), cause.trace)


class ReadyForSnapshotCondition(JobCondition):
    """Done when a savepoint or stop can succeed, or the job has ended; the result has the job's facts, and under
    ``running_since_ms`` the start of its present attempt. The message of a job that has FAILED ends a sentence.

    Not before: the job starts, is restarting or being recovered by a new driver, or another stop is in progress.
    """

    @property
    def subject(self) -> str:
        return f"job {self._job_id} to run without another stop in progress"

    def concerns(self, event: StreamedEvent) -> bool:
        return event.type in (*_STATES_TOLD_BY, "savepoint-triggered", "savepoint-failed", POLL)

    def look(self) -> Poll:
        job = yield from self._details()
        running = job.state == "RUNNING" and not is_starting(job)
        if job.state not in TERMINAL_STATES and (not running or (yield from _is_stopping(self._job_id))):
            self.standing = "another stop is in progress" if running else _standing(job)
            self._state = job.state
            return None
        cause = yield from failure_of(job)
        running_since = {"running_since_ms": job.timestamps_ms.get("RUNNING", 0)}
        return Verdict(Status.DONE, cause.clause, job_facts(job) | running_since, cause.trace)


class NameFreeCondition(Condition):
    """Done when no living job has the name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    @property
    def subject(self) -> str:
        return f"the end of every job named {self._name!r}"

    def poll(self) -> Poll:
        lines = yield requests.list_jobs()
        found = living(self._name, lines)
        if not found:
            return Verdict(Status.DONE)
        self.standing = ", ".join(f"job {line.job_id} is {line.state}" for line in found)
        return None


def _is_stopping(job_id: str) -> Generator[Call[Any], Any, bool]:
    try:
        statistics: CheckpointStatistics = yield requests.checkpoint_statistics(job_id)
    except NotFound:  # a Flink job without checkpoints has no statistics
        return False
    return any(item.kind == "SYNC_SAVEPOINT" and item.status == "IN_PROGRESS" for item in statistics.history)


def is_starting(job: JobDetails) -> bool:
    """Whether a task is still on its way: a job is RUNNING in name before."""
    return any(vertex.tasks.get(state, 0) for vertex in job.vertices for state in _ON_THEIR_WAY)


def _standing(job: JobDetails) -> str:
    return f"it is {job.state}, tasks are starting" if is_starting(job) else f"it is {job.state}"


def job_facts(job: JobDetails) -> Json:
    """What tasks return about a job."""
    return {
        "job_id": job.job_id,
        "name": job.name,
        "status": job.state,
        "start_time_ms": job.start_time_ms,
        "end_time_ms": job.end_time_ms,
        "duration_ms": job.duration_ms,
    }
