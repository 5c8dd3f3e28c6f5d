"""The messages between the driver and its slot agents, and the registration of agents and workers.

Separate from the messages of workers: an agent has to start quickly and needs none of their types.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

from ckpt_runtime.graph.schema import NonNegative
from ckpt_runtime.network.connections import Message, MessageDecoder

Port = Annotated[int, Meta(ge=1, le=65_535)]
PortRange = tuple[Port, Port]
Pid = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]

# --- registration: the first message of each connection, and sent only then


class ProcessIdentity(Struct, frozen=True):
    """Identifies a process so that another one can watch it. ``machine`` is empty if the process cannot be watched."""

    machine: str
    pid: Pid
    started: NonNegative


class RegisterAgent(Message, frozen=True):
    """Registers the slot of a slot agent."""

    slot: str
    host: str
    cpus: tuple[NonNegative, ...]
    process: ProcessIdentity


class RegisterWorker(Message, frozen=True):
    """Reports that a worker is ready. Its temporary files are in ``directory``."""

    slot: str
    worker: str
    data_address: tuple[str, Port]
    process: ProcessIdentity
    directory: str


Registration = RegisterAgent | RegisterWorker


# --- driver to slot agent


class SpawnWorker(Message, frozen=True):
    """Starts a process, which registers under this id.

    It listens for other workers at one of the ``data_ports`` (first and last port of a range); at any port if None.
    """

    worker: str
    data_ports: PortRange | None = None


class AdoptWorker(Message, frozen=True):
    """The agent takes over a worker of another agent."""

    worker: str
    process: ProcessIdentity
    directory: str


LAST_WRITES_S = 30.0
"""How long a worker waits for its last requests to the storage when its connection to the driver has been closed."""


class KillWorker(Message, frozen=True):
    """Ends a process at once; its exit is reported as usual."""

    worker: str


class Ping(Message, frozen=True):
    """Asks for a heartbeat, which reports the progress of the workers in ``starting``."""

    starting: tuple[str, ...] = ()


class ShutdownAgent(Message, frozen=True):
    """Ends the agent and all its workers except those in ``keep``, which another agent will adopt."""

    keep: tuple[str, ...] = ()


AgentCommand = SpawnWorker | AdoptWorker | KillWorker | Ping | ShutdownAgent


# --- slot agent to driver


class AgentHeartbeat(Message, frozen=True):
    """Answers :class:`Ping`. ``progress`` has a number for each starting worker, which changes as it makes progress."""

    progress: dict[str, NonNegative] = field(default_factory=dict)


class WorkerExited(Message, frozen=True):
    """``code`` is Python's exit code, negative for a signal; None if it is unknown or no process was started.

    ``log`` has the last lines that the worker logged.
    """

    worker: str
    code: int | None
    log: str = ""


AgentMessage = AgentHeartbeat | WorkerExited


FROM_UNREGISTERED: MessageDecoder[Registration] = MessageDecoder("a process that has not registered", Registration)
FROM_AGENT: MessageDecoder[AgentMessage] = MessageDecoder("a slot agent", AgentMessage)
TO_AGENT: MessageDecoder[AgentCommand] = MessageDecoder("the driver", AgentCommand)
