"""The keyed state backend on RocksDB: state on the worker's disk, larger than memory, in files that snapshots share.

One database per operator and subtask, with a write-back cache for each state. A snapshot's synchronous part takes
the changed entries of the caches; the asynchronous part writes them, links the database's files and stores the new
ones. All calls but those on a snapshot come from the subtask's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import pyarrow as pa

from ckpt_runtime.checkpoint.completed_checkpoint import (
    CanonicalKeyedStateHandle,
    IncrementalKeyedStateHandle,
    KeyedHandle,
)
from ckpt_runtime.checkpoint.properties import CheckpointProperties, SavepointFormat
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.state_options import RocksDBOptions, StateOptions, rocksdb_metrics
from ckpt_runtime.state.backend import BackendParameters, KeyedSnapshot, SnapshotReader
from ckpt_runtime.state.canonical import canonical_states
from ckpt_runtime.state.errors import UnsupportedBackendError, schema_mismatch
from ckpt_runtime.state.memory.aggregate_table import AggregateTable
from ckpt_runtime.state.memory.keyed_state import MemoryState
from ckpt_runtime.state.memory.keyed_states import TableBackend
from ckpt_runtime.state.memory.row_buffer import check_ends, rows_descriptor, stored_schema
from ckpt_runtime.state.rocksdb.catalog import Catalog
from ckpt_runtime.state.rocksdb.codec import KeyCodec
from ckpt_runtime.state.rocksdb.columnar_aggregates import CachedAggregates
from ckpt_runtime.state.rocksdb.columnar_rows import ChunkCodec, ColumnarCodec
from ckpt_runtime.state.rocksdb.database import Database, KeyFilter, UnknownKeys
from ckpt_runtime.state.rocksdb.keyed_collections import StoredLists, StoredMaps
from ckpt_runtime.state.rocksdb.keyed_states import RocksDBState, StoredTimers, StoredValues
from ckpt_runtime.state.rocksdb.local_files import LocalCopies, LocalDirectory
from ckpt_runtime.state.rocksdb.row_runs import RunCodec
from ckpt_runtime.state.rocksdb.snapshot import (
    NAME,
    CanonicalSnapshot,
    EmptySnapshot,
    RocksDBSnapshot,
    restored_database,
)
from ckpt_runtime.state.rocksdb.spilled_rows import SpilledRows
from ckpt_runtime.state.rocksdb.store import Store, StoreMemory
from ckpt_runtime.state.rocksdb.stored_form import stored_form
from ckpt_runtime.state.rocksdb.stored_row_buffers import SpillingRowBuffers, StoredRowBuffer
from ckpt_runtime.state.schema_evolution import check_evolution
from ckpt_runtime.state.shared_files import SharedFiles
from ckpt_runtime.state.states import AggregateColumn, Key, RowBufferSpec
from ckpt_runtime.state.stored_rows import schema_from_json

MAINTENANCE_BUDGET = 4_000
FILTER_SHARE = 8
"""Once keys leave a state's cache, its key filter gets additional memory: RocksDB's memory divided by this number."""
MOST_PENDING = 4
"""Maximum number of snapshots that wait for their writer; beyond it the subtask itself writes their entries."""


@lru_cache(maxsize=1)
def _memory(bytes_in_all: int, write_buffer_ratio: float) -> StoreMemory:
    """The memory that all databases of a worker share; that of an earlier configuration is freed with its databases."""
    return StoreMemory(bytes_in_all, write_buffer_ratio)


def _local_copies(configuration: Configuration, parameters: BackendParameters) -> LocalCopies | None:
    """The worker's local copies, if the job uses them."""
    shared_handles = parameters.shared_handles
    if shared_handles is None:
        return None
    if not configuration.get(StateOptions.FROM_LOCAL):
        shared_handles.drop(NAME)
        return None
    return shared_handles.get(NAME, LocalCopies, lambda: LocalCopies(parameters.make_directory))


class RocksDBKeyedStateBackend(TableBackend):
    """See the module docstring."""

    values_class = StoredValues
    lists_class = StoredLists
    maps_class = StoredMaps
    timers_class = StoredTimers

    def __init__(self, parameters: BackendParameters) -> None:
        self.key_groups = parameters.key_groups
        self.max_parallelism = parameters.max_parallelism
        self.uid = parameters.uid
        configuration = Configuration(parameters.configuration)
        self._cached_keys = configuration.get(RocksDBOptions.CACHE_KEYS)
        self._cached_rows = configuration.get(RocksDBOptions.CACHE_ROWS)
        self._filter_bytes = configuration.get(RocksDBOptions.MEMORY) // FILTER_SHARE
        self._memory = _memory(
            configuration.get(RocksDBOptions.MEMORY), configuration.get(RocksDBOptions.WRITE_BUFFER_RATIO)
        )
        self._compaction = configuration.get(RocksDBOptions.COMPACTION_STYLE)
        self._threads = configuration.get(RocksDBOptions.TRANSFER_THREADS)
        self._metrics = [name for name, option in rocksdb_metrics().items() if configuration.get(option)]
        self._copies = _local_copies(configuration, parameters)
        self._directory = LocalDirectory(configuration.get(RocksDBOptions.LOCAL_DIRECTORY), parameters.make_directory)
        self._root = self._directory.path
        self._shared = SharedFiles()
        self._catalog = Catalog(self.uid)
        self._states: dict[str, RocksDBState | CachedAggregates | StoredRowBuffer] = {}
        self._opened: Database | None = None

    @property
    def _database(self) -> Database:
        """Opened on first use: a restore puts its files in place before."""
        if self._opened is None:
            store = Store(self._root / "db", self._memory, self._compaction)
            self._opened = Database(self._directory, store, self.key_groups)
        return self._opened

    def restore(self, handles: Sequence[KeyedHandle], reader: SnapshotReader, *, owned: bool) -> None:
        native = [handle for handle in handles if isinstance(handle, IncrementalKeyedStateHandle)]
        canonical = [handle for handle in handles if isinstance(handle, CanonicalKeyedStateHandle)]
        own = [handle for handle in native if handle.backend == NAME]
        if handles and len(own) != len(handles) != len(canonical):
            raise UnsupportedBackendError(
                f"operator {self.uid!r}: its state was not written by the backend {NAME!r}, which state.backend.type "
                "names; another backend takes a canonical savepoint"
            )
        if canonical:
            self._load(canonical, reader)
            return
        restored = restored_database(
            self.uid,
            own,
            reader,
            self._root,
            self._memory,
            self._compaction,
            self.key_groups,
            self._threads,
            self._copies,
        )
        self._opened = Database(self._directory, restored.store, self.key_groups)
        self._catalog = restored.catalog
        if owned:
            self._shared.restored(restored.tables)

    def _load(self, handles: Sequence[CanonicalKeyedStateHandle], reader: SnapshotReader) -> None:
        """Writes all states to the database, whether they are used or not, so that later snapshots contain them."""
        for state in canonical_states(self.uid, handles):
            entry = self._catalog.add(state.name, state.descriptor)
            form = stored_form(state.name, entry, self.key_groups, self.max_parallelism)
            batches = state.batches(reader, self.key_groups, self.max_parallelism)
            self._database.write(form.entries(batch for _, batch in batches))

    def aggregate_table(self, name: str, key_schema: pa.Schema, columns: Sequence[AggregateColumn]) -> CachedAggregates:
        table = AggregateTable(self.uid, name, key_schema, columns)
        known = self._states.get(name)
        if known is not None:
            if not isinstance(known, CachedAggregates) or not known.is_like(table):
                raise schema_mismatch(
                    self.uid, name, "it is in use for something else", known.stored_schema(), list(columns)
                )
            return known
        is_new = name not in self._catalog
        if not is_new and self._catalog[name].kind == "aggregate":
            for descriptor in self._catalog[name].descriptors:
                table.check_compatible(descriptor)
        entry = self._catalog.add(name, table.descriptor())
        codec = ColumnarCodec(name, entry.id, entry.schemas(), entry.current, self.key_groups, self.max_parallelism)
        unknown = None if is_new else UnknownKeys(self._database, codec, entry.id, self.key_groups)
        forgotten = KeyFilter(self._filter_bytes)
        state = CachedAggregates(table, entry, codec, self._database, self._cached_keys, forgotten, unknown)
        self._states[name] = state
        return state

    def row_buffers(self, specs: Sequence[RowBufferSpec]) -> SpillingRowBuffers:
        self.check_rows(specs)
        buffers = SpillingRowBuffers(specs, self._row_buffer, self._database, self._cached_rows)
        buffers.restore(self.key_groups)
        self._states |= {side.spec.name: side for side in buffers.sides}
        return buffers

    def _row_buffer(self, spec: RowBufferSpec) -> StoredRowBuffer:
        if spec.name in self._catalog and self._catalog[spec.name].kind == "rows":
            for descriptor in self._catalog[spec.name].descriptors:
                check_ends(self.uid, spec, descriptor)
                stored = schema_from_json(descriptor.get("schema"))
                check_evolution(self.uid, spec.name, stored, stored_schema(spec))
        entry = self._catalog.add(spec.name, rows_descriptor(spec))
        form = (spec.name, entry.id, entry.schemas(), entry.current)
        runs = RunCodec(*form, self.key_groups, self.max_parallelism)
        spilled = SpilledRows(runs, self._database, self.key_groups, is_timed=spec.event_time is not None)
        return StoredRowBuffer(spec, ChunkCodec(*form), spilled, self.max_parallelism)

    @property
    def states(self) -> Mapping[str, RocksDBState | CachedAggregates | StoredRowBuffer]:
        return self._states

    def open_state(self, state: MemoryState) -> None:
        assert isinstance(state, RocksDBState)
        name = state.name
        if name in self._catalog and self._catalog[name].kind == state.kind:
            for stored in self._catalog[name].schemas().values():
                check_evolution(self.uid, name, stored, state.stored_schema())
        entry = self._catalog.add(name, state.descriptor())
        keys = KeyCodec(state.key_schema, self.key_groups, self.max_parallelism)
        state.attach(self._database, entry, keys, self.key_groups, self._cached_keys)
        self._states[name] = state

    def restored_key_schema(self) -> pa.Schema | None:
        for name in self._catalog:
            if name not in self._states:
                return schema_from_json(self._catalog[name].descriptor.get("key_schema"))
        return None

    def is_restored(self, name: str) -> bool:
        return name in self._catalog and name not in self._states

    def drop_state(self, name: str) -> None:
        self._states.pop(name, None)
        entry = self._catalog.remove(name)
        if entry is not None:
            self._database.delete_state(entry.id)

    def prefetch(self, keys: Iterable[Key]) -> None:
        keys = list(keys)
        for state in self._states.values():
            state.prefetch(keys)

    def maintain(self) -> None:
        for state in self._states.values():
            state.maintain(MAINTENANCE_BUDGET)

    def snapshot(self, checkpoint_id: int, properties: CheckpointProperties) -> KeyedSnapshot:
        if not properties.is_savepoint:
            self._shared.begun(checkpoint_id)
        if self._opened is None:
            return EmptySnapshot()
        if self._opened.pending >= MOST_PENDING:
            self._opened.settle()
        moment = self._opened.freeze([part for state in self._states.values() for part in state.changes()])
        if properties.savepoint_format is SavepointFormat.CANONICAL:
            description = self._catalog.to_json()
            return CanonicalSnapshot(self.uid, moment, description, self.key_groups, self.max_parallelism, self._memory)
        return RocksDBSnapshot(
            moment,
            self._catalog.to_json(),
            self.key_groups,
            self._shared,
            checkpoint_id,
            properties,
            self._threads,
            self._copies,
        )

    def notify_complete(self, checkpoint_id: int) -> None:
        self._shared.completed(checkpoint_id)
        if self._copies is not None:
            self._copies.completed(checkpoint_id)

    def notify_aborted(self, checkpoint_id: int) -> None:
        self._shared.aborted(checkpoint_id)
        if self._copies is not None:
            self._copies.aborted(checkpoint_id)

    def metrics(self) -> dict[str, int]:
        opened = self._opened
        figures = {} if opened is None else {name: opened.figure(name) for name in self._metrics}
        return {f"rocksdb.{name}": figure for name, figure in figures.items() if figure is not None}

    def close(self) -> None:
        self._states.clear()
        if self._opened is None:
            self._directory.remove()
        else:
            self._opened.left()
