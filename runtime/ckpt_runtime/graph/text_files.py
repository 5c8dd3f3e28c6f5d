"""Encodings and ends of lines in files of records, as Spark's readers of ``csv`` and ``json`` take them."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping
from typing import Any

from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.options import Option

TEXT_OPTIONS = (Option("lineSep"), Option("encoding"), Option("charset"), Option("multiLine", bool, False))

_CODECS = {
    "utf-8": "utf-8",
    "utf8": "utf-8",
    "iso-8859-1": "latin-1",
    "us-ascii": "ascii",
    "utf-16": "utf-16",
    "utf-16be": "utf-16-be",
    "utf-16le": "utf-16-le",
    "utf-32": "utf-32",
}
_NAMES = "UTF-8, ISO-8859-1, US-ASCII, UTF-16, UTF-16BE, UTF-16LE, UTF-32"
_WITH_MARK = {
    "utf-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
    "utf-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
}


def codec_of(options: Mapping[str, Any], *, plain: tuple[str, ...]) -> str:
    """Python's name of the encoding. ``plain`` are those whose lines can be told without ``lineSep``.

    Raises PlanError for an encoding that Spark does not have, or whose lines it cannot tell.
    """
    name = options["encoding"] or options["charset"] or "utf-8"
    codec = _CODECS.get(name.lower())
    if codec is None:
        raise PlanError("option 'encoding'", f"{name!r} is not one of {_NAMES}")
    if options["multiLine"]:
        return codec
    if codec in _WITH_MARK:
        problem = f"the byte order of a line in {name} is unknown; name it, as in {name}LE, or set multiLine"
        raise PlanError("option 'encoding'", problem if codec == "utf-16" else f"{name} needs multiLine, as in Spark")
    if codec not in plain and not options["lineSep"]:
        raise PlanError("option 'encoding'", f"{name} needs option lineSep, or multiLine")
    return codec


def line_end(options: Mapping[str, Any]) -> bytes | None:
    """The bytes of the option ``lineSep``; None if it is not set."""
    given = options["lineSep"]
    if not given:
        return None
    name = options.get("encoding") or options.get("charset") or "utf-8"
    return str(given).encode(_CODECS[name.lower()])


def decoded(data: bytes, codec: str) -> str:
    """The text of bytes. Malformed ones become U+FFFD; without a byte order mark, the greatest byte comes first."""
    if codec in _WITH_MARK and not data.startswith(_WITH_MARK[codec]):
        codec += "-be"
    return data.decode(codec, "replace")


def detected(data: bytes) -> str:
    """Python's name of the encoding of a JSON document, as Jackson finds it by the first bytes."""
    return json.detect_encoding(data)
