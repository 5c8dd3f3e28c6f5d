"""What compares the demonstration's results with Spark SQL finds what is lost, repeated and wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.support.flights import PIPELINES, expected_rotations, read_flights, write_slice

ROWS = 2_000


def _rotations(flights: pd.DataFrame) -> pd.DataFrame:
    rotations = expected_rotations(flights).reset_index()
    rotations["tailnum"] = rotations.aircraft
    columns = ["row_id", "tailnum", "carrier", "origin", "dest", "leg", "previous_dest"]
    return rotations[[*columns, "ground_minutes", "visits_of_dest", "legs_in_24h"]].astype({"ground_minutes": "Int64"})


def _carriers(flights: pd.DataFrame) -> pd.DataFrame:
    """Every update of every carrier, of which the last has the totals."""
    by_carrier = flights.groupby("carrier")
    updates = flights[["carrier"]].assign(
        flights=by_carrier.cumcount() + 1, total_dep_delay=by_carrier.dep_delay.cumsum(), avg_dep_delay=0.0
    )
    last = by_carrier.tail(1).index
    for name in ("dep_delay", "arr_delay"):
        updates.loc[last, f"avg_{name}"] = by_carrier[name].mean().loc[updates.carrier[last]].to_numpy()
    updates.loc[last, "total_dep_delay"] = by_carrier.dep_delay.sum().loc[updates.carrier[last]].to_numpy()
    return updates


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_lost_repeated_and_wrong_rows_are_counted(tmp_path: Path) -> None:
    source = write_slice(tmp_path / "flights.parquet", ROWS)
    flights = read_flights(source)
    rotations, carriers = _rotations(flights), _carriers(flights)

    rotations.loc[7, "leg"] += 1
    rotations.loc[8, "previous_dest"] = None if pd.notna(rotations.previous_dest[8]) else "JFK"
    rotations = pd.concat([rotations.drop(index=[10, 11, 12]), rotations.loc[[20, 20]]])

    last = carriers.groupby("carrier").tail(1).index
    carriers.loc[last[0], "total_dep_delay"] += 1
    before_last = carriers.index[(carriers.carrier == carriers.carrier[last[1]]) & (carriers.flights == 1)]
    too_many = carriers.loc[[last[2]]].assign(flights=ROWS + 1)
    carriers = pd.concat([carriers.drop(index=before_last), carriers.loc[[last[3]]], too_many])

    for name, frame in {"rotations": rotations, "carrier_delays": carriers}.items():
        (tmp_path / "out" / name).mkdir(parents=True)
        frame.to_parquet(tmp_path / "out" / name / "part-0.parquet", index=False)
    command = [sys.executable, str(PIPELINES / "verify_flights.py"), str(source), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    assert json.loads(done.stdout) == {"rows": 2 * ROWS, "lost": 3 + 1, "duplicated": 2 + 1, "wrong": 2 + 2}, (
        done.stderr
    )
    assert done.returncode == 1
