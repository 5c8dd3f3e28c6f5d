"""Jobs whose checkpoints wait for no barrier: ``execution.checkpointing.mode: AT_LEAST_ONCE``."""

from __future__ import annotations

import os
import signal

import pytest

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.errors import BadRequest
from ckpt_runtime.contract.checkpoints import CheckpointConfigPatch
from tests.support.jobs import SequenceJob, fast
from tests.support.outputs import assert_sequence, hidden, visible

AT_LEAST_ONCE = fast(execution__checkpointing__mode="AT_LEAST_ONCE", execution__checkpointing__interval="50ms")


def test_a_job_that_aligns_nothing_is_exact_until_it_fails_and_then_loses_nothing(
    client: CkptClient, job: SequenceJob
) -> None:
    job.start(rate=4000, configuration=AT_LEAST_ONCE)
    job.running()
    job.cluster.wait_for_checkpoints(job.job_id, 3)
    with pytest.raises(BadRequest, match="unaligned"):
        client.patch_checkpoint_config(job.job_id, CheckpointConfigPatch(unaligned=True))
    savepoint = job.cluster.savepoint(job.job_id, job.directory / "savepoints", stop=True)
    job.finished()
    rows = assert_sequence(job.out)
    job.start(rows=rows + 20_000, rate=10_000, savepoint=savepoint, configuration=AT_LEAST_ONCE)
    job.running()
    job.cluster.wait_for_checkpoints(job.job_id, 2)
    os.kill(job.cluster.worker_pids(job.job_id)[0], signal.SIGKILL)
    job.finished()
    order = visible(job.out / "order")
    for _, numbers in order.groupby("source").n:
        assert set(numbers) == set(range(numbers.max() + 1))
    assert len(order.drop_duplicates(["source", "n"])) == rows + 20_000
    assert (order.seen >= order.n + 1).all()
    assert hidden(job.out) == []
