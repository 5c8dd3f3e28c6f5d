"""Stored rows as entries of the database: the form of a key, several schemas, and entries that are damaged."""

from __future__ import annotations

import pyarrow as pa
import pytest

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.errors import CorruptStateError
from ckpt_runtime.state.hashing import hash_arrays, key_groups_of
from ckpt_runtime.state.rocksdb.columnar_rows import ColumnarCodec

OLD = pa.schema([("key.a", pa.int32()), ("key.b", pa.string()), ("n", pa.int64())])
NEW = pa.schema([*OLD, ("x", pa.float32()), ("d", pa.decimal128(12, 3)), ("t", pa.large_binary())])


def codec(current: int = 1, first: int = 0, state_id: int = 258) -> ColumnarCodec:
    return ColumnarCodec("s", state_id, {0: OLD, 1: NEW}, current, KeyGroupRange(first, 32_767), 32_768)


def rows(schema: pa.Schema = NEW) -> pa.RecordBatch:
    columns = {
        "key.a": pa.array([1, None, -3], pa.int32()),
        "key.b": ["x", "", None],
        "n": [5, None, 2**40],
        "x": pa.array([-0.0, float("inf"), None], pa.float32()),
        "d": pa.array(["1.5", None, "-2"]).cast(pa.decimal128(12, 3)),
        "t": pa.array([b"", b"\0\xff", None], pa.large_binary()),
    }
    return pa.record_batch([columns[name] for name in schema.names], schema=schema)


def stored(schema: pa.Schema = NEW) -> pa.RecordBatch:
    """The same rows in the order of the database, which is that of their key groups here."""
    groups = key_groups_of(hash_arrays(rows().columns[:2], ["a", "b"]), 32_768)
    return rows(schema).take(pa.array(groups.argsort()))


def test_entries_give_their_rows_back() -> None:
    entries = list(codec().entries(rows()))
    assert entries == sorted(entries)
    ((schema_id, found),) = codec().decode(entries)
    assert (schema_id, found) == (1, stored())
    assert "-0.0" in map(str, found["x"])


def test_a_key_begins_with_its_key_group_and_its_state() -> None:
    columns, keys = codec().ordered_keys(rows().columns[:2])
    assert columns == stored().columns[:2]
    groups = key_groups_of(hash_arrays(columns, ["a", "b"]), 32_768)
    assert max(groups) > 255
    assert [key[:4] for key in keys] == [int(group).to_bytes(2, "big") + b"\1\2" for group in groups]


@pytest.mark.parametrize("digits", [None, 6, 1], ids=["numbers", "strings of one length", "strings"])
def test_entries_come_in_the_order_of_the_database_and_about_so_when_lengths_differ(digits: int | None) -> None:
    keys = pa.array(range(1000)) if digits is None else pa.array([f"{number:0{digits}}" for number in range(1000)])
    schema = pa.schema([("key.a", keys.type), ("n", pa.int64())])
    batch = pa.record_batch([keys, pa.array(range(1000))], schema=schema)
    form = ColumnarCodec("s", 0, {0: schema}, 0, KeyGroupRange(0, 127), 128)
    entries = list(form.entries(batch))
    in_order = [entry[: 2 if digits == 1 else None] for entry, _ in entries]
    assert in_order == sorted(in_order)
    ((_, found),) = form.decode(entries)
    assert found.sort_by("n") == batch


def test_a_key_of_another_subtask_is_refused() -> None:
    least = int(min(key_groups_of(hash_arrays(rows().columns[:2], ["a", "b"]), 32_768)))
    with pytest.raises(CorruptStateError, match=f"state 's' has rows of key groups {least} to"):
        codec(first=least + 1).ordered_keys(rows().columns[:2])


def test_each_entry_is_read_in_the_schema_in_which_it_was_written() -> None:
    before = [value for _, value in codec(0).entries(rows(OLD))]
    after = [value for _, value in codec(1).entries(rows())]
    found = dict(codec().rows(stored().columns[:2], [before[0], None, after[2]]))
    assert found == {0: stored(OLD).slice(0, 1), 1: stored().slice(2)}
    assert list(codec().rows(rows().columns[:2], [None] * 3)) == []


def test_every_damage_is_an_error() -> None:
    (key, value), *_ = codec().entries(rows())
    broken = [value[:length] for length in range(len(value))] + [value + b"\0", b"\0\7" + value[2:]]
    broken += [value[:2] + b"\2" + value[3:], value[:-4] + b"\xff\xff\xff\x7f"]
    for entry in broken:
        with pytest.raises(CorruptStateError, match=r"cannot be read|unknown schema 7|without a schema"):
            list(codec().decode([(key, entry)]))
    for length in range(4, len(key)):
        with pytest.raises(CorruptStateError):
            list(codec().decode([(key[:length], value)]))


def test_bytes_that_are_not_text_are_an_error() -> None:
    entries = [(key.replace(b"x", b"\xff"), value) for key, value in codec().entries(rows().slice(0, 1))]
    with pytest.raises(CorruptStateError, match="an entry of state 's' cannot be read"):
        list(codec().decode(entries))
