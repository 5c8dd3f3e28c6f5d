"""Batches to pandas frames by key, and frames back to batches, for ``transformWithStateInPandas``.

Uses PySpark's own conversions. Spark assembles frames row by row, which decides the types of their columns: where these
do not depend on the rows, frames are parts of one frame, and otherwise they are assembled as in Spark. Imports pandas
only when it is used.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException

from ckpt_runtime.graph.specs import ZONE_OPTION
from ckpt_runtime.operators.conformed import conformed
from ckpt_runtime.operators.errors import OutputSchemaError, UserFunctionError
from ckpt_runtime.operators.processor_states import KeyCursor
from ckpt_runtime.operators.rows import RowGroups
from ckpt_runtime.state.columns import decoded_type, plain
from ckpt_runtime.state.states import Key

FRAMES_TOGETHER = 1_000
_COERCION = "spark.sql.execution.pythonUDF.pandas.intToDecimalCoercionEnabled"


class FrameGroups(RowGroups):
    """Groups the rows of batches by key columns into frames of all columns, of at most ``most`` rows for each key.

    As in Spark, a frame ends with the row that brings it to ``most_bytes``, by the mean size of a batch's rows.
    """

    def __init__(
        self, keys: Sequence[str], most: int, zone: str = "UTC", hidden: int = 0, *, most_bytes: int | None = None
    ) -> None:
        super().__init__(keys, zone, hidden)
        self._most = most
        self._most_bytes = most_bytes

    def given(self, key: Key) -> Key:
        """Returns the key as user code gets it: with the scalars and missing values of pandas; times have no zone."""
        from pyspark.sql.conversion import ArrowBatchTransformer

        scalars = tuple(map(_scalar, super().given(key)))
        if None not in scalars or self._schema is None:
            return scalars
        nulls = [pa.nulls(1, decoded_type(self._schema.field(name).type)) for name in self._keys]
        series = ArrowBatchTransformer.to_pandas(pa.RecordBatch.from_arrays(nulls, list(self._keys)), timezone="UTC")
        return tuple(each.iloc[0] if part is None else part for part, each in zip(scalars, series, strict=True))

    def whole(self, keys: pa.RecordBatch) -> Iterator[Key]:
        from pyspark.sql.conversion import ArrowBatchTransformer

        arrays = pa.RecordBatch.from_arrays(self.in_zone(keys), keys.schema.names)
        series = ArrowBatchTransformer.to_pandas(arrays, timezone=self._zone)
        parts = []
        for each, column in zip(series, arrays.columns, strict=True):
            part = list(each)
            if not pa.types.is_nested(column.type):
                scalars = zip(column.to_pylist(), part, strict=True)
                part = [missing if value is None else _scalar(value) for value, missing in scalars]
            parts.append(part)
        return zip(*parts, strict=True)

    def _grouped(
        self, ids: Iterable[Key], sizes: Iterable[int], batch: pa.RecordBatch
    ) -> Iterator[tuple[Key, list[Any]]]:
        import pandas as pd
        from pyspark.sql.conversion import ArrowBatchTransformer

        names, most = batch.schema.names, self._most
        arrays = pa.RecordBatch.from_arrays([plain(column) for column in self.in_zone(batch)], names)
        if self._most_bytes is not None and arrays.nbytes:
            most = min(most, -(-self._most_bytes * arrays.num_rows // arrays.nbytes))
        series = ArrowBatchTransformer.to_pandas(arrays, timezone=self._zone)
        whole = pd.concat(series, axis=1)
        whole.columns = names
        uniform = _uniform(whole, arrays)
        if uniform is not None:
            start = 0
            for key, size in zip(ids, sizes, strict=False):
                end = start + size
                starts = range(start, end, most)
                yield key, [_part(uniform, first, min(first + most, end)) for first in starts]
                start = end
            return
        rows = whole.itertuples(index=False, name=None)
        for key, size in zip(ids, sizes, strict=False):
            mine = list(islice(rows, size))
            pieces = [mine[start : start + most] for start in range(0, size, most)]
            yield key, [pd.DataFrame(piece, columns=names) for piece in pieces]


def _scalar(value: Any) -> Any:
    import pandas as pd

    return pd.Timestamp(value.replace(tzinfo=None)) if isinstance(value, dt.datetime) else value


def _uniform(whole: Any, arrays: pa.RecordBatch) -> Any:
    """The frame with the types that frames of some of its rows have; None where these depend on the rows.

    pandas finds the type of a column by its values. For values of one type that is always the same type; only nulls
    among texts and objects change it, if there are none in the frame or nothing else. Nulls of numbers are NaN.
    """
    import pandas as pd

    if not whole.columns.is_unique or not len(whole):
        return None
    for column in arrays.columns:
        number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
        if column.null_count and not number:
            return None
    assembled = pd.DataFrame([next(whole.itertuples(index=False, name=None))], columns=whole.columns).dtypes
    return whole.astype({name: kind for name, kind in assembled.items() if kind != whole.dtypes[name]})


def _part(whole: Any, start: int, end: int) -> Any:
    """Some rows as a frame of their own, numbered from 0."""
    import pandas as pd

    part = _apart(whole.iloc[start:end])
    part.index = pd.RangeIndex(end - start)
    return part


def _apart(frame: Any) -> Any:
    """A copy whose content does not change with the original; pandas copies on write since version 3."""
    import pandas as pd

    return frame.copy(deep=int(pd.__version__.split(".")[0]) < 3)


class FramesToBatch:
    """Collects frames as batches of one schema; columns match by name, or by position without text names (Spark).

    Frames with the same columns and types are converted together, up to :data:`FRAMES_TOGETHER`.
    """

    def __init__(
        self, uid: str, schema: pa.Schema, cursor: KeyCursor | None = None, settings: Mapping[str, str] | None = None
    ) -> None:
        """``cursor`` has the key that frames are given for, which an error names. ``settings`` are options of Spark."""
        from pyspark.sql.pandas.types import from_arrow_schema

        self._uid = uid
        self._schema = schema
        self._struct = from_arrow_schema(schema)
        self._cursor = cursor
        given = settings or {}
        self._options: dict[str, Any] = {
            "timezone": given.get(ZONE_OPTION, "UTC"),
            "safecheck": given.get("spark.sql.execution.pandas.convertToArrowArraySafely", "true") == "true",
            "int_to_decimal_coercion_enabled": given.get(_COERCION) == "true",
        }
        self._form: tuple[Any, list[Any]] | None = None
        self._alike: list[tuple[Any, Key | None]] = []
        self._batches: list[pa.RecordBatch] = []
        self.rows = 0

    def add(self, frames: list[Any]) -> None:
        """Raises UserFunctionError for a value that is not a frame, OutputSchemaError for columns that do not fit.

        The latter may be raised by a later call, or by :meth:`build`.
        """
        import pandas as pd

        for frame in frames:
            if not isinstance(frame, pd.DataFrame):
                raise UserFunctionError(
                    f"operator {self._uid!r} returned a {type(frame).__name__}, it must return pandas.DataFrame"
                )
            # A frame without rows gives nothing, with any columns.
            if not len(frame):
                continue
            columns, types = frame.columns, list(frame.dtypes)
            form = self._form
            if form is None or len(self._alike) >= FRAMES_TOGETHER or types != form[1] or not columns.equals(form[0]):
                self._convert()
                self._form = columns, types
            # User code may change a frame that it has given, and give it again.
            self._alike.append((_apart(frame), None if self._cursor is None else self._cursor.key))
            self.rows += len(frame)

    def _convert(self) -> None:
        """Converts the frames that are alike: together, or one by one if that fails: an error names its key."""
        import pandas as pd

        alike, self._alike = self._alike, []
        if len(alike) > 1:
            try:
                self._batches.append(self._batch(pd.concat([frame for frame, _ in alike], ignore_index=True)))
                return
            except OutputSchemaError:
                pass
        for frame, key in alike:
            try:
                self._batches.append(self._batch(frame))
            except OutputSchemaError as error:
                error.add_note(f"in a result of operator {self._uid!r}, key {key!r}")
                raise

    def _batch(self, frame: Any) -> pa.RecordBatch:
        from pyspark.sql.conversion import PandasToArrowConversion

        try:
            batch = PandasToArrowConversion.convert(
                frame, self._struct, arrow_cast=True, assign_cols_by_name=True, **self._options
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
        self._convert()
        taken, self._batches, self.rows = self._batches, [], 0
        return pa.concat_batches(taken)
