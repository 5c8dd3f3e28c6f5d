"""Turns an uploaded pipeline into a job graph: runs the entry point in a process of its own, never in the driver."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from ckpt_runtime.api.plan_process import PLAN_LIMITS, plan_in_process
from ckpt_runtime.api.plan_result import PlanRequest, PlanResult
from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.configuration.cluster_options import JobManagerOptions
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.frontend.analysis import ANALYZER
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.graph.schema import DocumentError
from ckpt_runtime.held_directory import HeldDirectory
from ckpt_runtime.jobmaster.gateway_errors import InvalidRequest, NotReady, SubmissionFailed
from ckpt_runtime.jobmaster.gateway_values import RunRequest
from ckpt_runtime.jobmaster.program_archive import DEFAULT_FUNCTION
from ckpt_runtime.jobmaster.program_store import StoredProgram
from ckpt_runtime.jobmaster.request_checks import (
    given_configuration,
    planning_configuration,
    with_own_configuration,
)
from ckpt_runtime.jobmaster.restore_preview import PlanPreview, RestorePreview, preview
from ckpt_runtime.jobmaster.submission import options_of_jobs
from ckpt_runtime.limited_process import LimitedProcessError, ProcessLimits
from ckpt_runtime.snapshots.preflight import judge_states
from ckpt_runtime.storage.driver_pools import DriverPools
from ckpt_runtime.storage.errors import PoolExhaustedError, StorageTimeoutError
from ckpt_runtime.structured_log import fields
from ckpt_runtime.user_environment import user_environment

T = TypeVar("T")
logger = logging.getLogger(__name__)

MOST_ANALYSES = 200
"""Maximum number of questions that the planning of one program may ask Spark; each is a run of the program."""


@dataclass(frozen=True, slots=True)
class RunningProgram:
    """A job's program: the zip of the pipeline's files, its entry and arguments, and the cluster's default options."""

    archive: bytes
    entry: str
    arguments: tuple[str, ...]
    defaults: Configuration


@dataclass(frozen=True, slots=True)
class Planner:
    """``cluster`` is the session's configuration, whose options are defaults for those of pipelines."""

    cluster: Configuration
    pools: DriverPools

    @property
    def limits(self) -> ProcessLimits:
        """The limits of a process that runs a pipeline function."""
        return ProcessLimits(
            time_s=self.cluster.get(JobManagerOptions.PLANNING_TIMEOUT) / 1000,
            memory_bytes=self.cluster.get(JobManagerOptions.PLANNING_MEMORY),
            answer_bytes=PLAN_LIMITS.answer_bytes,
        )

    async def plan(
        self, program: StoredProgram, request: RunRequest, configuration: Configuration
    ) -> tuple[JobGraph, Configuration]:
        """Returns the graph and the options that the pipeline's code set. ``configuration`` was given at submission."""
        return _parts(await self._result(program, request, configuration))

    async def _result(self, program: StoredProgram, request: RunRequest, configuration: Configuration) -> PlanResult:
        return await self.in_directory(
            lambda directory: self._planned(self.order(directory, program, request, configuration))
        )

    def _planned(self, order: PlanRequest) -> PlanResult:
        result = plan_in_process(order, self.limits, user_environment())
        while result.needed:
            if len(order.analyses) >= MOST_ANALYSES:
                raise SubmissionFailed(
                    f"the pipeline {order.entry} asks Spark more than {MOST_ANALYSES} questions while it is planned"
                )
            try:
                order.analyses.update(ANALYZER.answer(result.needed))
            except DocumentError as error:
                raise SubmissionFailed(f"the pipeline {order.entry} cannot be planned: {error}") from error
            result = plan_in_process(order, self.limits, user_environment())
        if result.failure is not None:
            trace = f"\n{result.failure.traceback}" if result.failure.traceback else ""
            raise SubmissionFailed(f"the pipeline {order.entry} cannot be planned: {result.failure}{trace}")
        for warning in result.warnings:
            logger.warning("pipeline %s: %s", order.entry, warning, extra=fields(entry=order.entry))
        return result

    async def plan_again(self, program: RunningProgram, configuration: Configuration) -> tuple[JobGraph, Configuration]:
        """As :meth:`plan`, for a running job, with another configuration."""

        def plan(directory: str) -> PlanResult:
            archive = Path(directory, "archive.zip")
            archive.write_bytes(program.archive)
            defaults, files = options_of_jobs(program.defaults), str(Path(directory, "files"))
            given = configuration.to_dict()
            order = PlanRequest(files, program.entry, program.arguments, given, defaults, archive=str(archive))
            return self._planned(order)

        return _parts(await self.in_directory(plan))

    async def preview(
        self, program: StoredProgram, request: RunRequest, snapshot: CompletedCheckpoint | None
    ) -> PlanPreview:
        """Shows what a submission would run and how the snapshot fits. Raises as a submission, except for a misfit."""
        given = given_configuration(request)
        planned = planning_configuration(given, snapshot, request)
        result = await self._result(program, request, planned)
        graph, own = _parts(result)
        configuration = Configuration.merge(self.cluster, with_own_configuration(own, given))
        if snapshot is None:
            return PlanPreview(graph, warnings=result.warnings)
        restored = snapshot

        def compare(directory: str) -> RestorePreview:
            order = replace(self.order(directory, program, request, planned), analyses=dict(graph.analyses))
            try:
                states = judge_states(order, restored, self.limits, user_environment())
            except (LimitedProcessError, DocumentError) as error:
                raise SubmissionFailed(f"the pipeline's state cannot be compared with the snapshot: {error}") from error
            return preview(restored, graph, configuration, request, states)

        return PlanPreview(graph, await self.in_directory(compare), result.warnings)

    def order(
        self, directory: str, program: StoredProgram, request: RunRequest, configuration: Configuration
    ) -> PlanRequest:
        """The request to a planning process, which unpacks the archive into ``directory``."""
        defaults = options_of_jobs(self.cluster)
        given = configuration.to_dict()
        entry = entry_of(program, request)
        return PlanRequest(directory, entry, request.arguments, given, defaults, archive=str(program.archive))

    async def in_directory(self, call: Callable[[str], T]) -> T:
        """Calls in the pool for plans, with a directory that is deleted afterwards."""

        def inside() -> T:
            with HeldDirectory("ckpt-plan-") as directory:
                return call(directory)

        try:
            return await asyncio.get_running_loop().run_in_executor(self.pools.planning, inside)
        except (PoolExhaustedError, StorageTimeoutError) as error:
            raise NotReady(str(error)) from error


def _parts(result: PlanResult) -> tuple[JobGraph, Configuration]:
    assert result.job_graph is not None
    return result.job_graph, Configuration(result.own_configuration)


def entry_of(program: StoredProgram, request: RunRequest) -> str:
    """The entry point to run. Raises :class:`InvalidRequest` when it has to be named and is not."""
    entry = request.entry_point or program.default_entry
    if entry is None:
        known = ", ".join(program.description.entry_points) or "the archive's modules"
        raise InvalidRequest("entryClass", None, f"name the entry point as 'module:{DEFAULT_FUNCTION}', one of {known}")
    return entry
