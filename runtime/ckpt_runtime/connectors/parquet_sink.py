"""Format ``parquet``: a directory of Parquet files, each row in exactly one visible file, by two-phase commit.

Rows go to a hidden file. A snapshot closes it and renames it to a hidden pending name; the checkpoint's completion
renames that to its visible name. An abort changes nothing: the next checkpoint covers the file. The pending files are
list state, split among the restored subtasks at any parallelism; each commits its own and together they cover the
snapshot. (Union state would give all names to each, but then no checkpoint can be taken once some subtasks have ended.)
Files that an earlier attempt left behind and the snapshot does not cover are recognized by their names and deleted, and
so are those of ended jobs that had the same sink before this one. Never touches files of another sink or of a job that
may be alive. At the end of the job the driver cleans up (``jobmaster/sink_clean_up.py``).
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Struct

from ckpt_runtime.checkpoint.sink_state import PENDING, SINK_ID, SinkLineage
from ckpt_runtime.checkpoint.state_handles import OperatorStateMode
from ckpt_runtime.connectors.part_directory import CommitError, PartDirectory, sync_and_close
from ckpt_runtime.connectors.part_names import PartName, owner_of, parse_hidden
from ckpt_runtime.graph.formats import sink_options
from ckpt_runtime.graph.specs import SinkSpec
from ckpt_runtime.operators.operator import Operator, OperatorContext, Output

_ROW_GROUP_ROWS = 131_072
_LOG = logging.getLogger(__name__)


class _StoredPending(Struct):
    directory: str
    name: str


@dataclass(frozen=True, slots=True)
class _Pending:
    """A file that the completion of its checkpoint, or of a later one, makes visible."""

    directory: str
    part: PartName

    def to_json(self) -> dict[str, Any]:
        return {"directory": self.directory, "name": self.part.pending}

    @classmethod
    def of(cls, item: _StoredPending) -> _Pending:
        part = parse_hidden(item.name)
        if part is None or part.checkpoint is None:
            raise CommitError(f"restored state names {item.name!r}, which is no pending file")
        return cls(item.directory, part)


class _PartFile:
    """One Parquet file being written; rows are held back until they fill a row group."""

    def __init__(self, directory: PartDirectory, part: PartName, schema: pa.Schema, compression: Any) -> None:
        self.part = part
        self.rows = 0
        self._schema = schema
        self._held: list[pa.RecordBatch] = []
        self._held_rows = 0
        self._file = directory.open_for_writing(part.in_progress)
        self._writer = pq.ParquetWriter(self._file, schema, compression=compression)

    def write(self, batch: pa.RecordBatch) -> None:
        self.rows += batch.num_rows
        self._held.append(batch)
        self._held_rows += batch.num_rows
        if self._held_rows >= _ROW_GROUP_ROWS:
            self._flush()

    def finish(self) -> None:
        """Writes the footer; the file is complete and durable."""
        if self._held:
            self._flush()
        self._writer.close()
        sync_and_close(self._file)

    def abandon(self) -> None:
        """Closes the file; its content is discarded."""
        self._held = []
        try:
            self._writer.close()
        finally:
            self._file.close()

    def _flush(self) -> None:
        self._writer.write_table(pa.Table.from_batches(self._held, self._schema))
        self._held = []
        self._held_rows = 0


class ParquetSink(Operator):
    """The operator behind format ``parquet``."""

    def __init__(self, spec: SinkSpec) -> None:
        assert isinstance(spec.format, str)
        options = sink_options(spec.format, spec.options)
        self._directory = PartDirectory(options["path"])
        self._compression: Any = options["compression"]
        self._max_rows = int(options["maxRowsPerFile"])
        self._ignore_missing = options["onMissing"] == "ignore"
        self._open: _PartFile | None = None
        self._closed: list[PartName] = []
        self._pending: list[_Pending] = []
        self._sequence = 0

    def open(self, context: OperatorContext, output: Output) -> None:
        """Commits what the restored snapshot covers, and removes what it does not."""
        super().open(context, output)
        if context.sink is None:
            raise ValueError(f"sink {context.uid!r} was deployed without its id")
        self._lineage: SinkLineage = context.sink
        self._owner = owner_of(context.job_id, context.uid, self._lineage.sink_id)
        self._directory.create()
        restored = [_Pending.of(item) for item in context.operator_state.restored(PENDING, _StoredPending)]
        self._commit(restored, "restored")
        self._delete_leftovers()

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        while batch.num_rows:
            if self._open is None:
                self._open = self._new_file(batch.schema)
            room = self._max_rows - self._open.rows if self._max_rows else batch.num_rows
            self._open.write(batch.slice(0, room))
            batch = batch.slice(room)
            if self._max_rows and self._open.rows >= self._max_rows:
                self._close_file()

    def process_watermark(self, timestamp_ms: int) -> None:
        """Drops the watermark: a sink has no output."""

    def snapshot(self, checkpoint_id: int) -> None:
        self._close_file()
        for closed in self._closed:
            part = replace(closed, checkpoint=checkpoint_id)
            self._directory.make_pending(part)
            self._pending.append(_Pending(self._directory.url, part))
        self._closed = []
        items = [pending.to_json() for pending in self._pending]
        self.context.operator_state.put(PENDING, items, OperatorStateMode.SPLIT)
        self.context.operator_state.put(SINK_ID, [self._lineage.sink_id], OperatorStateMode.SPLIT)

    def notify_complete(self, checkpoint_id: int) -> None:
        # Includes files of earlier checkpoints, whose notification may have been lost.
        covered = [pending for pending in self._pending if (pending.part.checkpoint or 0) <= checkpoint_id]
        self._pending = [pending for pending in self._pending if pending not in covered]
        self._commit(covered, f"checkpoint {checkpoint_id}")

    def finish(self) -> None:
        """Closes the last file: the final checkpoint makes it pending and commits it."""
        self._close_file()

    def close(self) -> None:
        """Deletes what no snapshot covers; pending files stay, the latest checkpoint may cover them."""
        uncovered = list(self._closed)
        if self._open is not None:
            uncovered.append(self._open.part)
            self._open.abandon()
        self._open = None
        self._closed = []
        for part in uncovered:
            self._directory.delete(part.in_progress)

    def _new_file(self, schema: pa.Schema) -> _PartFile:
        part = PartName(
            self._owner, self.context.subtask_index, self.context.attempt, self._sequence, secrets.token_hex(4)
        )
        self._sequence += 1
        return _PartFile(self._directory, part, schema, self._compression)

    def _close_file(self) -> None:
        if self._open is None:
            return
        self._open.finish()
        self._closed.append(self._open.part)
        self._open = None

    def _commit(self, files: list[_Pending], cause: str) -> None:
        """Commits all files, continues after errors and raises at the end: every file that can become visible does."""
        missing: list[str] = []
        errors: list[Exception] = []
        for pending in files:
            directory = self._directory
            try:
                if pending.directory != directory.url:
                    directory = PartDirectory(pending.directory)
                if not directory.commit(pending.part):
                    missing.append(f"{pending.directory}/{pending.part.pending}")
            except OSError as error:
                errors.append(error)
        if errors:
            raise CommitError(f"{cause}: {len(errors)} of {len(files)} files not committed; first: {errors[0]}")
        if missing and self._ignore_missing:
            _LOG.warning("%s: %d pending files are gone and are ignored, first %s", cause, len(missing), missing[0])
        elif missing:
            raise CommitError(
                f"{cause}: neither the pending file {missing[0]} nor its visible form exists ({len(missing)} such); "
                "its rows are lost, or were removed by their reader: set option onMissing=ignore to go on without them"
            )

    def _delete_leftovers(self) -> None:
        """Deletes files that earlier writers of this sink left; the writer's number decides which subtask does it."""
        restored = self.context.restored_checkpoint_id or 0
        covered = max(restored, self._lineage.savepoint_id)
        former = [owner_of(job_id, self.context.uid, self._lineage.sink_id) for job_id in self._lineage.ended_jobs]
        for part in self._directory.hidden_parts():
            if part.subtask % self.context.parallelism != self.context.subtask_index:
                continue
            if part.owner == self._owner:
                # Files of this attempt belong to other subtasks, which are still writing them.
                left = part.attempt < self.context.attempt and (part.checkpoint or covered + 1) > covered
            else:
                left = part.owner in former and (part.checkpoint or restored + 1) > restored
            if left:
                self._directory.delete(part.hidden)
