"""Checkpoints that count barriers and wait for none: under seeded schedules no row is lost, and none twice unless a
task has failed. The handler of barriers is the real one; tasks, channels and the coordinator are models of a few lines.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from random import Random

import pytest

from ckpt_runtime.checkpoint.barrier_handler import (
    BarrierEvent,
    BarrierHandler,
    BarrierReceived,
    BlockChannel,
    Channel,
    ResumeChannels,
    TakeSnapshot,
)
from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.properties import CheckpointOptions, CheckpointProperties, CheckpointType
from tests.simulation.jobs.observation import Observation
from tests.simulation.jobs.scenario import random_scenario
from tests.simulation.jobs.world import World
from tests.simulation.schedules.violation import Violation

SOURCES, MIDDLES, ROWS = 3, 2, 30
SEEDS, WHOLE_JOBS = 100, 20
COUNTED = CheckpointOptions(CheckpointProperties(), "", exactly_once=False)
SAVEPOINT = CheckpointOptions(CheckpointProperties(CheckpointType.SYNC_SAVEPOINT), "")

Row = tuple[int, int]
Element = Row | BarrierReceived
Snapshots = dict[str, int | list[Row]]


class Task:
    """A task with inputs. It keeps its rows; a middle one hands them on, the sink has them ready for the commit."""

    def __init__(self, job: Job, name: str, inputs: int, rows: list[Row]) -> None:
        self.job, self.name, self.rows = job, name, list(rows)
        self.handler = job.handler([(0, number) for number in range(inputs)])
        self.queues: dict[Channel, deque[Element]] = {(0, number): deque() for number in range(inputs)}
        self.blocked: set[Channel] = set()

    @property
    def ready(self) -> list[Channel]:
        return [channel for channel, queue in self.queues.items() if queue and channel not in self.blocked]

    def take(self, channel: Channel) -> None:
        element = self.queues[channel].popleft()
        if not isinstance(element, BarrierReceived):
            self.rows.append(element)
            self.job.send(self.name, element)
            return
        event = BarrierReceived(channel, element.checkpoint_id, element.timestamp, element.options)
        for effect in self.handler.handle(event, Instant(0, 0)):
            match effect:
                case BlockChannel(blocked):
                    assert element.options is SAVEPOINT, "a barrier that is counted blocks a channel"
                    self.blocked.add(blocked)
                case ResumeChannels(channels):
                    self.blocked -= set(channels)
                case TakeSnapshot(checkpoint_id):
                    self.job.acknowledge(checkpoint_id, self.name, list(self.rows))
                    if self.name == "sink":
                        self.rows.clear()
                    else:
                        self.job.send(self.name, element)


class Job:
    """Sources that deal rows to middle tasks, which send them to a sink that commits them with checkpoints."""

    def __init__(self, seed: int, handler: type[BarrierHandler] = BarrierHandler) -> None:
        self.random, self.handler = Random(seed), handler
        self.committed: Counter[Row] = Counter()
        self.failures = self.checkpoints = self.completed = 0
        self.start({})

    def start(self, restored: Snapshots) -> None:
        """From a snapshot. The sink has nothing ready then, because what the snapshot covers is committed."""
        self.position = [self._position(restored, source) for source in range(SOURCES)]
        self.triggered: list[deque[BarrierReceived]] = [deque() for _ in range(SOURCES)]
        self.tasks = {f"middle-{number}": Task(self, f"middle-{number}", SOURCES, []) for number in range(MIDDLES)}
        self.tasks["sink"] = Task(self, "sink", MIDDLES, [])
        for name, task in self.tasks.items():
            kept = restored.get(name, [])
            assert isinstance(kept, list)
            task.rows = list(kept) if name != "sink" else []
        self.pending: dict[int, Snapshots] = {}
        self.ready: dict[int, list[Row]] = {}
        self.restored = restored

    @staticmethod
    def _position(restored: Snapshots, source: int) -> int:
        position = restored.get(f"source-{source}", 0)
        assert isinstance(position, int)
        return position

    def trigger(self, options: CheckpointOptions) -> None:
        self.checkpoints += 1
        self.pending[self.checkpoints] = {}
        for queue in self.triggered:
            queue.append(BarrierReceived((0, 0), self.checkpoints, 0, options))

    def step(self) -> bool:
        """Moves something, in any order. Returns whether there was anything to move."""
        moves = [("source", source) for source in range(SOURCES) if self.position[source] < ROWS]
        moves += [("barrier", source) for source in range(SOURCES) if self.triggered[source]]
        moves += [(name, channel) for name, task in self.tasks.items() for channel in task.ready]
        if not moves:
            return False
        what, which = self.random.choice(moves)
        match what, which:
            case "source", int(source):
                row = (source, self.position[source])
                self.position[source] += 1
                self.tasks[f"middle-{sum(row) % MIDDLES}"].queues[0, source].append(row)
            case "barrier", int(source):
                barrier = self.triggered[source].popleft()
                self.acknowledge(barrier.checkpoint_id, f"source-{source}", self.position[source])
                for number in range(MIDDLES):
                    self.tasks[f"middle-{number}"].queues[0, source].append(barrier)
            case name, (gate, number):
                self.tasks[name].take((gate, number))
        return True

    def send(self, sender: str, element: Element) -> None:
        if sender != "sink":
            self.tasks["sink"].queues[0, int(sender.removeprefix("middle-"))].append(element)

    def acknowledge(self, checkpoint_id: int, task: str, state: int | list[Row]) -> None:
        if task == "sink":
            assert isinstance(state, list)
            self.ready[checkpoint_id] = state
        found = self.pending.get(checkpoint_id)
        if found is None:
            return
        found[task] = state
        if len(found) == SOURCES + MIDDLES + 1:
            for known in [known for known in self.pending if known <= checkpoint_id]:
                del self.pending[known]
            for known in sorted(known for known in self.ready if known <= checkpoint_id):
                self.committed.update(self.ready.pop(known))
            self.completed += 1
            self.restored = found

    def fail(self) -> None:
        self.failures += 1
        self.start(self.restored)

    def stop_with_savepoint(self) -> None:
        """Sources send nothing behind the barrier; the job continues from the savepoint."""
        self.pending.clear()
        for queue in self.triggered:
            queue.clear()
        self.trigger(SAVEPOINT)
        taken = self.checkpoints
        while taken in self.pending:
            assert self.step()
        self.start(self.restored)

    def end(self) -> None:
        while self.step():
            pass
        self.trigger(COUNTED)
        while self.step():
            pass
        assert not self.pending


def run(seed: int, handler: type[BarrierHandler] = BarrierHandler, *, fails: bool) -> Job:
    job = Job(seed, handler)
    for _ in range(job.random.randint(50, 400)):
        if not job.step():
            break
        chance = job.random.random()
        if chance < 0.05 and len(job.pending) < 3:
            job.trigger(COUNTED)
        elif chance < 0.06:
            job.stop_with_savepoint()
        elif chance < 0.08 and fails:
            job.fail()
    job.end()
    return job


def lost(job: Job) -> list[Row]:
    return [(source, row) for source in range(SOURCES) for row in range(ROWS) if not job.committed[source, row]]


def test_no_row_is_lost_and_none_comes_twice_without_a_failure() -> None:
    completed = 0
    for seed in range(SEEDS):
        job = run(seed, fails=False)
        completed += job.completed
        assert lost(job) == [], seed
        assert set(job.committed.values()) == {1}, seed
    assert completed > 3 * SEEDS


def test_failures_lose_no_row() -> None:
    failed = repeated = 0
    for seed in range(SEEDS):
        job = run(seed, fails=True)
        assert lost(job) == [], seed
        failed += job.failures > 0
        repeated += max(job.committed.values()) > 1
        assert job.failures or set(job.committed.values()) == {1}, seed
    # Otherwise the schedules would prove nothing of what they are about.
    assert failed > SEEDS // 2
    assert repeated > SEEDS // 20


def test_whole_jobs_whose_barriers_are_counted_are_exact_while_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real subtasks, channels and coordinator. Their checker of snapshots asks for the cut of aligned barriers."""
    extra: list[str] = []

    def check(observation: Observation, checkpoint: CompletedCheckpoint, options: CheckpointOptions | None) -> None:
        try:
            checked(observation, checkpoint, options)
        except Violation as violation:
            extra.append(str(violation))

    checked = Observation.check
    monkeypatch.setattr(Observation, "check", check)
    completed = 0
    for seed in range(WHOLE_JOBS):
        scenario = random_scenario(seed)
        submitted = replace(scenario.submitted, exactly_once=False, unaligned_enabled=False, interval_ms=10)
        world = World(seed, replace(scenario, submitted=submitted, actions=(), fault_scale=0.0))
        world.run()
        completed += world.completed
    assert completed > WHOLE_JOBS
    assert extra, "no snapshot holds more than what came before the barriers"


class _Early(BarrierHandler):
    """Planted: it does not wait for the other channels' barriers."""

    def handle(self, event: BarrierEvent, now: Instant) -> list[object]:  # type: ignore[override]
        for pending in self._pending.values():
            pending.unseen.clear()
        return [*super().handle(event, now)]


def test_a_handler_that_does_not_count_to_the_last_barrier_is_found() -> None:
    with pytest.raises(AssertionError):
        for seed in range(SEEDS):
            assert lost(run(seed, _Early, fails=True)) == []
