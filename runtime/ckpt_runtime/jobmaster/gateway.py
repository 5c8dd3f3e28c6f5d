"""The interface between the REST layer and the dispatcher, as one protocol.

The dispatcher implements :class:`DispatcherGateway`; REST handlers know nothing else of the job manager. The values are
in ``gateway_values``, with their units, and in the modules of the requests; the errors are in ``gateway_errors``.
No module in this room below the dispatcher imports this one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from ckpt_runtime.checkpoint.overrides import CheckpointOverrides
from ckpt_runtime.checkpoint.properties import SavepointFormat
from ckpt_runtime.checkpoint.statistics import CheckpointStats, CheckpointStatsSnapshot
from ckpt_runtime.jobmaster.configuration_requests import ConfigurationAnswer, ConfigurationRequest
from ckpt_runtime.jobmaster.event_log import EventLog
from ckpt_runtime.jobmaster.flame_graphs import StackSamples
from ckpt_runtime.jobmaster.gateway_values import (
    ANY_JOB,
    CheckpointKind,
    ClusterOverview,
    DashboardConfig,
    EffectiveCheckpointConfig,
    ExceptionHistory,
    ExecutionResult,
    HoldRequest,
    JobConfigInfo,
    JobDetails,
    JobOverview,
    KnownSavepoints,
    MetricSeries,
    OperationKind,
    OperationStatus,
    Precondition,
    RunRequest,
    SavepointList,
    SlotOverview,
    StoredPipeline,
    VertexPressure,
)
from ckpt_runtime.jobmaster.restore_preview import PlanPreview
from ckpt_runtime.process_figures import ProcessFigures
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.scheduler.replacement import ParallelismBounds
from ckpt_runtime.snapshots.catalogue import CataloguedSavepoint
from ckpt_runtime.storage.held_upgrades import HeldUpgrade
from ckpt_runtime.storage.savepoint_entry import Mark, MarkKind
from ckpt_runtime.thread_dump import ThreadInfo


class DispatcherGateway(Protocol):
    """The job manager as REST sees it. Any method may raise :class:`NotReady`; the others are named."""

    async def cluster_overview(self) -> ClusterOverview: ...

    async def slot_agents(self) -> tuple[SlotOverview, ...]:
        """Lists the slot agents that have been started, oldest first."""
        ...

    async def dashboard_config(self) -> DashboardConfig: ...

    async def cluster_configuration(self) -> Mapping[str, str]:
        """Gives the cluster's options, secrets already masked."""
        ...

    async def process_figures(self) -> ProcessFigures:
        """Memory and processor time of the driver."""
        ...

    async def thread_dump(self, slot_id: str | None) -> tuple[ThreadInfo, ...]:
        """Dumps the threads of a slot's worker; those of the driver for None.

        Raises :class:`NotFound` for an unknown slot, :class:`NotReady` when the worker does not answer.
        """
        ...

    async def recent_log(self, slot_id: str | None) -> str:
        """Returns the last log lines of a slot's worker; of the driver for None. Raises as :meth:`thread_dump`."""
        ...

    async def event_log(self) -> EventLog:
        """The events of this session since it became the leader."""
        ...

    async def shutdown_cluster(self) -> None:
        """Start an orderly shutdown of the session; returns at once. Jobs are suspended and their state is kept."""
        ...

    async def store_pipeline(self, filename: str, content: AsyncIterator[bytes]) -> StoredPipeline:
        """Keep an uploaded ``.py`` or ``.zip``. The stored name is the server's; ``filename`` is shown only.

        Raises :class:`InvalidRequest` when the content is not such an archive.
        """
        ...

    async def list_pipelines(self) -> tuple[StoredPipeline, ...]: ...

    async def delete_pipeline(self, pipeline_id: str) -> None:
        """Raises :class:`PipelineNotFound`, and :class:`PipelineInUse` while it is held."""
        ...

    async def hold_pipeline(self, pipeline_id: str, owner: str) -> StoredPipeline:
        """Keep a pipeline, also for the next driver, until its owner releases it; repeating the call is fine.

        A deleted pipeline is restored from a job that runs it. Raises :class:`PipelineNotFound`.
        """
        ...

    async def release_pipeline(self, pipeline_id: str, owner: str) -> None:
        """End a hold. Does nothing for a pipeline that is unknown or that the owner does not hold."""
        ...

    async def plan_pipeline(self, request: RunRequest) -> PlanPreview:
        """Shows what :meth:`run_pipeline` would run, and how the snapshot fits; starts nothing.

        Raises :class:`PipelineNotFound`, :class:`InvalidRequest`, and :class:`SubmissionFailed` for a pipeline or a
        snapshot that cannot be evaluated.
        """
        ...

    async def run_pipeline(self, request: RunRequest) -> str:
        """Returns the job id once the plan is checked and stored.

        Raises :class:`PipelineNotFound`, :class:`InvalidRequest`, :class:`SubmissionFailed`,
        :class:`JobAlreadyExists`, and :class:`NotReady` when storage fails: then nothing is left behind.
        """
        ...

    async def retire_job_id(self, job_id: str) -> None:
        """Prevent any later start of a job with this id, also by a delayed request; repeating the call is fine.

        Raises ``Conflict`` while a job of this id has not ended.
        """
        ...

    async def retired_job_ids(self) -> Mapping[str, int]:
        """Maps the retired ids to the times of retirement, in milliseconds since the epoch."""
        ...

    async def list_jobs(self) -> tuple[JobOverview, ...]:
        """Lists living and ended jobs, newest first."""
        ...

    async def job_status(self, job_id: str) -> JobStatus:
        """Raises :class:`JobNotFound`, as does every method below that takes a job id."""
        ...

    async def job_details(self, job_id: str) -> JobDetails: ...

    async def job_config(self, job_id: str) -> JobConfigInfo: ...

    async def change_job_config(self, job_id: str, request: ConfigurationRequest) -> ConfigurationAnswer:
        """FLIP-530: check, persist, apply, then return; a needed restart has begun by then.

        A request equivalent to the present configuration changes nothing, at any version. Raises
        :class:`ConfigurationRefused`, :class:`OptionsNotAllowed`, :class:`VersionConflict`, :class:`UpdateInProgress`,
        :class:`JobTerminated`, :class:`SubmissionFailed` for a pipeline that cannot be planned with it, and
        :class:`Conflict` when the job's state does not allow it.
        """
        ...

    async def job_metrics(self, job_id: str) -> Mapping[str, str]:
        """Maps Flink's names (``numberOfCompletedCheckpoints``, ``uptime``, ...) to values as text."""
        ...

    async def vertex_metrics(self, job_id: str, vertex_id: str) -> Mapping[int, Mapping[str, float]]:
        """Maps each subtask's index to its metrics by Flink's names. Raises :class:`VertexNotFound`."""
        ...

    async def task_metrics(self) -> tuple[tuple[MetricSeries, ...], int]:
        """The metrics of the subtasks of all jobs that have not ended, then those of their operators.

        At most as many values as the configured limit; the number behind them says how many were left out.
        """
        ...

    async def sampled_stacks(self, job_id: str, vertex_id: str) -> StackSamples:
        """Samples for some seconds in which code the subtasks of a vertex spend their time.

        Raises :class:`VertexNotFound`, and :class:`NotReady` when no worker answers.
        """
        ...

    async def vertex_backpressure(self, job_id: str, vertex_id: str) -> VertexPressure:
        """Raises :class:`VertexNotFound`."""
        ...

    async def exception_history(self, job_id: str, max_entries: int) -> ExceptionHistory: ...

    async def execution_result(self, job_id: str) -> ExecutionResult: ...

    async def cancel_job(
        self, job_id: str, *, retain: bool = False, condition: Precondition = ANY_JOB
    ) -> CheckpointStats | None:
        """Start cancelling. Does nothing for a CANCELED job; raises :class:`JobTerminated` if FINISHED or FAILED.

        With ``retain`` its checkpoints outlive it, whatever its options say. Returns the latest retained one; a
        checkpoint that is being completed may still follow it.
        """
        ...

    async def hold_lineage(self, job_id: str, request: HoldRequest) -> HeldUpgrade:
        """Begin an upgrade of the job's lineage, or prolong it; repeating the call is fine.

        Until its end every request that ends or starts a job of the lineage is refused unless it carries the owner.
        Raises :class:`Conflict` when another owner holds the lineage, when a job was started in the place of this one,
        and when another request is stopping it.
        """
        ...

    async def release_lineage(self, job_id: str, owner: str | None) -> None:
        """End the upgrade of an owner, or of any owner if None. Does nothing when none is in progress."""
        ...

    async def checkpoint_statistics(self, job_id: str) -> CheckpointStatsSnapshot: ...

    async def checkpoint_config(self, job_id: str) -> EffectiveCheckpointConfig: ...

    async def patch_checkpoint_config(self, job_id: str, overrides: CheckpointOverrides) -> EffectiveCheckpointConfig:
        """FLIP-571: persist, apply, then return the settings in effect. Settings that are not given stay.

        Raises :class:`UpdateInProgress`, :class:`JobTerminated`, and :class:`InvalidRequest` for values that only
        clash with the job's other settings.
        """
        ...

    async def delete_checkpoint_config_overrides(self, job_id: str) -> EffectiveCheckpointConfig:
        """Return to the submitted values. Raises :class:`UpdateInProgress`, :class:`JobTerminated`."""
        ...

    async def resource_requirements(self, job_id: str) -> Mapping[str, ParallelismBounds]:
        """The parallelism bounds by vertex id."""
        ...

    async def update_resource_requirements(
        self, job_id: str, bounds: Mapping[str, ParallelismBounds], condition: Precondition = ANY_JOB
    ) -> None:
        """Rescale a job: get the slots, take a checkpoint, persist, then apply, then return.

        Raises :class:`RequirementsRefused`, :class:`RescaleInProgress`, :class:`JobTerminated`, and :class:`Conflict`
        with the reason when the job continues unchanged.
        """
        ...

    async def default_savepoint_directory(self, job_id: str) -> str | None: ...

    async def trigger_checkpoint(self, job_id: str, kind: CheckpointKind, trigger_id: str | None) -> str:
        """Returns the trigger id: the given one, whose operation is started once only, or a new one.

        A known trigger id is answered with itself whatever the job's state is by now. Otherwise a job that has ended
        raises :class:`JobTerminated`.
        """
        ...

    async def trigger_savepoint(
        self,
        job_id: str,
        directory: str,
        savepoint_format: SavepointFormat,
        cancel_job: bool,
        trigger_id: str | None,
        requester: str | None = None,
        condition: Precondition = ANY_JOB,
    ) -> str:
        """As :meth:`trigger_checkpoint`. Directory errors show in the operation. ``requester`` names the client."""
        ...

    async def stop_with_savepoint(
        self,
        job_id: str,
        directory: str,
        savepoint_format: SavepointFormat,
        drain: bool,
        trigger_id: str | None,
        requester: str | None = None,
        condition: Precondition = ANY_JOB,
    ) -> str:
        """As :meth:`trigger_savepoint`; polled as a :attr:`OperationKind.SAVEPOINT`."""
        ...

    async def dispose_savepoint(self, path: str, trigger_id: str | None) -> str:
        """As :meth:`trigger_checkpoint`, for a path instead of a job."""
        ...

    async def operation_status(self, kind: OperationKind, trigger_id: str, job_id: str | None) -> OperationStatus:
        """Raises :class:`OperationNotFound`, also for the right trigger id with the wrong job id."""
        ...

    async def list_savepoints(self, directory: str | None, job: str | None) -> SavepointList:
        """Lists the savepoints below a directory, the latest first; only those of ``job``, an id or name, if given.

        Without a directory the configured one is used. Raises :class:`InvalidRequest`, as do the next two, and
        :class:`Conflict` for damaged savepoints.
        """
        ...

    async def known_savepoints(self, job: str | None) -> KnownSavepoints:
        """Lists the savepoints below every directory that the session or its jobs have configured or were given."""
        ...

    async def latest_savepoint(self, directory: str | None, job: str | None) -> CataloguedSavepoint:
        """Returns the latest good savepoint of that list. Raises :class:`NotFound` when there is none."""
        ...

    async def mark_savepoint(self, path: str, kind: MarkKind, mark: Mark) -> CataloguedSavepoint:
        """Records the outcome of a verification or a drill."""
        ...
