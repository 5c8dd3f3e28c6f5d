"""Jobs whose runs continue each other in one directory, without a snapshot in the request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from ckpt_runtime.jobmaster.gateway_values import Conflict, SubmissionFailed
from ckpt_runtime.jobmaster.planning import Planned, Planner
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import FAST, PIPELINES, SequenceJob
from tests.support.kafka_broker import KafkaBroker
from tests.support.outputs import assert_sequence, visible

ROWS = 1200


def test_run_continues_where_the_last_one_was_cancelled_or_ended(
    cluster: MiniCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[str] = []
    plan = Planner.plan

    async def counted(*given: Any) -> Planned:
        plans.append("")
        return await plan(*given)

    monkeypatch.setattr(Planner, "plan", counted)
    state = tmp_path / "state"
    configuration = {
        **FAST,
        "execution.checkpointing.continue-in": str(state),
        "execution.checkpointing.checkpoints-after-tasks-finish": "false",
        "execution.checkpointing.num-retained": "2",
        "execution.checkpointing.incremental": "true",
        "state.backend.type": "rocksdb",
    }
    run, rival = SequenceJob(cluster, tmp_path), SequenceJob(cluster, tmp_path / "rival")
    run.start(rows=ROWS, rate=4, configuration=configuration)  # for five minutes, unless it is cancelled
    run.has_output()
    with pytest.raises(Conflict, match=f"Job {run.job_id}, which is RUNNING, also continues in"):
        rival.start(rows=ROWS, configuration=configuration)
    with pytest.raises(Conflict, match="not stopped with a savepoint, because the next run of its program continues"):
        cluster.savepoint(run.job_id, tmp_path / "savepoints", stop=True)
    run.canceled()
    assert 0 < len(visible(run.out / "order")) < ROWS, "the job ended before it was cancelled"

    for _ in range(2):  # the second one has nothing left to read
        with pytest.raises(SubmissionFailed, match="cannot be started with fork"):
            run.start(rows=ROWS, fork=True, configuration=configuration)
        plans.clear()
        run.start(rows=ROWS, rate=0, configuration=configuration)
        assert len(plans) == 1, "the snapshot has the key groups of the plan"
        run.finished()
        assert_sequence(run.out, ROWS)
        kept = [path.parent.parent.name for path in state.glob("*/chk-*/_metadata")]
        assert kept == [run.job_id], "the checkpoint of the run before was deleted once this one had its own"
    assert not run.checkpoints.exists(), "checkpoints are in the directory in which the runs continue"


def test_run_reads_the_messages_of_kafka_that_have_arrived_since_the_last_one(
    cluster: MiniCluster, tmp_path: Path, broker: KafkaBroker
) -> None:
    topic = "increments"
    broker.create_topic(topic, 2)
    sent: list[str] = []
    for run in range(3):
        if run < 2:  # nothing has arrived before the last one
            texts = [f"{run}-{at}" for at in range(5)]
            for at, text in enumerate(texts):
                broker.produce(topic, [text.encode()], key=str(at).encode())
            sent += texts
        job = cluster.submit(
            PIPELINES / "kafka_increments.py", arguments=[broker.servers, topic, str(tmp_path)], parallelism=2
        )
        cluster.wait_for_status(job, JobStatus.FINISHED)
        rows = [row for file in (tmp_path / "rows").glob("*.parquet") for row in pq.read_table(file).to_pylist()]
        assert sorted(row["text"] for row in rows) == sorted(sent)
        assert len({(row["partition"], row["offset"]) for row in rows}) == len(sent)
