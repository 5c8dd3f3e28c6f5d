"""The outputs of a subtask: one result partition per outgoing job edge, with its channels.

Rows are split over the channels, gathered into buffers of good size, and sent when a buffer is full, when the buffer
timeout has passed, or before a control element. A partly filled buffer is sent earlier if its receiver has processed
all buffers that were sent to it. A thread of built-in operators sends it only when it has nothing else to do: so
buffers fill up while the receiver or the sender is busy, and rows do not wait at low rates.
No function here blocks: the subtask checks ``has_room`` before it does any work that may emit.

The current buffer of a subtask is processed in slices, so that no barrier waits for a whole buffer of slow rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import pyarrow as pa

from ckpt_runtime.expressions.dictionaries import BatchDecoder
from ckpt_runtime.graph.job_graph import Partitioning
from ckpt_runtime.network.elements import CheckpointBarrier, ControlElement, EndOfRange, Watermark
from ckpt_runtime.network.gate import InputChannel
from ckpt_runtime.network.output_queue import InFlightData
from ckpt_runtime.operators.groups import Combiner
from ckpt_runtime.operators.operator import IDLE_WATERMARK, MAX_WATERMARK
from ckpt_runtime.operators.slice_size import SliceSize
from ckpt_runtime.state.hashing import hash_columns, split_by_owner
from ckpt_runtime.task.in_flight import CapturedChannel


class BatchSizer:
    """Computes the sizes of batches whose schema rarely changes; validity bitmaps of fixed-width columns are left out.

    Arrow adds up buffers and releases the interpreter lock for it, which is too expensive for small batches.
    """

    __slots__ = ("_row_bits", "_schema")

    def __init__(self) -> None:
        self._schema: pa.Schema | None = None
        self._row_bits = 0

    def of(self, batch: pa.RecordBatch) -> int:
        """Bytes of the rows of ``batch``; a slice counts its own rows only."""
        schema = batch.schema
        if self._schema is None or not schema.equals(self._schema):
            self._schema, self._row_bits = schema, _row_bits(schema)
        if self._row_bits == 0:
            return int(batch.nbytes)
        return int(batch.num_rows) * self._row_bits // 8


def _row_bits(schema: pa.Schema) -> int:
    """Bits per row; 0 when rows have no fixed width."""
    widths = [int(field.type.bit_width) if pa.types.is_primitive(field.type) else 0 for field in schema]
    return sum(widths) if all(widths) else 0


class Subpartition(Protocol):
    """The sending end of one channel."""

    @property
    def has_room(self) -> bool: ...

    @property
    def is_empty(self) -> bool:
        """Whether no element waits on the sending side."""

    @property
    def is_drained(self) -> bool:
        """Whether the receiver has processed all buffers that were sent."""

    held: bool
    """Set while gathered rows wait for the channel to be drained; the producer is then woken when it is."""

    @property
    def error(self) -> BaseException | None: ...

    def send_batch(self, batch: pa.RecordBatch) -> None: ...

    def send_control(self, element: ControlElement) -> None: ...

    def overtake(self, barrier: CheckpointBarrier, limit: int | None) -> list[InFlightData]:
        """Sends a barrier ahead of the waiting elements, up to ``limit`` bytes, and returns the overtaken ones."""

    def switch_to_unaligned(self, checkpoint_id: int, limit: int | None) -> list[InFlightData]:
        """Like :meth:`overtake`, for a barrier that was sent in order and is still queued; otherwise does nothing."""

    def holds_barrier(self, checkpoint_id: int) -> bool: ...


class LocalSubpartition:
    """A channel inside one worker: batches are handed over by reference.

    Elements wait only in the receiver's queue, where an announcement lets a barrier overtake. Two counters, each
    written by one thread, replace a lock.
    """

    error: BaseException | None = None
    held = False
    is_empty = True

    def __init__(self, receiver: InputChannel, capacity: int, wake_producer: Callable[[], None]) -> None:
        self.buffer_size = receiver.buffer_size
        self._receiver = receiver
        self._capacity = capacity
        self._wake_producer = wake_producer
        self._sent = 0
        self._consumed = 0
        # Credit is returned once half of the window is consumed: with a window larger than the capacity, this could
        # take the whole capacity.
        receiver.credit.window = min(receiver.credit.window, capacity)
        receiver.on_credit(self._return_credit)

    @property
    def has_room(self) -> bool:
        return self._sent - self._consumed < self._capacity

    @property
    def is_drained(self) -> bool:
        return self._sent == self._consumed

    def send_batch(self, batch: pa.RecordBatch) -> None:
        self._sent += 1
        self._receiver.put(batch)

    def send_control(self, element: ControlElement) -> None:
        self._receiver.put(element)

    def overtake(self, barrier: CheckpointBarrier, limit: int | None) -> list[InFlightData]:
        self._receiver.put(barrier)
        return []

    def switch_to_unaligned(self, checkpoint_id: int, limit: int | None) -> list[InFlightData]:
        return []

    def holds_barrier(self, checkpoint_id: int) -> bool:
        return False

    def _return_credit(self, count: int) -> None:
        """Returns credit first and reads the sent count afterwards, so that a producer that fills the channel in
        between is woken."""
        self._consumed += count
        if self._sent - self._consumed + count >= self._capacity or (self.held and self.is_drained):
            self._wake_producer()


class _Gathering:
    """The rows that are gathered for the next buffer of one channel."""

    __slots__ = ("_decoder", "batches", "bytes", "rows")

    def __init__(self) -> None:
        self._decoder = BatchDecoder()
        self.batches: list[pa.RecordBatch] = []
        self.rows = 0
        self.bytes = 0

    def take(self) -> pa.RecordBatch:
        batches, self.batches, self.rows, self.bytes = self.batches, [], 0, 0
        if len(batches) == 1:
            return batches[0]
        # Decoded, because dictionaries may differ.
        return pa.concat_batches([self._decoder.decoded(batch) for batch in batches])


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """The limits of a buffer; a row larger than ``bytes`` gets its own buffer.

    ``timeout_ms`` is how long rows are gathered at most; with 0 each batch is sent at once.
    """

    rows: int
    bytes: int
    timeout_ms: int


_BY_REFERENCE = 16
"""How many times larger than a buffer a batch may be that is handed over by reference."""
EARLY_PAUSE_MS = 1.0
"""Minimum time between buffers of a partition that are sent less than half full; with more than four channels it grows
in proportion. It bounds the cost of small buffers for a producer that is slower than its receivers."""


class ResultPartition:
    """All channels of one job edge, on the producing side.

    ``rows`` counts each row taken once, ``bytes`` the bytes for every channel. ``peers`` are the consumers'
    subtask indexes, by default 0, 1 and so on. Without ``overtakes`` barriers stay in order, and each row is
    a piece of work: a rebalanced batch is distributed row by row.

    A ``combiner`` aggregates each batch first, if that pays: rows of two schemas then follow each other, in buffers of
    their own. With ``keeps_dictionaries``, dictionary columns are not decoded, for a consumer in the same worker that
    accepts them. On the channels ``by_reference``, batches reach the consumer uncut unless they are very large: cutting
    would save no memory, and cost the consumer a call for each part and a copy of each part that it keeps. With
    ``cut_by_ranges``, the rows of two ranges, with a watermark between them, are sent in separate buffers.
    """

    def __init__(
        self,
        partitioning: Partitioning,
        keys: Sequence[str],
        max_parallelism: int,
        subpartitions: Sequence[Subpartition],
        *,
        limits: BufferLimits,
        now_ms: Callable[[], float],
        peers: Sequence[int] | None = None,
        overtakes: bool = True,
    ) -> None:
        self._keys = tuple(keys)
        self._max_parallelism = max_parallelism
        self._subpartitions = list(subpartitions)
        self._peers = list(range(len(self._subpartitions)) if peers is None else peers)
        self._overtakes = overtakes
        self.combiner: Combiner | None = None
        self.keeps_dictionaries = False
        self.by_reference: frozenset[int] = frozenset()
        self.cut_by_ranges = True
        self._is_forward = partitioning is Partitioning.FORWARD
        self._splits = partitioning is Partitioning.HASH and len(self._subpartitions) > 1
        self._decoder = BatchDecoder()
        self._gathering = [_Gathering() for _ in subpartitions]
        self._limits = limits
        self._channel_limits = [limits] * len(self._subpartitions)
        self._now_ms = now_ms
        self._sizer = BatchSizer()
        self._flush_at: float | None = None
        self._early_pause_ms = EARLY_PAUSE_MS * max(1, len(self._subpartitions) / 4)
        self._early_at = 0.0
        self._watermark: int | None = None
        self._next = 0
        self.rows = 0
        self.bytes = 0
        self._route: Callable[[pa.RecordBatch], None] = {
            Partitioning.FORWARD: self._forward,
            Partitioning.HASH: self._hash,
            Partitioning.REBALANCE: self._rebalance if overtakes else self._deal,
            Partitioning.BROADCAST: self._broadcast,
        }[partitioning]
        # With one channel nothing is split, and no row needs a hash.
        if len(self._subpartitions) == 1:
            self._route = self._forward

    @property
    def takes_dictionaries(self) -> bool:
        """Whether batches may have columns that are dictionaries; a buffer for another worker has none.

        Rows are split over the channels before they are decoded, because positions in a dictionary are smaller than
        values.
        """
        return self.keeps_dictionaries or self._splits or self.combiner is not None

    @property
    def has_room(self) -> bool:
        """Whether every channel can take another buffer."""
        for subpartition in self._subpartitions:  # noqa: SIM110
            if not subpartition.has_room:
                return False
        return True

    def full_channels(self) -> list[bool]:
        """Whether each channel can take no more buffers. Called by any thread."""
        return [not subpartition.has_room for subpartition in self._subpartitions]

    @property
    def flush_at(self) -> float | None:
        """The time (clock of ``now_ms``) when :meth:`flush_due` has something to send; None if nothing is gathered."""
        if self._flush_at is not None and self._early_at < self._flush_at and self._leaves_early():
            return self._early_at
        return self._flush_at

    def _leaves_early(self) -> bool:
        """Whether rows wait for a drained channel, or a watermark waits and all channels are drained."""
        waits_alone = self._watermark is not None
        for gathering, subpartition in zip(self._gathering, self._subpartitions, strict=True):
            if subpartition.is_drained:
                if gathering.rows:
                    return True
            else:
                waits_alone = False
        return waits_alone

    def limit_bytes(self, index: int, size: int) -> None:
        """Sets the buffer size that the consumer of that channel requests (FLIP-183). Called by any thread.

        Applies from the next rows on, not to queued buffers; no limit exceeds the initial one.
        """
        # One assignment: the subtask's thread sees either the old or the new limit.
        self._channel_limits[index] = replace(self._limits, bytes=min(size, self._limits.bytes))

    @property
    def error(self) -> BaseException | None:
        """The ConnectionError of a lost channel; None while none is lost."""
        for subpartition in self._subpartitions:
            error = subpartition.error
            if error is not None:
                return error
        return None

    def emit(self, batch: pa.RecordBatch) -> None:
        """Takes a batch of at least one row."""
        self.rows += batch.num_rows
        self._route(batch if self.combiner is None else self.combiner.combined(batch))

    def emit_watermark(self, timestamp_ms: int) -> None:
        """Emits a watermark, which may wait for the buffers before it; only the latest one counts.

        The watermark of the end of data replaces none: timers may be due at the previous one, and not at the end. The
        watermark of an idle source replaces none either, because it has no event time.
        """
        if timestamp_ms in (MAX_WATERMARK, IDLE_WATERMARK):
            self.send_control(Watermark(timestamp_ms))
            return
        self._watermark = timestamp_ms
        for subpartition in self._subpartitions:
            subpartition.held = True
        self._hold()

    def emit_end_of_range(self, batch: int = 0, upto: int = 0) -> None:
        """Sends the end of a range at once, between the rows that it separates; on forward edges only.

        Rows and the watermark before it leave on other edges, too: the next range is no part of their buffer, and its
        rows follow the watermark, unless that makes no difference to any consumer.
        """
        if self._is_forward:
            self.send_control(EndOfRange(batch, upto))
        elif self.cut_by_ranges:
            self.flush()

    def send_control(self, element: ControlElement) -> None:
        """Sends a control element to every channel, after all rows emitted so far."""
        self.flush()
        for subpartition in self._subpartitions:
            subpartition.send_control(element)

    def overtake(self, barrier: CheckpointBarrier, limit: int | None) -> list[CapturedChannel]:
        """Sends a barrier ahead of all data that waits on this side and returns the overtaken data by channel. With a
        ``limit`` in bytes the barrier overtakes at most that much on all channels together, and waits for the rest.
        """
        if not self._overtakes:
            self.send_control(barrier)
            return []
        self.flush()
        return self._capture(lambda subpartition, share: subpartition.overtake(barrier, share), limit)

    def switch_to_unaligned(self, checkpoint_id: int, limit: int | None) -> list[CapturedChannel]:
        """Like :meth:`overtake`, for a barrier that was sent in order; channels that it has left contribute nothing."""
        if not self._overtakes:
            return []
        return self._capture(lambda subpartition, share: subpartition.switch_to_unaligned(checkpoint_id, share), limit)

    def holds_barrier(self, checkpoint_id: int) -> bool:
        """Whether a barrier that may overtake still waits on this side."""
        return self._overtakes and any(
            subpartition.holds_barrier(checkpoint_id) for subpartition in self._subpartitions
        )

    @property
    def is_empty(self) -> bool:
        """Whether no element waits on this side."""
        return self._flush_at is None and all(subpartition.is_empty for subpartition in self._subpartitions)

    def _capture(
        self, capture: Callable[[Subpartition, int | None], list[InFlightData]], limit: int | None
    ) -> list[CapturedChannel]:
        captured = []
        for position, subpartition in enumerate(self._subpartitions):
            # The unused share of a channel goes to the channels after it.
            share = None if limit is None else limit // (len(self._subpartitions) - position)
            elements = capture(subpartition, share)
            if elements:
                found = CapturedChannel(self._peers[position], list(elements))
                captured.append(found)
                if limit is not None:
                    limit -= found.bytes
        return captured

    def flush_due(self, now_ms: float, *, early: bool = True) -> bool:
        """Sends gathered rows and the watermark if the timeout has passed, otherwise only rows for drained channels.

        If not ``early``, these wait, too: the thread has other work, which may add rows. Returns whether it has sent
        anything.
        """
        if self._flush_at is None:
            return False
        if self._flush_at <= now_ms:
            self.flush()
            return True
        if not early or now_ms < self._early_at or not self._leaves_early():
            return False
        self._early_at = now_ms + self._early_pause_ms
        drained = [at for at, subpartition in enumerate(self._subpartitions) if subpartition.is_drained]
        if len(drained) == len(self._subpartitions):
            self.flush()
        else:
            # A watermark stays: it has to reach every receiver after the rows before it.
            for at in drained:
                self._send(at)
        return True

    def flush(self) -> None:
        """Sends all gathered rows and the waiting watermark."""
        self._flush_at = None
        for index in range(len(self._gathering)):
            self._send(index)
        if self._watermark is not None:
            watermark, self._watermark = Watermark(self._watermark), None
            for subpartition in self._subpartitions:
                subpartition.held = False
                subpartition.send_control(watermark)

    def _send(self, index: int) -> None:
        """Sends the rows that are gathered for a channel, if there are any."""
        subpartition = self._subpartitions[index]
        subpartition.held = self._watermark is not None
        if self._gathering[index].rows:
            subpartition.send_batch(self._gathering[index].take())

    def _forward(self, batch: pa.RecordBatch) -> None:
        self._add(0, batch)

    def _hash(self, batch: pa.RecordBatch) -> None:
        hashes = hash_columns(batch, self._keys)
        parts = split_by_owner(batch, hashes, self._max_parallelism, len(self._subpartitions))
        for index, part in enumerate(parts):
            if part.num_rows:
                self._add(index, self._decoder.decoded(part))

    def _broadcast(self, batch: pa.RecordBatch) -> None:
        for index in range(len(self._subpartitions)):
            self._add(index, batch)

    def _rebalance(self, batch: pa.RecordBatch) -> None:
        """Slices large batches evenly; rotates small ones whole, since tiny buffers cost as much as full ones."""
        channels = len(self._subpartitions)
        if batch.num_rows < self._limits.rows:
            self._add(self._next, batch)
            self._next = (self._next + 1) % channels
            return
        rows = -(-batch.num_rows // channels)
        for start in range(0, batch.num_rows, rows):
            self._add(self._next, batch.slice(start, rows))
            self._next = (self._next + 1) % channels

    def _deal(self, batch: pa.RecordBatch) -> None:
        """Distributes rows round-robin; those of one channel go into one buffer."""
        channels = len(self._subpartitions)
        for first in range(min(channels, batch.num_rows)):
            own = pa.array(range(first, batch.num_rows, channels), pa.int64())
            self._add((self._next + first) % channels, batch.take(own))
        self._next = (self._next + batch.num_rows) % channels

    def _add(self, index: int, batch: pa.RecordBatch) -> None:
        limits = self._channel_limits[index]
        size = self._sizer.of(batch)
        most_bytes = limits.bytes * 2
        wants_smaller = limits.bytes != self._limits.bytes
        if index in self.by_reference and not wants_smaller:
            most_bytes *= _BY_REFERENCE
        if batch.num_rows > 1 and (batch.num_rows > limits.rows * 2 or size > most_bytes):
            half = batch.num_rows // 2
            self._add(index, batch.slice(0, half))
            self._add(index, batch.slice(half))
            return
        self.bytes += size
        gathering = self._gathering[index]
        if gathering.rows and not gathering.batches[0].schema.equals(batch.schema):
            self._send(index)
        gathering.batches.append(batch)
        gathering.rows += batch.num_rows
        gathering.bytes += size
        # Sent from half full on, since the next batch may be as large: no rows are copied to fill a buffer completely.
        if gathering.rows * 2 >= limits.rows or gathering.bytes * 2 >= limits.bytes or not limits.timeout_ms:
            self._send(index)
        else:
            self._subpartitions[index].held = True
            self._hold()

    def _hold(self) -> None:
        if self._flush_at is None:
            self._flush_at = self._now_ms() + self._limits.timeout_ms


class CurrentBuffer:
    """Holds the buffer in work, at most one. ``now_ms`` is a monotonic clock.

    Slices end anywhere, or only at the row numbers of the buffer. The rest of the buffer is in-flight data
    of ``channel`` (FLIP-76), which is None for rows restored from a checkpoint.
    """

    __slots__ = ("_batch", "_ends", "_now_ms", "_offset", "_size", "channel", "input_index")

    def __init__(self, now_ms: Callable[[], float]) -> None:
        self._now_ms = now_ms
        self._batch: pa.RecordBatch | None = None
        self._offset = 0
        self._ends: Sequence[int] | None = None
        self._size = SliceSize()
        self.input_index = 0
        self.channel: InputChannel | None = None

    @property
    def is_empty(self) -> bool:
        return self._batch is None

    @property
    def rest(self) -> pa.RecordBatch | None:
        """The rows that have not been processed yet."""
        return None if self._batch is None else self._batch.slice(self._offset)

    def put(
        self, batch: pa.RecordBatch, input_index: int, channel: InputChannel | None, ends: Sequence[int] | None = None
    ) -> None:
        """Takes a buffer; only called when there is none."""
        self._batch, self._offset, self._ends = batch, 0, ends
        self.input_index, self.channel = input_index, channel

    def process(self, process: Callable[[pa.RecordBatch, int], None], *, whole: bool = False) -> bool:
        """Processes the next slice, or all remaining rows; returns whether it was the last one."""
        batch = self._batch
        assert batch is not None
        left = batch.num_rows - self._offset
        rows = left if whole else min(left, self._size.rows)
        if self._ends is not None and rows < left:
            rows = self._ends[bisect_left(self._ends, self._offset + rows)] - self._offset
        # Passes the batch itself and no slice of it: operators recognise it by identity, and making a slice costs as
        # much as processing a small batch.
        if rows == batch.num_rows:
            part = batch
        else:
            part = batch.slice(self._offset, rows)
        start = self._now_ms()
        process(part, self.input_index)
        self._size.took(rows, self._now_ms() - start)
        if rows == left:
            self._batch = self.channel = None
            return True
        self._offset += rows
        return False
