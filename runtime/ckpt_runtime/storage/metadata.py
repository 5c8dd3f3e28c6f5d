"""The ``_metadata`` file, whose existence makes a snapshot complete: a JSON document, which builds no objects.

Format 1 is two zstd frames, so that ``zstd -dc _metadata`` shows the text:

1. a *skippable* frame with one JSON object: format name, version, lengths of both parts, checksum of the second frame,
   and a checksum of the header itself;
2. a compressed frame of lines, each ``<16 hex digits of XXH3-64> <json>``. A top-level value of the document is one
   line ``["value", key, value]``; a top-level list is ``["list", key, n]`` followed by n lines ``["item", value]``.
   The last line is ``["end", number of lines before it, checksum of all text before it]``.

Every length is checked against a limit before memory is allocated for it, and the number of values before any of them
is created; nesting is bounded by the JSON parser (254 levels when writing, 1,024 when reading). The limits hold for
writing, too: a snapshot that could not be read back fails.
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
import xxhash
import zstandard
from msgspec import Meta, Struct

from ckpt_runtime.graph.schema import DocumentError, checked
from ckpt_runtime.storage.errors import CorruptFileError, InvalidLocationError, NotFoundError
from ckpt_runtime.storage.filesystem import Location, exists, is_directory, read_shown, resolve
from ckpt_runtime.storage.publish import checksum_of, publish, to_json_text

FORMAT = "ckpt-metadata"
VERSION = 1
MAX_COMPRESSED_BYTES = 64 << 20
MAX_TEXT_BYTES = 64 << 20
MAX_LINES = 500_000
MAX_LINE_BYTES = 8 << 20
MAX_VALUES = 2_000_000
"""Commas and opening brackets, which bound the number of values. Objects take twenty times their text."""

_SKIPPABLE = struct.Struct("<II")
_SKIPPABLE_MAGIC = 0x184D2A5C
_MAX_HEADER_BYTES = 1_024
_DIGEST = 16
_LEVEL = 3


def encode(document: Mapping[str, Any]) -> bytes:
    """The bytes of a document of JSON values with text keys.

    Raises ValueError when it is not such a document, too deep or too large: it could not be read back either.
    """
    text = b"".join(_text_lines(document))
    if len(text) > MAX_TEXT_BYTES:
        raise ValueError(f"metadata of {len(text)} bytes is larger than the {MAX_TEXT_BYTES} allowed")
    if (values := _values(text)) > MAX_VALUES:
        raise ValueError(f"metadata of {values} values is larger than the {MAX_VALUES} allowed")
    body = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True).compress(text)
    if len(body) > MAX_COMPRESSED_BYTES:
        raise ValueError(f"metadata of {len(body)} compressed bytes is larger than the {MAX_COMPRESSED_BYTES} allowed")
    fields = {
        "format": FORMAT,
        "version": VERSION,
        "length": len(body),
        "text_length": len(text),
        "checksum": checksum_of(body),
    }
    header = orjson.dumps({**fields, "header_checksum": checksum_of(orjson.dumps(fields))})
    return _SKIPPABLE.pack(_SKIPPABLE_MAGIC, len(header)) + header + body


def decode(data: bytes, name: str) -> dict[str, Any]:
    """The document in ``data``; errors refer to it as ``name``.

    Raises :class:`CorruptFileError` for anything that :func:`encode` did not write in full.
    """
    fields, body = _split(data, name)
    if checksum_of(body) != fields.checksum:
        raise _corrupt(name, "the checksum of its content is wrong")
    try:
        # Checked before memory is allocated for it: a small frame may claim to hold gigabytes.
        if zstandard.frame_content_size(body) != fields.text_length:
            raise _corrupt(name, "its length is not what its header says")
        text = zstandard.ZstdDecompressor().decompress(body, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _corrupt(name, f"it cannot be decompressed: {error}") from error
    if (values := _values(text)) > MAX_VALUES:
        raise _corrupt(name, f"it has {values} values; at most {MAX_VALUES} are allowed")
    with _collector_paused():
        records = _verified_records(text, name)
        document: dict[str, Any] = {}
        for record in records:
            match record:
                case ["value", str(key), value] if key not in document:
                    document[key] = value
                case ["list", str(key), int(count)] if key not in document and 0 <= count <= MAX_LINES:
                    document[key] = [_item(next(records, None), name) for _ in range(count)]
                case _:
                    raise _corrupt(name, "its lines are not in order")
        return document


def text_length(data: bytes, name: str) -> int:
    """The length of the text in ``data`` by its header, which the limit bounds. Raises :class:`CorruptFileError`."""
    return _split(data, name)[0].text_length


def _values(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


@contextmanager
def _collector_paused() -> Iterator[None]:
    """A large document is a million new containers, none of them garbage: collecting would take most of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _text_lines(document: Mapping[str, Any]) -> Iterator[bytes]:
    checksum = xxhash.xxh3_128()
    number = 0
    for record in _records(document):
        line = _line(record)
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"a line of {len(line)} bytes is longer than the {MAX_LINE_BYTES} allowed")
        checksum.update(line)
        number += 1
        yield line
    if number > MAX_LINES:
        raise ValueError(f"metadata of {number} lines is longer than the {MAX_LINES} allowed")
    yield _line(["end", number, checksum.hexdigest()])


def _records(document: Mapping[str, Any]) -> Iterator[list[Any]]:
    for key, value in document.items():
        if not isinstance(key, str):
            raise ValueError(f"{key!r} is no text key")
        if isinstance(value, list | tuple):
            yield ["list", key, len(value)]
            for item in value:
                yield ["item", item]
        else:
            yield ["value", key, value]


def _line(record: list[Any]) -> bytes:
    payload = to_json_text(record)
    return b"%s %s\n" % (xxhash.xxh3_64_hexdigest(payload).encode(), payload)


class _Header(Struct, frozen=True):
    """The header, whose lengths bound what is decompressed."""

    length: Annotated[int, Meta(ge=0, le=MAX_COMPRESSED_BYTES)]
    text_length: Annotated[int, Meta(ge=0, le=MAX_TEXT_BYTES)]
    checksum: str


def _split(data: bytes, name: str) -> tuple[_Header, memoryview]:
    """The checked header, and the body, whose length is checked as well."""
    if len(data) < _SKIPPABLE.size:
        raise _corrupt(name, "it is too short")
    magic, header_length = _SKIPPABLE.unpack_from(data)
    if magic != _SKIPPABLE_MAGIC:
        raise _corrupt(name, "it is not metadata of a checkpoint or savepoint")
    if header_length > _MAX_HEADER_BYTES or len(data) < _SKIPPABLE.size + header_length:
        raise _corrupt(name, "its header is damaged")
    fields = _header(data[_SKIPPABLE.size : _SKIPPABLE.size + header_length], name)
    body = memoryview(data)[_SKIPPABLE.size + header_length :]
    if len(body) != fields.length:
        raise _corrupt(name, f"it has {len(body)} bytes of content and not {fields.length}")
    return fields, body


def _header(payload: bytes, name: str) -> _Header:
    try:
        header = orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        raise _corrupt(name, "its header is damaged") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise _corrupt(name, "it is not metadata of a checkpoint or savepoint")
    given = header.pop("header_checksum", None)
    # The bytes are compared too, so that a change that leaves the JSON value the same is noticed as well.
    if given != checksum_of(orjson.dumps(header)) or orjson.dumps({**header, "header_checksum": given}) != payload:
        raise _corrupt(name, "its header is damaged")
    if header.get("version") != VERSION:
        raise _corrupt(name, f"it has format version {header.get('version')!r}; this release reads {VERSION}")
    try:
        return checked(header, _Header)
    except DocumentError as error:
        raise _corrupt(name, f"its header is not usable: {error}") from error


def _item(record: Any, name: str) -> Any:
    if not isinstance(record, list) or len(record) != 2 or record[0] != "item":
        raise _corrupt(name, "its lines are not in order")
    return record[1]


def _verified_records(text: bytes, name: str) -> Iterator[Any]:
    """All records but the last, which is checked after the others have been consumed."""
    checksum = xxhash.xxh3_128()
    view = memoryview(text)
    start = number = 0
    while True:
        end = text.find(b"\n", start)
        if end < 0:
            raise _corrupt(name, "its last line is missing")
        if end - start > MAX_LINE_BYTES:
            raise _corrupt(name, f"line {number + 1} has {end - start} bytes; at most {MAX_LINE_BYTES} are allowed")
        record = _record(text[start:end], number + 1, name)
        if isinstance(record, list) and record[:1] == ["end"]:
            break
        checksum.update(view[start : end + 1])
        start = end + 1
        number += 1
        if number > MAX_LINES:
            raise _corrupt(name, f"it has more than the {MAX_LINES} lines allowed")
        yield record
    if record != ["end", number, checksum.hexdigest()] or end + 1 != len(text):
        raise _corrupt(name, "the checksum of its lines is wrong")


def _record(line: bytes, number: int, name: str) -> Any:
    payload = line[_DIGEST + 1 :]
    if line[: _DIGEST + 1] != xxhash.xxh3_64_hexdigest(payload).encode() + b" ":
        raise _corrupt(name, f"the checksum of line {number} is wrong")
    try:
        return orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        raise _corrupt(name, f"line {number} is not JSON, or nested too deep") from error


def _corrupt(name: str, reason: str) -> CorruptFileError:
    return CorruptFileError(f"{name} is damaged or foreign: {reason}", name)


METADATA_NAME = "_metadata"
_MAX_FILE_BYTES = MAX_COMPRESSED_BYTES + 4_096


@dataclass(frozen=True, slots=True)
class SnapshotMetadata:
    """The metadata found. ``directory`` is the directory of the snapshot, even if the document names another one."""

    directory: Location
    document: dict[str, Any]
    size: int


def write_metadata(directory: Location, document: Mapping[str, Any]) -> str:
    """Publishes the metadata atomically and returns the snapshot directory's URL; the snapshot is then complete.

    Raises :class:`AlreadyExistsError` when another writer won, :class:`AmbiguousWriteError` when the outcome is
    unknown, :class:`StorageError` when nothing was written, ValueError for a document that is not JSON.
    """
    publish(directory.child(METADATA_NAME), encode(document))
    return directory.url


def read_metadata(url: str | Location) -> SnapshotMetadata:
    """The document of a snapshot, given as its directory or as the ``_metadata`` file in it.

    For callers that need the document itself; the engine reads snapshots with ``snapshots.snapshot.open_snapshot``.

    Raises :class:`InvalidLocationError`, :class:`NotFoundError`, :class:`CorruptFileError`, each naming the file.
    """
    file, data = read_metadata_bytes(url)
    return SnapshotMetadata(file.parent, decode(data, file.url), len(data))


def read_metadata_bytes(url: str | Location) -> tuple[Location, bytes]:
    """The ``_metadata`` file of a snapshot and its bytes, unchecked. Raises as :func:`read_metadata`."""
    given = url if isinstance(url, Location) else resolve(url)
    directory = snapshot_directory(given)
    if directory is given:
        _check_directory(given)
    file = directory.child(METADATA_NAME)
    return file, read_shown(file, _MAX_FILE_BYTES)


def snapshot_directory(given: Location) -> Location:
    """The directory of a snapshot, given as the directory or as the ``_metadata`` file in it."""
    return given.parent if given.name == METADATA_NAME and not is_directory(given) else given


def has_metadata(directory: Location) -> bool:
    """Whether the snapshot in a directory is complete."""
    return exists(directory.child(METADATA_NAME))


def _check_directory(directory: Location) -> None:
    if is_directory(directory):
        if not has_metadata(directory):
            message = f"cannot find checkpoint or savepoint: {directory.url} has no {METADATA_NAME} file"
            raise NotFoundError(message, directory.url)
        return
    if exists(directory):
        raise InvalidLocationError(f"{directory.url} is neither a directory nor a {METADATA_NAME} file", directory.url)
    message = f"cannot find checkpoint or savepoint: there is no file or directory {directory.url}"
    raise NotFoundError(message, directory.url)
