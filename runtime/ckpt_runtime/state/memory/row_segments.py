"""The columns of buffered rows: appended a batch at a time, read by row number, never changed.

Batches are kept as they arrive and merged into larger ones as they accumulate: each row is copied a logarithmic number
of times, and there are few segments to read from. A snapshot shares the segments.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.state.columns import AnyArray, arrow_from_numpy, unsigned_values

_MOST_ROWS = 1 << 17
_MOST_BYTES = 1 << 28


class RowSegments:
    """Rows ``0 .. rows - 1`` of ``schema``."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.rows = 0
        self._segments: list[pa.RecordBatch] = []
        self._ends: AnyArray = np.empty(0, dtype=np.int64)

    @property
    def segments(self) -> tuple[pa.RecordBatch, ...]:
        """All rows, in order."""
        return tuple(self._segments)

    def append(self, batch: pa.RecordBatch) -> None:
        """Adds rows; the batch is kept or copied."""
        segments = self._segments
        segments.append(batch)
        first = len(segments) - 1
        rows, size = batch.num_rows, batch.nbytes
        while first:
            before = segments[first - 1]
            if before.num_rows > 2 * rows or rows + before.num_rows > _MOST_ROWS or size + before.nbytes > _MOST_BYTES:
                break
            rows += before.num_rows
            size += before.nbytes
            first -= 1
        if first < len(segments) - 1:
            segments[first:] = [pa.concat_batches(segments[first:])]
        self.rows += batch.num_rows
        self._ends = np.cumsum([segment.num_rows for segment in segments])

    def take(self, rows: AnyArray, wanted: Sequence[int]) -> list[pa.Array]:
        """The columns at the positions ``wanted``, for row numbers in any order."""
        if len(self._segments) == 1:
            indices = arrow_from_numpy(pa.int32(), rows)
            return [pc.take(self._segments[0].column(index), indices, boundscheck=False) for index in wanted]
        owners = np.searchsorted(self._ends, rows, side="right").astype(np.uint16)
        order = np.argsort(owners, kind="stable")
        bounds = np.searchsorted(owners[order], np.arange(len(self._segments) + 1))
        parts: list[tuple[pa.RecordBatch, AnyArray, AnyArray]] = []
        for number, segment in enumerate(self._segments):
            places = order[bounds[number] : bounds[number + 1]]
            if len(places):
                start = self._ends[number] - segment.num_rows
                parts.append((segment, places, (rows[places] - start).astype(np.int32)))
        inverse = np.empty(len(rows), dtype=np.int32)
        inverse[order] = np.arange(len(rows), dtype=np.int32)
        return [self._gathered(index, parts, inverse) for index in wanted]

    def _gathered(
        self, index: int, parts: list[tuple[pa.RecordBatch, AnyArray, AnyArray]], inverse: AnyArray
    ) -> pa.Array:
        """One column: plain numbers are written to their places; other values are taken by segment, then reordered."""
        views = [unsigned_values(segment.column(index)) for segment, _, _ in parts]
        if views and all(view is not None for view in views):
            out = np.empty(len(inverse), dtype=views[0].dtype)  # type: ignore[union-attr]
            for view, (_, places, inside) in zip(views, parts, strict=True):
                out[places] = view[inside]  # type: ignore[index]
            return arrow_from_numpy(self.schema.field(index).type, out)
        taken = [
            pc.take(segment.column(index), arrow_from_numpy(pa.int32(), inside), boundscheck=False)
            for segment, _, inside in parts
        ]
        whole = pa.concat_arrays(taken) if taken else pa.nulls(0, self.schema.field(index).type)
        return whole if len(taken) == 1 else pc.take(whole, arrow_from_numpy(pa.int32(), inverse), boundscheck=False)
