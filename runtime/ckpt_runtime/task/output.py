"""What a subtask writes to: one result partition per outgoing job edge, with its channels.

Rows are split over the channels, gathered into buffers of a good size, and sent when a buffer is full, when the buffer
timeout has passed, or in front of a control element. Nothing here blocks: the subtask asks ``has_room`` before it does
any work that may emit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import pyarrow as pa

from ckpt_runtime.graph.job_graph import Partitioning
from ckpt_runtime.network.elements import ControlElement, Watermark
from ckpt_runtime.network.gate import InputChannel
from ckpt_runtime.state.hashing import hash_columns, split_by_owner
from ckpt_runtime.task.batch_size import BatchSizer


class Subpartition(Protocol):
    """The sending end of one channel."""

    @property
    def has_room(self) -> bool: ...

    @property
    def error(self) -> BaseException | None: ...

    def send_batch(self, batch: pa.RecordBatch) -> None: ...

    def send_control(self, element: ControlElement) -> None: ...


class LocalSubpartition:
    """A channel inside one worker: batches are handed over by reference.

    Two counters, each written by one thread, take the place of a lock.
    """

    error: BaseException | None = None

    def __init__(self, receiver: InputChannel, capacity: int, wake_producer: Callable[[], None]) -> None:
        self._receiver = receiver
        self._capacity = capacity
        self._wake_producer = wake_producer
        self._sent = 0
        self._consumed = 0
        # Credit comes back in halves of the window: of a window beyond the capacity, half may be all there is.
        receiver.credit.window = min(receiver.credit.window, capacity)
        receiver.on_credit(self._give_back)

    @property
    def has_room(self) -> bool:
        return self._sent - self._consumed < self._capacity

    def send_batch(self, batch: pa.RecordBatch) -> None:
        self._sent += 1
        self._receiver.put(batch)

    def send_control(self, element: ControlElement) -> None:
        self._receiver.put(element)

    def _give_back(self, count: int) -> None:
        """Looks at what was sent only after giving back: a producer that filled the channel meanwhile is woken too."""
        self._consumed += count
        if self._sent - self._consumed + count >= self._capacity:
            self._wake_producer()


class _Gathering:
    """Rows on their way into the next buffer of one channel."""

    __slots__ = ("batches", "bytes", "rows")

    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []
        self.rows = 0
        self.bytes = 0

    def take(self) -> pa.RecordBatch:
        batches, self.batches, self.rows, self.bytes = self.batches, [], 0, 0
        return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


class ResultPartition:
    """All channels of one job edge, on the producing side.

    ``buffer_rows`` and ``buffer_bytes`` bound a buffer; one row larger than that gets a buffer of its own.
    ``buffer_timeout_ms`` bounds how long rows are gathered; 0 sends each batch at once. ``rows`` counts each row taken
    once, ``bytes`` what goes to each channel.
    """

    def __init__(
        self,
        partitioning: Partitioning,
        keys: Sequence[str],
        max_parallelism: int,
        subpartitions: Sequence[Subpartition],
        *,
        buffer_rows: int,
        buffer_bytes: int,
        buffer_timeout_ms: int,
        now_ms: Callable[[], float],
    ) -> None:
        self._keys = tuple(keys)
        self._max_parallelism = max_parallelism
        self._subpartitions = list(subpartitions)
        self._gathering = [_Gathering() for _ in subpartitions]
        self._buffer_rows = buffer_rows
        self._buffer_bytes = buffer_bytes
        self._buffer_timeout_ms = buffer_timeout_ms
        self._now_ms = now_ms
        self._sizer = BatchSizer()
        self._flush_at: float | None = None
        self._watermark: int | None = None
        self._next = 0
        self.rows = 0
        self.bytes = 0
        self._route: Callable[[pa.RecordBatch], None] = {
            Partitioning.FORWARD: self._forward,
            Partitioning.HASH: self._hash,
            Partitioning.REBALANCE: self._rebalance,
            Partitioning.BROADCAST: self._broadcast,
        }[partitioning]
        if len(self._subpartitions) == 1:
            self._route = self._forward

    @property
    def has_room(self) -> bool:
        """Whether every channel can take another buffer."""
        return all(subpartition.has_room for subpartition in self._subpartitions)

    @property
    def flush_at(self) -> float | None:
        """When :meth:`flush` is due (clock of ``now_ms``); None when nothing is held back."""
        return self._flush_at

    def check(self) -> None:
        """Raises the ConnectionError of a channel that is lost."""
        for subpartition in self._subpartitions:
            if subpartition.error is not None:
                raise subpartition.error

    def emit(self, batch: pa.RecordBatch) -> None:
        """Takes a batch of at least one row."""
        self.rows += batch.num_rows
        self._route(batch)

    def emit_watermark(self, timestamp_ms: int) -> None:
        """Watermarks may wait for the buffers in front of them; only the latest one counts."""
        self._watermark = timestamp_ms
        self._hold()

    def send_control(self, element: ControlElement) -> None:
        """Sends a control element to every channel, behind all rows emitted so far."""
        self.flush()
        for subpartition in self._subpartitions:
            subpartition.send_control(element)

    def flush(self) -> None:
        """Sends what is held back."""
        self._flush_at = None
        for index, gathering in enumerate(self._gathering):
            if gathering.rows:
                self._subpartitions[index].send_batch(gathering.take())
        if self._watermark is not None:
            watermark, self._watermark = Watermark(self._watermark), None
            for subpartition in self._subpartitions:
                subpartition.send_control(watermark)

    def _forward(self, batch: pa.RecordBatch) -> None:
        self._add(0, batch)

    def _hash(self, batch: pa.RecordBatch) -> None:
        hashes = hash_columns(batch, self._keys)
        parts = split_by_owner(batch, hashes, self._max_parallelism, len(self._subpartitions))
        for index, part in enumerate(parts):
            if part.num_rows:
                self._add(index, part)

    def _broadcast(self, batch: pa.RecordBatch) -> None:
        for index in range(len(self._subpartitions)):
            self._add(index, batch)

    def _rebalance(self, batch: pa.RecordBatch) -> None:
        """Slices large batches evenly; rotates small ones whole, since tiny buffers cost as much as full ones."""
        channels = len(self._subpartitions)
        if batch.num_rows < self._buffer_rows:
            self._add(self._next, batch)
            self._next = (self._next + 1) % channels
            return
        rows = -(-batch.num_rows // channels)
        for start in range(0, batch.num_rows, rows):
            self._add(self._next, batch.slice(start, rows))
            self._next = (self._next + 1) % channels

    def _add(self, index: int, batch: pa.RecordBatch) -> None:
        size = self._sizer.of(batch)
        if batch.num_rows > 1 and (batch.num_rows > self._buffer_rows * 2 or size > self._buffer_bytes * 2):
            half = batch.num_rows // 2
            self._add(index, batch.slice(0, half))
            self._add(index, batch.slice(half))
            return
        self.bytes += size
        gathering = self._gathering[index]
        gathering.batches.append(batch)
        gathering.rows += batch.num_rows
        gathering.bytes += size
        if (
            gathering.rows * 2 >= self._buffer_rows
            or gathering.bytes * 2 >= self._buffer_bytes
            or not self._buffer_timeout_ms
        ):
            self._subpartitions[index].send_batch(gathering.take())
        else:
            self._hold()

    def _hold(self) -> None:
        if self._flush_at is None:
            self._flush_at = self._now_ms() + self._buffer_timeout_ms
