"""The canonical form: Parquet files of all kinds of state, read back for any range of key groups."""

from __future__ import annotations

import datetime as dt
import io
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec import structs

from ckpt_runtime.checkpoint.completed_checkpoint import CanonicalKeyedStateHandle, RowGroup, StateFile
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.graph.key_groups import KeyGroupRange, key_group_range
from ckpt_runtime.state import canonical
from ckpt_runtime.state.canonical import CanonicalWriter, canonical_states
from ckpt_runtime.state.errors import CorruptStateError, StateSchemaError
from ckpt_runtime.state.hashing import hash_arrays, key_groups_of
from ckpt_runtime.state.memory.backend import MemoryKeyedStateBackend
from ckpt_runtime.state.states import AggregateColumn, RowBufferSpec, TimeToLive
from ckpt_runtime.state.stored_rows import descriptor_of
from tests.support.inline_snapshots import CANONICAL, CHECKPOINT, InlineFiles, InlineReader, handles_of, restore

MAX = 128
ALL = KeyGroupRange(0, MAX - 1)
KEYS = range(500)
KEY = pa.schema([("k", pa.int64())])
VALUE = pa.schema([("n", pa.int64()), ("s", pa.string())])
STORED = pa.schema([("key.k", pa.int64()), ("value.s", pa.string())])
DESCRIPTOR = descriptor_of("value", KEY, STORED)
ROWS = RowBufferSpec("r", pa.schema([("k", pa.int64()), ("x", pa.float64())]), ("k",))
AGGREGATES = (
    AggregateColumn("avg", "x", "mean", pa.float64(), pa.float64()),
    AggregateColumn("count", None, "n", None, pa.int64()),
)
TTL = TimeToLive(10**12, lambda: 5)


def groups_of(keys: Sequence[int]) -> list[int]:
    return cast("list[int]", key_groups_of(hash_arrays([pa.array(keys, pa.int64())], ["k"]), MAX).tolist())


class Part:
    """One subtask's backend with a state of each kind."""

    def __init__(self, key_groups: KeyGroupRange, handles: Sequence[Any] = ()) -> None:
        self.key_groups = key_groups
        self.backend = MemoryKeyedStateBackend(key_groups, MAX, "op")
        if handles:
            restore(self.backend, handles)

    def claim(self) -> Part:
        backend = self.backend
        self.values, self.lists = backend.value_state("v", KEY, VALUE), backend.list_state("l", KEY, VALUE, TTL)
        self.maps, self.timers = backend.map_state("m", KEY, KEY, VALUE), backend.timers("$timers", KEY)
        self.rows, self.counts = backend.row_buffers([ROWS]), backend.aggregate_table("a", KEY, AGGREGATES)
        return self

    def fill(self) -> Part:
        self.claim()
        mine = [key for key, group in zip(KEYS, groups_of(KEYS), strict=True) if group in self.key_groups]
        for key in mine:
            self.values.put((key,), (key, f"s{key}"))
            self.lists.put((key,), [(9 - element, None) for element in range(10)])
            self.maps.put((key,), (2,), (key, "two"))
            self.maps.put((key,), (1,), (key, "one"))
            self.timers.register((key,), key * 10)
            self.timers.register((key,), 5)
        batch = pa.record_batch({"k": pa.array(mine, pa.int64()), "x": pa.array(mine, pa.float64())})
        self.counts.update(batch)
        side = self.rows.sides[0]
        side.append(batch, self.rows.slots_of([batch.column("k")]), np.ones(len(mine), np.uint8))
        return self

    def handles(self, properties: CheckpointProperties = CANONICAL) -> list[Any]:
        return handles_of([self.backend], properties)

    def content(self) -> dict[str, Any]:
        """As its canonical form has it, in the order in which it has it."""
        return {name: pq.read_table(io.BytesIO(file)).to_pylist() for name, file in contents(self.handles()).items()}


def contents(handles: Sequence[CanonicalKeyedStateHandle]) -> dict[str, bytes]:
    assert all(isinstance(handle, CanonicalKeyedStateHandle) for handle in handles)
    return {handle.name: handle.file.inline or b"" for handle in handles}


@pytest.fixture(scope="module")
def whole() -> Part:
    return Part(ALL).fill()


def test_every_kind_of_state_comes_back(whole: Part) -> None:
    again = Part(ALL, whole.handles()).claim()
    assert again.content() == whole.content()
    assert again.values.get((7,)) == (7, "s7")
    assert list(again.lists.get((7,))) == [(9 - element, None) for element in range(10)]
    assert dict(again.maps.get((7,))) == {(1,): (7, "one"), (2,): (7, "two")}
    assert again.timers.times_of((7,)) == (5, 70)
    assert sum(batch.num_rows for batch in again.rows.take_all()) == len(KEYS)


def test_unused_state_is_carried_over_in_both_forms(whole: Part) -> None:
    for properties in (CANONICAL, CHECKPOINT):
        passed_on = Part(ALL, whole.handles(properties))
        for handles in (passed_on.handles(CANONICAL), passed_on.handles(CHECKPOINT)):
            assert Part(ALL, handles).claim().content() == whole.content()


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (3, 2)])
def test_parts_are_clipped_and_merged(whole: Part, before: int, after: int) -> None:
    handles = [h for i in range(before) for h in Part(key_group_range(MAX, before, i)).fill().handles()]
    found: dict[str, list[Any]] = {}
    for index in range(after):
        for name, rows in Part(key_group_range(MAX, after, index), handles).claim().content().items():
            found.setdefault(name, []).extend(rows)
    assert found == whole.content()


def test_rows_are_sorted_by_key_group_and_key(whole: Part) -> None:
    frames = {name: pd.read_parquet(io.BytesIO(file)) for name, file in contents(whole.handles()).items()}
    for frame in frames.values():
        assert frame.key_group.tolist() == groups_of(frame["key.k"].tolist())
        assert frame[["key_group", "key.k"]].equals(
            frame[["key_group", "key.k"]].sort_values(["key_group", "key.k"], ignore_index=True)
        )
    assert frames["l"].groupby("key.k")["value.n"].apply(list).map(lambda n: n == list(range(9, -1, -1))).all()


def test_a_file_says_what_it_is_without_arrow(whole: Part) -> None:
    metadata = pq.ParquetFile(io.BytesIO(contents(whole.handles())["v"])).metadata
    assert list(metadata.metadata) == [b"ckpt.state"]
    assert metadata.row_group(0).column(0).compression == "ZSTD"
    assert metadata.row_group(0).column(0).statistics.has_min_max


ODD_TYPES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.float16(), [np.float16(2), np.float16("nan"), np.float16(-1), None]),
    (pa.float64(), [0.0, -0.0, float("nan"), None]),
    (pa.large_string(), ["b", "a", "", None]),
    (pa.dictionary(pa.int8(), pa.string()), ["b", "a", "b", None]),
    (pa.binary(2), [b"bb", b"aa", b"zz", None]),
    (pa.bool_(), [True, False, True, None]),
    (pa.uint64(), [2**63 + 5, 1, 0, None]),
    (pa.date64(), [dt.date(2024, 1, 1), dt.date(1969, 1, 1), dt.date(1970, 1, 1), None]),
    (pa.time32("s"), [dt.time(1), dt.time(0, 5), dt.time(0), None]),
    (pa.timestamp("s"), [dt.datetime(2024, 1, 1), dt.datetime(1960, 1, 1), dt.datetime(1970, 1, 1), None]),
    (pa.timestamp("us", "Europe/Berlin"), [dt.datetime(2024, 1, 1, tzinfo=dt.UTC)] * 3 + [None]),
    (pa.timestamp("ns"), [1, 2, 3, None]),
    (pa.duration("us"), [dt.timedelta(1), dt.timedelta(-1), dt.timedelta(0), None]),
    (pa.decimal128(38, 2), [Decimal("1.50"), Decimal("-2.00"), Decimal(0), None]),
    (pa.decimal256(40, 2), [Decimal("1.50"), Decimal("-2.00"), Decimal(0), None]),
    (pa.null(), [None] * 4),
]
NESTED_TYPES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.list_(pa.int32()), [[1], [], [None], None]),
    (pa.list_(pa.duration("us")), [[dt.timedelta(1)], [], [None], None]),
    (pa.large_list(pa.large_string()), [["a"], [], [None], None]),
    (pa.map_(pa.string(), pa.timestamp("s")), [[("a", dt.datetime(2024, 1, 1))], [], [("b", None)], None]),
    (pa.struct([("a", pa.int8()), ("b", pa.list_(pa.string()))]), [{"a": 1, "b": ["x"]}, {"a": None, "b": None}] * 2),
]


def of_type(kind: pa.DataType, values: list[Any], column: str) -> tuple[pa.Schema, pa.Table, Any]:
    other = "value.v" if column == "key.k" else "key.k"
    cells = pa.array(values, kind)
    table = pa.table({column: cells, other: pa.array(range(len(values)), pa.int64())})
    table = table.select(["key.k", "value.v"])
    keys = table.column("key.k").combine_chunks()
    return table.schema, table, key_groups_of(hash_arrays([keys], ["k"]), MAX)


@pytest.mark.parametrize(
    ("kind", "values", "column"),
    [(*case, column) for case in ODD_TYPES for column in ("key.k", "value.v")]
    + [(*case, "value.v") for case in NESTED_TYPES],
    ids=str,
)
def test_every_type_comes_back_as_it_was(kind: pa.DataType, values: list[Any], column: str) -> None:
    schema, table, groups = of_type(kind, values, column)
    descriptor = descriptor_of("value", pa.schema([pa.field("k", schema.field(0).type)]), schema)
    by_table, by_batch = writer_of(), writer_of()
    by_table.write_table("s", descriptor, table, groups, ALL)
    order = np.argsort(groups, kind="stable")
    (batch,) = table.take(pa.array(order)).combine_chunks().to_batches()
    by_batch.write_batches(
        "s", descriptor, schema, ((int(groups[row]), batch.slice(place, 1)) for place, row in enumerate(order))
    )
    for written in (by_table, by_batch):
        (state,) = canonical_states("op", written.handles)
        found = [part for _, part in state.batches(InlineReader(), ALL, MAX)]
        assert {part.schema for part in found} == {schema}
        rows = [str(row) for part in found for row in part.to_pylist()]
        assert sorted(rows) == sorted(str(row) for row in table.to_pylist())


def writer_of(key_groups: KeyGroupRange = ALL) -> CanonicalWriter:
    return CanonicalWriter(cast(Any, InlineFiles()), "op", key_groups)


def test_type_that_parquet_cannot_hold_is_refused_by_name() -> None:
    empty = pa.schema([("key.k", pa.int64()), ("value.v", pa.struct([]))])
    with pytest.raises(StateSchemaError, match=r"state 's' of operator 'op' has no canonical form.*value.v: struct<>"):
        writer_of().write_batches("s", descriptor_of("value", KEY, empty), empty, [])


def stored(keys: Sequence[int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(keys, pa.int64()), pa.array(map(str, keys))], schema=STORED)


def in_order(keys: Sequence[int]) -> Iterator[tuple[int, pa.RecordBatch]]:
    for group, key in sorted(zip(groups_of(keys), keys, strict=True)):
        yield group, stored([key])


@pytest.mark.parametrize("strange", [[3], [9], [5, 4]])
def test_key_groups_of_others_and_out_of_order_are_not_written(strange: list[int]) -> None:
    batches = [(group, stored([1])) for group in strange]
    with pytest.raises(CorruptStateError, match="state 's' has rows of key groups"):
        writer_of(KeyGroupRange(4, 8)).write_batches("s", DESCRIPTOR, STORED, batches)


def test_rows_stream_through_in_groups_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canonical, "ROWS_PER_GROUP", 64)
    monkeypatch.setattr(canonical, "BYTES_PER_GROUP", 64 * 24)
    streamed, sorted_at_once = writer_of(), writer_of()
    streamed.write_batches("s", DESCRIPTOR, STORED, in_order(KEYS))
    groups = np.array(groups_of(KEYS), np.int32)
    sorted_at_once.write_table("s", DESCRIPTOR, pa.Table.from_batches([stored(KEYS)]), groups, ALL)
    for written in (streamed, sorted_at_once):
        (handle,) = written.handles
        metadata = pq.ParquetFile(io.BytesIO(handle.file.inline or b"")).metadata
        sizes = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
        assert len(sizes) >= len(KEYS) // 64
        assert max(sizes) <= 64
        (state,) = canonical_states("op", [handle])
        some = list(state.batches(InlineReader(), KeyGroupRange(10, 20), MAX))
        assert [group for group, _ in some] == sorted(group for group, _ in some)
        assert {key for _, part in some for key in part.column(0).to_pylist()} == {
            key for key, group in zip(KEYS, groups_of(KEYS), strict=True) if 10 <= group <= 20
        }


class Counting(InlineReader):
    """Counts the bytes that are read."""

    def __init__(self) -> None:
        self.bytes = 0

    def read(self, file: StateFile, offset: int, length: int) -> bytes:
        self.bytes += length
        return super().read(file, offset, length)


def test_other_key_groups_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canonical, "ROWS_PER_GROUP", 2_000)
    keys = range(50_000)
    written = writer_of()
    written.write_table(
        "s", DESCRIPTOR, pa.Table.from_batches([stored(keys)]), np.array(groups_of(keys), np.int32), ALL
    )
    (state,) = canonical_states("op", written.handles)
    whole, part = Counting(), Counting()
    assert sum(rows.num_rows for _, rows in state.batches(whole, ALL, MAX)) == len(keys)
    assert list(state.batches(part, KeyGroupRange(3, 3), MAX))
    assert part.bytes < whole.bytes / 3


def failing_write(tmp_path: Path) -> None:
    raise OSError(f"{tmp_path} is full")


def test_an_error_while_rows_come_is_the_error(tmp_path: Path) -> None:
    def batches() -> Iterator[tuple[int, pa.RecordBatch]]:
        yield from in_order([1, 2])
        failing_write(tmp_path)

    written = writer_of()
    with pytest.raises(OSError, match="is full"):
        written.write_batches("s", DESCRIPTOR, STORED, batches())
    assert written.handles == []


# Hostile files. Their checksums fit: anybody may have written a snapshot.


def valid(keys: Sequence[int] = KEYS) -> CanonicalKeyedStateHandle:
    written = writer_of()
    written.write_batches("s", DESCRIPTOR, STORED, in_order(keys))
    return written.handles[0]


def with_content(handle: CanonicalKeyedStateHandle, content: bytes) -> CanonicalKeyedStateHandle:
    return structs.replace(handle, file=StateFile("", len(content), "", content))


def rewritten(change: Callable[[pa.Table], pa.Table]) -> CanonicalKeyedStateHandle:
    handle = valid()
    table = pq.read_table(io.BytesIO(handle.file.inline or b""))
    sink = io.BytesIO()
    about = canonical.description("op", "s", ALL, DESCRIPTOR)
    changed = change(table)
    with pq.ParquetWriter(sink, changed.schema, store_schema=False) as made:
        made.add_key_value_metadata({"ckpt.state": about})
        made.write_table(changed)
    return with_content(handle, sink.getvalue())


def column(table: pa.Table, index: int, array: Any) -> pa.Table:
    return table.set_column(index, table.field(index).with_type(array.type), array)


HOSTILE: dict[str, tuple[Callable[[], CanonicalKeyedStateHandle], str]] = {
    "no Parquet": (lambda: with_content(valid(), b"x" * 100), "magic bytes"),
    "nothing": (lambda: with_content(valid(), b""), "0 bytes"),
    "a cut file": (lambda: with_content(valid(), (valid().file.inline or b"")[:-30]), "magic bytes"),
    "an absurd footer": (lambda: with_content(valid(), b"PAR1" + b"\x7f" * 8 + b"\xff\xff\xff\x7fPAR1"), "footer"),
    "another key type": (lambda: rewritten(lambda t: column(t, 1, t.column(1).cast(pa.int32()))), "its columns are"),
    "text for numbers": (lambda: rewritten(lambda t: column(t, 1, t.column(1).cast(pa.string()))), "its columns are"),
    "a column too many": (lambda: rewritten(lambda t: t.append_column("x", t.column(1))), "its columns are"),
    "no key groups": (lambda: rewritten(lambda t: t.drop_columns("key_group")), "its columns are"),
    "fewer rows": (lambda: rewritten(lambda t: t.slice(1)), "instead of .500"),
    "more rows": (lambda: structs.replace(valid(), row_groups=(RowGroup(10**18, ALL),)), "instead of"),
    "a narrower range": (
        lambda: structs.replace(valid(), row_groups=(RowGroup(500, KeyGroupRange(3, 5)),)), "do not ascend from 3 to 5"
    ),
    "rows out of order": (
        lambda: rewritten(lambda t: t.take(pa.array(range(len(KEYS) - 1, -1, -1)))), "do not ascend from 0 to 127"
    ),
    "other key groups": (
        lambda: rewritten(lambda t: column(t, 0, pa.array([200] * len(KEYS), pa.int32()))), "do not ascend"
    ),
    "keys in a wrong group": (
        lambda: rewritten(lambda t: column(t, 0, pa.array([5] * len(KEYS), pa.int32()))), "not in their key groups"
    ),
    "bytes that are no text": (
        lambda: rewritten(lambda t: column(t, 2, pa.array([b"\xff"] * len(KEYS)).view(pa.string()))), "UTF-?8"
    ),
    "another state's": (lambda: structs.replace(valid(), name="other"), "it describes itself as"),
    "another range": (lambda: structs.replace(valid(), key_groups=KeyGroupRange(0, 200)), "it describes itself as"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_are_refused(kind: str) -> None:
    make, message = HOSTILE[kind]
    with pytest.raises(CorruptStateError, match=message):
        for state in canonical_states("op", [make()]):
            list(state.batches(InlineReader(), ALL, MAX))


def test_each_flipped_byte_is_refused_or_harmless() -> None:
    """The checksum finds them all; behind it nothing crashes and no key comes out in a wrong place."""
    handle = valid(range(20))
    content = handle.file.inline or b""
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 0x41
        (state,) = canonical_states("op", [with_content(handle, bytes(flipped))])
        try:
            rows = sum(part.num_rows for _, part in state.batches(InlineReader(), ALL, MAX))
        except CorruptStateError:
            continue
        assert rows <= 20


def test_parts_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(CorruptStateError, match="two parts with key group 0"):
        canonical_states("op", [valid(), valid([1])])
    other = descriptor_of("value", KEY, pa.schema([("key.k", pa.int64())]))
    with pytest.raises(StateSchemaError, match="parts of the snapshot differ"):
        canonical_states(
            "op", [valid(), structs.replace(valid(), descriptor=other, key_groups=KeyGroupRange(128, 200))]
        )
    with pytest.raises(CorruptStateError, match="unknown kind"):
        canonical_states("op", [structs.replace(valid(), descriptor={**DESCRIPTOR, "kind": "pickle"})])


class Away(InlineReader):
    """Storage that is gone after the footer was read."""

    reads = 0

    def read(self, file: StateFile, offset: int, length: int) -> bytes:
        self.reads += 1
        if self.reads > 1:
            raise PermissionError("away")
        return super().read(file, offset, length)


def test_unavailable_storage_does_not_count_as_damage() -> None:
    (state,) = canonical_states("op", [valid()])
    with pytest.raises(PermissionError, match="away"):
        list(state.batches(Away(), ALL, MAX))
