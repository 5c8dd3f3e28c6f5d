"""The table of Spark's aggregate functions that the engine computes over groups, and the argument types of each.

Result types are Spark's. ``operators/aggregates`` has the accumulator of each entry, by the entry's ``accumulator``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

Types = tuple[pa.DataType, ...]


@dataclass(frozen=True, slots=True)
class GroupAggregate:
    """One aggregate of a grouping.

    ``function`` is the name of Spark's class, ``columns`` are its arguments, ``name`` is unique within the grouping and
    does not change when other aggregates are added or removed, since state is kept under it. With ``filtered`` the last
    column is a condition; rows for which it is not true do not count.
    """

    function: str
    columns: tuple[str, ...]
    name: str
    result: pa.DataType
    ansi: bool = True
    filtered: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AggregateFunction:
    """``accepts`` decides whether it takes arguments of these types; ``sentence`` describes its result."""

    accumulator: str
    accepts: Callable[[Types], bool]
    sentence: str


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _is_plain(kind: pa.DataType) -> bool:
    """Whether Arrow's kernels can order and distinguish values of the type."""
    tests = (pa.types.is_boolean, pa.types.is_temporal, pa.types.is_string, pa.types.is_binary, pa.types.is_null)
    return _is_number(kind) or any(test(kind) for test in tests)


def _is_ordered(kind: pa.DataType) -> bool:
    """Whether Spark, and therefore the engine, orders values of the type; false for maps."""
    if pa.types.is_struct(kind):
        return all(_is_ordered(field.type) for field in kind)
    return _is_ordered(kind.value_type) if pa.types.is_list(kind) else _is_plain(kind)


def _has_floats(kind: pa.DataType) -> bool:
    if pa.types.is_nested(kind):
        return any(_has_floats(kind.field(at).type) for at in range(kind.num_fields))
    return bool(pa.types.is_floating(kind))


def _first_is(*tests: Callable[[pa.DataType], bool]) -> Callable[[Types], bool]:
    return lambda types: any(test(types[0]) for test in tests)


_summed = _first_is(_is_number, pa.types.is_duration)
_ordered = _first_is(_is_ordered)
_texts = _first_is(pa.types.is_string, pa.types.is_binary)
_integers = _first_is(pa.types.is_integer)
_binaries = _first_is(pa.types.is_binary)
_booleans = _first_is(pa.types.is_boolean)
_hashed_by_hll = _first_is(pa.types.is_integer, pa.types.is_string)
_hashed_by_theta = _first_is(pa.types.is_integer, pa.types.is_floating, pa.types.is_string)
_numbers_of_64_bits = _first_is(pa.types.is_integer, pa.types.is_floating)


def _anything(_: Types) -> bool:
    return True


def _collected(types: Types) -> bool:
    """Inside of structs and arrays, Spark distinguishes 0.0 and -0.0."""
    return _is_plain(types[0]) or (_is_ordered(types[0]) and not _has_floats(types[0]))


def _listed_texts(types: Types) -> bool:
    """Accepts also structs of a text and its sort key."""
    kind = types[0]
    if not pa.types.is_struct(kind):
        return _texts(types)
    return _texts((kind.field(0).type,)) and all(_is_ordered(each.type) for each in kind)


def _weighted_numbers(types: Types) -> bool:
    """Accepts also durations, and structs of a number and its frequency."""
    kind = types[0]
    if not pa.types.is_struct(kind):
        return _numbers_of_64_bits(types) or bool(pa.types.is_duration(kind))
    return _numbers_of_64_bits((kind.field(0).type,)) and bool(pa.types.is_integer(kind.field(1).type))


def _vectors(types: Types) -> bool:
    kind = types[0]
    return bool(pa.types.is_list(kind) and pa.types.is_float32(kind.value_type))


def _ordered_by(types: Types) -> bool:
    return _is_ordered(types[1])


def _doubles(types: Types) -> bool:
    return all(pa.types.is_float64(kind) for kind in types)


def _ranked(types: Types) -> bool:
    kind = types[0]
    if pa.types.is_decimal(kind):
        return bool(kind.precision <= 15)  # a double has no more digits
    return _numbers_of_64_bits(types) or any(
        test(kind) for test in (pa.types.is_timestamp, pa.types.is_date, pa.types.is_duration)
    )


_F = AggregateFunction
AGGREGATES: Mapping[str, AggregateFunction] = {
    "Count": _F("count", _anything, "the number of rows in which no argument is null"),
    "CountIf": _F("count_if", _booleans, "the number of rows for which the condition is true"),
    "Sum": _F("sum", _summed, "the sum"),
    "Average": _F("average", _summed, "the mean"),
    "Min": _F("extreme", _ordered, "the least value"),
    "Max": _F("extreme", _ordered, "the greatest value"),
    "BoolAnd": _F("extreme", _booleans, "whether all values are true"),
    "BoolOr": _F("extreme", _booleans, "whether some value is true"),
    "First": _F("picked", _anything, "the value that came first"),
    "Last": _F("picked", _anything, "the value that came last"),
    "AnyValue": _F("picked", _anything, "the value that came first"),
    "MinBy": _F("picked_by", _ordered_by, "the value beside the least value of another column"),
    "MaxBy": _F("picked_by", _ordered_by, "the value beside the greatest value of another column"),
    "MaxMinByK": _F("picked_several", _ordered_by, "the values beside the greatest or least ones of another column"),
    "Product": _F("product", _doubles, "the product"),
    "BitAndAgg": _F("bits", _integers, "the bits that all values have"),
    "BitOrAgg": _F("bits", _integers, "the bits that some value has"),
    "BitXorAgg": _F("bits", _integers, "the bits that an odd number of values have"),
    "BitmapConstructAgg": _F("bitmap", _integers, "a bitmap of 32,768 bits with those at the given positions"),
    "BitmapOrAgg": _F("bitmap", _binaries, "the bits that some bitmap has"),
    "BitmapAndAgg": _F("bitmap", _binaries, "the bits that all bitmaps have"),
    "StddevSamp": _F("moments", _doubles, "the standard deviation of a sample"),
    "StddevPop": _F("moments", _doubles, "the standard deviation of all values"),
    "VarianceSamp": _F("moments", _doubles, "the variance of a sample"),
    "VariancePop": _F("moments", _doubles, "the variance of all values"),
    "Skewness": _F("moments", _doubles, "the skewness"),
    "Kurtosis": _F("moments", _doubles, "the excess kurtosis"),
    "CovPopulation": _F("comoments", _doubles, "the covariance of all pairs"),
    "CovSample": _F("comoments", _doubles, "the covariance of a sample of pairs"),
    "Corr": _F("comoments", _doubles, "Pearson's correlation"),
    "RegrReplacement": _F("moments", _doubles, "the sum of the squared deviations from the mean"),
    "RegrSXY": _F("comoments", _doubles, "the sum of the products of both deviations from the mean"),
    "RegrSlope": _F("comoments", _doubles, "the slope of the line that fits pairs best"),
    "RegrIntercept": _F("comoments", _doubles, "where that line crosses zero"),
    "RegrR2": _F("comoments", _doubles, "the share of the variance that the line explains"),
    "ListAgg": _F("concatenated", _listed_texts, "all texts that are not null, with a separator between them"),
    "CollectList": _F("list", _anything, "all values that are not null, in the order in which they came"),
    "CollectSet": _F("set", _collected, "the distinct values that are not null, in the order in which they came"),
    "CountDistinct": _F("set", _ordered, "the number of distinct values that are not null"),
    "HyperLogLogPlusPlus": _F("registers", _anything, "Spark's estimate of the number of distinct values"),
    "Percentile": _F("percentile", _weighted_numbers, "the exact percentile, interpolated between neighbours"),
    "PercentileDisc": _F(
        "percentile", _numbers_of_64_bits, "the first value in order that the given share of values does not exceed"
    ),
    "Median": _F("percentile", _weighted_numbers, "the exact percentile 0.5"),
    "ApproximatePercentile": _F("ranked", _ranked, "the least value that the given share of values does not exceed"),
    "Mode": _F("mode", _collected, "the most frequent value"),
    "HllSketchAgg": _F("hll", _hashed_by_hll, "a HyperLogLog sketch of all values"),
    "HllUnionAgg": _F("hll", _binaries, "the union of HyperLogLog sketches"),
    "ThetaSketchAgg": _F("theta", _hashed_by_theta, "a theta sketch of all values"),
    "ThetaUnionAgg": _F("theta", _binaries, "the union of theta sketches"),
    "ThetaIntersectionAgg": _F("theta", _binaries, "the intersection of theta sketches"),
    "KllSketchAggBigint": _F("kll", _integers, "a KLL sketch of integers"),
    "KllSketchAggFloat": _F("kll", _numbers_of_64_bits, "a KLL sketch of floats"),
    "KllSketchAggDouble": _F("kll", _numbers_of_64_bits, "a KLL sketch of doubles"),
    "KllMergeAggBigint": _F("kll", _binaries, "KLL sketches of integers as one"),
    "KllMergeAggFloat": _F("kll", _binaries, "KLL sketches of floats as one"),
    "KllMergeAggDouble": _F("kll", _binaries, "KLL sketches of doubles as one"),
    "HistogramNumeric": _F("histogram", _numbers_of_64_bits, "bins, each with the mean and the number of its values"),
    "VectorSum": _F("vectors", _vectors, "the sum of vectors, element by element"),
    "VectorAvg": _F("vectors", _vectors, "the mean of vectors, element by element"),
}
"""The functions by the name of Spark's class. ``CountDistinct`` stands for a count with DISTINCT. Of other functions
with DISTINCT the setting ``distinct`` is true; their argument is one that can be ordered."""


def accepts(function: str, types: Types, *, distinct: bool) -> bool:
    """Whether the engine computes an aggregate of the table over arguments of these types."""
    return AGGREGATES[function].accepts(types) and (not distinct or (len(types) == 1 and _collected(types)))
