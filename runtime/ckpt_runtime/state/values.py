"""Python values of state fields: checks on writing, and conversion to Arrow columns and back.

A state returns canonical Python values, as Spark's does: int, bool, float, str, bytes, Decimal, date, datetime without
a zone (UTC where the field has one), timedelta, list, dict, and ``pyspark.sql.Row`` for nested structs. Writing accepts
these, their NumPy scalars, and the values that Spark converts: numbers as text, text as bytes, a datetime as a date;
for structs anything with the right number of entries (by position), a dict or an object (by name).

Where Spark silently wraps a value around or replaces it by null, writing raises :class:`StateValueTypeError` or
:class:`StateValueError`, which name state, field and value.

A number that is written to a text field is formatted as the JVM formats it.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Iterable, Sequence
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation
from typing import Any

import numpy as np
import pyarrow as pa

from ckpt_runtime.expressions.texts import double_text
from ckpt_runtime.state import columns
from ckpt_runtime.state.errors import StateSchemaError, StateValueError, StateValueTypeError


def java_text(value: bool | int | float | Decimal) -> str:
    """``true``, ``5``, ``1.0E10``, ``1.50``."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return double_text(float(value)) if isinstance(value, float) else str(value)


Coercer = Callable[[Any], Any]
Converter = Callable[[Any], Any] | None

NAN = float("nan")
_NOT_A_TIME = np.datetime64("NaT")


def row_coercer(state: str, schema: pa.Schema) -> Callable[[Any], tuple[Any, ...]]:
    """Checks a whole value of a state: anything with one entry per field, in order, or a dict; returns a tuple."""
    names = tuple(schema.names)
    checks = [value_coercer(state, field.name, field.type, field.nullable) for field in schema]
    arity = len(checks)

    def spread(value: Any) -> tuple[Any, ...]:
        return _struct_values(state, "value", names, value)

    if arity == 1:
        (only,) = checks

        def coerce_one(value: Any) -> tuple[Any, ...]:
            if type(value) is not tuple or len(value) != 1:
                value = spread(value)
            return (only(value[0]),)

        return coerce_one
    if arity == 2:
        first, second = checks
        # Most values are tuples of the canonical types: they need no call for each entry.
        one_type, least, greatest = _canonical(schema.field(0).type)
        other_type, other_least, other_greatest = _canonical(schema.field(1).type)
        one_free, other_free = one_type is not int, other_type is not int

        def coerce_two(value: Any) -> tuple[Any, ...]:
            if type(value) is not tuple or len(value) != 2:
                value = spread(value)
            one: Any = value[0]
            other: Any = value[1]
            if (
                type(one) is one_type
                and type(other) is other_type
                and (one_free or least <= one <= greatest)
                and (other_free or other_least <= other <= other_greatest)
            ):
                return value  # type: ignore[no-any-return]
            return (first(one), second(other))

        return coerce_two

    def coerce(value: Any) -> tuple[Any, ...]:
        if type(value) is not tuple or len(value) != arity:
            value = spread(value)
        return tuple([check(entry) for check, entry in zip(checks, value, strict=True)])

    return coerce


def _struct_values(state: str, field: str, names: tuple[str, ...], value: Any) -> tuple[Any, ...]:
    """The entries of a struct: by name from a dict, else by position."""
    if isinstance(value, dict):
        if set(value) != set(names):
            got = sorted(map(str, value))
            raise StateValueError(f"state {state!r}, {field}: got fields {got}, allowed are {names}")
        return tuple(value[name] for name in names)
    if not isinstance(value, Iterable):
        raise StateValueTypeError(
            f"state {state!r}, {field}: {value!r} is a {type(value).__name__}, allowed is a tuple of {names}"
        )
    own = getattr(value, "__fields__", None) or getattr(value, "_fields", None)
    if own is not None and tuple(own) != names and set(own) == set(names):
        raise StateValueError(
            f"state {state!r}, {field}: the row has fields {tuple(own)}, allowed are {names} in this order "
            "(rows are taken by position)"
        )
    entries = tuple(value)
    if len(entries) != len(names):
        raise StateValueError(f"state {state!r}, {field}: {value!r} has {len(entries)} fields, allowed are {names}")
    return entries


def _nested_struct_values(state: str, field: str, names: tuple[str, ...], value: Any) -> tuple[Any, ...]:
    """The entries of a struct inside a value: a field that a dict or an object lacks is null, as in Spark."""
    if not isinstance(value, (dict, tuple, list)) and any(name in getattr(value, "__dict__", ()) for name in names):
        value = value.__dict__
    if isinstance(value, dict):
        return tuple(value.get(name) for name in names)
    if isinstance(value, (str, bytes)):
        raise StateValueTypeError(f"state {state!r}, {field}: {value!r} is a {type(value).__name__}, not a struct")
    return _struct_values(state, field, names, value)


def value_coercer(state: str, field: str, kind: pa.DataType, nullable: bool = True) -> Coercer:
    """Checks one value. The fast path takes the canonical type; all other types take the slow path."""
    if pa.types.is_integer(kind):
        return _integer_coercer(state, field, kind, nullable)
    slow = _slow_coercer(state, field, kind)
    exact, _, _ = _canonical(kind)

    def coerce(value: Any) -> Any:
        if type(value) is exact:
            return value
        if value is None:
            return _null(state, field, nullable)
        return slow(_plain_scalar(value))

    return coerce


def _null(state: str, field: str, nullable: bool) -> None:
    if not nullable:
        raise StateValueError(f"state {state!r}, field {field!r}: null in a field that is not nullable")


def _plain_scalar(value: Any) -> Any:
    """NumPy and pandas scalars as Python ones."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dt.datetime) and hasattr(value, "to_pydatetime"):
        # NaT is an instance of datetime but has no date and time: no stored value could represent it.
        return value.to_pydatetime() if value == value else _NOT_A_TIME
    if isinstance(value, dt.timedelta) and hasattr(value, "to_pytimedelta"):
        return value.to_pytimedelta()
    return value


def _wrong_type(state: str, field: str, kind: pa.DataType, value: Any) -> StateValueTypeError:
    return StateValueTypeError(
        f"state {state!r}, field {field!r}: {value!r} is a {type(value).__name__}, the field has type {kind}"
    )


class _NoType:
    """In place of the type of values that always need a further check."""


def _canonical(kind: pa.DataType) -> tuple[Any, int, int]:
    """The Python type of values that are stored as they come; those of integers from the least to the greatest."""
    if pa.types.is_integer(kind):
        bits = kind.bit_width - (0 if pa.types.is_unsigned_integer(kind) else 1)
        return int, 0 if bits == kind.bit_width else -(1 << bits), (1 << bits) - 1
    narrow = pa.types.is_floating(kind) and kind.bit_width < 64
    return _NoType if narrow else _EXACT_TYPES.get(_family(kind), _NoType), 0, 0


def _integer_coercer(state: str, field: str, kind: pa.DataType, nullable: bool) -> Coercer:
    _, lowest, highest = _canonical(kind)

    def coerce(value: Any) -> Any:
        if type(value) is int and lowest <= value <= highest:
            return value
        if value is None:
            return _null(state, field, nullable)
        value = _plain_scalar(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise _wrong_type(state, field, kind, value)
        if not lowest <= value <= highest:
            raise StateValueError(
                f"state {state!r}, field {field!r}: {value} does not fit {kind}, allowed is {lowest} to {highest}"
            )
        return int(value)

    return coerce


_FAMILIES: tuple[tuple[str, Callable[[pa.DataType], bool]], ...] = (
    ("integer", pa.types.is_integer),
    ("bool", pa.types.is_boolean),
    ("float", pa.types.is_floating),
    ("str", pa.types.is_string),
    ("str", pa.types.is_large_string),
    ("bytes", pa.types.is_binary),
    ("bytes", pa.types.is_large_binary),
    ("decimal", pa.types.is_decimal),
    ("date", pa.types.is_date),
    ("timestamp", pa.types.is_timestamp),
    ("duration", pa.types.is_duration),
    ("map", pa.types.is_map),
    ("list", pa.types.is_list),
    ("list", pa.types.is_large_list),
    ("struct", pa.types.is_struct),
)


def _family(kind: pa.DataType) -> str:
    """The name of the group of types that share a check."""
    return next((name for name, test in _FAMILIES if test(kind)), "other")


# Exact types whose values need no further check; narrow floats do, because they are rounded.
_EXACT_TYPES: dict[str, type] = {"bool": bool, "bytes": bytes, "date": dt.date, "float": float}


def check_supported(schema: pa.Schema, what: str) -> None:
    """Raises :class:`StateSchemaError` for a type that states cannot hold."""
    for field in schema:
        _check_type(field.type, f"{what}, field {field.name!r}", storable=True)


def check_readable(schema: pa.Schema, what: str) -> None:
    """Raises :class:`StateSchemaError` for a type without exact Python values: anything in nanoseconds."""
    for field in schema:
        _check_type(field.type, f"{what}, field {field.name!r}", storable=False)


def _check_type(kind: pa.DataType, where: str, storable: bool) -> None:
    family = _family(kind)
    nanoseconds = family in ("timestamp", "duration") and kind.unit == "ns"
    if nanoseconds or (storable and family == "other"):
        hint = "; cast nanoseconds to microseconds" if nanoseconds else ""
        raise StateSchemaError(f"{where}: type {kind} is not supported{hint}")
    for index in range(kind.num_fields if family in ("list", "map", "struct") else 0):
        _check_type(kind.field(index).type, where, storable)


def _slow_coercer(state: str, field: str, kind: pa.DataType) -> Coercer:
    family = _family(kind)
    if family in ("list", "map", "struct"):
        return _nested_coercer(state, field, kind, family)
    if family == "decimal":
        return _decimal_coercer(state, field, kind)
    if family == "str":
        return _text_coercer(state, field, kind)
    accepted: Any
    accepted, convert = _SCALARS[family]
    if family == "float" and kind.bit_width < 64:
        convert = _rounding(kind.bit_width)

    def coerce(value: Any) -> Any:
        if not isinstance(value, accepted) or (isinstance(value, bool) and family == "float"):
            raise _wrong_type(state, field, kind, value)
        try:
            return _timestamp(kind, value) if family == "timestamp" else convert(value)
        except OverflowError as error:
            raise StateValueError(f"state {state!r}, field {field!r}: {value} does not fit {kind}") from error

    return coerce


def _text_coercer(state: str, field: str, kind: pa.DataType) -> Coercer:
    """Text that has no UTF-8 form (lone surrogates) is refused here rather than when a snapshot is written."""

    def coerce(value: Any) -> str:
        if isinstance(value, (bool, int, float, Decimal)):
            return java_text(value)
        if not isinstance(value, str):
            raise _wrong_type(state, field, kind, value)
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise StateValueError(f"state {state!r}, field {field!r}: {value!r} is not valid Unicode") from error
        return str(value)

    return coerce


def _rounding(bits: int) -> Callable[[Any], float]:
    """Rounds on writing to the precision that a snapshot can hold, so that a restore changes nothing."""
    narrow = np.float32 if bits == 32 else np.float16

    def rounded(value: Any) -> float:
        with np.errstate(over="ignore"):
            return float(narrow(value))

    return rounded


_SCALARS: dict[str, tuple[tuple[type, ...], Callable[[Any], Any]]] = {
    "bool": ((bool,), bool),
    "float": ((float, int), float),
    "bytes": (
        (bytes, bytearray, memoryview, str),
        lambda value: value.encode() if isinstance(value, str) else bytes(value),
    ),
    "date": ((dt.date,), lambda value: value.date() if isinstance(value, dt.datetime) else value),
    "timestamp": ((dt.datetime,), lambda value: value),
    "duration": ((dt.timedelta,), lambda value: value),
}


def _timestamp(kind: pa.DataType, value: dt.datetime) -> dt.datetime:
    """The value without its zone: UTC if the field has a zone, otherwise the local time in the value's zone."""
    if value.tzinfo is None:
        return value
    return value.replace(tzinfo=None) if kind.tz is None else value.astimezone(dt.UTC).replace(tzinfo=None)


def _decimal_coercer(state: str, field: str, kind: pa.DataType) -> Coercer:
    quantum = Decimal(1).scaleb(-kind.scale)
    context = Context(prec=kind.precision)

    def coerce(value: Any) -> Decimal:
        if not isinstance(value, (Decimal, int)) or isinstance(value, bool):
            raise _wrong_type(state, field, kind, value)
        try:
            if not Decimal(value).is_finite():
                raise InvalidOperation
            number = Decimal(value).quantize(quantum, rounding=ROUND_HALF_UP, context=context)
            return number or abs(number)  # decimals of Spark and Arrow have no negative zero
        except InvalidOperation as error:
            raise StateValueError(f"state {state!r}, field {field!r}: {value} does not fit {kind}") from error

    return coerce


def _nested_coercer(state: str, field: str, kind: pa.DataType, family: str) -> Coercer:
    if family == "struct":
        names = tuple(kind.field(index).name for index in range(kind.num_fields))
        checks = [
            value_coercer(state, f"{field}.{child.name}", child.type, child.nullable)
            for child in (kind.field(index) for index in range(kind.num_fields))
        ]
        row = row_builder(names)

        def coerce_struct(value: Any) -> Any:
            entries = _nested_struct_values(state, f"field {field!r}", names, value)
            return row([check(entry) for check, entry in zip(checks, entries, strict=True)])

        return coerce_struct
    if family == "list":
        element = value_coercer(state, f"{field}[]", kind.value_type, kind.value_field.nullable)

        def coerce_list(value: Any) -> Any:
            if isinstance(value, np.ndarray):
                value = value.tolist()
            if not isinstance(value, (list, tuple)):
                raise _wrong_type(state, field, kind, value)
            return [element(entry) for entry in value]

        return coerce_list
    key = value_coercer(state, f"{field}{{key}}", kind.key_type, False)
    item = value_coercer(state, f"{field}{{value}}", kind.item_type, kind.item_field.nullable)

    def coerce_map(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _wrong_type(state, field, kind, value)
        return {key(name): item(entry) for name, entry in value.items()}

    return coerce_map


def row_builder(names: tuple[str, ...]) -> Callable[[Sequence[Any]], Any]:
    """Makes ``pyspark.sql.Row`` values; imported only when a state nests structs."""
    from pyspark.sql.types import Row

    fields = list(names)

    def build(entries: Sequence[Any]) -> Any:
        row = tuple.__new__(Row, entries)
        row.__fields__ = fields
        return row

    return build


def row_copier(schema: pa.Schema) -> Callable[[tuple[Any, ...]], tuple[Any, ...]] | None:
    """Copies lists and dicts inside a value, so that its reader may change them; None when the schema has none."""
    if not any(_family(field.type) in ("list", "map", "struct") for field in schema):
        return None
    return lambda row: tuple([_copied(value) for value in row])


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [_copied(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _copied(entry) for key, entry in value.items()}
    if isinstance(value, tuple) and value:
        copy = tuple.__new__(type(value), [_copied(entry) for entry in value])
        copy.__dict__.update(value.__dict__)  # a Row keeps its field names there
        return copy
    return -0.0 if type(value) is _NegativeZero else value


def canonical_key(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """The key with one shared NaN object for every NaN: a dict would not find a different NaN object again."""
    if any(type(part) is float and math.isnan(part) for part in key):
        return tuple(NAN if type(part) is float and math.isnan(part) else part for part in key)
    return key


class _NegativeZero(float):
    """-0.0 inside a key of a map, where Spark distinguishes it from 0.0. Readers get a plain -0.0."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return type(other) is _NegativeZero

    def __ne__(self, other: object) -> bool:
        return type(other) is not _NegativeZero

    def __hash__(self) -> int:
        return hash(_NegativeZero)


_NEGATIVE_ZERO = _NegativeZero(-0.0)


def plain_number(value: Any) -> float:
    """The encoded form of a negative zero in a map's key. Raises TypeError for any other type."""
    if type(value) is not _NegativeZero:
        raise TypeError(f"{type(value).__name__} cannot be encoded")
    return -0.0


class _HashableList(list[Any]):
    """A list inside a key of a map. It is never changed: readers get copies."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self))


def user_key_maker(schema: pa.Schema) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Makes keys of a map state from canonical values, so that equal keys, also nested ones, are found again."""
    return _each_part(_hashable) if _has_parts(schema) else _unchanged


def user_key_reader(schema: pa.Schema) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """The inverse of :func:`user_key_maker`; the reader may change the result."""
    return _each_part(_copied) if _has_parts(schema) else _unchanged


def _has_parts(schema: pa.Schema) -> bool:
    return any(pa.types.is_nested(field.type) or pa.types.is_floating(field.type) for field in schema)


def _each_part(convert: Callable[[Any], Any]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    return lambda key: tuple([convert(part) for part in key])


def _unchanged(key: tuple[Any, ...]) -> tuple[Any, ...]:
    return key


def _hashable(part: Any) -> Any:
    if type(part) is float:
        if math.isnan(part):
            return NAN
        return _NEGATIVE_ZERO if part == 0.0 and math.copysign(1.0, part) < 0 else part
    if isinstance(part, list):
        return _HashableList([_hashable(entry) for entry in part])
    if isinstance(part, tuple):
        copy = tuple.__new__(type(part), [_hashable(entry) for entry in part])
        copy.__dict__.update(part.__dict__)
        return copy
    return part


def to_arrow(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Values of one field as an array: canonical ones, or those that :func:`from_arrow` returns."""
    convert = _to_arrow_converter(kind)
    if convert is not None:
        values = [None if value is None else convert(value) for value in values]
    elif not isinstance(values, list):
        values = list(values)
    return pa.array(values, type=kind)


def _to_arrow_converter(kind: pa.DataType) -> Converter:
    """The conversion of one value; None where Arrow takes canonical values unchanged."""
    family = _family(kind)
    if family == "struct":
        children = [kind.field(index) for index in range(kind.num_fields)]
        converters = [(child.name, _to_arrow_converter(child.type)) for child in children]
        names = [child.name for child in children]

        def convert(row: Any) -> dict[str, Any]:
            own = getattr(row, "__fields__", names)
            if own is not names and list(own) != names:
                row = dict(zip(own, row, strict=True))
            entries = [row.get(name) for name in names] if isinstance(row, dict) else row
            return {n: v if c is None or v is None else c(v) for (n, c), v in zip(converters, entries, strict=True)}

        return convert
    if family == "map":
        return _map_converter(_to_arrow_converter(kind.key_type), _to_arrow_converter(kind.item_type))
    if family == "list":
        element = _to_arrow_converter(kind.value_type)
        return None if element is None else lambda row: [None if v is None else element(v) for v in row]
    return None


def _map_converter(key: Converter, item: Converter) -> Converter:
    def convert(mapping: Any) -> list[tuple[Any, Any]]:
        pairs = mapping.items() if isinstance(mapping, dict) else mapping
        return [(k if key is None else key(k), v if item is None or v is None else item(v)) for k, v in pairs]

    return convert


def from_arrow(array: pa.Array) -> list[Any]:
    """The values of an array in the form of Spark's input rows: structs are dicts, maps are lists of pairs."""
    array = columns.plain(array)
    kind = array.type
    if array.null_count == 0 and (pa.types.is_integer(kind) or pa.types.is_float64(kind)):
        fast: list[Any] = array.to_numpy().tolist()
        return fast
    values: list[Any] = array.to_pylist()
    return values


def state_from_arrow(array: pa.Array) -> list[Any]:
    """The canonical values of an array."""
    convert = _from_arrow_converter(array.type)
    values = from_arrow(array)
    return values if convert is None else [None if value is None else convert(value) for value in values]


def _from_arrow_converter(kind: pa.DataType) -> Converter:
    family = _family(kind)
    if family == "struct":
        children = [kind.field(index) for index in range(kind.num_fields)]
        converters = [(child.name, _from_arrow_converter(child.type)) for child in children]
        build = row_builder(tuple(child.name for child in children))

        def convert(row: dict[str, Any]) -> Any:
            return build([row[n] if c is None or row[n] is None else c(row[n]) for n, c in converters])

        return convert
    if family == "map":
        pairs = _map_converter(_from_arrow_converter(kind.key_type), _from_arrow_converter(kind.item_type))
        assert pairs is not None
        return lambda entries: dict(pairs(dict(entries)))
    if family == "timestamp" and kind.tz is not None:
        return _without_zone
    if family == "list":
        element = _from_arrow_converter(kind.value_type)
        return None if element is None else lambda row: [None if v is None else element(v) for v in row]
    return None


def _without_zone(value: dt.datetime) -> dt.datetime:
    return value.astimezone(dt.UTC).replace(tzinfo=None)
