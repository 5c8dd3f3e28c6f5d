"""The high-availability directory: everything that a new driver needs to go on where an old one ended.

Layout below ``<high-availability.storageDir>/<cluster id>``::

    leader.json  leader/<epoch>  lease-<epoch>.json
    jobs/<job id>/plan/<revision>  jobs/<job id>/archive-<checksum>
    jobs/<job id>/checkpoints/<id>  jobs/<job id>/counter/<revision>
    results/<job id>/<revision>

Only puts the stores together; each has a module of its own.
"""

from __future__ import annotations

from ckpt_runtime.storage.checkpoint_pointer_store import CheckpointIdCounter, CheckpointPointerStore
from ckpt_runtime.storage.checkpoint_storage import check_job_id
from ckpt_runtime.storage.filesystem import Location, resolve
from ckpt_runtime.storage.job_result_store import JobResultStore
from ckpt_runtime.storage.job_store import Fence, JobStore, no_fence
from ckpt_runtime.storage.leader_store import LeaderStore

DEFAULT_CLUSTER_ID = "default"


class HaStore:
    """One cluster's directory. ``fence`` is called before every change of a store and raises to forbid it."""

    def __init__(
        self, directory: str | Location, cluster_id: str = DEFAULT_CLUSTER_ID, fence: Fence = no_fence
    ) -> None:
        """Touches nothing. Raises :class:`InvalidLocationError` for an unusable directory or cluster id."""
        base = directory if isinstance(directory, Location) else resolve(directory)
        self.root = base.child(cluster_id)
        self._fence = fence
        self.leader = LeaderStore(self.root)
        self.jobs = JobStore(self.root.child("jobs"), fence)
        self.results = JobResultStore(self.root.child("results"), fence)

    def pointers(self, job_id: str) -> CheckpointPointerStore:
        """The checkpoint pointers of one job; :meth:`JobStore.remove` deletes them with the job."""
        return CheckpointPointerStore(self._job(job_id).child("checkpoints"), self._fence)

    def counter(self, job_id: str) -> CheckpointIdCounter:
        """The checkpoint ids of one job; :meth:`JobStore.remove` deletes the counter with the job."""
        return CheckpointIdCounter(self._job(job_id).child("counter"), self._fence)

    def _job(self, job_id: str) -> Location:
        return self.root.child("jobs", check_job_id(job_id))
