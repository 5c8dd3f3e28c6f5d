"""Aggregates: SQL's nulls, overflow, extremes of strings, growth, evolution and what does not evolve."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ckpt_runtime.graph.output_schemas import aggregate_type
from ckpt_runtime.graph.specs import Aggregate
from ckpt_runtime.state.errors import AggregateOverflowError, StateSchemaError
from ckpt_runtime.state.states import AggregateColumn
from tests.support.held_memory import bytes_held
from tests.unit.runtime.state.conftest import Snapshots


def column(function: str, name: str | None, alias: str, kind: pa.DataType | None) -> AggregateColumn:
    schema = pa.schema([] if name is None else [(name, kind)])
    return AggregateColumn(function, name, alias, kind, aggregate_type(schema, Aggregate(function, name, alias)))


def columns_of(kind: pa.DataType, *functions: str) -> list[AggregateColumn]:
    return [column(function, "v", function, kind) for function in functions]


def run(table: Any, batch: pa.RecordBatch) -> list[list[Any]]:
    return [array.to_pylist() for array in table.update(batch)]


def test_nulls_are_ignored_and_nothing_sums_to_null(all_snapshots: Snapshots, int_key: pa.Schema) -> None:
    wanted = [column("count", None, "all", None), *columns_of(pa.int32(), "count", "sum", "min", "max", "avg")]
    table = all_snapshots.backend().aggregate_table("a", int_key, wanted)
    batch = pa.record_batch({"k": pa.array([1, 1, None, 1, None]), "v": pa.array([None, 5, 2, -1, None], pa.int32())})
    assert run(table, batch) == [
        [1, 2, 1, 3, 2],
        [0, 1, 1, 2, 1],
        [None, 5, 2, 4, 2],
        [None, 5, 2, -1, 2],
        [None, 5, 2, 5, 2],
        [None, 5.0, 2.0, 2.0, 2.0],
    ]


def test_overflow_is_an_error_that_names_the_column(all_snapshots: Snapshots, int_key: pa.Schema) -> None:
    table = all_snapshots.backend().aggregate_table("a", int_key, columns_of(pa.int64(), "sum"))
    with pytest.raises(AggregateOverflowError, match=r"column 'v' .*when adding 1 to 9223372036854775807"):
        table.update(pa.record_batch({"k": [1, 1], "v": [2**63 - 1, 1]}))


def test_size_in_memory_grows_with_keys_and_with_the_texts_of_extremes(
    all_snapshots: Snapshots, int_key: pa.Schema
) -> None:
    table = all_snapshots.backend().aggregate_table("a", int_key, columns_of(pa.string(), "max"))
    table.update(pa.record_batch({"k": [1], "v": ["a"]}))
    before = table.nbytes
    table.update(pa.record_batch({"k": pa.array(range(5_000)), "v": ["x" * 100] * 5_000}))
    assert table.nbytes > before + 5_000 * 100


def test_nan_is_the_greatest_float(all_snapshots: Snapshots, int_key: pa.Schema) -> None:
    table = all_snapshots.backend().aggregate_table("a", int_key, columns_of(pa.float64(), "min", "max"))
    least, greatest = run(table, pa.record_batch({"k": [1, 1, 1], "v": [float("nan"), 3.0, 4.0]}))
    assert least[1:] == [3.0, 3.0]
    assert all(math.isnan(value) for value in greatest)


def test_extremes_keep_their_type(all_snapshots: Snapshots, int_key: pa.Schema) -> None:
    for kind, values in [
        (pa.uint64(), [2**63 + 5, 3]),
        (pa.bool_(), [True, False]),
        (pa.date32(), [20_000, 10_000]),
        (pa.timestamp("ms", "UTC"), [5, 3]),
        (pa.float32(), [2.5, -1.5]),
        (pa.string(), ["b", "ab"]),
        (pa.large_binary(), [b"b", b""]),
    ]:
        table = all_snapshots.backend().aggregate_table("a", int_key, columns_of(kind, "min", "max"))
        batch = pa.record_batch({"k": [1, 1], "v": pa.array(values, kind)})
        least, greatest = table.update(batch)
        assert least.type == greatest.type == kind
        assert least.to_pylist() == batch["v"].to_pylist()
        assert greatest.to_pylist() == [batch["v"].to_pylist()[0]] * 2


def test_string_arena_is_compacted(snapshots: Snapshots, int_key: pa.Schema) -> None:
    table = snapshots.backend().aggregate_table("a", int_key, columns_of(pa.string(), "max"))
    frozen = None
    for round_ in range(60):
        values = [f"{round_:03d}" + "x" * 200 for _ in range(50)]
        (result,) = run(table, pa.record_batch({"k": list(range(50)), "v": values}))
        assert result == values
        if round_ == 20:
            frozen = snapshots.backend, table.freeze()
    assert bytes_held(table) < 1_000_000
    assert frozen is not None


def test_thousands_of_new_keys_grow_every_array(all_snapshots: Snapshots) -> None:
    for key in (pa.schema([("k", pa.int64())]), pa.schema([("k", pa.string())])):
        table = all_snapshots.backend().aggregate_table("a", key, columns_of(pa.int64(), "sum", "count"))
        numbers = np.arange(30_000)
        for start in range(0, 30_000, 5_000):
            part = pa.array(numbers[start : start + 5_000])
            table.update(pa.record_batch({"k": part.cast(key.field(0).type), "v": part}))
        sums, counts = table.update(pa.record_batch({"k": pa.array(numbers).cast(key.field(0).type), "v": numbers}))
        assert sums.to_pylist() == (2 * numbers).tolist()
        assert set(counts.to_pylist()) == {2}


COMPOSITE = pa.schema(
    [("a", pa.string()), ("b", pa.float64()), ("c", pa.decimal128(12, 3)), ("d", pa.bool_()), ("e", pa.binary(3))]
)


def composite_batch() -> pa.RecordBatch:
    return pa.record_batch(
        {
            "a": pa.array(["x", None, "", "x", "xy"]),
            "b": pa.array([0.0, float("nan"), None, -0.0, 1.5]),
            "c": pa.array(["1.5", None, "-2", "1.500", "0"]).cast(pa.decimal128(12, 3)),
            "d": pa.array([True, None, False, True, True]),
            "e": pa.array([b"abc", None, b"\0\0\0", b"abc", b"zzz"], pa.binary(3)),
            "v": [1, 2, 3, 4, 5],
        }
    )


def test_composite_keys_survive_a_snapshot(all_snapshots: Snapshots) -> None:
    wanted = columns_of(pa.int64(), "sum")
    backend = all_snapshots.backend()
    table = backend.aggregate_table("a", COMPOSITE, wanted)
    assert run(table, composite_batch()) == [[1, 2, 3, 5, 5]]
    again = all_snapshots.restored(all_snapshots.of(backend)).aggregate_table("a", COMPOSITE, wanted)
    assert run(again, composite_batch()) == [[6, 4, 6, 10, 10]]


def test_added_aggregates_start_neutral_and_removed_ones_go(all_snapshots: Snapshots, int_key: pa.Schema) -> None:
    backend = all_snapshots.backend()
    old = backend.aggregate_table("a", int_key, columns_of(pa.int64(), "sum", "max", "avg"))
    batch = pa.record_batch({"k": [1, 2], "v": [10, 20]})
    old.update(batch)
    new = all_snapshots.restored(all_snapshots.of(backend)).aggregate_table(
        "a", int_key, columns_of(pa.int64(), "count", "avg", "sum")
    )
    assert run(new, batch) == [[1, 1], [10.0, 20.0], [20, 40]]


def test_a_sum_learns_of_nulls_when_the_first_one_comes(all_snapshots: Snapshots, int_key: pa.Schema) -> None:
    for kind in (pa.int64(), pa.float64()):
        backend = all_snapshots.backend()
        table = backend.aggregate_table("a", int_key, columns_of(kind, "sum"))
        run(table, pa.record_batch({"k": [1, 2], "v": pa.array([10, 20], kind)}))
        batch = pa.record_batch({"k": [1, 3, 3], "v": pa.array([None, None, 5], kind)})
        assert run(table, batch) == [[10, None, 5]]
        run(table, pa.record_batch({"k": [4], "v": pa.array([1], kind)}))
        unknown = pa.record_batch({"k": [1, 2, 3, 4, 5], "v": pa.nulls(5, kind)})
        assert run(table, unknown) == [[10, 20, 5, 1, None]]
        again = all_snapshots.restored(all_snapshots.of(backend)).aggregate_table("a", int_key, columns_of(kind, "sum"))
        assert run(again, unknown) == [[10, 20, 5, 1, None]]


def test_a_sum_added_to_known_keys_is_null_until_their_next_value(all_snapshots: Snapshots, int_key: pa.Schema) -> None:
    backend = all_snapshots.backend()
    backend.aggregate_table("a", int_key, columns_of(pa.int64(), "count")).update(
        pa.record_batch({"k": [1, 2], "v": [10, 20]})
    )
    added = columns_of(pa.int64(), "count", "sum")
    table = all_snapshots.restored(all_snapshots.of(backend)).aggregate_table("a", int_key, added)
    assert run(table, pa.record_batch({"k": [1, 2], "v": pa.array([7, None])})) == [[2, 1], [7, None]]


def test_changed_meaning_or_key_is_refused(all_snapshots: Snapshots, int_key: pa.Schema) -> None:
    backend = all_snapshots.backend()
    backend.aggregate_table("a", int_key, columns_of(pa.int64(), "sum")).update(pa.record_batch({"k": [1], "v": [1]}))
    sources = all_snapshots.of(backend)
    with pytest.raises(StateSchemaError, match=r"state 'a' of operator 'op': aggregate 'sum' changed its meaning"):
        all_snapshots.restored(sources).aggregate_table("a", int_key, columns_of(pa.float64(), "sum"))
    with pytest.raises(StateSchemaError, match=r"key changed; it has \[k: int64\], but \[k: string\] was requested"):
        all_snapshots.restored(sources).aggregate_table(
            "a", pa.schema([("k", pa.string())]), columns_of(pa.int64(), "sum")
        )
    with pytest.raises(StateSchemaError, match="another kind"):
        all_snapshots.restored(sources).value_state("a", int_key, int_key)


def test_same_name_gives_the_same_table(all_snapshots: Snapshots, int_key: pa.Schema) -> None:
    backend = all_snapshots.backend()
    wanted = columns_of(pa.int64(), "sum")
    assert backend.aggregate_table("a", int_key, wanted) is backend.aggregate_table("a", int_key, wanted)
    with pytest.raises(StateSchemaError, match="in use for something else"):
        backend.aggregate_table("a", int_key, columns_of(pa.int64(), "max"))
