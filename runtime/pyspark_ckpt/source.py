"""The data source ``ckpt-state``. Spark looks for it in every session, so it imports its dependencies on use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, DataSourceReader

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class StateDataSource(DataSource):
    """``option("path", SNAPSHOT)`` lists its states. With ``operator`` and ``state`` it reads one's rows, by key group.

    Writing creates a new savepoint with the given rows as that state.
    """

    @classmethod
    def name(cls) -> str:
        return "ckpt-state"

    def schema(self) -> StructType:
        from pyspark_ckpt.reading import reader_of

        return reader_of(self.options).spark_schema

    def reader(self, schema: StructType) -> DataSourceReader:
        from pyspark_ckpt.reading import reader_of

        return reader_of(self.options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        from pyspark_ckpt.writing import writer_of

        return writer_of(self.options, schema, overwrite=overwrite)
