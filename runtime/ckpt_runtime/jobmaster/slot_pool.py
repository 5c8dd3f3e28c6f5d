"""The slots of a session: their agents, their workers, and which job holds which slot.

A slot has one active worker and one warm spare. When the active worker dies, the spare takes over at once and another
spare is started. Each slot is a stage of its own in Spark, so that the loss of an agent costs that slot alone: the job
that held it asks for another one, which is launched. Warm workers that never worked outlive their agent for a while:
the agent of another slot on the same machine adopts them instead of starting cold ones. Everything runs on the event
loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ckpt_runtime.jobmaster.control_endpoint import AgentPeer, AnyPeer
from ckpt_runtime.jobmaster.gateway_errors import NotFound, NotReady
from ckpt_runtime.jobmaster.slot_allocation import Supply, allocate, choose_cores, shortage
from ckpt_runtime.jobmaster.slot_loss_notifier import SlotLossNotifier, describe_exit
from ckpt_runtime.jobmaster.slots import Slot, SlotOwner, SlotProvider, SlotsUnavailableError, SlotTimes, Worker
from ckpt_runtime.jobmaster.worker_questions import ANSWER_TIMEOUT_S, A, WorkerQuestions
from ckpt_runtime.network.agent_messages import (
    LAST_WRITES_S,
    AdoptWorker,
    AgentHeartbeat,
    AgentMessage,
    KillWorker,
    Ping,
    ShutdownAgent,
    SpawnWorker,
    WorkerExited,
)
from ckpt_runtime.network.control_messages import (
    FollowAgent,
    Following,
    WorkerAnswer,
    WorkerHeartbeat,
    WorkerMessage,
    WorkerQuestion,
)
from ckpt_runtime.network.listeners import MalformedMessageError

logger = logging.getLogger(__name__)

MAX_PAUSE_S = 10.0
_RELEASED_WORKER_S = LAST_WRITES_S + 10.0
WORKER_START_TIMEOUT_S = 120.0
"""A worker process that has not registered by then hangs, and is killed; its end starts the next one."""

MAX_FAILURES = 3
"""A process in which subtasks have failed so often gets no further attempt: user code may have left the cause in it."""


@dataclass(slots=True, eq=False)
class _Request:
    """A job's request for slots, until ``answer`` has them. ``reason`` says why it waits."""

    owner: SlotOwner
    count: int
    held: list[Slot]
    answer: asyncio.Future[list[Slot]]
    taken: list[Slot] = field(default_factory=list)
    reason: str = ""
    refused: bool = False

    def kept(self) -> list[Slot]:
        """Of the slots that its owner had: any of them may have been lost, or given back by the owner."""
        return [slot for slot in self.held if not slot.lost and slot.owner is self.owner][: self.count]

    def wait(self, reason: str, *, refused: bool = False) -> None:
        self.refused = refused
        if reason != self.reason:
            self.reason = reason
            self.owner.slots_awaited(reason)


class SlotPool:
    """All slots. ``clock`` is monotonic, in seconds."""

    def __init__(
        self, provider: SlotProvider, secret: str, times: SlotTimes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._provider = provider
        self._secret = secret
        self._times = times
        self._clock = clock
        self._control_port = 0
        self._slots: dict[str, Slot] = {}
        self._launching: dict[str, float] = {}
        """Since when slots are launched whose agents have not registered yet."""
        self._ending: set[str] = set()
        """Slots that are given up, until their provider says that they are over."""
        self._orphans: dict[str, Worker] = {}
        self._requests: list[_Request] = []
        self._next_slot = 0
        self._next_worker = 0
        self._failed_launches = 0
        """Slots in a row that ended before they had a worker."""
        self._launch_due = 0.0
        self._loop = asyncio.get_running_loop()
        self._arrangement: asyncio.Handle | None = None
        self._all_ended = asyncio.Event()
        self._losses = SlotLossNotifier(self._loop)
        self._questions = WorkerQuestions()
        self._watch: asyncio.Task[None] | None = None
        self._closing = False

    def start(self, control_port: int) -> None:
        self._control_port = control_port
        self._provider.watch_capacity(self._capacity_changed)
        self._watch = self._loop.create_task(self._watch_heartbeats())

    async def stop(self) -> None:
        """Tells all agents to end and waits for them, for a while."""
        self._closing = True
        if self._watch is not None:
            self._watch.cancel()
        self._losses.close()
        for slot_id in list(self._launching):  # it may be long before there is an agent that could be told
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
        """Slots that there are, or could be by what is known now."""
        return max(len(self._slots), self._provider.capacity or 0)

    @property
    def available(self) -> int:
        """Those of :attr:`total` that no job holds."""
        return self.total - sum(slot.owner is not None for slot in self._slots.values())

    def all(self) -> tuple[Slot, ...]:
        """The living slots, oldest first."""
        return tuple(self._slots.values())

    def bind(self, slots: Sequence[Slot]) -> list[int | None]:
        """Chooses a core for the worker of each slot of a job, None for one that is not to be bound.

        It belongs to that worker alone until the slot is bound again or given back.
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
        """``count`` living slots with a ready worker each, those in ``held`` first.

        They come all at once: a request that waits holds no slot beside ``held``. With ``least`` the owner can do with
        fewer: it gets as many as the session can have, that many at least.

        Raises SlotsUnavailableError when no slot can be launched or the request times out. Whatever is raised, what
        was taken is given back, and what was held stays the owner's, who may also give it back meanwhile.
        """
        if least is not None and self._provider.capacity is not None:
            if least > self.total:
                raise SlotsUnavailableError(shortage(least, self.total, self.available))
            count = max(least, min(count, sum(not slot.lost for slot in held) + self.available))
        request = _Request(owner, count, held, self._loop.create_future())
        for slot in request.kept():
            # Between deployments, when nothing runs in it.
            if slot.worker is not None and slot.worker.failures >= MAX_FAILURES:
                self.replace_worker(slot)
        self._requests.append(request)
        self._arrange()
        try:
            async with asyncio.timeout(self._times.request_timeout_s):
                return await request.answer
        except BaseException as error:
            for slot in request.taken:
                # The owner may have given it back meanwhile, and another job have it.
                if slot.owner is owner:
                    self.release(slot)
            if isinstance(error, TimeoutError):
                raise SlotsUnavailableError(
                    f"{count} slots were not available within {self._times.request_timeout_s:g} s: {request.reason}"
                ) from None
            raise
        finally:
            if request in self._requests:
                self._requests.remove(request)
                self._notify()
            request.wait("")

    # --- serving requests

    def _notify(self) -> None:
        """Something has changed for requests that wait. They are served soon, once for all changes until then."""
        if self._arrangement is None and not self._closing:
            self._arrangement = self._loop.call_soon(self._arrange)

    def _capacity_changed(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: the session has ended before its provider
            self._loop.call_soon_threadsafe(self._notify)

    def _arrange(self) -> None:
        """Serves requests, launches slots for others, and says why the rest waits."""
        if self._arrangement is not None:
            self._arrangement.cancel()
            self._arrangement = None
        # A job that has slots comes first: nobody else can use them while it waits. Otherwise first come, first served.
        waiting = [request for request in self._requests if not request.answer.done()]
        requests = sorted(waiting, key=lambda request: not request.held)
        free = [slot for slot in self._slots.values() if slot.owner is None]
        ready = [slot for slot in free if slot.worker is not None]
        kept = [request.kept() for request in requests]
        missing = [request.count - len(slots) for request, slots in zip(requests, kept, strict=True)]
        allocation = allocate(missing, self._supply(len(ready), len(free)))
        for position, (request, slots) in enumerate(zip(requests, kept, strict=True)):
            if position in allocation.refused:
                available = self.available + sum(slot.owner is request.owner for slot in request.held if not slot.lost)
                request.wait(shortage(request.count, self.total, available), refused=True)
            elif position in allocation.granted and all(slot.worker is not None for slot in slots):
                request.taken, ready = ready[: missing[position]], ready[missing[position] :]
                for slot in request.taken:
                    slot.owner = request.owner
                self._requests.remove(request)
                request.answer.set_result([*slots, *request.taken])
            else:
                unready = request.count - sum(slot.worker is not None for slot in slots)
                request.wait(f"waits for {unready} of {request.count} slots to start")
        if allocation.launch:
            self._launch(allocation.launch)

    def _supply(self, ready: int, free: int) -> Supply:
        launching, room = len(self._launching), None
        if self._provider.capacity is not None:
            room = max(0, self._provider.capacity - len(self._slots))
            launching = min(launching, room)  # executors may have gone since: what has no room does not start
            room -= launching
        return Supply(ready, free - ready + launching, room)

    def _launch(self, count: int) -> None:
        if self._launching and self._failed_launches:
            return  # those that are on their way will show whether there can be any
        pause = self._launch_due - self._clock()
        if pause > 0:
            self._loop.call_later(pause, self._notify)
            return
        logger.info("launching %d slots", count)
        for _ in range(count):
            # An id is never given again: the agent of a slot that was given up may register much later.
            slot_id, self._next_slot = str(self._next_slot), self._next_slot + 1
            self._launching[slot_id] = self._clock()
            try:
                self._provider.launch(slot_id, self._control_port, self._secret, self._report_end)
            except Exception as error:
                del self._launching[slot_id]
                self._launch_failed(f"a slot could not be launched: {error}")
                return

    def _launch_failed(self, reason: str) -> None:
        """Requests that wait for slots to start fail, unless other slots are on their way."""
        if self._launching:
            return
        for request in list(self._requests):
            if not request.refused and not request.answer.done():
                self._requests.remove(request)
                request.answer.set_exception(SlotsUnavailableError(reason))

    def _report_end(self, slot_id: str, error: BaseException | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: the session has ended before its slots
            self._loop.call_soon_threadsafe(self._provider_ended, slot_id, error)

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
            self._no_worker_came()
            if error is not None:
                self._launch_failed(f"a slot could not be started: {reason}")
        self._losses.explain(slot_id, None if error is None else reason)
        self._notify()

    def _no_worker_came(self) -> None:
        """Slots that end at once would otherwise be launched in a circle."""
        self._failed_launches += 1
        self._launch_due = self._clock() + _pause_before(self._failed_launches)

    def release(self, slot: Slot) -> None:
        """Gives a slot back. Its worker ran a job's code, so the next job gets a fresh process.

        The worker ends by itself, behind its last requests to the storage; it is killed only if it does not.
        """
        slot.owner = slot.core = None
        slot.idle_since = self._clock()
        if not slot.lost and slot.worker is not None and slot.worker.used:
            self._replace_worker(slot, kill_in_s=_RELEASED_WORKER_S)
        self._notify()

    def replace_worker(self, slot: Slot) -> None:
        """Kills the slot's worker and makes the spare the active one."""
        self._replace_worker(slot, kill_in_s=0)

    def _replace_worker(self, slot: Slot, kill_in_s: float) -> None:
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
        if slot.slot_id not in self._launching:  # it was given up before its agent came, or has another agent
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
            case AgentHeartbeat():
                return
            case WorkerExited(worker_id, code):
                self._worker_exited(slot, worker_id, code)
            case Following():
                worker = slot.adopting
                if worker is None or worker.peer is not peer:
                    raise MalformedMessageError("a worker says that it follows an agent, and was not asked to")
                slot.adopting = None
                self._worker_ready(slot, worker)
            case _:
                sender = next((worker for worker in slot.workers if worker.peer is peer), None)
                if not (isinstance(message, WorkerHeartbeat) or (sender is not None and sender.used)):
                    what = type(message).__name__
                    raise MalformedMessageError(f"the message {what} came from a worker that was given no work")
                # A spare, and one that has just been replaced, have nothing to say to the owner.
                if slot.owner is not None and sender is slot.worker:
                    slot.owner.worker_message(slot, message)

    def peer_lost(self, peer: AnyPeer, reason: str, *, explained: bool) -> None:
        self._questions.lost(peer)
        slot = self._slots.get(peer.slot)
        if isinstance(peer, AgentPeer):
            if slot is not None:
                self._agent_lost(slot, reason, explained=explained)
            return
        worker_id = peer.registration.worker
        self._orphans.pop(worker_id, None)
        if slot is None:
            return
        if slot.worker is not None and slot.worker.peer is peer:
            self._active_worker_lost(slot, slot.worker, reason, explained=explained)
            return
        if explained:  # its process lives
            slot.agent.send(KillWorker(worker_id))
        self._worker_ended(slot, worker_id, reason)

    def _active_worker_lost(self, slot: Slot, worker: Worker, reason: str, *, explained: bool) -> None:
        """Its process has ended, as a rule: the agent will say how. It is killed only if the agent says nothing.

        Killed at once, it could not be told from one that the kernel has killed.
        """
        owner = slot.owner

        def tell(reason: str) -> None:
            slot.agent.send(KillWorker(worker.worker_id))
            if owner is not None:
                owner.worker_lost(slot, f"worker {worker.worker_id} was lost: {reason}")

        self._promote_spare(slot)
        if not explained:
            # Opened before the notice is told, or it would go out at once and without its cause.
            self._losses.open(worker.worker_id, self._times.loss_grace_s)
        self._losses.tell(worker.worker_id, tell, reason)
        self._start_workers(slot)
        self._notify()

    def _agent_lost(self, slot: Slot, reason: str, *, explained: bool) -> None:
        """Spark says why when it ends the slot's task; the owner hears of it then, or a little later."""
        if not explained:
            self._losses.open(slot.slot_id, self._times.loss_grace_s)
        self._slot_ended(slot, f"its slot agent was lost: {reason}")

    # --- workers

    def _promote_spare(self, slot: Slot) -> Worker | None:
        """Returns the former active worker, whose connection is closed."""
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
        """One process at a time, and spares last, so that no spare competes with a worker that a job waits for."""
        if slot.lost or slot.starting or (slot.worker is not None and slot.spare is not None):
            return
        if slot.worker is not None and any(
            neighbour.worker is None and not neighbour.failed_starts for neighbour in self._on_host(slot.host)
        ):
            return
        machine = slot.agent.registration.process.machine
        # Pids mean the same process only where machine is equal; elsewhere the agent could not hold it.
        orphan = next((worker for worker in self._orphans.values() if worker.machine == machine), None)
        # No spare is adopted while a slot is on its way, whose worker a job waits for.
        if orphan is not None and (slot.worker is None or not self._launching):
            self._adopt(slot, orphan)
            return
        pause = slot.spare_due - self._clock()
        if slot.worker is not None and pause > 0:
            self._loop.call_later(pause, self._start_workers, slot)
            return
        self._next_worker += 1
        worker_id = f"{slot.slot_id}-w{self._next_worker}"
        slot.starting[worker_id] = self._clock()
        spawn = SpawnWorker(worker_id)
        if slot.failed_starts:
            self._loop.call_later(_pause_before(slot.failed_starts), slot.agent.send, spawn)
        else:
            slot.agent.send(spawn)

    def _adopt(self, slot: Slot, worker: Worker) -> None:
        """The agent holds the worker, the worker follows the agent; its answer makes it the slot's."""
        del self._orphans[worker.worker_id]
        logger.info("slot %s adopts worker %s", slot.slot_id, worker.worker_id)
        worker.peer.slot = slot.slot_id  # from now on what it says, and its end, concern this slot
        slot.adopting = worker
        slot.starting[worker.worker_id] = self._clock()
        agent, registration = slot.agent.registration.process, worker.peer.registration
        slot.agent.send(AdoptWorker(worker.worker_id, registration.process, registration.directory))
        worker.peer.send(FollowAgent(agent))

    def _keep_orphan(self, worker: Worker) -> None:
        """Keeps a worker without a slot for the agents to come. It ends by itself when none comes in time."""
        if worker.machine and not self._closing:
            self._orphans[worker.worker_id] = worker
        else:
            worker.peer.close()

    def _worker_exited(self, slot: Slot, worker_id: str, code: int | None) -> None:
        """The agent says that a process has ended, or that it could not be adopted."""
        if slot.starting.pop(worker_id, None) is not None:
            # A machine without memory fails each start: the next one waits, longer each time.
            slot.failed_starts += 1
        reason = describe_exit(code)
        # Its connection ended first, as a rule: then everything is done but to say why.
        if not self._losses.explain(worker_id, reason):
            self._worker_ended(slot, worker_id, reason)

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
            self._no_worker_came()
        # Taken before the slot forgets them: an orphan must be found by its id alone from now on.
        workers = slot.workers
        slot.worker = slot.spare = slot.adopting = None
        # One that is still starting is as warm as a spare by the time the next slot is there.
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
            told = f"slot {slot.slot_id} was lost"
            self._losses.tell(slot.slot_id, lambda why: owner.slot_lost(slot, f"{told}: {why}"), reason)
        self._notify()

    # --- the silent and the idle

    async def _watch_heartbeats(self) -> None:
        """Finds the silent (a stopped process keeps its sockets open), and slots that nobody needs."""
        while True:
            began = self._clock()
            await asyncio.sleep(self._times.heartbeat_interval_s)
            if self._clock() - began > 2 * self._times.heartbeat_interval_s:
                # This process has stood still, or is late: what its peers have sent meanwhile is read first.
                await asyncio.sleep(self._times.heartbeat_interval_s)
            self.check()

    def check(self) -> None:
        """One round of the above."""
        now = self._clock()
        for slot in list(self._slots.values()):
            slot.agent.send(Ping())
            self._check_heartbeats(slot, now)
        self._give_up_launches(now)
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
        for worker_id, since in list(slot.starting.items()):
            if now - since > WORKER_START_TIMEOUT_S:
                logger.warning("worker %s did not report in within %g s", worker_id, WORKER_START_TIMEOUT_S)
                slot.agent.send(KillWorker(worker_id))
                slot.starting[worker_id] = now  # for the agent to report its end, which starts the next one

    def _give_up_launches(self, now: float) -> None:
        """Spark may have lost the task, or the agent hangs: another one is launched in its place if need be."""
        for slot_id, since in list(self._launching.items()):
            if now - since > self._times.request_timeout_s:
                logger.warning("slot %s is given up: no agent within %g s", slot_id, self._times.request_timeout_s)
                del self._launching[slot_id]
                self._ending.add(slot_id)
                self._provider.cancel(slot_id)
                self._notify()

    def _end_idle_slots(self, now: float) -> None:
        """While a job waits for slots there are no idle ones: it gets what there is when the last worker is ready."""
        if self._requests:
            return
        for slot in list(self._slots.values()):
            if slot.owner is None and now - slot.idle_since > self._times.idle_timeout_s:
                logger.info("ending slot %s: no job has used it for %g s", slot.slot_id, self._times.idle_timeout_s)
                self._slot_ended(slot, "it was idle", keep_workers=False)


def _pause_before(attempts: int) -> float:
    """Seconds before the next try of something that failed ``attempts`` times in a row: none, then more and more."""
    return 0.0 if attempts == 0 else min(MAX_PAUSE_S, 0.1 * 2 ** (attempts - 1))
