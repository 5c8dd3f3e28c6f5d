"""Sends the transaction requests that librdkafka cannot send: they end a transaction that another process began.

A small client of Kafka's protocol, over TCP or TLS, with SASL's mechanisms PLAIN and SCRAM. A broker says first which
versions of requests it knows. Blocking; one object belongs to one thread.

The version of ``EndTxn`` decides by which rules a broker ends a transaction, whatever ``transaction.version`` the
cluster has: up to version 4 the producer keeps its epoch, and a repeated request is answered with success only for
the same epoch. From version 5 on (KIP-890) each end raises the epoch, and a request is taken for a repeated one if the
epoch is one higher by now. An ``InitProducerId`` raises it as well, so this answer could call a transaction committed
that was aborted. Therefore this client never uses version 5. If the producer itself has ended its transaction by
version 5, brokers answer the repeated commit with PRODUCER_FENCED, and the log shows what has happened.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
import socket
import ssl
import struct
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

_FIND_COORDINATOR, _SASL_HANDSHAKE, _INIT_PRODUCER_ID, _END_TXN, _SASL_AUTHENTICATE = 10, 17, 22, 26, 36
_API_VERSIONS = 18
_KNOWN = {
    _FIND_COORDINATOR: (2, 2),
    _SASL_HANDSHAKE: (1, 1),
    _INIT_PRODUCER_ID: (4, 5),
    _END_TXN: (2, 4),
    _SASL_AUTHENTICATE: (0, 0),
}
"""The least and the greatest version of each request that this client can send."""
_NAMES = {
    _FIND_COORDINATOR: "FindCoordinator",
    _SASL_HANDSHAKE: "SaslHandshake",
    _INIT_PRODUCER_ID: "InitProducerId",
    _END_TXN: "EndTxn",
    _SASL_AUTHENTICATE: "SaslAuthenticate",
}
_FLEXIBLE_FROM = {_INIT_PRODUCER_ID: 2, _END_TXN: 3}
_TRANSACTION = 1
_LARGEST_ANSWER = 1 << 20

COORDINATOR_MOVES = frozenset({14, 15, 16})
"""COORDINATOR_LOAD_IN_PROGRESS, COORDINATOR_NOT_AVAILABLE, NOT_COORDINATOR."""
CONCURRENT_TRANSACTIONS = 51
"""The brokers are still writing the end of this transaction, or of the previous one."""
_UNSUPPORTED_VERSION = 35
NOT_THE_PRODUCER = {
    47: "INVALID_PRODUCER_EPOCH",
    48: "INVALID_TXN_STATE",
    49: "INVALID_PRODUCER_ID_MAPPING",
    59: "UNKNOWN_PRODUCER_ID",
    90: "PRODUCER_FENCED",
}
"""Error codes which mean that the transaction has been committed or aborted, or that brokers no longer know its id."""


class KafkaProtocolError(RuntimeError):
    """A broker refused a request. ``code`` is Kafka's number of the error."""

    def __init__(self, request: str, code: int, message: str = "") -> None:
        super().__init__(f"{request} was refused with Kafka's error {code}{message and f': {message}'}")
        self.code = code


@dataclass(frozen=True, slots=True)
class ProducerIdentity:
    """Identifies a producer. Of those with one transactional id, only the one with the highest epoch may write."""

    producer_id: int
    epoch: int


class TransactionClient:
    """Connects to the coordinator of a transactional id. ``settings`` are those of librdkafka; times are in seconds."""

    def __init__(self, settings: Mapping[str, str], timeout_s: float = 10) -> None:
        self._settings = settings
        self._timeout_s = timeout_s
        self._connections: dict[tuple[str, int], _Connection] = {}
        self._coordinators: dict[str, tuple[str, int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes all connections; the next request opens new ones."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._coordinators.clear()

    def end(self, transactional_id: str, identity: ProducerIdentity, *, commit: bool) -> int:
        """Ends a transaction and returns Kafka's error code; 0 if it has ended as requested, now or earlier.

        Raises OSError if no broker answers, and KafkaProtocolError if none names the coordinator.
        """
        body = struct.pack(">qh?", identity.producer_id, identity.epoch, commit)
        answer = self._coordinator(transactional_id).call(_END_TXN, body, first=transactional_id)
        code = int(struct.unpack_from(">ih", answer)[1])
        if code in COORDINATOR_MOVES:
            self.close()
        return code

    def take_over(self, transactional_id: str) -> ProducerIdentity | int:
        """Aborts the open transaction of an id and fences its producer; returns the new identity, or an error code.

        An epoch of 0 means that the id was unused. Raises as :meth:`end`.
        """
        body = struct.pack(">iqh", 60_000, -1, -1)
        answer = self._coordinator(transactional_id).call(_INIT_PRODUCER_ID, body, first=transactional_id)
        _, code, producer_id, epoch = struct.unpack_from(">ihqh", answer)
        if code in COORDINATOR_MOVES:
            self.close()
        return int(code) if code else ProducerIdentity(producer_id, epoch)

    def _coordinator(self, transactional_id: str) -> _Connection:
        if transactional_id not in self._coordinators:
            self._coordinators[transactional_id] = self._find(transactional_id)
        return self._connection(self._coordinators[transactional_id])

    def _find(self, transactional_id: str) -> tuple[str, int]:
        failures: list[str] = []
        for server in self._settings["bootstrap.servers"].split(","):
            try:
                connection = self._connection(_address(server))
                answer = connection.call(_FIND_COORDINATOR, bytes([_TRANSACTION]), first=transactional_id)
            except OSError as error:
                failures.append(f"{server.strip()}: {error}")
                continue
            reader = _Reader(answer)
            _, code = reader.unpack(">ih")
            message = reader.text() or ""
            reader.unpack(">i")
            host, [port] = reader.text() or "", reader.unpack(">i")
            if code in COORDINATOR_MOVES:
                failures.append(f"{server.strip()}: the coordinator is not available")
            elif code:
                raise KafkaProtocolError(f"FindCoordinator of {transactional_id!r}", code, message)
            else:
                return host, port
        raise ConnectionError("; ".join(failures))

    def _connection(self, address: tuple[str, int]) -> _Connection:
        connection = self._connections.get(address)
        if connection is None or connection.broken:
            connection = self._connections[address] = _Connection(address, self._settings, self._timeout_s)
        return connection


class _Connection:
    """One connection to a broker, with TLS and SASL as configured."""

    def __init__(self, address: tuple[str, int], settings: Mapping[str, str], timeout_s: float) -> None:
        self.broken = False
        self._sent = 0
        self._client_id = settings.get("client.id", "ckpt")
        self._socket: socket.socket = socket.create_connection(address, timeout_s)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if _uses(settings, "ssl"):
                self._socket = tls_context(settings).wrap_socket(self._socket, server_hostname=address[0])
            self._versions = self._known_to_broker()
            if _uses(settings, "sasl"):
                self._authenticate(settings)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.broken = True
        with suppress(OSError):
            self._socket.close()

    def call(self, key: int, body: bytes, *, first: str | None = None) -> bytes:
        """Sends a request and returns the body of its answer. ``first`` is a text in front of the body.

        Raises OSError, after which the connection is broken, and KafkaProtocolError for a broker that does not know
        the versions of this client.
        """
        version = self._version_of(key)
        flexible = version >= _FLEXIBLE_FROM.get(key, version + 1)
        if first is not None:
            body = (_compact(first) if flexible else _text(first)) + body
        return self._sent_and_answered(key, version, body + b"\0" if flexible else body, flexible=flexible)

    def _known_to_broker(self) -> dict[int, tuple[int, int]]:
        answer = _Reader(self._sent_and_answered(_API_VERSIONS, 0, b"", flexible=False))
        [code, count] = answer.unpack(">hi")
        if code:
            raise KafkaProtocolError("ApiVersions", code)
        found = (answer.unpack(">hhh") for _ in range(count))
        return {key: (least, greatest) for key, least, greatest in found}

    def _version_of(self, key: int) -> int:
        """The least version that both sides know."""
        ours, theirs = _KNOWN[key], self._versions.get(key)
        version = max(ours[0], theirs[0]) if theirs else ours[0]
        if theirs is None or version > min(ours[1], theirs[1]):
            has = "does not have it" if theirs is None else f"has versions {theirs[0]} to {theirs[1]}"
            request = f"{_NAMES[key]} in any of the versions {ours[0]} to {ours[1]}"
            raise KafkaProtocolError(request, _UNSUPPORTED_VERSION, f"the broker {has}")
        return version

    def _sent_and_answered(self, key: int, version: int, body: bytes, *, flexible: bool) -> bytes:
        self._sent += 1
        head = struct.pack(">hhi", key, version, self._sent) + _text(self._client_id) + (b"\0" if flexible else b"")
        try:
            self._socket.sendall(struct.pack(">i", len(head) + len(body)) + head + body)
            [size] = struct.unpack(">i", self._receive(4))
            if not 4 <= size <= _LARGEST_ANSWER:
                raise ConnectionError(f"a response of {size} bytes is not valid in Kafka's protocol")
            answer = self._receive(size)
            [number] = struct.unpack_from(">i", answer)
            if number != self._sent:
                raise ConnectionError(f"response {number} arrived for request {self._sent}")
        except OSError:
            self.close()
            raise
        return answer[5 if flexible else 4 :]

    def _receive(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            part = self._socket.recv(size - len(received))
            if not part:
                raise ConnectionError("the broker closed the connection")
            received += part
        return bytes(received)

    def _authenticate(self, settings: Mapping[str, str]) -> None:
        mechanism = mechanism_of(settings)
        answer = self.call(_SASL_HANDSHAKE, b"", first=mechanism)
        [code] = struct.unpack_from(">h", answer)
        if code:
            raise KafkaProtocolError(f"SASL mechanism {mechanism}", code)
        user, password = settings.get("sasl.username", ""), settings.get("sasl.password", "")
        if mechanism == "PLAIN":
            self._exchange(f"\0{user}\0{password}".encode())
            return
        exchange = ScramExchange(mechanism, user, password, secrets.token_urlsafe(24))
        final = exchange.proof(self._exchange(exchange.first))
        exchange.verify(self._exchange(final))

    def _exchange(self, token: bytes) -> bytes:
        answer = _Reader(self.call(_SASL_AUTHENTICATE, struct.pack(">i", len(token)) + token))
        [code] = answer.unpack(">h")
        message = answer.text() or ""
        if code:
            raise KafkaProtocolError("SASL authentication", code, message)
        [size] = answer.unpack(">i")
        return answer.take(max(size, 0))


class ScramExchange:
    """The client's side of SCRAM (RFC 5802). ``nonce`` is random text."""

    def __init__(self, mechanism: str, user: str, password: str, nonce: str) -> None:
        self._hash = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}[mechanism]
        self._password = password.encode()
        self._nonce = nonce
        self._bare = f"n={user.replace('=', '=3D').replace(',', '=2C')},r={nonce}"
        self._signature = b""

    @property
    def first(self) -> bytes:
        return f"n,,{self._bare}".encode()

    def proof(self, answer: bytes) -> bytes:
        """Returns the client's second message. Raises ConnectionError for a reply that does not match the first."""
        parts = dict(part.split("=", 1) for part in answer.decode().split(",") if "=" in part)
        if not parts.get("r", "").startswith(self._nonce) or not {"s", "i"} <= parts.keys():
            raise ConnectionError("the broker's SCRAM response does not match the request")
        salted = hashlib.pbkdf2_hmac(self._hash, self._password, base64.b64decode(parts["s"]), int(parts["i"]))
        client_key = self._hmac(salted, b"Client Key")
        without_proof = f"c=biws,r={parts['r']}"
        signed = f"{self._bare},{answer.decode()},{without_proof}".encode()
        signature = self._hmac(hashlib.new(self._hash, client_key).digest(), signed)
        self._signature = self._hmac(self._hmac(salted, b"Server Key"), signed)
        proof = bytes(one ^ other for one, other in zip(client_key, signature, strict=True))
        return f"{without_proof},p={base64.b64encode(proof).decode()}".encode()

    def verify(self, answer: bytes) -> None:
        """Raises ConnectionError for a broker that does not know the password."""
        expected = b"v=" + base64.b64encode(self._signature)
        if not hmac.compare_digest(answer.split(b",")[0], expected):
            raise ConnectionError("the broker has not proved that it knows the password")

    def _hmac(self, key: bytes, message: bytes) -> bytes:
        return hmac.new(key, message, self._hash).digest()


def mechanism_of(settings: Mapping[str, str]) -> str:
    """The SASL mechanism, librdkafka's default if none is set."""
    return settings.get("sasl.mechanism", settings.get("sasl.mechanisms", "GSSAPI")).upper()


def tls_context(settings: Mapping[str, str]) -> ssl.SSLContext:
    """Returns a TLS context with librdkafka's settings. Raises OSError for a file that cannot be read."""
    context = ssl.create_default_context()
    location = settings.get("ssl.ca.location", "probe")
    if location != "probe":
        where = {"capath": location} if os.path.isdir(location) else {"cafile": location}
        context.load_verify_locations(**where)
    if settings.get("ssl.ca.pem"):
        context.load_verify_locations(cadata=settings["ssl.ca.pem"])
    if settings.get("ssl.endpoint.identification.algorithm", "https").lower() == "none":
        context.check_hostname = False
    if settings.get("enable.ssl.certificate.verification", "true").lower() == "false":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    password = settings.get("ssl.key.password")
    if settings.get("ssl.certificate.location"):
        context.load_cert_chain(settings["ssl.certificate.location"], settings.get("ssl.key.location"), password)
    elif settings.get("ssl.certificate.pem"):
        with tempfile.NamedTemporaryFile(suffix=".pem") as file:
            file.write("\n".join([settings["ssl.certificate.pem"], settings.get("ssl.key.pem", "")]).encode())
            file.flush()
            context.load_cert_chain(file.name, password=password)
    return context


def _uses(settings: Mapping[str, str], layer: str) -> bool:
    return layer in settings.get("security.protocol", "plaintext").lower().split("_")


class _Reader:
    """Reads the values of a response in sequence."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def unpack(self, form: str) -> tuple[int, ...]:
        values = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return values

    def take(self, size: int) -> bytes:
        self._at += size
        return self._data[self._at - size : self._at]

    def text(self) -> str | None:
        [size] = self.unpack(">h")
        return None if size < 0 else self.take(size).decode()


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack(">h", len(data)) + data


def _compact(value: str) -> bytes:
    """Encodes a text for flexible versions: its length plus one, as a varint, precedes it."""
    data, size = value.encode(), len(value.encode()) + 1
    head = bytearray()
    while size >= 0x80:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head) + data


def _address(server: str) -> tuple[str, int]:
    """Host and port of an entry of ``bootstrap.servers``; a scheme in front is left out, as librdkafka does."""
    host, _, port = server.strip().rpartition("://")[2].rpartition(":")
    return (host.strip("[]"), int(port)) if host else (port, 9092)
