"""Schemas as users write them: DDL strings and PySpark ``StructType``, turned into Arrow schemas.

PySpark's own DDL parser asks the JVM; this one is plain Python and agrees with it on types and nullability. Types map
as PySpark maps them to Arrow (timestamps are microseconds in UTC). Never imports PySpark unless given one of its types.
"""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa

from ckpt_runtime.graph.errors import PlanError

_TOKEN = re.compile(
    r"\s*(?:(?P<quoted>`(?:[^`]|``)+`)|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<word>[A-Za-z_0-9]+)|(?P<sign>[<>(),:]))"
)

_SIMPLE: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "byte": pa.int8(),
    "smallint": pa.int16(),
    "short": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "long": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ltz": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "void": pa.null(),
}
_DECIMALS = ("decimal", "dec", "numeric")
_MAX_DECIMAL_PRECISION = 38


class _Parser:
    """Recursive descent over the tokens of one DDL string."""

    def __init__(self, text: str, field: str) -> None:
        self._text = text
        self._field = field
        self._tokens = self._tokenize()
        self._next = 0

    def schema(self) -> pa.Schema:
        """A field list, or one ``struct<...>`` around it."""
        if self._peek().lower() == "struct" and self._peek(1) == "<":
            struct = self._type()
            fields = [struct.field(index) for index in range(struct.num_fields)]
        else:
            fields = self._fields(end="")
        if self._peek():
            raise self._error(f"unexpected {self._peek()!r}")
        return pa.schema(fields)

    def _tokenize(self) -> list[str]:
        tokens: list[str] = []
        position = 0
        text = self._text.rstrip()
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise self._error(f"cannot read {text[position : position + 20]!r}")
            tokens.append(match.group().strip())
            position = match.end()
        return tokens

    def _error(self, problem: str) -> PlanError:
        return PlanError(self._field, f"{problem} in the DDL schema {self._text!r}; example: 'id BIGINT, name STRING'")

    def _peek(self, ahead: int = 0) -> str:
        position = self._next + ahead
        return self._tokens[position] if position < len(self._tokens) else ""

    def _take(self, expected: str | None = None) -> str:
        token = self._peek()
        if not token or (expected is not None and token != expected):
            raise self._error(f"expected {expected or 'more'}, found {token or 'the end'!r}")
        self._next += 1
        return token

    def _fields(self, end: str) -> list[pa.Field[Any]]:
        fields = [self._column()]
        while self._peek() == ",":
            self._take()
            fields.append(self._column())
        if end:
            self._take(end)
        names = [field.name for field in fields]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise self._error(f"repeated field {repeated[0]!r}")
        return fields

    def _column(self) -> pa.Field[Any]:
        name = self._take()
        if name.startswith("`"):
            name = name[1:-1].replace("``", "`")
        elif not re.fullmatch(r"\w+", name):
            raise self._error(f"{name!r} is not a field name")
        if self._peek() == ":":
            self._take()
        kind = self._type()
        nullable = True
        if self._peek().lower() == "not" and self._peek(1).lower() == "null":
            self._next += 2
            nullable = False
        if self._peek().lower() == "comment":
            self._next += 1
            self._take()
        return pa.field(name, kind, nullable)

    def _type(self) -> pa.DataType:
        word = self._take().lower()
        if word in _SIMPLE:
            return _SIMPLE[word]
        if word in _DECIMALS:
            return self._decimal()
        if word in ("varchar", "char"):
            self._numbers()
            return pa.string()
        if word == "array":
            self._take("<")
            element = self._type()
            self._take(">")
            return pa.list_(pa.field("element", element, True))
        if word == "map":
            self._take("<")
            key = self._type()
            self._take(",")
            value = self._type()
            self._take(">")
            mapping: pa.DataType = pa.map_(key, pa.field("value", value, True))
            return mapping
        if word == "struct":
            self._take("<")
            return pa.struct(self._fields(end=">"))
        raise self._error(f"unknown type {word!r}")

    def _decimal(self) -> pa.DataType:
        numbers = self._numbers() if self._peek() == "(" else [10, 0]
        precision, scale = numbers[0], numbers[1] if len(numbers) > 1 else 0
        if not 1 <= precision <= _MAX_DECIMAL_PRECISION or not 0 <= scale <= precision:
            raise self._error(f"decimal({precision},{scale}) is outside 1..38 digits")
        return pa.decimal128(precision, scale)

    def _numbers(self) -> list[int]:
        self._take("(")
        numbers = [self._number()]
        while self._peek() == ",":
            self._take()
            numbers.append(self._number())
        self._take(")")
        return numbers

    def _number(self) -> int:
        token = self._take()
        if not token.isdigit():
            raise self._error(f"{token!r} is not a number")
        return int(token)


def parse_ddl(text: str, field: str = "schema") -> pa.Schema:
    """The Arrow schema of a DDL string such as ``"id BIGINT NOT NULL, tags ARRAY<STRING>"``.

    ``field`` is what :class:`PlanError` names when the text cannot be read.
    """
    if not text.strip():
        raise PlanError(field, "an empty DDL schema; write e.g. 'id BIGINT, name STRING'")
    return _Parser(text, field).schema()


def to_arrow_schema(schema: Any, field: str = "schema") -> pa.Schema:
    """An Arrow schema of an Arrow schema, a DDL string or a PySpark ``StructType``."""
    if isinstance(schema, pa.Schema):
        return schema
    if isinstance(schema, str):
        return parse_ddl(schema, field)
    if type(schema).__name__ == "StructType" and type(schema).__module__.startswith("pyspark."):
        from pyspark.sql.pandas.types import to_arrow_schema as convert

        converted: pa.Schema = convert(schema, timezone="UTC")
        return converted
    raise PlanError(
        field, f"expected an Arrow schema, a DDL string or a PySpark StructType, not {type(schema).__name__}"
    )
