"""Alignment of watermarks: which splits wait, which they wait for, and that all are read in the end."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from ckpt_runtime.scheduler.watermark_alignment import AlignmentGroups, Progress, SplitAlignment

pytestmark = pytest.mark.row("ends.3")


def splits(*, drift: int = 10, idle_ms: int = 0, each: bool = True, **times: int | None) -> SplitAlignment:
    """A subtask that reads splits without an end, each with its event time."""
    found = SplitAlignment(drift, idle_ms, each=each)
    for name, event_time in times.items():
        found.add(name, event_time, bounded=False)
    return found


def test_split_waits_while_it_is_ahead_of_the_group_by_more_than_the_drift() -> None:
    reader = splits(a=100, b=100)
    reader.align(100)
    reader.advance("a", 110)
    assert reader.held == frozenset()
    reader.advance("a", 111)
    assert reader.held == {"a"}
    assert not reader.holds_all
    reader.advance("b", 105)
    reader.align(101)
    assert reader.held == frozenset()
    assert (reader.progress, reader.drift_ms) == (Progress(105), 4)


def test_splits_of_one_subtask_wait_for_each_other_before_the_driver_knows_of_the_slower_one() -> None:
    reader = splits(a=500, b=None)
    reader.align(500)
    reader.advance("a", 505)
    reader.advance("b", 100)
    assert (reader.held, reader.progress) == ({"a"}, Progress(100))
    reader.advance("b", 495)
    assert reader.held == frozenset()


def test_splits_wait_after_their_first_rows_until_the_driver_knows_the_group() -> None:
    reader = splits(a=None, b=None)
    assert reader.held == frozenset()
    reader.advance("a", 500)
    assert (reader.held, reader.progress) == ({"a"}, Progress(None))
    reader.advance("b", 400)
    assert (reader.holds_all, reader.progress) == (True, Progress(400))
    reader.align(400)
    assert reader.held == {"a"}


def test_split_without_a_row_is_waited_for_until_it_is_idle() -> None:
    reader = splits(idle_ms=100, a=100, b=None)
    reader.align(100)
    reader.looked(0)
    assert reader.progress == Progress(None)
    for now in (50, 99):
        reader.looked(now)
        reader.advance("a", 100)
    assert reader.progress == Progress(None)
    reader.looked(150)
    assert reader.progress == Progress(100)
    reader.advance("b", 40)
    assert reader.progress == Progress(40)


def test_split_that_has_to_wait_does_not_become_idle() -> None:
    reader = splits(idle_ms=100, a=100, b=200)
    reader.align(100)
    for now in range(0, 1_000, 50):
        reader.looked(now)
        reader.advance("a", 100)
    assert reader.held == {"b"}
    for now in range(1_000, 2_000, 50):
        reader.looked(now)
    assert reader.held == {"b"}
    assert reader.progress == Progress(200)  # only the other one is idle


def test_subtask_that_could_not_look_for_long_is_not_idle() -> None:
    reader = splits(idle_ms=5_000, a=100)
    reader.looked(0)
    reader.looked(60_000)
    assert reader.progress == Progress(100)


def test_split_that_had_rows_is_never_idle_without_a_timeout_and_an_empty_one_is_after_a_while() -> None:
    reader = splits(a=100, b=None)
    reader.align(100)
    for now in range(0, 2_900, 100):
        reader.looked(now)
    assert reader.progress == Progress(None)
    for now in range(2_900, 100_000, 100):
        reader.looked(now)
    assert reader.progress == Progress(100)


def test_subtask_without_splits_is_idle_after_a_while_even_if_no_timeout_is_set() -> None:
    for each in (True, False):
        reader = splits(each=each)
        assert reader.progress == Progress(None)
        for now in range(0, 4_000, 100):
            reader.looked(now)
        assert (reader.progress, reader.is_settled) == (Progress(None, idle=True), True)
        reader.add("a", None, bounded=True)
        assert not reader.is_settled


def test_reader_of_one_file_after_the_other_waits_with_the_next_file_too() -> None:
    reader = splits(each=False)
    reader.add("a", None, bounded=True)
    reader.advance("a", 100)
    reader.align(100)
    reader.advance("a", 150)
    reader.remove("a", bounded=True)
    assert reader.progress == Progress(150)
    reader.add("b", None, bounded=True)
    assert reader.holds_all
    reader.align(140)
    assert not reader.held
    reader.advance("b", 120)  # files may be older than those before them
    assert reader.progress == Progress(120)


def test_groups_have_no_minimum_before_each_subtask_has_a_row_or_is_idle_or_has_ended() -> None:
    groups = AlignmentGroups({"g": [("v", 0), ("v", 1), ("w", 0)], "h": [("x", 0)]})
    assert not groups.reported(("other", 0), Progress(1))
    groups.reported(("v", 0), Progress(500))
    groups.reported(("x", 0), Progress(7))
    assert list(groups.moved()) == [(7, (("x", 0),))]
    groups.reported(("v", 1), Progress(300))
    groups.ended(("w", 0))
    members = (("v", 0), ("v", 1), ("w", 0))
    assert list(groups.moved()) == [(300, members)]
    groups.reported(("v", 0), Progress(400))
    assert list(groups.moved()) == []
    groups.reported(("v", 1), Progress(None, idle=True))
    assert list(groups.moved()) == [(400, members)]
    groups.reported(("v", 0), Progress(None, idle=True))
    assert list(groups.moved()) == []


@dataclass
class World:
    """Subtasks whose splits are read in random order, with reports and answers that come late, and restarts."""

    seed: int
    each: bool
    drift: int = 20
    now: float = 0.0
    rows: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    read: dict[tuple[int, str], int | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.subtasks = self.random.randrange(1, 5)
        for subtask in range(self.subtasks):
            for number in range(self.random.randrange(4) if self.each else 1):
                pace, count = self.random.choice((1, 3, 10)), self.random.randrange(60)
                begin = self.random.randrange(100)
                key = subtask, f"s{number}"
                self.rows[key] = [begin + at * pace for at in range(count)]
                self.read[key] = None
        self.start()

    def start(self) -> None:
        """Begins a deployment from the positions so far."""
        self.readers = [SplitAlignment(self.drift, 2_000, each=self.each) for _ in range(self.subtasks)]
        for (subtask, split_id), event_time in self.read.items():
            self.readers[subtask].add(split_id, event_time, bounded=False)
        self.groups = AlignmentGroups({"g": [("v", subtask) for subtask in range(self.subtasks)]})
        self.sent: list[tuple[int, Progress]] = []

    def step(self) -> None:
        self.now += self.random.randrange(20)
        subtask = self.random.randrange(self.subtasks)
        reader = self.readers[subtask]
        reader.looked(self.now)
        self.sent.append((subtask, reader.progress))
        waiting = [key for key, rows in self.rows.items() if key[0] == subtask and rows]
        may = [key for key in waiting if (key[1] if self.each else "") not in reader.held]
        if may:
            self.take(reader, self.random.choice(may))
        for late, progress in self._arriving():
            self.groups.reported(("v", late), progress)
        if self.random.random() < 0.3:
            for minimum, members in self.groups.moved():
                for _, member in members:
                    self.readers[member].align(minimum)
        if self.random.random() < 0.0005:
            self.start()

    def _arriving(self) -> list[tuple[int, Progress]]:
        """The reports that reach the driver now, in order; some stay on their way."""
        count = self.random.randrange(len(self.sent) + 1) if self.random.random() < 0.3 else 0
        arriving, self.sent = self.sent[:count], self.sent[count:]
        return arriving

    def take(self, reader: SplitAlignment, key: tuple[int, str]) -> None:
        """Reads a row, which only a split may do that is not ahead of any other that has rows."""
        before = self.read[key]
        slowest = [self.read[other] for other, rows in self.rows.items() if rows]
        if before is not None and None not in slowest:
            least = min(time for time in slowest if time is not None)
            assert before <= least + self.drift
        event_time = self.rows[key].pop(0)
        self.read[key] = event_time
        reader.advance(key[1], event_time)


@pytest.mark.parametrize("each", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_splits_stay_within_the_drift_and_are_read_completely_with_late_reports_and_restarts(
    seed: int, each: bool
) -> None:
    world = World(seed, each)
    for _ in range(60_000):
        if not any(world.rows.values()):
            return
        world.step()
    assert not any(world.rows.values())
