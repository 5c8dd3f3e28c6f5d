"""Ties a worker to its slot agent: the worker ends when its agent does, unless it has not run a job yet.

A worker that has run a job may hold a sink or a channel, so it ends at once with its agent. A worker that has not may
wait for a while without an agent until another one adopts it. It accepts no work in that time: user code runs only
below a living barrier task.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable

from ckpt_runtime.network.agent_messages import ProcessIdentity
from ckpt_runtime.processes import handles
from ckpt_runtime.spark.worker_processes import own_identity

logger = logging.getLogger(__name__)

ORPHAN_LEASE_S = 30.0
"""How long a worker waits for its next agent; Spark takes seconds to start another slot."""


class ParentWatch:
    """``pipe`` is the reading end of the pipe that the agent holds open; ``end`` ends this process and never returns.

    ``directory`` has the process's temporary files; its agent removes them afterwards.
    """

    def __init__(
        self, pipe: int, end: Callable[[], None], lease_s: float = ORPHAN_LEASE_S, directory: str = ""
    ) -> None:
        self.directory = directory
        self._agent: int | None = pipe
        self._end = end
        self._lease_s = lease_s
        self._working = False
        self._lock = threading.Lock()
        self._woken, self._wake = os.pipe()

    def start(self) -> None:
        threading.Thread(target=self._follow, name="agent-watch", daemon=True).start()

    @property
    def identity(self) -> ProcessIdentity:
        return own_identity()

    def begin_work(self) -> None:
        """From now on the worker ends with its agent; it ends at once if it has no agent."""
        with self._lock:
            if self._agent is None:
                logger.error("a worker without an agent was asked to work")
                self._end()
            self._working = True

    def adopted_by(self, agent: ProcessIdentity) -> None:
        """Follow another agent instead. Ends the process if that agent is gone already.

        The descriptor of the former agent stays open, as this happens only once or twice in a worker's life.
        """
        try:
            held = handles.hold(agent.pid, agent.started)
        except OSError as error:
            logger.info("the adopting agent is gone: %s", error)
            self._end()
            return
        with self._lock:
            self._agent = held
        # The watching thread still waits on the descriptor of the former agent.
        os.write(self._wake, b"!")

    def _follow(self) -> None:
        while True:
            with self._lock:
                agent = self._agent
            ready = self._wait(agent)
            if not ready:
                logger.info("no agent adopted this worker within %g s", self._lease_s)
                self._end()
                return
            if self._woken in ready:
                os.read(self._woken, 1)
            elif not self._survives(agent):
                return

    def _wait(self, agent: int | None) -> list[int]:
        """Wait for descriptors that become readable; none if the lease has expired."""
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        if agent is not None:
            poll.register(agent, select.POLLIN)
        return [descriptor for descriptor, _ in poll.poll(self._lease_s * 1000 if agent is None else None)]

    def _survives(self, agent: int | None) -> bool:
        """Whether the worker continues, after its agent is gone or has just been replaced."""
        with self._lock:
            if self._agent != agent:
                return True
            if self._working:
                self._end()
                return False
            self._agent = None
        logger.info("the agent is gone, waiting for another one")
        return True
