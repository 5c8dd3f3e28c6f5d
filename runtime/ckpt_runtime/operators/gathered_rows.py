"""Rows that are buffered for a stateful processor until its trigger fires.

While they wait they are keyed state: part of every checkpoint, and rescaled with their keys. Late rows were dropped
before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from ckpt_runtime.operators.conformed import conformed
from ckpt_runtime.operators.rows import RowGroups
from ckpt_runtime.state.backend import KeyedStateBackend
from ckpt_runtime.state.states import RowBufferSpec

STATE = "$rows"
PART_ROWS = 4_096


class GatheredRows:
    """Rows of ``schema`` by ``keys``, in order of arrival. Restored rows are present from the start."""

    def __init__(self, backend: KeyedStateBackend, uid: str, schema: pa.Schema, keys: Sequence[str]) -> None:
        self._uid = uid
        self._schema = schema
        self._keys = tuple(keys)
        self._groups = RowGroups(keys)
        self._buffers = backend.row_buffers([RowBufferSpec(STATE, schema, self._keys)])

    @property
    def is_empty(self) -> bool:
        return not len(self._buffers.sides[0])

    def add(self, batch: pa.RecordBatch) -> None:
        """Keeps the rows."""
        batch = conformed(batch, self._schema, self._uid)
        slots = self._buffers.slots_of([batch.column(key) for key in self._keys])
        self._buffers.sides[0].append(batch, slots, np.zeros(batch.num_rows, dtype=np.uint8))
        self._buffers.compact_if_due()

    def take(self) -> Iterator[pa.RecordBatch]:
        """Yields all rows in parts that do not split a key; the store is empty from the first part on."""
        for rows in self._buffers.take_all():
            together = self._groups.together(rows)
            batch, ends = (rows, range(1, rows.num_rows + 1)) if together is None else together
            start = 0
            for end in ends:
                if end - start >= PART_ROWS or end == batch.num_rows:
                    yield batch.slice(start, end - start)
                    start = end
