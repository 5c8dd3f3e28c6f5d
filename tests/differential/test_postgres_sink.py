"""Format ``postgresql`` in programs; tests of kills are in ``test_killed_sinks.py``."""

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

PROGRAM = PIPELINES / "written_tables.py"


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
        job = cluster.submit(PROGRAM, entry="written_tables:postgres", arguments=arguments, configuration=fast())
        cluster.wait_for_status(job, JobStatus.FINISHED)
        assert Counter(content(database)) == Counter([1, None, 3])


@pytest.mark.row("ends.4")
@pytest.mark.row("ends.5")
def test_program_reads_a_table_of_postgres_by_the_name_of_the_format_into_a_delta_table(
    cluster: MiniCluster, tmp_path: Path
) -> None:
    deltalake = pytest.importorskip("deltalake", reason="pip install 'ckpt-runtime[delta]'")
    with postgres_server() as url, psycopg.connect(url, autocommit=True) as database:
        database.execute("CREATE TABLE numbers (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, n int)")
        database.execute("INSERT INTO numbers (n) SELECT n - 500 FROM generate_series(0, 999) n")
        job = cluster.submit(
            PIPELINES / "read_tables.py",
            entry="read_tables:postgres",
            arguments=[url, "numbers", str(tmp_path / "target")],
            configuration=fast(),
        )
        cluster.wait_for_status(job, JobStatus.FINISHED)
        found = deltalake.DeltaTable(tmp_path / "target").to_pyarrow_table().column("n").to_pylist()
        assert sorted(found) == list(range(1, 500))
