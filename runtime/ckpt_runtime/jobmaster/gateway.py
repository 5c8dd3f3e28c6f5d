"""What the REST layer asks of the dispatcher, as one protocol.

The dispatcher implements :class:`DispatcherGateway`; REST handlers know nothing else of the job manager. What passes is
in ``gateway_values``, with its units, and in the modules of what is asked for; the errors are in ``gateway_errors``.
Nothing in this room below the dispatcher imports this module.
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
        """Lists those that have been started, oldest first."""
        ...

    async def dashboard_config(self) -> DashboardConfig: ...

    async def cluster_configuration(self) -> Mapping[str, str]:
        """Gives the cluster's options, secrets already masked."""
        ...

    async def thread_dump(self, slot_id: str | None) -> tuple[ThreadInfo, ...]:
        """What the threads of a slot's worker do; of the driver for None.

        Raises :class:`NotFound` for an unknown slot, :class:`NotReady` when the worker does not answer.
        """
        ...

    async def recent_log(self, slot_id: str | None) -> str:
        """The last lines of the log of a slot's worker; of the driver for None. Raises as :meth:`thread_dump`."""
        ...

    async def event_log(self) -> EventLog:
        """What happens in this session, from the moment on that it leads."""
        ...

    async def shutdown_cluster(self) -> None:
        """Start an orderly end of the session; returns at once. Running jobs are suspended, their state kept."""
        ...

    async def store_pipeline(self, filename: str, content: AsyncIterator[bytes]) -> StoredPipeline:
        """Keep an uploaded ``.py`` or ``.zip``. The stored name is the server's; ``filename`` is shown only.

        Raises :class:`InvalidRequest` when the content is no such archive.
        """
        ...

    async def list_pipelines(self) -> tuple[StoredPipeline, ...]: ...

    async def delete_pipeline(self, pipeline_id: str) -> None:
        """Raises :class:`PipelineNotFound`, and :class:`PipelineInUse` while it is held."""
        ...

    async def hold_pipeline(self, pipeline_id: str, owner: str) -> StoredPipeline:
        """Keep it, also for the next driver, until its owner releases it; again is fine.

        One that is not here any more is brought back from a job that runs it. Raises :class:`PipelineNotFound`.
        """
        ...

    async def release_pipeline(self, pipeline_id: str, owner: str) -> None:
        """One that the owner does not hold, or that is not known, is fine."""
        ...

    async def plan_pipeline(self, request: RunRequest) -> PlanPreview:
        """Says what :meth:`run_pipeline` would run, and how the snapshot fits; starts nothing.

        Raises :class:`PipelineNotFound`, :class:`InvalidRequest`, and :class:`SubmissionFailed` for a pipeline or a
        snapshot that nothing can be said of.
        """
        ...

    async def run_pipeline(self, request: RunRequest) -> str:
        """Returns the job id once the plan is checked and stored.

        Raises :class:`PipelineNotFound`, :class:`InvalidRequest`, :class:`SubmissionFailed`,
        :class:`JobAlreadyExists`, and :class:`NotReady` when storage fails: nothing is left then.
        """
        ...

    async def retire_job_id(self, job_id: str) -> None:
        """From now on no job is started with this id, by a request that is still on its way either; again is fine.

        Raises ``Conflict`` while a job of this id has not ended.
        """
        ...

    async def retired_job_ids(self) -> Mapping[str, int]:
        """The retired ids, with since when in milliseconds since the epoch."""
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
        """FLIP-530: check, persist, then apply, then return; a restart that it needs is under way then.

        What means the same as the present configuration changes nothing, at any version. Raises
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

    async def sampled_stacks(self, job_id: str, vertex_id: str) -> StackSamples:
        """In which code the subtasks of a vertex spend their time, by looking for some seconds.

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
        """Start cancelling. Nothing to do on a CANCELED job; :class:`JobTerminated` on a FINISHED or FAILED one.

        With ``retain`` its checkpoints outlive it, whatever its options say. Returns the latest that does; one that
        is being completed may still come after it.
        """
        ...

    async def hold_lineage(self, job_id: str, request: HoldRequest) -> HeldUpgrade:
        """Begin an upgrade of the job's lineage, or prolong it; the same again is fine.

        Until its end every request that ends or starts a job of the lineage is refused unless it carries the owner.
        Raises :class:`Conflict` when somebody else holds the lineage, when a job was started in the place of this one,
        and when somebody is stopping it.
        """
        ...

    async def release_lineage(self, job_id: str, owner: str | None) -> None:
        """End the upgrade of an owner, or without one whoever's it is; none is fine."""
        ...

    async def checkpoint_statistics(self, job_id: str) -> CheckpointStatsSnapshot: ...

    async def checkpoint_config(self, job_id: str) -> EffectiveCheckpointConfig: ...

    async def patch_checkpoint_config(self, job_id: str, overrides: CheckpointOverrides) -> EffectiveCheckpointConfig:
        """FLIP-571: persist, then apply, then return what holds now. What is not given stays as it is.

        Raises :class:`UpdateInProgress`, :class:`JobTerminated`, and :class:`InvalidRequest` for values that only
        clash with the job's other settings.
        """
        ...

    async def delete_checkpoint_config_overrides(self, job_id: str) -> EffectiveCheckpointConfig:
        """Return to the submitted values. Raises :class:`UpdateInProgress`, :class:`JobTerminated`."""
        ...

    async def resource_requirements(self, job_id: str) -> Mapping[str, ParallelismBounds]:
        """By vertex id."""
        ...

    async def update_resource_requirements(
        self, job_id: str, bounds: Mapping[str, ParallelismBounds], condition: Precondition = ANY_JOB
    ) -> None:
        """Rescale a job: get the slots, take a checkpoint, persist, then apply, then return.

        Raises :class:`RequirementsRefused`, :class:`RescaleInProgress`, :class:`JobTerminated`, and :class:`Conflict`
        with the reason when the job goes on as it was.
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
        """As :meth:`trigger_checkpoint`. Problems with the directory show in the operation. ``requester``: who asks."""
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
        """As :meth:`trigger_checkpoint`, for a path and no job."""
        ...

    async def operation_status(self, kind: OperationKind, trigger_id: str, job_id: str | None) -> OperationStatus:
        """Raises :class:`OperationNotFound`, also for the right trigger id with the wrong job id."""
        ...

    async def list_savepoints(self, directory: str | None, job: str | None) -> SavepointList:
        """The savepoints below a directory, the latest first; of a ``job`` by its id or name.

        Without a directory it is the configured one. Raises :class:`InvalidRequest`, as do the next two, and
        :class:`Conflict` for what is damaged.
        """
        ...

    async def known_savepoints(self, job: str | None) -> KnownSavepoints:
        """The savepoints below every directory that the session or one of its jobs has for them, or was given."""
        ...

    async def latest_savepoint(self, directory: str | None, job: str | None) -> CataloguedSavepoint:
        """The latest of these that is good. Raises :class:`NotFound` when there is none."""
        ...

    async def mark_savepoint(self, path: str, kind: MarkKind, mark: Mark) -> CataloguedSavepoint:
        """Notes what came of a verification or a drill."""
        ...
