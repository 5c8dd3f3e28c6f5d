"""Elements queued for one channel and not yet handed to the connection; barriers may overtake them (FLIP-76). Pure.

The sending subtask appends elements; the thread that holds the connection's send lock takes them. Both are atomic on a
deque, so they need no common lock; :meth:`OutputQueue.add_barrier` and :meth:`OutputQueue.switch_to_unaligned` move
elements and must not run while another thread takes elements.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa

from ckpt_runtime.network.elements import CancelCheckpoint, CheckpointBarrier, ControlElement, SenderCredit, Watermark


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class EncodedRows:
    """Rows as an IPC message, and their schema, which the message does not contain."""

    schema: pa.Schema
    message: pa.Buffer


InFlightData: TypeAlias = "pa.RecordBatch | EncodedRows | Watermark"
"""In-flight data that barriers overtake and checkpoints store: rows, encoded or not, and watermarks."""

QueuedElement: TypeAlias = "EncodedRows | ControlElement"


class OutputQueue:
    """The sender should pause when ``capacity`` row buffers are queued; control elements always fit."""

    __slots__ = ("_added", "_capacity", "_queue", "taken")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._queue: deque[QueuedElement] = deque()
        # Two counters, each written by one thread, so that their difference needs no lock.
        self._added = 0
        self.taken = 0
        """Row buffers taken so far."""

    @property
    def has_room(self) -> bool:
        return self._added - self.taken < self._capacity

    @property
    def is_empty(self) -> bool:
        return not self._queue

    def add_rows(self, rows: EncodedRows) -> None:
        self._added += 1
        self._queue.append(rows)

    def add_control(self, element: ControlElement) -> None:
        """Appends a control element at the end of the queue."""
        self._queue.append(element)

    def add_barrier(self, barrier: CheckpointBarrier, limit: int | None = None) -> list[InFlightData]:
        """Puts the barrier in front of the queued elements and returns those that it overtakes, in order.

        It stays after every other barrier and cancellation. With a ``limit`` it overtakes at most that many bytes of
        rows, counted from the end of the queue.
        """
        queued = list(self._queue)
        return self._place(queued, barrier, len(queued), limit)

    def switch_to_unaligned(self, checkpoint_id: int, limit: int | None = None) -> list[InFlightData]:
        """Moves a queued barrier to where :meth:`add_barrier` would have put it; does nothing if it has been sent."""
        queued = list(self._queue)
        for position, element in enumerate(queued):
            if isinstance(element, CheckpointBarrier) and element.checkpoint_id == checkpoint_id:
                del queued[position]
                return self._place(queued, element, position, limit)
        return []

    def holds_barrier(self, checkpoint_id: int) -> bool:
        """Whether the barrier is still queued."""
        return any(
            isinstance(element, CheckpointBarrier) and element.checkpoint_id == checkpoint_id
            for element in tuple(self._queue)
        )

    def take(self, credit: SenderCredit) -> Iterator[QueuedElement]:
        """Takes the elements that may be sent now, in order; spends ``credit`` for rows."""
        while self._queue:
            # Control elements need no credit but keep their place: a barrier after rows waits for them.
            if isinstance(self._queue[0], EncodedRows):
                if credit.available == 0:
                    return
                credit.spend()
                self.taken += 1
            yield self._queue.popleft()

    def was_full(self, taken: int) -> bool:
        """Whether the queue had no room before the last ``taken`` buffers were taken."""
        return taken > 0 and self._added - self.taken + taken >= self._capacity

    def _place(
        self, queued: list[QueuedElement], barrier: CheckpointBarrier, end: int, limit: int | None
    ) -> list[InFlightData]:
        """Inserts the barrier, whose place in order is ``end``, as far to the front as possible."""
        place = end
        size = 0
        while place > 0:
            element = queued[place - 1]
            # Receivers align checkpoints in the order of their ids, so barriers and cancellations keep their order.
            if isinstance(element, CheckpointBarrier | CancelCheckpoint):
                break
            if isinstance(element, EncodedRows) and limit is not None:
                size += element.message.size
                if size > limit:
                    break
            place -= 1
        overtaken: list[InFlightData] = [
            element for element in queued[place:end] if isinstance(element, EncodedRows | Watermark)
        ]
        queued.insert(place, barrier)
        # Replaced in one step: the producer's thread checks the deque for room and barriers without a lock.
        self._queue = deque(queued)
        return overtaken
