"""Queries of Nexmark beside DuckDB, which computes them independently from the same events."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.nexmark import expected as reference
from benchmarks.nexmark.__main__ import in_engine, last_events
from benchmarks.nexmark.expected import Expected
from benchmarks.nexmark.pipeline.queries import QUERIES
from ckpt_runtime.testing.mini_cluster import MiniCluster

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

OPTIONS = Namespace(check_events=40_000, events_per_split=5_000, parallelism=2)
PER_SECOND = 1_000
IN_SUITE = ("q8", "q18")
"""A join of two windows, and the last row of each key."""


@pytest.fixture(scope="module")
def expected() -> Expected:
    return Expected(OPTIONS.check_events, PER_SECOND)


@pytest.mark.parametrize(
    "query", [pytest.param(name, marks=() if name in IN_SUITE else pytest.mark.long) for name in QUERIES]
)
def test_query_gives_the_rows_that_duckdb_computes_for_the_same_events(
    cluster: MiniCluster, expected: Expected, tmp_path: Path, query: str
) -> None:
    in_engine(cluster, query, OPTIONS.check_events, PER_SECOND, OPTIONS, tmp_path)
    result = pq.read_table(tmp_path / query)
    rows, wrong = expected.difference(query, result, last_events(OPTIONS))
    assert wrong == ""
    assert rows > 0


def test_comparison_finds_a_row_that_is_missing_and_one_that_is_wrong(expected: Expected) -> None:
    last = (OPTIONS.check_events - 1, OPTIONS.check_events - 1)
    right = expected.rows("q2", last[0])
    assert expected.difference("q2", right, last) == (right.num_rows, "")
    assert "1 of" in expected.difference("q2", right.slice(1), last)[1]
    doubled = pa.concat_tables([right, right.slice(0, 1)])
    assert "and 1 are wrong" in expected.difference("q2", doubled, last)[1]
    assert set(reference.QUERIES) == set(QUERIES)
