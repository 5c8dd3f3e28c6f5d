"""Statistics of floats whose state is the moments of each group, by Spark's formulas."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ckpt_runtime.graph.aggregates import GroupAggregate
from ckpt_runtime.operators.aggregates.accumulator import GroupAccumulator, Rows, array_of, filled, floats
from ckpt_runtime.state import columns
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.columns import AnyArray
from ckpt_runtime.state.kernels import group_kernels as kernels


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
            kernels.merge_moments(old.groups, *map(filled, old.columns), *state)
        column = floats(new.columns[0])
        kernels.add_moments(new.groups, column.values, column.bitmap, column.bit_offset, *state)
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
            kernels.merge_comoments(old.groups, *map(filled, old.columns), *state)
        xs, ys = (columns.plain(column) for column in new.columns)
        valid = np.asarray(xs.is_valid()) & np.asarray(ys.is_valid())
        given = (floats(xs).values, floats(ys).values, read_only(valid.astype(np.uint8)))
        kernels.add_comoments(new.groups, *given, *state)
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
