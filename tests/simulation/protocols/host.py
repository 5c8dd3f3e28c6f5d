"""What a simulated driver's shell runs on: its time, its pools, its slots, and the ends of its workers' connections."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.jobmaster.job_host import Cancellable, Pool, Result
from ckpt_runtime.jobmaster.slots import Slot, SlotOwner, SlotsUnavailableError, Worker
from ckpt_runtime.network.control_messages import (
    CancelDeployment,
    DeploySubtasks,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    TriggerCheckpoint,
    WorkerCommand,
)
from tests.simulation.simulated_driver import SimulatedHost, new_slot, outcome, raising, worker_registration

if TYPE_CHECKING:
    from tests.simulation.protocols.driver import Driver

T = TypeVar("T")


class Peer:
    """The driver's end of a worker's connection. ``alive`` is the worker, whatever its driver knows."""

    def __init__(self, driver: Driver, slot: Slot, number: int) -> None:
        self.registration = worker_registration(slot.slot_id, number)
        self.slot = slot
        self.alive = True
        self._driver = driver

    def send(self, command: WorkerCommand) -> None:
        """On its way the message waits its turn, or is lost."""
        deployment = self._driver.deployment
        if deployment is None or not self.alive:
            return
        attempt = deployment.attempt
        match command:
            case DeploySubtasks():
                deployment.start(self, command.deployment.subtasks[0].subtask_index)
            case CancelDeployment():
                index = deployment.peers.index(self)
                deployment.send(index, deployment.cancel, index)
            case TriggerCheckpoint(_, tasks, checkpoint_id, _, options):
                for key in tasks:
                    task = deployment.tasks[ExecutionId(*key, attempt)]
                    deployment.send(key[1], deployment.trigger, task, checkpoint_id, options, checkpointing=True)
            case NotifyCheckpointComplete(_, tasks, checkpoint_id):
                for key in tasks:
                    task = deployment.tasks[ExecutionId(*key, attempt)]
                    # What ends a stopped job is not lost: no later completion would heal it.
                    lossy = task.stopping != checkpoint_id
                    deployment.send(key[1], deployment.completed, task, checkpoint_id, checkpointing=lossy)
            case NotifyCheckpointAborted(_, tasks, checkpoint_id, latest):
                for key in tasks:
                    task = deployment.tasks[ExecutionId(*key, attempt)]
                    deployment.send(key[1], deployment.aborted, task, checkpoint_id, latest, checkpointing=True)


class _Timer:
    """With late timers, one that was cancelled tells the shell its event all the same."""

    __slots__ = ("_call", "_cancelled", "_driver")

    def __init__(self, driver: Driver, call: Callable[[], None]) -> None:
        self._driver = driver
        self._call = call
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    def fire(self) -> None:
        if not self._cancelled:
            self._call()
        elif self._driver.world.scenario.late_timers and not self._driver.shut_down:
            call: object = self._call  # supervised, by a timer of the job's, with an event for the shell
            while isinstance(call, partial):
                call = call.args[-1]
            if isinstance(call, on.TimerFired):
                self._driver.world.late_events += 1
                self._driver.tell(call)


class DriverHost(SimulatedHost):
    """In virtual time, in the driver's process."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver.epoch)
        self._driver = driver
        self._world = driver.world
        self._workers = 0
        self._free: list[Slot] = []

    def now(self) -> Instant:
        return self._world.loop.instant(self._driver.origin, self._driver.skew)

    def next_deployment(self) -> int:
        return self._driver.begin_deployment()

    def _later(self, delay: float, call: Callable[[], None]) -> _Timer:
        timer = _Timer(self._driver, call)
        self._world.loop.at(self._world.loop.now + int(delay), self._driver.process, timer.fire)
        return timer

    def call_later(self, delay_ms: float, call: Callable[[], None]) -> Cancellable:
        return self._later(delay_ms + self._world.choices.delay("timer", 0, 2), call)

    def in_pool(self, pool: Pool | str, call: Callable[[], T], answer: Callable[[Result[T]], None]) -> None:
        choices = self._world.choices
        delay = choices.delay("call", 1, 200 if choices.fault("a call is slow", 0.01) else 10)
        self._world.loop.at(self._world.loop.now + delay, self._driver.process, self._run, call, answer)

    def _run(self, call: Callable[[], T], answer: Callable[[Result[T]], None]) -> None:
        with self._world.runs(self._driver, in_pool=True):
            result = outcome(call)
        self._world.check_broken()
        self._world.loop.at(self._world.loop.now + 1, self._driver.process, answer, result)

    # --- slots

    def acquire_slots(
        self,
        owner: SlotOwner,
        count: int,
        held: list[Slot],
        answer: Callable[[Result[list[Slot]]], None],
        least: int | None = None,
    ) -> Cancellable:
        """Those that a job can do without come late, fewer than wanted, or never; one that came may be lost."""
        choices = self._world.choices
        if least is None:
            fails, late = choices.fault("no slots", 0.05), choices.delay("slots", 0, 15)
        else:
            late = choices.delay("reserve", 0, 200 if choices.fault("slots are late", 0.2) else 15)
            fails = choices.fault("slots never come", 0.15)
            count = least if choices.fault("slots are few", 0.2) else count
        if fails:
            return self._later(late, partial(answer, raising(SlotsUnavailableError("simulated"))))

        def acquired() -> None:
            slots = self._take(owner, count, held)
            answer(lambda: slots)
            spare = [slot for slot in slots if slot not in held]
            if least is not None and spare and choices.fault("a reserved slot is lost", 0.1):
                self._later(choices.delay("loss", 1, 40), partial(self._lose, spare[-1]))

        return self._later(late, acquired)

    def _take(self, owner: SlotOwner, count: int, held: list[Slot]) -> list[Slot]:
        slots = [slot for slot in held if not slot.lost][:count]
        while len(slots) < count:
            if not self._free:
                self._free.append(new_slot(self._workers))
            slots.append(self._free.pop())
        for slot in slots:
            slot.owner = owner
            if slot.worker is None:
                self._workers += 1
                slot.worker = Worker(cast(Any, Peer(self._driver, slot, self._workers)))
        return slots

    def _lose(self, slot: Slot) -> None:
        if slot.owner is not None and not slot.lost:
            slot.lost = True
            slot.owner.slot_lost(slot, "simulated")

    def release_slot(self, slot: Slot) -> None:
        slot.owner = None
        self._free.append(slot)

    def replace_worker(self, slot: Slot) -> None:
        """Only all workers of a deployment are replaced, when it is unknown which orders they have received."""
        slot.worker = None
        deployment, self._driver.deployment = self._driver.deployment, None
        if deployment is not None:
            deployment.die()
