"""Generators and Python functions of PySpark programs in Spark and in the engine, over the same file."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import PIPELINES, fast
from tests.support.parity import shown
from tests.support.pipelines import function_programs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = PIPELINES / "function_programs.py"
STRUCT = pa.struct([("name", pa.string()), ("age", pa.int32())])
COLUMNS = pa.schema(
    [
        ("id", pa.int64()),
        ("words", pa.string()),
        ("numbers", pa.list_(pa.int32())),
        ("facts", pa.map_(pa.string(), pa.float64())),
        ("amount", pa.float64()),
        ("price", pa.decimal128(10, 2)),
        ("at", pa.timestamp("us", "UTC")),
        ("day", pa.date32()),
        ("people", pa.list_(STRUCT)),
    ]
)


def given_rows() -> list[dict[str, Any]]:
    """Rows with nulls, empty and long collections, and dates before 1970."""
    start = datetime(1969, 12, 31, 23, 30, tzinfo=UTC)
    cycles: dict[str, list[Any]] = {
        "words": ["to be or", None, "", "not  to be", "Straße ß"],
        "numbers": [[1, None, 3], [], None, [2], list(range(5))],
        "facts": [[("a", 1.5), ("b", None)], None, [], [("c", 2.0)]],
        "amount": [None, 1.25, -3.0, 0.1 + 0.2, 1e20],
        "price": [Decimal("1.10"), None, Decimal("-99999.99")],
        "day": [date(1582, 10, 15), None, date(2026, 2, 28)],
        "people": [[{"name": "a", "age": 1}, None], None, [], [{"name": None, "age": None}]],
    }
    return [
        {
            "id": at,
            "at": start + timedelta(minutes=7 * at),
            **{name: cycle[at % len(cycle)] for name, cycle in cycles.items()},
        }
        for at in range(700)
    ]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("rows")
    pq.write_table(pa.Table.from_pylist(given_rows(), COLUMNS), directory / "rows.parquet")
    return str(directory)


@pytest.mark.row("ps.1", "ps.3")
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)])
def test_generators_and_python_functions_give_the_rows_of_spark(
    spark: SparkSession, cluster: MiniCluster, path: str, tmp_path: Path, every: int
) -> None:
    """All queries, and each third one of them in the suite."""
    rows = spark.read.schema(function_programs.SCHEMA).parquet(path)
    rows.createOrReplaceTempView("rows")
    spark.udf.register("doubled", lambda number: None if number is None else number * 2, "long")
    frames = dict([*function_programs.queries(spark, rows).items()][::every])
    job = cluster.submit(
        PROGRAM,
        arguments=["replay", path, str(tmp_path), *frames],
        configuration=fast(restart_strategy__type="none", execution__checkpointing__interval="2 s"),
    )
    cluster.wait_for_status(job, JobStatus.FINISHED)
    for name, frame in frames.items():
        wanted = frame.toArrow().to_pylist()
        given = pq.read_table(tmp_path / name).to_pylist()
        assert wanted, name
        assert Counter(str(shown(row)) for row in given) == Counter(str(shown(row)) for row in wanted), name
