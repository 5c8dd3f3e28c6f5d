"""Converts Python values to JSON text and back, for input partitions and commit messages of user classes.

A value that JSON lacks is an object with one member, whose name begins with ``$`` and gives the type. Objects of the
plan's classes (:class:`PlanClasses`) are encoded by their attributes; constructors are not called, but ``__getstate__``
and ``__setstate__`` are. Nothing is pickled, and a name in a text never causes an import.
"""

from __future__ import annotations

import json
import re
import sys
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag
from functools import partial
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from ckpt_runtime.graph.plan_classes import PlanClasses, class_name, may_be_of_a_plan

_MOST_LEVELS = 100
_JSON_INTEGERS = range(-(1 << 53), (1 << 53) + 1)
_NUMPY_TYPE = re.compile(r"[<>|=]([biufcmMSU])\d*(\[\d*[A-Za-z]+\])?")
_ALLOWED = (
    "None, bool, int, float, complex, str, bytes, bytearray, Decimal, UUID, date, time, datetime, timedelta, ZoneInfo, "
    "pathlib paths, range, tuple, list, set, frozenset, deque, dict, OrderedDict, Counter, defaultdict of a built-in "
    "type, NumPy scalars and arrays, pandas Timestamp and Timedelta, Row, StructType, and named tuples, enumerations, "
    "dataclasses and plain objects of classes at the top of the pipeline's modules"
)
_NOT_DATA = "cannot travel as data"
_ELSEWHERE = "is not a class of the plan: define it at the top level of the source's module, or import it by name there"

Where = tuple[Any, str] | None
"""The path to a value: the preceding steps and the last one. It is assembled for messages only."""


class ValueNotCarriedError(TypeError):
    """A value that cannot be encoded. The message names its path, its type and a remedy."""


class UnreadableValueError(ValueError):
    """A text that this version of the plan, or of the engine, cannot decode."""


class TaggedValues:
    """Encodes and decodes with the classes of one plan."""

    def __init__(self, classes: PlanClasses) -> None:
        self._classes = classes

    def encode(self, value: Any, what: str) -> str:
        """The text of a value; ``what`` begins its path in messages, e.g. ``"Reader.partitions()[0]"``.

        Raises ValueNotCarriedError for a value that contains one which cannot be encoded, or itself.
        """
        return json.dumps(self._encode(value, (None, what), 0), separators=(",", ":"))

    def decode(self, text: str) -> Any:
        """The value of a text. Raises UnreadableValueError for an unknown class, or a text not from :meth:`encode`.

        Errors of the machine, such as OSError, are raised unchanged, also from a user's ``__setstate__``.
        """
        try:
            return self._decode(json.loads(text))
        except (UnreadableValueError, OSError, MemoryError):
            raise
        except Exception as error:
            raise UnreadableValueError(f"{text[:200]!r} cannot be read: {type(error).__name__}: {error}") from error

    # Encoding.

    def _encode(self, value: Any, where: Where, level: int) -> Any:
        kind = type(value)
        if value is None or kind is bool or (kind is int and value in _JSON_INTEGERS):
            return value
        if level > _MOST_LEVELS:
            raise _refused(where, kind, f"is nested deeper than {_MOST_LEVELS} levels, or contains itself")
        if kind is ZoneInfo and value.key is None:
            raise _refused(where, kind, "has no key")
        if kind in _ENCODERS:
            return _ENCODERS[kind](value)
        if kind is list:
            return self._items(value, where, level)
        if kind in _ITERABLES:
            return {_ITERABLES[kind]: self._items(value, where, level)}
        if kind in _MAPPINGS:
            return {_MAPPINGS[kind]: self._pairs(value, where, level)}
        if kind in _OF_PARTS:
            return self._encode_parts(value, where, level)
        return self._encode_special(value, where, level)

    def _items(self, values: Any, where: Where, level: int) -> list[Any]:
        return [self._encode(item, (where, f"[{number}]"), level + 1) for number, item in enumerate(values)]

    def _pairs(self, values: dict[Any, Any], where: Where, level: int) -> list[Any]:
        return [
            [self._encode(key, (where, " key"), level + 1), self._encode(item, (where, f"[{key!r}]"), level + 1)]
            for key, item in values.items()
        ]

    def _encode_parts(self, value: Any, where: Where, level: int) -> Any:
        if isinstance(value, deque):
            return {"$deque": [value.maxlen, self._items(value, where, level)]}
        if isinstance(value, defaultdict):
            factory = value.default_factory
            if factory not in _FACTORIES.values():
                raise _refused(where, defaultdict, "creates values of a type that is not built in")
            return {"$defaultdict": [factory and factory.__name__, self._pairs(value, where, level)]}
        return {f"${type(value).__name__}": [*_bare(value), self._encode(value.tzinfo, (where, ".tzinfo"), level + 1)]}

    def _encode_special(self, value: Any, where: Where, level: int) -> Any:
        """Encodes a value whose form depends on more than its exact type."""
        if isinstance(value, Enum):
            member = self._encode(value.value, where, level + 1) if isinstance(value, Flag) else value.name
            return {"$enum": [self._name_of(type(value), where), member]}
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
            return _encode_numpy(value, where)
        pandas = sys.modules.get("pandas")
        if pandas is not None and isinstance(value, pandas.Timestamp | pandas.Timedelta | type(pandas.NaT)):
            return {"$pandas": [_encode_numpy(value.to_numpy(), where)["$numpy"], _zone_of(value)]}
        if isinstance(value, tuple):
            return self._encode_tuple(value, where, level)
        return self._encode_object(value, where, level)

    def _encode_tuple(self, value: Any, where: Where, level: int) -> Any:
        from pyspark.sql import Row

        items = self._items(value, where, level)
        if type(value) is Row:
            return {"$row": [getattr(value, "__fields__", None), items]}
        if not hasattr(value, "_fields"):
            raise _refused(where, type(value))
        return {"$namedtuple": [self._name_of(type(value), where), items]}

    def _encode_object(self, value: Any, where: Where, level: int) -> Any:
        from pyspark.sql.types import StructType

        kind = type(value)
        if kind is StructType:
            return {"$struct_type": value.json()}
        if not _is_plain(kind):
            raise _refused(where, kind)
        name = self._name_of(kind, where)
        state = value.__getstate__()
        if _defines(kind, "__getstate__"):
            return {"$state": [name, self._encode(state, (where, ".__getstate__()"), level + 1)]}
        fields, slots = state if isinstance(state, tuple) else (state, None)
        return {"$object": [name, self._fields(fields, where, level), self._fields(slots, where, level)]}

    def _fields(self, fields: dict[str, Any] | None, where: Where, level: int) -> dict[str, Any]:
        return {name: self._encode(item, (where, f".{name}"), level + 1) for name, item in (fields or {}).items()}

    def _name_of(self, kind: type, where: Where) -> str:
        name = self._classes.name_of(kind)
        if name is None:
            raise _refused(where, kind, _ELSEWHERE if may_be_of_a_plan(kind) else _NOT_DATA)
        return name

    # Decoding.

    def _decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        [(tag, content)] = value.items()
        if tag in _DECODERS:
            return _DECODERS[tag](content)
        if tag in _ITERABLES_BACK:
            return _ITERABLES_BACK[tag](self._decode(content))
        if tag in _MAPPINGS_BACK:
            return _MAPPINGS_BACK[tag](dict(self._decode(content)))
        if tag in _PARTS_BACK:
            return _PARTS_BACK[tag](*(self._decode(part) for part in content))
        return self._decode_of_class(tag, self._class_of(content[0]), content[1:])

    def _decode_of_class(self, tag: str, kind: Any, content: list[Any]) -> Any:
        if tag == "$enum" and issubclass(kind, Enum):
            return kind(self._decode(content[0])) if issubclass(kind, Flag) else kind[content[0]]
        if tag == "$namedtuple" and issubclass(kind, tuple):
            return kind._make(self._decode(content[0]))
        if tag not in ("$object", "$state") or not _is_plain(kind):
            raise UnreadableValueError(f"{tag!r} of {class_name(kind)} is unknown")
        made = object.__new__(kind)
        if tag == "$state":
            _set_state(made, self._decode(content[0]))
            return made
        fields, slots = ({name: self._decode(item) for name, item in part.items()} for part in content)
        _set_state(made, (fields, slots) if slots else fields)
        return made

    def _class_of(self, name: str) -> type:
        kind = self._classes.find(name)
        if kind is None:
            raise UnreadableValueError(
                f"class {name} is not a class of the plan, but was one when the text was written. Define it at the "
                "same place, or import it there by name"
            )
        return kind


def _refused(where: Where, kind: type, why: str = _NOT_DATA) -> ValueNotCarriedError:
    steps: list[str] = []
    while where is not None:
        where, step = where
        steps.append(step)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return ValueNotCarriedError(
        f"{''.join(reversed(steps))} is of type {name}, which {why}. Allowed are {_ALLOWED}. Pass the values from "
        "which the object can be created, and create it where it is used"
    )


def _is_plain(kind: type) -> bool:
    """Whether its objects consist of attributes only: no state in C, and no pickling methods."""
    if _defines(kind, "__reduce__") or _defines(kind, "__reduce_ex__"):
        return False
    makers = [vars(base)["__new__"] for base in kind.__mro__[:-1] if "__new__" in vars(base)]
    return all(isinstance(maker, staticmethod) for maker in makers) and not issubclass(kind, type | tuple | Enum)


def _defines(kind: type, method: str) -> bool:
    """Whether a class overrides a method that ``object`` has."""
    return any(method in vars(base) for base in kind.__mro__[:-1])


def _set_state(made: Any, state: Any) -> None:
    """Sets the state of an object as unpickling does."""
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
        return
    fields, slots = state if isinstance(state, tuple) else (state, None)
    if fields:
        made.__dict__.update(fields)
    for name, value in (slots or {}).items():
        object.__setattr__(made, name, value)


def _zoned(kind: type[Any], text: str, fold: int, zone: Any) -> Any:
    return kind.fromisoformat(text).replace(tzinfo=zone, fold=fold)


def _row(names: list[str] | None, values: list[Any]) -> Any:
    from pyspark.sql import Row

    row: Any = Row(*values)
    if names is not None:
        row.__fields__ = names
    return row


def _bare(value: Any) -> tuple[str, int]:
    return value.replace(tzinfo=None, fold=0).isoformat(), value.fold


def _encode_float(value: float) -> Any:
    return value if value - value == 0 else {"$float": repr(value)}


def _encode_text(value: str) -> Any:
    """Encodes a text; not every JSON reader accepts lone surrogates (file names that are not UTF-8)."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return {"$text": b64encode(value.encode("utf-8", "surrogatepass")).decode()}
    return value


def _encode_offset(value: timezone) -> Any:
    offset, *name = value.__getinitargs__()  # type: ignore[attr-defined]
    return {"$offset": [offset // timedelta(microseconds=1), *name]}


def _encode_numpy(value: Any, where: Where) -> Any:
    kind = value.dtype.str
    if not _NUMPY_TYPE.fullmatch(kind):
        raise _refused(where, type(value), f"with dtype {kind} {_NOT_DATA}")
    shape = list(value.shape) if isinstance(value, sys.modules["numpy"].ndarray) else None
    return {"$numpy": [kind, shape, b64encode(value.tobytes()).decode()]}


def _decode_numpy(content: list[Any]) -> Any:
    import numpy as np

    kind, shape, data = content
    if not _NUMPY_TYPE.fullmatch(kind):
        raise UnreadableValueError(f"NumPy type {kind!r} is unknown")
    flat = np.frombuffer(b64decode(data), dtype=np.dtype(kind))
    return flat[0] if shape is None else flat.reshape(shape).copy()


def _zone_of(value: Any) -> str | None:
    zone = getattr(value, "tzinfo", None)
    return None if zone is None else str(zone)


def _decode_pandas(content: list[Any]) -> Any:
    import pandas as pd

    plain, zone = _decode_numpy(content[0]), content[1]
    if plain.dtype.kind == "m":
        return pd.Timedelta(plain)
    moment = pd.Timestamp(plain)
    return moment if zone is None else moment.tz_localize("UTC").tz_convert(zone)


def _decode_struct_type(content: str) -> Any:
    from pyspark.sql.types import StructType

    return StructType.fromJson(json.loads(content))


_PATHS: dict[str, type[PurePath]] = {
    kind.__name__: kind for kind in (Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath)
}
_ENCODERS: dict[type, Callable[[Any], Any]] = {
    str: _encode_text,
    float: _encode_float,
    # Hexadecimal: Python refuses decimal texts of thousands of digits.
    int: lambda value: {"$int": hex(value)},
    complex: lambda value: {"$complex": [repr(value.real), repr(value.imag)]},
    bytes: lambda value: {"$bytes": b64encode(value).decode()},
    bytearray: lambda value: {"$bytearray": b64encode(value).decode()},
    Decimal: lambda value: {"$decimal": str(value)},
    UUID: lambda value: {"$uuid": str(value)},
    date: lambda value: {"$date": value.isoformat()},
    timedelta: lambda value: {"$timedelta": [value.days, value.seconds, value.microseconds]},
    timezone: _encode_offset,
    ZoneInfo: lambda value: {"$zone": value.key},
    range: lambda value: {"$range": [hex(value.start), hex(value.stop), hex(value.step)]},
    **{kind: lambda value: {"$path": [type(value).__name__, _encode_text(str(value))]} for kind in _PATHS.values()},
}
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$text": lambda content: b64decode(content).decode("utf-8", "surrogatepass"),
    "$float": float,
    "$int": lambda content: int(content, 16),
    "$complex": lambda content: complex(*map(float, content)),
    "$bytes": b64decode,
    "$bytearray": lambda content: bytearray(b64decode(content)),
    "$decimal": Decimal,
    "$uuid": UUID,
    "$date": date.fromisoformat,
    "$timedelta": lambda content: timedelta(*content),
    "$offset": lambda content: timezone(timedelta(microseconds=content[0]), *content[1:]),
    "$zone": ZoneInfo,
    "$range": lambda content: range(*(int(part, 16) for part in content)),
    "$path": lambda content: _PATHS[content[0]](_decode_text(content[1])),
    "$numpy": _decode_numpy,
    "$pandas": _decode_pandas,
    "$struct_type": _decode_struct_type,
}
_ITERABLES: dict[type, str] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset"}
_ITERABLES_BACK: dict[str, Callable[[Any], Any]] = {tag: kind for kind, tag in _ITERABLES.items()}
_MAPPINGS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
_MAPPINGS_BACK: dict[str, Callable[[Any], Any]] = {tag: kind for kind, tag in _MAPPINGS.items()}
_FACTORIES: dict[str | None, Callable[[], Any] | None] = {
    None: None,
    **{kind.__name__: kind for kind in (list, dict, set, tuple, frozenset, int, float, bool, str, bytes)},
}
"""Allowed factories of a ``defaultdict``: any other function would have to be imported by name."""
_OF_PARTS = (datetime, time, deque, defaultdict)
_PARTS_BACK: dict[str, Callable[..., Any]] = {
    "$datetime": partial(_zoned, datetime),
    "$time": partial(_zoned, time),
    "$deque": lambda most, items: deque(items, most),
    "$defaultdict": lambda factory, pairs: defaultdict(_FACTORIES[factory], dict(pairs)),
    "$row": _row,
}


def _decode_text(content: Any) -> str:
    return content if isinstance(content, str) else _DECODERS["$text"](content["$text"])
