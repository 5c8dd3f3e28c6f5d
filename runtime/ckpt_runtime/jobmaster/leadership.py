"""Leader election: waits for the lease, renews it, and closes the fence in time when a renewal fails.

A leader considers its lease expired before a challenger may take it: the leader relies on it for two thirds of the
lease time from the beginning of its last renewal, and a challenger waits for the whole lease time after the last
renewal that it saw. This is safe as long as neither clock runs 1.5 times as fast as the other. If a process is
suspended with its clock, the fence in storage stops it.
Both use monotonic clocks only; :class:`OwnLease` and :class:`Watch` are pure and get the time passed. Blocking calls
run in a thread of their own, so that slow storage calls of jobs do not delay renewals.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from ckpt_runtime.storage import leader_store
from ckpt_runtime.storage.errors import NotLeaderError, StorageError
from ckpt_runtime.storage.leader_store import LeaderInfo, LeaderStore, Lease

logger = logging.getLogger(__name__)


class OwnLease:
    """A leader's own view of its lease. Times are in the unit of ``lease_time``."""

    def __init__(self, lease_time: float) -> None:
        self._good_for = lease_time * 2 / 3
        self.valid_until = 0.0

    def renewed(self, begun: float) -> None:
        """Storage accepted a renewal that began at ``begun``; the time of its answer does not matter."""
        self.valid_until = begun + self._good_for

    def holds(self, now: float) -> bool:
        return now < self.valid_until


class Watch:
    """A challenger's view of the present leader."""

    def __init__(self, lease_time: float) -> None:
        self._lease_time = lease_time
        self._seen: tuple[int, int] | None = None
        self._since = 0.0
        self._vacant = False

    @property
    def epoch(self) -> int | None:
        """The epoch of the last known leader; None before the first read."""
        return None if self._seen is None else self._seen[0]

    def saw(self, epoch: int, sequence: int, *, released: bool, begun: float) -> None:
        """Records the renewal found by a read that began at ``begun``; ``epoch`` 0 means there was no leader yet."""
        if self._seen != (epoch, sequence):
            self._seen, self._since = (epoch, sequence), begun
        self._vacant = epoch == 0 or released

    def may_claim(self, now: float) -> bool:
        return self._vacant or (self._seen is not None and now - self._since >= self._lease_time)


T = TypeVar("T")
LEASE_TIMEOUT_S = 10.0
"""How long a leader may be silent before another driver takes over."""


class ClusterEnded(RuntimeError):
    """The leader that this driver waited for was asked to end the whole cluster."""


class LeaseSignature:
    """Signs a leader's address with the session's token. A signature is valid for twice the lease time."""

    def __init__(self, token: str, cluster_id: str, lease_timeout_s: float = LEASE_TIMEOUT_S) -> None:
        self._token = token
        self._cluster_id = cluster_id
        self._good_for_s = 2 * lease_timeout_s

    def signed(self, document: dict[str, Any]) -> dict[str, Any]:
        return leader_store.signed(document, self._token, self._cluster_id, time.time() + self._good_for_s)

    def is_good(self, published: Any, document: dict[str, Any]) -> bool:
        """Whether the signature is valid: at most half of its time has passed, and the clock was not set back since."""
        good_until = published.get(leader_store.GOOD_UNTIL) if isinstance(published, dict) else None
        if not isinstance(good_until, float) or not 0.5 <= (good_until - time.time()) / self._good_for_s <= 1:
            return False
        return bool(published == leader_store.signed(document, self._token, self._cluster_id, good_until))


class Leadership:
    """One driver's candidacy. Use :meth:`acquire` once."""

    def __init__(self, store: LeaderStore, lease_timeout_s: float = LEASE_TIMEOUT_S) -> None:
        self._store = store
        self._lease_timeout_s = lease_timeout_s
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="lease")
        self._info: LeaderInfo | None = None
        self._own = OwnLease(lease_timeout_s)
        self._lost = False
        self._renewal: asyncio.Task[None] | None = None

    @property
    def epoch(self) -> int:
        """The epoch of this driver's leadership; 0 before it leads."""
        return 0 if self._info is None else self._info.epoch

    def fence(self) -> None:
        """For pool threads. Raises NotLeaderError unless this driver leads, StorageError while that is uncertain."""
        info = self._info
        if info is None or self._lost:
            raise NotLeaderError("this driver is not the leader", "")
        # Checked before storage: a driver that was suspended sees by its own clock that another one may lead.
        if not self._own.holds(time.monotonic()):
            raise StorageError("the lease of this driver has run out and is not renewed yet", "")
        # The lease alone is no proof: the leader named in storage decides.
        self._store.check(info)

    async def acquire(
        self,
        rest_url: str,
        application_id: str,
        on_lost: Callable[[], None],
        on_waiting: Callable[[LeaderInfo], None] = lambda _: None,
    ) -> None:
        """Waits until this driver leads; ``on_lost`` is called once when it no longer does.

        ``on_waiting`` is called for each leader that this driver waits for. Raises ClusterEnded when that leader was
        asked to end the cluster, StorageError when the directory is unusable from the beginning.
        """
        info = self._info = await self._win(rest_url, application_id, on_waiting)
        logger.info("this driver is the leader (epoch %d)", info.epoch)
        self._renewal = asyncio.get_running_loop().create_task(self._renew(info, on_lost))

    async def _win(self, rest_url: str, application_id: str, on_waiting: Callable[[LeaderInfo], None]) -> LeaderInfo:
        await self._in_pool(self._store.prepare)
        attempt = uuid.uuid4().hex
        watch = Watch(self._lease_timeout_s)
        waited_for = 0
        while True:
            begun = time.monotonic()
            try:
                leader, lease = await self._in_pool(self._look)
                epoch, released = lease.epoch, lease.released
                if lease.ended and waited_for == epoch:
                    raise ClusterEnded("the cluster was shut down")
                if leader is not None and not released and waited_for != epoch:
                    waited_for = epoch
                    logger.info(
                        "waiting for the leadership: %s (application %s) is the leader", leader.rest, leader.app_id
                    )
                    on_waiting(leader)
                watch.saw(epoch, lease.sequence, released=released, begun=begun)
                if watch.may_claim(time.monotonic()):
                    begun = time.monotonic()
                    claim = partial(self._store.claim, rest_url, application_id, attempt, after=epoch)
                    info = await self._in_pool(claim)
                    self._own.renewed(begun)
                    return info
            except NotLeaderError:
                logger.info("another driver has claimed the lease first")
            except StorageError as error:
                # Storage has never answered: probably the directory is wrong, not just unavailable for a moment.
                if watch.epoch is None:
                    raise
                logger.warning("cannot read which driver leads: %s", error)
            await asyncio.sleep(self._lease_timeout_s / 10)

    async def release(self, *, ended: bool = False) -> None:
        """Releases the lease, so that the next driver need not wait. ``ended``: waiting drivers end, too."""
        if self._renewal is not None:
            # Cancelled before the release: a later renewal would revoke it.
            self._renewal.cancel()
        info, self._info = self._info, None
        if info is not None:
            try:
                await asyncio.wait_for(
                    self._in_pool(lambda: self._store.release(info, ended=ended)), self._lease_timeout_s
                )
            except (OSError, TimeoutError) as error:
                logger.warning("cannot release the lease: %s", error)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _look(self) -> tuple[LeaderInfo | None, Lease]:
        """Reads the present leader and its last lease renewal."""
        present = self._store.current()
        return (None, Lease(0, 0)) if present is None else (present, self._store.lease(present.epoch))

    async def _renew(self, info: LeaderInfo, on_lost: Callable[[], None]) -> None:
        sequence = 0
        while True:
            sequence += 1
            begun = time.monotonic()
            try:
                # After a suspension of the process there may still be no successor. The renewal gets a whole lease time
                # then, since the machine is probably slow: the fence is closed until then, and the renewal looks for a
                # successor.
                left = self._own.valid_until - begun
                async with asyncio.timeout(left if left > self._lease_timeout_s / 5 else self._lease_timeout_s):
                    await self._in_pool(partial(self._store.renew, info, sequence))
                self._own.renewed(begun)
            except NotLeaderError as error:
                logger.error("%s", error)
                break
            except (StorageError, TimeoutError) as error:
                logger.warning("cannot renew the lease: %s", str(error) or "no answer")
                if not self._own.holds(time.monotonic()):
                    break
            await asyncio.sleep(self._lease_timeout_s / 5)
        # Closes the fence at once, before any listener reacts.
        self._lost = True
        logger.error("this driver has lost its leadership")
        on_lost()

    async def _in_pool(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)
