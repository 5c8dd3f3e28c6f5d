"""What the driver and its slot agents say to each other, and how agents and workers register.

Apart from the messages of workers: an agent has to start quickly, and needs nothing of what those carry.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ckpt_runtime.graph.schema import NonNegative
from ckpt_runtime.network.listeners import Door, Message

Port = Annotated[int, Meta(ge=1, le=65_535)]
Pid = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]

# --- registration: the first message of a connection, and never another one


class ProcessIdentity(Struct, frozen=True):
    """What another process needs to hold on to this one. ``machine`` is empty where none can."""

    machine: str
    pid: Pid
    started: NonNegative


class RegisterAgent(Message, frozen=True):
    """A slot agent offers its slot."""

    slot: str
    host: str
    cpus: tuple[NonNegative, ...]
    process: ProcessIdentity


class RegisterWorker(Message, frozen=True):
    """A worker is ready. Its temporary files are in ``directory``."""

    slot: str
    worker: str
    data_address: tuple[str, Port]
    process: ProcessIdentity
    directory: str


Registration = RegisterAgent | RegisterWorker


# --- driver to slot agent


class SpawnWorker(Message, frozen=True):
    """Start a process, which registers under this id."""

    worker: str


class AdoptWorker(Message, frozen=True):
    """Hold a worker that was another agent's."""

    worker: str
    process: ProcessIdentity
    directory: str


LAST_WRITES_S = 30.0
"""How long a worker waits for its last requests to the storage when its connection to the driver has been closed."""


class KillWorker(Message, frozen=True):
    """End a process at once; its exit is reported as always."""

    worker: str


class Ping(Message, frozen=True):
    """Answered by a heartbeat."""


class ShutdownAgent(Message, frozen=True):
    """End, with all workers but those in ``keep``, which wait for another agent."""

    keep: tuple[str, ...] = ()


AgentCommand = SpawnWorker | AdoptWorker | KillWorker | Ping | ShutdownAgent


# --- slot agent to driver


class AgentHeartbeat(Message, frozen=True):
    """Answers :class:`Ping`."""


class WorkerExited(Message, frozen=True):
    """``code`` is as Python gives it, negative for a signal; None when it is unknown, or there never was a process."""

    worker: str
    code: int | None


AgentMessage = AgentHeartbeat | WorkerExited


FROM_STRANGER: Door[Registration] = Door("a process that has not registered", Registration)
FROM_AGENT: Door[AgentMessage] = Door("a slot agent", AgentMessage)
TO_AGENT: Door[AgentCommand] = Door("the driver", AgentCommand)
