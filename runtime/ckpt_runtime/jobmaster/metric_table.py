"""The table of all metrics with Flink's names: what each is read from, its kind and its meaning.

REST, the Prometheus endpoint and the documentation's table are made from it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from ckpt_runtime.checkpoint.statistics import CheckpointCounts, CheckpointStats
from ckpt_runtime.jobmaster.gateway_values import ClusterOverview
from ckpt_runtime.network.control_messages import SubtaskMeasures
from ckpt_runtime.process_figures import ProcessFigures
from ckpt_runtime.scheduler.job_status import JobStatus

T = TypeVar("T")


class Kind(StrEnum):
    """A rate is the change of a counter per second between the last two heartbeats."""

    COUNTER = "counter"
    GAUGE = "gauge"
    RATE = "rate"


@dataclass(frozen=True, slots=True)
class Metric(Generic[T]):
    """``read`` gives the value, or the counter from which a rate is made; None when there is no value yet."""

    name: str
    kind: Kind
    read: Callable[[T], float | None]
    meaning: str


@dataclass(frozen=True, slots=True)
class JobFigures:
    """A job's figures; ``latest`` is the last completed checkpoint."""

    restarts: int
    counts: CheckpointCounts
    uptime_ms: int = 0
    latest: CheckpointStats | None = None
    failed_reports: int = 0


@dataclass(frozen=True, slots=True)
class OperatorFigures:
    """Rows and watermarks of one operator in one subtask; a source gets the rows that it reads."""

    rows_in: int
    rows_out: int
    input_watermark: int | None = None
    output_watermark: int | None = None
    pending_rows: int | None = None
    alignment_drift_ms: int | None = None


_COUNTER, _GAUGE, _RATE = Kind.COUNTER, Kind.GAUGE, Kind.RATE
_ENDED = (JobStatus.FINISHED, JobStatus.CANCELED, JobStatus.FAILED)


def running(cluster: ClusterOverview) -> int:
    """The number of jobs that have not ended."""
    return sum(count for status, count in cluster.jobs_by_status.items() if status not in _ENDED)


CLUSTER: tuple[Metric[ClusterOverview], ...] = (
    Metric("numRegisteredTaskManagers", _GAUGE, lambda c: c.slot_agents, "The slot agents that are registered."),
    Metric("numRunningJobs", _GAUGE, running, "The jobs that have not ended."),
    Metric("taskSlotsTotal", _GAUGE, lambda c: c.slots_total, "All slots."),
    Metric("taskSlotsAvailable", _GAUGE, lambda c: c.slots_available, "The slots that no job holds."),
)

PROCESS: tuple[Metric[ProcessFigures], ...] = (
    Metric("Status.JVM.CPU.Load", _GAUGE, lambda p: p.cpu_load, "The fraction of all cores that the process uses."),
    Metric("Status.JVM.CPU.Time", _COUNTER, lambda p: p.cpu_ns, "The processor time of the process, in nanoseconds."),
    Metric("Status.JVM.Memory.Heap.Used", _GAUGE, lambda p: p.memory, "The resident memory of the process."),
    Metric("Status.JVM.Memory.Heap.Committed", _GAUGE, lambda p: p.memory, "The resident memory of the process."),
    Metric(
        "Status.JVM.Memory.Heap.Max",
        _GAUGE,
        lambda p: p.memory_limit,
        "The memory limit of the container, or else the memory of the machine.",
    ),
    Metric("Status.JVM.Memory.Metaspace.Used", _GAUGE, lambda _: 0, "Always 0: code is part of the resident memory."),
    Metric(
        "Status.Flink.Memory.Managed.Used",
        _GAUGE,
        lambda _: 0,
        "Always 0: no memory is reserved for operators, and state is part of the resident memory.",
    ),
    Metric("Status.Flink.Memory.Managed.Total", _GAUGE, lambda _: 0, "Always 0: no memory is reserved for operators."),
    Metric("Status.JVM.Threads.Count", _GAUGE, lambda p: p.threads, "The threads of the Python interpreter."),
)
"""Metrics of a process; the driver's are served below ``/jobmanager``, those of workers below ``/taskmanagers``."""


def _of_latest(name: str, read: Callable[[CheckpointStats], int], what: str) -> Metric[JobFigures]:
    """A metric of the last completed checkpoint."""
    meaning = f"{what} of the last completed checkpoint; -1 before the first."
    return Metric(name, _GAUGE, lambda j: -1 if j.latest is None else read(j.latest), meaning)


JOB: tuple[Metric[JobFigures], ...] = (
    Metric("numRestarts", _COUNTER, lambda j: j.restarts, "The restarts since the submission."),
    Metric("fullRestarts", _COUNTER, lambda j: j.restarts, "The same: each restart restarts the whole job."),
    Metric("uptime", _GAUGE, lambda j: j.uptime_ms, "Milliseconds since the job has been running; 0 while it is not."),
    Metric(
        "numFailedReports",
        _COUNTER,
        lambda j: j.failed_reports,
        "The reports of progress, metrics and events that this driver could not make; its log has the reasons.",
    ),
    Metric("totalNumberOfCheckpoints", _COUNTER, lambda j: j.counts.total, "All checkpoints that were triggered."),
    Metric("numberOfCompletedCheckpoints", _COUNTER, lambda j: j.counts.completed, "The checkpoints that completed."),
    Metric("numberOfFailedCheckpoints", _COUNTER, lambda j: j.counts.failed, "The checkpoints that failed."),
    Metric("numberOfInProgressCheckpoints", _GAUGE, lambda j: j.counts.in_progress, "The checkpoints in progress."),
    _of_latest("lastCompletedCheckpointId", lambda c: c.id, "The id"),
    _of_latest("lastCheckpointDuration", lambda c: c.end_to_end_duration, "The milliseconds from trigger to end"),
    _of_latest("lastCheckpointSize", lambda c: c.checkpointed_size, "The newly written bytes"),
    _of_latest("lastCheckpointFullSize", lambda c: c.state_size, "The bytes of all state"),
    _of_latest("lastCheckpointProcessedData", lambda c: c.processed_data, "The bytes processed in alignments"),
    _of_latest("lastCheckpointPersistedData", lambda c: c.persisted_data, "The bytes of data in flight"),
)
"""``lastCheckpointExternalPath`` is served beside these; it is a text."""

TASK: tuple[Metric[SubtaskMeasures], ...] = (
    Metric("numRecordsIn", _COUNTER, lambda t: t.rows_in, "The rows that the subtask has received."),
    Metric("numRecordsInPerSecond", _RATE, lambda t: t.rows_in, "The same per second."),
    Metric("numRecordsOut", _COUNTER, lambda t: t.rows_out, "The rows that the subtask has sent."),
    Metric("numRecordsOutPerSecond", _RATE, lambda t: t.rows_out, "The same per second."),
    Metric("numBytesIn", _COUNTER, lambda t: t.bytes_in, "The bytes of the received rows, in memory."),
    Metric("numBytesInPerSecond", _RATE, lambda t: t.bytes_in, "The same per second."),
    Metric("numBytesOut", _COUNTER, lambda t: t.bytes_out, "The bytes of the sent rows, once for each channel."),
    Metric("numBytesOutPerSecond", _RATE, lambda t: t.bytes_out, "The same per second."),
    Metric("numLateRecordsDropped", _COUNTER, lambda t: t.late_rows_dropped, "The rows that were dropped as late."),
    Metric("numBadRecordsDropped", _COUNTER, lambda t: t.bad_rows_dropped, "The bad rows that were dropped."),
    Metric("busyTimeMsPerSecond", _RATE, lambda t: t.busy_ms, "Milliseconds per second that the subtask processed."),
    Metric("idleTimeMsPerSecond", _RATE, lambda t: t.idle_ms, "Milliseconds per second without anything to process."),
    Metric(
        "backPressuredTimeMsPerSecond",
        _RATE,
        lambda t: t.backpressured_ms,
        "Milliseconds per second in which the subtask could not send.",
    ),
    Metric("accumulateBusyTimeMs", _COUNTER, lambda t: t.busy_ms, "The sum of the busy time."),
    Metric("accumulateIdleTimeMs", _COUNTER, lambda t: t.idle_ms, "The sum of the idle time."),
    Metric("accumulateBackPressuredTimeMs", _COUNTER, lambda t: t.backpressured_ms, "The sum of the blocked time."),
    Metric("isBackPressured", _GAUGE, lambda t: int(t.backpressured), "1 while the subtask cannot send, else 0."),
    Metric(
        "buffers.inPoolUsage",
        _GAUGE,
        lambda t: t.input_usage,
        "The fraction of the granted input buffers that are in use.",
    ),
    Metric(
        "buffers.outPoolUsage", _GAUGE, lambda t: t.output_usage, "The fraction of the output channels that are full."
    ),
    Metric("buffers.inputQueueLength", _GAUGE, lambda t: t.queued_elements, "The elements that wait in the input."),
    Metric(
        "currentInputWatermark", _GAUGE, lambda t: t.input_watermark, "The event time that all inputs have reached."
    ),
    Metric(
        "checkpointAlignmentTime",
        _GAUGE,
        lambda t: None if t.alignment_ms is None else t.alignment_ms * 1_000_000,
        "Nanoseconds that the barriers of the last checkpoint were aligned.",
    ),
    Metric(
        "checkpointStartDelayNanos",
        _GAUGE,
        lambda t: None if t.start_delay_ms is None else t.start_delay_ms * 1_000_000,
        "Nanoseconds between the trigger of the last checkpoint and its first barrier here.",
    ),
    Metric(
        "debloatedBufferSize",
        _GAUGE,
        lambda t: t.debloated_buffer_size,
        "The bytes of a buffer that the subtask requests, with buffer debloating.",
    ),
)

OPERATOR: tuple[Metric[OperatorFigures], ...] = (
    Metric(
        "numRecordsIn", _COUNTER, lambda o: o.rows_in, "The rows that the operator has received; for a source, read."
    ),
    Metric("numRecordsInPerSecond", _RATE, lambda o: o.rows_in, "The same per second."),
    Metric("numRecordsOut", _COUNTER, lambda o: o.rows_out, "The rows that the operator has sent."),
    Metric("numRecordsOutPerSecond", _RATE, lambda o: o.rows_out, "The same per second."),
    Metric("currentInputWatermark", _GAUGE, lambda o: o.input_watermark, "For the first operator of a chain."),
    Metric("currentOutputWatermark", _GAUGE, lambda o: o.output_watermark, "For the last operator of a chain."),
    Metric("pendingRecords", _GAUGE, lambda o: o.pending_rows, "The rows that wait in a source that can count them."),
    Metric(
        "watermarkAlignmentDrift",
        _GAUGE,
        lambda o: o.alignment_drift_ms,
        "Milliseconds by which an aligned source is ahead of the slowest one of its group.",
    ),
)

ABSENT = (
    ("Status.JVM.Memory.NonHeap.*, .Direct.*, .Mapped.*", "There is only one kind of memory."),
    ("Status.JVM.GarbageCollector.*, Status.JVM.ClassLoader.*", "There is no JVM."),
    ("Status.Shuffle.Netty.*, Status.Network.*", "Each channel has its own queues instead of a shared pool."),
    ("currentFetchEventTimeLag, currentEmitEventTimeLag", "Sources do not know the event time of a row."),
    ("buffers.inputExclusiveBuffersUsage, inputFloatingBuffersUsage", "Each channel has a fixed window of buffers."),
    ("softBackPressuredTimeMsPerSecond, hardBackPressuredTimeMsPerSecond", "Both are backPressuredTimeMsPerSecond."),
    ("mailboxMailsPerSecond, mailboxQueueSize", "The queue of a task's mails is not measured."),
)
"""Flink's metrics that have no meaning here or are not measured."""


def values(metrics: Iterable[Metric[T]], source: T) -> dict[str, float]:
    """The values that exist, by name; rates are left out."""
    found = {}
    for metric in metrics:
        value = None if metric.kind is Kind.RATE else metric.read(source)
        if value is not None:
            found[metric.name] = value
    return found


def texts(metrics: Iterable[Metric[T]], source: T) -> dict[str, str]:
    """The values as text."""
    return {name: text_of(value) for name, value in values(metrics, source).items()}


def text_of(value: float) -> str:
    """A value as text; whole numbers have no decimal point."""
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def values_with_rates(metrics: Iterable[Metric[T]], current: T, previous: T | None, span_ms: float) -> dict[str, float]:
    """The values that exist, by name, with the rates between two measurements that are ``span_ms`` apart."""
    found = {}
    for metric in metrics:
        value = metric.read(current)
        if metric.kind is Kind.RATE and value is not None:
            before = value if previous is None else metric.read(previous) or 0.0
            value = max(0.0, value - before) / span_ms * 1000 if span_ms else 0.0
        if value is not None:
            found[metric.name] = value
    return found
