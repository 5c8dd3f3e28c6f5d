"""The keyed state backend interface: the states that operators request, and snapshot and restore by the subtask.

One backend serves one operator of one subtask and holds the key groups which that subtask owns. ``state/registry.py``
maps names to backends; no other module imports one.

For snapshots, the task manages names, places, checksums and sizes of files. A backend opens as many files as it
needs, private or shared ones, and gets a handle for each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

import pyarrow as pa

from ckpt_runtime.checkpoint.completed_checkpoint import KeyedHandle, StateFile
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.states import (
    AggregateColumn,
    Key,
    KeyedAggregates,
    KeyedColumns,
    KeyedLists,
    KeyedMaps,
    KeyedRows,
    KeyedTimers,
    KeyedValues,
    RowBufferSpec,
    TimeToLive,
)


class SnapshotFile(AbstractContextManager["SnapshotFile"], Protocol):
    """A new file of a snapshot. As a context manager it is discarded unless it was finished."""

    stream: BinaryIO

    def finish(self) -> StateFile:
        """Makes the content durable. Small content is stored inside the returned handle instead of a file."""


class SnapshotFiles(Protocol):
    """Opens the new files of one snapshot, from any thread; a file is used by one. Raises the storage's OSError."""

    def private(self, suffix: str = "") -> SnapshotFile:
        """A file that is deleted with this snapshot. With a suffix it is for other tools, and never inside a handle."""

    def shared(self) -> SnapshotFile:
        """A file that later checkpoints may refer to. In a savepoint, which shares no files, it is a private one."""

    def shared_from(self, path: Path) -> StateFile:
        """Stores the content of a local file that no longer changes, as a file like one of :meth:`shared`.

        The result may be a hard link of the local file: writing to the local file would damage the snapshot.
        """

    def duplicate_all(self, files: Mapping[str, StateFile]) -> dict[str, StateFile]:
        """A savepoint's own copies of files of completed checkpoints, by the same names; several are made at once.

        A file that could not be duplicated is missing from the result, and the caller has to write it.
        """


class KeyedSnapshot(Protocol):
    """The asynchronous part of a snapshot. Its state does not change while the operator continues to process."""

    def write(self, files: SnapshotFiles) -> Sequence[KeyedHandle]:
        """Writes all states and returns their handles; runs in a pool thread. Without states the result is empty.

        The files that the task opened for it are deleted when this raises, or when the snapshot is no longer needed.
        """

    def release(self) -> None:
        """Releases the frozen view; called once after ``write`` or instead of it, from any thread."""


class SnapshotReader(Protocol):
    """Reads the files of a restored snapshot, each verified as a whole before any byte of it is used.

    Raises StorageError; the caller distinguishes a damaged file from a missing one.
    """

    def read(self, file: StateFile, offset: int, length: int) -> bytes | memoryview:
        """A part of a file."""

    def fetch(self, file: StateFile, path: str, *, may_link: bool = False) -> None:
        """Writes the whole file to a new local file. Several threads may fetch at once.

        With ``may_link`` the local file may be a hard link of the stored file, and must not be written to.
        """

    def take(self, file: StateFile, copy: str, path: str) -> bool:
        """Makes ``path`` a hard link of ``copy``, a local file with the expected content; False if the content differs.

        In that case there is no file at ``path``. The snapshot itself is not read.
        """


_K = TypeVar("_K", bound="SharedHandle")


class SharedHandle(Protocol):
    """A resource that backends pass on to the backends of the next deployment in the same process."""

    def close(self) -> None:
        """Deletes its files. Calling it again does no harm."""


class SharedHandles:
    """The handles of one worker, by the names that backends give them.

    The thread that builds a deployment calls :meth:`get`; the worker calls :meth:`close` when it ends.
    """

    def __init__(self) -> None:
        self._known: dict[str, SharedHandle] = {}

    def get(self, name: str, kind: type[_K], make: Callable[[], _K]) -> _K:
        """The handle of that name, which is made when there is none yet."""
        known = self._known.get(name)
        if not isinstance(known, kind):
            known = self._known[name] = make()
        return known

    def drop(self, name: str) -> None:
        """Removes the handle of that name and closes it; does nothing when there is none."""
        known = self._known.pop(name, None)
        if known is not None:
            known.close()

    def close(self) -> None:
        """Closes all handles; called when the worker ends."""
        for name in list(self._known):
            self.drop(name)


@dataclass(frozen=True, slots=True)
class BackendParameters:
    """The arguments of a backend. ``uid`` is the operator's, for messages; ``configuration`` the job's options.

    ``make_directory`` makes a new directory for local files, which is deleted with the worker's process, however that
    ends. ``shared_handles`` come from the worker's earlier deployments, if it keeps any.
    """

    uid: str
    key_groups: KeyGroupRange
    max_parallelism: int
    make_directory: Callable[[], str]
    configuration: Mapping[str, str] = field(default_factory=dict)
    shared_handles: SharedHandles | None = None


class KeyedStateBackend(ABC):
    """States by name. Asking for the same name twice returns the same object; another schema is an error.

    A restored state whose stored schema differs from the requested one is evolved if that is safe (fields are added,
    with null or the aggregate's neutral value, or removed). Otherwise ``StateSchemaError`` names uid, state and both
    schemas.
    """

    key_groups: KeyGroupRange
    max_parallelism: int

    @abstractmethod
    def restore(self, handles: Sequence[KeyedHandle], reader: SnapshotReader, *, owned: bool) -> None:
        """Loads a snapshot; called once, before any state is asked for.

        Handles come from all subtasks whose key groups overlap this backend's, and are not clipped: the backend reads
        only its own groups. Without ``owned`` the files still belong to the user, and no snapshot may refer to them.
        Raises UnsupportedBackendError for state that another backend has written.
        """

    @abstractmethod
    def aggregate_table(self, name: str, key_schema: pa.Schema, columns: Sequence[AggregateColumn]) -> KeyedAggregates:
        """Columnar state for built-in aggregates: one row per key."""

    @abstractmethod
    def value_state(
        self, name: str, key_schema: pa.Schema, value_schema: pa.Schema, ttl: TimeToLive | None = None
    ) -> KeyedValues:
        """One tuple per key. ``ttl`` says how long it lives after its last update."""

    @abstractmethod
    def list_state(
        self, name: str, key_schema: pa.Schema, value_schema: pa.Schema, ttl: TimeToLive | None = None
    ) -> KeyedLists:
        """A list of tuples per key; each element expires on its own."""

    @abstractmethod
    def map_state(
        self,
        name: str,
        key_schema: pa.Schema,
        user_key_schema: pa.Schema,
        value_schema: pa.Schema,
        ttl: TimeToLive | None = None,
    ) -> KeyedMaps:
        """A map from tuple to tuple per key; each entry expires on its own."""

    @abstractmethod
    def timers(self, name: str, key_schema: pa.Schema) -> KeyedTimers:
        """A priority queue of (time, key), each pair once."""

    @abstractmethod
    def row_buffers(self, specs: Sequence[RowBufferSpec]) -> KeyedRows:
        """Rows per key of several sides whose keys have equal types; each side is a state. May be called only once."""

    @abstractmethod
    def keyed_columns(self, spec: RowBufferSpec) -> KeyedColumns:
        """At most one row per key. Its stored form is that of :meth:`row_buffers`, of which it takes the place."""

    @abstractmethod
    def restored_key_schema(self) -> pa.Schema | None:
        """The key schema of a restored state that has not been requested yet; None when there is no such state."""

    @abstractmethod
    def is_restored(self, name: str) -> bool:
        """Whether the restored snapshot has a state of that name that has not been requested yet."""

    @abstractmethod
    def drop_state(self, name: str) -> None:
        """Removes a state with all its content; snapshots in flight keep it."""

    def prefetch(self, keys: Iterable[Key]) -> None:
        """Announces the keys, each once, that are used next; a backend that keeps all state in memory does nothing."""

    def maintain(self) -> None:
        """Housekeeping in small steps, called about once per buffer by the subtask's thread."""

    @abstractmethod
    def snapshot(self, checkpoint_id: int, properties: CheckpointProperties) -> KeyedSnapshot:
        """The synchronous part: freezes the state in (near) constant time. Several may be in flight.

        ``properties`` say whether it is a savepoint, in which format, and with ``is_incremental`` whether it may reuse
        files of checkpoints whose completion was notified: refer to them, or as a savepoint duplicate them.
        """

    def notify_complete(self, checkpoint_id: int) -> None:
        """A checkpoint completed. Ids may be skipped, calls may come late, and plain savepoints are not reported."""

    def notify_aborted(self, checkpoint_id: int) -> None:
        """A checkpoint was aborted; its new files are deleted. Its snapshot may still be in progress."""

    def metrics(self) -> Mapping[str, int]:
        """The backend's metrics by name, as enabled by its options. Called from any thread, also when closed."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Frees memory and local files. Snapshots in flight may still be written, and are released later."""
