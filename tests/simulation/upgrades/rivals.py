"""Two upgrades, suspensions or resumptions of one job at once, taking turns at every step."""

from __future__ import annotations

import random
from dataclasses import dataclass

from airflow_provider_ckpt.upgrades import actions as act
from airflow_provider_ckpt.upgrades import machine
from airflow_provider_ckpt.upgrades.record import DesiredUpgrade, Goal, Mode, Step, Upgrade
from tests.simulation.upgrades.upgrade_cluster import NEW, OLD_JOB, Broken, Chances, UpgradeCluster

_MAX_TURNS = 2_000


@dataclass
class Rival:
    """One task with its record; ``turn`` does one thing, as ``driving.drive`` and a trigger do in turns."""

    cluster: UpgradeCluster
    record: Upgrade
    approves: bool

    def turn(self) -> None:
        record = self.record
        answer: act.Answer = act.Accepted()
        if record.step is not Step.RELEASE:
            answer = self.cluster.answer(machine.claim_of(record))
        if not isinstance(answer, act.Lost):
            action = machine.action_of(record)
            answer = act.Decided(self.approves) if action is None else self.cluster.answer(action)
        self.record = machine.advance(record, answer, self.cluster.now_ms)

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
        Rival(cluster, machine.begin(desired(chance), f"rival-{seed}-{number}"), chance.random() < 0.8)
        for number in range(2)
    ]
    for _ in range(_MAX_TURNS):
        going = [rival for rival in rivals if not rival.has_ended]
        if not going:
            return [rival.record for rival in rivals]
        chance.choice(going).turn()
        if cluster.holder is not None and chance.random() < 0.01:  # a person takes it for dead
            cluster.over.add(cluster.holder)
            cluster.holder = None
        cluster.pass_time(chance.choice((0, 0, 500)))
    raise Broken(f"they do not come to an end: {[rival.record for rival in rivals]}")
