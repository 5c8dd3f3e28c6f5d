"""Runs one job's pure core: executes its outputs and feeds the results back as events. Makes no decisions itself.

Everything that takes time or a thread goes through the host, so that the same shell runs on the driver's event loop
and in the simulation of whole jobs. An event that arises while outputs are being executed waits for its turn.

An exception that the driver's own code does not expect fails the job, wherever it is raised: it is logged, every answer
that the core waits for is given, and the restart strategy decides. Reports (progress, metrics, events, what users see
of a subtask) are the exception: a failed one is counted, and the job continues.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import replace
from functools import partial

from ckpt_runtime.checkpoint import effects as checkpoint_out
from ckpt_runtime.checkpoint import events as checkpoint_on
from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.events import TimerId
from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.properties import CheckpointFailureReason
from ckpt_runtime.checkpoint.sink_state import SinkLineage
from ckpt_runtime.checkpoint.statistics import CheckpointMetrics, CheckpointStatsSnapshot
from ckpt_runtime.configuration.cluster_options import CpuPinning, SecurityOptions, TaskManagerOptions
from ckpt_runtime.configuration.state_options import StateOptions
from ckpt_runtime.failure_report import report_of, summary_of
from ckpt_runtime.frontend.spark_connect import spark_url
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.jobmaster.event_log import JobAnnouncer
from ckpt_runtime.jobmaster.gateway_values import EffectiveCheckpointConfig, ExecutionState
from ckpt_runtime.jobmaster.job_host import JobHost, JobSlots, JobTimers, Pool, Result, SupervisedHost, raised
from ckpt_runtime.jobmaster.job_record import carry_out, pause_before_ms, unconfirmed
from ckpt_runtime.jobmaster.job_settings import BACKEND_NAMES, processes_backlog
from ckpt_runtime.jobmaster.job_view import JobView, KeptFailures
from ckpt_runtime.jobmaster.progress import JobProgress
from ckpt_runtime.jobmaster.slots import Slot
from ckpt_runtime.jobmaster.storage_effects import StorageEffects, answer_to_failed, backoff_ms
from ckpt_runtime.jobmaster.submission import JobSubmission
from ckpt_runtime.jobmaster.task_gateway import SecondaryFailures, SlotPlacement, TaskGateway, plan_deployments
from ckpt_runtime.network.control_messages import (
    AcknowledgeCheckpoint,
    Canceled,
    DeclineCheckpoint,
    DeploymentFailed,
    DeploymentMessage,
    EndOfDataReport,
    SnapshotProgress,
    SourceProgress,
    SparkAddress,
    SparkWanted,
    TaskFailure,
    TaskMessage,
    TaskStateChanged,
    WorkerHeartbeat,
)
from ckpt_runtime.scheduler import core_events as core
from ckpt_runtime.scheduler import job_effects as job_out
from ckpt_runtime.scheduler import job_events as job_on
from ckpt_runtime.scheduler.core_events import JobInput, JobOutput
from ckpt_runtime.scheduler.deployment import JobDescriptor, Program
from ckpt_runtime.scheduler.job_core import JobCore
from ckpt_runtime.scheduler.job_events import FailureInfo, JobEvent
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.scheduler.watermark_alignment import AlignmentGroups, Progress
from ckpt_runtime.snapshots.clean_up import sink_lineages, sink_outputs
from ckpt_runtime.storage.checkpoint_storage import CheckpointStorage
from ckpt_runtime.storage.driver_pools import crash_point
from ckpt_runtime.storage.errors import NotLeaderError, StorageError
from ckpt_runtime.structured_log import about, fields

logger = logging.getLogger(__name__)

Answer = Callable[[Result[JobOutput]], None]
_ALIGNMENT, _ALIGN_AFTER_MS = "alignment", 50


class JobShell:
    """One job under one driver. Owns the job's slots; the slot pool and workers talk to it directly."""

    def __init__(
        self,
        submission: JobSubmission,
        job_core: JobCore,
        host: JobHost,
        storage: CheckpointStorage,
        tasks: TaskGateway,
        announcer: JobAnnouncer | None = None,
    ) -> None:
        self.core = job_core
        self.view = JobView(submission)
        self.progress = JobProgress(submission.job_id, submission.place.query_id, submission.submitted_at_ms)
        self.when_changed: Callable[[JobStatus], None] = lambda status: None  # noqa: ARG005
        """Is called with each status that the job enters."""
        self._announcer = announcer or JobAnnouncer(submission.job_id)
        self._announcer.begin(job_core)
        self._submission = submission
        # Log lines of everything that the job starts name it.
        with about(job_id=submission.job_id, job_name=submission.graph.name):
            self._context = copy_context()
        self._state_backend = BACKEND_NAMES[submission.configuration.get(StateOptions.BACKEND_TYPE)]
        self._host = host = SupervisedHost(host, self._unexpected)
        self._tasks = tasks
        self._record = submission.record
        history = submission.history
        earlier_ids = range(history.first_checkpoint_id, history.next_checkpoint_id)
        self.storage = StorageEffects(
            submission.job_id,
            storage,
            submission.record,
            host,
            self.tell,
            lambda: job_core.coordinator.retained,
            earlier_ids,
            submission.claims,
        )
        # Files that an earlier driver began to delete are in no record of checkpoints: only this job can finish
        # deleting it.
        self.storage.dispose(history.disposals)
        self.storage.discard_savepoints(history.savepoints)
        self._consequences = SecondaryFailures(host, self._deliver_consequence)
        self._inbox: deque[JobInput] = deque()
        self._busy = False
        self._closed = False
        self._slots = JobSlots(host, self, self.tell)
        self._timers = JobTimers(host)
        self._kept_failures = KeptFailures(submission.job_id, self.view, submission.record, host)
        self._answers: dict[str, tuple[JobInput, Answer]] = {}
        self._backlog = False
        self._alignment = AlignmentGroups({})
        self._ends_as: JobStatus | None = None

    # --- events in, outputs out

    def tell(self, event: JobInput) -> None:
        """Passes an event to the core, in order, and executes the effects that the core returns. Never raises."""
        self._inbox.append(event)
        # Executing an output may raise an event (a lost worker cannot be cancelled): the core is not
        # re-entered.
        if self._busy:
            return
        self._busy = True
        try:
            self._context.run(self._take_all)
        finally:
            self._busy = False

    def _take_all(self) -> None:
        while self._inbox:
            self._take(self._inbox.popleft())

    def _take(self, event: JobInput) -> None:
        if isinstance(event, JobEvent):
            self.view.touched()
        try:
            outputs = self.core.handle(event, self._host.now())
        except Exception as error:
            self._refused(event, error)
            return
        for output in outputs:
            try:
                self._execute(output)
            except Exception as error:
                self._not_executed(output, error)
            # Announced after execution: listeners look at the job on a change, so it has to show it already.
            self._announcer.announce(output)
        self._announcer.looked(self.core)

    def ask(self, request_id: str, event: JobInput, answer: Answer) -> None:
        """Passes on an event like :meth:`tell` and returns its answer, or the error that it causes. None after
        :meth:`close`."""
        self._answers[request_id] = event, answer
        self.tell(event)

    # --- errors of the driver's own code

    @property
    def failed_reports(self) -> int:
        """The number of reports that could not be made."""
        return self._announcer.failed_reports

    def _unexpected(self, place: str, error: Exception) -> None:
        """Fails the job, which cannot continue: an answer that it waits for may never come."""
        cause = self._cause_in(place, error)
        if not self._closed:
            self.tell(job_on.JobFailed(cause))

    def _cause_in(self, place: str, error: Exception) -> FailureInfo:
        """Logs the error, and returns it as the cause of a failure."""
        report = report_of(error)
        about_it = fields(job_id=self._submission.job_id)
        logger.error("job %s: %s failed: %s", self._submission.job_id, place, report.stack_trace, extra=about_it)
        message = f"{place} in the driver failed unexpectedly with {report.exception}: {report.message}"
        return FailureInfo("UnexpectedDriverException", message, report.stack_trace)

    def _refused(self, event: JobInput, error: Exception) -> None:
        """Handles an event that the core cannot take: a requester gets the error; without a requester the job fails."""
        asked = next((key for key, (asked, _) in self._answers.items() if asked is event), None)
        if asked is not None:
            _, answer = self._answers.pop(asked)
            self._cause_in(type(event).__name__, error)
            self._announcer.report(answer, partial(raised, error))
        elif isinstance(event, job_on.JobFailed):
            self._cause_in("JobFailed", error)  # failing the job once more would fail again
        else:
            self._unexpected(type(event).__name__, error)

    def _not_executed(self, output: JobOutput, error: Exception) -> None:
        """Gives the core the failure answer that it expects; if it expects no answer, the job fails."""
        cause = self._cause_in(type(output).__name__, error)
        match output:
            case job_out.AcquireSlots(attempt):
                self.tell(job_on.SlotsFailed(attempt, cause))
            case core.ReserveSlots():
                self.tell(core.SlotsNotReserved(output.request_id, cause.message))
            case core.DeployTasks():
                self._abandon_workers()
                for execution in output.executions:
                    self._task_failed(execution, cause)
            case job_out.CancelTasks(executions):
                self._abandon_workers()
                for execution in executions:
                    self._task_canceled(execution)
            case core.RecordAttempt(attempt):
                self.tell(core.AttemptNotRecorded(attempt, cause))
            case core.StoreResult():
                self._tell_later(core.ResultNotStored())
            case core.StoreOverrides() | core.SettleOverrides() | core.StorePlan() | core.SettlePlan():
                self.tell(unconfirmed(output, error))
            # The end is tried once more; if that fails too, the next driver finishes it.
            case job_out.JobEnded() | checkpoint_out.ShutdownComplete():
                self._host.call_later(backoff_ms(1), partial(self._execute, output))
            case _ if (answer := answer_to_failed(output, cause.message)) is not None:
                self._tell_later(answer)
            case _:
                self.tell(job_on.JobFailed(cause))

    def _tell_later(self, event: JobInput) -> None:
        """Delays the event, because the core may request the same output again at once."""

        def tell() -> None:
            if not self._closed:
                self.tell(event)

        self._host.call_later(backoff_ms(1), tell)

    def _abandon_workers(self) -> None:
        """Ends all tasks of the workers: it is unknown which messages they have received."""
        for slot in self._slots.held:
            self._host.replace_worker(slot)

    def clean_up_after(self, status: JobStatus) -> None:
        """Finishes the clean-up of a job that ended as ``status`` under an earlier driver.

        Where checkpoints are retained, some may exist without a pointer because that driver had begun to release
        them. Every complete checkpoint stays, unless the pointers show that all retained ones are known.
        """
        self._ends_as = status
        history = self._submission.history
        keep = {entry.checkpoint.id for entry in history.checkpoints}
        upper = history.next_checkpoint_id
        configuration = self.core.coordinator.configuration
        if not configuration.discards_on(status.value):
            upper = min(keep) if len(keep) >= configuration.retained else 0
        self.storage.sweep(range(history.first_checkpoint_id, upper), keep)
        self.tell(checkpoint_on.Shutdown(status.value))

    def close(self) -> None:
        """Stops the job's timers and waits because this driver ends."""
        self._closed = True
        self._slots.close()
        self._kept_failures.close()
        self._timers.cancel_all()
        self.storage.close()

    def _execute(self, output: JobOutput) -> None:
        match output:
            case job_out.StatusChanged():
                self.view.status_changed(output)
                self.when_changed(output.status)
            case job_out.AcquireSlots() | core.ReserveSlots() | core.ReleaseReserve():
                self._arrange_slots(output)
            case core.DeployTasks():
                self._deploy(output)
            case core.LimitSources(rates):
                self._tasks.limit(rates, self.core.graph)
            case job_out.CancelTasks(executions):
                self._cancel_tasks(executions)
            case job_out.JobEnded(status):
                self._ends_as = status
                self._end(output)
            case core.RecordFailure():
                self._announcer.report(self._record_failure, output)
            case core.RecordAttempt(attempt):
                self._record_attempt(attempt)
            case core.StoreResult():
                # A pending write of failures would otherwise store them for a job that no longer exists.
                self._kept_failures.when_kept(partial(self._store_result, output))
            case core.StoreOverrides() | core.SettleOverrides() | core.StorePlan() | core.SettlePlan():
                call = partial(carry_out, self._record, output)
                self._in_pool(call, partial(unconfirmed, output), pause_before_ms(output))
            case checkpoint_out.ShutdownComplete(keeps_nothing):
                self._shut_down(keeps_nothing)
            case _:
                self._execute_checkpoint_effect(output)

    def _execute_checkpoint_effect(self, output: JobOutput) -> None:
        match output:
            case checkpoint_out.TriggerSources(checkpoint_id, timestamp, options, tasks):
                if not self._tasks.trigger(checkpoint_id, timestamp, options, tasks):
                    self.tell(
                        checkpoint_on.TriggerFailed(
                            checkpoint_id, "a worker whose subtasks are to be triggered is lost"
                        )
                    )
            case checkpoint_out.NotifyComplete(checkpoint_id, begun, tasks):
                self.storage.completed(checkpoint_id)
                crash_point("notify-before")
                self._tasks.complete(checkpoint_id, tasks)
                crash_point("notify-after")
                now_ms = self._host.now().abs_ms
                self._announcer.report(self.progress.completed, checkpoint_id, begun, now_ms, self.core.graph)
            case checkpoint_out.NotifyAborted(checkpoint_id, _, latest_completed, tasks):
                self._tasks.abort(checkpoint_id, latest_completed, tasks)
                self._announcer.report(self.progress.aborted, checkpoint_id)
            case checkpoint_out.ScheduleTimer(timer, generation, at_rel_ms):
                self._schedule(timer, at_rel_ms, checkpoint_on.TimerFired(timer, generation))
            case checkpoint_out.CancelTimer(timer):
                self._timers.cancel(timer)
            case job_out.ScheduleRestart(generation, at_rel_ms):
                self._schedule("restart", at_rel_ms, job_on.RestartTimerFired(generation))
            case job_out.CancelRestart():
                self._timers.cancel("restart")
            case (
                checkpoint_out.RequestCompleted()
                | checkpoint_out.RequestFailed()
                | job_out.StopCompleted()
                | job_out.StopFailed()
                | core.ChangeAnswered()
            ):
                if output.request_id in self._answers:
                    _, answer = self._answers.pop(output.request_id)
                    self._announcer.report(answer, lambda: output)
            case _:
                self.storage.execute(output)

    # --- timers and pools

    def _schedule(self, timer: TimerId | str, at_rel_ms: int, event: JobInput) -> None:
        # It may be over: the core decided based on the time of its event, and executing its outputs took time.
        self._timers.start(timer, at_rel_ms - self._host.now().rel_ms, partial(self.tell, event))

    def _in_pool(
        self, call: Callable[[], JobInput], failed: Callable[[Exception], JobInput], delay_ms: float = 0.0
    ) -> None:
        """Stores what is not a checkpoint: ``failed`` maps an error of storage, or of the pool, to an event.

        If another driver leads, the event is LeadershipLost for every kind of call.
        """

        def answered(result: Result[JobInput]) -> None:
            if self._closed:
                return
            try:
                event = result()
            except NotLeaderError as error:
                logger.error("job %s: this driver no longer runs it: %s", self._submission.job_id, error)
                event = core.LeadershipLost()
            except StorageError as error:
                event = failed(error)
            except Exception as error:  # not a document, too large, not JSON, or a bug: it needs an answer too
                logger.exception("job %s: storage", self._submission.job_id)
                event = failed(error)
            self.tell(event)

        if delay_ms:
            self._host.call_later(delay_ms, partial(self._in_pool, call, failed))
        elif not self._closed:
            self._host.in_pool(Pool.OWN, call, answered)

    # --- slots and deployment

    def _arrange_slots(self, order: job_out.AcquireSlots | core.ReserveSlots | core.ReleaseReserve) -> None:
        match order:
            case job_out.AcquireSlots(attempt):
                self._slots.acquire(attempt, self.core.graph.slots)
            case core.ReserveSlots():
                self._slots.reserve(order)
            case core.ReleaseReserve():
                self._slots.release_reserve()

    def _deploy(self, order: core.DeployTasks) -> None:
        self.view.deploying(order)
        self._announcer.report(self.progress.deployed)
        # A slot whose loss was reported to this job has been removed from them.
        slots = self._slots.held
        # Slots were acquired before the state was restored, which took time: any of them may have been lost since.
        gone = any(slot.lost or slot.worker is None for slot in slots)
        if gone or len(slots) < order.graph.slots:
            cause = FailureInfo("SlotLostException", "a slot was lost before the deployment")
            for execution in order.executions:
                self._task_failed(execution, cause)
            return
        submission = self._submission
        pinned = order.configuration.get(TaskManagerOptions.CPU_PINNING) is CpuPinning.AUTO
        cores = self._host.bind_slots(slots) if pinned else [None] * len(slots)
        addresses = [slot.worker.data_address for slot in slots if slot.worker is not None]
        deployments = plan_deployments(
            order.graph,
            [SlotPlacement(address, core) for address, core in zip(addresses, cores, strict=True)],
            deployment=self._host.next_deployment(),
            attempt=order.attempt,
            restored=order.restored,
            sinks=self._sink_lineages(order.graph, order.lineage, order.savepoint_id),
        )
        crash_point("deploy-before")
        program = Program(submission.program_id, submission.entry, submission.arguments)
        self._tasks.deploy(slots, JobDescriptor(submission.job_id, order.graph, program), deployments)
        self._announcer.report(self.view.deployed, slots)
        self._alignment = AlignmentGroups(order.graph.alignment_groups)

    def _sink_lineages(
        self, graph: JobGraph, lineage: CompletedCheckpoint | None, savepoint_id: int
    ) -> dict[str, SinkLineage]:
        of = self._submission
        return sink_lineages(graph, of.seed, lineage, of.ended_jobs, savepoint_id, of.job_id)

    def _cancel_tasks(self, executions: tuple[ExecutionId, ...]) -> None:
        by_slot: dict[int, list[ExecutionId]] = {}
        for execution in executions:
            self._show(execution, ExecutionState.CANCELING)
            by_slot.setdefault(execution.subtask, []).append(execution)
        for subtask, gone in by_slot.items():
            # A lost worker cannot answer: its tasks ended with it.
            if not self._tasks.cancel(subtask):
                for execution in gone:
                    self._task_canceled(execution)

    # --- the owner of slots: losses and messages of workers

    def worker_lost(self, slot: Slot, reason: str) -> None:
        """Fails the lost worker's tasks. A late call fails none if a new deployment has another worker there."""
        self._host.run(self._worker_lost, slot, reason)

    def _worker_lost(self, slot: Slot, reason: str) -> None:
        index = self._tasks.index_of(slot)
        if index is not None and not self._tasks.lives(index):
            cause = FailureInfo("WorkerLostException", reason)
            alive = self._alive_in(index)
            for execution in alive:
                self._task_failed(execution, cause)
            if not alive and self._feeds_living(index):
                # Some of the last in-flight data may not have arrived, and a receiver that the worker had not connected
                # to yet would wait for it forever.
                self.tell(job_on.JobFailed(cause))
        self._consequences.release()

    def _feeds_living(self, index: int) -> bool:
        """Whether living tasks receive rows from finished tasks of that subtask index."""
        tasks = self.core.machine.tasks
        alive = {execution.vertex_id for execution in tasks.alive}
        finished = {execution.vertex_id for execution in tasks.finished if execution.subtask == index}
        return any(edge.source in finished and edge.target in alive for edge in self.core.graph.edges)

    def slot_lost(self, slot: Slot, reason: str) -> None:
        self.worker_lost(slot, reason)
        self._host.run(self._slots.lost, slot, reason)

    def slots_awaited(self, reason: str) -> None:
        self.view.waits_for_slots = reason

    def _note_backlog(self) -> None:
        """Reports when the sources begin and end to process a backlog. Does nothing if pending rows are unknown."""
        pending = self.view.executions.pending_rows
        if pending is None:
            return
        backlog = processes_backlog(pending, self._backlog, self.core.configuration)
        if backlog != self._backlog:
            self._backlog = backlog
            self.tell(checkpoint_on.BacklogChanged(backlog))

    def _align(self, is_grouped: bool) -> None:
        """Announces the progress of the slowest sources soon; reports of many subtasks until then are one message."""
        if is_grouped and _ALIGNMENT not in self._timers:
            self._timers.start(_ALIGNMENT, _ALIGN_AFTER_MS, self._announce_minima)

    def _announce_minima(self) -> None:
        for minimum, members in self._alignment.moved():
            self._tasks.align(minimum, members)

    def worker_message(self, slot: Slot, message: DeploymentMessage) -> None:
        """Raises MalformedMessageError when the message names a subtask that was not deployed to the slot."""
        index = self._tasks.sender_of(slot, message)
        if index is not None:
            self._host.run(self._worker_message, slot, index, message)

    def _worker_message(self, slot: Slot, index: int, message: DeploymentMessage) -> None:
        match message:
            case WorkerHeartbeat():
                self._announcer.report(self.view.executions.measured, message.tasks)
                self._announcer.report(self._note_backlog)
                for snapshot in message.snapshots:
                    self._snapshot_progress(snapshot)
            case DeploymentFailed():
                self._reported_failure(index, self._alive_in(index), message.failure)
            case Canceled():
                # A task does not react to its cancellation: only the end of its process can end it.
                if not message.ended:
                    self._host.replace_worker(slot)
                for execution in self._alive_in(index):
                    self._task_canceled(execution)
            case SparkWanted():
                self._send_spark_address(slot)
            case _:
                attempt = self.core.machine.attempt
                self._task_message(ExecutionId(message.vertex_id, message.subtask, attempt), message)

    def _send_spark_address(self, slot: Slot) -> None:
        """Sends the worker the address of the session's Spark, once it serves."""
        worker = slot.worker
        encrypted = self._submission.configuration.get(SecurityOptions.INTERNAL_ENABLED)

        def answered(result: Result[str]) -> None:
            if worker is None:
                return
            try:
                worker.peer.send(SparkAddress(result()))
            except Exception as error:  # Spark reports many kinds of errors, and the worker needs an answer
                worker.peer.send(SparkAddress("", summary_of(error)))

        self._host.in_pool(Pool.OWN, partial(spark_url, encrypted=encrypted), answered)

    def _snapshot_progress(self, snapshot: SnapshotProgress) -> None:
        execution = ExecutionId(snapshot.vertex_id, snapshot.subtask, self.core.machine.attempt)
        metrics = CheckpointMetrics(checkpointed_size=snapshot.written_size, reused_size=snapshot.duplicated_size)
        self.tell(checkpoint_on.ProgressReported(snapshot.checkpoint_id, execution, metrics))

    def _task_message(self, execution: ExecutionId, message: TaskMessage) -> None:
        match message:
            case TaskStateChanged():
                self._task_state(execution, message)
            case EndOfDataReport():
                self._align(self._alignment.ended(execution.key))
                self.tell(checkpoint_on.EndOfDataReached(execution, message.waits))
            case AcknowledgeCheckpoint():
                self._announcer.report(
                    self.progress.acknowledged, message.checkpoint_id, execution.key, message.intervals
                )
                self.tell(
                    checkpoint_on.Acknowledged(
                        message.checkpoint_id, execution, message.directory, message.state, message.metrics
                    )
                )
            case SourceProgress():
                self._align(self._alignment.reported(execution.key, Progress(message.event_time, message.idle)))
                if message.wants_checkpoint:
                    self.tell(checkpoint_on.CheckpointWanted())
            case DeclineCheckpoint():
                reason = CheckpointFailureReason[message.reason]
                self.tell(checkpoint_on.Declined(message.checkpoint_id, execution, reason, message.message))

    def _task_state(self, execution: ExecutionId, message: TaskStateChanged) -> None:
        state = ExecutionState(message.state)
        match state:
            case ExecutionState.RUNNING:
                self._show(execution, state)
                self.tell(job_on.TaskRunning(execution))
            case ExecutionState.FINISHED:
                self._show(execution, state)
                self._announcer.report(self.progress.ended, execution.key, message.intervals)
                self.tell(job_on.TaskFinished(execution))
                self._align(self._alignment.ended(execution.key))
            case ExecutionState.CANCELED:
                self._task_canceled(execution)
            case ExecutionState.FAILED:
                assert message.failure is not None
                self._reported_failure(execution.subtask, [execution], message.failure)

    def _reported_failure(self, subtask: int, executions: list[ExecutionId], failure: TaskFailure) -> None:
        """Handles a worker's failure. An unrecoverable failure ends the job under any restart strategy."""
        if failure.consequence:
            self._consequences.hold(executions, failure.cause)
            return
        self._tasks.note_failure(subtask)
        # Before the task failures: they would be counted and would begin a restart that cannot help.
        if not failure.recoverable:
            self.tell(job_on.JobFailed(failure.cause, recoverable=False))
        for execution in executions:
            self._task_failed(execution, failure.cause)
        self._consequences.release()

    def _deliver_consequence(self, execution: ExecutionId, cause: FailureInfo) -> None:
        """Fails the subtask, unless it has already ended in another way or another attempt has begun."""
        if execution in self.core.machine.tasks.alive:
            self._task_failed(execution, cause)

    def _alive_in(self, index: int) -> list[ExecutionId]:
        return [execution for execution in self.core.machine.tasks.alive if execution.subtask == index]

    def _show(self, execution: ExecutionId, state: ExecutionState) -> None:
        self._announcer.report(self.view.enter, execution, state)

    def _task_canceled(self, execution: ExecutionId) -> None:
        self._show(execution, ExecutionState.CANCELED)
        self.tell(job_on.TaskCanceled(execution))

    def _task_failed(self, execution: ExecutionId, cause: FailureInfo) -> None:
        self._show(execution, ExecutionState.FAILED)
        self.tell(job_on.TaskFailed(execution, cause))

    # --- what is stored beside checkpoints

    def _record_attempt(self, attempt: int) -> None:
        def record() -> JobInput:
            self._record.begin_attempt(attempt)
            crash_point("attempt-recorded")
            return core.AttemptRecorded(attempt)

        def failed(error: Exception) -> JobInput:
            cause = FailureInfo(type(error).__name__, f"the attempt could not be recorded: {error}")
            return core.AttemptNotRecorded(attempt, cause)

        self._in_pool(record, failed)

    def _record_failure(self, failure: core.RecordFailure) -> None:
        self.view.failed(failure)
        if failure.durable:
            self._kept_failures.keep()

    # --- the end

    def _store_result(self, order: core.StoreResult) -> None:
        result = self.view.result_to_store(
            order.ended, self.core.accepted_plan, self.checkpoint_config(), self._statistics_after(order.ended.status)
        )

        def store() -> JobInput:
            crash_point("end-before")
            self._record.end(result)
            crash_point("end-stored")
            return core.ResultStored()

        def failed(error: Exception) -> JobInput:
            logger.warning("the end of job %s cannot be stored yet: %s", self._submission.job_id, error)
            return core.ResultNotStored()

        self._in_pool(store, failed, backoff_ms(order.attempt))

    def _end(self, ended: job_out.JobEnded) -> None:
        if ended.status is JobStatus.FINISHED:
            self._announcer.report(self.progress.finished, self._host.now().abs_ms, self.core.graph)
        self.view.ended(ended.cause)
        self._slots.release_all()
        self._consequences.forget()
        self._tasks.close()

    def _shut_down(self, keeps_nothing: bool) -> None:
        """Finishes storage: the coordinator has no operations in flight."""
        self._timers.cancel_all()
        submission, known = self._submission, self.core
        if self._ends_as is None or not self._ends_as.is_globally_terminal or known.is_fenced:
            self.storage.close()
            return
        lineages = self._sink_lineages(known.graph, known.lineage, known.savepoint_id)
        outputs = sink_outputs(submission.job_id, known.graph, lineages)
        self.storage.finish(keeps_nothing=keeps_nothing, outputs=outputs, savepoint_id=known.savepoint_id)

    # --- views

    def checkpoint_config(self) -> EffectiveCheckpointConfig:
        """The settings in effect now."""
        settings = self.core.coordinator.configuration
        return EffectiveCheckpointConfig(
            settings,
            exactly_once=settings.exactly_once,
            state_backend=self._state_backend,
            checkpoint_storage="FileSystemCheckpointStorage",
            overrides=tuple(self.core.overrides.given),
        )

    def _statistics_after(self, status: JobStatus) -> CheckpointStatsSnapshot:
        """The statistics as they will be once the job has ended as ``status`` and its checkpoints are cleaned up."""
        coordinator = self.core.coordinator
        shown = coordinator.statistics()
        latest = shown.latest_completed
        if latest is None or not coordinator.configuration.discards_on(status.value):
            return shown
        return replace(shown, latest_completed=replace(latest, discarded=True))
