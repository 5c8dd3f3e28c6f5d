"""Columnar accumulators of the built-in aggregates: NumPy arrays by slot, updated a batch at a time by kernels.

SQL's rules: nulls are ignored, ``count`` of nothing is 0 and every other aggregate of nothing is null. Integer sums
that leave 64 bits raise :class:`AggregateOverflowError` (Spark's ANSI mode); NaN is the greatest float.
One thread changes an accumulator; ``aggregate_table.py`` describes how a snapshot gets its columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import pyarrow as pa

from ckpt_runtime.state import columns
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.columns import AnyArray
from ckpt_runtime.state.errors import AggregateOverflowError, UnsupportedAggregateError
from ckpt_runtime.state.kernels import aggregate_kernels as kernels
from ckpt_runtime.state.memory.key_index import capacity_for, grown
from ckpt_runtime.state.states import AggregateColumn
from ckpt_runtime.state.stored_rows import fixed_array

_SIGN = np.int64(-(2**63))
_NO_FLAGS: AnyArray = np.empty(0, dtype=np.uint8)


class Accumulator(ABC):
    """State of one aggregate for all slots; ``stored`` are the fields that a snapshot holds for it."""

    stored: list[pa.Field]

    def __init__(self, column: AggregateColumn, dtypes: dict[str, Any]) -> None:
        self.column = column
        self._arrays: dict[str, AnyArray] = {name: np.zeros(1024, dtype=dtype) for name, dtype in dtypes.items()}

    def make_room(self, slots: int, used: int) -> None:
        """Makes room for ``slots`` slots, of which ``used`` hold values."""
        for name, array in self._arrays.items():
            capacity = capacity_for(len(array), slots)
            if capacity != len(array):
                self._arrays[name] = grown(array, capacity, used)

    @abstractmethod
    def update(self, slots: AnyArray, values: pa.Array | None) -> pa.Array:
        """Adds one batch; returns the value after each row."""

    @abstractmethod
    def load(self, slots: AnyArray, stored: list[pa.Array]) -> None:
        """Sets slots from arrays that :meth:`to_arrow` returned."""

    def load_nothing(self) -> None:
        """Called when a snapshot has the latest slots, but no values of this aggregate for them."""

    @property
    def columns(self) -> dict[str, AnyArray]:
        """The arrays with an entry per slot, by name. Updates change them in place, growing replaces them."""
        return dict(self._arrays)

    def shared(self) -> dict[str, AnyArray]:
        """Further arrays that belong to the columns and never change."""
        return {}

    @abstractmethod
    def to_arrow(self, frozen: dict[str, AnyArray]) -> list[pa.Array]:
        """The arrays of :attr:`stored` for equally long :attr:`columns` and :meth:`shared`; from any thread."""


class CountAccumulator(Accumulator):
    """count(*) and count(column)."""

    def __init__(self, column: AggregateColumn) -> None:
        super().__init__(column, {"counts": np.int64})
        self.stored = [pa.field(column.alias, pa.int64())]

    def update(self, slots: AnyArray, values: pa.Array | None) -> pa.Array:
        bitmap, bit_offset = (columns.NO_BITMAP, 0) if values is None else columns.validity(columns.plain(values))
        out = np.empty(len(slots), dtype=np.int64)
        kernels.update_count(slots, bitmap, bit_offset, self._arrays["counts"], out)
        return columns.arrow_from_numpy(pa.int64(), out)

    def load(self, slots: AnyArray, stored: list[pa.Array]) -> None:
        self._arrays["counts"][slots] = columns.int64_column(stored[0]).values

    def to_arrow(self, frozen: dict[str, AnyArray]) -> list[pa.Array]:
        return [columns.arrow_from_numpy(pa.int64(), frozen["counts"])]


class _NumberAccumulator(Accumulator):
    """One 64-bit number and a flag per slot."""

    def __init__(self, column: AggregateColumn, floating: bool) -> None:
        super().__init__(column, {"numbers": np.float64 if floating else np.int64, "has": np.uint8})
        self.stored = [pa.field(column.alias, column.result_type)]
        self._floating = floating
        self._unsigned = pa.types.is_uint64(column.result_type)

    def _input(self, values: pa.Array) -> columns.FixedColumn:
        values = columns.plain(values)
        fixed = columns.float64_column(values) if self._floating else columns.int64_column(values)
        if self._unsigned:  # shifted, so that signed comparison orders unsigned values
            return columns.FixedColumn(read_only(fixed.values ^ _SIGN), fixed.bitmap, fixed.bit_offset)
        return fixed

    def _outputs(self, rows: int, fixed: columns.FixedColumn) -> tuple[AnyArray, AnyArray]:
        valid = np.empty(rows if fixed.bitmap.size else 0, dtype=np.uint8)
        return np.empty(rows, dtype=self._arrays["numbers"].dtype), valid

    def _result(self, numbers: AnyArray, valid: AnyArray) -> pa.Array:
        if self._unsigned:
            numbers = numbers ^ _SIGN
        bits = numbers.view(np.int64) if self._floating else numbers
        return fixed_array(self.column.result_type, bits, valid if valid.size else None)

    def load(self, slots: AnyArray, stored: list[pa.Array]) -> None:
        fixed = self._input(stored[0])
        self._arrays["numbers"][slots] = fixed.values
        self._arrays["has"][slots] = np.asarray(stored[0].is_valid()).astype(np.uint8)

    def to_arrow(self, frozen: dict[str, AnyArray]) -> list[pa.Array]:
        return [self._result(frozen["numbers"], frozen.get("has", _NO_FLAGS))]


class SumAccumulator(_NumberAccumulator):
    """sum: int64 of integers, float64 of floats.

    Without nulls every slot has a value from its first row on; the flags are created at the first null.
    """

    def __init__(self, column: AggregateColumn) -> None:
        super().__init__(column, pa.types.is_floating(column.result_type))
        del self._arrays["has"]
        self._slots = self._filled = 0

    def make_room(self, slots: int, used: int) -> None:
        super().make_room(slots, used)
        self._slots = slots

    def _flags(self, *, nulls: bool) -> AnyArray:
        """``has``, or an empty array while all slots up to now have a value."""
        if nulls and "has" not in self._arrays:
            has = np.zeros(len(self._arrays["numbers"]), dtype=np.uint8)
            has[: self._filled] = 1
            self._arrays["has"] = has
        self._filled = self._slots
        return self._arrays.get("has", _NO_FLAGS)

    def load(self, slots: AnyArray, stored: list[pa.Array]) -> None:
        fixed = self._input(stored[0])
        self._arrays["numbers"][slots] = fixed.values
        has = self._flags(nulls=stored[0].null_count > 0)
        if has.size:
            has[slots] = np.asarray(stored[0].is_valid()).astype(np.uint8)

    def load_nothing(self) -> None:
        self._flags(nulls=True)

    def update(self, slots: AnyArray, values: pa.Array | None) -> pa.Array:
        fixed = self._input(values)
        out, valid = self._outputs(len(slots), fixed)
        has = self._flags(nulls=fixed.bitmap.size > 0)
        arguments = (slots, fixed.values, fixed.bitmap, fixed.bit_offset, self._arrays["numbers"], has)
        if self._floating:
            kernels.update_sum_float64(*arguments, out, valid)
        elif (row := kernels.update_sum_int64(*arguments, out, valid)) >= 0:
            raise AggregateOverflowError(
                f"sum of column {self.column.column!r} ({self.column.alias!r}) exceeded int64 when adding "
                f"{int(fixed.values[row])} to {int(self._arrays['numbers'][slots[row]])}; cast the column to float64"
            )
        return self._result(out, valid)


class ExtremeAccumulator(_NumberAccumulator):
    """min and max of numbers, booleans and times."""

    def __init__(self, column: AggregateColumn) -> None:
        super().__init__(column, pa.types.is_floating(column.result_type))
        self._update = kernels.update_extreme_float64 if self._floating else kernels.update_extreme_int64

    def update(self, slots: AnyArray, values: pa.Array | None) -> pa.Array:
        fixed = self._input(values)
        out, valid = self._outputs(len(slots), fixed)
        numbers, has = self._arrays["numbers"], self._arrays["has"]
        greatest = self.column.function == "max"
        self._update(slots, fixed.values, fixed.bitmap, fixed.bit_offset, greatest, numbers, has, out, valid)
        return self._result(out, valid)


class AverageAccumulator(Accumulator):
    """avg, kept as a float64 sum and a count."""

    def __init__(self, column: AggregateColumn) -> None:
        super().__init__(column, {"sums": np.float64, "counts": np.int64})
        self.stored = [pa.field(f"{column.alias}#sum", pa.float64()), pa.field(f"{column.alias}#count", pa.int64())]

    def update(self, slots: AnyArray, values: pa.Array | None) -> pa.Array:
        fixed = columns.float64_column(columns.plain(values))
        out = np.empty(len(slots), dtype=np.float64)
        valid = np.empty(len(slots) if fixed.bitmap.size else 0, dtype=np.uint8)
        sums, counts = self._arrays["sums"], self._arrays["counts"]
        kernels.update_average(slots, fixed.values, fixed.bitmap, fixed.bit_offset, sums, counts, out, valid)
        return columns.arrow_from_numpy(pa.float64(), out, columns.bitmap_of(valid) if valid.size else None)

    def load(self, slots: AnyArray, stored: list[pa.Array]) -> None:
        self._arrays["sums"][slots] = columns.float64_column(stored[0]).values
        self._arrays["counts"][slots] = columns.int64_column(stored[1]).values

    def to_arrow(self, frozen: dict[str, AnyArray]) -> list[pa.Array]:
        sums = columns.arrow_from_numpy(pa.float64(), frozen["sums"])
        return [sums, columns.arrow_from_numpy(pa.int64(), frozen["counts"])]


class BytesExtremeAccumulator(Accumulator):
    """min and max of strings and binaries. Bytes are in an append-only arena, compacted when half of it is garbage."""

    def __init__(self, column: AggregateColumn) -> None:
        super().__init__(column, {"starts": np.int64, "sizes": np.int64, "has": np.uint8})
        self.stored = [pa.field(column.alias, column.result_type)]
        self._arena: AnyArray = np.zeros(1 << 16, dtype=np.uint8)
        self._end = 0

    def update(self, slots: AnyArray, values: pa.Array | None) -> pa.Array:
        starts, sizes, valid = self._apply(slots, values)
        return self._gather(starts, sizes, valid, self._arena)

    def _apply(self, slots: AnyArray, values: pa.Array | None) -> tuple[AnyArray, AnyArray, AnyArray]:
        var = columns.bytes_column(columns.plain(values))
        rows = len(slots)
        self._make_arena_room(int(var.offsets[-1]) - int(var.offsets[0]))
        starts, sizes = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.int64)
        valid = np.empty(rows, dtype=np.uint8)
        state = self._arrays["starts"]
        state[-1] = self._end
        kernels.update_extreme_bytes(
            slots, var.offsets, var.data, var.bitmap, var.bit_offset, self.column.function == "max",
            self._arena, state, self._arrays["sizes"], self._arrays["has"], starts, sizes, valid,
        )  # fmt: skip
        self._end = int(state[-1])
        return starts, sizes, valid

    def make_room(self, slots: int, used: int) -> None:
        super().make_room(slots + 1, used)  # the last entry of "starts" is the arena's end during an update

    def _make_arena_room(self, wanted: int) -> None:
        if self._end + wanted <= len(self._arena):
            return
        live = int(self._arrays["sizes"].sum())
        capacity = capacity_for(1 << 16, 2 * (live + wanted))
        starts, sizes = self._arrays["starts"], self._arrays["sizes"]
        ends = np.zeros(len(sizes) + 1, dtype=np.int64)
        np.cumsum(sizes, out=ends[1:])
        arena = np.zeros(capacity, dtype=np.uint8)
        starts[sizes == 0] = 0
        kernels.gather_bytes(read_only(starts), read_only(sizes), read_only(self._arena), ends, arena)
        self._arrays["starts"], self._arena, self._end = ends[:-1].copy(), arena, live

    def _gather(self, starts: AnyArray, sizes: AnyArray, valid: AnyArray, arena: AnyArray) -> pa.Array:
        sizes = np.where(valid == 1, sizes, 0)
        ends = np.zeros(len(sizes) + 1, dtype=np.int64)
        np.cumsum(sizes, out=ends[1:])
        data = np.empty(int(ends[-1]), dtype=np.uint8)
        kernels.gather_bytes(read_only(starts), read_only(sizes), read_only(arena), ends, data)
        kind = self.column.result_type
        text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        wide = pa.large_string() if text else pa.large_binary()
        buffers = [columns.bitmap_of(valid), pa.py_buffer(ends), pa.py_buffer(data)]
        return pa.Array.from_buffers(wide, len(sizes), buffers).cast(kind)

    def load(self, slots: AnyArray, stored: list[pa.Array]) -> None:
        self._apply(slots, stored[0])

    def shared(self) -> dict[str, AnyArray]:
        return {"arena": self._arena}

    def to_arrow(self, frozen: dict[str, AnyArray]) -> list[pa.Array]:
        return [self._gather(frozen["starts"], frozen["sizes"], frozen["has"], frozen["arena"])]


def accumulator_for(column: AggregateColumn) -> Accumulator:
    """The accumulator of one aggregate. Raises :class:`UnsupportedAggregateError` for an unknown function."""
    if column.function == "count":
        return CountAccumulator(column)
    if column.function == "sum":
        return SumAccumulator(column)
    if column.function == "avg":
        return AverageAccumulator(column)
    if column.function in ("min", "max"):
        bytes_like = columns.is_bytes_like(column.result_type)
        return BytesExtremeAccumulator(column) if bytes_like else ExtremeAccumulator(column)
    raise UnsupportedAggregateError(f"aggregate {column.alias!r}: function {column.function!r} is unknown")
