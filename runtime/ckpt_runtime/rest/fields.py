"""Typed reading of a request body's fields, under any of their accepted spellings.

A field that is absent or null gives its default; one of the wrong type, or given under two spellings with two values,
is a 400 which names the field, the value and what is allowed. Unknown fields are ignored here, as Flink does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

from ckpt_runtime.rest.errors import BadRequest, echo

HEX_ID = re.compile(r"[0-9a-fA-F]{32}")
MAX_PATH_CHARS = 4096
MAX_TEXT_CHARS = 64 * 1024
MAX_OPTIONS = 500
MAX_KEY_CHARS = 1024
MAX_ITEMS = 10_000
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ABSOLUTE = re.compile(r"/|[A-Za-z][A-Za-z0-9+.-]*:/")
_ENTRY_POINT = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")

E = TypeVar("E", bound=StrEnum)


def refuse(name: str, value: object, allowed: str) -> BadRequest:
    """The 400 for one field, to raise."""
    return BadRequest(f"{name}: {echo(value)} is not acceptable, {allowed}")


class BodyFields:
    """Reads fields out of one parsed JSON object."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document

    def present(self, *names: str) -> tuple[str, Any] | None:
        """Name and value of the field, or None. Two spellings must agree."""
        given = [(name, self._document[name]) for name in names if self._document.get(name) is not None]
        if len(given) > 1 and any(value != given[0][1] for _, value in given):
            raise BadRequest(f"{' and '.join(name for name, _ in given)} are one field, but have different values")
        return given[0] if given else None

    def text(self, *names: str) -> str | None:
        found = self.present(*names)
        if found is None:
            return None
        name, value = found
        if not isinstance(value, str):
            raise refuse(name, value, "it must be a string")
        if len(value) > MAX_TEXT_CHARS:
            raise refuse(name, value, f"it must have at most {MAX_TEXT_CHARS} characters")
        return value

    def path(self, *names: str) -> str | None:
        """An absolute path or a URL: no control characters, no ``..`` segment."""
        value = self.text(*names)
        if value is None:
            return None
        if not value.strip() or _CONTROL.search(value) or len(value) > MAX_PATH_CHARS:
            raise refuse(
                names[0], value, f"it must be a path of 1 to {MAX_PATH_CHARS} characters without control characters"
            )
        if ".." in re.split(r"[/\\]", value):
            raise refuse(names[0], value, "it must not contain '..'")
        if not _ABSOLUTE.match(value):
            raise refuse(names[0], value, "it must be an absolute path or a URL with a scheme")
        return value

    def entry_point(self, *names: str) -> str | None:
        """``module:function``, both dotted Python names."""
        value = self.text(*names)
        if value is not None and (len(value) > MAX_PATH_CHARS or not _ENTRY_POINT.fullmatch(value)):
            raise refuse(names[0], value, "it must be module:function")
        return value

    def boolean(self, *names: str, default: bool) -> bool:
        found = self.present(*names)
        if found is None:
            return default
        name, value = found
        if not isinstance(value, bool):
            raise refuse(name, value, "it must be true or false")
        return value

    def integer(self, *names: str, minimum: int, maximum: int) -> int | None:
        found = self.present(*names)
        if found is None:
            return None
        return checked_integer(*found, minimum, maximum)

    def choice(self, kind: type[E], *names: str) -> E | None:
        """A member of ``kind`` in any case; several spellings of the field must mean the same member."""
        found = {name: self._member(kind, name) for name in names if self.present(name) is not None}
        if len(set(found.values())) > 1:
            raise BadRequest(f"{' and '.join(found)} are one field, but have different values")
        return next(iter(found.values()), None)

    def _member(self, kind: type[E], name: str) -> E:
        value = self.text(name) or ""
        try:
            return kind(value.upper() if value.isascii() else value)
        except ValueError:
            allowed = ", ".join(member.value for member in kind)
            raise refuse(name, value, f"it must be one of {allowed}") from None

    def hex_id(self, *names: str) -> str | None:
        """32 hex digits, given back in lower case."""
        value = self.text(*names)
        if value is None:
            return None
        if not HEX_ID.fullmatch(value):
            raise refuse(names[0], value, "it must be 32 hexadecimal digits")
        return value.lower()

    def texts(self, *names: str) -> tuple[str, ...]:
        found = self.present(*names)
        if found is None:
            return ()
        name, value = found
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise refuse(name, value, "it must be a list of strings")
        if len(value) > MAX_ITEMS:
            raise refuse(name, f"{len(value)} strings", f"it must have at most {MAX_ITEMS}")
        return tuple(value)

    def options(self, *names: str) -> dict[str, str]:
        """Configuration options; numbers and booleans become their text, as Flink does."""
        found = self.present(*names)
        if found is None:
            return {}
        name, value = found
        if not isinstance(value, dict):
            raise refuse(name, value, "it must be an object of option keys and values")
        if len(value) > MAX_OPTIONS:
            raise refuse(name, f"{len(value)} options", f"it must have at most {MAX_OPTIONS}")
        for key in value:
            if len(key) > MAX_KEY_CHARS:
                raise refuse(name, key, f"a key must have at most {MAX_KEY_CHARS} characters")
        return {key: _option_text(f"{name}.{key}", item) for key, item in value.items()}


def checked_integer(name: str, value: object, minimum: int, maximum: int) -> int:
    """``value`` when it is an integer (never a boolean, never 1.0) in range; 400 otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise refuse(name, value, f"it must be an integer from {minimum} to {maximum}")
    return value


def _option_text(name: str, value: object) -> str:
    if isinstance(value, str):
        if len(value) > MAX_TEXT_CHARS:
            raise refuse(name, value, f"it must have at most {MAX_TEXT_CHARS} characters")
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(value)
    raise refuse(name, value, "it must be a string")
