"""Which requests of Spark Connect clients concern streams, which carry code, and which answers are recorded."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from pyspark.sql.connect.proto import Plan, Relation

from ckpt_runtime.connect.server import code_in
from ckpt_runtime.connect.sessions import MOST_RECORDED_BYTES, Failure, Recording
from ckpt_runtime.frontend.connect_service import reads_stream
from ckpt_runtime.frontend.recorded_script import STATUS_KEY
from ckpt_runtime.graph.errors import PlanError

STREAM = {"read": {"is_streaming": True, "data_source": {"format": "rate"}}}
TABLE = {"read": {"named_table": {"unparsed_identifier": "Orders"}}}


def sql(query: str) -> dict[str, Any]:
    return {"sql": {"query": query}}


@pytest.mark.parametrize(
    ("relation", "concerns"),
    [
        (STREAM, True),
        ({"read": {"data_source": {"format": "parquet"}}}, False),
        ({"join": {"left": {"range": {"end": 1, "step": 1}}, "right": STREAM}}, True),
        (TABLE, True),
        ({"read": {"named_table": {"unparsed_identifier": "others"}}}, False),
        (sql("SELECT * FROM orders"), True),
        (sql("SELECT * FROM `ORDERS` AS o"), True),
        (sql("SELECT * FROM old_orders"), False),
        (sql("SELECT * FROM orders2"), False),
        ({"filter": {"condition": {"expression_string": {"expression": "id IN (SELECT id FROM orders)"}}}}, True),
    ],
)
def test_plan_concerns_a_stream_if_it_reads_one_or_names_a_view_of_one(
    relation: dict[str, Any], concerns: bool
) -> None:
    assert reads_stream(Plan(root=Relation(**relation)), {"orders"}) is concerns


def test_plan_of_views_concerns_no_stream_where_no_stream_has_a_view() -> None:
    assert not reads_stream(Plan(root=Relation(**TABLE)), ())
    assert not reads_stream(Plan(root=Relation(**sql("SELECT * FROM orders"))), ())


def test_serialized_function_is_found_at_any_depth() -> None:
    udf = {"common_inline_user_defined_function": {"function_name": "f", "python_udf": {"command": b"\x80"}}}
    filtered = Relation(filter={"input": STREAM, "condition": {"alias": {"expr": udf, "name": ["x"]}}})
    assert code_in(Plan(root=filtered)) == "common_inline_user_defined_function"
    assert code_in(Plan(root=Relation(map_partitions={"input": STREAM}))) == "map_partitions"
    assert code_in(Plan(root=Relation(**STREAM))) == ""


def test_answers_are_recorded_in_the_order_of_their_requests_and_each_response_once() -> None:
    recording = Recording()
    for operation, kind in (("first", "sql_command"), ("second", ""), ("first", "sql_command"), ("third", "start")):
        recording.begin(operation, kind)
    for operation, response in (("second", b"2"), ("first", b"1"), ("first", b"1"), ("unknown", b"0")):
        recording.add(operation, response.decode(), response)
    recording.fail("second", Failure(grpc.StatusCode.NOT_FOUND, "no such table", ((STATUS_KEY, b"status"),)))
    first, second = recording.before("third")
    assert (first.kind, first.responses, first.code) == ("sql_command", [b"1"], 0)
    assert (second.kind, second.responses, second.code) == ("", [b"2"], grpc.StatusCode.NOT_FOUND.value[0])
    assert (second.message, second.details) == ("no such table", b"status")


def test_script_that_reads_too_much_starts_no_query_with_functions() -> None:
    recording = Recording()
    recording.begin("first", "")
    recording.add("first", "1", bytes(MOST_RECORDED_BYTES))
    recording.begin("second", "start")
    recording.fail("second", Failure(grpc.StatusCode.INTERNAL, "", ()))
    with pytest.raises(PlanError, match="more than 4194304 bytes"):
        recording.before("second")
