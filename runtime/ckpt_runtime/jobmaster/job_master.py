"""One job as the dispatcher sees it: requests that are awaited, and views. Its shell and its core do all other work."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Self, TypeVar

from ckpt_runtime.checkpoint import effects as checkpoint_out
from ckpt_runtime.checkpoint import events as checkpoint_on
from ckpt_runtime.checkpoint.configuration import CheckpointOverrides
from ckpt_runtime.checkpoint.coordinator import CheckpointCoordinator
from ckpt_runtime.checkpoint.events import TriggerRequested
from ckpt_runtime.checkpoint.properties import CheckpointProperties, CheckpointType, SavepointFormat
from ckpt_runtime.checkpoint.statistics import CheckpointStats, CheckpointStatsSnapshot, CheckpointStatsTracker
from ckpt_runtime.checkpoint.triggering import CheckpointIdCounter
from ckpt_runtime.configuration.checkpointing_options import CheckpointingOptions
from ckpt_runtime.configuration.cluster_options import JobManagerOptions
from ckpt_runtime.configuration.configuration import Configuration, OwnConfiguration
from ckpt_runtime.configuration.pipeline_options import ExecutionOptions
from ckpt_runtime.configuration.registry import INTERNAL_PREFIX
from ckpt_runtime.contract.configuration import JobConfig
from ckpt_runtime.frontend.static_tables import program_of
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.jobmaster.event_log import EventLog, JobAnnouncer
from ckpt_runtime.jobmaster.executions import ExecutionGraph
from ckpt_runtime.jobmaster.gateway_values import (
    AfterSavepoint,
    CheckpointKind,
    ConfigurationRefused,
    Conflict,
    EffectiveCheckpointConfig,
    InvalidRequest,
    JobTerminated,
    NotReady,
    OperationStatus,
    RequirementsRefused,
    RescaleInProgress,
    SavepointRequest,
    UpdateInProgress,
    VersionConflict,
)
from ckpt_runtime.jobmaster.job_host import LoopHost, Result
from ckpt_runtime.jobmaster.job_settings import create_restart_strategy, overridden_options, submitted_settings
from ckpt_runtime.jobmaster.job_shell import JobShell
from ckpt_runtime.jobmaster.operations import OperationFailure
from ckpt_runtime.jobmaster.planning import RunningProgram
from ckpt_runtime.jobmaster.request_checks import checkpoint_directory
from ckpt_runtime.jobmaster.slot_pool import SlotPool
from ckpt_runtime.jobmaster.snapshot_references import References
from ckpt_runtime.jobmaster.submission import JobSubmission
from ckpt_runtime.jobmaster.task_gateway import TaskGateway
from ckpt_runtime.scheduler import job_effects as job_out
from ckpt_runtime.scheduler import job_events as job_on
from ckpt_runtime.scheduler.core_events import (
    ChangeAnswered,
    ChangeOutcome,
    ConfigurationRequested,
    JobInput,
    JobOutput,
    LeadershipLost,
    PatchRequested,
    RescaleRequested,
    SavepointBeforeCancel,
)
from ckpt_runtime.scheduler.deployment import JobPlan
from ckpt_runtime.scheduler.job_core import JobCore
from ckpt_runtime.scheduler.job_machine import JobMachine
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.scheduler.replacement import (
    ParallelismBounds,
    ReplacementRefusedError,
    check_replaceable,
    declared_bounds,
    subtasks_of,
)
from ckpt_runtime.scheduler.restart_strategies import RestartStrategy
from ckpt_runtime.snapshots.catalogue import SavepointFacts, record_savepoint
from ckpt_runtime.storage.checkpoint_storage import CheckpointStorage
from ckpt_runtime.storage.driver_pools import DriverPools, crash_point
from ckpt_runtime.storage.errors import StorageError

logger = logging.getLogger(__name__)
T = TypeVar("T")

_STOP_AGAIN_S = 1.0
"""The pause before the next attempt to stop a job whose time limit has passed."""


class JobMaster:
    """A job from its submission to its result. Raises InvalidOptionError or CheckpointConfigurationError for unusable
    values."""

    def __init__(
        self,
        submission: JobSubmission,
        slots: SlotPool,
        pools: DriverPools,
        events: EventLog | None = None,
        stop: Callable[[JobMaster, str], Awaitable[OperationStatus]] | None = None,
    ) -> None:
        """With ``events`` None the job publishes no events. ``stop`` stops a job whose time is over, with a savepoint
        in the given directory; with None no job's time is limited."""
        announcer = JobAnnouncer(submission.job_id, None if events is None else events.publish)
        self._tasks = TaskGateway(submission.archive)
        # The archive has up to a gigabyte; only the gateway needs it, and only while the job lives.
        self._submission = submission = replace(submission, archive=b"")
        self._ids = CheckpointIdCounter(submission.history.next_checkpoint_id)
        self._loop = asyncio.get_running_loop()
        self._pools = pools.of_job(submission.job_id)
        self._checkpoint_directory = checkpoint_directory(submission)
        self._shell = JobShell(
            submission,
            create_job_core(submission, self._ids, announcer.checkpoint),
            LoopHost(slots, self._pools),
            CheckpointStorage(self._checkpoint_directory, submission.job_id),
            self._tasks,
            announcer,
        )
        self._shell.when_changed = self._limit_time
        self.view = view = self._shell.view
        """The job as users see it."""
        self.overview, self.details, self.result = view.overview, view.details, view.result
        self.exception_history = view.exception_history
        self.job_id = submission.job_id
        self.defaults = submission.defaults
        """The cluster's options, which the job's own options override."""
        self._stop_in_time = stop
        self._running_since: float | None = None
        self._time_limit: asyncio.Task[None] | None = None
        self._asked: set[asyncio.Future[JobOutput]] = set()
        self._stopping: dict[tuple[str, SavepointFormat, AfterSavepoint], asyncio.Future[OperationStatus]] = {}
        self._rescaling: tuple[Mapping[str, ParallelismBounds], asyncio.Task[None]] | None = None

    # --- requests

    @property
    def status(self) -> JobStatus:
        return self.view.status

    @property
    def has_ended(self) -> bool:
        return self.status.is_globally_terminal

    def living(self) -> Self:
        """The job itself. Raises JobTerminated once it has ended."""
        if self.has_ended:
            raise JobTerminated(self.job_id, self.status)
        return self

    @property
    def cleaned_up(self) -> bool:
        """Whether the clean-up after its end is complete: its files, claims and records are deleted."""
        return self._shell.storage.cleaned_up

    def prepare_storage(self) -> int:
        """In a pool thread: makes the directory; returns a new job's first checkpoint id. Raises StorageError."""
        first = self._shell.storage.prepare()
        # Directories of an earlier job of this id may exist: their checkpoint ids are not reused.
        self._ids.advance_to(first)
        return first

    def start(self) -> None:
        self._shell.tell(job_on.Start())

    def cancel(self, *, retain: bool = False) -> None:
        """With ``retain``, its checkpoints outlive it, regardless of its options. This cannot be undone."""
        if retain:
            self._shell.tell(checkpoint_on.RetentionAsked())
        self._shell.tell(job_on.CancelRequested())

    def clean_up_after(self, status: JobStatus, *, retain: bool = False) -> None:
        """Finishes the clean-up of a job that ended as ``status`` under an earlier driver that did not complete it."""
        if retain:
            self._shell.tell(checkpoint_on.RetentionAsked())
        self._shell.clean_up_after(status)

    def suspend(self, *, fenced: bool = False) -> None:
        """Ends the tasks because this driver ends; ``fenced``: another one leads, and this one may change nothing."""
        self._shell.tell(LeadershipLost() if fenced else job_on.SuspendRequested())
        self.close()

    def close(self) -> None:
        """Stops the job's pending work because this driver ends; pending requests fail with NotReady."""
        if self._time_limit is not None:
            self._time_limit.cancel()
        self._shell.close()
        for future in self._asked:
            if not future.done():
                future.set_exception(NotReady("this driver is no longer the leader; retry against the current leader"))

    async def trigger_checkpoint(self, kind: CheckpointKind) -> OperationStatus:
        """Raises OperationFailure."""
        done = await self._trigger(CheckpointProperties(full=kind is CheckpointKind.FULL), None)
        return OperationStatus(True, checkpoint_id=done.checkpoint_id)

    async def take_savepoint(
        self, request: SavepointRequest, taken_by: SavepointFacts | None = None
    ) -> OperationStatus:
        """Raises OperationFailure, after which the job continues. ``taken_by`` None makes no catalogue entry."""
        if request.then in (AfterSavepoint.STOP, AfterSavepoint.DRAIN):
            # An identical request while the stop is in progress joins it, regardless of its requester.
            wanted = (request.directory, request.format, request.then)
            stopping = self._stopping.get(wanted)
            if stopping is None:
                stopping = self._stopping[wanted] = self._loop.create_task(self._stop(request, taken_by))
                stopping.add_done_callback(lambda _: self._stopping.pop(wanted))
                # Its client may have disconnected, and asyncio logs an error that is never retrieved.
                stopping.add_done_callback(lambda done: done.cancelled() or done.exception())
            return await asyncio.shield(stopping)
        properties = CheckpointProperties(CheckpointType.SAVEPOINT, request.format)
        cancels = request.then is AfterSavepoint.CANCEL
        done = await self._trigger(properties, request.directory, cancels=cancels)
        try:
            await self._loop.run_in_executor(
                self._pools.own, self._submission.record.keep_savepoint, done.checkpoint_id
            )
        except StorageError as error:
            logger.warning("the next driver will not know savepoint %s: %s", done.external_path, error)
        # Before the job is cancelled: the driver may end with the job, and the entry would be missing.
        await self._catalogue(done.external_path, taken_by)
        if cancels:
            self.cancel()
        return OperationStatus(True, location=done.external_path)

    async def _trigger(
        self, properties: CheckpointProperties, directory: str | None, *, cancels: bool = False
    ) -> checkpoint_out.RequestCompleted:
        request_id = uuid.uuid4().hex
        trigger = TriggerRequested(request_id, properties, directory)
        answer = await self._ask(request_id, SavepointBeforeCancel(trigger) if cancels else trigger)
        if isinstance(answer, checkpoint_out.RequestCompleted):
            return answer
        assert isinstance(answer, checkpoint_out.RequestFailed)
        raise OperationFailure(answer.message)

    async def _catalogue(self, location: str | None, taken_by: SavepointFacts | None) -> None:
        """Adds the catalogue entry. If that fails, the savepoint is still valid."""
        if location is None or taken_by is None:
            return
        try:
            await self._loop.run_in_executor(self._pools.paths(location), record_savepoint, location, taken_by)
        except (StorageError, ValueError) as error:
            logger.warning("savepoint %s has no entry in the catalogue: %s", location, error)

    async def _stop(self, request: SavepointRequest, taken_by: SavepointFacts | None) -> OperationStatus:
        request_id = uuid.uuid4().hex
        drain = request.then is AfterSavepoint.DRAIN
        answer = await self._ask(request_id, job_on.StopRequested(request_id, drain, request.directory, request.format))
        assert isinstance(answer, job_out.StopCompleted | job_out.StopFailed)
        await self._catalogue(answer.location, taken_by)
        if isinstance(answer, job_out.StopCompleted):
            return OperationStatus(True, location=answer.location)
        suffix = "" if answer.location is None else f" (savepoint: {answer.location})"
        raise OperationFailure(answer.message + suffix)

    def _limit_time(self, status: JobStatus) -> None:
        """Schedules the stop of a job with a time limit. Its time starts when this driver first observes it running."""
        if self._time_limit is not None:
            self._time_limit.cancel()
            self._time_limit = None
        after_ms = self.configuration.get(ExecutionOptions.STOP_AFTER)
        if status is not JobStatus.RUNNING or after_ms is None or self._stop_in_time is None:
            return
        # A drill ends by itself and keeps no savepoint. If the next run continues from checkpoints, it would not find
        # the savepoint.
        if self._submission.is_drill or self.configuration.get(CheckpointingOptions.CONTINUE_IN) is not None:
            return
        if self._running_since is None:
            self._running_since = self._loop.time()
        self._time_limit = self._loop.create_task(self._stop_at(self._running_since + after_ms / 1000))

    async def _stop_at(self, due: float) -> None:
        """Stops the job at a time of the loop, and tries again after a failure, while the job runs."""
        assert self._stop_in_time is not None
        directory = self.configuration.get(CheckpointingOptions.SAVEPOINT_DIRECTORY) or self._checkpoint_directory
        await asyncio.sleep(due - self._loop.time())
        while True:
            try:
                await self._stop_in_time(self, directory)
                return
            except OperationFailure as error:
                logger.warning("job %s, whose time is over, is not stopped yet: %s", self.job_id, error)
            await asyncio.sleep(_STOP_AGAIN_S)

    async def patch_checkpoint_config(self, patch: CheckpointOverrides | None) -> EffectiveCheckpointConfig:
        """FLIP-571: persists, then applies, then returns the settings in effect. Settings that are not given stay.

        None drops all overrides. Raises UpdateInProgress, JobTerminated, and InvalidRequest for values that only clash
        with the job's other settings.
        """
        answer = await self._change(PatchRequested(uuid.uuid4().hex, patch))
        match answer.outcome:
            case ChangeOutcome.BUSY:
                raise UpdateInProgress(self.job_id)
            case ChangeOutcome.REFUSED:
                raise InvalidRequest(
                    "checkpoint configuration", answer.message, "values that are consistent with each other"
                )
            case ChangeOutcome.NOT_STORED:
                raise NotReady(answer.message)
        crash_point("patch-applied")
        return self.checkpoint_config()

    # --- its configuration (FLIP-530)

    @property
    def accepted_plan(self) -> JobPlan:
        """The plan that was accepted last and that the next deployment runs."""
        return self._shell.core.accepted_plan

    @property
    def overrides(self) -> CheckpointOverrides:
        """The checkpoint overrides of FLIP-571."""
        return self._shell.core.overrides

    def taken_by(self, cluster: str, requester: str | None) -> SavepointFacts:
        """What the catalogue records about a savepoint that this job takes now."""
        own = self._shell.core.accepted_plan.own
        return SavepointFacts(self.graph.name, self._submission.program_id, own.version, cluster, requester)

    def program(self) -> RunningProgram:
        submission = self._submission
        defaults = submission.defaults.without(INTERNAL_PREFIX)
        archive = program_of(self._tasks.archive, has_tables=bool(submission.graph.tables))
        return RunningProgram(archive, submission.entry, submission.arguments, defaults, self.graph)

    def check_no_drill(self, change: str) -> None:
        """Raises Conflict for a restore drill, which keeps no snapshot."""
        if self._submission.is_drill:
            raise Conflict(f"job {self.job_id} is a restore drill: {change}")

    def check_stoppable(self) -> None:
        """Raises Conflict for a job that the next run of its program continues: that would not find the savepoint."""
        directory = self._submission.configuration.get(CheckpointingOptions.CONTINUE_IN)
        if directory is not None:
            raise Conflict(
                f"job {self.job_id} is not stopped with a savepoint, because the next run of its program continues "
                f"from its last checkpoint in {directory}: wait for its end, or cancel it; its checkpoints stay"
            )

    def check_configurable(self) -> None:
        """Raises Conflict when the job is a restore drill, or its state allows no configuration change."""
        self.check_no_drill("its configuration cannot be changed")
        try:
            check_replaceable(self._shell.core.machine.state, "configuration")
        except ReplacementRefusedError as error:
            raise Conflict(str(error)) from error

    async def change_configuration(
        self, plan: JobPlan, base: JobPlan, strategy: RestartStrategy | None, *, restarts: bool
    ) -> None:
        """Persists, applies, returns when a needed restart has begun. Raises as ``Dispatcher.change_job_config``."""
        answer = await self._change(ConfigurationRequested(uuid.uuid4().hex, plan, base, restarts, strategy))
        match answer.outcome:
            case ChangeOutcome.BUSY:
                raise UpdateInProgress(self.job_id)
            case ChangeOutcome.STALE:
                raise VersionConflict(self.job_id, base.own.version, self.accepted_plan.own.version)
            case ChangeOutcome.REFUSED:
                raise ConfigurationRefused(answer.message)
            case ChangeOutcome.NOT_STORED if plan.graph.vertices != base.graph.vertices:
                raise Conflict(answer.message)  # caused by the rescale
            case ChangeOutcome.NOT_STORED:
                raise NotReady(answer.message)
        crash_point("configuration-applied")

    # --- its parallelism

    def resource_requirements(self) -> dict[str, ParallelismBounds]:
        """The bounds declared last, perhaps by a request in progress; without any, both are the parallelism."""
        return declared_bounds(self._shell.core.target_graph)

    async def rescale(self, bounds: Mapping[str, ParallelismBounds]) -> None:
        """Returns when the new parallelism is stored and the job is being deployed with it.

        An identical request while the rescale is in progress joins it, regardless of its requester.
        Raises as ``Dispatcher.update_resource_requirements``.
        """
        if self._rescaling is not None and self._rescaling[1].done():
            self._rescaling = None
        if self._rescaling is not None and self._rescaling[0] == bounds:
            rescaling = self._rescaling[1]
        else:
            rescaling = self._loop.create_task(self._rescale(bounds))
            rescaling.add_done_callback(lambda done: done.cancelled() or done.exception())  # its client may have gone
            # Later requests keep joining the one in progress; a different one is answered as busy.
            self._rescaling = self._rescaling or (bounds, rescaling)
        await asyncio.shield(rescaling)

    async def _rescale(self, bounds: Mapping[str, ParallelismBounds]) -> None:
        answer = await self._change(RescaleRequested(uuid.uuid4().hex, bounds))
        match answer.outcome:
            case ChangeOutcome.BUSY:
                raise RescaleInProgress(self.job_id)
            case ChangeOutcome.REFUSED:
                raise RequirementsRefused(answer.message)
            case ChangeOutcome.NOT_STORED:
                raise Conflict(answer.message)

    async def _change(self, change: PatchRequested | ConfigurationRequested | RescaleRequested) -> ChangeAnswered:
        """Raises the errors common to all changes: NotReady, JobTerminated, and Conflict with the job's state."""
        answer = await self._ask(change.request_id, change)
        assert isinstance(answer, ChangeAnswered)
        match answer.outcome:
            case ChangeOutcome.NOT_NOW:
                raise Conflict(answer.message)
            case ChangeOutcome.JOB_ENDED:
                raise JobTerminated(self.job_id, self._shell.core.machine.status)
            case ChangeOutcome.UNKNOWN:
                raise NotReady(answer.message)
        return answer

    async def _ask(self, request_id: str, event: JobInput) -> JobOutput:
        future: asyncio.Future[JobOutput] = self._loop.create_future()
        self._asked.add(future)
        future.add_done_callback(self._asked.discard)

        def answer(result: Result[JobOutput]) -> None:
            if future.done():  # the caller may have been cancelled
                return
            try:
                future.set_result(result())
            except Exception as error:
                future.set_exception(error)

        self._shell.ask(request_id, event, answer)
        return await future

    # --- views

    @property
    def graph(self) -> JobGraph:
        return self.view.graph

    @property
    def configuration(self) -> Configuration:
        """The configuration that was accepted last."""
        return self._shell.core.accepted_plan.configuration

    @property
    def own(self) -> OwnConfiguration:
        """The job's own configuration as accepted last."""
        return self._shell.core.accepted_plan.own

    @property
    def executions(self) -> ExecutionGraph:
        return self.view.executions

    def config_info(self) -> JobConfig:
        core = self._shell.core
        return self.view.config_info(core.accepted_plan, core.plan.own.version, overridden_options(core.overrides))

    async def processed_all(self, since: int | None) -> tuple[int, bool]:
        """Takes a checkpoint; returns its id, and whether all data of an earlier one is committed. Raises
        OperationFailure."""
        taken = (await self._trigger(CheckpointProperties(), None)).checkpoint_id
        return taken, since is not None and self._shell.progress.has_processed_all(since)

    async def progress(self) -> list[dict[str, Any]]:
        """The reports of the progress of all queries, oldest first."""
        return await asyncio.to_thread(self._shell.progress.reports)

    def checkpoint_config(self) -> EffectiveCheckpointConfig:
        return self._shell.checkpoint_config()

    def references(self) -> References:
        """The snapshots that this job needs."""
        shell = self._shell
        return References(self.job_id, self.status.value, shell.storage.directory, shell.core.referenced)

    def checkpoint_statistics(self) -> CheckpointStatsSnapshot:
        return self._shell.core.coordinator.statistics()

    def metrics(self) -> dict[str, str]:
        """Flink's names of job metrics."""
        return self.view.metrics(self.checkpoint_statistics(), self._shell.failed_reports)


def create_job_core(
    submission: JobSubmission, ids: CheckpointIdCounter, on_checkpoint: Callable[[CheckpointStats], None] | None = None
) -> JobCore:
    """The core of a new or recovered job. Raises InvalidOptionError or CheckpointConfigurationError for unusable
    values."""
    configuration, history = submission.configuration, submission.history
    settings = submitted_settings(configuration, submission.graph.transaction_timeout_ms)
    overrides = CheckpointOverrides.from_document(history.overrides)
    recovered = [entry.checkpoint for entry in history.checkpoints]
    statistics = CheckpointStatsTracker(configuration.get(JobManagerOptions.CHECKPOINT_HISTORY_SIZE), on_checkpoint)
    for checkpoint in recovered:
        # A claimed snapshot of another job was never a checkpoint of this one.
        if checkpoint.job_id == submission.job_id:
            statistics.report_recovered(checkpoint)
    return JobCore(
        JobPlan(
            submission.graph,
            configuration,
            settings,
            submission.savepoint,
            submission.claim_mode,
            submission.allow_non_restored_state,
            submission.own,
        ),
        JobMachine(subtasks_of(submission.graph), create_restart_strategy(configuration), history.next_attempt),
        CheckpointCoordinator(
            submission.job_id,
            submission.graph,
            overrides.applied_to(settings),
            ids,
            history.checkpoints,
            statistics=statistics,
            lineage=submission.place.id,
        ),
        overrides,
        history.savepoint_id,
        max(recovered, key=lambda checkpoint: checkpoint.id, default=None),
    )


# --- the host of its shell
