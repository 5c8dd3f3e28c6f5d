"""Rows that are aggregated in front of the shuffle: their groups, their pauses, and the results behind it."""

from __future__ import annotations

import random
from datetime import timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ckpt_runtime.graph.aggregates import AGGREGATES, GroupAggregate
from ckpt_runtime.graph.specs import GroupSpec
from ckpt_runtime.operators.errors import OutputSchemaError
from ckpt_runtime.operators.groups import PARTIAL_ROWS, Combiner, GroupAggregates
from ckpt_runtime.state.hashing import hash_columns
from tests.support.groups import TIME, GroupJob, aggregate

INT = pa.int64()
COUNT, SUM = aggregate("Count", result=INT), aggregate("Sum", "v", result=INT)
ROWS = pa.schema([("k", pa.string()), ("v", INT)])
SPEC = GroupSpec(ROWS, ("k",), (COUNT, SUM), "append", None)


def of_keys(kind: pa.DataType, keys: list[Any], *aggregates: GroupAggregate) -> tuple[GroupSpec, pa.RecordBatch]:
    schema = pa.schema([("k", kind), ("v", INT)])
    batch = pa.RecordBatch.from_arrays([pa.array(keys, kind), pa.array(range(len(keys)), INT)], schema=schema)
    return GroupSpec(schema, ("k",), aggregates or (COUNT, SUM), "update"), batch


def test_batch_becomes_one_row_per_key_with_its_stored_columns_and_number_of_rows() -> None:
    batch = pa.RecordBatch.from_pylist([{"k": k, "v": v} for k, v in zip("abab" * 2, range(8), strict=True)], ROWS)
    combined = Combiner(SPEC).combined(batch.slice(1))
    assert combined.to_pylist() == [
        {"k": "b", "Count()": 4, "Sum(v)": 1 + 3 + 5 + 7, PARTIAL_ROWS: 4},
        {"k": "a", "Count()": 3, "Sum(v)": 2 + 4 + 6, PARTIAL_ROWS: 3},
    ]


@pytest.mark.parametrize(
    ("kind", "keys", "groups"),
    [
        (pa.int32(), [1, None, 1, None, 1, 1], 2),
        (pa.float64(), [0.0, -0.0, float("nan"), float("nan"), 0.0, float("nan")], 2),
        (pa.string(), ["", None, "", None, "", None], 2),
        (pa.string(), ["long enough for words"] * 6, 1),
        (pa.decimal128(20, 2), [Decimal("1.50")] * 3 + [None] * 3, 2),
        (pa.bool_(), [True, False] * 3, 2),
        (TIME, [5, 5, 5, 7, 7, None], 3),
        (pa.dictionary(pa.int32(), pa.string()), ["a", "b", "a", None, "b", "a"], 3),
    ],
)
def test_keys_of_every_type_are_grouped_as_the_operator_groups_them(
    kind: pa.DataType, keys: list[Any], groups: int
) -> None:
    spec, batch = of_keys(kind, keys)
    combined = Combiner(spec).combined(batch)
    assert combined.num_rows == groups
    assert sum(combined.column("Count()").to_pylist()) == 6
    assert sum(combined.column("Sum(v)").to_pylist()) == 15


def test_keys_that_share_a_hash_stay_apart() -> None:
    mask = (1 << 64) - 1

    def unmixed(word: int) -> int:  # the inverse of the finaliser, so that an integer gets the hash of null
        word ^= word >> 31 ^ word >> 62
        word = word * pow(0x94D049BB133111EB, -1, 1 << 64) & mask
        word ^= word >> 27 ^ word >> 54
        word = word * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & mask
        return word ^ word >> 30 ^ word >> 60

    same = unmixed(0xD6E8FEB86659FD93) - 0x9E3779B97F4A7C15 & mask
    same -= (1 << 64) if same >> 63 else 0
    spec, batch = of_keys(INT, [same, None] * 4)
    assert len(np.unique(hash_columns(batch, ["k"]))) == 1
    combined = Combiner(spec).combined(batch)
    assert combined is batch


def test_batches_with_many_keys_are_not_combined_and_attempts_pause_ever_longer() -> None:
    many = pa.RecordBatch.from_pylist([{"k": str(at), "v": at} for at in range(100)], ROWS)
    few = pa.RecordBatch.from_pylist([{"k": "a", "v": at} for at in range(100)], ROWS)
    combiner = Combiner(SPEC)
    assert combiner.combined(many) is many
    assert combiner.combined(few) is few  # one batch of pause
    assert combiner.combined(few).num_rows == 1
    assert combiner.combined(many) is many
    assert combiner.combined(many) is many
    assert combiner.combined(many) is many  # the second failed attempt
    assert [combiner.combined(few).num_rows for _ in range(4)] == [100, 100, 100, 1]


def test_batches_that_are_not_combined_have_no_dictionaries() -> None:
    schema = pa.schema([("k", pa.dictionary(pa.int32(), pa.string())), ("v", INT)])
    batch = pa.RecordBatch.from_pylist([{"k": str(at), "v": at} for at in range(4)], schema)
    assert Combiner(SPEC).combined(batch).schema == ROWS


COMBINED = {
    "Count",
    "CountIf",
    "Sum",
    "Average",
    "Min",
    "Max",
    "BoolAnd",
    "BoolOr",
    "BitAndAgg",
    "BitOrAgg",
    "BitXorAgg",
    "HyperLogLogPlusPlus",
}
OF_PAIRS = ("MinBy", "MaxBy", "MaxMinByK", "CovPopulation", "CovSample", "Corr")
ARGUMENTS = {"CountIf": pa.bool_(), "BoolAnd": pa.bool_(), "BoolOr": pa.bool_()}


def test_aggregates_whose_result_depends_on_the_order_of_rows_are_not_combined() -> None:
    settings = {"size": 8, "bins": 2, "precision": 4, "tables": {"thresholds": [], "estimates": [], "biases": []}}
    for function in AGGREGATES:
        for kind in (pa.float64(), ARGUMENTS.get(function, INT)):
            schema = pa.schema([("k", INT), ("a", kind), ("b", kind)])
            columns = ("a", "b") if function in OF_PAIRS else ("a",)
            one = aggregate(function, *columns, result=kind, settings=settings)
            floats = pa.types.is_floating(kind) and function in ("Sum", "Average")
            combines = Combiner.combines(GroupSpec(schema, ("k",), (one,), "update"))
            assert combines is (function in COMBINED and not floats), (function, kind)
    session = GroupSpec(ROWS, ("k",), (COUNT,), "append", session=("k", "v"))
    assert not Combiner.combines(session)


def test_rows_with_a_key_of_the_name_that_marks_partial_rows_are_not_combined() -> None:
    schema = pa.schema([("k", pa.string()), (PARTIAL_ROWS, INT)])
    spec = GroupSpec(schema, ("k", PARTIAL_ROWS), (COUNT,), "update")
    assert not Combiner.combines(spec)
    job = GroupJob(spec)
    for rows in (1, 2):
        assert job.process({"k": "a", PARTIAL_ROWS: 7}) == [{"k": "a", PARTIAL_ROWS: 7, "Count()": rows}]


TYPED = pa.schema(
    [
        ("k", pa.string()),
        ("i", INT),
        ("d", pa.decimal128(10, 2)),
        ("s", pa.string()),
        ("b", pa.bool_()),
        ("f", pa.bool_()),
        ("t", pa.duration("us")),
    ]
)
DECIMAL = pa.decimal128(20, 2)
ALL = (
    COUNT,
    aggregate("Count", "i", "s", result=INT),
    aggregate("CountIf", "b", result=INT),
    aggregate("Sum", "i", result=INT),
    aggregate("Sum", "d", result=DECIMAL),
    aggregate("Average", "i", result=pa.float64()),
    aggregate("Average", "d", result=pa.decimal128(14, 6)),
    *(aggregate(function, "t", result=pa.duration("us")) for function in ("Sum", "Average")),
    *(aggregate(function, name, result=TYPED.field(name).type) for function in ("Min", "Max") for name in "ids"),
    *(aggregate(function, "b", result=pa.bool_()) for function in ("BoolAnd", "BoolOr")),
    *(aggregate(function, "i", result=INT) for function in ("BitAndAgg", "BitOrAgg", "BitXorAgg")),
    GroupAggregate("Sum", ("i", "f"), "filtered", INT, filtered=True),
)


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_results_are_the_same_whether_batches_are_combined_or_not(backend: str) -> None:
    spec = GroupSpec(TYPED, ("k",), ALL, "complete")
    assert Combiner.combines(spec)
    chosen = random.Random(29)

    def maybe(value: Any) -> Any:
        return None if chosen.random() < 0.2 else value

    jobs = [GroupJob(spec, 2, backend, combines=combines) for combines in (True, False)]
    results: list[dict[Any, Any]] = [{}, {}]
    for step in range(8):
        rows = [
            {
                "k": maybe(str(chosen.randrange(6))),
                "i": maybe(chosen.randrange(-1000, 1000)),
                "d": maybe(Decimal(chosen.randrange(-99999, 99999)).scaleb(-2)),
                "s": maybe(str(chosen.randrange(1000))),
                "b": maybe(chosen.random() < 0.5),
                "f": maybe(chosen.random() < 0.5),
                "t": maybe(timedelta(microseconds=chosen.randrange(-99, 99))),
            }
            for _ in range(40)
        ]
        for job, result in zip(jobs, results, strict=True):
            result.update({row["k"]: row for row in job.process(*rows) + job.checkpoint()})
            if step % 3 == 2:
                job.restart(3 - step // 3)
    assert results[0] == results[1]
    assert len(results[0]) == 7
    for job in jobs:
        job.close()


def test_rows_and_partial_rows_that_take_turns_are_added_together() -> None:
    job = GroupJob(GroupSpec(ROWS, ("k",), (COUNT, SUM), "append", None), combines=False)
    batch = pa.RecordBatch.from_pylist([{"k": k, "v": v} for k, v in zip("abab", range(4), strict=True)], ROWS)
    operator = job.subtasks[0].operator
    for _ in range(3):
        operator.process_batch(batch, 0)
        operator.process_batch(Combiner(SPEC).combined(batch), 0)
    job.checkpoint()
    [stored] = operator._buffer.stored()
    assert operator.rows_updated == 4  # two groups, by rows and by partial rows
    assert sorted(stored.select(["k", "Count()", "Sum(v)"]).to_pylist(), key=str) == [
        {"k": "a", "Count()": 12, "Sum(v)": 12},
        {"k": "b", "Count()": 12, "Sum(v)": 24},
    ]


def test_late_rows_are_counted_one_by_one_when_they_come_combined() -> None:
    schema = pa.schema([("end", TIME), ("v", INT)])
    job = GroupJob(GroupSpec(schema, ("end",), (COUNT, SUM), "append", "end"))
    job.watermark(10)
    batch = pa.RecordBatch.from_pylist([{"end": end, "v": 1} for end in (5_000, 5_000, 5_000, 20_000)], schema)
    combined = Combiner(job.spec).combined(batch)
    assert combined.num_rows == 2
    job.subtasks[0].operator.process_batch(combined, 0)
    assert job.late == 3
    assert [list(row.values())[1:] for row in job.watermark(20)] == [[1, 1]]


def test_partial_rows_in_flight_lack_aggregates_that_were_added_and_have_those_that_were_removed() -> None:
    batch = pa.RecordBatch.from_pylist([{"k": "a", "v": 3}, {"k": "a", "v": 4}], ROWS)
    in_flight = Combiner(SPEC).combined(batch)
    changed = GroupSpec(ROWS, ("k",), (SUM, aggregate("Max", "v", result=INT)), "update")
    assert GroupAggregates(changed).takes_partial(in_flight.schema)
    job = GroupJob(changed, combines=False)
    job.subtasks[0].operator.process_batch(in_flight, 0)
    assert job.process({"k": "a", "v": 5})[-1] == {"k": "a", "Sum(v)": 12, "Max(v)": 5}


def test_partial_rows_of_other_keys_or_types_are_refused() -> None:
    batch = pa.RecordBatch.from_pylist([{"k": "a", "v": 3}], ROWS)
    in_flight = Combiner(SPEC).combined(batch)
    schema = pa.schema([("k", INT), ("v", INT)])
    for changed in (GroupSpec(schema, ("k",), (SUM,), "update"), GroupSpec(schema, ("v", "k"), (SUM,), "update")):
        assert not GroupAggregates(changed).takes_partial(in_flight.schema)
        job = GroupJob(changed)
        with pytest.raises(OutputSchemaError):
            job.subtasks[0].operator.process_batch(in_flight, 0)
        job.close()
