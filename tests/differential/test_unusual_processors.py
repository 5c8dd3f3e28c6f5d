"""Legal but unusual stateful processors, of rows and of pandas frames, in Spark and in the engine."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.pipelines.side_processors import SCHEMA
from tests.support.side_by_side import Case, EngineRun, Rows, flat, in_spark, ordered

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.row("io.2")]

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def seconds(*values: int | None) -> pa.Array:
    times = [None if value is None else EPOCH + dt.timedelta(seconds=value) for value in values]
    return pa.array(times, pa.timestamp("us", tz="UTC"))


def words(*rows: tuple[str, int]) -> pa.Table:
    columns = {"k": [key for key, _ in rows], "v": pa.array([number for _, number in rows], pa.int32())}
    return pa.table({**columns, "word": ["ab"[number % 2] for _, number in rows]})


def timed(*rows: tuple[str, int | None]) -> pa.Table:
    numbers = pa.array([second or 0 for _, second in rows], pa.int32())
    return pa.table({"k": [key for key, _ in rows], "v": numbers, "t": seconds(*[second for _, second in rows])})


def keyed() -> pa.Table:
    """Keys of eight types, and nulls."""
    return pa.table(
        {
            "v": pa.array([1, 2, 3, 4], pa.int32()),
            "i": pa.array([1, None, 1, 5], pa.int32()),
            "f": pa.array([0.1, None, 0.1, -0.0], pa.float64()),
            "t": seconds(5, None, 5, 6),
            "n": pa.array([dt.datetime(2020, 1, 2, 3), None] * 2, pa.timestamp("us")),
            "d": [dt.date(2020, 1, 1), None] * 2,
            "c": pa.array([Decimal("1.20"), None] * 2, pa.decimal128(10, 2)),
            "b": [b"x", None] * 2,
            "o": [True, None] * 2,
        }
    )


def typed() -> pa.Table:
    return pa.table(
        {
            "k": ["x", "y", "x"],
            "i": pa.array([1, 2, 3], pa.int32()),
            "l": pa.array([1, None, 2], pa.int64()),
            "f": pa.array([0.5, None, 1.5], pa.float32()),
            "t": seconds(5, None, 7),
            "d": [dt.date(2020, 1, 1), None, dt.date(1, 1, 1)],
            "c": pa.array([Decimal("1.20"), None, Decimal(2)], pa.decimal128(10, 2)),
            "b": [b"x", None, b""],
            "o": [True, None, False],
            "a": pa.array([[1, None], None, []], pa.list_(pa.int32())),
            "st": pa.array([{"x": 1, "y": "q"}, None, {"x": None, "y": "r"}]).cast(
                pa.struct([("x", pa.int32()), ("y", pa.string())])
            ),
        }
    )


EVENTS = [
    timed(("x", 10), ("y", 3), ("x", 4)),
    timed(("x", 8), ("x", 9), ("y", 7), ("x", 12)),
    timed(("x", 10), ("y", 11), ("x", 30)),
    timed(("x", None), ("y", 28), ("y", 29), ("y", 200)),
    timed(("z", 1)),
]
WORDS = [words(("x", 1), ("y", 2), ("x", 3), ("x", 2)), words(("x", 5), ("y", 3))]
EVENT_TIME: dict[str, Any] = {"time_mode": "EventTime", "watermark": ("t", "2 seconds")}
TYPES = (
    "k STRING, i INT, l BIGINT, f FLOAT, t TIMESTAMP, d DATE, c DECIMAL(10, 2), b BINARY, o BOOLEAN, a ARRAY<INT>, "
    "st STRUCT<x: INT, y: STRING>, n INT"
)
CASES = {
    "keys": Case("Keys", [keyed(), keyed()], SCHEMA, keys=[*"iftndcbo"], time_mode="ProcessingTime"),
    "values": Case("Unusual", WORDS, SCHEMA),
    "sessions": Case("Ending", EVENTS, SCHEMA, **EVENT_TIME),
    "frames": Case("Frames", [typed(), typed()], SCHEMA, time_mode="ProcessingTime", in_pandas=True),
    "frames, other keys": Case(
        "Frames", [typed().slice(0, 1)] * 2, SCHEMA, keys=[*"itdcbo"], time_mode="ProcessingTime", in_pandas=True
    ),
    "types of frames": Case("TypedFrames", [typed()], TYPES, in_pandas=True),
    "events in frames": Case("FrameEvents", EVENTS, SCHEMA, in_pandas=True, **EVENT_TIME),
}

IN_SUITE = ("frames, other keys",)


def without_zones(rows: Rows) -> Rows:
    return [
        {name: cell.replace(tzinfo=None) if isinstance(cell, dt.datetime) else cell for name, cell in row.items()}
        for row in rows
    ]


def whole(cluster: MiniCluster, case: Case, directory: Path) -> Rows:
    return EngineRun(cluster, case, directory).rows()


def rescaled(cluster: MiniCluster, case: Case, directory: Path) -> Rows:
    """The rows of two jobs with RocksDB: the second one has more subtasks, and the savepoint of the first one."""
    with_rocksdb = replace(case, configuration={"state.backend.type": "rocksdb"})
    first = EngineRun(cluster, replace(with_rocksdb, batches=case.batches[:1]), directory / "first")
    rows = first.rows()
    then = replace(with_rocksdb, batches=case.batches[1:])
    return rows + EngineRun(cluster, then, directory / "then", first.savepoint, first=1, parallelism=2).rows()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_SUITE else pytest.mark.long) for name in CASES]
)
def test_the_same_rows(spark: SparkSession, cluster: MiniCluster, tmp_path: Path, name: str) -> None:
    """Those of frames also across a savepoint and a rescale; with several keys their types tell what subtasks share."""
    case = CASES[name]
    theirs = ordered(flat(in_spark(spark, case, tmp_path)))
    ours = (rescaled if name == "frames, other keys" else whole)(cluster, case, tmp_path)
    assert ordered(without_zones(ours)) == theirs
    assert theirs
