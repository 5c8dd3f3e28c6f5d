"""A request to start a new version that arrives when it was given up, and another driver leads: nothing is started."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_provider_ckpt.upgrades import actions as act
from airflow_provider_ckpt.upgrades import steps
from airflow_provider_ckpt.upgrades.executor import perform
from airflow_provider_ckpt.upgrades.record import DesiredUpgrade, Goal, Outcome, Step, Upgrade
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.contract.jobs import TERMINAL_STATES, RunOptions
from tests.support.driver_processes import Sessions
from tests.support.jobs import fast, program_of
from tests.support.outputs import assert_sequence
from tests.support.patience import patient
from tests.support.spark_sessions import wait_until

PAUSE_S = 0.05


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[Sessions]:
    started = Sessions(tmp_path)
    yield started
    started.end()


class Dead(Exception):
    """The process that drives the upgrade is gone."""


class Driven:
    """An upgrade, against whichever driver leads. It dies before the request for the job ``dies_before``."""

    def __init__(self, client: CkptClient, record: Upgrade) -> None:
        self.client = client
        self.record = record
        self.requests: list[act.Run] = []
        self.dies_before: str | None = None

    def ask(self, action: act.Action) -> act.Answer:
        return self.client.run(self._ask(action))

    async def _ask(self, action: act.Action) -> act.Answer:
        if isinstance(action, act.Run):
            if action.job == self.dies_before:
                raise Dead
            self.requests.append(action)
        return await perform(self.client.calls, action, PAUSE_S)

    def go(self) -> None:
        """Until the upgrade has ended, or its process dies."""

        def ended() -> bool:
            changed = self.client.run(steps.take_step(self.record, self._ask, round(time.time() * 1000)))
            self.record = changed or self.record
            return self.record.step is Step.ENDED

        wait_until(ended, "the end of the upgrade", 120)

    def living(self) -> list[str]:
        return [line.job_id for line in self.client.list_jobs() if line.state not in TERMINAL_STATES]


def submitted(client: CkptClient, directory: Path) -> tuple[str, str]:
    """The old version, and the program of the new one."""
    (directory / "version").mkdir()
    new = shutil.copytree(program_of("sequence"), directory / "version", dirs_exist_ok=True)
    (new / "sequence.py").write_text((new / "sequence.py").read_text() + "# another version\n")
    arguments = ("--output", str(directory / "out"), "--rows", "0", "--rate", "500", "--faults", str(directory))
    options = RunOptions(entry_point="sequence:pipeline", arguments=arguments, parallelism=2, configuration=fast())
    job_id = client.run_pipeline(client.upload_pipeline(*pack_pipeline(program_of("sequence"))), options)
    client.wait_for_state(job_id, ["RUNNING"], timeout_s=patient(180))
    wait_until(lambda: client.checkpoint_statistics(job_id).counts.completed > 0, "a checkpoint")
    return job_id, client.upload_pipeline(*pack_pipeline(new))


@pytest.mark.slow
@pytest.mark.row("air.4")
@pytest.mark.timeout(600)
def test_a_run_that_arrives_after_the_rollback_starts_nothing_although_another_driver_leads(
    sessions: Sessions, tmp_path: Path
) -> None:
    client = sessions.start()
    old, program = submitted(client, tmp_path)
    checkpoints = tmp_path / "new-checkpoints"
    checkpoints.write_text("in the way, for a while")
    desired = DesiredUpgrade(
        goal=Goal.UPGRADE,
        job=old,
        program=program,
        options={"configuration": {"execution.checkpointing.dir": str(checkpoints)}},
        directory=str(tmp_path / "savepoints"),
    )
    upgrade = Driven(client, steps.begin(desired, "series"))
    upgrade.dies_before = upgrade.record.restarted_job
    with pytest.raises(Dead):
        upgrade.go()
    assert "the new version was not started" in upgrade.record.why
    assert upgrade.record.step is Step.ROLL_BACK
    (late,) = upgrade.requests
    checkpoints.unlink()  # now it would succeed

    sessions.kill()
    upgrade.client = client = sessions.start()
    assert [each.id for each in client.retired_job_ids()] == [late.job]
    answer = upgrade.ask(late)
    assert isinstance(answer, act.Refused)
    assert answer.reason.endswith(f"The job id {late.job} is retired: no job can be started with it; choose another id")
    assert upgrade.living() == []

    upgrade.dies_before = None
    upgrade.go()
    assert upgrade.record.outcome is Outcome.ROLLED_BACK
    assert isinstance(upgrade.ask(late), act.Refused)
    restarted = upgrade.record.restarted_job
    assert upgrade.living() == [restarted]
    wait_until(lambda: client.checkpoint_statistics(restarted).counts.completed > 1, "checkpoints")
    client.wait_for_operation(
        "savepoint", client.stop_with_savepoint(restarted, str(tmp_path / "end")), restarted, timeout_s=patient(180)
    )
    assert assert_sequence(tmp_path / "out") > 0

    # Under a claim that holds, nothing but its id was in the way of that request.
    claim = act.Claim(restarted, "another-upgrade", (), None, 60_000)
    assert upgrade.ask(claim) == act.Accepted()
    twin = act.Run(late.program, "ab" * 16, late.like_job, late.options, late.snapshot, claim.owner)
    assert upgrade.ask(twin) == act.Accepted()
    assert upgrade.living() == [twin.job]
