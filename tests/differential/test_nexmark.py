"""Queries of Nexmark in the engine and in Flink SQL, beside DuckDB, which computes them from the same events."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.nexmark import expected as reference
from benchmarks.nexmark.__main__ import check_flink, in_engine, last_events
from benchmarks.nexmark.expected import Expected
from benchmarks.nexmark.flink import queries as in_flink
from benchmarks.nexmark.flink.peer import FlinkPeer
from benchmarks.nexmark.pipeline.queries import QUERIES
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support import flink_cluster
from tests.support.effort import THOROUGH

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

EVENTS = 40_000 if THOROUGH else 20_000
OPTIONS = Namespace(
    check_events=EVENTS, events_per_split=5_000, parallelism=2, incremental=True, events=EVENTS, flink_dir=None
)
PER_SECOND = 1_000
IN_SUITE = "q8"
"""A join of two windows."""


@pytest.fixture(scope="module")
def expected() -> Expected:
    return Expected(OPTIONS.check_events, PER_SECOND)


@pytest.mark.parametrize(
    "query", [pytest.param(name, marks=() if name == IN_SUITE else pytest.mark.long) for name in QUERIES]
)
def test_query_gives_the_rows_that_duckdb_computes_for_the_same_events(
    cluster: MiniCluster, expected: Expected, tmp_path: Path, query: str
) -> None:
    in_engine(cluster, query, OPTIONS.check_events, PER_SECOND, OPTIONS, tmp_path)
    result = pq.read_table(tmp_path / query)
    rows, wrong = expected.difference(query, result, last_events(OPTIONS))
    assert wrong == ""
    assert rows > 0


@pytest.fixture(scope="module")
def flink(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlinkPeer]:
    if reason := flink_cluster.absent("java", "javac"):
        pytest.skip(reason)
    with FlinkPeer(OPTIONS, tmp_path_factory.mktemp("nexmark")) as peer:
        yield peer


@pytest.mark.flink
@pytest.mark.long
@pytest.mark.parametrize("query", [*reference.EVENTS, *QUERIES])
def test_query_in_flink_gives_the_rows_that_duckdb_computes_for_the_same_events(flink: FlinkPeer, query: str) -> None:
    check_flink(flink, [query])


@pytest.mark.flink
@pytest.mark.long
def test_flink_measures_a_query_that_has_no_sink_to_compare(flink: FlinkPeer) -> None:
    run = flink.run("q2")
    assert run.seconds > 0
    assert run.cpu_s > 0


def test_comparison_finds_a_row_that_is_missing_and_one_that_is_wrong(expected: Expected) -> None:
    last = (OPTIONS.check_events - 1, OPTIONS.check_events - 1)
    right = expected.rows("q2", last[0])
    assert expected.difference("q2", right, last) == (right.num_rows, "")
    assert "1 of" in expected.difference("q2", right.slice(1), last)[1]
    doubled = pa.concat_tables([right, right.slice(0, 1)])
    assert "and 1 are wrong" in expected.difference("q2", doubled, last)[1]
    assert set(reference.QUERIES) == set(QUERIES)
    assert set(in_flink.QUERIES) == {*QUERIES, *reference.EVENTS}
