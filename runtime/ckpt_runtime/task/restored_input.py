"""The state that a subtask restores: its operators' keyed state, and in-flight data, read before any data from channels
(FLIP-76).

Streams are read one after the other, element by element, so that at most one buffer is in memory. A checkpoint during
the restore refers to the unread elements, so even a slow job makes progress from one recovery to the next.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import pyarrow as pa

from ckpt_runtime.checkpoint.completed_checkpoint import ChannelStateStream, KeyedHandle
from ckpt_runtime.configuration.checkpointing_options import CheckpointingOptions, SavepointDuplication
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.network.elements import Watermark
from ckpt_runtime.snapshots.snapshot import StoredFiles
from ckpt_runtime.state.backend import BackendParameters, KeyedStateBackend
from ckpt_runtime.state.errors import CorruptStateError
from ckpt_runtime.state.hashing import hash_columns, key_groups_of
from ckpt_runtime.state.registry import create_backend
from ckpt_runtime.storage.channel_state import ChannelStateReader, InFlightWatermark, decode_schema
from ckpt_runtime.storage.errors import CorruptFileError, InvalidLocationError, StorageError
from ckpt_runtime.task.in_flight import CapturedChannel


class StateRestoreError(StorageError):
    """State of the restored snapshot is certainly damaged, so a retry would fail as well. Names operator and file."""


class StateUnavailableError(StorageError):
    """State of the restored snapshot cannot be restored now: its storage or this host fails. Names operator and file.

    The storage may be unavailable or the local disk full. A missing file does not prove damage: on a host that has
    lost its mount all files are missing.
    """


_DAMAGED = (CorruptFileError, InvalidLocationError, CorruptStateError)
"""Errors that every retry on every host would meet: checksum, length, version, or an invalid handle."""


def create_keyed_backend(
    name: str, parameters: BackendParameters, handles: Sequence[KeyedHandle], directory: str, *, owned: bool
) -> KeyedStateBackend:
    """The backend that ``state.backend.type`` names. ``directory`` is the restored snapshot's (URL), which
    the job owns or not.

    Each subtask gets whole handles, which the backend clips. Raises UnsupportedBackendError, StateSchemaError,
    StateRestoreError naming the damaged file, and StateUnavailableError naming the file that is missing or cannot be
    read or written.
    """
    backend = create_backend(name, parameters)
    if handles:
        duplication = Configuration(parameters.configuration).get(CheckpointingOptions.SAVEPOINT_DUPLICATION)
        copies_only = duplication is SavepointDuplication.COPY
        named = naming_operator(parameters.uid, f"state from {directory}", directory)
        with named, closing(StoredFiles(directory, copies_only=copies_only)) as reader:
            try:
                backend.restore(handles, reader, owned=owned)
            except BaseException:
                backend.close()
                raise
    return backend


@contextmanager
def naming_operator(uid: str, what: str, directory: str = "") -> Iterator[None]:
    """Names the operator in errors: StateRestoreError for damage, StateUnavailableError for other failures."""
    try:
        yield
    except (OSError, CorruptStateError) as error:
        url = error.url if isinstance(error, StorageError) else directory
        # A directory where a file is expected does not count as a missing file.
        is_damage = isinstance(error, _DAMAGED) or (isinstance(error, StorageError) and error.errno == errno.EISDIR)
        kind = StateRestoreError if is_damage else StateUnavailableError
        raise kind(f"operator {uid!r} cannot restore its {what}: {error}", url, error) from error


class UnreadableInFlightDataError(ValueError):
    """In-flight rows of the restored checkpoint have a schema that the operator no longer takes."""

    def __init__(self, uid: str, stored: pa.Schema, expected: pa.Schema) -> None:
        super().__init__(
            f"operator {uid!r} cannot take the in-flight data of the unaligned checkpoint: its rows have the schema "
            f"[{_shown(stored)}], the operator's input has [{_shown(expected)}]. Take a savepoint with the old version "
            "of the job and start the new one from it: a savepoint holds no in-flight data"
        )


@dataclass(frozen=True, slots=True)
class EdgeKeys:
    """How rows of an input are distributed: by these columns over ``max_parallelism`` key groups."""

    keys: tuple[str, ...]
    max_parallelism: int


@dataclass(frozen=True, slots=True)
class RestoredRows:
    """Rows of one stored element that are meant for this subtask, at least one."""

    edge: int
    batch: pa.RecordBatch


@dataclass(frozen=True, slots=True)
class RestoredWatermark:
    """Event time of the channel from subtask ``peer`` of the edge; after a rescale no such channel may exist."""

    edge: int
    peer: int
    watermark: Watermark


class RestoredInput:
    """The streams of one subtask, in order; ``edge_keys`` by edge, for those that are clipped by key group.

    ``open_reader`` opens one stream. Damaged data raises :class:`StateRestoreError`, unreadable data
    :class:`StateUnavailableError`; both name operator ``uid`` and the file.
    """

    def __init__(
        self,
        uid: str,
        streams: Sequence[ChannelStateStream],
        open_reader: Callable[[ChannelStateStream], ChannelStateReader],
        edge_keys: Sequence[EdgeKeys],
    ) -> None:
        self._uid = uid
        self._streams = deque(streams)
        self._open_reader = open_reader
        self._edge_keys = edge_keys
        self._reader: ChannelStateReader | None = None

    @property
    def is_empty(self) -> bool:
        return not self._streams

    def poll(self) -> RestoredRows | RestoredWatermark | None:
        """The next element; None when there is none or none of its rows are meant for this subtask."""
        if not self._streams:
            return None
        stream = self._streams[0]
        with naming_operator(self._uid, "in-flight data"):
            if self._reader is None:
                self._reader = self._open_reader(stream)
            element = self._reader.read()
        if element is None:
            self._reader.close()
            self._reader = None
            self._streams.popleft()
            return None
        if isinstance(element.content, InFlightWatermark):
            watermark = Watermark(element.content.timestamp_ms, element.content.batch)
            return RestoredWatermark(stream.edge, stream.peer, watermark)
        batch = pa.ipc.read_record_batch(element.content, self._reader.schema)
        # After a rescale several subtasks read the same element, and each takes the rows of its own key groups.
        if element.place.key_groups is not None:
            batch = _clip(batch, self._edge_keys[stream.edge], element.place.key_groups)
        return RestoredRows(stream.edge, batch) if batch.num_rows else None

    def unread(self, current_edge: int, rest: pa.RecordBatch | None) -> list[CapturedChannel]:
        """The remaining elements, by stream. ``rest`` is the rest of the rows that :meth:`poll` returned last."""
        left = []
        if rest is not None:
            left.append(CapturedChannel(self._streams[0].peer, [rest], current_edge))
        for number, stream in enumerate(self._streams):
            reader = self._reader if number == 0 and self._reader is not None else self._open_reader(stream)
            elements = reader.unread_elements()
            if elements:
                left.append(CapturedChannel(stream.peer, list(elements), stream.edge, reader.schema))
        return left

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._streams.clear()


def _clip(batch: pa.RecordBatch, edge: EdgeKeys, own: KeyGroupRange) -> pa.RecordBatch:
    groups = key_groups_of(hash_columns(batch, edge.keys), edge.max_parallelism)
    return batch.filter(pa.array((groups >= own.first) & (groups <= own.last)))


def check_schema(
    stream: ChannelStateStream, expected: pa.Schema | None, uid: str, also: Callable[[pa.Schema], bool] | None = None
) -> None:
    """Raises :class:`UnreadableInFlightDataError`, or StateRestoreError when the handle's schema is damaged.

    Nullability is not compared. ``expected`` is the schema that operator ``uid`` takes; None if the plan does not know
    it. ``also`` decides whether the operator takes any other schema.
    """
    if not stream.schema or expected is None:
        return
    try:
        stored = decode_schema(stream.schema)
    except ValueError as error:
        raise StateRestoreError(f"operator {uid!r} cannot restore its in-flight data: {error}", "", error) from error
    assert stored is not None
    same = [(field.name, field.type) for field in stored] == [(field.name, field.type) for field in expected]
    if not same and (also is None or not also(stored)):
        raise UnreadableInFlightDataError(uid, stored, expected)


def _shown(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
