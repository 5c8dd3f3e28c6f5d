"""Each kind of fault once, in a seeded order; ``make chaos`` goes on for hours."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.run import FAULTS, Run

SEED = 20261122
RATE = 1200
FAULTS_S = 40.0


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path, SEED, rows=int(RATE * (FAULTS_S + 180)), rate=RATE)
    yield made
    made.clean_up()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_under_faults_of_every_kind_writes_exactly_what_it_should(run: Run) -> None:
    """As many as fit into the time; nothing hidden, without owner or running is left in the end."""
    names = sorted(FAULTS)
    run.choice.shuffle(names)
    run.begin()
    end = time.monotonic() + FAULTS_S
    for name in names:
        if time.monotonic() < end:
            run.fault(name)
    assert run.faults >= 5
    run.finish()
