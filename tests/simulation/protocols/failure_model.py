"""An independent account of which checkpoint failures count, and when they must fail the job.

Written from the rules alone (Flink's CheckpointFailureManager), as a second opinion on the coordinator's.
"""

from __future__ import annotations

from ckpt_runtime.checkpoint.properties import CheckpointFailureReason as Reason
from ckpt_runtime.checkpoint.properties import CheckpointProperties

_COUNTED = (
    Reason.IO_EXCEPTION,
    Reason.CHECKPOINT_ASYNC_EXCEPTION,
    Reason.CHECKPOINT_DECLINED,
    Reason.CHECKPOINT_EXPIRED,
    Reason.FINALIZE_CHECKPOINT_FAILURE,
)
# Longest first: the text of one reason may begin with another's.
_BY_TEXT = sorted(((reason.message, reason) for reason in Reason), key=lambda pair: -len(pair[0]))


def reason_of(message: str) -> Reason:
    """The reason that an abort's message begins with."""
    return next(reason for text, reason in _BY_TEXT if message.startswith(text))


class FailureModel:
    """Continuous failures of one driver. Ids count once, and not at all up to the last success.

    ``times``: how often in a row they were too many when the job failed last; 0 when a stop's savepoint failed it.
    """

    def __init__(self) -> None:
        self._count = 0
        self._last_success = 0
        self._in_a_row = 0
        self.times = 0

    def reset(self) -> None:
        """A new deployment."""
        self._count = 0

    def succeeded(self, checkpoint_id: int) -> None:
        self._count = self._in_a_row = 0
        self._last_success = max(self._last_success, checkpoint_id)

    def failed(
        self,
        checkpoint_id: int,
        reason: Reason,
        properties: CheckpointProperties,
        tolerable: int,
        by_running_task: bool | None,
    ) -> bool:
        """Whether the job must fail. ``by_running_task``: None when no task reported it."""
        by_task = by_running_task is not None
        if by_task and properties.is_synchronous:
            self.times = 0
            return bool(by_running_task)
        if properties.is_savepoint and not by_task:
            return False
        if reason not in _COUNTED or checkpoint_id <= self._last_success:
            return False
        return self._counted(tolerable, by_running_task is not False)

    def failed_without_id(self, tolerable: int) -> bool:
        """Storage gave no id; never for a savepoint."""
        return self._counted(tolerable, may_fail=True)

    def _counted(self, tolerable: int, may_fail: bool) -> bool:
        self._count += 1
        if self._count <= tolerable or not may_fail:
            return False
        self._count = 0
        self._in_a_row += 1
        self.times = self._in_a_row
        return True
