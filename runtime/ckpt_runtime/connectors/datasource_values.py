"""What PySpark's readers and writers hand over, as it is sent and kept: tagged values, in items with a version."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ckpt_runtime.connectors.tagged_values import TaggedValues
from ckpt_runtime.graph.plan_classes import PlanClasses
from ckpt_runtime.state.errors import StateSchemaError

STATE_VERSION = 2
"""1 (which items did not tell) kept offset ranges instead of planned partitions, and messages in another encoding."""


def versioned(items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items as they are kept."""
    return [{"version": STATE_VERSION, **item} for item in items]


def checked_items(uid: str, items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items without their version. Raises StateSchemaError for those of another version."""
    checked = []
    for item in items:
        found = item.get("version", 1)
        if found != STATE_VERSION:
            raise StateSchemaError(
                f"operator {uid!r}: the snapshot holds state of version {found}, and this engine reads version "
                f"{STATE_VERSION}; finish the job with the engine that wrote it, or start it without that snapshot"
            )
        checked.append({key: value for key, value in item.items() if key != "version"})
    return checked


def values_of(source: type, *helpers: Any) -> TaggedValues:
    """With the classes around a ``DataSource`` class and the objects that it made: readers, writers.

    Call it when those are made and before they work, so that all workers of a job know the same classes.
    """
    from pyspark.sql.datasource import InputPartition, WriterCommitMessage

    return TaggedValues(PlanClasses((source, *map(type, helpers)), (InputPartition, WriterCommitMessage)))
