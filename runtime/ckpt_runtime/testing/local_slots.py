"""Slot agents as plain processes: the engine without Spark, for tests that start in a second."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from ckpt_runtime.jobmaster.slot_stages import StageEnded
from ckpt_runtime.spark import processes
from ckpt_runtime.spark.slot_agent import AgentParameters
from ckpt_runtime.structured_log import PLAIN, LogSettings
from ckpt_runtime.testing.agent_template import forked_agent

_HOST = "127.0.0.1"
_LOOK_S = 0.05
"""There is no way to wait for whichever of several processes ends first, and for no other child of this one."""


class Agent(Protocol):
    """The process of one, as :class:`subprocess.Popen` shows it."""

    @property
    def pid(self) -> int:
        """0 as long as there is none."""

    @property
    def returncode(self) -> int | None: ...

    def kill(self) -> None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...


StartAgent = Callable[[AgentParameters, int], Agent]


def spawned_agent(parameters: AgentParameters, index: int) -> Agent:
    """From a cold interpreter; works on every system. Raises OSError."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    agent = subprocess.Popen(
        [sys.executable, "-m", "ckpt_runtime.testing.local_slot_main"], stdin=subprocess.PIPE, env=environment
    )
    assert agent.stdin is not None
    agent.stdin.write(msgspec.json.encode((parameters, index)) + b"\n")
    agent.stdin.close()
    return agent


class LocalSlotProvider:
    """A ``SlotProvider`` that starts one process per slot. A stage ends, as in Spark, when one of its agents does."""

    def __init__(self, start_agent: StartAgent | None = None, log: LogSettings = PLAIN) -> None:
        self._log = log
        self._start_agent = start_agent or (forked_agent if processes.machine() else spawned_agent)
        self._stages: dict[int, list[Agent]] = {}

    @property
    def capacity(self) -> int:
        """Processes are started as many as are wanted."""
        return 0

    def launch(self, stage_id: int, slots: int, control_port: int, secret: str, ended: StageEnded) -> None:
        parameters = AgentParameters(_HOST, control_port, secret, stage_id, self._log)
        agents = [self._start_agent(parameters, index) for index in range(slots)]
        self._stages[stage_id] = agents
        threading.Thread(target=self._watch, args=(stage_id, agents, ended), daemon=True).start()

    def cancel(self, stage_id: int) -> None:
        for agent in self._stages.get(stage_id, []):
            agent.kill()

    def agent_pids(self) -> list[int]:
        """Process ids of the living agents."""
        stages = list(self._stages.values())  # which end in threads of their own
        living = [agent for agents in stages for agent in agents if agent.poll() is None]
        return [agent.pid for agent in living if agent.pid]

    def _watch(self, stage_id: int, agents: list[Agent], ended: StageEnded) -> None:
        running = deque(agents)
        while running:
            agent = running.popleft()
            try:
                if agent.wait(timeout=_LOOK_S) != 0:
                    self.cancel(stage_id)
            except subprocess.TimeoutExpired:
                running.append(agent)
        self._stages.pop(stage_id, None)
        failed = [agent.returncode for agent in agents if agent.returncode != 0]
        ended(stage_id, RuntimeError(f"slot agents ended with {failed}") if failed else None)
