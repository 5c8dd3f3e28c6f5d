"""Frames of the data plane: a fixed header and a body. Pure: bytes in, frames out.

Header, 16 bytes, little endian: channel id (u64), body length (u32), frame kind (u8), three zero bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

_HEADER = struct.Struct("<QIB3x")
HEADER_BYTES = _HEADER.size
MAX_BODY_BYTES = 1 << 30


class FrameKind(IntEnum):
    """Frames from the sender of a channel and, for CREDIT and BUFFER_SIZE, from its receiver.

    OPEN asks the receiver for credit; CREDIT grants it (body: u32 count). BUFFER_SIZE requests the size of further
    buffers of the channel (body: u32 bytes). All other frames carry the channel's elements.
    """

    OPEN = 1
    CREDIT = 2
    SCHEMA = 3
    DATA = 4
    CONTROL = 5
    BUFFER_SIZE = 6


class FramingError(ConnectionError):
    """The peer sent bytes that are not a frame; the connection can no longer be used."""


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """The header before a body of ``length`` bytes."""

    channel: int
    length: int
    kind: FrameKind


def encode_header(channel: int, length: int, kind: FrameKind) -> bytes:
    """The 16 header bytes. Raises FramingError for a body above MAX_BODY_BYTES."""
    if length > MAX_BODY_BYTES:
        raise FramingError(f"frame body of {length} bytes exceeds the limit of {MAX_BODY_BYTES}")
    return _HEADER.pack(channel, length, kind)


def decode_header(content: bytes | bytearray | memoryview) -> FrameHeader:
    """The header. Raises FramingError for an unknown kind or a claimed body above MAX_BODY_BYTES."""
    channel, length, kind = _HEADER.unpack(content)
    if length > MAX_BODY_BYTES:
        raise FramingError(f"peer announced a frame body of {length} bytes, the limit is {MAX_BODY_BYTES}")
    try:
        return FrameHeader(channel, length, FrameKind(kind))
    except ValueError:
        raise FramingError(f"peer sent a frame of unknown kind {kind}") from None


def encode_credit(count: int) -> bytes:
    """The body of a CREDIT frame."""
    return struct.pack("<I", count)


def decode_credit(content: bytes | bytearray | memoryview) -> int:
    """The credit. Raises FramingError unless the body is one u32."""
    if len(content) != 4:
        raise FramingError(f"credit frame of {len(content)} bytes")
    count: int = struct.unpack("<I", content)[0]
    return count


def encode_buffer_size(size: int) -> bytes:
    """The body of a BUFFER_SIZE frame."""
    return struct.pack("<I", size)


def decode_buffer_size(content: bytes | bytearray | memoryview) -> int:
    """The buffer size. Raises FramingError unless the body is one positive u32."""
    if len(content) != 4:
        raise FramingError(f"buffer size frame of {len(content)} bytes")
    size: int = struct.unpack("<I", content)[0]
    if size == 0:
        raise FramingError("buffer size of 0 bytes")
    return size


def channel_id(deployment: int, index: int) -> int:
    """The wire id of a channel: unique over all deployments of a session, so late frames reach no other channel."""
    return deployment << 32 | index


def deployment_of(channel: int) -> int:
    """The deployment that a wire id belongs to."""
    return channel >> 32
