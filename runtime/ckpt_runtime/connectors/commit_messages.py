"""Commit messages of PySpark writers as JSON and back. Never pickles, and never imports what a text names.

A message is read back into a ``WriterCommitMessage`` subclass that is already loaded, found by its qualified name; the
one in the data source's own module wins. Its constructor is not called: fields are set as they were.
"""

from __future__ import annotations

import dataclasses
import json
from base64 import b64decode, b64encode
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from typing import Any


class CommitMessageError(TypeError):
    """A commit message that JSON cannot carry, or whose class is unknown here."""


_ENCODERS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    bytes: ("$bytes", lambda value: b64encode(value).decode()),
    datetime: ("$datetime", datetime.isoformat),
    date: ("$date", date.isoformat),
    Decimal: ("$decimal", str),
    complex: ("$complex", lambda value: [value.real, value.imag]),
}
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$bytes": b64decode,
    "$datetime": datetime.fromisoformat,
    "$date": date.fromisoformat,
    "$decimal": Decimal,
    "$complex": lambda value: complex(*value),
    "$float": float,
}
_SEQUENCES: dict[str, type] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}


def encode_message(message: Any) -> str | None:
    """The JSON of a commit message; None for None.

    :raises CommitMessageError: not a ``WriterCommitMessage``, or a field of a type that is not carried (allowed: JSON
        types, bytes, tuples, sets, dates, decimals, other commit messages).
    """
    from pyspark.sql.datasource import WriterCommitMessage

    if message is None:
        return None
    if not isinstance(message, WriterCommitMessage):
        raise CommitMessageError(f"write() returned {type(message).__name__}, expected a WriterCommitMessage or None")
    return json.dumps(_encode(message, type(message).__qualname__))


def decode_message(text: str | None, data_source: type) -> Any:
    """The commit message of a JSON text. :raises CommitMessageError: its class is not loaded, or the text is none."""
    if text is None:
        return None
    return _decode(json.loads(text), data_source)


def _encode(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    kind = type(value)
    if isinstance(value, int):
        return int(value)
    if kind is float:
        return value if value - value == 0 else {"$float": repr(value)}
    if kind in _ENCODERS:
        tag, encode = _ENCODERS[kind]
        return {tag: encode(value)}
    if kind is list:
        return [_encode(item, where) for item in value]
    for tag, sequence in _SEQUENCES.items():
        if kind is sequence:
            return {tag: [_encode(item, where) for item in value]}
    if kind is dict:
        return {"$dict": [[_encode(key, where), _encode(item, where)] for key, item in value.items()]}
    return _encode_object(value, where)


def _encode_object(value: Any, where: str) -> Any:
    from pyspark.sql.datasource import WriterCommitMessage

    if not isinstance(value, WriterCommitMessage):
        raise CommitMessageError(
            f"commit message {where} holds a {type(value).__name__}; allowed are JSON types, bytes, tuples, sets, "
            "dates, decimals and other commit messages"
        )
    fields = {name: _encode(item, f"{where}.{name}") for name, item in _fields(value).items()}
    return {"$message": type(value).__qualname__, "fields": fields}


def _fields(message: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(message)] if dataclasses.is_dataclass(message) else []
    for kind in type(message).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    names += list(getattr(message, "__dict__", {}))
    return {name: getattr(message, name) for name in dict.fromkeys(names) if hasattr(message, name)}


def _decode(value: Any, data_source: type) -> Any:
    if isinstance(value, list):
        return [_decode(item, data_source) for item in value]
    if not isinstance(value, dict):
        return value
    if "$message" in value:
        return _decode_object(value, data_source)
    if len(value) != 1:
        raise CommitMessageError(f"unreadable commit message part {value!r}")
    [(tag, content)] = value.items()
    if tag == "$dict":
        return {_decode(key, data_source): _decode(item, data_source) for key, item in content}
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](_decode(item, data_source) for item in content)
    if tag not in _DECODERS:
        raise CommitMessageError(f"unreadable commit message part {tag!r}")
    return _DECODERS[tag](content)


def _decode_object(value: dict[str, Any], data_source: type) -> Any:
    kind = _message_class(str(value["$message"]), data_source)
    message: Any = object.__new__(kind)
    for name, item in value["fields"].items():
        object.__setattr__(message, name, _decode(item, data_source))
    return message


def _message_class(qualname: str, data_source: type) -> type:
    from pyspark.sql.datasource import WriterCommitMessage

    found: list[type] = []
    todo: list[type] = [WriterCommitMessage]
    while todo:
        kind = todo.pop()
        todo.extend(kind.__subclasses__())
        if kind.__qualname__ == qualname:
            found.append(kind)
    own = [kind for kind in found if kind.__module__ == data_source.__module__]
    candidates = own or found
    if not candidates:
        raise CommitMessageError(f"commit message class {qualname!r} is not loaded; define it at the top of a module")
    return candidates[-1]
