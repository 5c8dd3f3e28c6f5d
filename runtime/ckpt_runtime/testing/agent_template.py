"""Slot agents from a template: one process that has imported everything, from which a session's agents are forked.

A session in Spark starts its agents once and lives for days. Tests start and end agents all the time, and in each the
imports of the agent's own template would take a second and a half. Here only the first agent of a test run imports
everything. The result is the same as in Spark: each agent is a process with its own template, and workers below that.

This module has both sides. The template ends with the requesting process, once its agents have ended. Linux only, like
the template of workers.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from ckpt_runtime.processes import handles
from ckpt_runtime.processes.forking import ForkedProcess, ForkRequest, ForkServer, Template, end_as
from ckpt_runtime.processes.user_environment import user_environment
from ckpt_runtime.spark.slot_agent import AgentParameters, SlotAgent, begin_log
from ckpt_runtime.spark.worker_processes import worker_environment
from ckpt_runtime.spark.worker_template import Forker

OFTEN_NEEDED = "ckpt_runtime.connectors.numbers"
"""The source of most jobs in tests. Each of their workers would load its kernels again, which is half of its work."""

AGENT = "ckpt-agent"
_TEMPLATE = "ckpt-agents"


class AgentStart(Struct, frozen=True):
    """The parameters of a new agent. ``environment`` is for the agent only: workers inherit the template's."""

    parameters: AgentParameters
    environment: dict[str, str]


# --- the requesting side


@dataclass(frozen=True)
class _Inherited:
    """The settings that processes inherit from their template; for different ones another template is needed."""

    owner: int
    directory: str
    path: tuple[str, ...]
    environment: dict[str, str]

    @classmethod
    def of_this_process(cls) -> _Inherited:
        environment = user_environment()
        environment.pop("PYTEST_CURRENT_TEST", None)  # it differs in each test
        return cls(os.getpid(), os.getcwd(), tuple(path for path in sys.path if path), environment)

    def variables(self) -> dict[str, str]:
        """The environment of the template."""
        return {**self.environment, "PYTHONPATH": os.pathsep.join(self.path)}


class AgentTemplate:
    """The template of this process."""

    def __init__(self, inherited: _Inherited, template: Template) -> None:
        self.inherited = inherited
        self._template = template
        threading.Thread(target=template.process.wait, name="agent-template", daemon=True).start()
        atexit.register(self.close)

    @classmethod
    def started(cls, inherited: _Inherited) -> AgentTemplate:
        """Start a new process, which has to import everything first. Raises OSError."""
        return cls(inherited, Template.started("ckpt_runtime.testing.local_slot_main", inherited.variables()))

    @classmethod
    def forked(cls, inherited: _Inherited) -> AgentTemplate:
        """Fork this process. Raises OSError."""

        def become(connection: socket.socket) -> None:
            os.environ.clear()
            os.environ.update(inherited.variables())
            serve_agents(connection)

        return cls(inherited, Template.forked(become))

    def fork(self, start: AgentStart) -> ForkedProcess:
        """Request an agent and return at once. Raises OSError if the template has ended."""
        return self._template.fork(msgspec.json.encode(start), [1, 2])

    def close(self) -> None:
        """Close the connection: the template forks no further agents."""
        atexit.unregister(self.close)
        self._template.close()


_lock = threading.Lock()
_template: AgentTemplate | None = None


def forked_agent(parameters: AgentParameters) -> ForkedProcess:
    """Fork an agent from the template of this process, or from a new one. Raises OSError if none can be made."""
    global _template
    start = AgentStart(parameters, dict(os.environ))
    inherited = _Inherited.of_this_process()
    with _lock:
        if _template is not None:
            if _template.inherited == inherited:
                with suppress(OSError):  # the template was killed
                    return _template.fork(start)
            _template.close()
        _template = AgentTemplate.started(inherited)
        return _template.fork(start)


def fork_template() -> None:
    """Fork the template from this process, which has imported what workers need and has no threads yet."""
    global _template
    with _lock:
        _template = AgentTemplate.forked(_Inherited.of_this_process())


# --- the template's side


def serve_agents(connection: socket.socket) -> None:
    """Run the template, and each agent that it forks.

    An interrupt from the terminal is left to the agents and to the requesting process.
    """
    from ckpt_runtime.spark.worker_main import prepare

    handles.set_name(_TEMPLATE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare(OFTEN_NEEDED)
    server = ForkServer(connection)
    request = server.run()
    if request is None:
        server.wait_for_all()
    else:
        end_as(lambda: _become_agent(request))


def _become_agent(request: ForkRequest) -> None:
    """Run an agent, whose own template is forked before the agent has threads."""
    request.begun()
    for number, output in enumerate(request.descriptors, 1):
        os.dup2(output, number)
        os.close(output)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    start = msgspec.json.decode(request.document, type=AgentStart)
    start.parameters.log.for_children()
    template = Template.forked(_become_template)
    handles.set_name(AGENT)
    os.environ.clear()
    os.environ.update(start.environment)
    begin_log(start.parameters)
    SlotAgent(start.parameters, Forker(template)).run()


def _become_template(connection: socket.socket) -> None:
    """Run like a template that the agent has started with the environment of workers; it logs to the agent's log."""
    from ckpt_runtime.spark.template_main import serve
    from ckpt_runtime.spark.worker_main import make_ready

    os.dup2(2, 1)
    environment = worker_environment()
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    make_ready("template")
    serve(connection)
