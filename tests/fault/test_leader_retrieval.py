"""The leader is killed while commands and clients wait; its standby leads, and they continue there by themselves."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckpt_runtime.cli.framework import ExitCode
from ckpt_runtime.client.clients import AsyncCkptClient, CkptClient
from ckpt_runtime.contract.checkpoints import Checkpoint
from ckpt_runtime.leader_retrieval import LeaderDirectory
from tests.support.driver_processes import Sessions
from tests.support.jobs import fast, program_of
from tests.support.outputs import assert_sequence
from tests.support.patience import patient
from tests.support.processes import children, living
from tests.support.spark_sessions import wait_until

TOKEN = "the-token-of-both-drivers"
JOB = "fa461ac280c9aa36bde4a060aa97618c"


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[Sessions]:
    started = Sessions(tmp_path, token=TOKEN, lease_timeout_s=20.0)  # which a standby waits for
    yield started
    started.end()


class Commands:
    """Started with nothing but the directory and the token."""

    def __init__(self, directory: Path) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "CKPT_HA_DIR": str(directory / "ha"),
            "CKPT_REST_TOKEN": TOKEN,
            "CKPT_SESSION_FILE": str(directory / "no-session.json"),
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        code = "from ckpt_runtime.cli.main import entry_point; entry_point()"
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environment,
            text=True,
        )
        self.processes.append(process)
        return process

    def run(self, *arguments: str) -> str:
        process = self.start(*arguments)
        output, errors = process.communicate(timeout=patient(90))
        assert process.returncode == 0, errors
        return output

    def end(self) -> None:
        """Those that a failed test leaves."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.communicate()


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    started = Commands(tmp_path)
    yield started
    started.end()


def run_job(directory: Path) -> list[str]:
    """The attached command's arguments."""
    options = [f"-D{key}={value}" for key, value in fast().items()]
    job = ["run", "--job-id", JOB, "-p", "2", "-c", "sequence:pipeline", *options, str(program_of("sequence"))]
    return [*job, "--output", str(directory / "out"), "--rows", "0", "--rate", "2000", "--faults", str(directory)]


@pytest.mark.slow
@pytest.mark.row("air.1")
@pytest.mark.timeout(300)
def test_waits_continue_at_the_leader_that_took_over(sessions: Sessions, commands: Commands, tmp_path: Path) -> None:
    sessions.start()
    attached = commands.start(*run_job(tmp_path))
    with CkptClient(LeaderDirectory(str(tmp_path / "ha"), token=TOKEN), token=TOKEN, retry_timeout_s=60) as client:
        wait_until(lambda: any(job.job_id == JOB for job in client.list_jobs()), "the job")
        client.wait_for_state(JOB, ["RUNNING"], timeout_s=patient(120))
        first = client.url
        wait_until(lambda: client.checkpoint_statistics(JOB).counts.completed > 0, "a checkpoint")
        # A savepoint that cannot complete, and who waits for it; and two clients that wait for the end of the job.
        (tmp_path / "processor-held").touch()
        savepoint = commands.start("savepoint", JOB, str(tmp_path / "savepoints"))
        wait_until(lambda: any(map(pending_savepoint, client.checkpoint_statistics(JOB).history)), "the savepoint")
        with ThreadPoolExecutor(2) as pool:
            waits = [pool.submit(wait_blocking, tmp_path), pool.submit(asyncio.run, wait_async(tmp_path))]
            orphans = take_over(sessions)
            (tmp_path / "processor-held").unlink()
            wait_until(lambda: not living(orphans), "the slots of the killed driver to end")
            output, errors = savepoint.communicate(timeout=patient(60))
            assert savepoint.returncode == ExitCode.NOT_FOUND, (output, errors)
            assert "looking for the leader" not in errors or first in errors
            client.wait_for_state(JOB, ["RUNNING"], timeout_s=patient(120))
            assert client.url != first
            stopped = json.loads(commands.run("--json", "stop", JOB, "-p", str(tmp_path / "end")))
            assert stopped["location"].startswith((tmp_path / "end").as_uri())
            assert [wait.result(patient(60)) for wait in waits] == ["FINISHED", "FINISHED"]
    output, errors = attached.communicate(timeout=patient(60))
    assert attached.returncode == 0, (output, errors)
    assert assert_sequence(tmp_path / "out") > 0


def pending_savepoint(shown: Checkpoint) -> bool:
    return shown.is_savepoint and shown.status == "IN_PROGRESS"


def take_over(sessions: Sessions) -> list[int]:
    """Starts a standby, waits until it stands by, and kills the leader; gives the processes that it leaves."""
    leader = sessions.processes[-1]
    ready = sessions.launch()
    log = sessions.directory / f"session-{sessions.number}.log"
    wait_until(lambda: "waiting for the leadership" in log.read_text(), "the standby")
    orphans = children(leader.pid)
    leader.kill()
    leader.wait()
    wait_until(ready.exists, "the standby to lead")
    return orphans


def wait_blocking(directory: Path) -> str:
    source = LeaderDirectory(str(directory / "ha"), token=TOKEN)
    with CkptClient(source, token=TOKEN) as client:
        return client.wait_for_state(JOB, ["FINISHED"], timeout_s=patient(120))


async def wait_async(directory: Path) -> str:
    source = LeaderDirectory(str(directory / "ha"), token=TOKEN)
    async with AsyncCkptClient(source, token=TOKEN) as client:
        return await client.wait_for_state(JOB, ["FINISHED"], timeout_s=patient(120))
