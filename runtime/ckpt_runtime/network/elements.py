"""Stream elements other than data, which travel in order with the rows of a channel.

A channel carries record batches and these control elements. They need no credit and are never dropped. Their wire form
is JSON, since they are rare and small. No I/O here.

Flow control is based on credit, counted on both sides. A receiver grants a window of buffers per channel; a sender
needs credit for each data buffer, but none for control elements. Credit is returned when half of the window has been
consumed, or at once when the receiver's queue is empty.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import Struct

from ckpt_runtime.checkpoint.properties import CheckpointOptions
from ckpt_runtime.graph.schema import DocumentError, malformed


class _Element(Struct, frozen=True, tag_field="t"):
    """Each element names its type on the wire."""


class CheckpointBarrier(_Element, frozen=True, tag="barrier"):
    """Separates the rows of a checkpoint, which precede the barrier, from the rows after it."""

    checkpoint_id: int
    timestamp_ms: int
    options: CheckpointOptions


class CancelCheckpoint(_Element, frozen=True, tag="cancel"):
    """The checkpoint was aborted upstream: its barrier will not arrive on this channel."""

    checkpoint_id: int


class Watermark(_Element, frozen=True, tag="watermark"):
    """No later row of this channel has an event time at or below ``timestamp_ms``.

    With ``batch``, the number of a range that has ended, this holds behind the next range only: see
    :meth:`Operator.process_coming_watermark`.
    """

    timestamp_ms: int
    batch: int | None = None


class EndOfRange(_Element, frozen=True, tag="end_of_range"):
    """All rows of a range planned by a stream reader that belong to this channel have been sent."""

    batch: int = 0
    upto: int = 0


class EndOfData(_Element, frozen=True, tag="end_of_data"):
    """No more rows (control elements may follow). With ``drain`` operators finish; without it the job will resume."""

    drain: bool


class EndOfPartition(_Element, frozen=True, tag="end_of_partition"):
    """Nothing follows: the producer has ended."""


ControlElement = CheckpointBarrier | CancelCheckpoint | Watermark | EndOfRange | EndOfData | EndOfPartition
_DECODER: msgspec.json.Decoder[ControlElement] = msgspec.json.Decoder(ControlElement)


def encode_element(element: ControlElement) -> bytes:
    """The wire form of a control element."""
    return msgspec.json.encode(element)


def decode_element(content: bytes | memoryview) -> ControlElement:
    """The inverse of :func:`encode_element`. Raises DocumentError for anything else."""
    try:
        with malformed():
            return _DECODER.decode(content)
    except DocumentError as error:
        raise DocumentError(f"malformed control element: {error}") from error


class SenderCredit:
    """The credit of a sender. One thread may grant and another spend: each writes its own counter."""

    __slots__ = ("_granted", "_spent", "_window")

    def __init__(self) -> None:
        self._granted = 0
        self._spent = 0
        self._window = 0

    @property
    def available(self) -> int:
        return self._granted - self._spent

    @property
    def is_complete(self) -> bool:
        """Whether the whole window is available, so that the receiver has consumed everything that was sent."""
        return self.available == self._window

    def grant(self, count: int) -> None:
        if count <= 0:
            raise ValueError(f"credit grant must be positive, was {count}")
        # The first grant is the window.
        self._window = self._window or count
        self._granted += count

    def spend(self) -> None:
        if self.available == 0:
            raise RuntimeError("a buffer was sent without credit")
        self._spent += 1


class ReceiverCredit:
    """The credit that a receiver owes: buffers consumed but not yet returned to the sender."""

    __slots__ = ("_owed", "window")

    def __init__(self, window: int) -> None:
        if window < 1:
            raise ValueError(f"credit window must be at least 1, was {window}")
        self.window = window
        self._owed = 0

    def consumed(self, queue_empty: bool) -> int:
        """Counts a consumed buffer; returns how many credits to give back now (0 = later)."""
        self._owed += 1
        # Half a window keeps the sender busy while the message travels; an empty queue means that it may be waiting.
        if queue_empty or self._owed * 2 >= self.window:
            owed, self._owed = self._owed, 0
            return owed
        return 0


class DesiredBufferSize:
    """The buffer size that the receiver of a channel requests, on its way to the sender.

    One thread announces while another one may start to listen: the listener always ends up with the latest size.
    """

    __slots__ = ("_listener", "latest")

    def __init__(self) -> None:
        self._listener: Callable[[int], None] | None = None
        self.latest: int | None = None

    def announce(self, size: int) -> None:
        # Set before the listener is read, and listen() does both in the opposite order: whichever of the two calls is
        # later notifies the listener.
        self.latest = size
        if self._listener is not None:
            self._listener(size)

    def listen(self, listener: Callable[[int], None]) -> None:
        """Calls ``listener(bytes)`` with the latest requested size, if any, and with each later one."""
        self._listener = listener
        delivered = None
        while delivered != self.latest:
            delivered = self.latest
            assert delivered is not None
            listener(delivered)
