"""The slots of a session: stages of slot agents, their workers, and which job holds which slot.

A slot has one active worker and one warm spare. When the active worker dies, the spare takes over at once and another
spare is started. When an agent is lost, its whole stage is (Spark fails a barrier stage as one), and the job that held
the slots asks for new ones, which launches a new stage. Warm workers that never worked outlive their agents for a
while: agents of the new stage on the same machine adopt them instead of starting cold ones. Everything runs on the
event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from ckpt_runtime.jobmaster.control_endpoint import AgentPeer, AnyPeer
from ckpt_runtime.jobmaster.gateway_errors import NotFound, NotReady
from ckpt_runtime.jobmaster.loss_notices import LossNotices, describe_exit
from ckpt_runtime.jobmaster.slot_stages import SlotProvider, SlotStages
from ckpt_runtime.jobmaster.slots import Slot, SlotOwner, SlotsUnavailableError, SlotTimes, Worker
from ckpt_runtime.jobmaster.worker_questions import ANSWER_TIMEOUT_S, A, WorkerQuestions
from ckpt_runtime.network.agent_messages import (
    AdoptWorker,
    AgentHeartbeat,
    AgentMessage,
    KillWorker,
    Ping,
    ShutdownAgent,
    SpawnWorker,
    WorkerExited,
)
from ckpt_runtime.network.control_doors import MalformedMessageError
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
WORKER_START_TIMEOUT_S = 120.0
"""A worker process that has not registered by then hangs, and is killed; its end starts the next one."""

MAX_FAILURES = 3
"""A process in which subtasks have failed so often gets no further attempt: user code may have left the cause in it."""


class SlotPool:
    """All slots. ``clock`` is monotonic, in seconds."""

    def __init__(
        self, provider: SlotProvider, secret: str, times: SlotTimes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._times = times
        self._clock = clock
        self._stages = SlotStages(provider, secret, self._stage_ended)
        self._slots: dict[str, Slot] = {}
        self._orphans: dict[str, Worker] = {}
        self._waiting_requests = 0
        self._next_worker = 0
        self._changed = asyncio.Condition()
        self._loop = asyncio.get_running_loop()
        self._losses = LossNotices(self._loop)
        self._questions = WorkerQuestions()
        self._watch: asyncio.Task[None] | None = None
        self._closing = False

    def start(self, control_port: int) -> None:
        self._stages.control_port = control_port
        self._watch = self._loop.create_task(self._watch_heartbeats())

    async def stop(self) -> None:
        """Tells all agents to end and waits for their stages, for a while."""
        self._closing = True
        if self._watch is not None:
            self._watch.cancel()
        self._losses.close()
        for stage_id in self._stages.living:
            self._stages.begin_end(stage_id)
        for slot in self._slots.values():
            slot.agent.send(ShutdownAgent())
        for orphan in self._orphans.values():
            orphan.peer.close()
        try:
            async with asyncio.timeout(10), self._changed:
                await self._changed.wait_for(lambda: not self._stages)
        except TimeoutError:
            for stage_id in self._stages.living:
                self._stages.cancel(stage_id)

    # --- for jobs

    @property
    def total(self) -> int:
        """Slots that there are, or could be."""
        return max(len(self._slots), self._stages.capacity)

    @property
    def available(self) -> int:
        """Those of :attr:`total` that no job holds."""
        return self.total - sum(1 for slot in self._slots.values() if slot.owner is not None)

    def all(self) -> tuple[Slot, ...]:
        """The living slots, oldest first."""
        return tuple(self._slots.values())

    def in_use(self, host: str) -> int:
        """Slots on a host that jobs hold."""
        return sum(1 for slot in self._slots.values() if slot.owner is not None and slot.host == host)

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

        With ``least`` the owner can do without: it gets as many as the session can have, that many at least, and what
        was launched for it in vain does not stand in the way of others.

        Raises SlotsUnavailableError when a stage cannot be launched or the request times out. Whatever is raised, what
        was taken is given back, and what was held stays the owner's, who may also give it back meanwhile.
        """
        if least is not None and self._stages.capacity:
            count = max(least, min(count, sum(not slot.lost for slot in held) + self.available))
        chosen = [slot for slot in held if not slot.lost][:count]
        for slot in chosen:
            # Between deployments, when nothing runs in it.
            if slot.worker is not None and slot.worker.failures >= MAX_FAILURES:
                self.replace_worker(slot)
        taken: list[Slot] = []
        launched: list[int] = []
        self._waiting_requests += 1
        try:
            async with asyncio.timeout(self._times.request_timeout_s):
                await self._gather(owner, count, chosen, taken, launched)
            return chosen
        except BaseException as error:
            for slot in taken:
                # The owner may have given it back meanwhile, and another job have it.
                if slot.owner is owner:
                    self.release(slot)
            if least is not None:
                self._abandon(launched)
            if isinstance(error, TimeoutError):
                raise SlotsUnavailableError(
                    f"{count} slots were not available within {self._times.request_timeout_s:g} s "
                    f"({len(chosen)} were); check that Spark has as many free task slots (cores) as the job's "
                    "parallelism"
                ) from None
            raise
        finally:
            self._waiting_requests -= 1

    async def _gather(
        self, owner: SlotOwner, count: int, chosen: list[Slot], taken: list[Slot], launched: list[int]
    ) -> None:
        """Until ``chosen`` is complete; notes which free slots were taken, and which stages launched, for it."""
        while True:
            # Looked at anew after each wait: any of them may have been lost, or given back by the owner.
            chosen[:] = [slot for slot in chosen if not slot.lost and slot.owner is owner]
            for slot in self._slots.values():
                if len(chosen) < count and slot.owner is None:
                    slot.owner = owner
                    chosen.append(slot)
                    taken.append(slot)
            if len(chosen) == count and all(slot.worker is not None for slot in chosen):
                return
            # One stage at a time: slots that are on their way count, or each wake-up would launch the same again.
            if len(chosen) < count and not self._stages.launching:
                # Stages that end at once would else be launched in a circle.
                await asyncio.sleep(_pause_before(len(launched)))
                launched.append(self._stages.launch(count - len(chosen)))
            async with self._changed:
                await self._changed.wait()
            self._stages.raise_failure()

    def _abandon(self, launched: list[int]) -> None:
        """Stages that are still on their way would keep those from coming that somebody waits for."""
        for stage_id in launched:
            if self._stages.is_open(stage_id) and not self._stages.is_complete(stage_id):
                self._end_stage(stage_id, "nobody waits for its slots any more", keep_workers=False)
                self._stages.cancel(stage_id)

    def release(self, slot: Slot) -> None:
        """Gives a slot back. Its worker ran a job's code, so the next job gets a fresh process."""
        slot.owner = None
        slot.idle_since = self._clock()
        if not slot.lost and slot.worker is not None and slot.worker.used:
            self.replace_worker(slot)
        self._notify()

    def replace_worker(self, slot: Slot) -> None:
        """Kills the slot's worker and makes the spare the active one."""
        worker = self._promote_spare(slot)
        if worker is not None:
            slot.agent.send(KillWorker(worker.worker_id))
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
        if slot.slot_id in self._slots or not self._stages.arrive(slot.stage_id):
            agent.send(ShutdownAgent())  # as a rule its stage has lost another agent before this one came
            agent.close()
            return
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
        """Spark will say why with the end of the stage; owners hear of it then, or a little later."""
        if not explained and self._stages.is_open(slot.stage_id):
            self._losses.open(_stage_key(slot.stage_id), self._times.loss_grace_s)
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
        slot.failed_starts = 0
        if slot.worker is None:
            slot.worker = worker
            slot.spare_due = self._clock() + self._times.spare_pause_s
        else:
            slot.spare = worker
        for sibling in self._of_stage(slot.stage_id):
            self._start_workers(sibling)
        self._notify()

    def _of_stage(self, stage_id: int) -> list[Slot]:
        return [slot for slot in self._slots.values() if slot.stage_id == stage_id]

    def _has_workers(self, stage_id: int) -> bool:
        """Whether all slots of a stage are there and have an active worker."""
        return self._stages.is_complete(stage_id) and all(slot.worker is not None for slot in self._of_stage(stage_id))

    def _start_workers(self, slot: Slot) -> None:
        """One process at a time, and spares last, so that no spare competes with a worker that a job waits for."""
        if slot.lost or slot.starting or (slot.worker is not None and slot.spare is not None):
            return
        if slot.worker is not None and not self._has_workers(slot.stage_id):
            return
        machine = slot.agent.registration.process.machine
        # Pids mean the same process only where machine is equal; elsewhere the agent could not hold it.
        orphan = next((worker for worker in self._orphans.values() if worker.machine == machine), None)
        if orphan is not None:
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

    # --- slots and stages

    def _slot_ended(self, slot: Slot, reason: str, *, keep_workers: bool = True) -> None:
        if slot.lost:
            return
        # First: what follows ends the whole stage, and comes back here for each slot of it.
        slot.lost = True
        self._slots.pop(slot.slot_id, None)
        # Taken before the slot forgets them: an orphan must be found by its id alone from now on.
        workers = slot.workers
        slot.worker = slot.spare = slot.adopting = None
        # One that is still starting is as warm as a spare by the time the next stage is there.
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
            self._losses.tell(_stage_key(slot.stage_id), lambda why: owner.slot_lost(slot, f"{told}: {why}"), reason)
        self._end_stage(slot.stage_id, "its barrier stage lost a task", keep_workers=keep_workers)
        self._notify()

    def _end_stage(self, stage_id: int, reason: str, *, keep_workers: bool) -> None:
        """Spark fails a barrier stage as a whole: do not wait for it to take the other slots away one by one."""
        if not self._stages.begin_end(stage_id):
            return
        slots = self._of_stage(stage_id)
        logger.info("ending barrier stage %d, which has %d slots left: %s", stage_id, len(slots), reason)
        for sibling in slots:
            self._slot_ended(sibling, reason, keep_workers=keep_workers)

    def _stage_ended(self, stage_id: int, error: BaseException | None) -> None:
        reason = "its barrier stage ended" if error is None else str(error).splitlines()[0]
        for slot in self._of_stage(stage_id):
            self._slot_ended(slot, reason)
        self._losses.explain(_stage_key(stage_id), None if error is None else reason)
        self._notify()

    def _notify(self) -> None:
        # A task: the condition can only be entered by waiting, and its callers are no coroutines.
        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        self._loop.create_task(notify())

    # --- the silent and the idle

    async def _watch_heartbeats(self) -> None:
        """Finds the silent (a stopped process keeps its sockets open), and stages that nobody needs."""
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
        self._end_idle_stages(now)

    def _check_heartbeats(self, slot: Slot, now: float) -> None:
        silent = f"no heartbeat for {self._times.heartbeat_timeout_s:g} s"
        if now - slot.agent.last_heard > self._times.heartbeat_timeout_s:
            logger.warning("slot %s is lost: %s", slot.slot_id, silent)
            self._stages.cancel(slot.stage_id)
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

    def _end_idle_stages(self, now: float) -> None:
        """While a job waits for slots there are no idle ones: it gets what there is when the last worker is ready."""
        if self._waiting_requests:
            return
        for stage_id in self._stages.living:
            slots = self._of_stage(stage_id)
            idle = all(slot.owner is None and now - slot.idle_since > self._times.idle_timeout_s for slot in slots)
            if slots and idle:
                reason = f"no job has used its slots for {self._times.idle_timeout_s:g} s"
                self._end_stage(stage_id, reason, keep_workers=False)


def _stage_key(stage_id: int) -> str:
    return f"stage {stage_id}"


def _pause_before(attempts: int) -> float:
    """Seconds before the next try of something that failed ``attempts`` times in a row: none, then more and more."""
    return 0.0 if attempts == 0 else min(MAX_PAUSE_S, 0.1 * 2 ** (attempts - 1))
