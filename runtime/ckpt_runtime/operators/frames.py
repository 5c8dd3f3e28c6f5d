"""Batches to pandas frames by key, and frames back to batches, for ``transformWithStateInPandas``.

Uses PySpark's own conversions and assembles frames row by row as Spark does, so that columns have the same types as in
Spark. Imports pandas only when it is used.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException

from ckpt_runtime.operators.conformed import conformed
from ckpt_runtime.operators.errors import OutputSchemaError, UserFunctionError
from ckpt_runtime.operators.rows import RowGroups, adjacent
from ckpt_runtime.state.columns import plain
from ckpt_runtime.state.states import Key

FRAME_ROWS = 10_000
"""Maximum number of rows per frame, which is Spark's default."""


class FrameGroups(RowGroups):
    """Groups the rows of batches by key columns into frames of all columns, several for a key with many rows."""

    def of(self, batch: pa.RecordBatch, prefetch: Callable[[Iterable[Key]], None]) -> Iterator[tuple[Key, list[Any]]]:
        ids, numbers = self._numbered(batch)
        prefetch(ids)
        sizes: Sequence[int] = [1] * len(ids)
        if len(ids) < len(numbers):
            batch, counted = adjacent(batch, numbers, len(ids))
            sizes = counted.tolist()
        return self._frames(ids, sizes, batch)

    def given(self, key: Key) -> Key:
        """Returns the key as user code gets it: with pandas scalars."""
        import pandas as pd

        def scalar(value: Any) -> Any:
            if not isinstance(value, dt.datetime):
                return value
            return pd.Timestamp(value if value.tzinfo is None else value.astimezone(dt.UTC).replace(tzinfo=None))

        return tuple(map(scalar, key))

    def _all_columns(
        self, ids: dict[Key, int], sizes: list[int], batch: pa.RecordBatch
    ) -> Iterator[tuple[Key, list[Any]]]:
        return self._frames(ids, sizes, batch)

    def _frames(
        self, ids: Iterable[Key], sizes: Iterable[int], batch: pa.RecordBatch
    ) -> Iterator[tuple[Key, list[Any]]]:
        import pandas as pd
        from pyspark.sql.conversion import ArrowBatchTransformer

        names = batch.schema.names
        arrays = pa.RecordBatch.from_arrays([plain(column) for column in batch.columns], names)
        series = ArrowBatchTransformer.to_pandas(arrays, timezone="UTC")
        rows = pd.concat(series, axis=1).itertuples(index=False, name=None)
        for key, size in zip(ids, sizes, strict=True):
            mine = list(islice(rows, size))
            pieces = [mine[start : start + FRAME_ROWS] for start in range(0, size, FRAME_ROWS)]
            yield key, [pd.DataFrame(piece, columns=names) for piece in pieces]


class FramesToBatch:
    """Collects frames as batches of one schema; columns match by name, or by position without text names (Spark)."""

    def __init__(self, uid: str, schema: pa.Schema) -> None:
        from pyspark.sql.pandas.types import from_arrow_schema

        self._uid = uid
        self._schema = schema
        self._struct = from_arrow_schema(schema)
        self._batches: list[pa.RecordBatch] = []
        self.rows = 0

    def add(self, frames: list[Any]) -> None:
        """Raises UserFunctionError for a value that is not a frame, OutputSchemaError for columns that do not fit."""
        for frame in frames:
            batch = self._batch(frame)
            if batch is not None:
                self._batches.append(batch)
                self.rows += batch.num_rows

    def _batch(self, frame: Any) -> pa.RecordBatch | None:
        """Returns None for a frame without rows, whatever its columns are."""
        import pandas as pd
        from pyspark.sql.conversion import PandasToArrowConversion

        if not isinstance(frame, pd.DataFrame):
            raise UserFunctionError(
                f"operator {self._uid!r} returned a {type(frame).__name__}, it must return pandas.DataFrame"
            )
        if not len(frame):
            return None
        try:
            batch = PandasToArrowConversion.convert(
                frame, self._struct, timezone="UTC", arrow_cast=True, assign_cols_by_name=True
            )
        except (PySparkException, pa.ArrowException, TypeError, ValueError, LookupError) as error:
            names = [str(name) for name in frame.columns]
            raise OutputSchemaError(
                f"operator {self._uid!r} returned a frame with the columns {names}, which do not fit "
                f"{self._schema.names}: {error}"
            ) from error
        for field, column in zip(self._schema, batch.columns, strict=True):
            if column.null_count and not field.nullable:
                raise OutputSchemaError(f"operator {self._uid!r}, output field {field.name!r}: null is not allowed")
        return conformed(batch, self._schema, self._uid)

    def build(self) -> pa.RecordBatch:
        """Returns a batch of all collected rows, and clears the collection."""
        taken, self._batches, self.rows = self._batches, [], 0
        return pa.concat_batches(taken)
