"""Sketches that the engine's aggregates write beside those of Spark, and what both read from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from ckpt_runtime.operators.aggregates.accumulator import Rows
from ckpt_runtime.operators.aggregates.registry import accumulator_for
from ckpt_runtime.state.arrays import read_only
from tests.support.generated_parity import COLUMNS, compare
from tests.support.groups import aggregate

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

COUNTS = (0, 1, 3, 150, 700, 5_000)
"""Numbers of values: none, few, those of sketches that list them, and those of sketches that estimate."""
LONGS = list(range(max(COUNTS)))
TEXTS = [f"ä{number}" for number in LONGS]
DOUBLES = [number / 7 for number in LONGS]
BUILT: dict[str, tuple[str, list[Any], pa.DataType, int]] = {
    "hll_sketch_agg(id, 4)": ("HllSketchAgg", LONGS, pa.int64(), 4),
    "hll_sketch_agg(CONCAT('ä', id), 10)": ("HllSketchAgg", TEXTS, pa.string(), 10),
    "theta_sketch_agg(CAST(id AS INT), 5)": ("ThetaSketchAgg", LONGS, pa.int32(), 5),
    "theta_sketch_agg(CONCAT('ä', id), 9)": ("ThetaSketchAgg", TEXTS, pa.string(), 9),
    "theta_sketch_agg(id / 7D, 10)": ("ThetaSketchAgg", DOUBLES, pa.float64(), 10),
    "kll_sketch_agg_bigint(id, 200)": ("KllSketchAggBigint", LONGS, pa.int64(), 200),
    "kll_sketch_agg_float(CAST(id / 7D AS FLOAT), 20)": ("KllSketchAggFloat", DOUBLES, pa.float32(), 20),
    "kll_sketch_agg_double(id / 7D, 200)": ("KllSketchAggDouble", DOUBLES, pa.float64(), 200),
}
"""By Spark's call over the numbers from 0: the function, its values, their type, its size."""


def built(call: str) -> list[bytes]:
    """The sketches of the engine for each of ``COUNTS``, whose values come in two batches."""
    function, values, kind, size = BUILT[call]
    one = aggregate(function, "v", result=pa.binary(), settings={"size": size})
    accumulator = accumulator_for(one, pa.schema([("v", kind)]))
    stored = [pa.nulls(0, pa.binary())]
    known = read_only(np.empty(0, dtype=np.uint32))
    for even in (True, False):
        rows = [
            (group, value)
            for group, count in enumerate(COUNTS)
            for value in (values[: count // 2] if even else [*values[count // 2 : count], None])
        ]
        numbers = read_only(np.array([group for group, _ in rows], dtype=np.uint32))
        given = Rows(numbers, [pa.array([value for _, value in rows], kind)])
        stored = accumulator.combined(len(COUNTS), Rows(known, stored), given)
        known = read_only(np.arange(len(COUNTS), dtype=np.uint32))
    sketches: list[bytes] = accumulator.result(stored).to_pylist()
    return sketches


@pytest.mark.row("ps.4")
def test_sketch_has_the_bytes_of_spark_until_it_drops_values_at_random(spark: SparkSession) -> None:
    numbers = spark.range(0, max(COUNTS), 1, 1)
    calls = [f"{call} FILTER (WHERE id < {count})" for call in BUILT for count in COUNTS]
    wanted = iter([bytes(each) for each in numbers.selectExpr(*calls).head()])  # type: ignore[union-attr]
    for call, (function, _, _, size) in BUILT.items():
        for count, given, found in zip(COUNTS, built(call), wanted, strict=False):
            if function.startswith("Kll") and count > size:
                assert len(given) == pytest.approx(len(found), rel=0.2), (call, count)
            else:
                assert given == found, (call, count)


FUNCTIONS = {
    "hll_sketch_agg": [
        "hll_sketch_estimate(x)",
        "hll_sketch_estimate(hll_union(x, unhex(s), true))",
        "hll_sketch_estimate(hll_union(x, unhex(s)))",
    ],
    "theta_sketch_agg": [
        "theta_sketch_estimate(x)",
        *[f"theta_{name}(x, unhex(s))" for name in ("union", "intersection", "difference")],
        "theta_union(unhex(s), x, 6)",
        "theta_difference(x, x)",
    ],
    "kll_sketch_agg": [
        "kll_sketch_get_n_{0}(x)",
        "kll_sketch_get_n_{0}(kll_sketch_merge_{0}(x, unhex(s)))",
        *[f"kll_sketch_get_quantile_{{0}}(x, {rank})" for rank in ("0D", "0.1D", "0.7D", "1D", "-0.1D", "array(0.3D)")],
        "kll_sketch_get_rank_{0}(x, array(CAST(7 AS {0}), CAST(90 AS {0})))",
    ],
}


@pytest.mark.row("ps.4")
@pytest.mark.parametrize("call", BUILT)
def test_functions_of_sketches_that_the_engine_wrote_give_the_values_of_spark(spark: SparkSession, call: str) -> None:
    sketches = [*built(call), b"no sketch at all", None]
    rows = len(sketches)
    columns = {name: pa.nulls(rows, kind) for name, (kind, _) in COLUMNS.items()}
    columns["x"] = pa.array(sketches, pa.binary())
    texts = [None if data is None else data.hex() for data in (sketches[1:2] * rows)[: rows - 3] + sketches[-3:]]
    columns["s"] = pa.array(texts, pa.string())
    name = call.partition("(")[0]
    family, kind = ("kll_sketch_agg", name.rsplit("_", 1)[1]) if name.startswith("kll") else (name, "")
    expressions = [text.format(kind) for text in FUNCTIONS[family]]
    outcome = compare(spark, pa.table(columns), expressions, ansi=True, zone="UTC")
    assert outcome.differences == []
    assert outcome.equal == len(expressions)
