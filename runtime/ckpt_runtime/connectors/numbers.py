"""Format ``numbers``: computes its rows as the job runs, for benchmarks and exactly-once checks.

Row ``i`` (from 0) is ``h = splitmix64(i)``, ``key = h mod keys`` (unsigned), ``value = h & 1023``. With
``keyForm=scattered`` the key is its splitmix64 as a signed integer, with ``keyForm=string`` the 16 lower-case digits of
that in hexadecimal; with ``sequence=true`` a row is ``(split, number within the split)``, both int64. Rows are dealt in
blocks to a fixed number of splits whose positions are the state. Never replays prepared batches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from ckpt_runtime.connectors import kernels
from ckpt_runtime.connectors.splits import SPLITS, Pacer, SplitPosition, assigned_splits, put_positions
from ckpt_runtime.graph.formats import source_options, source_schema
from ckpt_runtime.graph.specs import SourceSpec
from ckpt_runtime.operators.operator import OperatorContext, Output, SourceOperator, SourceStatus
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.columns import arrow_from_numpy

_NO_LIMIT = (1 << 63) - 1


class NumbersSource(SourceOperator):
    """The operator of format ``numbers``. ``rowsPerSecond`` is the rate of all subtasks together."""

    requires_final_checkpoint = False

    def __init__(self, spec: SourceSpec) -> None:
        assert isinstance(spec.format, str)
        options = source_options(spec.format, spec.options)
        self._schema = source_schema(spec.format, spec.options, spec.schema)
        self._limit = options["rows"] or _NO_LIMIT
        self._keys: Any = np.uint64(options["keys"])
        self._key_form = str(options["keyForm"])
        self._batch_rows = int(options["batchRows"])
        self._rate = float(options["rowsPerSecond"])
        self._sequence = bool(options["sequence"])
        self._turn = 0

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        splits = assigned_splits(context, SplitPosition)
        self._splits = read_only(np.array(list(splits), dtype=np.int64))
        self._positions = np.array([0 if item is None else item.position for item in splits.values()], dtype=np.int64)
        self._pacer = Pacer(self._rate * len(splits) / SPLITS, context.monotonic_ms)
        _hex_digits(self._columns(np.empty(0, dtype=np.int64))[0])

    def poll(self) -> SourceStatus:
        wanted = min(self._batch_rows, self.most_rows, self._pacer.allowance())
        if wanted <= 0:
            return SourceStatus.NOTHING_AVAILABLE
        rows = _new_column(wanted)
        filled, self._turn = kernels.next_rows(self._splits, self._positions, self._turn, self._limit, rows)
        if filled == 0:
            return SourceStatus.END_OF_INPUT
        self._pacer.spend(filled)
        columns = self._columns(rows[:filled])
        arrays = [arrow_from_numpy(pa.int64(), column) for column in columns]
        if self._key_form == "string":
            arrays[0] = _hex_digits(columns[0])
        self.output.emit(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        return SourceStatus.MORE_AVAILABLE

    def idle_ms(self) -> int:
        return self._pacer.idle_ms()

    def snapshot(self, checkpoint_id: int) -> None:
        positions = zip(self._splits.tolist(), self._positions.tolist(), strict=True)
        put_positions(
            self.context.operator_state,
            ({"split": split, "position": position} for split, position in positions),
        )

    def _columns(self, rows: kernels.Int64Array) -> list[kernels.Int64Array]:
        """The output columns of some rows, in fresh memory."""
        first, second = _new_column(len(rows)), _new_column(len(rows))
        if self._sequence:
            kernels.sequence_numbers(read_only(rows), first, second)
            return [first, second]
        kernels.keyed_values(read_only(rows), self._keys, first, second)
        if self._key_form != "int":
            kernels.scatter_keys(first)
        return [first, second, rows][: len(self._schema)]


def _hex_digits(keys: kernels.Int64Array) -> pa.Array:
    text = pa.allocate_buffer(16 * len(keys))
    kernels.hex_digits(read_only(keys), np.frombuffer(memoryview(text), dtype=np.uint8))
    offsets = np.arange(0, 16 * len(keys) + 1, 16, dtype=np.int32)
    return pa.StringArray.from_buffers(len(keys), pa.py_buffer(offsets), text)


def _new_column(rows: int) -> kernels.Int64Array:
    """Allocates from Arrow's pool, which reuses pages; a plain allocation would fault them in again for every batch."""
    return np.frombuffer(memoryview(pa.allocate_buffer(rows * 8)), dtype=np.int64)
