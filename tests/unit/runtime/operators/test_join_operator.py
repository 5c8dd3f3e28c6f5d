"""The join operator: what comes out and when, for each kind of join; nulls, late rows, types, forgetting."""

from __future__ import annotations

import dataclasses
from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import KeyedStateHandle
from ckpt_runtime.expressions.nodes import Call, Column
from ckpt_runtime.graph.output_schemas import SchemaDerivationError, join_output_schema
from ckpt_runtime.graph.specs import NO_BOUND_US, JoinSide, JoinSpec
from ckpt_runtime.operators.errors import OperatorError, OutputSchemaError
from ckpt_runtime.operators.join import JoinOperator
from ckpt_runtime.operators.operator import MAX_WATERMARK, OperatorContext, OperatorStateStore
from ckpt_runtime.state.errors import StateSchemaError
from tests.support.held_memory import bytes_held
from tests.support.inline_snapshots import CHECKPOINT, written
from tests.support.joins import EPOCH, LEFT, MS, RIGHT, Expected, JoinJob, Subtask, join_spec, text

Row = dict[str, Any]


def left(k: Any, t: int | None, value: Any = 0) -> Row:
    return {"k": k, "lt": t, "l": value}


def right(k: Any, t: int | None, value: Any = 0) -> Row:
    return {"k": k, "rt": t, "r": value}


def brief(events: list[Any]) -> list[Any]:
    """Rows as (key, left time, right time) in ms; watermarks as they are."""

    def millis(value: Any) -> int | None:
        return None if value is None else round((value - EPOCH).total_seconds() * 1000)

    return [
        event if isinstance(event, int) else (event["k"], millis(event.get("lt")), millis(event.get("rt")))
        for event in events
    ]


def test_pairs_come_out_when_both_rows_are_there_in_the_order_of_rows() -> None:
    join = Subtask(join_spec("inner", (-2, 3)))
    assert join.left(left(1, 10), left(2, 10), left(1, 11)) == []
    assert brief(join.right(right(1, 13), right(1, 8), right(2, 20), right(1, 14))) == [
        (1, 10, 13),
        (1, 11, 13),
        (1, 10, 8),
        (1, 11, 14),
    ]
    assert brief(join.left(left(1, 10))) == [(1, 10, 13), (1, 10, 8)]


def test_pairs_of_a_key_match_at_any_distance_without_bounds() -> None:
    join = Subtask(join_spec("inner", None))
    join.left(left(1, 10), left(1, None))
    assert join.watermark(10**9) == [10**9]
    assert brief(join.right(right(1, 99))) == [(1, 10, 99), (1, None, 99)]
    assert join.watermark(MAX_WATERMARK) == [MAX_WATERMARK]
    assert join.living() == (2, 1)
    assert join.operator.late_rows_dropped == 0


@pytest.mark.parametrize(
    ("how", "at_12", "at_13"),
    [
        ("inner", [], []),
        ("left_semi", [], []),
        ("left_outer", [], [(1, 10, None)]),
        ("right_outer", [(2, None, 10)], []),
        ("full_outer", [(2, None, 10)], [(1, 10, None)]),
    ],
)
def test_unmatched_rows_come_out_when_the_watermark_passes_their_last_match(
    how: str, at_12: list[Any], at_13: list[Any]
) -> None:
    """A left row at 10 can match until 13, a right row at 10 until 12; the emitted watermark is held back by 3."""
    join = Subtask(join_spec(how, (-2, 3)))
    join.left(left(1, 10))
    join.right(right(2, 10))
    assert brief(join.watermark(11)) == [8]
    assert join.living() == (1, 1)
    assert brief(join.watermark(12)) == [*at_12, 9]
    assert join.living() == (1, 0)
    assert brief(join.watermark(13)) == [*at_13, 10]
    assert join.living() == (0, 0)
    assert brief(join.watermark(MAX_WATERMARK)) == [MAX_WATERMARK]


def test_rows_that_nothing_can_follow_are_not_kept() -> None:
    """With both bounds below zero the right row comes first: a left row matches what is there, or nothing."""
    join = Subtask(join_spec("left_outer", (-5, -4)))
    join.right(right(1, 10))
    join.watermark(9)
    assert brief(join.left(left(1, 14), left(1, 12), left(2, 13))) == [(1, 14, 10), (1, 12, None), (2, 13, None)]
    assert join.living() == (1, 1)
    assert brief(join.watermark(11)) == [6]


def test_a_matched_row_is_not_emitted_again_as_unmatched() -> None:
    join = Subtask(join_spec("full_outer", (0, 0)))
    join.left(left(1, 10), left(1, 11))
    assert brief(join.right(right(1, 10), right(1, 12))) == [(1, 10, 10)]
    assert brief(join.watermark(MAX_WATERMARK)) == [(1, 11, None), (1, None, 12), MAX_WATERMARK]


def test_a_semi_join_gives_each_left_row_once_with_its_own_columns() -> None:
    join = Subtask(join_spec("left_semi", (-2, 3)))
    assert join_output_schema(join.spec).names == ["k", "lt", "l"]
    join.right(right(1, 10), right(1, 10))
    assert brief(join.left(left(1, 10), left(2, 10))) == [(1, 10, None)]
    assert brief(join.right(right(2, 10), right(2, 10), right(1, 10))) == [(2, 10, None)]
    assert join.living() == (0, 5)
    assert join.watermark(MAX_WATERMARK) == [MAX_WATERMARK]


def test_outer_join_keeps_rows_without_a_key_until_the_watermark_and_drops_those_without_event_time() -> None:
    rows = [left(None, 10), left(1, None), left(1, 10)]
    assert Subtask(join_spec("inner")).left(*rows) == []
    for how, ends in (("full_outer", [(2, None, 10)]), ("left_outer", [(None, 10, None)])):
        join = Subtask(join_spec(how))
        assert join.left(*rows) == []
        matched = brief(join.right(right(None, 10), right(1, 10), right(2, 10)))
        assert matched == ([(None, 10, 10)] if how == "full_outer" else []) + [(1, 10, 10)], "as in Spark"
        assert brief(join.watermark(MAX_WATERMARK)) == [*ends, MAX_WATERMARK]


def test_late_rows_are_dropped_and_counted() -> None:
    join = Subtask(join_spec("full_outer", (-2, 3)))
    join.right(right(1, 10))
    join.watermark(9)
    assert brief(join.left(left(1, 9), left(1, 8), left(1, 10))) == [(1, 10, 10)]
    assert brief(join.right(right(1, 9), right(1, 11))) == [(1, 10, 11)]
    assert join.operator.late_rows_dropped == 3


def test_the_watermark_is_state_but_not_the_one_at_the_end_of_data() -> None:
    join = Subtask(join_spec("inner"))
    join.watermark(20)
    join.watermark(MAX_WATERMARK)
    handles, lists = join.snapshot()
    again = Subtask(join.spec, handles=tuple(handles), lists=lists)
    again.left(left(1, 20), left(1, 21))
    assert again.operator.late_rows_dropped == 1


def test_event_time_of_a_join_with_bounds_begins_at_1970_as_in_spark() -> None:
    join = Subtask(join_spec("left_outer", (-5, 5)))
    join.left(left(1, -2), left(2, 0), left(3, 1))
    assert join.operator.late_rows_dropped == 2
    assert join.watermark(-10) == [-15]
    assert [row["k"] for row in join.watermark(MAX_WATERMARK)[:-1]] == [3]
    boundless = Subtask(join_spec("inner", None))
    boundless.left(left(1, -2))
    assert len(boundless.right({"k": 1, "rt": -3, "r": 0})) == 1


def test_join_without_bounds_drops_late_rows_of_a_side_that_has_event_time_and_keeps_all_others_for_ever() -> None:
    spec = join_spec("inner", None)
    join = Subtask(dataclasses.replace(spec, left=dataclasses.replace(spec.left, late_by="lt")))
    join.left(left(1, 5))
    join.watermark(10)
    join.left(left(1, 10), left(1, 11), left(1, None))
    assert join.operator.late_rows_dropped == 1
    assert brief(join.right(right(1, 3))) == [(1, 5, 3), (1, 11, 3), (1, None, 3)]
    handles, lists = join.snapshot()
    again = Subtask(join.spec, handles=tuple(handles), lists=lists)
    assert again.left(left(1, 10)) == []
    assert brief(again.left(left(1, 12))) == [(1, 12, 3)]


def test_rows_of_a_join_with_windows_are_late_by_the_end_of_their_window() -> None:
    window = pa.struct([("start", MS), ("end", MS)])
    sides = [JoinSide(pa.schema([("k", pa.int64()), (name, window)]), ("k",), late_by=name) for name in ("w", "v")]
    join = Subtask(JoinSpec("inner", *sides))
    join.watermark(10)
    rows: list[Row | None] = [{"start": 0, "end": 10}, {"start": 5, "end": 11}, None]
    join.left(*({"k": at, "w": row} for at, row in enumerate(rows)))
    pairs = join.right(*({"k": at, "v": {"start": 10, "end": 20}} for at in range(3)))
    assert [row["k"] for row in pairs] == [1, 2]
    assert join.operator.late_rows_dropped == 1


def test_keys_of_two_names_both_come_out() -> None:
    ms = pa.timestamp("ms")
    spec = JoinSpec(
        "full_outer",
        JoinSide(pa.schema([("a", pa.string()), ("s", pa.int8()), ("at", ms)]), ("a", "s"), "at"),
        JoinSide(pa.schema([("bt", ms), ("s", pa.int8()), ("b", pa.string())]), ("b", "s"), "bt"),
        (0, 0),
    )
    join = Subtask(spec)
    assert join_output_schema(spec).names == ["s", "a", "at", "bt", "b"]
    join.left({"a": "x", "s": 1, "at": 1}, {"a": "y", "s": 1, "at": 1})
    rows = join.right({"bt": 1, "s": 1, "b": "x"}, {"bt": 1, "s": 2, "b": "y"}) + join.watermark(MAX_WATERMARK)[:-1]
    assert [(row["s"], row["a"], row["b"]) for row in rows] == [(1, "x", "x"), (1, "y", None), (2, None, "y")]


@pytest.mark.parametrize(
    ("unit", "lower", "upper", "matching", "ends_at"),
    [
        ("s", -1500, 2500, [9, 10, 11, 12], 12_000),
        ("ms", -1500, 2500, [9, 10, 11, 12], 12_500),
        ("us", -1000, 1000, [9, 10, 11], 11_000),
        ("ns", 0, 0, [10], 10_000),
    ],
)
def test_bounds_hold_in_every_unit_of_event_time(
    unit: str, lower: int, upper: int, matching: list[int], ends_at: int
) -> None:
    kind = pa.timestamp(unit, "UTC")
    join = Subtask(join_spec("inner", (lower, upper), time=kind))
    per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    rows = [right(1, second * per_second, second) for second in range(20)]
    join.left(left(1, 10 * per_second))
    assert [row["r"] for row in join.right(*rows)] == matching
    join.watermark(ends_at - 1)
    assert join.living()[0] == 1
    join.watermark(ends_at)
    assert join.living()[0] == 0


def test_times_at_the_ends_of_64_bits_do_not_wrap() -> None:
    most = (1 << 63) - 1
    join = Subtask(join_spec("full_outer", (-5, 5)))
    numbers = [most, most - 5, -most, -most + 5]
    for side, name in ((LEFT, "lt"), (RIGHT, "rt")):
        times = pa.array(numbers, pa.int64()).cast(pa.timestamp("ms"))
        value = {"lt": "l", "rt": "r"}[name]
        batch = pa.record_batch({"k": pa.array([1] * 4), name: times, value: pa.array(range(4))})
        collected: list[pa.RecordBatch] = []
        join.emit = collected.append  # type: ignore[method-assign]
        join.operator.process_batch(batch, side)
    pairs = {(row["l"], row["r"]) for batch in collected for row in batch.select(["l", "r"]).to_pylist()}
    assert pairs == {(0, 0), (0, 1), (1, 0), (1, 1)}, "the others lie before 1970"
    assert join.living() == (2, 2)
    join.operator.process_watermark(-most + 1)
    assert join.living() == (2, 2)


def test_row_with_very_many_matches_gives_them_in_bounded_batches() -> None:
    join = Subtask(join_spec("inner", None))
    sizes: list[int] = []
    values: list[int] = []

    def emit(batch: pa.RecordBatch) -> None:
        sizes.append(batch.num_rows)
        values.extend(batch["l"].to_pylist())

    join.left(*[left(1, 0, number) for number in range(20_000)])
    join.emit = emit  # type: ignore[method-assign]
    join.right(right(1, 0), right(2, 0), right(1, 0))
    assert values == [*range(20_000), *range(20_000)]
    assert max(sizes) <= 16_384


def test_forgotten_rows_and_keys_leave_memory() -> None:
    """A million keys pass through; memory holds a window of them, and what is kept still matches."""
    join = Subtask(join_spec("left_outer", (0, 100)))
    unmatched = 0

    def emit(batch: pa.RecordBatch) -> None:
        nonlocal unmatched
        unmatched += batch["r"].null_count

    join.emit = emit  # type: ignore[method-assign]
    most = 0
    for start in range(0, 1_000_000, 10_000):
        numbers = np.arange(start, start + 10_000)
        times = pa.array(numbers // 100 + 1).cast(pa.timestamp("ms"))
        batch = pa.RecordBatch.from_arrays([pa.array(numbers), times, pa.array(numbers)], schema=join.spec.left.schema)
        join.operator.process_batch(batch, LEFT)
        every_other = pa.RecordBatch.from_arrays(batch.columns, schema=join.spec.right.schema).take(
            pa.array(np.arange(0, 10_000, 2))
        )
        join.operator.process_batch(every_other, RIGHT)
        join.operator.process_watermark(start // 100 + 1)
        most = max(most, bytes_held(join.operator._buffers))
    join.operator.process_watermark(MAX_WATERMARK)
    assert unmatched == 500_000
    assert most < 10_000_000
    assert join.living() == (0, 0)


def test_a_snapshot_shows_its_moment_while_rows_come_and_go() -> None:
    join = Subtask(join_spec("left_outer", (0, 5)))
    join.left(left(1, 10, 1), left(2, 10, 2))
    join.right(right(1, 12, 1))
    frozen = join.backend.snapshot(1, CHECKPOINT)
    join.right(right(2, 11, 9))
    join.watermark(100)
    join.left(left(3, 200, 3))
    (handle,) = written(frozen)
    assert isinstance(handle, KeyedStateHandle)
    assert [section.name for section in handle.sections] == ["left", "right"]
    again = Subtask(join.spec, handles=(handle,))
    assert again.living() == (2, 1)
    assert brief(again.watermark(MAX_WATERMARK)) == [(2, 10, None), MAX_WATERMARK]


def test_columns_that_come_dictionary_encoded_after_all_are_decoded() -> None:
    spec = join_spec("inner", None, [("k", pa.string())], pa.string())
    join = Subtask(spec)
    plain = pa.RecordBatch.from_pylist([{"k": "a", "lt": 1, "l": "x"}], spec.left.schema)
    encoded = pa.record_batch({"k": plain["k"].dictionary_encode(), "lt": plain["lt"], "l": plain["l"]})
    join.operator.process_batch(encoded, LEFT)
    [row] = join.right({"k": "a", "rt": 1, "r": "y"})
    assert text(row) == text({"k": "a", "l": "x", "lt": 1, "r": "y", "rt": 1})
    with pytest.raises(OutputSchemaError, match="operator 'join' returned a batch with columns"):
        join.operator.process_batch(pa.record_batch({"k": ["a"]}), LEFT)


def test_gates_of_a_united_left_side_come_first() -> None:
    spec = join_spec("inner", None)
    spec = JoinSpec("inner", JoinSide(spec.left.schema, ("k",), None, gates=2), spec.right)
    assert [spec.side_of_gate(gate) for gate in range(4)] == [LEFT, LEFT, RIGHT, RIGHT]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (join_spec("inner"), join_spec("inner", keys=[("k", pa.int32())]), "'key.k' cannot change from int64 to int32"),
        (join_spec("inner"), join_spec("inner", payload=pa.string()), "'value.l' cannot change from int64 to string"),
        (join_spec("inner"), join_spec("inner", None), "its rows end at an unexpected position"),
        (join_spec("left_semi"), join_spec("inner"), "its rows end at an unexpected position"),
    ],
)
def test_state_that_does_not_fit_is_refused_with_operator_and_side(
    before: JoinSpec, after: JoinSpec, message: str
) -> None:
    join = Subtask(before)
    join.left(left(1, 10))
    handles, _ = join.snapshot()
    with pytest.raises(StateSchemaError, match=f"state 'left' of operator 'join': .*{message}"):
        Subtask(after, handles=tuple(handles))


def test_a_wider_payload_and_another_kind_of_join_continue_from_the_state() -> None:
    """Whether a row has matched is known even where it did not matter."""
    join = Subtask(join_spec("inner", payload=pa.int32()))
    join.left(left(1, 10, 7), left(2, 10, 8))
    join.right(right(1, 10))
    handles, lists = join.snapshot()
    outer = Subtask(join_spec("full_outer", payload=pa.int64()), handles=tuple(handles), lists=lists)
    assert brief(outer.watermark(MAX_WATERMARK)) == [(2, 10, None), MAX_WATERMARK]


def test_an_operator_without_keyed_state_says_so() -> None:
    context = OperatorContext(
        job_id="j", uid="join", name="join", subtask_index=0, parallelism=1, attempt=0,
            operator_state=OperatorStateStore(), now_ms=lambda: 0, monotonic_ms=lambda: 0,
        set_timer=lambda at_ms: None,
    )  # fmt: skip
    with pytest.raises(OperatorError, match="operator 'join' joins by key but has no keyed state"):
        JoinOperator(join_spec()).open(context, Subtask(join_spec()))


def test_a_description_with_an_unknown_kind_is_refused() -> None:
    with pytest.raises(SchemaDerivationError, match="join type 'anti' is unknown, allowed are"):
        JoinOperator(join_spec("anti"))


class ExpectedWithCondition(Expected):
    """The definition, for pairs whose values ``l`` and ``r`` are in order, too."""

    def _matches(self, left: Row, right: Row) -> bool:
        return super()._matches(left, right) and left["l"] < right["r"]


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
@pytest.mark.parametrize("how", ["inner", "left_outer", "right_outer", "full_outer", "left_semi"])
def test_condition_on_pairs_decides_what_matches_in_each_kind_of_join_through_restores(how: str, backend: str) -> None:
    plain = join_spec(how, (-4, 5), payload=pa.int64())
    condition = Call("LessThan", (Column(2, "long"), Column(5, "long")), "boolean")
    spec = dataclasses.replace(plain, condition=condition)
    job, expected = JoinJob(spec, 2, backend, rows_in_memory=20), ExpectedWithCondition(spec)
    choice = Random(how)
    found: Counter[str] = Counter()
    for step in range(30):
        for side, name in ((0, "l"), (1, "r")):
            rows = [
                {
                    "k": choice.choice([1, 2, 3, None]),
                    f"{name}t": step * 2 + choice.randrange(12),
                    name: choice.randrange(9),
                }
                for _ in range(choice.randrange(1, 9))
            ]
            found.update(map(text, job.process(side, rows)))
            expected.process(side, rows)
        found.update(map(text, job.watermark(step * 2)))
        expected.advance(step * 2)
        assert found == expected.output()
        assert job.living == expected.living()
        if step % 8 == 5:
            job.rescale(choice.randrange(1, 4))
    job.close()


def test_bound_of_one_side_keeps_the_rows_of_the_other_and_holds_no_watermark_back() -> None:
    spec = join_spec("right_outer", (0, NO_BOUND_US // 1000))
    spec = dataclasses.replace(spec, exact=(0, NO_BOUND_US))
    join = Subtask(spec)
    join.left(left(1, 10), left(2, 30))
    assert brief(join.right(right(1, 10**9), right(2, 29))) == [(1, 10, 10**9)]
    assert brief(join.watermark(29)) == [(2, None, 29), 29]
    assert join.living() == (2, 1)
