"""Waiting for completed checkpoints of a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckpt_runtime.client import CkptNotFound

from airflow_provider_ckpt import calls
from airflow_provider_ckpt.conditions.base import Condition, Json, Poll, Status, Verdict
from airflow_provider_ckpt.conditions.job import TERMINAL

_UNKNOWN_LIMIT = 3


@dataclass(frozen=True, slots=True)
class CheckpointGoal:
    """Which completed checkpoints are wanted; every given field must hold.

    ``checkpoint_id``: exactly this one. ``since_id``: ids above it only. ``after_ms``: triggered at or after this
    moment (milliseconds since the epoch). ``count``: so many of them. ``savepoints``: savepoints count as well.
    """

    checkpoint_id: int | None = None
    since_id: int | None = None
    after_ms: int | None = None
    count: int = 1
    savepoints: bool = False

    def accepts(self, item: Json) -> bool:
        """Whether one entry of the job's checkpoint history is wanted."""
        return (
            item.get("status") == "COMPLETED"
            and (self.savepoints or not item.get("is_savepoint"))
            and (self.checkpoint_id is None or item["id"] == self.checkpoint_id)
            and (self.since_id is None or item["id"] > self.since_id)
            and (self.after_ms is None or item["trigger_timestamp"] >= self.after_ms)
        )

    def __str__(self) -> str:
        parts = [f"{self.count} completed checkpoint{'s' if self.count > 1 else ''}"]
        parts += [f"with id {self.checkpoint_id}"] if self.checkpoint_id is not None else []
        parts += [f"newer than {self.since_id}"] if self.since_id is not None else []
        parts += [f"triggered after {self.after_ms}"] if self.after_ms is not None else []
        return " ".join(parts)


class CheckpointCondition(Condition):
    """Done when enough wanted checkpoints completed; FAILED when the job ended, or the wanted one failed.

    The job manager shows only the newest entries, so what was seen is remembered over the life of one instance.
    """

    def __init__(self, job_id: str, goal: CheckpointGoal) -> None:
        self._job_id = job_id
        self._goal = goal
        self._seen: dict[int, Json] = {}
        self._times_unknown = 0

    @property
    def subject(self) -> str:
        return f"{self._goal} of job {self._job_id}"

    def poll(self) -> Poll:
        try:
            # The state first: a job that ended before the history was read has written all of its history.
            status: Json = yield calls.job_status(self._job_id)
            statistics: Json = yield calls.checkpoint_statistics(self._job_id)
        except CkptNotFound as error:
            self._times_unknown += 1
            return Verdict(Status.MISSING, str(error)) if self._times_unknown >= _UNKNOWN_LIMIT else None
        self._times_unknown = 0
        history = list(statistics.get("history") or [])
        self._seen.update({item["id"]: item for item in history if self._goal.accepts(item)})
        if len(self._seen) >= self._goal.count:
            return Verdict(Status.DONE, result=self._result())
        return self._hopeless(str(status["status"]), history)

    def _hopeless(self, state: str, history: list[Json]) -> Verdict | None:
        wanted = self._goal.checkpoint_id
        for item in history:
            if item["id"] == wanted and item.get("status") == "FAILED":
                reason = item.get("failure_message") or "no reason given"
                return Verdict(Status.FAILED, f"checkpoint {wanted} of job {self._job_id} failed: {reason}")
        if state in TERMINAL:
            found = f"{len(self._seen)} of {self._goal.count} came" if self._seen else "none came"
            return Verdict(Status.FAILED, f"job {self._job_id} is {state} and completes no more checkpoints, {found}")
        return None

    def _result(self) -> Json:
        newest = self._seen[max(self._seen)]
        return checkpoint_facts(self._job_id, newest) | {"checkpoint_ids": sorted(self._seen)}


def checkpoint_facts(job_id: str, item: Json) -> Json:
    """What tasks return about a completed checkpoint."""
    return {
        "job_id": job_id,
        "checkpoint_id": item["id"],
        "checkpoint_type": item.get("checkpoint_type"),
        "external_path": item.get("external_path"),
        "trigger_timestamp": item.get("trigger_timestamp"),
        "duration_ms": item.get("end_to_end_duration"),
        "state_size": item.get("state_size"),
        "checkpointed_size": item.get("checkpointed_size"),
    }


def newest_id(statistics: Json) -> int:
    """The highest id of a finished or failed checkpoint or savepoint so far; 0 when there is none."""
    items: list[Any] = [*(statistics.get("history") or []), *(statistics.get("latest") or {}).values()]
    return max((item["id"] for item in items if item and item.get("status") != "IN_PROGRESS"), default=0)
