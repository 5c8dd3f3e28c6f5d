"""The input gate of a subtask: its channels' queues, the choice of the next channel, and blocking for alignment.

Producers (the I/O thread, or a subtask of the same worker) append; one consumer, the subtask, polls. Appending and
popping a deque is atomic, so the hot path takes no lock. Every element puts one token into ``_arrivals``: polling is
O(1) for any number of channels. No sockets here.

A barrier that may be unaligned is queued like any element and is also announced, so that the subtask knows of it before
it has processed the elements before it (FLIP-76). Barriers do not overtake barriers: an announcement waits until no
aligned barrier is in front of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import TypeAlias

import pyarrow as pa

from ckpt_runtime.network.elements import (
    CheckpointBarrier,
    ControlElement,
    DesiredBufferSize,
    EndOfPartition,
    ReceiverCredit,
    Watermark,
)
from ckpt_runtime.network.output_queue import EncodedRows, InFlightData

Announced: TypeAlias = "CheckpointBarrier | EndOfPartition"
Element: TypeAlias = "pa.RecordBatch | EncodedRows | ControlElement | BaseException"


class InputChannel:
    """The receiving end of one channel.

    ``input_index`` is the job edge (gate number) it belongs to, ``peer`` the sending subtask's index. Barriers stay in
    order unless ``overtakes`` is set. ``schema`` is that of the encoded rows that arrive next; only the producer's
    thread uses it.
    """

    __slots__ = (
        "_gate",
        "_return_credit",
        "blocked",
        "buffer_size",
        "credit",
        "held",
        "index",
        "input_index",
        "overtakes",
        "peer",
        "queue",
        "schema",
    )

    def __init__(
        self, gate: InputGate, index: int, input_index: int, window: int, *, peer: int, overtakes: bool
    ) -> None:
        self._gate = gate
        self._return_credit: Callable[[int], None] | None = None
        self.index = index
        self.input_index = input_index
        self.peer = peer
        self.overtakes = overtakes
        self.queue: deque[Element] = deque()
        self.schema: pa.Schema | None = None
        self.credit = ReceiverCredit(window)
        self.buffer_size = DesiredBufferSize()
        self.blocked = False
        self.held = 0

    def on_credit(self, give_back: Callable[[int], None]) -> None:
        """Sets ``give_back(count)``, which returns credit to the sender, before the first buffer arrives."""
        self._return_credit = give_back

    def put(self, element: Element) -> None:
        """Queues an element. Called by the producer's thread."""
        # Queued first: the consumer looks up announced elements in the queue, and pops one element per arrival token.
        self.queue.append(element)
        if self.overtakes and (
            isinstance(element, EndOfPartition)
            or (isinstance(element, CheckpointBarrier) and element.options.unaligned)
        ):
            self._gate.announced(self, element)
        self._gate.arrived(self.index)

    def put_encoded(self, message: pa.Buffer) -> None:
        """Queues rows of the schema that has arrived last. Raises ValueError before the first."""
        if self.schema is None:
            raise ValueError("rows have arrived before their schema")
        self.put(EncodedRows(self.schema, message))

    def queued_before(self, checkpoint_id: int, *, or_all: bool = False) -> list[InFlightData]:
        """The rows and watermarks ahead of a checkpoint's barrier. If it is not queued: none, or with ``or_all``
        all."""
        found: list[InFlightData] = []
        for element in tuple(self.queue):
            if isinstance(element, CheckpointBarrier) and element.checkpoint_id == checkpoint_id:
                return found
            if isinstance(element, pa.RecordBatch | EncodedRows | Watermark):
                found.append(element)
        return found if or_all else []

    def buffer_consumed(self) -> None:
        """Returns credit. Called by the subtask after it has consumed a data buffer."""
        owed = self.credit.consumed(not self.queue)
        if owed and self._return_credit is not None:
            self._return_credit(owed)


class InputGate:
    """All input channels of one subtask."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.channels: list[InputChannel] = []
        self._arrivals: deque[int] = deque()
        self._announcements: deque[tuple[InputChannel, Announced]] = deque()
        self._withheld: list[tuple[InputChannel, Announced]] = []
        self._wake = wake

    def add_channel(
        self, input_index: int, window: int, *, peer: int | None = None, overtakes: bool = True
    ) -> InputChannel:
        """Adds a channel; ``peer`` defaults to the number of channels that the gate already has for that input."""
        if peer is None:
            peer = sum(channel.input_index == input_index for channel in self.channels)
        channel = InputChannel(self, len(self.channels), input_index, window, peer=peer, overtakes=overtakes)
        self.channels.append(channel)
        return channel

    def announced(self, channel: InputChannel, element: Announced) -> None:
        """Notes an announcement. Called by the producer's thread after it has queued the element."""
        self._announcements.append((channel, element))

    def arrived(self, index: int) -> None:
        self._arrivals.append(index)
        self._wake()

    @property
    def has_announcements(self) -> bool:
        return bool(self._announcements)

    def next_announcement(self) -> tuple[InputChannel, Announced] | None:
        """The next announced element, in order of arrival; None when there is none.

        An element that was polled before its announcement was read is skipped.
        """
        while self._announcements:
            channel, element = self._announcements.popleft()
            match _place_of(channel, element):
                case _Place.FREE:
                    return channel, element
                case _Place.BEHIND_ALIGNED_BARRIER:
                    self._withheld.append((channel, element))
        return None

    def barrier_polled(self, channel: InputChannel) -> None:
        """A barrier was polled in order: elements that waited for it may be announced."""
        waiting = [held for held in self._withheld if held[0] is channel]
        if waiting:
            self._withheld = [held for held in self._withheld if held[0] is not channel]
            self._announcements.extendleft(reversed(waiting))

    def poll(self) -> tuple[InputChannel, Element] | None:
        """The next element of any channel that is not blocked; None when there is none."""
        while self._arrivals:
            channel = self.channels[self._arrivals.popleft()]
            if channel.blocked:
                channel.held += 1
                continue
            return channel, channel.queue.popleft()
        return None

    @property
    def has_arrivals(self) -> bool:
        """Whether a poll might return something; may be true when only blocked channels have data."""
        return bool(self._arrivals)

    @property
    def queued(self) -> int:
        """The elements that wait in all channels. Called by any thread."""
        return sum(len(channel.queue) for channel in self.channels)

    @property
    def usage(self) -> float:
        """The share, 0 to 1, of the buffers granted to senders that is queued here. Called by any thread."""
        granted = sum(channel.credit.window for channel in self.channels)
        return min(1.0, self.queued / granted) if granted else 0.0

    def block(self, index: int) -> None:
        """Blocks a channel that delivered its barrier: nothing after it is processed until the alignment ends."""
        self.channels[index].blocked = True

    def resume(self, index: int) -> None:
        """Ends :meth:`block`. Elements that the channel delivered in the meantime precede newer arrivals."""
        channel = self.channels[index]
        channel.blocked = False
        if channel.held:
            # Polls that found the channel blocked have used up their tokens.
            self._arrivals.extendleft([index] * channel.held)
            channel.held = 0


class _Place(Enum):
    """The place of an announced element in its channel's queue."""

    FREE = "behind no aligned barrier"
    BEHIND_ALIGNED_BARRIER = "behind an aligned barrier"
    POLLED = "not in the queue any more"


def _place_of(channel: InputChannel, announced: Announced) -> _Place:
    place = _Place.FREE
    # A copy, which is atomic: the producer keeps appending.
    for element in tuple(channel.queue):
        if element is announced:
            return place
        if isinstance(element, CheckpointBarrier) and not element.options.unaligned:
            place = _Place.BEHIND_ALIGNED_BARRIER
    return _Place.POLLED
