"""How the time of a subtask's thread is counted, including the interval that has not ended."""

from __future__ import annotations

import threading

import pytest

from ckpt_runtime.network.gate import InputGate
from ckpt_runtime.task.deployed_job import TaskThread, Wakeup
from ckpt_runtime.task.metrics import Activity, ActivityTimer, TimeSpent
from tests.unit.runtime.task.conftest import TaskKit

TIMEOUT_S = 60.0


def test_an_interval_in_progress_counts_up_to_now() -> None:
    timer = ActivityTimer()
    timer.enter(Activity.BACKPRESSURED, 100)
    assert timer.until(100) == TimeSpent()
    assert timer.until(600) == TimeSpent(backpressured=500)
    assert timer.until(700) == TimeSpent(backpressured=600)
    assert timer.closed == TimeSpent()
    timer.enter(Activity.BUSY, 800)
    assert timer.until(850) == TimeSpent(busy=50, backpressured=700)
    timer.enter(Activity.IDLE, 900)
    timer.enter(None, 1_000)
    assert timer.until(5_000) == timer.closed == TimeSpent(busy=100, idle=100, backpressured=700)


def test_reader_with_a_slow_clock_counts_no_negative_time() -> None:
    timer = ActivityTimer()
    timer.enter(Activity.BUSY, 100)
    assert timer.until(90) == TimeSpent()


@pytest.mark.parametrize("shared", [False, True])
def test_call_that_does_not_return_is_busy_time_of_its_own_subtask(kit: TaskKit, shared: bool) -> None:
    wakeup, inside, leave = Wakeup(), threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        assert leave.wait(TIMEOUT_S)

    benches = [kit.Bench() for _ in range(2 if shared else 1)]
    for bench in benches:
        gate: InputGate = bench.gate
        gate._wake = wakeup.wake
    held = benches[0]
    held.head.at["batch"] = hold
    thread = TaskThread("t", [bench.subtask for bench in benches], wakeup)
    thread.start()
    held.put(0, kit.rows(1))
    assert inside.wait(TIMEOUT_S)
    timer = held.subtask.metrics.timer
    assert (timer.activity, held.subtask.work_waits) == (Activity.BUSY, True)
    since = timer._state[2]
    assert timer.until(since + 5_000_000_000).busy - timer.closed.busy == 5_000_000_000
    assert all(other.subtask.metrics.timer.activity is None for other in benches[1:])
    leave.set()
    for bench in benches:
        bench.mail(bench.subtask.cancel)
    wakeup.wake()
    assert thread.join(TIMEOUT_S)
    assert timer.activity is None


def test_a_thread_that_sleeps_without_input_is_idle_and_has_no_work(kit: TaskKit) -> None:
    bench = kit.Bench()
    asleep = threading.Event()

    class Noting(Wakeup):
        def wait(self, timeout_s: float | None) -> None:
            asleep.set()
            super().wait(timeout_s)

    wakeup = Noting()
    thread = TaskThread("t", [bench.subtask], wakeup)
    thread.start()
    assert asleep.wait(TIMEOUT_S)
    assert (bench.subtask.metrics.timer.activity, bench.subtask.work_waits) == (Activity.IDLE, False)
    bench.mail(bench.subtask.cancel)
    wakeup.wake()
    assert thread.join(TIMEOUT_S)
