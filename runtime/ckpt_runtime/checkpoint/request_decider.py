"""Decides which queued request is triggered next, and whether it may be now (Flink's CheckpointRequestDecider).

Pure ordering and capacity; the coordinator asks after every change. At most one periodic request is queued.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from enum import Enum

from ckpt_runtime.checkpoint.properties import CheckpointProperties

CAPACITY = 1_000


@dataclass(frozen=True, slots=True)
class TriggerRequest:
    """One request. ``request_id`` is None if the result is not awaited; ``sequence`` breaks ties in the order.

    ``final`` marks the request at the end of a bounded job's data.
    """

    request_id: str | None
    properties: CheckpointProperties
    requested_at: int
    sequence: int = 0
    periodic: bool = False
    final: bool = False
    target_directory: str | None = None

    @property
    def priority(self) -> tuple[bool, bool, int, int]:
        """The sort key: savepoints first, then requests that a user waits for, then older ones."""
        return (not self.properties.is_savepoint, self.periodic, self.requested_at, self.sequence)


class RequestVerdict(Enum):
    """What to do with the head of the queue."""

    WAIT = "wait"
    GO = "go"
    TOO_EARLY = "too early"


@dataclass(frozen=True, slots=True)
class Load:
    """The load at the time of the decision. ``pause_ends_at`` is monotonic time.

    ``savepoints_wait``: ``max_concurrent`` applies to savepoints too. This holds while unaligned checkpoints are on: a
    savepoint is aligned and no barrier overtakes a barrier, so until it is taken no later checkpoint turns unaligned.
    """

    triggering: bool
    cleaning: int
    pending: int
    max_concurrent: int
    pause_ends_at: int
    savepoints_wait: bool = False


class CheckpointRequestDecider:
    """The queue of requests; at most ``CAPACITY`` long."""

    def __init__(self) -> None:
        self._queue: list[TriggerRequest] = []

    def offer(self, request: TriggerRequest) -> TriggerRequest | None:
        """Queues a request. Returns the dropped one, if any (the new one, or a periodic one it displaced)."""
        # One queued tick is enough: two in a row would snapshot the same state twice.
        if request.periodic and any(queued.periodic for queued in self._queue):
            return request
        if len(self._queue) >= CAPACITY:
            if not self._queue[-1].periodic:
                return request
            # A tick recurs by itself; a user's request does not.
            dropped = self._queue.pop()
            insort(self._queue, request, key=lambda queued: queued.priority)
            return dropped
        insort(self._queue, request, key=lambda queued: queued.priority)
        return None

    @property
    def is_empty(self) -> bool:
        """Whether no request waits."""
        return not self._queue

    def next(self, load: Load, now: int) -> tuple[RequestVerdict, TriggerRequest | None]:
        """Removes the head of the queue if it may run now, or if it is periodic and within the minimum pause."""
        # If deleting is slower than taking checkpoints, triggering waits; otherwise files to delete would pile up.
        if not self._queue or load.triggering or load.cleaning > load.max_concurrent:
            return RequestVerdict.WAIT, None
        head = self._queue[0]
        unbounded = head.properties.is_savepoint and not load.savepoints_wait
        if not unbounded and load.pending >= load.max_concurrent:
            return RequestVerdict.WAIT, None
        del self._queue[0]
        # Only periodic requests observe the pause; a user's request ignores it, as in Flink.
        if head.periodic and load.pause_ends_at > now:
            return RequestVerdict.TOO_EARLY, head
        return RequestVerdict.GO, head

    def drain(self) -> list[TriggerRequest]:
        """Empties the queue."""
        drained, self._queue = self._queue, []
        return drained

    def drop_periodic(self) -> None:
        """Forgets a queued tick (its timer was stopped)."""
        self._queue = [queued for queued in self._queue if not queued.periodic]
