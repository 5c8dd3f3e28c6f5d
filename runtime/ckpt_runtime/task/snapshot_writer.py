"""The asynchronous part of a subtask's snapshot: writes keyed state and in-flight data before the acknowledgement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa

from ckpt_runtime.checkpoint.state_handles import (
    KeyedStateHandle,
    OperatorSubtaskState,
    SubtaskState,
)
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.network.elements import Watermark
from ckpt_runtime.storage.channel_state_frame import InFlightWatermark, PersistedElement
from ckpt_runtime.storage.channel_state_writer import CapturedStream, WrittenChannelState, write_channel_state
from ckpt_runtime.storage.errors import StorageError
from ckpt_runtime.storage.filesystem import Location, delete_file, resolve
from ckpt_runtime.storage.state_file_writer import StateFileWriter
from ckpt_runtime.task.in_flight import CapturedChannel, PersistedBuffers
from ckpt_runtime.task.subtask_checkpoints import OperatorSnapshot, Snapshot


@dataclass(frozen=True, slots=True)
class WrittenSnapshot:
    """What the acknowledgement carries.

    ``written_bytes`` is what this snapshot added to the storage or metadata, ``in_flight_bytes`` the part of it that is
    in-flight data; ``files`` are new.
    """

    state: SubtaskState
    written_bytes: int
    in_flight_bytes: int = 0
    files: tuple[Location, ...] = ()

    def discard(self) -> None:
        """Deletes the new files of a snapshot that nobody waits for; what cannot be deleted stays."""
        _delete(self.files)


def write_snapshot(
    snapshot: Snapshot,
    key_groups: KeyGroupRange,
    inline_threshold: int,
    persisted: PersistedBuffers,
) -> WrittenSnapshot:
    """Writes all keyed states of a subtask into one file, its in-flight data into another; small ones into the handles.

    In-flight data that ``persisted`` knows in files of completed checkpoints is referred to. Releases the frozen states
    whatever happens. Raises what the storage raises; nothing is left behind then.
    """
    states: dict[str, OperatorSubtaskState] = {}
    files: list[Location] = []
    total = 0
    try:
        directory = resolve(snapshot.barrier.options.directory)
        for operator in snapshot.operators:
            handles, length = _write_keyed(directory, operator, key_groups, inline_threshold)
            total += length
            files += [directory.child(handle.file.path) for handle in handles if handle.file.inline is None]
            if handles or operator.lists:
                states[operator.uid] = OperatorSubtaskState(handles, operator.lists)
        if snapshot.in_flight.is_empty:
            return WrittenSnapshot(SubtaskState(states, total), total, files=tuple(files))
        written = _write_in_flight(directory, snapshot, inline_threshold, persisted)
    except BaseException:
        _delete(files)
        raise
    finally:
        snapshot.release()
    if written.file is not None:
        files.append(resolve(written.file.path))
    total += written.written_bytes
    state = SubtaskState(states, total + written.referenced_bytes, written.inputs, written.outputs)
    return WrittenSnapshot(state, total, written.written_bytes, tuple(files))


def _delete(files: Iterable[Location]) -> None:
    for file in files:
        with suppress(StorageError):
            delete_file(file)


def _write_keyed(
    directory: Location, operator: OperatorSnapshot, key_groups: KeyGroupRange, inline_threshold: int
) -> tuple[tuple[KeyedStateHandle, ...], int]:
    if operator.keyed is None:
        return (), 0
    with StateFileWriter(directory, inline_threshold) as writer:
        sections = operator.keyed.write(writer.stream, 0)
        file = writer.finish()
    return ((KeyedStateHandle(key_groups, file, tuple(sections)),) if sections else ()), file.length


def _write_in_flight(
    directory: Location, snapshot: Snapshot, inline_threshold: int, persisted: PersistedBuffers
) -> WrittenChannelState:
    checkpoint_id, options = snapshot.barrier.checkpoint_id, snapshot.barrier.options
    written = write_channel_state(
        resolve(options.shared_directory),
        directory,
        [_stream(channel, persisted, checkpoint_id) for channel in snapshot.in_flight.inputs],
        [_stream(channel, persisted, checkpoint_id) for channel in snapshot.in_flight.outputs],
        inline_threshold,
        full=options.properties.full,
    )
    places = _places(snapshot.in_flight.inputs, written.input_places)
    places += _places(snapshot.in_flight.outputs, written.output_places)
    persisted.written(checkpoint_id, places)
    return written


def _stream(channel: CapturedChannel, persisted: PersistedBuffers, checkpoint_id: int) -> CapturedStream:
    elements: list[PersistedElement | pa.Buffer | pa.RecordBatch | InFlightWatermark] = []
    schema = channel.schema
    for element in channel.elements:
        match element:
            case Watermark(timestamp_ms):
                elements.append(InFlightWatermark(timestamp_ms))
            case PersistedElement():
                elements.append(element)
            case _:
                if schema is None and isinstance(element, pa.RecordBatch):
                    schema = element.schema
                elements.append(persisted.place_of(element, checkpoint_id) or element)
    return CapturedStream(channel.edge, channel.peer, schema, elements)


def _places(
    channels: Sequence[CapturedChannel], places: Sequence[Sequence[PersistedElement | None]]
) -> list[tuple[pa.Buffer | pa.RecordBatch, PersistedElement]]:
    return [
        (element, place)
        for channel, placed in zip(channels, places, strict=True)
        for element, place in zip(channel.elements, placed, strict=True)
        if place is not None and isinstance(element, pa.Buffer | pa.RecordBatch)
    ]
