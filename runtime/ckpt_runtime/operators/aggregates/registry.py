"""The accumulator of each entry of the table of aggregate functions.

The estimated number of distinct values is that of HyperLogLog++ (Heule, Nunkesser, Hall, EDBT 2013), with Spark's
result. Statistics of floats keep the moments of each group, by Spark's formulas.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ckpt_runtime.graph.aggregates import AGGREGATES, GroupAggregate
from ckpt_runtime.operators.aggregates.accumulator import GroupAccumulator, Rows, array_of, filled, floats, integers
from ckpt_runtime.operators.aggregates.numbers import Average, Bitmap, Bits, Count, CountIf, Extreme, Product, Sum
from ckpt_runtime.operators.aggregates.sketches import HllSketches, KllSketches, ThetaSketches
from ckpt_runtime.operators.aggregates.values import (
    Concatenated,
    Distinct,
    FirstOrLastAccumulator,
    Histogram,
    Listed,
    MinMaxByAccumulator,
    MostFrequent,
    OfDistinct,
    Percentiles,
    Ranked,
    TopAccumulator,
)
from ckpt_runtime.operators.aggregates.vectors import Vectors
from ckpt_runtime.state import columns
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.columns import AnyArray, arrow_from_numpy, decoded_type
from ckpt_runtime.state.kernels import group_kernels, register_kernels


class _MomentsAccumulator(GroupAccumulator):
    """State of float64 columns."""

    parts: tuple[str, ...]

    def __init__(self, aggregate: GroupAggregate, inputs: list[pa.DataType]) -> None:
        super().__init__(aggregate, inputs)
        self.stored = [self.field(part, pa.float64()) for part in self.parts]

    def _zeros(self, groups: int) -> list[AnyArray]:
        return [np.zeros(groups, dtype=np.float64) for _ in self.parts]

    def result(self, stored: list[pa.Array]) -> pa.Array:
        values = [filled(column) for column in stored]
        with np.errstate(divide="ignore", invalid="ignore"):
            result, exists = self._computed(*values)
        return array_of(pa.float64(), np.ascontiguousarray(result), exists.astype(np.uint8))

    def _computed(self, *values: AnyArray) -> tuple[AnyArray, AnyArray]:
        """Returns the results, and a mask of the groups that have one."""
        raise NotImplementedError


class Moments(_MomentsAccumulator):
    """Variances, standard deviations, skewness and kurtosis."""

    parts = ("n", "mean", "m2", "m3", "m4")

    def combined(self, groups: int, old: Rows, new: Rows) -> list[pa.Array]:
        state = self._zeros(groups)
        if len(old.groups):
            group_kernels.merge_moments(old.groups, *map(filled, old.columns), *state)
        column = floats(new.columns[0])
        group_kernels.add_moments(new.groups, column.values, column.bitmap, column.bit_offset, *state)
        return [array_of(pa.float64(), part) for part in state]

    def _computed(self, *values: AnyArray) -> tuple[AnyArray, AnyArray]:
        n, _, m2, m3, m4 = values
        match self.aggregate.function:
            case "StddevSamp":
                return np.sqrt(m2 / (n - 1.0)), n > 1
            case "StddevPop":
                return np.sqrt(m2 / n), n > 0
            case "VarianceSamp":
                return m2 / (n - 1.0), n > 1
            case "VariancePop":
                return m2 / n, n > 0
            case "RegrReplacement":
                return m2, n > 0
            case "Skewness":
                return np.sqrt(n) * m3 / np.sqrt(m2 * m2 * m2), (n > 0) & (m2 != 0)
        return n * m4 / (m2 * m2) - 3.0, (n > 0) & (m2 != 0)


class Comoments(_MomentsAccumulator):
    """Covariances, correlation and linear regression of pairs; pairs with a null do not count.

    Regressions have the dependent variable first."""

    parts = ("n", "x", "y", "xy", "x2", "y2")

    def combined(self, groups: int, old: Rows, new: Rows) -> list[pa.Array]:
        state = self._zeros(groups)
        if len(old.groups):
            group_kernels.merge_comoments(old.groups, *map(filled, old.columns), *state)
        xs, ys = (columns.plain(column) for column in new.columns)
        valid = np.asarray(xs.is_valid()) & np.asarray(ys.is_valid())
        given = (floats(xs).values, floats(ys).values, read_only(valid.astype(np.uint8)))
        group_kernels.add_comoments(new.groups, *given, *state)
        return [array_of(pa.float64(), part) for part in state]

    def _computed(self, *values: AnyArray) -> tuple[AnyArray, AnyArray]:
        n, x, y, xy, x2, y2 = values
        match self.aggregate.function:
            case "RegrSXY":
                return xy, n > 0
            case "RegrSlope":
                return xy / y2, (n > 0) & (y2 != 0)
            case "RegrIntercept":
                return x - xy / y2 * y, (n > 0) & (y2 != 0)
            case "RegrR2":
                return np.where(x2 == 0, 1.0, xy * xy / (x2 * y2)), (n > 0) & (y2 != 0)
            case "CovPopulation":
                return xy / n, n > 0
            case "CovSample":
                return xy / (n - 1.0), n > 1
        return xy / np.sqrt(x2 * y2), n > 1


_NO_OFFSETS: AnyArray = read_only(np.empty(0, dtype=np.int64))
_ALPHA = {4: 0.673, 5: 0.697, 6: 0.709}


class ApproximateDistinct(GroupAccumulator):
    """Counts hashes of values. The registers of a group with few values are stored as a list of those in use."""

    combines = True

    def __init__(self, aggregate: GroupAggregate, inputs: list[pa.DataType]) -> None:
        super().__init__(aggregate, inputs)
        self._precision = int(aggregate.settings["precision"])
        self._registers = 1 << self._precision
        self._width = max(2, (self._precision + register_kernels.RANK_BITS + 7) // 8)
        self._most_sparse = self._registers // 4
        alpha = _ALPHA.get(self._precision, 0.7213 / (1.0 + 1.079 / self._registers))
        self._scale = alpha * self._registers * self._registers
        tables = aggregate.settings["tables"]
        self._thresholds = _constants(tables["thresholds"])
        self._estimates, self._biases = _constants(tables["estimates"]), _constants(tables["biases"])
        self._scratch: AnyArray = np.zeros(self._registers, dtype=np.int64)
        self.stored = [self.field("registers", pa.large_binary())]

    def combined(self, groups: int, old: Rows, new: Rows) -> list[pa.Array]:
        sizes = np.zeros(groups, dtype=np.int64)
        offsets, data = self._stored(old.columns[0])
        known = self._linked(groups, old.groups, offsets, sizes)
        added = self._linked(groups, new.groups, _NO_OFFSETS, sizes)
        room = int(np.where(sizes <= self._most_sparse, sizes, self._registers).sum())
        ends, out = np.zeros(groups + 1, dtype=np.int64), np.empty(room, dtype=np.uint8)
        hashes = integers(new.columns[0])
        register_kernels.combine_registers(
            *known, offsets, data, *added, hashes.values, hashes.bitmap, hashes.bit_offset, sizes,
            self._precision, self._width, self._most_sparse, self._scratch, ends, out,
        )  # fmt: skip
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(out[: int(ends[-1])])]
        return [pa.Array.from_buffers(pa.large_binary(), groups, buffers)]

    def _linked(self, groups: int, numbers: AnyArray, offsets: AnyArray, sizes: AnyArray) -> tuple[AnyArray, AnyArray]:
        """The last row of each group, and for each row the one before it in its group; -1 for none."""
        heads, nexts = np.full(groups, -1, dtype=np.int64), np.empty(len(numbers), dtype=np.int64)
        register_kernels.link_rows(numbers, offsets, self._width, heads, nexts, sizes)
        return heads, nexts

    @staticmethod
    def _stored(column: pa.Array) -> tuple[AnyArray, AnyArray]:
        """The ends of each row's registers, and the registers."""
        found = columns.bytes_column(columns.plain(column))
        return read_only(found.offsets.astype(np.int64, copy=False)), found.data

    def result(self, stored: list[pa.Array]) -> pa.Array:
        counts = np.zeros(len(stored[0]), dtype=np.int64)
        register_kernels.estimate_distinct(
            *self._stored(stored[0]), self._precision, self._width, self._scale,
            self._thresholds, self._estimates, self._biases, counts,
        )  # fmt: skip
        return arrow_from_numpy(pa.int64(), counts)


def _constants(values: list[float]) -> AnyArray:
    return read_only(np.array(values, dtype=np.float64))


ACCUMULATORS: dict[str, type[GroupAccumulator]] = {
    "count": Count,
    "count_if": CountIf,
    "sum": Sum,
    "average": Average,
    "extreme": Extreme,
    "picked": FirstOrLastAccumulator,
    "picked_by": MinMaxByAccumulator,
    "picked_several": TopAccumulator,
    "product": Product,
    "bits": Bits,
    "bitmap": Bitmap,
    "moments": Moments,
    "comoments": Comoments,
    "list": Listed,
    "concatenated": Concatenated,
    "set": Distinct,
    "registers": ApproximateDistinct,
    "percentile": Percentiles,
    "ranked": Ranked,
    "mode": MostFrequent,
    "histogram": Histogram,
    "hll": HllSketches,
    "theta": ThetaSketches,
    "kll": KllSketches,
    "vectors": Vectors,
}


def accumulator_for(aggregate: GroupAggregate, schema: pa.Schema) -> GroupAccumulator:
    """Returns the accumulator of an aggregate over rows of this schema."""
    arguments = aggregate.columns[:-1] if aggregate.filtered else aggregate.columns
    inputs = [decoded_type(schema.field(name).type) for name in arguments]
    accumulator = ACCUMULATORS[AGGREGATES[aggregate.function].accumulator](aggregate, inputs)
    return OfDistinct(accumulator) if aggregate.settings.get("distinct") else accumulator
