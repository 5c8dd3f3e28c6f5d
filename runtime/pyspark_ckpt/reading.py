"""Readers of the data source: the list of states in a snapshot, and the rows of one state.

A reader is sent to Spark's workers, so it holds only names; each partition opens the snapshot again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from ckpt_runtime.graph.key_groups import KeyGroupRange, key_group_range
from ckpt_runtime.snapshots.keyed_states import StoredState, keyed_states
from ckpt_runtime.snapshots.snapshot import Snapshot, open_snapshot
from ckpt_runtime.state.errors import schema_text
from pyspark_ckpt.columns import StateColumns
from pyspark_ckpt.options import READING, OptionError, Options


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
