"""One simulated run of a job: the real core in the real shell, on a host whose time and steps come from the seed.

Slots, workers' connections and the record of high availability are the simulation's; what is stored goes through the
real storage layer to simulated files. A new run (another parallelism, another savepoint) is another job with an id of
its own. A driver that takes a run over makes another object for it, out of the record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration, CheckpointOverrides, OverridesChange
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.properties import CheckpointOptions, CheckpointProperties
from ckpt_runtime.checkpoint.retention import RetainedCheckpoint
from ckpt_runtime.checkpoint.triggering import CheckpointIdCounter
from ckpt_runtime.configuration.checkpointing_options import RecoveryClaimMode
from ckpt_runtime.configuration.configuration import Configuration, OwnConfiguration
from ckpt_runtime.graph.compiler import CompiledPlan
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.jobmaster.job_host import Cancellable, Pool, Result
from ckpt_runtime.jobmaster.job_record import JobRecord
from ckpt_runtime.jobmaster.slots import Slot, SlotOwner, SlotsUnavailableError
from ckpt_runtime.jobmaster.submission import JobHistory
from ckpt_runtime.network.control_messages import DeploymentMessage
from ckpt_runtime.scheduler import job_effects as job_out
from ckpt_runtime.scheduler import job_events as job_on
from ckpt_runtime.scheduler.core_events import (
    ChangeAnswered,
    ChangeOutcome,
    JobOutput,
    PatchRequested,
    RescaleRequested,
)
from ckpt_runtime.scheduler.deployment import JobPlan
from ckpt_runtime.scheduler.job_status import JobState, JobStatus
from ckpt_runtime.scheduler.replacement import ParallelismBounds
from ckpt_runtime.scheduler.restart_strategies import BackoffSettings, FixedDelay
from ckpt_runtime.snapshots.job_claims import JobClaims
from ckpt_runtime.storage.checkpoint_storage import CheckpointStorage, SnapshotDisposal
from ckpt_runtime.storage.errors import AmbiguousWriteError, NotFoundError, StorageError
from tests.simulation.file_system import ROOT
from tests.simulation.jobs.checkers import CheckpointLedger
from tests.simulation.schedules.violation import Violation
from tests.simulation.simulated_driver import (
    SimulatedHost,
    StrictShell,
    deliver,
    lose_worker,
    outcome,
    raising,
    shell_of,
    submission_of,
)

if TYPE_CHECKING:
    from tests.simulation.jobs.worker import SimulatedWorker
    from tests.simulation.jobs.world import World

T = TypeVar("T")

SAVEPOINTS = f"{ROOT}/savepoints"
_NO_OPTIONS = Configuration({})


class _Timer:
    """``at`` is a moment of the world's time."""

    __slots__ = ("at", "call", "cancelled")

    def __init__(self, at: float, call: Callable[[], None]) -> None:
        self.at = at
        self.call = call
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class JobMasterHost(SimulatedHost):
    """Everything happens when the world's schedule says so."""

    def __init__(self, world: World, master: JobMaster) -> None:
        super().__init__(master.number)
        self._world = world
        self._master = master
        self._timers: list[_Timer] = []
        self._first_due = inf

    def now(self) -> Instant:
        return Instant(int(self._world.now), self._world.wall_ms(-1))

    def next_deployment(self) -> int:
        return self._world.next_deployment(self._master)

    def call_later(self, delay_ms: float, call: Callable[[], None]) -> Cancellable:
        timer = _Timer(self._world.now + delay_ms, call)
        self._timers.append(timer)
        self._first_due = min(self._first_due, timer.at)
        return timer

    def in_pool(self, pool: Pool | str, call: Callable[[], T], answer: Callable[[Result[T]], None]) -> None:
        kind = "deletion" if pool is Pool.DELETIONS else "storage"
        self._world.asynchronously(kind, lambda call, answer: answer(outcome(call)), call, answer)

    def acquire_slots(
        self,
        owner: SlotOwner,
        count: int,
        held: list[Slot],
        answer: Callable[[Result[list[Slot]]], None],
        least: int | None = None,
    ) -> Cancellable:
        """Those that a job can do without come late, fewer than wanted, or never."""
        choices = self._world.choices
        spare = least is not None
        if spare and choices.fault("slots never come", 0.2):
            never = SlotsUnavailableError("simulated")
            return self.call_later(choices.delay("slots never come", 0, 60), partial(answer, raising(never)))
        wanted = least if least is not None and choices.fault("slots are few", 0.2) else count

        def acquired() -> None:
            slots = self._world.slots_for(wanted)
            for slot in slots:
                slot.owner = owner
            answer(lambda: slots)

        return self.call_later(choices.delay("slots are late", 0, 60) if spare else 0, acquired)

    def release_slot(self, slot: Slot) -> None:
        """No request is on its way for longer than its job lives."""
        slot.owner = None
        self._world.land_all()

    def replace_worker(self, slot: Slot) -> None:
        raise AssertionError("simulated subtasks end when they are cancelled")

    @property
    def next_timer(self) -> float | None:
        return min((timer.at for timer in self._timers if not timer.cancelled), default=None)

    def fire_timers(self) -> None:
        """Those that are due, by their time."""
        now = self._world.now
        if now < self._first_due:
            return
        due = sorted((timer for timer in self._timers if timer.at <= now), key=lambda timer: timer.at)
        self._timers = [timer for timer in self._timers if timer.at > now]
        self._first_due = min((timer.at for timer in self._timers), default=inf)
        for timer in due:
            if not timer.cancelled:
                timer.call()


class SimulatedRecord(JobRecord):
    """High availability of one run: each call may fail, with or without an effect."""

    def __init__(self, master: JobMaster, earlier: SimulatedRecord | None = None) -> None:
        """``earlier`` is the dead driver's."""
        super().__init__()
        self._master = master
        self._world = master.world
        self.pointers: dict[int, tuple[str, bool]] = {} if earlier is None else earlier.pointers
        self.disposals: dict[int, SnapshotDisposal] = {} if earlier is None else earlier.disposals
        self.overrides: str | None = None if earlier is None else earlier.overrides
        self._overrides = self.overrides
        self.next_checkpoint_id: int = 1 if earlier is None else earlier.next_checkpoint_id
        self.next_attempt: int = 0 if earlier is None else earlier.next_attempt
        self.savepoint_id: int = 0 if earlier is None else earlier.savepoint_id
        self.ended = False
        self._removed_with_files: dict[int, bool] = {}
        self._forgotten = False

    def removing(self, effect: out.RemoveFromStore) -> None:
        """The coordinator wants that pointer gone, and perhaps the files."""
        self._removed_with_files[effect.checkpoint_id] = effect.discards is not None

    def reserve(self, checkpoint_id: int) -> None:
        self.next_checkpoint_id = max(self.next_checkpoint_id, checkpoint_id + 1)

    def keep_savepoint(self, checkpoint_id: int) -> None:
        self.savepoint_id = max(self.savepoint_id, checkpoint_id)

    def begin_attempt(self, attempt: int) -> None:
        self._may_fail("an attempt is not recorded", 0.01)
        self.next_attempt = max(self.next_attempt, attempt + 1)

    def add(self, checkpoint: CompletedCheckpoint, owned: bool) -> None:
        self._may_fail("no pointer", 0.01)
        if self._world.choices.fault("pointer unknown and absent", 0.005):
            raise AmbiguousWriteError("simulated", "pointer")
        self.pointers[checkpoint.id] = (checkpoint.directory, owned)
        self._world.snapshots.point_to(self._master, checkpoint)
        if self._world.choices.fault("pointer unknown", 0.01):
            raise AmbiguousWriteError("simulated", "pointer")

    def contains(self, checkpoint_id: int) -> bool:
        return checkpoint_id in self.pointers

    def remove(self, checkpoint_id: int, disposal: SnapshotDisposal | None = None) -> None:
        self._may_fail("removal fails", 0.01)
        self.pointers.pop(checkpoint_id, None)
        if disposal is not None:
            self.disposals[checkpoint_id] = disposal
        if self._world.scenario.shares and self._world.choices.fault("the driver dies behind a removal", 0.08):
            self._world.later(self._world.take_over)
        retained = not self._removed_with_files[checkpoint_id]
        self._world.snapshots.forget(self._master, checkpoint_id, retained=retained)

    def settle(self, checkpoint_id: int) -> None:
        self._may_fail("a disposal is not settled", 0.05)
        self.disposals.pop(checkpoint_id, None)

    def change_overrides(self, change: OverridesChange) -> str | None:
        if self._forgotten:
            raise NotFoundError("simulated: the job is gone", "job")
        self._may_fail("overrides are not stored", 0.05)
        if self._world.choices.fault("overrides unknown and not stored", 0.05):
            raise AmbiguousWriteError("simulated", "job")
        text = self.overrides = super().change_overrides(change)
        if self._world.choices.fault("overrides unknown", 0.05):
            raise AmbiguousWriteError("simulated", "job")
        return text

    def store_plan(self, graph: JobGraph, own: OwnConfiguration) -> None:
        self._may_fail("a graph is not stored", 0.1)
        if self._world.choices.fault("graph unknown and not stored", 0.1):
            raise AmbiguousWriteError("simulated", "job")
        self._master.stored_graph = graph
        if self._world.choices.fault("graph unknown", 0.1):
            raise AmbiguousWriteError("simulated", "job")

    def settle_plan(self, graph: JobGraph, own: OwnConfiguration) -> bool:
        self._may_fail("a graph is not settled", 0.3)
        return self._master.stored_graph == graph

    def end(self, result: Any) -> None:
        self._may_fail("the end is not stored", 0.05)
        self.ended = True

    def forget(self) -> None:
        self._forgotten = True
        self._master.shell.close()
        self._world.later(self._world.job_closed, self._master)

    def _may_fail(self, how: str, probability: float) -> None:
        if self._world.choices.fault(how, probability):
            raise StorageError("simulated", how)


class JobMaster:
    """``origin`` is what the run starts from, ``number`` counts the runs from 1; ``claims`` make the origin the run's.

    ``earlier`` was the run's under a driver that died.
    """

    def __init__(
        self,
        world: World,
        number: int,
        plan: CompiledPlan,
        configuration: CheckpointConfiguration,
        origin: CompletedCheckpoint | None,
        claims: JobClaims | None = None,
        earlier: JobMaster | None = None,
    ) -> None:
        self.world = world
        self.number = number
        self.job_id = f"{number:032x}"
        self.plan = plan
        self.submitted = configuration
        self.stored_graph: JobGraph = plan.job_graph if earlier is None else earlier.stored_graph
        self.claims = claims
        self.taken_over = earlier is not None
        self.mode = RecoveryClaimMode.NO_CLAIM if claims is None else RecoveryClaimMode.CLAIM
        self.origin = origin if origin is None or claims is None else origin.claimed()
        self.ended: JobStatus | None = None
        self.stopped_at: str | None = None
        self.options: dict[int, CheckpointOptions] = {}
        self.host = JobMasterHost(world, self)
        self.ledger = CheckpointLedger(self)
        self.record: SimulatedRecord = SimulatedRecord(self, None if earlier is None else earlier.record)
        self._requests = 0
        history = self._history(earlier)
        savepoint = None if history.checkpoints else self.origin
        plan_of_job = JobPlan(self.stored_graph, _NO_OPTIONS, self.submitted, savepoint, self.mode)
        submission = submission_of(
            self.job_id,
            plan_of_job,
            history,
            claims=self.claims,
            record=self.record,
            submitted_at_ms=self.world.wall_ms(-1),
        )
        self.shell = shell_of(
            StrictShell,
            self,
            submission,
            plan_of_job,
            CheckpointOverrides.from_document(self.record.overrides),
            self.host,
            ids=CheckpointIdCounter(history.next_checkpoint_id),
            listener=self.ledger,
            first_delay_ms=world.choices.delay("first delay", 0, 40),
            strategy=FixedDelay(1_000_000, world.choices.delay("restart", 0, 5)),
            backoff=BackoffSettings(2, 10, 1.5),
        )
        self.machine = self.shell.core.machine
        self.coordinator = self.shell.core.coordinator
        world.files.make_directories(CheckpointStorage(ROOT, self.job_id).shared.path)

    def _history(self, earlier: JobMaster | None) -> JobHistory:
        """What is recorded, as ``known_jobs.py`` reads it."""
        if earlier is None:
            return JobHistory()
        record, checkpoints = self.record, []
        for _, (directory, owned) in sorted(record.pointers.items()):
            found = self.world.read_snapshot(directory)
            checkpoints.append(RetainedCheckpoint(found.claimed() if owned else found, owned))
        self.ledger.completed = {*earlier.ledger.completed, *record.pointers}
        return JobHistory(
            checkpoints=tuple(checkpoints),
            next_checkpoint_id=max([record.next_checkpoint_id, *(number + 1 for number in record.pointers)]),
            next_attempt=record.next_attempt,
            savepoint_id=record.savepoint_id,
            disposals={
                number: SnapshotDisposal.from_json(disposal.to_json()) for number, disposal in record.disposals.items()
            },
        )

    @property
    def graph(self) -> JobGraph:
        """What the present deployment runs."""
        return self.shell.core.graph

    # --- what happens

    def begins(self, event: on.CoordinatorEvent | job_on.JobEvent) -> None:
        """Of one of the machines."""
        self.world.note("%s", event)

    def stepped(
        self, event: on.CoordinatorEvent | job_on.JobEvent, effects: Sequence[out.Effect | job_out.JobEffect]
    ) -> None:
        """Of one of the machines."""
        for effect in effects:
            self.world.note("  -> %s", effect)
            self.decided(effect)

    def decided(self, effect: out.Effect | job_out.JobEffect) -> None:
        """By the machines, in their order, before anything is carried out."""
        match effect:
            case out.TriggerSources(checkpoint_id, _, options, _):
                self.options[checkpoint_id] = options
            case out.RequestCompleted(request_id, checkpoint_id, path) if not request_id.startswith(
                ("checkpoint", "rescale")
            ):
                self.world.savepoint_taken(self, checkpoint_id, path, stop=request_id.startswith("stop"))
            case out.InitializeLocation(checkpoint_id, properties) if properties.is_savepoint:
                if properties.is_incremental:
                    self.world.snapshots.savepoint_begins(self, checkpoint_id, self.coordinator.retained)
            case out.RemoveFromStore():
                self.record.removing(effect)
            case out.RestoreFrom(_, checkpoint):
                self.world.restoring(self, checkpoint)
            case job_out.StopCompleted() | job_out.StopFailed():
                self.stopped_at = effect.location
            case job_out.AllTasksRunning():
                self.world.later(self.check_runs_what_is_stored)
            case job_out.JobEnded(status):
                self.ended = status

    def check_runs_what_is_stored(self) -> None:
        """In as many slots as it takes, unless the job is being rescaled or has stopped running meanwhile."""
        core = self.shell.core
        if self.world.master is not self or core.machine.state is not JobState.RUNNING:
            return
        if core.target_graph is not core.graph:
            return
        if core.graph != self.stored_graph:
            raise Violation("the job runs a graph that is not the stored one")
        if self.world.held_slots > core.graph.slots:
            raise Violation(f"{core.graph.slots} slots are in use, {self.world.held_slots} are held")

    def worker_lost(self, worker: SimulatedWorker) -> None:
        lose_worker(self.world.slots[worker.slot], worker.peer)

    def worker_message(self, worker: SimulatedWorker, message: DeploymentMessage) -> None:
        deliver(self.world.slots[worker.slot], worker.peer, message)

    # --- requests

    def start(self) -> None:
        self.shell.tell(job_on.Start())

    def cancel(self) -> None:
        self.shell.tell(job_on.CancelRequested())

    def trigger(self, request_id: str, properties: CheckpointProperties) -> None:
        directory = SAVEPOINTS if properties.is_savepoint else None
        self.shell.tell(on.TriggerRequested(request_id, properties, directory))

    def stop(self, request_id: str, drain: bool) -> None:
        self.shell.tell(job_on.StopRequested(request_id, drain, SAVEPOINTS))

    def patch(self, overrides: CheckpointOverrides, *, until_applied: bool = False) -> None:
        """Once, as a user does, or again and again until it is in force or the run has ended."""

        def answer(result: Result[JobOutput]) -> None:
            output = result()
            assert isinstance(output, ChangeAnswered)
            if output.outcome is ChangeOutcome.APPLIED:
                self.world.patched(self, overrides)
            elif until_applied and self.ended is None:
                self.host.call_later(5, partial(self.patch, overrides, until_applied=True))

        self._requests += 1
        if "timeout_ms" in overrides.given:
            self.ledger.allow(overrides.given["timeout_ms"])
        request_id = f"patch-{self._requests}"
        self.shell.ask(request_id, PatchRequested(request_id, overrides), answer)

    def rescale(self, bounds: Mapping[str, ParallelismBounds], applied: Callable[[], None]) -> None:
        def answer(result: Result[JobOutput]) -> None:
            output = result()
            assert isinstance(output, ChangeAnswered)
            self.world.seen[f"rescale {output.outcome.name}"] += 1
            if output.outcome is ChangeOutcome.APPLIED:
                applied()

        self._requests += 1
        request_id = f"rescale-{self._requests}"
        self.shell.ask(request_id, RescaleRequested(request_id, bounds), answer)

    def force(self, configuration: CheckpointConfiguration) -> None:
        """Other settings for a moment, behind the back of what is stored."""
        self.ledger.allow(configuration.timeout_ms)
        self.shell.tell(on.ConfigurationPatched(configuration))
