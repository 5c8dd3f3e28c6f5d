"""What a reader's ``read`` yields, as PySpark's own worker and as the engine converts it; needs no session of Spark."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.errors import PySparkValueError
from pyspark.sql import Row
from pyspark.sql.datasource import DataSource
from pyspark.sql.worker.plan_data_source_read import records_to_arrow_batches

from ckpt_runtime.connectors.datasource_rows import records_to_batches, struct_type
from ckpt_runtime.graph.ddl import to_arrow_schema

EAST = dt.timezone(dt.timedelta(hours=3))
RECORDS: dict[str, list[Any]] = {
    "a INT": [
        (1,), [2], (None,), Row(a=3), Row(4), (True,), (1.0,), (1.5,), ("x",), (2**40,), (np.int32(3),), (1, 2), 5
    ],
    "a STRING": [
        ("s",), (1,), (1.5,), (True,), (b"x",), (Decimal("1.50"),), ([1],), ({"a": 1},), (dt.date(2020, 1, 1),),
        ("\ud800",),
    ],
    "a DOUBLE": [(1,), (np.float64(1.5),), ("x",)],
    "a FLOAT": [(np.float64(1.5),), (1e300,)],
    "a BOOLEAN": [(1,), (np.bool_(True),)],
    "a DATE": [(dt.datetime(2020, 1, 1, 5),), ("2020-01-01",)],
    "a TIMESTAMP": [(dt.datetime(2020, 1, 1),), (dt.datetime(2020, 1, 1, tzinfo=EAST),)],
    "a TIMESTAMP_NTZ": [(dt.datetime(2020, 1, 1),), (dt.datetime(2020, 1, 1, tzinfo=dt.UTC),)],
    "a BINARY": [(b"x",), (bytearray(b"y"),), ("s",)],
    "a DECIMAL(10, 2)": [(Decimal("1.2"),), (Decimal("1.205"),), (1,), (1.5,)],
    "a ARRAY<INT>": [([1, None],), ((1, 2),), (None,), (np.array([1, 2]),)],
    "a ARRAY<STRING>": [([1, 2.5],)],
    "a MAP<STRING, INT>": [({"a": 1},), ({},), ({1: 1},)],
    "a STRUCT<x: INT, y: STRING>": [
        (Row(y="q", x=1),), ((1, "t"),), ({"x": 1},), ({"y": 2, "x": None},), ([1, "l"],), (None,)
    ],
    "a ARRAY<INT>, b STRING": [([], "x"), Row(b="y", a=[1]), ["only"], Row(a=[1], c="x")],
    "a INTERVAL DAY TO SECOND": [(dt.timedelta(1),)],
}  # fmt: skip


class Named(DataSource):
    """Only its name is asked for, in messages."""


def converted(convert: Callable[[Any], Iterable[pa.RecordBatch]], record: Any) -> str:
    """The rows, or that there are none for this record."""
    try:
        return repr([row for batch in convert(iter([record])) for row in batch.to_pylist()])
    except Exception:
        return "refused"


@pytest.mark.row("io.2")
@pytest.mark.parametrize("ddl", RECORDS)
def test_records_become_the_same_rows(ddl: str) -> None:
    schema = to_arrow_schema(ddl, "schema")
    struct, source = struct_type(schema), Named({})
    for record in RECORDS[ddl]:
        theirs = converted(lambda records: records_to_arrow_batches(records, 100, struct, source), record)
        assert converted(lambda records: records_to_batches(records, schema, "read"), record) == theirs, record


def test_a_null_that_the_schema_has_not_is_refused() -> None:
    """Spark's worker lets it pass."""
    schema = to_arrow_schema("a INT NOT NULL", "schema")
    with pytest.raises(PySparkValueError, match="not be"):
        list(records_to_batches([(None,)], schema, "read"))
