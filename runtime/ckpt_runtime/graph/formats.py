"""The built-in formats at planning time: their options, and the schema that a source will emit.

Their operators are in ``connectors/``; a pipeline author's process needs only this table. PySpark
``DataSource`` classes are described here too, by calling the class itself; that is user code, so it runs only where
plans are made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ckpt_runtime.graph.bad_rows import BAD_ROWS_DIRECTORY_OPTION, BAD_ROWS_OPTION, reader_policy
from ckpt_runtime.graph.ddl import to_arrow_schema
from ckpt_runtime.graph.delta_options import check_table_path, import_deltalake
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.event_time import ALIGNMENT_OPTIONS
from ckpt_runtime.graph.kafka_columns import KAFKA_SINK_OPTIONS, check_kafka_sink
from ckpt_runtime.graph.options import Option, absolute, bytes_of, names_of, parse_options, parse_value
from ckpt_runtime.graph.postgres_options import POSTGRES_SINK_OPTIONS, check_postgres_sink
from ckpt_runtime.graph.source_formats import SPLIT_SOURCES, SourceFormat, check_distinct
from ckpt_runtime.graph.specs import FILE_FORMATS
from ckpt_runtime.graph.text_outputs import TEXT_OUTPUTS, TextOutput
from ckpt_runtime.sinks import is_sink
from ckpt_runtime.sources import is_source

AVAILABLE_NOW_OPTION = "availableNow"
"""Reader option of every source that is read in splits, handled by the engine: read the data present now, then end."""
BATCH_LIMITS = frozenset({"maxfilespertrigger", "maxbytespertrigger", "maxoffsetspertrigger"})
"""The options, in lower case, that divide the present data into batches."""

ORDERED_READS_OPTION = "orderedReads"
"""Reader option of every ``DataSource`` class, handled by the engine: reading a partition again gives the same rows in
the same order, so that a checkpoint may come in the middle of it."""

MAX_WAITING_BATCHES = Option("maxWaitingBatches", int, 2, minimum=0)
"""Writer option of ``foreachBatch``: how many completed checkpoints may wait for the function while rows are taken."""

_COMMITTABLE_FIELDS: list[pa.Field[Any]] = [
    pa.field("checkpoint_id", pa.int64(), False),
    pa.field("subtask", pa.int32(), False),
    pa.field("message", pa.string(), True),
]
COMMITTABLE_SCHEMA = pa.schema(_COMMITTABLE_FIELDS)
"""What a PySpark stream writer sends to its committer: one row per subtask and checkpoint; the message is
a tagged text."""

_SPLIT_FIELDS: list[pa.Field[Any]] = [
    pa.field("sequence", pa.int64(), False),
    pa.field("number", pa.int32(), False),
    pa.field("partition", pa.string(), True),
    pa.field("rows", pa.binary(), True),
]
SPLIT_SCHEMA = pa.schema(_SPLIT_FIELDS)
"""What an enumerator sends to the readers: one row per partition of an offset range. ``sequence`` counts all of them,
``number`` those of the range; ``partition`` is the user's object as a tagged text. ``rows`` is set instead if the
reader returns the rows with the offsets (simple readers): an Arrow IPC stream."""

_BATCH_ROWS = Option("batchRows", int, 8192, minimum=1)
_KEY_FORM = Option("keyForm", default="int", choices=("int", "scattered", "string"))
_RATE = Option("rowsPerSecond", float, 0.0, minimum=0)

_DATA_SOURCE = "pyspark.sql.datasource"

SinkCheck = Callable[[dict[str, Any], pa.Schema], None]


@dataclass(frozen=True, slots=True)
class SinkFormat:
    """A built-in sink: its options and a check of them against the schema of its input."""

    name: str
    options: tuple[Option, ...]
    check: SinkCheck


def _replay_schema(options: dict[str, Any], declared: pa.Schema | None) -> pa.Schema:
    schema = declared if declared is not None else _parquet_schema(options["path"])
    for column in options["partitionBy"]:
        if column not in schema.names:
            raise PlanError("option 'partitionBy'", f"no column {column!r}; there are {', '.join(schema.names)}")
    return schema


def _parquet_schema(path: str) -> pa.Schema:
    """The schema of the first file, read with Arrow's own file systems."""
    import pyarrow.parquet as pq
    from pyarrow import fs

    field = "option 'path'"
    try:
        filesystem, root = fs.FileSystem.from_uri(path) if ":/" in path else (fs.LocalFileSystem(), path)
        info = filesystem.get_file_info(root)
        files = [root] if info.is_file else []
        if info.type is fs.FileType.Directory:
            files = [file.path for file in filesystem.get_file_info(fs.FileSelector(root)) if file.is_file]
        files = sorted(file for file in files if file == root or is_parquet_name(file.rsplit("/", 1)[-1]))
        if not files:
            raise FileNotFoundError(f"{path!r} is not a Parquet file or a directory with Parquet files")
        schema = pq.read_schema(files[0], filesystem=filesystem).remove_metadata()
        # No operator accepts types of views.
        plain = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
        return pa.schema([field.with_type(plain.get(field.type, field.type)) for field in schema])
    except (OSError, pa.ArrowException) as error:
        raise PlanError(field, f"the schema of {path!r} cannot be read, set .schema(...): {error}") from error


def is_parquet_name(name: str) -> bool:
    """Whether a file in a directory of Parquet files is one of them, and not hidden."""
    return name.endswith(".parquet") and not name.startswith((".", "_"))


def _numbers_schema(options: dict[str, Any], declared: pa.Schema | None) -> pa.Schema:
    if options["sequence"]:
        schema = pa.schema([("source", pa.int64()), ("n", pa.int64())])
    else:
        key = pa.string() if options["keyForm"] == "string" else pa.int64()
        schema = pa.schema([("key", key), ("value", pa.int64())])
        if options["rowNumber"]:
            schema = schema.append(pa.field("row", pa.int64()))
    if declared is not None and declared != schema:
        kinds = ", ".join(f"{field.name} {field.type}" for field in schema)
        raise PlanError("schema", f"format 'numbers' emits {kinds}; do not set a schema")
    return schema


def _names_directories(kind: pa.DataType) -> bool:
    """Whether every file format can name directories by values of a type."""
    tests = (pa.types.is_string, pa.types.is_integer, pa.types.is_date, pa.types.is_boolean)
    return any(test(kind) for test in tests)


def _names_more_directories(kind: pa.DataType) -> bool:
    further = (pa.types.is_decimal, pa.types.is_floating, pa.types.is_timestamp)
    return _names_directories(kind) or any(test(kind) for test in further)


def _check_files(
    options: dict[str, Any],
    schema: pa.Schema,
    names_directories: Callable[[pa.DataType], bool] = _names_more_directories,
) -> None:
    check_distinct("format", schema)
    columns = partition_columns(options, schema)
    if columns and len(columns) == len(schema):
        raise PlanError("partitionBy", "all columns are named; at least one must remain for the files")
    for column in columns:
        kind = schema.field(column).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not names_directories(kind):
            further = ", decimals, floating-point numbers, timestamps" if names_directories(pa.float64()) else ""
            raise PlanError(
                "partitionBy",
                f"column {column!r} is {kind}; directories can be named by texts, whole numbers, dates{further} and "
                "booleans: cast it to one of them",
            )


def _check_text(format_: str) -> SinkCheck:
    def check(options: dict[str, Any], schema: pa.Schema) -> None:
        _check_files(options, schema)
        keys = partition_columns(options, schema)
        TextOutput(format_, options, pa.schema([field for field in schema if field.name not in keys]))

    return check


def _check_delta(options: dict[str, Any], schema: pa.Schema) -> None:
    _check_files(options, schema, _names_directories)
    check_table_path(options["path"])
    deltalake = import_deltalake()
    for field in schema:
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        try:
            stored = pa.schema(deltalake.Schema.from_arrow(pa.schema([(field.name, kind)])))
        except Exception as error:  # the library raises several kinds
            raise PlanError(
                "format", f"column {field.name!r} is {field.type}, for which Delta has no type: {error}"
            ) from None
        if stored.field(0).type != kind:
            raise PlanError(
                "format",
                f"column {field.name!r} is {field.type}, but Delta would store it as {stored.field(0).type}; cast it",
            )


def partition_columns(options: Mapping[str, Any], schema: pa.Schema) -> tuple[str, ...]:
    """The columns that ``partitionBy`` names, as the schema spells them. Raises PlanError for an unknown one."""
    found = []
    for column in options["partitionBy"]:
        exact = [name for name in schema.names if name == column]
        known = exact or [name for name in schema.names if name.lower() == column.lower()]
        if len(known) != 1:
            raise PlanError("partitionBy", f"no column {column!r}; there are {', '.join(schema.names)}")
        if known[0] in found:
            raise PlanError("partitionBy", f"column {column!r} is named twice")
        found.append(known[0])
    return tuple(found)


def partition_option(sink: str | type, columns: list[str]) -> str:
    """The option that carries the columns of ``partitionBy``. Raises PlanError for a sink that has no directories."""
    if sink not in FILE_FORMATS:
        raise PlanError(
            "partitionBy", f"format {sink!r} has no directories; it works with {', '.join(sorted(FILE_FORMATS))}"
        )
    if odd := [column for column in columns if "," in column]:
        raise PlanError("partitionBy", f"column {odd[0]!r} has a comma in its name; rename it")
    return ",".join(columns)


def file_extension(format_: str, options: Mapping[str, Any]) -> str:
    """The ending of a file's name, with that of its compression where the format's readers need it."""
    endings = {"gzip": ".gz", "bzip2": ".bz2"}
    if known := {"foreach": "arrow", "delta": "parquet", "parquet": "parquet"}.get(format_):
        return known
    return ("txt" if format_ == "text" else format_) + endings.get(options["compression"], "")


def _accept(options: dict[str, Any], schema: pa.Schema) -> None:
    """Takes any input."""


def _check_verify(options: dict[str, Any], schema: pa.Schema) -> None:
    if not options["report"].startswith("/"):
        raise PlanError("option 'report'", f"{options['report']!r} is not an absolute local directory")
    for key in ("row",) if options["row"] else ("key", "count", "sum"):
        column = options[key]
        if key == "sum" and not column:
            continue
        if column not in schema.names:
            raise PlanError(f"option {key!r}", f"no column {column!r}; there are {', '.join(schema.names)}")
        if key == "key" and options["keyForm"] == "string":
            if not pa.types.is_string(schema.field(column).type):
                raise PlanError(f"option {key!r}", f"column {column!r} is {schema.field(column).type}, not a string")
        elif not pa.types.is_integer(schema.field(column).type):
            raise PlanError(f"option {key!r}", f"column {column!r} is {schema.field(column).type}, not an integer")


SOURCE_FORMATS: dict[str, SourceFormat] = {
    source.name: source
    for source in (
        SourceFormat(
            "replay",
            (Option("path", absolute, required=True), _RATE, _BATCH_ROWS, Option("partitionBy", names_of, ())),
            _replay_schema,
        ),
        SourceFormat(
            "numbers",
            (
                Option("rows", int, 0, minimum=0),
                Option("keys", int, 100_000, minimum=1),
                _KEY_FORM,
                Option("batchRows", int, 32_768, minimum=1),
                _RATE,
                Option("rowNumber", bool, False),
                Option("sequence", bool, False),
            ),
            _numbers_schema,
        ),
        *SPLIT_SOURCES,
    )
}

_OF_DIRECTORIES = (
    Option("path", absolute, required=True),
    Option("maxRecordsPerFile", int, 0, minimum=0),
    Option("onMissing", default="fail", choices=("fail", "ignore")),
    Option("partitionBy", names_of, ()),
    Option("timeZone", default="UTC"),
)

_DELTA_CODECS = ("snappy", "zstd", "gzip", "none", "uncompressed")

SINK_FORMATS: dict[str, SinkFormat] = {
    sink.name: sink
    for sink in (
        SinkFormat(
            "parquet",
            (*_OF_DIRECTORIES, Option("compression", default="snappy", choices=(*_DELTA_CODECS, "lz4", "lz4_raw"))),
            _check_files,
        ),
        *(SinkFormat(name, (*_OF_DIRECTORIES, *options), _check_text(name)) for name, options in TEXT_OUTPUTS.items()),
        SinkFormat(
            "delta",
            (
                Option("path", absolute, required=True),
                Option("compression", default="snappy", choices=_DELTA_CODECS),
                Option("maxRecordsPerFile", int, 0, minimum=0),
                Option("partitionBy", names_of, ()),
                Option("mergeSchema", bool, False),
                Option("targetFileSize", bytes_of, 0),
                Option("userMetadata"),
            ),
            _check_delta,
        ),
        SinkFormat("kafka", KAFKA_SINK_OPTIONS, _accept),
        SinkFormat("postgresql", POSTGRES_SINK_OPTIONS, check_postgres_sink),
        SinkFormat("noop", (), _accept),
        SinkFormat(
            "verify",
            (
                Option("key", default="key"),
                _KEY_FORM,
                Option("count", default="count"),
                Option("sum"),
                Option("row"),
                Option("report", required=True),
                Option("reportIntervalMs", int, 0, minimum=0),
            ),
            _check_verify,
        ),
    )
}


def is_data_source(value: Any) -> bool:
    """Whether ``value`` is a class shaped like PySpark's ``DataSource`` (PySpark is not imported to find out)."""
    return isinstance(value, type) and all(
        callable(getattr(value, method, None)) for method in ("name", "schema", "streamReader", "streamWriter")
    )


def source_options(name: str, options: Mapping[str, str]) -> dict[str, Any]:
    """The parsed options of a built-in source, those of the engine left out."""
    known = SOURCE_FORMATS[name]
    if available_now(options) and not known.ends:
        raise PlanError(
            f"option {AVAILABLE_NOW_OPTION!r}",
            f"format {name!r} has no end: availableNow cannot read only the data that is available at the start; use "
            "trigger(processingTime=...), or read a source that has an end",
        )
    return known.parsed(options_of_source(strict_options(name, options)) if known.splits else options)


def sink_options(name: str, options: Mapping[str, str]) -> dict[str, Any]:
    """The parsed options of a built-in sink."""
    return parse_options(name, SINK_FORMATS[name].options, options)


_OF_RECORDS = ("csv", "json")
"""Formats whose option ``mode`` says what happens to bad records."""
_WITH_BAD_ROWS = (*_OF_RECORDS, "postgresql")


def strict_options(source: str | type, options: Mapping[str, str]) -> Mapping[str, str]:
    """The options of a reader; with ``badRows``, all records on which mode FAILFAST would fail count as bad.

    Raises PlanError for ``badRows`` with another mode.
    """
    if source not in _OF_RECORDS or reader_policy(options) is None:
        return options
    mode = next((value for key, value in options.items() if key.lower() == "mode"), "FAILFAST")
    if mode.upper() != "FAILFAST":
        raise PlanError(
            f"option {BAD_ROWS_OPTION!r}", f"it handles bad records, and so does mode {mode}: set only one of them"
        )
    others = {key: value for key, value in options.items() if key.lower() not in ("mode", "columnpruning")}
    return {**others, "mode": "FAILFAST", **({"columnPruning": "false"} if source == "csv" else {})}


def _finds_bad_rows(source: str | type) -> bool:
    return bool(source.finds_bad_rows) if is_source(source) else source in _WITH_BAD_ROWS  # type: ignore[union-attr]


def _check_bad_rows(source: str | type, options: Mapping[str, str]) -> None:
    """Raises PlanError for ``badRows`` of a source that cannot find bad rows."""
    if reader_policy(options) is None or _finds_bad_rows(source):
        return
    name = source if isinstance(source, str) else source.__name__
    raise PlanError(
        f"option {BAD_ROWS_OPTION!r}",
        f"{name!r} does not detect bad rows; use it with {', '.join(_WITH_BAD_ROWS)} and sources that report them. For "
        "expressions that fail for a row, such as from_json in mode FAILFAST, set the job's option "
        "execution.bad-rows.mode",
    )


def source_schema(source: str | type, options: Mapping[str, str], declared: pa.Schema | None) -> pa.Schema:
    """Returns the schema that a source emits, after checking its options.

    Raises PlanError for an unknown format, a bad option, or a ``DataSource`` without a schema or a stream reader.
    """
    _check_bad_rows(source, options)
    if is_source(source):
        available_now(options)
        try:
            return source(options_of_source(options)).schema(declared)  # type: ignore[operator]
        except ValueError as error:
            raise PlanError("format", f"{source.__name__}: {error}") from error  # type: ignore[union-attr]
    if isinstance(source, type):
        return described_data_source(source, options, declared, reported=False)[1]
    if source not in SOURCE_FORMATS:
        raise PlanError("format", _unknown(source, SOURCE_FORMATS, "a FrameSource reads what spark.read can read"))
    return SOURCE_FORMATS[source].schema(source_options(source, options), declared)


def check_sink(sink: str | type, options: Mapping[str, str], schema: pa.Schema) -> None:
    """Checks a sink's format and options against the schema of its input. Raises as :func:`source_schema`."""
    if is_sink(sink):
        try:
            sink(options).check(schema)  # type: ignore[operator]
        except ValueError as error:
            raise PlanError("format", f"{sink.__name__}: {error}") from error  # type: ignore[union-attr]
        return
    if isinstance(sink, type):
        _check_stream(sink, "written", "streamWriter")
        check_types_of_pyspark(sink.__name__, schema)
        return
    if sink not in SINK_FORMATS:
        raise PlanError("format", _unknown(sink, SINK_FORMATS, "foreachBatch writes what Spark can write"))
    if sink == "kafka":
        # Its options with a prefix are settings of the client library.
        check_kafka_sink(options, schema)
        return
    SINK_FORMATS[sink].check(sink_options(sink, options), schema)


def _check_stream(source: type, verb: str, *methods: str) -> None:
    """Raises PlanError for a ``DataSource`` that overrides none of the methods, e.g. one for batches only."""
    if all(getattr(getattr(source, method, None), "__module__", _DATA_SOURCE) == _DATA_SOURCE for method in methods):
        raise PlanError(
            "format",
            f"{source.__name__} has no {' and no '.join(methods)}: it cannot be {verb} as a stream, only in a batch "
            "of Spark",
        )


def check_types_of_pyspark(name: str, schema: pa.Schema) -> None:
    """Raises PlanError for a column of a type that the ``StructType`` which a ``DataSource`` gets cannot have."""
    from pyspark.errors import PySparkTypeError
    from pyspark.sql.pandas.types import from_arrow_type, to_arrow_type

    for column in schema:
        try:
            to_arrow_type(from_arrow_type(column.type), timezone="UTC")
        except (PySparkTypeError, pa.ArrowInvalid, ValueError):  # ValueError: decimals of too many digits
            problem = f"column {column.name!r} is {column.type}, for which PySpark has no type; cast it before"
            raise PlanError("schema", f"{name}: {problem}") from None


def _unknown(name: str, known: Mapping[str, Any], instead: str) -> str:
    names = ", ".join(sorted(known))
    return f"{name!r} is not one of {names}, and no DataSource class is registered under that name; {instead}"


def described_data_source(
    source: type, options: Mapping[str, str], known: pa.Schema | None, reported: bool
) -> tuple[Any, pa.Schema]:
    """Creates a ``DataSource`` to read from; returns it with the ``known`` schema, or else the one it reports.

    If the source itself gave the known schema (``reported``), it is requested again: in Spark the instance that gave it
    also makes the reader, and may rely on state from that call.

    Raises PlanError for a bad option, no stream reader, or no schema that can be used.
    """
    _check_stream(source, "read", "streamReader", "simpleStreamReader")
    available_now(options)
    ordered_reads(options)
    instance, schema = new_data_source(source, options), known
    if schema is None or reported:
        try:
            answer = instance.schema()
        except Exception as error:
            raise PlanError("schema", f"{source.__name__}.schema() failed, set .schema(...): {error}") from error
        schema = to_arrow_schema(answer) if schema is None else schema
    check_types_of_pyspark(source.__name__, schema)
    return instance, schema


def available_now(options: Mapping[str, str]) -> bool:
    """Whether a ``DataSource`` ends with the data that is present at the start. Raises PlanError for a bad value."""
    return _engine_flag(AVAILABLE_NOW_OPTION, options)


def ordered_reads(options: Mapping[str, str]) -> bool:
    """Whether reading a partition again gives the same rows in the same order. Raises PlanError for a bad value."""
    return _engine_flag(ORDERED_READS_OPTION, options)


def _engine_flag(key: str, options: Mapping[str, str]) -> bool:
    given = {name.lower(): value for name, value in options.items()}
    return bool(parse_value(Option(key, bool, False), str(given.get(key.lower(), "false"))))


def new_data_source(source: type, options: Mapping[str, str]) -> Any:
    """An instance of a user's ``DataSource`` class with case-insensitive options, as Spark builds it."""
    from pyspark.sql.datasource import CaseInsensitiveDict

    return source(CaseInsensitiveDict(options_of_source(options)))


def options_of_source(options: Mapping[str, str]) -> dict[str, str]:
    """The options without those that the engine itself handles."""
    engine = (
        AVAILABLE_NOW_OPTION,
        ORDERED_READS_OPTION,
        BAD_ROWS_OPTION,
        BAD_ROWS_DIRECTORY_OPTION,
        *ALIGNMENT_OPTIONS,
    )
    taken = {key.lower() for key in engine}
    return {key: value for key, value in options.items() if key.lower() not in taken}


def is_split_source(source: str | type) -> bool:
    """Whether an enumerator finds the splits of a source, and readers read them."""
    if isinstance(source, type):
        return True
    return source in SOURCE_FORMATS and SOURCE_FORMATS[source].splits
