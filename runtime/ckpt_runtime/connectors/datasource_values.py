"""Encodes the values that PySpark's readers and writers return, for sending and for state, as versioned items."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from ckpt_runtime.connectors.tagged_values import TaggedValues
from ckpt_runtime.graph.plan_classes import PlanClasses
from ckpt_runtime.operators.operator import OperatorContext
from ckpt_runtime.state.errors import StateSchemaError

T = TypeVar("T")

STATE_VERSION = 2
"""Version 1 (not written into items) kept offset ranges, not planned partitions, and encoded messages differently."""


def versioned(items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the items with the version, as they are stored."""
    return [{"version": STATE_VERSION, **item} for item in items]


def restored_items(
    context: OperatorContext, name: str, schema: type[T], version: int = STATE_VERSION, *also: int
) -> tuple[T, ...]:
    """The restored items. Raises StateSchemaError for those of another version, CorruptStateError for damaged ones.

    ``also`` are further versions that the schema describes.
    """
    uid = context.uid
    for item in context.operator_state.restored(name, dict[str, Any]):
        found = item.get("version", 1)
        if found not in (version, *also):
            raise StateSchemaError(
                f"operator {uid!r}: the snapshot holds state of version {found}, and this engine reads version "
                f"{version}; finish the job with the engine that wrote it, or start it without that snapshot"
            )
    return context.operator_state.restored(name, schema)


def values_of(source: type, *helpers: Any) -> TaggedValues:
    """Returns the codec for the classes around a ``DataSource`` class and the objects that it made (readers, writers).

    Call it after these objects are made and before they are used, so that all workers of a job know the same classes.
    """
    from pyspark.sql.datasource import InputPartition, WriterCommitMessage

    return TaggedValues(PlanClasses((source, *map(type, helpers)), (InputPartition, WriterCommitMessage)))
