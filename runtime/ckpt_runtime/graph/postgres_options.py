"""Format ``postgresql`` at planning time: the options of source and sink, the columns that can be
read exactly or written, and their types in the database.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.options import Option, duration_in_s, duration_ms, names_of

POSTGRES_SINK_OPTIONS = (
    Option("url", required=True),
    Option("dbtable", required=True),
    Option("user"),
    Option("password"),
    Option("mode", default="append", choices=("append", "upsert")),
    Option("keys", names_of, ()),
    Option("deleteColumn"),
    Option("preparedTransactions", bool, False),
    Option("stagedRowsTimeout", duration_in_s),
)

_INTEGERS = ("int2", "int4", "int8", "numeric")


def check_postgres_sink(options: Mapping[str, Any], schema: pa.Schema) -> None:
    """Raises PlanError for options that contradict each other, a column without a type there, and a missing library."""
    server_of(options["url"])
    check_table(options)
    keys, marker = options["keys"], options["deleteColumn"]
    if options["mode"] == "upsert" and not keys:
        raise PlanError("option 'keys'", "mode upsert needs the columns of a unique index, separated by commas")
    if options["mode"] == "append" and (keys or marker):
        name = "keys" if keys else "deleteColumn"
        raise PlanError(f"option {name!r}", "it requires mode upsert; mode append inserts every row")
    if options["preparedTransactions"] and options["mode"] != "append":
        raise PlanError("option 'preparedTransactions'", "it requires mode append; mode upsert merges staging tables")
    for column in (*keys, *([marker] if marker else [])):
        if column not in schema.names:
            raise PlanError("option 'keys'", f"no column {column!r}; there are {', '.join(schema.names)}")
    if marker and (schema.field(marker).type != pa.bool_() or marker in keys):
        raise PlanError("option 'deleteColumn'", f"column {marker!r} must be a BOOLEAN that is not a key")
    for field in schema:
        database_types(field)
    import_driver()


def server_of(url: str) -> str:
    """The URL as the driver takes it; that of JDBC is accepted. Raises PlanError for any other."""
    server = url.removeprefix("jdbc:")
    if not server.startswith(("postgresql://", "postgres://")):
        raise PlanError("option 'url'", "it must be postgresql://HOST:PORT/DATABASE, or that with jdbc: before it")
    _, _, place = server.partition("://")
    for host in re.split("[/?]", place)[0].rpartition("@")[2].split(","):
        port = re.fullmatch(r"(?:\[[^]]*\]|[^:]*)(?::(.*))?", host)
        if port is None or (port[1] and not (port[1].isdecimal() and 0 < int(port[1]) < 1 << 16)):
            raise PlanError("option 'url'", f"{host!r} is not a host with a port from 1 to 65535")
    return server


def check_table(options: Mapping[str, Any]) -> None:
    """Raises PlanError for a query in place of a table name, which JDBC would accept."""
    if options["dbtable"].lstrip().startswith("("):
        raise PlanError(
            "option 'dbtable'",
            f"{options['dbtable']!r} is a query; expected the name of a table, such as public.orders",
        )


def import_driver() -> Any:
    """The module ``psycopg``. Raises PlanError if it is not installed."""
    try:
        import psycopg
    except ImportError:
        raise PlanError("format", "'postgresql' needs a library: pip install 'ckpt-runtime[postgres]'") from None
    return psycopg


def database_types(field: pa.Field) -> tuple[str, ...]:
    """PostgreSQL's names of the types that a table column may have for this type; the first one has exactly its values.

    Raises PlanError for a type that none of them holds.
    """
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    if pa.types.is_list(kind) and not pa.types.is_nested(kind.value_type):
        return tuple(f"_{name}" for name in database_types(kind.field(0).with_name(field.name)) if name != "jsonb")
    if pa.types.is_signed_integer(kind):
        return _INTEGERS[{8: 0, 16: 0, 32: 1, 64: 2}[kind.bit_width] :]
    if pa.types.is_decimal(kind):
        return ("numeric",)
    if pa.types.is_timestamp(kind):
        return ("timestamptz",) if kind.tz else ("timestamp",)
    known = {
        pa.bool_(): ("bool",),
        pa.float32(): ("float4", "float8"),
        pa.float64(): ("float8",),
        pa.string(): ("text", "varchar", "uuid", "jsonb"),
        pa.binary(): ("bytea",),
        pa.date32(): ("date",),
    }
    if kind not in known:
        raise PlanError(
            "format", f"column {field.name!r} is {field.type}, for which PostgreSQL has no type; use to_json of it"
        )
    return known[kind]


EARLIEST, LATEST = "earliest", "latest"


def _starting_value(text: str) -> int | str:
    if text in (EARLIEST, LATEST):
        return text
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not earliest, latest or a whole number") from None


POSTGRES_SOURCE_OPTIONS = (
    Option("url", required=True),
    Option("dbtable", required=True),
    Option("user"),
    Option("password"),
    Option("growingColumn", required=True),
    Option("startingValue", _starting_value, EARLIEST),
    Option("settleTime", duration_ms),
    Option("pollInterval", duration_ms, duration_ms("200ms")),
    Option("numPartitions", int, 8, minimum=1),
    Option("fetchsize", int, 8192, minimum=1),
)


def postgres_schema(options: dict[str, Any], declared: pa.Schema | None) -> pa.Schema:
    """The declared columns. Raises PlanError for options that contradict each other, and types that it cannot read."""
    server_of(options["url"])
    check_table(options)
    if declared is None:
        raise PlanError("schema", "a stream of a table needs its schema: .schema('id BIGINT, name STRING, ...')")
    growing = options["growingColumn"]
    if growing not in declared.names:
        raise PlanError("option 'growingColumn'", f"no column {growing!r}; there are {', '.join(declared.names)}")
    kind = declared.field(growing).type
    if not (pa.types.is_integer(kind) or pa.types.is_timestamp(kind)):
        raise PlanError(
            "option 'growingColumn'", f"column {growing!r} is {kind}; it must be a whole number or a timestamp"
        )
    if pa.types.is_timestamp(kind) and options["settleTime"] is None:
        raise PlanError(
            "option 'settleTime'",
            f"column {growing!r} is a timestamp, and a transaction may commit rows with earlier ones than those that "
            "were read: set the time after which this cannot happen, such as 1m",
        )
    for field in declared:
        readable_types(field)
    import_driver()
    return declared


def readable_types(field: pa.Field) -> tuple[str, ...]:
    """PostgreSQL's names of the types whose values a column of this type holds exactly. Raises PlanError for none."""
    kind = field.type
    if pa.types.is_list(kind) and not pa.types.is_nested(kind.value_type):
        return tuple(f"_{name}" for name in readable_types(kind.field(0).with_name(field.name)))
    if pa.types.is_decimal(kind):
        return ("numeric",)
    if pa.types.is_timestamp(kind):
        return ("timestamptz",) if kind.tz else ("timestamp",)
    known = {
        pa.bool_(): ("bool",),
        pa.int16(): ("int2",),
        pa.int32(): ("int2", "int4"),
        pa.int64(): ("int2", "int4", "int8"),
        pa.float32(): ("float4",),
        pa.float64(): ("float4", "float8"),
        pa.string(): ("text", "varchar", "uuid", "json", "jsonb"),
        pa.binary(): ("bytea",),
        pa.date32(): ("date",),
    }
    if kind not in known:
        raise PlanError("schema", f"column {field.name!r} is {kind}, which no column of PostgreSQL has; cast it later")
    return known[kind]
