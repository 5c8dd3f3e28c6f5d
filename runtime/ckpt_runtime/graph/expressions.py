"""Checks Arrow expressions against a schema at planning time, so that no subtask fails on them. Reads no data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.graph.errors import PlanError


def expression_type(expression: object, schema: pa.Schema, field: str) -> pa.DataType:
    """The type of ``expression`` over rows of ``schema``.

    Raises PlanError naming ``field`` for a column that does not exist, types that no function takes,
    or a value that is not an expression.
    """
    if not isinstance(expression, pc.Expression):
        raise PlanError(
            field, f"expected a pyarrow.compute expression such as pc.field('x') > 1, not {kind_text(expression)}"
        )
    import pyarrow.dataset as ds  # imports pandas, see ckpt_runtime.graph.schemas

    try:
        columns: Any = {"value": expression}
        projected = ds.dataset(schema.empty_table()).scanner(columns=columns).projected_schema
    except (pa.ArrowException, ValueError, TypeError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PlanError(field, f"{expression}: {first_line}; columns are {', '.join(schema.names)}") from error
    kind: pa.DataType = projected.field("value").type
    return kind


def kind_text(value: object) -> str:
    """Describes a value that does not belong in a plan, for messages."""
    kind = type(value)
    of_pyspark = kind.__module__.partition(".")[0] == "pyspark"
    return f"PySpark's {kind.__name__}, which only Spark can work with" if of_pyspark else kind.__name__


def check_columns(columns: Sequence[str], schema: pa.Schema, field: str) -> None:
    """Raises PlanError for a name that is not a string or not a column, or one that occurs twice in ``columns``."""
    for position, column in enumerate(columns):
        if not isinstance(column, str):
            raise PlanError(field, f"expected a column name, not {kind_text(column)}")
        if schema.names.count(column) != 1:
            known = ", ".join(schema.names)
            problem = "is ambiguous" if column in schema.names else "does not exist"
            raise PlanError(field, f"column {column!r} {problem}; columns are {known}")
        if column in columns[:position]:
            raise PlanError(field, f"column {column!r} is given twice")
