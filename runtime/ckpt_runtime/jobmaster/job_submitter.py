"""Turns a request to run a pipeline into a job: plans, checks, claims its snapshot, and stores it. Starts nothing."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.configuration import CheckpointConfigurationError
from ckpt_runtime.checkpoint.state_assignment import restored_max_parallelism
from ckpt_runtime.configuration.checkpointing_options import CheckpointingOptions, RecoveryClaimMode
from ckpt_runtime.configuration.configuration import Configuration, OwnConfiguration
from ckpt_runtime.configuration.option import ConfigurationError
from ckpt_runtime.frontend.static_tables import with_tables
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.jobmaster.executions import wall_clock_ms
from ckpt_runtime.jobmaster.gateway_values import GatewayError, NotReady, RunRequest, SubmissionFailed
from ckpt_runtime.jobmaster.job_master import JobMaster
from ckpt_runtime.jobmaster.job_record import DurableRecord, JobRecord, store_job
from ckpt_runtime.jobmaster.job_settings import with_implicit_strategy
from ckpt_runtime.jobmaster.known_jobs import KnownJobs
from ckpt_runtime.jobmaster.lineages import Lineages
from ckpt_runtime.jobmaster.planning import Planned, Planner, entry_of
from ckpt_runtime.jobmaster.program_store import ProgramStore, StoredProgram
from ckpt_runtime.jobmaster.request_checks import (
    check_backend,
    check_directories,
    check_drill,
    check_fits,
    check_no_drill,
    check_planned,
    check_release,
    checkpoint_directory,
    given_configuration,
    planning_configuration,
    positions_of,
    with_own_configuration,
)
from ckpt_runtime.jobmaster.snapshot_references import SnapshotReferences
from ckpt_runtime.jobmaster.submission import JobSubmission
from ckpt_runtime.snapshots.positions import check_positions, repositioned
from ckpt_runtime.snapshots.snapshot import newest_checkpoint, open_in_place
from ckpt_runtime.storage.claims import SESSION_PREFIX
from ckpt_runtime.storage.driver_pools import DriverPools
from ckpt_runtime.storage.errors import StorageError, StorageTimeoutError, storage_failed
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.storage.ha_store import HaStore
from ckpt_runtime.storage.metadata import snapshot_directory


class JobSubmitter:
    """Submits jobs. ``store`` is None without high availability, and until this driver leads."""

    def __init__(
        self,
        known: KnownJobs,
        programs: ProgramStore,
        configuration: Configuration,
        volatile_directory: str,
        pools: DriverPools,
        planner: Planner,
        references: SnapshotReferences,
        lineages: Lineages,
    ) -> None:
        """``volatile_directory`` is for checkpoints that no later driver needs."""
        self.store: HaStore | None = None
        self._known = known
        self._programs = programs
        self._configuration = configuration
        self._volatile_directory = volatile_directory
        self._pools = pools
        self._planner = planner
        self._references = references
        self._lineages = lineages
        self._starting: list[tuple[frozenset[str], asyncio.Future[None]]] = []
        self._session = uuid.uuid4().hex

    async def submit(self, job_id: str, request: RunRequest) -> JobMaster:
        """Returns the stored job, not started. Raises as ``Dispatcher.run_pipeline`` and leaves nothing behind, except
        that tables of Spark's catalog which the job writes may have been created, without rows.

        The caller must make the job known as soon as this returns: the next job of its lineage, or of its name where
        names are unique, is checked as soon as the loop is free.
        """
        program = self._programs.get(request.pipeline_id)
        check_drill(request)
        original, given = request, given_configuration(request)
        request, savepoint, planned = await self._planned(program, request, given)
        given = await self._checked(planned, request, given, savepoint)
        if not request.drill:
            await asyncio.get_running_loop().run_in_executor(self._pools.planning, planned.create_tables)
        store = None if request.drill else self.store  # a drill ends with its driver
        submission = JobSubmission(
            job_id=job_id,
            graph=planned.graph,
            defaults=with_implicit_strategy(self._configuration, given),
            own=OwnConfiguration(given),
            archive=with_tables(program.archive.read_bytes(), planned.tables),
            program_id=request.pipeline_id,
            entry=entry_of(program, request),
            arguments=request.arguments,
            savepoint=savepoint,
            claim_mode=request.claim_mode,
            allow_non_restored_state=request.allow_non_restored_state,
            default_checkpoint_directory=self.default_checkpoint_directory,
            request=original,
            record=JobRecord() if store is None else DurableRecord(store, job_id),
            ended_jobs=self._known.ended_before(savepoint),
        )
        if request.drill:
            return await self._accepted(submission, store)
        return await self._accepted_in_turn(submission, original, store)

    async def _planned(
        self, program: StoredProgram, request: RunRequest, given: Configuration
    ) -> tuple[RunRequest, CompletedCheckpoint | None, Planned]:
        """Plans a job from the snapshot that it starts from: the request's, or that of the program's last run.

        Returns the request with that snapshot, the snapshot if there is one, and the plan.
        """
        savepoint = await self.read_savepoint(request)
        planned = await self._planner.plan(program, request, planning_configuration(given, savepoint, request))
        continued = await self.continued(request, Configuration.merge(planned.own, given))
        if continued is None:
            return request, savepoint, planned
        savepoint = await self.read_savepoint(continued)
        if savepoint is not None and not _has_key_groups_of(planned.graph, savepoint):
            own = planning_configuration(given, savepoint, continued)
            planned = await self._planner.plan(program, continued, own, planned)
        return continued, savepoint, planned

    async def _checked(
        self, planned: Planned, request: RunRequest, given: Configuration, savepoint: CompletedCheckpoint | None
    ) -> Configuration:
        """Returns the job's own configuration. Raises SubmissionFailed for a job that cannot be started like this."""
        check_planned(planned.graph, request)
        given = with_own_configuration(planned.own, given)
        if request.drill:  # it leaves nothing behind
            given = given.without(CheckpointingOptions.CONTINUE_IN.key)
        if request.fork and given.get(CheckpointingOptions.CONTINUE_IN) is not None:
            raise SubmissionFailed(
                "a program that continues where its last run ended cannot be started with fork, because its next run "
                f"would continue from this job: give it another {CheckpointingOptions.CONTINUE_IN.key}, which is "
                f"{given.get(CheckpointingOptions.CONTINUE_IN)!r}, and no fork"
            )
        if savepoint is not None:
            fits = partial(check_fits, savepoint, planned.graph, request)
            await asyncio.get_running_loop().run_in_executor(self._pools.planning, fits)
        configuration = Configuration.merge(self._configuration, given)
        check_directories(configuration)
        if savepoint is not None:
            check_backend(savepoint, configuration, request)
            check_release(savepoint, request)
            check_no_drill(savepoint, request)
        return given

    async def _accepted_in_turn(
        self, submission: JobSubmission, request: RunRequest, store: HaStore | None
    ) -> JobMaster:
        """Accepts a job after all earlier submissions to its place: a name, or a lineage."""
        while True:
            # The place is checked again after each wait, and its keys are reserved before the next wait.
            place, keys = self._lineages.place(submission)
            before = [done for taken, done in self._starting if taken & keys]
            if not before:
                break
            # Whether an earlier submission results in a job is known only when its storage has answered.
            await asyncio.wait(before)
        turn = keys, asyncio.get_running_loop().create_future()
        self._starting.append(turn)
        try:
            await self._check_still_newest(submission, request)
            return await self._accepted(replace(submission, lineage=place), store)
        finally:
            self._starting.remove(turn)
            turn[1].set_result(None)

    async def continued(self, request: RunRequest, configuration: Configuration) -> RunRequest | None:
        """The request to start from the newest checkpoint of the program's last run; None if there is nothing to
        continue, or the request names a snapshot.

        Raises SubmissionFailed, and NotReady when storage does not answer.
        """
        directory = configuration.get(CheckpointingOptions.CONTINUE_IN)
        if directory is None or request.savepoint_path is not None or request.drill:
            return None
        newest = await self.newest_in(directory)
        return None if newest is None else replace(request, savepoint_path=newest, claim_mode=RecoveryClaimMode.CLAIM)

    async def newest_in(self, directory: str) -> str | None:
        """Returns the newest checkpoint of the program whose runs continue in a directory; None if it has none.

        Raises SubmissionFailed, and NotReady when storage does not answer.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._pools.paths(directory), newest_checkpoint, directory
            )
        except StorageError as error:
            raise _refusal(f"cannot find the last run's checkpoint in {directory}", error) from error

    async def _check_still_newest(self, submission: JobSubmission, request: RunRequest) -> None:
        """Refuses a job if another run of its program has started and ended since its snapshot was chosen."""
        directory = submission.configuration.get(CheckpointingOptions.CONTINUE_IN)
        if directory is None or request.savepoint_path is not None:
            return
        chosen = None if submission.savepoint is None else submission.savepoint.directory
        newest = await self.newest_in(directory)
        if newest != chosen:
            raise NotReady(f"another run in {directory} has ended at {newest} since this one was planned; retry")

    async def _accepted(self, submission: JobSubmission, store: HaStore | None) -> JobMaster:
        try:
            # The client names the directory: whether storage answers there is not known yet.
            directory = checkpoint_directory(submission)
            await asyncio.get_running_loop().run_in_executor(self._pools.paths(directory), resolve, directory)
            submission = await self._claimed(submission)
            job, first_checkpoint_id = await self._prepared(submission)
        except (ConfigurationError, CheckpointConfigurationError) as error:
            raise SubmissionFailed(str(error)) from error
        except StorageError as error:
            raise _refusal("the checkpoint directory cannot be used", error) from error
        if store is not None:
            call = partial(store_job, store, submission.to_stored(first_checkpoint_id), submission.archive)
            try:
                await asyncio.get_running_loop().run_in_executor(self._pools.own, call)
            except StorageTimeoutError as error:
                message = f"it is unknown whether job {submission.job_id} is stored; if it is, the next driver runs it"
                raise NotReady(f"{message}: {error}") from error
            except StorageError as error:
                raise NotReady(f"the job could not be stored: {error}") from error
        return job

    async def _claimed(self, submission: JobSubmission) -> JobSubmission:
        """With CLAIM, claims the snapshot for the job before anything is stored or started."""
        snapshot = submission.savepoint
        if snapshot is None or submission.claim_mode is not RecoveryClaimMode.CLAIM:
            return submission
        job_id, directory = submission.job_id, checkpoint_directory(submission)
        try:
            lineage = None if submission.lineage is None else submission.lineage.id
            claims = await self._references.claim(snapshot, job_id, directory, self.cluster, lineage)
        except StorageError as error:
            raise _refusal(f"cannot claim {snapshot.directory}", error) from error
        return replace(submission, savepoint=snapshot.claimed(), claims=claims)

    async def _prepared(self, submission: JobSubmission) -> tuple[JobMaster, int]:
        """Returns the job and its first checkpoint id. On an error its claims are released."""
        in_pool = asyncio.get_running_loop().run_in_executor
        try:
            job = self._known.create(submission)
            return job, await in_pool(self._pools.paths(checkpoint_directory(submission)), job.prepare_storage)
        except BaseException:
            if submission.claims is not None and submission.savepoint is not None:
                with suppress(StorageError):
                    await in_pool(self._pools.paths(submission.savepoint.directory), submission.claims.release)
            raise

    @property
    def cluster(self) -> str:
        """The cluster's name in claims."""
        return f"{SESSION_PREFIX}{self._session}" if self.store is None else self.store.root.url

    @property
    def default_checkpoint_directory(self) -> str:
        """The default directory, in which a later driver finds checkpoints too if high availability is on."""
        return self._volatile_directory if self.store is None else self.store.snapshots.url

    async def read_savepoint(self, request: RunRequest, *, only_plans: bool = False) -> CompletedCheckpoint | None:
        """The snapshot that the job starts from, if any, with the positions that the request sets sources to.

        ``only_plans``: the positions are checked and not set; the job itself may start from another snapshot.
        """
        path, positions = request.savepoint_path, positions_of(request, wall_clock_ms())
        if path is None:
            return None
        try:
            if await self._references.is_being_disposed(path):
                raise SubmissionFailed(f"cannot restore from {path}: it is being disposed of")
            found = await asyncio.get_running_loop().run_in_executor(self._pools.paths(path), _open, path)
            if only_plans:
                check_positions(found, positions)
                return found
            return repositioned(found, positions)
        except StorageError as error:
            raise _refusal(f"cannot restore from {path}", error) from error


def _has_key_groups_of(graph: JobGraph, snapshot: CompletedCheckpoint) -> bool:
    """Whether a program that was planned without a snapshot has the numbers of key groups that the snapshot needs."""
    maxima = restored_max_parallelism(snapshot)
    planned = ((node.uid, vertex.max_parallelism) for vertex in graph.vertices for node in vertex.operators)
    return all(maxima.get(uid, own) == own for uid, own in planned)


def _refusal(what: str, error: StorageError) -> GatewayError:
    """NotReady when storage failed, so that the client may retry; else SubmissionFailed."""
    return (NotReady if storage_failed(error) else SubmissionFailed)(f"{what}: {error}")


def _open(path: str) -> CompletedCheckpoint:
    """Opens the snapshot by its real path, where its claims are found, regardless of symbolic links."""
    return open_in_place(snapshot_directory(resolve(path)).real()).metadata
