"""A job's checkpoints, as its job master sees them: requests, settings, state to start from, messages of tasks.

Translates between the job machine, the workers and users on one side and the checkpoint coordinator on the other. What
concerns the job's life goes back to the job master as an event of the job machine.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.configuration import CheckpointConfigurationError
from ckpt_runtime.checkpoint.coordinator import CheckpointCoordinator, CoordinatorState
from ckpt_runtime.checkpoint.documents import subtask_state_of
from ckpt_runtime.checkpoint.effects import Effect
from ckpt_runtime.checkpoint.events import CheckpointMetrics
from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.failure_reason import CheckpointFailureReason
from ckpt_runtime.checkpoint.id_counter import CheckpointIdCounter
from ckpt_runtime.checkpoint.overrides import CheckpointOverrides
from ckpt_runtime.checkpoint.properties import CheckpointOptions, CheckpointProperties, RestoreMode
from ckpt_runtime.checkpoint.properties import SavepointFormat as SnapshotFormat
from ckpt_runtime.checkpoint.sink_state import SinkLineage
from ckpt_runtime.checkpoint.state_assignment import assign_states
from ckpt_runtime.checkpoint.state_assignment_error import StateAssignmentError
from ckpt_runtime.checkpoint.statistics import CheckpointStatsSnapshot, CheckpointType
from ckpt_runtime.checkpoint.statistics_tracker import CheckpointStatsTracker
from ckpt_runtime.configuration.checkpointing_options import CheckpointingOptions
from ckpt_runtime.configuration.cluster_options import JobManagerOptions
from ckpt_runtime.jobmaster.checkpoint_settings import shown_settings, submitted_settings
from ckpt_runtime.jobmaster.checkpoint_shell import CheckpointShell
from ckpt_runtime.jobmaster.deployment_planner import RestoredState
from ckpt_runtime.jobmaster.driver_pools import DriverPools
from ckpt_runtime.jobmaster.gateway import (
    CheckpointKind,
    EffectiveCheckpointConfig,
    InvalidRequest,
    JobStatus,
    NotReady,
    OperationStatus,
    SavepointFormat,
    UpdateInProgress,
)
from ckpt_runtime.jobmaster.operations import OperationFailed
from ckpt_runtime.jobmaster.sink_clean_up import sink_lineages, sink_outputs
from ckpt_runtime.jobmaster.snapshot_deletions import SnapshotDeletions
from ckpt_runtime.jobmaster.submission import JobSubmission
from ckpt_runtime.jobmaster.task_gateway import TaskGateway
from ckpt_runtime.scheduler import job_effects, job_events
from ckpt_runtime.scheduler.job_effects import JobEffect
from ckpt_runtime.scheduler.job_events import FailureInfo, JobEvent
from ckpt_runtime.storage.checkpoint_storage import CheckpointStorage
from ckpt_runtime.storage.crash_points import reach
from ckpt_runtime.storage.errors import AmbiguousWriteError, NotFoundError, StorageError
from ckpt_runtime.storage.leader_store import NotLeaderError

T = TypeVar("T")
logger = logging.getLogger(__name__)

_UNKNOWN_PAUSE_S = 0.2
_UNKNOWN_ATTEMPTS = 5
"""How often an update is settled by reading again before its caller is told that its outcome is unknown."""


class JobCheckpoints:
    """One job's coordinator with its shell. ``report`` takes what the job machine has to know.

    Raises InvalidOptionError or CheckpointConfigurationError for settings that cannot be used.
    """

    def __init__(
        self, submission: JobSubmission, tasks: TaskGateway, report: Callable[[JobEvent], None], pools: DriverPools
    ) -> None:
        self.restored: RestoredState | None = None
        self._submission = submission = replace(submission, archive=b"")  # it deploys nothing
        self._tasks = tasks
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._pools = pools
        self._record = submission.record
        self._submitted_settings = submitted_settings(submission.configuration)
        self._overrides = CheckpointOverrides.from_document(submission.history.overrides)
        self._ids = CheckpointIdCounter(submission.history.next_checkpoint_id)
        self._updating = False
        self._settling: asyncio.Task[None] | None = None
        self._restoring: asyncio.Task[None] | None = None
        self._requests: dict[str, asyncio.Future[out.RequestCompleted]] = {}
        self._savepoints: set[str] = set()
        self._restore_attempt = 0
        self._at_end_of_data: list[ExecutionId] = []
        self._final = False
        self._savepoint_id = submission.history.savepoint_id
        recovered = [entry.checkpoint for entry in submission.history.checkpoints]
        self._lineage_of = max(recovered, key=lambda checkpoint: checkpoint.id, default=submission.savepoint)
        self._shell = self._create_shell()

    def _create_shell(self) -> CheckpointShell:
        submission = self._submission
        configuration = submission.configuration
        statistics = CheckpointStatsTracker(configuration.get(JobManagerOptions.CHECKPOINT_HISTORY_SIZE))
        for entry in submission.history.checkpoints:
            if entry.checkpoint.job_id == submission.job_id:
                statistics.report_recovered(entry.checkpoint)
        coordinator = CheckpointCoordinator(
            submission.job_id,
            submission.graph,
            self._overrides.applied_to(self._submitted_settings),
            self._ids,
            submission.history.checkpoints,
            statistics=statistics,
        )
        directory = configuration.get(CheckpointingOptions.CHECKPOINTS_DIRECTORY)
        storage = CheckpointStorage(directory or submission.default_checkpoint_directory, submission.job_id)
        deletions = SnapshotDeletions(self._pools.deletions, self._record.check)
        ids = range(submission.history.first_checkpoint_id, submission.history.next_checkpoint_id)
        shell = CheckpointShell(
            submission.job_id, coordinator, storage, self._record, self, self._pools, deletions, ids
        )
        shell.dispose(submission.history.disposals)
        return shell

    def prepare_storage(self) -> int:
        """Makes the job's checkpoint directory, in a pool thread. Raises StorageError when it cannot be used.

        Returns the first checkpoint id of a new job.
        """
        first = self._shell.prepare_storage()
        self._ids.advance_to(first)
        return first

    # --- wishes

    async def trigger_checkpoint(self, kind: CheckpointKind) -> OperationStatus:
        """Raises OperationFailed."""
        done = await self._request(CheckpointProperties(full=kind is CheckpointKind.FULL), None)
        return OperationStatus(True, checkpoint_id=done.checkpoint_id)

    async def trigger_savepoint(self, directory: str, savepoint_format: SavepointFormat) -> OperationStatus:
        """Raises OperationFailed."""
        properties = CheckpointProperties(CheckpointType.SAVEPOINT, SnapshotFormat(savepoint_format.value))
        done = await self._request(properties, directory)
        try:
            await self._in_pool(lambda: self._record.keep_savepoint(done.checkpoint_id))
        except StorageError as error:
            logger.warning("a later driver will not know of savepoint %s: %s", done.external_path, error)
        return OperationStatus(True, location=done.external_path)

    async def _request(self, properties: CheckpointProperties, directory: str | None) -> out.RequestCompleted:
        request_id = uuid.uuid4().hex
        if properties.is_savepoint:
            self._savepoints.add(request_id)
        future: asyncio.Future[out.RequestCompleted] = self._loop.create_future()
        self._requests[request_id] = future
        self._shell.handle(on.TriggerRequested(request_id, properties, directory))
        return await future

    async def patch(self, patch: CheckpointOverrides | None) -> EffectiveCheckpointConfig:
        """FLIP-571: persists, then applies, then returns what holds. None drops all overrides.

        Raises UpdateInProgress, InvalidRequest when the values clash with other settings, NotReady when the change
        could not be stored or when that is unknown. Whether the job has ended meanwhile is for its master to say.
        """
        if self._updating:
            raise UpdateInProgress(self._submission.job_id)
        self._updating = True
        try:
            reach("patch-before")
            stored = await self._persist(patch)
            reach("patch-persisted")
            self._apply(stored)
            reach("patch-applied")
        finally:
            self._updating = self._settling is not None
        return self.effective_config()

    async def _persist(self, patch: CheckpointOverrides | None) -> str | None:
        """Returns the stored text. An unknown outcome is settled by doing it again, which reads first."""
        unknown = False
        for attempt in range(_UNKNOWN_ATTEMPTS):
            await asyncio.sleep(attempt * _UNKNOWN_PAUSE_S)
            try:
                return await self._in_pool(lambda: self._record.change_overrides(partial(self._changed, patch)))
            except CheckpointConfigurationError as error:
                raise InvalidRequest("checkpoint configuration", str(error), "values that fit together") from error
            except AmbiguousWriteError:
                unknown = True
            except NotLeaderError as error:
                self._shell.lose_leadership()
                raise NotReady(f"another driver leads, ask it whether the change is stored: {error}") from error
            except StorageError as error:
                if not unknown:
                    raise NotReady(f"the change could not be stored, nothing has changed: {error}") from error
        self._settling = self._loop.create_task(self._settle())
        raise NotReady(
            "it is unknown whether the change is stored; it is looked up as soon as storage answers, and applied if "
            "it is; look at the configuration, or repeat the request then"
        )

    def _changed(self, patch: CheckpointOverrides | None, text: str | None) -> str | None:
        """In a pool thread. Nothing that would make the next start of the job fail is ever stored."""
        known = CheckpointOverrides.from_document(text)
        overrides = CheckpointOverrides() if patch is None else known.merged_with(patch)
        overrides.applied_to(self._submitted_settings)
        return overrides.to_document() if overrides.given else None

    async def _settle(self) -> None:
        """After an unknown outcome: applies what is stored, once that can be read."""
        attempt = 0
        while True:
            attempt += 1
            await asyncio.sleep(min(30.0, _UNKNOWN_PAUSE_S * 2 ** min(attempt, 10)))
            try:
                stored = await self._in_pool(lambda: self._record.change_overrides(lambda text: text))
            except NotLeaderError:
                self._shell.lose_leadership()
                return
            except NotFoundError:  # the job has ended
                return
            except StorageError:
                continue
            break
        self._apply(stored)
        self._updating, self._settling = False, None

    def _apply(self, text: str | None) -> None:
        overrides = CheckpointOverrides.from_document(text)
        self._shell.handle(on.ConfigurationPatched(overrides.applied_to(self._submitted_settings)))
        self._overrides = overrides

    async def _in_pool(self, call: Callable[[], T]) -> T:
        return await self._loop.run_in_executor(self._pools.own, call)

    # --- views

    def sinks(self) -> dict[str, SinkLineage]:
        """What the sinks of a deployment have to know, by operator uid."""
        submission = self._submission
        return sink_lineages(
            submission.graph, submission.seed, self._lineage_of, submission.ended_jobs, self._savepoint_id
        )

    def effective_config(self) -> EffectiveCheckpointConfig:
        """What holds now."""
        return shown_settings(self._shell.coordinator.configuration, self._submission.configuration, self._overrides)

    def references(self) -> tuple[str, tuple[str, ...]]:
        """The job's own directory, and the snapshots that it may have to start from."""
        coordinator, origin = self._shell.coordinator, self._submission.savepoint
        begins = () if origin is None or coordinator.latest_checkpoint is not None else (origin.directory,)
        return self._shell.directory, (*begins, *coordinator.referenced)

    def statistics(self) -> CheckpointStatsSnapshot:
        """A frozen view."""
        return self._shell.coordinator.statistics()

    def statistics_after(self, status: JobStatus) -> CheckpointStatsSnapshot:
        """What will be true once the job has ended as ``status`` and its checkpoints are cleaned up."""
        shown = self.statistics()
        latest = shown.latest_completed
        if latest is None or not self._shell.coordinator.configuration.discards_on(status.value):
            return shown
        return replace(shown, latest_completed=replace(latest, discarded=True))

    # --- the job's life

    def restore(self, attempt: int) -> None:
        """Finds what the deployment starts from; StateRestored or StateRestoreFailed is reported."""
        self._restore_attempt = attempt
        self._restoring = self._loop.create_task(self._restore(attempt))

    async def _restore(self, attempt: int) -> None:
        try:
            await self._in_pool(lambda: self._record.begin_attempt(attempt))
        except NotLeaderError:
            self._shell.lose_leadership()
            return
        except StorageError as error:
            cause = FailureInfo(type(error).__name__, f"the attempt could not be recorded: {error}")
            self._report(job_events.StateRestoreFailed(attempt, cause))
            return
        reach("attempt-recorded")
        open_states = (CoordinatorState.CREATED, CoordinatorState.RESTORING)
        if attempt == self._restore_attempt and self._shell.coordinator.state in open_states:
            mode = RestoreMode(self._submission.claim_mode.value)
            self._shell.handle(on.RestoreRequested(f"restore-{attempt}", self._submission.savepoint, mode))

    def job_effect(self, effect: JobEffect) -> None:
        """What the job machine says to the coordinator."""
        match effect:
            case job_effects.AllTasksRunning(executions, finished):
                self._all_running(executions, finished)
            case job_effects.TasksLeaveRunning():
                self._at_end_of_data = []
                self._shell.handle(on.TasksLeftRunning())
            case job_effects.StopPeriodicTrigger():
                self._shell.handle(on.PeriodicTriggerStopped())
            case job_effects.StartPeriodicTrigger():
                self._shell.handle(on.PeriodicTriggerStarted())
            case job_effects.TriggerSavepoint(request_id, drain, directory, savepoint_format):
                properties = CheckpointProperties(CheckpointType.SYNC_SAVEPOINT, savepoint_format, drain=drain)
                self._shell.handle(on.TriggerRequested(request_id, properties, directory))

    def _all_running(self, executions: tuple[ExecutionId, ...], finished: frozenset[ExecutionId]) -> None:
        finished_vertices = frozenset() if self.restored is None else self.restored.finished_vertices
        self._shell.handle(on.JobRunning(executions, finished, finished_vertices))
        waiting, self._at_end_of_data = self._at_end_of_data, []
        for execution in waiting:
            self._shell.handle(on.EndOfDataReached(execution))

    def sweep(self, status: JobStatus) -> None:
        """Of a job that ended as ``status`` under an earlier driver: deletes what that one did not get to.

        Where checkpoints are retained, those above the oldest with a pointer may be retained ones whose pointer is
        gone; they stay.
        """
        history = self._submission.history
        keep = {entry.checkpoint.id for entry in history.checkpoints}
        upper = history.next_checkpoint_id
        if not self._shell.coordinator.configuration.discards_on(status.value):
            upper = min(keep, default=0)
        self._shell.sweep(range(history.first_checkpoint_id, upper), keep)

    def tasks_are_gone(self) -> None:
        """The job has ended, and that is being stored: no more checkpoints."""
        if self._shell.coordinator.state is CoordinatorState.RUNNING:
            self._shell.handle(on.TasksLeftRunning())

    def shut_down(self, status: JobStatus, *, fenced: bool = False) -> None:
        """The job has ended, or (SUSPENDED) another driver goes on with it; ``fenced`` when it already does."""
        self._final = status.is_globally_terminal
        self._shell.handle(on.Shutdown(status.value, fenced))

    def close(self) -> None:
        """This driver ends: nothing is waited for."""
        for task in (self._settling, self._restoring):
            if task is not None:
                task.cancel()
        self._shell.close()

    # --- messages of tasks

    def task_message(self, execution: ExecutionId, message: dict[str, Any], *, deploying: bool) -> bool:
        """Takes a worker's message; False when it is none about checkpoints.

        The coordinator knows no tasks while they are being deployed (``deploying``): what comes early waits.
        """
        match message["type"]:
            case "end_of_data":
                if deploying:
                    self._at_end_of_data.append(execution)
                else:
                    self._shell.handle(on.EndOfDataReached(execution))
            case "ack":
                self._shell.handle(
                    on.Acknowledged(
                        message["checkpoint_id"],
                        execution,
                        message["directory"],
                        subtask_state_of(message["state"]),
                        CheckpointMetrics(**message["metrics"]),
                        message["finished_operators"],
                    )
                )
            case "decline":
                reason = CheckpointFailureReason[message["reason"]]
                self._shell.handle(on.Declined(message["checkpoint_id"], execution, reason, message["message"]))
            case _:
                return False
        return True

    def task_finished(self, execution: ExecutionId) -> None:
        """Before the job machine hears of it."""
        self._shell.handle(on.SubtaskFinished(execution))

    # --- the listener of the coordinator's shell

    def send_trigger(
        self, checkpoint_id: int, timestamp: int, options: CheckpointOptions, tasks: tuple[ExecutionId, ...]
    ) -> None:
        if not self._tasks.trigger(checkpoint_id, timestamp, options, tasks):
            failed = on.TriggerFailed(checkpoint_id, "a worker to be triggered is gone")
            self._loop.call_soon(self._shell.handle, failed)

    def send_complete(self, checkpoint_id: int, tasks: tuple[ExecutionId, ...]) -> None:
        self._tasks.complete(checkpoint_id, tasks)

    def send_aborted(self, checkpoint_id: int, latest_completed: int, tasks: tuple[ExecutionId, ...]) -> None:
        self._tasks.abort(checkpoint_id, latest_completed, tasks)

    def checkpoint_answer(self, effect: Effect) -> None:
        match effect:
            case out.RequestCompleted():
                self._request_completed(effect)
            case out.RequestFailed(request_id, _, message, _, reached_tasks):
                future = self._requests.pop(request_id, None)
                self._savepoints.discard(request_id)
                if future is None:
                    self._report(job_events.SavepointFailed(request_id, message, reached_tasks))
                elif not future.done():
                    future.set_exception(OperationFailed(message))
            case out.RestoreFrom(_, checkpoint):
                self._restore_from(checkpoint)
            case out.RestoreFailed(_, message):
                cause = FailureInfo("StateRestoreException", message)
                self._report(job_events.StateRestoreFailed(self._restore_attempt, cause))
            case out.FailJob(_, message, times):
                text = f"Exceeded checkpoint tolerable failure threshold. The latest checkpoint failed: {message}"
                cause = FailureInfo("CheckpointException", text)
                self._report(job_events.JobFailed(cause, failed_checkpoints=times))
            case out.ShutdownComplete(keeps_nothing):
                outputs = sink_outputs(self._submission.job_id, self._submission.graph, self.sinks())
                self._shell.finish(
                    clean_up=self._final,
                    keeps_nothing=keeps_nothing,
                    outputs=outputs,
                    savepoint_id=self._savepoint_id,
                )
                if self._shell.fenced:
                    self._report(job_events.SuspendRequested())

    def _request_completed(self, done: out.RequestCompleted) -> None:
        """Answers whoever asked: a user, or the job machine, which stops the job with a savepoint."""
        if done.request_id in self._savepoints:
            self._savepoints.remove(done.request_id)
            self._savepoint_id = max(self._savepoint_id, done.checkpoint_id)
        future = self._requests.pop(done.request_id, None)
        if future is None:
            self._report(job_events.SavepointCompleted(done.request_id, done.external_path))
        elif not future.done():
            future.set_result(done)

    def _restore_from(self, checkpoint: CompletedCheckpoint | None) -> None:
        attempt = self._restore_attempt
        self._lineage_of = checkpoint or self._lineage_of
        try:
            self.restored = None if checkpoint is None else self._assign(checkpoint)
        except StateAssignmentError as error:
            cause = FailureInfo(type(error).__name__, str(error))
            self._report(job_events.StateRestoreFailed(attempt, cause, recoverable=False))
            return
        self._report(job_events.StateRestored(attempt))

    def _assign(self, checkpoint: CompletedCheckpoint) -> RestoredState:
        """A job's own checkpoint may lack operators of the savepoint it began with; that was decided at submission."""
        allowed = self._submission.allow_non_restored_state or self._submission.savepoint is not checkpoint
        assignment = assign_states(checkpoint, self._submission.graph, allowed)
        return RestoredState(
            checkpoint.id,
            checkpoint.directory,
            assignment.subtasks,
            assignment.finished_vertices,
            assignment.in_flight,
            owned=self._shell.coordinator.latest_is_owned,
        )
