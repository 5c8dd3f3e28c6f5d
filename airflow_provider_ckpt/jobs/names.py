"""Which job a task means: one that is named by its id, or by a name that no other living job has.

A name outlives its jobs: each redeployment makes another job of it. So a name means the job that lives; the ended ones
are its history, of which the latest counts only where that makes sense.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from airflow_provider_ckpt.conditions.base import Condition, MissingPolicy, Status, Verdict, moment
from airflow_provider_ckpt.exceptions import CkptJobAmbiguous, CkptJobNotFound
from ckpt_runtime.client.clients import AsyncCalls
from ckpt_runtime.client.models import TERMINAL_STATES, JobLine

_MOST_SHOWN = 10
_DIGITS = 32


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


def is_id(job: str) -> bool:
    """Whether it is a job's id, as :func:`airflow_provider_ckpt.arguments.job` gives it, and not a name."""
    return len(job) == _DIGITS and not set(job) - set("0123456789abcdef")


def living(name: str, lines: Sequence[JobLine]) -> list[JobLine]:
    """The jobs of this name that have not ended. A restore drill has the name of the job that it restores."""
    return [line for line in lines if line.name == name and line.state not in TERMINAL_STATES and not line.drill]


def latest_ended(name: str, lines: Sequence[JobLine]) -> JobLine | None:
    """The job of this name that ended last."""
    ended = (line for line in lines if line.name == name and line.state in TERMINAL_STATES and not line.drill)
    return max(ended, key=lambda line: line.end_time_ms, default=None)


def chosen(job: str, lines: Sequence[JobLine], *, ended: bool) -> JobLine | None:
    """The job that is meant, if it is there; with ``ended`` the latest of the name when none lives.

    :raises CkptJobAmbiguous: for a name that several living jobs have.
    """
    if is_id(job):
        return next((line for line in lines if line.job_id == job), None)
    found = living(job, lines)
    if len(found) > 1:
        raise CkptJobAmbiguous(
            f"job: {job!r} is the name of {len(found)} living jobs, {_shown(found)}. Give the id of one of them"
        )
    return found[0] if found else (latest_ended(job, lines) if ended else None)


async def resolve(client: AsyncCalls, job: str, *, ended: bool, pause: float) -> JobLine:
    """Look for the job among the session's. That it is missing is believed when it is so several times in a row.

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
    raise CkptJobNotFound(_absent(job, lines))


def _absent(job: str, lines: Sequence[JobLine]) -> str:
    running = [line for line in lines if line.state not in TERMINAL_STATES]
    there = f"living jobs are {_shown(running)}" if running else "no job lives in this session"
    last = None if is_id(job) else latest_ended(job, lines)
    if is_id(job):
        text = f"job: {job} is unknown to the job manager; {there}"
    elif last is None:
        text = f"job: no job is named {job!r}; {there}"
    else:
        text = f"job: no living job is named {job!r}, the latest one, {last.job_id}, is {last.state}; {there}"
    return f"{text}. Check the connection and the name, or give if_not_found='skip'"


def _shown(lines: Sequence[JobLine]) -> str:
    shown = [
        f"{line.job_id} ({line.name!r}, {line.state}, started {moment(line.start_time_ms)})"
        for line in lines[:_MOST_SHOWN]
    ]
    more = len(lines) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
