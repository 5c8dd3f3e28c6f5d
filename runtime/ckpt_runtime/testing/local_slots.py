"""Slot agents as plain processes: the engine without Spark, for tests that start in a second."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable

StageEnded = Callable[[int, BaseException | None], None]


class LocalSlotProvider:
    """A ``SlotProvider`` that starts one process per slot. A stage ends, as in Spark, when one of its agents does."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._stages: dict[int, list[subprocess.Popen[bytes]]] = {}

    @property
    def capacity(self) -> int:
        """Processes are started as many as are wanted."""
        return 0

    def launch(self, stage_id: int, slots: int, control_port: int, secret: str, ended: StageEnded) -> None:
        agents = [self._start(stage_id, index, control_port, secret) for index in range(slots)]
        self._stages[stage_id] = agents
        threading.Thread(target=self._watch, args=(stage_id, agents, ended), daemon=True).start()

    def cancel(self, stage_id: int) -> None:
        for agent in self._stages.get(stage_id, []):
            agent.kill()

    def agent_pids(self) -> list[int]:
        """Process ids of the living agents."""
        return [agent.pid for agents in self._stages.values() for agent in agents if agent.poll() is None]

    def _start(self, stage_id: int, index: int, control_port: int, secret: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        agent = subprocess.Popen(
            [sys.executable, "-m", "ckpt_runtime.testing.local_slot_main"], stdin=subprocess.PIPE, env=environment
        )
        assert agent.stdin is not None
        start = {"host": self._host, "port": control_port, "secret": secret, "stage": stage_id, "index": index}
        agent.stdin.write(json.dumps(start).encode() + b"\n")
        agent.stdin.close()
        return agent

    def _watch(self, stage_id: int, agents: list[subprocess.Popen[bytes]], ended: StageEnded) -> None:
        codes: dict[int, int] = {}
        while len(codes) < len(agents):
            pid, status = _wait_any(agents, codes)
            codes[pid] = status
            if status != 0:
                self.cancel(stage_id)
        self._stages.pop(stage_id, None)
        failed = [code for code in codes.values() if code != 0]
        ended(stage_id, RuntimeError(f"slot agents ended with {failed}") if failed else None)


def _wait_any(agents: list[subprocess.Popen[bytes]], known: dict[int, int]) -> tuple[int, int]:
    """Waits until one more agent has ended; returns its pid and exit code."""
    while True:
        for agent in agents:
            if agent.pid not in known:
                try:
                    return agent.pid, agent.wait(timeout=0.05)
                except subprocess.TimeoutExpired:
                    continue
