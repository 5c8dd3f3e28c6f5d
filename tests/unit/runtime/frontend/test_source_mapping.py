"""What a program says elsewhere decides how its sources read: the trigger of a query, the session's time zone."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql.connect.proto import WriteStreamOperationStart

from ckpt_runtime.frontend.capture import Capture, CapturedQuery, CapturedSource
from ckpt_runtime.frontend.mapping import add_queries
from ckpt_runtime.frontend.typed_plan import Analysis, Source, TypedColumn
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.logical import LogicalPlan
from ckpt_runtime.graph.specs import SourceSpec

COLUMNS = (TypedColumn("value", "string"),)


def source_of(*triggers: dict[str, Any], source: str = "text", zone: str | None = None) -> SourceSpec:
    """The source of a program with a query for each trigger, all over one stream."""
    capture = Capture({}, lambda _: [("value", "string")], lambda _key, _value: None)
    if zone is not None:
        capture.configuration["spark.sql.session.timeZone"] = zone
    capture.sources[7] = CapturedSource(source, {"path": "/data"}, "value STRING")
    for trigger in triggers:
        start = WriteStreamOperationStart(format="noop", output_mode="append", **trigger)
        analysis = Analysis(columns=COLUMNS, nodes=(Source(columns=COLUMNS, plan_id=7),))
        capture.queries.append(CapturedQuery(start, analysis))
    plan = LogicalPlan("job")
    add_queries(capture, plan, lambda name: name)
    [spec] = [node.spec for node in plan.nodes if isinstance(node.spec, SourceSpec)]
    return spec


@pytest.mark.parametrize("trigger", [{"available_now": True}, {"once": True}])
def test_source_ends_with_what_is_there_if_the_trigger_of_its_queries_says_so(trigger: dict[str, Any]) -> None:
    assert source_of(trigger, trigger).options["availableNow"] == "true"


@pytest.mark.parametrize("trigger", [{}, {"processing_time_interval": "1 second"}])
def test_source_has_no_end_with_any_other_trigger(trigger: dict[str, Any]) -> None:
    assert "availableNow" not in source_of(trigger).options


def test_queries_over_one_stream_with_and_without_an_end_are_refused() -> None:
    with pytest.raises(PlanError, match="need one trigger"):
        source_of({"available_now": True}, {})


def test_source_that_always_ends_keeps_its_options() -> None:
    assert dict(source_of({"available_now": True}, source="replay").options) == {"path": "/data"}


def test_json_is_read_in_the_time_zone_of_the_session() -> None:
    assert source_of({}, source="json", zone="Europe/Vienna").options["timeZone"] == "Europe/Vienna"
    assert source_of({}, source="json").options["timeZone"] == "UTC"
