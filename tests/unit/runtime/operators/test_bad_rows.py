"""Rows for which an expression fails: they fail the job, are counted, or are kept once through restarts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from ckpt_runtime.configuration.registry import RESTORE_DRILL
from ckpt_runtime.expressions.nodes import Call, Column, Literal
from ckpt_runtime.expressions.types import EvaluationError, SparkType
from ckpt_runtime.graph.specs import (
    ConditionSpec,
    EvaluateSpec,
    ExpandSpec,
    GenerateSpec,
    StaticJoinKey,
    StaticJoinSpec,
)
from ckpt_runtime.operators.operator import Operator, OperatorContext, OperatorStateStore, RowOrigins
from ckpt_runtime.operators.static_join import StaticJoinOperator
from ckpt_runtime.operators.typed_expressions import (
    ConditionOperator,
    EvaluateOperator,
    ExpandOperator,
    GenerateOperator,
)
from ckpt_runtime.task.chain import ChainEnd, OperatorChain
from tests.support.joins import Subtask, join_spec

KIND = pa.schema([("quotient", pa.float64())])
DOUBLES: SparkType = {"type": "array", "elementType": "double", "containsNull": True}
QUOTIENT = Call("Divide", (Column(0, "double"), Column(1, "double")), "double", "ansi", {})
POSITIVE = Call("IsNotNull", (QUOTIENT,), "boolean", "ansi", {})
EXPLODED = Call("Explode", (Call("CreateArray", (QUOTIENT,), DOUBLES),), "void")
GENERATED = pa.schema([("a", pa.float64()), ("b", pa.float64()), *KIND])


class Taken:
    """An output, and the operator in front of it in one attempt."""

    def __init__(self, operator: Operator, attempt: int = 0, restored: int | None = None, **options: str) -> None:
        self.rows: list[dict[str, Any]] = []
        self.operator = operator
        operator.open(
            OperatorContext(
                job_id="j", uid="ratio/x", name="ratio", subtask_index=0, parallelism=1, attempt=attempt,
                operator_state=OperatorStateStore(), now_ms=lambda: 1_000, monotonic_ms=lambda: 0.0,
                set_timer=lambda at_ms: None, restored_checkpoint_id=restored, configuration=options,
            ),
            self,
        )  # fmt: skip

    def emit(self, batch: pa.RecordBatch) -> None:
        batch.validate(full=True)
        self.rows += batch.to_pylist()

    def emit_watermark(self, timestamp_ms: int) -> None:
        raise AssertionError

    def emit_end_of_range(self) -> None:
        raise AssertionError

    def process(self, *pairs: tuple[float | None, float | None]) -> None:
        left, right = zip(*pairs, strict=True)
        batch = pa.record_batch({"a": pa.array(left, pa.float64()), "b": pa.array(right, pa.float64())})
        # A slice with an offset, as operators get them.
        padded = pa.concat_tables([pa.Table.from_batches([batch.slice(0, 1)]), pa.Table.from_batches([batch])])
        self.operator.process_batch(padded.combine_chunks().to_batches()[0].slice(1), 0)


def evaluate() -> Operator:
    return EvaluateOperator(EvaluateSpec((("quotient", QUOTIENT),), KIND))


def kept(directory: Path) -> list[tuple[float, float]]:
    if not any(directory.glob("*.parquet")):
        return []
    rows = ds.dataset([str(file) for file in directory.glob("*.parquet")]).to_table().to_pylist()
    assert {row["operator"] for row in rows} == {"ratio/x"}
    assert {row["condition"] for row in rows} == {"DIVIDE_BY_ZERO"}
    assert all("DIVIDE_BY_ZERO" in row["reason"] for row in rows)
    return sorted(tuple(json.loads(row["row"]).values()) for row in rows)


def dead_letters(directory: Path) -> dict[str, str]:
    return {"execution.bad-rows.mode": "DEAD_LETTER", "execution.bad-rows.directory": str(directory)}


def test_bad_row_fails_the_job_without_the_option() -> None:
    run = Taken(evaluate())
    with pytest.raises(EvaluationError, match="DIVIDE_BY_ZERO"):
        run.process((1.0, 2.0), (1.0, 0.0))


@pytest.mark.row("ends.6")
@pytest.mark.parametrize(
    ("make", "columns"),
    [
        (evaluate, ["quotient"]),
        (lambda: ConditionOperator(ConditionSpec(POSITIVE)), ["a"]),
        (lambda: ExpandOperator(ExpandSpec(((QUOTIENT,), (QUOTIENT,)), KIND)), ["quotient"]),
        (lambda: GenerateOperator(GenerateSpec(EXPLODED, False, frozenset(), GENERATED)), ["quotient"]),
    ],
    ids=["select", "where", "expand", "explode"],
)
def test_bad_rows_are_left_out_and_counted_and_the_others_continue(
    make: Callable[[], Operator], columns: list[str]
) -> None:
    run = Taken(make(), **{"execution.bad-rows.mode": "DROP"})
    run.process((4.0, 2.0), (1.0, 0.0), (None, 1.0), (9.0, 3.0), (8.0, 0.0), (7.0, 0.0))
    assert run.operator.bad_rows_dropped == 3
    good = {row[columns[0]] for row in run.rows}
    assert good == ({4.0, 9.0} if columns == ["a"] else {2.0, None, 3.0})
    run.process((1.0, 0.0))
    assert run.operator.bad_rows_dropped == 4


@pytest.mark.row("ends.6")
@pytest.mark.parametrize("passes", [True, False], ids=["operators that say it", "one that does not"])
def test_dead_letter_has_the_place_of_its_row_in_the_source_behind_operators_that_change_rows(
    tmp_path: Path, passes: bool
) -> None:
    """A filter, a generator and columns that are computed in between; the decoder of a text makes a batch anew."""

    class Copy(Operator):
        takes_dictionaries = False

        def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
            self.output.emit(batch if passes else batch.slice(0))

    text = pa.schema([("text", pa.string()), ("a", pa.float64()), ("b", pa.float64())])
    a, b = Column(1, "double"), Column(2, "double")
    positive = Call("GreaterThan", (a, Literal(0.0, "double")), "boolean", "ansi")
    twice = Call("Explode", (Call("CreateArray", (a, b), DOUBLES),), "void")
    generated = pa.schema([*text, ("each", pa.float64())])
    each = EvaluateSpec((("b", b), ("each", Column(3, "double"))), pa.schema(list(generated)[2:]))
    ratio = Call("Divide", (Column(0, "double"), Column(1, "double")), "double", "ansi", {})
    operators = [
        ConditionOperator(ConditionSpec(positive)),
        Copy(),
        GenerateOperator(GenerateSpec(twice, False, frozenset((0, 1, 2)), generated)),
        EvaluateOperator(each),
        EvaluateOperator(EvaluateSpec((("quotient", ratio),), KIND)),
    ]
    end = ChainEnd([])
    contexts = [dataclasses.replace(Taken(evaluate()).operator.context, chain_time=end.time) for _ in operators]
    contexts = [dataclasses.replace(context, configuration=dead_letters(tmp_path)) for context in contexts]
    chain = OperatorChain(operators, contexts, end)
    chain.open()
    words = pa.array(["x"] * 5).dictionary_encode()
    rows = [pa.array([1.0, -1.0, 0.0, 3.0, 4.0]), pa.array([0.0, 0.0, 0.0, 1.0, 0.0])]
    batch = pa.record_batch([words, *rows], names=text.names)
    end.time.origins = RowOrigins(batch, np.arange(5), lambda at: (f"offset {at + 100}", b"%d" % at))
    operators[0].process_batch(batch, 0)
    assert end.rows == 4
    chain.prepare_snapshot(1)
    [file] = tmp_path.glob("*.parquet")
    letters = [(row["row"], row["position"], row["raw"]) for row in pq.read_table(file).to_pylist()]
    places = [("offset 100", b"0"), ("offset 104", b"4")] if passes else [(None, None)] * 2
    rows_of = ['{"b": 0.0, "each": 0.0}', '{"b": 0.0, "each": 0.0}']
    assert letters == [(row, *place) for row, place in zip(rows_of, places, strict=True)]


OF_PAIRS = Call(
    "GreaterThan",
    (Call("Divide", (Column(2, "double"), Column(5, "double")), "double", "ansi", {}), Literal(1.0, "double")),
    "boolean",
)


@pytest.mark.row("ends.6")
@pytest.mark.parametrize("how", ["inner", "left_outer", "left_semi"])
def test_pair_for_which_the_condition_of_a_join_fails_does_not_match_and_is_kept(tmp_path: Path, how: str) -> None:
    """The rows of the pair still match others; without others, an outer join emits them with nulls."""
    spec = dataclasses.replace(join_spec(how, payload=pa.float64()), condition=OF_PAIRS)
    join = Subtask(spec, configuration=dead_letters(tmp_path))
    join.left({"k": 1, "lt": 10, "l": 4.0}, {"k": 2, "lt": 10, "l": 4.0})
    rows = join.right(*({"k": 1, "rt": 10, "r": divisor} for divisor in (2.0, 0.0, 1.0)), {"k": 2, "rt": 10, "r": 0.0})
    rows += [event for event in join.watermark(100) if isinstance(event, dict)]
    found = [(row["k"], row.get("r")) for row in rows]
    unmatched = [(2, None)] if how == "left_outer" else []
    assert found == ([(1, None)] if how == "left_semi" else [(1, 2.0), (1, 1.0), *unmatched])
    assert join.operator.bad_rows_dropped == 2
    join.operator.prepare_snapshot(1)
    bad = ds.dataset([str(file) for file in tmp_path.glob("*.parquet")]).to_table().to_pylist()
    assert {row["condition"] for row in bad} == {"DIVIDE_BY_ZERO"}
    pairs = [json.loads(row["row"]) for row in bad]
    assert {(pair["left.k"], pair["left.l"], pair["right.k"], pair["right.r"]) for pair in pairs} >= {(2, 4.0, 2, 0.0)}
    with pytest.raises(EvaluationError, match="DIVIDE_BY_ZERO"):
        failing = Subtask(spec)
        failing.left({"k": 1, "lt": 10, "l": 4.0})
        failing.right({"k": 1, "rt": 10, "r": 0.0})


@pytest.mark.row("ends.6")
def test_pair_and_key_that_fail_in_a_join_with_a_table_are_kept(tmp_path: Path) -> None:
    table = pa.table({"key": [2.0, 2.0, 3.0], "by": [0.0, 1.0, 0.0]})
    with pa.ipc.new_file(str(tmp_path / "table.arrow"), table.schema) as writer:
        writer.write_table(table)
    key = StaticJoinKey(QUOTIENT, Column(0, "double"))
    over = Call("Divide", (Column(0, "double"), Column(3, "double")), "double", "ansi", {})
    schema = pa.schema([("a", pa.float64()), ("b", pa.float64()), *table.schema])
    spec = StaticJoinSpec(
        "outer",
        str(tmp_path / "table.arrow"),
        (key,),
        (),
        Call("IsNotNull", (over,), "boolean"),
        2,
        (0, 1, 2, 3),
        schema,
    )
    run = Taken(StaticJoinOperator(spec), **dead_letters(tmp_path / "bad"))
    run.process((4.0, 2.0), (1.0, 0.0), (9.0, 3.0), (8.0, 2.0))
    assert [(row["a"], row["key"], row["by"]) for row in run.rows] == [
        (4.0, 2.0, 1.0),
        (9.0, None, None),
        (8.0, None, None),
    ]
    run.operator.finish()
    bad = ds.dataset([str(file) for file in (tmp_path / "bad").glob("*.parquet")]).to_table().to_pylist()
    pairs = [{"stream.a": a, "stream.b": b, "table.key": a / b, "table.by": 0.0} for a, b in ((4.0, 2.0), (9.0, 3.0))]
    rows = [json.loads(row["row"]) for row in bad]
    assert sorted(rows, key=str) == sorted([{"a": 1.0, "b": 0.0}, *pairs], key=str)
    assert run.operator.bad_rows_dropped == 3


@pytest.mark.row("ends.6")
def test_bad_rows_are_kept_once_with_the_reason_through_restarts(tmp_path: Path) -> None:
    first = Taken(evaluate(), **dead_letters(tmp_path))
    first.process((1.0, 0.0), (1.0, 1.0))
    assert kept(tmp_path) == []
    first.operator.prepare_snapshot(1)
    assert kept(tmp_path) == [(1.0, 0.0)]
    first.process((2.0, 0.0))
    first.operator.prepare_snapshot(2)  # this checkpoint does not complete
    first.process((3.0, 0.0))
    # The process ends here: the rows behind checkpoint 1 come again.
    second = Taken(evaluate(), attempt=1, restored=1, **dead_letters(tmp_path))
    assert kept(tmp_path) == [(1.0, 0.0)]
    second.process((2.0, 0.0), (3.0, 0.0))
    second.operator.prepare_snapshot(3)
    second.process((4.0, 0.0))
    second.operator.finish()
    assert kept(tmp_path) == [(1.0, 0.0), (2.0, 0.0), (3.0, 0.0), (4.0, 0.0)]
    assert all(not path.name.startswith(".") for path in tmp_path.iterdir())


def test_row_of_any_type_is_kept_as_json(tmp_path: Path) -> None:
    run = Taken(evaluate(), **dead_letters(tmp_path))
    batch = pa.record_batch(
        {
            "a": [1.0],
            "b": [0.0],
            "raw": pa.array([b"\xff\x00"]),
            "price": [Decimal("1.50")],
            "at": pa.array([0], pa.timestamp("us", "UTC")),
            "nested": [{"x": [1, None]}],
        }
    )
    run.operator.process_batch(batch, 0)
    run.operator.finish()
    [row] = ds.dataset(tmp_path).to_table().column("row").to_pylist()
    assert json.loads(row) == {
        "a": 1.0,
        "b": 0.0,
        "raw": "/wA=",
        "price": "1.50",
        "at": "1970-01-01T00:00:00+00:00",
        "nested": {"x": [1, None]},
    }


@pytest.mark.row("air.9")
def test_restore_drill_counts_bad_rows_and_writes_none(tmp_path: Path) -> None:
    directory = tmp_path / "dead"
    run = Taken(evaluate(), **{**dead_letters(directory), RESTORE_DRILL: "true"})
    run.process((1.0, 0.0), (1.0, 1.0))
    run.operator.prepare_snapshot(1)
    assert (run.operator.bad_rows_dropped, run.rows) == (1, [{"quotient": 1.0}])
    assert not directory.exists()
