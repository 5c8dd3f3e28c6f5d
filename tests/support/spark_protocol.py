"""Spark's transport protocol as far as a client without a secret needs it: frames over TCP, in plain Python."""

from __future__ import annotations

import socket
import struct

CHUNK_FETCH_REQUEST, CHUNK_FETCH_SUCCESS = 0, 1
RPC_REQUEST, RPC_RESPONSE = 3, 4
ONE_WAY = 9
SILENT_S = 5
"""A port that has said nothing for so long says nothing: most ports of a session are waited for, and never answer."""


_REQUEST_ID = struct.pack(">q", 7)


class Refused(Exception):
    """The other side has closed the connection, or says nothing."""


class SparkConnection:
    """An unauthenticated connection to a port that may be Spark's. Every method may raise :class:`Refused`."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), SILENT_S)
        self._received = self._socket.makefile("rb")

    def close(self) -> None:
        self._received.close()
        self._socket.close()

    def __enter__(self) -> SparkConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, body: bytes) -> bytes | None:
        """The body of the answer to an RPC; None for a failure."""
        self._send(RPC_REQUEST, _REQUEST_ID + struct.pack(">I", len(body)) + body)
        kind, answer = self._receive()
        # Other ports begin with random bytes, of which some look like the header of an answer.
        return answer[12:] if kind == RPC_RESPONSE and answer.startswith(_REQUEST_ID) else None

    def tell(self, body: bytes) -> None:
        """A message that is not answered."""
        self._send(ONE_WAY, struct.pack(">I", len(body)) + body)

    def block(self, name: str) -> bytes | None:
        """A block of a block manager; None when it has none of that name."""
        opened = self.ask(b"\0" + _text("app") + _text("driver") + struct.pack(">I", 1) + _text(name))
        if opened is None:
            return None
        self._send(CHUNK_FETCH_REQUEST, opened[1:9] + struct.pack(">I", 0))
        kind, answer = self._receive()
        return answer[12:] if kind == CHUNK_FETCH_SUCCESS else None

    def _send(self, kind: int, content: bytes) -> None:
        try:
            self._socket.sendall(struct.pack(">qb", 9 + len(content), kind) + content)
        except OSError as error:
            raise Refused from error

    def _receive(self) -> tuple[int, bytes]:
        try:
            header = self._received.read(9)
            if len(header) < 9:
                raise Refused
            length, kind = struct.unpack(">qb", header)
            return kind, self._received.read(min(max(length - 9, 0), 1 << 24))
        except OSError as error:
            raise Refused from error


def to_endpoint(port: int, name: str, message: bytes) -> bytes:
    """A message for an endpoint of the RPC at ``port``; ``message`` is what Java's serialization makes of it."""
    receiver = b"\1" + _utf("localhost") + struct.pack(">i", port) + _utf(name)
    return b"\0" + receiver + message


def _text(text: str) -> bytes:
    return struct.pack(">I", len(text)) + text.encode()


def _utf(text: str) -> bytes:
    return struct.pack(">H", len(text)) + text.encode()
