"""One job's master: runs the pure job machine and executes what it decides.

Everything happens on the driver's event loop. The machine decides about the job's life; this shell carries events from
workers, timers, slots and users to it, and its effects back out. Checkpoints are ``job_checkpoints``'s affair.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.overrides import CheckpointOverrides
from ckpt_runtime.checkpoint.properties import SavepointFormat as SnapshotFormat
from ckpt_runtime.checkpoint.statistics import CheckpointStatsSnapshot
from ckpt_runtime.configuration.cluster_options import CpuPinning, JobManagerOptions, TaskManagerOptions
from ckpt_runtime.jobmaster.checkpoint_shell import present_instant
from ckpt_runtime.jobmaster.consequences import Consequences
from ckpt_runtime.jobmaster.deployment_planner import place, plan_deployments
from ckpt_runtime.jobmaster.driver_pools import DriverPools
from ckpt_runtime.jobmaster.ended_job import result_document
from ckpt_runtime.jobmaster.exceptions_history import FailureLog, cause_of
from ckpt_runtime.jobmaster.executions import ExecutionGraph, wall_clock_ms
from ckpt_runtime.jobmaster.gateway import (
    NOT_YET,
    CheckpointKind,
    EffectiveCheckpointConfig,
    ExceptionEntry,
    ExceptionHistory,
    ExecutionResult,
    ExecutionState,
    JobConfigInfo,
    JobDetails,
    JobOverview,
    JobStatus,
    JobTerminated,
    NotReady,
    OperationStatus,
    SavepointFormat,
)
from ckpt_runtime.jobmaster.job_checkpoints import JobCheckpoints
from ckpt_runtime.jobmaster.operations import OperationFailed
from ckpt_runtime.jobmaster.restart_strategy_factory import create_restart_strategy, strategy_type
from ckpt_runtime.jobmaster.slot_pool import Slot, SlotPool, SlotsUnavailableError
from ckpt_runtime.jobmaster.snapshot_references import References
from ckpt_runtime.jobmaster.submission import JobSubmission
from ckpt_runtime.jobmaster.task_gateway import TaskGateway
from ckpt_runtime.scheduler import job_effects as effects
from ckpt_runtime.scheduler import job_events as events
from ckpt_runtime.scheduler.job_effects import JobEffect
from ckpt_runtime.scheduler.job_events import FailureInfo, JobEvent
from ckpt_runtime.scheduler.job_machine import JobMachine
from ckpt_runtime.scheduler.job_status import JobState
from ckpt_runtime.storage.crash_points import reach
from ckpt_runtime.storage.errors import StorageError
from ckpt_runtime.storage.leader_store import NotLeaderError
from ckpt_runtime.task.deployment import Program

logger = logging.getLogger(__name__)

_RETRY_BASE_S = 0.2
_RETRY_MAX_S = 30.0

_deployments = itertools.count(1)
"""Numbers of deployments, unique in the session: late frames and messages of another one are recognised by it."""


class JobMaster:
    """A job from its submission to its result. Raises InvalidOptionError for values that cannot be used."""

    def __init__(self, submission: JobSubmission, slots: SlotPool, pools: DriverPools) -> None:
        self.graph = submission.graph
        self.configuration = submission.configuration
        self.executions = ExecutionGraph(submission.graph)
        self._tasks = TaskGateway(submission.archive)
        # Up to a gigabyte, which the gateway alone needs, and no longer than the job lives.
        self._submission = submission = replace(submission, archive=b"")
        self._slot_pool = slots
        self._pools = pools.of_job(submission.job_id)
        self._slots: list[Slot] = []
        self._loop = asyncio.get_running_loop()
        self._background: set[asyncio.Task[None]] = set()
        self._acquiring: asyncio.Task[None] | None = None
        keys = [(vertex.id, index) for vertex in self.graph.vertices for index in range(vertex.parallelism)]
        first_attempt = submission.history.next_attempt
        self._machine = JobMachine(keys, create_restart_strategy(self.configuration), first_attempt)
        self._checkpoints = JobCheckpoints(submission, self._tasks, self._checkpoint_event, self._pools)
        self._consequences = Consequences(self._deliver_consequence)
        self._stops: dict[str, asyncio.Future[str]] = {}
        self._stopping: dict[tuple[str, SavepointFormat, bool], asyncio.Future[str]] = {}
        self._restart_timer: asyncio.TimerHandle | None = None
        history_size = self.configuration.get(JobManagerOptions.EXCEPTION_HISTORY_SIZE)
        self._failures = FailureLog(history_size, submission.history.failures)
        self._failures_changed = False
        self._keeping_failures: asyncio.Task[None] | None = None
        self._status = JobStatus.INITIALIZING
        self._fenced = False
        self._timestamps: dict[JobStatus, int] = {JobStatus.INITIALIZING: submission.submitted_at_ms}
        self._last_modification = wall_clock_ms()
        self._end_cause: FailureInfo | None = None
        self._restarts = 0

    # --- wishes

    @property
    def has_ended(self) -> bool:
        return self._status.is_globally_terminal

    @property
    def status(self) -> JobStatus:
        """What users see. A job has ended when that is stored, not before."""
        return self._status

    def prepare_storage(self) -> int:
        """Makes the job's checkpoint directory, in a pool thread; returns the first checkpoint id of a new job.

        Raises StorageError when the directory cannot be used.
        """
        return self._checkpoints.prepare_storage()

    def start(self) -> None:
        self._handle(events.Start())

    def cancel(self) -> None:
        self._handle(events.CancelRequested())

    async def suspend(self, *, fenced: bool = False) -> None:
        """This driver ends: the tasks are told to end, what is retained stays.

        ``fenced`` when another driver leads already, so that nothing may be changed any more.
        """
        self._fenced = fenced
        self._handle(events.SuspendRequested())
        for task in list(self._background):
            task.cancel()
        self._checkpoints.close()

    async def trigger_checkpoint(self, kind: CheckpointKind) -> OperationStatus:
        """Raises OperationFailed."""
        return await self._checkpoints.trigger_checkpoint(kind)

    async def trigger_savepoint(
        self, directory: str, savepoint_format: SavepointFormat, cancel_job: bool
    ) -> OperationStatus:
        """Raises OperationFailed; the job goes on then."""
        done = await self._checkpoints.trigger_savepoint(directory, savepoint_format)
        if cancel_job:
            self.cancel()
        return done

    async def stop_with_savepoint(
        self, directory: str, savepoint_format: SavepointFormat, drain: bool
    ) -> OperationStatus:
        """Completes when all tasks have finished after the savepoint. Raises OperationFailed.

        The same stop again while it is in progress is that one, whoever asks.
        """
        wanted = (directory, savepoint_format, drain)
        future = self._stopping.get(wanted)
        if future is None:
            request_id = uuid.uuid4().hex
            future = self._stops[request_id] = self._stopping[wanted] = self._loop.create_future()
            future.add_done_callback(lambda _: self._stopping.pop(wanted))
            self._handle(events.StopRequested(request_id, drain, directory, SnapshotFormat(savepoint_format.value)))
        return OperationStatus(True, location=await asyncio.shield(future))

    async def patch_checkpoint_config(self, patch: CheckpointOverrides | None) -> EffectiveCheckpointConfig:
        """FLIP-571; None drops all overrides. Raises as ``DispatcherGateway.patch_checkpoint_config``."""
        try:
            shown = await self._checkpoints.patch(patch)
        except NotReady as error:
            self._check_not_ended(error)
            raise
        self._check_not_ended()
        return shown

    def _check_not_ended(self, cause: Exception | None = None) -> None:
        """A change that raced with the job's end has no effect, whether it was stored or not."""
        if self._machine.status.is_globally_terminal:
            raise JobTerminated(self._submission.job_id, self._machine.status) from cause

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
        return self._checkpoints.effective_config()

    def references(self) -> References:
        """The snapshots that this job needs."""
        return References(self._submission.job_id, self.status.value, *self._checkpoints.references())

    def checkpoint_statistics(self) -> CheckpointStatsSnapshot:
        return self._checkpoints.statistics()

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
            failure=None if cause is None else cause_of(cause),
        )

    # --- the job machine

    def _handle(self, event: JobEvent) -> None:
        self._last_modification = wall_clock_ms()
        decided = self._machine.handle(event, present_instant())
        ended = next((effect for effect in decided if isinstance(effect, effects.JobEnded)), None)
        if ended is not None and ended.status.is_globally_terminal:
            self._in_background(self._end_durably(ended, decided))
            return
        for effect in decided:
            self._execute(effect)

    async def _end_durably(self, ended: effects.JobEnded, decided: list[JobEffect]) -> None:
        """Nobody hears of the end before it is stored: a job that was said to have ended must never run again."""
        self._checkpoints.tasks_are_gone()
        result = self._result_document(ended)
        if self._keeping_failures is not None:
            await self._keeping_failures
        reach("end-before")
        pause = _RETRY_BASE_S
        while True:
            try:
                await self._loop.run_in_executor(self._pools.own, self._submission.record.end, result)
                break
            except NotLeaderError:
                logger.warning("job %s ended, but another driver leads now", self._submission.job_id)
                return
            except (StorageError, ValueError) as error:  # ValueError: no document, too large or no JSON
                logger.warning("the end of job %s cannot be stored yet: %s", self._submission.job_id, error)
            await asyncio.sleep(pause)
            pause = min(_RETRY_MAX_S, pause * 2)
        reach("end-stored")
        for effect in decided:
            self._execute(effect)

    def _result_document(self, ended: effects.JobEnded) -> dict[str, Any]:
        cause = ended.cause
        return result_document(
            job_id=self._submission.job_id,
            status=ended.status,
            graph=self.graph,
            given=self._submission.given,
            timestamps={**self._timestamps, ended.status: ended.timestamp},
            failure=None if cause is None else cause_of(cause),
            exceptions=self._failures.to_stored(),
            restart_strategy=strategy_type(self.configuration).value,
            checkpoint_config=self.checkpoint_config(),
            request=self._submission.request,
            checkpoints=self._checkpoints.statistics_after(ended.status),
            restarts=self._restarts,
        )

    def _execute(self, effect: JobEffect) -> None:
        match effect:
            case effects.StatusChanged(status, timestamp, _):
                logger.info("job %s is %s", self._submission.job_id, status.value)
                self._status = status
                self._timestamps[status] = timestamp
            case effects.AcquireSlots(attempt):
                self._stop_acquiring()
                self._acquiring = self._in_background(self._acquire_slots(attempt))
            case effects.RestoreState(attempt):
                self._checkpoints.restore(attempt)
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
                self._checkpoints.job_effect(effect)

    async def _acquire_slots(self, attempt: int) -> None:
        try:
            slots = await self._slot_pool.acquire(self, self.graph.slots, self._slots)
        except SlotsUnavailableError as error:
            self._release_slots()
            cause = FailureInfo("NoResourceAvailableException", str(error))
            if self._machine.state is JobState.ACQUIRING and self._machine.attempt == attempt:
                self._note_failure(cause)
            self._handle(events.SlotsFailed(attempt, cause))
            return
        self._slots = slots
        self._handle(events.SlotsAcquired(attempt))

    def _deploy(self, executions: tuple[ExecutionId, ...]) -> None:
        attempt = self._machine.attempt
        self.executions.reset(attempt)
        self._restarts += attempt > self._submission.history.next_attempt
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
            restored=self._checkpoints.restored,
            sinks=self._checkpoints.sinks(),
        )
        reach("deploy-before")
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
        self._checkpoints.shut_down(self._machine.status, fenced=self._fenced)
        self._stop_acquiring()
        self._release_slots()
        self._consequences.forget()
        self._tasks.close()
        for future in self._stops.values():
            future.set_exception(OperationFailed(f"The job is {self.status.value}."))
        self._stops.clear()

    def _stop_acquiring(self) -> None:
        if self._acquiring is not None:
            self._acquiring.cancel()

    def _release_slots(self) -> None:
        slots, self._slots = self._slots, []
        for slot in slots:
            if not slot.lost:
                self._slot_pool.release(slot)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _keep_failures(self) -> None:
        """For a later driver. One that cannot be stored is tried again with the next failure."""
        while self._failures_changed:
            self._failures_changed = False
            stored = self._failures.to_stored()
            try:
                await self._loop.run_in_executor(self._pools.own, self._submission.record.keep_failures, stored)
            except (StorageError, ValueError) as error:  # ValueError: no document, too large or no JSON
                logger.warning("the failures of job %s cannot be stored: %s", self._submission.job_id, error)
        self._keeping_failures = None

    # --- the owner of slots: what becomes of workers and slots

    def worker_lost(self, slot: Slot, reason: str) -> None:
        """May come late: a deployment that has begun meanwhile has another worker there."""
        index = self._tasks.index_of(slot)
        if index is not None and not self._tasks.lives(index):
            cause = FailureInfo("WorkerLostException", reason)
            for execution in [e for e in self._machine.tasks.alive if e.subtask == index]:
                self._task_failed(execution, cause)
        self._consequences.release()

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
                self._reported_failure(index, [e for e in self._machine.tasks.alive if e.subtask == index], message)
            case "canceled":
                if not message["ended"]:
                    self._slot_pool.replace_worker(slot)
                for execution in [e for e in self._machine.tasks.alive if e.subtask == index]:
                    self._task_canceled(execution)
            case _:
                execution = ExecutionId(message["vertex_id"], message["subtask"], self._machine.attempt)
                self._task_message(execution, message)

    def _task_message(self, execution: ExecutionId, message: dict[str, Any]) -> None:
        if message["type"] == "state":
            self._task_state(execution, message)
        elif not self._checkpoints.task_message(
            execution, message, deploying=self._machine.state is JobState.DEPLOYING
        ):
            logger.warning("job %s: unknown message %r of a worker", self._submission.job_id, message["type"])

    def _task_state(self, execution: ExecutionId, message: dict[str, Any]) -> None:
        state = ExecutionState(message["state"])
        match state:
            case ExecutionState.RUNNING:
                self._enter(execution, state)
                self._handle(events.TaskRunning(execution))
            case ExecutionState.FINISHED:
                self._enter(execution, state)
                self._checkpoints.task_finished(execution)
                self._handle(events.TaskFinished(execution))
            case ExecutionState.CANCELED:
                self._task_canceled(execution)
            case ExecutionState.FAILED:
                self._reported_failure(execution.subtask, [execution], message)

    def _reported_failure(self, subtask: int, executions: list[ExecutionId], message: dict[str, Any]) -> None:
        """A worker's failure. One that no restart can help ends the job, whatever the restart strategy says."""
        error = dict(message["error"])
        recoverable, is_consequence = error.pop("recoverable"), error.pop("consequence", False)
        cause = FailureInfo(**error)
        if is_consequence:
            self._consequences.hold(executions, cause)
            return
        self._tasks.note_failure(subtask)
        if not recoverable:
            self._note_failure(cause)
            self._handle(events.JobFailed(cause, recoverable=False))
        for execution in executions:
            self._task_failed(execution, cause)
        self._consequences.release()

    def _deliver_consequence(self, execution: ExecutionId, cause: FailureInfo) -> None:
        """Unless the subtask has ended otherwise meanwhile, or another attempt has begun."""
        if execution in self._machine.tasks.alive:
            self._task_failed(execution, cause)

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
        entry = ExceptionEntry(cause_of(cause), wall_clock_ms(), name, endpoint, slot)
        clearing = (JobState.CLEARING, JobState.FAILING, JobState.CANCELLING)
        self._failures.add(entry, concurrent=self._machine.state in clearing)
        self._failures_changed = not self._machine.state.is_terminal
        if self._failures_changed and self._keeping_failures is None:
            self._keeping_failures = self._in_background(self._keep_failures())

    # --- what checkpoints mean for the job

    def _checkpoint_event(self, event: JobEvent) -> None:
        if isinstance(event, events.StateRestoreFailed | events.JobFailed):
            self._note_failure(event.cause)
        self._handle(event)
