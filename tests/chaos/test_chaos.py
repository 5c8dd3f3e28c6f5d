"""Faults of several kinds, in a seeded order; ``make chaos`` has all kinds and may run for hours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.run import Run

SEED = 20261122
RATE = 100
ROWS = 24_000
"""More than come while the faults last, on a slow machine too."""
LEASE_S = 10.0
"""Longer than a busy machine keeps a driver from renewing it."""
FAULTS = ["cancel while the output is away", "kill driver", "worker killed while it is rescaled"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path, SEED, rows=ROWS, rate=RATE, backend="rocksdb", lease_s=LEASE_S)
    yield made
    made.clean_up()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_under_faults_writes_exactly_what_it_should(run: Run) -> None:
    """Nothing hidden, without owner or running is left in the end."""
    run.begin()
    for name in run.choice.sample(FAULTS, len(FAULTS)):
        run.fault(name)
    run.finish()
