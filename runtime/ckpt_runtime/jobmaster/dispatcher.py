"""The dispatcher: accepts jobs, knows all of them, and answers the REST layer."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from ckpt_runtime.checkpoint.statistics import CheckpointStats
from ckpt_runtime.configuration.checkpointing_options import CheckpointingOptions
from ckpt_runtime.configuration.cluster_options import JobManagerOptions, RestOptions
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.contract.cluster import DashboardConfig, Features, Hardware, Resource, TaskManager
from ckpt_runtime.contract.configuration import ConfigChange
from ckpt_runtime.contract.jobs import Backpressure
from ckpt_runtime.graph.job_graph import JobVertex
from ckpt_runtime.jobmaster.configuration_updates import ConfigurationUpdates
from ckpt_runtime.jobmaster.ended_job import EndedJob
from ckpt_runtime.jobmaster.event_log import EventLog, operation_ended
from ckpt_runtime.jobmaster.executions import limited, wall_clock_ms
from ckpt_runtime.jobmaster.flame_graphs import FlameGraphs, StackSamples
from ckpt_runtime.jobmaster.gateway_values import (
    ANY_JOB,
    AfterSavepoint,
    CheckpointKind,
    ClusterOverview,
    ConfigurationRequest,
    HoldRequest,
    InvalidRequest,
    JobDetails,
    JobNotFound,
    JobOverview,
    KnownSavepoints,
    MetricSeries,
    NotReady,
    OperationKind,
    OperationStatus,
    Precondition,
    RunRequest,
    SavepointList,
    SavepointRequest,
    StoredPipeline,
    SubmissionFailed,
    VertexNotFound,
    WorkerFigures,
)
from ckpt_runtime.jobmaster.job_master import JobMaster
from ckpt_runtime.jobmaster.job_submitter import JobSubmitter
from ckpt_runtime.jobmaster.known_jobs import KnownJobs
from ckpt_runtime.jobmaster.lineages import Lineages
from ckpt_runtime.jobmaster.operations import OperationStore
from ckpt_runtime.jobmaster.planning import Planner, PlanPreview
from ckpt_runtime.jobmaster.program_store import ProgramHolds, ProgramStore
from ckpt_runtime.jobmaster.request_checks import check_target, completed_like, like, with_recovery_options
from ckpt_runtime.jobmaster.slot_pool import SlotPool
from ckpt_runtime.jobmaster.slots import EndedWorkerLog
from ckpt_runtime.jobmaster.snapshot_references import SavepointCatalogue, SnapshotReferences
from ckpt_runtime.jobmaster.submission import Submissions
from ckpt_runtime.network.control_messages import DumpThreads, ReadLog, RecentLog, ThreadDump
from ckpt_runtime.process_figures import ProcessFigures, ProcessMeter
from ckpt_runtime.processes.thread_dump import ThreadInfo, dump_threads
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.scheduler.replacement import ParallelismBounds
from ckpt_runtime.snapshots.catalogue import CataloguedSavepoint
from ckpt_runtime.snapshots.job_claims import dispose_of_snapshot
from ckpt_runtime.storage.driver_pools import DriverPools
from ckpt_runtime.storage.errors import PoolExhaustedError, StorageError, StorageTimeoutError
from ckpt_runtime.storage.ha_store import HaStore, HeldUpgrade
from ckpt_runtime.storage.leader_store import LeaderInfo
from ckpt_runtime.storage.savepoint_entry import Mark, MarkKind
from ckpt_runtime.structured_log import recent_lines
from ckpt_runtime.version import FLINK_VERSION, REVISION, VERSION

NO_SAVEPOINT = "no savepoint is taken of it, because it does not have the state of the real sinks; cancel it"


class Dispatcher:
    """The job manager as the REST layer sees it; every method runs on the driver's event loop.

    The values, with their units, and the errors are in ``gateway_values``. Any coroutine may raise
    :class:`NotReady`; methods that take a job id raise :class:`JobNotFound`. The docstrings name other errors.
    """

    def __init__(
        self,
        slots: SlotPool,
        programs: ProgramStore,
        configuration: Configuration,
        work_directory: Path,
        pools: DriverPools,
        on_shutdown: Callable[[], None],
        *,
        leads: bool = True,
    ) -> None:
        """``leads`` is false with high availability, until :meth:`take_over`."""
        self._slots = slots
        self._programs = programs
        self._configuration = configuration
        self._pools = pools
        self._on_shutdown = on_shutdown
        self._submissions = Submissions()
        self._events = EventLog(uuid.uuid4().hex[:16], configuration.get(RestOptions.EVENT_BUFFER_SIZE))
        self.jobs = KnownJobs(configuration, slots, pools, self._events, self._submissions, leads=leads)
        """Every job by its id; requests about one job go to it directly. See :class:`KnownJobs` for the errors."""
        self._operations = OperationStore(partial(operation_ended, self._events.publish))
        self._holds = ProgramHolds(programs, self.jobs.running_archive)
        self._planner = Planner(configuration, pools, lambda: self._submitter.default_checkpoint_directory)
        self._catalogue = SavepointCatalogue(pools.paths)
        self.jobs.create = partial(self.jobs.create, stop=self._stop_in_time)
        self._lineages = Lineages(self.jobs, pools.own, self._holds.programs)
        self._references = SnapshotReferences(
            lambda: [*self.jobs.references(), *self._lineages.pinned()], pools.paths, self.jobs.settled
        )
        self._submitter = JobSubmitter(
            self.jobs,
            programs,
            configuration,
            str(work_directory / "checkpoints"),
            pools,
            self._planner,
            self._references,
            self._lineages,
        )
        allow_list = configuration.get(JobManagerOptions.DYNAMIC_CONFIGURATION_ALLOW_LIST)
        self._configuration_updates = ConfigurationUpdates(self._planner, allow_list)
        self._flame_graphs = FlameGraphs(slots)
        self._meter = ProcessMeter()
        self._closing = False
        self.connect_port: int | None = None
        """The port of Spark Connect, once the session serves it."""
        self.shutdown_requested = False
        """Whether the leader was asked to shut down the whole cluster."""

    async def stop(self) -> None:
        """Suspends every job: their retained checkpoints and savepoints stay."""
        self._closing = True
        self.jobs.stop_retrying()
        await self._operations.stop()
        self.jobs.suspend_all(fenced=False)

    # --- high availability

    def wait_for(self, leader: LeaderInfo) -> None:
        """Records the driver that is the leader, so that errors to callers name it."""
        self.jobs.leader_elsewhere = leader

    async def take_over(self, store: HaStore) -> None:
        """This driver becomes the leader: recovers the jobs of earlier drivers. Raises StorageError for an unreadable
        directory."""
        self.jobs.leader_elsewhere = None
        self._submitter.store = store
        await self._holds.take_over(store.programs)
        await self._submissions.take_over(store.retired)
        await self._lineages.take_over(store.upgrades)
        jobs = await self.jobs.find(store)
        if self._closing:  # the leadership was lost in the meantime, or the session ends
            return
        self.jobs.take_over(jobs)
        self.jobs.leads = True

    async def lose_leadership(self) -> None:
        """Another driver leads: this one may not change anything from now on, and its session ends."""
        self.jobs.leads = False
        self._closing = True
        self.jobs.stop_retrying()
        await self._operations.stop()
        self.jobs.suspend_all(fenced=True)
        self._on_shutdown()

    # --- the cluster

    async def cluster_overview(self) -> ClusterOverview:
        statuses = Counter(job.status for job in self.jobs.newest_first())
        return ClusterOverview(self._slots.total, self._slots.available, len(self._slots.all()), statuses)

    async def slot_agents(self) -> tuple[TaskManager, ...]:
        """Lists the slot agents that have been started, oldest first."""
        epoch_ms = wall_clock_ms() - time.monotonic() * 1000
        return tuple(
            TaskManager(
                id=slot.slot_id,
                path=slot.endpoint,
                data_port=-1 if slot.worker is None else slot.worker.data_address[1],
                time_since_last_heartbeat=round(epoch_ms + slot.agent.last_heard * 1000),
                free_slots=int(slot.owner is None),
                assigned_tasks=int(slot.owner is not None),
                free_resource=Resource(cpu_cores=float(slot.owner is None)),
                hardware=Hardware(cpu_cores=len(slot.cpus)),
            )
            for slot in self._slots.all()
        )

    async def dashboard_config(self) -> DashboardConfig:
        """Returns versions and features. ``flink_version`` is the version of Flink whose REST API is served; tools
        compare it."""
        return DashboardConfig(
            refresh_interval_ms=3_000,
            timezone_name=time.tzname[0],
            timezone_offset_ms=-time.timezone * 1000,
            flink_version=FLINK_VERSION,
            flink_revision=REVISION,
            ckpt_version=VERSION,
            connect_port=self.connect_port,
            features=Features(cancel_and_retain=True),
        )

    async def cluster_configuration(self) -> Mapping[str, str]:
        """Gives the cluster's options, secrets already masked."""
        return self._configuration.displayed()

    async def process_figures(self) -> ProcessFigures:
        """Memory and processor time of the driver."""
        return self._meter.measure()

    async def worker_figures(self) -> tuple[WorkerFigures, ...]:
        """Memory and processor time of the worker of each slot."""
        return tuple(
            WorkerFigures(slot.slot_id, slot.endpoint, None if slot.worker is None else slot.worker.process)
            for slot in self._slots.all()
        )

    async def thread_dump(self, slot_id: str | None) -> tuple[ThreadInfo, ...]:
        """The threads of a slot's worker, or of the driver. Raises NotFound for an unknown slot, NotReady without an
        answer."""
        return dump_threads() if slot_id is None else (await self._slots.ask(slot_id, DumpThreads, ThreadDump)).threads

    async def recent_log(self, slot_id: str | None) -> str:
        """Returns the last log lines of a slot's worker; of the driver for None. Raises as :meth:`thread_dump`."""
        return recent_lines() if slot_id is None else (await self._slots.ask(slot_id, ReadLog, RecentLog)).text

    async def ended_worker_logs(self) -> tuple[EndedWorkerLog, ...]:
        """The last log lines of workers whose processes ended unexpectedly, the latest first; a bounded number."""
        return tuple(reversed(self._slots.ended_logs))

    async def event_log(self) -> EventLog:
        """The events of this session since it became the leader."""
        self.jobs.check_leads()
        return self._events

    async def shutdown_cluster(self) -> None:
        """Start an orderly shutdown of the session; returns at once. Jobs are suspended and their state is kept."""
        self._closing = True
        self.shutdown_requested = self.jobs.leads
        # Delayed, so that this request is still answered.
        asyncio.get_running_loop().call_later(0.1, self._on_shutdown)

    # --- pipelines

    async def store_pipeline(self, filename: str, content: AsyncIterator[bytes]) -> StoredPipeline:
        """Stores an uploaded ``.py`` or ``.zip`` under a name chosen by the server. Raises :class:`InvalidRequest` for
        others."""
        try:
            return await self._programs.store(filename, content, wall_clock_ms(), self._pools.planning)
        except (PoolExhaustedError, StorageTimeoutError) as error:
            raise NotReady(str(error)) from error

    async def stored_archive(self, pipeline_id: str) -> bytes:
        """Returns the zip of a stored pipeline. Raises :class:`PipelineNotFound`."""
        return await asyncio.to_thread(self._programs.get(pipeline_id).archive.read_bytes)

    async def list_pipelines(self) -> tuple[StoredPipeline, ...]:
        return tuple(map(self._shown, self._programs.list()))

    async def delete_pipeline(self, pipeline_id: str) -> None:
        """Raises :class:`PipelineNotFound`, and :class:`PipelineInUse` while it is held."""
        self._holds.check_unheld(pipeline_id)
        self._programs.delete(pipeline_id)

    async def hold_pipeline(self, pipeline_id: str, owner: str) -> StoredPipeline:
        """Keeps a pipeline, also for the next driver, until its owner releases it; one that was deleted and runs is
        restored. Raises :class:`PipelineNotFound`."""
        self.jobs.check_leads()
        pools = self._pools
        await self._holds.hold(pipeline_id, owner, wall_clock_ms(), pools.own, pools.planning)
        return self._shown(self._programs.get(pipeline_id).description)

    async def release_pipeline(self, pipeline_id: str, owner: str) -> None:
        """End a hold. Does nothing for a pipeline that is unknown or that the owner does not hold."""
        self.jobs.check_leads()
        await self._holds.release(pipeline_id, owner, self._pools.own)

    def _shown(self, pipeline: StoredPipeline) -> StoredPipeline:
        return replace(pipeline, holds=self._holds.of(pipeline.id))

    async def plan_pipeline(self, request: RunRequest) -> PlanPreview:
        """Shows what :meth:`run_pipeline` would run, and how the snapshot fits; starts nothing.

        Raises :class:`PipelineNotFound`, :class:`InvalidRequest`, and :class:`SubmissionFailed` for a pipeline or a
        snapshot that cannot be evaluated.
        """
        self.jobs.check_leads()
        request = with_recovery_options(self._complete(request))
        program, read = self._programs.get(request.pipeline_id), self._submitter.read_savepoint
        shown = await self._planner.preview(program, request, await read(request, only_plans=True))
        continued = await self._submitter.continued(request, Configuration(shown.graph.configuration))
        if continued is None:
            return shown
        return await self._planner.preview(program, continued, await read(continued, only_plans=True))

    async def newest_checkpoint(self, directory: str) -> str | None:
        """Returns the newest checkpoint of the program whose runs continue in a directory; None if it has none.

        Raises :class:`SubmissionFailed`, and :class:`NotReady` when storage fails.
        """
        return await self._submitter.newest_in(directory)

    async def run_pipeline(self, request: RunRequest) -> str:
        """Returns the job id once the plan is checked and stored.

        Raises :class:`PipelineNotFound`, :class:`InvalidRequest`, :class:`SubmissionFailed`,
        :class:`JobAlreadyExists`, and :class:`NotReady` when storage fails: then nothing is left behind.
        """
        self.jobs.check_leads()
        if self._closing:
            raise NotReady("the session is shutting down")
        job_id = request.job_id or uuid.uuid4().hex
        self._submissions.check_not_retired(job_id)
        known = self._submissions.known(job_id)
        # The other job may have changed or may have been removed since.
        request = self._complete(request) if known is None else completed_like(request, known)
        await self._submissions.once(job_id, with_recovery_options(request), self._submit)
        return job_id

    async def retire_job_id(self, job_id: str) -> None:
        """Prevents any later start of a job with this id. Raises ``Conflict`` while a job of this id has not ended."""
        self.jobs.check_leads()
        await self._submissions.retire(job_id, self._lives, wall_clock_ms(), self._pools.own)

    async def retired_job_ids(self) -> Mapping[str, int]:
        """Maps the retired ids to the times of retirement, in milliseconds since the epoch."""
        self.jobs.check_leads()
        return self._submissions.retired()

    def _lives(self, job_id: str) -> bool:
        try:
            return not self.jobs[job_id].status.is_globally_terminal
        except JobNotFound:
            return False

    def _complete(self, request: RunRequest) -> RunRequest:
        """The request, completed from the job that ``like_job`` names, if it names one."""
        if request.like_job is None:
            return request
        other = self.jobs[request.like_job]
        known = self._submissions.known(request.like_job)
        if known is None:
            raise SubmissionFailed(f"likeJob: the submission of job {request.like_job} is no longer known")
        return like(request, known, other.own)

    async def _submit(self, job_id: str, request: RunRequest) -> None:
        job = await self._submitter.submit(job_id, request)
        self.jobs.check_leads()
        self.jobs.add(job_id, job)

    # --- jobs

    async def list_jobs(self) -> tuple[JobOverview, ...]:
        """Lists living and ended jobs, newest first."""
        self.jobs.check_leads()
        return self.jobs.overviews()

    async def job_details(self, job_id: str) -> JobDetails:
        details = self.jobs[job_id].details()
        place = details.overview.lineage
        return replace(details, upgrade=None if place is None else self._lineages.held(place.id))

    async def hold_lineage(self, job_id: str, request: HoldRequest) -> HeldUpgrade:
        """Begins or extends an upgrade of the job's lineage; the call may be repeated.

        Until the upgrade ends, a request to end or start a job of the lineage is refused unless it names the owner.
        Raises :class:`Conflict` when another owner holds the lineage, when another job has replaced this one, and when
        another request is stopping it.
        """
        return await self._lineages.hold(self.jobs[job_id].overview(), request)

    async def release_lineage(self, job_id: str, owner: str | None) -> None:
        """Ends the upgrade of an owner, or of any owner if None. Does nothing if no upgrade is in progress."""
        await self._lineages.release(self.jobs[job_id].overview(), owner)

    async def change_job_config(self, job_id: str, request: ConfigurationRequest) -> ConfigChange:
        """FLIP-530: check, persist, apply, then return; a needed restart has begun by then.

        A request equivalent to the present configuration changes nothing, at any version. Raises
        :class:`ConfigurationRefused`, :class:`OptionsNotAllowed`, :class:`VersionConflict`, :class:`UpdateInProgress`,
        :class:`JobTerminated`, :class:`SubmissionFailed` for a pipeline that cannot be planned with it, and
        :class:`Conflict` when the job's state does not allow it.
        """
        return await self._configuration_updates.change(self.jobs[job_id].living(), request)

    async def vertex_metrics(self, job_id: str, vertex_id: str) -> Mapping[int, Mapping[str, float]]:
        """Maps each subtask's index to its metrics by Flink's names. Raises :class:`VertexNotFound`."""
        job = self.jobs[job_id]
        return job.executions.vertex_metrics(_vertex(job, vertex_id))

    async def task_metrics(self) -> tuple[tuple[MetricSeries, ...], int]:
        """The metrics of subtasks that have not ended, then of their operators, up to the limit; and how many were left
        out."""
        self.jobs.check_leads()
        jobs = [
            (job.overview(), job.executions) for job in self.jobs.newest_first() if not job.status.is_globally_terminal
        ]
        series = [one for job, executions in jobs for one in executions.series(job.job_id, job.name)]
        return limited(series, self._configuration.get(RestOptions.MAX_METRIC_SERIES))

    async def sampled_stacks(self, job_id: str, vertex_id: str) -> StackSamples:
        """Samples what the subtasks of a vertex do. Raises VertexNotFound, and NotReady when no worker answers."""
        job = self.jobs[job_id]
        vertex = _vertex(job, vertex_id)
        return await self._flame_graphs.of(job_id, job.executions.vertex_details(vertex))

    async def vertex_backpressure(self, job_id: str, vertex_id: str) -> Backpressure:
        """Raises :class:`VertexNotFound`."""
        job = self.jobs[job_id]
        return job.executions.pressure(_vertex(job, vertex_id))

    async def cancel_job(
        self, job_id: str, *, retain: bool = False, condition: Precondition = ANY_JOB
    ) -> CheckpointStats | None:
        """Start cancelling. Does nothing for a CANCELED job; raises :class:`JobTerminated` if FINISHED or FAILED.

        With ``retain`` its checkpoints outlive it, regardless of its options. Returns the latest retained one; a
        checkpoint that is being completed may still follow it.
        """
        job = self.jobs[job_id]
        self._lineages.check(job.overview(), condition)
        if job.status is not JobStatus.CANCELED:
            job.living().cancel(retain=retain)
        latest = job.checkpoint_statistics().latest_completed
        kept = not job.checkpoint_config().settings.discards_on(JobStatus.CANCELED)
        return latest if kept and latest is not None and not latest.discarded else None

    async def update_resource_requirements(
        self, job_id: str, bounds: Mapping[str, ParallelismBounds], condition: Precondition = ANY_JOB
    ) -> None:
        """Rescale a job: get the slots, take a checkpoint, persist, then apply, then return.

        Raises :class:`RequirementsRefused`, :class:`RescaleInProgress`, :class:`JobTerminated`, and :class:`Conflict`
        with the reason when the job continues unchanged.
        """
        job = self.jobs[job_id].living()
        self._lineages.check(job.overview(), condition)
        await job.rescale(bounds)

    # --- checkpoints

    async def trigger_checkpoint(self, job_id: str, kind: CheckpointKind, trigger_id: str | None) -> str:
        """Returns the trigger id: the given one, whose operation is started once only, or a new one.

        A known trigger id is returned again, in any state of the job. With a new one, a job that has ended raises
        :class:`JobTerminated`.
        """
        operation = OperationKind.CHECKPOINT
        if self._operations.knows(operation, job_id, trigger_id):
            return trigger_id or ""
        job = self.jobs[job_id].living()
        return self._operations.start(operation, job_id, trigger_id, lambda: job.trigger_checkpoint(kind))

    async def take_savepoint(self, job_id: str, request: SavepointRequest) -> str:
        """Takes a savepoint, as :meth:`trigger_checkpoint`. An unusable directory makes the operation fail."""
        operation = OperationKind.SAVEPOINT
        if self._operations.knows(operation, job_id, request.trigger_id):
            return request.trigger_id or ""
        job = self.jobs[job_id].living()
        check_target(request.directory)
        job.check_no_drill(NO_SAVEPOINT)
        self._catalogue.expect_in(request.directory)
        taken_by = job.taken_by(self._submitter.cluster, request.requester)
        if request.then is AfterSavepoint.CONTINUE:
            return self._operations.start(
                operation, job_id, request.trigger_id, lambda: job.take_savepoint(request, taken_by)
            )
        job.check_stoppable()
        self._lineages.check(job.overview(), request.condition)
        self._lineages.stopping[job_id] += 1

        async def end() -> OperationStatus:
            try:
                return await job.take_savepoint(request, taken_by)
            finally:
                self._lineages.stopping[job_id] -= 1

        return self._operations.start(operation, job_id, request.trigger_id, end)

    def _stop_in_time(self, job: JobMaster, directory: str) -> Awaitable[OperationStatus]:
        """Stops a job whose time limit has passed, see ``execution.stop-after``."""
        self._catalogue.expect_in(directory)
        taken_by = job.taken_by(self._submitter.cluster, None)
        return job.take_savepoint(SavepointRequest(directory, AfterSavepoint.STOP), taken_by)

    async def dispose_savepoint(self, path: str, trigger_id: str | None) -> str:
        """Disposes of a savepoint by its path; the trigger id is handled as by :meth:`trigger_checkpoint`."""
        operation = OperationKind.SAVEPOINT_DISPOSAL
        self.jobs.check_leads()
        if self._operations.knows(operation, None, trigger_id):
            return trigger_id or ""
        try:
            claimed = await self._references.begin_disposal(path, self._submitter.cluster)
        except PoolExhaustedError as error:
            raise NotReady(str(error)) from error
        except StorageError as error:
            failure = error
            return self._operations.start(operation, None, trigger_id, lambda: _fail(failure))
        if self._operations.knows(operation, None, trigger_id):  # an identical request has just been started
            self._references.end_disposal(claimed)
            return trigger_id or ""

        async def dispose() -> OperationStatus:
            try:
                order = partial(self._dispose, path, self._references.written(), self.jobs.settled())
                await asyncio.get_running_loop().run_in_executor(self._pools.paths(path), order)
            finally:
                self._references.end_disposal(claimed)
            return OperationStatus(True)

        return self._operations.start(operation, None, trigger_id, dispose)

    def _dispose(self, path: str, written: tuple[str, ...], ended: frozenset[str]) -> None:
        if self._submitter.store is not None:
            self._submitter.store.fence()
        dispose_of_snapshot(path, self._submitter.cluster, written, ended)

    # --- the savepoint catalogue

    async def list_savepoints(self, directory: str | None, job: str | None) -> SavepointList:
        """Lists the savepoints below a directory, the latest first; only those of ``job``, an id or name, if given.

        Without a directory the configured one is used. Raises :class:`InvalidRequest`, as do the next two, and
        :class:`Conflict` for damaged savepoints.
        """
        self.jobs.check_leads()
        return await self._catalogue.list(self._savepoint_directory(directory, job), job)

    async def known_savepoints(self, job: str | None) -> KnownSavepoints:
        """Lists the savepoints below every directory that the session or its jobs have configured or were given."""
        self.jobs.check_leads()
        option = CheckpointingOptions.SAVEPOINT_DIRECTORY
        directories = [self._configuration.get(option)]
        for known in self.jobs.newest_first():
            statistics = known.checkpoint_statistics()
            taken = [item for item in (*statistics.history, statistics.latest_savepoint) if item and item.is_savepoint]
            directories.append(known.configuration.get(option))
            directories += [(item.external_path or "").rpartition("/")[0] for item in taken]
        return await self._catalogue.known([directory for directory in directories if directory], job)

    async def latest_savepoint(
        self, directory: str | None, job: str | None, before_ms: int | None = None
    ) -> CataloguedSavepoint:
        """Returns the latest good savepoint of that list. Raises :class:`NotFound` when there is none."""
        self.jobs.check_leads()
        return await self._catalogue.latest(self._savepoint_directory(directory, job), job, before_ms)

    async def mark_savepoint(self, path: str, kind: MarkKind, mark: Mark) -> CataloguedSavepoint:
        """Records the outcome of a verification or a drill."""
        self.jobs.check_leads()
        return await self._catalogue.mark(path, kind, mark)

    def _savepoint_directory(self, directory: str | None, job: str | None) -> str:
        """The given directory, or the one configured for the latest known job of that id or name, or for all jobs."""
        if directory is not None:
            return directory
        known = (found for found in self.jobs.newest_first() if job in (found.overview().job_id, found.graph.name))
        of_job = next((found.configuration for found in known), Configuration())
        option = CheckpointingOptions.SAVEPOINT_DIRECTORY
        configured = Configuration.merge(self._configuration, of_job).get(option)
        if configured is None:
            raise InvalidRequest("directory", directory, f"name one, or set {option.key} for the job or the session")
        return configured

    async def operation_status(self, kind: OperationKind, trigger_id: str, job_id: str | None) -> OperationStatus:
        """Raises :class:`OperationNotFound`, also for a known trigger id with the id of another job."""
        self.jobs.check_leads()
        return self._operations.status(kind, job_id, trigger_id)


async def _fail(error: StorageError) -> OperationStatus:
    raise error


def _vertex(job: JobMaster | EndedJob, vertex_id: str) -> JobVertex:
    for vertex in job.graph.vertices:
        if vertex.id == vertex_id:
            return vertex
    raise VertexNotFound(vertex_id)
