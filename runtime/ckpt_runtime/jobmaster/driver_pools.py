"""The driver's thread pools, kept apart so that slow storage or a slow plan of one job blocks no other work."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from threading import Lock
from weakref import WeakSet

from ckpt_runtime.configuration.cluster_options import JobManagerOptions
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.jobmaster.bounded_pool import BoundedPool
from ckpt_runtime.storage.filesystem import address_of

_DELETION_PATIENCE = 10
"""A deletion may cover a whole directory: its deadline is this many times that of other calls."""

_PLANNING_GRACE_S = 30.0
"""Extra time for a plan beside its process, which has a time limit of its own."""


_MAX_ADDRESSES = 16
"""Maximum number of addresses with a pool of their own at a time. Further addresses share one pool."""


class AddressPools:
    """Gives the pool for the address of a URL that a user names: an address that hangs blocks no other one.

    Thread-safe.
    """

    def __init__(self, deadline_s: float, made: WeakSet[BoundedPool]) -> None:
        """Adds each pool to ``made``, whose owner shuts them down."""
        self._deadline_s = deadline_s
        self._made = made
        self._lock = Lock()
        self._pools: dict[str, BoundedPool] = {}
        self._others = self._pool(f"hosts and buckets beyond the {_MAX_ADDRESSES} in use")

    def __call__(self, url: str) -> BoundedPool:
        address = address_of(url)
        with self._lock:
            if address not in self._pools:
                self._pools = {known: pool for known, pool in self._pools.items() if not pool.is_idle}
                if len(self._pools) >= _MAX_ADDRESSES:
                    return self._others
                self._pools[address] = self._pool(address)
            return self._pools[address]

    def _pool(self, address: str) -> BoundedPool:
        name = f"storage calls to {address}"
        pool = BoundedPool(name, 4, deadline_s=self._deadline_s, max_hanging=4, max_waiting=64)
        self._made.add(pool)
        return pool


@dataclass(frozen=True, slots=True)
class DriverPools:
    """``own`` is for the high-availability directory, and in a job's set for the job's own checkpoints.

    ``deletions`` deletes snapshots. ``paths`` gives the pool for a URL that a user names: savepoints to take, to start
    from and to dispose of, and directories that are used for the first time. ``planning`` waits for the processes that
    read programs.
    """

    own: Executor
    deletions: Executor
    paths: Callable[[str], Executor]
    planning: Executor
    storage_deadline_s: float | None = None
    made: WeakSet[BoundedPool] = field(default_factory=WeakSet)
    """The pools of jobs and of addresses."""

    @classmethod
    def create(cls, configuration: Configuration) -> DriverPools:
        """Creates the session's pools."""
        deadline_s = configuration.get(JobManagerOptions.STORAGE_TIMEOUT) / 1000
        planning_s = configuration.get(JobManagerOptions.PLANNING_TIMEOUT) / 1000 + _PLANNING_GRACE_S
        made: WeakSet[BoundedPool] = WeakSet()
        return cls(
            own=BoundedPool("storage calls of the session", 8, deadline_s=deadline_s, max_hanging=8),
            deletions=_deletions("deletions of the session", deadline_s),
            paths=AddressPools(deadline_s, made),
            planning=BoundedPool("plans", 2, deadline_s=planning_s, max_hanging=2, max_waiting=32),
            storage_deadline_s=deadline_s,
            made=made,
        )

    def of_job(self, job_id: str) -> DriverPools:
        """Creates a job's pools: if its storage is away, no other job is affected. Their idle threads end."""
        deadline_s = self.storage_deadline_s
        if deadline_s is None:
            return self
        own = BoundedPool(f"storage calls of job {job_id}", 4, deadline_s=deadline_s, max_hanging=4)
        deletions = _deletions(f"deletions of job {job_id}", deadline_s)
        self.made.update((own, deletions))
        return replace(self, own=own, deletions=deletions)

    def shutdown(self) -> None:
        """Shuts all pools down, also those of jobs, without waiting for running calls."""
        for pool in (self.own, self.deletions, self.planning, *self.made):
            pool.shutdown(wait=False, cancel_futures=True)


def _deletions(name: str, deadline_s: float) -> BoundedPool:
    return BoundedPool(name, 4, deadline_s=_DELETION_PATIENCE * deadline_s, max_hanging=4)
