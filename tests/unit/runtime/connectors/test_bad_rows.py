"""Bad rows of sources and expressions: what is emitted, counted and kept."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.connectors.bad_rows import DroppedRowsOperator
from ckpt_runtime.expressions.errors import EvaluationError
from ckpt_runtime.expressions.nodes import Call, Column
from ckpt_runtime.graph.bad_rows import letters_of, marked, with_bad_column
from ckpt_runtime.graph.compiler import compile_plan
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.logical import LogicalInput, LogicalNode, LogicalPlan
from ckpt_runtime.graph.specs import BadRowsSpec, ConditionSpec, EvaluateSpec, OperatorSpec, SinkSpec, SourceSpec
from ckpt_runtime.operators.operator import Operator
from ckpt_runtime.operators.typed_expressions import ConditionOperator, EvaluateOperator
from ckpt_runtime.sources import BadRow
from tests.unit.runtime.connectors.harness import Collector, context

TEXTS = pa.schema([("text", pa.string())])
NUMBERS = pa.schema([("n", pa.int32())])
CAST = Call("Cast", (Column(0, "string"),), "integer")


def through(operator: Operator, texts: list[str | None]) -> list[dict[str, Any]]:
    output = Collector()
    operator.open(context(), output)
    operator.process_batch(pa.record_batch([texts], schema=TEXTS), 0)
    return output.rows


@pytest.mark.parametrize("texts", [["1", "x", "2", None, "y"], ["x"], ["x", "y", "z"], ["1", "2"]], ids=str)
def test_projection_reports_the_rows_for_which_it_fails_and_gives_the_others_in_order(texts: list[str | None]) -> None:
    rows = through(EvaluateOperator(EvaluateSpec((("n", CAST),), NUMBERS, reports_bad=True)), texts)
    assert [row["n"] for row in rows] == [int(text) if text and text.isdigit() else None for text in texts]
    bad = [row["_bad_row"] for row in rows if row["_bad_row"] is not None]
    wrong = [text for text in texts if text is not None and not text.isdigit()]
    assert [letter["raw"] for letter in bad] == [f'{{"text":"{text}"}}'.encode() for text in wrong]
    assert all("CAST_INVALID_INPUT" in letter["reason"] and letter["position"] is None for letter in bad)


def test_condition_reports_rows_for_which_it_fails_as_bad_and_not_as_false() -> None:
    holds = Call("EqualTo", (CAST, CAST), "boolean")
    rows = through(ConditionOperator(ConditionSpec(holds, reports_bad=True)), ["1", "x", None])
    assert [row["text"] for row in rows] == ["1", None]
    assert rows[1]["_bad_row"]["raw"] == b'{"text":"x"}'
    with pytest.raises(EvaluationError, match="CAST_INVALID_INPUT"):
        through(ConditionOperator(ConditionSpec(holds)), ["x"])


def test_dropped_rows_are_counted_and_good_ones_pass() -> None:
    output = Collector()
    operator = DroppedRowsOperator()
    operator.open(context(), output)
    rows = pa.record_batch([["1", None, "2"]], schema=TEXTS)
    operator.process_batch(marked(rows, letters_of(3, {1: BadRow("no number", "line 2", b"x")})), 0)
    operator.process_batch(marked(rows.slice(0, 1)), 0)
    assert [row["text"] for row in output.rows] == ["1", "2", "1"]
    assert operator.bad_rows == 1


def plan_of(
    options: dict[str, str], configuration: dict[str, str], format_: str = "json", *, drill: bool = False
) -> list[OperatorSpec]:
    plan = LogicalPlan("job", configuration=configuration, drill=drill)
    read = plan.add(LogicalNode(SourceSpec(format_, {"path": "/in", **options}, TEXTS), (), TEXTS, "in"))
    cast = EvaluateSpec((("n", CAST),), NUMBERS)
    numbers = plan.add(LogicalNode(cast, (LogicalInput(read),), NUMBERS))
    renamed = plan.add(
        LogicalNode(EvaluateSpec((("m", Column(0, "integer")),), NUMBERS), (LogicalInput(numbers),), NUMBERS)
    )
    plan.add(LogicalNode(SinkSpec("noop"), (LogicalInput(renamed),), None))
    compiled = compile_plan(plan)
    assert {"in", "in.reader", "project-2", "project-3", "sink-4"} <= set(compiled.specs), "uids do not depend on it"
    for uid, spec in compiled.specs.items():
        if isinstance(spec, BadRowsSpec):
            found_by = compiled.output_schemas[spec.found_by]
            assert found_by == with_bad_column(compiled.output_schemas[uid])
    [reading, *_] = [vertex for vertex in compiled.job_graph.vertices if vertex.operators[0].uid == "in.reader"]
    assert reading.operators[-1].kind in ("sink", "drill_sink"), "operators for bad rows do not cut a chain"
    return [spec for spec in compiled.specs.values() if isinstance(spec, BadRowsSpec)]


JOB = {"pipeline.bad-rows": "DEAD_LETTER", "pipeline.bad-rows.directory": "/dead"}


@pytest.mark.parametrize(
    ("options", "configuration", "found"),
    [
        ({}, {}, []),
        ({"badRows": "fail"}, {}, []),
        ({"badRows": "drop"}, {}, [BadRowsSpec("in.reader")]),
        ({"badRows": "deadLetter", "badRowsDirectory": "/a"}, {}, [BadRowsSpec("in.reader", "/a")]),
        ({"mode": "DROPMALFORMED"}, {}, []),
        ({}, JOB, [BadRowsSpec("project-2", "/dead")]),
        ({"mode": "FAILFAST"}, JOB, [BadRowsSpec("in.reader", "/dead"), BadRowsSpec("project-2", "/dead")]),
        ({"badRows": "fail"}, {"pipeline.bad-rows": "DROP"}, [BadRowsSpec("project-2")]),
    ],
    ids=str,
)
def test_operators_for_bad_rows_stand_where_options_say_so_and_something_may_fail(
    options: dict[str, str], configuration: dict[str, str], found: list[BadRowsSpec]
) -> None:
    assert plan_of(options, configuration) == found
    in_drill = plan_of(options, configuration, drill=True)
    assert in_drill == [BadRowsSpec(spec.found_by) for spec in found], "a drill writes nothing"


def test_dead_letters_of_a_job_need_an_absolute_directory() -> None:
    with pytest.raises(PlanError, match="DEAD_LETTER needs it"):
        plan_of({}, {"pipeline.bad-rows": "DEAD_LETTER"})
    with pytest.raises(PlanError, match="'dead' is relative"):
        plan_of({}, {**JOB, "pipeline.bad-rows.directory": "dead"})
