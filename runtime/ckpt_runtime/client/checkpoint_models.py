"""Checkpoint statistics and configuration as plain frozen values; see :mod:`ckpt_runtime.client.models`."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field, structs, to_builtins

from ckpt_runtime.client.models import read

PERIODIC_OFF = 2**63 - 1


class CheckpointCounts(Struct, frozen=True):
    """``failed`` and ``total`` include triggers that never got an id."""

    restored: int
    total: int
    in_progress: int
    completed: int
    failed: int


class TaskCheckpoint(Struct, frozen=True):
    """One vertex of one checkpoint."""

    vertex_id: str
    status: str
    latest_ack_ms: int = field(name="latest_ack_timestamp")
    state_size: int
    checkpointed_size: int
    duration_ms: int = field(name="end_to_end_duration")
    num_subtasks: int
    num_acknowledged: int = field(name="num_acknowledged_subtasks")


class Checkpoint(Struct, frozen=True, kw_only=True):
    """One checkpoint or savepoint. ``status`` is IN_PROGRESS, COMPLETED or FAILED.

    Only ``checkpoint_details`` fills ``tasks``. Not every server reports the following fields. ``incremental``: the
    checkpoint builds upon files of completed checkpoints; it references or duplicated ``reused_size`` bytes of them.
    ``progress_size``: how much of a pending checkpoint is in storage. ``deadline_ms``: when a pending checkpoint would
    expire. ``timeout_extension_ms``: how much a rescue policy has added to its timeout.
    """

    id: int
    status: str
    kind: str = field(name="checkpoint_type")
    is_savepoint: bool
    savepoint_format: str | None = field(name="savepointFormat", default=None)
    triggered_at_ms: int = field(name="trigger_timestamp")
    latest_ack_ms: int = field(name="latest_ack_timestamp")
    state_size: int
    checkpointed_size: int
    incremental: bool | None = None
    reused_size: int = 0
    progress_size: int | None = None
    duration_ms: int = field(name="end_to_end_duration")
    num_subtasks: int
    num_acknowledged: int = field(name="num_acknowledged_subtasks")
    processed_data: int
    persisted_data: int
    external_path: str | None = None
    discarded: bool = False
    failed_at_ms: int | None = field(name="failure_timestamp", default=None)
    failure_message: str | None = None
    deadline_ms: int | None = field(name="deadline_timestamp", default=None)
    timeout_extension_ms: int = field(name="timeout_extension", default=0)
    # On the wire ``tasks`` is a mapping by vertex id, which read_checkpoint converts.
    tasks: tuple[TaskCheckpoint, ...] = field(name="tasks by vertex", default=())


def read_checkpoint(document: Any) -> Checkpoint:
    """Read a checkpoint with its tasks; the key of each task becomes its vertex id."""
    tasks = [{**task, "vertex_id": key} for key, task in (document.get("tasks") or {}).items()]
    return structs.replace(read(document, Checkpoint), tasks=read(tasks, tuple[TaskCheckpoint, ...]))


class RetainedCheckpoint(Struct, frozen=True, rename="kebab"):
    """A checkpoint that outlives its job."""

    id: int
    external_path: str
    triggered_at_ms: int = field(name="trigger-timestamp")


def read_retained(document: Any) -> RetainedCheckpoint | None:
    """Read the answer to a cancellation."""
    found = document["retained-checkpoint"]
    return None if found is None else read(found, RetainedCheckpoint)


class RestoredCheckpoint(Struct, frozen=True):
    """The snapshot from which the job's present attempt started."""

    id: int
    restored_at_ms: int = field(name="restore_timestamp")
    is_savepoint: bool
    external_path: str | None = None


class CheckpointStatistics(Struct, frozen=True):
    """``summary`` maps a measure to its ``min``, ``max``, ``avg`` and percentiles; ``history`` is newest first."""

    counts: CheckpointCounts
    summary: dict[str, dict[str, Any]]
    latest_completed: Checkpoint | None
    latest_savepoint: Checkpoint | None
    latest_failed: Checkpoint | None
    latest_restored: RestoredCheckpoint | None
    history: tuple[Checkpoint, ...]

    @property
    def completed(self) -> tuple[Checkpoint, ...]:
        """All completed checkpoints and savepoints in the answer, oldest first.

        The latest ones are included even if a short history no longer contains them.
        """
        latest = (self.latest_completed, self.latest_savepoint)
        shown = [*self.history, *(item for item in latest if item is not None)]
        found = {item.id: item for item in shown if item.status == "COMPLETED"}
        return tuple(found[number] for number in sorted(found))


def read_statistics(document: Any) -> CheckpointStatistics:
    """Read the statistics; the fields below ``latest`` are moved up beside the others."""
    names = ("completed", "savepoint", "failed", "restored")
    latest = {f"latest_{name}": document["latest"].get(name) for name in names}
    return read({**document, **latest}, CheckpointStatistics)


class CheckpointConfig(Struct, frozen=True):
    """The configuration in effect.

    ``interval_ms`` is None if periodic checkpoints are off; ``overrides`` are FLIP-571's.
    """

    mode: str
    interval_ms: int | None = field(name="interval")
    timeout_ms: int = field(name="timeout")
    min_pause_ms: int = field(name="min_pause")
    max_concurrent: int
    tolerable_failed_checkpoints: int
    unaligned: bool = field(name="unaligned_checkpoints")
    aligned_timeout_ms: int = field(name="aligned_checkpoint_timeout")
    state_backend: str
    checkpoint_storage: str
    max_inflight_data_bytes: int | None = None
    overrides: tuple[str, ...] = ()
    deleted_on_cancellation: bool = True


def read_config(document: Any) -> CheckpointConfig:
    """Read the configuration; Flink uses a special number to say that there are no periodic checkpoints."""
    interval = document["interval"]
    interval = None if interval == PERIODIC_OFF else interval
    deleted = document.get("externalization", {}).get("delete_on_cancellation", True)
    return read({**document, "interval": interval, "deleted_on_cancellation": deleted}, CheckpointConfig)


class CheckpointConfigPatch(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """FLIP-571: the fields to change; a field that is None stays unchanged. Durations in milliseconds."""

    interval_ms: int | None = field(name="checkpointInterval", default=None)
    timeout_ms: int | None = field(name="checkpointTimeout", default=None)
    min_pause_ms: int | None = field(name="minPauseBetweenCheckpoints", default=None)
    max_concurrent: int | None = field(name="maxConcurrentCheckpoints", default=None)
    tolerable_failed_checkpoints: int | None = field(name="tolerableCheckpointFailureNumber", default=None)
    aligned_timeout_ms: int | None = field(name="alignedCheckpointTimeout", default=None)
    unaligned: bool | None = field(name="unalignedEnabled", default=None)
    max_inflight_data_bytes: int | None = field(name="maxInflightDataBytes", default=None)

    def to_json(self) -> dict[str, Any]:
        """The request's body: the fields that are set, by their names on the wire."""
        body: dict[str, Any] = to_builtins(self)
        return body
