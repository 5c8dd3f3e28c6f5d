"""Triggers of queries as the interval of a job's checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql.connect.proto import WriteStreamOperationStart

from ckpt_runtime.configuration.pipeline_options import ExecutionOptions
from ckpt_runtime.frontend.capture import CapturedSource
from ckpt_runtime.frontend.job import JobOptions
from ckpt_runtime.frontend.program import fresh_queries, gather_batch, locations_without_use, set_options
from ckpt_runtime.graph.errors import PlanError

INTERVAL = "execution.checkpointing.interval"
ENDS = "execution.event-time.ends-with-data"
AT_LEAST_ONCE = {"deliveryGuarantee": "at-least-once"}


def start(**fields: Any) -> Any:
    return WriteStreamOperationStart(**fields)


@pytest.mark.parametrize(
    ("starts", "interval"),
    [
        ([start(processing_time_interval="10 seconds")], "10000 ms"),
        ([start(continuous_checkpoint_interval="1 second"), start(processing_time_interval="1 minute")], "1000 ms"),
        ([start(processing_time_interval="0 seconds")], None),
        ([start(available_now=True), start(once=True), start()], None),
        ([start(real_time_batch_duration="5 minutes", format="kafka", options=AT_LEAST_ONCE)], "300000 ms"),
        ([start(real_time_batch_duration="5 minutes", format="kafka")], "300000 ms"),
        ([start(real_time_batch_duration="30 seconds", format="console")], "30000 ms"),
    ],
)
def test_shortest_interval_of_the_triggers_is_that_of_checkpoints(starts: list[Any], interval: str | None) -> None:
    conf = JobOptions({})
    set_options(starts, conf)
    assert conf.own.get_text(INTERVAL) == interval


def test_interval_of_program_or_submission_is_stronger_than_a_trigger_and_that_of_the_cluster_weaker() -> None:
    query = start(processing_time_interval="10 seconds")
    submitted, own, cluster = JobOptions({INTERVAL: "3 s"}), JobOptions({}), JobOptions({}, {INTERVAL: "5 s"})
    own.set(INTERVAL, "4 s")
    for conf, interval in ((submitted, "3 s"), (own, "4 s"), (cluster, "10000 ms")):
        set_options([query], conf)
        assert conf.get(INTERVAL) == interval


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (start(processing_time_interval="soon"), r"processingTime='soon' is not an interval: expected one or more"),
        (start(real_time_batch_duration="5 minutes", format="parquet"), "realTime needs the sink kafka"),
        (
            start(real_time_batch_duration="5 minutes", format="kafka", options={"deliveryguarantee": "exactly-once"}),
            "without the option deliveryGuarantee=exactly-once",
        ),
    ],
)
def test_trigger_that_cannot_be_kept_is_refused(query: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        set_options([query], JobOptions({}))


@pytest.mark.parametrize(
    ("starts", "submitted", "ends"),
    [
        ([start(available_now=True), start(once=True)], {}, False),
        ([start(available_now=True), start()], {}, True),
        ([], {}, True),
        ([start(available_now=True)], {ENDS: "true"}, True),
        ([start(available_now=True)], {"execution.stateful-processor.fire-timers-at-end": "true"}, True),
    ],
)
def test_event_time_does_not_end_with_the_data_if_all_triggers_do(
    starts: list[Any], submitted: dict[str, str], ends: bool
) -> None:
    conf = JobOptions(submitted)
    set_options(starts, conf)
    assert conf.effective.get(ExecutionOptions.EVENT_TIME_ENDS) is ends


CONTINUE_IN = "execution.checkpointing.continue-in"
AFTER_FINISH = "execution.checkpointing.checkpoints-after-tasks-finish"


def ending(*locations: str) -> list[Any]:
    """Queries with these locations, none for an empty one."""
    return [start(available_now=True, options={"checkpointLocation": at} if at else {}) for at in locations]


@pytest.mark.parametrize(
    ("starts", "submitted", "directory"),
    [
        (ending("/state/a", "/state/b"), {}, "/state/a"),
        (ending(""), {}, None),
        (ending("/state/a"), {CONTINUE_IN: "/other"}, "/other"),
        ([*ending("/state/a"), start(processing_time_interval="1 second")], {}, None),
    ],
)
def test_program_whose_triggers_all_end_continues_in_the_first_location_of_a_query(
    starts: list[Any], submitted: dict[str, str], directory: str | None
) -> None:
    conf = JobOptions(submitted)
    set_options(starts, conf)
    assert conf.get(CONTINUE_IN) == directory
    if directory is not None:
        assert conf.get(AFTER_FINISH) == "false"
    warned = bool(locations_without_use(starts, conf))
    assert warned is (directory is None and len(starts[0].options) > 0)


def test_queries_for_which_spark_makes_a_location_may_start_fresh_with_each_run() -> None:
    starts = [*ending("", "/state/b"), start(available_now=True, format="console"), start(once=True, format="noop")]
    starts[0].foreach_batch.python_function.command = b"code"
    conf = JobOptions({})
    set_options(starts, conf)
    assert conf.get(CONTINUE_IN) == "/state/b"
    assert fresh_queries(starts) == [0, 2, 3]
    assert fresh_queries(ending("", "")) == fresh_queries([*starts, start(processing_time_interval="1 second")]) == []


@pytest.mark.parametrize(
    ("locations", "message"),
    [
        (
            ("/state/a", ""),
            "query 'parquet' has none, and others have one: set it for this query, too; only queries to",
        ),
        (("/state/a", "/state/a"), r"'/state/a' is that of two queries"),
    ],
)
def test_program_that_cannot_continue_as_a_whole_is_refused(locations: tuple[str, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        set_options(ending(*locations), JobOptions({}))


TRIGGER = "execution.stateful-processor.trigger.type"
LIMITED = {"maxFilesPerTrigger": "1"}


@pytest.mark.parametrize(
    ("starts", "options", "submitted", "trigger"),
    [
        ([start(available_now=True), start(once=True)], {}, {}, "CHECKPOINT"),
        ([start(available_now=True)], LIMITED, {}, None),
        ([start(once=True)], LIMITED, {}, "CHECKPOINT"),
        ([start(available_now=True), start()], {}, {}, None),
        ([start(available_now=True)], {}, {TRIGGER: "BUFFER"}, None),
    ],
)
def test_functions_with_state_are_called_once_for_all_that_is_there_if_that_is_one_batch_in_spark(
    starts: list[Any], options: dict[str, str], submitted: dict[str, str], trigger: str | None
) -> None:
    conf = JobOptions(submitted)
    gather_batch(starts, [CapturedSource("parquet", options, "id LONG")], conf)
    assert conf.own.get_text(TRIGGER) == trigger
