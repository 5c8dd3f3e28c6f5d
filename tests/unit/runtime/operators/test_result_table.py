"""Results of aggregations with each checkpoint: when a whole one comes out, in which order, what a restore changes."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import OperatorListState
from ckpt_runtime.graph.specs import GroupSpec, LatestSpec, LimitSpec, SortOrder, SortSpec, TableSpec
from ckpt_runtime.operators import result_table
from ckpt_runtime.operators.group_state import OUTPUT_ROWS
from ckpt_runtime.operators.operator import Operator, OperatorContext, OperatorStateStore
from ckpt_runtime.operators.result_table import LatestOperator, LimitOperator, SortOperator
from tests.support.groups import GroupJob, GroupSubtask, aggregate
from tests.support.inline_snapshots import CANONICAL

INT = pa.int64()
GROUP = GroupSpec(
    pa.schema([("k", pa.string()), ("v", INT)]),
    ("k",),
    (aggregate("Count", result=INT), aggregate("Sum", "v", result=INT)),
    "complete",
)
TABLE = TableSpec(GROUP)
BACKENDS = pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])


def row(key: str | None, count: int, total: int | None) -> dict[str, Any]:
    return {"k": key, "Count()": count, "Sum(v)": total}


def by_key(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda found: str(found["k"]))


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an entry for each end of a range."""
    found: list[int] = []
    monkeypatch.setattr(GroupSubtask, "emit_end_of_range", lambda self: found.append(len(self.rows)))
    return found


def test_complete_aggregation_gives_changed_groups_before_the_barrier_and_drops_no_late_row() -> None:
    job = GroupJob(GROUP, combines=False)
    assert job.process({"k": "a", "v": 1}, {"k": None, "v": 2}) == []
    job.watermark(10_000)
    job.process({"k": "a", "v": 4})
    assert by_key(job.checkpoint()) == [row(None, 1, 2), row("a", 2, 5)]
    assert job.checkpoint() == []
    job.process({"k": "a", "v": None})
    assert job.checkpoint() == [row("a", 3, 5)]


@BACKENDS
def test_whole_table_comes_out_with_each_checkpoint_in_which_a_row_has_changed(backend: str, ends: list[int]) -> None:
    job = GroupJob(TABLE, backend=backend)
    assert job.checkpoint() == []
    assert not ends
    assert job.process(row("a", 1, 1), row(None, 1, None), row("a", 2, 3)) == []
    assert by_key(job.checkpoint()) == [row(None, 1, None), row("a", 2, 3)]
    assert ends == [2]
    assert job.checkpoint() == []
    job.process(row("b", 1, 1))
    assert by_key(job.checkpoint()) == [row(None, 1, None), row("a", 2, 3), row("b", 1, 1)]
    job.restart()
    assert job.checkpoint() == []
    job.process(row(None, 2, 7))
    assert by_key(job.checkpoint()) == [row(None, 2, 7), row("a", 2, 3), row("b", 1, 1)]
    assert ends == [2, 3, 3]
    job.close()


@pytest.mark.usefixtures("ends")
def test_table_larger_than_the_memory_limit_comes_out_whole_each_time() -> None:
    job = GroupJob(TABLE, backend="rocksdb")  # a limit of 1,000 rows
    expected = {}
    for start in range(0, 6_000, 600):
        changed = {f"k{key % 5_000}": row(f"k{key % 5_000}", key, start) for key in range(start, start + 900)}
        expected |= changed
        job.process(*changed.values())
        found = job.checkpoint()
        assert by_key(found) == by_key(list(expected.values()))
    job.restart(backend="hashmap", properties=CANONICAL)
    job.process(row("k1", 0, 0))
    assert len(job.checkpoint()) == len(expected)
    job.close()


@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize(
    ("function", "given", "result", "expected"),
    [
        ("Count", (), INT, 0),
        ("Count", (pa.string(),), INT, 0),
        ("CountIf", (pa.bool_(),), INT, 0),
        ("CountDistinct", (INT,), INT, 0),
        ("Sum", (INT,), INT, None),
        ("Sum", (pa.decimal128(10, 2),), pa.decimal128(20, 2), None),
        ("Average", (INT,), pa.float64(), None),
        ("Max", (pa.string(),), pa.string(), None),
        ("First", (INT,), INT, None),
        ("MaxBy", (pa.string(), INT), pa.string(), None),
        ("StddevSamp", (pa.float64(),), pa.float64(), None),
        ("Corr", (pa.float64(), pa.float64()), pa.float64(), None),
        ("CollectList", (INT,), pa.list_(INT), []),
        ("BitOrAgg", (INT,), INT, None),
    ],
)
def test_aggregate_of_no_rows_has_the_result_of_sql_until_the_first_row_comes(
    function: str, given: tuple[pa.DataType, ...], result: pa.DataType, expected: Any
) -> None:
    columns = [f"v{at}" for at in range(len(given))]
    schema = pa.schema([("all", pa.int32()), *zip(columns, given, strict=True)])
    one = aggregate(function, *columns, result=result, settings={"ignoreNulls": False})
    group = GroupSpec(schema, ("all",), (one,), "complete")
    job = GroupJob(TableSpec(group, total=True))
    assert job.checkpoint() == [{"all": 0, one.name: expected}]
    assert job.checkpoint() == []
    job.process({"all": 0, one.name: None})
    assert job.checkpoint() == [{"all": 0, one.name: None}]
    job.close()


@pytest.mark.parametrize("limit", [OUTPUT_ROWS, 4])
def test_last_row_of_each_key_comes_out_with_the_next_checkpoint_and_once(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(result_table, "OUTPUT_ROWS", limit)
    rows = Rows(LatestOperator(LatestSpec(("a", "b"))))

    def process(*given: tuple[str | None, int | None, int]) -> None:
        columns = [pa.array(values) for values in zip(*given, strict=True)]
        types = (pa.string(), pa.int64(), pa.int64())
        arrays = [column.cast(kind) for column, kind in zip(columns, types, strict=True)]
        rows.operator.process_batch(pa.RecordBatch.from_arrays(arrays, ["a", "b", "v"]), 0)

    process(("x", 1, 1), ("x", 2, 2), (None, 1, 3), ("x", 1, 4))
    process((None, None, 5))
    process(("y", 1, 6), (None, 1, 7), (None, 1, 8))
    process(("x", 1, 9), (None, None, 10))
    assert rows.out == []
    rows.operator.prepare_snapshot(1)
    assert rows.out == [("x", 2, 2), ("y", 1, 6), (None, 1, 8), ("x", 1, 9), (None, None, 10)]
    rows.operator.prepare_snapshot(2)
    assert len(rows.out) == 5
    process(("x", 1, 11))
    rows.operator.finish()
    assert rows.out[5:] == [("x", 1, 11)]


def test_last_row_of_an_aggregation_without_keys_comes_out() -> None:
    rows = Rows(LatestOperator(LatestSpec(())))
    for values in ([1, 2], [3]):
        rows.operator.process_batch(pa.record_batch({"v": values}), 0)
    rows.operator.prepare_snapshot(1)
    assert rows.out == [(3,)]


class Rows:
    """Runs an operator on whole tables, and notes what comes out and where a table ends."""

    def __init__(self, operator: Operator, context: OperatorContext | None = None) -> None:
        self.operator = operator
        self.out: list[Any] = []
        operator.open(context, self)  # type: ignore[arg-type]

    def emit(self, batch: pa.RecordBatch) -> None:
        self.out += [tuple(found.values()) for found in batch.to_pylist()]

    def emit_watermark(self, timestamp_ms: int) -> None:
        raise AssertionError("there is no event time")

    def emit_end_of_range(self) -> None:
        self.out.append("end")

    def table(self, *batches: pa.RecordBatch) -> list[Any]:
        self.out = []
        for batch in batches:
            self.operator.process_batch(batch, 0)
        self.operator.process_end_of_range()
        return self.out


def test_rows_are_ordered_as_in_spark_across_batches_and_columns_of_orders_are_left_out() -> None:
    schema = pa.schema([("n", INT), ("f", pa.float64()), ("t", pa.string())])
    values = [
        (0, -0.0, "b"),
        (1, 0.0, "a"),
        (2, math.nan, None),
        (3, None, "x"),
        (4, math.inf, "é"),
        (5, math.nan, "z"),
    ]
    parts = [
        pa.RecordBatch.from_arrays(
            [pa.array([one[at] for one in some], kind) for at, kind in enumerate(schema.types)], schema=schema
        )
        for some in (values[:2], values[2:5], values[5:])
    ]
    kept = pa.schema([("n", INT)])
    up = Rows(SortOperator(SortSpec((SortOrder(1, False, True), SortOrder(2, True, False)), kept)))
    assert up.table(*parts) == [(3,), (0,), (1,), (4,), (5,), (2,), "end"]
    down = Rows(SortOperator(SortSpec((SortOrder(1, True, False), SortOrder(2, False, True)), kept)))
    assert down.table(*parts) == [(2,), (5,), (4,), (1,), (0,), (3,), "end"]
    assert down.table() == ["end"]


def test_limit_counts_the_rows_of_each_table_separately() -> None:
    limit = Rows(LimitOperator(LimitSpec(3)))
    batch = pa.RecordBatch.from_pydict({"n": [1, 2]})
    for _ in range(2):
        assert limit.table(batch, batch, batch) == [(1,), (2,), (1,), "end"]
    assert Rows(LimitOperator(LimitSpec(0))).table(batch) == ["end"]


def test_limit_of_a_stream_counts_the_rows_that_passed_before_a_restore() -> None:
    def opened(restored: tuple[OperatorListState, ...] = ()) -> tuple[Rows, OperatorContext]:
        context = OperatorContext(
            job_id="j", uid="limit", name="limit", subtask_index=0, parallelism=1, attempt=0, now_ms=lambda: 0,
            monotonic_ms=lambda: 0, set_timer=lambda at_ms: None, operator_state=OperatorStateStore(restored),
            keyed_state=None,
        )  # fmt: skip
        return Rows(LimitOperator(LimitSpec(3, in_all=True)), context), context

    batch = pa.RecordBatch.from_pydict({"n": [1, 2]})
    limit, context = opened()
    assert limit.table(batch) == [(1,), (2,), "end"]
    limit.operator.snapshot(1)
    limit, context = opened(context.operator_state.snapshot())
    assert limit.table(batch, batch) == [(1,), "end"]
    limit.operator.snapshot(2)
    limit, _ = opened(context.operator_state.snapshot())
    assert limit.table(batch) == ["end"]
