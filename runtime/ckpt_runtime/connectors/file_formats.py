"""Encodes rows into the files of the formats that Spark reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq


class FileWriter(Protocol):
    """Writes tables of one schema into an open binary file, which it does not close."""

    def write(self, rows: pa.Table) -> None:
        """Appends rows."""

    def close(self) -> None:
        """Writes the end of the file."""


class _ParquetWriter:
    def __init__(self, file: Any, schema: pa.Schema, compression: Any) -> None:
        self._writer = pq.ParquetWriter(file, schema, compression=compression)

    def write(self, rows: pa.Table) -> None:
        self._writer.write_table(rows)

    def close(self) -> None:
        self._writer.close()


class _ArrowWriter:
    def __init__(self, file: Any, schema: pa.Schema) -> None:
        self._writer = pa.ipc.new_file(file, schema, options=pa.ipc.IpcWriteOptions(compression="zstd"))

    def write(self, rows: pa.Table) -> None:
        self._writer.write_table(rows)

    def close(self) -> None:
        self._writer.close()


def open_file_writer(format_: str, file: Any, schema: pa.Schema, options: Mapping[str, Any]) -> FileWriter:
    """Returns a writer for a file of a format. ``options`` are the parsed ones of its sink."""
    if format_ == "foreach":
        return _ArrowWriter(file, schema)
    return _ParquetWriter(file, schema, options["compression"])
