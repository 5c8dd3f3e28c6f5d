"""How many rows of files wait to be read. A Parquet or ORC file is counted by its footer, others by their first lines.

One thread counts the next files, while the reader reads rows: reading never waits for a count. Later files, and those
that cannot be counted, are estimated from their sizes and from the rows per byte of the files that were counted or
read. In an object store a count costs a HEAD and a GET of the last 64 kB or the first 256 kB; each file is counted at
most once, and one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

from ckpt_runtime.connectors.file_rows import count_rows
from ckpt_runtime.sources import Split
from ckpt_runtime.storage.filesystem import Location

COUNTED_AHEAD = 32
"""How many of the next files are counted; the others are estimated."""


class WaitingRows:
    """The number of rows in the files that one reader has been given and has not read to the end.

    A file that cannot be counted is estimated like later ones: its fault is raised when its rows are read.
    """

    def __init__(self, format_: str, location: Callable[[Split], Location], options: dict[str, Any]) -> None:
        """``location`` returns the file of a split; ``options`` are those of the format."""
        self._format = format_
        self._location = location
        self._options = options
        # Starts its thread with the first count.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rows of files")
        self._counts: dict[str, Future[int]] = {}
        self._waiting_bytes = 0
        self._rows_of_counted = 0
        self._bytes_of_counted = 0

    def added(self, split: Split) -> None:
        self._waiting_bytes += split.description["size"]

    def ended(self, split: Split, rows: int) -> None:
        """A file was read to the end; it had so many rows."""
        size = split.description["size"]
        self._waiting_bytes -= size
        counted = self._counts.get(split.id)
        if counted is None or not counted.done() or counted.exception() is not None:
            self._rows_of_counted += rows
            self._bytes_of_counted += size

    def count(self, waiting: Iterable[tuple[Split, int]]) -> int | None:
        """Returns the rows of the waiting files, each given with its number of read rows; None before the first count.

        The files come in the order in which they will be read.
        """
        if not self._waiting_bytes:
            return 0
        rows, estimated_bytes = 0, self._waiting_bytes
        counts: dict[str, Future[int]] = {}
        read_of_estimated = 0
        for split, position in islice(waiting, COUNTED_AHEAD):
            size = split.description["size"]
            if not size:
                continue
            found = self._counts.get(split.id)
            if found is None:
                found = self._pool.submit(self._count, split)
            counts[split.id] = found
            if found.done() and found.exception() is None:
                rows += max(0, found.result() - position)
                estimated_bytes -= size
            else:
                read_of_estimated += position
        self._counts = counts
        if not estimated_bytes:
            return rows
        # The thread adds to both numbers; one that is a file ahead of the other makes the estimate a little worse.
        if not self._bytes_of_counted:
            return None
        estimate = estimated_bytes * self._rows_of_counted // self._bytes_of_counted
        return rows + max(0, estimate - read_of_estimated)

    def close(self) -> None:
        """Does not wait for a footer that is being read."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _count(self, split: Split) -> int:
        size = split.description["size"]
        rows = count_rows(self._format, self._location(split), size, self._options)
        self._rows_of_counted += rows
        self._bytes_of_counted += size
        return rows
