"""Writes a savepoint without a job: one state from given rows, and all other state from a base snapshot.

The savepoint has the canonical form, so that every backend can restore it. One process opens the write; any number of
processes write parts, with any distribution of rows over them; then one process copies the other states from the base,
merges parts whose key groups overlap, and publishes ``_metadata``. The savepoint exists from that moment.

A marker file exists while the write is open, and is deleted first when the write ends. A task that writes its part
after that finds no marker and deletes its part again, so that no file is left behind. A second file, the end marker,
records the outcome. It is created only once, so that a write is either published or given up, never both.
A write whose metadata may have been stored, because storage has not answered, is never given up: its files stay.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from heapq import merge
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.checkpoint.completed_checkpoint import (
    CanonicalKeyedStateHandle,
    CompletedCheckpoint,
    KeyedHandle,
    OperatorSubtaskState,
    SubtaskState,
    VertexDescriptor,
)
from ckpt_runtime.checkpoint.executions import SubtaskKey
from ckpt_runtime.checkpoint.properties import CheckpointProperties, CheckpointType, SavepointFormat
from ckpt_runtime.graph.key_groups import KeyGroupRange, key_group_range, owner_of_key_group
from ckpt_runtime.snapshots.keyed_states import StoredState, keyed_states
from ckpt_runtime.snapshots.snapshot import Snapshot, StoredFiles, UnsharedFiles, open_snapshot
from ckpt_runtime.state.canonical import CanonicalWriter, canonical_states, order_by
from ckpt_runtime.state.columns import AnyArray
from ckpt_runtime.state.errors import StateValueError
from ckpt_runtime.state.hashing import hash_arrays, key_groups_of
from ckpt_runtime.state.stored_rows import KEY_PREFIX, TIME, USER_KEY_PREFIX
from ckpt_runtime.storage.errors import (
    AlreadyExistsError,
    AmbiguousWriteError,
    InvalidLocationError,
    NotFoundError,
    StorageError,
)
from ckpt_runtime.storage.filesystem import (
    Location,
    delete_empty_directory,
    delete_file,
    exists,
    list_names,
    make_directory,
    read_beginning,
)
from ckpt_runtime.storage.metadata import has_metadata, write_metadata
from ckpt_runtime.storage.publish import publish

_UNIQUE: dict[str, tuple[str, ...]] = {
    "value": (KEY_PREFIX,),
    "aggregate": (KEY_PREFIX,),
    "map": (KEY_PREFIX, USER_KEY_PREFIX),
    "timers": (KEY_PREFIX, TIME),
}
"""Prefixes of the columns that identify a row, by kind of state: no two rows may have equal values in them."""
_FIRST_CHECKPOINT = 1
_PUBLISHED, _GIVEN_UP = b"published", b"given up"


@dataclass(frozen=True, slots=True)
class NewState:
    """A keyed state to be written. ``descriptor`` and ``schema`` are those of its stored rows."""

    uid: str
    name: str
    descriptor: dict[str, Any]
    schema: pa.Schema
    max_parallelism: int

    @property
    def key_groups(self) -> KeyGroupRange:
        """The key groups of the whole operator."""
        return KeyGroupRange(0, self.max_parallelism - 1)


def open_write(target: Location, prefix: str) -> None:
    """Creates the directory and opens the write, in which all file names begin with ``prefix``.

    Raises :class:`AlreadyExistsError` when something exists at ``target``.
    """
    make_directory(target, exist_ok=False)
    try:
        publish(_open_mark(target, prefix), b"")
    except BaseException:
        discard(target, prefix)
        raise


def _open_mark(target: Location, prefix: str) -> Location:
    return target.child(f"{prefix}open")


def _ends(target: Location, prefix: str, how: bytes) -> bool:
    """Records the outcome ``how`` if none is recorded yet; returns whether ``how`` is the recorded outcome."""
    mark = _end_mark(target, prefix)
    try:
        publish(mark, how)
    except AlreadyExistsError:
        return read_beginning(mark, len(how) + 1) == how
    return True


def _end_mark(target: Location, prefix: str) -> Location:
    return target.child(f"{prefix}end")


def write_part(
    target: Location, prefix: str, state: NewState, rows: pa.Table, given_groups: pa.ChunkedArray | None = None
) -> CanonicalKeyedStateHandle | None:
    """Writes a part: some rows of a state. Returns None without rows.

    The order of the rows matters only for the elements of a list. ``given_groups`` are the rows' key groups as stated
    by their author, if any. Raises :class:`StateValueError` for a wrong key group and for a repeated key. Raises
    :class:`StorageError` and deletes the part when the write has ended.
    """
    if rows.num_rows == 0:
        return None
    check_unique(state, rows)
    names = [name for name in rows.column_names if name.startswith(KEY_PREFIX)]
    hashes = [hash_arrays([batch.column(name) for name in names], names) for batch in rows.to_batches()]
    groups = key_groups_of(np.concatenate(hashes), state.max_parallelism)
    if given_groups is not None:
        _check_key_groups(state, rows.select(names), given_groups, groups)
    owned = KeyGroupRange(int(groups.min()), int(groups.max()))
    files = UnsharedFiles(target, prefix)
    writer = CanonicalWriter(files, state.uid, owned)
    try:
        writer.write_table(state.name, state.descriptor, rows, groups, owned)
    finally:
        # Checked after the files were written. The process that ends the write deletes the marker first and lists the
        # files afterwards: so either that process or this one finds and deletes a late file.
        if not exists(_open_mark(target, prefix)):
            _take_back(target, files)
            raise StorageError(f"a part of {target.url} arrived after the write had ended", target.url)
    return writer.handles[0]


def _check_key_groups(state: NewState, keys: pa.Table, given: pa.ChunkedArray, groups: AnyArray) -> None:
    wrong = np.flatnonzero(given.fill_null(-1).to_numpy() != groups)
    if wrong.size:
        place = int(wrong[0])
        raise StateValueError(
            f"state {state.name!r} of operator {state.uid!r}: column 'key_group' is {given[place].as_py()} for the "
            f"key {keys.slice(place, 1).to_pylist()[0]}, which is in key group {groups[place]} of "
            f"{state.max_parallelism}; remove the column"
        )


def _take_back(target: Location, files: UnsharedFiles) -> None:
    for file in files.finished:
        delete_file(target.child(file.path))
    delete_empty_directory(target)


def check_unique(state: NewState, rows: pa.Table) -> None:
    """Raises :class:`StateValueError` if two rows have the same key, map entry or timer. Lists may repeat a key."""
    unique = _UNIQUE.get(state.descriptor["kind"], ())
    names = [name for name in rows.column_names if name.startswith(unique)]
    if not names:
        return
    keys = pa.table([_comparable(name, rows.column(name)) for name in names], names)
    try:
        counted = keys.group_by(names).aggregate([([], "count_all")])
        repeated = counted.filter(pc.greater(counted.column("count_all"), 1)).slice(0, 1).select(names).to_pylist()
    except pa.ArrowNotImplementedError:  # keys of maps may be nested
        found = Counter(map(str, keys.to_pylist()))
        repeated = [row for row, number in found.most_common(1) if number > 1]
    if repeated:
        raise StateValueError(
            f"state {state.name!r} of operator {state.uid!r} has one row for each key, but {repeated[0]} occurs twice"
        )


def _comparable(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column with one NaN for all NaNs and, except in a map's own keys, 0.0 in place of -0.0."""
    if not pa.types.is_floating(column.type):
        return column
    numbers = column.cast(pa.float64())
    if name.startswith(KEY_PREFIX):
        numbers = pc.add(numbers, 0.0)
    return pc.if_else(pc.is_nan(numbers), float("nan"), numbers)


def publish_savepoint(
    target: Location,
    prefix: str,
    state: NewState,
    parts: Sequence[CanonicalKeyedStateHandle],
    base: Snapshot | None,
    now_ms: int,
) -> str:
    """Publishes a savepoint that consists of these parts and of all other states of ``base``; returns its URL.

    The elements of a list are in the order of ``parts``. Raises :class:`StateValueError` for a key that occurs in two
    parts, :class:`AlreadyExistsError` when another writer was faster, :class:`AmbiguousWriteError` when it is unknown
    whether the savepoint exists, and :class:`StorageError` for a write that was given up.
    """
    files = UnsharedFiles(target, prefix)
    vertices = base.metadata.vertices if base else ()
    if not any(state.uid in vertex.operator_uids for vertex in vertices):
        parallelism = min(max(1, len(parts)), state.max_parallelism)
        name = VertexDescriptor(secrets.token_hex(16), state.uid, (state.uid,), parallelism, state.max_parallelism)
        vertices = (*vertices, name)
    keyed = _Keyed(vertices)
    if base:
        # Temporary files for reading are deleted here, because a Spark worker ends without running clean-up code.
        with ExitStack() as read:
            for other in keyed_states(base):
                read.enter_context(closing(other))
                if (other.uid, other.name) != (state.uid, state.name):
                    keyed.add(other.uid, _rewritten(other, files))
    keyed.add(state.uid, _in_order(target, files, state, parts, keyed.vertex_of(state.uid).parallelism))
    states = keyed.with_lists(base.metadata.states if base else {})
    metadata = CompletedCheckpoint(
        id=base.metadata.id if base else _FIRST_CHECKPOINT,
        job_id=base.metadata.job_id if base else secrets.token_hex(16),
        timestamp=now_ms,
        completion_timestamp=now_ms,
        directory=target.url,
        properties=CheckpointProperties(CheckpointType.SAVEPOINT, SavepointFormat.CANONICAL),
        vertices=vertices,
        states=states,
        finished=base.metadata.finished if base else frozenset(),
        edges=base.metadata.edges if base else (),
        lineage=base.metadata.lineage if base else None,
    )
    _publish(target, prefix, metadata, files)
    return target.url


def _publish(target: Location, prefix: str, metadata: CompletedCheckpoint, files: UnsharedFiles) -> None:
    end = _end_mark(target, prefix)
    published = _ends(target, prefix, _PUBLISHED)
    # A process that gave up the write has deleted all files under the prefix, perhaps including the end marker that
    # recorded it. Then `_ends` creates a new end marker, but the marker of the open write is missing.
    if not published or not exists(_open_mark(target, prefix)):
        if published:
            delete_file(end)
        _take_back(target, files)
        raise StorageError(f"{target.url} cannot be published: the write was abandoned", target.url)
    discard(target, prefix, {*_referred_to(metadata.states), end.name})
    try:
        write_metadata(target, metadata.to_json())
    except AmbiguousWriteError as error:
        message = f"{error}; its files are kept: if it exists the savepoint is complete, otherwise delete the directory"
        raise AmbiguousWriteError(message, target.url, error) from error
    except StorageError:
        delete_file(end)
        raise
    with suppress(StorageError):
        delete_file(end)


def check_base(base: Snapshot, uid: str) -> None:
    """Raises :class:`InvalidLocationError` if the snapshot cannot be the base of a savepoint with changed state.

    This is so if it has in-flight data, or if a subtask of the operator ``uid`` had finished.
    """
    url = base.directory.url
    if any(found.has_channel_state for found in base.metadata.states.values()):
        raise InvalidLocationError(f"{url} contains in-flight data; use a savepoint, which contains none", url)
    finished = {vertex for vertex, _ in base.metadata.finished}
    if any(vertex.id in finished for vertex in base.metadata.vertices if uid in vertex.operator_uids):
        raise InvalidLocationError(f"operator {uid!r} had finished in {url} and no longer has state", url)


def give_up(target: Location, prefix: str) -> None:
    """Ends a failed write and deletes its files, except those of a savepoint that exists or may exist.

    If the process ended while it was publishing the savepoint, the savepoint may exist, and no file is deleted.
    """
    with suppress(NotFoundError):
        if _ends(target, prefix, _GIVEN_UP) or has_metadata(target):
            discard(target, prefix)


def discard(target: Location, prefix: str, but: Collection[str] | None = None) -> None:
    """Deletes the files whose names begin with the prefix, except those named in ``but``.

    Without ``but``, the files of a savepoint that was published in the directory, by any process, are kept, and the
    directory is deleted as well if it is then empty.
    """
    if but is None and has_metadata(target):
        but = _referred_to(open_snapshot(target).metadata.states)
    delete_file(_open_mark(target, prefix))
    for name in list_names(target):
        if name.startswith(prefix) and name not in (but or ()):
            delete_file(target.child(name))
    if but is None:
        delete_empty_directory(target)


def _referred_to(states: Mapping[SubtaskKey, SubtaskState]) -> set[str]:
    return {file.path for state in states.values() for file in state.files()}


class _Keyed:
    """Handles of keyed state by subtask: a handle belongs to the subtask that owns its first key group."""

    def __init__(self, vertices: Sequence[VertexDescriptor]) -> None:
        self._vertices = {uid: vertex for vertex in vertices for uid in vertex.operator_uids}
        self._handles: dict[SubtaskKey, dict[str, list[KeyedHandle]]] = {}

    def vertex_of(self, uid: str) -> VertexDescriptor:
        return self._vertices[uid]

    def add(self, uid: str, handles: Iterable[CanonicalKeyedStateHandle]) -> None:
        vertex = self._vertices[uid]
        for handle in handles:
            subtask = owner_of_key_group(handle.key_groups.first, vertex.max_parallelism, vertex.parallelism)
            self._handles.setdefault((vertex.id, subtask), {}).setdefault(uid, []).append(handle)

    def with_lists(self, base: Mapping[SubtaskKey, SubtaskState]) -> dict[SubtaskKey, SubtaskState]:
        """The state of every subtask in the base or with handles: the handles, and the list states of the base."""
        states = {}
        for key in sorted(base.keys() | self._handles.keys()):
            lists = {uid: found.lists for uid, found in base[key].operators.items()} if key in base else {}
            keyed = self._handles.get(key, {})
            operators = {
                uid: OperatorSubtaskState(tuple(keyed.get(uid, ())), lists.get(uid, ()))
                for uid in sorted(lists.keys() | keyed.keys())
            }
            length = sum(file.length for handles in keyed.values() for found in handles for file in found.state_files())
            states[key] = SubtaskState(operators, length)
        return states


def _rewritten(state: StoredState, files: UnsharedFiles) -> Iterator[CanonicalKeyedStateHandle]:
    """Writes a state of the base in canonical form, one part per subtask; subtasks without rows have no part.

    A finished subtask has no rows, and so gets no handle.
    """
    vertex = state.vertex
    for subtask in range(vertex.parallelism):
        owned = key_group_range(vertex.max_parallelism, vertex.parallelism, subtask)
        writer = CanonicalWriter(files, state.uid, owned)
        writer.write_batches(state.name, state.descriptor, state.schema, state.rows(owned))
        yield from (handle for handle in writer.handles if handle.row_groups)


def _in_order(
    target: Location,
    files: UnsharedFiles,
    state: NewState,
    parts: Sequence[CanonicalKeyedStateHandle],
    parallelism: int,
) -> Iterator[CanonicalKeyedStateHandle]:
    """The parts unchanged if no key group is in two of them; otherwise merged into one part per subtask."""
    ranges = sorted(part.key_groups for part in parts)
    if all(before.last < after.first for before, after in pairwise(ranges)):
        yield from parts
        return
    with closing(StoredFiles(target.url)) as reader:
        for subtask in range(parallelism):
            owned = key_group_range(state.max_parallelism, parallelism, subtask)
            writer = CanonicalWriter(files, state.uid, owned)
            writer.write_batches(state.name, state.descriptor, state.schema, _merged(reader, state, parts, owned))
            yield from (handle for handle in writer.handles if handle.row_groups)


def _merged(
    reader: StoredFiles, state: NewState, parts: Sequence[CanonicalKeyedStateHandle], owned: KeyGroupRange
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of all parts in ascending key-group order, with one key group in memory at a time."""
    sources = [
        stored.batches(reader, owned, state.max_parallelism)
        for part in parts
        for stored in canonical_states(state.uid, [part])
    ]
    for group, found in groupby(merge(*sources, key=itemgetter(0)), key=itemgetter(0)):
        rows = pa.Table.from_batches([batch for _, batch in found])
        check_unique(state, rows)
        keys = [rows.column(name) for name in rows.column_names if name.startswith(KEY_PREFIX)]
        for batch in rows.take(order_by(keys)).to_batches():
            yield group, batch
