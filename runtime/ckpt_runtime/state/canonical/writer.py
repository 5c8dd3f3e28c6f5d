"""Writes keyed state in canonical form: the target of the frozen states of all backends in a canonical savepoint.

Rows are streamed: only one row group is in memory, whatever the size of the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.checkpoint.state_handles import CanonicalKeyedStateHandle, RowGroup
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.canonical.parquet_form import (
    BYTES_PER_GROUP,
    KEY_GROUP,
    METADATA_KEY,
    ROWS_PER_GROUP,
    SUFFIX,
    check_storable,
    description,
    file_schema,
    parquet_writer,
)
from ckpt_runtime.state.columns import AnyArray, arrow_from_numpy, plain
from ckpt_runtime.state.snapshots import SnapshotFiles
from ckpt_runtime.state.stored_rows import KEY_PREFIX, check_owned


class CanonicalWriter:
    """A :class:`~ckpt_runtime.state.stored_rows.StateWriter` for the states of one operator in one subtask.

    One thread uses it. ``handles`` has one handle for each state that was written.
    """

    def __init__(self, files: SnapshotFiles, uid: str, key_groups: KeyGroupRange) -> None:
        self._files = files
        self._uid = uid
        self._key_groups = key_groups
        self.handles: list[CanonicalKeyedStateHandle] = []

    def write_table(
        self, name: str, descriptor: dict[str, Any], table: pa.Table, groups: AnyArray, owned: KeyGroupRange
    ) -> None:
        """See :class:`~ckpt_runtime.state.stored_rows.StateWriter`. Sorts by key group and key."""
        check_owned(name, groups, owned)
        self._write(name, descriptor, table.schema, _sorted(table, groups))

    def write_batches(
        self, name: str, descriptor: dict[str, Any], schema: pa.Schema, batches: Iterable[tuple[int, pa.RecordBatch]]
    ) -> None:
        """See :class:`~ckpt_runtime.state.stored_rows.StateWriter`. Rows of one key must be adjacent.

        Raises :class:`CorruptStateError` for key groups that do not ascend or belong to another subtask.
        """
        self._write(name, descriptor, schema, self._gathered(name, schema, batches))

    def _write(self, name: str, descriptor: dict[str, Any], stored: pa.Schema, row_groups: Iterable[pa.Table]) -> None:
        check_storable(stored, f"state {name!r} of operator {self._uid!r}")
        about = description(self._uid, name, self._key_groups, descriptor)
        written = []
        with self._files.private(SUFFIX) as file:
            writer = parquet_writer(file.stream, file_schema(stored))
            try:
                writer.add_key_value_metadata({METADATA_KEY: about})
                for table in row_groups:
                    writer.write_table(table, row_group_size=ROWS_PER_GROUP)
                    groups = table.column(0)
                    written.append(RowGroup(len(groups), KeyGroupRange(groups[0].as_py(), groups[-1].as_py())))
            except BaseException:
                # Closed here, because garbage collection would also write the buffered rows. The file is discarded, so
                # errors do not matter.
                with suppress(Exception):
                    writer.close()
                raise
            writer.close()
            stored_file = file.finish()
        self.handles.append(CanonicalKeyedStateHandle(self._key_groups, name, descriptor, tuple(written), stored_file))

    def _gathered(
        self, name: str, schema: pa.Schema, batches: Iterable[tuple[int, pa.RecordBatch]]
    ) -> Iterator[pa.Table]:
        """Gathers batches into row groups."""
        gathered: list[pa.RecordBatch] = []
        groups: list[int] = []
        rows = size = 0
        owned = self._key_groups
        for key_group, batch in batches:
            check_owned(name, np.array([key_group]), owned)
            owned = KeyGroupRange(key_group, owned.last)
            step = _rows_per_group(batch)
            for start in range(0, batch.num_rows, step):
                piece = batch.slice(start, step)
                if gathered and (rows + piece.num_rows > ROWS_PER_GROUP or size + piece.nbytes > BYTES_PER_GROUP):
                    yield _numbered(pa.Table.from_batches(gathered, schema), groups, gathered)
                    gathered, groups, rows, size = [], [], 0, 0
                gathered.append(piece)
                groups.append(key_group)
                rows += piece.num_rows
                size += piece.nbytes
        if gathered:
            yield _numbered(pa.Table.from_batches(gathered, schema), groups, gathered)


def _numbered(table: pa.Table, groups: list[int], batches: list[pa.RecordBatch]) -> pa.Table:
    return _with_groups(table, np.repeat(np.array(groups, np.int32), [batch.num_rows for batch in batches]))


def _sorted(table: pa.Table, groups: AnyArray) -> Iterator[pa.Table]:
    whole = _with_groups(table, groups.astype(np.int32)).combine_chunks()
    keys = [name for name in table.column_names if name.startswith(KEY_PREFIX)]
    order = order_by([whole.column(name) for name in (KEY_GROUP, *keys)])
    step = _rows_per_group(table)
    for start in range(0, len(order), step):
        yield whole.take(order.slice(start, step))


def order_by(columns: Sequence[pa.ChunkedArray]) -> pa.Array:
    """The positions of rows in the order of these columns; equal rows keep their order."""
    names = [str(index) for index in range(len(columns))]
    return pc.sort_indices(
        pa.table([_sortable(column) for column in columns], names), sort_keys=[(name, "ascending") for name in names]
    )


def _sortable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column without encodings and half floats, which Arrow cannot sort."""
    values = pa.chunked_array([plain(chunk) for chunk in column.chunks] or [plain(pa.nulls(0, column.type))])
    return values.cast(pa.float32()) if pa.types.is_float16(values.type) else values


def _with_groups(table: pa.Table, groups: AnyArray) -> pa.Table:
    return table.add_column(0, file_schema(pa.schema([])).field(0), arrow_from_numpy(pa.int32(), groups))


def _rows_per_group(rows: pa.Table | pa.RecordBatch) -> int:
    fitting = BYTES_PER_GROUP * rows.num_rows // max(1, rows.nbytes)
    return max(1, min(ROWS_PER_GROUP, int(fitting)))
