"""Aggregates whose state is one number or a few for each group: counts, sums, means, extremes, products, bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import ROUND_HALF_UP, Context, Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.graph.aggregates import GroupAggregate
from ckpt_runtime.operators.aggregates.accumulator import (
    AggregateFailedError,
    GroupAccumulator,
    Rows,
    array_of,
    floats,
    integers,
    joined,
    ranks,
    taken,
)
from ckpt_runtime.state import columns
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.columns import NO_BITMAP, AnyArray
from ckpt_runtime.state.kernels import group_kernels as kernels

_BITMAP_BYTES = 4096
_WIDE = 76
_EXACT = Context(prec=80)


def _given(
    of: Callable[[pa.Array], columns.FixedColumn], *several: Rows
) -> Iterator[tuple[AnyArray, AnyArray, AnyArray, int]]:
    """Yields the groups of rows, and the numbers of their first columns, as kernels take them."""
    for rows in several:
        if len(rows.groups):
            column = of(rows.columns[0])
            yield rows.groups, column.values, column.bitmap, column.bit_offset


def _counted(groups: int, old: Rows, new: Rows, valid: pa.Array | None) -> AnyArray:
    """Counts of stored counts and of new rows that are not null in ``valid``; None counts all rows."""
    counts = np.zeros(groups, dtype=np.int64)
    for given in _given(integers, old):
        kernels.add_int64(*given, False, counts, np.zeros(groups, np.uint8))
    bitmap, bit_offset = (NO_BITMAP, 0) if valid is None else columns.validity(valid)
    kernels.count_rows(new.groups, bitmap, bit_offset, counts)
    return counts


class Count(GroupAccumulator):
    """Counts rows without nulls in the arguments."""

    combines = True

    def combined(self, groups: int, old: Rows, new: Rows) -> list[pa.Array]:
        return [columns.arrow_from_numpy(pa.int64(), _counted(groups, old, new, self._counted_column(new.columns)))]

    def _counted_column(self, arguments: list[pa.Array]) -> pa.Array | None:
        nullable = [columns.plain(column) for column in arguments if column.null_count]
        if len(nullable) <= 1:
            return nullable[0] if nullable else None
        valid = nullable[0].is_valid()
        for column in nullable[1:]:
            valid = pc.and_(valid, column.is_valid())
        return pc.if_else(valid, True, None)

    def result(self, stored: list[pa.Array]) -> pa.Array:
        return pc.fill_null(stored[0], 0)


class CountIf(Count):
    """Counts rows whose condition is true."""

    def _counted_column(self, arguments: list[pa.Array]) -> pa.Array | None:
        return pc.if_else(columns.plain(arguments[0]), True, None)


class Sum(GroupAccumulator):
    """Sums of integers and durations in 64 bits, of floats in order, of decimals exactly."""

    def __init__(self, aggregate: GroupAggregate, inputs: list[pa.DataType]) -> None:
        super().__init__(aggregate, inputs)
        self._decimal = pa.types.is_decimal(inputs[0])
        self._floating = pa.types.is_floating(inputs[0])
        self._tried = not (self._decimal or self._floating) and bool(aggregate.settings.get("tried"))
        self.combines = not (self._floating or self._tried)
        # A sum that has overflowed stays null, as in Spark; the next column distinguishes it from a sum of no rows.
        if self._decimal:
            self.stored.append(self.field("rows", pa.int64()))
        elif self._tried:
            self.stored.append(self.field("lost", pa.bool_()))

    def combined(self, groups: int, old: Rows, new: Rows) -> list[pa.Array]:
        if self._decimal:
            return self._decimals(groups, old, new)
        if self._tried:
            return self._of_try_sum(groups, old, new)
        has = np.zeros(groups, dtype=np.uint8)
        sums = np.zeros(groups, dtype=np.float64 if self._floating else np.int64)
        for given in _given(floats if self._floating else integers, old, new):
            if self._floating:
                kernels.add_float64(*given, sums, has)
            elif (row := kernels.add_int64(*given, self._checked, sums, has)) >= 0:
                numbers, values, *_ = given
                raise AggregateFailedError(
                    f"{self.aggregate.name} exceeded 64 bits when it added {int(values[row])} to "
                    f"{int(sums[numbers[row]])}; use try_sum, or cast the column to a decimal"
                )
        return [array_of(self.aggregate.result, sums, has)]

    def _of_try_sum(self, groups: int, old: Rows, new: Rows) -> list[pa.Array]:
        lost, has, sums = (np.zeros(groups, dtype=kind) for kind in (bool, np.uint8, np.int64))
        if len(old.groups):
            lost[old.groups[np.asarray(pc.fill_null(old.columns[1], False))]] = True
        if any(kernels.add_int64(*given, True, sums, has) >= 0 for given in _given(integers, old, new)):
            has[:], sums[:] = 0, 0
            for rows in (old, new):
                values = columns.plain(rows.columns[0]).cast(pa.int64()).to_pylist() if len(rows.groups) else []
                for number, value in zip(rows.groups.tolist(), values, strict=True):
                    total = int(sums[number]) + (value or 0)
                    lost[number] |= not -(1 << 63) <= total < 1 << 63
                    if value is not None and not lost[number]:
                        has[number], sums[number] = 1, total
        has[lost] = 0
        return [array_of(self.aggregate.result, sums, has), pa.array(lost)]

    @property
    def _checked(self) -> bool:
        return self.aggregate.ansi or pa.types.is_duration(self.inputs[0])

    def _decimals(self, groups: int, old: Rows, new: Rows) -> list[pa.Array]:
        counts = _counted(groups, Rows(old.groups, old.columns[1:]), new, new.columns[0])
        lost = np.zeros(groups, dtype=bool)
        if len(old.groups):
            gone = pc.and_(pc.is_null(old.columns[0]), pc.greater(pc.fill_null(old.columns[1], 0), 0))
            lost[old.groups[np.asarray(gone)]] = True
        sums = decimal_sums(groups, old, new)
        kind = self.aggregate.result
        limit = Decimal(10) ** (kind.precision - kind.scale)
        bound = pa.scalar(limit, sums.type)
        over = np.asarray(pc.fill_null(pc.greater_equal(pc.abs(sums), bound), False))
        if self.aggregate.ansi and over.any():
            raise AggregateFailedError(
                f"{self.aggregate.name} does not fit {kind}; use try_sum, or cast the column to a wider decimal"
            )
        missing = over | lost | (counts == 0)
        sums = pc.if_else(pa.array(missing), None, sums)
        return [sums.cast(kind), columns.arrow_from_numpy(pa.int64(), counts)]


def decimal_sums(groups: int, old: Rows, new: Rows) -> pa.Array:
    """Exact sums of the first columns, null for groups without values, as decimals of 256 bits."""
    numbers = joined(old.groups, new.groups)
    parts = [rows.columns[0] for rows in (old, new) if len(rows.groups)] or [new.columns[0]]
    scale = parts[-1].type.scale
    wide = [part.cast(pa.decimal256(_WIDE, scale)) for part in parts]
    table = pa.table({"group": numbers, "value": pa.chunked_array(wide)})
    summed = table.group_by("group", use_threads=False).aggregate([("value", "sum")])
    places = np.full(groups, -1, dtype=np.int64)
    places[summed["group"].to_numpy()] = np.arange(summed.num_rows)
    return taken([summed["value_sum"].combine_chunks()], places)


class Average(GroupAccumulator):
    """Means, kept as a sum and a count: floats in order, decimals and durations exactly."""

    def __init__(self, aggregate: GroupAggregate, inputs: list[pa.DataType]) -> None:
        super().__init__(aggregate, inputs)
        kind = inputs[0]
        self._decimal, self._duration = pa.types.is_decimal(kind), pa.types.is_duration(kind)
        self.combines = not pa.types.is_floating(kind)
        wide = kind if self._duration else pa.float64()
        if self._decimal:
            wide = pa.decimal128(min(kind.precision + 10, 38), kind.scale)
        self.stored = [self.field("sum", wide), self.field("count", pa.int64())]
        exact = self._decimal or self._duration
        self._sum = Sum(GroupAggregate("Sum", (), aggregate.name, wide, aggregate.ansi), inputs) if exact else None

    def combined(self, groups: int, old: Rows, new: Rows) -> list[pa.Array]:
        if self._sum is not None and self._decimal:
            return self._sum.combined(groups, old, new)
        counts = _counted(groups, Rows(old.groups, old.columns[1:]), new, columns.plain(new.columns[0]))
        if self._sum is not None:
            [total] = self._sum.combined(groups, Rows(old.groups, old.columns[:1]), new)
            return [total, columns.arrow_from_numpy(pa.int64(), counts)]
        sums, has = np.zeros(groups, dtype=np.float64), np.zeros(groups, dtype=np.uint8)
        for given in _given(floats, old, new):
            kernels.add_float64(*given, sums, has)
        return [array_of(pa.float64(), sums), columns.arrow_from_numpy(pa.int64(), counts)]

    def result(self, stored: list[pa.Array]) -> pa.Array:
        sums, counts = stored[0], pc.fill_null(stored[1], 0)
        if self._sum is None:
            return pc.divide(sums, pc.if_else(pc.equal(counts, 0), None, counts.cast(pa.float64())))
        kind = self.aggregate.result
        if self._duration:
            totals, numbers = (pc.fill_null(each.cast(pa.int64()), 0).to_numpy() for each in (sums, counts))
            whole, rest = np.divmod(np.abs(totals), np.maximum(numbers, 1))
            rounded = np.sign(totals) * (whole + (2 * rest >= np.maximum(numbers, 1)))
            return array_of(kind, rounded, (numbers > 0).astype(np.uint8))
        step, limit = Decimal(1).scaleb(-kind.scale), Decimal(10) ** (kind.precision - kind.scale)
        means: list[Decimal | None] = []
        for total, count in zip(sums.to_pylist(), counts.to_pylist(), strict=True):
            mean = None
            if total is not None and count:
                mean = _EXACT.divide(total, count).quantize(step, ROUND_HALF_UP, _EXACT)
            if mean is not None and abs(mean) >= limit:
                if self.aggregate.ansi:
                    raise AggregateFailedError(f"{self.aggregate.name} does not fit {kind}; use try_avg")
                mean = None
            means.append(mean)
        return pa.array(means, kind)


class Extreme(GroupAccumulator):
    """Minimum and maximum: numbers by a kernel, other types by ranking the stored and the new values."""

    combines = True

    def __init__(self, aggregate: GroupAggregate, inputs: list[pa.DataType]) -> None:
        super().__init__(aggregate, inputs)
        kind = inputs[0]
        self._greatest = aggregate.function in ("Max", "BoolOr")
        self._floating = pa.types.is_floating(kind)
        self._fixed = self._floating or columns.is_integer_like(kind)

    def combined(self, groups: int, old: Rows, new: Rows) -> list[pa.Array]:
        if not self._fixed:
            several = [rows for rows in (old, new) if len(rows.groups)] or [new]
            parts = [columns.plain(rows.columns[0]) for rows in several]
            picked = picked_rows(groups, joined(old.groups, new.groups), parts, greatest=self._greatest, later=False)
            return [taken(parts, picked)]
        has = np.zeros(groups, dtype=np.uint8)
        best = np.zeros(groups, dtype=np.float64 if self._floating else np.int64)
        update = kernels.extreme_float64 if self._floating else kernels.extreme_int64
        for given in _given(floats if self._floating else integers, old, new):
            update(*given, self._greatest, best, has)
        return [array_of(self.aggregate.result, best, has)]


def picked_rows(groups: int, numbers: AnyArray, parts: list[pa.Array], *, greatest: bool, later: bool) -> AnyArray:
    """The row with the minimum or maximum value of each group, -1 for a group of nulls; NaN is the greatest value."""
    whole = parts[0] if len(parts) == 1 else pa.concat_arrays(parts)
    values = ranks(whole)
    picked = np.full(groups, -1, dtype=np.int64)
    bitmap, bit_offset = columns.validity(whole)
    kernels.pick_rows(numbers, read_only(values if greatest else -values), bitmap, bit_offset, later, picked)
    return picked


class Product(GroupAccumulator):
    """Products of floats, in order."""

    def combined(self, groups: int, old: Rows, new: Rows) -> list[pa.Array]:
        products, has = np.zeros(groups, dtype=np.float64), np.zeros(groups, dtype=np.uint8)
        for given in _given(floats, old, new):
            kernels.multiply_float64(*given, products, has)
        return [array_of(pa.float64(), products, has)]


class Bits(GroupAccumulator):
    """Combined bits of integers."""

    combines = True

    def __init__(self, aggregate: GroupAggregate, inputs: list[pa.DataType]) -> None:
        super().__init__(aggregate, inputs)
        operations = {"BitAndAgg": kernels.AND, "BitOrAgg": kernels.OR, "BitXorAgg": kernels.XOR}
        self._operation = operations[aggregate.function]

    def combined(self, groups: int, old: Rows, new: Rows) -> list[pa.Array]:
        bits, has = np.zeros(groups, dtype=np.int64), np.zeros(groups, dtype=np.uint8)
        for given in _given(integers, old, new):
            kernels.combine_bits(*given, self._operation, bits, has)
        return [array_of(self.aggregate.result, bits, has)]


class Bitmap(GroupAccumulator):
    """Spark's bitmaps of fixed size: with the bits at given positions, or those that some or all other bitmaps have.

    Other bitmaps may be shorter. What they lack is not in all of them.
    """

    def __init__(self, aggregate: GroupAggregate, inputs: list[pa.DataType]) -> None:
        super().__init__(aggregate, inputs)
        self._of_all = aggregate.function == "BitmapAndAgg"
        self._none = (b"\xff" if self._of_all else b"\0") * _BITMAP_BYTES
        self.stored = [self.field("", pa.binary())]

    def combined(self, groups: int, old: Rows, new: Rows) -> list[pa.Array]:
        bits = np.frombuffer(self._none * groups, np.uint8).reshape(groups, _BITMAP_BYTES).copy()
        constructs = self.aggregate.function == "BitmapConstructAgg"
        if constructs:
            self._set(bits, new)
        for rows in (old,) if constructs else (old, new):
            values = columns.plain(rows.columns[0]).to_pylist() if len(rows.groups) else []
            for number, value in zip(rows.groups.tolist(), values, strict=True):
                if value is not None:
                    self._merge(bits[number], np.frombuffer(value, np.uint8)[:_BITMAP_BYTES])
        return [pa.array([group.tobytes() for group in bits], pa.binary())]

    def _set(self, bits: AnyArray, rows: Rows) -> None:
        values = columns.plain(rows.columns[0])
        positions = values.drop_null().to_numpy(zero_copy_only=False).astype(np.int64)
        outside = positions[(positions < 0) | (positions >= 8 * _BITMAP_BYTES)]
        if len(outside):
            raise AggregateFailedError(
                f"{self.aggregate.name}: the bitmap position {outside[0]} is not from 0 to {8 * _BITMAP_BYTES - 1}; "
                "use bitmap_bit_position, and group by bitmap_bucket_number"
            )
        numbers = rows.groups[np.asarray(values.is_valid())]
        np.bitwise_or.at(bits, (numbers, positions // 8), (1 << positions % 8).astype(np.uint8))

    def _merge(self, bits: AnyArray, other: AnyArray) -> None:
        if self._of_all:
            bits[: len(other)] &= other
            bits[len(other) :] = 0
        else:
            bits[: len(other)] |= other

    def result(self, stored: list[pa.Array]) -> pa.Array:
        return pc.fill_null(stored[0], pa.scalar(self._none, pa.binary()))
