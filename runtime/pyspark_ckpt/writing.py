"""The writer of the data source: a new savepoint with the rows of a DataFrame as one state.

Tasks write parts, with any distribution of rows over them; the commit on the driver takes over the content of the base
and publishes the savepoint. A failed or aborted write leaves nothing behind, unless storage did not answer and it is
unknown whether the savepoint was published.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from uuid import uuid4

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from ckpt_runtime.checkpoint.state_handles import CanonicalKeyedStateHandle
from ckpt_runtime.graph.key_groups import DEFAULT_MAX_PARALLELISM, UPPER_BOUND_MAX_PARALLELISM
from ckpt_runtime.snapshots.authoring import NewState, check_base, give_up, open_write, publish_savepoint, write_part
from ckpt_runtime.snapshots.keyed_states import keyed_states
from ckpt_runtime.snapshots.snapshot import Snapshot, check_outside, open_snapshot
from ckpt_runtime.state.hashing import check_key_types
from ckpt_runtime.state.stored_rows import KEY_PREFIX, descriptor_of, without_prefix
from ckpt_runtime.state.values import check_supported
from ckpt_runtime.storage.errors import AlreadyExistsError
from ckpt_runtime.storage.filesystem import exists, resolve
from pyspark_ckpt.columns import KEY_GROUP, StateColumns, TableError, new_stored_schema
from pyspark_ckpt.options import WRITING, OptionError, Options

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
