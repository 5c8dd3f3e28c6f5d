"""Threads that advance subtasks: they sleep without work, wake for it, and end with their subtasks."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ckpt_runtime.checkpoint.executions import TaskState
from ckpt_runtime.network.elements import EndOfData
from ckpt_runtime.network.gate import InputGate
from ckpt_runtime.operators.operator import SourceStatus
from ckpt_runtime.task.deployed_job import TaskThread, Wakeup
from ckpt_runtime.task.subtask import Subtask
from tests.unit.runtime.task.conftest import TaskKit

TIMEOUT_S = 60.0


class Woken:
    """A bench whose gate wakes the thread, and whose host tells when something was reported."""

    def __init__(self, kit: TaskKit, **settings: Any) -> None:
        self.wakeup = Wakeup()
        self.bench = kit.Bench(**settings)
        self.gate: InputGate = self.bench.gate
        self.gate._wake = self.wakeup.wake
        self.reported = threading.Event()
        for name in ("state_changed", "end_of_data", "write_snapshot"):
            setattr(self.bench.host, name, self.noting(getattr(self.bench.host, name)))

    def noting(self, call: Any) -> Any:
        def noted(*arguments: Any) -> None:
            call(*arguments)
            self.reported.set()

        return noted

    def wait(self) -> None:
        assert self.reported.wait(TIMEOUT_S)
        self.reported.clear()

    def mail(self, action: Any) -> None:
        self.bench.mail(action)
        self.wakeup.wake()


def test_data_and_mails_wake_a_sleeping_thread(kit: TaskKit) -> None:
    woken = Woken(kit)
    thread = TaskThread("t", [woken.bench.subtask], woken.wakeup)
    thread.start()
    woken.wait()
    assert woken.bench.host.states == ["RUNNING"]
    woken.gate.channels[0].put(EndOfData(True))
    woken.wait()
    assert woken.bench.host.ends_of_data == 1
    woken.mail(woken.bench.subtask.cancel)
    assert thread.join(TIMEOUT_S)
    assert woken.bench.subtask.state is TaskState.CANCELED
    assert woken.bench.subtask.metrics.timer.closed.busy > 0


@pytest.mark.parametrize("call", ["open", "batch"])
@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3)])
def test_error_of_user_code_fails_its_own_subtask_only(kit: TaskKit, call: str, error: BaseException) -> None:
    first, second = Woken(kit), Woken(kit)

    def raise_error() -> None:
        raise error

    first.bench.head.at[call] = raise_error
    second.gate._wake = first.wakeup.wake
    second.wakeup = first.wakeup
    first.gate.channels[0].put(kit.rows(1))
    thread = TaskThread("t", [first.bench.subtask, second.bench.subtask], first.wakeup)
    thread.start()
    second.wait()
    second.mail(second.bench.subtask.cancel)
    assert thread.join(TIMEOUT_S)
    assert first.bench.subtask.state is TaskState.FAILED
    assert first.bench.host.errors == [error]
    assert second.bench.subtask.state is TaskState.CANCELED


def test_timer_in_the_distant_future_lets_the_thread_sleep(kit: TaskKit) -> None:
    woken = Woken(kit)
    thread = TaskThread("t", [woken.bench.subtask], woken.wakeup)
    thread.start()
    woken.wait()
    woken.mail(lambda: woken.bench.subtask.set_timer(0, 2**62))
    woken.gate.channels[0].put(EndOfData(True))
    woken.wait()
    woken.mail(woken.bench.subtask.cancel)
    assert thread.join(TIMEOUT_S)


def test_a_thread_may_be_given_longer_to_end_than_the_system_can_wait(kit: TaskKit) -> None:
    """``task.cancellation.timeout`` takes any duration, and an error here would end the worker."""
    task = Woken(kit)
    thread = TaskThread("t", [task.bench.subtask], task.wakeup)
    task.bench.subtask.mail(task.bench.subtask.cancel)
    thread.start()
    assert thread.join(2.0**63 / 1000)


def test_an_idle_source_is_polled_again_without_being_woken(kit: TaskKit) -> None:
    woken = Woken(kit, source=[SourceStatus.NOTHING_AVAILABLE, SourceStatus.END_OF_INPUT])
    clock = [0.0]

    def ticking() -> float:
        clock[0] += 5
        return clock[0]

    woken.bench.host.monotonic_ms = ticking
    thread = TaskThread("t", [woken.bench.subtask], woken.wakeup)
    thread.start()
    woken.wait()
    while not woken.bench.host.ends_of_data:
        woken.wait()
    woken.mail(woken.bench.subtask.cancel)
    assert thread.join(TIMEOUT_S)


def test_a_subtask_canceled_before_the_start_is_never_opened(kit: TaskKit) -> None:
    woken = Woken(kit)
    subtask: Subtask = woken.bench.subtask
    subtask.cancel()
    thread = TaskThread("t", [subtask], woken.wakeup)
    thread.start()
    assert thread.join(TIMEOUT_S)
    assert woken.bench.calls == []


class TestWakeup:
    def test_wakeup_counts_between_preparing_and_the_end_of_waiting_alone(self) -> None:
        wakeup = Wakeup()
        wakeup.prepare()
        wakeup.wake()
        wakeup.wait(None)
        wakeup = Wakeup()
        wakeup.wake()
        wakeup.prepare()
        wakeup.wait(0)
        assert not wakeup._event.is_set()
        wakeup = Wakeup()
        wakeup.prepare()
        wakeup.cancel()
        wakeup.wake()
        assert not wakeup._event.is_set()


def test_thread_lets_buffers_fill_while_it_has_work_and_sends_them_before_it_sleeps(kit: TaskKit) -> None:
    script = [kit.rows(1), kit.rows(2), kit.rows(3)]
    woken = Woken(kit, source=script, buffer_timeout_ms=60_000)
    sent = threading.Event()
    out = woken.bench.out
    out.is_drained = True
    woken.bench.subtask.fills_buffers = True
    send = out.send_batch

    def noted(batch: Any) -> None:
        send(batch)
        sent.set()

    out.send_batch = noted
    thread = TaskThread("t", [woken.bench.subtask], woken.wakeup)
    thread.start()
    assert sent.wait(TIMEOUT_S)
    assert out.elements == [[1, 2, 3]]
    woken.mail(woken.bench.subtask.cancel)
    assert thread.join(TIMEOUT_S)
