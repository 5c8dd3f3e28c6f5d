"""The number of bytes in a record batch, needed once or twice per buffer. Pure arithmetic on Arrow's types."""

from __future__ import annotations

import pyarrow as pa


class BatchSizer:
    """Sizes of batches of one schema; validity bitmaps of fixed-width columns are left out.

    Arrow adds up buffers and releases the interpreter lock for it, which is too expensive for small batches.
    """

    __slots__ = ("_row_bits",)

    def __init__(self) -> None:
        self._row_bits: int | None = None

    def of(self, batch: pa.RecordBatch) -> int:
        """Bytes of the rows of ``batch``; a slice counts its own rows only."""
        if self._row_bits is None:
            self._row_bits = _row_bits(batch.schema)
        if self._row_bits == 0:
            return int(batch.nbytes)
        return int(batch.num_rows) * self._row_bits // 8


def _row_bits(schema: pa.Schema) -> int:
    """Bits per row; 0 when rows have no fixed width."""
    widths = [int(field.type.bit_width) if pa.types.is_primitive(field.type) else 0 for field in schema]
    return sum(widths) if all(widths) else 0
