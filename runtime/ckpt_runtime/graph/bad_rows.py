"""Bad rows of sources: the options of a program for them, and how the readers of files recognize them.

A batch that may have bad rows has one more column, which is null for good rows. ``operators/bad_rows.py`` counts and
keeps bad rows, those of expressions too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from ckpt_runtime.configuration.pipeline_options import BadRowsMode
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.sources import BadRow

BAD_ROWS_OPTION, BAD_ROWS_DIRECTORY_OPTION = "badRows", "badRowsDirectory"
"""Reader options of the sources that can find bad rows, handled by the engine."""


_LETTER: list[pa.Field[Any]] = [
    pa.field("reason", pa.string()),
    pa.field("position", pa.string()),
    pa.field("raw", pa.binary()),
]
BAD_COLUMN: pa.Field[Any] = pa.field("_bad_row", pa.struct(_LETTER))
"""The last column of batches that may hold bad rows."""


class BadLine(NamedTuple):
    """A line of a file that is no record: its index among the given lines, from 0, the fault, and its bytes."""

    line: int
    reason: str
    raw: bytes


class BadRecordError(ValueError):
    """A line is bad, in mode FAILFAST. ``line`` is its index among the given lines, from 0."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


class ReaderPolicy(NamedTuple):
    """The treatment of a source's bad rows. ``directory`` is the directory of dead letters, if any."""

    mode: BadRowsMode
    directory: str | None


def reader_policy(options: Mapping[str, str]) -> ReaderPolicy | None:
    """Returns the options of a reader about bad rows; None if it has none. Raises PlanError."""
    given = {key.lower(): value for key, value in options.items()}
    choice, directory = given.get(BAD_ROWS_OPTION.lower()), given.get(BAD_ROWS_DIRECTORY_OPTION.lower())
    if choice is not None and choice not in _MODES_OF:
        raise PlanError(f"option {BAD_ROWS_OPTION!r}", f"{choice!r} is not one of {', '.join(_MODES_OF)}")
    if (choice == "deadLetter") != (directory is not None):
        problem = f"{BAD_ROWS_OPTION} deadLetter needs it, and no other value uses it"
        raise PlanError(f"option {BAD_ROWS_DIRECTORY_OPTION!r}", problem)
    if choice is None:
        return None
    if directory is not None and not directory.startswith("/") and ":/" not in directory:
        problem = f"{directory!r} is relative; give an absolute path or a URL"
        raise PlanError(f"option {BAD_ROWS_DIRECTORY_OPTION!r}", problem)
    return ReaderPolicy(_MODES_OF[choice], directory)


_MODES_OF = {"fail": BadRowsMode.FAIL, "drop": BadRowsMode.DROP, "deadLetter": BadRowsMode.DEAD_LETTER}


def marked(batch: pa.RecordBatch, letters: pa.Array | None = None) -> pa.RecordBatch:
    """Adds the column of bad rows to a batch; without ``letters`` all rows are good."""
    if letters is None:
        letters = pa.nulls(batch.num_rows, BAD_COLUMN.type)
    return pa.RecordBatch.from_arrays([*batch.columns, letters], schema=batch.schema.append(BAD_COLUMN))


def letters_of(rows: int, bad: Mapping[int, BadRow]) -> pa.Array:
    """The column of bad rows for a batch with that number of rows; ``bad`` maps the positions of bad rows to their
    letters."""
    letters: list[dict[str, Any] | None] = [None] * rows
    for place, row in bad.items():
        letters[place] = {"reason": row.reason, "position": row.position, "raw": row.raw}
    return pa.array(letters, BAD_COLUMN.type)


def taken_apart(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.StructArray | None]:
    """The good rows of a batch of :func:`marked`, without its column, and the letters of the bad ones, if any."""
    letters = batch.column(batch.num_columns - 1)
    rows = batch.select(range(batch.num_columns - 1))
    if letters.null_count == batch.num_rows:
        return rows, None
    return rows.filter(letters.is_null()), letters.drop_null()


def bad_rows_of(letters: pa.StructArray | None) -> Sequence[BadRow]:
    """The bad rows that the letters describe."""
    return () if letters is None else [BadRow(**letter) for letter in letters.to_pylist()]


MODES = ("PERMISSIVE", "DROPMALFORMED", "FAILFAST")
"""Spark's modes of bad records in text files."""


def checked_mode(options: Mapping[str, Any]) -> str:
    """The option ``mode`` in capitals. Raises PlanError."""
    mode = str(options["mode"]).upper()
    if mode not in MODES:
        raise PlanError("option 'mode'", f"{options['mode']!r} is not one of {', '.join(MODES)}")
    return mode


def check_corrupt_column(name: str, schema: pa.Schema) -> None:
    """Raises PlanError if a schema's column of bad records is not a text."""
    if name in schema.names and not pa.types.is_string(schema.field(name).type):
        raise PlanError("schema", f"the column of bad records, {name!r}, must be a STRING")


def by_mode(batch: pa.RecordBatch, bad: Mapping[int, BadLine], mode: str) -> pa.RecordBatch:
    """The rows of a batch that a mode keeps. Raises BadRecordError in mode FAILFAST if some are bad."""
    if not bad or mode == "PERMISSIVE":
        return batch
    if mode == "FAILFAST":
        first = bad[min(bad)]
        raise BadRecordError(first.line, first.reason)
    return batch.filter(pa.array([row not in bad for row in range(batch.num_rows)], pa.bool_()))
