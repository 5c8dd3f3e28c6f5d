"""In-flight data that a checkpoint stores (FLIP-76): the elements that a barrier overtook, by channel."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import pyarrow as pa

from ckpt_runtime.network.output_queue import EncodedRows, InFlightData
from ckpt_runtime.storage.channel_state import PersistedElement

CapturedElement: TypeAlias = "InFlightData | PersistedElement"
"""Live data, or a run of elements that is already stored in a channel state file."""


def size_of(element: CapturedElement) -> int:
    """The stored size of the rows in bytes, for rows from this worker and from others; 0 for a watermark."""
    match element:
        case EncodedRows(_, message):
            return int(message.size)
        case pa.RecordBatch():
            return int(pa.ipc.get_record_batch_size(element))
        case PersistedElement():
            return element.length
    return 0


@dataclass(slots=True)
class CapturedChannel:
    """In-flight data of one channel, in order; ``edge`` and ``peer`` as in :class:`ChannelStateStream`.

    ``schema`` is the schema of rows that are already stored. Other rows carry their own schema, which may change within
    a channel.
    """

    peer: int
    elements: list[CapturedElement] = field(default_factory=list)
    edge: int = 0
    schema: pa.Schema | None = None

    @property
    def bytes(self) -> int:
        return sum(size_of(element) for element in self.elements)


_Rows: TypeAlias = "pa.RecordBatch | EncodedRows"
_Place: TypeAlias = "tuple[weakref.ref[_Rows], PersistedElement]"


@dataclass(frozen=True, slots=True)
class InFlight:
    """All in-flight data of one subtask. Several captures of one channel are in the order of the channel."""

    inputs: tuple[CapturedChannel, ...] = ()
    outputs: tuple[CapturedChannel, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not any(channel.elements for channel in (*self.inputs, *self.outputs))


class PersistedBuffers:
    """Places of still queued buffers in files of earlier checkpoints, so that they are not written again.

    Only files of completed checkpoints may be referred to: files of aborted ones are deleted, and so are files that a
    newer completed checkpoint does not refer to. Buffers are referenced weakly. Threads that write snapshots call
    :meth:`written` and :meth:`place_of`; the subtask's thread calls the other methods.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[int, _Place] = {}
        self._written: dict[int, list[_Place]] = {}
        self._begun: set[int] = set()

    def begun(self, checkpoint_id: int) -> None:
        """Notes a snapshot that may contain buffers; their places are unknown until it is written."""
        with self._lock:
            self._begun.add(checkpoint_id)

    def written(self, checkpoint_id: int, places: Iterable[tuple[_Rows, PersistedElement]]) -> None:
        """Notes the places of the buffers of a checkpoint that is not complete yet."""
        with self._lock:
            self._begun.discard(checkpoint_id)
            self._written[checkpoint_id] = [(weakref.ref(buffer), place) for buffer, place in places]

    def completed(self, checkpoint_id: int) -> None:
        with self._lock:
            for reference, place in self._written.pop(checkpoint_id, ()):
                self._remember(reference, place)
            # Older checkpoints are subsumed: their files are deleted, and nothing may refer to them.
            self._written = {known: places for known, places in self._written.items() if known > checkpoint_id}
            self._begun = {known for known in self._begun if known > checkpoint_id}

    def aborted(self, checkpoint_id: int) -> None:
        with self._lock:
            self._written.pop(checkpoint_id, None)
            self._begun.discard(checkpoint_id)

    def place_of(self, buffer: _Rows, checkpoint_id: int) -> PersistedElement | None:
        """The buffer's frame in a file that the checkpoint may refer to; None when it has to be written.

        The file is not used while an older checkpoint is pending that stores the buffer elsewhere: when that one
        completes, the file is deleted.
        """
        with self._lock:
            # While an older checkpoint is being written, its file may still get the buffer in another place.
            reference, place = self._places.get(id(buffer), (None, None))
            if reference is None or reference() is not buffer or any(known < checkpoint_id for known in self._begun):
                return None
            kept = (written for known, written in self._written.items() if known < checkpoint_id)
            elsewhere = any(other() is buffer and at != place for places in kept for other, at in places)
            return None if elsewhere else place

    def _remember(self, reference: weakref.ref[_Rows], place: PersistedElement) -> None:
        buffer = reference()
        if buffer is None:
            return
        # By identity, because comparing buffers compares their content. An id may be reused, so the reference is
        # compared as well.
        key = id(buffer)

        # The garbage collector calls this in the thread that drops the buffer. It takes no lock, because that thread
        # may hold it.
        def forget(gone: object, key: int = key) -> None:
            known = self._places.get(key)
            # The id may belong to another buffer by now.
            if known is not None and known[0] is gone:
                del self._places[key]

        self._places[key] = (weakref.ref(buffer, forget), place)
