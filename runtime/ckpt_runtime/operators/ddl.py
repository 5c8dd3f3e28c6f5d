"""Spark's DDL schema strings (``"id int, tags array<string> NOT NULL"``) without a JVM.

Covers what Spark's own parser takes for table schemas: names plain or in backquotes, an optional colon after a name,
``NOT NULL`` and ``COMMENT``. Raises :class:`DdlError` naming the string and the place. Never evaluates
anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from pyspark.sql import types as spark

_TOKEN = re.compile(
    r"\s*(?:(?P<quoted>`(?:[^`]|``)+`)|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(?P<word>\w+)|(?P<mark>[<>(),:]))"
)
_SIMPLE: dict[str, Callable[[], spark.DataType]] = {
    "boolean": spark.BooleanType,
    "tinyint": spark.ByteType,
    "byte": spark.ByteType,
    "smallint": spark.ShortType,
    "short": spark.ShortType,
    "int": spark.IntegerType,
    "integer": spark.IntegerType,
    "bigint": spark.LongType,
    "long": spark.LongType,
    "float": spark.FloatType,
    "real": spark.FloatType,
    "double": spark.DoubleType,
    "string": spark.StringType,
    "binary": spark.BinaryType,
    "date": spark.DateType,
    "timestamp": spark.TimestampType,
    "timestamp_ltz": spark.TimestampType,
    "timestamp_ntz": spark.TimestampNTZType,
    "void": spark.NullType,
}
_INTERVAL_UNITS = {"day": 0, "hour": 1, "minute": 2, "second": 3}
_MAX_DEPTH = 100


class DdlError(ValueError):
    """A schema string that is not DDL, or names a type that state cannot hold."""


def parse_schema(ddl: str) -> spark.StructType:
    """The struct that a DDL string describes; ``struct<...>`` around the fields is allowed."""
    parser = _Parser(ddl)
    schema = parser.fields(end=None, depth=0) if not parser.is_bare_struct() else parser.data_type(0)
    parser.expect_end()
    assert isinstance(schema, spark.StructType)
    return schema


class _Parser:
    def __init__(self, ddl: str) -> None:
        self._ddl = ddl
        self._tokens: list[tuple[str, str, int]] = []
        self._next = 0
        position = 0
        while ddl[position:].strip():
            match = _TOKEN.match(ddl, position)
            if match is None:
                raise DdlError(f"schema string {ddl!r}: unexpected character at {position}")
            kind = str(match.lastgroup)
            self._tokens.append((kind, match.group(kind), match.start(kind)))
            position = match.end()

    def is_bare_struct(self) -> bool:
        head = [text.lower() for _, text, _ in self._tokens[:2]]
        return head == ["struct", "<"]

    def expect_end(self) -> None:
        if self._next < len(self._tokens):
            raise self._error("the end")

    def fields(self, end: str | None, depth: int) -> spark.StructType:
        """``name type, …`` up to ``end``."""
        found: list[spark.StructField] = []
        if end is not None and self._accept(end):
            return spark.StructType(found)
        while True:
            found.append(self._field(depth))
            if self._accept(","):
                continue
            if end is not None:
                self._expect(end)
            return spark.StructType(found)

    def _field(self, depth: int) -> spark.StructField:
        name = self._name()
        self._accept(":")
        kind = self.data_type(depth)
        nullable = True
        metadata = None
        while True:
            if self._accept("not"):
                self._expect("null")
                nullable = False
            elif self._accept("comment"):
                metadata = {"comment": self._text()}
            else:
                return spark.StructField(name, kind, nullable, metadata)

    def data_type(self, depth: int) -> spark.DataType:
        if depth > _MAX_DEPTH:
            raise DdlError(f"schema string {self._ddl!r}: types nested deeper than {_MAX_DEPTH}")
        word = self._word("a type").lower()
        if word == "array":
            self._expect("<")
            element = self.data_type(depth + 1)
            self._expect(">")
            return spark.ArrayType(element)
        if word == "map":
            self._expect("<")
            key = self.data_type(depth + 1)
            self._expect(",")
            item = self.data_type(depth + 1)
            self._expect(">")
            return spark.MapType(key, item)
        if word == "struct":
            self._expect("<")
            return self.fields(">", depth + 1)
        if word in ("decimal", "dec", "numeric"):
            precision, scale = self._numbers(10, 0)
            if not (0 < precision <= 38 and 0 <= scale <= precision):
                raise DdlError(f"schema string {self._ddl!r}: decimal({precision},{scale}) is not allowed")
            return spark.DecimalType(precision, scale)
        if word in ("char", "character", "varchar"):
            (length,) = self._numbers(0)
            return spark.VarcharType(length) if word == "varchar" else spark.CharType(length)
        if word == "interval":
            return self._interval()
        if word not in _SIMPLE:
            raise DdlError(f"schema string {self._ddl!r}: unknown type {word!r}")
        return _SIMPLE[word]()

    def _interval(self) -> spark.DataType:
        start = self._word("an interval unit").lower()
        stop = self._word("an interval unit").lower() if self._accept("to") else start
        if start not in _INTERVAL_UNITS or stop not in _INTERVAL_UNITS:
            raise DdlError(f"schema string {self._ddl!r}: only day to second intervals are supported")
        return spark.DayTimeIntervalType(_INTERVAL_UNITS[start], _INTERVAL_UNITS[stop])

    def _numbers(self, *defaults: int) -> list[int]:
        found = list(defaults)
        if not self._accept("("):
            if defaults == (0,):
                raise self._error("'(' and a length")
            return found
        for index in range(len(defaults)):
            if index and not self._accept(","):
                break
            word = self._word("a number")
            if not word.isdecimal():
                raise DdlError(f"schema string {self._ddl!r}: {word!r} is not a number")
            found[index] = int(word)
        self._expect(")")
        return found

    def _name(self) -> str:
        if self._next < len(self._tokens) and self._tokens[self._next][0] == "quoted":
            text = self._tokens[self._next][1]
            self._next += 1
            return text[1:-1].replace("``", "`")
        return self._word("a field name")

    def _text(self) -> str:
        if self._next < len(self._tokens) and self._tokens[self._next][0] == "text":
            self._next += 1
            return re.sub(r"\\(.)", r"\1", self._tokens[self._next - 1][1][1:-1])
        raise self._error("a quoted text")

    def _word(self, what: str) -> str:
        if self._next < len(self._tokens) and self._tokens[self._next][0] == "word":
            self._next += 1
            return self._tokens[self._next - 1][1]
        raise self._error(what)

    def _accept(self, text: str) -> bool:
        if self._next < len(self._tokens):
            kind, found, _ = self._tokens[self._next]
            if kind in ("word", "mark") and found.lower() == text:
                self._next += 1
                return True
        return False

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            raise self._error(repr(text))

    def _error(self, what: str) -> DdlError:
        if self._next < len(self._tokens):
            _, found, position = self._tokens[self._next]
            return DdlError(f"schema string {self._ddl!r}: {what} expected at {position}, not {found!r}")
        return DdlError(f"schema string {self._ddl!r}: {what} expected at the end")
