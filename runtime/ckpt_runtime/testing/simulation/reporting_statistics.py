"""The coordinator's statistics, told to the checkers instead of being kept: what began and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ckpt_runtime.checkpoint.statistics import CheckpointType, SubtaskStats
from ckpt_runtime.checkpoint.statistics_tracker import CheckpointStatsTracker

if TYPE_CHECKING:
    from ckpt_runtime.testing.simulation.driver_checker import DriverChecker


class ReportingStatistics(CheckpointStatsTracker):
    """Keeps nothing, which is what a simulation of thousands of schedules can afford."""

    def __init__(self, checker: DriverChecker) -> None:
        super().__init__()
        self._checker = checker

    def report_pending(
        self,
        checkpoint_id: int,
        trigger_timestamp: int,
        checkpoint_type: CheckpointType,
        savepoint_format: str | None,
        parallelism: Mapping[str, int],
        deadline_timestamp: int,
    ) -> None:
        self._checker.triggered(checkpoint_id)

    def report_subtask(self, checkpoint_id: int, vertex_id: str, stats: SubtaskStats) -> None:
        """Not of interest here."""

    def report_deadline(self, checkpoint_id: int, deadline_timestamp: int) -> None:
        """Not of interest here."""

    def report_completed(self, checkpoint_id: int, external_path: str) -> None:
        self._checker.ended_well(checkpoint_id)

    def report_discarded(self, checkpoint_id: int) -> None:
        """Not of interest here."""

    def report_failed(self, checkpoint_id: int, failure_timestamp: int, message: str) -> None:
        self._checker.ended_badly(checkpoint_id, message)

    def report_failed_without_id(self) -> None:
        """The checker hears of missing ids from where they are taken."""

    def report_restored(
        self, checkpoint_id: int, restore_timestamp: int, is_savepoint: bool, external_path: str | None
    ) -> None:
        """Not of interest here."""
