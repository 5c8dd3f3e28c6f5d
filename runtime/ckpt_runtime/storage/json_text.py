"""JSON text of stored values: exactly what can be read back, or an error. Pure."""

from __future__ import annotations

import json
from typing import Any

import orjson

_STRICT = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME


def to_json_text(value: Any, *, sort_keys: bool = False) -> bytes:
    """The JSON text of a value made of dicts with text keys, lists, tuples, texts, numbers, booleans and None.

    Raises ValueError for anything else: other types, integers beyond 64 bits, NaN and the infinities, and nesting
    beyond 254 levels.
    """
    try:
        text = parsed_to_json_text(value, sort_keys=sort_keys)
    except TypeError as error:
        raise ValueError(f"only JSON values can be stored: {error}") from error
    # The encoder writes NaN and the infinities as null without a word.
    if b"null" in text and _has_non_finite(value):
        raise ValueError("only JSON values can be stored: NaN and the infinities are none")
    return text


def parsed_to_json_text(value: Any, *, sort_keys: bool = False) -> bytes:
    """The same text, sooner, of a value that was parsed from JSON and can therefore hold nothing else."""
    return orjson.dumps(value, option=_STRICT | (orjson.OPT_SORT_KEYS if sort_keys else 0))


def _has_non_finite(value: Any) -> bool:
    """Asked of the standard library's encoder, which says it, and sooner than a walk in Python would."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return True
    return False
