"""Writes the in-flight data of one subtask and checkpoint: one file in the job's shared directory (FLIP-76).

Elements that already lie in a file of an earlier checkpoint are referred to. Nothing refers to the new file before
:func:`write_channel_state` returns, and when it raises, no file is left behind.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import pyarrow as pa
from msgspec import structs

from ckpt_runtime.checkpoint.shared_state_registry import is_shared
from ckpt_runtime.checkpoint.state_handles import ChannelStateSegment, ChannelStateStream, StateFile
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.storage.channel_state_reader import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    ElementKind,
    FrameSource,
    InFlightWatermark,
    PersistedElement,
    frame_header,
    watermark_body,
)
from ckpt_runtime.storage.checksums import checksum_of
from ckpt_runtime.storage.errors import StorageError
from ckpt_runtime.storage.filesystem import Location
from ckpt_runtime.storage.state_files import StateFileWriter

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
        return ElementKind.WATERMARK, watermark_body(element)
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
