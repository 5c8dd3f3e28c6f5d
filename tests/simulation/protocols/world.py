"""One simulated schedule: drivers, workers, storage, users and faults in virtual time, all from one seed.

``World(seed).run()`` ends quietly or raises :class:`Violation`. The same seed gives the same schedule everywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ckpt_runtime.checkpoint.completed_checkpoint import (
    CompletedCheckpoint,
    KeyedStateHandle,
    OperatorSubtaskState,
    StateFile,
    SubtaskState,
    VertexDescriptor,
)
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.configuration.checkpointing_options import RecoveryClaimMode
from ckpt_runtime.graph.key_groups import key_group_range
from ckpt_runtime.jobmaster import job_host, job_record, job_shell, storage_effects
from ckpt_runtime.scheduler import job_events as job_on
from ckpt_runtime.snapshots.job_claims import JobClaims, claim_snapshot
from ckpt_runtime.storage import checkpoint_storage
from ckpt_runtime.storage.checkpoint_storage import CheckpointStorage
from ckpt_runtime.storage.claims import Claimant
from ckpt_runtime.storage.metadata import METADATA_NAME, write_metadata
from tests.simulation.file_system import ROOT, SimulatedFileSystem
from tests.simulation.protocols.checkers import ProtocolChecker
from tests.simulation.protocols.configurations import Options
from tests.simulation.protocols.driver import Driver
from tests.simulation.protocols.event_loop import DriverCrash, EventLoop, SimulatedProcess
from tests.simulation.protocols.files import JOB, ORIGIN_JOB, SAVEPOINTS, Files, path_of
from tests.simulation.protocols.final_checks import check_files, check_progress, check_quiet
from tests.simulation.protocols.leases import LEASE_MS, LeaseHolder, Standby, new_clock
from tests.simulation.protocols.record import HaStore
from tests.simulation.protocols.scenario import Scenario, random_scenario
from tests.simulation.protocols.users import Users
from tests.simulation.schedules.choices import Choices, FaultKey
from tests.simulation.schedules.simulation import Simulation
from tests.simulation.schedules.trace import describe
from tests.simulation.schedules.violation import Violation
from tests.simulation.simulated_driver import ObservedClaims, quiet

ORIGIN_ID = 5
END_MS = 3_000


class World:
    """``crash_at``: the crash points, by number, at which the driver dies. ``tracing`` keeps every step as text."""

    def __init__(
        self,
        seed: int,
        scenario: Scenario | None = None,
        *,
        muted: frozenset[FaultKey] = frozenset(),
        crash_at: frozenset[int] = frozenset(),
        tracing: bool = False,
    ) -> None:
        self.seed = seed
        self.scenario = random_scenario(seed) if scenario is None else scenario
        self.calm_from = self.scenario.chaos_ms
        self.choices = Choices(seed, muted, scale=self.scenario.fault_scale, plain=self.scenario.plain)
        self.loop = EventLoop(self._on_crash)
        self.options = Options(self.scenario, seed)
        self.ha = HaStore(self.scenario.graph, self.options.submitted())
        self.files = Files(self)
        self.files.make_directories(CheckpointStorage(ROOT, JOB).shared.path)
        self.files.make_directories(path_of(SAVEPOINTS))
        self.running: Driver | None = None
        self._in_pool = False
        self.broken: Violation | None = None
        self.claims: JobClaims | None = None
        self.published: dict[str, CompletedCheckpoint] = {}
        self.late_events = 0
        """How many events of cancelled timers the shells have received."""
        self.tracing = tracing
        self.trace: list[str] = []
        self.crash_points: list[str] = []
        self.drivers = 0
        self.deployments = 0
        self.failures = 0
        self.origin: CompletedCheckpoint | None = None
        self._crash_at = crash_at
        self.checker = ProtocolChecker(self)
        self._make_origin()
        self.users = Users(self)
        self._known: list[Driver] = []
        self.present: Driver
        self.claim()
        self.take_up(self.ha.epoch, self._first_lease())

    @property
    def origin_id(self) -> int:
        return 0 if self.origin is None else self.origin.id

    def run(self) -> str:
        """Runs the schedule to its end; returns a digest of the trace (of nothing without ``tracing``)."""
        with self.entered():
            self._run()
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()

    def _run(self) -> None:
        for action in self.scenario.actions:
            self.loop.at(action.at, None, self.users.act, action)
        self.loop.run_until(self.scenario.chaos_ms)
        self._end_of_faults()
        end = self.calm_from + self.scenario.calm_ms
        self.loop.run_until(end)
        check_progress(self)
        check_files(self)
        if not self.job_has_ended:
            self.present.tell(job_on.CancelRequested())
        self.loop.run_until(end + END_MS)
        check_quiet(self)

    def _end_of_faults(self) -> None:
        """Settings come under which checkpoints can complete, unless the scenario keeps its own."""
        self.choices.chaos = False
        if self.present.changes.is_configuring:
            # Until its checkpoint expires, which may hang; other settings are refused meanwhile.
            settings = self.present.coordinator.configuration
            self.calm_from += settings.timeout_ms + settings.rescue_max_extension_ms
        if self.scenario.calm:
            self.users.calm()

    @property
    def job_has_ended(self) -> bool:
        """For good, or it is about to: all that is left is to store the result and to clean up."""
        return self.ha.result is not None or self.present.machine.status.is_globally_terminal

    @property
    def had_ended(self) -> bool:
        """Whether the job ends before the present driver has looked for what earlier ones left."""
        return not self.present.knows_leftovers

    # --- drivers

    def _lead(self) -> None:
        """A new driver claims the next epoch; until it has adopted what there is, writes of the old one may come in."""
        if self.ha.job_is_stored and self.ha.epoch == self.present.epoch:
            self.claim()
            self.loop.at(self.loop.now + self.choices.delay("adoption", 0, 80), None, self.take_up, self.ha.epoch)

    def _first_lease(self) -> LeaseHolder | None:
        if not self.scenario.standby:
            return None
        Standby(self)
        clock = new_clock(self)
        return LeaseHolder(self, clock, clock.now)

    def claim(self) -> None:
        """The next epoch; earlier leaders cannot change what its leader adopts."""
        ha = self.ha
        ha.epoch += 1
        ha.signs, ha.last_sign, ha.released = 0, self.loop.now, False
        self.drivers += 1

    def _adopt_results(self, epoch: int) -> None:
        self.ha.adopt("result", epoch)

    def _adopt(self, document: str, epoch: int) -> None:
        self.ha.adopt(document, epoch)

    def take_up(self, epoch: int, lease: LeaseHolder | None = None) -> None:
        """Results are adopted before plans are read: a job that is run must not get the result of an earlier driver."""
        if epoch != self.ha.epoch:
            return  # it was too slow: another one leads
        self._adopt_results(epoch)
        for document in ("plan", "counters", "pointers", "failures"):
            self._adopt(document, epoch)
        self.present = driver = Driver(self, epoch, lease)
        self._known.append(driver)
        self.note(driver, "leads")
        self.checker.clients.in_force(driver)
        self.checker.clients.settled()
        self.checker.failures_found(driver)
        self.loop.at(self.loop.now, driver.process, driver.start)

    def crash_point(self, driver: Driver, name: str) -> None:
        """Somewhere a process may die: by a number that was asked for, or as a fault."""
        if not driver.process.alive:
            raise DriverCrash
        number = len(self.crash_points)
        self.crash_points.append(name)
        likely = name in ("writing result", "end-stored", "the job is removed")
        if number in self._crash_at or self.choices.fault("crash", 0.15 if likely else 0.004):
            self.note(driver, f"crashes {name}")
            raise DriverCrash

    def crash(self, driver: Driver) -> None:
        """From outside, between two steps."""
        if driver.process.alive:
            self.note(driver, "crashes")
            self._on_crash(driver.process)

    def _on_crash(self, process: SimulatedProcess) -> None:
        driver = next(known for known in self._known if known.process is process)
        if process.alive:
            driver.die()
            if driver is self.present:
                self.driver_gone()

    def released(self, driver: Driver) -> None:
        """It has ended in order."""
        self.ha.released = self.ha.released or driver.leads
        self.driver_gone()

    def driver_gone(self) -> None:
        """Another driver is started, unless one waits already."""
        if self.scenario.standby:
            return
        self.loop.at(self.loop.now + self.choices.delay("next driver", 10, 250), None, self._replace, self.present)

    def pause(self, driver: Driver, millis: int) -> None:
        """The process stops. Beyond its lease another one takes over, and it does not know."""
        if driver.process.alive:
            self.note(driver, f"pauses for {millis}")
            driver.process.paused_until = max(driver.process.paused_until, self.loop.now + millis)
            if driver.lease is not None:
                if self.choices.chance("the machine is suspended", 0.5):
                    driver.lease.clock.stand_still(driver.process.paused_until)
            elif millis > LEASE_MS:
                self.loop.at(self.loop.now + LEASE_MS, None, self._take_over, driver)

    def _take_over(self, driver: Driver) -> None:
        if self.present is driver and driver.process.alive and driver.process.paused_until > self.loop.now:
            self._lead()

    def _replace(self, driver: Driver) -> None:
        if self.present is driver and not driver.process.alive:
            self._lead()

    # --- what is running

    @contextmanager
    def runs(self, driver: Driver, *, in_pool: bool) -> Iterator[None]:
        """A driver is at work: on its event loop, or in one of its pools, where it may be paused."""
        before = self.running, self._in_pool
        self.running, self._in_pool = driver, in_pool
        try:
            yield
        finally:
            self.running, self._in_pool = before

    def step(self, driver: Driver, name: str) -> None:
        """Between two steps of a call in a pool its driver may die, or be paused while everything else continues."""
        self.crash_point(driver, name)
        likely = 0.03 if name == "writing metadata" else 0.002
        if self.running is driver and self._in_pool and self.choices.fault("paused in the midst of a call", likely):
            self.pause(driver, self.choices.pick("how long in the midst", (50, 200, 400, 700)))
            before, self.running = self.running, None
            self.loop.run_meanwhile(driver.process.paused_until)
            self.running, self._in_pool = before, True
            if not driver.process.alive:
                raise DriverCrash

    def reach(self, name: str) -> None:
        """A crash point of the engine. One in front of a write is the same as that in the midst of it."""
        if self.running is not None and not (self._in_pool and name.endswith("-before")):
            self.step(self.running, name)

    def broke(self, message: str) -> Violation:
        """What was found. Within a call in a pool it would be taken for an error of storage, so it is raised behind."""
        self.broken = self.broken or Violation(message)
        return self.broken

    def check_broken(self) -> None:
        if self.broken is not None:
            raise self.broken

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The engine's crash points and storage are those of this world, and its pauses those of its time."""
        SimulatedFileSystem.store = self.files
        names = [
            *(
                (module, "crash_point", self.reach)
                for module in (storage_effects, job_record, job_shell, checkpoint_storage)
            ),
            (storage_effects, "RETRY_BASE_MS", 15.0),
            (job_host, "DELETION_PAUSE_MS", 15.0),
            (job_record, "UNKNOWN_PAUSE_MS", 15.0),
            (job_record, "_SETTLE_PAUSE_MS", 60.0),
        ]
        before = [(module, name, getattr(module, name)) for module, name, _ in names]
        for module, name, value in names:
            setattr(module, name, value)
        try:
            with quiet():
                yield
        finally:
            for module, name, value in before:
                setattr(module, name, value)

    # --- what is durable

    def next_failure(self) -> int:
        """Of the job, over all drivers."""
        self.failures += 1
        return self.failures

    def next_number(self) -> int:
        """Of a deployment, over all drivers."""
        self.deployments += 1
        return self.deployments

    def _make_origin(self) -> None:
        """The snapshot of another job that this one was started from."""
        if self.scenario.restored is None:
            return
        graph = self.scenario.graph
        storage = CheckpointStorage(ROOT, ORIGIN_JOB)
        directory = storage.checkpoint(ORIGIN_ID)
        states = {}
        for vertex in graph.vertices:
            for index in range(vertex.parallelism):
                paths = (f"{vertex.id}-{index}", storage.shared.child(f"chk-{ORIGIN_ID}-{vertex.id}-{index}").url)
                owned = key_group_range(vertex.max_parallelism, vertex.parallelism, index)
                handles = tuple(KeyedStateHandle(owned, StateFile(path, 1, "x"), ()) for path in paths)
                states[vertex.id, index] = SubtaskState({vertex.id: OperatorSubtaskState(handles)}, 1)
        vertices = tuple(VertexDescriptor.of(vertex) for vertex in graph.vertices)
        origin = self.origin = CompletedCheckpoint(
            ORIGIN_ID, ORIGIN_JOB, 1, 2, directory.url, CheckpointProperties(), vertices, states
        )
        files = self.files.files_of(origin)
        for path in (*sorted(files.private), *sorted(files.shared)):
            self.files.files[path] = b"x"
        self.files.make_directories(storage.shared.path)
        self.files.make_directories(directory.path)
        with self.entered():
            del self.files.files[directory.child(METADATA_NAME).path]
            write_metadata(directory, origin.to_json())
            if self.scenario.restored is RecoveryClaimMode.CLAIM:
                claimant = Claimant(JOB, "simulated", CheckpointStorage(ROOT, JOB).location.url)
                self.claims = ObservedClaims(claimant, claim_snapshot(origin, claimant).places, world=self)
        if self.claims is None:
            self.files.user_owned[origin.directory] = files.private | files.shared

    # --- the trace

    def note(self, driver: Driver, what: Any) -> None:
        """A step: time, driver, and what happened."""
        if self.tracing:
            self.trace.append(f"{self.loop.now:>6} driver {driver.epoch}: {describe(what)}")

    def note_all(self, driver: Driver, effects: Iterable[Any]) -> None:
        for effect in effects:
            self.note(driver, effect)


PROTOCOLS: Simulation[Scenario] = Simulation("protocols", random_scenario, World, shrink_runs=600)
