"""Functions of the engine that get the frame of a checkpoint: Spark's batch writer, memory tables and the console."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_runtime.frontend.live_session import put_view
from ckpt_runtime.graph.options import Option, parse_options

SPARK_FILES = frozenset({"csv", "json", "orc", "text", "xml"})
"""File formats that the engine writes with Spark's batch writer."""
MEMORY_VIEW = "ckptmemoryview"
"""The option with which the Connect endpoint names the view that a query with format ``memory`` fills."""
MEMORY_BATCH = "$batch"
"""The column of such a view that holds the batch id of each row."""
_MOST_MEMORY_BYTES = 64 << 20
logger = logging.getLogger(__name__)


class MemoryTableError(RuntimeError):
    """A query with format ``memory`` has more rows than a memory table may hold."""


@dataclass(frozen=True, slots=True)
class SparkWrite:
    """Writes each checkpoint's rows with Spark's batch writer. ``options`` has no path if ``path`` is given."""

    format: str
    options: Mapping[str, str]
    columns: tuple[str, ...] = ()
    path: str = ""

    def __call__(self, frame: Any, batch_id: int) -> None:
        """Appends the rows to the existing ones."""
        self._writer(frame).mode("append").save()

    def to(self, frame: Any, directory: str) -> None:
        """Replaces the content of a directory by the rows."""
        self._writer(frame).mode("overwrite").save(directory)

    def _writer(self, frame: Any) -> Any:
        writer = frame.write.format(self.format).options(**self.options)
        return writer.partitionBy(*self.columns) if self.columns else writer


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """Keeps the rows of a query in the memory of Spark's driver, as a global view that its clients can read.

    The view has the rows' columns and :data:`MEMORY_BATCH`. ``whole``: each batch replaces the rows.
    """

    view: str
    whole: bool

    def __call__(self, frame: Any, batch_id: int) -> None:
        """Adds the rows; rows of the same batch, from an earlier call, are replaced.

        Raises MemoryTableError for more rows than a table may have.
        """
        import pyarrow as pa
        from pyspark.sql import functions as F  # noqa: N812 as everybody calls it

        name = f"global_temp.{self.view}"
        session = frame.sparkSession
        marked = frame.withColumn(MEMORY_BATCH, F.lit(batch_id).cast("bigint"))
        rows = marked.toArrow()
        if not self.whole and session.catalog.tableExists(name):
            kept = session.table(name).where(F.col(MEMORY_BATCH) != batch_id).toArrow()
            rows = pa.concat_tables([kept, rows.cast(kept.schema)])
        if rows.nbytes > _MOST_MEMORY_BYTES:
            raise MemoryTableError(
                f"the table of a query with format memory has {rows.nbytes} bytes, but at most {_MOST_MEMORY_BYTES} "
                "are allowed, because the driver keeps it in memory: write to files"
            )
        put_view(session, rows, marked.schema, self.view, sender=f"{self.view}/{batch_id}")


@dataclass(frozen=True, slots=True)
class Console:
    """Shows the first rows of each checkpoint in the log of the worker, in the form of Spark's console.

    ``names`` are those of the columns, several of which may be equal; without any, the frame's are shown.
    """

    rows: int
    truncate: bool
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: Mapping[str, str], names: tuple[str, ...] = ()) -> Console:
        """Raises PlanError for an option that the console does not have. ``path`` has no meaning, as in Spark."""
        known = (Option("numRows", int, 20, minimum=0), Option("truncate", bool, True), Option("path"))
        values = parse_options("console", known, options)
        return cls(values["numRows"], values["truncate"], names)

    def __call__(self, frame: Any, batch_id: int) -> None:
        line = "-" * 43
        frame = frame.toDF(*self.names) if self.names else frame
        logger.info("\n%s\nBatch: %d\n%s\n%s", line, batch_id, line, frame._show_string(self.rows, self.truncate))
