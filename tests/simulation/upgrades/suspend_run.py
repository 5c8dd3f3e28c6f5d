"""One simulated suspension, and what follows: the job is resumed, by a person once more if it was not started."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from airflow_provider_ckpt.upgrades.record import DesiredUpgrade, Goal, Mode, Outcome, Upgrade
from tests.simulation.upgrades.upgrade_cluster import OLD, OLD_JOB, Broken
from tests.simulation.upgrades.upgrade_run import HEALTHY_WITHIN, SAVEPOINT_WITHIN, Run


@dataclass
class SuspendRun(Run):
    """``ends`` are the outcomes, one after the other."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ends: list[Outcome | None] = []
        self.desired = _suspension(self.chance)
        self.cluster.chances = replace(self.cluster.chances, refuses_first=self.chance.choice((0, 1, 1, 2)))

    def go(self) -> Upgrade:
        """To the end, with every promise kept. Raises Broken."""
        record = self._stage("suspend")
        if record.outcome is Outcome.SUSPENDED:
            self.cluster.pass_time(self.chance.choice((500, 60_000)))
            record = self._resumed(record, "resume")
            if record.outcome is Outcome.STRANDED and record.new_job not in self._started():
                self.cluster.pass_time(self.chance.choice((500, 60_000)))
                record = self._resumed(record, "resume again")
        self._let_everything_arrive(record)
        return record

    def _resumed(self, before: Upgrade, purpose: str) -> Upgrade:
        job = before.old_job
        self.desired = DesiredUpgrade(
            goal=Goal.RESUME, job=job, healthy_within=HEALTHY_WITHIN, checkpoints=self.chance.choice((1, 3))
        )
        return self._stage(purpose)

    def _stage(self, purpose: str) -> Upgrade:
        self.journal, self.series = None, f"series-{self.seed}/{purpose}"
        record = self._to_its_end()
        self.trace.append(f"{self.cluster.now_ms} {purpose}: {record.outcome} {record.why}")
        self.ends.append(record.outcome)
        return record

    # --- what has to be true at the end of each stage

    def _check_end(self, record: Upgrade) -> None:
        right = self._suspended(record) if record.desired.goal is Goal.SUSPEND else self._has_resumed(record)
        if not right:
            jobs = {job_id: job.state for job_id, job in self.cluster.jobs.items()}
            raise Broken(f"it ended as {record.outcome} ({record.why}) with {jobs}")

    def _living(self) -> set[str]:
        return {job.job_id for job in self.cluster.jobs.values() if not job.has_ended}

    def _started(self) -> set[str]:
        return set(self.cluster.jobs) | set(self.cluster.forgotten)

    def _suspended(self, record: Upgrade) -> bool:
        cluster, kept = self.cluster, self.cluster.snapshot(record.snapshot)
        match record.outcome:
            case Outcome.SUSPENDED:
                committed = cluster.jobs[OLD_JOB].committed
                goes_on = committed == 0 if kept is None else not kept.deleted and kept.row == committed
                return not self._living() and goes_on and record.owner in cluster.holds[OLD]
            case Outcome.REFUSED:
                job = cluster.jobs[OLD_JOB]
                return bool(record.why) and (not job.has_ended or job.state in ("FAILED", "FINISHED"))
            case Outcome.STRANDED:
                return not self._living() and self._may_strand(record)
        return False

    def _has_resumed(self, record: Upgrade) -> bool:
        cluster, new = self.cluster, (self.cluster.forgotten | self.cluster.jobs).get(record.new_job)
        match record.outcome:
            case Outcome.RESUMED:
                lives = self._living() == {record.new_job}
                return new is not None and (lives or new.state in ("FAILED", "FINISHED"))
            case Outcome.REFUSED:  # it had completed nothing before it was suspended
                return not self._living() and record.snapshot is None and new is None
            case Outcome.STRANDED if new is None:
                refuses = cluster.chances.old_cannot_return or cluster.chances.refuses_first > 0
                return not self._living() and refuses and self._can_go_on(record)
            case Outcome.STRANDED:
                chances = cluster.chances
                troubled = chances.deaths > 0 or chances.failures > 0 or chances.takeovers > 0
                said = "Nothing runs" not in record.why or not self._living()
                return said and troubled and self._living() <= {record.new_job}
        return False

    def _can_go_on(self, record: Upgrade) -> bool:
        kept = self.cluster.snapshot(record.snapshot)
        return kept is not None and not kept.deleted and kept.path in record.why and bool(self.cluster.holds[OLD])


def _suspension(chance: random.Random) -> DesiredUpgrade:
    return DesiredUpgrade(
        goal=Goal.SUSPEND,
        job=OLD_JOB,
        mode=chance.choice((Mode.SAVEPOINT, Mode.LAST_STATE)),
        fallback_age=chance.choice((None, None, 5_000, 10**9)),
        savepoint_within=SAVEPOINT_WITHIN,
        healthy_within=HEALTHY_WITHIN,
    )
