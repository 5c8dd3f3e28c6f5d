"""A real agent at a real control endpoint, with small scripts in the place of workers."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_runtime.jobmaster.control_endpoint import ControlEndpoint, Message, Peer
from ckpt_runtime.network.authentication import AuthenticationError
from ckpt_runtime.spark import slot_agent
from ckpt_runtime.spark.slot_agent import AgentParameters, SlotAgent

TIMEOUT_S = 20
OBEDIENT = """
line = sys.stdin.readline()
open(os.path.join(os.path.dirname(__file__), "started.partial"), "w").write(line)
os.rename(os.path.join(os.path.dirname(__file__), "started.partial"), os.path.dirname(__file__) + "/started")
sys.stdin.read()
"""
FAILING = "sys.exit(7)"


class Driver:
    """The driver's side: one agent's peer and messages."""

    def __init__(self) -> None:
        self.peer: Peer | None = None
        self.here = asyncio.Event()
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.lost = asyncio.Event()

    def welcome(self, peer: Peer) -> None:
        peer.listener = self
        self.peer = peer
        self.here.set()

    def peer_message(self, peer: Peer, message: Message) -> None:
        self.messages.put_nowait(message)

    def peer_lost(self, peer: Peer, reason: str) -> None:
        self.lost.set()

    async def next(self) -> Message:
        return await asyncio.wait_for(self.messages.get(), TIMEOUT_S)

    def send(self, **message: Any) -> None:
        assert self.peer is not None
        self.peer.send(message)


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that another process does."""
    for _ in range(TIMEOUT_S * 200):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never happened")


@pytest.fixture
def use_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a script in the worker's place; gives the file that it makes once it has read its first line."""

    def use(body: str) -> Path:
        script = tmp_path / "worker"
        script.write_text(f"#!{sys.executable} -IS\nimport os, sys\n{body}\n")
        script.chmod(0o755)
        replaced = SimpleNamespace(executable=str(script), path=sys.path, __stderr__=None)
        monkeypatch.setattr(slot_agent, "sys", replaced)
        return tmp_path / "started"

    return use


def run(test: Callable[[Driver], Coroutine[Any, Any, None]], *, shut_down: bool = True) -> None:
    async def inside() -> None:
        driver = Driver()
        endpoint = ControlEndpoint("127.0.0.1", "secret", driver.welcome)
        port = await endpoint.start()
        agent = SlotAgent(AgentParameters("127.0.0.1", port, "secret", 3), 1)
        running = asyncio.get_running_loop().run_in_executor(None, agent.run)
        try:
            await asyncio.wait_for(driver.here.wait(), TIMEOUT_S)
            await test(driver)
            if shut_down:
                driver.send(type="shutdown")
            await asyncio.wait_for(running, TIMEOUT_S)
            assert agent._workers == {} or all(worker.poll() is not None for worker in agent._workers.values())
        finally:
            await endpoint.stop()

    asyncio.run(inside())


def test_it_says_who_it_is_and_answers_pings() -> None:
    async def test(driver: Driver) -> None:
        assert driver.peer is not None
        hello = driver.peer.hello
        assert (hello["role"], hello["slot"], hello["stage"], hello["host"]) == ("agent", "3-1", 3, "127.0.0.1")
        assert hello["pid"] == os.getpid()
        assert hello["cpus"] == sorted(os.sched_getaffinity(0))
        driver.send(type="ping")
        assert await driver.next() == {"type": "heartbeat"}

    run(test)


def test_an_unknown_message_is_ignored() -> None:
    async def test(driver: Driver) -> None:
        driver.send(type="nonsense")
        driver.send(type="kill", worker="nobody")
        driver.send(type="ping")
        assert await driver.next() == {"type": "heartbeat"}

    run(test)


def test_a_worker_gets_its_parameters_on_its_input_and_is_killed_on_request(
    use_worker: Callable[[str], Path],
) -> None:
    started = use_worker(OBEDIENT)

    async def test(driver: Driver) -> None:
        driver.send(type="spawn", worker="w1")
        await until(started.exists)
        line = json.loads(started.read_text())
        assert (line["secret"], line["slot"], line["worker"]) == ("secret", "3-1", "w1")
        assert line["driver"][0] == "127.0.0.1"
        driver.send(type="kill", worker="w1")
        assert await driver.next() == {"type": "exited", "worker": "w1", "code": -9}

    run(test)


def test_the_exit_of_a_worker_is_reported_with_its_code(use_worker: Callable[[str], Path]) -> None:
    use_worker(FAILING)

    async def test(driver: Driver) -> None:
        for number in range(3):
            driver.send(type="spawn", worker=f"w{number}")
            assert await driver.next() == {"type": "exited", "worker": f"w{number}", "code": 7}

    run(test)


def test_a_worker_that_is_gone_before_it_reads_is_reported_like_any_other(
    use_worker: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_worker(FAILING)
    real, pipe = slot_agent.subprocess.Popen, slot_agent.subprocess.PIPE

    def start_and_wait(*arguments: Any, **settings: Any) -> Any:
        process = real(*arguments, **settings)
        process.wait()
        return process

    monkeypatch.setattr(slot_agent, "subprocess", SimpleNamespace(Popen=start_and_wait, PIPE=pipe))

    async def test(driver: Driver) -> None:
        driver.send(type="spawn", worker="w1")
        assert await driver.next() == {"type": "exited", "worker": "w1", "code": 7}
        driver.send(type="ping")
        assert await driver.next() == {"type": "heartbeat"}

    run(test)


@pytest.mark.parametrize("by", ["shutdown", "hang-up"])
def test_its_workers_never_outlive_it(use_worker: Callable[[str], Path], by: str) -> None:
    started = use_worker(OBEDIENT)

    async def test(driver: Driver) -> None:
        driver.send(type="spawn", worker="w1")
        await until(started.exists)
        if by == "hang-up":
            assert driver.peer is not None
            driver.peer.close()

    run(test, shut_down=by == "shutdown")


def test_a_driver_with_another_secret_is_an_error() -> None:
    async def test() -> None:
        endpoint = ControlEndpoint("127.0.0.1", "other", lambda _: None)
        port = await endpoint.start()
        agent = SlotAgent(AgentParameters("127.0.0.1", port, "secret", 0), 0)
        with pytest.raises((AuthenticationError, ConnectionError)):
            await asyncio.get_running_loop().run_in_executor(None, agent.run)
        await endpoint.stop()

    asyncio.run(test())


def test_workers_prefer_an_installed_pyspark_to_the_zipped_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zipped = ["/spark/python/lib/pyspark.zip", "/spark/python/lib/py4j-0.10.9-src.zip"]
    monkeypatch.setattr(slot_agent, "sys", SimpleNamespace(path=["", *zipped, "/job.zip", str(tmp_path)]))
    assert slot_agent._worker_path() == [*zipped, "/job.zip", str(tmp_path)]
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").touch()
    assert slot_agent._worker_path() == ["/job.zip", str(tmp_path)]
