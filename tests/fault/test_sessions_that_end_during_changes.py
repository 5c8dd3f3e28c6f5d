"""A session ends while a task upgrades a job or drills a savepoint, by SIGTERM or SIGKILL; the next one continues."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_ckpt.conditions.health import DrillCondition
from airflow_provider_ckpt.exceptions import CkptOperationFailed, CkptUpgradeRefused
from airflow_provider_ckpt.operators import upgrade_steps
from airflow_provider_ckpt.operators.drill import RestoreDrillOperator
from airflow_provider_ckpt.operators.upgrade import UpgradeJobOperator
from airflow_provider_ckpt.upgrades import executor
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.contract.jobs import TERMINAL_STATES, RunOptions
from tests.support.driver_processes import Sessions
from tests.support.jobs import fast, program_of
from tests.support.outputs import assert_sequence, hidden
from tests.support.patience import patient
from tests.support.spark_sessions import wait_until
from tests.unit.provider.conftest import Task

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]

HERE: dict[str, Any] = {"deferrable": False, "poll_interval": 0.1}
"""The whole wait is in this process, where a test sees each request."""


@dataclass
class Running:
    """A job of the ``sequence`` pipeline in a session that is a process of its own."""

    sessions: Sessions
    directory: Path
    client: CkptClient = field(init=False)
    job_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.client = self.sessions.start()
        options = RunOptions(
            entry_point="sequence:pipeline",
            arguments=("--output", str(self.directory / "out"), "--rate", "500", "--faults", str(self.directory)),
            parallelism=2,
            configuration=fast(),
        )
        self.job_id = self.client.run_pipeline(
            self.client.upload_pipeline(*pack_pipeline(program_of("sequence"))), options
        )
        self.client.wait_for_state(self.job_id, ["RUNNING"], timeout_s=patient(180))
        self.completes(self.job_id)

    def next_session(self, end: Callable[[], None]) -> None:
        """End the session, and start the next one."""
        end()
        self.client = self.sessions.start()

    def completes(self, job_id: str) -> None:
        """Waits for one more checkpoint."""
        known = self.client.checkpoint_statistics(job_id).counts.completed
        wait_until(lambda: self.client.checkpoint_statistics(job_id).counts.completed > known, "a checkpoint", 120)

    def living(self) -> list[str]:
        return [line.job_id for line in self.client.list_jobs() if line.state not in TERMINAL_STATES]

    def holders(self) -> list[str]:
        return [holder.owner for program in self.client.list_pipelines() for holder in program.holders]

    def stop_exactly(self, job_id: str) -> None:
        """Each row came once, whatever has ended meanwhile, and nothing of a job that has ended is left."""
        self.client.wait_for_state(job_id, ["RUNNING"], timeout_s=patient(180))
        self.completes(job_id)
        trigger = self.client.stop_with_savepoint(job_id, str(self.directory / "end"))
        self.client.wait_for_operation("savepoint", trigger, job_id, timeout_s=patient(180))
        self.client.wait_for_state(job_id, ["FINISHED"], timeout_s=patient(180))
        wait_until(lambda: hidden(self.directory / "out") == [], "the clean-up of the sinks")
        assert assert_sequence(self.directory / "out") > 0
        owned = self.directory / "ha" / "default" / "snapshots"
        wait_until(lambda: not owned.exists() or not list(owned.iterdir()), "the clean-up of the ended jobs", 120)


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    sessions = Sessions(tmp_path)
    connection = {"conn_type": "ckpt", "extra": {"ha_dir": str(tmp_path / "ha")}}
    monkeypatch.setenv("AIRFLOW_CONN_CKPT_DEFAULT", json.dumps(connection))
    try:
        yield Running(sessions, tmp_path)
    finally:
        sessions.end()


@pytest.mark.row("air.4")
@pytest.mark.parametrize("moment", ["before", "behind"])
def test_an_upgrade_whose_session_ends_at_each_request_is_finished_by_the_next_sessions(
    running: Running, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """SIGTERM comes once before, or once behind, each kind of request of the upgrade."""
    version = running.directory / "version"
    shutil.copytree(program_of("sequence"), version)
    with (version / "sequence.py").open("a") as file:
        file.write("# another version\n")
    interrupted: list[str] = []
    perform = executor.perform

    async def with_an_end(client: Any, action: Any, *more: Any) -> Any:
        kind = type(action).__name__
        if kind in interrupted:
            return await perform(client, action, *more)
        interrupted.append(kind)
        if moment == "before":
            await asyncio.to_thread(running.next_session, running.sessions.terminate)
            return await perform(client, action, *more)
        answer = await perform(client, action, *more)
        await asyncio.to_thread(running.next_session, running.sessions.terminate)
        return answer

    for module in (executor, upgrade_steps):
        monkeypatch.setattr(module, "perform", with_an_end)
    savepoints = running.directory / "savepoints"

    def upgrade() -> dict[str, Any]:
        operator = UpgradeJobOperator(
            task_id="t", job=running.job_id, pipeline=str(version), target_directory=str(savepoints), **HERE
        )
        found: dict[str, Any] = operator.execute(Task().context())
        return found

    refused = ""
    try:
        result = upgrade()
    except CkptUpgradeRefused as error:
        refused = str(error)
    if refused:
        # A session that has just begun takes no savepoint: the upgrade ends without a trace, for the next run.
        assert "The job is not running" in refused
        assert running.living() == [running.job_id]
        assert running.holders() == []
        running.client.wait_for_state(running.job_id, ["RUNNING"], timeout_s=patient(180))
        result = upgrade()
    assert {"Claim", "Hold", "Look", "Preview", "Stop", "ReadStop", "Run", "Release"} <= set(interrupted)
    assert result["outcome"] == "UPGRADED"
    assert running.living() == [result["job_id"]]
    assert running.client.job_config(result["job_id"]).pipeline_id == result["pipeline_id"]
    assert [path.as_uri() for path in savepoints.iterdir()] == [result["savepoint_path"]]
    lines = {line.job_id: line for line in running.client.list_jobs()}
    assert lines[running.job_id].end_time_ms <= lines[result["job_id"]].start_time_ms
    assert running.holders() == []
    running.stop_exactly(result["job_id"])


@pytest.mark.row("air.10")
@pytest.mark.parametrize("end", ["terminate", "kill"])
def test_a_drill_whose_session_ends_leaves_nothing_and_the_next_try_passes(
    running: Running, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The result is noted once, and the job that has taken the savepoint notices nothing."""
    savepoints = running.directory / "savepoints"
    trigger = running.client.trigger_savepoint(running.job_id, str(savepoints))
    running.client.wait_for_operation("savepoint", trigger, running.job_id, timeout_s=patient(180))
    (savepoint,) = (path.as_uri() for path in savepoints.iterdir())
    task = Task()

    def drill(checkpoints: int) -> RestoreDrillOperator:
        return RestoreDrillOperator(
            task_id="t",
            pipeline=str(program_of("sequence")),
            entry="sequence:pipeline",
            args=["--output", str(running.directory / "out"), "--faults", str(running.directory)],
            parallelism=2,
            savepoint_path=savepoint,
            checkpoints=checkpoints,
            checkpoint_interval="200 ms",
            configuration={"execution.checkpointing.dir": str(running.directory / "drilled")},
            **HERE,
        )

    look = DrillCondition.look
    ended: list[str] = []

    async def look_and_end(condition: DrillCondition, client: Any) -> Any:
        drill = await client.job_details(condition.job_id)
        if not ended and drill.state == "RUNNING":
            ended.append(condition.job_id)
            await asyncio.to_thread(running.next_session, getattr(running.sessions, end))
        return await look(condition, client)

    monkeypatch.setattr(DrillCondition, "look", look_and_end)
    with pytest.raises(CkptOperationFailed, match="A drill ends with its driver; the next try begins another"):
        drill(1_000_000).execute(task.context())  # it does not end by itself
    assert ended
    assert ended[0] not in {line.job_id for line in running.client.list_jobs()}
    assert running.client.list_savepoints(str(savepoints))[0].drilled is None
    result = drill(2).execute(task.context())
    assert result["passed"]
    (entry,) = running.client.list_savepoints(str(savepoints))
    assert [mark.passed for mark in entry.drills] == [True]
    assert running.living() == [running.job_id]
    drilled = running.directory / "drilled"
    assert not drilled.exists() or not [path for path in drilled.rglob("*") if path.is_file()]
    running.stop_exactly(running.job_id)
