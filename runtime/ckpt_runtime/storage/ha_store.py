"""The high-availability directory: everything that a new driver needs to continue where an old one ended.

Layout below ``<high-availability.storageDir>/<cluster id>``::

    leader.json  leader/<epoch>  lease-<epoch>.json
    jobs/<job id>/plan/<revision>  jobs/<job id>/archive-<checksum>
    jobs/<job id>/checkpoints/<revision>  jobs/<job id>/counters/<revision>  jobs/<job id>/failures/<revision>
    results/<job id>/<revision>
    snapshots/<job id>/
    programs/holds/<revision>  programs/archive-<checksum>
    retired/<revision>  upgrades/<revision>

Only combines the stores; each has its own module.
"""

from __future__ import annotations

from typing import Any

from ckpt_runtime.storage.checkpoint_pointer_store import CheckpointPointerStore, JobCounters
from ckpt_runtime.storage.checkpoint_storage import check_job_id
from ckpt_runtime.storage.fenced_document import Fence, FencedDocument, no_fence
from ckpt_runtime.storage.filesystem import Location, resolve
from ckpt_runtime.storage.held_programs import HeldProgramStore
from ckpt_runtime.storage.held_upgrades import HeldUpgrades
from ckpt_runtime.storage.job_result_store import JobResultStore
from ckpt_runtime.storage.job_store import JobStore
from ckpt_runtime.storage.leader_store import LeaderStore
from ckpt_runtime.storage.retired_ids import RetiredIdStore

DEFAULT_CLUSTER_ID = "default"


class HaStore:
    """One cluster's directory. ``fence`` is called before every change of a store and raises to forbid it.

    ``epoch`` is that of this leader: it cannot change what a later leader has adopted, even when the fence is late.
    """

    def __init__(
        self,
        directory: str | Location,
        cluster_id: str = DEFAULT_CLUSTER_ID,
        fence: Fence = no_fence,
        epoch: int = 0,
    ) -> None:
        """Touches nothing. Raises :class:`InvalidLocationError` for an unusable directory or cluster id."""
        base = directory if isinstance(directory, Location) else resolve(directory)
        self.root = base.child(cluster_id)
        self.fence = fence
        self._epoch = epoch
        self.leader = LeaderStore(self.root)
        self.jobs = JobStore(self.root.child("jobs"), fence, epoch)
        self.results = JobResultStore(self.root.child("results"), fence, epoch)
        self.programs = HeldProgramStore(self.root.child("programs"), fence, epoch)
        self.retired = RetiredIdStore(self.root.child("retired"), fence, epoch)
        self.upgrades = FencedDocument(self.root.child("upgrades"), HeldUpgrades, fence, epoch)

    @property
    def snapshots(self) -> Location:
        """The checkpoint directory of jobs that do not configure one."""
        return self.root.child("snapshots")

    def pointers(self, job_id: str) -> CheckpointPointerStore:
        """The checkpoint pointers of one job; :meth:`JobStore.remove` deletes them with the job."""
        return CheckpointPointerStore(self._job(job_id).child("checkpoints"), self.fence, self._epoch)

    def counters(self, job_id: str) -> JobCounters:
        """Checkpoint ids and attempts of one job; :meth:`JobStore.remove` deletes the counters with the job."""
        return JobCounters(self._job(job_id).child("counters"), self.fence, self._epoch)

    def failures(self, job_id: str) -> FencedDocument[dict[str, Any]]:
        """The exception history of one job; :meth:`JobStore.remove` deletes it with the job."""
        return FencedDocument(self._job(job_id).child("failures"), dict[str, Any], self.fence, self._epoch)

    def _job(self, job_id: str) -> Location:
        return self.root.child("jobs", check_job_id(job_id))
