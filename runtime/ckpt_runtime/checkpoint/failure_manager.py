"""Counts checkpoint failures and says when they are too many (Flink's CheckpointFailureManager). Nothing else."""

from __future__ import annotations

from ckpt_runtime.checkpoint.failure_reason import CheckpointFailureReason
from ckpt_runtime.checkpoint.properties import CheckpointProperties


class CheckpointFailureManager:
    """An id counts at most once, failures without an id always, ids up to the last success never; success resets.

    ``failed_jobs`` is how often they have been too many since the last success, over all deployments: the pause before
    the next one grows with it.
    """

    def __init__(self, tolerable_failures: int) -> None:
        self.tolerable_failures = tolerable_failures
        self._counted: set[int] = set()
        self._continuous = 0
        self._last_success = 0
        self.failed_jobs = 0

    def on_success(self, checkpoint_id: int) -> None:
        self._last_success = max(self._last_success, checkpoint_id)
        self._continuous = 0
        self.failed_jobs = 0
        self._counted.clear()

    def on_restart(self) -> None:
        """A new deployment starts with a clean count."""
        self._continuous = 0
        self._counted.clear()

    def on_failure(
        self,
        reason: CheckpointFailureReason,
        properties: CheckpointProperties,
        checkpoint_id: int | None = None,
        task_level: bool = False,
        attempt_is_running: bool = True,
    ) -> bool:
        """Counts one failure; returns whether the job must fail.

        ``task_level``: a task reported it. Savepoints are then counted too, and a synchronous one fails the job at
        once; a task's report fails the job only while that attempt runs.
        """
        if task_level and properties.is_synchronous:
            return attempt_is_running
        if not task_level and properties.is_savepoint:
            return False
        if not reason.is_counted or not self._is_new(checkpoint_id):
            return False
        self._continuous += 1
        if self._continuous <= self.tolerable_failures:
            return False
        if task_level and not attempt_is_running:
            return False
        self.on_restart()
        self.failed_jobs += 1
        return True

    def _is_new(self, checkpoint_id: int | None) -> bool:
        if checkpoint_id is None:
            return True
        if checkpoint_id <= self._last_success or checkpoint_id in self._counted:
            return False
        self._counted.add(checkpoint_id)
        return True
