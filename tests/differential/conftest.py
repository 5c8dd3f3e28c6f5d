"""The engine beside the system whose contract it claims, on the same input in one test.

One Spark and one session of the engine serve all tests of the folder.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.java_archive import end_spark
from tests.support.jobs import PIPELINES
from tests.support.object_store import ObjectStore, object_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ROOT = Path(__file__).parents[2]
_UNPACKED = "import sys\nsys.path[:] = [path for path in sys.path if not path.endswith('pyspark.zip')]\n"
"""Spark's workers take PySpark from where it is installed: compiling it out of its archive takes most of their start,
which may last ten seconds."""


@pytest.fixture(scope="session")
def store() -> Iterator[ObjectStore]:
    with object_store() as started:
        yield started


@pytest.fixture(scope="session")
def spark(store: ObjectStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A local Spark, in UTC. Its Python workers import what tests and test pipelines import, and find the store."""
    from pyspark.sql import SparkSession

    directory = tmp_path_factory.mktemp("spark")
    (directory / "sitecustomize.py").write_text(_UNPACKED)
    own = [directory, _ROOT, _ROOT / "runtime", PIPELINES]
    paths = [*map(str, own), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    changed = {"PYTHONPATH": os.pathsep.join(paths), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    builder = SparkSession.builder.master("local[2]").appName("differential")
    for key, value in {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # PySpark would ask Java several times in each call of its API, to say in errors where in the program it is.
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        # To plan a query again after each of its stages takes longer than a stage of a few hundred rows.
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "1",
        "spark.sql.streaming.noDataMicroBatches.enabled": "false",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.local.dir": str(directory),
        "spark.python.daemon.module": "tests.support.spark_worker_daemon",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "768m",
        # To compile a class for each query takes longer than the class saves on a few hundred rows.
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        # Each file of a checkpoint is a process that changes its rights, and so is each file of its checksum.
        "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
        "spark.hadoop.fs.AbstractFileSystem.file.impl": "org.apache.hadoop.fs.local.RawLocalFs",
    }.items():
        builder = builder.config(key, value)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changed.items():
            patch.setenv(name, value)
        yield builder.getOrCreate()
        end_spark()


@pytest.fixture(scope="session")
def cluster(spark: SparkSession) -> Iterator[MiniCluster]:
    """A session of the engine, without Spark. Spark starts first: behind a job its Python workers lack a module."""
    with MiniCluster() as started:
        yield started


@pytest.fixture(scope="session")
def orders(tmp_path_factory: pytest.TempPathFactory) -> str:
    """2,000 orders with nulls, negative quantities and hours that overlap."""
    directory = tmp_path_factory.mktemp("orders")
    generator = random.Random(1)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    rows = [
        {
            "country": generator.choice(["at", "AU", "DE", "été", None]),
            "amount": generator.choice([None, float(generator.randrange(100)) / 10]),
            "quantity": generator.choice([None, -3, 0, 1, 2, 7]),
            "price": generator.choice([None, Decimal(generator.randrange(100_000)).scaleb(-2)]),
            "tags": generator.choice([None, [], ["a", None], ["b", "c"]]),
            "placed_at": start + timedelta(seconds=17 * at),
        }
        for at in range(2_000)
    ]
    schema = pa.schema(
        [
            ("country", pa.string()),
            ("amount", pa.float64()),
            ("quantity", pa.int32()),
            ("price", pa.decimal128(10, 2)),
            ("tags", pa.list_(pa.string())),
            ("placed_at", pa.timestamp("us", "UTC")),
        ]
    )
    pq.write_table(pa.Table.from_pylist(rows, schema), directory / "orders.parquet")
    return str(directory)
