"""Aggregates rows by key and session: intervals of one key that overlap or touch become one session.

A row opens an interval from its event time to the end of its gap. State has a row per open session; rows that connect
several of them merge them. A session ends when the watermark reaches its end; never in mode complete, in which the
sessions that have changed are emitted, and those that are no more.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ckpt_runtime.graph.specs import GroupSpec
from ckpt_runtime.operators.aggregates.accumulator import Rows
from ckpt_runtime.operators.groups import GroupOperator, normal_key
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.columns import arrow_from_numpy, int64_column
from ckpt_runtime.state.kernels.group_kernels import merge_sessions


class SessionOperator(GroupOperator):
    """Built from a :class:`GroupSpec` with a session."""

    def __init__(self, spec: GroupSpec) -> None:
        super().__init__(spec)
        assert spec.session is not None
        self._session = spec.session
        self.affects = spec.session[0]  # a row may extend a session that ends where the row begins

    def add(self, batch: pa.RecordBatch) -> None:
        keys = [normal_key(batch.column(name)) for name in self._keys]
        numbers, slots, firsts = self.numbered(keys)
        old = self.taken(slots, range(len(self._row_schema) - 1))
        known = len(old.groups)
        key_numbers = np.concatenate([old.groups, numbers]).astype(np.int64)
        bounds = [
            np.concatenate([int64_column(stored).values, int64_column(batch.column(name)).values])
            for stored, name in zip(old.columns[:2], self._session, strict=True)
        ]
        order = np.lexsort((bounds[0], key_numbers))
        in_order = np.empty(len(order), dtype=np.uint32)
        starts, ends = np.empty(len(order), dtype=np.int64), np.empty(len(order), dtype=np.int64)
        keyed, opened, closed = (read_only(column[order]) for column in (key_numbers, *bounds))
        count = int(merge_sessions(keyed, opened, closed, in_order, starts, ends))
        sessions = np.empty(len(order), dtype=np.uint32)
        sessions[order] = in_order
        of_session = np.empty(count, dtype=np.int64)
        of_session[sessions] = key_numbers
        stored = self._aggregates.combined(
            count,
            Rows(read_only(sessions[:known]), old.columns[2 + len(keys) :]),
            Rows(read_only(sessions[known:]), batch.columns),
        )
        first_rows = arrow_from_numpy(pa.int64(), firsts[of_session].astype(np.int64))
        grouped = [
            arrow_from_numpy(self._schema.field(name).type, np.ascontiguousarray(part[:count]))
            for name, part in zip(self._session, (starts, ends), strict=True)
        ]
        columns = [*grouped, *(key.take(first_rows) for key in keys), *stored]
        if self._spec.mode != "complete":
            self.store(columns, grouped[1], slots[of_session])
            return
        self.store(columns, None, slots[of_session])
        merged = np.flatnonzero(starts[sessions[:known]] != bounds[0][:known])
        self._emit_removed([column.take(pa.array(merged)) for column in old.columns[: 2 + len(keys)]])
        changed = pa.array(np.unique(sessions[known:]))
        self._emit([column.take(changed) for column in columns])

    def _emit_removed(self, columns: list[pa.Array]) -> None:
        """Emits that sessions, given by their bounds and keys, are part of earlier ones."""
        rows = len(columns[0])
        if rows:
            nulls = [pa.nulls(rows, kind) for kind in self._output_schema.types[len(columns) : -1]]
            arrays = [*columns, *nulls, pa.repeat(pa.scalar(True), rows)]
            self.output.emit(pa.RecordBatch.from_arrays(arrays, schema=self._output_schema))
