"""The deletions of a job's snapshot files, in the background.

If storage is unavailable when a checkpoint is subsumed or aborted, its files must not stay forever: a failed deletion
is retried with growing pauses, at once when a later checkpoint shows that storage answers again, and also after the
end of the job. What may be deleted is decided elsewhere, by the coordinator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ckpt_runtime.jobmaster.job_host import Cancellable, JobHost, Pool, Result
from ckpt_runtime.storage.errors import CorruptFileError, InvalidLocationError, NotFoundError, NotLeaderError
from ckpt_runtime.storage.versioned_document import Fence, no_fence

logger = logging.getLogger(__name__)

DELETION_PAUSE_MS = 500.0
MAX_DELETION_PAUSE_MS = 30_000.0
MAX_WAITING = 10_000
"""Maximum number of waiting deletions; beyond it the oldest is given up and named in the log."""


@dataclass(slots=True, eq=False)
class _Deletion:
    what: str
    delete: Callable[[], None]
    attempted: Callable[[], None] | None = None
    failures: int = 0


class SnapshotDeletions:
    """The deletions of one job, on its host's loop and in its pool for deletions.

    ``fence`` is called in the pool before each deletion and raises when this driver may not delete anything.
    """

    def __init__(self, host: JobHost, fence: Fence = no_fence) -> None:
        self._host = host
        self._fence = fence
        self._running = 0
        self._waiting: list[_Deletion] = []
        self._timer: Cancellable | None = None
        self._due_ms = 0.0
        self._when_done: Callable[[], None] | None = None
        self._closed = False

    @property
    def unfinished(self) -> tuple[str, ...]:
        """The deletions that have failed so far and wait for their next attempt."""
        return tuple(deletion.what for deletion in self._waiting)

    def submit(self, what: str, delete: Callable[[], None], attempted: Callable[[], None] | None = None) -> None:
        """Deletes in the background. ``delete`` may be called again after a failure and then continues.

        ``attempted`` is called on the loop after the first attempt, for any outcome: no caller waits for a retry.
        """
        self._start([_Deletion(what, delete, attempted)])

    def retry(self) -> None:
        """Retries all waiting deletions now, because storage answers."""
        waiting, self._waiting = self._waiting, []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if waiting:
            self._start(waiting)

    def when_done(self, call: Callable[[], None]) -> None:
        """Calls ``call`` once as soon as no deletion runs or waits, perhaps at once; never after :meth:`close`."""
        self._when_done = call
        self._check_done()

    def close(self) -> None:
        """Starts no more deletions. The waiting ones are named in the log; a later driver may perform them."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for deletion in self._waiting:
            logger.warning("could not %s before the end of this driver", deletion.what)
        self._waiting.clear()

    def _start(self, deletions: list[_Deletion]) -> None:
        if self._closed:
            return
        self._running += 1
        self._host.in_pool(Pool.DELETIONS, partial(self._attempt, deletions), partial(self._attempted, deletions))

    def _attempt(self, deletions: list[_Deletion]) -> list[_Deletion]:
        """Runs in a pool thread. Returns the deletions that failed and may succeed later."""
        return [deletion for deletion in deletions if not self._is_settled(deletion)]

    def _is_settled(self, deletion: _Deletion) -> bool:
        try:
            self._fence()
            deletion.delete()
        # Already deleted by an attempt whose answer was lost.
        except NotFoundError:
            return True
        except (NotLeaderError, InvalidLocationError, CorruptFileError) as error:
            logger.warning("will not %s: %s", deletion.what, error)
        except OSError as error:
            logger.warning("could not %s, will try again: %s", deletion.what, error)
            return False
        except Exception:
            logger.exception("will not %s", deletion.what)
        return True

    def _attempted(self, deletions: list[_Deletion], result: Result[list[_Deletion]]) -> None:
        self._running -= 1
        if self._closed:
            return
        try:
            failed = result()
        except Exception as error:  # the pool's own: not begun, or still hanging
            logger.warning("will try %d deletions again: %s", len(deletions), error)
            failed = deletions
        for deletion in deletions:
            # Called after the first attempt only: no caller waits for a retry.
            answer, deletion.attempted = deletion.attempted, None
            if answer is not None:
                answer()
        if failed:
            self._wait(failed)
        self._check_done()

    def _wait(self, failed: list[_Deletion]) -> None:
        for deletion in failed:
            deletion.failures += 1
        self._waiting.extend(failed)
        for given_up in self._waiting[:-MAX_WAITING]:
            logger.error("cannot %s: too many deletions are waiting", given_up.what)
        del self._waiting[:-MAX_WAITING]
        # The lowest failure count sets the pause: a deletion that has failed for hours must not delay a fresh one.
        least = min(deletion.failures for deletion in failed)
        pause = min(MAX_DELETION_PAUSE_MS, DELETION_PAUSE_MS * 2 ** min(least - 1, 16))
        due_ms = self._host.now().rel_ms + pause
        if self._timer is not None:
            if self._due_ms <= due_ms:
                return
            self._timer.cancel()
        self._due_ms = due_ms
        self._timer = self._host.call_later(pause, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self.retry()

    def _check_done(self) -> None:
        if self._when_done is not None and not self._running and not self._waiting and not self._closed:
            call, self._when_done = self._when_done, None
            call()
