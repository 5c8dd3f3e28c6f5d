"""The driver's pools of threads, kept apart so that nobody's slow storage or slow plan stops anybody else's work."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from weakref import WeakSet

from ckpt_runtime.configuration.cluster_options import JobManagerOptions
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.jobmaster.bounded_pool import BoundedPool

_DELETION_PATIENCE = 10
"""A deletion may be one of a whole directory: its deadline is as many times that of other calls."""

_PLANNING_GRACE_S = 30.0
"""What a plan takes beside its process, which has a time limit of its own."""


@dataclass(frozen=True, slots=True)
class DriverPools:
    """``own`` is for the directory of high availability, and in a job's set for the job's own checkpoints.

    ``deletions`` deletes snapshots. ``paths`` is for what users name: savepoints to take, to start from and to dispose
    of, and directories that are used for the first time. ``planning`` waits for the processes that read programs.
    """

    own: Executor
    deletions: Executor
    paths: Executor
    planning: Executor
    storage_deadline_s: float | None = None
    of_jobs: WeakSet[BoundedPool] = field(default_factory=WeakSet)

    @classmethod
    def create(cls, configuration: Configuration) -> DriverPools:
        """The session's."""
        deadline_s = configuration.get(JobManagerOptions.STORAGE_TIMEOUT) / 1000
        planning_s = configuration.get(JobManagerOptions.PLANNING_TIMEOUT) / 1000 + _PLANNING_GRACE_S
        return cls(
            own=BoundedPool("storage calls of the session", 8, deadline_s=deadline_s, max_hanging=8),
            deletions=_deletions("deletions of the session", deadline_s),
            paths=BoundedPool(
                "storage calls for paths that users name", 4, deadline_s=deadline_s, max_hanging=16, max_waiting=64
            ),
            planning=BoundedPool("plans", 2, deadline_s=planning_s, max_hanging=2, max_waiting=32),
            storage_deadline_s=deadline_s,
        )

    def of_job(self, job_id: str) -> DriverPools:
        """A job's: its storage can be away without any other job's noticing. Its threads end when they are idle."""
        deadline_s = self.storage_deadline_s
        if deadline_s is None:
            return self
        own = BoundedPool(f"storage calls of job {job_id}", 4, deadline_s=deadline_s, max_hanging=4)
        deletions = _deletions(f"deletions of job {job_id}", deadline_s)
        self.of_jobs.update((own, deletions))
        return replace(self, own=own, deletions=deletions)

    def shutdown(self) -> None:
        """Begins nothing more, also for jobs, and waits for nothing."""
        for pool in (self.own, self.deletions, self.paths, self.planning, *self.of_jobs):
            pool.shutdown(wait=False, cancel_futures=True)


def _deletions(name: str, deadline_s: float) -> BoundedPool:
    return BoundedPool(name, 4, deadline_s=_DELETION_PATIENCE * deadline_s, max_hanging=4)
