"""How a try handles the job that an earlier one has started. Pure: from what is known of that job to a plan.

An earlier job that has completed a checkpoint has committed output up to it. Another job that starts from nothing would
write that output again, so it resumes from the latest retained checkpoint, or not at all unless a person decides so.

The reason for the new try matters only for a job whose end the task has reported. A retry follows a failure, so no
success was reported. A task that had succeeded runs again only because a person cleared it: a job that FINISHED or was
CANCELED has ended as intended, and is started again as the arguments say. A cleared failure is a retry.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from airflow_provider_ckpt.exceptions import CkptJobNotResumable
from ckpt_runtime.client.checkpoint_models import Checkpoint, CheckpointStatistics
from ckpt_runtime.client.models import TERMINAL_STATES

Json = dict[str, Any]

_WAYS_OUT = (
    "Give the snapshot to resume from as savepoint_path; or remove what was written, and give start_over=True to start "
    "from nothing"
)


class NextStep(Enum):
    """The next step: return the job's facts, wait for it, request it once more, or start another."""

    REPORT = auto()
    ATTACH = auto()
    REPEAT = auto()
    START = auto()


@dataclass(frozen=True, slots=True)
class Plan:
    """A step and why. A requested job starts from ``snapshot``; ``resumes`` when an earlier job has made that."""

    step: NextStep
    why: str
    snapshot: str | None = None
    resumes: bool = False


@dataclass(frozen=True, slots=True)
class EarlierJob:
    """The journal's record, and what the job manager says: ``state`` is ``None`` for a job that it does not know."""

    record: Json
    state: str | None
    statistics: CheckpointStatistics | None = None

    @property
    def name(self) -> str:
        return f"job {self.record['job_id']} of an earlier try"


def plan(earlier: EarlierJob, given: str | None, *, start_over: bool) -> Plan:
    """Decides what to do about the earlier job; ``given`` is the task's ``savepoint_path``.

    :raises CkptJobNotResumable: when only a person can decide; it says what lies where.
    """
    record, state, name = earlier.record, earlier.state, earlier.name
    reported = bool(record.get("reported"))
    another = given is not None and given != record.get("given")
    if state is None and not record.get("started"):
        why = f"{name} never arrived"
        if start_over or another:
            return Plan(NextStep.REPEAT, why, given)
        return Plan(NextStep.REPEAT, why, record.get("snapshot"), bool(record.get("resumes")))
    if state is not None and state not in TERMINAL_STATES:
        return Plan(NextStep.ATTACH, f"{name} is {state}")
    if state == "FINISHED" and not reported:
        return Plan(NextStep.REPORT, f"{name} is {state}")
    if start_over:
        return Plan(NextStep.START, f"{name} is {state or 'unknown'}, and start_over is set", given)
    if another:
        return Plan(NextStep.START, f"{name} is {state or 'unknown'}, and another savepoint_path is given", given)
    if reported and state in ("FINISHED", "CANCELED"):
        return Plan(NextStep.START, f"{name} is {state}, and the task was cleared; what it has written stays", given)
    return _resume(earlier)


def _resume(earlier: EarlierJob) -> Plan:
    record, state, name = earlier.record, earlier.state, earlier.name
    if state is None:
        raise CkptJobNotResumable(
            f"{name} is no longer known to the job manager: a session without high availability forgets its jobs "
            f"when it ends. What it retained lies in the checkpoint directory below {record['job_id']}. {_WAYS_OUT}"
        )
    entries = _recovery_points(earlier.statistics)
    kept = [item for item in entries if not item.discarded and item.external_path]
    if kept:
        newest = max(kept, key=lambda item: item.id)
        return Plan(
            NextStep.START, f"{name} is {state}; resuming from {newest.external_path}", newest.external_path, True
        )
    if entries or _completed_unseen(earlier.statistics):
        raise CkptJobNotResumable(
            f"{name} is {state}. It has completed checkpoints, up to which its output is committed, and none of them "
            f"is retained (execution.checkpointing.externalized-checkpoint-retention). {_WAYS_OUT}"
        )
    why = f"{name} is {state} and has completed no checkpoint"
    return Plan(NextStep.START, why, record.get("snapshot"), bool(record.get("resumes")))


def _recovery_points(statistics: CheckpointStatistics | None) -> list[Checkpoint]:
    """Completed checkpoints, and the savepoint of a stop, which commits output as they do; plain ones do not."""
    return [] if statistics is None else [item for item in statistics.completed if item.kind != "SAVEPOINT"]


def _completed_unseen(statistics: CheckpointStatistics | None) -> bool:
    """Whether more have completed than plain savepoints are shown."""
    return statistics is not None and statistics.counts.completed > len(statistics.completed)
