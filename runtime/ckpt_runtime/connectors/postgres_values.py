"""Values of rows as a column of a PostgreSQL table takes them, and which it cannot hold. Knows no connection.

A value is refused before it is sent: one that the server refuses would end the transaction with all rows in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.failure_report import printable
from ckpt_runtime.sinks import BadRowError

_EXACT = Context(prec=100)
_NULL_CHARACTER = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
_HEADER = 4
"""Added by PostgreSQL to the length, or the digits, in a type's modifier."""
_MOST_SHOWN_CHARS = 100


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of a table. ``kind`` is the server's name of the type, with ``_`` in front of an array's.

    ``modifier`` is -1 for a type without a length or digits; ``shown`` is the type as people write it. ``generated``
    says how the server computes the values, and is empty for a column that it does not compute. ``read_as`` is the type
    as which values are read: that below a domain, and text for an enumeration.
    """

    name: str
    kind: str
    required: bool
    modifier: int
    shown: str
    generated: str
    read_as: str
    is_key: bool = False


def values_of(table: str, column: TableColumn, values: pa.Array, deleted: pa.Array | None = None) -> list[Any]:
    """Returns the values as the driver takes them. Raises BadRowError for one that the column cannot hold.

    ``deleted`` tells the rows that only name by their keys what is removed, whose other columns may be null.
    """
    if column.required or column.is_key:
        missing = values.is_null()
        if deleted is not None and not column.is_key:
            missing = pc.and_not(missing, deleted)
        if missing.true_count:
            why = "a key, and null is equal to no key" if column.is_key and not column.required else "NOT NULL"
            raise BadRowError(
                f"table {table!r}, column {column.name!r} ({column.shown}) cannot hold None: the column is {why}"
            )
    convert = _converter(column.kind, column.modifier)

    def converted(part: pa.Array) -> list[Any]:
        found: list[Any] = part.to_pylist()  # raises for times that Python does not have
        if convert is not None:
            found = [None if value is None else convert(value) for value in found]
        return found

    try:
        return converted(values)
    except (ValueError, OverflowError):
        for at in range(len(values)):
            one = values.slice(at, 1)
            try:
                converted(one)
            except (ValueError, OverflowError) as error:
                shown = printable(_shown(one), _MOST_SHOWN_CHARS)
                raise BadRowError(
                    f"table {table!r}, column {column.name!r} ({column.shown}) cannot hold {shown}: {error}"
                ) from error
        raise


def _shown(one: pa.Array) -> str:
    """The text of a value, also of a time that Python does not have."""
    return str(one.cast(pa.string())[0]) if pa.types.is_temporal(one.type) else repr(one[0].as_py())


def _converter(kind: str, modifier: int) -> Callable[[Any], Any] | None:
    if kind.startswith("_"):
        element = _converter(kind[1:], modifier)
        if element is None:
            return None
        return lambda values: [None if value is None else element(value) for value in values]
    if kind == "uuid":
        return UUID
    if kind == "jsonb":
        return _json
    if kind in ("text", "varchar"):
        return _text(None if modifier < 0 else modifier - _HEADER)
    if kind == "numeric" and modifier >= 0:
        return _numeric(modifier - _HEADER)
    return None


def _text(most: int | None) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if "\0" in text:
            raise ValueError("no text of PostgreSQL has the character with the code 0")
        if most is not None and len(text) > most and text[most:].strip(" "):  # the server cuts blanks off
            raise ValueError(f"it has {len(text)} characters")
        return text

    return convert


def _numeric(modifier: int) -> Callable[[int | Decimal], int | Decimal]:
    scale = ((modifier & 0x7FF) ^ 0x400) - 0x400
    unit, limit = Decimal(1).scaleb(-scale), Decimal(10) ** ((modifier >> 16) - scale)

    def convert(number: int | Decimal) -> int | Decimal:
        if abs(Decimal(number).quantize(unit, ROUND_HALF_UP, _EXACT)) >= limit:
            raise ValueError(f"its absolute value must be less than {limit:f}")
        return number

    return convert


def _json(text: str) -> Any:
    from psycopg.types.json import Jsonb

    try:
        document = json.loads(text, parse_constant=_refuse)
        json.dumps(document, ensure_ascii=False).encode()  # raises for half of a pair of surrogates
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if "\0" in text or _NULL_CHARACTER.search(text):
        raise ValueError("no JSON of PostgreSQL has the character with the code 0")
    return Jsonb(text, dumps=str)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
