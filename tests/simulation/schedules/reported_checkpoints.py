"""The coordinator's statistics, passed on to the checkers and not kept: which checkpoints began, how they ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ckpt_runtime.checkpoint.properties import CheckpointFailureReason, CheckpointType
from ckpt_runtime.checkpoint.statistics import CheckpointStatsTracker, SubtaskStats


class CheckpointListener(Protocol):
    """Hears of every checkpoint that has an id."""

    def triggered(self, checkpoint_id: int) -> None: ...

    def extended(self, checkpoint_id: int) -> None: ...

    def ended_well(self, checkpoint_id: int) -> None: ...

    def ended_badly(self, checkpoint_id: int, message: str) -> None: ...


class ReportedCheckpoints(CheckpointStatsTracker):
    """Keeps nothing, which is what a simulation of thousands of schedules can afford."""

    def __init__(self, listener: CheckpointListener) -> None:
        super().__init__()
        self._listener = listener

    def report_pending(
        self,
        checkpoint_id: int,
        trigger_timestamp: int,
        checkpoint_type: CheckpointType,
        savepoint_format: str | None,
        parallelism: Mapping[str, int],
        deadline_timestamp: int,
    ) -> None:
        self._listener.triggered(checkpoint_id)

    def report_subtask(self, checkpoint_id: int, vertex_id: str, stats: SubtaskStats) -> None:
        """Not of interest here."""

    def report_deadline(self, checkpoint_id: int, deadline_timestamp: int) -> None:
        """Not of interest here."""

    def report_extension(self, checkpoint_id: int, timeout_extension: int) -> None:
        self._listener.extended(checkpoint_id)

    def report_completed(self, checkpoint_id: int, external_path: str) -> None:
        self._listener.ended_well(checkpoint_id)

    def report_discarded(self, checkpoint_id: int) -> None:
        """Not of interest here."""

    def report_failed(self, checkpoint_id: int, failure_timestamp: int, message: str) -> None:
        self._listener.ended_badly(checkpoint_id, message)

    def report_withdrawn(self, checkpoint_id: int) -> None:
        self._listener.ended_badly(checkpoint_id, CheckpointFailureReason.CHECKPOINT_DECLINED_TASK_CLOSING.message)

    def report_failed_without_id(self) -> None:
        """Who wants to hear of missing ids hears it where they are taken."""

    def report_restored(
        self, checkpoint_id: int, restore_timestamp: int, is_savepoint: bool, external_path: str | None
    ) -> None:
        """Not of interest here."""
