"""Credit-based flow control, both sides, as plain counters. Pure.

A receiver grants a window of buffers per channel; a sender needs credit for each data buffer, but none for control
elements. Credit is returned when half of the window has been consumed, or at once when the receiver's queue is empty.
"""

from __future__ import annotations


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
