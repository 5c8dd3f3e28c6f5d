"""Joins with stored tables: order of the stream, many rows of one key, pairs that are cut, one index for a process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.expressions.nodes import Call, Column, Expression
from ckpt_runtime.frontend.static_tables import path_of, program_of, unpack, with_tables
from ckpt_runtime.graph.specs import StaticJoinKey, StaticJoinSpec
from ckpt_runtime.operators import static_join
from ckpt_runtime.operators.static_join import StaticJoinOperator

STREAM = pa.schema([("k", pa.string()), ("n", pa.int64())])
TABLE = pa.table({"key": ["a", "b", "b", None], "value": pa.array([1, 2, 3, 4], pa.int64())})
KEY = StaticJoinKey(Column(0, "string"), Column(0, "string"))
GREATER = Call("GreaterThan", (Column(1, "long"), Column(3, "long")), "boolean")


class Emitted:
    """Keeps what an operator emits."""

    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []

    def emit(self, batch: pa.RecordBatch) -> None:
        self.batches.append(batch)


def stored(directory: Path, table: pa.Table) -> str:
    path = directory / "table.arrow"
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    return str(path)


def operator_of(path: str, how: str, keys: tuple[StaticJoinKey, ...], condition: Expression | None = None) -> Any:
    schema = STREAM if how in ("semi", "anti") else pa.schema([*STREAM, *TABLE.schema])
    output = tuple(range(2 if how == "existence" else len(schema)))
    if how == "existence":
        schema = STREAM.append(pa.field("exists", pa.bool_()))
    operator = StaticJoinOperator(StaticJoinSpec(how, path, keys, (), condition, 2, output, schema))
    context: Any = SimpleNamespace(now_ms=lambda: 0, configuration={})
    operator.open(context, Emitted())  # type: ignore[arg-type]
    return operator


def joined(path: str, how: str, rows: list[tuple[Any, Any]], **options: Any) -> list[tuple[Any, ...]]:
    operator = operator_of(path, how, options.pop("keys", (KEY,)), **options)
    arrays = [pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), STREAM.types, strict=True)]
    operator.process_batch(pa.RecordBatch.from_arrays(arrays, schema=STREAM), 0)
    return [tuple(row.values()) for batch in operator.output.batches for row in batch.to_pylist()]


ROWS = [("b", 1), ("x", 2), (None, 3), ("a", 4)]


@pytest.mark.parametrize("pairs", [32_768, 1, 2])
@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ("inner", [("b", 1, "b", 2), ("b", 1, "b", 3), ("a", 4, "a", 1)]),
        (
            "outer",
            [*[("b", 1, "b", 2), ("b", 1, "b", 3), ("x", 2, None, None)], *[(None, 3, None, None), ("a", 4, "a", 1)]],
        ),
        ("semi", [("b", 1), ("a", 4)]),
        ("anti", [("x", 2), (None, 3)]),
        ("existence", [("b", 1, True), ("x", 2, False), (None, 3, False), ("a", 4, True)]),
    ],
)
def test_rows_stay_in_order_however_many_pairs_are_looked_at_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pairs: int, how: str, wanted: list[tuple[Any, ...]]
) -> None:
    monkeypatch.setattr(static_join, "OUTPUT_ROWS", pairs)
    assert joined(stored(tmp_path, TABLE), how, ROWS) == wanted


def test_null_key_matches_a_null_where_the_condition_says_so(tmp_path: Path) -> None:
    key = StaticJoinKey(KEY.stream, KEY.table, nulls_match=True)
    found = joined(stored(tmp_path, TABLE), "inner", ROWS, keys=(key,))
    assert (None, 3, None, 4) in found
    assert len(found) == 4


def test_condition_decides_about_each_pair_and_a_row_without_any_is_kept_by_an_outer_join(tmp_path: Path) -> None:
    path = stored(tmp_path, TABLE)
    rows = [("b", 3), ("a", 1), ("a", 2)]
    wanted = [("b", 3, "b", 2), ("a", 1, None, None), ("a", 2, "a", 1)]
    assert joined(path, "outer", rows, condition=GREATER) == wanted
    assert joined(path, "semi", rows, condition=GREATER) == [("b", 3), ("a", 2)]


def test_condition_without_an_equality_looks_at_every_row_of_the_table(tmp_path: Path) -> None:
    found = joined(stored(tmp_path, TABLE), "inner", [("q", 3), ("q", None)], keys=(), condition=GREATER)
    assert found == [("q", 3, "a", 1), ("q", 3, "b", 2)]


def test_keys_of_one_bucket_with_other_hashes_do_not_match(tmp_path: Path) -> None:
    table = pa.table({"key": [str(at) for at in range(1000)], "value": pa.array(range(1000), pa.int64())})
    rows: list[tuple[Any, Any]] = [(str(at), at) for at in range(500, 1500)]
    assert joined(stored(tmp_path, table), "inner", rows) == [(str(at), at, str(at), at) for at in range(500, 1000)]


@pytest.mark.parametrize("how", ["inner", "outer", "semi", "anti"])
def test_empty_table_leaves_the_rows_that_need_no_match(tmp_path: Path, how: str) -> None:
    missing = [(*row, None, None) for row in ROWS]
    wanted = {"inner": [], "outer": missing, "semi": [], "anti": ROWS}[how]
    for keys in ((KEY,), ()):
        assert joined(stored(tmp_path, TABLE.slice(0, 0)), how, ROWS, keys=keys) == wanted


def test_subtasks_of_a_process_share_the_index_of_a_table(tmp_path: Path) -> None:
    path = stored(tmp_path, TABLE)
    one, other = operator_of(path, "inner", (KEY,)), operator_of(path, "outer", (KEY,))
    assert one._index is other._index


def test_archive_of_a_job_holds_the_program_unchanged_and_tables_that_no_file_of_it_replaces(tmp_path: Path) -> None:
    program = with_tables(b"PK", {"0" * 64: b"rows"})
    assert program_of(program, has_tables=True) == b"PK"
    assert with_tables(b"PK", {}) == b"PK"
    inner = with_tables(b"", {"1" * 64: b"of the author"})
    unpack(with_tables(inner, {"1" * 64: b"rows"}), str(tmp_path), has_tables=True)
    assert Path(path_of(str(tmp_path), "1" * 64)).read_bytes() == b"rows"
