"""What a driver of one version left in its high-availability directory: ``tests/data/high_availability/<version>``.

``python -m tests.support.golden_session <directory>`` writes it with the present code, from the root of the project: a
job that runs with changed settings, a failure and a disposal that is not done, and one that has finished.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from ckpt_runtime.checkpoint.configuration import CheckpointOverrides
from ckpt_runtime.failure_report import FailureCause
from ckpt_runtime.jobmaster.gateway_values import ExceptionEntry
from ckpt_runtime.jobmaster.job_record import DurableRecord
from ckpt_runtime.jobmaster.job_view import FailureLog
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.storage.checkpoint_storage import SnapshotDisposal
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.storage.ha_store import HaStore
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.golden import Kind, submit

DIRECTORY = Path(__file__).parents[1] / "data" / "high_availability"
RUNNING = "a" * 32
FINISHED = "b" * 32
FAILURE = ExceptionEntry(FailureCause("ValueError", "no such row", "ValueError: no such row"), 5, "kept (1/2)")
DISPOSED = 77


def main(directory: Path) -> None:
    """Writes the directory."""
    with tempfile.TemporaryDirectory(prefix="golden-") as scratch:
        storage = Path(scratch) / "ha"
        options = {"high-availability.type": "filesystem", "high-availability.storageDir": str(storage)}
        with MiniCluster(configuration=options) as cluster:
            submit(cluster, Kind({}, rate=0), Path(scratch) / "finished", job_id=FINISHED)
            cluster.wait_for_status(FINISHED, JobStatus.FINISHED)
            often = Kind({"execution.checkpointing.interval": "1 s"}, rate=1)
            submit(cluster, often, Path(scratch) / "running", job_id=RUNNING)
            cluster.wait_for_status(RUNNING, JobStatus.RUNNING)
            cluster.wait_for_checkpoints(RUNNING, 1)
            patch = CheckpointOverrides(timeout_ms=123_000, unaligned_enabled=True)
            cluster.call(cluster.dispatcher.jobs[RUNNING].living().patch_checkpoint_config(patch))
        store = HaStore(str(storage), epoch=1)
        record = DurableRecord(store, RUNNING)
        log = FailureLog(3)
        log.add(FAILURE, concurrent=False)
        record.keep_failures(log.to_stored())
        record.remove(DISPOSED, SnapshotDisposal(resolve("/snapshots/chk-77"), (("state",), ("deep", "state"))))
        record.keep_savepoint(9)
        shutil.copytree(storage / "default", directory)
        shutil.rmtree(directory / "snapshots", ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
