"""Formats ``parquet``, ``orc``, ``text`` and ``json``: the files of a directory, found while the job runs.

A split is a file; its position is the number of emitted rows. The enumerator lists the directory periodically and keeps
the names of the files that it has sent to readers. Like Spark, it takes files in the order in which they were written,
ignores names that begin with ``_`` or ``.``, and expects a file to be complete when it appears. Never changes a file,
except with ``cleanSource``, after the completion of the checkpoint that covers it. Directories whose names are like
``country=DE`` add columns, with the values that Spark gives them.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, ClassVar, NotRequired, TypedDict
from urllib.parse import quote

import numpy as np
import pyarrow as pa

from ckpt_runtime.connectors.file_rows import NoFooterError, batch_of, count_rows, open_rows
from ckpt_runtime.connectors.sink_log import SinkLog
from ckpt_runtime.connectors.splits import BuiltInSource
from ckpt_runtime.expressions import texts
from ckpt_runtime.expressions.functions.casts import caster
from ckpt_runtime.expressions.types import UnsupportedExpressionError
from ckpt_runtime.graph.bad_rows import bad_rows_of, marked, taken_apart
from ckpt_runtime.graph.schema import NonNegative
from ckpt_runtime.graph.source_formats import (
    SINK_LOG,
    is_pattern,
    name_pattern,
    parted_metadata,
    split_at_pattern,
    without_slashes_in_braces,
)
from ckpt_runtime.sources import (
    Offsets,
    PositionKind,
    Split,
    SplitEnumerator,
    SplitReader,
    SplitRows,
    StartPosition,
)
from ckpt_runtime.storage.filesystem import (
    FileEntry,
    Location,
    delete_file,
    file_entry,
    is_directory,
    list_entries,
    move_file,
    resolve,
)

_LOG = logging.getLogger(__name__)
_LIST_EVERY_MS = 500
_SPACES_AND_CONTROLS = [*range(0x80, 0xA1), 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000]
_QUOTED = {
    code: quote(chr(code), safe="")
    for code in (*range(128), *_SPACES_AND_CONTROLS)
    if code > 127 or not (chr(code).isalnum() or chr(code) in "/-_.!~*'():@&=+$,;")
}
"""The characters that Java's URIs quote in a path. All others beyond ASCII stay as they are."""


class _ListedFiles(TypedDict):
    """The state of an enumerator: the files that were sent, with the time of each in milliseconds.

    ``batches`` counts the discoveries that have found files; earlier releases did not.
    """

    seen: dict[str, int]
    oldest_ms: int
    batches: NotRequired[NonNegative]


class _FileDescription(TypedDict):
    """The known facts about a file to read; ``partition`` has the columns that its directories name.

    ``batch`` is the number of the discovery that has found it, which is Spark's ``logOffset``.
    """

    size: NonNegative
    modified_ms: int
    partition: dict[str, str | None]
    batch: NotRequired[NonNegative]


class FileSource(BuiltInSource):
    """The source of the file formats."""

    state_type: Any = _ListedFiles
    description_type: Any = _FileDescription
    position_type: Any = NonNegative
    start_positions: ClassVar[frozenset[PositionKind]] = frozenset({"earliest", "latest", "timestamp"})

    def __init__(self, format_: str, options: Mapping[str, str]) -> None:
        super().__init__(format_, options)
        self._finds_bad = str(self._values.get("mode")).upper() == "FAILFAST"

    @property
    def acknowledges(self) -> bool:
        return bool(self._values["cleanSource"] != "off")

    def open_enumerator(self, schema: pa.Schema, state: Any, *, bounded: bool) -> SplitEnumerator:
        return FileEnumerator(self._values, parted_metadata(schema)[0], state, bounded=bounded)

    def repositioned(
        self, schema: pa.Schema, state: Any, reading: Sequence[tuple[Split, Any]], position: StartPosition
    ) -> Any:
        """A time is that of the last change of a file: files that are not older are read from their beginnings."""
        match position.kind:
            case "earliest":
                return {"seen": {}, "oldest_ms": 0}
            case "timestamp":
                return {"seen": {}, "oldest_ms": position.time_ms}
        unlimited = {**self._values, "maxFilesPerTrigger": None, "maxBytesPerTrigger": None}
        there = FileEnumerator(unlimited, parted_metadata(schema)[0], state, bounded=True)
        there.discover()
        return there.snapshot()

    def open_reader(self, schema: pa.Schema, *, subtask: int, parallelism: int) -> SplitReader:
        return FileReader(self._format, self._values, schema, reports_bad=self.reports_bad and self._finds_bad)


class FileEnumerator(SplitEnumerator):
    """Lists a directory. Its state holds each file that was sent, with the time when the file was written."""

    idle_ms = _LIST_EVERY_MS

    def __init__(self, options: dict[str, Any], schema: pa.Schema, state: Any, *, bounded: bool) -> None:
        self._is_pattern = is_pattern(options["path"])
        self._root = resolve(split_at_pattern(options["path"])[0] if self._is_pattern else options["path"])
        # Without it, Spark takes no columns from directories that a pattern matches.
        self._base = (resolve(options["basePath"]) if options["basePath"] else None) if self._is_pattern else self._root
        self._wanted = name_pattern("pathGlobFilter", options["pathGlobFilter"] or "*")
        self._schema = schema
        self._options = options
        self._bounded = bounded
        self._seen: dict[str, int] = dict(state["seen"]) if state is not None else {}
        self._oldest_ms = state["oldest_ms"] if state is not None else 0
        self._batches: int = state.get("batches", 0) if state is not None else 0
        self._most_files: int | None = options["maxFilesPerTrigger"]
        self._most_bytes: int | None = options["maxBytesPerTrigger"]
        # Spark ignores the maximum age in this case, too: old files would be dropped before they were read.
        aged = not (options["latestFirst"] and (self._most_files or self._most_bytes))
        self._max_age_ms = options["maxFileAge"] if aged else None
        self._there: deque[tuple[FileEntry, dict[str, str | None]]] | None = None
        self._log = SinkLog(self._root)

    def discover(self) -> Sequence[Split]:
        """Lists the directory when all files of the last listing were sent, and with ``latestFirst`` each time, as
        Spark does: files that have come meanwhile are the newest. A bounded source lists it once.
        """
        is_used_up = not self._there or self._options["latestFirst"]
        if self._there is None or (is_used_up and not self._bounded):
            self._there = deque(self._new_files())
        splits: list[Split] = []
        size = 0
        while self._there and not self._is_enough(splits, size + self._there[0][0].size):
            entry, partition = self._there.popleft()
            size += entry.size
            self._seen[self._key(entry.location)] = entry.modified_ms
            url = entry.location.url
            description = {"size": entry.size, "modified_ms": entry.modified_ms, "partition": partition}
            splits.append(Split(url, {**description, "batch": self._batches}))
        self._batches += bool(splits)
        self._forget_old_files()
        return splits

    def _is_enough(self, splits: Sequence[Split], size: int) -> bool:
        """Whether the next file, with which all have so many bytes, has to wait for the next discovery."""
        if self._most_files is not None:
            return len(splits) >= self._most_files
        return self._most_bytes is not None and bool(splits) and size > self._most_bytes

    def snapshot(self) -> Any:
        return {"seen": dict(self._seen), "oldest_ms": self._oldest_ms, "batches": self._batches}

    def _key(self, location: Location) -> str:
        return location.name if self._options["fileNameOnly"] else location.url

    def _new_files(self) -> list[tuple[FileEntry, dict[str, str | None]]]:
        found = list(self._found())
        if not self._is_pattern and self._log:
            found = self._committed(found)
        self._check_partitions(found)
        fresh = [
            (entry, partition)
            for entry, partition in found
            if entry.modified_ms >= self._oldest_ms and self._key(entry.location) not in self._seen
        ]
        newest_first = self._options["latestFirst"]
        fresh.sort(key=lambda file: (file[0].modified_ms, file[0].location.path), reverse=newest_first)
        return fresh

    def _found(self) -> Iterator[tuple[FileEntry, dict[str, str | None]]]:
        """The files that are there, each with the columns that its directories name."""
        if not self._is_pattern:
            files, directories = _there(self._root)
            yield from ((entry, {}) for entry in files)
        else:
            files, directories = self._matching()
            yield from self._readable(files)
        for directory in directories:
            yield from self._files(directory)

    def _committed(
        self, found: Sequence[tuple[FileEntry, dict[str, str | None]]]
    ) -> list[tuple[FileEntry, dict[str, str | None]]]:
        """The files that the log of Spark's sink names; a file is there before the log names it."""
        if self._options["cleanSource"] != "off":
            raise ValueError(
                f"option 'cleanSource': the log {SINK_LOG} of Spark's sink names the files of {self._root.url}, which "
                "therefore have to stay: leave the option out, as Spark demands, too"
            )
        committed = self._log.committed()
        return [(entry, partition) for entry, partition in found if entry.location.path in committed]

    def _matching(self) -> tuple[list[FileEntry], list[Location]]:
        """The files and directories that the pattern in the path means. Hidden directories can match, as in Spark."""
        files: dict[str, FileEntry] = {}
        directories: dict[str, Location] = {}
        for pattern in without_slashes_in_braces(self._options["path"]):
            start, segments = split_at_pattern(pattern)
            some_files, some_directories = _there(resolve(start))
            for segment in segments:
                wanted = name_pattern("path", segment)
                listed = [list_entries(directory) for directory in some_directories]
                some_files = [entry for found, _ in listed for entry in found if wanted.fullmatch(entry.location.name)]
                inside = [each for _, found in listed for each in found if each.name != SINK_LOG]
                some_directories = [each for each in inside if wanted.fullmatch(each.name)]
            files |= {entry.location.url: entry for entry in some_files}
            directories |= {each.url: each for each in some_directories}
        return list(files.values()), list(directories.values())

    def _files(
        self, directory: Location, *, partitioned: bool = False
    ) -> Iterator[tuple[FileEntry, dict[str, str | None]]]:
        """The files below a directory. Within one that names a column, all directories count."""
        files, directories = list_entries(directory)
        yield from self._readable(files)
        for below in directories:
            names_column = partitioned or below.name.find("=") > 0
            if _is_visible(below.name) and (names_column or self._options["recursiveFileLookup"]):
                yield from self._files(below, partitioned=names_column)

    def _readable(self, files: Sequence[FileEntry]) -> Iterator[tuple[FileEntry, dict[str, str | None]]]:
        """The files of one directory that are visible and wanted, with the columns of their directories."""
        for entry in files:
            name = entry.location.name
            if _is_visible(name) and self._wanted.fullmatch(name):
                yield entry, self._partition(entry.location.parent)

    def _partition(self, directory: Location) -> dict[str, str | None]:
        if self._base is None or self._options["recursiveFileLookup"] or directory == self._base:
            return {}
        if not self._base.contains(directory):
            raise ValueError(f"option 'basePath': {directory.url} is not below {self._base.url}")
        return partition_of(directory.path.removeprefix(self._base.path).strip("/").split("/"))

    def _check_partitions(self, found: Sequence[tuple[FileEntry, dict[str, str | None]]]) -> None:
        """Spark puts columns of directories after all others: the program has to declare them there."""
        layouts = {tuple(partition) for _, partition in found}
        if len(layouts) > 1:
            raise ValueError(
                f"{self._root.url}: files are in directories with different partition columns: {sorted(layouts)}"
            )
        for layout in layouts:
            last = [name.lower() for name in self._schema.names[len(self._schema.names) - len(layout) :]]
            if [name.lower() for name in layout] != last:
                raise ValueError(
                    f"{self._root.url} is partitioned by {', '.join(layout)}: declare these columns as the last ones "
                    f"of the schema, in this order; it has {', '.join(self._schema.names)}"
                )

    def _forget_old_files(self) -> None:
        """Drops files that are older than the newest one by ``maxFileAge``: they leave the state and are not read."""
        if self._max_age_ms is None or self._there or not self._seen:
            return
        self._oldest_ms = max(self._oldest_ms, int(max(self._seen.values()) - self._max_age_ms))
        self._seen = {key: at for key, at in self._seen.items() if at >= self._oldest_ms}


def spark_path(location: Location) -> str:
    """The address of a file as Spark shows it: a URI, in which a local file has no authority."""
    if location.is_local:
        return "file:" + location.path.translate(_QUOTED)
    scheme, separator, path = location.url.partition("://")
    return scheme + separator + path.translate(_QUOTED)


def _there(location: Location) -> tuple[list[FileEntry], list[Location]]:
    """The file or the directory at a place. A directory of an object store need not exist."""
    if location.is_local and not is_directory(location):
        entry = file_entry(location)
        return ([] if entry is None else [entry]), []
    if not location.is_local and (entry := file_entry(location)) is not None:
        return [entry], []
    return [], [location]


def _is_visible(name: str) -> bool:
    """Applies Spark's rule, by which a directory ``_column=value`` is visible."""
    hidden = name.startswith(".") or (name.startswith("_") and "=" not in name)
    return not hidden and not name.endswith("._COPYING_")


class FileReader(SplitReader):
    """Reads one file after the other. A source that never leaves out files lacks the options that say so."""

    def __init__(self, format_: str, options: dict[str, Any], schema: pa.Schema, *, reports_bad: bool = False) -> None:
        self._format = format_
        self._options = options
        self._schema, self._metadata = parted_metadata(schema)
        self._reports_bad = reports_bad
        self._waiting: deque[tuple[Split, int]] = deque()
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._rest: pa.RecordBatch | None = None
        self._waiting_rows = WaitingRows(format_, self.location, options)
        self._first: int | None = None
        self._reached: int | None = None
        """The first batch of files that it has got, and the last one of which it has returned rows."""

    def add(self, split: Split, position: Any) -> None:
        if self._first is None:
            self._first = split.description.get("batch")
        self._waiting.append((split, position or 0))
        self._waiting_rows.added(split)

    def backlog(self) -> int | None:
        return self._waiting_rows.count(self._waiting)

    def offsets(self) -> tuple[Offsets, Offsets] | None:
        return None if self._reached is None else ({"logOffset": {"": self._reached}}, {})

    def begun(self) -> Offsets:
        return {} if self._first is None else {"logOffset": {"": self._first - 1}}

    def read(self, most_rows: int) -> SplitRows | None:
        if not self._waiting:
            return None
        split, position = self._waiting[0]
        self._reached = split.description.get("batch")
        if self._batches is None:
            self._batches = self._open(split, position)
        if self._rest is None:
            self._rest = next(self._batches, None)
        if self._rest is None:
            self._waiting.popleft()
            self._batches = None
            self._waiting_rows.ended(split, position)
            return SplitRows(split.id, position, ended=True)
        batch, rest = self._rest.slice(0, most_rows), self._rest.slice(most_rows)
        self._rest = rest if rest.num_rows else None
        position += batch.num_rows
        self._waiting[0] = (split, position)
        good, letters = taken_apart(batch) if self._reports_bad else (batch, None)
        if self._metadata is not None:
            good = self._with_metadata(good, split, position - batch.num_rows)
        return SplitRows(split.id, position, good, bad=bad_rows_of(letters))

    def completed(self, positions: Mapping[str, Any], ended: Sequence[Split]) -> None:
        """Deletes or archives files that were read. If that fails, the file stays and a warning is logged.

        A call that is repeated after a failure finds no file, or another one, which was not read and stays.
        """
        for split in ended:
            location = resolve(split.id)
            try:
                found = file_entry(location)
                if found is None:
                    continue
                if not _is_described(split, found):
                    _LOG.warning("cleanSource: %s stays, because it has changed since it was read", split.id)
                elif self._options["cleanSource"] == "delete":
                    delete_file(location)
                else:
                    archive = resolve(self._options["sourceArchiveDir"])
                    parts = [part for part in location.path.split("/") if part]
                    move_file(location, archive.child(*parts))
            except OSError as error:
                _LOG.warning("cleanSource: %s was not moved or deleted: %s", split.id, error)

    def close(self) -> None:
        self._batches = self._rest = None
        self._waiting.clear()
        self._waiting_rows.close()

    def location(self, split: Split) -> Location:
        """The file of a split."""
        return resolve(split.id)

    def check_unchanged(self, split: Split, position: int) -> None:
        """Raises ValueError if the file is another one than that whose first rows were read."""
        now = file_entry(self.location(split))
        if now is None or not _is_described(split, now):
            raise ValueError(
                f"{split.id} has changed after {position} of its rows were read; files must not change after they "
                "have appeared"
            )

    def _open(self, split: Split, position: int) -> Iterator[pa.RecordBatch]:
        description = split.description
        if not description["size"]:
            return  # as in Spark, in every format
        location = self.location(split)
        if self._options.get("ignoreMissingFiles") and file_entry(location) is None:
            _LOG.warning("ignoreMissingFiles: %s is gone, behind %d of its rows", split.id, position)
            return
        if position:
            self.check_unchanged(split, position)
        # The client of an object store reads one version of an object; a local file may change while it is open.
        before = file_entry(location) if location.is_local else None
        partition = description["partition"]
        names = {name.lower() for name in partition}
        inside = pa.schema([field for field in self._schema if field.name.lower() not in names])
        values = {name.lower(): text for name, text in partition.items()}
        skip = position
        for batch in self._readable(
            open_rows(self._format, location, inside, self._options, report_bad=self._reports_bad)
        ):
            if skip >= batch.num_rows:
                skip -= batch.num_rows
                continue
            yield self._with_partition(batch.slice(skip), values, location.url)
            skip = 0
        now = before and file_entry(location)  # None if it was deleted, which its open file outlives
        if before is not None and now is not None and now != before:
            raise ValueError(
                f"{split.id} has changed while it was read: it had {before.size} bytes, and has {now.size}; files must "
                "not change after they have appeared"
            )

    def _readable(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            yield from batches
        except NoFooterError as error:
            if not self._options.get("ignoreCorruptFiles"):
                raise
            _LOG.warning("ignoreCorruptFiles: %s", error)

    def _with_metadata(self, batch: pa.RecordBatch, split: Split, first: int) -> pa.RecordBatch:
        """Adds Spark's hidden column to rows of a file, whose first one has the index ``first`` in it.

        A file is read as one block.
        """
        assert self._metadata is not None
        location, size = self.location(split), split.description["size"]
        facts: dict[str, Any] = {
            "file_path": spark_path(location),
            "file_name": spark_path(location).rsplit("/", 1)[-1],
            "file_size": size,
            "file_block_start": 0,
            "file_block_length": size,
            "file_modification_time": split.description["modified_ms"] * 1000,
        }
        rows, columns = batch.num_rows, []
        for field in self._metadata.type:
            if field.name == "row_index":
                columns.append(pa.array(np.arange(first, first + rows)))
            else:
                columns.append(pa.repeat(pa.scalar(facts[field.name], field.type), rows))
        values = pa.StructArray.from_arrays(columns, fields=list(self._metadata.type))
        return pa.RecordBatch.from_arrays([*batch.columns, values], schema=batch.schema.append(self._metadata))

    def _with_partition(self, batch: pa.RecordBatch, values: dict[str, str | None], url: str) -> pa.RecordBatch:
        """Adds the columns that the file's directories name."""
        if not values:
            return batch
        columns = []
        for field in self._schema:
            text = values.get(field.name.lower())
            if field.name.lower() not in values:
                columns.append(batch.column(field.name))
                continue
            try:
                value = partition_value(text, field.type)
            except (ValueError, UnsupportedExpressionError) as error:
                problem = f"{url}: {text!r} of a directory is no {field.type}, the type of column {field.name!r}"
                raise ValueError(problem) from error
            columns.append(pa.repeat(value, batch.num_rows))
        whole = batch_of(columns, self._schema)
        return marked(whole, batch.column(batch.num_columns - 1)) if self._reports_bad else whole


def _is_described(split: Split, file: FileEntry) -> bool:
    """Whether a file is the one that was listed. What an object store says of one object has times in seconds only."""
    step_ms = 1 if file.location.is_local else 1000
    described = split.description
    return (file.size, file.modified_ms // step_ms) == (described["size"], described["modified_ms"] // step_ms)


_NULL = "__HIVE_DEFAULT_PARTITION__"
_ESCAPED = re.compile("%([0-9a-fA-F]{2})")


def partition_of(directories: Sequence[str]) -> dict[str, str | None]:
    """The columns of the names of directories, the outermost first, as texts.

    Only the last directories count that all name columns; others may lie below them. Raises ValueError.
    """
    columns: dict[str, str | None] = {}
    for directory in reversed(directories):
        name, equals, value = directory.partition("=")
        if not equals or not name:
            if columns:
                break
            continue
        if not value:
            raise ValueError(f"the directory {directory!r} gives column {name!r} no value")
        columns[_unescaped(name)] = None if value == _NULL else _unescaped(value)
    return dict(reversed(columns.items()))


def _unescaped(text: str) -> str:
    """Spark escapes a character of one byte as its code, and no other."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), text)


def partition_value(text: str | None, type_: pa.DataType) -> Any:
    """The value of a text as a scalar of a type. Raises ValueError if it is none."""
    if text is None or pa.types.is_string(type_) or pa.types.is_binary(type_):
        return pa.scalar(text, pa.string()).cast(type_)
    if pa.types.is_integer(type_):
        return pa.scalar(_integer(text, type_), type_)
    if type_ == pa.bool_():
        if text.lower() not in ("true", "false"):
            raise ValueError
        return pa.scalar(text.lower() == "true")
    if pa.types.is_floating(type_):
        number = texts.parse_double(text)
        if number is None:
            raise ValueError
        return pa.scalar(number, pa.float64()).cast(type_)
    if pa.types.is_decimal(type_):
        if texts.parse_decimal(text) is None:
            raise ValueError
        return _cast(text, f"decimal({type_.precision},{type_.scale})")  # null if it does not fit, as in Spark
    if pa.types.is_date(type_) or pa.types.is_timestamp(type_):
        kind = "date" if pa.types.is_date(type_) else "timestamp" if type_.tz else "timestamp_ntz"
        value = _cast(text, kind)
        if not value.is_valid:
            raise ValueError
        return value.cast(type_)
    raise ValueError("directories cannot name values of this type")


def _integer(text: str, type_: pa.DataType) -> int:
    """Java's parser, whose result loses its upper bits in a column of 8 or 16."""
    if not re.fullmatch("[+-]?[0-9]+", text):
        raise ValueError
    value, bits = int(text), max(32, type_.bit_width)
    if not -(1 << (bits - 1)) <= value < 1 << (bits - 1):
        raise ValueError
    half: int = 1 << (type_.bit_width - 1)
    return (value + half) % (2 * half) - half


def _cast(text: str, kind: str) -> Any:
    return caster("string", kind, "try", "UTC")(pa.array([text], pa.string()))[0]


COUNTED_AHEAD = 32
"""How many of the next files are counted; the others are estimated."""


class WaitingRows:
    """The number of rows in the files that one reader has been given and has not read to the end.

    A Parquet or ORC file is counted by its footer, others by their first lines. One thread counts the next files, while
    the reader reads rows: reading never waits for a count. Later files are estimated from their sizes and from the rows
    per byte of the files that were counted or read. In an object store a count costs a HEAD and a GET of the last 64 kB
    or the first 256 kB; each file is counted at most once, and one at a time.

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
        """A file with this number of rows was read to its end."""
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
