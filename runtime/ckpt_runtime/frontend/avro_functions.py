"""Spark's ``from_avro`` and ``to_avro``: Arrow functions around fastavro.

``from_avro`` takes Spark's options ``mode`` and ``avroSchema``, and those of a Schema Registry, whose messages name the
schema with which they were written. ``to_avro`` takes options for writing such messages. Types are those that Spark's
package has; types to which it would give another form are refused.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

import pyarrow as pa

from ckpt_runtime.expressions.types import SparkType
from ckpt_runtime.frontend.message_functions import (
    HEADER_BYTES,
    REGISTRY_URL,
    REGISTRY_USER,
    WRITER_OPTIONS,
    Decoder,
    MessageFunction,
    WrittenSchema,
    by_name,
    checked_options,
    literals_of,
    nullable,
    registered_schema,
)
from ckpt_runtime.graph.errors import PlanError

NAMES = ("from_avro", "to_avro")
_AVRO_SCHEMA = "avroschema"
_PRIMITIVES: dict[str, SparkType] = {
    "null": "void",
    "boolean": "boolean",
    "int": "integer",
    "long": "long",
    "float": "float",
    "double": "double",
    "string": "string",
    "bytes": "binary",
}
_LOGICAL: dict[tuple[str, str], tuple[SparkType, int]] = {
    ("int", "date"): ("date", 1),
    ("long", "timestamp-millis"): ("timestamp", 1000),
    ("long", "timestamp-micros"): ("timestamp", 1),
    ("long", "local-timestamp-millis"): ("timestamp_ntz", 1000),
    ("long", "local-timestamp-micros"): ("timestamp_ntz", 1),
}
"""What a number stands for, and how many of Spark's units one of it is."""
_REFUSED_LOGICAL = ("time-millis", "time-micros", "timestamp-nanos", "local-timestamp-nanos", "duration")
_WIDER = {frozenset({"int", "long"}): "long", frozenset({"float", "double"}): "double"}

_RECORDS = ("record", "error")

Convert = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Type:
    """A Spark type, and how a value that fastavro reads becomes one for Arrow; None if it is one already."""

    spark: SparkType
    nullable: bool = False
    convert: Convert | None = None


class _Types:
    """The Spark types of a schema. Raises PlanError for what Spark has no type for, or another one."""

    def __init__(self, function: str) -> None:
        self._function = function
        self._named: dict[str, Any] = {}
        self._open: list[str] = []

    def of(self, schema: Any) -> _Type:
        if isinstance(schema, list):
            return self._union(schema)
        kind = schema if isinstance(schema, str) else schema["type"]
        if isinstance(kind, dict | list):
            return self.of(kind)
        if kind in self._named:
            known = self._named[kind]
            return self._record_of(known) if known["type"] in _RECORDS else self.of(known)
        logical = schema.get("logicalType") if isinstance(schema, dict) else None
        if logical is not None and (found := self._logical(kind, schema)) is not None:
            return found
        if kind in _PRIMITIVES:
            return _Type(_PRIMITIVES[kind], nullable=kind == "null")
        if kind in _RECORDS:
            self._named[schema["name"]] = schema
            return self._record_of(schema)
        return self._complex(kind, schema)

    def _complex(self, kind: str, schema: dict[str, Any]) -> _Type:
        if kind in ("enum", "fixed"):
            self._named[schema["name"]] = {"type": "string" if kind == "enum" else "bytes"}
            return _Type("string" if kind == "enum" else "binary")
        below = self.of(schema["items" if kind == "array" else "values"])
        convert = below.convert
        if kind == "array":
            spark = {"type": "array", "elementType": below.spark, "containsNull": below.nullable}
            return _Type(spark, convert=convert and (lambda values: [_given(convert, value) for value in values]))
        spark = {"type": "map", "keyType": "string", "valueType": below.spark, "valueContainsNull": below.nullable}
        if convert is None:
            return _Type(spark, convert=lambda values: list(values.items()))
        return _Type(spark, convert=lambda values: [(key, _given(convert, value)) for key, value in values.items()])

    def _record_of(self, schema: dict[str, Any]) -> _Type:
        name = schema["name"]
        if name in self._open:
            raise PlanError(self._function, f"record {name} contains itself, which no type of Spark can")
        self._open.append(name)
        types = {field["name"]: self.of(field["type"]) for field in schema["fields"]}
        self._open.pop()
        fields = [
            {"name": field, "type": found.spark, "nullable": found.nullable, "metadata": {}}
            for field, found in types.items()
        ]
        converts = {field: found.convert for field, found in types.items() if found.convert is not None}
        if not converts:
            return _Type({"type": "struct", "fields": fields})

        def convert(values: dict[str, Any]) -> dict[str, Any]:
            return {**values, **{field: _given(each, values[field]) for field, each in converts.items()}}

        return _Type({"type": "struct", "fields": fields}, convert=convert)

    def _union(self, branches: Sequence[Any]) -> _Type:
        others = [branch for branch in branches if branch != "null"]
        nullable = len(others) < len(branches)
        if not others:
            return _Type("void", nullable=True)
        if len(others) > 1:
            wider = _WIDER.get(frozenset(map(str, others)))
            if wider is None:
                raise PlanError(
                    self._function,
                    f"a union of {len(others)} types has no type of Spark's but a struct with a member for each, which "
                    "the engine does not make; give a reader schema (option avroSchema) without the union",
                )
            others = [wider]
        found = self.of(others[0])
        return _Type(found.spark, nullable or found.nullable, found.convert)

    def _logical(self, kind: str, schema: dict[str, Any]) -> _Type | None:
        """Returns None for logical types that Spark ignores."""
        logical = schema["logicalType"]
        if logical in _REFUSED_LOGICAL:
            raise PlanError(self._function, f"the logical type {logical} is not supported; read it as a plain {kind}")
        if (kind, logical) in _LOGICAL:
            spark, factor = _LOGICAL[kind, logical]
            return _Type(spark, convert=None if factor == 1 else lambda value: value * factor)
        if logical == "decimal" and kind in ("bytes", "fixed"):
            if kind == "fixed":
                self._named[schema["name"]] = schema
            precision, scale = int(schema["precision"]), int(schema.get("scale", 0))
            if precision > 38:
                raise PlanError(self._function, f"a decimal of {precision} digits; Spark has at most 38")
            return _Type(
                f"decimal({precision},{scale})",
                convert=lambda value: Decimal(int.from_bytes(value, "big", signed=True)).scaleb(-scale),
            )
        return None


def _given(convert: Convert, value: Any) -> Any:
    return None if value is None else convert(value)


def _raw(schema: Any) -> Any:
    """The schema without logical types: fastavro then returns numbers and bytes as they are."""
    if isinstance(schema, list):
        return [_raw(branch) for branch in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: value if key == "default" else _raw(value) for key, value in schema.items() if key != "logicalType"}


def _parsed(function: str, text: str) -> Any:
    """Raises PlanError for a text that is no schema."""
    fastavro = _fastavro(function)
    try:
        return fastavro.parse_schema(json.loads(text))
    except Exception as error:  # the library raises several kinds
        raise PlanError(function, f"its schema cannot be used: {type(error).__name__}: {error}") from None


def _fastavro(function: str) -> Any:
    try:
        import fastavro
    except ImportError:
        problem = "needs fastavro where programs are planned and run: pip install 'ckpt-runtime[avro]'"
        raise PlanError(function, problem) from None
    return fastavro


class FromAvro(Decoder):
    """Decodes messages. ``schema`` is the schema with which they were written, and as which they are read without
    ``avroSchema``.
    """

    name = "from_avro"

    def __init__(self, schema: str, options: Mapping[str, str]) -> None:
        given = checked_options(self.name, options, ("mode", "avroSchema", REGISTRY_URL, REGISTRY_USER))
        super().__init__(given)
        writer = _parsed(self.name, schema)
        reader = _parsed(self.name, given[_AVRO_SCHEMA]) if _AVRO_SCHEMA in given else writer
        self._type = _Types(self.name).of(reader)
        self._reader = _raw(reader)
        self._writer = self._resolved(writer)
        self.result = nullable(self._type.spark) if self.permissive else self._type.spark
        self._read = _fastavro(self.name).schemaless_reader
        self._writer_of = lru_cache(self._written_with)
        if isinstance(self.result, dict) and self.result["type"] == "struct":
            # As in Spark: a struct of nulls, or null for other types.
            self.malformed = dict.fromkeys(field["name"] for field in self.result["fields"])

    def _resolved(self, writer: Any) -> tuple[Any, Any]:
        """A writer's schema, and the one to read its messages as; None if it is the same.

        As in Spark, the two may have different names.
        """
        raw, reader = _raw(writer), self._reader
        if isinstance(raw, dict) and isinstance(reader, dict) and raw["type"] == reader["type"] == "record":
            reader = {**reader, "name": raw["name"]}
        return raw, None if raw == reader else reader

    def _written_with(self, schemas: tuple[str, ...]) -> tuple[Any, Any]:
        """What :meth:`_resolved` gives for the last of some schemas, which refers to those before."""
        named: dict[str, Any] = {}
        parsed = [_fastavro(self.name).parse_schema(json.loads(text), named_schemas=named) for text in schemas]
        return self._resolved(parsed[-1])

    def value(self, message: bytes) -> Any:
        stream, (writer, reader) = io.BytesIO(message), self._writer
        if self.registry is not None:
            writer, reader = self._writer_of(self.registry.schema_of(message, "AVRO"))
            stream.seek(HEADER_BYTES)
        value = self._read(stream, writer, reader)
        return value if self._type.convert is None else _given(self._type.convert, value)


class ToAvro(MessageFunction):
    """Encodes values with a schema."""

    name = "to_avro"
    result = "binary"

    def __init__(self, schema: str, options: Mapping[str, str] | None = None) -> None:
        if not schema:
            raise PlanError(
                self.name,
                "the engine does not derive a schema from a column, whose nullability decides its bytes; give one: "
                "to_avro(column, jsonFormatSchema)",
            )
        self._registered = registered_schema(self.name, checked_options(self.name, options or {}, WRITER_OPTIONS))
        parsed = _parsed(self.name, schema)
        self._text = schema
        self._schema = parsed
        self._type = _Types(self.name).of(parsed)
        self._write = _fastavro(self.name).schemaless_writer

    def check(self, argument: SparkType) -> None:
        wanted, given = by_name(self._type.spark), by_name(argument)
        if wanted != given:
            raise PlanError(self.name, f"its schema is that of {wanted}, and the column is {given}: cast the column")

    def __call__(self, values: pa.Array) -> pa.Array:
        return pa.array([self._encoded(value) for value in values.to_pylist(maps_as_pydicts="strict")], pa.binary())

    def _encoded(self, value: Any) -> bytes | None:
        if value is None:
            return None
        stream = io.BytesIO()
        if self._registered is not None:
            stream.write(self._registered.header(lambda: WrittenSchema(self._text, "AVRO")))
        self._write(stream, self._schema, value, strict=True)
        return stream.getvalue()


def function_of(call: Any) -> MessageFunction:
    """The function of a call of ``from_avro`` or ``to_avro`` in a plan. Raises PlanError."""
    given, options = literals_of(call)
    return _made(call.function_name.lower(), *map(str, given), options=tuple(options.items()))


@lru_cache
def _made(name: str, schema: str = "", *, options: tuple[tuple[str, str], ...]) -> MessageFunction:
    """One object for all equal calls, which a plan then calls once for equal columns."""
    if name == "to_avro":
        return ToAvro(schema, dict(options))
    return FromAvro(schema, dict(options))
