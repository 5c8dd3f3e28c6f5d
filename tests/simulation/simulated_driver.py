"""What both simulated worlds have of a driver: the real shell, core and machines of a job, observed, and its slots.

Time, pools, high availability and workers are each world's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar, cast

from ckpt_runtime.checkpoint.configuration import CheckpointOverrides
from ckpt_runtime.checkpoint.coordinator import CheckpointCoordinator
from ckpt_runtime.checkpoint.effects import Effect
from ckpt_runtime.checkpoint.events import CoordinatorEvent
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.triggering import CheckpointIdCounter
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.jobmaster.job_host import JobHost, Result
from ckpt_runtime.jobmaster.job_shell import JobShell
from ckpt_runtime.jobmaster.slots import Slot
from ckpt_runtime.jobmaster.submission import JobHistory, JobSubmission
from ckpt_runtime.jobmaster.task_gateway import TaskGateway
from ckpt_runtime.network.agent_messages import ProcessIdentity, RegisterAgent, RegisterWorker
from ckpt_runtime.network.control_messages import DeploymentMessage
from ckpt_runtime.scheduler.deployment import JobPlan
from ckpt_runtime.scheduler.job_core import JobCore
from ckpt_runtime.scheduler.job_effects import JobEffect
from ckpt_runtime.scheduler.job_events import JobEvent
from ckpt_runtime.scheduler.job_machine import JobMachine
from ckpt_runtime.scheduler.replacement import subtasks_of
from ckpt_runtime.scheduler.restart_strategies import BackoffSettings, RestartStrategy
from ckpt_runtime.snapshots.job_claims import JobClaims
from ckpt_runtime.storage.checkpoint_storage import CheckpointStorage
from ckpt_runtime.storage.claims import CLAIM_NAME
from tests.simulation.file_system import ROOT
from tests.simulation.schedules.reported_checkpoints import CheckpointListener, ReportedCheckpoints
from tests.simulation.schedules.violation import Violation

T = TypeVar("T")
_NO_OPTIONS = Configuration({})


class Observer(Protocol):
    """Sees each step of the machines of a driver, before anything of it is carried out."""

    def begins(self, event: CoordinatorEvent | JobEvent) -> None: ...

    def stepped(self, event: CoordinatorEvent | JobEvent, effects: Sequence[Effect | JobEffect]) -> None: ...


class ObservedCoordinator(CheckpointCoordinator):
    """The real one; ``observer`` is set before the first event."""

    observer: Observer

    def handle(self, event: CoordinatorEvent, now: Instant) -> list[Effect]:
        self.observer.begins(event)
        effects = super().handle(event, now)
        self.observer.stepped(event, effects)
        return effects


class ObservedMachine(JobMachine):
    """The real one; ``observer`` is set before the first event."""

    observer: Observer

    def handle(self, event: JobEvent, now: Instant) -> list[JobEffect]:
        self.observer.begins(event)
        effects = super().handle(event, now)
        self.observer.stepped(event, effects)
        return effects


class StrictShell(JobShell):
    """Lets every exception through that the shell does not expect: in a simulation it is a finding."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._announcer.report = lambda call, *arguments: call(*arguments)  # type: ignore[method-assign]

    def _cause_in(self, place: str, error: Exception) -> NoReturn:
        raise error


S = TypeVar("S", bound=StrictShell)


def shell_of(
    kind: type[S],
    observer: Observer,
    submission: JobSubmission,
    plan: JobPlan,
    overrides: CheckpointOverrides,
    host: JobHost,
    *,
    ids: CheckpointIdCounter,
    listener: CheckpointListener,
    first_delay_ms: int,
    strategy: RestartStrategy,
    backoff: BackoffSettings,
) -> S:
    """A driver's shell with its core, which continues where the submission's history ends."""
    history = submission.history
    coordinator = ObservedCoordinator(
        submission.job_id,
        plan.graph,
        overrides.applied_to(plan.settings),
        ids,
        history.checkpoints,
        first_delay_ms=first_delay_ms,
        statistics=ReportedCheckpoints(listener),
    )
    machine = ObservedMachine(subtasks_of(plan.graph), strategy, history.next_attempt, backoff)
    coordinator.observer = machine.observer = observer
    latest = max((entry.checkpoint for entry in history.checkpoints), key=lambda found: found.id, default=None)
    core = JobCore(plan, machine, coordinator, overrides, history.savepoint_id, latest)
    return kind(submission, core, host, CheckpointStorage(ROOT, submission.job_id), TaskGateway(b""))


def submission_of(job_id: str, plan: JobPlan, history: JobHistory, **more: Any) -> JobSubmission:
    """Of a job without a program."""
    return JobSubmission(
        job_id=job_id,
        graph=plan.graph,
        defaults=_NO_OPTIONS,
        own=plan.own,
        archive=b"",
        program_id="",
        entry="",
        arguments=(),
        default_checkpoint_directory=ROOT,
        savepoint=plan.savepoint,
        claim_mode=plan.restore_mode,
        history=history,
        **more,
    )


class SimulatedHost:
    """The part of a :class:`~ckpt_runtime.jobmaster.job_host.JobHost` that no schedule changes."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._tokens = 0

    def token(self) -> str:
        self._tokens += 1
        return f"{self._number:06x}{self._tokens:06x}"

    def bind_slots(self, slots: list[Slot]) -> list[int | None]:
        return [None] * len(slots)


def raising(error: Exception) -> Result[Any]:
    """The answer of a call that raised."""
    return partial(_raise, error)


def _raise(error: Exception) -> NoReturn:
    raise error


def outcome(call: Callable[[], T]) -> Result[T]:
    """Makes a call as a pool does: its answer gives what it returned, or raises what it raised."""
    try:
        found = call()
    except Exception as error:
        return raising(error)
    return lambda: found


# --- slots


class SimulatedAgent:
    """The driver's end of an agent's connection, on which nothing is said."""

    def __init__(self, registration: RegisterAgent) -> None:
        self.registration = registration


def new_slot(number: int) -> Slot:
    registration = RegisterAgent(f"slot-{number}", "worker", (), ProcessIdentity("", 1, 0))
    return Slot(cast(Any, SimulatedAgent(registration)))


def worker_registration(slot_id: str, number: int) -> RegisterWorker:
    process = ProcessIdentity("", number, 0)
    return RegisterWorker(slot_id, f"worker-{number}", ("worker", number), process, "")


def is_worker_of(peer: object, slot: Slot) -> bool:
    """Whether its driver still counts on it."""
    return slot.worker is not None and cast(object, slot.worker.peer) is peer


def deliver(slot: Slot, peer: object, message: DeploymentMessage) -> bool:
    """To the slot's owner, if the worker is still the slot's; returns whether it is."""
    current = is_worker_of(peer, slot)
    if current and slot.owner is not None:
        slot.owner.worker_message(slot, message)
    return current


def lose_worker(slot: Slot, peer: object) -> None:
    """The connection of a worker has ended."""
    if is_worker_of(peer, slot):
        slot.worker = None
        if slot.owner is not None:
            slot.owner.worker_lost(slot, "simulated: the worker is gone")


# --- worlds


class ClaimingWorld(Protocol):
    """``had_ended``: the job ends before the present driver has looked for what earlier ones left."""

    broken: Violation | None

    @property
    def files(self) -> Any: ...

    @property
    def had_ended(self) -> bool: ...


@dataclass(frozen=True)
class ObservedClaims(JobClaims):
    """When the job ends, nothing of what it has claimed is left that it had to delete before.

    A driver that finds the job ended has no coordinator that deletes: then this is what deletes.
    """

    world: ClaimingWorld = field(kw_only=True)

    def release(self) -> None:
        files = self.world.files.files
        before = {path for path in files if not path.endswith(f"/{CLAIM_NAME}")}
        super().release()
        gone = before - files.keys()
        if gone and not self.world.had_ended:
            self.world.broken = Violation(f"{len(gone)} files of a claimed snapshot had no owner until the end")


@contextmanager
def quiet() -> Iterator[None]:
    """Production logs what goes wrong, and here everything does."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
