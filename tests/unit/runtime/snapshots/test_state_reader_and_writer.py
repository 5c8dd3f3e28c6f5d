"""The reader and the writer of ``ckpt-state`` as Spark calls them, without Spark, on every kind of file system."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import from_arrow_schema

from ckpt_runtime.checkpoint.properties import SavepointFormat
from ckpt_runtime.graph.ddl import parse_ddl
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.snapshots.copying import convert_snapshot, copy_snapshot
from ckpt_runtime.snapshots.inspection import verify_snapshot
from ckpt_runtime.snapshots.snapshot import open_snapshot
from ckpt_runtime.state.errors import StateSchemaError, StateValueError, UnsupportedKeyTypeError
from ckpt_runtime.storage.errors import AlreadyExistsError, InvalidLocationError, NotFoundError
from ckpt_runtime.storage.filesystem import Location, exists, resolve
from pyspark_ckpt.columns import TableError
from pyspark_ckpt.source import OptionError, StateDataWriter, StateListReader, StateReader, reader_of, writer_of
from tests.support.golden import DIRECTORY, SOURCES
from tests.support.snapshots import write_keyed_state

pytestmark = pytest.mark.row("203.9")

SAVEPOINT = str(DIRECTORY / "format-2" / "savepoint")
KEYED = "key struct<id: bigint>, value struct<v: bigint>"


def reading(path: str, operator: str, state: str, **options: str) -> StateReader:
    reader = reader_of({"path": path, "operator": operator, "state": state, **options})
    assert isinstance(reader, StateReader)
    return reader


def rows(reader: StateReader) -> list[dict[str, Any]]:
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def writing(target: Location, columns: str = KEYED, **options: str) -> StateDataWriter:
    given: Mapping[str, str] = {"path": target.url, "operator": "op", "state": "s", **options}
    return writer_of(given, from_arrow_schema(parse_ddl(columns)), overwrite=False)


def batch(*pairs: tuple[int, int | None]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"key": {"id": key}, "value": {"v": value}} for key, value in pairs])


def test_state_is_read_and_written_in_any_file_system(base: Location) -> None:
    source, target = base.child("source"), base.child("target")
    copy_snapshot(SAVEPOINT, source)
    reader = reading(source.url, "kept", "groups")
    writer = writer_of(
        {"path": target.url, "operator": "kept", "state": "groups", "base": source.url},
        reader.spark_schema,
        overwrite=False,
    )
    messages = [writer.write(reader.read(part)) for part in reader.partitions()]
    assert not exists(target.child("_metadata"))
    writer.commit(messages)
    assert verify_snapshot(open_snapshot(target)) == []
    assert sorted(map(str, rows(reading(target.url, "kept", "groups")))) == sorted(map(str, rows(reader)))
    listed = reader_of({"path": target.url})
    assert isinstance(listed, StateListReader)
    assert len(list(listed.read(InputPartition(None)))) == 7


@pytest.mark.parametrize("form", ["canonical", "rocksdb"])
def test_every_form_is_read_in_any_number_of_partitions(tmp_path: Path, form: str) -> None:
    if form == "canonical":
        convert_snapshot(SAVEPOINT, resolve(tmp_path / "s"), SavepointFormat.CANONICAL, "hashmap")
        operator, state, number = "kept", "seen", SOURCES
        many = "1000"
    else:
        write_keyed_state("rocksdb", resolve(tmp_path / "s"), [KeyGroupRange(0, 63), KeyGroupRange(64, 127)])
        operator, state, number = "counts", "v", 100
        many = "20"  # each part opens a database
    whole = rows(reading(str(tmp_path / "s"), operator, state))
    assert len(whole) == number
    for partitions in ("1", "3", many):
        assert rows(reading(str(tmp_path / "s"), operator, state, numPartitions=partitions)) == whole


def test_abandoned_write_leaves_no_files(base: Location) -> None:
    target = base.child("target")
    writer = writing(target, kind="value")
    messages = [writer.write(iter([batch((1, 1))])), writer.write(iter([batch((1, 2))]))]
    with pytest.raises(StateValueError, match="has one row for each key, but {'key.id': 1} occurs twice"):
        writer.commit(messages)
    writer.abort(messages)
    assert not exists(target)


def test_a_wrong_key_group_is_refused(base: Location) -> None:
    target = base.child("target")
    with pytest.raises(TableError, match="column 'key_group' has to be of an integer type, it is string"):
        writing(target, f"key_group string, {KEYED}", kind="value")
    writer = writing(target, f"key_group int, {KEYED}", kind="value")
    with pytest.raises(StateValueError, match="state 's' of operator 'op': column 'key_group' is 128 for the key"):
        writer.write(iter([batch((1, 1)).add_column(0, "key_group", pa.array([128], pa.int32()))]))
    writer.abort([])
    assert not exists(target)


def test_values_that_do_not_fit_are_refused_with_the_state_they_are_for(base: Location) -> None:
    target = base.child("target")
    writer = writing(target, "key struct<id: bigint>, value struct<v: bigint NOT NULL>", kind="value")
    with pytest.raises(
        TableError, match=r"^state 's' of operator 'op': column 'value\.v' is null in 1 place, .*NOT NULL"
    ):
        writer.write(iter([batch((1, 1)), batch((2, None))]))
    writer.abort([])
    assert not exists(target)


def test_two_writes_to_one_place_make_one_savepoint(base: Location) -> None:
    target = base.child("target")
    writer = writing(target, kind="value")
    with pytest.raises(AlreadyExistsError, match="it already exists"):
        writing(target, kind="value")
    writer.commit([writer.write(iter([batch((0, 1))]))])
    assert [row["key"]["id"] for row in rows(reading(target.url, "op", "s"))] == [0]
    assert verify_snapshot(open_snapshot(target)) == []
    with pytest.raises(AlreadyExistsError):
        writing(target, kind="value")


@pytest.mark.parametrize(
    ("columns", "options", "error", "reason"),
    [
        (KEYED, {}, OptionError, "option 'kind' is None"),
        (KEYED, {"kind": "aggregate"}, OptionError, "must be one of value, list, map, timers"),
        (KEYED, {"kind": "map"}, TableError, "a state of kind 'map' has the columns"),
        (KEYED, {"kind": "value", "maxParallelism": "x"}, OptionError, "must be a number above 0"),
        (KEYED, {"kind": "value", "maxParallelism": "9" * 5000}, OptionError, "must be a number above 0 and below"),
        (KEYED, {"kind": "value", "maxParallelism": "32769"}, OptionError, "must be at most 32768"),
        (KEYED, {"kind": "value", "numPartitions": "2"}, OptionError, "option 'numpartitions' is unknown"),
        (KEYED, {"kind": "value", "base": "/nowhere"}, NotFoundError, "/nowhere"),
        (KEYED, {"kind": "value", "path": "relative"}, InvalidLocationError, "relative"),
        (KEYED, {"kind": "value", "operator": ""}, OptionError, "option 'operator' is missing"),
        (
            "key struct<id: array<int>>, value struct<v: int>",
            {"kind": "value"},
            UnsupportedKeyTypeError,
            "key column 'id' has type list",
        ),
        ("key struct<id: int>, value struct<v: void>", {"kind": "value"}, StateSchemaError, "is not supported"),
    ],
)
def test_rows_that_cannot_be_written_are_refused_before_any_file_is_written(
    tmp_path: Path, columns: str, options: dict[str, str], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        writing(resolve(tmp_path / "target"), columns, **options)
    assert list(tmp_path.iterdir()) == []
