"""Writes and reads the in-flight data of unaligned checkpoints (FLIP-76): frames, each verified before it is used.

Header of a frame, 24 bytes, little endian: ``CKIF``, kind (u8: 1 rows, 2 watermark, 3 coming watermark), three zero
bytes, body length (u64, at most 1 GiB), XXH3-64 checksum. The body is an Arrow IPC message of rows, or the eight bytes
of a watermark in milliseconds, behind which a coming one has eight bytes with the number of its batch. The checksum
covers header and body and is seeded with the file's name and the frame's place in it, so that swapped frames and files
are noticed: a file may be moved with its directory, never renamed. Content that is inlined in the metadata has an empty
name and counts its offsets from its own start.

Each frame is readable on its own: a restored stream is read lazily, with one element or 256 KiB in memory, and later
checkpoints may refer to any part. Unread content is a stream again.

The in-flight data of one subtask and checkpoint is one file in the job's shared directory. Elements that are already in
a file of an earlier checkpoint are referred to. Nothing refers to the new file before :func:`write_channel_state`
returns, and when it raises, no file is left behind.
"""

from __future__ import annotations

import os
import struct
from base64 import b64decode, b64encode
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TypeAlias, TypeGuard

import pyarrow as pa
import xxhash
from msgspec import structs

from ckpt_runtime.checkpoint.completed_checkpoint import ChannelStateSegment, ChannelStateStream, StateFile, is_shared
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.storage.errors import CorruptFileError, StorageError
from ckpt_runtime.storage.filesystem import Location, file_size, naming, open_regular, read_range
from ckpt_runtime.storage.publish import checksum_of
from ckpt_runtime.storage.state_files import StateFileWriter, locate

MAX_BODY_BYTES = 1 << 30
"""The limit is the same as on the wire: no message of rows is larger."""

_MAGIC = b"CKIF"
_FIELDS = struct.Struct("<4sB3sQ")
_CHECKSUM = struct.Struct("<Q")
_WATERMARK = struct.Struct("<q")
_COMING_WATERMARK = struct.Struct("<qq")
_PADDING = bytes(3)
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
_READ_AHEAD_BYTES = 256 << 10


class ElementKind(IntEnum):
    """The content of a frame."""

    ROWS = 1
    WATERMARK = 2
    COMING_WATERMARK = 3


_WATERMARK_OF = {ElementKind.WATERMARK: _WATERMARK, ElementKind.COMING_WATERMARK: _COMING_WATERMARK}


@dataclass(frozen=True, slots=True)
class InFlightWatermark:
    """A watermark that was in flight; with ``batch``, one that was to follow the next range."""

    timestamp_ms: int
    batch: int | None = None


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
        return InFlightWatermark(*_WATERMARK_OF[self.kind].unpack(self.body))


def watermark_body(watermark: InFlightWatermark) -> bytes:
    """The body of a watermark's frame."""
    if watermark.batch is None:
        return _WATERMARK.pack(watermark.timestamp_ms)
    return _COMING_WATERMARK.pack(watermark.timestamp_ms, watermark.batch)


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

    Local files are kept open, so that a file that is deleted after it was opened can still be read. Keeps at most one
    frame, or 256 KiB, in memory.
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
        """Raises CorruptFileError unless a file of this length can contain these bytes."""
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
        if magic != _MAGIC or padding != _PADDING or kind not in tuple(ElementKind):
            raise self._damaged(offset, "no element begins here")
        if length > min(end - offset - HEADER_BYTES, MAX_BODY_BYTES):
            raise self._damaged(offset, f"the element claims {length} bytes")
        body = self._bytes(offset + HEADER_BYTES, length, end)
        fields, checksum = header[: _FIELDS.size], _CHECKSUM.unpack_from(header, _FIELDS.size)[0]
        if checksum != _checksum(self._name, offset, fields, body):
            raise self._damaged(offset, "the element's checksum is wrong")
        if kind != ElementKind.ROWS and length != _WATERMARK_OF[ElementKind(kind)].size:
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
        data = read_range(self._location, offset, length, self._descriptor)
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


InFlightElement: TypeAlias = PersistedElement | pa.Buffer | pa.RecordBatch | InFlightWatermark
"""Frames that lie in a file already, an Arrow IPC message of rows, rows still to be serialised, or a watermark."""


@dataclass(frozen=True, slots=True)
class CapturedStream:
    """Captured elements of one channel, in order; ``edge`` and ``peer`` are as in :class:`ChannelStateStream`.

    ``schema`` is that of the rows; None when there are none. It is not checked against the elements.
    """

    edge: int
    peer: int
    schema: pa.Schema | None
    elements: Sequence[InFlightElement]


@dataclass(frozen=True, slots=True)
class WrittenChannelState:
    """The handles, and where each element is stored now.

    ``input_places`` and ``output_places`` run parallel to the captured streams and their elements: an element that was
    referred to is its own place; one that lies in the metadata has None. ``file`` is the newly written file, or
    None. ``written_bytes`` went into the file or the handles; ``referenced_bytes`` were stored elsewhere already.
    """

    inputs: tuple[ChannelStateStream, ...]
    outputs: tuple[ChannelStateStream, ...]
    input_places: tuple[tuple[PersistedElement | None, ...], ...]
    output_places: tuple[tuple[PersistedElement | None, ...], ...]
    written_bytes: int = 0
    referenced_bytes: int = 0
    file: StateFile | None = None


def write_channel_state(
    shared: Location,
    snapshot_directory: Location,
    inputs: Sequence[CapturedStream],
    outputs: Sequence[CapturedStream],
    inline_threshold: int,
    *,
    full: bool,
) -> WrittenChannelState:
    """Writes new elements and refers to stored ones; streams without elements are left out.

    ``snapshot_directory`` is that of the checkpoint being written; the file's name begins with its name, which tells
    the checkpoint of a file left by a killed worker. Up to ``inline_threshold`` new bytes go into the handles instead.
    ``full`` refers to nothing: elements stored elsewhere are copied, as inline and foreign elements always are. Raises
    the errors of the storage, and CorruptFileError when an element to be copied is damaged.
    """
    captured = (*inputs, *outputs)
    size = sum(_new_bytes(element, full) for stream in captured for element in stream.elements)
    if size <= inline_threshold:
        placed = _place(captured, snapshot_directory, None, full)
        return _result(placed, len(inputs), None)
    with StateFileWriter(shared, 0, f"{snapshot_directory.name}-") as writer:
        placed = _place(captured, snapshot_directory, writer, full)
        file = structs.replace(writer.finish(), path=writer.location.url)
    return _result(placed, len(inputs), file)


@dataclass(slots=True)
class _Piece:
    """Consecutive new frames of one stream: a part of the new file, or, with ``held``, inline content."""

    key_groups: KeyGroupRange | None
    offset: int
    held: bytearray | None
    length: int = 0

    def segment(self, file: StateFile | None) -> ChannelStateSegment:
        if self.held is not None:
            content = bytes(self.held)
            file = StateFile("", len(content), checksum_of(content), content)
        assert file is not None
        return ChannelStateSegment(file, self.offset, self.length, self.key_groups)


@dataclass(slots=True)
class _PlacedStream:
    """One stream being written: its parts, and each element's place as (piece, offset, length) or itself."""

    captured: CapturedStream
    parts: list[_Piece | ChannelStateSegment] = field(default_factory=list)
    places: list[PersistedElement | tuple[_Piece, int, int]] = field(default_factory=list)

    def refer(self, element: PersistedElement) -> None:
        """Adds a stored element; one that continues the previous part in the same file is joined to it."""
        self.places.append(element)
        last = self.parts[-1] if self.parts else None
        if (
            isinstance(last, ChannelStateSegment)
            and (last.file, last.key_groups) == (element.file, element.key_groups)
            and last.offset + last.length == element.offset
        ):
            self.parts[-1] = replace(last, length=last.length + element.length)
        elif element.length:
            self.parts.append(element.segment)

    def stream(self, file: StateFile | None) -> ChannelStateStream:
        schema = self.captured.schema
        text = "" if schema is None else b64encode(schema.serialize()).decode()
        segments = tuple(part.segment(file) if isinstance(part, _Piece) else part for part in self.parts if part.length)
        return ChannelStateStream(self.captured.edge, self.captured.peer, text, segments)

    def places_in(self, file: StateFile | None) -> tuple[PersistedElement | None, ...]:
        found: list[PersistedElement | None] = []
        for place in self.places:
            if isinstance(place, PersistedElement):
                found.append(place)
            elif file is None:
                found.append(None)
            else:
                piece, offset, length = place
                found.append(PersistedElement(file, offset, length, piece.key_groups))
        return tuple(found)


def _new_bytes(element: InFlightElement, full: bool) -> int:
    match element:
        case PersistedElement():
            return 0 if _may_refer(element, full) else element.length
        case InFlightWatermark():
            return HEADER_BYTES + len(watermark_body(element))
        case pa.RecordBatch():
            return HEADER_BYTES + int(pa.ipc.get_record_batch_size(element))
        case _:
            return HEADER_BYTES + int(element.size)


def _may_refer(element: PersistedElement, full: bool) -> bool:
    return not full and not element.foreign and element.file.inline is None and is_shared(element.file)


def _place(
    captured: Sequence[CapturedStream], directory: Location, writer: StateFileWriter | None, full: bool
) -> list[_PlacedStream]:
    """Streams every element into the writer, or into inline pieces without one."""
    placed = []
    with closing(_Copier(directory)) as copier:
        for captured_stream in captured:
            stream = _PlacedStream(captured_stream)
            placed.append(stream)
            for element in captured_stream.elements:
                if isinstance(element, PersistedElement):
                    if _may_refer(element, full):
                        stream.refer(element)
                    else:
                        copier.copy(element, stream, writer)
                    continue
                piece = _open_piece(stream, writer, None)
                start = piece.offset + piece.length
                kind, body = _encode(element)
                _append(piece, writer, kind, body)
                stream.places.append((piece, start, piece.offset + piece.length - start))
    return placed


def _encode(element: pa.Buffer | pa.RecordBatch | InFlightWatermark) -> tuple[ElementKind, pa.Buffer | bytes]:
    if isinstance(element, InFlightWatermark):
        kind = ElementKind.WATERMARK if element.batch is None else ElementKind.COMING_WATERMARK
        return kind, watermark_body(element)
    return ElementKind.ROWS, element.serialize() if isinstance(element, pa.RecordBatch) else element


def _open_piece(stream: _PlacedStream, writer: StateFileWriter | None, key_groups: KeyGroupRange | None) -> _Piece:
    last = stream.parts[-1] if stream.parts else None
    if isinstance(last, _Piece) and last.key_groups == key_groups:
        return last
    piece = _Piece(key_groups, 0, bytearray()) if writer is None else _Piece(key_groups, writer.bytes_written, None)
    stream.parts.append(piece)
    return piece


def _append(piece: _Piece, writer: StateFileWriter | None, kind: ElementKind, body: pa.Buffer | bytes) -> None:
    if len(body) > MAX_BODY_BYTES:
        where = "the metadata" if writer is None else writer.location.url
        message = f"an in-flight element of {len(body)} bytes is larger than the {MAX_BODY_BYTES} allowed in {where}"
        raise StorageError(message, where)
    offset = piece.offset + piece.length
    header = frame_header("" if writer is None else writer.location.name, offset, kind, body)
    if writer is None:
        assert piece.held is not None
        piece.held += header
        piece.held += memoryview(body)
    else:
        writer.write(header)
        writer.write(memoryview(body))
    piece.length += len(header) + len(body)


class _Copier:
    """Copies frames out of other files, verified one by one; keeps the last file open."""

    def __init__(self, directory: Location) -> None:
        self._directory = directory
        self._source: FrameSource | None = None

    def copy(self, element: PersistedElement, stream: _PlacedStream, writer: StateFileWriter | None) -> None:
        if self._source is None or self._source.file != element.file:
            self.close()
            self._source = FrameSource(self._directory, element.file)
        self._source.check_range(element.offset, element.length)
        piece = _open_piece(stream, writer, element.key_groups)
        start, offset = piece.offset + piece.length, element.offset
        while offset < element.offset + element.length:
            frame = self._source.read(offset, element.offset + element.length)
            _append(piece, writer, frame.kind, frame.body)
            offset = frame.end
        stream.places.append((piece, start, element.length))

    def close(self) -> None:
        if self._source is not None:
            self._source.close()


def _result(placed: list[_PlacedStream], inputs: int, file: StateFile | None) -> WrittenChannelState:
    streams = [stream.stream(file) if any(part.length for part in stream.parts) else None for stream in placed]
    places = [stream.places_in(file) for stream in placed]
    parts = [part for stream in placed for part in stream.parts]
    return WrittenChannelState(
        tuple(stream for stream in streams[:inputs] if stream is not None),
        tuple(stream for stream in streams[inputs:] if stream is not None),
        tuple(places[:inputs]),
        tuple(places[inputs:]),
        sum(part.length for part in parts if isinstance(part, _Piece)),
        sum(part.length for part in parts if isinstance(part, ChannelStateSegment)),
        file,
    )
