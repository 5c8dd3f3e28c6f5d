"""Real agents, forked from a real template; the driver's side is the test."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt_runtime.client.session_command import TOKEN_VARIABLE
from ckpt_runtime.jobmaster.control_endpoint import ControlEndpoint
from ckpt_runtime.network.agent_messages import ShutdownAgent, SpawnWorker
from ckpt_runtime.processes import handles
from ckpt_runtime.testing.agent_template import AGENT
from ckpt_runtime.testing.mini_cluster import LocalSlotProvider, MiniCluster
from tests.support.processes import children, command_name, living, parent
from tests.support.slot_agents import SlotListener, until

pytestmark = pytest.mark.skipif(not handles.machine(), reason="no process descriptors here")
TIMEOUT_S = 60


def started(
    slots: int, test: Callable[[SlotListener, list[int]], None] | None = None, *, shut_down: bool = True
) -> list[str]:
    """Runs agents at an endpoint; gives the errors that they ended with."""
    ended: queue.Queue[object] = queue.Queue()
    errors: list[str] = []

    async def inside() -> None:
        driver = SlotListener()
        endpoint = ControlEndpoint("127.0.0.1", "secret", driver)
        provider = LocalSlotProvider()
        try:
            port = await endpoint.start()
            for slot in range(slots):
                provider.launch(str(slot), port, "secret", lambda _, error: ended.put(error))
            await until(lambda: len(driver.agents) == slots)
            agents = provider.agent_pids()
            for number, agent in enumerate(driver.agents):
                agent.send(SpawnWorker(f"w{number}"))
            await until(lambda: len(driver.workers) == slots)
            if test is not None:
                await asyncio.to_thread(test, driver, agents)
            for agent in driver.agents if shut_down else ():
                agent.send(ShutdownAgent())
            for _ in range(slots):
                error = await asyncio.to_thread(ended.get, True, TIMEOUT_S)
                if error is not None:
                    errors.append(str(error))
        finally:
            await endpoint.stop()
            for slot in range(slots):
                provider.cancel(str(slot))

    asyncio.run(inside())
    return errors


def test_agents_of_one_template_are_processes_with_a_template_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "hidden")
    seen: list[int] = []

    def test(driver: SlotListener, agents: list[int]) -> None:
        assert [command_name(agent) for agent in agents] == [AGENT, AGENT]
        assert len({parent(agent) for agent in agents}) == 1
        workers = {peer.registration.process.pid for peer in driver.workers.values()}
        assert len(workers) == 2
        for agent in agents:
            below = children(agent)
            assert [command_name(pid) for pid in below].count(handles.TEMPLATE) == 1
            assert len(workers & set(below)) == 1
        seen.extend(pid for agent in agents for pid in [agent, *children(agent)])
        for pid in [parent(agents[0]), *seen]:
            assert b"hidden" not in Path(f"/proc/{pid}/environ").read_bytes()

    assert started(2, test) == []
    MiniCluster.wait_until(lambda: not living(seen), "the supervisors to end behind the workers", TIMEOUT_S)


@pytest.mark.long
def test_agents_that_are_killed_end_their_slots() -> None:
    seen: list[int] = []

    def test(driver: SlotListener, agents: list[int]) -> None:
        seen.extend(pid for agent in agents for pid in [agent, *children(agent)])
        for agent in agents:
            os.kill(agent, signal.SIGKILL)

    errors = started(2, test, shut_down=False)
    assert errors == [f"the slot agent ended with {-signal.SIGKILL}"] * 2
    MiniCluster.wait_until(lambda: not living(seen), "the workers to end", TIMEOUT_S)


def test_the_agents_of_a_killed_template_end_and_later_agents_get_another_template() -> None:
    templates: list[int] = []
    seen: list[int] = []

    def test(driver: SlotListener, agents: list[int]) -> None:
        templates.append(parent(agents[0]))
        seen.extend(agents)
        os.kill(templates[0], signal.SIGKILL)

    errors = started(2, test, shut_down=False)
    assert errors == [f"the slot agent ended with {-signal.SIGKILL}"] * 2
    MiniCluster.wait_until(lambda: not living(seen), "the agents to end", TIMEOUT_S)
    assert started(1, lambda driver, agents: templates.append(parent(agents[0]))) == []
    assert templates[0] != templates[1]


@pytest.mark.long
def test_forked_processes_inherit_the_environment_of_the_moment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    templates: list[int] = []

    def test(driver: SlotListener, agents: list[int]) -> None:
        templates.append(parent(agents[0]))
        for pid in [agents[0], *(peer.registration.process.pid for peer in driver.workers.values())]:
            assert Path(f"/proc/{pid}/cwd").readlink() == Path.cwd()
            assert os.environ.get("OF_THE_TEST", "").encode() in Path(f"/proc/{pid}/environ").read_bytes()

    assert started(1, test) == []
    monkeypatch.setenv("OF_THE_TEST", "seen by workers")
    assert started(1, test) == []
    monkeypatch.chdir(tmp_path)
    assert started(1, test) == []
    assert len(set(templates)) == 3


@pytest.fixture
def other_session(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from ckpt_runtime.testing.mini_cluster import MiniCluster\n"
        "from tests.support.jobs import SequenceJob\n"
        "with MiniCluster() as cluster:\n"
        "    job = SequenceJob(cluster, Path(sys.argv[1]))\n"
        "    job.start()\n"
        "    job.running()\n"
        "    print('runs', flush=True)\n"
        "    sys.stdin.read()\n"
        "    job.end()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "runs\n"
        yield process
        process.kill()


@pytest.mark.long
@pytest.mark.parametrize("killed", [True, False], ids=["killed", "ends"])
def test_all_end_with_the_process_that_has_asked_for_them(killed: bool, other_session: subprocess.Popen[str]) -> None:
    started = children(other_session.pid)
    assert {AGENT, handles.TEMPLATE, handles.WORKER} <= {command_name(pid) for pid in started}
    if killed:
        other_session.kill()
    else:
        assert other_session.stdin is not None
        other_session.stdin.close()
    MiniCluster.wait_until(lambda: not living(started), "all processes to end", TIMEOUT_S)
    assert other_session.wait(TIMEOUT_S) == (-signal.SIGKILL if killed else 0)
