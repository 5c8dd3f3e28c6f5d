"""One job's master: runs the pure job machine and the checkpoint coordinator of one job, and executes what they decide.

Everything happens on the driver's event loop. The machine decides about the job's life, the coordinator about its
checkpoints; this shell carries events from workers, timers, slots and users to them, and their effects back out.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from ckpt_runtime.checkpoint import effects as checkpoint_effects
from ckpt_runtime.checkpoint import events as checkpoint_events
from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.configuration import CheckpointConfigurationError
from ckpt_runtime.checkpoint.coordinator import CheckpointCoordinator
from ckpt_runtime.checkpoint.effects import Effect
from ckpt_runtime.checkpoint.events import CheckpointMetrics
from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.failure_reason import CheckpointFailureReason
from ckpt_runtime.checkpoint.overrides import CheckpointOverrides
from ckpt_runtime.checkpoint.properties import CheckpointOptions, CheckpointProperties, RestoreMode
from ckpt_runtime.checkpoint.properties import SavepointFormat as SnapshotFormat
from ckpt_runtime.checkpoint.state_assignment import StateAssignmentError, assign_states
from ckpt_runtime.checkpoint.state_handles import SubtaskState
from ckpt_runtime.checkpoint.statistics import CheckpointStatsSnapshot, CheckpointType
from ckpt_runtime.checkpoint.statistics_tracker import CheckpointStatsTracker
from ckpt_runtime.configuration.checkpointing_options import CheckpointingOptions
from ckpt_runtime.configuration.cluster_options import CpuPinning, JobManagerOptions, TaskManagerOptions
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.jobmaster.checkpoint_settings import overrides_of, shown_settings, submitted_settings
from ckpt_runtime.jobmaster.checkpoint_shell import CheckpointShell, NoPointers, present_instant
from ckpt_runtime.jobmaster.deployment_planner import RestoredState, place, plan_deployments
from ckpt_runtime.jobmaster.exceptions_history import FailureLog
from ckpt_runtime.jobmaster.executions import ExecutionGraph, wall_clock_ms
from ckpt_runtime.jobmaster.gateway import (
    NOT_YET,
    CheckpointConfigPatch,
    CheckpointKind,
    ClaimMode,
    EffectiveCheckpointConfig,
    ExceptionEntry,
    ExceptionHistory,
    ExecutionResult,
    ExecutionState,
    FailureCause,
    InvalidRequest,
    JobConfigInfo,
    JobDetails,
    JobOverview,
    JobStatus,
    OperationStatus,
    SavepointFormat,
)
from ckpt_runtime.jobmaster.operations import OperationFailed
from ckpt_runtime.jobmaster.restart_strategy_factory import create_restart_strategy, strategy_type
from ckpt_runtime.jobmaster.slot_pool import Slot, SlotPool, SlotsUnavailableError
from ckpt_runtime.jobmaster.task_gateway import TaskGateway
from ckpt_runtime.scheduler import job_effects as effects
from ckpt_runtime.scheduler import job_events as events
from ckpt_runtime.scheduler.job_effects import JobEffect
from ckpt_runtime.scheduler.job_events import FailureInfo, JobEvent
from ckpt_runtime.scheduler.job_machine import JobMachine
from ckpt_runtime.scheduler.job_status import JobState
from ckpt_runtime.storage.checkpoint_storage import CheckpointStorage
from ckpt_runtime.task.deployment import Program

logger = logging.getLogger(__name__)

_deployments = itertools.count(1)
"""Numbers of deployments, unique in the session: late frames and messages of another one are recognised by it."""


@dataclass(frozen=True, slots=True)
class JobSubmission:
    """Everything that a job starts from.

    ``configuration`` is the cluster's and the job's together, ``given`` what came with the submission alone.
    ``archive`` is the zip of the pipeline's files.
    """

    job_id: str
    graph: JobGraph
    configuration: Configuration
    given: Configuration
    archive: bytes
    program_id: str
    entry: str
    arguments: tuple[str, ...]
    default_checkpoint_directory: str
    savepoint: CompletedCheckpoint | None = None
    claim_mode: ClaimMode = ClaimMode.NO_CLAIM
    allow_non_restored_state: bool = False


class JobMaster:
    """A job from its submission to its result. Raises InvalidOptionError for values that cannot be used."""

    def __init__(self, submission: JobSubmission, slots: SlotPool, pool: Executor) -> None:
        self.graph = submission.graph
        self.configuration = submission.configuration
        self.executions = ExecutionGraph(submission.graph)
        self._submission = submission
        self._slot_pool = slots
        self._slots: list[Slot] = []
        self._tasks = TaskGateway(submission.archive)
        self._loop = asyncio.get_running_loop()
        self._background: set[asyncio.Task[None]] = set()
        keys = [(vertex.id, index) for vertex in self.graph.vertices for index in range(vertex.parallelism)]
        self._machine = JobMachine(keys, create_restart_strategy(self.configuration))
        self._submitted_settings = submitted_settings(self.configuration)
        self._overrides = CheckpointOverrides()
        self._checkpoints = self._create_checkpoints(pool)
        self._restored: RestoredState | None = None
        self._restore_attempt = 0
        self._at_end_of_data: list[ExecutionId] = []
        self._requests: dict[str, asyncio.Future[checkpoint_effects.RequestCompleted]] = {}
        self._stops: dict[str, asyncio.Future[str]] = {}
        self._restart_timer: asyncio.TimerHandle | None = None
        self._failures = FailureLog(self.configuration.get(JobManagerOptions.EXCEPTION_HISTORY_SIZE))
        self._timestamps: dict[JobStatus, int] = {JobStatus.INITIALIZING: wall_clock_ms()}
        self._last_modification = wall_clock_ms()
        self._end_cause: FailureInfo | None = None
        self._restarts = 0

    def _create_checkpoints(self, pool: Executor) -> CheckpointShell:
        job_id = self._submission.job_id
        directory = self.configuration.get(CheckpointingOptions.CHECKPOINTS_DIRECTORY)
        coordinator = CheckpointCoordinator(
            job_id,
            self.graph,
            self._submitted_settings,
            statistics=CheckpointStatsTracker(self.configuration.get(JobManagerOptions.CHECKPOINT_HISTORY_SIZE)),
        )
        storage = CheckpointStorage(directory or self._submission.default_checkpoint_directory, job_id)
        return CheckpointShell(job_id, coordinator, storage, NoPointers(), self, pool)

    # --- wishes

    @property
    def status(self) -> JobStatus:
        return self._machine.status

    def prepare_storage(self) -> None:
        """Makes the job's checkpoint directory, in a pool thread. Raises StorageError when it cannot be used."""
        self._checkpoints.prepare_storage()

    def start(self) -> None:
        self._handle(events.Start())

    def cancel(self) -> None:
        self._handle(events.CancelRequested())

    async def suspend(self) -> None:
        """This driver ends: the tasks are told to end, what is retained stays."""
        self._handle(events.SuspendRequested())
        for task in list(self._background):
            task.cancel()
        self._checkpoints.close()

    async def trigger_checkpoint(self, kind: CheckpointKind) -> OperationStatus:
        done = await self._request(CheckpointProperties(full=kind is CheckpointKind.FULL), None)
        return OperationStatus(True, checkpoint_id=done.checkpoint_id)

    async def trigger_savepoint(
        self, directory: str, savepoint_format: SavepointFormat, cancel_job: bool
    ) -> OperationStatus:
        properties = CheckpointProperties(CheckpointType.SAVEPOINT, SnapshotFormat(savepoint_format.value))
        done = await self._request(properties, directory)
        if cancel_job:
            self.cancel()
        return OperationStatus(True, location=done.external_path)

    async def stop_with_savepoint(
        self, directory: str, savepoint_format: SavepointFormat, drain: bool
    ) -> OperationStatus:
        """Completes when all tasks have finished after the savepoint. Raises OperationFailed."""
        request_id = uuid.uuid4().hex
        future = self._stops[request_id] = self._loop.create_future()
        self._handle(events.StopRequested(request_id, drain, directory, SnapshotFormat(savepoint_format.value)))
        return OperationStatus(True, location=await future)

    async def _request(
        self, properties: CheckpointProperties, directory: str | None
    ) -> checkpoint_effects.RequestCompleted:
        request_id = uuid.uuid4().hex
        future: asyncio.Future[checkpoint_effects.RequestCompleted] = self._loop.create_future()
        self._requests[request_id] = future
        self._checkpoints.handle(checkpoint_events.TriggerRequested(request_id, properties, directory))
        return await future

    async def patch_checkpoint_config(self, patch: CheckpointConfigPatch | None) -> EffectiveCheckpointConfig:
        """FLIP-571; None drops all overrides. Raises InvalidRequest when the values clash with other settings."""
        if patch is not None:
            _check_available(patch)
        overrides = CheckpointOverrides() if patch is None else self._overrides.merged_with(overrides_of(patch))
        try:
            settings = overrides.applied_to(self._submitted_settings)
        except CheckpointConfigurationError as error:
            raise InvalidRequest("checkpoint configuration", str(error), "values that fit together") from error
        self._overrides = overrides
        self._checkpoints.handle(checkpoint_events.ConfigurationPatched(settings))
        return self.checkpoint_config()

    # --- views

    def overview(self) -> JobOverview:
        return JobOverview(
            job_id=self._submission.job_id,
            name=self.graph.name,
            status=self.status,
            start_time_ms=self._timestamps[JobStatus.INITIALIZING],
            end_time_ms=self._timestamps[self.status] if self.status.is_globally_terminal else NOT_YET,
            last_modification_ms=self._last_modification,
            tasks_by_state=self.executions.counts(),
        )

    def details(self) -> JobDetails:
        vertices = tuple(self.executions.vertex_details(vertex) for vertex in self.graph.vertices)
        return JobDetails(self.overview(), dict(self._timestamps), vertices, self.graph)

    def config_info(self) -> JobConfigInfo:
        parallelism = max(vertex.parallelism for vertex in self.graph.vertices)
        return JobConfigInfo(
            self._submission.job_id,
            self.graph.name,
            strategy_type(self.configuration).value,
            parallelism,
            self._submission.given.displayed(),
        )

    def checkpoint_config(self) -> EffectiveCheckpointConfig:
        return shown_settings(self._checkpoints.coordinator.configuration, self.configuration, self._overrides)

    def checkpoint_statistics(self) -> CheckpointStatsSnapshot:
        return self._checkpoints.coordinator.statistics()

    def metrics(self) -> dict[str, str]:
        """Flink's names of job metrics."""
        statistics = self.checkpoint_statistics()
        running_since = self._timestamps.get(JobStatus.RUNNING, NOT_YET)
        uptime = wall_clock_ms() - running_since if self.status is JobStatus.RUNNING else 0
        latest = statistics.latest_completed
        return {
            "numRestarts": str(self._restarts),
            "uptime": str(uptime),
            "numberOfCompletedCheckpoints": str(statistics.counts.completed),
            "numberOfFailedCheckpoints": str(statistics.counts.failed),
            "numberOfInProgressCheckpoints": str(statistics.counts.in_progress),
            "totalNumberOfCheckpoints": str(statistics.counts.total),
            "lastCheckpointDuration": str(-1 if latest is None else latest.end_to_end_duration),
            "lastCheckpointSize": str(-1 if latest is None else latest.checkpointed_size),
            "lastCheckpointExternalPath": "n/a" if latest is None else str(latest.external_path),
        }

    def exception_history(self, limit: int) -> ExceptionHistory:
        return self._failures.view(limit)

    def result(self) -> ExecutionResult:
        overview = self.overview()
        cause = self._end_cause
        return ExecutionResult(
            job_id=overview.job_id,
            name=overview.name,
            status=overview.status if overview.status.is_globally_terminal else None,
            start_time_ms=overview.start_time_ms,
            end_time_ms=overview.end_time_ms,
            failure=None if cause is None else FailureCause(cause.exception, cause.message, cause.stack_trace),
        )

    # --- the job machine

    def _handle(self, event: JobEvent) -> None:
        self._last_modification = wall_clock_ms()
        for effect in self._machine.handle(event, present_instant()):
            self._execute(effect)

    def _execute(self, effect: JobEffect) -> None:
        match effect:
            case effects.StatusChanged(status, timestamp, _):
                logger.info("job %s is %s", self._submission.job_id, status.value)
                self._timestamps[status] = timestamp
            case effects.AcquireSlots(attempt):
                self._in_background(self._acquire_slots(attempt))
            case effects.RestoreState(attempt):
                self._restore_state(attempt)
            case effects.Deploy(executions):
                self._deploy(executions)
            case effects.CancelTasks(executions):
                self._cancel_tasks(executions)
            case effects.ScheduleRestart(generation, at_rel_ms):
                delay = max(0.0, (at_rel_ms - present_instant().rel_ms) / 1000)
                self._restart_timer = self._loop.call_later(
                    delay, lambda: self._handle(events.RestartTimerFired(generation))
                )
            case effects.CancelRestart():
                if self._restart_timer is not None:
                    self._restart_timer.cancel()
            case effects.StopCompleted(request_id, location):
                self._stops.pop(request_id).set_result(location)
            case effects.StopFailed(request_id, message, location):
                suffix = "" if location is None else f" (savepoint: {location})"
                self._stops.pop(request_id).set_exception(OperationFailed(message + suffix))
            case effects.JobEnded(_, _, cause, _):
                self._end(cause)
            case _:
                self._tell_coordinator(effect)

    def _tell_coordinator(self, effect: JobEffect) -> None:
        match effect:
            case effects.AllTasksRunning(executions, finished):
                finished_vertices = frozenset() if self._restored is None else self._restored.finished_vertices
                self._checkpoints.handle(checkpoint_events.JobRunning(executions, finished, finished_vertices))
                waiting, self._at_end_of_data = self._at_end_of_data, []
                for execution in waiting:
                    self._checkpoints.handle(checkpoint_events.EndOfDataReached(execution))
            case effects.TasksLeaveRunning():
                self._checkpoints.handle(checkpoint_events.TasksLeftRunning())
            case effects.StopPeriodicTrigger():
                self._checkpoints.handle(checkpoint_events.PeriodicTriggerStopped())
            case effects.StartPeriodicTrigger():
                self._checkpoints.handle(checkpoint_events.PeriodicTriggerStarted())
            case effects.TriggerSavepoint(request_id, drain, directory, savepoint_format):
                properties = CheckpointProperties(CheckpointType.SYNC_SAVEPOINT, savepoint_format, drain=drain)
                self._checkpoints.handle(checkpoint_events.TriggerRequested(request_id, properties, directory))

    async def _acquire_slots(self, attempt: int) -> None:
        try:
            slots = await self._slot_pool.acquire(self, self.graph.slots, self._slots)
        except SlotsUnavailableError as error:
            self._slots = []
            self._handle(events.SlotsFailed(attempt, FailureInfo("NoResourceAvailableException", str(error))))
            return
        if self._machine.state.is_terminal:
            for slot in slots:
                self._slot_pool.release(slot)
            return
        self._slots = slots
        self._handle(events.SlotsAcquired(attempt))

    def _restore_state(self, attempt: int) -> None:
        self._restore_attempt = attempt
        mode = RestoreMode(self._submission.claim_mode.value)
        self._checkpoints.handle(
            checkpoint_events.RestoreRequested(f"restore-{attempt}", self._submission.savepoint, mode)
        )

    def _restore_from(self, checkpoint: CompletedCheckpoint | None) -> None:
        attempt = self._restore_attempt
        try:
            self._restored = None if checkpoint is None else self._assign(checkpoint)
        except StateAssignmentError as error:
            cause = FailureInfo(type(error).__name__, str(error))
            self._handle(events.StateRestoreFailed(attempt, cause, recoverable=False))
            return
        self._handle(events.StateRestored(attempt))

    def _assign(self, checkpoint: CompletedCheckpoint) -> RestoredState:
        """A job's own checkpoint may lack operators of the savepoint it began with; that was decided at submission."""
        allowed = self._submission.allow_non_restored_state or self._submission.savepoint is not checkpoint
        assignment = assign_states(checkpoint, self.graph, allowed)
        return RestoredState(checkpoint.id, checkpoint.directory, assignment.subtasks, assignment.finished_vertices)

    def _deploy(self, executions: tuple[ExecutionId, ...]) -> None:
        attempt = self._machine.attempt
        self.executions.reset(attempt)
        self._at_end_of_data = []
        self._restarts += attempt > 0
        if any(slot.lost or slot.worker is None for slot in self._slots):
            cause = FailureInfo("SlotLostException", "a slot was lost before the deployment")
            for execution in executions:
                self._task_failed(execution, cause)
            return
        crowded = any(self._slot_pool.in_use(slot.host) > len(slot.cpus) for slot in self._slots)
        pin = self.configuration.get(TaskManagerOptions.CPU_PINNING) is CpuPinning.AUTO and not crowded
        workers = [(slot.host, slot.worker.data_address, slot.cpus) for slot in self._slots if slot.worker is not None]
        deployments = plan_deployments(
            self._submission.job_id,
            self.graph,
            Program(self._submission.program_id, self._submission.entry, self._submission.arguments),
            place(workers, pin=pin),
            deployment=next(_deployments),
            attempt=attempt,
            restored=self._restored,
        )
        self._tasks.deploy(self._slots, deployments)
        for (_, subtask), known in self.executions.executions.items():
            slot = self._slots[subtask]
            known.slot, known.endpoint = slot.slot_id, slot.endpoint
        self.executions.enter_all(ExecutionState.DEPLOYING)

    def _cancel_tasks(self, executions: tuple[ExecutionId, ...]) -> None:
        by_slot: dict[int, list[ExecutionId]] = {}
        for execution in executions:
            self._enter(execution, ExecutionState.CANCELING)
            by_slot.setdefault(execution.subtask, []).append(execution)
        for subtask, gone in by_slot.items():
            if not self._tasks.cancel(subtask):
                for execution in gone:
                    self._task_canceled(execution)

    def _end(self, cause: FailureInfo | None) -> None:
        self._end_cause = cause
        self._checkpoints.handle(checkpoint_events.Shutdown(self._machine.status.value))
        for slot in self._slots:
            if not slot.lost:
                self._slot_pool.release(slot)
        self._slots = []
        for future in self._stops.values():
            future.set_exception(OperationFailed(f"The job is {self.status.value}."))
        self._stops.clear()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # --- the owner of slots: what becomes of workers and slots

    def worker_lost(self, slot: Slot, reason: str) -> None:
        index = self._tasks.index_of(slot)
        if index is not None:
            cause = FailureInfo("WorkerLostException", reason)
            for execution in [e for e in self._machine.tasks.alive if e.subtask == index]:
                self._task_failed(execution, cause)

    def slot_lost(self, slot: Slot, reason: str) -> None:
        self.worker_lost(slot, reason)
        self._slots = [known for known in self._slots if known is not slot]

    def worker_message(self, slot: Slot, message: dict[str, Any]) -> None:
        if message.get("deployment") != self._tasks.deployment:
            return
        index = self._tasks.index_of(slot)
        if index is None or not self._tasks.lives(index):
            return
        match message["type"]:
            case "heartbeat":
                self.executions.measured(message["tasks"])
            case "deploy_failed":
                cause = self._failure_of(message)
                for execution in [e for e in self._machine.tasks.alive if e.subtask == index]:
                    self._task_failed(execution, cause)
            case "canceled":
                if not message["ended"]:
                    self._slot_pool.replace_worker(slot)
                for execution in [e for e in self._machine.tasks.alive if e.subtask == index]:
                    self._task_canceled(execution)
            case _:
                execution = ExecutionId(message["vertex_id"], message["subtask"], self._machine.attempt)
                self._task_message(execution, message)

    def _task_message(self, execution: ExecutionId, message: dict[str, Any]) -> None:
        match message["type"]:
            case "state":
                self._task_state(execution, message)
            case "end_of_data":
                if self._machine.state is JobState.DEPLOYING:
                    self._at_end_of_data.append(execution)
                else:
                    self._checkpoints.handle(checkpoint_events.EndOfDataReached(execution))
            case "ack":
                self._checkpoints.handle(
                    checkpoint_events.Acknowledged(
                        message["checkpoint_id"],
                        execution,
                        message["directory"],
                        SubtaskState.from_json(message["state"]),
                        CheckpointMetrics(**message["metrics"]),
                        message["finished_operators"],
                    )
                )
            case "decline":
                reason = CheckpointFailureReason[message["reason"]]
                self._checkpoints.handle(
                    checkpoint_events.Declined(message["checkpoint_id"], execution, reason, message["message"])
                )
            case other:
                logger.warning("job %s: unknown message %r of a worker", self._submission.job_id, other)

    def _task_state(self, execution: ExecutionId, message: dict[str, Any]) -> None:
        state = ExecutionState(message["state"])
        match state:
            case ExecutionState.RUNNING:
                self._enter(execution, state)
                self._handle(events.TaskRunning(execution))
            case ExecutionState.FINISHED:
                self._enter(execution, state)
                self._checkpoints.handle(checkpoint_events.SubtaskFinished(execution))
                self._handle(events.TaskFinished(execution))
            case ExecutionState.CANCELED:
                self._task_canceled(execution)
            case ExecutionState.FAILED:
                self._task_failed(execution, self._failure_of(message))

    def _failure_of(self, message: dict[str, Any]) -> FailureInfo:
        """A worker's failure. One that no restart can help ends the job, whatever the restart strategy says."""
        error = dict(message["error"])
        recoverable = error.pop("recoverable")
        cause = FailureInfo(**error)
        if not recoverable:
            self._note_failure(cause)
            self._handle(events.JobFailed(cause, recoverable=False))
        return cause

    def _task_canceled(self, execution: ExecutionId) -> None:
        self._enter(execution, ExecutionState.CANCELED)
        self._handle(events.TaskCanceled(execution))

    def _task_failed(self, execution: ExecutionId, cause: FailureInfo) -> None:
        self._enter(execution, ExecutionState.FAILED)
        self._note_failure(cause, execution)
        self._handle(events.TaskFailed(execution, cause))

    def _enter(self, execution: ExecutionId, state: ExecutionState) -> None:
        known = self.executions.executions.get(execution.key)
        if known is not None and known.id == execution:
            known.enter(state)

    def _note_failure(self, cause: FailureInfo, execution: ExecutionId | None = None) -> None:
        name = slot = endpoint = None
        if execution is not None:
            vertex = self.graph.vertex(execution.vertex_id)
            known = self.executions.executions[execution.key]
            name = f"{vertex.name} ({execution.subtask + 1}/{vertex.parallelism})"
            slot, endpoint = known.slot, known.endpoint
        failure = FailureCause(
            cause.exception, cause.message, cause.stack_trace or f"{cause.exception}: {cause.message}"
        )
        entry = ExceptionEntry(failure, wall_clock_ms(), name, endpoint, slot)
        healthy = (JobState.DEPLOYING, JobState.RUNNING, JobState.STOPPING, JobState.ENDING)
        self._failures.add(entry, concurrent=self._machine.state not in healthy)

    # --- the listener of the checkpoint coordinator

    def send_trigger(
        self, checkpoint_id: int, timestamp: int, options: CheckpointOptions, tasks: tuple[ExecutionId, ...]
    ) -> None:
        if not self._tasks.trigger(checkpoint_id, timestamp, options, tasks):
            message = "a worker to be triggered is gone"
            self._loop.call_soon(
                lambda: self._checkpoints.handle(checkpoint_events.TriggerFailed(checkpoint_id, message))
            )

    def send_complete(self, checkpoint_id: int, tasks: tuple[ExecutionId, ...]) -> None:
        self._tasks.complete(checkpoint_id, tasks)

    def send_aborted(self, checkpoint_id: int, latest_completed: int, tasks: tuple[ExecutionId, ...]) -> None:
        self._tasks.abort(checkpoint_id, latest_completed, tasks)

    def checkpoint_answer(self, effect: Effect) -> None:
        match effect:
            case checkpoint_effects.RequestCompleted():
                self._request_completed(effect)
            case checkpoint_effects.RequestFailed():
                self._request_failed(effect)
            case checkpoint_effects.RestoreFrom(_, checkpoint):
                self._restore_from(checkpoint)
            case checkpoint_effects.RestoreFailed(_, message):
                cause = FailureInfo("StateRestoreException", message)
                self._handle(events.StateRestoreFailed(self._restore_attempt, cause))
            case checkpoint_effects.FailJob(_, message):
                text = f"Exceeded checkpoint tolerable failure threshold. The latest checkpoint failed: {message}"
                cause = FailureInfo("CheckpointException", text)
                self._note_failure(cause)
                self._handle(events.JobFailed(cause))
            case checkpoint_effects.ShutdownComplete():
                self._checkpoints.finish(clean_up=self._machine.status.is_globally_terminal)

    def _request_completed(self, effect: checkpoint_effects.RequestCompleted) -> None:
        if effect.request_id in self._stops:
            self._handle(events.SavepointCompleted(effect.request_id, effect.external_path))
            return
        future = self._requests.pop(effect.request_id, None)
        if future is not None and not future.done():
            future.set_result(effect)

    def _request_failed(self, effect: checkpoint_effects.RequestFailed) -> None:
        if effect.request_id in self._stops:
            self._handle(events.SavepointFailed(effect.request_id, effect.message, effect.reached_tasks))
            return
        future = self._requests.pop(effect.request_id, None)
        if future is not None and not future.done():
            future.set_exception(OperationFailed(effect.message))


def _check_available(patch: CheckpointConfigPatch) -> None:
    """A setting that would have no effect is refused."""
    unavailable = {
        "unalignedEnabled": patch.unaligned,
        "alignedCheckpointTimeout": patch.aligned_timeout_ms,
        "maxInflightDataBytes": patch.max_inflight_data_bytes,
    }
    for field, value in unavailable.items():
        if value:
            raise InvalidRequest(field, value, "this version aligns barriers")
