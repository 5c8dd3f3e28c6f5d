"""The sending end of a channel to another worker: its queue, its credit, and the waking of its producer.

It has no socket and no thread: the connection that it is attached to (``data_connection``) calls it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import pyarrow as pa

from ckpt_runtime.network.elements import (
    CheckpointBarrier,
    ControlElement,
    DesiredBufferSize,
    EndOfData,
    SenderCredit,
    encode_element,
)
from ckpt_runtime.network.framing import FrameKind, encode_header
from ckpt_runtime.network.output_queue import EncodedRows, InFlightData, OutputQueue


class Carrier(Protocol):
    """The services that a subpartition needs from its connection: a way to announce queued elements, and the error that
    ended it.
    """

    @property
    def error(self) -> BaseException | None: ...

    def ready(self, subpartition: RemoteSubpartition) -> None: ...


class RemoteSubpartition:
    """The sending end of a channel whose consumer lives in another worker.

    The subtask's thread queues elements; the thread that holds the connection's send lock moves them on as credit
    allows. The producer is woken when there is room again, when a barrier that could still turn unaligned has left the
    queue, and when the queue is empty after the end of data, which an ending subtask waits for.
    """

    def __init__(self, channel: int, capacity: int, wake_producer: Callable[[], None]) -> None:
        self.channel = channel
        self.buffer_size = DesiredBufferSize()
        self.held = False
        self._wake_producer = wake_producer
        self._queue = OutputQueue(capacity)
        self._moving = threading.Lock()
        self._credit = SenderCredit()
        self._queued_schema: pa.Schema | None = None
        self._sent_schema: pa.Schema | None = None
        self._opened = False
        self._ends = False
        self._connection: Carrier | None = None

    @property
    def has_room(self) -> bool:
        return self._queue.has_room

    @property
    def is_empty(self) -> bool:
        """Whether everything has been handed to the connection."""
        return self._queue.is_empty

    @property
    def is_drained(self) -> bool:
        """Whether the receiver has processed all buffers that were sent: it has returned all of its credit."""
        return self._queue.is_empty and self._credit.is_complete

    @property
    def error(self) -> BaseException | None:
        """The error because of which nothing can be sent; None while there is none."""
        return None if self._connection is None else self._connection.error

    def attach(self, connection: Carrier) -> None:
        self._connection = connection

    def send_batch(self, batch: pa.RecordBatch) -> None:
        """Queues a batch in the subtask's thread, which serialises it instead of the I/O thread."""
        if self._queued_schema is None or not self._queued_schema.equals(batch.schema):
            self._queued_schema = batch.schema
        self._queue.add_rows(EncodedRows(self._queued_schema, batch.serialize()))
        self._notify()

    def send_control(self, element: ControlElement) -> None:
        self._ends = self._ends or isinstance(element, EndOfData)
        self._queue.add_control(element)
        self._notify()

    def overtake(self, barrier: CheckpointBarrier, limit: int | None) -> list[InFlightData]:
        """Sends the barrier before the queued data; see :meth:`OutputQueue.add_barrier`."""
        # Locked, so that no other thread takes elements: the copy made here would put them back into the queue.
        with self._moving:
            overtaken = self._queue.add_barrier(barrier, limit)
        # Outside the lock, because this call may send at once, which takes the lock.
        self._notify()
        return overtaken

    def switch_to_unaligned(self, checkpoint_id: int, limit: int | None) -> list[InFlightData]:
        """Moves a barrier that is still queued to the front; see :meth:`OutputQueue.switch_to_unaligned`."""
        with self._moving:
            overtaken = self._queue.switch_to_unaligned(checkpoint_id, limit)
        self._notify()
        return overtaken

    def holds_barrier(self, checkpoint_id: int) -> bool:
        return self._queue.holds_barrier(checkpoint_id)

    def _notify(self) -> None:
        assert self._connection is not None
        self._connection.ready(self)

    def grant(self, count: int) -> None:
        """Adds credit (I/O thread). The first grant also means that the receiver exists: nothing is sent before it."""
        self._opened = True
        self._credit.grant(count)
        if self.held and self.is_drained:
            self._wake_producer()

    def drain_into(self, out: deque[bytes | memoryview | pa.Buffer]) -> None:
        """Moves as many elements to ``out`` as credit allows."""
        if not self._opened:
            return
        turnable = emptied = False
        with self._moving:
            before = self._queue.taken
            for element in self._queue.take(self._credit):
                if isinstance(element, EncodedRows):
                    self._append_rows(element, out)
                else:
                    body = encode_element(element)
                    out.append(encode_header(self.channel, len(body), FrameKind.CONTROL))
                    out.append(body)
                    turnable = turnable or (isinstance(element, CheckpointBarrier) and element.options.unaligned)
                emptied = self._ends and self._queue.is_empty
        # Checked after the loop: a producer that has filled the channel in the meantime has to be woken as well.
        if turnable or emptied or self._queue.was_full(self._queue.taken - before):
            self._wake_producer()

    def _append_rows(self, rows: EncodedRows, out: deque[bytes | memoryview | pa.Buffer]) -> None:
        """The schema is sent when it changes: the choice is made here, since barriers may have moved queued rows."""
        if rows.schema is not self._sent_schema:
            self._sent_schema = rows.schema
            schema = rows.schema.serialize()
            out.append(encode_header(self.channel, schema.size, FrameKind.SCHEMA))
            out.append(schema)
        out.append(encode_header(self.channel, rows.message.size, FrameKind.DATA))
        out.append(rows.message)

    def failed(self) -> None:
        """The connection is lost: wakes the producer, which reads :attr:`error`."""
        self._wake_producer()
