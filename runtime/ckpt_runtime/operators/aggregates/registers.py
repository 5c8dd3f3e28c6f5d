"""The estimated number of distinct values: HyperLogLog++ (Heule, Nunkesser, Hall, EDBT 2013), with Spark's result."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ckpt_runtime.graph.aggregates import GroupAggregate
from ckpt_runtime.operators.aggregates.accumulator import GroupAccumulator, Rows, integers
from ckpt_runtime.state import columns
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.columns import AnyArray, arrow_from_numpy
from ckpt_runtime.state.kernels import group_kernels as kernels

_ALPHA = {4: 0.673, 5: 0.697, 6: 0.709}


class ApproximateDistinct(GroupAccumulator):
    """Counts hashes of values. A group has a byte for each register; only groups without values have none."""

    def __init__(self, aggregate: GroupAggregate, inputs: list[pa.DataType]) -> None:
        super().__init__(aggregate, inputs)
        self._precision = int(aggregate.settings["precision"])
        self._registers = 1 << self._precision
        alpha = _ALPHA.get(self._precision, 0.7213 / (1.0 + 1.079 / self._registers))
        self._scale = alpha * self._registers * self._registers
        tables = aggregate.settings["tables"]
        self._thresholds = _constants(tables["thresholds"])
        self._estimates, self._biases = _constants(tables["estimates"]), _constants(tables["biases"])
        self.stored = [self.field("registers", pa.large_binary())]

    def combined(self, groups: int, old: Rows, new: Rows) -> list[pa.Array]:
        flat = np.zeros(groups * self._registers, dtype=np.uint8)
        if len(old.groups):
            kernels.merge_registers(old.groups, *self._stored(old.columns[0]), flat)
        hashes = integers(new.columns[0])
        kernels.add_hashes(new.groups, hashes.values, hashes.bitmap, hashes.bit_offset, self._precision, flat)
        ends = np.arange(groups + 1, dtype=np.int64) * self._registers
        return [pa.Array.from_buffers(pa.large_binary(), groups, [None, pa.py_buffer(ends), pa.py_buffer(flat)])]

    @staticmethod
    def _stored(column: pa.Array) -> tuple[AnyArray, AnyArray]:
        """The ends of each row's registers, and the registers."""
        found = columns.bytes_column(columns.plain(column))
        return read_only(found.offsets.astype(np.int64)), found.data

    def result(self, stored: list[pa.Array]) -> pa.Array:
        counts = np.zeros(len(stored[0]), dtype=np.int64)
        offsets, data = self._stored(stored[0])
        kernels.estimate_distinct(
            offsets, data, self._registers, self._scale, self._thresholds, self._estimates, self._biases, counts
        )
        return arrow_from_numpy(pa.int64(), counts)


def _constants(values: list[float]) -> AnyArray:
    return read_only(np.array(values, dtype=np.float64))
