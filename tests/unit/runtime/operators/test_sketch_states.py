"""Sketches in state: those of sessions that merge, those that cannot be read, and none at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasketches
import numpy as np
import pyarrow as pa
import pytest

from ckpt_runtime.expressions.functions import sketches
from ckpt_runtime.expressions.types import UnsupportedExpressionError
from ckpt_runtime.operators.aggregates.accumulator import AggregateFailedError, GroupAccumulator, Rows
from ckpt_runtime.operators.aggregates.registry import accumulator_for
from ckpt_runtime.state.arrays import read_only
from tests.support.groups import aggregate

SIZES = {"HllSketchAgg": 10, "ThetaSketchAgg": 7, "KllSketchAggBigint": 4_000}


def accumulator(function: str, kind: pa.DataType, **settings: Any) -> GroupAccumulator:
    one = aggregate(function, "v", result=pa.binary(), settings=settings)
    return accumulator_for(one, pa.schema([("v", kind)]))


def of_one_group(column: pa.Array) -> Rows:
    return Rows(read_only(np.zeros(len(column), dtype=np.uint32)), [column])


def combined(own: GroupAccumulator, stored: Sequence[bytes], values: Sequence[Any]) -> bytes:
    rows = of_one_group(pa.array(values, own.inputs[0]))
    found: bytes = own.combined(1, of_one_group(pa.array(stored, pa.binary())), rows)[0][0].as_py()
    return found


def content(function: str, data: bytes) -> object:
    """What does not depend on the way in which a sketch was made."""
    if function == "HllSketchAgg":
        union = datasketches.hll_union(SIZES[function])
        for _ in range(2):  # a united sketch estimates from its registers alone
            union.update(datasketches.hll_sketch.deserialize(data))
        return union.get_estimate()
    if function == "ThetaSketchAgg":
        return data
    sketch = datasketches.kll_items_sketch.deserialize(data, datasketches.PyLongsSerDe())
    return sketch.n, sketch.get_quantiles([0.0, 0.1, 0.5, 1.0], True)


@pytest.mark.parametrize("function", SIZES)
@pytest.mark.parametrize("count", [5, 3_000])
def test_sessions_that_merge_have_the_sketch_of_all_of_their_values(function: str, count: int) -> None:
    own = accumulator(function, pa.int64(), size=SIZES[function])
    parts = [combined(own, [], range(at, count, 3)) for at in range(2)]
    whole = combined(own, [], range(count))
    assert content(function, combined(own, parts, range(2, count, 3))) == content(function, whole)


@pytest.mark.parametrize("function", ["HllUnionAgg", "ThetaUnionAgg", "ThetaIntersectionAgg", "KllMergeAggDouble"])
def test_binary_that_is_no_sketch_fails_with_the_name_of_the_aggregate(function: str) -> None:
    own = accumulator(function, pa.binary(), size=8)
    with pytest.raises(AggregateFailedError, match=rf"'{function}\(v\)'.*_INVALID_INPUT_SKETCH_BUFFER"):
        combined(own, [], [b"no sketch"])


def test_sketches_of_different_sizes_are_united_only_if_they_may_be_mixed() -> None:
    of_size = {size: combined(accumulator("HllSketchAgg", pa.int64(), size=size), [], range(999)) for size in (8, 10)}
    with pytest.raises(AggregateFailedError, match="sizes 10 and 8; its argument allowDifferentLgConfigK"):
        combined(accumulator("HllUnionAgg", pa.binary(), mixed=False), [of_size[10]], [of_size[8]])
    united = combined(accumulator("HllUnionAgg", pa.binary(), mixed=True), [of_size[10]], [of_size[8]])
    assert datasketches.hll_sketch.deserialize(united).lg_config_k == 8


def test_union_and_intersection_of_no_sketches_are_empty_as_in_spark() -> None:
    nothing = [pa.nulls(1, pa.binary())]
    [empty] = accumulator("HllUnionAgg", pa.binary(), mixed=False).result(nothing).to_pylist()
    assert datasketches.hll_sketch.deserialize(empty).is_empty()
    [empty] = accumulator("ThetaIntersectionAgg", pa.binary()).result(nothing).to_pylist()
    assert empty == bytes.fromhex("01030300001E0000")


def test_sketches_are_refused_where_their_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketches, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedExpressionError, match=r"HllUnion: .*pip install 'ckpt-runtime\[sketches\]'"):
        sketches.sketch_library("HllUnion")
