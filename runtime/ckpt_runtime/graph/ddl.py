"""Schemas as users write them: DDL strings and PySpark ``StructType``, turned into Arrow schemas.

PySpark's own DDL parser calls the JVM; this one is plain Python and agrees with it on types and nullability: names
plain or in backquotes, an optional colon after a name, ``NOT NULL`` and ``COMMENT``. Types map as PySpark maps them to
Arrow (timestamps are microseconds in UTC). Never evaluates anything, nor imports PySpark unless given one of its types.
"""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa

from ckpt_runtime.graph.errors import PlanError

_TOKEN = re.compile(
    r"\s*(?:(?P<quoted>`(?:[^`]|``)+`)|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<word>\w+)|(?P<mark>[<>(),:]))"
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
_TEXTS_WITH_LENGTH = ("char", "character", "varchar")
_INTERVAL_UNITS = ("day", "hour", "minute", "second")
_MAX_DECIMAL_PRECISION = 38
_MAX_DEPTH = 100


class _Parser:
    """Recursive descent over the tokens of one DDL string."""

    def __init__(self, text: str, field: str) -> None:
        self._text = text
        self._field = field
        self._tokens: list[tuple[str, str, int]] = []
        self._next = 0
        self._depth = 0
        position = 0
        while text[position:].strip():
            match = _TOKEN.match(text, position)
            if match is None:
                raise self._error(f"unexpected character at {position}")
            kind = str(match.lastgroup)
            self._tokens.append((kind, match.group(kind), match.start(kind)))
            position = match.end()

    def schema(self) -> pa.Schema:
        """A field list, or one ``struct<...>`` around it."""
        if [text.lower() for _, text, _ in self._tokens[:2]] == ["struct", "<"]:
            struct = self._type()
            fields = [struct.field(index) for index in range(struct.num_fields)]
        else:
            fields = self._fields()
        if self._next < len(self._tokens):
            raise self._expected("the end")
        return pa.schema(fields)

    def _fields(self) -> list[pa.Field[Any]]:
        fields = [self._column()]
        while self._accept(","):
            fields.append(self._column())
        names = [field.name for field in fields]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise self._error(f"repeated field {repeated[0]!r}")
        return fields

    def _column(self) -> pa.Field[Any]:
        name = self._name()
        self._accept(":")
        kind = self._type()
        nullable = True
        while True:
            if self._accept("not"):
                self._expect("null")
                nullable = False
            elif self._accept("comment"):
                self._take("text", "a quoted text")
            else:
                return pa.field(name, kind, nullable)

    def _type(self) -> pa.DataType:
        word = self._take("word", "a type").lower()
        if word in _SIMPLE:
            return _SIMPLE[word]
        if word in _DECIMALS:
            return self._decimal()
        if word in _TEXTS_WITH_LENGTH:
            self._numbers(1)
            return pa.string()
        if word == "interval":
            return self._interval()
        if word not in ("array", "map", "struct"):
            raise self._error(f"unknown type {word!r}")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error(f"types nested deeper than {_MAX_DEPTH}")
        nested = self._nested(word)
        self._depth -= 1
        return nested

    def _nested(self, word: str) -> pa.DataType:
        self._expect("<")
        nested: pa.DataType
        if word == "array":
            nested = pa.list_(pa.field("element", self._type(), True))
        elif word == "map":
            key = self._type()
            self._expect(",")
            nested = pa.map_(key, pa.field("value", self._type(), True))
        else:
            nested = pa.struct([] if self._peek(">") else self._fields())
        self._expect(">")
        return nested

    def _decimal(self) -> pa.DataType:
        numbers = self._numbers(2) if self._peek("(") else [10]
        precision, scale = numbers[0], numbers[1] if len(numbers) > 1 else 0
        if not 1 <= precision <= _MAX_DECIMAL_PRECISION or scale > precision:
            raise self._error(f"decimal({precision},{scale}) is outside 1..38 digits")
        return pa.decimal128(precision, scale)

    def _interval(self) -> pa.DataType:
        start = self._take("word", "an interval unit").lower()
        stop = self._take("word", "an interval unit").lower() if self._accept("to") else start
        if start not in _INTERVAL_UNITS or stop not in _INTERVAL_UNITS:
            raise self._error("only day to second intervals are supported")
        return pa.duration("us")

    def _numbers(self, most: int) -> list[int]:
        self._expect("(")
        numbers = [self._number()]
        while len(numbers) < most and self._accept(","):
            numbers.append(self._number())
        self._expect(")")
        return numbers

    def _number(self) -> int:
        word = self._take("word", "a number")
        if not (word.isascii() and word.isdecimal()):
            raise self._error(f"{word!r} is not a number")
        return int(word)

    def _name(self) -> str:
        if self._next < len(self._tokens) and self._tokens[self._next][0] == "quoted":
            return self._take("quoted", "a field name")[1:-1].replace("``", "`")
        return self._take("word", "a field name")

    def _take(self, kind: str, what: str) -> str:
        if self._next < len(self._tokens) and self._tokens[self._next][0] == kind:
            self._next += 1
            return self._tokens[self._next - 1][1]
        raise self._expected(what)

    def _peek(self, text: str) -> bool:
        if self._next >= len(self._tokens):
            return False
        kind, found, _ = self._tokens[self._next]
        return kind in ("word", "mark") and found.lower() == text

    def _accept(self, text: str) -> bool:
        accepted = self._peek(text)
        self._next += accepted
        return accepted

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            raise self._expected(repr(text))

    def _expected(self, what: str) -> PlanError:
        if self._next < len(self._tokens):
            _, found, position = self._tokens[self._next]
            return self._error(f"{what} expected at {position}, not {found!r},")
        return self._error(f"{what} expected at the end")

    def _error(self, problem: str) -> PlanError:
        return PlanError(self._field, f"{problem} in the DDL schema {self._text!r}; example: 'id BIGINT, name STRING'")


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
