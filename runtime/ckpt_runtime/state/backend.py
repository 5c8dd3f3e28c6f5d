"""The keyed state backend interface: what operators ask of it and how a subtask snapshots and restores it.

One backend serves one operator of one subtask and holds the key groups which that subtask owns. ``state/registry.py``
knows the backends by name; nobody else imports one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import pyarrow as pa

from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.checkpoint.state_handles import KeyedHandle
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.snapshots import KeyedSnapshot, SnapshotReader
from ckpt_runtime.state.states import (
    AggregateColumn,
    Key,
    KeyedAggregates,
    KeyedLists,
    KeyedMaps,
    KeyedRows,
    KeyedTimers,
    KeyedValues,
    RowBufferSpec,
    TimeToLive,
)

_K = TypeVar("_K", bound="SharedHandle")


class SharedHandle(Protocol):
    """What backends of a deployment leave for those of the next one in the same process."""

    def close(self) -> None:
        """Its files go. Once more does no harm."""


class SharedHandles:
    """A worker's, by the names that backends give them. The deployment's thread takes, and the worker closes."""

    def __init__(self) -> None:
        self._known: dict[str, SharedHandle] = {}

    def get(self, name: str, kind: type[_K], make: Callable[[], _K]) -> _K:
        """The one of that name, which is made when there is none yet."""
        known = self._known.get(name)
        if not isinstance(known, kind):
            known = self._known[name] = make()
        return known

    def drop(self, name: str) -> None:
        """Nobody wants it any more."""
        known = self._known.pop(name, None)
        if known is not None:
            known.close()

    def close(self) -> None:
        """The worker ends."""
        for name in list(self._known):
            self.drop(name)


@dataclass(frozen=True, slots=True)
class BackendParameters:
    """What a backend is made from. ``uid`` is the operator's, for messages; ``configuration`` the job's options.

    ``make_directory`` makes a new directory for local files, which goes with the worker's process, however that ends.
    ``shared_handles`` are of the worker's earlier deployments, if it keeps any.
    """

    uid: str
    key_groups: KeyGroupRange
    max_parallelism: int
    make_directory: Callable[[], str]
    configuration: Mapping[str, str] = field(default_factory=dict)
    shared_handles: SharedHandles | None = None


class KeyedStateBackend(ABC):
    """States by name. Asking for the same name twice returns the same object; another schema is an error.

    Restoring a state whose stored schema differs evolves it where that is safe (fields added, with null or the
    aggregate's neutral value; fields removed) and raises ``StateSchemaError`` naming uid, state and both schemas
    otherwise.
    """

    key_groups: KeyGroupRange
    max_parallelism: int

    @abstractmethod
    def restore(self, handles: Sequence[KeyedHandle], reader: SnapshotReader, *, owned: bool) -> None:
        """Loads a snapshot; called once, before any state is asked for.

        Handles come whole, of all subtasks whose key groups meet this backend's: it takes its own. Without ``owned``
        the files stay the user's, and no snapshot may refer to them. Raises UnsupportedBackendError for state that
        another backend has written.
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
        """A list of tuples per key; elements live on their own."""

    @abstractmethod
    def map_state(
        self,
        name: str,
        key_schema: pa.Schema,
        user_key_schema: pa.Schema,
        value_schema: pa.Schema,
        ttl: TimeToLive | None = None,
    ) -> KeyedMaps:
        """A map from tuple to tuple per key; entries live on their own."""

    @abstractmethod
    def timers(self, name: str, key_schema: pa.Schema) -> KeyedTimers:
        """A priority queue of (time, key), each pair once."""

    @abstractmethod
    def row_buffers(self, specs: Sequence[RowBufferSpec]) -> KeyedRows:
        """Rows per key of several sides whose keys have equal types; each side is a state. To be asked for once."""

    @abstractmethod
    def restored_key_schema(self) -> pa.Schema | None:
        """The key's schema according to the restored snapshot, of which nothing has been asked for; else None."""

    @abstractmethod
    def is_restored(self, name: str) -> bool:
        """Whether the restored snapshot has a state of that name which nothing has asked for."""

    @abstractmethod
    def drop_state(self, name: str) -> None:
        """Forgets a state with all its content; snapshots in flight keep it."""

    def prefetch(self, keys: Iterable[Key]) -> None:
        """The keys, each once, that are read and written next; a backend that has everything at hand does nothing."""

    def maintain(self) -> None:
        """Housekeeping in small steps, called about once per buffer by the subtask's thread."""

    @abstractmethod
    def snapshot(self, checkpoint_id: int, properties: CheckpointProperties) -> KeyedSnapshot:
        """The synchronous part: freezes the state in (near) constant time. Several may be in flight.

        ``properties`` say whether it is a savepoint, in which format, and with ``is_incremental`` whether it may build
        upon files of checkpoints whose completion was notified: refer to them, or as a savepoint duplicate them.
        """

    def notify_complete(self, checkpoint_id: int) -> None:
        """A checkpoint completed. Ids may be skipped and calls may come late; plain savepoints are not told of."""

    def notify_aborted(self, checkpoint_id: int) -> None:
        """A checkpoint was given up; its new files go. It may still be being written."""

    def metrics(self) -> Mapping[str, int]:
        """Figures of its own by name, those that its options ask for. Called from any thread, also after the end."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Frees memory and local files. Snapshots in flight may still be written, and are released later."""
