"""Which output modes a plan allows, and how plans are looked through."""

from __future__ import annotations

import pytest
from pyspark.sql.connect.proto import Relation

from ckpt_runtime.frontend.analysis import _checked
from ckpt_runtime.frontend.stateful import check_output_mode
from ckpt_runtime.frontend.typed_plan import Aggregate, Deduplicate, PlanNode
from ckpt_runtime.graph.errors import PlanError

DISTINCT = Deduplicate(columns=(), keys=(0,))
TOTALS = Aggregate(columns=(), keys=(0,), aggregates=())


@pytest.mark.parametrize("mode", ["update", "complete"])
@pytest.mark.parametrize(
    ("nodes", "allowed"),
    [((DISTINCT, TOTALS), True), ((DISTINCT, DISTINCT), True), ((TOTALS, TOTALS), False), ((TOTALS, DISTINCT), False)],
)
def test_mode_other_than_append_allows_stateful_operations_in_front_of_an_aggregation_only(
    mode: str, nodes: tuple[PlanNode, ...], allowed: bool
) -> None:
    if allowed:
        assert check_output_mode(mode, nodes) == mode
        return
    with pytest.raises(PlanError, match="behind an aggregation"):
        check_output_mode(mode, nodes)


def test_message_with_a_field_that_is_called_values_is_looked_through() -> None:
    relation = Relation(
        unpivot={"input": {"range": {"end": 1, "step": 1}}, "values": {"values": [{"literal": {"integer": 1}}]}}
    )
    assert _checked("Relation", relation.SerializeToString()) == relation.SerializeToString()
