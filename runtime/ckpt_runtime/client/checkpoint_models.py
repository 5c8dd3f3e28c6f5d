"""Checkpoint statistics and configuration as plain frozen values; see :mod:`ckpt_runtime.client.models`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ckpt_runtime.client.models import PERIODIC_OFF, Json


@dataclass(frozen=True, slots=True)
class CheckpointCounts:
    """``failed`` and ``total`` include triggers that never got an id."""

    restored: int
    total: int
    in_progress: int
    completed: int
    failed: int

    @classmethod
    def from_json(cls, document: Json) -> CheckpointCounts:
        return cls(**{item.name: document[item.name] for item in fields(cls)})


@dataclass(frozen=True, slots=True)
class TaskCheckpoint:
    """One vertex of one checkpoint."""

    vertex_id: str
    status: str
    latest_ack_ms: int
    state_size: int
    checkpointed_size: int
    duration_ms: int
    num_subtasks: int
    num_acknowledged: int

    @classmethod
    def from_json(cls, vertex_id: str, document: Json) -> TaskCheckpoint:
        return cls(
            vertex_id=vertex_id,
            status=document["status"],
            latest_ack_ms=document["latest_ack_timestamp"],
            state_size=document["state_size"],
            checkpointed_size=document["checkpointed_size"],
            duration_ms=document["end_to_end_duration"],
            num_subtasks=document["num_subtasks"],
            num_acknowledged=document["num_acknowledged_subtasks"],
        )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint or savepoint. ``status`` is IN_PROGRESS, COMPLETED or FAILED.

    ``tasks`` is filled by ``checkpoint_details`` alone. ``deadline_ms`` is when a pending one would expire, where
    the server tells it.
    """

    id: int
    status: str
    kind: str
    is_savepoint: bool
    savepoint_format: str | None
    triggered_at_ms: int
    latest_ack_ms: int
    state_size: int
    checkpointed_size: int
    duration_ms: int
    num_subtasks: int
    num_acknowledged: int
    processed_data: int
    persisted_data: int
    external_path: str | None = None
    discarded: bool = False
    failed_at_ms: int | None = None
    failure_message: str | None = None
    deadline_ms: int | None = None
    tasks: tuple[TaskCheckpoint, ...] = ()

    @classmethod
    def from_json(cls, document: Json) -> Checkpoint:
        return cls(
            id=document["id"],
            status=document["status"],
            kind=document["checkpoint_type"],
            is_savepoint=document["is_savepoint"],
            savepoint_format=document.get("savepointFormat"),
            triggered_at_ms=document["trigger_timestamp"],
            latest_ack_ms=document["latest_ack_timestamp"],
            state_size=document["state_size"],
            checkpointed_size=document["checkpointed_size"],
            duration_ms=document["end_to_end_duration"],
            num_subtasks=document["num_subtasks"],
            num_acknowledged=document["num_acknowledged_subtasks"],
            processed_data=document["processed_data"],
            persisted_data=document["persisted_data"],
            external_path=document.get("external_path"),
            discarded=document.get("discarded", False),
            failed_at_ms=document.get("failure_timestamp"),
            failure_message=document.get("failure_message"),
            deadline_ms=document.get("deadline_timestamp"),
            tasks=tuple(TaskCheckpoint.from_json(key, task) for key, task in (document.get("tasks") or {}).items()),
        )


@dataclass(frozen=True, slots=True)
class RestoredCheckpoint:
    """What the job's present attempt started from."""

    id: int
    restored_at_ms: int
    is_savepoint: bool
    external_path: str | None

    @classmethod
    def from_json(cls, document: Json) -> RestoredCheckpoint:
        return cls(
            document["id"], document["restore_timestamp"], document["is_savepoint"], document.get("external_path")
        )


@dataclass(frozen=True, slots=True)
class CheckpointStatistics:
    """``summary`` maps a measure to its ``min``, ``max``, ``avg`` and percentiles; ``history`` is newest first."""

    counts: CheckpointCounts
    summary: Mapping[str, Mapping[str, Any]]
    latest_completed: Checkpoint | None
    latest_savepoint: Checkpoint | None
    latest_failed: Checkpoint | None
    latest_restored: RestoredCheckpoint | None
    history: tuple[Checkpoint, ...]

    @classmethod
    def from_json(cls, document: Json) -> CheckpointStatistics:
        latest = document["latest"]
        restored = latest.get("restored")
        return cls(
            counts=CheckpointCounts.from_json(document["counts"]),
            summary=document["summary"],
            latest_completed=_optional(latest.get("completed")),
            latest_savepoint=_optional(latest.get("savepoint")),
            latest_failed=_optional(latest.get("failed")),
            latest_restored=None if restored is None else RestoredCheckpoint.from_json(restored),
            history=tuple(Checkpoint.from_json(item) for item in document["history"]),
        )


def _optional(document: Json | None) -> Checkpoint | None:
    return None if document is None else Checkpoint.from_json(document)


SETTINGS: Mapping[str, tuple[str, str]] = {
    "interval_ms": ("interval", "checkpointInterval"),
    "timeout_ms": ("timeout", "checkpointTimeout"),
    "min_pause_ms": ("min_pause", "minPauseBetweenCheckpoints"),
    "max_concurrent": ("max_concurrent", "maxConcurrentCheckpoints"),
    "tolerable_failed_checkpoints": ("tolerable_failed_checkpoints", "tolerableCheckpointFailureNumber"),
    "aligned_timeout_ms": ("aligned_checkpoint_timeout", "alignedCheckpointTimeout"),
    "unaligned": ("unaligned_checkpoints", "unalignedEnabled"),
    "max_inflight_data_bytes": ("max_inflight_data_bytes", "maxInflightDataBytes"),
}
"""Our names of settings: theirs in an answer and in a patch. A test compares them with the engine's table."""


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """What holds now. ``interval_ms`` is None when periodic checkpoints are off; ``overrides`` are FLIP-571's."""

    mode: str
    interval_ms: int | None
    timeout_ms: int
    min_pause_ms: int
    max_concurrent: int
    tolerable_failed_checkpoints: int
    unaligned: bool
    aligned_timeout_ms: int
    state_backend: str
    checkpoint_storage: str
    max_inflight_data_bytes: int | None
    overrides: tuple[str, ...]

    @classmethod
    def from_json(cls, document: Json) -> CheckpointConfig:
        known = {"max_inflight_data_bytes": None, **document}  # which Flink does not have
        settings = {attribute: known[shown] for attribute, (shown, _) in SETTINGS.items()}
        if settings["interval_ms"] == PERIODIC_OFF:
            settings["interval_ms"] = None
        return cls(
            mode=document["mode"],
            state_backend=document["state_backend"],
            checkpoint_storage=document["checkpoint_storage"],
            overrides=tuple(document.get("overrides") or ()),
            **settings,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfigPatch:
    """FLIP-571: the fields to change; None leaves one alone. Durations in milliseconds."""

    interval_ms: int | None = None
    timeout_ms: int | None = None
    min_pause_ms: int | None = None
    max_concurrent: int | None = None
    tolerable_failed_checkpoints: int | None = None
    aligned_timeout_ms: int | None = None
    unaligned: bool | None = None
    max_inflight_data_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The request's body: the fields that are set, by their names on the wire."""
        values = {name: getattr(self, attribute) for attribute, (_, name) in SETTINGS.items()}
        return {name: value for name, value in values.items() if value is not None}
