"""Format ``delta``: types, partitions and statistics of a table; tests of kills are in ``test_killed_sinks.py``."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ckpt_runtime.jobmaster.gateway_values import SubmissionFailed
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import PIPELINES, fast

deltalake = pytest.importorskip("deltalake", reason="pip install 'ckpt-runtime[delta]'")

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = PIPELINES / "written_tables.py"


def added(table: Path) -> list[dict[str, Any]]:
    """What the log of a table adds, read without the library that wrote it."""
    lines = [line for file in sorted((table / "_delta_log").glob("*.json")) for line in file.read_text().splitlines()]
    return [action["add"] for action in map(json.loads, lines) if "add" in action]


@pytest.mark.row("ends.5")
def test_table_is_read_with_the_types_and_partitions_of_the_rows(cluster: MiniCluster, tmp_path: Path) -> None:
    rows = pa.table(
        {
            "n": pa.array([1, None, 3], pa.int32()),
            "x": pa.array([float("nan"), 1.5, None]),
            "at": pa.array([datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC), None, None], pa.timestamp("us", "UTC")),
            "tags": pa.array([["a", None], [], None], pa.list_(pa.string())),
            "name": ["a/b=c", None, "é"],
        }
    )
    source, table = tmp_path / "rows.parquet", tmp_path / "table"
    pq.write_table(rows, source)
    for _ in range(2):  # the second job appends to the table
        arguments = [str(source), str(table)]
        job = cluster.submit(PROGRAM, entry="written_tables:delta", arguments=arguments, configuration=fast())
        cluster.wait_for_status(job, JobStatus.FINISHED)
    found = deltalake.DeltaTable(table).to_pyarrow_table().select(rows.column_names)
    assert Counter(map(str, found.to_pylist())) == Counter(map(str, 2 * rows.to_pylist()))
    stats = [json.loads(add["stats"]) for add in added(table)]
    assert {entry["maxValues"].get("at") for entry in stats} == {"1970-01-01T00:00:00.000Z", None}
    assert not any("x" in entry["maxValues"] for entry in stats)
    assert sum(entry["numRecords"] for entry in stats) == 2 * rows.num_rows


@pytest.mark.row("ends.5")
def test_type_that_delta_lacks_is_refused_when_the_program_is_planned(cluster: MiniCluster, tmp_path: Path) -> None:
    source = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"n": pa.array([1], pa.duration("us")), "name": ["a"]}), source)
    with pytest.raises(SubmissionFailed, match=r"column 'n' is duration\[us\]"):
        cluster.submit(PROGRAM, entry="written_tables:delta", arguments=[str(source), str(tmp_path / "table")])


@pytest.mark.row("ends.4")
@pytest.mark.row("ends.5")
def test_program_reads_a_delta_table_by_the_name_of_the_format_into_another_one(
    cluster: MiniCluster, tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    rows = pa.table({"n": pa.array([1, None, 3], pa.int64()), "part": ["a/b", "é", None]})
    for _ in range(2):
        deltalake.write_deltalake(source, rows, mode="append", partition_by=["part"])
    arguments = [str(source), str(target)]
    program = PIPELINES / "read_tables.py"
    job = cluster.submit(program, entry="read_tables:delta", arguments=arguments, configuration=fast())
    cluster.wait_for_status(job, JobStatus.FINISHED)
    wanted = [{**row, "twice": row["n"] and 2 * row["n"]} for row in 2 * rows.to_pylist()]
    found = deltalake.DeltaTable(target).to_pyarrow_table().select(["n", "part", "twice"])
    assert Counter(map(str, found.to_pylist())) == Counter(map(str, wanted))
