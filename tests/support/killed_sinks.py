"""Runs a program whose sink is killed at steps of its commits, and says what its target must then hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import fast

ROWS = 20_000


def numbers_through_kills(
    cluster: MiniCluster,
    program: Path,
    target: str,
    steps: Sequence[str],
    content: Callable[[], list[int]],
    tmp_path: Path,
) -> Counter[int]:
    """Runs the program, kills it at each step, and starts two jobs from its savepoint, one after the other.

    Returns the numbers that the target must hold: those of the savepoint once, those behind it once for each job.
    """
    faults, source = tmp_path / "faults", tmp_path / "numbers.parquet"
    faults.mkdir()
    pq.write_table(pa.table({"n": pa.array(range(ROWS), pa.int64())}), source)

    def start(rate: int, savepoint: str | None = None) -> str:
        return cluster.submit(
            program,
            arguments=[str(source), str(rate), target, str(faults)],
            configuration=fast(execution__checkpointing__interval="100ms"),
            parallelism=2,
            savepoint=savepoint,
        )

    job = start(50)  # which lasts for minutes, however long the kills take
    cluster.wait_for_checkpoints(job, 2)
    for step in steps:
        (faults / step).touch()
        cluster.wait_until(lambda step=step: not (faults / step).exists(), f"a kill at {step}")  # type: ignore[misc]
    cluster.wait_for_checkpoints(job, 2)
    savepoint = cluster.savepoint(job, tmp_path / "savepoints", stop=True)
    before = content()
    assert 0 < len(before) < ROWS
    assert len(set(before)) == len(before)
    for _ in range(2):
        cluster.wait_for_status(start(0, savepoint), JobStatus.FINISHED)
    return Counter(range(ROWS)) + Counter(set(range(ROWS)) - set(before))
