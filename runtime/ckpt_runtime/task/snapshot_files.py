"""The asynchronous part of a subtask's snapshot: writes keyed state and in-flight data before the acknowledgement.

New files are named and counted, and deleted if the snapshot is discarded.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
from msgspec import structs

from ckpt_runtime.checkpoint.completed_checkpoint import (
    CanonicalKeyedStateHandle,
    KeyedHandle,
    OperatorSubtaskState,
    StateFile,
    SubtaskState,
    is_shared,
)
from ckpt_runtime.checkpoint.properties import CheckpointOptions, SavepointFormat
from ckpt_runtime.expressions.dictionaries import BatchDecoder
from ckpt_runtime.network.elements import Watermark
from ckpt_runtime.network.output_queue import EncodedRows
from ckpt_runtime.state.errors import SharedFileError, UnsupportedBackendError
from ckpt_runtime.storage.channel_state import (
    CapturedStream,
    InFlightElement,
    InFlightWatermark,
    PersistedElement,
    WrittenChannelState,
    write_channel_state,
)
from ckpt_runtime.storage.duplication import NO_SUCH_MEANS, Duplicator, Means, linked_state_file
from ckpt_runtime.storage.errors import StorageError
from ckpt_runtime.storage.filesystem import Location, discard_file, naming, resolve
from ckpt_runtime.storage.publish import fsync_directory
from ckpt_runtime.storage.state_files import StateFileWriter
from ckpt_runtime.task.in_flight import CapturedChannel, CapturedElement, PersistedBuffers
from ckpt_runtime.task.subtask_checkpoints import SubtaskSnapshot

logger = logging.getLogger(__name__)

DUPLICATED_AT_ONCE = 8
_CHUNK_BYTES = 1 << 20


class NewFiles:
    """The task's side of :class:`~ckpt_runtime.state.backend.SnapshotFiles`.

    ``written_bytes`` is the size of the written content, inline or not, and ``duplicated_bytes`` that of duplicates;
    ``duplicated`` counts the duplicates by means, and ``locations`` are the new files. Their content is durable at
    once, their names after :meth:`settle`.
    """

    def __init__(self, options: CheckpointOptions, inline_threshold: int, *, copies_only: bool = False) -> None:
        self.directory = resolve(options.directory)
        self.written_bytes = 0
        self.duplicated_bytes = 0
        self.duplicated: Counter[Means] = Counter()
        self.locations: list[Location] = []
        self._may_link = not copies_only
        self._duplicator = Duplicator(self.directory, copies_only=copies_only)
        self._unsettled: dict[str, Location] = {}
        self._given_up = False
        self._lock = threading.Lock()
        self._threshold = inline_threshold
        self._shared = resolve(options.shared_directory) if options.shared_directory else None

    def give_up(self) -> None:
        """Gives up the snapshot: later writes raise StorageError. Called by any thread."""
        self._given_up = True

    def check_wanted(self) -> None:
        """Raises StorageError once the files are given up."""
        if self._given_up:
            raise StorageError(f"{self.directory.url}: this snapshot was abandoned", self.directory.url)

    def private(self, suffix: str = "") -> StateFileWriter:
        if suffix:
            return _NewFile(self, self.directory, 0, name_suffix=suffix)
        return _NewFile(self, self.directory, self._threshold)

    def shared(self) -> StateFileWriter:
        """A shared file. Its name begins with the checkpoint's, which identifies files that a killed worker left."""
        if self._shared is None:
            return self.private()
        return _NewFile(self, self._shared, self._threshold, name_prefix=f"{self.directory.name}-")

    def shared_from(self, path: Path) -> StateFile:
        """A shared file from a local one: inline if small, a hard link where possible, otherwise a copy."""
        self.check_wanted()
        directory = self._shared or self.directory
        if self._may_link and directory.is_local and path.stat().st_size > self._threshold:
            try:
                return self._linked(path, directory)
            except OSError as error:
                if error.errno not in NO_SUCH_MEANS:
                    raise
                self._may_link = False
        with self.shared() as file, path.open("rb") as source:
            shutil.copyfileobj(source, file.stream, _CHUNK_BYTES)
            return file.finish()

    def _linked(self, path: Path, directory: Location) -> StateFile:
        is_private = self._shared is None
        target = directory.child(str(uuid4()) if is_private else f"{self.directory.name}-{uuid4()}")
        file = linked_state_file(str(path), target)
        with self._lock:
            self.locations.append(target)
            self.written_bytes += file.length
        self.settle_later(directory)
        return file if is_private else structs.replace(file, path=target.url)

    def duplicate_all(self, files: Mapping[str, StateFile]) -> dict[str, StateFile]:
        found = {name: file for name, file in files.items() if file.inline is not None}
        # Resolved here and not in the threads: fsspec makes one object for each thread.
        sources = {name: resolve(file.path) for name, file in files.items() if file.inline is None}

        def duplicated(name: str) -> Means | None:
            self.check_wanted()
            try:
                duplicate, means = self._duplicator.duplicate(sources[name], files[name])
                with self._lock:
                    self.locations.append(self.directory.child(duplicate.path))
                    self.duplicated_bytes += duplicate.length
                    self.duplicated[means] += 1
                found[name] = duplicate
            except StorageError as error:
                logger.warning("the file is written again: %s", error)
                return None
            return means

        if sources:
            names = list(sources)
            # A hard link takes less time than starting a thread for it.
            while names and duplicated(names.pop()) is Means.HARD_LINK:
                pass
            if names:
                with ThreadPoolExecutor(min(DUPLICATED_AT_ONCE, len(names)), "ckpt-duplicate") as pool:
                    list(pool.map(duplicated, names))
            if self.directory.is_local:
                self.settle_later(self.directory)
            by_means = ", ".join(f"{count} by {means}" for means, count in self.duplicated.items()) or "none"
            logger.info("%s: files duplicated so far: %s", self.directory.url, by_means)
        return found

    def settle_later(self, directory: Location) -> None:
        """Notes that a local directory has new entries."""
        with self._lock:
            self._unsettled[directory.path] = directory

    def settle(self) -> None:
        """Makes the names of all files durable; called once, after the last file."""
        with self._lock:
            directories, self._unsettled = self._unsettled, {}
        for path, directory in directories.items():
            with naming("write", directory):
                fsync_directory(path)

    def count(self, written: int) -> None:
        """Adds bytes that were written to a new file."""
        with self._lock:
            self.written_bytes += written

    def discard(self) -> None:
        """Deletes the files; those that cannot be deleted stay."""
        for location in self.locations:
            discard_file(location)


class _NewFile(StateFileWriter):
    def __init__(
        self, files: NewFiles, directory: Location, threshold: int, *, name_prefix: str = "", name_suffix: str = ""
    ) -> None:
        super().__init__(directory, threshold, name_prefix, name_suffix)
        self._files = files
        self._is_private = directory is files.directory

    def write(self, data: bytes | bytearray | memoryview) -> int:
        self._files.check_wanted()
        written = super().write(data)
        self._files.count(written)
        return written

    def _settle_entry(self, directory: Location) -> None:
        self._files.settle_later(directory)

    def abort(self) -> None:
        if not self._ended:
            # The bytes that were counted during writing are discarded.
            self._files.count(-self.bytes_written)
        super().abort()

    def finish(self) -> StateFile:
        file = super().finish()
        if file.inline is None:
            self._files.locations.append(self.location)
        return file if self._is_private or file.inline is not None else structs.replace(file, path=self.location.url)


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
    duplicate in a savepoint shares a block on disk with its source. ``begun`` is called with the files, so that the
    caller can observe them. Always releases the frozen states. Raises the errors of the storage, and then leaves no
    files.
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
            if options.properties.savepoint_format is SavepointFormat.CANONICAL and not all(
                isinstance(handle, CanonicalKeyedStateHandle) for handle in handles
            ):
                message = f"operator {operator.uid!r}: its state backend does not write canonical savepoints"
                raise UnsupportedBackendError(message)
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


def _write_in_flight(
    directory: Location, snapshot: SubtaskSnapshot, inline_threshold: int, persisted: PersistedBuffers
) -> WrittenChannelState:
    checkpoint_id, options = snapshot.barrier.checkpoint_id, snapshot.barrier.options
    inputs, outputs = (
        [part for channel in channels for part in _streams(channel, persisted, checkpoint_id)]
        for channels in (snapshot.in_flight.inputs, snapshot.in_flight.outputs)
    )
    written = write_channel_state(
        resolve(options.shared_directory),
        directory,
        [stream for stream, _ in inputs],
        [stream for stream, _ in outputs],
        inline_threshold,
        full=options.properties.full,
    )
    places = [
        (element, place)
        for (_, live), placed in zip([*inputs, *outputs], [*written.input_places, *written.output_places], strict=True)
        for element, place in zip(live, placed, strict=True)
        if place is not None and isinstance(element, EncodedRows | pa.RecordBatch)
    ]
    persisted.written(checkpoint_id, places)
    return written


def _streams(
    channel: CapturedChannel, persisted: PersistedBuffers, checkpoint_id: int
) -> list[tuple[CapturedStream, list[CapturedElement]]]:
    """One stream for each run of rows of one schema, in order, with the elements as they were captured."""
    streams: list[tuple[CapturedStream, list[CapturedElement]]] = []
    stored: list[InFlightElement] = []
    live: list[CapturedElement] = []
    schema, decoder = channel.schema, BatchDecoder()
    own: pa.Schema | None
    content: InFlightElement
    for element in channel.elements:
        match element:
            case Watermark(timestamp_ms, batch):
                own, content = schema, InFlightWatermark(timestamp_ms, batch)
            case PersistedElement():
                own, content = channel.schema, element
            case pa.RecordBatch():
                plain = decoder.decoded(element)
                own, content = plain.schema, persisted.place_of(element, checkpoint_id) or plain
            case EncodedRows(own, message):
                content = persisted.place_of(element, checkpoint_id) or message
        if schema is not None and own is not None and not own.equals(schema):
            streams.append((CapturedStream(channel.edge, channel.peer, schema, stored), live))
            stored, live = [], []
        schema = own
        stored.append(content)
        live.append(element)
    return [*streams, (CapturedStream(channel.edge, channel.peer, schema, stored), live)]
