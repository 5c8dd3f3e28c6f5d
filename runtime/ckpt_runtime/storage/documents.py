"""JSON text of stored values, and small documents with a checksum and a format version. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orjson

from ckpt_runtime.storage.checksums import checksum_of
from ckpt_runtime.storage.errors import CorruptFileError

_STRICT = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME

VERSION = 1
MAX_DOCUMENT_BYTES = 16 << 20


def encode_document(document: Mapping[str, Any]) -> bytes:
    """The bytes of a document. Raises ValueError for what is not JSON, and when it is too large."""
    payload = to_json_text(document, sort_keys=True)
    if len(payload) > MAX_DOCUMENT_BYTES:
        raise ValueError(f"a document of {len(payload)} bytes is larger than the {MAX_DOCUMENT_BYTES} allowed")
    return _enclosed(payload)


def _enclosed(payload: bytes) -> bytes:
    return b'{"version":%d,"checksum":"%s","document":%s}\n' % (VERSION, checksum_of(payload).encode(), payload)


def decode_document(data: bytes, name: str) -> dict[str, Any]:
    """The document in ``data``; errors refer to it as ``name``. Raises :class:`CorruptFileError`."""
    try:
        envelope = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise CorruptFileError(f"{name} is damaged: it is not JSON", name) from error
    if not isinstance(envelope, dict) or not isinstance(envelope.get("document"), dict):
        raise CorruptFileError(f"{name} is damaged or foreign", name)
    if envelope.get("version") != VERSION:
        raise CorruptFileError(f"{name} has format version {envelope.get('version')!r}; this release reads 1", name)
    document: dict[str, Any] = envelope["document"]
    try:
        intact = _enclosed(parsed_to_json_text(document, sort_keys=True)) == data
    except TypeError:  # nested deeper than any document that this module writes
        intact = False
    if not intact:
        raise CorruptFileError(f"{name} is damaged: its checksum is wrong", name)
    return document


def to_json_text(value: Any, *, sort_keys: bool = False) -> bytes:
    """The JSON text of a value made of dicts with text keys, lists, tuples, texts, numbers, booleans and None.

    Raises ValueError for anything else: other types, integers beyond 64 bits, NaN and the infinities, and nesting
    beyond 254 levels.
    """
    try:
        text = parsed_to_json_text(value, sort_keys=sort_keys)
    except TypeError as error:
        raise ValueError(f"only JSON values can be stored: {error}") from error
    # The encoder silently writes NaN and the infinities as null.
    if b"null" in text and _has_non_finite(value):
        raise ValueError("only JSON values can be stored: NaN and the infinities are none")
    return text


def parsed_to_json_text(value: Any, *, sort_keys: bool = False) -> bytes:
    """Like :func:`to_json_text`, but faster and without checks, for a value that was parsed from JSON."""
    return orjson.dumps(value, option=_STRICT | (orjson.OPT_SORT_KEYS if sort_keys else 0))


def _has_non_finite(value: Any) -> bool:
    """Uses the standard library's encoder, which reports them and is faster than a traversal in Python."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return True
    return False
