"""Metrics in the text format of Prometheus, with the names of Flink's reporter if Flink has them. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ckpt_runtime.contract.jobs import JobHealth
from ckpt_runtime.jobmaster.gateway_values import ClusterOverview, JobOverview, MetricSeries, WorkerFigures
from ckpt_runtime.jobmaster.health import HealthVerdict
from ckpt_runtime.jobmaster.metric_table import CLUSTER, JOB, OPERATOR, PROCESS, TASK, values
from ckpt_runtime.process_figures import ProcessFigures
from ckpt_runtime.scheduler.job_status import JobStatus

Job = tuple[JobOverview, Mapping[str, str], JobHealth]

_MEANINGS = {metric.name: metric.meaning for group in (OPERATOR, TASK, JOB, CLUSTER, PROCESS) for metric in group}
_LABELS = ("job_id", "job_name")


@dataclass(frozen=True, slots=True)
class Moment:
    """The values that a scrape shows; ``left_out`` counts the series of subtasks and operators that are above the
    limit."""

    cluster: ClusterOverview
    driver: ProcessFigures
    workers: Sequence[WorkerFigures]
    jobs: Sequence[Job]
    series: Sequence[MetricSeries]
    left_out: int


def text(moment: Moment) -> bytes:
    """The answer to a scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(moment))
    return generate_latest(registry)


def _name(prefix: str, metric: str) -> str:
    """The name in Prometheus. Flink's reporter replaces every character that Prometheus does not allow."""
    return prefix + re.sub(r"[^a-zA-Z0-9_:]", "_", metric)


class _Snapshot(Collector):
    """The metric values at one moment. All are exported as gauges, even counters, as by Flink's reporter."""

    def __init__(self, moment: Moment) -> None:
        self._moment = moment
        self._jobs = moment.jobs

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for metric, value in values(CLUSTER, self._moment.cluster).items():
            yield GaugeMetricFamily(_name("flink_jobmanager_", metric), _MEANINGS[metric], value=value)
        for metric, value in values(PROCESS, self._moment.driver).items():
            yield GaugeMetricFamily(_name("flink_jobmanager_", metric), _MEANINGS[metric], value=value)
        states = GaugeMetricFamily(
            "ckpt_jobs", "jobs in a state, including the ended ones that are listed", labels=("state",)
        )
        for status in JobStatus:
            states.add_metric((status.value,), self._moment.cluster.jobs_by_status.get(status, 0))
        yield states
        names = dict.fromkeys(name for _, metrics, _ in self._jobs for name in metrics)
        for name in names:
            yield from self._of_jobs(name)
        yield from self._of_health()
        yield from self._of_tasks()

    def _of_tasks(self) -> Iterator[GaugeMetricFamily]:
        """The workers' processes, the subtasks and the operators."""
        families: dict[str, GaugeMetricFamily] = {}

        def add(prefix: str, labels: Mapping[str, str], found: Mapping[str, float]) -> None:
            for metric, value in found.items():
                name = _name(prefix, metric)
                family = families.get(name)
                if family is None:
                    family = families[name] = GaugeMetricFamily(name, _MEANINGS[metric], labels=tuple(labels))
                family.add_metric(tuple(labels.values()), value)

        for worker in self._moment.workers:
            if worker.process is not None:
                labels = {"host": worker.endpoint.rpartition(":")[0], "tm_id": worker.slot_id}
                add("flink_taskmanager_", labels, values(PROCESS, worker.process))
        for series in self._moment.series:
            scope = "task_operator_" if series.of_operator else "task_"
            add(f"flink_taskmanager_job_{scope}", series.labels, series.values)
        yield from families.values()
        yield GaugeMetricFamily(
            "ckpt_metrics_series_left_out",
            "series of subtasks and operators above rest.metrics.max-series",
            value=self._moment.left_out,
        )

    def _of_jobs(self, name: str) -> Iterator[GaugeMetricFamily]:
        """The numeric job metrics of Flink."""
        family = GaugeMetricFamily(f"flink_jobmanager_job_{name}", _MEANINGS.get(name, name), labels=_LABELS)
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
            "ckpt_job_health", "1 for the current verdict, 0 for the others", labels=(*_LABELS, "verdict")
        )
        age = GaugeMetricFamily("ckpt_job_lastCheckpointAge", "ms since the last checkpoint completed", labels=_LABELS)
        rate = GaugeMetricFamily(
            "ckpt_job_checkpointSuccessRate",
            "fraction of the checkpoints in the history that completed",
            labels=_LABELS,
        )
        pressure = GaugeMetricFamily(
            "ckpt_job_backpressure", "maximum fraction of time that a subtask could not send", labels=_LABELS
        )
        for job, _, health in self._jobs:
            labels = (job.job_id, job.name)
            for possible in HealthVerdict:
                verdict.add_metric((*labels, possible.value), float(possible == health.verdict))
            if health.checkpoints.last_completed_age_ms is not None:
                age.add_metric(labels, health.checkpoints.last_completed_age_ms)
            if health.checkpoints.success_rate is not None:
                rate.add_metric(labels, health.checkpoints.success_rate)
            pressure.add_metric(labels, health.backpressure.ratio)
        yield from (verdict, age, rate, pressure)
