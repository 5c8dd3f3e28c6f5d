"""Rows that a source cannot read, or for which an expression or a Python function fails: how they are counted and kept.

A batch in which a row fails is halved until each bad row is separate, so that the good rows of the batch continue in
their order. Rows that are kept go to Parquet files of a directory. A file has the rows between two barriers of a
subtask, is complete in front of the second one, and is named after the first: a restored attempt deletes files that
earlier attempts wrote after its checkpoint, since their rows are read again.
"""

from __future__ import annotations

import base64
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.pipeline_options import BadRowsMode, ExecutionOptions
from ckpt_runtime.configuration.registry import RESTORE_DRILL
from ckpt_runtime.expressions.types import EvaluationError, ServiceError
from ckpt_runtime.failure_report import printable
from ckpt_runtime.graph.bad_rows import ReaderPolicy
from ckpt_runtime.operators.operator import Operator, OperatorContext, Output, RowOrigins
from ckpt_runtime.sources import BadRow
from ckpt_runtime.state.columns import AnyArray
from ckpt_runtime.storage.filesystem import (
    Location,
    delete_file,
    exists,
    list_names,
    make_directory,
    move_file,
    naming,
    resolve,
)

T = TypeVar("T")

SCHEMA = pa.schema(
    [
        pa.field("at", pa.timestamp("ms", "UTC"), False),
        pa.field("operator", pa.string(), False),
        pa.field("condition", pa.string(), False),
        pa.field("reason", pa.string(), False),
        pa.field("row", pa.string()),
        pa.field("position", pa.string()),
        pa.field("raw", pa.binary()),
    ]
)
"""A bad row: when it failed, the operator's uid, Spark's name of the error or the class of a Python function's, its
message, the row as JSON, and its position and bytes in the source. Where the source could not read it, there is no row;
behind an operator that does not say which rows its own come from, there is no position."""

_ROWS_HELD = 10_000
_MAX_REASON_CHARS = 2_000
_LOG_EVERY_MS = 10_000
_LOG = logging.getLogger(__name__)


class BadRows:
    """The bad rows of one operator in one subtask. ``dropped`` counts those that were left out, kept or not."""

    def __init__(
        self, context: OperatorContext, directory: Location | None, caught: type[Exception] = EvaluationError
    ) -> None:
        """``directory`` is None if rows are only counted. ``caught`` has the exceptions that a bad row raises."""
        self._caught = caught
        self.dropped = 0
        self._context = context
        self._directory = directory
        self._held: list[dict[str, Any]] = []
        self._behind = context.restored_checkpoint_id or 0
        self._files = 0
        self._log_at_ms = float("-inf")
        self._prefix = f"bad-{context.job_id}-{quote(context.uid, safe='')}-"
        if directory is not None:
            make_directory(directory, private=False)
            self._delete_what_comes_again(directory)

    @classmethod
    def of(
        cls, context: OperatorContext, caught: type[Exception], policy: ReaderPolicy | None = None
    ) -> BadRows | None:
        """Returns what takes the bad rows of an operator; None if they fail the job. A restore drill counts them.

        The ``policy`` of a source overrides that of the job.
        """
        configuration = Configuration(context.configuration)
        drill = configuration.get_text(RESTORE_DRILL) == "true"
        mode, directory = policy or (
            configuration.get(ExecutionOptions.BAD_ROWS_MODE),
            configuration.get(ExecutionOptions.BAD_ROWS_DIRECTORY),
        )
        if mode not in (BadRowsMode.DROP, BadRowsMode.DEAD_LETTER):
            return None
        kept = mode is BadRowsMode.DEAD_LETTER and not drill
        return cls(context, resolve(directory or "") if kept else None, caught)

    def left_out(
        self, batch: pa.RecordBatch, compute: Callable[[pa.RecordBatch], T]
    ) -> Iterator[tuple[pa.RecordBatch, T]]:
        """Yields the good rows in parts, in their order, with the values computed from them."""
        time = self._context.chain_time
        origins = time.origins if time.origins is not None and time.origins.batch is batch else None
        for first, last, result in self.good_ranges(
            0,
            batch.num_rows,
            lambda first, last: compute(batch.slice(first, last - first)),
            lambda at: batch.slice(at, 1),
            origins,
        ):
            part = batch.slice(first, last - first)
            time.origins = origins and origins.of(part, slice(first, last))
            yield part, result

    def good_ranges(
        self,
        first: int,
        last: int,
        compute: Callable[[int, int], T],
        row: Callable[[int], pa.RecordBatch],
        origins: RowOrigins | None = None,
    ) -> Iterator[tuple[int, int, T]]:
        """Yields the ranges of positions that have no bad row, with the values computed from each range.

        ``row`` returns the row at a position: it is called for bad rows only. ``origins`` are those of all rows.
        """
        try:
            result = compute(first, last)
        except ServiceError:
            raise
        except self._caught as error:
            if last - first == 1:
                position, raw = origins.named(int(origins.rows[first])) if origins is not None else (None, None)
                self._take_failed(row(first), error, position, raw)
                return
            half = (first + last) // 2
            yield from self.good_ranges(first, half, compute, row, origins)
            yield from self.good_ranges(half, last, compute, row, origins)
            return
        yield first, last, result

    def barrier(self, checkpoint_id: int) -> None:
        """Writes the rows in front of a barrier."""
        self.flush()
        self._behind, self._files = checkpoint_id, 0

    def flush(self) -> None:
        """Writes the rows that are held."""
        if not self._held or self._directory is None:
            return
        context = self._context
        place = f"s{context.subtask_index}-a{context.attempt}-after{self._behind}-{self._files}"
        partial = self._directory.child(f".{self._prefix}{place}")
        with naming("write", partial), partial.filesystem.open(partial.path, "wb") as stream:
            pq.write_table(pa.Table.from_pylist(self._held, SCHEMA), stream)
        move_file(partial, self._directory.child(f"{self._prefix}{place}.parquet"))
        self._held = []
        self._files += 1

    def take_unread(self, bad: Sequence[BadRow]) -> None:
        """Takes rows that a source could not read."""
        for row in bad:
            self._take("MALFORMED_RECORD_IN_PARSING", row.reason, position=row.position, raw=row.raw)

    def _take_failed(self, row: pa.RecordBatch, error: Exception, position: str | None, raw: bytes | None) -> None:
        condition = error.condition if isinstance(error, EvaluationError) else type(error).__name__
        text = None
        if self._directory is not None:
            text = json.dumps(_fields(row), default=_as_text, ensure_ascii=False)
        self._take(condition, str(error), row=text, position=position, raw=raw)

    def _take(self, condition: str, reason: str, **found: Any) -> None:
        """Counts a bad row, logs it now and then, and keeps it with the columns that were ``found``."""
        self.dropped += 1
        reason = printable(reason, _MAX_REASON_CHARS)
        now_ms, monotonic_ms = self._context.now_ms(), self._context.monotonic_ms()
        if monotonic_ms >= self._log_at_ms:
            self._log_at_ms = monotonic_ms + _LOG_EVERY_MS
            _LOG.warning("%s: %d bad rows were dropped; the last one: %s", self._context.uid, self.dropped, reason)
        if self._directory is None:
            return
        at = datetime.fromtimestamp(now_ms / 1000, UTC)
        self._held.append({"at": at, "operator": self._context.uid, "condition": condition, "reason": reason, **found})
        if len(self._held) >= _ROWS_HELD:
            self.flush()

    def _delete_what_comes_again(self, directory: Location) -> None:
        context = self._context
        if not context.attempt:
            return
        pattern = re.compile(re.escape(self._prefix) + r"s([0-9]+)-a([0-9]+)-after([0-9]+)-[0-9]+(\.parquet)?")
        for name in list_names(directory):
            found = pattern.fullmatch(name.removeprefix("."))
            if found is None or int(found[1]) % context.parallelism != context.subtask_index:
                continue
            if int(found[2]) < context.attempt and (name.startswith(".") or int(found[3]) >= self._behind):
                place = directory.child(name)
                if exists(place):
                    delete_file(place)


class LeavesOutBadRows(Operator):
    """An operator whose bad rows may be left out. It computes through :meth:`_parts`.

    ``caught_for_bad_rows`` is what computing a bad row raises.
    """

    caught_for_bad_rows: type[Exception] = EvaluationError
    _bad_rows: BadRows | None = None

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        self._bad_rows = BadRows.of(context, self.caught_for_bad_rows)

    def prepare_snapshot(self, checkpoint_id: int) -> None:
        if self._bad_rows is not None:
            self._bad_rows.barrier(checkpoint_id)

    def finish(self) -> None:
        if self._bad_rows is not None:
            self._bad_rows.flush()

    def _parts(
        self, batch: pa.RecordBatch, compute: Callable[[pa.RecordBatch], T]
    ) -> Iterator[tuple[pa.RecordBatch, T]]:
        """Yields the rows of a batch, without the bad ones, with the computed values. Raises the error of a bad row if
        these fail the job."""
        if self._bad_rows is None:
            yield batch, compute(batch)
            return
        yield from self._bad_rows.left_out(batch, compute)
        self.bad_rows_dropped = self._bad_rows.dropped

    def _emit_from(
        self, part: pa.RecordBatch, batch: pa.RecordBatch, rows: slice | AnyArray | pa.BooleanArray = slice(None)
    ) -> None:
        """Emits a batch that was computed from rows of a part of the input, see :meth:`RowOrigins.of`."""
        time = self.context.chain_time
        before = time.origins
        if before is not None and before.batch is part:
            time.origins = before.of(batch, rows)
        self.output.emit(batch)
        time.origins = before

    def _where(
        self, pairs: int, holds: Callable[[int, int], AnyArray], pair: Callable[[int], pa.RecordBatch]
    ) -> AnyArray:
        """Returns for which pairs a condition of a join holds: for no bad one. ``holds`` gets a range of positions,
        and ``pair`` returns the row that stands for a pair."""
        if self._bad_rows is None:
            return holds(0, pairs)
        found = np.zeros(pairs, bool)
        for first, last, mask in self._bad_rows.good_ranges(0, pairs, holds, pair):
            found[first:last] = mask
        self.bad_rows_dropped = self._bad_rows.dropped
        return found


def as_pair(sides: tuple[str, str], rows: tuple[pa.RecordBatch, pa.RecordBatch]) -> pa.RecordBatch:
    """The row of a pair of rows, for dead letters: each column's name begins with that of its side."""
    names = [f"{side}.{name}" for side, row in zip(sides, rows, strict=True) for name in row.schema.names]
    return pa.record_batch([column for row in rows for column in row.columns], names)


def _fields(row: pa.RecordBatch) -> dict[str, Any]:
    """The columns of one row by name; the first of those that have one name."""
    fields: dict[str, Any] = {}
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            value = column[0].as_py()
        except (ValueError, OverflowError):  # a time that Python does not have
            value = str(column.cast(pa.string())[0])
        fields.setdefault(name, value)
    return fields


def _as_text(value: Any) -> Any:
    """Values without a form in JSON: bytes in base64, and times and decimals as texts."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
