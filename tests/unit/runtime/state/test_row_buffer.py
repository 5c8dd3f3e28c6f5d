"""Buffered rows per key: columns in segments, matches by kernel, restoring and passing on, what does not fit."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ckpt_runtime.state.errors import CorruptStateError, StateSchemaError
from ckpt_runtime.state.memory.row_buffer import RowBuffer, RowBuffers, RowSegments
from ckpt_runtime.state.states import RowBufferSpec
from tests.support import reference_kernels as reference
from tests.unit.runtime.state.conftest import Snapshots

SCHEMA = pa.schema(
    [
        ("v", pa.list_(pa.string())),
        ("t", pa.timestamp("ms")),
        ("k", pa.string()),
        ("n", pa.int32()),
    ]
)
SPEC = RowBufferSpec("rows", SCHEMA, ("k", "n"), "t")
INTS = RowBufferSpec("ints", pa.schema([("k", pa.int64()), ("t", pa.timestamp("ms"))]), ("k",), "t")


def rows_of(numbers: range) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [
            {"v": ["x"] * (n % 3) if n % 4 else None, "t": n, "k": f"key-{n % 5}", "n": n % 2 if n % 7 else None}
            for n in numbers
        ],
        SCHEMA,
    )


def append(buffers: RowBuffers, side: RowBuffer, batch: pa.RecordBatch) -> None:
    slots = buffers.slots_of([batch.column(key) for key in side.spec.keys])
    side.append(batch, slots, np.zeros(batch.num_rows, dtype=np.uint8))


def test_rows_are_read_back_by_number_from_any_number_of_segments() -> None:
    """Eight small batches of like sizes are merged, and larger ones stay as they are."""
    kinds = [pa.large_binary(), pa.string(), pa.binary(), pa.uint8(), pa.int16(), pa.float32(), pa.bool_()]
    schema = pa.schema([*SCHEMA, *((str(kind), kind) for kind in kinds)])
    segments = RowSegments(schema)
    whole = []
    start = 0
    for size in (9000, 900, 200, 40, *[10] * 7, *[3] * 8, *[300] * 9):
        numbers = range(start - 1, start + size)
        more: list[list[Any]] = [[str(n % 900).encode() * (n % 7) for n in numbers]] * 3
        more += [[n % 200 for n in numbers]] * 2 + [[n / 3 for n in numbers], [n % 3 == 0 for n in numbers]]
        columns = [*rows_of(numbers).columns, *(pa.array(v).cast(k) for v, k in zip(more, kinds, strict=True))]
        batch = pa.RecordBatch.from_arrays(columns, schema=schema).slice(1)
        segments.append(batch)
        whole.append(batch)
        start += size
    table = pa.Table.from_batches(whole)
    merged = 200 + (40 + 7 * 10) + 8 * 3 + 5 * 300
    assert [segment.num_rows for segment in segments.segments] == [9000, 900, merged, 300, 300, 300, 300]
    choice = Random(1)
    for count in (0, 1, 7, 5000):
        rows = np.array([choice.randrange(start) for _ in range(count)], dtype=np.int32)
        taken = segments.take(rows, range(len(schema)))
        assert [array.type for array in taken] == schema.types
        for array in taken:
            array.validate(full=True)
        assert [array.to_pylist() for array in taken] == [
            column.to_pylist() for column in table.take(pa.array(rows)).columns
        ]


def test_large_segments_are_merged_when_reading_from_many_has_cost_as_much() -> None:
    segments = RowSegments(INTS.schema)
    batch = pa.record_batch([pa.array(range(10_000)), pa.nulls(10_000, pa.timestamp("ms"))], INTS.schema.names)
    for _ in range(6):
        segments.append(batch)
    rows = np.arange(0, 60_000, 5_000, dtype=np.int32)
    counts = []
    for _ in range(20):
        assert segments.take(rows, [0])[0].to_pylist() == [0, 5_000] * 6
        counts.append(len(segments.segments))
    assert (counts[0], counts[-1]) == (6, 1)


def test_part_of_a_batch_does_not_keep_the_memory_of_the_whole() -> None:
    segments = RowSegments(INTS.schema)
    batch = pa.record_batch([pa.array(range(100_000)), pa.nulls(100_000, pa.timestamp("ms"))], INTS.schema.names)
    segments.append(batch.slice(50_000, 20_000))
    assert segments.segments[0].get_total_buffer_size() < 500_000


def test_segments_have_a_bounded_size() -> None:
    segments = RowSegments(INTS.schema)
    batch = pa.RecordBatch.from_arrays(
        [pa.array(np.arange(50_000)), pa.nulls(50_000, pa.timestamp("ms"))], INTS.schema.names
    )
    for _ in range(10):
        segments.append(batch)
    assert segments.rows == 500_000
    assert max(segment.num_rows for segment in segments.segments) <= 1 << 16


@pytest.mark.parametrize("keeps_matched", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_matches_and_forgetting_follow_the_plain_form(seed: int, keeps_matched: bool) -> None:
    choice = Random(seed)
    buffers = RowBuffers([RowBufferSpec("ints", INTS.schema, ("k",), "t", keeps_matched)])
    [side] = buffers.sides
    plain = reference.BufferedRows(keeps_matched)
    for _ in range(60):
        keys = [choice.randrange(6) for _ in range(choice.randint(1, 40))]
        times = [choice.randrange(100) for _ in keys]
        batch = pa.record_batch({"k": pa.array(keys), "t": pa.array(times).cast(pa.timestamp("ms"))})
        lower, upper = sorted((choice.randint(-30, 30), choice.randint(-30, 30)))
        slots = buffers.slots_of([batch["k"]])
        found = np.zeros(len(keys), dtype=np.uint8)
        expected = plain.matches(keys, times, lower, upper)
        if keeps_matched and choice.random() < 0.3:
            side.mark_found(slots, side.times_of(batch), lower, upper, found)
            assert found.tolist() == [int(position in {p for p, _ in expected}) for position in range(len(keys))]
            found[:] = 0
        pairs = [
            pair
            for probes, rows in side.matches(slots, side.times_of(batch), lower, upper, found)
            for pair in zip(probes.tolist(), rows.tolist(), strict=True)
        ]
        assert pairs == expected
        plain.mark(expected)
        assert found.tolist() == [int(position in {p for p, _ in expected}) for position in range(len(keys))]
        append(buffers, side, batch)
        plain.append(keys, times)
        bound = choice.randrange(60)
        assert side.expire(bound).tolist() == plain.expire(bound)
        assert len(side) == plain.living()


@pytest.mark.parametrize("keeps_keys", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_compaction_leaves_the_live_rows_of_each_key_in_order(seed: int, keeps_keys: bool) -> None:
    choice = Random(seed)
    buffers = RowBuffers([INTS, INTS])
    living: list[dict[int, list[int]]] = [{key: [] for key in range(9)} for _ in buffers.sides]

    def stored(side: RowBuffer, key: int) -> list[int]:
        slots = buffers.slots_of([pa.array([key])])
        found = [rows for _, rows in side.candidates(slots, np.zeros(1, dtype=np.int64), -1000, 1000)]
        return [time for rows in found for time in side.take(rows, [1])[0].cast(pa.int64()).to_pylist()]

    for number in range(30):
        at = choice.randrange(2)
        keys = [choice.randrange(9) for _ in range(choice.randint(1, 9))]
        times = [10 * number + choice.randrange(40) for _ in keys]
        append(
            buffers,
            buffers.sides[at],
            pa.record_batch([pa.array(keys), pa.array(times, INTS.schema.types[1])], INTS.schema.names),
        )
        for key, time in zip(keys, times, strict=True):
            living[at][key].append(time)
        bound = choice.randrange(10 * number + 1)
        other = choice.randrange(2)
        buffers.sides[other].expire(bound)
        living[other] = {key: [time for time in rows if time > bound] for key, rows in living[other].items()}
        if choice.random() < 0.5:
            buffers._compact(keeps_keys=keeps_keys)
            assert all(side.dead == 0 for side in buffers.sides)
        for side, expected in zip(buffers.sides, living, strict=True):
            assert {key: stored(side, key) for key in expected} == expected


def test_rows_of_a_key_keep_their_order_in_a_snapshot_and_unclaimed_ones_are_kept(
    all_snapshots: Snapshots,
) -> None:
    backend = all_snapshots.backend()
    buffers = backend.row_buffers([SPEC])
    append(buffers, buffers.sides[0], rows_of(range(500)))
    unclaimed = all_snapshots.restored(all_snapshots.of(backend))
    halves = [all_snapshots.restored(all_snapshots.of(unclaimed), first, last) for first, last in ((0, 63), (64, 127))]
    found: list[dict[str, Any]] = []
    for half in halves:
        [side] = half.row_buffers([SPEC]).sides
        found += [row for batch, _ in side.living() for row in batch.to_pylist()]
    expected = rows_of(range(500)).to_pylist()
    assert sorted(map(repr, found)) == sorted(map(repr, expected))
    for key in {(row["k"], row["n"]) for row in expected}:
        assert [r for r in found if (r["k"], r["n"]) == key] == [r for r in expected if (r["k"], r["n"]) == key]


def test_added_and_removed_columns_evolve_as_in_other_states(all_snapshots: Snapshots) -> None:
    backend = all_snapshots.backend()
    buffers = backend.row_buffers([SPEC])
    append(buffers, buffers.sides[0], rows_of(range(3)))
    wider = pa.schema([SCHEMA.field("t"), SCHEMA.field("k"), pa.field("new", pa.int8()), SCHEMA.field("n")])
    [side] = (
        all_snapshots.restored(all_snapshots.of(backend))
        .row_buffers([RowBufferSpec("rows", wider, ("k", "n"), "t")])
        .sides
    )
    batch = pa.concat_batches([batch for batch, _ in side.living()])
    assert batch.schema.equals(wider)
    assert batch["new"].null_count == 3
    strict = pa.schema([*SCHEMA, pa.field("new", pa.int8(), nullable=False)])
    with pytest.raises(StateSchemaError, match="state 'rows' of operator 'op': the added field 'value.new' must be"):
        all_snapshots.restored(all_snapshots.of(backend)).row_buffers([RowBufferSpec("rows", strict, ("k", "n"), "t")])


def test_another_kind_of_state_and_sides_with_other_keys_are_refused(all_snapshots: Snapshots) -> None:
    backend = all_snapshots.backend()
    backend.value_state("rows", SPEC.key_schema, pa.schema([("x", pa.int64())]))
    with pytest.raises(StateSchemaError, match="state 'rows' of operator 'op': the snapshot has another kind of state"):
        all_snapshots.restored(all_snapshots.of(backend)).row_buffers([SPEC])
    with pytest.raises(StateSchemaError, match="state 'rows' of operator 'op': it is in use"):
        backend.row_buffers([SPEC])
    with pytest.raises(StateSchemaError, match="operator 'op': keys differ in type"):
        all_snapshots.backend().row_buffers([SPEC, INTS])


def test_a_descriptor_that_does_not_say_how_rows_end_is_corrupt(snapshots: Snapshots) -> None:
    backend = snapshots.backend()
    buffers = backend.row_buffers([INTS])
    append(buffers, buffers.sides[0], pa.RecordBatch.from_pylist([{"k": 1, "t": 1}], INTS.schema))
    [handle] = snapshots.of(backend)
    del handle.sections[0].descriptor["rows"]
    with pytest.raises(CorruptStateError, match="state 'ints' has a descriptor that does not say how its rows end"):
        snapshots.restored([handle]).row_buffers([INTS])


def test_consumed_rows_of_a_key_are_removed() -> None:
    spec = RowBufferSpec("ints", INTS.schema, ("k",), "t", keeps_matched=False)
    buffers = RowBuffers([spec])
    (side,) = buffers.sides

    def rows(**times: int) -> pa.RecordBatch:
        keys = [int(key.removeprefix("k")) for key in times]
        return pa.record_batch([pa.array(keys), pa.array(times.values(), pa.timestamp("ms"))], schema=INTS.schema)

    append(buffers, side, rows(k1=10, k2=20, k3=30))
    side.expire(10)
    slots = buffers.slots_of([pa.array([3, 1, 4])])
    assert side.consume(slots).tolist() == [2, -1, -1]
    append(buffers, side, rows(k1=40, k3=50))  # behind rows that are no longer alive
    slots = buffers.slots_of([pa.array([1, 2, 3])])
    consumed = side.consume(slots)
    assert side.take(consumed, [1])[0].cast(pa.int64()).to_pylist() == [40, 20, 50]
    assert len(side) == 0
    assert side.consume(slots).tolist() == [-1, -1, -1]
