"""The estimated number of distinct values: HyperLogLog++ (Heule, Nunkesser, Hall, EDBT 2013), with Spark's result."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ckpt_runtime.graph.aggregates import GroupAggregate
from ckpt_runtime.operators.aggregates.accumulator import GroupAccumulator, Rows, integers
from ckpt_runtime.state import columns
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.columns import AnyArray, arrow_from_numpy
from ckpt_runtime.state.kernels import register_kernels as kernels

_NO_OFFSETS: AnyArray = read_only(np.empty(0, dtype=np.int64))
_ALPHA = {4: 0.673, 5: 0.697, 6: 0.709}


class ApproximateDistinct(GroupAccumulator):
    """Counts hashes of values. The registers of a group with few values are stored as a list of those in use."""

    combines = True

    def __init__(self, aggregate: GroupAggregate, inputs: list[pa.DataType]) -> None:
        super().__init__(aggregate, inputs)
        self._precision = int(aggregate.settings["precision"])
        self._registers = 1 << self._precision
        self._width = max(2, (self._precision + kernels.RANK_BITS + 7) // 8)
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
        kernels.combine_registers(
            *known, offsets, data, *added, hashes.values, hashes.bitmap, hashes.bit_offset, sizes,
            self._precision, self._width, self._most_sparse, self._scratch, ends, out,
        )  # fmt: skip
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(out[: int(ends[-1])])]
        return [pa.Array.from_buffers(pa.large_binary(), groups, buffers)]

    def _linked(self, groups: int, numbers: AnyArray, offsets: AnyArray, sizes: AnyArray) -> tuple[AnyArray, AnyArray]:
        """The last row of each group, and for each row the one before it in its group; -1 for none."""
        heads, nexts = np.full(groups, -1, dtype=np.int64), np.empty(len(numbers), dtype=np.int64)
        kernels.link_rows(numbers, offsets, self._width, heads, nexts, sizes)
        return heads, nexts

    @staticmethod
    def _stored(column: pa.Array) -> tuple[AnyArray, AnyArray]:
        """The ends of each row's registers, and the registers."""
        found = columns.bytes_column(columns.plain(column))
        return read_only(found.offsets.astype(np.int64, copy=False)), found.data

    def result(self, stored: list[pa.Array]) -> pa.Array:
        counts = np.zeros(len(stored[0]), dtype=np.int64)
        kernels.estimate_distinct(
            *self._stored(stored[0]), self._precision, self._width, self._scale,
            self._thresholds, self._estimates, self._biases, counts,
        )  # fmt: skip
        return arrow_from_numpy(pa.int64(), counts)


def _constants(values: list[float]) -> AnyArray:
    return read_only(np.array(values, dtype=np.float64))
