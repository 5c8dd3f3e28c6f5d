"""Format ``delta`` as a source: the rows of a table, and then those that each later version adds.

The enumerator reads the table's log. A split is a file that a version adds; its position is the number of emitted rows.
The state of the enumerator is a version and how many of its files were sent, so that it stays small for any size of the
table: files are sent in an order that a version always has. A version that deletes or changes rows fails the job,
unless an option handles it; so do files and versions that were removed before they were read. Never writes
to the table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Any, ClassVar, TypedDict
from urllib.parse import unquote

import pyarrow as pa

from ckpt_runtime.connectors.file_source import FileReader
from ckpt_runtime.connectors.splits import BuiltInSource
from ckpt_runtime.graph.delta_options import (
    IN_COMMIT_TIMESTAMPS,
    LATEST_VERSION,
    DeltaTableError,
    check_columns,
    check_partitions,
    check_readable,
    open_table,
    starting_ms,
)
from ckpt_runtime.graph.schema import NonNegative
from ckpt_runtime.sources import (
    PositionKind,
    Split,
    SplitEnumerator,
    SplitReader,
    StartPosition,
    single_offset,
)
from ckpt_runtime.storage.errors import NotFoundError
from ckpt_runtime.storage.filesystem import Location, exists, list_entries, read_bytes, resolve

_LOOK_EVERY_MS = 200
_GREATEST_COMMIT_BYTES = 1 << 30
_VERSIONS_AT_ONCE = 64
_LOG = "_delta_log"


class _ReadUpTo(TypedDict):
    """The state of an enumerator: ``index`` files of ``version`` were sent, and all of earlier versions.

    ``snapshot``: they are all files of the table at that version, not those that the version added. ``table`` is the
    table's own id.
    """

    table: str
    version: NonNegative
    index: NonNegative
    snapshot: bool


class _AddedFile(TypedDict):
    """The log's facts about a file: ``path`` is relative to the table, ``rows`` None if the log does not count them."""

    path: str
    version: NonNegative
    size: NonNegative
    rows: NonNegative | None
    partition: dict[str, str | None]


class DeltaSource(BuiltInSource):
    """The source of format ``delta``."""

    state_type: Any = _ReadUpTo
    description_type: Any = _AddedFile
    position_type: Any = NonNegative
    start_positions: ClassVar[frozenset[PositionKind]] = frozenset({"earliest", "latest", "timestamp", "offsets"})

    def open_enumerator(self, schema: pa.Schema, state: Any, *, bounded: bool) -> SplitEnumerator:
        return DeltaEnumerator(self._values, schema, state, bounded=bounded)

    def repositioned(
        self, schema: pa.Schema, state: Any, reading: Sequence[tuple[Split, Any]], position: StartPosition
    ) -> Any:
        """As a new job with one of the options does: ``earliest`` are all rows that the table has now."""
        start: dict[str, Any] = {"startingVersion": None, "startingTimestamp": None}
        match position.kind:
            case "latest":
                start["startingVersion"] = LATEST_VERSION
            case "timestamp":
                assert position.time_ms is not None
                start["startingTimestamp"] = datetime.fromtimestamp(position.time_ms / 1000, UTC).isoformat()
            case "offsets":
                start["startingVersion"] = single_offset(position.offsets, "version", least=0)
        return DeltaEnumerator({**self._values, **start}, schema, None, bounded=False).snapshot()

    def open_reader(self, schema: pa.Schema, *, subtask: int, parallelism: int) -> SplitReader:
        return DeltaReader(self._values, schema)


@dataclass(slots=True)
class _Commit:
    """The actions of one version. ``is_change``: it deletes rows, and perhaps adds changed ones in their place."""

    version: int
    added: list[dict[str, Any]] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    metadata: dict[str, Any] | None = None
    protocol: dict[str, Any] | None = None

    @classmethod
    def parsed(cls, version: int, data: bytes) -> _Commit:
        """Reads the lines of a log file. Files that were only rewritten, as by a compaction, are left out."""
        commit = cls(version)
        for line in data.splitlines():
            action = json.loads(line) if line.strip() else {}
            if (add := action.get("add")) is not None and add.get("dataChange", True):
                commit.added.append(add)
            elif (remove := action.get("remove")) is not None and remove.get("dataChange", True):
                commit.removed.append(remove["path"])
            commit.metadata = action.get("metaData") or commit.metadata
            commit.protocol = action.get("protocol") or commit.protocol
        return commit


@dataclass(frozen=True, slots=True)
class _Protocol:
    """A ``protocol`` action of the log, by the names of the library's class."""

    min_reader_version: int
    reader_features: list[str] | None


class DeltaEnumerator(SplitEnumerator):
    """Reads the log of a table, version by version."""

    idle_ms = _LOOK_EVERY_MS

    def __init__(self, options: dict[str, Any], schema: pa.Schema, state: Any, *, bounded: bool) -> None:
        self._options = options
        self._schema = schema
        self._most_bytes: int | None = options["maxBytesPerTrigger"]
        self._excluded: re.Pattern[str] | None = options["excludeRegex"]
        self._root = resolve(options["path"])
        self._path = self._root.path if self._root.is_local else options["path"]
        table = open_table(self._path)
        check_readable(table.protocol(), table.metadata().configuration)
        latest = table.version()
        self._table_id = str(table.metadata().id)
        self._last = latest if bounded else None
        self._files: list[_AddedFile] | None = None
        if state is None:
            self._version, self._is_snapshot = self._start(table)
            self._index = 0
        else:
            self._version, self._index, self._is_snapshot = state["version"], state["index"], state["snapshot"]
            self._check_table(state["table"], latest)
        if self._is_snapshot:
            self._files = self._files_of_snapshot(table)

    def discover(self) -> Sequence[Split]:
        """Returns files of one version or of several, at most ``maxFilesPerTrigger``.

        The file with which they have ``maxBytesPerTrigger`` is the last one.
        """
        splits: list[Split] = []
        versions = size = 0
        while self._has_room(len(splits), size) and (self._last is None or self._version <= self._last):
            if self._files is None:
                if splits and versions >= _VERSIONS_AT_ONCE:
                    break
                self._files = self._files_of_next_version()
                versions += 1
            if self._files is None:
                break
            while self._index < len(self._files) and self._has_room(len(splits), size):
                described = self._files[self._index]
                if self._excluded is None or not self._excluded.search(described["path"]):
                    splits.append(Split(f"{self._version}-{self._index}", described))
                    size += described["size"]
                self._index += 1
            if self._index >= len(self._files):
                self._version, self._index, self._is_snapshot, self._files = self._version + 1, 0, False, None
        return splits

    def _has_room(self, files: int, size: int) -> bool:
        return files < self._options["maxFilesPerTrigger"] and (self._most_bytes is None or size < self._most_bytes)

    def snapshot(self) -> Any:
        return {
            "table": self._table_id,
            "version": self._version,
            "index": self._index,
            "snapshot": self._is_snapshot,
        }

    def _start(self, table: Any) -> tuple[int, bool]:
        """The version to begin with, and whether all files of the table at that version are read first."""
        version, moment_ms = self._options["startingVersion"], starting_ms(self._options)
        if version == LATEST_VERSION:
            return table.version() + 1, False
        if isinstance(version, int):
            if version > table.version():
                raise DeltaTableError(
                    f"option 'startingVersion': {version} is greater than {table.version()}, the current version of "
                    f"the Delta table at {self._path}"
                )
            return version, False
        if moment_ms is not None:
            return self._version_at(moment_ms, table), False
        return table.version(), True

    def _version_at(self, moment_ms: int, table: Any) -> int:
        """The first version that is not older than a time. As in Spark, a log file's time is that of its last write."""
        if str(table.metadata().configuration.get(IN_COMMIT_TIMESTAMPS)).lower() == "true":
            raise DeltaTableError(
                f"option 'startingTimestamp': the Delta table at {self._path} has {IN_COMMIT_TIMESTAMPS}, whose "
                "timestamps this source does not support; set startingVersion"
            )
        written_ms = 0
        for entry in list_entries(self._root.child(_LOG))[0]:
            if (version := _version_of(entry.location.name)) is not None:
                written_ms = max(written_ms + 1, entry.modified_ms)  # times of versions grow, by definition
                if written_ms >= moment_ms:
                    return version
        raise DeltaTableError(
            f"option 'startingTimestamp': the Delta table at {self._path} has no version of that time or later; set "
            "an earlier time, or startingVersion=latest"
        )

    def _check_table(self, table_id: str, latest: int) -> None:
        if self._table_id != table_id:
            raise DeltaTableError(
                f"{self._path} holds another Delta table ({self._table_id}) than the one that the restored snapshot "
                f"has read ({table_id}): give the source a new uid, so that it starts from the beginning"
            )
        if self._version > latest + 1:
            raise DeltaTableError(
                f"the restored snapshot has read version {self._version - 1} of the Delta table at {self._path}, which "
                f"has {latest} as its latest version: versions were lost. Give the source a new uid"
            )

    def _files_of_snapshot(self, table: Any) -> list[_AddedFile]:
        """All files of the table at the version, oldest first, as Spark reads them."""
        if table.version() != self._version:
            table = open_table(self._path, self._version)
        self._check_schema(table.schema().to_json(), list(table.metadata().partition_columns))
        if "deletionVectors" in (table.protocol().reader_features or ()):
            for found in pa.table(table.deletion_vectors()).column(0).to_pylist()[:1]:
                raise self._deletion_vector(found)
        actions = pa.table(table.get_add_actions(flatten=False)).to_pylist()
        actions.sort(key=lambda action: (action["modification_time"], action["path"]))
        return [
            self._described(
                action["path"],
                action["size_bytes"],
                action["num_records"],
                {name: _text_of(value) for name, value in (action.get("partition") or {}).items()},
            )
            for action in actions
        ]

    def _files_of_next_version(self) -> list[_AddedFile] | None:
        """The files that a version adds; None if there is no such version yet."""
        data = self._log_file(self._version)
        if data is None:
            return None
        commit = _Commit.parsed(self._version, data)
        if commit.protocol is not None:
            features = commit.protocol.get("readerFeatures")
            check_readable(_Protocol(commit.protocol["minReaderVersion"], features), {})
        if commit.metadata is not None:
            self._check_table(commit.metadata["id"], self._version)
            check_readable(_Protocol(1, None), commit.metadata.get("configuration") or {})
            self._check_schema(commit.metadata["schemaString"], commit.metadata["partitionColumns"])
        if not self._reads(commit):
            return []
        for add in commit.added:
            if add.get("deletionVector") is not None:
                raise self._deletion_vector(add["path"])
        return [
            self._described(
                add["path"],
                add["size"],
                json.loads(add.get("stats") or "{}").get("numRecords"),
                {name: value or None for name, value in add["partitionValues"].items()},
            )
            for add in commit.added
        ]

    def _log_file(self, version: int) -> bytes | None:
        """The actions of a version; None if there is none yet. Raises DeltaTableError if its log was cleaned up."""
        file = self._root.child(_LOG, f"{version:020}.json")
        was_cleaned_up = False
        while True:
            try:
                return read_bytes(file, _GREATEST_COMMIT_BYTES)
            except NotFoundError:
                if was_cleaned_up:
                    raise DeltaTableError(
                        f"version {version} of the Delta table at {self._path} was removed from its log before it was "
                        "read. Give the source a new uid, so that it starts with the table's current rows, or set "
                        "option startingVersion"
                    ) from None
            # Only versions before a checkpoint of the log are removed. This one may have appeared in the meantime.
            if self._checkpointed_version() < version:
                return None
            was_cleaned_up = True

    def _checkpointed_version(self) -> int:
        """The version of the log's last checkpoint, -1 without one."""
        hint = self._root.child(_LOG, "_last_checkpoint")
        try:
            return int(json.loads(read_bytes(hint, 1 << 20))["version"]) if exists(hint) else -1
        except (NotFoundError, ValueError):
            return -1  # it is being replaced

    def _reads(self, commit: _Commit) -> bool:
        """Whether the files that a version adds are read. Raises DeltaTableError for a change of rows."""
        options = self._options
        if not commit.removed or (options["ignoreChanges"] and not options["skipChangeCommits"]):
            return True
        if options["skipChangeCommits"]:
            return False
        if not commit.added:
            if options["ignoreDeletes"]:
                return False
            way_out = "With option ignoreDeletes the source skips it"
        else:
            way_out = (
                "With option skipChangeCommits the source skips it; with ignoreChanges it reads the rewritten files, "
                "whose unchanged rows are emitted again"
            )
        what = "changes" if commit.added else "deletes"
        raise DeltaTableError(
            f"version {commit.version} of the Delta table at {self._path} {what} rows (file {commit.removed[0]!r} was "
            f"removed), but a stream only reads added rows. {way_out}"
        )

    def _check_schema(self, text: str, partition_columns: Sequence[str]) -> None:
        check_columns(text, self._schema, self._version)
        check_partitions(self._schema, partition_columns)

    def _described(self, path: str, size: int, rows: int | None, partition: dict[str, str | None]) -> _AddedFile:
        decoded = unquote(path)
        if "://" in path or decoded.startswith("/"):
            raise DeltaTableError(
                f"the Delta table at {self._path} has a file outside of its directory, {path!r}, like a shallow "
                "clone; such tables cannot be read"
            )
        return {"path": decoded, "version": self._version, "size": size, "rows": rows, "partition": partition}

    def _deletion_vector(self, path: str) -> DeltaTableError:
        return DeltaTableError(
            f"version {self._version} of the Delta table at {self._path} has a deletion vector for file {path!r}, "
            "which this source does not support: run REORG TABLE ... APPLY (PURGE), or set option skipChangeCommits "
            "for later versions"
        )


def _version_of(name: str) -> int | None:
    """The version that a file of the log describes; None for other files."""
    stem, _, ending = name.partition(".")
    return int(stem) if ending == "json" and len(stem) == 20 and stem.isdigit() else None


def _text_of(value: Any) -> str | None:
    """A partition's value as the log has it."""
    if value is None or value == "":
        return None
    if isinstance(value, bool):
        return str(value).lower()
    return value.isoformat() if isinstance(value, date) else str(value)


class DeltaReader(FileReader):
    """Reads the Parquet files of a table. A file with the log's name never changes; it can only be removed."""

    def __init__(self, options: dict[str, Any], schema: pa.Schema) -> None:
        super().__init__("parquet", options, schema)
        self._root = resolve(options["path"])

    def location(self, split: Split) -> Location:
        """Raises InvalidLocationError for a path of the log that leads out of the table's directory."""
        return self._root.child(*split.description["path"].split("/"))

    def check_unchanged(self, split: Split, position: int) -> None:
        """Does nothing, see the class."""

    def backlog(self) -> int | None:
        """The log has the number of rows of most files; the others are counted like files of format ``parquet``."""
        counts = [(split.description["rows"], position) for split, position in self._waiting]
        if any(rows is None for rows, _ in counts):
            return super().backlog()
        return sum(int(rows) - position for rows, position in counts)

    def _open(self, split: Split, position: int) -> Iterator[pa.RecordBatch]:
        try:
            yield from super()._open(split, position)
        except NotFoundError as error:
            raise DeltaTableError(
                f"a file of version {split.description['version']} of a Delta table was removed before its rows were "
                f"read, {self.location(split).url}, as VACUUM does. Give the source a new uid, so that it starts "
                "with the table's current rows, or set option startingVersion"
            ) from error
