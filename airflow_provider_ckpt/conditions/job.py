"""Waiting for a state of a job."""

from __future__ import annotations

from collections.abc import Collection, Generator
from typing import Any, Final

from ckpt_runtime.client import CkptNotFound

from airflow_provider_ckpt import calls
from airflow_provider_ckpt.conditions.base import Call, Condition, Json, Poll, Status, Verdict

TERMINAL: Final = ("FINISHED", "CANCELED", "FAILED")
"""States that a job never leaves."""
STATES: Final = (
    *("INITIALIZING", "CREATED", "RUNNING", "RESTARTING", "RECONCILING"),
    *("FAILING", "CANCELLING", "SUSPENDED"),
    *TERMINAL,
)
_ON_THEIR_WAY: Final = ("CREATED", "SCHEDULED", "DEPLOYING", "INITIALIZING", "RECONCILING")
_UNKNOWN_LIMIT: Final = 3


class JobCondition(Condition):
    """Done when the job is in one of ``expected``; FAILED when it ended in another state.

    With ``all_tasks``, RUNNING counts only when no task is still on its way: a job is RUNNING in name before its tasks
    are, and a checkpoint that is triggered then fails. A job that is unknown several times in a row is MISSING; once
    is not enough, since a new leader answers before it has recovered its jobs.
    """

    def __init__(self, job_id: str, expected: Collection[str], *, all_tasks: bool = False) -> None:
        self._job_id = job_id
        self._expected = frozenset(expected)
        self._all_tasks = all_tasks
        self._times_unknown = 0

    @property
    def subject(self) -> str:
        return f"job {self._job_id} to be {' or '.join(sorted(self._expected))}"

    def poll(self) -> Poll:
        try:
            job: Json = yield calls.job_details(self._job_id)
        except CkptNotFound as error:
            self._times_unknown += 1
            return Verdict(Status.MISSING, str(error)) if self._times_unknown >= _UNKNOWN_LIMIT else None
        self._times_unknown = 0
        state = str(job["state"])
        if state in self._expected and not (state == "RUNNING" and self._all_tasks and _tasks_on_their_way(job)):
            return Verdict(Status.DONE, result=job_facts(job))
        if state not in TERMINAL:
            return None
        cause = (yield from _root_cause(self._job_id)) if state == "FAILED" else ""
        expected = " or ".join(sorted(self._expected))
        return Verdict(Status.FAILED, f"job {self._job_id} is {state}, not {expected}{cause}", job_facts(job))


def _tasks_on_their_way(job: Json) -> bool:
    counts = [vertex.get("tasks") or {} for vertex in job.get("vertices") or []]
    return any(count.get(state, 0) for count in counts for state in _ON_THEIR_WAY)


def _root_cause(job_id: str) -> Generator[Call, Any, str]:
    """The newest failure as the end of a sentence; nothing when the job manager does not tell."""
    try:
        answer: Json = yield calls.job_exceptions(job_id)
    except CkptNotFound:
        return ""
    entries = (answer.get("exceptionHistory") or {}).get("entries") or []
    if not entries:
        return ""
    first_line = (str(entries[0].get("stacktrace") or "").strip().splitlines() or [""])[0]
    return f": {first_line or entries[0].get('exceptionName')}"


def job_facts(job: Json) -> Json:
    """What tasks return about a job."""
    return {
        "job_id": job["jid"],
        "name": job.get("name"),
        "status": job["state"],
        "start_time": job.get("start-time"),
        "end_time": job.get("end-time"),
        "duration_ms": job.get("duration"),
    }
