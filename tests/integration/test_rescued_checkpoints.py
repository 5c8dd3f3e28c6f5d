"""FLIP-571's example on a running job, scaled down: 19 of 20 subtasks are done when a checkpoint is about to expire.

Its timeout is extended, and it completes with all that was written for it, each time of 200 (5 in the suite).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.contract.checkpoints import Checkpoint
from ckpt_runtime.contract.configuration import CheckpointConfigPatch
from ckpt_runtime.contract.jobs import RunOptions
from ckpt_runtime.jobmaster.executions import wall_clock_ms
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import fast, program_of
from tests.support.patience import patient
from tests.support.spark_sessions import wait_until

MAX_LATE = 200
"""Rounds in which this test itself was too slow to ask in time, on a busy machine; they count neither way."""
TIMEOUT_MS = round(patient(150))
MARGIN_MS = round(patient(40))
"""How long before the deadline the PATCH is sent."""
EXTENDED_MS = 600_000
SUBTASKS = 20


class HeldJob:
    """The ``held`` pipeline."""

    def __init__(self, client: CkptClient, directory: Path) -> None:
        self.client = client
        self.directory = directory
        self._rounds = 0
        configuration = fast(
            execution__checkpointing__interval="1h",
            execution__checkpointing__timeout=f"{TIMEOUT_MS} ms",
            execution__checkpointing__tolerable_failed_checkpoints="1000",
            execution__checkpointing__dir=str(directory / "checkpoints"),
            execution__buffer_timeout="10 ms",
        )
        options = RunOptions(
            entry_point="held:pipeline", arguments=(str(directory),), parallelism=2, configuration=configuration
        )
        self.id = client.run_pipeline(client.upload_pipeline(*pack_pipeline(program_of("held"))), options)
        client.wait_for_state(self.id, ["RUNNING"], timeout_s=patient(180))

    def latest(self) -> Checkpoint:
        return self.client.checkpoint_statistics(self.id).history[0]

    def round(self) -> bool:
        """One rescue; False when the PATCH came too late. Raises AssertionError for a checkpoint that was lost."""
        hold, holding = self.directory / "hold", self.directory / "holding"
        hold.touch()
        wait_until(holding.exists, "a subtask to stand still")
        self.client.trigger_checkpoint(self.id)
        self._rounds += 1
        wait_until(lambda: self._pending() is not None or self._has_expired(), "19 of 20 subtasks")
        try:
            pending = self._pending()
            if pending is None:
                return False
            deadline = pending.deadline_ms
            assert deadline is not None
            _sleep_until(deadline - MARGIN_MS)
            self.client.patch_checkpoint_config(self.id, CheckpointConfigPatch(timeout_ms=EXTENDED_MS))
            in_time = wall_clock_ms() < deadline
            extended = self.latest()
            if not in_time and extended.status == "FAILED":
                return False
            assert extended.deadline_ms == deadline - TIMEOUT_MS + EXTENDED_MS
            _sleep_until(deadline + 10)
            assert self.latest().status == "IN_PROGRESS"
        finally:
            hold.unlink()
        wait_until(lambda: self.latest().status != "IN_PROGRESS", "the checkpoint to end")
        done = self.latest()
        assert (done.id, done.status, done.num_acknowledged) == (pending.id, "COMPLETED", SUBTASKS)
        assert done.triggered_at_ms == pending.triggered_at_ms
        return True

    def settle(self) -> None:
        """Back to the short timeout, with everything moving."""
        wait_until(lambda: not (self.directory / "holding").exists(), "the subtask to continue")
        wait_until(lambda: self.client.checkpoint_statistics(self.id).counts.in_progress == 0, "no checkpoint")
        self.client.patch_checkpoint_config(self.id, CheckpointConfigPatch(timeout_ms=TIMEOUT_MS))

    def _pending(self) -> Checkpoint | None:
        """The checkpoint that waits for the subtask which is held. One that expires at once is counted, not listed."""
        for found in self.client.checkpoint_statistics(self.id).history[:1]:
            if found.status == "IN_PROGRESS" and found.num_acknowledged == SUBTASKS - 1:
                return found
        return None

    def _has_expired(self) -> bool:
        counts = self.client.checkpoint_statistics(self.id).counts
        return counts.in_progress == 0 and counts.total == self._rounds


@pytest.fixture
def job(cluster: MiniCluster, tmp_path: Path) -> Iterator[HeldJob]:
    with CkptClient(cluster.rest_url) as client:
        held = HeldJob(client, tmp_path)
        yield held
        client.cancel_job(held.id)
        client.wait_for_state(held.id, ["CANCELED"], timeout_s=patient(180))


@pytest.mark.slow
@pytest.mark.row("571.3")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rescues", [5, pytest.param(200, marks=pytest.mark.long)])
def test_every_extended_checkpoint_completes(job: HeldJob, rescues: int) -> None:
    rescued = late = 0
    while rescued < rescues:
        in_time = job.round()
        rescued, late = rescued + in_time, late + (not in_time)
        assert late <= MAX_LATE, f"{late} rounds were late, {rescued} rescued"
        job.settle()
    print(f"{rescued} of {rescued} rescued; {late} rounds were late")
    statistics = job.client.checkpoint_statistics(job.id)
    assert statistics.counts.completed == rescues
    assert statistics.counts.failed == late


def _sleep_until(wall_ms: int) -> None:
    time.sleep(max(0.0, (wall_ms - wall_clock_ms()) / 1000))
