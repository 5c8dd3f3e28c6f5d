"""Which requests of Spark Connect clients concern streams, and which carry code."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql.connect.proto import Plan, Relation

from ckpt_runtime.connect.server import code_in, reads_stream

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
