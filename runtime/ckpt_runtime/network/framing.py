"""Frames of the data plane, and the authentication of connections. Pure: the callers send and receive.

A frame is a header and a body. Header, 16 bytes, little endian: channel id (u64), body length (u32), frame kind (u8),
three zero bytes.

A new connection is authenticated by a shared secret. Both sides send 32 random bytes; each proves knowledge of the
secret by an HMAC-SHA256 over its role and both nonces. A replayed or reflected proof fails, since it depends on role
and nonces. The secret itself is never sent.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass
from enum import IntEnum

_HEADER = struct.Struct("<QIB3x")
HEADER_BYTES = _HEADER.size
MAX_BODY_BYTES = 1 << 30


class FrameKind(IntEnum):
    """Frames from the sender of a channel and, for CREDIT and BUFFER_SIZE, from its receiver.

    OPEN requests credit from the receiver; CREDIT grants it (body: u32 count). BUFFER_SIZE requests the size of further
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


NONCE_BYTES = 32
PROOF_BYTES = 32
_PREFACE = b"CKPT1"
PREFACE_BYTES = len(_PREFACE) + NONCE_BYTES


class AuthenticationError(ConnectionError):
    """The peer does not know the secret, or does not speak this protocol."""


def new_secret() -> str:
    """A new application secret: 256 random bits as hex."""
    return secrets.token_hex(32)


class Handshake:
    """One side of a handshake. ``role`` is ``"client"`` (connects) or ``"server"``; ``purpose`` names the protocol."""

    def __init__(self, secret: str, role: str, purpose: str) -> None:
        self._secret = secret.encode()
        self._role = role
        self._purpose = purpose
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    def preface(self) -> bytes:
        """The PREFACE_BYTES bytes that this side sends first."""
        return _PREFACE + self._nonce

    def proof(self, peer_preface: bytes) -> bytes:
        """The PROOF_BYTES bytes that this side sends second. Raises AuthenticationError for a foreign preface."""
        return self._mac(self._role, self._peer_nonce(peer_preface))

    def verify(self, peer_preface: bytes, peer_proof: bytes) -> None:
        """Raises AuthenticationError unless the peer knows the secret and has the other role."""
        other = "server" if self._role == "client" else "client"
        if not hmac.compare_digest(self._mac(other, self._peer_nonce(peer_preface)), peer_proof):
            raise AuthenticationError("the peer does not know this application's secret")

    def _mac(self, role: str, peer_nonce: bytes) -> bytes:
        mine_is_client = self._role == "client"
        client, server = (self._nonce, peer_nonce) if mine_is_client else (peer_nonce, self._nonce)
        message = b"|".join([self._purpose.encode(), role.encode(), client, server])
        return hmac.new(self._secret, message, hashlib.sha256).digest()

    @staticmethod
    def _peer_nonce(peer_preface: bytes) -> bytes:
        if len(peer_preface) != PREFACE_BYTES or not peer_preface.startswith(_PREFACE):
            raise AuthenticationError("the peer does not speak this protocol")
        return peer_preface[len(_PREFACE) :]
