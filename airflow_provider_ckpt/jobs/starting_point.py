"""What a new job starts from: "the latest of" another job, or what the job of an earlier try has left.

A job has committed its output up to its latest checkpoint. So an older snapshot is not taken in the place of a latest
one that is gone, unless a savepoint is requested: what was written since would be written again. For the same reason
a try whose earlier job has completed a checkpoint never starts from nothing, unless a person decides so: it resumes
from the latest retained checkpoint, or not at all.

The reason for the new try matters only for a job whose end the task has reported. A retry follows a failure, so no
success was reported. A task that had succeeded runs again only because a person cleared it: a job that FINISHED or was
CANCELED has ended as intended, and is started again as the arguments say. A cleared failure is a retry.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

from airflow_provider_ckpt.exceptions import CkptJobNotFound, CkptJobNotResumable
from airflow_provider_ckpt.jobs.names import resolve
from ckpt_runtime.client.clients import AsyncCalls
from ckpt_runtime.client.errors import NotFound
from ckpt_runtime.client.waiting import until_final
from ckpt_runtime.contract.checkpoints import Checkpoint, CheckpointStatistics
from ckpt_runtime.contract.jobs import TERMINAL_STATES, JobLine

KINDS: Final = ("ANY", "CHECKPOINT", "SAVEPOINT")
_WAYS_OUT: Final = "Give a path as savepoint_path, or if_no_snapshot='start' to begin with nothing"


async def latest_snapshot_of(client: AsyncCalls, job: str, kind: str, *, or_nothing: bool, pause: float) -> str | None:
    """Where the latest snapshot of the kind lies, of the living job of that id or name, or of the one that ended last.

    None only with ``or_nothing``: no such job, or one that has completed nothing and was started from nothing.

    :raises CkptJobNotFound: when there is no such job.
    :raises CkptJobNotResumable: when it has no such snapshot, or no longer.
    """
    try:
        line = await resolve(client, job, ended=True, pause=pause)
    except CkptJobNotFound:
        if or_nothing:
            return None
        raise
    try:
        if line.state in TERMINAL_STATES:
            await until_final(client, line.job_id)
        statistics: CheckpointStatistics | None = await client.checkpoint_statistics(line.job_id)
    except NotFound:  # a Flink job without checkpoints has none
        statistics = None
    path = None if statistics is None else chosen_path(line, statistics, kind)
    if path is None and not or_nothing:
        raise CkptJobNotResumable(f"{_named(line)} has no completed {_noun(kind)} to start from. {_WAYS_OUT}")
    return path


def chosen_path(line: JobLine, statistics: CheckpointStatistics, kind: str) -> str | None:
    """The path of the latest snapshot of the kind; None when the job has completed none and was restored from none.

    :raises CkptJobNotResumable: when the latest is gone.
    """
    found = [item for item in statistics.completed if _fits(item, kind)]
    if not found:
        restored = statistics.latest_restored
        return None if restored is None or statistics.counts.completed else restored.external_path
    kept = [item for item in found if item.external_path and not item.discarded]
    newest = max(found, key=lambda item: item.id)
    if kind == "SAVEPOINT":
        newest = max(kept, key=lambda item: item.id, default=newest)
    if newest not in kept:
        raise CkptJobNotResumable(
            f"the latest {_noun(kind)} of {_named(line)}, {newest.id}, is not retained "
            f"(execution.checkpointing.externalized-checkpoint-retention). {_WAYS_OUT}"
        )
    return newest.external_path


def _fits(item: Checkpoint, kind: str) -> bool:
    return kind == "ANY" or item.is_savepoint == (kind == "SAVEPOINT")


def _noun(kind: str) -> str:
    return "checkpoint or savepoint" if kind == "ANY" else kind.lower()


def _named(line: JobLine) -> str:
    return f"job {line.job_id} ({line.name!r}, {line.state})"


Json = dict[str, Any]

_RETRY_HINT = (
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
            f"when it ends. What it retained lies in the checkpoint directory below {record['job_id']}. {_RETRY_HINT}"
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
            f"is retained (execution.checkpointing.externalized-checkpoint-retention). {_RETRY_HINT}"
        )
    why = f"{name} is {state} and has completed no checkpoint"
    return Plan(NextStep.START, why, record.get("snapshot"), bool(record.get("resumes")))


def _recovery_points(statistics: CheckpointStatistics | None) -> list[Checkpoint]:
    """Completed checkpoints, and the savepoint of a stop, which commits output as they do; plain ones do not."""
    return [] if statistics is None else [item for item in statistics.completed if item.kind != "SAVEPOINT"]


def _completed_unseen(statistics: CheckpointStatistics | None) -> bool:
    """Whether more have completed than plain savepoints are shown."""
    return statistics is not None and statistics.counts.completed > len(statistics.completed)
