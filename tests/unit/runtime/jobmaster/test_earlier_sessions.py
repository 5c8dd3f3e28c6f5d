"""What drivers of this and earlier versions left is read in full: their jobs run on, ended ones are shown."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.jobmaster.ended_job import EndedJob
from ckpt_runtime.jobmaster.known_jobs import find_jobs
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.snapshots.snapshot import open_snapshot
from ckpt_runtime.storage.ha_store import HaStore
from ckpt_runtime.storage.leader_store import LeaderInfo
from tests.support.golden import DIRECTORY as SNAPSHOTS
from tests.support.golden_session import DIRECTORY, DISPOSED, FAILURE, FINISHED, RUNNING


@pytest.fixture(params=sorted(path.name for path in DIRECTORY.iterdir()))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> HaStore:
    shutil.copytree(DIRECTORY / request.param, tmp_path / "ha" / "default")
    return HaStore(str(tmp_path / "ha"), epoch=2)


def test_jobs_are_found_with_all_that_happened_to_them(store: HaStore) -> None:
    read: list[str] = []

    def instead(url: str) -> CompletedCheckpoint:
        """What lay at the recorded place is not kept; any snapshot of the job is as good."""
        read.append(url)
        return open_snapshot(str(SNAPSHOTS / "format-2" / "checkpoint")).metadata

    ended, running = find_jobs(store, Configuration({}), instead)

    assert (running.job_id, running.failure, running.result) == (RUNNING, None, None)
    submission = running.submission
    assert submission is not None
    assert submission.configuration.to_dict()["execution.checkpointing.interval"] == "1 s"
    assert submission.configuration.to_dict()["restart-strategy.type"] == "fixed-delay"
    uids = {operator.uid for vertex in submission.graph.vertices for operator in vertex.operators}
    assert {"left", "right", "joined", "kept-sink"} <= uids
    assert submission.archive[:2] == b"PK"
    assert submission.request is not None
    assert submission.request.job_id == RUNNING
    history = submission.history
    assert history.overrides == '{"checkpointTimeout": 123000, "unalignedEnabled": true}'
    assert [(entry.checkpoint.id, entry.owned) for entry in history.checkpoints] == [(1, True)]
    assert [url.rpartition("/")[2] for url in read] == ["chk-1"]
    assert (history.first_checkpoint_id, history.next_attempt, history.savepoint_id) == (1, 1, 9)
    assert history.next_checkpoint_id >= 2
    assert history.failures == (FAILURE,)
    assert {number: disposal.to_json() for number, disposal in history.disposals.items()} == {
        DISPOSED: {"directory": "file:///snapshots/chk-77", "files": ["state", "deep/state"]}
    }

    assert (ended.job_id, ended.submission, ended.failure) == (FINISHED, None, None)
    job = EndedJob(ended.result)
    assert job.status is JobStatus.FINISHED
    assert job.overview().job_id == FINISHED
    assert job.checkpoint_statistics().latest_completed is not None
    assert job.metrics()["numberOfCompletedCheckpoints"] == "1"
    assert job.config_info().execution_config["restart-strategy"] == "fixed-delay"


def test_the_leader_is_known_and_has_released_its_lease(store: HaStore) -> None:
    leader = store.leader.current()
    assert leader == LeaderInfo("", "mini-cluster", leader.attempt if leader else "", 1)
    assert store.leader.lease(1).released
