"""A real agent at a real control endpoint, with small scripts in the place of workers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_runtime.client.process_id import started, stat_fields
from ckpt_runtime.client.session_command import TOKEN_VARIABLE
from ckpt_runtime.jobmaster.control_endpoint import ControlEndpoint
from ckpt_runtime.network.agent_messages import (
    AdoptWorker,
    KillWorker,
    ProcessIdentity,
    RegisterAgent,
    ShutdownAgent,
    SpawnWorker,
    WorkerExited,
)
from ckpt_runtime.network.connections import MalformedMessageError
from ckpt_runtime.network.framing import AuthenticationError
from ckpt_runtime.processes import handles
from ckpt_runtime.processes.held_directory import HeldDirectory
from ckpt_runtime.spark import slot_agent, worker_processes
from ckpt_runtime.spark.slot_agent import AgentParameters, SlotAgent
from ckpt_runtime.spark.worker_processes import Spawner, own_identity
from tests.support.processes import children
from tests.support.slot_agents import TIMEOUT_S, SlotListener, running_agent, until

OBEDIENT = """
line = sys.stdin.readline()
open(os.path.join(os.path.dirname(__file__), "started.partial"), "w").write(line)
os.rename(os.path.join(os.path.dirname(__file__), "started.partial"), os.path.dirname(__file__) + "/started")
sys.stdin.read()
"""
FAILING = "sys.exit(7)"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the workers' temporary files lie: a script that is kept as a worker would leave them."""
    directory = tmp_path / "tmp"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


@pytest.fixture
def use_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a script in the worker's place; gives the file that it makes once it has read its first line."""

    def use(body: str) -> Path:
        script = tmp_path / "worker"
        script.write_text(f"#!{sys.executable} -IS\nimport os, sys\n{body}\n")
        script.chmod(0o755)
        replaced = SimpleNamespace(executable=str(script), path=sys.path, __stderr__=None)
        monkeypatch.setattr(worker_processes, "sys", replaced)
        return tmp_path / "started"

    return use


@asynccontextmanager
async def opened(*, shut_down: bool = True) -> AsyncIterator[SlotListener]:
    driver = SlotListener()
    async with running_agent(driver, Spawner()) as agent:
        yield driver
        if shut_down:
            driver.send(ShutdownAgent())
    for worker in list(agent._workers.values()):
        await asyncio.wait_for(asyncio.to_thread(worker.wait), TIMEOUT_S)


async def test_agent_registers_with_its_identity_and_kills_no_worker_that_it_does_not_know() -> None:
    async with opened() as driver:
        assert driver.agent is not None
        cpus = tuple(sorted(os.sched_getaffinity(0)))
        assert driver.agent.registration == RegisterAgent("3-1", "127.0.0.1", cpus, own_identity())
        assert await driver.answers()
    async with opened() as driver:
        driver.send(KillWorker("unknown"))
        assert await driver.answers()


@pytest.mark.parametrize(
    ("body", "reported"),
    [
        (b"\x81\xa4type\xa8nonsense", "the driver may not send message 'nonsense' here"),
        (b"\x82\xa4type\xabSpawnWorker\xa6worker\x05", "the message SpawnWorker of the driver is malformed"),
        (b"noise", "the driver sent bytes that are not a message"),
    ],
)
async def test_agent_that_cannot_understand_the_driver_ends_with_its_workers(
    use_worker: Callable[[str], Path], body: bytes, reported: str
) -> None:
    started = use_worker(OBEDIENT)
    before = set(children(os.getpid()))
    driver = SlotListener()
    with pytest.raises(MalformedMessageError, match=reported):
        async with running_agent(driver, Spawner()):
            driver.send(SpawnWorker("w1"))
            await until(started.exists)
            assert driver.agent is not None
            driver.agent._writer.write(struct.pack("<I", len(body)) + body)
    assert not set(children(os.getpid())) - before


async def test_a_worker_gets_its_parameters_on_its_input_and_is_killed_on_request(
    use_worker: Callable[[str], Path],
) -> None:
    started = use_worker(OBEDIENT)

    async with opened() as driver:
        driver.send(SpawnWorker("w1"))
        await until(started.exists)
        line = json.loads(started.read_text())
        assert (line["secret"], line["slot"], line["worker"]) == ("secret", "3-1", "w1")
        assert line["driver"][0] == "127.0.0.1"
        driver.send(KillWorker("w1"))
        assert await driver.exited() == WorkerExited("w1", -9)


BUSY_FOR_EACH_LINE = """
import time
sys.stdin.readline()
for line in sys.stdin:
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system does not show the processor time")
async def test_the_progress_of_a_worker_is_reported_on_request_and_changes_only_while_it_works(
    use_worker: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_worker(BUSY_FOR_EACH_LINE)
    spawned: list[subprocess.Popen[bytes]] = []

    def note(*arguments: Any, **settings: Any) -> subprocess.Popen[bytes]:
        spawned.append(subprocess.Popen(*arguments, **settings))
        return spawned[-1]

    monkeypatch.setattr(worker_processes, "subprocess", SimpleNamespace(Popen=note, PIPE=subprocess.PIPE))

    async with opened() as driver:
        driver.send(SpawnWorker("w1"))
        reported: set[int] = set()

        async def works() -> None:
            assert spawned[0].stdin is not None
            spawned[0].stdin.write(b"more\n")
            before = len(reported)
            async with asyncio.timeout(TIMEOUT_S):
                while len(reported) == before:
                    await driver.answers("w1", "unknown")
                    reported.update(driver.progress.values())
                    assert driver.progress.keys() == {"w1"}

        await driver.answers()
        assert driver.progress == {}
        await works()
        await works()
        os.kill(spawned[0].pid, signal.SIGSTOP)
        await until(lambda: stat_fields(spawned[0].pid)[0] == "T")
        await driver.answers("w1")
        stopped = driver.progress
        for _ in range(3):
            await driver.answers("w1")
            assert driver.progress == stopped
        driver.send(KillWorker("w1"))
        assert await driver.exited() == WorkerExited("w1", -9)
        await driver.answers("w1")
        assert driver.progress == {}


async def test_the_exit_of_a_worker_is_reported_with_its_code(use_worker: Callable[[str], Path]) -> None:
    use_worker(FAILING)

    async with opened() as driver:
        for number in range(3):
            driver.send(SpawnWorker(f"w{number}"))
            assert await driver.exited() == WorkerExited(f"w{number}", 7)


async def test_worker_that_ends_before_it_reads_its_parameters_is_reported(
    use_worker: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_worker(FAILING)
    real, pipe = subprocess.Popen, subprocess.PIPE

    def start_and_wait(*arguments: Any, **settings: Any) -> Any:
        process = real(*arguments, **settings)
        process.wait()
        return process

    monkeypatch.setattr(worker_processes, "subprocess", SimpleNamespace(Popen=start_and_wait, PIPE=pipe))

    async with opened() as driver:
        driver.send(SpawnWorker("w1"))
        assert await driver.exited() == WorkerExited("w1", 7)
        assert await driver.answers()


WRITING = """
line = sys.stdin.readline()
open(os.path.join(os.environ["TMPDIR"], "left"), "w").close()
partial = os.path.join(os.path.dirname(__file__), "started.partial")
open(partial, "w").write(line)
os.rename(partial, os.path.dirname(__file__) + "/started")
sys.stdin.read()
"""


ROOT = Path(__file__).parents[4]
KILLED_AGENT = """
import os, signal, sys, tempfile
sys.path[:0] = [".", "runtime"]
tempfile.tempdir = sys.argv[1]
from ckpt_runtime.spark.slot_agent import AgentParameters, SlotAgent
from ckpt_runtime.network.agent_messages import SpawnWorker

class Starter:
    def start(self, start):
        os.kill(os.getpid(), signal.SIGKILL)

SlotAgent(AgentParameters("127.0.0.1", 1, "secret", "3"), Starter())._execute_command(SpawnWorker("w0"))
"""


class TestTemporaryFiles:
    @pytest.mark.parametrize("by", ["kill", "shutdown"])
    async def test_temporary_files_are_removed_with_their_worker(
        self, use_worker: Callable[[str], Path], elsewhere: Path, by: str
    ) -> None:
        started = use_worker(WRITING)

        async with opened() as driver:
            driver.send(SpawnWorker("w1"))
            await until(started.exists)
            directory = Path(json.loads(started.read_text())["directory"])
            assert directory.parent == elsewhere
            assert (directory / "left").exists()
            if by == "kill":
                driver.send(KillWorker("w1"))
                await until(lambda: not os.listdir(elsewhere))
        assert list(elsewhere.iterdir()) == []

    async def test_temporary_files_of_a_killed_agent_are_removed_by_the_next_worker(
        self, use_worker: Callable[[str], Path], elsewhere: Path
    ) -> None:
        started = use_worker(WRITING)
        killed = subprocess.run([sys.executable, "-c", KILLED_AGENT, str(elsewhere)], cwd=ROOT, check=False)
        assert killed.returncode == -signal.SIGKILL
        assert len(os.listdir(elsewhere)) == 1

        async with opened() as driver:
            driver.send(SpawnWorker("w1"))
            await until(started.exists)
            assert [Path(json.loads(started.read_text())["directory"]).name] == os.listdir(elsewhere)

    async def test_temporary_files_of_a_kept_worker_stay(
        self, use_worker: Callable[[str], Path], elsewhere: Path
    ) -> None:
        started = use_worker(WRITING + "open(os.path.dirname(__file__) + '/free', 'w').close()")

        async with opened(shut_down=False) as driver:
            driver.send(SpawnWorker("w1"))
            await until(started.exists)
            driver.send(ShutdownAgent(("w1",)))
            await until((started.parent / "free").exists)
        assert len(list(elsewhere.glob("ckpt-worker-*/left"))) == 1

    def test_an_agent_that_ends_waits_until_they_are_deleted(
        self, use_worker: Callable[[str], Path], elsewhere: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use_worker(FAILING)
        deleting, waited_for = threading.Event(), threading.Event()
        remove = slot_agent._remove

        def remove_late(directory: HeldDirectory | str) -> None:
            # Agents of earlier tests may still be deleting what workers have left that they had let go.
            if isinstance(directory, HeldDirectory) and directory.path.parent == elsewhere:
                deleting.set()
                waited_for.wait(TIMEOUT_S)
            remove(directory)

        monkeypatch.setattr(slot_agent, "_remove", remove_late)

        async def test() -> None:
            driver = SlotListener()
            async with running_agent(driver, Spawner()) as agent:
                driver.send(SpawnWorker("w1"))
                await until(deleting.is_set)
                (watcher,) = agent._watchers.values()
                join = watcher.join

                def recorded_join(timeout: float | None = None) -> None:
                    waited_for.set()
                    join(timeout)

                monkeypatch.setattr(watcher, "join", recorded_join)
                driver.send(ShutdownAgent())

        try:
            asyncio.run(test())
            assert waited_for.is_set()
            assert list(elsewhere.iterdir()) == []
        finally:
            waited_for.set()

    @pytest.mark.skipif(not handles.machine(), reason="no process descriptors here")
    async def test_adopting_agent_removes_the_temporary_files_of_its_worker_only(
        self, tmp_path: Path, elsewhere: Path
    ) -> None:
        own, other = elsewhere / "ckpt-worker-x", elsewhere / "other"
        own.mkdir()
        other.mkdir()
        adopted = [subprocess.Popen([sys.executable, "-IS", "-c", "input()"], stdin=subprocess.PIPE) for _ in "12"]

        async with opened() as driver:  # its end waits until what each worker has left is deleted
            for process, directory in zip(adopted, (own, other), strict=True):
                began = started(process.pid)
                worker = f"worker of {directory.name}"
                driver.send(AdoptWorker(worker, ProcessIdentity("", process.pid, began), str(directory)))
                driver.send(KillWorker(worker))
                assert await driver.exited() == WorkerExited(worker, None)
        for process in adopted:
            process.communicate()
        assert list(elsewhere.iterdir()) == [other]


@pytest.mark.parametrize("lacking", ["space", "processes"])
async def test_a_worker_that_cannot_be_started_is_reported_and_the_agent_lives_on(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    def fail(*arguments: Any, **settings: Any) -> Any:
        raise BlockingIOError("no more")

    if lacking == "space":
        monkeypatch.setattr(tempfile, "mkdtemp", fail)
    else:
        monkeypatch.setattr(worker_processes, "subprocess", SimpleNamespace(Popen=fail, PIPE=-1))

    async with opened() as driver:
        driver.send(SpawnWorker("w1"))
        assert await driver.exited() == WorkerExited("w1", None)
        assert await driver.answers()
    assert list(elsewhere.iterdir()) == []


async def test_a_worker_does_not_inherit_the_token_of_the_rest_api(
    use_worker: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    started = use_worker(f"sys.exit(9 if {TOKEN_VARIABLE!r} in os.environ else 8)")
    assert not started.exists()

    async with opened() as driver:
        driver.send(SpawnWorker("w1"))
        assert (await driver.exited()).code == 8


@pytest.mark.skipif(not handles.machine(), reason="no process descriptors here")
class TestAdoption:
    async def test_an_adopted_process_is_killed_reported_and_ended_like_a_child(self) -> None:
        adopted = [subprocess.Popen([sys.executable, "-IS", "-c", "input()"], stdin=subprocess.PIPE) for _ in "12"]

        async with opened() as driver:
            for number, process in enumerate(adopted):
                began = started(process.pid)
                driver.send(AdoptWorker(f"w{number}", ProcessIdentity("", process.pid, began), ""))
            driver.send(KillWorker("w0"))
            assert await driver.exited() == WorkerExited("w0", None)
        assert [process.wait(TIMEOUT_S) for process in adopted] == [-9, -9]
        for process in adopted:
            process.communicate()

    async def test_ended_orphan_is_reported_as_ended(self) -> None:
        async with opened() as driver:
            driver.send(AdoptWorker("w1", ProcessIdentity("", os.getpid(), 0), ""))
            assert await driver.exited() == WorkerExited("w1", None)

    async def test_workers_to_be_kept_survive_the_agent_and_see_their_pipe_closed(
        self, use_worker: Callable[[str], Path]
    ) -> None:
        started = use_worker(OBEDIENT + "open(os.path.dirname(__file__) + '/free', 'w').close()")

        async with opened(shut_down=False) as driver:
            driver.send(SpawnWorker("w1"))
            await until(started.exists)
            driver.send(ShutdownAgent(("w1", "unknown")))
            await until((started.parent / "free").exists)


@pytest.mark.parametrize("by", ["shutdown", "hang-up"])
async def test_workers_end_with_their_agent(use_worker: Callable[[str], Path], by: str) -> None:
    started = use_worker(OBEDIENT)

    async with opened(shut_down=by == "shutdown") as driver:
        driver.send(SpawnWorker("w1"))
        await until(started.exists)
        if by == "hang-up":
            assert driver.agent is not None
            driver.agent.close()


async def test_a_driver_with_another_secret_is_an_error() -> None:
    endpoint = ControlEndpoint("127.0.0.1", "other", SlotListener())
    port = await endpoint.start()
    agent = SlotAgent(AgentParameters("127.0.0.1", port, "secret", "0"))
    with pytest.raises((AuthenticationError, ConnectionError)):
        await asyncio.get_running_loop().run_in_executor(None, agent.run)
    await endpoint.stop()
