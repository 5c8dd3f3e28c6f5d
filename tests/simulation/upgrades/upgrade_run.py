"""One simulated upgrade: tries that crash at any call, with a journal that survives, until it has ended."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from airflow_provider_ckpt.upgrades import steps
from airflow_provider_ckpt.upgrades.actions import Action, Answer, Claim
from airflow_provider_ckpt.upgrades.record import DesiredUpgrade, Goal, Mode, Outcome, Step, Upgrade
from tests.simulation.upgrades.upgrade_cluster import NEW, OLD, OLD_JOB, Broken, Chances, UpgradeCluster

_MAX_LOOKS = 3_000
HEALTHY_WITHIN = 20_000
SAVEPOINT_WITHIN = 10_000
_DELAYS = ((500, 0), (3_000, 0), (40_000, 0), (300_000, 0), *((0, others) for others in range(1, 9)))
"""For how long a request may be on its way whose sender is gone, and how many others overtake it."""


class Crash(Exception):
    """The process that drives the upgrade is gone."""


def completed(step: Coroutine[None, None, Upgrade | None]) -> Upgrade | None:
    """Run a step whose requests are answered at once."""
    try:
        step.send(None)
    except StopIteration as end:
        changed: Upgrade | None = end.value
        return changed
    raise AssertionError("a simulated request suspends")


def chances(chance: random.Random) -> Chances:
    """What may happen in this run: mostly one kind of trouble, sometimes several."""
    return Chances(
        new=chance.choice(("healthy", "healthy", "crashes", "stuck", "misfit", "misfits the savepoint", "refused")),
        failures=chance.choice((0, 0, 0.02, 0.1)),
        deaths=chance.choice((0, 0, 0, 0.02)),
        takeovers=chance.choice((0, 0, 0.02)),
        failed_stops=chance.choice((0, 0, 0.5)),
        slow_stops=chance.choice((0, 0, 0.3)),
        old_cannot_return=chance.random() < 0.05,
        refuses_first=chance.choice((0, 0, 0, 0, 1, 2)),
        forgets=chance.random() < 0.2,
        retainable=chance.random() > 0.1,
        end_of_data=chance.choice((10**9, 10**9, 600)),
    )


def desired(chance: random.Random) -> DesiredUpgrade:
    fallback = chance.choice((None, None, 5_000, 10**9))
    return DesiredUpgrade(
        goal=Goal.UPGRADE,
        job=OLD_JOB,
        mode=chance.choice(tuple(Mode)),
        program=NEW,
        fallback_age=fallback,
        savepoint_within=SAVEPOINT_WITHIN,
        healthy_within=HEALTHY_WITHIN,
        checkpoints=chance.choice((1, 3)),
        pauses=chance.random() < 0.3,
    )


@dataclass
class Run:
    """``crashes`` is how likely each call is to be the last one of its try."""

    seed: int
    crashes: float = 0.08
    begin: Callable[[DesiredUpgrade, str], Upgrade] = steps.begin
    trace: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.cluster = UpgradeCluster(self.chance, chances(self.chance))
        self.desired = desired(self.chance)
        self.approves = self.chance.random() < 0.6
        self.series = f"series-{self.seed}"
        self.journal: dict[str, object] | None = None
        self.late: list[tuple[int, int, Action]] = []
        self.answered = 0
        self.asked = ""

    def go(self) -> Upgrade:
        """To the end, with every promise kept. Raises Broken."""
        record = self._to_its_end()
        self._let_everything_arrive(record)
        return record

    def _to_its_end(self) -> Upgrade:
        for _ in range(_MAX_LOOKS):
            try:
                record = self._one_try()
            except Crash:
                self.cluster.pass_time(self.chance.choice((500, 5_000)))
                continue
            self._check_end(record)
            return record
        raise Broken(f"it does not come to an end: {self.journal}")

    def _one_try(self) -> Upgrade:
        if self.journal is None:
            self._keep(self.begin(self.desired, self.series))
        record = Upgrade.from_json(self.journal)
        while record.step is not Step.ENDED:
            record = steps.drive(record, self._take, self._keep)
            if record.step in steps.WATCHES:
                record = self._watch(record)
            elif record.step is Step.PAUSED:
                self.cluster.pass_time(self.chance.choice((500, 60_000)))
                record = steps.decide(record, approved=self.approves, by="a person")
                self._keep(record)
        return record

    def _take(self, record: Upgrade) -> Upgrade | None:
        """As the task does, which remembers the last change that it has requested in a step."""
        self.asked = ""

        async def ask(action: Action) -> Answer:
            answer = self._perform(action)
            if not isinstance(action, (*steps.READS, Claim)):
                self.asked = type(action).__name__
            return answer

        return completed(steps.take_step(record, ask, self.cluster.now_ms))

    def _watch(self, record: Upgrade) -> Upgrade:
        """As the trigger does, until the task has something to keep or to request."""

        async def look(action: Action) -> Answer:
            return self._perform(action)

        asked_at_ms = self.cluster.now_ms
        for _ in range(_MAX_LOOKS):
            try:
                changed = completed(steps.watch_step(record, look, self.cluster.now_ms))
            except steps.ChangeIsDue as change:
                if str(change) != self.asked or self.cluster.now_ms >= asked_at_ms + steps.REPEAT_AFTER_MS:
                    return record
                changed = None
            if changed is not None:
                self._keep(changed)
                return changed
            self.cluster.pass_time(500)
        raise Broken(f"it watches for ever: {record}")

    def _keep(self, record: Upgrade) -> None:
        self._may_crash()
        self.trace.append(f"{self.cluster.now_ms} {record.step}")
        self.journal = record.to_json()
        self._may_crash()

    def _perform(self, action: Action) -> Answer:
        """Crashes before the call, on its way (it arrives later), or before its answer is known."""
        self._may_crash()
        if self.chance.random() < self.crashes / 2:
            delay, others = self.chance.choice(_DELAYS)
            self.late.append((self.cluster.now_ms + delay, self.answered + others, action))
            raise Crash
        self.cluster.pass_time(self.chance.choice((0, 0, 500)))
        self._deliver()
        self.trace.append(f"{self.cluster.now_ms} {action}")
        answer = self.cluster.answer(action)
        self.answered += 1
        self.trace.append(f"{self.cluster.now_ms}    {answer}")
        self._may_crash()
        return answer

    def _deliver(self) -> None:
        """What a dead process had sent, while the job manager that it was sent to leads."""
        due, self.late = (
            [late for late in self.late if (late[0] <= self.cluster.now_ms and late[1] <= self.answered) is arrived]
            for arrived in (True, False)
        )
        for _, _, action in due:
            self.trace.append(f"{self.cluster.now_ms} late: {action}")
            self.cluster.answer(action)

    def _may_crash(self) -> None:
        if self.chance.random() < self.crashes:
            self.trace.append(f"{self.cluster.now_ms} crash")
            raise Crash

    # --- what has to be true at the end

    def _let_everything_arrive(self, record: Upgrade) -> None:
        """After the end nothing is started any more."""
        started = set(self.cluster.runs) | set(self.cluster.forgotten)
        while self.late:
            self.cluster.pass_time(5_000)
            self.answered += 1
            self._deliver()
        self.cluster.pass_time(500)
        others = set(self.cluster.runs) - started
        if others:
            raise Broken(f"it ended as {record.outcome}, and {others} was started then")

    def _check_end(self, record: Upgrade) -> None:
        cluster = self.cluster
        living = {job.program for job in cluster.jobs.values() if not job.has_ended}
        jobs = {job_id: job.state for job_id, job in cluster.jobs.items()}
        known = cluster.forgotten | cluster.jobs
        new, again = known.get(record.new_job), known.get(record.restarted_job)
        died = [job.program for job in cluster.jobs.values() if job.state in ("FAILED", "FINISHED")]
        match record.outcome:
            case Outcome.UPGRADED:
                right = new is not None and again is None and (living == {NEW} or NEW in died)
            case Outcome.ROLLED_BACK:
                right = again is not None and (living == {OLD} or OLD in died)
            case Outcome.REFUSED:
                right = new is None and again is None and (living == {OLD} or OLD in died) and bool(record.why)
            case Outcome.STRANDED:
                right = not living and self._may_strand(record)
            case _:
                right = False
        if not right:
            raise Broken(f"it ended as {record.outcome} ({record.why}) with {jobs}")
        if record.outcome is not Outcome.STRANDED and any(cluster.holds.values()):
            raise Broken(f"programs are still held: {cluster.holds}")

    def _may_strand(self, record: Upgrade) -> bool:
        """Happens only when the old version cannot run, and always says from where a person can continue."""
        kept = self.cluster.snapshot(record.snapshot)
        said = record.snapshot is None or (kept is not None and not kept.deleted and kept.path in record.why)
        chances = self.cluster.chances
        old_died = chances.old_cannot_return or chances.deaths > 0 or chances.refuses_first > 0
        return said and old_died and bool(self.cluster.holds[OLD])
