"""The data source ``ckpt-state``. Spark looks for it in every session, so it imports its dependencies on use.

One reader lists the states in a snapshot, the other reads the rows of one state. A reader is sent to Spark's workers,
so it holds only names; each partition opens the snapshot again.

The writer makes a new savepoint with the rows of a DataFrame as one state. Tasks write parts, with any distribution of
rows over them; the commit on the driver takes over the content of the base and publishes the savepoint. A failed or
aborted write leaves no files, unless storage did not answer and it is unknown whether the savepoint was published.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from ckpt_runtime.checkpoint.completed_checkpoint import CanonicalKeyedStateHandle
from ckpt_runtime.graph.key_groups import (
    DEFAULT_MAX_PARALLELISM,
    UPPER_BOUND_MAX_PARALLELISM,
    KeyGroupRange,
    key_group_range,
)
from ckpt_runtime.snapshots.authoring import NewState, check_base, give_up, open_write, publish_savepoint, write_part
from ckpt_runtime.snapshots.keyed_states import StoredState, keyed_states
from ckpt_runtime.snapshots.snapshot import Snapshot, check_outside, open_snapshot
from ckpt_runtime.state.errors import schema_text
from ckpt_runtime.state.hashing import check_key_types
from ckpt_runtime.state.stored_rows import KEY_PREFIX, descriptor_of, without_prefix
from ckpt_runtime.state.values import check_supported
from ckpt_runtime.storage.errors import AlreadyExistsError
from ckpt_runtime.storage.filesystem import exists, resolve
from pyspark_ckpt.columns import KEY_GROUP, StateColumns, TableError, new_stored_schema

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


READING = ("path", "operator", "state", "numPartitions")
WRITING = ("path", "operator", "state", "base", "kind", "maxParallelism")
_DIGITS = 10


class OptionError(ValueError):
    """An option is missing, unknown or has a value that it cannot have."""


class Options:
    """The given options, which must be among the ``allowed``. Names are case-insensitive, like Spark's."""

    def __init__(self, given: Mapping[str, str], allowed: Sequence[str]) -> None:
        """Raises :class:`OptionError` for an option that is not allowed."""
        known = {name.lower() for name in allowed}
        self._given = {name.lower(): value for name, value in given.items()}
        for name in self._given.keys() - known:
            raise OptionError(f"option {name!r} is unknown, allowed are {', '.join(allowed)}")

    def get(self, name: str) -> str | None:
        """The value of an option, or None when it was not given."""
        return self._given.get(name.lower())

    def required(self, name: str) -> str:
        """The value of an option. Raises :class:`OptionError` when it was not given."""
        value = self.get(name)
        if not value:
            raise OptionError(f"option {name!r} is missing")
        return value

    def positive(self, name: str) -> int | None:
        """The value as a number above zero and below a billion, or None when it was not given."""
        value = self.get(name)
        if value is None:
            return None
        if not (value.isascii() and value.isdecimal() and len(value) < _DIGITS and int(value) > 0):
            raise OptionError(f"option {name!r} is {value!r}, it must be a number above 0 and below a billion")
        return int(value)


def reader_of(given: Mapping[str, str]) -> StateListReader | StateReader:
    """The reader for these options. Raises :class:`OptionError`, and the errors of opening the snapshot."""
    options = Options(given, READING)
    path, operator, name = options.required("path"), options.get("operator"), options.get("state")
    if name is None:
        return StateListReader(path, operator)
    snapshot = open_snapshot(path)
    state = find_state(snapshot, options.required("operator"), name)
    return StateReader(snapshot, state, options.positive("numPartitions") or state.vertex.parallelism)


def find_state(snapshot: Snapshot, operator: str, name: str) -> StoredState:
    """The state with this name. Raises :class:`OptionError` that lists the existing states."""
    if states := [state for state in keyed_states(snapshot, operator) if state.name == name]:
        return states[0]
    found = ", ".join(f"{state.name!r} of {state.uid!r}" for state in keyed_states(snapshot))
    raise OptionError(
        f"{snapshot.directory.url} has no keyed state {name!r} of an operator with the uid {operator!r}; "
        f"it has {found or 'none'}"
    )


class StateListReader(DataSourceReader):
    """One row for each keyed state."""

    spark_schema = StructType(
        [
            StructField("operator", StringType(), nullable=False),
            StructField("state", StringType(), nullable=False),
            StructField("kind", StringType(), nullable=False),
            StructField("parallelism", IntegerType(), nullable=False),
            StructField("max_parallelism", IntegerType(), nullable=False),
            StructField("bytes", LongType()),
            StructField("schema", StringType(), nullable=False),
        ]
    )

    def __init__(self, path: str, operator: str | None) -> None:
        self._path = path
        self._operator = operator

    def read(self, partition: InputPartition) -> Iterator[tuple[str | int | None, ...]]:
        for state in keyed_states(open_snapshot(self._path), self._operator):
            vertex = state.vertex
            sizes = (vertex.parallelism, vertex.max_parallelism, state.bytes)
            yield (state.uid, state.name, state.kind, *sizes, schema_text(state.schema))


@dataclass
class KeyGroupPartition(InputPartition):
    """Key groups ``first`` to ``last``."""

    first: int
    last: int


class StateReader(DataSourceReader):
    """The rows of one state. By default there is one partition per subtask of the job: no file is read twice."""

    def __init__(self, snapshot: Snapshot, state: StoredState, partitions: int) -> None:
        self._path = snapshot.directory.url
        self._operator = state.uid
        self._name = state.name
        self._max_parallelism = state.vertex.max_parallelism
        self._partitions = min(partitions, self._max_parallelism)
        self.spark_schema = StateColumns(state.kind, state.schema).spark_schema

    def partitions(self) -> list[KeyGroupPartition]:
        ranges = (key_group_range(self._max_parallelism, self._partitions, i) for i in range(self._partitions))
        return [KeyGroupPartition(found.first, found.last) for found in ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, KeyGroupPartition)
        snapshot = open_snapshot(self._path)
        key_groups = KeyGroupRange(partition.first, partition.last)
        # Spark's workers end without cleaning up.
        with closing(find_state(snapshot, self._operator, self._name)) as state:
            yield from StateColumns(state.kind, state.schema).tables(state.rows(key_groups))


_NEW_KINDS = ("value", "list", "map", "timers")


def writer_of(given: Mapping[str, str], table: StructType, *, overwrite: bool) -> StateDataWriter:
    """The writer for these options and columns; its target is open from this call on.

    Spark calls this at the start of a write, and later commits or aborts. Raises :class:`OptionError`,
    ``TableError`` for columns that the state does not have, and the errors of opening the base.
    """
    options = Options(given, WRITING)
    if overwrite:
        raise OptionError("mode 'overwrite' is not possible, a savepoint is written to a new directory: use 'append'")
    target = resolve(options.required("path"))
    if exists(target):
        raise AlreadyExistsError(f"cannot write to {target.url}: it already exists", target.url)
    base = open_snapshot(url) if (url := options.get("base")) else None
    state = _state(options, table, base)
    if base is not None:
        check_outside(target, base.directory)
        check_base(base, state.uid)
    StateColumns(state.descriptor["kind"], state.schema).check_table(table)
    writer = StateDataWriter(target.url, None if base is None else base.directory.url, state)
    open_write(target, writer.prefix)
    return writer


def _state(options: Options, table: StructType, base: Snapshot | None) -> NewState:
    """The description of the state from the base, or from options and columns if the base does not have it."""
    uid, name, kind = options.required("operator"), options.required("state"), options.get("kind")
    vertices = () if base is None else base.metadata.vertices
    fixed = next((vertex.max_parallelism for vertex in vertices if uid in vertex.operator_uids), None)
    asked = options.positive("maxParallelism")
    if fixed is not None and asked not in (None, fixed):
        raise OptionError(f"option 'maxParallelism' is {asked}, operator {uid!r} has {fixed} in the base")
    if asked is not None and asked > UPPER_BOUND_MAX_PARALLELISM:
        raise OptionError(f"option 'maxParallelism' is {asked}, it must be at most {UPPER_BOUND_MAX_PARALLELISM}")
    max_parallelism = fixed or asked or DEFAULT_MAX_PARALLELISM
    for known in () if base is None else keyed_states(base, uid):
        if known.name == name:
            if kind not in (None, known.kind):
                raise OptionError(f"option 'kind' is {kind!r}, the state is of kind {known.kind!r} in the base")
            return NewState(uid, name, known.descriptor, known.schema, max_parallelism)
    if kind not in _NEW_KINDS:
        raise OptionError(
            f"option 'kind' is {kind!r}; for a state that the base has not it must be one of {', '.join(_NEW_KINDS)}"
        )
    schema = new_stored_schema(kind, table)
    key_schema = without_prefix(schema, KEY_PREFIX)
    check_supported(schema, f"state {name!r} of operator {uid!r}")
    check_key_types(key_schema, key_schema.names)
    return NewState(uid, name, descriptor_of(kind, key_schema, schema), schema, max_parallelism)


@dataclass
class WrittenPart(WriterCommitMessage):
    """The part that one task wrote; None when there were no rows."""

    handle: CanonicalKeyedStateHandle | None


class StateDataWriter(DataSourceArrowWriter):
    """The writer, sent to Spark's workers. Files of one write have one prefix, which finds those of failed tasks."""

    def __init__(self, target: str, base: str | None, state: NewState) -> None:
        self._target = target
        self._base = base
        self._state = state
        self.prefix = f"{uuid4()}-"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        state = self._state
        columns = StateColumns(state.descriptor["kind"], state.schema)
        groups: list[pa.Array] = []

        def stored(table: pa.RecordBatch) -> pa.RecordBatch:
            if KEY_GROUP in table.schema.names:
                groups.append(table.column(KEY_GROUP).cast(pa.int64()))
            return columns.stored_rows(table)

        try:
            rows = pa.Table.from_batches(map(stored, iterator), state.schema)
        except TableError as error:
            raise TableError(f"state {state.name!r} of operator {state.uid!r}: {error}") from error
        given = pa.chunked_array(groups) if groups else None
        return WrittenPart(write_part(resolve(self._target), self.prefix, state, rows, given))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        written = [message.handle for message in messages if isinstance(message, WrittenPart)]
        parts = [handle for handle in written if handle is not None]
        base = None if self._base is None else open_snapshot(self._base)
        now_ms = time.time_ns() // 1_000_000
        publish_savepoint(resolve(self._target), self.prefix, self._state, parts, base, now_ms)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        give_up(resolve(self._target), self.prefix)


class StateDataSource(DataSource):
    """``option("path", SNAPSHOT)`` lists its states. With ``operator`` and ``state`` it reads the rows of one state, by
    key group.

    Writing creates a new savepoint with the given rows as that state.
    """

    @classmethod
    def name(cls) -> str:
        return "ckpt-state"

    def schema(self) -> StructType:
        from pyspark_ckpt.source import reader_of

        return reader_of(self.options).spark_schema

    def reader(self, schema: StructType) -> DataSourceReader:
        from pyspark_ckpt.source import reader_of

        return reader_of(self.options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        from pyspark_ckpt.source import writer_of

        return writer_of(self.options, schema, overwrite=overwrite)
