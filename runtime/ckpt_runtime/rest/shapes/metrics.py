"""Metrics in Flink's JSON shapes: lists of names, values as text, aggregations. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckpt_runtime.jobmaster.metric_table import text_of

Json = dict[str, Any]

AGGREGATIONS = ("min", "max", "avg", "sum", "skew")


def by_subtask(metrics: Mapping[int, Mapping[str, float]]) -> dict[str, str]:
    """Metric values as text, by names such as ``0.numRecordsIn``."""
    return {f"{index}.{name}": text_of(value) for index, own in metrics.items() for name, value in own.items()}


def listing(values: Mapping[str, str], names: Sequence[str] | None) -> list[Json]:
    """Lists all names if none was requested, else the values of the requested metrics that exist."""
    if names is None:
        return [{"id": name} for name in values]
    return [{"id": name, "value": values[name]} for name in dict.fromkeys(names) if name in values]


def aggregated(samples: Iterable[Mapping[str, float]], names: Sequence[str] | None, kinds: Sequence[str]) -> list[Json]:
    """Computes ``min``, ``max``, ``avg``, ``sum`` and ``skew`` over the samples which have the metric."""
    collected: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.items():
            collected.setdefault(name, []).append(float(value))
    if names is None:
        return [{"id": name} for name in collected]
    return [
        {"id": name, **{kind: _aggregate(kind, collected[name]) for kind in kinds}}
        for name in dict.fromkeys(names)
        if name in collected
    ]


def _aggregate(kind: str, values: Sequence[float]) -> float:
    if kind == "min":
        return min(values)
    if kind == "max":
        return max(values)
    total = sum(values)
    average = total / len(values)
    if kind == "avg":
        return average
    if kind == "sum":
        return total
    if average == 0:
        return 0.0
    deviation = sum(abs(value - average) for value in values) / len(values)
    return 100.0 * deviation / average
