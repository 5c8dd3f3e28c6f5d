"""What all structs of the contract share: fields that readers do not require, decoding, and output for scripts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec
from msgspec import Struct, structs

from ckpt_runtime.readable_types import ready

T = TypeVar("T")


def always(default: T) -> T:
    """A field that every answer of this server has, but that readers do not require, since Flink may lack it.

    In structs with ``omit_defaults`` a field with a plain default is left out of answers while it has that default; a
    field made by this function is never left out. All instances share ``default``, so nothing may change it.
    """
    return msgspec.field(default_factory=lambda: default)


def read(document: Any, kind: type[T]) -> T:
    """Read a document as a value. Numbers may be given as text: Flink sends ``"NaN"``.

    Raises ``ValueError``, which names the field, for a missing value or one of the wrong type.
    """
    return msgspec.convert(document, ready(kind), strict=False)


def reader(kind: type[T], inside: str | None = None) -> Callable[[Any], T]:
    """Make a function that reads a document, or the part of it under the key ``inside``."""
    return lambda document: read(document if inside is None else document[inside], kind)


@runtime_checkable
class Flat(Protocol):
    """A struct that is shown to scripts in another form than its fields, because Flink nests some of them."""

    def flat(self) -> dict[str, Any]: ...


def plain(value: Any) -> Any:
    """JSON types with the Python names of the fields, for the output of commands and the results of operators.

    msgspec's own encoding would use the names on the wire.
    """
    if isinstance(value, Struct):
        value = value.flat() if isinstance(value, Flat) else structs.asdict(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
