"""A slice of the example data and what the example pipelines must make of it, computed with pandas from the input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from pipelines.prepare_flights import flights_table

PIPELINES = Path(__file__).parents[2] / "pipelines"
_DAY = pd.Timedelta(days=1)


def write_slice(path: Path, rows: int) -> Path:
    """The first flights of the year, as ``prepare_flights.py`` writes them."""
    pq.write_table(flights_table().slice(0, rows), path, row_group_size=8192)
    return path


def read_flights(path: Path) -> pd.DataFrame:
    """The input, in row order; ``aircraft`` is never null."""
    frame: pd.DataFrame = pq.read_table(path).to_pandas().sort_values("row_id").reset_index(drop=True)
    frame["aircraft"] = frame.tailnum.where(frame.tailnum.notna(), "row-" + frame.row_id.astype(str))
    return frame


def expected_rotations(flights: pd.DataFrame) -> pd.DataFrame:
    """One row per flight with what its aircraft did before, by row id."""
    frame = flights.copy()
    minutes = pd.to_timedelta(frame.dep_delay, unit="min")
    frame["departure"] = frame.event_time + minutes
    frame["arrival"] = frame.departure + pd.to_timedelta(frame.air_time, unit="min")
    by_aircraft = frame.groupby("aircraft")
    frame["leg"] = by_aircraft.cumcount() + 1
    frame["previous_dest"] = by_aircraft.dest.shift()
    frame["ground_minutes"] = (frame.departure - by_aircraft.arrival.shift()).dt.total_seconds() // 60
    frame["visits_of_dest"] = frame.groupby(["aircraft", "dest"]).cumcount() + 1
    frame["legs_in_24h"] = 0
    scheduled = frame.event_time.dt.tz_convert(None).to_numpy()
    for rows in by_aircraft.indices.values():
        times = scheduled[rows]
        first = np.searchsorted(times, times - _DAY.to_timedelta64(), side="right")
        frame.loc[rows, "legs_in_24h"] = np.arange(1, len(rows) + 1) - first
    return frame.set_index("row_id")


def assert_rotations(found: pd.DataFrame, flights: pd.DataFrame) -> None:
    """Every flight exactly once, every column right."""
    assert not found.row_id.duplicated().any(), "repeated rows"
    expected = expected_rotations(flights)
    found = found.set_index("row_id").sort_index()
    assert found.index.equals(expected.index), f"{len(expected) - len(found)} rows are lost"
    assert (found.tailnum == expected.aircraft).all()
    for column in ("carrier", "origin", "dest", "leg", "previous_dest", "visits_of_dest", "legs_in_24h"):
        same = (found[column] == expected[column]) | (found[column].isna() & expected[column].isna())
        assert same.all(), f"{column} is wrong in {(~same).sum()} rows"
    pd.testing.assert_series_equal(
        found.ground_minutes.astype("Float64"), expected.ground_minutes.astype("Float64"), check_names=False
    )


def assert_carriers(found: pd.DataFrame, flights: pd.DataFrame) -> None:
    """Each carrier's updates count from 1 to its number of flights, each once; the last one has the totals."""
    expected = flights.groupby("carrier").agg(
        flights=("row_id", "size"),
        total_dep_delay=("dep_delay", "sum"),
        avg_dep_delay=("dep_delay", "mean"),
        avg_arr_delay=("arr_delay", "mean"),
    )
    for carrier, updates in found.groupby("carrier"):
        assert sorted(updates.flights) == list(range(1, expected.flights[carrier] + 1)), carrier
    last = found.sort_values("flights").groupby("carrier").last().loc[expected.index]
    for column in ("total_dep_delay", "avg_dep_delay", "avg_arr_delay"):
        np.testing.assert_allclose(last[column].to_numpy(float), expected[column].to_numpy(float), rtol=1e-9)
    assert len(found) == len(flights)
