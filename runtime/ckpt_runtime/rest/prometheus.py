"""Metrics in the text format of Prometheus, with the names of Flink's reporter if Flink has them. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ckpt_runtime.jobmaster.gateway_values import ClusterOverview, JobOverview
from ckpt_runtime.jobmaster.health import HealthVerdict, JobHealth
from ckpt_runtime.scheduler.job_status import JobStatus

Job = tuple[JobOverview, Mapping[str, str], JobHealth]

_LABELS = ("job_id", "job_name")


def text(cluster: ClusterOverview, jobs: Iterable[Job]) -> bytes:
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
