"""Well-formed documents that say something else: each field in turn removed, of another type, or out of range.

Each object also gets a field that no schema knows, with a nested value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import msgspec

_MISSING = object()
_UNKNOWN = "unknownField"
EVERY_VALUE: Any = (
    _MISSING,
    None,
    True,
    -1,
    1 << 63,
    1 << 70,
    1.5,
    "",
    "x",
    [],
    ["x"],
    [{"x": [1]}],
    {},
    {"x": {"x": 1}},
)
FEW_VALUES = (_MISSING, None, -1, "x", ["x"], {"x": {"x": 1}})
"""For documents that take long to open."""

_BARE = (
    KeyError, IndexError, TypeError, AttributeError, UnboundLocalError, ValueError, OverflowError, RecursionError,
    AssertionError, StopIteration, msgspec.MsgspecError, msgspec.ValidationError, msgspec.DecodeError,
)  # fmt: skip
"""Errors that say nothing about the document. Named errors are subclasses of these, never one of these."""


def forged(document: Any, values: Sequence[Any] = EVERY_VALUE, depth: int = 99) -> Iterator[tuple[str, Any]]:
    """Each forged document with the change made to it, in at most ``depth`` levels."""
    for path in ((), *_paths(document)):
        for value in values if path and len(path) <= depth else ():
            changed = deepcopy(document)
            holder = _at(changed, path[:-1])
            if value is _MISSING:
                del holder[path[-1]]
            elif type(value) is type(holder[path[-1]]) and value == holder[path[-1]]:
                continue
            else:
                holder[path[-1]] = deepcopy(value)
            shown = "missing" if value is _MISSING else repr(value)
            yield f"{'.'.join(map(str, path))}: {shown}", changed
        if isinstance(_at(document, path), dict) and len(path) < depth:
            changed = deepcopy(document)
            _at(changed, path)[_UNKNOWN] = {"x": [{"x": None}]}
            yield f"{'.'.join(map(str, path))}: with an unknown field", changed


def _at(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


def unnamed_errors(
    document: Any, read: Callable[[Any], object], values: Sequence[Any] = EVERY_VALUE, depth: int = 99
) -> tuple[list[str], int]:
    """The changes after which ``read`` raises an error without a name of its own, and the number of refusals."""
    read(deepcopy(document))
    found, refused = [], 0
    for change, changed in forged(document, values, depth):
        try:
            read(changed)
        except Exception as error:
            refused += 1
            if type(error) in _BARE:
                found.append(f"{change}: {error!r}")
    return found, refused


def _paths(value: Any, path: tuple[Any, ...] = (), shapes: set[object] | None = None) -> Iterator[tuple[Any, ...]]:
    """Each place in the document. Of items with the same kind and fields in the same list only the first counts."""
    shapes = set() if shapes is None else shapes
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    place = tuple("*" if isinstance(key, int) else key for key in path)
    for key, inner in items:
        known = (inner.get("kind"), *inner) if isinstance(inner, dict) else type(inner)
        shape = (*place, "*" if isinstance(key, int) else key, known)
        if shape in shapes:
            continue
        shapes.add(shape)
        yield (*path, key)
        yield from _paths(inner, (*path, key), shapes)
