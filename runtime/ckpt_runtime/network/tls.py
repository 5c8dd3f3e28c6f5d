"""TLS: contexts from PEM files, and a socket that several threads may use.

The credentials that admit a process to the sockets of a session travel as one text: the session's secret and, with
``security.ssl.internal``, the files of its certificate. The secret is proved inside TLS as well, so neither a
certificate alone nor the secret alone admits a process.
"""

from __future__ import annotations

import select
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

from ckpt_runtime.configuration.cluster_options import SecurityOptions
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.network.framing import AuthenticationError

T = TypeVar("T")

_SEPARATOR = "\n"
_RECORD_BYTES = 16 << 10
_MODES_OF_OTHERS = 0o027
"""Only the owner and a group may read a key, and only the owner may change it."""


class TlsFilesError(ValueError):
    """A certificate or key file cannot be used; the message names the option and the file."""


@dataclass(frozen=True, slots=True)
class InternalFiles:
    """Paths of PEM files: a certificate, its key, and the authority that signs all certificates."""

    certificate: str
    key: str
    authority: str


def rest_context(configuration: Configuration) -> ssl.SSLContext | None:
    """The context of the REST server; None for plain HTTP. Raises :class:`TlsFilesError`."""
    get = configuration.get
    if not get(SecurityOptions.REST_ENABLED):
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    certificate, key = get(SecurityOptions.REST_CERTIFICATE) or "", get(SecurityOptions.REST_KEY) or ""
    _load(context, certificate, key, (SecurityOptions.REST_CERTIFICATE.key, SecurityOptions.REST_KEY.key))
    return context


def credentials(secret: str, configuration: Configuration) -> str:
    """The credentials for the session's sockets, as one text. Raises :class:`TlsFilesError` for unusable files."""
    get = configuration.get
    if not get(SecurityOptions.INTERNAL_ENABLED):
        return secret
    options = (SecurityOptions.INTERNAL_CERTIFICATE, SecurityOptions.INTERNAL_KEY, SecurityOptions.INTERNAL_AUTHORITY)
    text = _SEPARATOR.join([secret, *(get(option) or "" for option in options)])
    internal_context(text, "server")
    return text


def internal_context(credentials: str, role: str) -> ssl.SSLContext | None:
    """The context for one side (``client`` connects); None without TLS. Raises :class:`TlsFilesError`."""
    files = _files(credentials)
    if files is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if role == "server" else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The session's own authority signs certificates, which name no hosts: workers start on any machine.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    _load(
        context,
        files.certificate,
        files.key,
        (SecurityOptions.INTERNAL_CERTIFICATE.key, SecurityOptions.INTERNAL_KEY.key),
    )
    try:
        context.load_verify_locations(cafile=files.authority)
    except OSError as error:
        raise TlsFilesError(
            f"{SecurityOptions.INTERNAL_AUTHORITY.key}: {files.authority!r} is not acceptable, it must be a PEM file "
            f"with certificates: {error}"
        ) from error
    return context


def _files(credentials: str) -> InternalFiles | None:
    _, *files = credentials.split(_SEPARATOR)
    return InternalFiles(*files) if files else None


def _load(context: ssl.SSLContext, certificate: str, key: str, options: tuple[str, str]) -> None:
    for path, option in zip((certificate, key), options, strict=True):
        if not Path(path).is_file():
            raise TlsFilesError(f"{option}: {path!r} is not acceptable, it must be a PEM file that can be read here")
    mode = stat.S_IMODE(Path(key).stat().st_mode)
    if mode & _MODES_OF_OTHERS:
        raise TlsFilesError(
            f"{options[1]}: {key!r} has mode {mode:04o}, so that other users can read or change the key; it must have "
            "mode 0600 or 0400, or 0640 or 0440 for a group that may read it"
        )
    try:
        context.load_cert_chain(certificate, key, password=_no_passphrase)
    except (OSError, ValueError) as error:
        raise TlsFilesError(
            f"{options[0]}: {certificate!r} and {options[1]}: {key!r} are not acceptable, they must be a certificate "
            f"and its key in PEM form, without a passphrase: {error}"
        ) from error


def _no_passphrase() -> str:
    """Raises an error, instead of asking for a passphrase at a terminal."""
    raise ValueError("the key has a passphrase")


class TlsSocket:
    """A TLS connection with the methods of a socket that are used here.

    Two threads must not use OpenSSL's objects at the same time, so each step happens under a lock, without waiting; a
    thread waits for the peer outside the lock. A non-blocking socket raises ``BlockingIOError`` instead of waiting.
    """

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, role: str) -> None:
        """Takes ownership of the socket. The caller still has to run the handshake."""
        self._timeout = connection.gettimeout()
        connection.setblocking(False)
        self._tls = context.wrap_socket(connection, server_side=role == "server", do_handshake_on_connect=False)
        self._lock = threading.Lock()

    def do_handshake(self) -> None:
        """Runs the handshake. Raises AuthenticationError when it fails with this peer."""
        try:
            self._step(self._tls.do_handshake)
        except ssl.SSLError as error:
            raise AuthenticationError(f"no TLS connection (security.ssl.internal): {error}") from error

    def fileno(self) -> int:
        return self._tls.fileno()

    def pending(self) -> int:
        """Number of received bytes that a selector does not report."""
        with self._lock:
            return self._tls.pending() if self._tls.fileno() >= 0 else 0

    def setblocking(self, blocks: bool) -> None:
        self._timeout = None if blocks else 0.0

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def setsockopt(self, level: int, name: int, value: int) -> None:
        self._tls.setsockopt(level, name, value)

    def getsockname(self) -> tuple[str, int]:
        host, port = self._tls.getsockname()[:2]
        return (host, port)

    def recv(self, count: int) -> bytes:
        return self._step(lambda: self._tls.recv(count))

    def recv_into(self, view: memoryview | bytearray) -> int:
        return self._step(lambda: self._tls.recv_into(view))

    def send(self, content: bytes | bytearray | memoryview) -> int:
        return self._step(lambda: self._tls.send(content))

    def sendall(self, content: bytes) -> None:
        left = memoryview(content)
        while left:
            left = left[self.send(left) :]

    def sendmsg(self, vectors: Iterable[memoryview]) -> int:
        """Sends as many bytes from the beginning as fit into one record: small vectors share a record."""
        parts = [part.cast("B") for part in vectors]
        if parts[0].nbytes >= _RECORD_BYTES:
            return self.send(parts[0])
        beginning = bytearray()
        for part in parts:
            beginning += part[: _RECORD_BYTES - len(beginning)]
            if len(beginning) >= _RECORD_BYTES:
                break
        return self.send(beginning)

    def shutdown(self, how: int) -> None:
        """Shuts down the underlying connection, which wakes threads that wait for the peer."""
        with self._lock:
            self._tls.shutdown(how)

    def close(self) -> None:
        with self._lock:
            self._tls.close()

    def _step(self, step: Callable[[], T]) -> T:
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        while True:
            try:
                with self._lock:
                    # Locked for this step only: while one thread waits for the peer, another may send.
                    return step()
            except ssl.SSLWantReadError:
                events = select.POLLIN
            except ssl.SSLWantWriteError:
                events = select.POLLOUT
            if self._timeout == 0:
                raise BlockingIOError("the peer is waited for")
            self._wait(events, deadline)

    def _wait(self, events: int, deadline: float | None) -> None:
        number = self._tls.fileno()
        if number < 0:
            raise ConnectionError("the connection is closed")
        poll = select.poll()
        poll.register(number, events)
        left_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        if not poll.poll(left_ms):
            raise TimeoutError("the peer does not answer")


AnySocket: TypeAlias = socket.socket | TlsSocket


def secured(connection: socket.socket, context: ssl.SSLContext | None, role: str) -> AnySocket:
    """The connection, with TLS if there is a context for it; blocks for the handshake. Raises AuthenticationError."""
    if context is None:
        return connection
    tls = TlsSocket(connection, context, role)
    try:
        tls.do_handshake()
    except BaseException:
        tls.close()
        raise
    return tls
