"""The accumulator of each entry of the table of aggregate functions."""

from __future__ import annotations

import pyarrow as pa

from ckpt_runtime.graph.aggregates import AGGREGATES, GroupAggregate
from ckpt_runtime.operators.aggregates.accumulator import GroupAccumulator
from ckpt_runtime.operators.aggregates.numbers import Average, Bits, Count, CountIf, Extreme, Product, Sum
from ckpt_runtime.operators.aggregates.registers import ApproximateDistinct
from ckpt_runtime.operators.aggregates.statistics import Comoments, Moments
from ckpt_runtime.operators.aggregates.values import (
    Concatenated,
    Distinct,
    FirstOrLastAccumulator,
    Listed,
    MinMaxByAccumulator,
    MostFrequent,
    OfDistinct,
    Percentiles,
    Ranked,
)
from ckpt_runtime.state.columns import decoded_type

ACCUMULATORS: dict[str, type[GroupAccumulator]] = {
    "count": Count,
    "count_if": CountIf,
    "sum": Sum,
    "average": Average,
    "extreme": Extreme,
    "picked": FirstOrLastAccumulator,
    "picked_by": MinMaxByAccumulator,
    "product": Product,
    "bits": Bits,
    "moments": Moments,
    "comoments": Comoments,
    "list": Listed,
    "concatenated": Concatenated,
    "set": Distinct,
    "registers": ApproximateDistinct,
    "percentile": Percentiles,
    "ranked": Ranked,
    "mode": MostFrequent,
}


def accumulator_for(aggregate: GroupAggregate, schema: pa.Schema) -> GroupAccumulator:
    """Returns the accumulator of an aggregate over rows of this schema."""
    arguments = aggregate.columns[:-1] if aggregate.filtered else aggregate.columns
    inputs = [decoded_type(schema.field(name).type) for name in arguments]
    accumulator = ACCUMULATORS[AGGREGATES[aggregate.function].accumulator](aggregate, inputs)
    return OfDistinct(accumulator) if aggregate.settings.get("distinct") else accumulator
