"""Every pipeline of the documentation runs over the files that are there, and gives results that can be computed."""

from __future__ import annotations

import ast
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.docs.markdown import ROOT, Block, blocks
from tests.support.jobs import fast

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

ROWS = 600
START = datetime(2024, 1, 1, tzinfo=UTC)
COUNTRIES = ("DE", "FR", "PL")
PROGRAMS = [block for block in blocks("python") if "def pipeline(spark: SparkSession" in block.text]


@pytest.fixture(scope="module")
def documented_orders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages call the orders, and a last one two days later, by which event time passes all others."""
    rows = range(ROWS + 1)
    times = [START + timedelta(minutes=5 * row, days=2 if row == ROWS else 0) for row in rows]
    table = pa.table(
        {
            "order_id": pa.array(rows, pa.int64()),
            "customer": ["last" if row == ROWS else f"customer-{row % 7}" for row in rows],
            "country": [COUNTRIES[row % 3] for row in rows],
            "amount": [float(row) for row in rows],
            "placed_at": pa.array(times, pa.timestamp("us", tz="UTC")),
        }
    )
    directory = tmp_path_factory.mktemp("orders")
    pq.write_table(table, directory / "orders.parquet")
    return directory


def arguments(block: Block, orders: Path, output: Path) -> list[str]:
    known = {"output": output, "rows": ROWS}
    [function] = [
        node for node in ast.parse(block.text).body if isinstance(node, ast.FunctionDef) and node.name == "pipeline"
    ]
    return [str(known.get(argument.arg, orders)) for argument in function.args.args[1:]]


def ended_by_its_data(block: Block) -> str:
    """The text of a program that ends when it has read all files, instead of waiting for more."""
    return block.text.replace(".writeStream", ".writeStream.trigger(availableNow=True)")


@pytest.fixture(scope="module")
def outputs(
    cluster: MiniCluster, documented_orders: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """The rows of each pipeline."""
    directory = tmp_path_factory.mktemp("programs")
    found = {}
    for number, block in enumerate(PROGRAMS):
        program, output = directory / f"example_{number}.py", directory / f"output-{number}"
        program.write_text(ended_by_its_data(block))
        given = arguments(block, documented_orders, output)
        job = cluster.submit(program, arguments=given, configuration=fast())
        cluster.wait_for_status(job, JobStatus.FINISHED)
        files = sorted(output.rglob("[!.]*.parquet"))
        found[str(block)] = [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]
    return found


def rows_of(outputs: dict[str, list[dict[str, Any]]], page: str, word: str) -> list[dict[str, Any]]:
    """The output of the one pipeline on that page whose text holds the word."""
    [block] = [block for block in PROGRAMS if block.page == ROOT / page and word in block.text]
    return outputs[str(block)]


def test_every_pipeline_writes_rows(outputs: dict[str, list[dict[str, Any]]]) -> None:
    assert [name for name, rows in outputs.items() if not rows] == []


def test_totals_per_customer_are_exact(outputs: dict[str, list[dict[str, Any]]]) -> None:
    found = rows_of(outputs, "docs/pipelines.md", 'alias("orders"), F.sum')
    last = {row["customer"]: row for row in sorted(found, key=lambda row: int(row["orders"]))}
    for number in range(7):
        mine = range(number, ROWS, 7)
        assert (last[f"customer-{number}"]["orders"], last[f"customer-{number}"]["total"]) == (len(mine), sum(mine))


def test_windows_that_have_ended_are_exact(outputs: dict[str, list[dict[str, Any]]]) -> None:
    """An hour has 12 orders, 4 of each country. The window of the last order has not ended."""
    found = rows_of(outputs, "README.md", "totals.py")
    assert {row["country"] for row in found} == {"DE", "FR", "PL"}
    totals = sorted((row["window"]["start"], row["country"], row["orders"], row["total"]) for row in found)
    expected = [
        (START + timedelta(hours=hour), country, 4, float(sum(range(12 * hour + number, 12 * hour + 12, 3))))
        for hour in range(ROWS // 12)
        for number, country in enumerate(COUNTRIES)
    ]
    assert totals == sorted(expected)


def test_program_of_the_readme_runs_in_spark_with_a_checkpoint_location(
    spark: SparkSession, outputs: dict[str, list[dict[str, Any]]], documented_orders: Path, tmp_path: Path
) -> None:
    [block] = [block for block in PROGRAMS if block.page == ROOT / "README.md"]
    session = spark.newSession()
    session.conf.set("spark.sql.streaming.checkpointLocation", str(tmp_path / "checkpoints"))
    session.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "true")
    module: dict[str, Any] = {}
    exec(compile(ended_by_its_data(block), str(block), "exec"), module)
    module["pipeline"](session, str(documented_orders), str(tmp_path / "output"))
    for query in session.streams.active:
        query.awaitTermination()
    rows = session.read.parquet(str(tmp_path / "output")).toArrow().to_pylist()
    assert sorted(map(str, rows)) == sorted(map(str, outputs[str(block)]))


def test_every_order_belongs_to_one_visit(outputs: dict[str, list[dict[str, Any]]]) -> None:
    assert sum(row["orders"] for row in rows_of(outputs, "docs/pipelines.md", "class Sessions")) == ROWS


def test_every_order_meets_the_next_one_of_its_customer(outputs: dict[str, list[dict[str, Any]]]) -> None:
    """A customer's orders are 35 minutes apart: one of them is within the next hour, except behind the last."""
    found = rows_of(outputs, "docs/pipelines.md", "next-orders")
    assert len(found) == ROWS
    expected = {order: order + 7 if order + 7 < ROWS else None for order in range(ROWS)}
    assert {row["order_id"]: row["next_id"] for row in found} == expected


def test_data_source_gives_each_tick_once(outputs: dict[str, list[dict[str, Any]]]) -> None:
    assert sorted(row["tick"] for row in rows_of(outputs, "docs/pipelines.md", "class TicksReader")) == [*range(100)]
