"""The input gate of a subtask: its channels' queues, which channel is next, and blocking for alignment.

Producers (the I/O thread, or a subtask of the same worker) append; one consumer, the subtask, polls. Appending and
popping a deque is atomic, so the hot path takes no lock. Every element puts one token into ``_arrivals``: polling is
O(1) whatever the number of channels. No sockets here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import pyarrow as pa

from ckpt_runtime.network.credit import ReceiverCredit
from ckpt_runtime.network.elements import ControlElement

Element: TypeAlias = "pa.RecordBatch | pa.Buffer | ControlElement | BaseException"


class InputChannel:
    """One channel's receiving end. ``input_index`` is the job edge (gate number) it belongs to."""

    __slots__ = ("_gate", "_give_back", "blocked", "credit", "held", "index", "input_index", "queue", "schema")

    def __init__(self, gate: InputGate, index: int, input_index: int, window: int) -> None:
        self._gate = gate
        self._give_back: Callable[[int], None] | None = None
        self.index = index
        self.input_index = input_index
        self.queue: deque[Element] = deque()
        self.schema: pa.Schema | None = None
        self.credit = ReceiverCredit(window)
        self.blocked = False
        self.held = 0

    def on_credit(self, give_back: Callable[[int], None]) -> None:
        """``give_back(count)`` returns credit to the sender; set before the first buffer arrives."""
        self._give_back = give_back

    def put(self, element: Element) -> None:
        """Called by the producer's thread."""
        self.queue.append(element)
        self._gate.arrived(self.index)

    def buffer_consumed(self) -> None:
        """Called by the subtask after it took a data buffer."""
        owed = self.credit.consumed(not self.queue)
        if owed and self._give_back is not None:
            self._give_back(owed)


class InputGate:
    """All input channels of one subtask."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.channels: list[InputChannel] = []
        self._arrivals: deque[int] = deque()
        self._wake = wake

    def add_channel(self, input_index: int, window: int) -> InputChannel:
        channel = InputChannel(self, len(self.channels), input_index, window)
        self.channels.append(channel)
        return channel

    def arrived(self, index: int) -> None:
        self._arrivals.append(index)
        self._wake()

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

    def block(self, index: int) -> None:
        """The channel delivered its barrier: nothing behind it may be processed until the alignment ends."""
        self.channels[index].blocked = True

    def resume(self, index: int) -> None:
        """Ends :meth:`block`. What the channel delivered meanwhile comes before newer arrivals."""
        channel = self.channels[index]
        channel.blocked = False
        if channel.held:
            self._arrivals.extendleft([index] * channel.held)
            channel.held = 0
