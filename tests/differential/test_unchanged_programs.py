"""Program files as teams have them: plain PySpark and the engine run the same file, and write the same rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import fast
from tests.support.parity import shown
from tests.support.patience import patient

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

PROGRAMS = Path(__file__).parents[1] / "support" / "programs"
SUBMIT = (
    "--master local[2] --driver-memory 512m --conf spark.ui.enabled=false --conf spark.sql.shuffle.partitions=1"
    " --conf spark.driver.host=127.0.0.1 pyspark-shell"
)


def write(directory: Path) -> None:
    """Lines and clicks in the order of their times, with nulls, and a table with pages that have no click."""
    choice = Random(7)
    start = datetime(2026, 3, 29, tzinfo=UTC)  # an hour of this day does not exist in Vienna
    texts = ["To be, or not to be", "that is the QUESTION:", "", None, "whether 'tis nobler", "être ou ne pas être"]
    (directory / "lines").mkdir()
    with open(directory / "lines" / "lines.json", "w", encoding="utf-8") as file:
        for at in range(600):
            time = (start + timedelta(seconds=31 * at)).isoformat()
            file.write(json.dumps({"line": choice.choice(texts), "at": time}) + "\n")
    clicks = [
        {
            "user": choice.choice(["ann", "bob", "eve", "zoë"]),
            "page": choice.choice(["/", "/a", "/b", "/none", None]),
            "at": start + timedelta(seconds=211 * at + choice.randrange(200)),
        }
        for at in range(600)
    ]
    schema = pa.schema([("user", pa.string()), ("page", pa.string()), ("at", pa.timestamp("us", "UTC"))])
    (directory / "clicks").mkdir()
    pq.write_table(pa.Table.from_pylist(clicks, schema), directory / "clicks" / "clicks.parquet")
    (directory / "pages.csv").write_text('page,title,department\n/,Home,\n/a,"A, the first",sales\n/c,C,none\n')


def rows(spark: SparkSession, directory: Path) -> Counter[str]:
    """What both have written, read by Spark: it writes times in a form of its own."""
    return Counter(str(shown(row)) for row in spark.read.parquet(str(directory / "rows")).toArrow().to_pylist())


@pytest.mark.row("ps.1", "ps.5")
@pytest.mark.parametrize("name", ["word_count", "sessionisation", "enrichment"])
def test_program_file_that_plain_pyspark_runs_writes_the_same_rows_in_the_engine(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path, name: str
) -> None:
    write(tmp_path)
    program = PROGRAMS / f"{name}.py"
    plain = subprocess.run(
        [sys.executable, program, tmp_path, tmp_path / "spark"],
        env={
            **os.environ,
            "PYSPARK_SUBMIT_ARGS": SUBMIT,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
        },
        capture_output=True,
        text=True,
        timeout=patient(120),
        check=False,
    )
    assert plain.returncode == 0, plain.stderr
    job = cluster.submit(
        program,
        arguments=[str(tmp_path), str(tmp_path / "engine")],
        configuration=fast(),
        parallelism=2,
    )
    cluster.wait_for_status(job, JobStatus.FINISHED)
    wanted = rows(spark, tmp_path / "spark")
    assert wanted.total() > 20
    assert rows(spark, tmp_path / "engine") == wanted
