"""Format ``socket``: lines of text from a server, for tests, as in Spark. At most once.

Lines that were sent while the job was down, or received after the restored checkpoint, are lost: a socket cannot be
read again. One reader has the connection; when the server closes it, no further rows arrive.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from typing import Any, TypedDict

import pyarrow as pa

from ckpt_runtime.connectors.splits import BuiltInSource
from ckpt_runtime.sources import Split, SplitEnumerator, SplitReader, SplitRows

_LOG = logging.getLogger(__name__)
_CONNECT_S = 10
_BLOCK_BYTES = 1 << 16
_LONGEST_LINE = 1 << 24


class _Sent(TypedDict):
    """The state of the enumerator: whether the connection was given to a reader."""

    sent: bool


class SocketSource(BuiltInSource):
    """The source of format ``socket``."""

    state_type: Any = _Sent
    description_type: Any = None
    position_type: Any = None

    def open_enumerator(self, schema: pa.Schema, state: Any, *, bounded: bool) -> SplitEnumerator:
        return _OneSplit(state)

    def open_reader(self, schema: pa.Schema, *, subtask: int, parallelism: int) -> SplitReader:
        return SocketReader(self._values["host"], self._values["port"], schema)


class _OneSplit(SplitEnumerator):
    """Sends the connection to one reader."""

    def __init__(self, state: Any) -> None:
        self._sent = state is not None and state["sent"]

    def discover(self) -> Sequence[Split]:
        if self._sent:
            return ()
        self._sent = True
        return [Split("connection", None, bounded=False)]

    def snapshot(self) -> Any:
        return {"sent": self._sent}


class SocketReader(SplitReader):
    """Emits the lines that have arrived."""

    def __init__(self, host: str, port: int, schema: pa.Schema) -> None:
        self._address = (host, port)
        self._schema = schema
        self._socket: socket.socket | None = None
        self._rest = b""
        self._lines: list[tuple[str, int]] = []

    def add(self, split: Split, position: Any) -> None:
        host, port = self._address
        try:
            self._socket = socket.create_connection(self._address, _CONNECT_S)
        except OSError as error:
            raise ConnectionError(
                f"no server answers at {host}:{port}: {error}; start one, such as nc -lk {port}"
            ) from None
        self._socket.setblocking(False)

    def read(self, most_rows: int) -> SplitRows | None:
        if not self._lines:
            self._receive()
        taken, self._lines = self._lines[:most_rows], self._lines[most_rows:]
        if not taken:
            return None
        columns = [pa.array([line for line, _ in taken], pa.string())]
        if len(self._schema) > 1:
            columns.append(pa.array([at for _, at in taken], pa.int64()).cast(self._schema.field(1).type))
        return SplitRows("connection", None, pa.RecordBatch.from_arrays(columns, schema=self._schema))

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _receive(self) -> None:
        if self._socket is None:
            return
        try:
            block = self._socket.recv(_BLOCK_BYTES)
        except BlockingIOError:
            return
        if not block:
            _LOG.warning("socket %s:%d was closed by the server; no more rows will arrive from it", *self._address)
            self.close()
            if not self._rest:
                return
            block = b"\n"  # as in Spark, the last line need not have an end
        *lines, self._rest = (self._rest + block).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            raise ValueError(
                f"socket {self._address[0]}:{self._address[1]} sent a line of more than {_LONGEST_LINE} bytes"
            )
        now_us = int(time.time() * 1000) * 1000
        self._lines = [(line.removesuffix(b"\r").decode("utf-8", "replace"), now_us) for line in lines]
