"""How the values of a data source's classes travel."""

from __future__ import annotations

from typing import Any

from ckpt_runtime.connectors.tagged_values import TaggedValues
from ckpt_runtime.graph.plan_classes import PlanClasses


def values_of(source: type, *helpers: Any) -> TaggedValues:
    """With the classes around a ``DataSource`` class and the objects that it made: readers, writers.

    Call it when those are made and before they work, so that all workers of a job know the same classes.
    """
    from pyspark.sql.datasource import InputPartition, WriterCommitMessage

    return TaggedValues(PlanClasses((source, *map(type, helpers)), (InputPartition, WriterCommitMessage)))
