"""The example pipelines: version 2 starts from a savepoint of version 1, with more operators, and loses nothing."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.flights import PIPELINES, assert_carriers, assert_rotations, read_flights, write_slice
from tests.support.jobs import fast
from tests.support.outputs import hidden, visible

ROWS = 12_000


@pytest.mark.row("203.7")
def test_version_2_continues_from_a_savepoint_of_version_1(cluster: MiniCluster, tmp_path: Path) -> None:
    source = write_slice(tmp_path / "flights.parquet", ROWS)
    out = tmp_path / "out"

    def start(version: str, rate: str, **restore: str) -> str:
        arguments = ["--input", str(source), "--output", str(out), "--rows-per-second", rate]
        return cluster.submit(
            PIPELINES, entry=f"{version}:pipeline", arguments=arguments, configuration=fast(), parallelism=2, **restore
        )

    first = start("flights", "4000")
    cluster.wait_for_status(first, JobStatus.RUNNING)
    cluster.wait_until(lambda: len(visible(out / "rotations")) > 0, "the first rows")
    savepoint = cluster.savepoint(first, tmp_path / "savepoints", stop=True)
    before = visible(out / "carrier_delays")
    done = set(visible(out / "rotations").row_id)
    assert 0 < len(done) < ROWS
    second = start("flights_v2", "0", savepoint=savepoint)
    cluster.wait_for_status(second, JobStatus.FINISHED)

    flights = read_flights(source)
    assert hidden(out) == []
    assert_rotations(visible(out / "rotations"), flights)
    carriers = visible(out / "carrier_delays")
    assert_carriers(carriers, flights)
    rest = flights[~flights.row_id.isin(done)]
    _assert_new_field(carriers, before, rest)
    _assert_new_branch(visible(out / "route_delays"), rest)


def _assert_new_field(carriers: pd.DataFrame, before: pd.DataFrame, rest: pd.DataFrame) -> None:
    """The greatest delay counts from the upgrade on."""
    old = before.groupby("carrier").flights.max()
    new = carriers[carriers.flights > carriers.carrier.map(old).fillna(0)]
    assert len(new) == len(rest)
    last = new.sort_values("flights").groupby("carrier").max_dep_delay.last()
    expected = rest.groupby("carrier").dep_delay.max()
    pd.testing.assert_series_equal(last, expected, check_names=False)


def _assert_new_branch(routes: pd.DataFrame, rest: pd.DataFrame) -> None:
    """The routes' delays count from the upgrade on."""
    delayed = rest[rest.dep_delay > 0]
    assert len(routes) == len(delayed)
    last = routes.sort_values("delayed_flights").groupby(["origin", "dest"]).last()
    expected = delayed.groupby(["origin", "dest"]).dep_delay.agg(["size", "max"])
    assert (last.delayed_flights == expected["size"]).all()
    assert (last.max_dep_delay == expected["max"]).all()
