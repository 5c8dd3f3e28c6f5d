"""The rows of a Parquet file, or of a directory of them, under stable row numbers. Holds one row group at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ckpt_runtime.graph.formats import is_parquet_name
from ckpt_runtime.storage.filesystem import Location, is_directory, list_names, naming, resolve


@dataclass(frozen=True, slots=True)
class _RowGroup:
    file: str
    index: int
    first_row: int
    rows: int


class ParquetRows:
    """Row ``i`` is the ``i``-th row of all files in name order."""

    def __init__(self, url: str, schema: pa.Schema) -> None:
        """Columns are read by name and cast to ``schema``. Raises StorageError, or ValueError if there is no file."""
        self._location = resolve(url)
        self._schema = schema
        self._groups: list[_RowGroup] = []
        self._open: tuple[str, Any, pq.ParquetFile] | None = None
        files = _files(self._location)
        if not files:
            raise ValueError(f"option 'path': {url!r} holds no Parquet files")
        self.rows = 0
        for file in files:
            metadata = self._file(file).metadata
            for index in range(metadata.num_row_groups):
                count = metadata.row_group(index).num_rows
                self._groups.append(_RowGroup(file, index, self.rows, count))
                self.rows += count

    def read(self, start: int, stop: int, batch_rows: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Batches of at most ``batch_rows`` rows from row ``start`` up to ``stop``, each with its first row number."""
        for group in self._groups:
            if group.first_row + group.rows <= start or group.first_row >= stop:
                continue
            table = self._read_group(group)
            first = max(start - group.first_row, 0)
            last = min(stop - group.first_row, group.rows)
            row = group.first_row + first
            for batch in table.slice(first, last - first).to_batches(max_chunksize=batch_rows):
                if batch.num_rows:
                    yield row, batch
                    row += batch.num_rows

    def close(self) -> None:
        """Closes the file that is open."""
        if self._open is not None:
            self._open[2].close()
            self._open[1].close()
            self._open = None

    def _read_group(self, group: _RowGroup) -> pa.Table:
        with naming("read", self._location):
            table = self._file(group.file).read_row_group(group.index, columns=self._schema.names)
        return table.select(self._schema.names).cast(self._schema)

    def _file(self, path: str) -> pq.ParquetFile:
        if self._open is None or self._open[0] != path:
            self.close()
            with naming("open", self._location):
                stream = self._location.filesystem.open(path, "rb")
                self._open = (path, stream, pq.ParquetFile(stream))
        return self._open[2]


def _files(location: Location) -> list[str]:
    """The Parquet files that a location stands for, in name order: itself, or the visible ones in the directory."""
    if not is_directory(location):
        return [location.path]
    return [location.child(name).path for name in list_names(location) if is_parquet_name(name)]
