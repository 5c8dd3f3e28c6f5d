"""Checkpoints and savepoints: statistics, details, triggered operations and the savepoint catalogue."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, structs

from ckpt_runtime.contract import spelling
from ckpt_runtime.contract.jobs import QueueStatus, RemoteFailure
from ckpt_runtime.contract.spelling import always

# --- statistics


class CheckpointCounts(Struct, frozen=True):
    """``failed`` and ``total`` include triggers that never got an id."""

    restored: int
    total: int
    in_progress: int
    completed: int
    failed: int


Percentile = float | Literal["NaN"]


class Summary(Struct, frozen=True):
    """A measure over completed checkpoints or subtasks. Percentiles are ``"NaN"`` when nothing was recorded."""

    min: int
    max: int
    avg: int
    p50: Percentile
    p90: Percentile
    p95: Percentile
    p99: Percentile
    p999: Percentile


class TaskCheckpoint(Struct, frozen=True, kw_only=True, rename=spelling.CHECKPOINT):
    """One vertex of one checkpoint. ``id`` is that of the checkpoint."""

    id: int
    status: str
    latest_ack_ms: int
    checkpointed_size: int
    reused_size: int = 0
    state_size: int
    duration_ms: int
    alignment_buffered: int = 0
    processed_data: int = 0
    persisted_data: int = 0
    num_subtasks: int
    num_acknowledged: int


class Checkpoint(Struct, frozen=True, kw_only=True, omit_defaults=True, rename=spelling.CHECKPOINT):
    """One checkpoint or savepoint. ``status`` is IN_PROGRESS, COMPLETED or FAILED.

    Only ``checkpoint_details`` fills ``tasks``, by vertex id. Not every server reports the following fields.
    ``incremental``: the checkpoint builds upon files of completed checkpoints; it references or duplicated
    ``reused_size`` bytes of them. ``progress_size``: how much of a pending checkpoint is in storage. ``deadline_ms``:
    when a pending checkpoint would expire. ``timeout_extension_ms``: how much a rescue policy has added to its timeout.
    ``external_path`` and ``discarded`` are those of a completed checkpoint.
    """

    class_name: str = always("")
    id: int
    status: str
    is_savepoint: bool
    savepoint_format: str | None = always(None)
    incremental: bool | None = always(None)
    triggered_at_ms: int
    latest_ack_ms: int
    checkpointed_size: int
    reused_size: int = always(0)
    state_size: int
    duration_ms: int
    alignment_buffered: int = always(0)
    processed_data: int
    persisted_data: int
    num_subtasks: int
    num_acknowledged: int
    kind: str
    tasks: dict[str, TaskCheckpoint] = always({})
    timeout_extension_ms: int = 0
    external_path: str | None = None
    discarded: bool | None = None
    failed_at_ms: int | None = None
    failure_message: str | None = None
    progress_size: int | None = None
    deadline_ms: int | None = None

    def flat(self) -> dict[str, Any]:
        """The checkpoint for scripts, its tasks as a list."""
        tasks = [{"vertex_id": vertex_id, **structs.asdict(task)} for vertex_id, task in self.tasks.items()]
        return structs.asdict(self) | {"tasks": tasks, "discarded": bool(self.discarded)}


class RestoredCheckpoint(Struct, frozen=True, kw_only=True, rename=spelling.RESTORED_CHECKPOINT):
    """The snapshot from which the job's present attempt started."""

    id: int
    restored_at_ms: int
    is_savepoint: bool
    external_path: str | None = None


class LatestCheckpoints(Struct, frozen=True):
    """The latest checkpoint of each kind, None if there was none."""

    completed: Checkpoint | None = None
    savepoint: Checkpoint | None = None
    failed: Checkpoint | None = None
    restored: RestoredCheckpoint | None = None


class CheckpointStatistics(Struct, frozen=True):
    """``/jobs/:jobid/checkpoints``. ``summary`` is by measure; ``history`` is newest first."""

    counts: CheckpointCounts
    summary: dict[str, Summary]
    latest: LatestCheckpoints
    history: tuple[Checkpoint, ...]

    @property
    def latest_completed(self) -> Checkpoint | None:
        return self.latest.completed

    @property
    def latest_savepoint(self) -> Checkpoint | None:
        return self.latest.savepoint

    @property
    def latest_failed(self) -> Checkpoint | None:
        return self.latest.failed

    @property
    def latest_restored(self) -> RestoredCheckpoint | None:
        return self.latest.restored

    def flat(self) -> dict[str, Any]:
        """The statistics for scripts: the latest checkpoints are fields of their own, not nested."""
        own = structs.asdict(self)
        latest: LatestCheckpoints = own.pop("latest")
        return own | {f"latest_{kind}": found for kind, found in structs.asdict(latest).items()}

    @property
    def completed(self) -> tuple[Checkpoint, ...]:
        """All completed checkpoints and savepoints in the answer, oldest first.

        The latest ones are included even if a short history no longer contains them.
        """
        latest = (self.latest.completed, self.latest.savepoint)
        shown = [*self.history, *(item for item in latest if item is not None)]
        found = {item.id: item for item in shown if item.status == "COMPLETED"}
        return tuple(found[number] for number in sorted(found))


class RetainedCheckpoint(Struct, frozen=True, rename=spelling.RETAINED_CHECKPOINT):
    """A checkpoint that outlives its job."""

    id: int
    external_path: str | None
    triggered_at_ms: int


class CanceledJob(Struct, frozen=True, rename="kebab"):
    """The answer to a cancellation that retains checkpoints; None if there is none yet."""

    retained_checkpoint: RetainedCheckpoint | None


# --- one vertex of a checkpoint, by subtask


class Phases(Struct, frozen=True, rename=spelling.PHASES):
    """Durations of the two parts of a snapshot."""

    synchronous: int
    asynchronous: int


class Alignment(Struct, frozen=True):
    """The cost of an alignment: the bytes that it buffered, processed and persisted, and its duration."""

    buffered: int
    processed: int
    persisted: int
    duration: int


class CompletedSubtask(
    Struct, frozen=True, kw_only=True, tag_field="className", tag="completed", rename=spelling.SUBTASK_CHECKPOINT
):
    """A subtask that has reported. ``aborted``: it did not acknowledge before the checkpoint ended."""

    index: int
    ack_timestamp: int
    checkpointed_size: int
    state_size: int
    duration_ms: int
    checkpoint: Phases
    alignment: Alignment
    start_delay: int
    unaligned_checkpoint: bool
    aborted: bool
    status: Literal["completed"] = "completed"


class PendingSubtask(Struct, frozen=True, tag_field="className", tag="pending"):
    """A subtask that has not reported."""

    index: int
    status: Literal["pending_or_failed"] = "pending_or_failed"


class PhaseSummaries(Struct, frozen=True, rename=spelling.PHASES):
    """As :class:`Phases`, over subtasks."""

    synchronous: Summary
    asynchronous: Summary


class AlignmentSummaries(Struct, frozen=True):
    """As :class:`Alignment`, over subtasks."""

    buffered: Summary
    processed: Summary
    persisted: Summary
    duration: Summary


class SubtaskSummary(Struct, frozen=True, kw_only=True, rename=spelling.SUBTASK_CHECKPOINT):
    """Each measure, summarised over the subtasks that have acknowledged."""

    checkpointed_size: Summary
    state_size: Summary
    duration_ms: Summary
    checkpoint_duration: PhaseSummaries
    alignment: AlignmentSummaries
    start_delay: Summary


class VertexCheckpoint(TaskCheckpoint, frozen=True, kw_only=True, rename=spelling.CHECKPOINT):
    """``/jobs/:jobid/checkpoints/details/:checkpointid/subtasks/:vertexid``."""

    summary: SubtaskSummary
    subtasks: tuple[CompletedSubtask | PendingSubtask, ...]


# --- operations


class Triggered(Struct, frozen=True, rename="kebab"):
    """The id under which a triggered operation is polled."""

    request_id: str


class OperationOutcome(Struct, frozen=True, kw_only=True, omit_defaults=True, rename=spelling.OPERATION_OUTCOME):
    """The outcome of a completed operation; a failed one is completed, too. A disposal has no fields."""

    location: str | None = None
    checkpoint_id: int | None = None
    checkpoint_failure: RemoteFailure | None = None
    savepoint_failure: RemoteFailure | None = None


class OperationStatus(Struct, frozen=True, rename=spelling.OPERATION):
    """An asynchronous operation. A savepoint results in a ``location``, a checkpoint in a ``checkpoint_id``."""

    queue: QueueStatus
    outcome: OperationOutcome | None = None

    @property
    def done(self) -> bool:
        return self.queue.done

    @property
    def location(self) -> str | None:
        return None if self.outcome is None else self.outcome.location

    @property
    def checkpoint_id(self) -> int | None:
        return None if self.outcome is None else self.outcome.checkpoint_id

    @property
    def failure(self) -> RemoteFailure | None:
        return None if self.outcome is None else self.outcome.checkpoint_failure or self.outcome.savepoint_failure

    def flat(self) -> dict[str, Any]:
        """The status for scripts, without the nesting."""
        return {name: getattr(self, name) for name in ("done", "location", "checkpoint_id", "failure")}


# --- the savepoint catalogue


class SavepointMark(Struct, frozen=True, kw_only=True, rename=spelling.kebab()):
    """The result of a verification or a restore drill."""

    timestamp: int
    passed: bool
    by: str | None = None
    detail: str = ""
    duration_ms: int | None = None


class Savepoint(Struct, frozen=True, kw_only=True, rename=spelling.SAVEPOINT):
    """One savepoint. ``problem`` is the reason why it is not ``good``. A value of None means unknown.

    ``verified`` and ``drilled`` are the newest marks of their kind. Flink has no catalogue of savepoints.
    """

    location: str
    good: bool
    problem: str | None = None
    job_id: str | None = None
    job_name: str | None = None
    lineage: str | None = None
    program: str | None = None
    configuration_version: int | None = None
    savepoint_id: int | None = None
    taken_by: str | None = None
    cluster: str | None = None
    trigger_timestamp: int | None = None
    completion_timestamp: int | None = None
    duration_ms: int | None = None
    size: int | None = None
    files: int | None = None
    format: str | None = None
    state_backend: str | None = None
    written_by: str | None = None
    verified: SavepointMark | None = None
    drilled: SavepointMark | None = None
    verifications: tuple[SavepointMark, ...] = ()
    drills: tuple[SavepointMark, ...] = ()


class UnreadableSavepoint(Savepoint, frozen=True, kw_only=True, omit_defaults=True, rename=spelling.SAVEPOINT):
    """A savepoint of which only location and problem are known; the answer has no other fields."""


class SavepointList(Struct, frozen=True):
    """``/savepoints``: the savepoints below ``directory``, the latest first."""

    directory: str
    savepoints: tuple[Savepoint, ...]


class UnreadDirectory(Struct, frozen=True):
    """A directory that cannot be listed now."""

    directory: str
    problem: str


class KnownSavepoints(Struct, frozen=True):
    """``/savepoints/known``: the savepoints below every directory known to the session, the latest first."""

    directories: tuple[str, ...]
    unread: tuple[UnreadDirectory, ...]
    savepoints: tuple[Savepoint, ...]
