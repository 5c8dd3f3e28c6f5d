"""What a function of ``mapInArrow`` may give: the same functions in Spark and in the engine's operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from ckpt_runtime.graph.ddl import to_arrow_schema
from ckpt_runtime.graph.specs import MapInArrowSpec
from ckpt_runtime.operators.errors import OperatorError
from ckpt_runtime.operators.python_functions import MapInArrowOperator
from tests.unit.runtime.connectors.harness import context, opened

pytestmark = pytest.mark.spark

Batches = Iterator[pa.RecordBatch]
NUMBERS, TEXTS = pa.array([1, 2]), pa.array(["x", None])


def pandas(batches: Batches) -> Batches:
    for batch in batches:
        yield pa.RecordBatch.from_pandas(batch.to_pandas())


def giving(**columns: pa.Array) -> Callable[[Batches], Batches]:
    return lambda batches: (pa.record_batch(columns) for _ in batches)


TAKEN: dict[str, tuple[Callable[[Batches], Any], str]] = {
    "pandas": (pandas, "a BIGINT, b STRING"),
    "other names": (giving(x=NUMBERS, y=TEXTS), "a BIGINT, b STRING"),
    "large text": (giving(a=NUMBERS, b=TEXTS.cast(pa.large_string())), "a BIGINT, b STRING"),
    "nulls": (giving(a=pa.nulls(2), b=TEXTS), "a BIGINT, b STRING"),
    "not null": (giving(a=NUMBERS, b=TEXTS), "a BIGINT NOT NULL, b STRING"),
    "decimal": (giving(a=pa.array(["1.5"]).cast(pa.decimal128(5, 1))), "a DECIMAL(10, 2)"),
    "list": (lambda batches: [pa.record_batch({"a": NUMBERS}) for _ in batches], "a BIGINT"),
}
REFUSED: dict[str, tuple[Callable[[Batches], Any], str]] = {
    "order": (giving(b=TEXTS, a=NUMBERS), "a BIGINT, b STRING"),
    "narrow": (giving(a=NUMBERS.cast(pa.int32())), "a BIGINT"),
    "nothing": (lambda batches: None, "a BIGINT"),
}


def in_the_engine(function: Callable[[Batches], Any], schema: str) -> list[dict[str, Any]]:
    operator = MapInArrowOperator(MapInArrowSpec(function, to_arrow_schema(schema)))
    output = opened(operator, context())
    operator.process_batch(pa.record_batch({"a": NUMBERS, "b": TEXTS}), 0)
    return output.rows


def test_results_of_every_form(spark: SparkSession) -> None:
    source = spark.createDataFrame([(1, "x"), (2, None)], "a BIGINT, b STRING").coalesce(1)
    for name, (function, schema) in TAKEN.items():
        assert in_the_engine(function, schema) == [
            row.asDict() for row in source.mapInArrow(function, schema).collect()
        ], name
    for function, schema in REFUSED.values():
        with pytest.raises(PySparkException):
            source.mapInArrow(function, schema).collect()
        with pytest.raises((OperatorError, TypeError)):
            in_the_engine(function, schema)
