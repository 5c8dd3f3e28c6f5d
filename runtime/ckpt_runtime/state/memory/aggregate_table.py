"""Columnar state for built-in aggregates: one slot per key, one accumulator per aggregate.

The owner updates it a batch at a time. A snapshot freezes the columns in constant time and
shares the append-only keys. Keys are never evicted.

The accumulators are NumPy arrays by slot, updated a batch at a time by kernels. SQL's rules: nulls are ignored,
``count`` of nothing is 0 and every other aggregate of nothing is null. Integer sums that leave 64 bits raise
:class:`AggregateOverflowError` (Spark's ANSI mode); NaN is the greatest float. One thread changes an accumulator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state import columns, stored_rows
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.columns import AnyArray, plain
from ckpt_runtime.state.errors import AggregateOverflowError, UnsupportedAggregateError, schema_mismatch
from ckpt_runtime.state.hashing import hash_arrays, key_groups_of
from ckpt_runtime.state.kernels import aggregate_kernels as kernels
from ckpt_runtime.state.memory.changes import Changed, FrozenColumns, SealedChanges, SlotNotes
from ckpt_runtime.state.memory.key_index import FrozenKeys, capacity_for, grown, key_index
from ckpt_runtime.state.memory.parts import PartWriter
from ckpt_runtime.state.states import AggregateColumn
from ckpt_runtime.state.stored_rows import StateWriter, fixed_array

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

    def finish(self, moved: Callable[[AnyArray], AnyArray], used: int) -> None:
        """See :meth:`AggregateTable.finish`; ``used`` slots hold values."""
        self._arrays = {name: moved(array[:used]) for name, array in self._arrays.items()}

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

    def finish(self, moved: Callable[[AnyArray], AnyArray], used: int) -> None:
        super().finish(moved, used)
        self._arena = moved(self._arena[: self._end])

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


class AggregateTable:
    """Running aggregates per key."""

    def __init__(self, uid: str, name: str, key_schema: pa.Schema, aggregates: Sequence[AggregateColumn]) -> None:
        self.uid = uid
        self.name = name
        self.key_schema = key_schema
        self.aggregates = tuple(aggregates)
        self._index = key_index(key_schema)
        self._accumulators = [accumulator_for(column) for column in self.aggregates]
        self._notes = SlotNotes()

    def __len__(self) -> int:
        return self._index.size

    @property
    def nbytes(self) -> int:
        """The size of its arrays, with their room for further keys."""
        parts = [part for each in self._accumulators for part in (each.columns, each.shared())]
        return self._index.nbytes + sum(array.nbytes for part in parts for array in part.values())

    def update(self, batch: pa.RecordBatch) -> list[pa.Array]:
        return self.add(self.slots_of([batch.column(name) for name in self.key_schema.names]), batch)

    def add(self, slots: AnyArray, batch: pa.RecordBatch) -> list[pa.Array]:
        """The same for rows whose slots are known."""
        self._notes.mark(slots, self._index.size)
        return [
            accumulator.update(slots, None if column.column is None else batch.column(column.column))
            for column, accumulator in zip(self.aggregates, self._accumulators, strict=True)
        ]

    def slots_of(self, keys: list[pa.Array]) -> AnyArray:
        """The slot of each row's key; new keys get the next ones."""
        before = self._index.size
        slots = self._index.slots_of(keys)
        size = self._index.size
        if size != before:
            for accumulator in self._accumulators:
                accumulator.make_room(size, before)
        return read_only(slots)

    def finish(self, moved: Callable[[AnyArray], AnyArray]) -> None:
        """Replaces its arrays by what ``moved`` makes of them: equal ones. From then on it can be read, not changed."""
        self._index.finish(moved)
        for accumulator in self._accumulators:
            accumulator.finish(moved, self._index.size)

    def find(self, keys: list[pa.Array]) -> AnyArray:
        """The slot of each row's key as int64, -1 for an unknown key."""
        return self._index.find(keys)

    def hashes(self) -> AnyArray:
        return self._index.freeze().hashes()

    def hashes_of(self, keys: list[pa.Array]) -> AnyArray:
        return hash_arrays(keys, self.key_schema.names)

    def freeze(self) -> FrozenAggregateTable:
        columns = [column for accumulator in self._accumulators for column in accumulator.columns.values()]
        parts = [(each, list(each.columns), each.shared()) for each in self._accumulators]
        return FrozenAggregateTable(self, self._index.freeze(), parts, self._notes.freeze(self._index.size, columns))

    def begin_changes(self) -> None:
        """Counts the present content as unchanged, and notes changes from now on."""
        self._notes.begin(self._index.size)

    def seal(self) -> SealedChanges | None:
        return self._notes.seal(self._index.size)

    def keys_of(self, slots: AnyArray) -> list[pa.Array]:
        return self._index.freeze().arrays(slots)

    def rows(self, slots: AnyArray) -> pa.RecordBatch:
        """Stored rows of some slots, as of this call."""
        arrays = self.keys_of(slots)
        for accumulator in self._accumulators:
            columns = {name: column[slots] for name, column in accumulator.columns.items()}
            arrays += accumulator.to_arrow(accumulator.shared() | columns)
        return pa.RecordBatch.from_arrays(arrays, schema=self.stored_schema())

    def descriptor(self) -> dict[str, Any]:
        aggregates = [
            {**column.describe(), "stored": [field.name for field in accumulator.stored]}
            for column, accumulator in zip(self.aggregates, self._accumulators, strict=True)
        ]
        return stored_rows.descriptor_of("aggregate", self.key_schema, self.stored_schema(), aggregates=aggregates)

    def stored_schema(self) -> pa.Schema:
        decoded = pa.schema([pa.field(f.name, plain(pa.nulls(0, f.type)).type) for f in self.key_schema])
        fields = stored_rows.prefixed(decoded, stored_rows.KEY_PREFIX)
        return pa.schema(fields + [field for accumulator in self._accumulators for field in accumulator.stored])

    def load(self, descriptor: dict[str, Any], batch: pa.RecordBatch) -> None:
        """Adds restored rows, leaving aggregates that the snapshot does not have at their neutral values."""
        keys = stored_rows.without_prefix(self.stored_schema(), stored_rows.KEY_PREFIX).names
        slots = self.slots_of([batch.column(stored_rows.KEY_PREFIX + name) for name in keys])
        stored = {entry["alias"]: entry["stored"] for entry in descriptor["aggregates"]}
        for column, accumulator in zip(self.aggregates, self._accumulators, strict=True):
            if column.alias in stored:
                accumulator.load(slots, [batch.column(name) for name in stored[column.alias]])
            else:
                accumulator.load_nothing()

    def load_nothing(self) -> None:
        """Called when the latest keys have no values yet; they may stay without."""
        for accumulator in self._accumulators:
            accumulator.load_nothing()

    def check_compatible(self, descriptor: dict[str, Any]) -> None:
        """Raises StateSchemaError when the key or an aggregate of the same alias differs in the snapshot."""
        stored = {entry["alias"]: entry for entry in descriptor["aggregates"]}
        for column in self.aggregates:
            entry = stored.get(column.alias)
            wanted = column.describe()
            if entry is not None and any(entry.get(key) != value for key, value in wanted.items()):
                reason = f"aggregate {column.alias!r} changed its meaning"
                kept = {key: entry.get(key) for key in wanted}
                raise schema_mismatch(self.uid, self.name, reason, kept, wanted)
        schemas = stored_rows.schema_from_json(descriptor.get("schema")), self.stored_schema()
        before, asked = (stored_rows.without_prefix(schema, stored_rows.KEY_PREFIX) for schema in schemas)
        if before.names != asked.names or before.types != asked.types:
            raise schema_mismatch(self.uid, self.name, "the key changed", before, asked)

    def is_like(self, other: AggregateTable) -> bool:
        return self.aggregates == other.aggregates and self.key_schema.equals(other.key_schema)


def evolved_rows(descriptor: dict[str, Any], rows: pa.RecordBatch) -> pa.RecordBatch:
    """Converts stored rows of an earlier descriptor of the same state: missing aggregates get their neutral values.

    The state need not be in use, and no memory is needed beyond the batch's.
    """
    zeros: dict[str, int] = {}
    for entry in descriptor["aggregates"]:
        if entry["function"] in ("count", "avg"):  # all other aggregates of nothing are null
            zeros |= dict.fromkeys(entry["stored"], 0)
    schema = stored_rows.schema_from_json(descriptor.get("schema"))
    arrays = [
        rows.column(field.name) if field.name in rows.schema.names else _neutral(field, zeros, rows.num_rows)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _neutral(field: pa.Field, zeros: dict[str, int], rows: int) -> pa.Array:
    if field.name in zeros:
        return pa.repeat(pa.scalar(zeros[field.name], field.type), rows)
    return pa.nulls(rows, field.type)


@dataclass(frozen=True, slots=True)
class FrozenAggregateTable:
    """A table as of one moment. ``parts`` has the names of each accumulator's columns, and what it had beside them."""

    table: AggregateTable
    keys: FrozenKeys
    parts: Sequence[tuple[Accumulator, list[str], dict[str, AnyArray]]]
    columns: FrozenColumns

    def rows(self, slots: AnyArray | None = None) -> pa.Table:
        """Stored rows of all slots, or of some ascending ones. To be called once."""
        taken = iter(self.columns.take(slots))
        arrays = self.keys.arrays(slots)
        for accumulator, names, shared in self.parts:
            arrays += accumulator.to_arrow(shared | {name: next(taken) for name in names})
        return pa.Table.from_arrays(arrays, schema=self.table.stored_schema())

    @property
    def numbers(self) -> int | None:
        return self.keys.size

    def write(self, writer: StateWriter, owned: KeyGroupRange, max_parallelism: int) -> None:
        """The asynchronous part: sorts by key group and writes."""
        groups = key_groups_of(np.ascontiguousarray(self.keys.hashes()), max_parallelism)
        writer.write_table(self.table.name, self.table.descriptor(), self.rows(), groups, owned)

    def write_part(
        self, writer: PartWriter, changed: Changed | None, owned: KeyGroupRange, max_parallelism: int
    ) -> None:
        """Writes the changed slots, or all; keys are never removed."""
        if changed is None:
            self.write(writer, owned, max_parallelism)
        elif len(changed):
            assert isinstance(changed, np.ndarray)
            writer.write_rows(self.table.name, self.rows(changed), owned, max_parallelism)

    def release(self) -> None:
        """Releases the frozen columns, so that the table no longer keeps old values for them."""
        self.columns.release()
