"""The one door of documents: whatever is stored or sent is compared with its schema before anything is made of it.

A schema is a ``msgspec.Struct`` or a dataclass. Fields that it does not know are left out, so that a later release may
add some. Whatever is wrong with a document comes out as one named error, which says where.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import msgspec

from ckpt_runtime.graph.key_groups import UPPER_BOUND_MAX_PARALLELISM

T = TypeVar("T")

_SCALARS = (str, bool, int, float)

MAX_LEVELS = 64
"""Of values that no schema describes: the ways to copy, compare and send them have limits of their own."""

NonNegative = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Parallelism = Annotated[int, msgspec.Meta(ge=1, le=UPPER_BOUND_MAX_PARALLELISM)]


class DocumentError(ValueError):
    """A document has another shape than its schema."""


def checked(document: object, schema: type[T]) -> T:
    """The document as ``schema`` describes it. Raises :class:`DocumentError` saying where it does not fit."""
    with malformed():
        return msgspec.convert(document, schema)


def decoded(text: bytes, schema: type[T]) -> T:
    """As :func:`checked`, of JSON text."""
    with malformed():
        return msgspec.json.decode(text, type=schema)


_FAULTS = (
    msgspec.MsgspecError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError
)  # fmt: skip
"""What a document can cause. A mistake in a schema stays one."""


@contextmanager
def malformed() -> Iterator[None]:
    """Turns whatever reading a document raises into :class:`DocumentError`."""
    try:
        yield
    except DocumentError:
        raise
    except _FAULTS as error:
        raise DocumentError(str(error) or type(error).__name__) from error


def check_values(value: Any, where: str) -> None:
    """Raises :class:`DocumentError` for what JSON has not, and for more than :data:`MAX_LEVELS` levels of nesting."""
    level = [value]
    for _ in range(MAX_LEVELS + 1):
        level = [inner for outer in level for inner in _inside(outer, where)]
        if not level:
            return
    raise DocumentError(f"{where} is nested deeper than {MAX_LEVELS} levels")


def _inside(value: Any, where: str) -> Iterable[Any]:
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return value.values()
        raise DocumentError(f"{where} has an object with another key than text")
    if value is None or isinstance(value, _SCALARS):
        return ()
    raise DocumentError(f"{where} has a {type(value).__name__}, which is no JSON value")
