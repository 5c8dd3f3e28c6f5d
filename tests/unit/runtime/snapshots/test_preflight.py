"""What a preflight says of each keyed state: what the operator itself would say at a restore, without a row."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import (
    CanonicalKeyedStateHandle,
    CompletedCheckpoint,
    IncrementalKeyedStateHandle,
    KeyedHandle,
    KeyedSection,
    KeyedStateHandle,
    OperatorSubtaskState,
    StateFile,
    SubtaskState,
)
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.graph.compiler import CompiledPlan
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.graph.specs import Aggregate, AggregateSpec, JoinSide, JoinSpec, OperatorSpec, ProcessSpec
from ckpt_runtime.operators.aggregate import AggregateOperator
from ckpt_runtime.operators.operator import OperatorContext, OperatorStateStore
from ckpt_runtime.snapshots.preflight import UNTIL_IT_RUNS, StateVerdict, stored_descriptors
from ckpt_runtime.snapshots.preflight_process import NoOutput, verdicts
from ckpt_runtime.state.memory.backend import MemoryKeyedStateBackend
from ckpt_runtime.state.stored_rows import descriptor_of
from tests.support.inline_snapshots import handles_of

ROWS = pa.schema([("k", pa.int64()), ("v", pa.int64())])
COUNT = Aggregate("count", None, "rows")
TOTAL = Aggregate("sum", "v", "total")


def judged(spec: OperatorSpec | None, stored: dict[str, Any], schema: pa.Schema = ROWS) -> list[StateVerdict]:
    specs = {} if spec is None else {"u": spec}
    plan = CompiledPlan(JobGraph("j", (), ()), specs, dict.fromkeys(specs, schema), {})
    return list(verdicts(plan, {"u": stored} if stored else {}))


def counts(*aggregates: Aggregate, schema: pa.Schema = ROWS) -> dict[str, Any]:
    """What the state of an aggregation is stored as, by way of an operator that writes it."""
    backend = MemoryKeyedStateBackend(KeyGroupRange(0, 127), 128, "u")
    operator = AggregateOperator(AggregateSpec(("k",), aggregates), schema)
    context = OperatorContext(
        "", "u", "u", 0, 1, 0, OperatorStateStore(), lambda: 0, lambda: 0, lambda _: None, {}, backend
    )
    operator.open(context, NoOutput())
    (handle,) = handles_of([backend])
    assert isinstance(handle, KeyedStateHandle)
    return {section.name: section.descriptor for section in handle.sections}


@pytest.mark.row("203.14")
def test_aggregates_match_change_are_new_or_dropped() -> None:
    stored = counts(COUNT)
    (same,) = judged(AggregateSpec(("k",), (COUNT,)), stored)
    assert (same.verdict, same.stored) == ("matched", same.wanted)
    (more,) = judged(AggregateSpec(("k",), (COUNT, TOTAL)), stored)
    assert more.verdict == "changed"
    assert more.stored == ("key.k: int64", "rows: int64")
    assert more.wanted == ("key.k: int64", "rows: int64", "total: int64")
    (new,) = judged(AggregateSpec(("k",), (COUNT,)), {})
    assert (new.verdict, new.stored) == ("new", ())
    (dropped,) = judged(None, stored)
    assert (dropped.verdict, dropped.wanted, dropped.stored) == ("dropped", (), more.stored)


@pytest.mark.row("203.14")
def test_a_change_that_a_restore_would_refuse_is_refused_with_both_schemas() -> None:
    text = pa.schema([("k", pa.string()), ("v", pa.int64())])
    (found,) = judged(AggregateSpec(("k",), (COUNT,)), counts(COUNT), text)
    assert found.verdict == "refused"
    assert found.reason is not None
    assert "key changed" in found.reason
    assert (found.stored[0], found.wanted[0]) == ("key.k: int64", "key.k: string")


def test_states_of_joins_are_judged_one_by_one() -> None:
    right_side = JoinSide(pa.schema([("id", pa.int64()), ("w", pa.string())]), ("id",))
    left, right = judged(JoinSpec("inner", JoinSide(ROWS, ("k",)), right_side), {})
    assert (left.state, left.verdict, left.wanted) == (
        "left",
        "new",
        ("key.k: int64", "value.v: int64", "matched: bool not null"),
    )
    assert (right.state, right.verdict) == ("right", "new")


def test_unknown_requests_of_user_code_run_nothing() -> None:
    class Never:
        def init(self, handle: object) -> None:
            raise AssertionError("user code ran")

    stored = {"last": descriptor_of("value", pa.schema([("k", pa.int64())]), pa.schema([("key.k", pa.int64())]))}
    (found,) = judged(ProcessSpec(("k",), Never(), ROWS), stored)
    assert (found.verdict, found.stored, found.wanted) == (UNTIL_IT_RUNS, ("key.k: int64",), ())


def test_a_damaged_descriptor_is_a_refusal_and_no_error_of_the_preflight() -> None:
    (found,) = judged(AggregateSpec(("k",), (COUNT,)), {"aggregates": {"format": 1, "kind": "aggregate", "schema": {}}})
    assert found.verdict == "refused"


def test_descriptors_are_found_in_handles_of_every_kind() -> None:
    one, two = {"kind": "value", "format": 1}, {"kind": "list", "format": 1}
    groups, file = KeyGroupRange(0, 7), StateFile("f", 1, "c")
    handles: list[KeyedHandle] = [
        KeyedStateHandle(groups, file, (KeyedSection("a", one, ()),)),
        CanonicalKeyedStateHandle(groups, "b", two, (), file),
        IncrementalKeyedStateHandle(groups, "files", {}, {"states": {"c": one}}),
    ]
    descriptions: list[dict[str, Any]] = [
        {"states": {"d": {"descriptors": [one, two], "current": 1}}},
        {"states": 7},
        {"states": {"e": 7, "f": {"descriptors": [], "current": "x"}, "g": {"descriptors": [one], "current": 3}}},
    ]
    handles += [IncrementalKeyedStateHandle(groups, "other", {}, description) for description in descriptions]
    states = {("v", at): SubtaskState({"u": OperatorSubtaskState((handle,))}) for at, handle in enumerate(handles)}
    snapshot = CompletedCheckpoint(1, "0" * 32, 1, 2, "file:///x", CheckpointProperties(), (), states)
    assert stored_descriptors(snapshot) == {"u": {"a": one, "b": two, "c": one, "d": two}}
