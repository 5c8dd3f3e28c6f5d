"""What a task's log tells about a job: where it stands, its last checkpoint, and why it failed.

Generators as conditions are, see :mod:`airflow_provider_ckpt.conditions.base`.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ckpt_runtime.client import requests
from ckpt_runtime.client.checkpoint_models import CheckpointStatistics
from ckpt_runtime.client.errors import NotFound
from ckpt_runtime.client.models import ExceptionHistory, JobDetails
from ckpt_runtime.client.requests import Call
from ckpt_runtime.client.stack_traces import telling_line

_AFTER_FAILURES = ("RESTARTING", "FAILING")
MAX_TRACE_CHARS = 16_000
"""A trace travels in a trigger's event, which lies in Airflow's database."""


@dataclass(frozen=True, slots=True)
class RootCause:
    """The newest failure of a job. ``line`` is empty when the job manager tells of none."""

    line: str = ""
    trace: str = ""

    @property
    def clause(self) -> str:
        """The end of a sentence."""
        return f": {self.line}" if self.line else ""


def root_cause(job_id: str) -> Generator[Call[Any], Any, RootCause]:
    """Why the job has failed, or is restarting."""
    try:
        history: ExceptionHistory = yield requests.job_exceptions(job_id, 1)
    except NotFound:
        return RootCause()
    if not history.entries:
        return RootCause()
    newest = history.entries[0]
    task = f"task {newest.task_name}" if newest.task_name else "the job"
    where = f" on {newest.endpoint}" if newest.endpoint else ""
    trace = f"Failure of {task}{where} at {moment(newest.timestamp_ms)}\n{shortened(newest.stack_trace)}"
    return RootCause(telling_line(newest.stack_trace) or newest.exception, trace)


def failure_of(job: JobDetails) -> Generator[Call[Any], Any, RootCause]:
    """As :func:`root_cause` for a job that is FAILED; nothing for others."""
    return (yield from root_cause(job.job_id)) if job.state == "FAILED" else RootCause()


def job_line(job_id: str) -> Generator[Call[Any], Any, str]:
    """State, last failure and last checkpoint of a job."""
    job: JobDetails = yield requests.job_details(job_id)
    detail = yield from progress_of(job_id, job.state)
    return f"the job is {job.state}; {detail}"


def progress_of(job_id: str, state: str) -> Generator[Call[Any], Any, str]:
    """The last checkpoint, and of a job that is restarting the last failure."""
    cause = (yield from root_cause(job_id)) if state in _AFTER_FAILURES else RootCause()
    checkpoint = yield from _last_checkpoint(job_id)
    return f"last failure{cause.clause}; {checkpoint}" if cause.line else checkpoint


def _last_checkpoint(job_id: str) -> Generator[Call[Any], Any, str]:
    try:
        statistics: CheckpointStatistics = yield requests.checkpoint_statistics(job_id)
    except NotFound:  # a Flink job without checkpoints has no statistics
        return "it takes no checkpoints"
    return checkpoint_line(statistics)


def checkpoint_line(statistics: CheckpointStatistics) -> str:
    """The newest completed checkpoint or savepoint, and what is pending or has failed."""
    found = [item for item in (statistics.latest_completed, statistics.latest_savepoint) if item is not None]
    newest = max(found, key=lambda item: item.id, default=None)
    counts = statistics.counts
    last = "no checkpoint yet"
    if newest is not None:
        noun = "savepoint" if newest.is_savepoint else "checkpoint"
        last = f"last {noun} {newest.id} of {moment(newest.triggered_at_ms)}, which took {newest.duration_ms} ms"
    return f"{last} ({counts.completed} completed, {counts.in_progress} in progress, {counts.failed} failed)"


def moment(epoch_ms: int) -> str:
    """A point in time as people read it; what is none is shown as it is."""
    try:
        return datetime.fromtimestamp(epoch_ms / 1000, UTC).isoformat(sep=" ", timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return f"{epoch_ms} ms"


def shortened(trace: str) -> str:
    """Both ends of a long trace: this engine's tells first, Java's innermost cause comes last."""
    if len(trace) <= MAX_TRACE_CHARS:
        return trace
    half = MAX_TRACE_CHARS // 2
    return f"{trace[:half]}\n... {len(trace) - 2 * half} characters left out ...\n{trace[-half:]}"
