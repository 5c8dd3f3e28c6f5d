"""Metrics as the contract shows them (lists of names, values as text, aggregations), and in Prometheus' text format.

In the text format metrics have the names of Flink's reporter if Flink has them. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ckpt_runtime.contract.cluster import AggregatedMetric, Metric
from ckpt_runtime.jobmaster.gateway_values import ClusterOverview, JobOverview
from ckpt_runtime.jobmaster.health import HealthVerdict, JobHealth
from ckpt_runtime.scheduler.job_status import JobStatus

AGGREGATIONS = ("min", "max", "avg", "sum", "skew")


def by_subtask(metrics: Mapping[int, Mapping[str, float]]) -> dict[str, str]:
    """Metric values as text, by names such as ``0.numRecordsIn``."""
    return {f"{index}.{name}": number(value) for index, own in metrics.items() for name, value in own.items()}


def number(value: float) -> str:
    """A metric's value as text; whole numbers have no decimal point."""
    return str(int(value)) if float(value).is_integer() else repr(float(value))


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


Job = tuple[JobOverview, Mapping[str, str], JobHealth]

_LABELS = ("job_id", "job_name")


def prometheus_text(cluster: ClusterOverview, jobs: Iterable[Job]) -> bytes:
    """The answer to a scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(cluster, list(jobs)))
    return generate_latest(registry)


class _Snapshot(Collector):
    """The metric values at one moment."""

    def __init__(self, cluster: ClusterOverview, jobs: list[Job]) -> None:
        self._cluster = cluster
        self._jobs = jobs

    def collect(self) -> Iterator[GaugeMetricFamily]:
        cluster = self._cluster
        running = cluster.jobs_by_status.get(JobStatus.RUNNING, 0)
        for name, value, meaning in (
            ("numRegisteredTaskManagers", cluster.slot_agents, "slot agents"),
            ("taskSlotsTotal", cluster.slots_total, "slots"),
            ("taskSlotsAvailable", cluster.slots_available, "slots that no job has"),
            ("numRunningJobs", running, "jobs in state RUNNING"),
        ):
            yield GaugeMetricFamily(f"flink_jobmanager_{name}", meaning, value=value)
        states = GaugeMetricFamily("ckpt_jobs", "jobs in a state, with ended ones that are listed", labels=("state",))
        for status in JobStatus:
            states.add_metric((status.value,), cluster.jobs_by_status.get(status, 0))
        yield states
        names = dict.fromkeys(name for _, metrics, _ in self._jobs for name in metrics)
        for name in names:
            yield from self._of_jobs(name)
        yield from self._of_health()

    def _of_jobs(self, name: str) -> Iterator[GaugeMetricFamily]:
        """The numeric ones among Flink's job metrics."""
        family = GaugeMetricFamily(f"flink_jobmanager_job_{name}", f"Flink's job metric {name}", labels=_LABELS)
        for job, metrics, _ in self._jobs:
            try:
                value = float(metrics[name])
            except (KeyError, ValueError):
                continue
            family.add_metric((job.job_id, job.name), value)
        if family.samples:
            yield family

    def _of_health(self) -> Iterator[GaugeMetricFamily]:
        verdict = GaugeMetricFamily(
            "ckpt_job_health", "1 for the verdict that holds, 0 for the others", labels=(*_LABELS, "verdict")
        )
        age = GaugeMetricFamily("ckpt_job_lastCheckpointAge", "ms since the last checkpoint completed", labels=_LABELS)
        rate = GaugeMetricFamily(
            "ckpt_job_checkpointSuccessRate", "share of the checkpoints in the history that completed", labels=_LABELS
        )
        pressure = GaugeMetricFamily(
            "ckpt_job_backpressure", "greatest share of time that a subtask could not send", labels=_LABELS
        )
        for job, _, health in self._jobs:
            labels = (job.job_id, job.name)
            for possible in HealthVerdict:
                verdict.add_metric((*labels, possible.value), float(possible is health.verdict))
            if health.checkpoint_age_ms is not None:
                age.add_metric(labels, health.checkpoint_age_ms)
            if health.success_rate is not None:
                rate.add_metric(labels, health.success_rate)
            pressure.add_metric(labels, health.backpressure)
        yield from (verdict, age, rate, pressure)
