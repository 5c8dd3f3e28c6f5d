"""Format ``replay``: replays a Parquet file or directory as a stream, in file order, at a chosen rate.

With ``partitionBy`` a row belongs to the split of its key's stable hash and every subtask scans the file for its own
splits, so that rows of one key stay in order at any parallelism; ``a,b`` means "by a, and by b where a is null".
Without it, splits are contiguous row ranges. A split's position is the number of the next row to look at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ckpt_runtime.connectors.splits import SPLITS, Pacer, SplitPosition, assigned_splits, put_positions
from ckpt_runtime.graph.formats import is_parquet_name, source_options, source_schema
from ckpt_runtime.graph.schema import NonNegative
from ckpt_runtime.graph.specs import SourceSpec
from ckpt_runtime.operators.operator import OperatorContext, Output, SourceOperator, SourceStatus
from ckpt_runtime.state.hashing import hash_arrays, key_groups_of
from ckpt_runtime.storage.filesystem import Location, is_directory, list_names, naming, resolve


@dataclass(frozen=True, slots=True)
class _RowGroup:
    file: str
    index: int
    first_row: int
    rows: int


class ParquetRows:
    """Row ``i`` is the ``i``-th row of all files in name order."""

    def __init__(self, url: str, schema: pa.Schema) -> None:
        """Columns are read by name and cast to ``schema``. Raises StorageError, or ValueError if there is no file."""
        self._location = resolve(url)
        self._schema = schema
        self._groups: list[_RowGroup] = []
        self._open: tuple[str, Any, pq.ParquetFile] | None = None
        files = _files(self._location)
        if not files:
            raise ValueError(f"option 'path': {url!r} contains no Parquet files")
        self.rows = 0
        for file in files:
            metadata = self._file(file).metadata
            for index in range(metadata.num_row_groups):
                count = metadata.row_group(index).num_rows
                self._groups.append(_RowGroup(file, index, self.rows, count))
                self.rows += count

    def read(self, start: int, stop: int, batch_rows: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Batches of at most ``batch_rows`` rows from row ``start`` up to ``stop``, each with its first row number."""
        for group in self._groups:
            if group.first_row + group.rows <= start or group.first_row >= stop:
                continue
            table = self._read_group(group)
            first = max(start - group.first_row, 0)
            last = min(stop - group.first_row, group.rows)
            row = group.first_row + first
            for batch in table.slice(first, last - first).to_batches(max_chunksize=batch_rows):
                if batch.num_rows:
                    yield row, batch
                    row += batch.num_rows

    def close(self) -> None:
        """Closes the file that is open."""
        if self._open is not None:
            self._open[2].close()
            self._open[1].close()
            self._open = None

    def _read_group(self, group: _RowGroup) -> pa.Table:
        with naming("read", self._location):
            table = self._file(group.file).read_row_group(group.index, columns=self._schema.names)
        return table.select(self._schema.names).cast(self._schema)

    def _file(self, path: str) -> pq.ParquetFile:
        if self._open is None or self._open[0] != path:
            self.close()
            with naming("open", self._location):
                stream = self._location.filesystem.open(path, "rb")
                self._open = (path, stream, pq.ParquetFile(stream))
        return self._open[2]


def _files(location: Location) -> list[str]:
    """The Parquet files of a location, in name order: itself, or the visible ones in the directory."""
    if not is_directory(location):
        return [location.path]
    return [location.child(name).path for name in list_names(location) if is_parquet_name(name)]


_NOT_MINE = np.iinfo(np.int64).max

_Chunks = Iterator[tuple[int, pa.RecordBatch]]


class _Position(SplitPosition):
    """``by`` are the columns of ``partitionBy``, ``rows`` the rows that the files had."""

    by: list[str]
    rows: NonNegative


class ReplayChangedError(ValueError):
    """The restored positions belong to other files, or to another value of option ``partitionBy``."""


class ReplaySource(SourceOperator):
    """The operator of format ``replay``. ``rowsPerSecond`` is the rate of all subtasks together."""

    requires_final_checkpoint = False

    def __init__(self, spec: SourceSpec) -> None:
        assert isinstance(spec.format, str)
        options = source_options(spec.format, spec.options)
        self._path = str(options["path"])
        self._schema = source_schema(spec.format, spec.options, spec.schema)
        self._rate = float(options["rowsPerSecond"])
        self._batch_rows = int(options["batchRows"])
        self._partition_by = list(options["partitionBy"])
        self._rows: ParquetRows | None = None
        self._chunk: tuple[int, pa.RecordBatch] | None = None

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        self._rows = ParquetRows(self._path, self._schema)
        splits = assigned_splits(context, _Position, contiguous=not self._partition_by)
        total = self._rows.rows
        self._next = np.full(SPLITS, _NOT_MINE, dtype=np.int64)
        for split, item in splits.items():
            if item is None:
                self._next[split] = 0 if self._partition_by else split * total // SPLITS
            else:
                self._check_restored(item, total)
                self._next[split] = item.position
        if not self._partition_by:  # otherwise the rows' keys determine which rows belong to this subtask
            ends = ((split + 1) * total // SPLITS for split in splits)
            self.pending_rows = sum(
                max(0, end - int(self._next[split])) for split, end in zip(splits, ends, strict=True)
            )
        share = 1.0 if self._partition_by else len(splits) / SPLITS
        self._pacer = Pacer(self._rate * share, context.monotonic_ms)
        self._chunks = self._scan_all() if self._partition_by else self._scan_ranges()

    def poll(self) -> SourceStatus:
        if self._chunk is None:
            self._chunk = next(self._chunks, None)
            if self._chunk is None:
                return SourceStatus.END_OF_INPUT
        row, batch = self._chunk
        count = min(self._pacer.allowance(), self.most_rows, batch.num_rows)
        if count <= 0:
            return SourceStatus.NOTHING_AVAILABLE
        self._pacer.spend(count)
        if self.pending_rows is not None:
            self.pending_rows -= count
        self._chunk = (row + count, batch.slice(count)) if count < batch.num_rows else None
        mine = self._take(row, batch.slice(0, count))
        if mine.num_rows:
            self.output.emit(mine)
        return SourceStatus.MORE_AVAILABLE

    def idle_ms(self) -> int:
        return self._pacer.idle_ms()

    def snapshot(self, checkpoint_id: int) -> None:
        assert self._rows is not None
        fixed = {"rows": self._rows.rows, "by": self._partition_by}
        items = ({"split": s, "position": int(self._next[s]), **fixed} for s in self._own_splits())
        put_positions(self.context.operator_state, items)

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()

    def _check_restored(self, item: _Position, total: int) -> None:
        if item.by != self._partition_by:
            raise ReplayChangedError(
                f"source {self.context.uid!r}: option 'partitionBy' is {self._partition_by}, but the restored "
                f"positions belong to {item.by}; keep it, or give the source a new uid to start over"
            )
        grown = bool(self._partition_by) and total >= item.rows
        if item.rows != total and not grown:
            raise ReplayChangedError(
                f"source {self.context.uid!r}: {self._path!r} contains {total} rows, but the restored positions "
                f"belong to {item.rows}; the files must not change, except that partitioned replays may grow at the "
                "end"
            )

    def _own_splits(self) -> list[int]:
        return [int(split) for split in np.flatnonzero(self._next != _NOT_MINE)]

    def _scan_all(self) -> _Chunks:
        """All rows from the lowest position of an own split."""
        assert self._rows is not None
        start = int(self._next.min())
        if start == _NOT_MINE:
            return iter(())
        return self._rows.read(start, self._rows.rows, self._batch_rows)

    def _scan_ranges(self) -> _Chunks:
        """The remaining range of each own split, in sequence; adjacent ranges are read as one."""
        assert self._rows is not None
        total = self._rows.rows
        ranges: list[tuple[int, int]] = []
        for split in self._own_splits():
            start, stop = int(self._next[split]), (split + 1) * total // SPLITS
            if start >= stop:
                continue
            if ranges and ranges[-1][1] == start:
                start = ranges.pop()[0]
            ranges.append((start, stop))
        for start, stop in ranges:
            yield from self._rows.read(start, stop, self._batch_rows)

    def _take(self, row: int, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Records that a run of rows was scanned, and returns those of own splits that were not emitted before."""
        end = row + batch.num_rows
        if not self._partition_by:
            assert self._rows is not None
            starts = np.arange(SPLITS, dtype=np.int64) * self._rows.rows // SPLITS
            touched = (self._next != _NOT_MINE) & (starts < end) & (self._next < end)
            stops = np.append(starts[1:], self._rows.rows)
            self._next[touched & (stops > row)] = np.minimum(end, stops)[touched & (stops > row)]
            return batch
        splits = key_groups_of(self._hashes(batch), SPLITS)
        wanted = np.arange(row, end, dtype=np.int64) >= self._next[splits]
        own = self._next != _NOT_MINE
        self._next[own] = np.maximum(self._next[own], end)
        return batch if wanted.all() else batch.filter(pa.array(wanted))

    def _hashes(self, batch: pa.RecordBatch) -> npt.NDArray[np.uint64]:
        """The hash of the first partition column that is not null."""
        result: npt.NDArray[np.uint64] | None = None
        for name in reversed(self._partition_by):
            column = batch.column(name)
            hashes = hash_arrays([column], [name])
            if result is None or not column.null_count:
                result = hashes
            else:
                valid = column.is_valid().to_numpy(zero_copy_only=False)
                result = np.where(valid, hashes, result)
        assert result is not None
        return result
