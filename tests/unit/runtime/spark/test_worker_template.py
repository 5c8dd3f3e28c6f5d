"""Real workers, forked from a real template that a real agent starts; the driver's side is the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ckpt_runtime.client.process_id import stat_fields
from ckpt_runtime.client.session_command import TOKEN_VARIABLE
from ckpt_runtime.network.agent_messages import KillWorker, ShutdownAgent, SpawnWorker
from ckpt_runtime.processes import handles
from tests.support.processes import children, command_name, living
from tests.support.slot_agents import SlotListener, running_agent, until

pytestmark = pytest.mark.skipif(not handles.machine(), reason="no process descriptors here")


@asynccontextmanager
async def opened(*, shut_down: bool = True) -> AsyncIterator[SlotListener]:
    before = set(children(os.getpid()))
    driver = SlotListener()
    async with running_agent(driver):
        yield driver
        if shut_down:
            driver.send(ShutdownAgent())
    assert not set(children(os.getpid())) - before


def template() -> int:
    (pid,) = [pid for pid in children(os.getpid()) if command_name(pid) == handles.TEMPLATE]
    return pid


def environment(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the workers' temporary files lie."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


async def test_workers_share_a_template_live_and_die_by_themselves_and_outlive_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")

    async with opened() as driver:
        pids = await driver.started("w1", "w2", "w3")
        assert len(set(pids)) == 3
        assert {command_name(pid) for pid in pids} == {handles.WORKER}
        assert set(pids) <= set(children(template()))
        assert TOKEN_VARIABLE.encode() not in environment(pids[0])
        assert len(os.listdir(directory)) == 3

        driver.send(KillWorker("w1"))
        assert await driver.code_of("w1") == -signal.SIGKILL
        os.kill(pids[1], signal.SIGTERM)
        assert await driver.code_of("w2") == -signal.SIGTERM
        driver.workers["w3"].close()
        assert await driver.code_of("w3") == 0
        assert not living(pids)

        (again,) = await driver.started("w4")
        assert again in children(template())
        await until(lambda: len(os.listdir(directory)) == 1)

        old = template()
        os.kill(old, signal.SIGKILL)
        await until(lambda: not living([old]))
        assert living([again]) == [again]
        driver.send(KillWorker("w4"))
        assert await driver.code_of("w4") is None
        driver.send(SpawnWorker("w5"))
        await until(lambda: "w5" in driver.workers)
        assert template() != old
    assert not list(directory.iterdir())


async def test_a_worker_whose_template_hangs_is_killed_with_it_and_the_next_one_starts(directory: Path) -> None:
    async with opened() as driver:
        driver.send(SpawnWorker("w1"))
        await until(lambda: any(command_name(pid) == handles.TEMPLATE for pid in children(os.getpid())))
        hung = template()
        os.kill(hung, signal.SIGSTOP)
        await until(lambda: stat_fields(hung)[0] == "T")
        await driver.answers("w1")
        assert driver.progress["w1"] == handles.processor_ticks(hung)
        driver.send(KillWorker("w1"))
        assert await driver.code_of("w1") is None
        await driver.started("w2")
    assert not list(directory.iterdir())


async def test_an_agent_that_ends_while_its_template_starts_leaves_nothing(directory: Path) -> None:
    async with opened() as driver:
        driver.send(SpawnWorker("w1"))
        await until(lambda: any(command_name(pid) == handles.TEMPLATE for pid in children(os.getpid())))
    assert not list(directory.iterdir())


@pytest.mark.long
async def test_kept_workers_outlive_agent_and_template(directory: Path) -> None:
    kept: list[int] = []

    async with opened(shut_down=False) as driver:
        kept.extend(await driver.started("w1", "w2"))
        driver.send(ShutdownAgent(("w1",)))
        await until(lambda: driver.workers["w2"] in driver.lost)
        await until(lambda: living(kept) == kept[:1])
        assert driver.workers["w1"] not in driver.lost
        driver.workers["w1"].close()
        await until(lambda: not living(kept))
    assert not list(directory.iterdir())


@pytest.mark.long
async def test_a_template_that_ends_during_a_request_is_reported_like_an_ended_worker() -> None:
    async with opened() as driver:
        driver.send(SpawnWorker("w1"))
        await until(lambda: any(command_name(pid) == handles.TEMPLATE for pid in children(os.getpid())))
        os.kill(template(), signal.SIGKILL)
        assert await driver.code_of("w1") is None
        await driver.started("w2")


SIBLINGS = """
import os
import numpy as np
from ckpt_runtime.spark import worker_main

worker_main._watched_parent = lambda start, pipe: None
worker_main._serve = lambda start, parent_watch: (print(np.random.random(), flush=True), os._exit(0))
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        worker_main.work({}, 0)
    os.waitpid(pid, 0)
"""


def test_workers_of_one_template_do_not_draw_the_same_numbers() -> None:
    """User code may use NumPy's own generator, which forks alike."""
    done = subprocess.run([sys.executable, "-c", SIBLINGS], check=True, capture_output=True, text=True)
    assert len(set(done.stdout.split())) == 2
