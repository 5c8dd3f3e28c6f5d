"""The public protocol of stateful processors in Arrow: one call for all keys of a buffer, with their state as columns.

A program passes an :class:`ArrowStatefulProcessor` to ``transformWithState``, as it does with PySpark's own processors.
The engine calls it with the rows of many keys at once. Plain Spark, which does not know this protocol, calls it like
any other processor, for one key at a time: the program runs there unchanged and gives the same result, at the speed of
rows.
"""

# Names are PySpark's.
# ruff: noqa: N802, N803, N815

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from itertools import chain
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

from ckpt_runtime.graph.ddl import to_arrow_schema

Result: TypeAlias = tuple[pa.Table | None, pa.Table | None]
"""Rows of the output, and the new state."""

STORED_IN_SPARK = "state"


class ArrowStatefulProcessor(StatefulProcessor):
    """Base class of processors that get all keys of a buffer at once.

    A subclass declares, as DDL or ``StructType``:

    * ``keySchema``: the columns of ``groupBy``, in its order.
    * ``inputSchema``: the columns of the input that :meth:`handleBatch` gets.
    * ``stateSchema``: the state of a key. All of its columns are nullable, and a key whose columns are all null has no
      state: that is how a processor gets a key for the first time, and how it removes the state of one.
    * ``timerColumn``, if it wants timers: a BIGINT column of the state with the event time, in milliseconds since 1970,
      at which :meth:`handleExpired` gets the key. Null stands for no timer. Needs ``timeMode`` EventTime.

    Columns of tables that it returns are found by their names.
    """

    keySchema: ClassVar[str | StructType]
    inputSchema: ClassVar[str | StructType]
    stateSchema: ClassVar[str | StructType]
    timerColumn: ClassVar[str | None] = None

    def open(self) -> None:
        """Called before all other calls: once per attempt of a job, in plain Spark once per task."""

    @abstractmethod
    def handleBatch(self, rows: pa.Table, offsets: npt.NDArray[np.int64], state: pa.Table, timerValues: Any) -> Result:
        """Returns the rows of the output and the new state; None for no rows, and for a state that does not change.

        ``state`` has one row for each key: the key's columns, then the state's. ``rows`` has the columns of
        ``inputSchema``; those of the key in row ``i`` of ``state`` are ``rows[offsets[i]:offsets[i + 1]]``, at least
        one, in order of arrival. The new state has a row for each row of ``state``, in the same order, and the columns
        of ``stateSchema``. ``timerValues`` is PySpark's.
        """

    def handleExpired(self, state: pa.Table, timerValues: Any) -> Result:
        """Returns rows and the new state of keys whose timers the watermark has reached.

        ``state`` has the form that it has in :meth:`handleBatch`, with the timers that have expired. None for the new
        state, which is the default, removes the state of these keys.
        """
        return None, None

    def close(self) -> None:
        """Called after all other calls, as often as :meth:`open`."""

    # The following functions run in plain Spark only. The state of a key is one row as an Arrow stream, so that all
    # types and nulls are the same as in the engine.

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._stored = handle.getValueState(STORED_IN_SPARK, "row BINARY")
        self._schemas = ProcessorSchemas(self)
        self.open()

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        first = next(rows)
        if not isinstance(first, Row):
            raise TypeError("an ArrowStatefulProcessor goes to transformWithState, not to transformWithStateInPandas")
        table = _table_of(list(chain([first], rows)), self._schemas.input)
        state = _table_of([first], self._schemas.key)
        before = self._stored.get()
        stored = _nothing(self._schemas.state) if before is None else self._schemas.evolved(_from_bytes(before[0]))
        for name in self._schemas.state.names:
            state = state.append_column(self._schemas.state.field(name), stored.column(name))
        results, after = self.handleBatch(table, np.array([0, table.num_rows]), state, timerValues)
        if after is not None:
            self._keep(state.select(self._schemas.key.names), after)
        return _rows_of(results)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        stored = self._stored.get()
        if stored is None:
            return iter(())
        keys = _from_bytes(stored[0]).select(self._schemas.key.names)
        state = self._schemas.evolved(_from_bytes(stored[0]))
        for column, field in zip(reversed(keys.columns), reversed(self._schemas.key), strict=True):
            state = state.add_column(0, field, column)
        results, after = self.handleExpired(state, timerValues)
        self._keep(keys, _nothing(self._schemas.state) if after is None else after)
        return _rows_of(results)

    def _keep(self, keys: pa.Table, state: pa.Table) -> None:
        state = state.select(self._schemas.state.names).cast(self._schemas.state)
        if self.timerColumn is not None:
            for time in list(self._handle.listTimers()):
                self._handle.deleteTimer(time)
            (timer,) = state.column(self.timerColumn).to_pylist()
            if timer is not None:
                self._handle.registerTimer(timer)
        if all(column.null_count for column in state.columns):
            self._stored.clear()
            return
        for column, field in zip(reversed(keys.columns), reversed(self._schemas.key), strict=True):
            state = state.add_column(0, field, column)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, state.schema) as writer:
            writer.write_table(state)
        self._stored.update((sink.getvalue().to_pybytes(),))


class ProcessorSchemas:
    """The declared schemas of a processor in Arrow. Raises PlanError, which names the attribute."""

    def __init__(self, processor: ArrowStatefulProcessor) -> None:
        self.key, self.input, self.state = (
            to_arrow_schema(getattr(processor, name, ""), name) for name in ("keySchema", "inputSchema", "stateSchema")
        )

    def evolved(self, stored: pa.Table) -> pa.Table:
        """The stored state in the declared columns; those that it lacks are null."""
        arrays = [
            stored.column(field.name).cast(field.type)
            if field.name in stored.schema.names
            else pa.chunked_array([pa.nulls(stored.num_rows, field.type)])
            for field in self.state
        ]
        return pa.Table.from_arrays(arrays, schema=self.state)


def _nothing(schema: pa.Schema) -> pa.Table:
    return pa.Table.from_arrays([pa.nulls(1, field.type) for field in schema], schema=schema)


def _from_bytes(stored: bytes) -> pa.Table:
    with pa.ipc.open_stream(stored) as reader:
        return reader.read_all()


def _table_of(rows: list[Row], schema: pa.Schema) -> pa.Table:
    from pyspark.sql.conversion import LocalDataToArrowConversion
    from pyspark.sql.pandas.types import from_arrow_schema

    wanted = [tuple([row[name] for name in schema.names]) for row in rows]
    return LocalDataToArrowConversion.convert(wanted, from_arrow_schema(schema), False).cast(schema)


def _rows_of(results: pa.Table | None) -> Iterator[Row]:
    from pyspark.sql.conversion import ArrowTableToRowsConversion
    from pyspark.sql.pandas.types import from_arrow_schema

    if results is None or not results.num_rows:
        return iter(())
    return iter(ArrowTableToRowsConversion.convert(results, from_arrow_schema(results.schema)))
