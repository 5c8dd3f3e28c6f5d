"""Reads restored in-flight data lazily, one element at a time; each is verified before it is used."""

from __future__ import annotations

from base64 import b64decode
from dataclasses import dataclass, replace

import pyarrow as pa

from ckpt_runtime.checkpoint.state_handles import ChannelStateStream
from ckpt_runtime.storage.channel_state_frame import FrameSource, InFlightWatermark, PersistedElement
from ckpt_runtime.storage.errors import CorruptFileError
from ckpt_runtime.storage.filesystem import Location


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
