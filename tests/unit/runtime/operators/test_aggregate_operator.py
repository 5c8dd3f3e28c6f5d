"""The aggregate operator: one row out for each row in, restored state, derived schema."""

from __future__ import annotations

import pyarrow as pa
import pytest

from ckpt_runtime.graph.output_schemas import SchemaDerivationError, aggregate_output_schema
from ckpt_runtime.graph.specs import Aggregate, AggregateSpec
from ckpt_runtime.operators.aggregate import AggregateOperator
from tests.unit.runtime.operators.conftest import Harness

SPEC = AggregateSpec(
    ("k",), (Aggregate("count", None, "n"), Aggregate("sum", "v", "total"), Aggregate("avg", "v", "a"))
)
BATCH = pa.record_batch({"k": ["a", "b", "a"], "v": pa.array([1, 2, 3], pa.int32())})


def test_every_row_gives_its_running_values(harness: type[Harness]) -> None:
    run = harness(AggregateOperator(SPEC))
    assert run.process(BATCH) == [
        {"k": "a", "n": 1, "total": 1, "a": 1.0},
        {"k": "b", "n": 1, "total": 2, "a": 2.0},
        {"k": "a", "n": 2, "total": 4, "a": 2.0},
    ]
    assert run.batches[0].schema.equals(aggregate_output_schema(BATCH.schema, SPEC))


@pytest.mark.parametrize("given", [True, False])
def test_state_is_restored_with_or_without_the_input_schema(harness: type[Harness], given: bool) -> None:
    run = harness(AggregateOperator(SPEC))
    run.process(BATCH)
    again = harness(AggregateOperator(SPEC, BATCH.schema if given else None), run.snapshot())
    third = harness(AggregateOperator(SPEC), again.snapshot())
    assert third.process(BATCH)[0] == {"k": "a", "n": 3, "total": 5, "a": 5 / 3}


def test_dictionary_keys_come_out_as_they_came_in(harness: type[Harness]) -> None:
    run = harness(AggregateOperator(SPEC))
    encoded = pa.record_batch({"k": BATCH["k"].dictionary_encode(), "v": BATCH["v"]})
    run.process(BATCH)
    again = harness(AggregateOperator(SPEC, encoded.schema), run.snapshot())
    assert again.process(encoded)[2]["n"] == 4
    assert again.batches[0].schema.field("k").type == encoded.schema.field("k").type


@pytest.mark.parametrize(
    ("aggregate", "text"),
    [
        (Aggregate("median", "v", "x"), "function 'median' is unknown"),
        (Aggregate("sum", None, "x"), "sum needs a column"),
        (Aggregate("sum", "k", "x"), "sum of column 'k' with type string is not supported"),
        (Aggregate("sum", "nope", "x"), "'nope' is missing"),
        (Aggregate("sum", "v", "k"), r"more than once: \['k'\]"),
        (Aggregate("avg", "k", "x"), "avg of column 'k'"),
    ],
)
def test_specs_that_do_not_fit_are_refused(aggregate: Aggregate, text: str) -> None:
    with pytest.raises(SchemaDerivationError, match=text):
        aggregate_output_schema(BATCH.schema, AggregateSpec(("k",), (aggregate,)))


def test_large_unsigned_sums_and_decimals_are_refused() -> None:
    for kind in (pa.uint64(), pa.decimal128(10, 2)):
        with pytest.raises(SchemaDerivationError, match="sum of column 'v'"):
            aggregate_output_schema(
                pa.schema([("k", pa.int64()), ("v", kind)]), AggregateSpec(("k",), (Aggregate("sum", "v", "s"),))
            )
