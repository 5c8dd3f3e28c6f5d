"""Small JSON documents in files: a checksum and a format version around them. Pure: bytes in, bytes out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from ckpt_runtime.storage.checksums import checksum_of
from ckpt_runtime.storage.errors import CorruptFileError
from ckpt_runtime.storage.json_text import parsed_to_json_text, to_json_text

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
    """The document in ``data``; ``name`` is what errors call it. Raises :class:`CorruptFileError`."""
    try:
        envelope = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise CorruptFileError(f"{name} is damaged: it is no JSON", name) from error
    if not isinstance(envelope, dict) or not isinstance(envelope.get("document"), dict):
        raise CorruptFileError(f"{name} is damaged or foreign", name)
    if envelope.get("version") != VERSION:
        raise CorruptFileError(f"{name} has format version {envelope.get('version')!r}; this release reads 1", name)
    document: dict[str, Any] = envelope["document"]
    try:
        intact = _enclosed(parsed_to_json_text(document, sort_keys=True)) == data
    except TypeError:  # nested deeper than anything that was written
        intact = False
    if not intact:
        raise CorruptFileError(f"{name} is damaged: its checksum is wrong", name)
    return document
