"""Two upgrades, suspensions or resumptions of one job at once, taking turns at every step."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from types import coroutine

from airflow_provider_ckpt.upgrades import actions as act
from airflow_provider_ckpt.upgrades import steps
from airflow_provider_ckpt.upgrades.record import DesiredUpgrade, Goal, Mode, Step, Upgrade
from tests.simulation.upgrades.upgrade_cluster import NEW, OLD_JOB, Broken, Chances, UpgradeCluster

_MAX_TURNS = 2_000


@dataclass
class Rival:
    """One task with its record."""

    cluster: UpgradeCluster
    record: Upgrade
    approves: bool

    def go(self) -> Iterator[None]:
        """Take all steps, with a yield before each request, where the other one may do something."""
        while not self.has_ended:
            step, changed = steps.take_step(self.record, self._ask, self.cluster.now_ms), None
            try:
                action = step.send(None)
                while True:
                    yield
                    action = step.send(self.cluster.answer(action))
            except StopIteration as end:
                changed = end.value
            if changed is None and self.record.step is Step.PAUSED:
                changed = steps.decide(self.record, approved=self.approves)
            self.record = changed or self.record

    @coroutine
    def _ask(self, action: act.Action) -> Generator[act.Action, act.Answer, act.Answer]:
        return (yield action)

    @property
    def has_ended(self) -> bool:
        return self.record.step is Step.ENDED


def desired(chance: random.Random) -> DesiredUpgrade:
    goal = chance.choice((Goal.UPGRADE, Goal.UPGRADE, Goal.SUSPEND, Goal.RESUME))
    return DesiredUpgrade(
        goal=goal,
        job=OLD_JOB,
        mode=chance.choice((Mode.SAVEPOINT, Mode.LAST_STATE)),
        program=NEW if goal is Goal.UPGRADE else None,
        fallback_age=chance.choice((None, 10**9)),
        savepoint_within=10_000,
        healthy_within=20_000,
        checkpoints=chance.choice((1, 3)),
        pauses=chance.random() < 0.5,
    )


def run(seed: int) -> list[Upgrade]:
    """Both records at their end. The cluster raises Broken at the moment when two versions run."""
    chance = random.Random(seed)
    chances = Chances(new=chance.choice(("healthy", "healthy", "crashes", "stuck", "refused")))
    cluster = UpgradeCluster(chance, chances)
    cluster.pass_time(3_000)
    rivals = [
        Rival(cluster, steps.begin(desired(chance), f"rival-{seed}-{number}"), chance.random() < 0.8)
        for number in range(2)
    ]
    going = [rival.go() for rival in rivals]
    for _ in range(_MAX_TURNS):
        if all(rival.has_ended for rival in rivals):
            return [rival.record for rival in rivals]
        next(chance.choice(going), None)
        if cluster.holder is not None and chance.random() < 0.01:  # a person takes it for dead
            cluster.over.add(cluster.holder)
            cluster.holder = None
        cluster.pass_time(chance.choice((0, 0, 500)))
    raise Broken(f"they do not come to an end: {[rival.record for rival in rivals]}")
