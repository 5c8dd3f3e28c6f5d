"""Hosts an :class:`~ckpt_runtime.processors.ArrowStatefulProcessor`: one call of user code for all keys of a batch.

It is the host of PySpark's processors, with its triggers, late rows and watermarks. Only a call differs: it gets the
state of all keys of the batch as a table, and returns the new state as one. State is one row per key in columns, which
both backends have; the new state of a key replaces its row. Rows expire by the column of timers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.streaming.stateful_processor import TimerValues

from ckpt_runtime.graph.specs import ProcessSpec
from ckpt_runtime.operators.conformed import conformed_result
from ckpt_runtime.operators.errors import OutputSchemaError, UserFunctionError
from ckpt_runtime.operators.groups import normal_key
from ckpt_runtime.operators.operator import MAX_WATERMARK
from ckpt_runtime.operators.stateful_processor import OUTPUT_ROWS, StatefulProcessorOperator
from ckpt_runtime.processors import ArrowStatefulProcessor, ProcessorSchemas
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.backend import KeyedStateBackend
from ckpt_runtime.state.columns import AnyArray, arrow_from_numpy, in_type
from ckpt_runtime.state.kernels.group_kernels import number_groups
from ckpt_runtime.state.kernels.hash_kernels import order_by_group
from ckpt_runtime.state.states import RowBufferSpec

STATE = "state"
EXPIRED_ROWS = 32_768
"""Maximum number of keys in one call for expired timers."""
NEVER = (1 << 63) - 1


class BatchKeys:
    """The keys of a batch: by key its slot and its first row, and by row the number of its key."""

    def __init__(self, slots: AnyArray, marks: AnyArray) -> None:
        groups, firsts = (np.empty(len(slots), dtype=np.uint32) for _ in range(2))
        firsts = firsts[: number_groups(slots, marks, groups, firsts)]
        self.groups, self.firsts, self.slots = groups, firsts, slots[firsts]

    def adjacent(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, AnyArray]:
        """The batch with the rows of each key next to each other, in order of arrival, and where each key begins."""
        ends = np.zeros(len(self.firsts), dtype=np.int64)
        order = np.empty(len(self.groups), dtype=np.int64)
        order_by_group(read_only(self.groups.view(np.int32)), 0, ends, order)
        if (self.groups[1:] < self.groups[:-1]).any():
            batch = batch.take(arrow_from_numpy(pa.int64(), order))
        return batch, np.concatenate([np.zeros(1, dtype=np.int64), ends])


class StateRows:
    """One row of state per key, in columns. A key without a row has no state."""

    def __init__(
        self, backend: KeyedStateBackend, uid: str, schemas: ProcessorSchemas, keys: Sequence[str], timer: str | None
    ) -> None:
        self._uid = uid
        self._schema = schemas.state
        self._timer = timer
        self.schema = pa.schema([*schemas.key, *schemas.state])
        self._width = len(schemas.key)
        self._rows = backend.keyed_columns(RowBufferSpec(STATE, self.schema, tuple(keys), timer, keeps_matched=False))
        self._marks: AnyArray = np.zeros(1024, dtype=np.uint32)

    def keys_of(self, keys: list[pa.Array]) -> BatchKeys:
        """The distinct keys; their slots are valid until :meth:`put`."""
        slots = self._rows.slots_of(keys)
        size = int(slots.max()) + 1
        if size > len(self._marks):
            self._marks = np.zeros(2 * size, dtype=np.uint32)
        return BatchKeys(slots, self._marks)

    def taken(self, keys: list[pa.Array], slots: AnyArray) -> pa.RecordBatch:
        """The rows of keys, in their order; all columns are null without a row. :meth:`put` follows."""
        return self._table(keys, self._rows.take(slots))

    def _table(self, keys: list[pa.Array], columns: list[pa.Array]) -> pa.RecordBatch:
        if self._timer is not None:
            at = self._schema.get_field_index(self._timer)
            columns[at] = pc.if_else(pc.equal(columns[at], NEVER), pa.scalar(None, pa.int64()), columns[at])
        return pa.RecordBatch.from_arrays([*keys, *columns], schema=self.schema)

    def put(self, keys: list[pa.Array], slots: AnyArray, state: pa.RecordBatch | None) -> int:
        """Replaces the rows that were taken; those of nulls only are removed. None leaves them as they are.

        Returns the earliest timer, or NEVER.
        """
        earliest = NEVER
        columns, living = None, None
        if state is not None:
            columns = state.columns
            if all(column.null_count for column in columns):
                living = np.zeros(len(slots), dtype=bool)
                for column in columns:
                    living |= np.asarray(column.is_valid())
            if self._timer is not None:
                at = self._schema.get_field_index(self._timer)
                columns[at] = columns[at].fill_null(NEVER)
                earliest = pc.min(columns[at]).as_py()
        self._rows.put(keys, slots, columns, living)
        self._rows.compact_if_due()
        return int(earliest)

    def expired(self, bound: int) -> list[pa.RecordBatch]:
        """Removes and returns the rows whose timers are at ``bound`` or before it."""
        parts = []
        for columns in self._rows.expired(bound):
            rows = self._table(columns[: self._width], columns[self._width :])
            parts += [rows.slice(start, EXPIRED_ROWS) for start in range(0, rows.num_rows, EXPIRED_ROWS)]
        return parts

    def fitting(self, state: Any, given: pa.RecordBatch, method: str) -> pa.RecordBatch:
        """The new state for the rows of ``given``, in the declared columns.

        Raises UserFunctionError for another number or order of keys, OutputSchemaError for other columns.
        """
        wanted = f"{method} of operator {self._uid!r} must return a state with the {given.num_rows} rows of its `state`"
        if not isinstance(state, pa.Table):
            raise UserFunctionError(f"{wanted} as a pyarrow.Table, it returned a {type(state).__name__}")
        if state.num_rows != given.num_rows:
            raise UserFunctionError(f"{wanted}, it returned {state.num_rows} rows")
        for at in range(self._width):
            name = self.schema.names[at]
            if name in state.schema.names and not _equal(state.column(name), given.column(at)):
                raise UserFunctionError(f"{wanted} in the same order, but column {name!r} has other values")
        return _of_schema(state, self._schema, f"{method} of operator {self._uid!r}")


def _equal(column: pa.ChunkedArray, given: pa.Array) -> bool:
    """Whether a column of keys has the given values. Columns with NaN, which differs from itself, pass."""
    return bool(pa.types.is_floating(given.type) or column.cast(given.type).equals(pa.chunked_array([given])))


def _of_schema(table: pa.Table, schema: pa.Schema, what: str) -> pa.RecordBatch:
    """The columns of ``schema`` by name. Raises OutputSchemaError."""
    names = table.schema.names
    missing = [name for name in schema.names if names.count(name) != 1]
    if missing:
        raise OutputSchemaError(
            f"{what} gave the columns {names}, of which {missing} is missing or there are two of it"
        )
    arrays = []
    for name in schema.names:
        column = table.column(name)
        arrays.append(column.chunk(0) if column.num_chunks == 1 else column.combine_chunks())
    batch = pa.RecordBatch.from_arrays(arrays, schema.names)
    return conformed_result(batch, schema, what)


class TablesToBatch:
    """Collects output tables as batches of one schema; columns match by name."""

    def __init__(self, uid: str, schema: pa.Schema) -> None:
        self._uid = uid
        self._schema = schema
        self._batches: list[pa.RecordBatch] = []
        self.rows = 0

    def add(self, tables: list[Any]) -> None:
        """Raises UserFunctionError for a value that is not a table, OutputSchemaError for columns that do not fit."""
        for table in tables:
            if not isinstance(table, pa.Table):
                raise UserFunctionError(
                    f"operator {self._uid!r} gave a {type(table).__name__} as its output, it must give a pyarrow.Table"
                )
            if table.num_rows:
                self._batches.append(_of_schema(table, self._schema, self._uid))
                self.rows += table.num_rows

    def build(self) -> pa.RecordBatch:
        """Returns a batch of all collected rows, and clears the collection."""
        taken, self._batches, self.rows = self._batches, [], 0
        return taken[0] if len(taken) == 1 else pa.concat_batches(taken)


class ArrowProcessorOperator(StatefulProcessorOperator):
    """Built from a :class:`ProcessSpec` whose ``in_arrow`` is true. State is the states of all keys as columns."""

    _processor: ArrowStatefulProcessor

    def __init__(self, spec: ProcessSpec, input_schema: pa.Schema | None = None) -> None:
        super().__init__(spec, input_schema)
        self._schemas = ProcessorSchemas(self._processor)
        self._timer = self._processor.timerColumn
        self._next_timer = -1
        """No timer is earlier. It is -1 until state that was restored has been searched for timers."""

    def _new_results(self) -> TablesToBatch:
        return TablesToBatch(self.context.uid, self._spec.output_schema)

    def _initialise(self, key_schema: pa.Schema) -> None:
        self._state = StateRows(self._backend, self.context.uid, self._schemas, self._spec.keys, self._timer)
        self._opened_user_code = True
        with self._user_code("open", None):
            self._processor.open()

    def together(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Sequence[int]] | None:
        """Allows a buffer to be split anywhere: what belongs to one call is not promised for buffers."""
        return None

    def _handle_rows(self, batch: pa.RecordBatch, timer_values: TimerValues) -> None:
        if not batch.num_rows:
            return
        columns = [in_type(normal_key(batch.column(field.name)), field.type) for field in self._schemas.key]
        keys = self._state.keys_of(columns)
        firsts = pa.array(keys.firsts)
        distinct = [column.take(firsts) for column in columns]
        rows, offsets = keys.adjacent(batch.select(self._schemas.input.names))
        arrays = [in_type(column, field.type) for column, field in zip(rows, self._schemas.input, strict=True)]
        table = pa.Table.from_arrays(arrays, schema=self._schemas.input)
        given = self._state.taken(distinct, keys.slots)
        with self._user_code("handleBatch", None):
            result = self._processor.handleBatch(table, offsets, pa.Table.from_batches([given]), timer_values)
        output, after = self._pair("handleBatch", result)
        kept = None if after is None else self._state.fitting(after, given, "handleBatch")
        self._next_timer = min(self._next_timer, self._state.put(distinct, keys.slots, kept))
        self._collect(output)

    def _collect(self, output: Any) -> None:
        if output is not None:
            self._results.add([output])
            if self._results.rows >= OUTPUT_ROWS:
                self._flush()

    def _pair(self, method: str, result: Any) -> tuple[Any, Any]:
        if not isinstance(result, tuple) or len(result) != 2:
            raise UserFunctionError(
                f"{method} of operator {self.context.uid!r} returned {type(result).__name__}, it must return a tuple "
                "of two: the output and the new state, each a pyarrow.Table or None"
            )
        return result

    def _fire(self) -> None:
        """Calls ``handleExpired`` with the keys whose timers the watermark has reached.

        A timer that such a call sets fires with a later watermark, even if this one has reached it.
        """
        until = min(self._watermark, MAX_WATERMARK - 1)
        if self._timer is None or not self._opened_user_code or self._next_timer > until:
            return
        self._next_timer = until + 1
        # All of them before the first call: rows must not be added while they are searched.
        for given in self._state.expired(until):
            with self._user_code("handleExpired", None):
                result = self._processor.handleExpired(pa.Table.from_batches([given]), self._timer_values())
            output, after = self._pair("handleExpired", result)
            if after is not None:
                kept = self._state.fitting(after, given, "handleExpired")
                keys = given.columns[: len(self._schemas.key)]
                slots = self._state.keys_of(keys).slots
                self._next_timer = min(self._next_timer, self._state.put(keys, slots, kept))
            self._collect(output)
