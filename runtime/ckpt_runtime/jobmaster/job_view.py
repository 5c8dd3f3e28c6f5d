"""A living job as users see it: status, subtasks, failures, numbers. Filled by the job's shell, read by REST.

The failures are bounded in number and in size for any message of a worker: a history that cannot be stored would keep a
job from ending.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.statistics import CheckpointStatsSnapshot
from ckpt_runtime.configuration.cluster_options import JobManagerOptions
from ckpt_runtime.configuration.configuration import effective_options
from ckpt_runtime.contract.configuration import JobConfig
from ckpt_runtime.failure_report import MAX_MESSAGE_CHARS, MAX_TRACE_CHARS, FailureCause, printable
from ckpt_runtime.jobmaster.ended_job import ShownJob, result_document, shown_configuration
from ckpt_runtime.jobmaster.executions import wall_clock_ms
from ckpt_runtime.jobmaster.gateway_values import (
    NOT_YET,
    EffectiveCheckpointConfig,
    ExceptionEntry,
    ExceptionHistory,
    ExecutionState,
)
from ckpt_runtime.jobmaster.job_host import JobHost, Pool, Result
from ckpt_runtime.jobmaster.job_record import JobRecord
from ckpt_runtime.jobmaster.job_settings import strategy_type
from ckpt_runtime.jobmaster.metric_table import JOB, JobFigures, texts
from ckpt_runtime.jobmaster.slots import Slot
from ckpt_runtime.jobmaster.submission import JobSubmission
from ckpt_runtime.scheduler.core_events import DeployTasks, RecordFailure
from ckpt_runtime.scheduler.deployment import JobPlan
from ckpt_runtime.scheduler.job_effects import JobEnded, StatusChanged
from ckpt_runtime.scheduler.job_events import FailureInfo
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.structured_log import fields

logger = logging.getLogger(__name__)

MAX_CONCURRENT = 16
MAX_STORED = 16
MAX_STORED_CHARS = 1 << 20
"""Limit of all texts together; the oldest failures are dropped first, then those concurrent with the newest."""
_MAX_TRACE_CHARS = MAX_TRACE_CHARS + 2 * MAX_MESSAGE_CHARS
"""In addition to its frames, a worker's trace has a first line that repeats the message."""


class FailureLog:
    """Keeps the last ``size`` failures; ``earlier`` are those of earlier drivers, newest first."""

    def __init__(self, size: int, earlier: Iterable[ExceptionEntry] = ()) -> None:
        self._entries: deque[ExceptionEntry] = deque(tuple(earlier)[:size], maxlen=size)
        self._total = len(self._entries)

    def add(self, entry: ExceptionEntry, *, concurrent: bool) -> None:
        """Adds a failure; a failure during the handling of another one is attached to that one."""
        entry = replace(entry, failure=_bounded(entry.failure))
        if concurrent and self._entries:
            first = self._entries[0]
            if len(first.concurrent) < MAX_CONCURRENT:
                self._entries[0] = replace(first, concurrent=(*first.concurrent, entry))
            return
        self._total += 1
        self._entries.appendleft(entry)

    def view(self, limit: int) -> ExceptionHistory:
        entries = tuple(self._entries)[:limit]
        return ExceptionHistory(entries, truncated=self._total > len(entries))

    def to_stored(self) -> list[dict[str, Any]]:
        """The newest failures as JSON values."""
        left = MAX_STORED_CHARS
        stored: list[dict[str, Any]] = []
        for entry in tuple(self._entries)[:MAX_STORED]:
            left -= _size(entry)
            if left < 0:
                return stored or [asdict(replace(entry, concurrent=()))]
            stored.append(asdict(entry))
        return stored


def cause_of(failure: FailureInfo) -> FailureCause:
    """The failure as users see it. Without a stack trace, its trace is one line with the exception and the message."""
    trace = failure.stack_trace or f"{failure.exception}: {failure.message}"
    return _bounded(FailureCause(failure.exception, failure.message, trace))


def _bounded(failure: FailureCause) -> FailureCause:
    return FailureCause(
        printable(failure.exception, MAX_MESSAGE_CHARS),
        printable(failure.message, 2 * MAX_MESSAGE_CHARS),
        printable(failure.stack_trace, _MAX_TRACE_CHARS),
    )


def _size(entry: ExceptionEntry) -> int:
    failure = entry.failure
    own = len(failure.exception) + len(failure.message) + len(failure.stack_trace)
    return own + sum(_size(other) for other in entry.concurrent)


class JobView(ShownJob):
    """The view of one job under one driver. A job counts as ended only once its end is stored."""

    def __init__(self, submission: JobSubmission) -> None:
        times = {JobStatus.INITIALIZING: submission.submitted_at_ms}
        super().__init__(submission.graph, JobStatus.INITIALIZING, times, wall_clock_ms(), submission.place)
        self._submission = submission
        self.job_id, self.drill = submission.job_id, submission.is_drill
        self._failures = FailureLog(
            submission.configuration.get(JobManagerOptions.EXCEPTION_HISTORY_SIZE), submission.history.failures
        )
        self._restarts = 0

    # --- updates from the shell

    def touched(self) -> None:
        """Records the time of an event of the job; checkpoints do not count."""
        self._last_modification = wall_clock_ms()

    def status_changed(self, change: StatusChanged) -> None:
        logger.info("job %s is %s", self.job_id, change.status.value)
        self.status = change.status
        self._timestamps[change.status] = change.timestamp

    def deploying(self, order: DeployTasks) -> None:
        """Begins a new attempt of every subtask."""
        self.graph = order.graph
        self.executions.reset(order.attempt, order.graph)
        self._restarts += order.attempt > self._submission.history.next_attempt

    def deployed(self, slots: list[Slot]) -> None:
        """Records the slots to which the subtasks were deployed."""
        for (_, subtask), known in self.executions.executions.items():
            slot = slots[subtask]
            known.slot, known.endpoint = slot.slot_id, slot.endpoint
        self.executions.enter_all(ExecutionState.DEPLOYING)

    def enter(self, execution: ExecutionId, state: ExecutionState) -> None:
        """Records a subtask's state, unless another attempt has begun."""
        known = self.executions.executions.get(execution.key)
        if known is not None and known.id == execution:
            known.enter(state)

    def failed(self, failure: RecordFailure) -> None:
        name = slot = endpoint = None
        execution = failure.execution
        if execution is not None:
            vertex = self.graph.vertex(execution.vertex_id)
            known = self.executions.executions[execution.key]
            name = f"{vertex.name} ({execution.subtask + 1}/{vertex.parallelism})"
            slot, endpoint = known.slot, known.endpoint
        entry = ExceptionEntry(cause_of(failure.cause), wall_clock_ms(), name, endpoint, slot)
        self._failures.add(entry, concurrent=failure.concurrent)
        cause, who = failure.cause, "" if name is None else f"{name}: "
        about_it = {} if execution is None else asdict(execution)
        logger.info(
            "job %s has a failure: %s%s: %.500r",
            self.job_id,
            who,
            cause.exception,
            cause.message,
            extra=fields(**about_it),
        )

    def ended(self, cause: FailureInfo | None) -> None:
        self.failure = None if cause is None else cause_of(cause)

    # --- what is stored

    def failures_to_store(self) -> list[dict[str, Any]]:
        """The failures to store for a later driver."""
        return self._failures.to_stored()

    def result_to_store(
        self,
        ended: JobEnded,
        plan: JobPlan,
        checkpoint_config: EffectiveCheckpointConfig,
        checkpoints: CheckpointStatsSnapshot,
    ) -> dict[str, Any]:
        """The job as it will be shown once its end is stored; ``plan`` was accepted last."""
        cause = ended.cause
        return result_document(
            job_id=self.job_id,
            status=ended.status,
            graph=self.graph,
            own=plan.own,
            timestamps={**self._timestamps, ended.status: ended.timestamp},
            failure=None if cause is None else cause_of(cause),
            exceptions=self._failures.to_stored(),
            restart_strategy=strategy_type(plan.configuration).value,
            checkpoint_config=checkpoint_config,
            request=self._submission.request,
            checkpoints=checkpoints,
            restarts=self._restarts,
            lineage=self._submission.place,
        )

    # --- what users see

    def config_info(self, plan: JobPlan, running_version: int, overrides: Mapping[str, str | None]) -> JobConfig:
        """``plan`` was accepted last; ``overrides`` maps keys to the values in effect instead for now."""
        own, request = plan.own, self._submission.request
        submitted = frozenset[str]() if request is None else request.option_keys
        return shown_configuration(
            self.job_id,
            self.graph.name,
            own,
            restart_strategy=strategy_type(plan.configuration).value,
            parallelism=max(vertex.parallelism for vertex in self.graph.vertices),
            running_version=running_version,
            pipeline_id=self._submission.program_id,
            effective=effective_options(own, submitted, self._submission.defaults, overrides),
        )

    def metrics(self, statistics: CheckpointStatsSnapshot, failed_reports: int = 0) -> dict[str, str]:
        """Job metrics by Flink's names."""
        running_since = self._timestamps.get(JobStatus.RUNNING, NOT_YET)
        uptime = wall_clock_ms() - running_since if self.status is JobStatus.RUNNING else 0
        latest = statistics.latest_completed
        figures = JobFigures(self._restarts, statistics.counts, uptime, latest, failed_reports)
        path = "n/a" if latest is None else str(latest.external_path)
        return {**texts(JOB, figures), "lastCheckpointExternalPath": path}

    def exception_history(self, limit: int) -> ExceptionHistory:
        return self._failures.view(limit)


class KeptFailures:
    """Stores the failures that a view shows, one write at a time; the next failure repeats a write that failed."""

    def __init__(self, job_id: str, view: JobView, record: JobRecord, host: JobHost) -> None:
        self._job_id = job_id
        self._view = view
        self._record = record
        self._host = host
        self._changed = False
        self._writing = False
        self._closed = False
        self._when_kept: Callable[[], None] | None = None

    def keep(self) -> None:
        """Stores the failures that the view shows now."""
        self._changed = True
        if not self._writing:
            self._write()

    def when_kept(self, call: Callable[[], None]) -> None:
        """Calls the function once no write is in progress, perhaps at once."""
        if self._writing:
            self._when_kept = call
        else:
            call()

    def close(self) -> None:
        """Starts no more writes."""
        self._closed = True

    def _write(self) -> None:
        self._changed, self._writing = False, True
        stored = self._view.failures_to_store()
        self._host.in_pool(Pool.OWN, lambda: self._record.keep_failures(stored), self._written)

    def _written(self, result: Result[None]) -> None:
        try:
            result()
        except Exception as error:  # the end of the job waits for this, whatever the error is
            logger.warning("the failures of job %s cannot be stored: %s", self._job_id, error)
        if self._changed and not self._closed:
            self._write()
            return
        self._writing = False
        when_kept, self._when_kept = self._when_kept, None
        if when_kept is not None:
            when_kept()
