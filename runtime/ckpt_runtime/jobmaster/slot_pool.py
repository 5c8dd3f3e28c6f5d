"""The slots of a session: their agents, their workers, and which job holds which slot.

A slot has one active worker and one warm spare. When the active worker dies, the spare takes over at once and another
spare is started. Each slot is a Spark stage of its own, so that the loss of an agent costs only that slot: the job
that held it asks for a replacement, which is launched. Warm workers that were never used outlive their agent for a
while: the agent of another slot on the same machine adopts them instead of starting cold ones. Everything runs on the
event loop.

A request is served as a whole or not at all. While the cluster cannot serve it, it holds no slots, so that other
requests can use them; :mod:`ckpt_runtime.jobmaster.slots` says when slots are reserved for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from weakref import WeakKeyDictionary

from ckpt_runtime.jobmaster.control_endpoint import ANSWER_TIMEOUT_S, A, AgentPeer, AnyPeer, WorkerQuestions
from ckpt_runtime.jobmaster.executions import wall_clock_ms
from ckpt_runtime.jobmaster.gateway_values import NotFound, NotReady
from ckpt_runtime.jobmaster.slots import (
    EndedWorkerLog,
    Slot,
    SlotLossNotifier,
    SlotOwner,
    SlotProvider,
    SlotRequest,
    SlotsUnavailableError,
    SlotTimes,
    StartingWorker,
    Supply,
    Turn,
    Worker,
    allocate,
    choose_cores,
    describe_exit,
    shortage,
    turn_after,
)
from ckpt_runtime.network.agent_messages import (
    LAST_WRITES_S,
    AdoptWorker,
    AgentHeartbeat,
    AgentMessage,
    KillWorker,
    Ping,
    PortRange,
    ShutdownAgent,
    SpawnWorker,
    WorkerExited,
)
from ckpt_runtime.network.connections import MalformedMessageError
from ckpt_runtime.network.control_messages import (
    FollowAgent,
    Following,
    WorkerAnswer,
    WorkerHeartbeat,
    WorkerMessage,
    WorkerQuestion,
)

logger = logging.getLogger(__name__)


MAX_PAUSE_S = 10.0
_RELEASED_WORKER_S = LAST_WRITES_S + 10.0
MAX_ENDED_LOGS = 32
MAX_FAILURES = 3
"""After this many subtask failures a process is replaced: user code may have left the cause of the failures in it."""


class SlotPool:
    """All slots. ``clock`` is monotonic, in seconds."""

    def __init__(
        self,
        provider: SlotProvider,
        secret: str,
        times: SlotTimes,
        clock: Callable[[], float] = time.monotonic,
        data_ports: PortRange | None = None,
    ) -> None:
        self._provider = provider
        self._data_ports = data_ports
        self._secret = secret
        self._times = times
        self._clock = clock
        self._control_port = 0
        self._slots: dict[str, Slot] = {}
        self._launching: dict[str, float] = {}
        """The launch time of each slot whose agent has not registered yet."""
        self._ending: set[str] = set()
        """Slots that were given up and whose end the provider has not reported yet."""
        self._orphans: dict[str, Worker] = {}
        self._requests: list[SlotRequest] = []
        self._next_slot = 0
        self._next_worker = 0
        self._failed_launches = 0
        """How many slots in a row ended before they had a worker."""
        self._launch_due = 0.0
        self._loop = asyncio.get_running_loop()
        self._arrangement: asyncio.Handle | None = None
        self._waiting_since: WeakKeyDictionary[SlotOwner, float] = WeakKeyDictionary()
        self._next_turn: asyncio.TimerHandle | None = None
        self._all_ended = asyncio.Event()
        self._losses = SlotLossNotifier(self._loop)
        self._questions = WorkerQuestions()
        self.ended_logs: deque[EndedWorkerLog] = deque(maxlen=MAX_ENDED_LOGS)
        """The logs of workers whose processes ended unexpectedly, the latest last."""
        self._watch: asyncio.Task[None] | None = None
        self._closing = False

    def start(self, control_port: int) -> None:
        self._control_port = control_port
        self._provider.watch_capacity(partial(self._on_loop, self._notify))
        self._watch = self._loop.create_task(self._watch_heartbeats())

    async def stop(self) -> None:
        """Tells all agents to end and waits for them for a limited time."""
        self._closing = True
        if self._next_turn is not None:
            self._next_turn.cancel()
        if self._watch is not None:
            self._watch.cancel()
        self._losses.close()
        for slot_id in list(self._launching):  # agents that have not registered cannot be requested to shut down
            self._provider.cancel(slot_id)
        for slot in self._slots.values():
            slot.agent.send(ShutdownAgent())
        self._ending |= self._slots.keys()
        for orphan in self._orphans.values():
            orphan.peer.close()
        if not self._ending:
            return
        self._all_ended.clear()
        try:
            await asyncio.wait_for(self._all_ended.wait(), 10)
        except TimeoutError:
            for slot_id in self._ending:
                self._provider.cancel(slot_id)

    # --- for jobs

    @property
    def total(self) -> int:
        """The number of slots that exist, or that could exist given the capacity known now."""
        return max(len(self._slots), self._provider.capacity or 0)

    @property
    def available(self) -> int:
        """The number of slots in :attr:`total` that no job holds."""
        return self.total - sum(slot.owner is not None for slot in self._slots.values())

    def all(self) -> tuple[Slot, ...]:
        """The living slots, oldest first."""
        return tuple(self._slots.values())

    def bind(self, slots: Sequence[Slot]) -> list[int | None]:
        """Chooses a core for the worker of each slot of a job, None for an unbound worker.

        The core belongs to that worker alone until the slot is bound again or released.
        """
        own = set(slots)
        others = [(slot.host, slot.core) for slot in self._slots.values() if slot.owner is not None and slot not in own]
        cores = choose_cores([(slot.host, slot.cpus) for slot in slots], others)
        for slot, core in zip(slots, cores, strict=True):
            slot.core = core
        return cores

    async def ask(
        self,
        slot_id: str,
        question: Callable[[int], WorkerQuestion],
        answer: type[A],
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> A:
        """Asks the active worker of a slot about itself. Raises NotFound and NotReady."""
        slot = self._slots.get(slot_id)
        if slot is None:
            raise NotFound(f"Task manager {slot_id} not found")
        if slot.worker is None:
            raise NotReady(f"task manager {slot_id} has no worker that is ready")
        return await self._questions.ask(slot.worker.peer, question, answer, timeout_s)

    async def acquire(self, owner: SlotOwner, count: int, held: list[Slot], least: int | None = None) -> list[Slot]:
        """Returns ``count`` living slots with a ready worker each, those in ``held`` first.

        All slots are granted at once: a waiting request holds no slots other than ``held``. With ``least`` the owner
        accepts fewer: it gets as many as the session can have, but at least ``least``.

        Raises SlotsUnavailableError when no slot can be launched or the request times out. On any error newly taken
        slots are released, and the owner keeps the held ones. It may release held slots while the request waits.
        """
        if least is not None and self._provider.capacity is not None:
            if least > self.total:
                raise SlotsUnavailableError(shortage(least, self.total, self.available))
            count = max(least, min(count, sum(not slot.lost for slot in held) + self.available))
        since = self._waiting_since.setdefault(owner, self._clock())
        request = SlotRequest(owner, count, held, self._loop.create_future(), since)
        for slot in request.kept():
            # It is called between deployments, when no subtask runs in the worker.
            if slot.worker is not None and slot.worker.failures >= MAX_FAILURES:
                self.replace_worker(slot)
        self._requests.append(request)
        self._arrange()
        try:
            async with asyncio.timeout(self._times.request_timeout_s):
                slots = await request.answer
            self._waiting_since.pop(owner, None)
            return slots
        except BaseException as error:
            for slot in request.taken:
                # The owner may have released it in the meantime, and another job may hold it.
                if slot.owner is owner:
                    self.release(slot)
            if isinstance(error, TimeoutError):
                raise SlotsUnavailableError(
                    f"{count} slots were not available within {self._times.request_timeout_s:g} s: {request.reason}"
                ) from None
            self._waiting_since.pop(owner, None)
            raise
        finally:
            if request in self._requests:
                self._requests.remove(request)
                self._notify()
            request.wait("")

    # --- serving requests

    def _notify(self) -> None:
        """Called when something has changed for waiting requests: schedules one attempt to serve them all."""
        if self._arrangement is None and not self._closing:
            self._arrangement = self._loop.call_soon(self._arrange)

    def _on_loop(self, call: Callable[..., None], *arguments: object) -> None:
        """Passes on what the provider reports, from any of its threads."""
        with suppress(RuntimeError):  # the loop is closed: the session has ended before its provider
            self._loop.call_soon_threadsafe(call, *arguments)

    def _arrange(self) -> None:
        """Grants the requests that can be served, launches slots for others, and records why the rest waits."""
        if self._arrangement is not None:
            self._arrangement.cancel()
            self._arrangement = None
        # A job that holds slots is served first: they are blocked while it waits. Otherwise requests are served in
        # their order, and a job whose request timed out keeps its place in line for the next one.
        waiting = [request for request in self._requests if not request.answer.done()]
        requests = sorted(waiting, key=lambda request: (not request.held, request.since))
        free = [slot for slot in self._slots.values() if slot.owner is None]
        ready = [slot for slot in free if slot.worker is not None]
        kept = [request.kept() for request in requests]
        missing = [request.count - len(slots) for request, slots in zip(requests, kept, strict=True)]
        turns = [self._turn(request) for request in requests]
        reserving = [position for position, turn in enumerate(turns) if turn.reserves]
        allocation = allocate(missing, self._supply(len(ready), len(free)), reserving)
        for position, (request, slots) in enumerate(zip(requests, kept, strict=True)):
            if position in allocation.refused:
                available = self.available + sum(slot.owner is request.owner for slot in request.held if not slot.lost)
                reason = shortage(request.count, self.total, available)
                if allocation.reserved_for is not None and position >= allocation.reserved_for:
                    other = requests[allocation.reserved_for].count
                    mine = position == allocation.reserved_for
                    reason += f"; free slots are reserved for {'it' if mine else f'a job that needs {other}'}"
                request.wait(reason, refused=True)
            elif position in allocation.granted and all(slot.worker is not None for slot in slots):
                request.taken, ready = ready[: missing[position]], ready[missing[position] :]
                for slot in request.taken:
                    slot.owner = request.owner
                self._requests.remove(request)
                request.answer.set_result([*slots, *request.taken])
            else:
                unready = request.count - sum(slot.worker is not None for slot in slots)
                request.wait(f"waits for {unready} of {request.count} slots to start")
        self._schedule_next_turn([turns[position].ends_in_s for position in allocation.refused])
        if allocation.launch:
            self._launch(allocation.launch)

    def _turn(self, request: SlotRequest) -> Turn:
        """Returns the turn of a request. No slots are reserved for a job that needs more than the cluster has or
        already holds some."""
        if request.held or request.count > self.total:
            return Turn(False, None)
        return turn_after(self._clock() - request.since, self._times.reservation_interval_s)

    def _schedule_next_turn(self, turns_s: list[float | None]) -> None:
        """Serves the requests again when the first of these turns ends."""
        if self._next_turn is not None:
            self._next_turn.cancel()
            self._next_turn = None
        first = min((turn for turn in turns_s if turn is not None), default=None)
        if first is not None and not self._closing:
            self._next_turn = self._loop.call_later(first, self._notify)

    def _supply(self, ready: int, free: int) -> Supply:
        launching, room = len(self._launching), None
        if self._provider.capacity is not None:
            room = max(0, self._provider.capacity - len(self._slots))
            launching = min(launching, room)  # executors may have been lost since: a slot without room does not start
            room -= launching
        return Supply(ready, free - ready + launching, room)

    def _launch(self, count: int) -> None:
        if self._launching and self._failed_launches:
            return  # the pending launches will show whether slots can be started at all
        pause = self._launch_due - self._clock()
        if pause > 0:
            self._loop.call_later(pause, self._notify)
            return
        logger.info("launching %d slots", count)
        ended = partial(self._on_loop, self._provider_ended)
        for _ in range(count):
            # An id is never reused: the agent of a slot that was given up may register much later.
            slot_id, self._next_slot = str(self._next_slot), self._next_slot + 1
            self._launching[slot_id] = self._clock()
            try:
                self._provider.launch(slot_id, self._control_port, self._secret, ended)
            except Exception as error:
                del self._launching[slot_id]
                self._launch_failed(f"a slot could not be launched: {error}")
                return

    def _launch_failed(self, reason: str) -> None:
        """Fails the requests that wait for slots to start, unless other slots are being launched."""
        if self._launching:
            return
        for request in list(self._requests):
            if not request.refused and not request.answer.done():
                self._requests.remove(request)
                request.answer.set_exception(SlotsUnavailableError(reason))

    def _provider_ended(self, slot_id: str, error: BaseException | None) -> None:
        reason = "its slot agent ended" if error is None else str(error).splitlines()[0]
        slot = self._slots.get(slot_id)
        if slot is not None:
            self._slot_ended(slot, reason)
        self._ending.discard(slot_id)
        if not self._ending:
            self._all_ended.set()
        if slot_id in self._launching:
            del self._launching[slot_id]
            self._delay_next_launch()
            if error is not None:
                self._launch_failed(f"a slot could not be started: {reason}")
        self._losses.explain(slot_id, None if error is None else reason)
        self._notify()

    def _delay_next_launch(self) -> None:
        """Delays the next launch: slots that end at once would otherwise be launched in an endless loop."""
        self._failed_launches += 1
        self._launch_due = self._clock() + _pause_before(self._failed_launches)

    def release(self, slot: Slot) -> None:
        """Releases a slot. Its worker ran a job's code, so the next job gets a fresh process.

        The worker ends by itself after its last requests to the storage; it is killed only if it does not.
        """
        slot.owner = slot.core = None
        slot.idle_since = self._clock()
        if not slot.lost and slot.worker is not None and slot.worker.used:
            self.replace_worker(slot, kill_in_s=_RELEASED_WORKER_S)
        self._notify()

    def replace_worker(self, slot: Slot, kill_in_s: float = 0.0) -> None:
        """Makes the spare the active worker, and kills the former one: at once, or if it still runs after a time."""
        worker = self._promote_spare(slot)
        if worker is not None:
            kill = KillWorker(worker.worker_id)
            if kill_in_s:
                self._loop.call_later(kill_in_s, slot.agent.send, kill)
            else:
                slot.agent.send(kill)
        self._start_workers(slot)

    # --- for the control endpoint

    def peer_registered(self, peer: AnyPeer) -> None:
        if isinstance(peer, AgentPeer):
            self._agent_registered(peer)
            return
        slot, worker = self._slots.get(peer.slot), Worker(peer)
        if slot is None:
            self._keep_orphan(worker)
        else:
            self._worker_ready(slot, worker)

    def _agent_registered(self, agent: AgentPeer) -> None:
        slot = Slot(agent, idle_since=self._clock())
        if slot.slot_id not in self._launching:  # it was given up before its agent registered, or has another agent
            agent.send(ShutdownAgent())
            agent.close()
            return
        del self._launching[slot.slot_id]
        self._slots[slot.slot_id] = slot
        self._start_workers(slot)

    def peer_message(self, peer: AnyPeer, message: AgentMessage | WorkerMessage) -> None:
        if isinstance(message, WorkerAnswer):
            self._questions.answered(peer, message)
            return
        slot = self._slots.get(peer.slot)
        if slot is None:
            return
        match message:
            case AgentHeartbeat(progress):
                # At the fork the figure falls from the template's to that of the new worker: any change counts as
                # progress.
                for worker_id, figure in progress.items():
                    start = slot.starting.get(worker_id)
                    if start is not None and figure != start.progress:
                        start.progress, start.progressed_at = figure, self._clock()
            case WorkerExited():
                self._worker_exited(slot, message)
            case Following():
                worker = slot.adopting
                if worker is None or worker.peer is not peer:
                    raise MalformedMessageError("a worker reports without a request that it follows an agent")
                slot.adopting = None
                self._worker_ready(slot, worker)
            case _:
                sender = next((worker for worker in slot.workers if worker.peer is peer), None)
                if not (isinstance(message, WorkerHeartbeat) or (sender is not None and sender.used)):
                    what = type(message).__name__
                    raise MalformedMessageError(f"the message {what} came from a worker that has no work")
                if sender is not None and isinstance(message, WorkerHeartbeat):
                    sender.process = message.process
                # Messages of a spare, or of a worker that has just been replaced, do not reach the owner.
                if slot.owner is not None and sender is slot.worker:
                    slot.owner.worker_message(slot, message)

    def peer_lost(self, peer: AnyPeer, reason: str, *, explained: bool) -> None:
        self._questions.lost(peer)
        slot = self._slots.get(peer.slot)
        if isinstance(peer, AgentPeer):
            if slot is not None:
                # Its owner is notified once Spark, ending the slot's task, gives the cause, or after the grace period.
                if not explained:
                    self._losses.open(slot.slot_id, self._times.loss_grace_s)
                self._slot_ended(slot, f"its slot agent was lost: {reason}")
            return
        worker_id = peer.registration.worker
        self._orphans.pop(worker_id, None)
        if slot is None:
            return
        if slot.worker is not None and slot.worker.peer is peer:
            self._active_worker_lost(slot, slot.worker, reason, explained=explained)
            return
        if explained:  # its process still runs
            slot.agent.send(KillWorker(worker_id))
        self._worker_ended(slot, worker_id, reason)

    def _active_worker_lost(self, slot: Slot, worker: Worker, reason: str, *, explained: bool) -> None:
        """Usually its process has ended and the agent will report how. It is killed only if the agent reports nothing.

        If it were killed at once, its exit would look like that of a process killed by the kernel.
        """
        owner = slot.owner

        def tell(reason: str) -> None:
            slot.agent.send(KillWorker(worker.worker_id))
            if owner is not None:
                owner.worker_lost(slot, f"worker {worker.worker_id} was lost: {reason}")

        self._promote_spare(slot)
        if not explained:
            # Opened before the notice is passed on, or the owner would get it at once and without its cause.
            self._losses.open(worker.worker_id, self._times.loss_grace_s)
        self._losses.tell(worker.worker_id, tell, reason)
        self._start_workers(slot)
        self._notify()

    # --- workers

    def _promote_spare(self, slot: Slot) -> Worker | None:
        """Makes the spare the active worker. Returns the former active worker, whose connection is closed."""
        worker, slot.worker = slot.worker, slot.spare
        slot.spare = None
        slot.spare_due = self._clock() + self._times.spare_pause_s
        if worker is not None:
            worker.peer.close()
        return worker

    def _worker_ready(self, slot: Slot, worker: Worker) -> None:
        slot.starting.pop(worker.worker_id, None)
        slot.failed_starts = self._failed_launches = 0
        if slot.worker is None:
            slot.worker = worker
            slot.spare_due = self._clock() + self._times.spare_pause_s
        else:
            slot.spare = worker
        for neighbour in self._on_host(slot.host):
            self._start_workers(neighbour)
        self._notify()

    def _on_host(self, host: str) -> list[Slot]:
        return [slot for slot in self._slots.values() if slot.host == host]

    def _start_workers(self, slot: Slot) -> None:
        """Starts one process at a time, spares last, so that no spare competes with a worker that a job waits for."""
        if slot.lost or slot.starting or (slot.worker is not None and slot.spare is not None):
            return
        if slot.worker is not None and any(
            neighbour.worker is None and not neighbour.failed_starts for neighbour in self._on_host(slot.host)
        ):
            return
        machine = slot.agent.registration.process.machine
        # Pids name the same process only where machine is equal; an agent on another host could not adopt the worker.
        orphan = next((worker for worker in self._orphans.values() if worker.machine == machine), None)
        # No orphan becomes a spare while a slot is being launched: a job waits for that slot's worker.
        if orphan is not None and (slot.worker is None or not self._launching):
            self._adopt(slot, orphan)
            return
        pause = slot.spare_due - self._clock()
        if slot.worker is not None and pause > 0:
            self._loop.call_later(pause, self._start_workers, slot)
            return
        self._next_worker += 1
        worker_id = f"{slot.slot_id}-w{self._next_worker}"
        slot.starting[worker_id] = StartingWorker(self._clock())
        spawn = SpawnWorker(worker_id, self._data_ports)
        if slot.failed_starts:
            self._loop.call_later(_pause_before(slot.failed_starts), slot.agent.send, spawn)
        else:
            slot.agent.send(spawn)

    def _adopt(self, slot: Slot, worker: Worker) -> None:
        """Makes the agent adopt the worker and the worker follow the agent; its answer assigns it to the slot."""
        del self._orphans[worker.worker_id]
        logger.info("slot %s adopts worker %s", slot.slot_id, worker.worker_id)
        worker.peer.slot = slot.slot_id  # from now on its messages and its end concern this slot
        slot.adopting = worker
        slot.starting[worker.worker_id] = StartingWorker(self._clock())
        agent, registration = slot.agent.registration.process, worker.peer.registration
        slot.agent.send(AdoptWorker(worker.worker_id, registration.process, registration.directory))
        worker.peer.send(FollowAgent(agent))

    def _keep_orphan(self, worker: Worker) -> None:
        """Keeps a worker without a slot for future agents. It ends by itself when no agent adopts it in time."""
        if worker.machine and not self._closing:
            self._orphans[worker.worker_id] = worker
        else:
            worker.peer.close()

    def _worker_exited(self, slot: Slot, report: WorkerExited) -> None:
        """Handles the agent's report that a process has ended, or that it could not be adopted."""
        worker_id, reason = report.worker, describe_exit(report.code)
        unexpected = any(worker.worker_id == worker_id for worker in slot.workers)
        if slot.starting.pop(worker_id, None) is not None:
            # On a machine without free memory every start fails: the pause before the next start grows each time.
            slot.failed_starts += 1
            unexpected = True
        # Usually its connection ended first: then only the reason is still to be passed on.
        if self._losses.explain(worker_id, reason):
            unexpected = True
        else:
            self._worker_ended(slot, worker_id, reason)
        if unexpected:
            self.ended_logs.append(EndedWorkerLog(worker_id, slot.slot_id, wall_clock_ms(), reason, report.log))

    def _worker_ended(self, slot: Slot, worker_id: str, reason: str) -> None:
        if slot.adopting is not None and slot.adopting.worker_id == worker_id:
            slot.adopting.peer.close()
            slot.adopting = None
            slot.starting.pop(worker_id, None)
        elif slot.spare is not None and slot.spare.worker_id == worker_id:
            slot.spare.peer.close()
            slot.spare = None
        elif slot.worker is not None and slot.worker.worker_id == worker_id:
            self.replace_worker(slot)
            if slot.owner is not None:
                slot.owner.worker_lost(slot, f"worker {worker_id} was lost: {reason}")
        self._start_workers(slot)
        self._notify()

    # --- the ends of slots

    def _slot_ended(self, slot: Slot, reason: str, *, keep_workers: bool = True) -> None:
        if slot.lost:
            return
        slot.lost = True
        self._slots.pop(slot.slot_id, None)
        self._ending.add(slot.slot_id)
        if slot.owner is None and slot.worker is None:
            self._delay_next_launch()
        # Read before the slot forgets its workers: from now on an orphan is found only by its id.
        workers = slot.workers
        slot.worker = slot.spare = slot.adopting = None
        # A worker that is still starting will be as warm as a spare by the time the next slot exists.
        kept = list(slot.starting) if keep_workers else []
        for worker in workers:
            if keep_workers and not worker.used:
                kept.append(worker.worker_id)
                self._keep_orphan(worker)
            else:
                worker.peer.close()
        slot.agent.send(ShutdownAgent(tuple(kept)))
        slot.agent.close()
        if (owner := slot.owner) is not None:
            lost = f"slot {slot.slot_id} was lost"
            self._losses.tell(slot.slot_id, lambda why: owner.slot_lost(slot, f"{lost}: {why}"), reason)
        self._notify()

    # --- silent peers and idle slots

    async def _watch_heartbeats(self) -> None:
        """Finds silent peers (a stopped process keeps its sockets open), and slots that no job needs."""
        while True:
            began = self._clock()
            await asyncio.sleep(self._times.heartbeat_interval_s)
            if self._clock() - began > 2 * self._times.heartbeat_interval_s:
                # This process was suspended, or is late: it first reads the messages that its peers have sent in the
                # meantime.
                await asyncio.sleep(self._times.heartbeat_interval_s)
            self.check()

    def check(self) -> None:
        """Runs one round of the heartbeat and idleness checks."""
        now = self._clock()
        for slot in list(self._slots.values()):
            # An adopted worker constantly uses a little processor time, which does not count as progress.
            slot.agent.send(Ping(() if slot.adopting is not None else tuple(slot.starting)))
            self._check_heartbeats(slot, now)
        # Spark may have lost their task, or their agent hangs; others are launched if needed.
        for slot_id, since in list(self._launching.items()):
            if now - since > self._times.request_timeout_s:
                logger.warning(
                    "slot %s is released: its agent has not registered within %g s",
                    slot_id,
                    self._times.request_timeout_s,
                )
                del self._launching[slot_id]
                self._ending.add(slot_id)
                self._provider.cancel(slot_id)
                self._notify()
        self._end_idle_slots(now)

    def _check_heartbeats(self, slot: Slot, now: float) -> None:
        silent = f"no heartbeat for {self._times.heartbeat_timeout_s:g} s"
        if now - slot.agent.last_heard > self._times.heartbeat_timeout_s:
            logger.warning("slot %s is lost: %s", slot.slot_id, silent)
            self._provider.cancel(slot.slot_id)
            self._slot_ended(slot, silent)
            return
        for worker in slot.workers:
            if now - worker.peer.last_heard > self._times.heartbeat_timeout_s:
                logger.warning("worker %s is lost: %s", worker.worker_id, silent)
                slot.agent.send(KillWorker(worker.worker_id))
                self._worker_ended(slot, worker.worker_id, silent)
        for worker_id, start in slot.starting.items():
            idle_s = now - start.progressed_at
            if idle_s > self._times.registration_timeout_s:
                logger.warning(
                    "worker %s is killed: it has not registered, and has made no progress for %.0f s", worker_id, idle_s
                )
                slot.agent.send(KillWorker(worker_id))
                start.progressed_at = now  # The agent reports the worker's end, which starts the next worker.

    def _end_idle_slots(self, now: float) -> None:
        """Ends idle slots. While a job waits, no slot is idle: the job gets all slots when the last worker is ready.

        If the request times out, idleness counts only from then on: the job's next attempt needs the slots.
        """
        for slot in list(self._slots.values()):
            if self._requests:
                slot.idle_since = now
            elif slot.owner is None and now - slot.idle_since > self._times.idle_timeout_s:
                logger.info("ending slot %s: no job has used it for %g s", slot.slot_id, self._times.idle_timeout_s)
                self._slot_ended(slot, "it was idle", keep_workers=False)


def _pause_before(attempts: int) -> float:
    """Seconds to wait after ``attempts`` failures in a row, at least one."""
    return float(min(MAX_PAUSE_S, 0.1 * 2 ** (attempts - 1)))
