"""The ``_metadata`` codec: what it keeps, and that nothing but what it wrote is ever read."""

from __future__ import annotations

import struct
from typing import Any

import orjson
import pytest
import xxhash
import zstandard

from ckpt_runtime.storage import metadata
from ckpt_runtime.storage.errors import CorruptFileError
from ckpt_runtime.storage.metadata import decode, encode
from ckpt_runtime.storage.publish import checksum_of

DOCUMENT: dict[str, Any] = {
    "id": 7,
    "properties": {"forced": False, "ratio": 0.5, "nothing": None},
    "states": [{"vertex": "a" * 32, "subtask": index, "text": "é\n\u2028"} for index in range(3)],
    "finished": [["b", 1]],
    "empty": [],
}


def container(text: bytes, **changes: Any) -> bytes:
    """Well-formed outside, whatever is inside: what a forger would write."""
    body = changes.pop("body", None) or zstandard.ZstdCompressor().compress(text)
    fields = {
        "format": metadata.FORMAT,
        "version": 1,
        "length": len(body),
        "text_length": len(text),
        "checksum": checksum_of(body),
        **changes,
    }
    header = orjson.dumps({**fields, "header_checksum": checksum_of(orjson.dumps(fields))})
    return struct.pack("<II", 0x184D2A5C, len(header)) + header + body


def lines(*records: Any) -> bytes:
    return b"".join(
        b"%s %s\n" % (xxhash.xxh3_64_hexdigest(orjson.dumps(record)).encode(), orjson.dumps(record))
        for record in records
    )


def ended(*records: Any) -> bytes:
    text = lines(*records)
    return text + lines(["end", len(records), xxhash.xxh3_128_hexdigest(text)])


def test_document_survives_and_is_readable_with_ordinary_tools() -> None:
    assert decode(encode(DOCUMENT), "x") == DOCUMENT
    assert list(decode(encode(DOCUMENT), "x")) == list(DOCUMENT)
    assert decode(encode({}), "x") == {}
    assert encode(DOCUMENT) == encode(DOCUMENT)
    text = zstandard.ZstdDecompressor().stream_reader(encode(DOCUMENT), read_across_frames=True).read()
    assert text.splitlines()[0].endswith(b' ["value","id",7]')


@pytest.mark.row("203.10")
def test_every_truncation_is_refused_by_name() -> None:
    data = encode(DOCUMENT)
    for length in range(len(data)):
        with pytest.raises(CorruptFileError, match="file:///s/_metadata is damaged or foreign"):
            decode(data[:length], "file:///s/_metadata")


@pytest.mark.row("203.10")
def test_every_flipped_bit_is_refused_by_name() -> None:
    data = encode(DOCUMENT)
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(CorruptFileError, match="file:///s/_metadata is damaged or foreign"):
                decode(bytes(damaged), "file:///s/_metadata")


def test_added_bytes_are_refused() -> None:
    data = encode(DOCUMENT)
    for foreign in (data + b"\0", data + data, b"\0" + data):
        with pytest.raises(CorruptFileError):
            decode(foreign, "x")


@pytest.mark.parametrize("data", [b"", b"{}", b"PK\x03\x04" * 10, b"\x80\x04K\x01." * 5, b"\0" * 100])
def test_foreign_files_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptFileError):
        decode(data, "x")


def test_the_containers_of_these_tests_are_right() -> None:
    assert decode(container(ended(["value", "a", 1], ["list", "b", 1], ["item", 2])), "x") == {"a": 1, "b": [2]}


@pytest.mark.parametrize(
    "text",
    [
        lines(["value", "a", 1]),
        ended(["value", "a", 1], ["value", "a", 2]),
        ended(["list", "a", 2], ["item", 1]),
        ended(["list", "a", 10_000_000]),
        ended(["list", "a", -1]),
        ended(["list", "a", 1 << 60]),
        ended(["item", 1]),
        ended(["value", 1, 1]),
        ended("text"),
        ended({"a": 1}),
        ended(["value", "a"]),
        lines(["end", 1, "0" * 32]),
        ended(["value", "a", 1]) + b"\n",
        ended(["value", "a", 1])[:-1],
        ended(["value", "a", 1]) + ended(),
        b"0" * 17 + b"[]\n",
        lines(["value", "a", 1]) + lines(["end", 1]),
        b"",
    ],
)
def test_forged_lines_are_refused(text: bytes) -> None:
    with pytest.raises(CorruptFileError):
        decode(container(text), "x")


def test_nesting_beyond_the_parsers_limit_is_refused() -> None:
    payload = b'["value","a",' + b"[" * 5_000 + b"]" * 5_000 + b"]"
    line = b"%s %s\n" % (xxhash.xxh3_64_hexdigest(payload).encode(), payload)
    with pytest.raises(CorruptFileError, match="nested too deep"):
        decode(container(line + lines(["end", 1, xxhash.xxh3_128_hexdigest(line)])), "x")
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    with pytest.raises(ValueError, match="JSON"):
        encode({"a": deep})


def test_claimed_sizes_are_checked_before_memory_is_taken() -> None:
    bomb = zstandard.ZstdCompressor().compress(b"\0" * (64 << 20))
    with pytest.raises(CorruptFileError, match="its length is not what its header says"):
        decode(container(b"abc", body=bomb), "x")
    for claim in (1 << 40, -1, "1", True, None, 1.0):
        with pytest.raises(CorruptFileError):
            decode(container(b"", text_length=claim), "x")
    unknown_size = zstandard.ZstdCompressor(write_content_size=False).compress(ended())
    with pytest.raises(CorruptFileError):
        decode(container(ended(), body=unknown_size), "x")


def test_a_later_version_is_refused_by_number() -> None:
    with pytest.raises(CorruptFileError, match="format version 2; this release reads 1"):
        decode(container(ended(), version=2), "x")


@pytest.mark.parametrize(
    "document",
    [
        {1: 2},
        {"a": object()},
        {"a": [b"x"]},
        {"a": {1: 2}},
        {"a": [None, float("nan")]},
        {"a": {"b": -float("inf")}},
        {"a": 1 << 64},
    ],
)
def test_value_that_is_not_json_is_not_written(document: dict[Any, Any]) -> None:
    with pytest.raises(ValueError, match=r"JSON|text key"):
        encode(document)
