"""Metrics of a frame: over parts of its rows, in any split, they are those of all rows."""

from __future__ import annotations

import random

import msgspec
import pyarrow as pa
import pytest

from ckpt_runtime.expressions.evaluation import Frame
from ckpt_runtime.expressions.nodes import Call, Column, Literal
from ckpt_runtime.expressions.types import EvaluationError
from ckpt_runtime.graph.schema import DocumentError, decoded
from ckpt_runtime.graph.specs import ObservedAggregate, ObserveSpec
from ckpt_runtime.operators.observe import Observation, ObserveOperator
from tests.unit.runtime.connectors.harness import context, opened

SPEC = ObserveSpec(
    "seen",
    (Literal("1", "integer"), Column(0, "integer"), Column(1, "double"), Column(2, "timestamp")),
    (
        ObservedAggregate("Count", (0,), "long"),
        ObservedAggregate("Sum", (1,), "long"),
        ObservedAggregate("Average", (2,), "double"),
        ObservedAggregate("Max", (3,), "timestamp"),
    ),
    (
        ("rows", Column(0, "long")),
        ("sum", Column(1, "long")),
        ("mean", Column(2, "double")),
        ("latest", Column(3, "timestamp")),
        ("doubled", Call("Add", (Column(1, "long"), Column(1, "long")), "long")),
    ),
    "Europe/Berlin",
)


def frame(numbers: list[int | None]) -> Frame:
    times = pa.array([number and number * 1_000_000 for number in numbers], pa.timestamp("us", "UTC"))
    floats = pa.array([number and float(number) for number in numbers], pa.float64())
    return Frame([pa.array(numbers, pa.int32()), floats, times], len(numbers))


@pytest.mark.parametrize("seed", range(5))
def test_metrics_of_parts_are_those_of_all_rows(seed: int) -> None:
    generator = random.Random(seed)
    numbers = [generator.choice([None, generator.randrange(1, 100)]) for _ in range(200)]
    observation = Observation(decoded(msgspec.json.encode(SPEC), ObserveSpec))
    parts, stored, left = [], [], list(numbers)
    while left:
        batch = [left.pop() for _ in range(min(len(left), generator.randrange(1, 30)))]
        stored = observation.added(stored, observation.arguments(frame(batch)))
        if generator.random() < 0.3:
            parts.append(observation.encoded(stored))
            stored = []
    parts.append(observation.encoded(stored))
    joined = observation.encoded(observation.combined(parts[:2]))
    known = [number for number in numbers if number is not None]
    assert observation.results([joined, *parts[2:]]) == {
        "rows": 200,
        "sum": sum(known),
        "mean": sum(known) / len(known),
        "latest": f"1970-01-01 01:0{max(known) // 60}:{max(known) % 60:02}",
        "doubled": 2 * sum(known),
    }


def test_metrics_of_no_rows_are_those_of_sql() -> None:
    found = Observation(SPEC).results([])
    assert found == {"rows": 0, "sum": None, "mean": None, "latest": None, "doubled": None}


@pytest.mark.parametrize("part", [b"no stream", b"\x00" * 64])
def test_row_that_is_no_arrow_stream_is_refused(part: bytes) -> None:
    with pytest.raises(DocumentError, match="an observed row"):
        Observation(SPEC).results([part])


def test_row_of_another_observation_is_refused() -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([("x", pa.int64())])) as stream:
        stream.write_batch(pa.record_batch({"x": [1]}))
    with pytest.raises(DocumentError, match="an observed row has 1 rows of"):
        Observation(SPEC).results([sink.getvalue().to_pybytes()])


@pytest.mark.row("ends.6")
def test_row_for_which_an_argument_fails_is_bad_and_left_out_of_rows_and_metrics_alike() -> None:
    inverse = Call("Divide", (Literal("1.0", "double"), Column(0, "double")), "double")
    spec = ObserveSpec(
        "seen", (inverse,), (ObservedAggregate("Sum", (0,), "double"),), (("sum", Column(0, "double")),), "UTC"
    )
    rows = pa.record_batch({"x": [1.0, 0.0, 2.0, 4.0]})
    operator = ObserveOperator(spec)
    opened(operator, context())
    with pytest.raises(EvaluationError, match="DIVIDE_BY_ZERO"):
        operator.process_batch(rows, 0)
    operator = ObserveOperator(spec)
    output = opened(operator, context(configuration={"execution.bad-rows.mode": "DROP"}))
    operator.process_batch(rows, 0)
    assert output.column("x") == [1.0, 2.0, 4.0]
    measures = operator.measured()
    assert Observation(spec).results([measures.observed]) == {"sum": 1.75}
    assert operator.bad_rows_dropped == 1
