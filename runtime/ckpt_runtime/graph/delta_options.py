"""Format ``delta`` as a source, at planning time: its options, the columns of a table, and what a reader must know.

The names of options are those of Delta's own source for Spark. What the table's log says is checked here when the
program is planned, and again by the running source at each change of the log.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from ckpt_runtime.expressions.functions.casts import caster
from ckpt_runtime.graph.ddl import to_arrow_schema
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.options import Option, absolute, bytes_of, java_pattern

LATEST_VERSION = "latest"


def _version(text: str) -> int | str:
    if text != LATEST_VERSION and not (text.isascii() and text.isdigit()):
        raise ValueError(f"{text!r} is neither the number of a version nor 'latest'")
    return text if text == LATEST_VERSION else int(text)


DELTA_SOURCE_OPTIONS = (
    Option("path", absolute, required=True),
    Option("startingVersion", _version),
    Option("startingTimestamp"),
    Option("ignoreDeletes", bool, False),
    Option("ignoreChanges", bool, False),
    Option("skipChangeCommits", bool, False),
    Option("maxFilesPerTrigger", int, 1000, minimum=1),
    Option("maxBytesPerTrigger", partial(bytes_of, minimum=1)),
    Option("excludeRegex", java_pattern),
    Option("timeZone", default="UTC"),
)

_READ_FEATURES = frozenset({"columnMapping", "deletionVectors", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"})
"""Features that a table may require of its readers: column mapping in mode ``none`` only, and a file with a deletion
vector is refused when it is found."""
_GREATEST_READER_VERSION = 2
_MAPPING_MODE = "delta.columnMapping.mode"
IN_COMMIT_TIMESTAMPS = "delta.enableInCommitTimestamps"


class DeltaTableError(ValueError):
    """A Delta table cannot be read as the program requests. The message names the table or version, and a way out."""


def check_table_path(path: str) -> None:
    """Raises PlanError for a path that the library would change, because it decodes ``%20``."""
    if found := re.search(r"%[0-9a-fA-F]{2}|\\", path):
        raise PlanError(
            "option 'path'",
            f"{path!r} contains {found[0]!r}, which the library deltalake takes for another character: rename it",
        )


def import_deltalake() -> Any:
    """The module ``deltalake``. Raises PlanError if it is not installed."""
    try:
        import deltalake
    except ImportError:
        raise PlanError("format", "'delta' needs a library: pip install 'ckpt-runtime[delta]'") from None
    return deltalake


def delta_schema(options: dict[str, Any], declared: pa.Schema | None) -> pa.Schema:
    """The columns of the table according to its present log. Raises PlanError for invalid options and unreadable
    tables."""
    if declared is not None:
        raise PlanError("schema", "the columns of a Delta table are its own; do not set a schema")
    if options["startingVersion"] is not None and options["startingTimestamp"] is not None:
        raise PlanError("option 'startingTimestamp'", "startingVersion is set as well; set only one of them")
    check_table_path(options["path"])
    starting_ms(options)
    try:
        table = open_table(options["path"])
        check_readable(table.protocol(), table.metadata().configuration)
        schema = columns_of(table.schema().to_json())
        check_partitions(schema, table.metadata().partition_columns)
    except DeltaTableError as error:
        raise PlanError("format", str(error)) from error
    return schema


def open_table(path: str, version: int | None = None) -> Any:
    """A snapshot of a table. Raises DeltaTableError if there is no table, or if the version can no longer be read."""
    deltalake = import_deltalake()
    try:
        return deltalake.DeltaTable(path, version=version)
    except deltalake.exceptions.DeltaError as error:
        if version is None and isinstance(error, deltalake.exceptions.TableNotFoundError):
            raise DeltaTableError(f"there is no Delta table at {path}") from None
        if version is None:
            raise DeltaTableError(f"the Delta table at {path} cannot be opened: {error}") from error
        raise DeltaTableError(
            f"version {version} of the Delta table at {path} can no longer be read ({error}), because its log was "
            "cleaned up. Give the source a new uid, so that it starts with the table's current rows, or set option "
            "startingVersion"
        ) from error


def starting_ms(options: Mapping[str, Any]) -> int | None:
    """Option ``startingTimestamp`` in milliseconds since the epoch. Raises PlanError for another value.

    The text is read as by Spark's cast: a date is its midnight, and without an offset the session's time zone counts.
    """
    text: str | None = options["startingTimestamp"]
    if text is None:
        return None
    moment = caster("string", "timestamp", "try", options["timeZone"])(pa.array([text]))[0]
    if not moment.is_valid:
        raise PlanError(
            "option 'startingTimestamp'",
            f"{text!r} is not a date or a time, such as 2026-11-01 or 2026-11-01T09:00:00Z",
        )
    return int(moment.value) // 1000


def columns_of(text: str) -> pa.Schema:
    """The columns that a log describes, whose schemas are Spark's own JSON."""
    from pyspark.sql.types import StructType

    return to_arrow_schema(StructType.fromJson(json.loads(text)))


def check_readable(protocol: Any, configuration: Mapping[str, str | None]) -> None:
    """Raises DeltaTableError for a table that requires features of its readers that the engine lacks.

    ``protocol`` has ``min_reader_version`` and ``reader_features``, as the library's class has.
    """
    if protocol.min_reader_version > _GREATEST_READER_VERSION:
        unknown = sorted(set(protocol.reader_features or ()) - _READ_FEATURES)
        if unknown or protocol.reader_features is None:
            needs = f"the features {', '.join(unknown)}" if unknown else f"version {protocol.min_reader_version}"
            raise DeltaTableError(f"the table needs readers with {needs}, which this source does not support")
    mode = configuration.get(_MAPPING_MODE) or "none"
    if mode != "none":
        raise DeltaTableError(
            f"the table has {_MAPPING_MODE} {mode!r}: its files name columns differently, but this source reads them "
            "by their names. Write the columns to another table with Spark, and read that"
        )


def check_partitions(schema: pa.Schema, columns: Sequence[str]) -> None:
    """Raises DeltaTableError for a partition column whose values in the log have no exact meaning here."""
    for name in columns:
        kind = schema.field(name).type
        simple = pa.types.is_string(kind) or pa.types.is_integer(kind) or pa.types.is_date(kind) or kind == pa.bool_()
        if not simple:
            raise DeltaTableError(
                f"the table is partitioned by {name!r}, which is {kind}; partitions must be texts, whole numbers, "
                "dates or booleans"
            )


def check_columns(text: str, schema: pa.Schema, version: int) -> None:
    """Raises DeltaTableError if a version of the table has a column that the program was not planned with."""
    for field in columns_of(text):
        if field.name not in schema.names or schema.field(field.name).type != field.type:
            raise DeltaTableError(
                f"the table has column {field.name!r} {field.type} in version {version}, but the program was planned "
                "without it: submit the program again from the last checkpoint, which plans it with the new columns"
            )
