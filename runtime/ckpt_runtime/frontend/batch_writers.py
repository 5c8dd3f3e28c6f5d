"""What the engine itself does with the frame of a checkpoint: Spark's batch writer, and the console."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_runtime.graph.options import Option, parse_options

SPARK_FILES = frozenset({"csv", "json", "orc", "text", "xml"})
"""Formats of files that Spark's batch writer writes for a stream of the engine."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SparkWrite:
    """Writes each checkpoint's rows with Spark's batch writer. ``options`` has no path if ``path`` is given."""

    format: str
    options: Mapping[str, str]
    columns: tuple[str, ...] = ()
    path: str = ""

    def __call__(self, frame: Any, checkpoint_id: int) -> None:
        """Appends the rows to what is there."""
        self._writer(frame).mode("append").save()

    def to(self, frame: Any, directory: str) -> None:
        """Replaces what a directory holds by the rows."""
        self._writer(frame).mode("overwrite").save(directory)

    def _writer(self, frame: Any) -> Any:
        writer = frame.write.format(self.format).options(**self.options)
        return writer.partitionBy(*self.columns) if self.columns else writer


@dataclass(frozen=True, slots=True)
class Console:
    """Shows the first rows of each checkpoint in the log of the worker, in the form of Spark's console."""

    rows: int
    truncate: bool

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Console:
        """Raises PlanError for an option that the console does not have."""
        known = (Option("numRows", int, 20, minimum=0), Option("truncate", bool, True))
        values = parse_options("console", known, options)
        return cls(values["numRows"], values["truncate"])

    def __call__(self, frame: Any, checkpoint_id: int) -> None:
        line = "-" * 43
        logger.info("\n%s\nBatch: %d\n%s\n%s", line, checkpoint_id, line, frame._show_string(self.rows, self.truncate))
