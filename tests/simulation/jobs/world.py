"""One simulated schedule of a whole job: real parts without threads, sockets or clocks, advanced in an order by seed.

``World(seed).run()`` ends quietly or raises :class:`Violation`. The same seed gives the same schedule everywhere.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import accumulate, chain
from random import Random
from typing import Any, NamedTuple, cast

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint, is_shared
from ckpt_runtime.checkpoint.configuration import MINIMUM_MS, CheckpointOverrides, CheckpointRetention
from ckpt_runtime.checkpoint.properties import CheckpointProperties, CheckpointType, SavepointFormat
from ckpt_runtime.configuration.checkpointing_options import RecoveryClaimMode
from ckpt_runtime.graph.compiler import CompiledPlan
from ckpt_runtime.jobmaster.slots import Slot, Worker
from ckpt_runtime.network.control_messages import DeploymentMessage, WorkerCommand
from ckpt_runtime.scheduler.deployment import Address
from ckpt_runtime.scheduler.job_status import JobState, JobStatus
from ckpt_runtime.scheduler.replacement import ParallelismBounds
from ckpt_runtime.snapshots.job_claims import JobClaims, claim_snapshot
from ckpt_runtime.snapshots.snapshot import disposal_of
from ckpt_runtime.storage.checkpoint_storage import CheckpointStorage
from ckpt_runtime.storage.claims import Claimant, ClaimedError
from ckpt_runtime.storage.errors import StorageError
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.storage.metadata import METADATA_NAME, read_metadata
from tests.simulation.file_system import PROTOCOL, ROOT, FileStore, SimulatedFileSystem, counted_names
from tests.simulation.jobs.checkers import Sink, Snapshots
from tests.simulation.jobs.job_master import JobMaster
from tests.simulation.jobs.network import Connection
from tests.simulation.jobs.observation import Observation
from tests.simulation.jobs.rows import Row
from tests.simulation.jobs.scenario import Scenario, random_overrides, random_parallelism, random_scenario
from tests.simulation.jobs.tables import in_place_of_rocksdb
from tests.simulation.jobs.topology import observed
from tests.simulation.jobs.worker import Runner, SimulatedWorker
from tests.simulation.schedules.choices import Choices, FaultKey
from tests.simulation.schedules.schedule import Action
from tests.simulation.schedules.simulation import Simulation
from tests.simulation.schedules.trace import describe
from tests.simulation.schedules.violation import Violation
from tests.simulation.simulated_driver import ObservedClaims, new_slot, quiet

WALL_MS = 1_700_000_000_000
CHAOS_STEPS = 1_000
OUTAGE = 0.0006
"""How likely it is in each step that storage goes away as a whole."""
CALM = CheckpointOverrides(interval_ms=120, min_pause_ms=0, timeout_ms=60_000, tolerable_failed_checkpoints=1_000)
FAIR_ROUNDS = 1_000
"""Rounds in which everything gets its turn; a job whose faults have ended needs less than two hundred."""

Message = tuple[Callable[..., None], tuple[Any, ...]]
CLUSTER = "simulated"


class _Next(NamedTuple):
    """What is started when the present run has ended; without an origin, from a checkpoint that it retains."""

    origin: CompletedCheckpoint | None
    mode: RecoveryClaimMode
    parallelism: tuple[int, ...]
    rng: Random


class World:
    """``tracing`` keeps every step as text."""

    def __init__(
        self,
        seed: int,
        scenario: Scenario | None = None,
        *,
        muted: frozenset[FaultKey] = frozenset(),
        tracing: bool = False,
    ) -> None:
        self.seed = seed
        self.scenario = random_scenario(seed) if scenario is None else scenario
        self.topology = self.scenario.topology
        self.choices = Choices(seed, muted, scale=self.scenario.fault_scale, plain=self.scenario.plain)
        self.now = 1_000.0
        self._spent: list[tuple[float, float]] = []
        self.tracing = tracing
        self.trace: list[str] = []
        self.steps = 0
        self.files = FileStore()
        self.files.fails = self._file_fault
        self.files.may_land_late = self.cleans_up
        SimulatedFileSystem.store = self.files
        self.snapshots = Snapshots(self)
        self.files.deleting = self.snapshots.deleting
        self.sink = Sink()
        self.workers: list[SimulatedWorker] = []
        self.slots: list[Slot] = []
        self.plans: dict[str, CompiledPlan] = {}
        self.runs = 0
        self.deployments = 0
        self.finished = False
        self.completed = 0
        self.restores = 0
        self._random = Random(seed ^ 0x5EED).random
        self.names = {vertex_id: name for name, vertex_id in self.topology.names.items()}
        gates = Counter(target for _, target, _ in self.topology.edges)
        self._orders = {
            (name, gate): (self.topology.ordered(name, gate), self.topology.pointwise(name, gate))
            for name, count in gates.items()
            for gate in range(count)
        }
        self._expected = self.topology.expected()
        self._counts = any("count" in vertex.operators for vertex in self.topology.vertices)
        self._runners: list[Runner] = []
        self._connections: dict[tuple[int, int], Connection] = {}
        self._lanes: dict[tuple[str, int], deque[Message]] = {}
        self._asynchronous: list[tuple[str, SimulatedWorker | None, Callable[..., None], tuple[Any, ...]]] = []
        self._later: deque[Message] = deque()
        self._savepoints: list[tuple[int, int, str]] = []
        self._next: _Next | None = None
        self._workers_made = 0
        self._disordered = False
        self._back_at = 0
        self._trap: Action | None = None
        self._parallelism = self.scenario.parallelism
        self._configuration = replace(self.scenario.submitted, retention=CheckpointRetention.RETAIN_ON_CANCELLATION)
        self.calm_since = float("inf")
        self.broken: Violation | None = None
        self._shares = tuple(accumulate(self.scenario.weights))
        kinds = (self._step_subtask, self._step_connection, self._step_message, self._step_asynchronous)
        self._kinds = kinds + kinds
        self.seen: Counter[str] = Counter()
        self.observation: Observation
        self.master: JobMaster
        self._start_run(None, RecoveryClaimMode.NO_CLAIM)

    # --- the schedule

    def run(self) -> str:
        """Runs the schedule to its end; returns a digest of the trace (of nothing without ``tracing``)."""
        with counted_names(), in_place_of_rocksdb(), quiet():
            self._run()
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()

    def _run(self) -> None:
        actions = deque(sorted(self.scenario.actions, key=lambda action: action.at))
        while not self.finished and (self.steps < CHAOS_STEPS and (actions or self.steps < 300)):
            while actions and actions[0].at <= self.steps:
                self.act(actions.popleft())
            self._random_step()
        if not self.finished:
            self._calm()
            self._run_fairly()
        self._check_end()

    def _random_step(self) -> None:
        """One piece of work of a kind drawn by weight; the next kind when there is none of it."""
        self.steps += 1
        self.now += self.scenario.step_ms
        self._move_storage()
        if self._later:
            self._drain_later()
        self.master.host.fire_timers()
        kind = bisect(self._shares, self._random() * self._shares[-1], hi=3)
        for step in self._kinds[kind : kind + 4]:
            if step():
                return
        self._skip_time()

    def _move_storage(self) -> None:
        """Storage may go away as a whole, and comes back after a while."""
        if self.files.in_transit and self.choices.chance("a write lands", 0.02):
            self.seen["writes that landed late"] += 1
            self.files.land()
        if self.files.away:
            self.files.away = self.steps < self._back_at
        elif self.choices.fault("storage goes away", OUTAGE):
            self.note("storage is away")
            self.files.away = True
            self._back_at = self.steps + self.choices.delay("storage is away", 20, 200)
            self.seen["storage was away"] += 1

    def _step_subtask(self) -> bool:
        runners, now = self._runners, self.now
        start = int(self._random() * len(runners))
        for runner in chain(runners[start:], runners[:start]):
            if runner.wakeup.awake or (runner.due is not None and runner.due <= now):
                if runner.vertex in self.scenario.slow and self.choices.chaos and self._random() < 0.9:
                    return True
                self._advance(runner)
                return True
        return False

    def _advance(self, runner: Runner) -> None:
        runner.wakeup.awake = True
        runner.step()

    def _step_connection(self) -> bool:
        busy = [c for c in self._connections.values() if c.in_flight or c.returning or c.ready_to_send]
        if not busy:
            return False
        busy[int(self._random() * len(busy))].step(self._random())
        return True

    def _step_message(self) -> bool:
        lanes = [lane for lane in self._lanes.values() if lane]
        if not lanes:
            return False
        lane = lanes[int(self._random() * len(lanes))]
        if lane is self._late_lane(lane) and self._random() < 0.93:
            return True
        action, arguments = lane.popleft()
        action(*arguments)
        return True

    def _late_lane(self, lane: deque[Message]) -> deque[Message] | None:
        """The lane itself when it leads to a worker that hears late."""
        if self.choices.chaos and self.scenario.late_slots:
            for worker in self.workers:
                if worker.slot in self.scenario.late_slots and self._lanes.get(("to", worker.number)) is lane:
                    return lane
        return None

    def _step_asynchronous(self) -> bool:
        waiting = self._asynchronous
        if not waiting:
            return False
        _, owner, action, arguments = waiting.pop(int(self._random() * len(waiting)))
        if owner is None or owner.alive:
            action(*arguments)
        if self.broken is not None:
            raise self.broken
        return True

    def _skip_time(self) -> None:
        """Nothing can move: on to the next timer."""
        times = [runner.due for runner in self._runners if runner.due is not None]
        timer = self.master.host.next_timer
        if timer is not None:
            times.append(timer)
        if times:
            self.now = max(self.now, min(times))
        elif self._later or self.finished:
            return
        else:
            raise Violation(f"nothing moves any more: {self._situation()}")

    def _calm(self) -> None:
        """Faults end; checkpoints can complete."""
        self.note("faults end")
        self.choices.chaos = False
        self.files.away = False
        self.land_all()
        self._configuration = replace(self._configuration, **CALM.given)  # type: ignore[arg-type]
        self.master.patch(CALM, until_applied=True)

    def _run_fairly(self) -> None:
        """Everything gets its turn until the job has finished."""
        for _ in range(FAIR_ROUNDS):
            self.now += 1.0
            self._drain_later()
            self.master.host.fire_timers()
            moved = False
            for runner in list(self._runners):
                if runner.live and (runner.wakeup.awake or (runner.due is not None and runner.due <= self.now)):
                    self.steps += 1
                    self._advance(runner)
                    moved = True
            for connection in list(self._connections.values()):
                while connection.busy:
                    self.steps += 1
                    connection.step(self._random())
                    moved = True
            while self._step_message():
                moved = True
            while self._step_asynchronous():
                moved = True
            if self.finished:
                return
            if not moved:
                self._skip_time()
        raise Violation(f"the job does not finish: {self._situation()}")

    def _situation(self) -> str:
        """Short and the same for the same cause."""
        waiting = sorted(
            {
                f"{r.vertex} {r.subtask.state} {'full' if not r.subtask.chain.end.has_room else ''}"
                for r in self._runners
            }
        )
        master = self.master
        return f"{master.machine.state.value}, coordinator {master.coordinator.state.value}, {waiting}"

    def _drain_later(self) -> None:
        while self._later:
            action, arguments = self._later.popleft()
            action(*arguments)

    # --- what the parts of the world ask for

    def later(self, action: Callable[..., None], *arguments: Any) -> None:
        """Soon, and not inside of what calls this."""
        self._later.append((action, arguments))

    def asynchronously(
        self, kind: str, action: Callable[..., None], *arguments: Any, owner: SimulatedWorker | None = None
    ) -> None:
        """In a pool: at any later time, in any order. What a dead worker had to do is not done."""
        self._asynchronous.append((kind, owner, action, arguments))

    def to_worker(self, worker: SimulatedWorker, command: WorkerCommand) -> None:
        if worker.alive:
            self._lanes.setdefault(("to", worker.number), deque()).append((worker.obey, (command,)))

    def to_driver(self, worker: SimulatedWorker, message: DeploymentMessage) -> None:
        lane = self._lanes.setdefault(("from", worker.number), deque())
        lane.append((self._hear, (worker, message)))

    def _hear(self, worker: SimulatedWorker, message: DeploymentMessage) -> None:
        self.master.worker_message(worker, message)

    def wall_ms(self, slot: int) -> int:
        """``slot`` -1 is the driver."""
        skew = 0 if slot < 0 else self.scenario.skew_ms[slot % len(self.scenario.skew_ms)]
        return WALL_MS + int(self.now) + skew

    def spend(self, millis: float) -> None:
        """A subtask computes for this long. Everything else stands still, the driver's timers as well."""
        self._spent.append((self.now, millis))
        self.now += millis

    def spent_since(self, at: float) -> float:
        """For how long subtasks have computed after this time."""
        return sum(millis for began, millis in self._spent if began + millis > at)

    def chance(self, kind: str, probability: float) -> bool:
        return self.choices.chaos and self.choices.chance(kind, probability)

    def slots_for(self, count: int) -> list[Slot]:
        """That many slots, each with a live worker."""
        for index in range(count):
            if index == len(self.slots):
                self.slots.append(new_slot(index))
                self.workers.append(self._new_worker(index))
            slot = self.slots[index]
            if slot.worker is None:  # the pool has a worker replaced when it hears that it is gone, and not before
                if not self.workers[index].alive:
                    self.workers[index] = self._new_worker(index)
                slot.worker = Worker(cast(Any, self.workers[index].peer))
        return self.slots[:count]

    @property
    def held_slots(self) -> int:
        """By whatever run."""
        return sum(slot.owner is not None for slot in self.slots)

    def _new_worker(self, slot: int) -> SimulatedWorker:
        self._workers_made += 1
        return SimulatedWorker(self, slot, self._workers_made)

    def connection(self, sender: SimulatedWorker, peer: Address) -> Connection:
        """Raises ConnectionError when the peer is gone."""
        key = (sender.number, peer[1])
        known = self._connections.get(key)
        if known is None or known.error is not None:
            receiver = next((worker for worker in self.workers if worker.number == peer[1] and worker.alive), None)
            if receiver is None:
                raise ConnectionError("simulated: the peer is gone")
            known = self._connections[key] = Connection(sender, receiver)
        return known

    def connections_of(self, worker: SimulatedWorker) -> list[Connection]:
        return [c for c in self._connections.values() if worker is c.sender or worker is c.receiver]

    def runners_changed(self) -> None:
        self._runners = [runner for worker in self.workers if worker.alive for runner in worker.runners if runner.live]

    def next_deployment(self, master: JobMaster) -> int:
        self.deployments += 1
        self.observation = Observation(master.graph)
        return self.deployments

    def keeps_order(self, name: str, gate: int) -> bool:
        """Whether rows of one split and key still come in their order at that input."""
        ordered, pointwise = self._orders[name, gate]
        return ordered and not (self._disordered and pointwise)

    def commit(self, transaction: str, checkpoint_id: int, rows: list[Row]) -> None:
        run = int(transaction.partition("/")[0], 16)
        self.sink.commit(transaction, run, checkpoint_id, rows)

    def broadcast_ended(self, rows: list[int]) -> None:
        """A subtask's copy of the broadcast rows at the end of data: all of them."""
        expected = sorted(row[0] for row in self.topology.sources[1].all())
        if sorted(rows) != expected:
            raise Violation(f"broadcast state ends with {len(rows)} of {len(expected)} rows")

    # --- runs of the job

    def _start_run(self, origin: CompletedCheckpoint | None, mode: RecoveryClaimMode) -> None:
        self.runs += 1
        claims = None
        if origin is not None:
            self.snapshots.keep(origin)
            if mode is RecoveryClaimMode.CLAIM:
                claims = self._claim(origin)
        plan = self.topology.plan(self._parallelism, self.scenario.options)
        self.note("run %s with parallelism %s from %s", self.runs, self._parallelism, origin and origin.directory)
        self.master = JobMaster(self, self.runs, plan, self._configuration, origin, claims)
        self.plans[self.master.job_id] = plan
        if not self.choices.chaos:  # submitted with calm settings
            self.calm_since = min(self.calm_since, self.now)
        self.master.start()

    def _claim(self, origin: CompletedCheckpoint) -> JobClaims | None:
        """As the dispatcher has a snapshot claimed; None when checkpoints of an ended run need the claim."""
        job_id = f"{self.runs:032x}"
        claimant = Claimant(job_id, CLUSTER, CheckpointStorage(ROOT, job_id).location.url)
        try:
            with self.without_faults():
                claims = claim_snapshot(origin, claimant)
        except ClaimedError:
            self.seen["claims refused"] += 1
            return None
        self._savepoints = [entry for entry in self._savepoints if entry[2] != origin.directory]
        self.seen["claimed"] += 1
        self.seen["claimed with siblings"] += bool(self.snapshots.retained_of(int(origin.job_id, 16))[1:])
        return ObservedClaims(claims.claimant, claims.places, world=self)

    def take_over(self) -> None:
        """The driver dies, and its workers with it. Another one continues from what is recorded."""
        earlier = self.master
        live = earlier.machine.state not in (JobState.STOPPING, JobState.CANCELLING)
        if not live or earlier.ended is not None or self._next is not None or earlier.record.ended:
            return
        for kind, owner, _, arguments in self._asynchronous:
            if owner is None and self.choices.chance(f"{kind} of a dead driver", 0.5):
                with suppress(Exception):  # its answer reaches no one
                    arguments[0]()
        if earlier.record.ended:
            raise AssertionError("a living job has no result")
        earlier.shell.close()
        for worker in [worker for worker in self.workers if worker.alive]:
            self._crash(worker)
        self._asynchronous.clear()
        self._lanes.clear()
        self._later.clear()
        for slot in self.slots:
            slot.owner = slot.worker = None
        self.snapshots.forget_unfinished()
        self.seen["takeovers"] += 1
        with self.without_faults():
            self.master = JobMaster(
                self, earlier.number, earlier.plan, earlier.submitted, earlier.origin, earlier.claims, earlier
            )
        self.master.start()

    def restoring(self, master: JobMaster, checkpoint: CompletedCheckpoint | None) -> None:
        """A deployment starts from that."""
        self.restores += 1
        if checkpoint is not None:
            origin = master.origin
            if origin is not None and master.claims is not None and checkpoint.directory == origin.directory:
                self.snapshots.release(checkpoint)
            before = {vertex.id: vertex.parallelism for vertex in checkpoint.vertices}
            rescaled = any(before[vertex.id] != vertex.parallelism for vertex in master.graph.vertices)
            if any(state.has_channel_state for state in checkpoint.states.values()):
                self.seen["restores with in-flight data"] += 1
                self.seen["rescaled with in-flight data"] += rescaled
            if rescaled and any(state.has_channel_state for state in checkpoint.states.values()):
                self._disordered = True
            self.sink.check_not_undone(int(checkpoint.job_id, 16), checkpoint.id)

    def patched(self, master: JobMaster, overrides: CheckpointOverrides) -> None:
        """The sender has got its answer; a later run is submitted with the change."""
        if master is self.master:
            if overrides == CALM:
                self.calm_since = min(self.calm_since, self.now)
            self._configuration = replace(self._configuration, **overrides.given)  # type: ignore[arg-type]
            for name, value in overrides.given.items():
                if getattr(master.coordinator.configuration, name) != value:
                    raise Violation(f"{name} is said to be {value} and is not in force")

    def completing(self, master: JobMaster, checkpoint: CompletedCheckpoint) -> None:
        """All parts of a snapshot are durable."""
        if checkpoint.job_id != master.job_id:
            return
        with self.without_faults():
            self.observation.check(checkpoint, master.options.get(checkpoint.id))
            self._check_references(master, checkpoint)
        self.seen["checked"] += 1
        if any(state.has_channel_state for state in checkpoint.states.values()):
            self.seen["with in-flight data"] += 1
            if self._trap is not None:
                self.later(self.act, self._trap)
                self._trap = None
        if any(state.outputs for state in checkpoint.states.values()):
            self.seen["with output data"] += 1

    def _check_references(self, master: JobMaster, checkpoint: CompletedCheckpoint) -> None:
        """Files of other checkpoints of this run are of completed ones: those of aborted ones may go at any time."""
        numbers = set()
        for state in checkpoint.states.values():
            for file in state.files():
                origin = re.search(f"/{master.job_id}/shared/chk-([0-9]+)-", file.path)
                if origin is not None:
                    numbers.add(int(origin[1]))
                    if int(origin[1]) not in {checkpoint.id, *master.ledger.completed}:
                        raise Violation(
                            f"checkpoint {checkpoint.id} refers to a file of {origin[1]}, which did not complete"
                        )
        self.seen["increments"] += self.scenario.shares and not numbers <= {checkpoint.id}

    def savepoint_taken(self, master: JobMaster, checkpoint_id: int, path: str, *, stop: bool) -> None:
        checkpoint = self.read_snapshot(path)
        self.snapshots.keep(checkpoint)
        shared = [file.path for state in checkpoint.states.values() for file in state.files() if is_shared(file)]
        if shared:
            raise Violation(f"savepoint {checkpoint_id} refers to {len(shared)} files that are not its own")
        if not stop:
            self.completing(master, checkpoint)
            self._savepoints.append((master.number, checkpoint_id, path))

    @contextmanager
    def without_faults(self) -> Iterator[None]:
        """For checkers that read files."""
        chaos, self.choices.chaos = self.choices.chaos, False
        away, self.files.away = self.files.away, False
        try:
            yield
        finally:
            self.choices.chaos, self.files.away = chaos, away

    @property
    def had_ended(self) -> bool:
        """No driver takes over a job that has ended."""
        return False

    def read_snapshot(self, path: str) -> CompletedCheckpoint:
        try:
            with self.without_faults():
                found = read_metadata(path)
        except StorageError as error:
            raise Violation(f"a snapshot cannot be read: {error}") from error
        return CompletedCheckpoint.from_json(found.document, found.directory.url)

    def job_closed(self, master: JobMaster) -> None:
        """A run is over, with everything it had to delete. Perhaps there is another one."""
        master.ledger.check_all_ended()
        self.completed += len(master.ledger.completed)
        if self.held_slots:
            raise Violation(f"{self.held_slots} slots are held by a job that has ended")
        if master.taken_over and master.ended is JobStatus.CANCELED:
            self._keep_those_without_a_pointer(master)
        if self._next is not None:
            wanted, self._next = self._next, None
            self._parallelism, origin = wanted.parallelism, wanted.origin
            if origin is None:
                origin = self._one_of_the_retained(master, wanted.rng)
            if origin is not None:
                self.sink.rewind(int(origin.job_id, 16), origin.id)
            self._start_run(origin, wanted.mode)
        elif master.stopped_at is not None:
            origin = self.read_snapshot(master.stopped_at)
            self._start_run(origin, self._mode(origin.id))
        elif master.ended is JobStatus.FINISHED:
            self.finished = True
        elif master.ended is JobStatus.FAILED:
            raise Violation("the job has failed for good, and nothing is damaged")
        else:
            self._start_run(self.snapshots.latest_of(master) or master.origin, self._mode(self.runs))

    def _keep_those_without_a_pointer(self, master: JobMaster) -> None:
        """A driver that died behind the metadata left a whole checkpoint; the job ended before anybody looked for it.

        Beside those that are retained it is one of them.
        """
        for path in self.files.below(f"jobs/{master.job_id}"):
            if path.endswith(f"/{METADATA_NAME}"):
                self.snapshots.keep(self.read_snapshot(f"{PROTOCOL}://{path.rpartition('/')[0]}"))

    def _mode(self, value: int) -> RecoveryClaimMode:
        return RecoveryClaimMode.CLAIM if value % 2 else RecoveryClaimMode.NO_CLAIM

    # --- actions

    def act(self, action: Action) -> None:
        """What a user or the world does; "behind" waits for the next snapshot with in-flight data."""
        self.note("action: %s", action.kind)
        rng = Random(action.value)
        master = self.master
        if action.kind.endswith("behind"):
            self._trap = replace(action, kind=action.kind.removesuffix(" behind"))
            return
        match action.kind:
            case "checkpoint":
                full = rng.random() < 0.3
                master.trigger(f"checkpoint-{action.value}", CheckpointProperties(full=full))
            case "savepoint":
                properties = CheckpointProperties(CheckpointType.SAVEPOINT)
                master.trigger(f"savepoint-{action.value}", properties)
            case "patch" if master.ended is None:
                master.patch(random_overrides(action.value))
            case "expire what is pending":
                self._expire_pending()
            case "crash a worker":
                alive = [worker for worker in self.workers if worker.alive]
                if alive:
                    self._crash(rng.choice(alive))
            case "fail a task":
                if self._runners:
                    rng.choice(self._runners).probe.fails = True
            case "live rescale" if master.ended is None:
                self._rescale(master, rng)
            case "rescale" | "restore a savepoint" | "stop":
                self._replace(action.kind, rng)
            case _:
                self._act_on_snapshots(action, rng)

    def _act_on_snapshots(self, action: Action, rng: Random) -> None:
        master = self.master
        match action.kind:
            case "canonical savepoint":
                properties = CheckpointProperties(CheckpointType.SAVEPOINT, SavepointFormat.CANONICAL)
                master.trigger(f"savepoint-{action.value}", properties)
            case "dispose of a savepoint":
                self._dispose(rng)
            case "the driver dies":
                self.take_over()
            case "start from a retained checkpoint" if master.ended is None and self._next is None:
                if master.machine.state is not JobState.STOPPING:
                    self._next = _Next(None, self._mode(action.value), random_parallelism(rng, self.topology), rng)
                    master.cancel()
            case _:
                pass  # there is nothing to do it to

    def _rescale(self, master: JobMaster, rng: Random) -> None:
        parallelism, narrow = random_parallelism(rng, self.topology), rng.random() < 0.7
        bounds = {
            self.topology.names[vertex.name]: ParallelismBounds(wanted if narrow else 1, wanted)
            for vertex in self.topology.vertices
            for wanted in (parallelism[vertex.group],)
        }

        def applied() -> None:
            self.seen["rescaled live"] += 1

        master.rescale(bounds, applied)

    def _expire_pending(self) -> None:
        """By a timeout that is short for a moment."""
        if self.master.ended is None:
            present = self.master.coordinator.configuration
            self.master.force(replace(present, timeout_ms=MINIMUM_MS))
            self.master.force(present)

    def _crash(self, worker: SimulatedWorker) -> None:
        worker.alive = False
        for _, owner, action, arguments in list(self._asynchronous):
            if owner is worker and self.choices.chance("a dead worker's snapshot is written", 0.4):
                action(*arguments)
        self._asynchronous = [entry for entry in self._asynchronous if entry[1] is not worker]
        self._lanes.pop(("to", worker.number), None)
        for connection in self.connections_of(worker):
            connection.fail()
        self._connections = {
            key: connection for key, connection in self._connections.items() if connection.error is None
        }
        self.runners_changed()
        self._lanes.setdefault(("from", worker.number), deque()).append((self._lost, (worker,)))

    def _lost(self, worker: SimulatedWorker) -> None:
        self.master.worker_lost(worker)

    def _replace(self, kind: str, rng: Random) -> None:
        """The job is ended, to be started again in another way."""
        master = self.master
        parallelism = random_parallelism(rng, self.topology)
        if master.ended is not None or self._next is not None or master.machine.state is JobState.STOPPING:
            return
        if kind == "stop":
            self._parallelism = parallelism
            master.stop(f"stop-{rng.random()}", drain=False)
            return
        if kind == "restore a savepoint" and self._savepoints:
            position = rng.randrange(len(self._savepoints))
            path = self._savepoints[position][2]
            del self._savepoints[position + 1 :]
            mode = self._mode(rng.getrandbits(1)) if self.scenario.shares else RecoveryClaimMode.NO_CLAIM
            self._next = _Next(self.read_snapshot(path), mode, parallelism, rng)
            master.cancel()
            return
        self._parallelism = parallelism
        master.cancel()

    def _one_of_the_retained(self, master: JobMaster, rng: Random) -> CompletedCheckpoint | None:
        """Any of those that a cancelled run has left; what it started from when there are none."""
        retained = self.snapshots.retained_of(master.number)
        self.seen["one of several retained"] += len(retained) > 1
        if not retained:
            return self.snapshots.latest_of(master) or master.origin
        chosen = rng.choice(retained)
        lost = [e for e in self._savepoints if (e[0], e[1]) > (master.number, chosen.id)]
        self._savepoints = [entry for entry in self._savepoints if entry not in lost]
        return chosen

    def _dispose(self, rng: Random) -> None:
        """Of a savepoint that nothing refers to, as a user asks for it."""
        needed = {origin.directory for origin in (self.master.origin, self._next and self._next.origin) if origin}
        entries = [entry for entry in self._savepoints if entry[2] not in needed]
        if not entries:
            return
        entry = rng.choice(entries)
        self._savepoints.remove(entry)
        self.snapshots.release(self.read_snapshot(entry[2]))
        with self.without_faults():
            disposal_of(entry[2]).execute()
        if self.files.below(resolve(entry[2]).path):
            raise Violation("a savepoint that was disposed of leaves files")
        self.seen["disposed of"] += 1

    def _file_fault(self, operation: str) -> bool:
        return self.choices.fault(operation, 0.01)

    # --- the end

    def _check_end(self) -> None:
        self.master.ledger.check_all_ended()
        found = observed(self.sink.rows, counts=self._counts)
        if found != self._expected:
            lost, more = self._expected - found, found - self._expected
            detail = f"{lost.total()} lost, {more.total()} too many"
            raise Violation(f"the sink's content differs from a run without failure: {detail}")
        with self.without_faults():
            self._let_workers_end()
            self.snapshots.check_leftovers()

    def cleans_up(self, path: str) -> bool:
        """Whether a driver looks for it later: it does so below the directory of the living job."""
        own = resolve(self.master.shell.storage.directory).path
        return self.master.ended is None and path.startswith(f"{own}/")

    def land_all(self) -> None:
        while self.files.in_transit:
            self.files.land()

    def _let_workers_end(self) -> None:
        """Each waits for its last requests."""
        waiting, self._asynchronous = self._asynchronous, []
        for _, owner, action, arguments in waiting:
            if owner is not None and owner.alive:
                owner.job = None
                action(*arguments)

    # --- the trace

    def note(self, text: str, *values: Any) -> None:
        """A step, with the moment."""
        if self.tracing:
            shown = tuple(describe(value) for value in values)
            self.trace.append(f"{self.now:>8.1f} {text % shown if shown else text}")


JOBS: Simulation[Scenario] = Simulation("jobs", random_scenario, World, shrink_runs=300)
