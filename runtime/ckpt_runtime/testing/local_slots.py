"""Slot agents as plain processes: the engine without Spark, for tests that start in a second."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Protocol

import msgspec

from ckpt_runtime.jobmaster.slots import SlotEnded
from ckpt_runtime.processes import handles
from ckpt_runtime.spark.slot_agent import AgentParameters
from ckpt_runtime.structured_log import PLAIN, LogSettings
from ckpt_runtime.testing.agent_template import forked_agent

_HOST = "127.0.0.1"


class Agent(Protocol):
    """The process of an agent, with the interface of :class:`subprocess.Popen`."""

    @property
    def pid(self) -> int:
        """The pid; 0 as long as there is no process."""

    @property
    def returncode(self) -> int | None: ...

    def kill(self) -> None: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


StartAgent = Callable[[AgentParameters], Agent]


def spawned_agent(parameters: AgentParameters) -> Agent:
    """Start an agent in a cold interpreter; works on every system. Raises OSError."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    agent = subprocess.Popen(
        [sys.executable, "-m", "ckpt_runtime.testing.local_slot_main"], stdin=subprocess.PIPE, env=environment
    )
    assert agent.stdin is not None
    agent.stdin.write(msgspec.json.encode(parameters) + b"\n")
    agent.stdin.close()
    return agent


class LocalSlotProvider:
    """A ``SlotProvider`` that starts a process for each slot, without a limit."""

    capacity = None

    def __init__(self, start_agent: StartAgent | None = None, log: LogSettings = PLAIN) -> None:
        self._log = log
        self._start_agent = start_agent or (forked_agent if handles.machine() else spawned_agent)
        self._agents: dict[str, Agent] = {}

    def watch_capacity(self, changed: Callable[[], None]) -> None:
        """Does nothing: the capacity has no limit and never changes."""

    def launch(self, slot_id: str, control_port: int, secret: str, ended: SlotEnded) -> None:
        agent = self._start_agent(AgentParameters(_HOST, control_port, secret, slot_id, self._log))
        self._agents[slot_id] = agent
        threading.Thread(target=self._watch, args=(slot_id, agent, ended), daemon=True).start()

    def cancel(self, slot_id: str) -> None:
        agent = self._agents.get(slot_id)
        if agent is not None:
            agent.kill()

    def agent_pids(self) -> list[int]:
        """Process ids of the living agents."""
        agents = list(self._agents.values())  # a copy, because each agent is removed by a thread of its own
        return [agent.pid for agent in agents if agent.poll() is None and agent.pid]

    def _watch(self, slot_id: str, agent: Agent, ended: SlotEnded) -> None:
        code = agent.wait()
        self._agents.pop(slot_id, None)
        ended(slot_id, RuntimeError(f"the slot agent ended with {code}") if code != 0 else None)
