"""Leader lookup for clients that follow the leader: the interface of lookups, and when a lookup is repeated.

A client is given a :class:`LeaderSource` in place of an address. It asks again after every failure and as soon as the
last answer has expired. So it neither stays with a driver that has lost its leadership, nor sends a token to a process
that later took a dead driver's port. Lookups block, and run in threads of their own.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass

from ckpt_runtime.client.errors import CkptClientError, Unreachable


class LeaderUnknown(Unreachable):
    """There is no leader, or none can be determined; there may be one later. Nothing was sent."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(where, reason, sent=False)


class LeaderUnproven(CkptClientError):
    """The alleged address of the leader lacks a valid proof. No token was sent there."""


@dataclass(frozen=True, slots=True)
class Leader:
    """A proven address of the leader. ``good_until`` is on this process's monotonic clock."""

    url: str
    epoch: int
    good_until: float


class LeaderSource(ABC):
    """Finds a cluster's leader. Safe to share between threads, clients and event loops."""

    def __init__(self, where: str) -> None:
        """``where`` names the place in errors."""
        self.where = where
        self._lock = threading.Lock()
        self._lookup: Future[Leader] | None = None
        self._latest: Leader | None = None

    @abstractmethod
    def look_up(self) -> Leader:
        """Look up the leader; blocks. Raises :class:`LeaderUnknown`, :class:`LeaderUnproven`."""

    async def find(self, timeout_s: float, *, other_than: Leader | None = None) -> Leader:
        """Return the leader; looks it up unless an answer other than ``other_than`` is still good."""
        latest = self._latest
        if latest is not None and latest is not other_than and time.monotonic() < latest.good_until:
            return latest
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(self._shared_lookup())
        except TimeoutError:
            raise LeaderUnknown(self.where, f"no answer within {timeout_s:g} s") from None

    def _shared_lookup(self) -> Future[Leader]:
        """The lookup in progress, shared by all waiting callers: a lookup that hangs costs one thread."""
        with self._lock:
            if self._lookup is None or self._lookup.done():
                self._lookup = Future()
                self._lookup.set_running_or_notify_cancel()  # a caller that gives up cannot cancel it for the others
                # A daemon thread: a lookup that hangs does not keep the process from ending.
                threading.Thread(target=self._answer, args=(self._lookup,), name="leader-lookup", daemon=True).start()
            return self._lookup

    def _answer(self, lookup: Future[Leader]) -> None:
        try:
            lookup.set_result(self._look_up_newer())
        except BaseException as error:
            lookup.set_exception(error)

    def _look_up_newer(self) -> Leader:
        found = self.look_up()
        latest = self._latest
        if latest is not None and found.epoch < latest.epoch:
            raise LeaderUnknown(
                self.where, f"its leader is of epoch {found.epoch}, and one of epoch {latest.epoch} was seen before"
            )
        self._latest = found
        return found
