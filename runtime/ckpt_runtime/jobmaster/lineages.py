"""Lineages: jobs that started from each other's snapshots, with at most one living job and one upgrade at a time.

Two jobs of one lineage would read the same input and write the same output. So the job manager decides which requests
may start or end one: a client that replaces, suspends or resumes a job holds its lineage during that time, and requests
of other clients are refused. A dead holder loses the lineage when its time is over, or when a user releases it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from ckpt_runtime.configuration.checkpointing_options import CheckpointingOptions
from ckpt_runtime.configuration.pipeline_options import PipelineOptions
from ckpt_runtime.jobmaster.executions import wall_clock_ms
from ckpt_runtime.jobmaster.gateway_values import (
    Conflict,
    HoldRequest,
    JobOverview,
    LineagePlace,
    NotReady,
    Precondition,
)
from ckpt_runtime.jobmaster.known_jobs import KnownJobs
from ckpt_runtime.jobmaster.snapshot_references import References
from ckpt_runtime.jobmaster.submission import JobSubmission
from ckpt_runtime.storage.errors import StorageError
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.storage.ha_store import HeldUpgrade, HeldUpgrades
from ckpt_runtime.storage.versioned_document import FencedDocument

_REMEMBERED = 1_000
"""Maximum number of remembered owners of ended upgrades; their late requests begin nothing."""


SUSPENDED = "suspended-"
"""A suspended job's program is held under this prefix plus the job's id until the job is resumed."""


class LineageLives(Conflict):
    """A job would be started while a living one writes the same output."""

    def __init__(self, job: JobOverview, shared: str, way_out: str) -> None:
        super().__init__(
            f"Job {job.job_id}, which is {job.status.value}, also has {shared}, of which only one job may be active. "
            f"End that job first, or {way_out}"
        )


class LineageHeld(Conflict):
    """Another owner is replacing, suspending or resuming the job."""

    def __init__(self, held: HeldUpgrade) -> None:
        who = held.owner if held.requester is None else f"{held.requester} (owner {held.owner})"
        super().__init__(
            f"Job {held.job_id} is being upgraded by {who} since {_utc(held.since_ms)}, until {_utc(held.until_ms)} "
            "at most. Wait for its end; if that client no longer exists, release the lineage with: ckpt lineage "
            f"release {held.job_id}"
        )


class LineageNotHeld(Conflict):
    """A request belongs to an upgrade that has lost the lineage."""

    def __init__(self, owner: str) -> None:
        super().__init__(
            f"{owner} does not hold the lineage: its upgrade has ended or timed out, or another client has released it"
        )


class NotTheLatest(Conflict):
    """The request's precondition is outdated: another job has replaced this one."""

    def __init__(self, job_id: str, latest: JobOverview, expected: str) -> None:
        place = latest.lineage
        number = "" if place is None else f" as incarnation {place.incarnation}"
        super().__init__(
            f"The latest job of the lineage of {job_id} is {latest.job_id}, which is {latest.status.value}{number}; "
            f"the request expects {expected}"
        )


class JobIsBeingStopped(Conflict):
    """An upgrade cannot begin with a job that another request is stopping."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"Job {job_id} is being stopped by another client; it can be resumed when it has stopped")


class Lineages:
    """All methods run on the driver's event loop. Checks never await, so two requests cannot pass the same check."""

    def __init__(self, known: KnownJobs, pool: Executor, programs_held: Callable[[], Mapping[str, str]]) -> None:
        """``pool`` is for writes to the high-availability directory, ``programs_held`` maps owners to programs."""
        self._known = known
        self._programs_held = programs_held
        self._pool = pool
        self._held: dict[str, HeldUpgrade] = {}
        self._store: FencedDocument[HeldUpgrades] | None = None
        self._over: deque[str] = deque(maxlen=_REMEMBERED)
        self.stopping: Counter[str] = Counter()
        """How many requests to stop a job, or to cancel it with a savepoint, are in progress."""

    async def take_over(self, store: FencedDocument[HeldUpgrades]) -> None:
        """Adopts the upgrades that earlier drivers granted. Raises StorageError for an unreadable directory."""
        self._held |= (await asyncio.to_thread(store.adopt)).upgrades
        self._store = store

    def held(self, lineage: str) -> HeldUpgrade | None:
        """The upgrade of a lineage that is in progress."""
        held = self._held.get(lineage)
        if held is not None and held.until_ms <= wall_clock_ms():
            del self._held[lineage]
            return None
        return held

    def pinned(self) -> list[References]:
        """The snapshots that must not be deleted: those of upgrades in progress and of suspended jobs."""
        return [*self._of_upgrades(), *self._of_suspended_jobs()]

    def _of_upgrades(self) -> list[References]:
        """For each upgrade, the snapshot that it names and the last ones of its lineage's latest job."""
        found = []
        for lineage in list(self._held):
            held = self.held(lineage)
            if held is not None:
                paths = {held.snapshot, *self._known.latest_snapshots(lineage)}
                state, reason = f"being upgraded by {held.owner}", "the upgrade may continue from it"
                snapshots = tuple(sorted(filter(None, paths)))
                found.append(References(held.job_id, state, None, snapshots, reason=reason, kept_for=lineage))
        return found

    def _of_suspended_jobs(self) -> list[References]:
        """For each suspended job, whose program is held for it, the snapshot to resume it from."""
        found = []
        for owner, program_id in self._programs_held().items():
            job_id = owner.removeprefix(SUSPENDED)
            lineage = None if job_id == owner else self._known.lineage_ended_by(job_id)
            if lineage is not None and (path := self._known.to_resume_from(job_id)) is not None:
                reason = (
                    "it would be resumed from it. If it will not be resumed, release its program first: ckpt program "
                    f"release {program_id} --owner {owner}"
                )
                found.append(References(job_id, "suspended", None, (path,), reason=reason, kept_for=lineage))
        return found

    # --- checks

    def check(self, job: JobOverview, condition: Precondition) -> None:
        """Checks that a request may end or change a job. Raises Conflict."""
        place = job.lineage
        if place is None:
            return
        if condition.incarnation not in (None, place.incarnation):
            raise NotTheLatest(job.job_id, job, f"incarnation {condition.incarnation}")
        self._check_holder(place.id, condition)

    def place(self, submission: JobSubmission) -> tuple[LineagePlace, frozenset[str]]:
        """A new job's place, and the keys reserved for it until it is known or has failed. Raises Conflict."""
        request, savepoint, job_id = submission.request, submission.savepoint, submission.job_id
        condition = Precondition() if request is None else request.condition
        forks = request is not None and request.fork
        unique = submission.configuration.get(PipelineOptions.UNIQUE_NAME)
        same_name = self._known.named(submission.graph.name) if unique else []
        if condition.owner is not None:
            lineage = self._of_owner(condition.owner)
        elif savepoint is not None and not forks:
            lineage = savepoint.lineage_id
            self._known.check_recovered(savepoint.job_id)
        else:
            named = (job.lineage.id for job in same_name if job.lineage is not None and not forks)
            lineage = next(named, job_id)
        self._check_name(job_id, same_name, condition)
        directory = submission.configuration.get(CheckpointingOptions.CONTINUE_IN)
        if directory is not None:
            place = resolve(directory)
            for living in self._known.references():
                if living.job_id == job_id or living.checkpoints is None:
                    continue
                if resolve(living.checkpoints).parent == place:
                    raise Conflict(
                        f"Job {living.job_id}, which is {living.state}, also continues in {directory}, in which only "
                        "one job may be active. Wait for its end or cancel it, or give each query its own "
                        "checkpointLocation"
                    )
        self._check_start(lineage, job_id, condition)
        earlier = [job.lineage.incarnation for job in self._known.of_lineage(lineage) if job.lineage is not None]
        first = 1 if lineage == job_id else 2
        keys = {f"lineage {lineage}", *([f"name {submission.graph.name}"] if unique else [])}
        if directory is not None:
            keys.add(f"directory {resolve(directory).url}")
        return LineagePlace(lineage, max([first, *(number + 1 for number in earlier)])), frozenset(keys)

    def _of_owner(self, owner: str) -> str:
        for lineage in list(self._held):
            held = self.held(lineage)
            if held is not None and held.owner == owner:
                return lineage
        raise LineageNotHeld(owner)

    def _check_name(self, job_id: str, same_name: list[JobOverview], condition: Precondition) -> None:
        """Checks the name of a job that requires a unique one."""
        for job in same_name:
            if not job.status.is_globally_terminal and job.job_id != job_id:
                shared = f"the name {job.name!r}"
                raise LineageLives(job, shared, "use another pipeline.name, or do not set pipeline.unique-name")
            held = None if job.lineage is None else self.held(job.lineage.id)
            if held is not None and held.owner != condition.owner:
                raise LineageHeld(held)

    def _check_start(self, lineage: str, job_id: str, condition: Precondition) -> None:
        self._known.check_recovered(lineage)
        self._check_holder(lineage, condition)
        jobs = self._known.of_lineage(lineage)
        for job in jobs:
            if not job.status.is_globally_terminal and job.job_id != job_id:
                way_out = "start this one with fork, as a job with a separate output"
                raise LineageLives(job, f"the lineage {lineage}", way_out)
        if jobs and condition.incarnation not in (None, jobs[0].lineage and jobs[0].lineage.incarnation):
            raise NotTheLatest(lineage, jobs[0], f"incarnation {condition.incarnation}")

    def _check_holder(self, lineage: str, condition: Precondition) -> None:
        held = self.held(lineage)
        if held is not None and held.owner != condition.owner:
            raise LineageHeld(held)
        if held is None and condition.owner is not None:
            raise LineageNotHeld(condition.owner)

    # --- holding

    async def hold(self, job: JobOverview, request: HoldRequest) -> HeldUpgrade:
        """Begins or extends an upgrade of a job. Raises Conflict, and NotReady when it may not be stored."""
        place = job.lineage or LineagePlace(job.job_id)
        held, now = self.held(place.id), wall_clock_ms()
        if held is not None and held.owner != request.owner:
            raise LineageHeld(held)
        if request.owner in self._over:
            raise LineageNotHeld(request.owner)
        latest = next(iter(self._known.of_lineage(place.id)), None)
        if latest is not None and latest.job_id not in (job.job_id, *request.own_jobs):
            raise NotTheLatest(job.job_id, latest, f"job {job.job_id}")
        if held is None and self.stopping[job.job_id]:
            raise JobIsBeingStopped(job.job_id)
        begun = held or HeldUpgrade(request.owner, job.job_id, now, now)
        changed = replace(
            begun,
            until_ms=now + request.duration_ms,
            requester=request.requester or begun.requester,
            snapshot=request.snapshot or begun.snapshot,
        )
        self._held[place.id] = changed
        await self._write(place.id)
        return changed

    async def release(self, job: JobOverview, owner: str | None) -> None:
        """Ends an upgrade; without ``owner``, that of any owner. Does nothing when none is in progress."""
        lineage = (job.lineage or LineagePlace(job.job_id)).id
        held = self.held(lineage)
        if held is None or owner not in (None, held.owner):
            return
        self._over.append(held.owner)
        del self._held[lineage]
        await self._write(lineage)

    async def _write(self, lineage: str) -> None:
        if self._store is None:
            return
        call = partial(self._store.change, partial(self._with, lineage))
        try:
            await asyncio.get_running_loop().run_in_executor(self._pool, call)
        except StorageError as error:
            raise NotReady(f"the owner of the upgrade of lineage {lineage} could not be stored: {error}") from error

    def _with(self, lineage: str, stored: HeldUpgrades) -> HeldUpgrades:
        """The stored upgrades, with the present one of this lineage: the later of two writes has the later state."""
        held, now = self._held.get(lineage), wall_clock_ms()
        others = {key: other for key, other in stored.upgrades.items() if key != lineage and other.until_ms > now}
        return HeldUpgrades(others if held is None else {**others, lineage: held})


def _utc(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
