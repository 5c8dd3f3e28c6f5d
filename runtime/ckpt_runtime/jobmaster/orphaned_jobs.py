"""Jobs of earlier drivers that cannot be recovered now, and retries for those whose storage may come back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

from ckpt_runtime.jobmaster.job_recovery import FoundJob

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 5.0
_MAX_PAUSE_S = 60.0
_FACTOR = 1.5


class OrphanedJobs:
    """The reason for each unrecovered job. A recovery that may succeed is retried until it does or damage is proven."""

    def __init__(self, look: Callable[[FoundJob], FoundJob], recovered: Callable[[FoundJob], None]) -> None:
        """``look`` blocks, and is called in a thread; ``recovered`` gets each found job on the event loop."""
        self._look = look
        self._recovered = recovered
        self._reasons: dict[str, str] = {}
        self._looking: asyncio.Task[None] | None = None

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._reasons

    def __iter__(self) -> Iterator[str]:
        return iter(self._reasons)

    def __len__(self) -> int:
        return len(self._reasons)

    def reason(self, job_id: str) -> str:
        """What is wrong with which file, as a text for users."""
        return self._reasons[job_id]

    def add(self, job_id: str, reason: str) -> None:
        """Adds a job that stays unrecovered until a user acts and another driver leads."""
        self._reasons[job_id] = reason

    def look_for(self, jobs: list[FoundJob]) -> None:
        """Starts retrying the recovery of these jobs."""
        waiting = {job.job_id: job for job in jobs}
        if waiting:
            self._looking = asyncio.create_task(self._look_out(waiting))

    def close(self) -> None:
        """Stops the retries."""
        if self._looking is not None:
            self._looking.cancel()

    async def _look_out(self, waiting: dict[str, FoundJob]) -> None:
        pause = _FIRST_PAUSE_S
        while waiting:
            await asyncio.sleep(pause)
            pause = min(pause * _FACTOR, _MAX_PAUSE_S)
            for earlier in list(waiting.values()):
                found = await asyncio.to_thread(self._look, earlier)
                if found.failure is None or not found.may_pass:
                    del waiting[found.job_id]
                self._take(found)

    def _take(self, found: FoundJob) -> None:
        if found.failure is not None:
            self._reasons[found.job_id] = found.failure
            return
        del self._reasons[found.job_id]
        logger.info("job %s can be recovered now", found.job_id)
        self._recovered(found)
