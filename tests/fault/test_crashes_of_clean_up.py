"""A driver dies before any one of the changes that it makes to its stores at the end of a job; the next one leads.

The driver runs in this process, on its real stores; what it would have left is copied before each change, and given to
the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.storage.ha_store import HaStore
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.crash_states import CrashStates
from tests.support.jobs import UNRIVALLED_S, SequenceJob, fast
from tests.support.patience import patient
from tests.support.spark_sessions import wait_until

TIMEOUT_S = patient(120)


class Stores:
    """The directory of high availability and that of the checkpoints, side by side."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "stores"
        self.root.mkdir()
        self.ha = self.root / "ha"
        self.checkpoints = self.root / "checkpoints"
        self.configuration = {
            "high-availability.type": "filesystem",
            "high-availability.storageDir": str(self.ha),
            "execution.checkpointing.dir": str(self.checkpoints),
        }

    @property
    def store(self) -> HaStore:
        return HaStore(str(self.ha))

    def has_result(self, job_id: str) -> bool:
        return self.store.results.has(job_id)

    def left_of(self, job_id: str) -> list[Path]:
        """Beside its result."""
        left = [path for path in (self.ha / "default" / "jobs" / job_id, self.checkpoints / job_id) if path.exists()]
        return left if left or not self.store.results.is_dirty(job_id) else [self.ha / "default" / "results" / job_id]

    def lease_runs_out(self) -> None:
        """The lease has not been renewed for long."""
        leader = self.store.leader.current()
        assert leader is not None
        self.store.leader.release(leader)

    def leads_and_cleans_up(self, job_id: str) -> None:
        with MiniCluster(configuration=self.configuration, lease_timeout_s=UNRIVALLED_S) as cluster:
            assert cluster.status(job_id) is JobStatus.FINISHED
            wait_until(lambda: self.left_of(job_id) == [], "the clean-up", TIMEOUT_S)

    def end_a_job(self, directory: Path, states: Callable[[str], CrashStates]) -> tuple[str, CrashStates]:
        """A job that has run and is stopped with a savepoint; the states are recorded from its stored result on."""
        with MiniCluster(configuration=self.configuration, lease_timeout_s=UNRIVALLED_S) as cluster:
            job = SequenceJob(cluster, directory)
            configuration = fast(
                execution__checkpointing__num_retained="2", state__storage__fs__memory_threshold="0"
            ) | {"execution.checkpointing.dir": str(self.checkpoints)}
            job_id = job.start(configuration=configuration)
            job.running()
            cluster.wait_for_checkpoints(job_id, 3)
            recording = states(job_id)
            with recording.recorded():
                cluster.savepoint(job_id, directory / "savepoints", stop=True)
                wait_until(lambda: self.left_of(job_id) == [], "the clean-up", TIMEOUT_S)
        return job_id, recording


@pytest.mark.slow
@pytest.mark.row("571.5")
@pytest.mark.timeout(900)
def test_next_driver_leads_after_any_interrupted_change_of_a_clean_up(tmp_path: Path) -> None:
    """The same of the first of these drivers: what it leaves in the midst of its recovery, another one finishes."""
    stores = Stores(tmp_path)

    def first_states(job_id: str) -> CrashStates:
        return CrashStates(stores.root, tmp_path / "first", lambda: stores.has_result(job_id))

    job_id, first = stores.end_a_job(tmp_path / "job", first_states)
    assert len(first.copies) > 10, first.changes
    each_is_recovered(stores, first, job_id, "last")
    first.restore(first.copies[0])
    stores.lease_runs_out()
    second = CrashStates(stores.root, tmp_path / "second")
    with second.recorded():
        stores.leads_and_cleans_up(job_id)
    assert len(second.copies) > 20, second.changes
    each_is_recovered(stores, second, job_id, "recovering")


def each_is_recovered(stores: Stores, states: CrashStates, job_id: str, who: str) -> None:
    """From every state in which a driver may have left the stores."""
    for copy, change in zip(states.copies, states.changes, strict=True):
        states.restore(copy)
        stores.lease_runs_out()
        try:
            stores.leads_and_cleans_up(job_id)
        except BaseException as error:
            error.add_note(f"the {who} driver died before {change}, see {copy}")
            raise
