"""Two of everything at once: one has the job, the other one is refused and leaves everything alone."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import pytest

from airflow_provider_ckpt.upgrades import actions as act
from airflow_provider_ckpt.upgrades.record import Outcome
from tests.simulation.upgrades import rivals
from tests.simulation.upgrades.upgrade_cluster import Broken, UpgradeCluster

SEEDS = 1_000


@pytest.mark.row("air.4")
def test_of_two_upgrades_at_once_at_most_one_version_runs_and_the_loser_is_refused() -> None:
    losers: Counter[Outcome | None] = Counter()
    for seed in range(SEEDS):
        try:
            records = rivals.run(seed)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        losers.update(record.outcome for record in records if record.lost)
    assert losers[Outcome.REFUSED] > 300
    assert set(losers) == {Outcome.REFUSED}, "who has lost the job does not call for a person"


def test_without_lineages_two_versions_run() -> None:
    """The simulation finds what the job manager prevents."""
    original = UpgradeCluster.answer

    def answer(cluster: UpgradeCluster, action: act.Action) -> act.Answer:
        if isinstance(action, act.Claim):
            cluster.holder = action.owner
            return act.Accepted()
        if isinstance(action, act.Run):
            cluster.runs.setdefault(action.job, action)
            if action.job not in cluster.jobs and action.job not in cluster.forgotten:
                cluster._start(action.job, action.program, cluster.snapshot(action.snapshot))
            return act.Accepted()
        return original(cluster, action)

    with patch.object(UpgradeCluster, "answer", answer), pytest.raises(Broken, match="two versions run"):
        for seed in range(SEEDS):
            rivals.run(seed)
