"""A data source whose batches are checkpoints: each batch comes when the one before has been committed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema


class Batches(DataSource):
    """Option ``path``: a directory with ``batch-<n>.parquet``; ``commit`` leaves ``committed-<n>`` there.

    Option ``chunk``: how many rows ``read`` gives at a time, all by default.
    """

    @classmethod
    def name(cls) -> str:
        return "batches"

    @property
    def _directory(self) -> Path:
        return Path(self.options["path"])

    def schema(self) -> Any:
        return from_arrow_schema(pq.read_schema(self._directory / "batch-0.parquet"))

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        chunk = int(self.options.get("chunk", 0)) or None
        return BatchesReader(self._directory, to_arrow_schema(schema, timezone="UTC"), chunk)


class BatchesReader(DataSourceStreamReader):
    """Keeps nothing in the object: all that counts lies in the directory."""

    def __init__(self, directory: Path, schema: pa.Schema, chunk: int | None) -> None:
        self._directory = directory
        self._schema = schema
        self._chunk = chunk

    def initialOffset(self) -> dict[str, int]:
        return {"next": 0}

    def latestOffset(self) -> dict[str, int]:
        committed = len(list(self._directory.glob("committed-*")))
        given = len(list(self._directory.glob("batch-*")))
        return {"next": min(committed + 1, given)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition(number) for number in range(start["next"], end["next"])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        table = pq.read_table(self._directory / f"batch-{partition.value}.parquet")
        return iter(table.cast(self._schema).to_batches(self._chunk))

    def commit(self, end: dict[str, int]) -> None:
        for number in range(end["next"]):
            (self._directory / f"committed-{number}").touch()
