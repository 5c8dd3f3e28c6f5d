"""The asynchronous part of a subtask's snapshot: writes keyed state and in-flight data before the acknowledgement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from ckpt_runtime.checkpoint.properties import SavepointFormat
from ckpt_runtime.checkpoint.shared_state_registry import is_shared
from ckpt_runtime.checkpoint.state_handles import (
    CanonicalKeyedStateHandle,
    KeyedHandle,
    OperatorSubtaskState,
    SubtaskState,
)
from ckpt_runtime.network.elements import Watermark
from ckpt_runtime.state.errors import SharedFileError, UnsupportedBackendError
from ckpt_runtime.storage.channel_state_reader import InFlightWatermark, PersistedElement
from ckpt_runtime.storage.channel_state_writer import CapturedStream, WrittenChannelState, write_channel_state
from ckpt_runtime.storage.filesystem import Location, resolve
from ckpt_runtime.task.in_flight import CapturedChannel, PersistedBuffers
from ckpt_runtime.task.snapshot_files import NewFiles
from ckpt_runtime.task.subtask_checkpoints import SubtaskSnapshot


@dataclass(frozen=True, slots=True)
class WrittenSnapshot:
    """The content of the acknowledgement.

    ``written_bytes`` were added to the storage or metadata, ``in_flight_bytes`` of them are in-flight data;
    ``reused_bytes`` is keyed state that the snapshot refers to or has duplicated. ``files`` are new and have to be
    discarded if the snapshot is no longer needed.
    """

    state: SubtaskState
    written_bytes: int
    reused_bytes: int
    in_flight_bytes: int
    files: NewFiles


def write_snapshot(
    snapshot: SubtaskSnapshot,
    inline_threshold: int,
    persisted: PersistedBuffers,
    *,
    copies_only: bool = False,
    begun: Callable[[NewFiles], None] | None = None,
) -> WrittenSnapshot:
    """Makes the backends write a subtask's keyed states, and writes its in-flight data; small files go into handles.

    In-flight data that ``persisted`` knows in files of completed checkpoints is referred to. With ``copies_only`` no
    duplicate in a savepoint shares a block on disk with its source. ``begun`` gets the files, to watch them.
    Always releases the frozen states. Raises the errors of the storage, and then leaves nothing behind.
    """
    options = snapshot.barrier.options
    states: dict[str, OperatorSubtaskState] = {}
    in_flight = WrittenChannelState((), (), (), ())
    files: NewFiles | None = None
    try:
        files = NewFiles(options, inline_threshold, copies_only=copies_only)
        if begun is not None:
            begun(files)
        for operator in snapshot.operators:
            handles = () if operator.keyed is None else tuple(operator.keyed.write(files))
            if options.properties.is_savepoint or not options.properties.is_incremental:
                _check_full(operator.uid, handles, files)
            if options.properties.savepoint_format is SavepointFormat.CANONICAL:
                _check_canonical(operator.uid, handles)
            if handles or operator.lists:
                states[operator.uid] = OperatorSubtaskState(handles, operator.lists)
        files.settle()
        if not snapshot.in_flight.is_empty:
            in_flight = _write_in_flight(files.directory, snapshot, inline_threshold, persisted)
    except BaseException:
        if files is not None:
            files.discard()
        raise
    finally:
        snapshot.release()
    if in_flight.file is not None:
        files.locations.append(resolve(in_flight.file.path))
    keyed = sum(file.length for state in states.values() for handle in state.keyed for file in handle.state_files())
    reused = max(0, keyed - files.written_bytes)
    total = keyed + in_flight.written_bytes + in_flight.referenced_bytes
    state = SubtaskState(states, total, in_flight.inputs, in_flight.outputs)
    return WrittenSnapshot(state, files.written_bytes + in_flight.written_bytes, reused, in_flight.written_bytes, files)


def _check_full(uid: str, handles: Iterable[KeyedHandle], files: NewFiles) -> None:
    """Checks that a savepoint, or the first checkpoint after a user's snapshot, depends on no other snapshot.

    A mistake in a backend must not break this.
    """
    new = {location.url for location in files.locations}
    for file in (file for handle in handles for file in handle.state_files()):
        if is_shared(file) and file.path not in new:
            raise SharedFileError(f"operator {uid!r}: its state backend refers to {file.path} in a full snapshot")


def _check_canonical(uid: str, handles: Iterable[KeyedHandle]) -> None:
    """Checks that a canonical savepoint, which every backend can restore, has no other handles."""
    if not all(isinstance(handle, CanonicalKeyedStateHandle) for handle in handles):
        raise UnsupportedBackendError(f"operator {uid!r}: its state backend does not write canonical savepoints")


def _write_in_flight(
    directory: Location, snapshot: SubtaskSnapshot, inline_threshold: int, persisted: PersistedBuffers
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
