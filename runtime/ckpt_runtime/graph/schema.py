"""Validates documents: everything stored or sent is checked against its schema before it is used.

A schema is a ``msgspec.Struct`` or a dataclass. Unknown fields are ignored, so that a later release may add
some. Every fault of a document raises one named error with the position of the fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import msgspec

from ckpt_runtime.graph.key_groups import UPPER_BOUND_MAX_PARALLELISM
from ckpt_runtime.readable_types import ready

T = TypeVar("T")

_SCALARS = (str, bool, int, float)

MAX_LEVELS = 64
"""Nesting limit for values without a schema, because copying, comparing and sending them has limits too."""

NonNegative = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Parallelism = Annotated[int, msgspec.Meta(ge=1, le=UPPER_BOUND_MAX_PARALLELISM)]


class DocumentError(ValueError):
    """A document does not match its schema."""


def checked(document: object, schema: type[T]) -> T:
    """Converts the document to ``schema``. Raises :class:`DocumentError`, which names the place that does not match."""
    with malformed():
        return msgspec.convert(document, ready(schema))


def decoded(text: bytes, schema: type[T]) -> T:
    """As :func:`checked`, for JSON text."""
    with malformed():
        return msgspec.json.decode(text, type=ready(schema))


_FAULTS = (
    msgspec.MsgspecError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError
)  # fmt: skip
"""Errors that an invalid document can cause. A mistake in the schema raises other errors."""


@contextmanager
def malformed() -> Iterator[None]:
    """Turns errors from reading a document into :class:`DocumentError`."""
    try:
        yield
    except DocumentError:
        raise
    except _FAULTS as error:
        raise DocumentError(str(error) or type(error).__name__) from error


def check_values(value: Any, where: str) -> None:
    """Raises :class:`DocumentError` for values that JSON lacks, and more than :data:`MAX_LEVELS` levels of nesting."""
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
        raise DocumentError(f"{where} has an object with a key that is not a text")
    if value is None or isinstance(value, _SCALARS):
        return ()
    raise DocumentError(f"{where} has a {type(value).__name__}, which is not a JSON value")
