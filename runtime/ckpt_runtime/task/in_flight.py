"""In-flight data on its way into a checkpoint (FLIP-76): what a barrier overtook, channel by channel."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import pyarrow as pa

from ckpt_runtime.network.output_queue import InFlightData
from ckpt_runtime.storage.channel_state_frame import PersistedElement

CapturedElement: TypeAlias = "InFlightData | PersistedElement"
"""Live data, or a run of elements that lies in a channel state file already."""


def size_of(element: CapturedElement) -> int:
    """Bytes of rows as they are kept, whether they came over the wire or not; a watermark has none."""
    match element:
        case pa.Buffer():
            return int(element.size)
        case pa.RecordBatch():
            return int(pa.ipc.get_record_batch_size(element))
        case PersistedElement():
            return element.length
    return 0


@dataclass(slots=True)
class CapturedChannel:
    """In-flight data of one channel, in order; ``edge`` and ``peer`` as in :class:`ChannelStateStream`.

    ``schema`` is that of the rows, unless they are batches, which know their own.
    """

    peer: int
    schema: pa.Schema | None
    elements: list[CapturedElement] = field(default_factory=list)
    edge: int = 0

    @property
    def bytes(self) -> int:
        return sum(size_of(element) for element in self.elements)


_Rows: TypeAlias = "pa.RecordBatch | pa.Buffer"
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
    """Where buffers that are still queued lie in files of earlier checkpoints, so that they are not written again.

    Only files of completed checkpoints may be referred to; those of aborted ones are deleted, and so are those that no
    checkpoint refers to once a newer one is complete. Buffers are held weakly. Threads: remembered and looked up by
    those that write snapshots, the rest is called by the subtask's.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[int, _Place] = {}
        self._written: dict[int, list[_Place]] = {}
        self._begun: set[int] = set()

    def begun(self, checkpoint_id: int) -> None:
        """A snapshot was taken that may hold buffers; where they lie is not known before it is written."""
        with self._lock:
            self._begun.add(checkpoint_id)

    def written(self, checkpoint_id: int, places: Iterable[tuple[_Rows, PersistedElement]]) -> None:
        """Where the buffers of a checkpoint that is not complete yet were written."""
        with self._lock:
            self._begun.discard(checkpoint_id)
            self._written[checkpoint_id] = [(weakref.ref(buffer), place) for buffer, place in places]

    def completed(self, checkpoint_id: int) -> None:
        with self._lock:
            for reference, place in self._written.pop(checkpoint_id, ()):
                self._remember(reference, place)
            # Older ones are subsumed: their files go, and nothing may refer to them.
            self._written = {known: places for known, places in self._written.items() if known > checkpoint_id}
            self._begun = {known for known in self._begun if known > checkpoint_id}

    def aborted(self, checkpoint_id: int) -> None:
        with self._lock:
            self._written.pop(checkpoint_id, None)
            self._begun.discard(checkpoint_id)

    def place_of(self, buffer: _Rows, checkpoint_id: int) -> PersistedElement | None:
        """The buffer's frame in a file that the checkpoint may refer to; None when it has to be written.

        An older checkpoint under way that keeps the buffer elsewhere makes the file go when it completes.
        """
        with self._lock:
            # While an older one is being written, nobody knows whether its file will hold the buffer in another place.
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
        # By identity: buffers are compared by content, and this is about what lies in memory. An id may be given again,
        # so the reference is compared as well.
        key = id(buffer)

        # Called by the collector in whatever thread drops the buffer, perhaps one that holds the lock: so it takes
        # none.
        def forget(gone: object, key: int = key) -> None:
            known = self._places.get(key)
            # The id may be another buffer's by now.
            if known is not None and known[0] is gone:
                del self._places[key]

        self._places[key] = (weakref.ref(buffer, forget), place)
