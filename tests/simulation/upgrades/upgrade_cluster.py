"""A cluster as an upgrade sees it: jobs that fail when they like, snapshots that may be deleted, a driver that changes.

Rows are numbers. A running job reads on; what its checkpoints cover is committed. Every rule of the promise is checked
at the moment when it could break.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from airflow_provider_ckpt.upgrades import actions as act

OLD, NEW = "old-program", "new-program"
OLD_JOB = "0" * 32
INTERVAL_MS = 2_000


class Broken(AssertionError):
    """A promise does not hold."""


@dataclass
class Snapshot:
    """``row`` is the first that it does not cover."""

    path: str
    number: int
    row: int
    taken_at_ms: int
    is_stop: bool = False
    deleted: bool = False


@dataclass
class Job:
    """``stopping`` is the trigger of its stop."""

    job_id: str
    program: str
    origin: Snapshot | None
    row: int
    committed: int
    state: str = "RUNNING"
    starts_at_ms: int = 0
    snapshots: list[Snapshot] = field(default_factory=list)
    next_number: int = 1
    next_checkpoint_ms: int = 0
    stopping: str | None = None
    retains: bool = False

    @property
    def has_ended(self) -> bool:
        return self.state in ("FINISHED", "CANCELED", "FAILED")


@dataclass(frozen=True)
class Chances:
    """What may happen to whom: probabilities, for each step of time. ``new`` is the way of the new version.

    ``refuses_first``: so many requests to start something are refused for a reason that passes. ``forgets``: of a job
    that was started and cancelled nothing is known some time later.
    """

    new: str = "healthy"
    failures: float = 0.0
    deaths: float = 0.0
    takeovers: float = 0.0
    failed_stops: float = 0.0
    slow_stops: float = 0.0
    loses_programs: float = 0.0
    old_cannot_return: bool = False
    refuses_first: int = 0
    forgets: bool = False
    retainable: bool = True
    end_of_data: int = 10**9


@dataclass
class Operation:
    job_id: str
    path: str | None = None
    failure: str = ""
    due_ms: int = 0
    expires: bool = False


class UpgradeCluster:
    """Takes actions and answers them; :meth:`pass_time` advances the world."""

    def __init__(self, chance: random.Random, chances: Chances) -> None:
        self.chance = chance
        self.chances = chances
        self.now_ms = 1_000_000
        self.jobs: dict[str, Job] = {}
        self.forgotten: dict[str, Job] = {}
        self.runs: dict[str, act.Run] = {}
        self.retired: set[str] = set()
        self.holder: str | None = None
        self.over: set[str] = set()
        self.latest = OLD_JOB
        self.refused = 0
        self.operations: dict[str, Operation] = {}
        self.programs = {OLD, NEW}
        self.holds: dict[str, set[str]] = {OLD: set(), NEW: set()}
        self.committed_by: list[tuple[str, int, int]] = []
        """Program, and the rows from and up to which one of its commits went."""
        self._start(OLD_JOB, OLD, None)
        self.pass_time(chance.choice((0, 0, 3_000, 30_000)))

    # --- the world

    def pass_time(self, milliseconds: int) -> None:
        end = self.now_ms + milliseconds
        while self.now_ms < end:
            self.now_ms = min(end, self.now_ms + 500)
            for job in list(self.jobs.values()):
                self._live(job)
            if self.chances.forgets:
                self._forget()
            if self._occurs_within(self.chances.takeovers):
                self._take_over()
        self.check()

    def _forget(self) -> None:
        for job in list(self.jobs.values()):
            if job.state == "CANCELED" and job.job_id != OLD_JOB and self.chance.random() < 0.2:
                self.forgotten[job.job_id] = self.jobs.pop(job.job_id)
                del self.runs[job.job_id]

    def _occurs_within(self, probability: float) -> bool:
        return probability > 0 and self.chance.random() < probability

    def _live(self, job: Job) -> None:
        if job.has_ended:
            return
        if job.state == "CANCELLING":
            self._end(job, "CANCELED")
            return
        if job.state == "RESTARTING":
            if self.now_ms >= job.starts_at_ms:
                job.state, job.row = "RUNNING", job.committed
            return
        if job.program == NEW and self.chances.new == "crashes":
            self._end(job, "FAILED")
            return
        if job.stopping is not None:
            self._stop_on(job, self.operations[job.stopping])
            return
        if self._occurs_within(self.chances.deaths):
            self._end(job, "FAILED")
            return
        if self._occurs_within(self.chances.failures):
            job.state, job.starts_at_ms = "RESTARTING", self.now_ms + 1_500
            return
        job.row = min(job.row + 10, self.chances.end_of_data)
        if job.row == self.chances.end_of_data:
            self._checkpoint(job)
            self._end(job, "FINISHED")
        elif self.now_ms >= job.next_checkpoint_ms and not (job.program == NEW and self.chances.new == "stuck"):
            self._checkpoint(job)

    def _checkpoint(self, job: Job, *, is_stop: bool = False) -> Snapshot:
        kind = "savepoint" if is_stop else "chk"
        path = f"/{job.job_id}/{kind}-{job.next_number}"
        taken = Snapshot(path, job.next_number, job.row, self.now_ms, is_stop)
        job.next_number += 1
        if not is_stop:
            for older in job.snapshots:
                older.deleted = older.deleted or not older.is_stop
        job.snapshots.append(taken)
        job.next_checkpoint_ms = self.now_ms + INTERVAL_MS
        if job.row > job.committed:
            self.committed_by.append((job.program, job.committed, job.row))
        job.committed = job.row
        return taken

    def _stop_on(self, job: Job, operation: Operation) -> None:
        if self.now_ms < operation.due_ms:
            return
        if operation.path is None and (operation.expires or self._occurs_within(self.chances.failed_stops)):
            operation.failure = "the savepoint failed"
            job.stopping = None
            job.state, job.starts_at_ms = "RESTARTING", self.now_ms + 1_000
        elif operation.path is None:
            operation.path = self._checkpoint(job, is_stop=True).path  # its tasks end behind it
        elif self._occurs_within(self.chances.failures):
            operation.failure, operation.path = "the job failed behind its savepoint", None
            self._end(job, "FAILED")
        else:
            self._end(job, "FINISHED")

    def _end(self, job: Job, state: str) -> None:
        job.state = state
        if job.stopping is not None and self.operations[job.stopping].path is None:
            self.operations[job.stopping].failure = f"the job is {state}"
        keeps = state == "FAILED" or (state == "CANCELED" and job.retains)
        for snapshot in job.snapshots:
            if not snapshot.is_stop and not keeps:
                snapshot.deleted = True

    def _take_over(self) -> None:
        """Another driver leads: it has the jobs, and of programs those that are held. Operations are forgotten."""
        self.operations.clear()
        for job in self.jobs.values():
            job.stopping = None
            if not job.has_ended:
                job.state, job.starts_at_ms = "RESTARTING", self.now_ms + 1_000
        self.programs = {program for program in self.programs if self.holds[program]}

    # --- promises

    def check(self) -> None:
        living = [job for job in self.jobs.values() if not job.has_ended]
        if len(living) > 1:
            raise Broken(f"two versions run: {living}")

    def snapshot(self, path: str | None) -> Snapshot | None:
        everything = (*self.jobs.values(), *self.forgotten.values())
        found = (taken for job in everything for taken in job.snapshots if taken.path == path)
        return next(found, None)

    def _start(self, job_id: str, program: str, origin: Snapshot | None) -> None:
        row = 0 if origin is None else origin.row
        if origin is not None and origin.deleted:
            raise Broken(f"{origin.path} was lost")
        committed = max((upto for who, _, upto in self.committed_by if who == OLD), default=0)
        if self.jobs and origin is None and program == OLD and committed:
            raise Broken("the old version was started from nothing")
        if origin is not None and row != committed:
            raise Broken(f"{program} starts at row {row}; the old version has committed up to {committed}")
        begins = {"starts_at_ms": self.now_ms + 1_000, "next_checkpoint_ms": self.now_ms + INTERVAL_MS}
        self.jobs[job_id] = Job(job_id, program, origin, row, row, state="RESTARTING", **begins)
        self.check()

    # --- requests

    def answer(self, action: act.Action) -> act.Answer:  # noqa: PLR0911 - one for each
        match action:
            case act.Claim():
                return self._claim(action)
            case act.Hold(program, owner):
                return self._hold(program, owner)
            case act.Release(programs, owner, _, claim):
                if self.holder == claim:
                    self.holder = None
                self.over.add(claim)
                return self._release(programs, owner)
            case act.Stop() | act.Cancel() | act.Run() if action.claim != self.holder:
                return act.Refused(f"{self.holder} holds the lineage")
            case act.Look(job_id):
                return self._seen(job_id)
            case act.Preview(program, job_id, _, snapshot, is_passing):
                later = self.jobs[job_id].snapshots if is_passing and job_id in self.jobs else []
                return self._preview(program, later[-1].path if later else snapshot)
            case act.Stop(job_id, trigger):
                return self._stop(job_id, trigger)
            case act.ReadStop(job_id, trigger):
                return self._stop_seen(job_id, trigger)
            case act.Cancel(job_id, retain):
                return self._cancel(job_id, retain=retain)
            case act.Retire(job_id):
                return self._retire(job_id)
        return self._run(action)

    def _claim(self, claim: act.Claim) -> act.Answer:
        if self.holder not in (None, claim.owner):
            return act.Lost(f"{self.holder} holds the lineage")
        if claim.owner in self.over:
            return act.Lost("it is over")
        if self.latest not in (claim.job, *claim.own_jobs):
            return act.Lost(f"the latest job is {self.latest}")
        self.holder = claim.owner
        return act.Accepted()

    def _retire(self, job_id: str) -> act.Answer:
        job = self.jobs.get(job_id)
        if job is not None and not job.has_ended:
            return act.Refused(f"job {job_id} has not ended")
        self.retired.add(job_id)
        return act.Accepted()

    def _hold(self, program: str, owner: str) -> act.Answer:
        runs = any(job.program == program and not job.has_ended for job in self.jobs.values())
        if program not in self.programs and not runs:
            return act.JobMissing(program)
        self.programs.add(program)
        self.holds[program].add(owner)
        return act.Accepted()

    def _release(self, programs: tuple[str, ...], owner: str) -> act.Answer:
        for program in programs:
            self.holds[program].discard(owner)
        return act.Accepted()

    def _stop_seen(self, job_id: str, trigger: str) -> act.Answer:
        found, job = self.operations.get(trigger), self._seen(job_id)
        assert isinstance(job, act.Seen | act.JobMissing)
        if found is None:
            return act.StopSeen(job, known=False)
        return act.StopSeen(job, path=found.path if self.jobs[job_id].has_ended else None, failure=found.failure)

    def _seen(self, job_id: str) -> act.Answer:
        job = self.jobs.get(job_id)
        if job is None:
            return act.JobMissing(job_id)
        newest = max(job.snapshots, key=lambda taken: taken.number, default=None)
        return act.Seen(
            state=job.state,
            ready=job.state == "RUNNING" and job.stopping is None,
            has_ended=job.has_ended,
            completed=len([taken for taken in job.snapshots if not taken.is_stop]),
            newest=None
            if newest is None
            else act.Newest(None if newest.deleted else newest.path, newest.taken_at_ms, newest.is_stop),
            restored=None if job.origin is None else job.origin.path,
            program=job.program,
            retainable=self.chances.retainable,
        )

    def _preview(self, program: str, path: str | None) -> act.Answer:
        if program not in self.programs:
            return act.JobMissing(program)
        found = self.snapshot(path)
        if path is not None and (found is None or found.deleted):
            return act.Refused(f"{path} cannot be opened")
        if program == NEW and self.chances.new == "misfit":
            return act.SnapshotFit(("its state is of another type",))
        if program == NEW and self.chances.new == "misfits the savepoint" and found is not None and found.is_stop:
            return act.SnapshotFit(("its state is of another type",))
        return act.SnapshotFit()

    def _stop(self, job_id: str, trigger: str) -> act.Answer:
        if trigger in self.operations:
            return act.Accepted()
        job = self.jobs[job_id]
        if job.has_ended:
            return act.Refused(f"it is {job.state}")
        if job.state != "RUNNING" or job.stopping is not None:
            self.operations[trigger] = Operation(job_id, failure="the job is not running")
            return act.Accepted()
        expires = self._occurs_within(self.chances.slow_stops)
        takes = 30_000 if expires else self.chance.choice((500, 1_500))
        job.stopping = trigger
        self.operations[trigger] = Operation(job_id, due_ms=self.now_ms + takes, expires=expires)
        return act.Accepted()

    def _cancel(self, job_id: str, *, retain: bool) -> act.Answer:
        job = self.jobs.get(job_id)
        if job is None:
            return act.JobMissing(job_id)
        job.retains = job.retains or retain
        if job.state in ("FINISHED", "FAILED"):
            return act.Refused(f"it is {job.state}")
        if not job.has_ended:
            job.state = "CANCELLING"
            if job.stopping is not None and self.operations[job.stopping].path is None:
                self.operations[job.stopping].failure = "the job is being cancelled"
        return act.Accepted()

    def _run(self, run: act.Run) -> act.Answer:
        if run.job in self.retired:
            return act.Refused(f"the job id {run.job} is retired")
        known = self.runs.get(run.job)
        if known is not None:
            return act.Accepted() if known == run else act.Refused("that id belongs to another request")
        living = [job.job_id for job in self.jobs.values() if not job.has_ended]
        if living:
            return act.Refused(f"{living} live in the lineage")
        if run.program not in self.programs:
            return act.JobMissing(run.program)
        if run.program == NEW and self.chances.new == "refused":
            return act.Refused("its plan is wrong")
        if run.program == OLD and self.chances.old_cannot_return:
            return act.Refused("there are no slots for it")
        if self.refused < self.chances.refuses_first:
            self.refused += 1
            return act.Refused("its checkpoint directory cannot be used")
        origin = self.snapshot(run.snapshot)
        if run.snapshot is not None and origin is None:
            raise Broken(f"{run.snapshot} is not a snapshot")
        self.runs[run.job], self.latest = run, run.job
        self._start(run.job, run.program, origin)
        return act.Accepted()
