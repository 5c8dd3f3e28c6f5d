"""Metrics as the contract shows them: lists of names, values as text, aggregations. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ckpt_runtime.contract.cluster import AggregatedMetric, Metric
from ckpt_runtime.jobmaster.metric_table import text_of

AGGREGATIONS = ("min", "max", "avg", "sum", "skew")


def by_subtask(metrics: Mapping[int, Mapping[str, float]]) -> dict[str, str]:
    """Metric values as text, by names such as ``0.numRecordsIn``."""
    return {f"{index}.{name}": text_of(value) for index, own in metrics.items() for name, value in own.items()}


def listing(values: Mapping[str, str], names: Sequence[str] | None) -> list[Metric]:
    """Lists all names if none was requested, else the values of the requested metrics that exist."""
    if names is None:
        return [Metric(name) for name in values]
    return [Metric(name, values[name]) for name in dict.fromkeys(names) if name in values]


def aggregated(
    samples: Iterable[Mapping[str, float]], names: Sequence[str] | None, kinds: Sequence[str]
) -> list[AggregatedMetric]:
    """Aggregates each requested metric over the samples which have it; lists all names if none was requested."""
    collected: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.items():
            collected.setdefault(name, []).append(float(value))
    if names is None:
        return [AggregatedMetric(name) for name in collected]
    return [
        AggregatedMetric(name, **{kind: _aggregate(kind, collected[name]) for kind in kinds})
        for name in dict.fromkeys(names)
        if name in collected
    ]


def _aggregate(kind: str, values: Sequence[float]) -> float:
    average = sum(values) / len(values)
    match kind:
        case "min":
            return min(values)
        case "max":
            return max(values)
        case "avg":
            return average
        case "sum":
            return sum(values)
    deviation = sum(abs(value - average) for value in values) / len(values)
    return 100.0 * deviation / average if average else 0.0
