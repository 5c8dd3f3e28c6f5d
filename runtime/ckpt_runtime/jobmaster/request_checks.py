"""The checks that a request must pass before anything is begun for it, and the configuration that results from it."""

from __future__ import annotations

import json
from dataclasses import replace

from ckpt_runtime.checkpoint.channel_state_assignment import StateAssignmentError
from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.sink_state import DRILL_MARK
from ckpt_runtime.checkpoint.state_assignment import assign_states, restored_max_parallelism
from ckpt_runtime.configuration.checkpointing_options import (
    CheckpointingOptions,
    CheckpointRetention,
    RecoveryClaimMode,
    StateRecoveryOptions,
)
from ckpt_runtime.configuration.configuration import Configuration, OwnConfiguration
from ckpt_runtime.configuration.option import ConfigurationError, OptionScope
from ckpt_runtime.configuration.pipeline_options import PipelineOptions, RestartStrategyOptions, RestartStrategyType
from ckpt_runtime.configuration.registry import INTERNAL_PREFIX, RESTORE_DRILL, RESTORED_MAX_PARALLELISM, canonical_key
from ckpt_runtime.configuration.state_options import StateBackendType, StateOptions
from ckpt_runtime.configuration.validation import validate
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.jobmaster.gateway_values import InvalidRequest, RunRequest, SubmissionFailed
from ckpt_runtime.jobmaster.submission import JobSubmission
from ckpt_runtime.snapshots.positions import start_position
from ckpt_runtime.sources import StartPosition
from ckpt_runtime.storage.errors import InvalidLocationError
from ckpt_runtime.storage.filesystem import check_url
from ckpt_runtime.version import VERSION

_RECOVERY_PREFIX = "execution.state-recovery."


def given_configuration(request: RunRequest) -> Configuration:
    """Reads the options of the request. Raises SubmissionFailed with all their errors."""
    try:
        given = Configuration(request.configuration)
        if request.parallelism is not None:
            given = given.with_option(PipelineOptions.PARALLELISM, request.parallelism)
        validate(given, OptionScope.JOB)
    except ConfigurationError as error:
        raise SubmissionFailed(str(error)) from error
    check_directories(given)
    return given.with_values(_OF_DRILLS) if request.drill else given


def with_own_configuration(own: Configuration, given: Configuration) -> Configuration:
    """The request's options override those that the pipeline set. Raises SubmissionFailed for incompatible ones."""
    submitted = Configuration.merge(own, given)
    try:
        validate(submitted, OptionScope.JOB)
    except ConfigurationError as error:
        raise SubmissionFailed(str(error)) from error
    return submitted


_OF_DRILLS: dict[str, str | None] = {
    CheckpointingOptions.EXTERNALIZED_RETENTION.key: CheckpointRetention.NO_EXTERNALIZED_CHECKPOINTS.value,
    RestartStrategyOptions.TYPE.key: RestartStrategyType.NONE.value,
}
"""Options that override all others: a drill retains no checkpoints, and its first failure ends it."""


def planning_configuration(
    configuration: Configuration, savepoint: CompletedCheckpoint | None, request: RunRequest
) -> Configuration:
    """The configuration for planning, which marks a restore drill as one.

    A job that sets no max parallelism takes its snapshot's: the derived value could be a different number.
    """
    restored = {} if savepoint is None else restored_max_parallelism(savepoint)
    internal: dict[str, str | None] = {RESTORED_MAX_PARALLELISM: json.dumps(restored)} if restored else {}
    return configuration.with_values(internal | ({RESTORE_DRILL: "true"} if request.drill else {}))


def positions_of(request: RunRequest, now_ms: int) -> dict[str, StartPosition]:
    """The positions that the request sets sources to, by uid. Raises InvalidRequest."""
    if request.source_positions and request.savepoint_path is None:
        allowed = "they change a snapshot, but savepointPath names none; a new job starts where its options say"
        raise InvalidRequest("sourcePositions", dict(request.source_positions), allowed)
    found = {}
    for uid, text in request.source_positions.items():
        try:
            found[uid] = start_position(text, now_ms)
        except ValueError as error:
            raise InvalidRequest(f"sourcePositions.{uid}", text, str(error)) from None
    return found


def check_drill(request: RunRequest) -> None:
    """Checks that a restore drill names a snapshot and does not claim it. Raises InvalidRequest."""
    if request.drill and request.savepoint_path is None:
        raise InvalidRequest("savepointPath", None, "a restore drill must name the snapshot to restore")
    if request.drill and request.claim_mode is not RecoveryClaimMode.NO_CLAIM:
        raise InvalidRequest("claimMode", request.claim_mode.value, "a restore drill restores with NO_CLAIM only")


def check_planned(graph: JobGraph, request: RunRequest) -> None:
    """Checks that a drill has no real sink and other jobs no drill sink, whatever options the pipeline has set."""
    kinds = {operator.kind for vertex in graph.vertices for operator in vertex.operators}
    wrong = kinds & ({"sink", "committer"} if request.drill else {"drill_sink"})
    if wrong:
        raise SubmissionFailed(f"the plan has a {sorted(wrong)[0]}, which this kind of job must not have")


def check_no_drill(savepoint: CompletedCheckpoint, request: RunRequest) -> None:
    """Refuses a drill's checkpoint: it lacks what the real sinks have prepared, so rows would be lost."""
    operators = (operator for state in savepoint.states.values() for operator in state.operators.values())
    if any(listed.name == DRILL_MARK for operator in operators for listed in operator.lists):
        raise SubmissionFailed(f"cannot restore from {request.savepoint_path}: it is a checkpoint of a restore drill")


def check_fits(savepoint: CompletedCheckpoint, graph: JobGraph, request: RunRequest) -> None:
    """Checks that the snapshot fits the plan, before anything is started."""
    try:
        assign_states(savepoint, graph, request.allow_non_restored_state, graph.fresh_operators)
    except StateAssignmentError as error:
        raise SubmissionFailed(f"cannot restore from {request.savepoint_path}: {error}") from error


def check_backend(savepoint: CompletedCheckpoint, configuration: Configuration, request: RunRequest) -> None:
    """Checks that the backend can read the snapshot's native files. Snapshots of custom backends are not checked."""
    backend = configuration.get(StateOptions.BACKEND_TYPE)
    if savepoint.state_backend in set(StateBackendType) - {backend}:
        raise SubmissionFailed(
            f"cannot restore from {request.savepoint_path}: its keyed state has the native form of the state backend "
            f"{savepoint.state_backend!r}, but {StateOptions.BACKEND_TYPE.key} is {backend.value!r}; only a "
            "savepoint in canonical form can change the backend: 'ckpt snapshot convert' creates one from most "
            "snapshots"
        )


def check_release(savepoint: CompletedCheckpoint, request: RunRequest) -> None:
    """Refuses in-flight data of another release: its format changes; the format of state stays readable."""
    written_by = savepoint.written_by
    in_flight = any(state.has_channel_state for state in savepoint.states.values())
    if in_flight and written_by is not None and _minor(written_by) != _minor(VERSION):
        raise SubmissionFailed(
            f"cannot restore from {request.savepoint_path}: it is an unaligned checkpoint of release {written_by} "
            f"with in-flight data, but this is release {VERSION}; start the job with a release {_minor(written_by)}, "
            "take a savepoint, and restore from that"
        )


def _minor(release: str) -> str:
    return release.rpartition(".")[0]


def with_recovery_options(request: RunRequest) -> RunRequest:
    """Applies the options ``execution.state-recovery.*`` where the request itself says nothing."""
    try:
        given = Configuration(request.configuration)
        path = request.savepoint_path or given.get(StateRecoveryOptions.PATH)
        mode = given.get(StateRecoveryOptions.CLAIM_MODE)
        ignore = given.get(StateRecoveryOptions.IGNORE_UNCLAIMED_STATE)
    except ConfigurationError as error:
        raise SubmissionFailed(str(error)) from error
    return replace(
        request,
        savepoint_path=path,
        claim_mode=request.claim_mode if mode is RecoveryClaimMode.NO_CLAIM else mode,
        allow_non_restored_state=request.allow_non_restored_state or ignore,
    )


def like(request: RunRequest, other: RunRequest, own: OwnConfiguration) -> RunRequest:
    """Completes the request from ``other``, whose job has the configuration ``own`` now.

    If the request names another program, options that the other job's program set are left out. The snapshot that the
    other job started from is not taken over.
    """
    given = own.given.without(INTERNAL_PREFIX).to_dict()
    if request.pipeline_id != other.pipeline_id and len(own.notes) == own.version - 1:  # every change is known
        asked = {*map(canonical_key, other.configuration), *(key for note in own.notes for key in note.options)}
        given = {key: value for key, value in given.items() if key in asked}
    kept = {key: value for key, value in given.items() if not key.startswith(_RECOVERY_PREFIX)}
    if request.parallelism is not None or other.parallelism is not None:
        kept.pop(PipelineOptions.PARALLELISM.key, None)  # the request has a field of its own for it
    return completed_like(request, replace(other, configuration=kept))


def completed_like(request: RunRequest, other: RunRequest) -> RunRequest:
    """Fills entry point, arguments, parallelism and options of a request with ``like_job`` from the other request."""
    if request.like_job is None:
        return request
    given = set(map(canonical_key, request.configuration))
    return replace(
        request,
        entry_point=request.entry_point or other.entry_point,
        arguments=request.arguments or other.arguments,
        parallelism=request.parallelism if request.parallelism is not None else other.parallelism,
        configuration={
            **{key: value for key, value in other.configuration.items() if canonical_key(key) not in given},
            **request.configuration,
        },
    )


def check_target(directory: str) -> None:
    """Refuses an unusable target early: a job must not stop for a savepoint from which no job could resume."""
    try:
        check_url(directory)
    except InvalidLocationError as error:
        raise InvalidRequest("target-directory", directory, str(error)) from error


def check_directories(configuration: Configuration) -> None:
    """Detects an unusable checkpoint or savepoint directory at submission, not when the job is to be stopped."""
    options = CheckpointingOptions
    for option in (options.CHECKPOINTS_DIRECTORY, options.SAVEPOINT_DIRECTORY, options.CONTINUE_IN):
        directory = configuration.get(option)
        if directory is not None:
            try:
                check_url(directory)
            except InvalidLocationError as error:
                raise SubmissionFailed(f"{option.key}: {error}") from error


def checkpoint_directory(submission: JobSubmission) -> str:
    """The directory of the job's checkpoints: that in which it continues, the configured one, or the session's."""
    get = submission.configuration.get
    directory = get(CheckpointingOptions.CONTINUE_IN) or get(CheckpointingOptions.CHECKPOINTS_DIRECTORY)
    return directory or submission.default_checkpoint_directory
