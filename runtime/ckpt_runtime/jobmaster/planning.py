"""Turns an uploaded pipeline into a job graph: runs the entry point in a process of its own, never in the driver.

A preview says how a snapshot would fit the plan: the reasons for a refusal, and what would happen to each operator's
state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.configuration.cluster_options import JobManagerOptions
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.registry import DEFAULT_CHECKPOINTS_DIRECTORY
from ckpt_runtime.contract.jobs import OperatorPreview, RestorePreview, StatePreview
from ckpt_runtime.frontend.analysis import ANALYZER
from ckpt_runtime.frontend.catalog_tables import NewTables, StaticTables
from ckpt_runtime.frontend.planning_process import PLAN_LIMITS, PlanRequest, PlanResult, plan_in_process
from ckpt_runtime.frontend.typed_plan import Analysis
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.graph.schema import DocumentError
from ckpt_runtime.jobmaster.gateway_values import InvalidRequest, NotReady, RunRequest, SubmissionFailed
from ckpt_runtime.jobmaster.program_store import DEFAULT_FUNCTION, StoredProgram
from ckpt_runtime.jobmaster.request_checks import (
    check_backend,
    check_fits,
    check_release,
    given_configuration,
    planning_configuration,
    with_own_configuration,
)
from ckpt_runtime.jobmaster.submission import options_of_jobs
from ckpt_runtime.processes.held_directory import HeldDirectory
from ckpt_runtime.processes.limited_process import LimitedProcessError, ProcessLimits
from ckpt_runtime.processes.user_environment import user_environment
from ckpt_runtime.snapshots.preflight import StateVerdict, judge_states
from ckpt_runtime.storage.driver_pools import DriverPools
from ckpt_runtime.storage.errors import PoolExhaustedError, StorageTimeoutError
from ckpt_runtime.structured_log import fields

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlanPreview:
    """The graph that a submission would run, and its ``warnings``; ``restore`` when it starts from a snapshot."""

    graph: JobGraph
    restore: RestorePreview | None = None
    warnings: tuple[str, ...] = ()


def preview(
    snapshot: CompletedCheckpoint,
    graph: JobGraph,
    configuration: Configuration,
    request: RunRequest,
    states: Iterable[StateVerdict],
) -> RestorePreview:
    """Runs all checks of a submission and collects their refusals."""
    judged = tuple(states)
    refused = [f"state {each.state!r} of operator {each.operator!r}: {each.reason}" for each in judged if each.reason]
    checks = (
        partial(check_backend, snapshot, configuration, request),
        partial(check_release, snapshot, request),
        partial(check_fits, snapshot, graph, request),
    )
    for check in checks:
        try:
            check()
        except SubmissionFailed as error:
            refused.append(str(error))
    return RestorePreview(
        snapshot=snapshot.directory,
        type=snapshot.properties.type,
        format=snapshot.format,
        state_backend=snapshot.state_backend,
        fits=not refused,
        refusals=tuple(refused),
        operators=tuple(_operators(snapshot, graph)),
        states=msgspec.convert(judged, tuple[StatePreview, ...], from_attributes=True),
    )


def _operators(snapshot: CompletedCheckpoint, graph: JobGraph) -> Iterable[OperatorPreview]:
    """Yields operators with state: those of the plan in its order, then those that the plan lacks."""
    kept = {uid for state in snapshot.states.values() for uid, own in state.operators.items() if own.keyed or own.lists}
    stored = {uid: vertex for vertex in snapshot.vertices for uid in vertex.operator_uids}
    planned = set()
    for vertex in graph.vertices:
        for node in vertex.operators:
            planned.add(node.uid)
            before = stored.get(node.uid)
            if before is not None and (node.stateful or node.uid in kept):
                yield OperatorPreview(
                    node.uid, node.name, "matched", before.parallelism, vertex.parallelism, before.max_parallelism,
                    vertex.max_parallelism,
                )  # fmt: skip
            elif node.stateful:
                numbers = {"parallelism": vertex.parallelism, "max_parallelism": vertex.max_parallelism}
                yield OperatorPreview(node.uid, node.name, "new", **numbers)
    for uid in sorted(kept - planned):
        before = stored[uid]
        numbers = {"restored_parallelism": before.parallelism, "restored_max_parallelism": before.max_parallelism}
        yield OperatorPreview(uid, before.name, "dropped", **numbers)


T = TypeVar("T")
MOST_ANALYSES = 200
"""Maximum number of questions that the planning of one program may ask Spark; each is a run of the program."""
MOST_REMEMBERED, MOST_REMEMBERED_CHARACTERS = 32, 1 << 20
"""The number of programs whose answers are remembered, and the maximum size of the answers of one program."""


@dataclass(frozen=True, slots=True)
class RunningProgram:
    """A job's program: the zip of the pipeline's files, its entry and arguments, and the cluster's default options.

    ``graph`` is the one that it runs.
    """

    archive: bytes
    entry: str
    arguments: tuple[str, ...]
    defaults: Configuration
    graph: JobGraph


@dataclass(frozen=True, slots=True)
class Planned:
    """A graph, the options that the pipeline's code set, and the rows of its static tables by their digests.

    ``new_tables`` are tables of Spark's catalog that the job writes and that do not exist yet.
    """

    graph: JobGraph
    own: Configuration
    tables: Mapping[str, bytes] = field(default_factory=dict)
    new_tables: NewTables = field(default_factory=NewTables)

    def create_tables(self) -> None:
        """Creates :attr:`new_tables`. Blocks. Raises SubmissionFailed if Spark refuses one of them."""
        if self.new_tables.statements and (error := ANALYZER.create_tables(self.new_tables)):
            raise SubmissionFailed(f"a table that the job writes cannot be created: {error}")


@dataclass(slots=True)
class RememberedAnswers:
    """Spark's answers to programs that were planned before, so that planning one again needs no request.

    Each question that Spark has to answer is another run of the program. Only answers that the same Spark would give at
    any time are kept, of the programs that were planned last. Threads may share it.
    """

    _of_programs: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)

    def of(self, program: str, entry: str) -> dict[str, str]:
        """``program`` is the digest of the archive."""
        return self._of_programs.get((program, entry), {})

    def keep(self, program: str, entry: str, answers: Mapping[str, str]) -> None:
        lasting = {digest: text for digest, text in answers.items() if msgspec.json.decode(text, type=Analysis).lasts}
        others = {key: known for key, known in self._of_programs.items() if key != (program, entry)}
        kept = [*others.items()][1 - MOST_REMEMBERED :]
        if sum(map(len, lasting.values())) <= MOST_REMEMBERED_CHARACTERS:
            kept.append(((program, entry), lasting))
        self._of_programs = dict(kept)


@dataclass(frozen=True, slots=True)
class Planner:
    """``cluster`` is the session's configuration, whose options are defaults for those of pipelines.

    ``checkpoints`` returns the directory for checkpoints of jobs that configure none.
    """

    cluster: Configuration
    pools: DriverPools
    checkpoints: Callable[[], str]
    answers: RememberedAnswers = field(default_factory=RememberedAnswers)

    @property
    def limits(self) -> ProcessLimits:
        """The limits of a process that runs a pipeline function."""
        return ProcessLimits(
            time_s=self.cluster.get(JobManagerOptions.PLANNING_TIMEOUT) / 1000,
            memory_bytes=self.cluster.get(JobManagerOptions.PLANNING_MEMORY),
            answer_bytes=PLAN_LIMITS.answer_bytes,
        )

    async def plan(
        self,
        program: StoredProgram,
        request: RunRequest,
        configuration: Configuration,
        earlier: Planned | None = None,
    ) -> Planned:
        """Runs the pipeline function. ``configuration`` was given at submission.

        ``earlier`` is a plan of the same submission with another configuration, whose program has already read its
        static tables and written its output; this is not repeated.
        """
        tables = self._static_tables()
        tables.writes = True
        known: Mapping[str, str] = {}
        if earlier is not None:
            tables.files.update(earlier.tables)
            tables.new, known = earlier.new_tables, earlier.graph.analyses
        graph, own = _parts(await self._result(program, request, configuration, tables, known))
        return Planned(graph, own, {digest: tables.files[digest] for digest in graph.tables}, tables.new)

    async def _result(
        self,
        program: StoredProgram,
        request: RunRequest,
        configuration: Configuration,
        tables: StaticTables,
        known: Mapping[str, str],
    ) -> PlanResult:
        digest, entry = program.description.id.partition("_")[0], entry_of(program, request)

        def plan(directory: str) -> PlanResult:
            order = self.order(directory, program, request, configuration)
            order = replace(order, remembered=self.answers.of(digest, entry), submitted=True)
            result = self._planned(order, tables, known)
            self.answers.keep(digest, entry, order.remembered | order.analyses)
            return result

        return await self.in_directory(plan)

    def _static_tables(self) -> StaticTables:
        return StaticTables(
            self.cluster.get(JobManagerOptions.STATIC_TABLES_SIZE),
            self.cluster.get(JobManagerOptions.STATIC_TABLES_TIMEOUT) / 1000,
        )

    def _planned(self, order: PlanRequest, tables: StaticTables, known: Mapping[str, str]) -> PlanResult:
        """``known`` has Spark's answers from an earlier planning; answers with rows of static tables are reused."""
        result = plan_in_process(order, self.limits, user_environment())
        while result.needed:
            if len(order.analyses) >= MOST_ANALYSES:
                raise SubmissionFailed(
                    f"the pipeline {order.entry} sends Spark more than {MOST_ANALYSES} requests while it is planned"
                )
            try:
                order.analyses.update(ANALYZER.answer(result.needed, tables, known))
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
            defaults, files = self._defaults(program.defaults), str(Path(directory, "files"))
            given = configuration.to_dict()
            order = PlanRequest(files, program.entry, program.arguments, given, defaults, archive=str(archive))
            return self._planned(order, tables, program.graph.analyses)

        tables = self._static_tables()
        graph, own = _parts(await self.in_directory(plan))
        if graph.tables != program.graph.tables:
            raise SubmissionFailed(
                "with this change the program would read other static tables than those that are stored with the "
                "job: stop the job with a savepoint, and submit the program again with it"
            )
        return graph, own

    async def preview(
        self, program: StoredProgram, request: RunRequest, snapshot: CompletedCheckpoint | None
    ) -> PlanPreview:
        """Shows what a submission would run and how the snapshot fits. Raises as a submission, except for a misfit."""
        given = given_configuration(request)
        planned = planning_configuration(given, snapshot, request)
        result = await self._result(program, request, planned, self._static_tables(), {})
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
        defaults = self._defaults(self.cluster)
        given = configuration.to_dict()
        entry = entry_of(program, request)
        return PlanRequest(directory, entry, request.arguments, given, defaults, archive=str(program.archive))

    def _defaults(self, configuration: Configuration) -> dict[str, str]:
        return options_of_jobs(configuration) | {DEFAULT_CHECKPOINTS_DIRECTORY: self.checkpoints()}

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
    """The entry point to run. Raises :class:`InvalidRequest` when the request has to name it and does not."""
    entry = request.entry_point or program.default_entry
    if entry is None:
        known = ", ".join(program.description.entry_points) or "the archive's modules"
        raise InvalidRequest("entryClass", None, f"name the entry point as 'module:{DEFAULT_FUNCTION}', one of {known}")
    return entry
