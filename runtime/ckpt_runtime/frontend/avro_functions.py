"""Spark's ``from_avro`` and ``to_avro``, which need no package of Spark here: Arrow functions around fastavro.

The analyzer in Spark gets a Python function of the result's type in their place. The schemas have to be literals.
``from_avro`` takes Spark's options ``mode`` and ``avroSchema``, and those of a Schema Registry, whose messages say with
which schema they were written. Types are those that Spark's package has; what it would give another form is refused.

The registry has Confluent's API. Its schemas never change, so that each is asked for once. If the registry does not
answer, the call is repeated for a while, and fails then. Credentials are in no log line and no error.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

import msgspec
import pyarrow as pa

from ckpt_runtime.expressions.types import ServiceError, SparkType, arrow_type
from ckpt_runtime.graph.errors import PlanError

_ATTEMPTS, _PAUSE_S, _TIMEOUT_S = 5, 0.5, 10.0
_MOST_BYTES = 1 << 20
HEADER_BYTES = 5
"""The wire format: a zero byte, the id of the schema as a big-endian number of four bytes, the message."""


class UnknownSchemaError(ValueError):
    """A message does not begin as the wire format says, or the registry has no schema of its id."""


class RegistryError(ServiceError):
    """The registry did not answer, or refused to."""


class _Answer(msgspec.Struct, rename="camel"):
    schema: str
    schema_type: str = "AVRO"
    references: list[msgspec.Raw] = []


class SchemaRegistry:
    """A client of one registry. ``user_info`` is ``user:password`` for basic authentication, or None."""

    def __init__(self, url: str, user_info: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._user_info = user_info
        self._schemas: dict[int, str] = {}

    def schema_of(self, message: bytes) -> str:
        """The schema with which a message was written. Raises UnknownSchemaError, and RegistryError."""
        if len(message) < HEADER_BYTES or message[0]:
            raise UnknownSchemaError("the message does not begin with a zero byte and the id of its schema")
        number = int.from_bytes(message[1:HEADER_BYTES], "big")
        if number not in self._schemas:
            self._schemas[number] = self._asked(number)
        return self._schemas[number]

    def _asked(self, number: int) -> str:
        import httpx

        auth = None
        if self._user_info is not None:
            user, _, password = self._user_info.partition(":")
            auth = httpx.BasicAuth(user, password)
        problem = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_PAUSE_S * 2**attempt)
            try:
                answer = httpx.get(f"{self._url}/schemas/ids/{number}", auth=auth, timeout=_TIMEOUT_S)
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if answer.status_code == httpx.codes.NOT_FOUND:
                raise UnknownSchemaError(f"the Schema Registry has no schema {number}")
            if answer.is_success:
                return self._schema_in(answer.content, number)
            problem = f"status {answer.status_code}"
            if not answer.is_server_error:
                break
        raise RegistryError(f"schema {number} cannot be read from the Schema Registry at {self._url}: {problem}")

    def _schema_in(self, content: bytes, number: int) -> str:
        try:
            found = msgspec.json.decode(content[: _MOST_BYTES + 1], type=_Answer)
        except msgspec.DecodeError as error:
            raise RegistryError(f"the Schema Registry at {self._url} gave no schema for {number}: {error}") from None
        if found.schema_type != "AVRO":
            raise UnknownSchemaError(f"schema {number} of the Schema Registry is of type {found.schema_type}, not AVRO")
        if found.references:
            raise UnknownSchemaError(f"schema {number} of the Schema Registry refers to others, which is not supported")
        return found.schema


NAMES = ("from_avro", "to_avro")
_MODE, _AVRO_SCHEMA = "mode", "avroschema"
_REGISTRY_URL, _REGISTRY_USER = "schema.registry.url", "schema.registry.basic.auth.user.info"
_OPTIONS = (_MODE, _AVRO_SCHEMA, _REGISTRY_URL, _REGISTRY_USER)
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


def _nullable(spark: SparkType) -> SparkType:
    """The type with all of its parts nullable."""
    if not isinstance(spark, dict):
        return spark
    changed = {key: _nullable(value) if isinstance(value, dict) else value for key, value in spark.items()}
    for key in ("nullable", "containsNull", "valueContainsNull"):
        if key in changed:
            changed[key] = True
    if "fields" in changed:
        changed["fields"] = [_nullable(field) for field in changed["fields"]]
    return changed


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


class AvroFunction:
    """A function over Arrow arrays; ``result`` is the Spark type of what it returns."""

    name: str
    result: SparkType

    def check(self, argument: SparkType) -> None:
        """Raises PlanError for an argument of a type that the function does not take."""
        raise NotImplementedError

    def __call__(self, values: pa.Array) -> pa.Array:
        raise NotImplementedError


class FromAvro(AvroFunction):
    """Decodes messages. ``schema`` is what they were written with, and what they are read as without ``avroSchema``."""

    name = "from_avro"

    def __init__(self, schema: str, options: Mapping[str, str]) -> None:
        given = {key.lower(): value for key, value in options.items()}
        if unknown := sorted(set(given) - set(_OPTIONS)):
            known = f"mode, avroSchema, {_REGISTRY_URL} and {_REGISTRY_USER}"
            raise PlanError(self.name, f"the option {unknown[0]!r} is not supported; there are {known}")
        mode = given.get(_MODE, "FAILFAST").upper()
        if mode not in ("FAILFAST", "PERMISSIVE"):
            raise PlanError(self.name, f"mode {given[_MODE]!r} is not FAILFAST or PERMISSIVE, as in Spark")
        self._permissive = mode == "PERMISSIVE"
        self._registry: SchemaRegistry | None = None
        if _REGISTRY_URL in given:
            self._registry = SchemaRegistry(given[_REGISTRY_URL], given.get(_REGISTRY_USER))
        elif _REGISTRY_USER in given:
            raise PlanError(self.name, f"{_REGISTRY_USER} needs {_REGISTRY_URL}")
        writer = _parsed(self.name, schema)
        reader = _parsed(self.name, given[_AVRO_SCHEMA]) if _AVRO_SCHEMA in given else writer
        self._type = _Types(self.name).of(reader)
        self._reader = _raw(reader)
        self._writer = self._resolved(writer)
        self.result = _nullable(self._type.spark) if self._permissive else self._type.spark
        self._read = _fastavro(self.name).schemaless_reader
        self._writer_of = lru_cache(lambda text: self._resolved(_parsed(self.name, text)))
        fields = self.result["fields"] if isinstance(self.result, dict) and self.result["type"] == "struct" else None
        self._malformed = None if fields is None else dict.fromkeys(field["name"] for field in fields)

    def check(self, argument: SparkType) -> None:
        if argument != "binary":
            raise PlanError(self.name, f"its argument is {argument}, not binary")

    def __call__(self, values: pa.Array) -> pa.Array:
        return pa.array(self._decoded(values.to_pylist()), arrow_type(self.result))

    def _resolved(self, writer: Any) -> tuple[Any, Any]:
        """A writer's schema, and the one to read its messages as; None if it is the same.

        As in Spark, the two may have different names.
        """
        raw, reader = _raw(writer), self._reader
        if isinstance(raw, dict) and isinstance(reader, dict) and raw["type"] == reader["type"] == "record":
            reader = {**reader, "name": raw["name"]}
        return raw, None if raw == reader else reader

    def _decoded(self, messages: Iterable[bytes | None]) -> list[Any]:
        found = []
        for message in messages:
            try:
                found.append(None if message is None else self._value(message))
            except RegistryError:
                raise
            except Exception as error:  # the library raises several kinds
                if not self._permissive:
                    raise ValueError(
                        f"from_avro: a message of {len(message or b'')} bytes is malformed ({type(error).__name__}: "
                        f"{error}); in mode PERMISSIVE it would be null"
                    ) from error
                found.append(self._malformed)  # as in Spark: a struct of nulls, or null for other types
        return found

    def _value(self, message: bytes) -> Any:
        stream, (writer, reader) = io.BytesIO(message), self._writer
        if self._registry is not None:
            writer, reader = self._writer_of(self._registry.schema_of(message))
            stream.seek(HEADER_BYTES)
        value = self._read(stream, writer, reader)
        return value if self._type.convert is None else _given(self._type.convert, value)


class ToAvro(AvroFunction):
    """Encodes values with a schema."""

    name = "to_avro"
    result = "binary"

    def __init__(self, schema: str) -> None:
        if not schema:
            raise PlanError(
                self.name,
                "the engine does not derive a schema from a column, whose nullability decides its bytes; give one: "
                "to_avro(column, jsonFormatSchema)",
            )
        parsed = _parsed(self.name, schema)
        self._schema = parsed
        self._type = _Types(self.name).of(parsed)
        self._write = _fastavro(self.name).schemaless_writer

    def check(self, argument: SparkType) -> None:
        wanted, given = _by_name(self._type.spark), _by_name(argument)
        if wanted != given:
            raise PlanError(self.name, f"its schema is that of {wanted}, and the column is {given}: cast the column")

    def __call__(self, values: pa.Array) -> pa.Array:
        return pa.array([self._encoded(value) for value in values.to_pylist(maps_as_pydicts="strict")], pa.binary())

    def _encoded(self, value: Any) -> bytes | None:
        if value is None:
            return None
        stream = io.BytesIO()
        self._write(stream, self._schema, value, strict=True)
        return stream.getvalue()


def _by_name(spark: SparkType) -> Any:
    """A type as texts, fields by their names, without their order and what is nullable."""
    if not isinstance(spark, dict):
        return spark
    match spark["type"]:
        case "struct":
            return {field["name"]: _by_name(field["type"]) for field in spark["fields"]}
        case "array":
            return [_by_name(spark["elementType"])]
        case "map":
            return (_by_name(spark["keyType"]), _by_name(spark["valueType"]))
    return spark


def function_of(call: Any) -> AvroFunction:
    """The function that a call of ``from_avro`` or ``to_avro`` in a plan stands for. Raises PlanError."""
    name = call.function_name.lower()
    given = [_text(name, part) for option in call.arguments[2:3] for part in option.unresolved_function.arguments]
    return _made(name, *[_text(name, argument) for argument in call.arguments[1:2]], options=tuple(given))


@lru_cache
def _made(name: str, schema: str = "", *, options: tuple[str, ...]) -> AvroFunction:
    """One object for all equal calls, which a plan then calls once for equal columns."""
    if name == "to_avro":
        return ToAvro(schema)
    return FromAvro(schema, dict(zip(options[::2], options[1::2], strict=True)))


def _text(function: str, expression: Any) -> str:
    if expression.literal.WhichOneof("literal_type") != "string":
        raise PlanError(function, "its schema and its options have to be texts, not columns")
    return str(expression.literal.string)
