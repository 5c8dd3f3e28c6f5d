"""The built-in sources that are read split by split, at planning time: their options, and the schemas that they emit.

The names of formats, options and columns are Spark's. Patterns in the paths and names of files are Hadoop's: ``*``,
``?``, ``[a-c]``, ``[^a]``, ``{a,b}``, and a backslash. The operators of the formats are in ``connectors/``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyarrow as pa

from ckpt_runtime.graph.delta_options import DELTA_SOURCE_OPTIONS, delta_schema
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.kafka_options import KAFKA_SOURCE_OPTIONS, PREFIX, kafka_schema
from ckpt_runtime.graph.options import Option, absolute, duration_in_s, duration_ms, parse_options
from ckpt_runtime.graph.postgres_options import POSTGRES_SOURCE_OPTIONS, postgres_schema
from ckpt_runtime.graph.text_files import CSV_OPTIONS, JSON_OPTIONS, CsvRows, JsonRows

SourceSchema = Callable[[dict[str, Any], pa.Schema | None], pa.Schema]


@dataclass(frozen=True, slots=True)
class SourceFormat:
    """A built-in source: its options and ``schema(options, declared schema)``.

    ``splits``: it is read split by split. ``ends``: it can be read up to the end of the data that is present at the
    start. Options with the ``prefix`` belong to another library; they are one value, which has the prefix as its key.
    """

    name: str
    options: tuple[Option, ...]
    schema: SourceSchema
    splits: bool = False
    ends: bool = True
    prefix: str | None = None

    def parsed(self, options: Mapping[str, str]) -> dict[str, Any]:
        """The values of options. Raises PlanError."""
        if self.prefix is None:
            return parse_options(self.name, self.options, options)
        others = {key: value for key, value in options.items() if key.lower().startswith(self.prefix)}
        own = {key: value for key, value in options.items() if key not in others}
        return {**parse_options(self.name, self.options, own), self.prefix: others}


def is_local_path(path: str) -> bool:
    """Whether a location is a path of this machine's file system."""
    return path.startswith(("/", "file:/"))


_FILE_OPTIONS = (
    Option("path", absolute, required=True),
    Option("maxFilesPerTrigger", int, None, minimum=1),
    Option("maxBytesPerTrigger", int, None, minimum=1),
    Option("basePath", absolute),
    Option("maxFileAge", duration_ms, duration_ms("7d")),
    Option("latestFirst", bool, False),
    Option("fileNameOnly", bool, False),
    Option("recursiveFileLookup", bool, False),
    Option("pathGlobFilter"),
    Option("cleanSource", default="off", choices=("off", "archive", "delete")),
    Option("sourceArchiveDir", absolute),
    Option("ignoreCorruptFiles", bool, False),
    Option("ignoreMissingFiles", bool, False),
    Option("inferSchema", bool, False),
    Option("mergeSchema", bool, False),
    Option("maxCachedFiles", int, 10_000, minimum=0),
    Option("discardCachedInputRatio", float, 0.2, minimum=0),
)
"""The last four have no effect: two only matter when Spark infers a schema, two limit what Spark keeps in memory."""


SINK_LOG = "_spark_metadata"
"""The directory, in one that Spark's streaming sink of files has written, of the log of its files."""


def taken_by_spark(path: str) -> PlanError:
    """The error of a sink whose directory has a log of Spark's sink."""
    return PlanError(
        "option 'path'",
        f"a streaming query of Spark has written to {path!r}, and Spark reads only the files there that the log "
        f"{SINK_LOG} names, which would be none of this sink: write to another directory, or remove the log and all "
        "files that it does not name",
    )


FILE_METADATA = "_metadata"
"""Spark's hidden column of a source of files: facts about the file of each row."""
_FILE_FACTS: list[tuple[str, pa.DataType]] = [
    ("file_path", pa.string()),
    ("file_name", pa.string()),
    ("file_size", pa.int64()),
    ("file_block_start", pa.int64()),
    ("file_block_length", pa.int64()),
    ("file_modification_time", pa.timestamp("us", "UTC")),
]
_MARK = {b"of": b"file"}
"""Distinguishes the hidden column from a declared column of the same name."""


def with_file_metadata(format_: str, schema: pa.Schema) -> pa.Schema:
    """Returns the schema of a source of files with the hidden column behind the others."""
    facts = [*_FILE_FACTS, ("row_index", pa.int64())] if format_ == "parquet" else _FILE_FACTS
    column: pa.Field[Any] = pa.field(FILE_METADATA, pa.struct(facts), metadata=_MARK)
    return schema.append(column)


def parted_metadata(schema: pa.Schema) -> tuple[pa.Schema, pa.Field[Any] | None]:
    """Returns the schema of the rows in files, and the hidden column if it was requested."""
    last = schema.field(len(schema) - 1) if len(schema) else None
    if last is None or last.metadata != _MARK:
        return schema, None
    return pa.schema(list(schema)[:-1]), last


def _file_schema(options: dict[str, Any], declared: pa.Schema | None) -> pa.Schema:
    _check_patterns(options)
    if options["maxFilesPerTrigger"] and options["maxBytesPerTrigger"]:
        raise PlanError("option 'maxBytesPerTrigger'", "it cannot be set together with maxFilesPerTrigger, as in Spark")
    if options.get("lineSep") == "":
        raise PlanError("option 'lineSep'", "it is empty; leave it out for lines that end with LF, CR or both")
    archive = options["sourceArchiveDir"]
    if options["cleanSource"] == "archive":
        if not archive:
            raise PlanError("option 'sourceArchiveDir'", "cleanSource=archive needs it")
        inside, around = archive.rstrip("/") + "/", split_at_pattern(options["path"])[0].rstrip("/") + "/"
        if inside.startswith(around) or around.startswith(inside):
            raise PlanError(
                "option 'sourceArchiveDir'", f"{archive!r} and the path {options['path']!r} contain each other"
            )
    if declared is None:
        raise PlanError(
            "schema",
            "a stream of files needs its schema: call .schema('name STRING, ...'), or set "
            "spark.sql.streaming.schemaInference to true: its columns are then those of the files that are there",
        )
    if not declared.names:
        raise PlanError("schema", "it has no column")
    check_distinct("schema", declared)
    return declared


def check_distinct(place: str, schema: pa.Schema) -> None:
    """Raises PlanError for two columns of one name: readers of files, Spark's too, find columns ignoring case."""
    known: dict[str, str] = {}
    for name in schema.names:
        if name.lower() in known:
            same = f"{known[name.lower()]!r} and {name!r}"
            raise PlanError(place, f"the columns {same} have one name, as case does not matter: rename one of them")
        known[name.lower()] = name


def _check_patterns(options: dict[str, Any]) -> None:
    path, base = options["path"], options["basePath"]
    for pattern in without_slashes_in_braces(path):
        for segment in split_at_pattern(pattern)[1]:
            name_pattern("path", segment)
    name_pattern("pathGlobFilter", options["pathGlobFilter"] or "*")
    if base is None:
        return
    if not is_pattern(path) and base.rstrip("/") != path.rstrip("/"):
        raise PlanError(
            "option 'basePath'", f"the path {path!r} is no pattern, and is the base itself: Spark ignores {base!r}"
        )


def _text_schema(options: dict[str, Any], declared: pa.Schema | None) -> pa.Schema:
    declared = _file_schema(options, pa.schema([("value", pa.string())]) if declared is None else declared)
    if not pa.types.is_string(declared.field(0).type):
        raise PlanError("schema", f"format 'text' has a text as first column, not {declared.field(0).type}")
    return declared


def _read_by(rows: type[JsonRows | CsvRows]) -> SourceSchema:
    def schema(options: dict[str, Any], declared: pa.Schema | None) -> pa.Schema:
        found = _file_schema(options, declared)
        rows(options, found)
        return found

    return schema


def _orc_schema(options: dict[str, Any], declared: pa.Schema | None) -> pa.Schema:
    schema = _file_schema(options, declared)
    for column in schema:
        if "timestamp" in str(column.type):
            raise PlanError(
                "schema",
                f"column {column.name!r}: timestamps of ORC files depend on the time zone of their writer, which is "
                "unknown; remove the column from the schema, or write Parquet",
            )
    return schema


def _rate_schema(options: dict[str, Any], declared: pa.Schema | None) -> pa.Schema:  # noqa: ARG001
    _check_undeclared("rate", declared)
    return pa.schema([("timestamp", _TIMESTAMP), ("value", pa.int64())])


def _socket_schema(options: dict[str, Any], declared: pa.Schema | None) -> pa.Schema:
    _check_undeclared("socket", declared)
    columns: list[tuple[str, pa.DataType]] = [("value", pa.string())]
    if options["includeTimestamp"]:
        columns.append(("timestamp", _TIMESTAMP))
    return pa.schema(columns)


def _check_undeclared(format_: str, declared: pa.Schema | None) -> None:
    if declared is not None:
        raise PlanError("schema", f"the columns of format {format_!r} are fixed; do not set a schema")


_TIMESTAMP = pa.timestamp("us", "UTC")

SPLIT_SOURCES = (
    SourceFormat("kafka", KAFKA_SOURCE_OPTIONS, kafka_schema, splits=True, prefix=PREFIX),
    SourceFormat("postgresql", POSTGRES_SOURCE_OPTIONS, postgres_schema, splits=True),
    SourceFormat("delta", DELTA_SOURCE_OPTIONS, delta_schema, splits=True),
    SourceFormat("parquet", _FILE_OPTIONS, _file_schema, splits=True),
    SourceFormat("json", (*_FILE_OPTIONS, *JSON_OPTIONS), _read_by(JsonRows), splits=True),
    SourceFormat("csv", (*_FILE_OPTIONS, *CSV_OPTIONS), _read_by(CsvRows), splits=True),
    SourceFormat("orc", _FILE_OPTIONS, _orc_schema, splits=True),
    SourceFormat(
        "text", (*_FILE_OPTIONS, Option("wholetext", bool, False), Option("lineSep")), _text_schema, splits=True
    ),
    SourceFormat(
        "rate",
        (
            Option("rowsPerSecond", int, 1, minimum=1),
            Option("rampUpTime", duration_in_s, 0.0),
            Option("numPartitions", int, None, minimum=1),
        ),
        _rate_schema,
        splits=True,
        ends=False,
    ),
    SourceFormat(
        "rate-micro-batch",
        (
            Option("rowsPerBatch", int, required=True, minimum=1),
            Option("numPartitions", int, None, minimum=1),
            Option("startTimestamp", int, 0, minimum=0),
            Option("advanceMillisPerBatch", int, 1000, minimum=0),
        ),
        _rate_schema,
        splits=True,
    ),
    SourceFormat(
        "socket",
        (
            Option("host", required=True),
            Option("port", int, required=True, minimum=1),
            Option("includeTimestamp", bool, False),
        ),
        _socket_schema,
        splits=True,
        ends=False,
    ),
)


_MARKS = "{}[]*?\\"


def is_pattern(path: str) -> bool:
    """Whether Spark takes a path for a pattern."""
    return any(mark in path for mark in _MARKS)


def name_pattern(key: str, glob: str) -> re.Pattern[str]:
    """A matcher of the names that a pattern without slashes means. ``key`` is the option. Raises PlanError."""
    parts: list[str] = []
    at, braces, in_set = 0, 0, False
    while at < len(glob):
        mark, at = glob[at], at + 1
        if mark == "\\":
            if at == len(glob):
                raise PlanError(f"option {key!r}", f"{glob!r} ends with a backslash")
            parts.append(re.escape(glob[at]))
            at += 1
        elif in_set:
            parts.append(mark if mark in "]-^" else re.escape(mark))
            in_set = mark != "]"
        elif mark == "[":
            negated = glob[at : at + 1] in ("!", "^") and at < len(glob)
            parts.append("[^" if negated else "[")
            at, in_set = at + negated, True
        elif mark in "*?":
            parts.append(".*" if mark == "*" else ".")
        elif mark == "{" or (mark in ",}" and braces):
            parts.append({"{": "(?:", ",": "|", "}": ")"}[mark])
            braces += {"{": 1, ",": 0, "}": -1}[mark]
        else:
            parts.append(re.escape(mark))
    if braces or in_set:
        raise PlanError(f"option {key!r}", f"{glob!r} has {'an open bracket' if in_set else 'an open brace'}")
    try:
        return re.compile("".join(parts), re.DOTALL)
    except re.error as error:
        raise PlanError(f"option {key!r}", f"{glob!r} is not a pattern: {error}") from None


def without_slashes_in_braces(path: str) -> list[str]:
    """The patterns of a path whose braces contain slashes: ``/in/{a/b,c}`` is ``/in/a/b`` and ``/in/c``."""
    start, depth = -1, 0
    commas: list[int] = []
    for at, mark in enumerate(path):
        if mark == "{":
            if not depth:
                start, commas = at, []
            depth += 1
        elif mark == "," and depth == 1:
            commas.append(at)
        elif mark == "}" and depth:
            depth -= 1
            if not depth and "/" in path[start:at]:
                ends = [start, *commas, at]
                choices = [path[one + 1 : other] for one, other in pairwise(ends)]
                whole = [path[:start] + choice + path[at + 1 :] for choice in choices]
                return [each for one in whole for each in without_slashes_in_braces(one)]
    return [path]


def split_at_pattern(path: str) -> tuple[str, list[str]]:
    """The directory in front of a path's first pattern, and the segments from there on."""
    segments = path.split("/")
    first = next((at for at, segment in enumerate(segments) if is_pattern(segment)), len(segments))
    return "/".join(segments[:first]) or "/", [segment for segment in segments[first:] if segment]
