"""Reads in-flight data of unaligned checkpoints: the frames of its files, each verified before it is used.

Header of a frame, 24 bytes, little endian: ``CKIF``, kind (u8: 1 rows, 2 watermark), three zero bytes, body length
(u64, at most 1 GiB), XXH3-64 checksum. The body is an Arrow IPC message of rows, or the eight bytes of a watermark in
milliseconds. The checksum covers header and body and is seeded with the file's name and the frame's place in it, so
that swapped frames and files are noticed: a file may be moved with its directory, never renamed. Content that is
inlined in the metadata has an empty name and counts its offsets from its own start.

Each frame is readable on its own: a restored stream is read lazily, with one element or 256 KiB in memory, and later
checkpoints may refer to any part. What has not been read yet is a stream again.
"""

from __future__ import annotations

import os
import struct
from base64 import b64decode
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TypeGuard

import pyarrow as pa
import xxhash

from ckpt_runtime.checkpoint.state_handles import ChannelStateSegment, ChannelStateStream, StateFile
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.storage.errors import CorruptFileError, StorageError
from ckpt_runtime.storage.filesystem import Location, file_size, naming, open_regular, read_descriptor, read_range
from ckpt_runtime.storage.state_files import locate

MAX_BODY_BYTES = 1 << 30
"""The same limit as on the wire: no message of rows is larger."""

_MAGIC = b"CKIF"
_FIELDS = struct.Struct("<4sB3sQ")
_CHECKSUM = struct.Struct("<Q")
_WATERMARK = struct.Struct("<q")
_PADDING = bytes(3)
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
_READ_AHEAD_BYTES = 256 << 10


class ElementKind(IntEnum):
    """What a frame holds."""

    ROWS = 1
    WATERMARK = 2


@dataclass(frozen=True, slots=True)
class InFlightWatermark:
    """A watermark that was in flight."""

    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class PersistedElement:
    """A run of whole frames, mostly one, that is already stored in a channel state file.

    ``key_groups`` as in :class:`ChannelStateSegment`. ``foreign``: the file still belongs to the user, so the next
    checkpoint that needs its bytes copies them and never refers to them.
    """

    file: StateFile
    offset: int
    length: int
    key_groups: KeyGroupRange | None = None
    foreign: bool = False

    @property
    def segment(self) -> ChannelStateSegment:
        return ChannelStateSegment(self.file, self.offset, self.length, self.key_groups)


@dataclass(frozen=True, slots=True)
class Frame:
    """A verified frame: its content and where the next one begins."""

    kind: ElementKind
    body: bytes
    end: int

    @property
    def content(self) -> pa.Buffer | InFlightWatermark:
        """The IPC message, or the watermark."""
        if self.kind is ElementKind.ROWS:
            return pa.py_buffer(self.body)
        return InFlightWatermark(_WATERMARK.unpack(self.body)[0])


def watermark_body(watermark: InFlightWatermark) -> bytes:
    """The body of a watermark's frame."""
    return _WATERMARK.pack(watermark.timestamp_ms)


def frame_header(name: str, offset: int, kind: ElementKind, body: bytes | memoryview | pa.Buffer) -> bytes:
    """The header of a frame at ``offset`` of the file ``name`` (its last path segment; empty for inline content)."""
    fields = _FIELDS.pack(_MAGIC, kind, _PADDING, len(body))
    return fields + _CHECKSUM.pack(_checksum(name, offset, fields, body))


def _checksum(name: str, offset: int, fields: bytes, body: bytes | memoryview | pa.Buffer) -> int:
    seed = (xxhash.xxh3_64_intdigest(name.encode()) + offset) & 0xFFFF_FFFF_FFFF_FFFF
    state = xxhash.xxh3_64(fields, seed=seed)
    state.update(body)
    return state.intdigest()


class FrameSource:
    """One channel state file, or inline content. Opens the file at the first read. Not thread-safe; :meth:`close` it.

    Local files are kept open, so that a file that is deleted meanwhile can still be read. Keeps at most one frame, or
    256 KiB, in memory.
    """

    def __init__(self, directory: Location, file: StateFile) -> None:
        """Relative paths of ``file`` are resolved in ``directory``. Raises CorruptFileError or InvalidLocationError."""
        self.file = file
        self._location = None if file.inline is not None else locate(directory, file.path)
        self.url = f"{directory.url} (inline channel state)" if self._location is None else self._location.url
        self._name = "" if self._location is None else self._location.name
        if not _is_size(file.length) or (file.inline is not None and len(file.inline) != file.length):
            raise CorruptFileError(f"{self.url}: the handle has a wrong length, {_shown(file.length)}", self.url)
        self._opened = self._location is None
        self._descriptor = -1
        self._window = b"" if file.inline is None else file.inline
        self._window_offset = 0

    def check_range(self, offset: object, length: object) -> None:
        """Raises CorruptFileError unless these bytes can lie in a file of this length."""
        if not _is_size(offset) or not _is_size(length) or offset + length > self.file.length:
            message = (
                f"{self.url}: a handle names {_shown(length)} bytes at {_shown(offset)} of a file of {self.file.length}"
            )
            raise CorruptFileError(message, self.url)

    def read(self, offset: int, end: int) -> Frame:
        """The frame at ``offset``, which may reach up to ``end``.

        Raises CorruptFileError naming the file and the position, or the errors of the storage.
        """
        if end - offset < HEADER_BYTES:
            raise self._damaged(offset, f"{end - offset} bytes are too few for an element")
        header = self._bytes(offset, HEADER_BYTES, end)
        magic, kind, padding, length = _FIELDS.unpack_from(header)
        if magic != _MAGIC or padding != _PADDING or kind not in (ElementKind.ROWS, ElementKind.WATERMARK):
            raise self._damaged(offset, "no element begins here")
        if length > min(end - offset - HEADER_BYTES, MAX_BODY_BYTES):
            raise self._damaged(offset, f"the element claims {length} bytes")
        body = self._bytes(offset + HEADER_BYTES, length, end)
        fields, checksum = header[: _FIELDS.size], _CHECKSUM.unpack_from(header, _FIELDS.size)[0]
        if checksum != _checksum(self._name, offset, fields, body):
            raise self._damaged(offset, "the element's checksum is wrong")
        if kind == ElementKind.WATERMARK and length != _WATERMARK.size:
            raise self._damaged(offset, f"a watermark has {length} bytes")
        return Frame(ElementKind(kind), body, offset + HEADER_BYTES + length)

    def close(self) -> None:
        """Closes the file and drops the bytes that were read ahead."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._location is not None:
            self._opened = False
            self._window = b""

    def _bytes(self, offset: int, length: int, end: int) -> bytes:
        """A copy, so that a small element does not keep everything that was read ahead with it."""
        start = offset - self._window_offset
        if start < 0 or start + length > len(self._window):
            if length > _READ_AHEAD_BYTES:
                return self._stored(offset, length)
            self._window = self._stored(offset, min(_READ_AHEAD_BYTES, end - offset))
            self._window_offset, start = offset, 0
        return self._window[start : start + length]

    def _stored(self, offset: int, length: int) -> bytes:
        assert self._location is not None
        self._open(self._location)
        if self._descriptor >= 0:
            with naming("read", self._location):
                data = read_descriptor(self._descriptor, offset, length)
        else:
            data = read_range(self._location, offset, length)
        if len(data) != length:
            self._check_length(self._location)  # a short answer does not prove that the file is damaged
            raise StorageError(f"{self.url}: storage gave {len(data)} of {length} bytes at {offset}", self.url)
        return data

    def _open(self, location: Location) -> None:
        if self._opened:
            return
        self._check_length(location)
        if location.is_local:
            with naming("read", location):
                self._descriptor = open_regular(location.path)
        self._opened = True

    def _check_length(self, location: Location) -> None:
        found = os.fstat(self._descriptor).st_size if self._descriptor >= 0 else file_size(location)
        if found != self.file.length:
            message = f"{self.url}: damaged, it has {found} bytes and not {self.file.length}"
            raise CorruptFileError(message, self.url)

    def _damaged(self, offset: int, reason: str) -> CorruptFileError:
        return CorruptFileError(f"{self.url}: the channel state at byte {offset} is damaged: {reason}", self.url)


def _is_size(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 63


def _shown(value: object) -> str:
    return repr(value)[:40]


@dataclass(frozen=True, slots=True)
class RestoredElement:
    """An element and where it is stored. ``content``: an Arrow IPC message of rows, not yet clipped, or a watermark."""

    place: PersistedElement
    content: pa.Buffer | InFlightWatermark


class ChannelStateReader:
    """One restored stream. Not thread-safe; :meth:`close` it after use."""

    def __init__(self, directory: Location, stream: ChannelStateStream, *, foreign: bool = False) -> None:
        """``directory`` is the restored snapshot's; ``foreign`` when its files still belong to the user.

        Touches no file. Raises CorruptFileError or InvalidLocationError for handles that cannot be right.
        """
        self._directory = directory
        self._stream = stream
        self._foreign = foreign
        self._source: FrameSource | None = None
        self._segment = 0
        self._offset = 0
        for segment in stream.segments:
            FrameSource(directory, segment.file).check_range(segment.offset, segment.length)
        self.schema: pa.Schema | None = _schema(directory, stream.schema)
        """The schema of the rows; None when the stream has none."""
        self._begin(0)

    def read(self) -> RestoredElement | None:
        """The next element, or None at the end.

        Raises CorruptFileError or NotFoundError naming the file and the position, or storage errors; the element
        then stays unread.
        """
        while self._segment < len(self._stream.segments):
            segment = self._stream.segments[self._segment]
            end = segment.offset + segment.length
            if self._offset == end:
                self._begin(self._segment + 1)
                continue
            source = self._open(self._segment)
            frame = source.read(self._offset, end)
            length = frame.end - self._offset
            place = PersistedElement(segment.file, self._offset, length, segment.key_groups, self._foreign)
            if isinstance(content := frame.content, pa.Buffer) and self.schema is None:
                message = f"{source.url}: rows at byte {self._offset} have no schema"
                raise CorruptFileError(message, source.url)
            self._offset = frame.end
            return RestoredElement(place, content)
        self.close()
        return None

    def unread(self) -> ChannelStateStream:
        """The elements that :meth:`read` has not returned yet, as a stream that a later checkpoint can refer to."""
        segments = list(self._stream.segments[self._segment :])
        if segments:
            first = segments[0]
            rest = first.offset + first.length - self._offset
            segments[0] = replace(first, offset=self._offset, length=rest)
        return replace(self._stream, segments=tuple(segment for segment in segments if segment.length))

    def unread_elements(self) -> tuple[PersistedElement, ...]:
        """The same as :meth:`unread`, in the form that the next checkpoint's writer takes."""
        return tuple(
            PersistedElement(segment.file, segment.offset, segment.length, segment.key_groups, self._foreign)
            for segment in self.unread().segments
        )

    def close(self) -> None:
        """Closes the file; reading again would open it again."""
        if self._source is not None:
            self._source.close()
            self._source = None

    def _begin(self, index: int) -> None:
        self._segment = index
        if index < len(self._stream.segments):
            self._offset = self._stream.segments[index].offset

    def _open(self, index: int) -> FrameSource:
        file = self._stream.segments[index].file
        if self._source is None or self._source.file != file:
            self.close()
            self._source = FrameSource(self._directory, file)
        return self._source


def decode_schema(text: str) -> pa.Schema | None:
    """The schema of a stream's handle; None when it has no rows. Raises ValueError for anything else."""
    if not text:
        return None
    try:
        return pa.ipc.read_schema(pa.py_buffer(b64decode(text, validate=True)))
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        raise ValueError(f"no schema: {error}") from error


def _schema(directory: Location, text: str) -> pa.Schema | None:
    try:
        return decode_schema(text)
    except ValueError as error:
        message = f"{directory.url}: the schema of in-flight data cannot be read: {error}"
        raise CorruptFileError(message, directory.url) from error
