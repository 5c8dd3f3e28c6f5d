"""The job that a task means, and the snapshot that a new job starts from.

A task names a job by its id, or by a name that no other living job has.

A name outlives its jobs: each redeployment makes another job of it. A name means the job that is alive. The jobs of
that name that have ended are its history, and the last of them is meant only where that makes sense.

A new job starts from "the latest of" another job, or from the snapshot of an earlier try's job. A job has committed
its output up to its latest checkpoint. An older snapshot therefore does not replace a latest one that is missing,
unless a savepoint is requested: rows written since would be written again. For the same reason a try whose earlier
job has completed a checkpoint never starts from nothing, unless a person decides so: it resumes from the latest
retained checkpoint, or not at all.

The reason for the new try matters only for a job whose end the task has reported. A retry follows a failure, so no
success was reported. A task that had succeeded runs again only because a person cleared it: a job that FINISHED or was
CANCELED has ended as intended, and is started again as the arguments say. A cleared failure is a retry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.conditions.base import Condition, MissingPolicy, Status, Verdict, moment
from airflow_provider_ckpt.exceptions import CkptJobAmbiguous, CkptJobNotFound, CkptJobNotResumable
from ckpt_runtime.client.clients import AsyncCalls
from ckpt_runtime.client.errors import NotFound
from ckpt_runtime.client.waiting import until_final
from ckpt_runtime.contract.checkpoints import CheckpointStatistics
from ckpt_runtime.contract.jobs import TERMINAL_STATES, JobLine

_MOST_SHOWN = 10


@dataclass(eq=False)
class NameFreeCondition(Condition):
    """Done when no living job has the name."""

    name: str

    @property
    def subject(self) -> str:
        return f"the end of every job named {self.name!r}"

    async def poll(self, client: AsyncCalls) -> Verdict | None:
        found = living(self.name, await client.list_jobs())
        if not found:
            return Verdict(Status.DONE)
        self.standing = ", ".join(f"job {line.job_id} is {line.state}" for line in found)
        return None

    def left_over(self) -> str:
        return f"no job was started, and the one named {self.name!r} keeps running"


def living(name: str, lines: Sequence[JobLine]) -> list[JobLine]:
    """The jobs of this name that have not ended. A restore drill has the name of the job that it restores."""
    return [line for line in lines if line.name == name and line.state not in TERMINAL_STATES and not line.drill]


def latest_ended(name: str, lines: Sequence[JobLine]) -> JobLine | None:
    """The most recently ended job of this name."""
    ended = (line for line in lines if line.name == name and line.state in TERMINAL_STATES and not line.drill)
    return max(ended, key=lambda line: line.end_time_ms, default=None)


def chosen(job: str, lines: Sequence[JobLine], *, ended: bool) -> JobLine | None:
    """The job that is meant, if it exists. With ``ended`` it may be the last one of the name, when none is alive.

    :raises CkptJobAmbiguous: for a name that several living jobs have.
    """
    if arguments.is_job_id(job):
        return next((line for line in lines if line.job_id == job), None)
    found = living(job, lines)
    if len(found) > 1:
        raise CkptJobAmbiguous(
            f"job: {job!r} is the name of {len(found)} active jobs, {_shown(found)}. Give the id of one of them"
        )
    return found[0] if found else (latest_ended(job, lines) if ended else None)


async def resolve(client: AsyncCalls, job: str, *, ended: bool, pause: float) -> JobLine:
    """Look for the job among those of the session. It is missing if several answers in a row do not have it.

    :raises CkptJobNotFound: naming the jobs that are there.
    :raises CkptJobAmbiguous: naming the candidates.
    """
    lines: Sequence[JobLine] = ()
    for look in range(MissingPolicy.LIMIT):
        if look:
            await asyncio.sleep(pause)
        lines = await client.list_jobs()
        found = chosen(job, lines, ended=ended)
        if found is not None:
            return found
    running = [line for line in lines if line.state not in TERMINAL_STATES]
    there = f"active jobs are {_shown(running)}" if running else "no job is active in this session"
    last = None if arguments.is_job_id(job) else latest_ended(job, lines)
    if arguments.is_job_id(job):
        text = f"job: {job} is unknown to the job manager; {there}"
    elif last is None:
        text = f"job: no job is named {job!r}; {there}"
    else:
        text = f"job: no active job is named {job!r}, the latest one, {last.job_id}, is {last.state}; {there}"
    raise CkptJobNotFound(f"{text}. Check the connection and the name, or give if_not_found='skip'")


def _shown(lines: Sequence[JobLine]) -> str:
    shown = [
        f"{line.job_id} ({line.name!r}, {line.state}, started {moment(line.start_time_ms)})"
        for line in lines[:_MOST_SHOWN]
    ]
    more = len(lines) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


KINDS: Final = ("ANY", "CHECKPOINT", "SAVEPOINT")
_WAYS_OUT: Final = "Set savepoint_path to a path, or if_no_snapshot='start' to start without a snapshot"


async def latest_snapshot_of(client: AsyncCalls, job: str, kind: str, *, or_nothing: bool, pause: float) -> str | None:
    """The path of the latest snapshot of the kind, of the living job of that id or name, or of the one that ended last.

    None only with ``or_nothing``: no such job, or a job without a completed snapshot that was started without one.

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

    :raises CkptJobNotResumable: when the latest is missing.
    """
    found = [item for item in statistics.completed if kind == "ANY" or item.is_savepoint == (kind == "SAVEPOINT")]
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


def _noun(kind: str) -> str:
    return "checkpoint or savepoint" if kind == "ANY" else kind.lower()


def _named(line: JobLine) -> str:
    return f"job {line.job_id} ({line.name!r}, {line.state})"


Json = dict[str, Any]

_RETRY_HINT = (
    "Set savepoint_path to the snapshot to resume from; or remove the output, and set start_over=True to start "
    "without a snapshot"
)


class NextStep(Enum):
    """The next step: return the job's facts, wait for it, request it once more, or start another."""

    REPORT = auto()
    ATTACH = auto()
    REPEAT = auto()
    START = auto()


@dataclass(frozen=True, slots=True)
class Plan:
    """A step and its reason. A requested job starts from ``snapshot``; ``resumes`` is true if an earlier job wrote
    it."""

    step: NextStep
    why: str
    snapshot: str | None = None
    resumes: bool = False


@dataclass(frozen=True, slots=True)
class EarlierJob:
    """The journal's record, and the job manager's answer: ``state`` is ``None`` for a job that it does not know."""

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
        return Plan(NextStep.START, f"{name} is {state}, and the task was cleared; its output is kept", given)
    return _resume(earlier)


def _resume(earlier: EarlierJob) -> Plan:
    record, state, name = earlier.record, earlier.state, earlier.name
    if state is None:
        raise CkptJobNotResumable(
            f"{name} is no longer known to the job manager: a session without high availability forgets its jobs when "
            f"it ends. Its retained checkpoints are in the checkpoint directory below {record['job_id']}. "
            f"{_RETRY_HINT}"
        )
    # Plain savepoints do not commit output, as checkpoints and the savepoint of a stop do.
    completed = () if earlier.statistics is None else earlier.statistics.completed
    entries = [item for item in completed if item.kind != "SAVEPOINT"]
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


def _completed_unseen(statistics: CheckpointStatistics | None) -> bool:
    """Whether more snapshots have completed than the plain savepoints that are shown."""
    return statistics is not None and statistics.counts.completed > len(statistics.completed)
