"""The types that the slot pool works with: slots, workers, owners and providers of slots, timeouts, notices of losses.

The end of a connection is noticed first and does not show the cause. The agent reports the exit code a moment later,
and Spark reports the loss of an executor within seconds. Users read the first notice that a job gets as the cause, so
notices are held back briefly.

Pure functions decide which requests for slots are served, what waiting ones reserve, and which cores workers get.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ckpt_runtime.configuration.cluster_options import HeartbeatOptions, SlotOptions, TaskManagerOptions
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.jobmaster.control_endpoint import AgentPeer, WorkerPeer
from ckpt_runtime.network.control_messages import DeploymentMessage
from ckpt_runtime.process_figures import ProcessFigures

LOSS_GRACE_S = 3.0
"""How long the cause of a loss is awaited: agents report an exit code at once, Spark a lost executor in seconds."""

SPARE_PAUSE_S = 1.0
"""A spare's start costs more than a second of a core, which a job that deploys at the same moment needs more."""


@dataclass(frozen=True, slots=True)
class SlotTimes:
    """Times in seconds: an unused slot is kept for ``idle_timeout_s``; a request waits for ``request_timeout_s``.

    While a job waits for slots, periods of ``reservation_interval_s`` alternate: free slots go to other jobs in one and
    are reserved for it in the next. A starting worker is given up after ``registration_timeout_s`` without progress.
    """

    heartbeat_interval_s: float = 1.0
    heartbeat_timeout_s: float = 10.0
    idle_timeout_s: float = 50.0
    request_timeout_s: float = 300.0
    reservation_interval_s: float = 60.0
    registration_timeout_s: float = 120.0
    spare_pause_s: float = SPARE_PAUSE_S
    loss_grace_s: float = LOSS_GRACE_S

    @classmethod
    def of(cls, configuration: Configuration) -> SlotTimes:
        """The times that a session's options configure."""
        times = (
            HeartbeatOptions.INTERVAL,
            HeartbeatOptions.TIMEOUT,
            SlotOptions.IDLE_TIMEOUT,
            SlotOptions.REQUEST_TIMEOUT,
            SlotOptions.RESERVATION_INTERVAL,
            TaskManagerOptions.REGISTRATION_TIMEOUT,
        )
        return cls(*(configuration.get(option) / 1000 for option in times))


@dataclass(frozen=True, slots=True)
class EndedWorkerLog:
    """The last log lines of a worker whose process ended unexpectedly."""

    worker_id: str
    slot_id: str
    ended_at_ms: int
    reason: str
    text: str


class SlotsUnavailableError(RuntimeError):
    """The slots that a job needs were not available in time."""


SlotEnded = Callable[[str, BaseException | None], None]


class SlotProvider(Protocol):
    """Where slot agents come from: Spark, or plain processes in tests."""

    @property
    def capacity(self) -> int | None:
        """How many slots could run at once as far as is known now; None without a limit."""

    def watch_capacity(self, changed: Callable[[], None]) -> None:
        """``changed`` may be called from any thread, after each change of the capacity."""

    def launch(self, slot_id: str, control_port: int, secret: str, ended: SlotEnded) -> None:
        """Starts a slot's agent; ``ended`` is called once, from any thread, when the agent has ended."""

    def cancel(self, slot_id: str) -> None: ...


class SlotOwner(Protocol):
    """The job that holds slots."""

    def worker_message(self, slot: Slot, message: DeploymentMessage) -> None:
        """Raises MalformedMessageError for a message that the worker may not send."""

    def worker_lost(self, slot: Slot, reason: str) -> None:
        """The slot's worker was lost. If the slot lives, ``slot.worker`` already is the spare (or None until ready)."""

    def slot_lost(self, slot: Slot, reason: str) -> None: ...

    def slots_awaited(self, reason: str) -> None:
        """``reason`` says why the owner's request for slots waits; it is empty when no request waits."""


@dataclass(slots=True, eq=False)
class Worker:
    """A worker process that has registered. ``used`` is true once subtasks were deployed to it."""

    peer: WorkerPeer
    used: bool = False
    failures: int = 0
    """How often subtasks of its job have failed in it."""
    process: ProcessFigures | None = None
    """The figures of its last heartbeat."""

    @property
    def worker_id(self) -> str:
        return self.peer.registration.worker

    @property
    def pid(self) -> int:
        return self.peer.registration.process.pid

    @property
    def machine(self) -> str:
        """The machine on which an agent can adopt it; empty when no agent can."""
        return self.peer.registration.process.machine

    @property
    def data_address(self) -> tuple[str, int]:
        return self.peer.registration.data_address


@dataclass(slots=True)
class StartingWorker:
    """A worker that is not ready yet: the last progress figure that its agent reported, and when that last changed."""

    progressed_at: float
    progress: int | None = None


@dataclass(slots=True, eq=False)
class Slot:
    """One slot agent. ``worker`` is the active worker, None while none is ready.

    ``starting`` has the worker that is being spawned or adopted; ``adopting`` is the latter. ``spare_due`` is the time
    from which a spare may be started in addition to the active worker. The worker is bound to ``core``, if there is
    one.
    """

    agent: AgentPeer
    worker: Worker | None = None
    spare: Worker | None = None
    owner: SlotOwner | None = None
    core: int | None = None
    idle_since: float = 0.0
    starting: dict[str, StartingWorker] = field(default_factory=dict)
    adopting: Worker | None = None
    spare_due: float = 0.0
    failed_starts: int = 0
    lost: bool = False

    @property
    def slot_id(self) -> str:
        return self.agent.registration.slot

    @property
    def host(self) -> str:
        return self.agent.registration.host

    @property
    def cpus(self) -> Sequence[int]:
        return self.agent.registration.cpus

    @property
    def workers(self) -> list[Worker]:
        """The workers that are ready, the active one first, and the one being adopted."""
        return [worker for worker in (self.worker, self.spare, self.adopting) if worker is not None]

    @property
    def endpoint(self) -> str:
        """``host:port`` of the active worker's data exchange; the host alone while there is none."""
        if self.worker is None:
            return self.host
        host, port = self.worker.data_address
        return f"{host}:{port}"


@dataclass(slots=True, eq=False)
class SlotRequest:
    """A job's pending request for slots; ``answer`` receives them. ``reason`` says why it waits."""

    owner: SlotOwner
    count: int
    held: list[Slot]
    answer: asyncio.Future[list[Slot]]
    since: float
    """When its owner began to wait; earlier than this request if the owner's previous one was not served."""
    taken: list[Slot] = field(default_factory=list)
    reason: str = ""
    refused: bool = False

    def kept(self) -> list[Slot]:
        """The slots that the owner had and still holds: it may have lost or released any of them in the meantime."""
        return [slot for slot in self.held if not slot.lost and slot.owner is self.owner][: self.count]

    def wait(self, reason: str, *, refused: bool = False) -> None:
        self.refused = refused
        if reason != self.reason:
            self.reason = reason
            self.owner.slots_awaited(reason)


_BY_SHELLS = 128
"""A shell, a container or a JVM that reports a signal adds this to its number."""
_HINTS = {
    signal.SIGKILL: "killed by another process, most often by the kernel because memory was exhausted",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGBUS: "a crash in native code, or a mapped file on a full disk",
    signal.SIGABRT: "native code aborted",
}

Tell = Callable[[str], None]
"""Notifies an owner of a loss; its argument is the reason."""


@dataclass(slots=True)
class _Held:
    timer: asyncio.TimerHandle
    notices: list[tuple[Tell, str]] = field(default_factory=list)


class SlotLossNotifier:
    """Keys name what is lost: a worker, or a stage. Runs on the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._held: dict[str, _Held] = {}

    def open(self, key: str, grace_s: float) -> None:
        """Delays notices of ``key`` from now on, for at most ``grace_s`` seconds."""
        if key not in self._held:
            self._held[key] = _Held(self._loop.call_later(grace_s, self.explain, key))

    def tell(self, key: str, tell: Tell, reason: str) -> None:
        """Calls ``tell`` at once, or when the key is explained if its notices are held back."""
        held = self._held.get(key)
        if held is None:
            tell(reason)
        else:
            held.notices.append((tell, reason))

    def explain(self, key: str, reason: str | None = None) -> bool:
        """Releases held notices in order of the losses, the first with this reason; False when none is held."""
        held = self._held.pop(key, None)
        if held is None:
            return False
        held.timer.cancel()
        for tell, own in held.notices:
            tell(own if reason is None else reason)
            # The first loss caused the others: only its notice gets the cause, the others keep their own reasons.
            reason = None
        return True

    def close(self) -> None:
        """Drops the held notices."""
        for held in self._held.values():
            held.timer.cancel()
        self._held.clear()


def describe_exit(code: int | None) -> str:
    """Describes a child's exit code: negative for a signal, as Python gives it; None when it is unknown."""
    if code is None:
        return "its process ended"
    hint = hint_of(code)
    return f"its process ended with exit code {code}" + (f" ({hint})" if hint else "")


def hint_of(code: int) -> str:
    """The signal behind an exit code, in Python's form or a shell's, and what it usually means; empty for others."""
    number = -code if code < 0 else code - _BY_SHELLS
    try:
        known = signal.Signals(number)
    except ValueError:
        return ""
    hint = _HINTS.get(known)
    return known.name if hint is None else f"{known.name}: {hint}"


@dataclass(frozen=True, slots=True)
class Supply:
    """The slots that the cluster can provide in addition to those that jobs hold.

    ``ready`` slots have a worker. ``starting`` ones were launched and have no worker yet. ``launchable`` is how many
    more the cluster has room for, None without a limit.
    """

    ready: int
    starting: int
    launchable: int | None


@dataclass(frozen=True, slots=True)
class Allocation:
    """Positions of ``granted`` and ``refused`` requests; the others wait. ``launch`` slots are to be launched now."""

    granted: tuple[int, ...]
    refused: tuple[int, ...]
    launch: int
    reserved_for: int | None = None
    """The first refused request that reserves the remaining slots."""


class Turn(NamedTuple):
    """Whether free slots are reserved for a waiting request now, and in how many seconds that changes, if ever."""

    reserves: bool
    ends_in_s: float | None


def turn_after(waited_s: float, interval_s: float) -> Turn:
    """The turn of a request that has waited for ``waited_s``.

    In the first interval later requests are served before it, in the next one free slots are reserved for it, and so
    on alternately. It is therefore served once enough slots become free within one interval, at any number of later
    requests. If the other jobs never end, free slots do not stay unused forever. An interval of 0 reserves nothing.
    """
    if interval_s <= 0:
        return Turn(False, None)
    intervals, within_s = divmod(waited_s, interval_s)
    return Turn(intervals % 2 == 1, interval_s - within_s)


def allocate(missing: Sequence[int], supply: Supply, reserving: Collection[int] = ()) -> Allocation:
    """``missing`` has the number of slots that each request lacks, in the order in which they are served.

    A request that the cluster can serve has its share reserved while its slots start. A request that it cannot serve
    is refused for now, and the later ones are served, unless it is one of those that are ``reserving``, by position:
    then all remaining slots are reserved for it.
    """
    ready, starting, launchable = supply.ready, supply.starting, supply.launchable
    granted: list[int] = []
    refused: list[int] = []
    launch = 0
    reserved_for = None
    for position, count in enumerate(missing):
        if launchable is not None and count > ready + starting + launchable:
            refused.append(position)
            if position in reserving and reserved_for is None:
                reserved_for = position
                ready = starting = launchable = 0
            continue
        from_ready = min(count, ready)
        from_starting = min(count - from_ready, starting)
        launched = count - from_ready - from_starting
        ready -= from_ready
        starting -= from_starting
        launch += launched
        if launchable is not None:
            launchable -= launched
        if from_ready == count:
            granted.append(position)
    return Allocation(tuple(granted), tuple(refused), launch, reserved_for)


def shortage(needed: int, total: int, free: int) -> str:
    """Why a request for ``needed`` slots is refused; ``free`` are those of ``total`` that no other job holds."""
    slots = "1 slot" if needed == 1 else f"{needed} slots"
    if needed > total:
        return f"needs {slots}, the cluster has {total}"
    return f"needs {slots}, {free} of the cluster's {total} are free"


def choose_cores(
    workers: Sequence[tuple[str, Sequence[int]]], others: Sequence[tuple[str, int | None]]
) -> list[int | None]:
    """Chooses a core for each worker of a job, None for an unbound worker.

    ``workers`` are given as host and cores of that host, the workers of ``others`` as host and the core that they are
    bound to. No two workers are bound to one core. If a host has more workers than cores, no worker of the job is bound
    there: it could wait for its core while another core is idle.
    """
    on_host = Counter(host for host, _ in (*workers, *others))
    taken = {(host, core) for host, core in others if core is not None}
    chosen: list[int | None] = []
    for host, cores in workers:
        free = (core for core in cores if (host, core) not in taken)
        core = next(free, None) if on_host[host] <= len(cores) else None
        if core is not None:
            taken.add((host, core))
        chosen.append(core)
    return chosen
