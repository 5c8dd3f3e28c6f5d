"""Aggregate functions for ``groupBy(...).agg(...)``, named as in ``pyspark.sql.functions``. Descriptions only."""

# Names are PySpark's.
# ruff: noqa: A001

from __future__ import annotations

from dataclasses import dataclass

from ckpt_runtime.api.checks import checked_text
from ckpt_runtime.graph.specs import Aggregate


@dataclass(frozen=True, slots=True)
class AggregateExpression:
    """One aggregate with the name of its output column."""

    function: str
    column: str | None
    name: str

    def alias(self, name: str) -> AggregateExpression:
        """Returns the same aggregate under another output name.

        :param name: of the column.
        """
        return AggregateExpression(self.function, self.column, checked_text("alias", name))

    def to_aggregate(self) -> Aggregate:
        """Returns the aggregate as the plan describes it."""
        return Aggregate(self.function, self.column, self.name)


def _over(function: str, column: str) -> AggregateExpression:
    name = checked_text(function, column)
    return AggregateExpression(function, name, f"{function}({name})")


def count(column: str = "*") -> AggregateExpression:
    """Counts the rows per key, named ``count``; of a column, the values that are not null, named ``count(column)``.

    :param column: the column whose values count; ``*`` for rows.
    """
    return AggregateExpression("count", None, "count") if column == "*" else _over("count", column)


def sum(column: str) -> AggregateExpression:
    """Adds up the values that are not null; null while there is none.

    :param column: a column of numbers.
    """
    return _over("sum", column)


def min(column: str) -> AggregateExpression:
    """Keeps the minimum; null while there is none.

    :param column: a column of values that have an order.
    """
    return _over("min", column)


def max(column: str) -> AggregateExpression:
    """Keeps the maximum; null while there is none.

    :param column: a column of values that have an order.
    """
    return _over("max", column)


def avg(column: str) -> AggregateExpression:
    """Averages the values that are not null, as a double; null while there is none.

    :param column: a column of numbers.
    """
    return _over("avg", column)
