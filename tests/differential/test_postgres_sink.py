"""Format ``postgresql``: rows of completed checkpoints in a table, exactly once through kills at each step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import PIPELINES, fast
from tests.support.postgres_server import postgres_server

psycopg = pytest.importorskip("psycopg", reason="pip install 'ckpt-runtime[postgres]'")

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

ROWS = 20_000
PROGRAM = PIPELINES / "killed_postgres.py"


@pytest.mark.row("ends.5")
def test_table_of_postgres_has_every_row_once_when_the_process_is_killed_at_each_step(
    cluster: MiniCluster, tmp_path: Path
) -> None:
    """Two jobs then start from one savepoint: its rows are there once, and those behind it once for each job."""
    faults, source = tmp_path / "faults", tmp_path / "numbers.parquet"
    faults.mkdir()
    pq.write_table(pa.table({"n": pa.array(range(ROWS), pa.int64())}), source)
    with postgres_server() as url, psycopg.connect(url, autocommit=True) as database:
        database.execute("CREATE TABLE numbers (n bigint)")

        def start(rate: int, savepoint: str | None = None) -> str:
            return cluster.submit(
                PROGRAM,
                arguments=[str(source), str(rate), url, str(faults)],
                configuration=fast(execution__checkpointing__interval="100ms"),
                parallelism=2,
                savepoint=savepoint,
            )

        job = start(50)  # which lasts for minutes, however long the kills take
        cluster.wait_for_checkpoints(job, 2)
        for step in ("write", "prepare", "notified", "merged", "committed", "merged"):
            (faults / step).touch()
            cluster.wait_until(lambda step=step: not (faults / step).exists(), f"a kill at {step}")  # type: ignore[misc]
        cluster.wait_for_checkpoints(job, 2)
        savepoint = cluster.savepoint(job, tmp_path / "savepoints", stop=True)
        before = content(database)
        assert 0 < len(before) < ROWS
        assert len(set(before)) == len(before)
        for _ in range(2):
            cluster.wait_for_status(start(0, savepoint), JobStatus.FINISHED)
        assert Counter(content(database)) == Counter(range(ROWS)) + Counter(set(range(ROWS)) - set(before))


def content(database: Any) -> list[int]:
    """The numbers in the table; no staging table is left beside it."""
    tables = database.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
    assert {name for (name,) in tables} == {"numbers", "ckpt_commits", "ckpt_staged"}
    assert database.execute("SELECT count(*) FROM ckpt_staged").fetchone() == (0,)
    return [number for (number,) in database.execute("SELECT n FROM numbers")]


@pytest.mark.row("ends.5")
def test_program_appends_to_a_table_of_postgres_by_the_name_of_the_format(cluster: MiniCluster, tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": pa.array([1, None, 3], pa.int64())}), tmp_path / "rows.parquet")
    with postgres_server() as url, psycopg.connect(url, autocommit=True) as database:
        database.execute("CREATE TABLE numbers (n bigint)")
        arguments = [str(tmp_path / "rows.parquet"), url]
        job = cluster.submit(PROGRAM, entry="killed_postgres:written", arguments=arguments, configuration=fast())
        cluster.wait_for_status(job, JobStatus.FINISHED)
        assert Counter(content(database)) == Counter([1, None, 3])
