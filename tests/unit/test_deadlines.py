"""Deadlines of tests: what a second counts on a busy machine, and when a wait that hangs ends."""

from __future__ import annotations

import pytest

from tests.support import patience


class Machine:
    """A clock that the test sets, and how busy the machine is."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slowness = 1.0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(patience.time, "monotonic", lambda: made.now)
    monkeypatch.setattr(patience, "slowness", lambda: made.slowness)
    return made


def test_second_counts_less_while_the_machine_is_slow(machine: Machine) -> None:
    is_over = patience.deadline(60)
    machine.slowness, machine.now = 4.0, 200.0
    assert not is_over()
    machine.slowness = 1.0
    machine.now = 209.0
    assert not is_over()
    machine.now = 211.0
    assert is_over()


@pytest.mark.parametrize(("seconds", "at_most"), [(20, 240), (60, 600), (500, 2000)])
def test_a_wait_that_hangs_ends_however_busy_the_machine_is(machine: Machine, seconds: int, at_most: int) -> None:
    machine.slowness = 12.0
    is_over = patience.deadline(seconds)
    machine.now = at_most - 1.0
    assert not is_over()
    machine.now = at_most + 1.0
    assert is_over()
    assert patience.patient(seconds) == at_most


def test_a_test_has_more_time_than_one_of_its_waits(machine: Machine) -> None:
    machine.slowness = 6.0
    assert patience.time_limit(120) == 720
    assert patience.time_limit(400) == 1200
    assert patience.time_limit(1200) == 2400
