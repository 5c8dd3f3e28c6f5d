"""What a worker says of itself: stacks of its subtasks, on a processor or waiting, also of threads that help them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from ckpt_runtime.network.control_messages import (
    DumpThreads,
    ReadLog,
    RecentLog,
    SampledStacks,
    SampleStacks,
    ThreadDump,
    WorkerAnswer,
)
from ckpt_runtime.operators.task_context import HelperThread
from ckpt_runtime.task.deployed_job import TaskThread, Wakeup
from ckpt_runtime.task.worker import Diagnosis, StackSampler
from tests.support.patience import deadline
from tests.unit.runtime.task.conftest import TaskKit

TIMEOUT_S = 60.0


class Held:
    """A subtask whose operator does what a test wants, in its own thread."""

    def __init__(self, kit: TaskKit, work: Callable[[], None]) -> None:
        self.bench = kit.Bench()
        self.inside = threading.Event()
        wakeup = Wakeup()
        self.bench.gate._wake = wakeup.wake
        self.wake = wakeup.wake

        def batch() -> None:
            self.inside.set()
            work()

        self.bench.head.at["batch"] = batch
        self.thread = TaskThread("t", [self.bench.subtask], wakeup)
        self.thread.start()
        self.bench.put(0, kit.rows(1))
        assert self.inside.wait(TIMEOUT_S)

    def end(self) -> None:
        self.bench.mail(self.bench.subtask.cancel)
        self.wake()
        assert self.thread.join(TIMEOUT_S)


@pytest.fixture
def kept() -> Iterator[list[Held]]:
    started: list[Held] = []
    yield started
    for held in started:
        held.end()


def _functions(frames: tuple[str, ...]) -> list[str]:
    return [frame.partition("(")[0].rpartition(".")[2] for frame in frames]


def test_a_thread_that_waits_is_off_cpu_and_one_that_computes_is_on_cpu(kit: TaskKit, kept: list[Held]) -> None:
    leave = threading.Event()

    def wait_in_user_code() -> None:
        leave.wait(TIMEOUT_S)

    def compute() -> None:
        while not leave.is_set():
            sum(range(1_000))

    waiting, computing = Held(kit, wait_in_user_code), Held(kit, compute)
    kept += [waiting, computing]
    sampler = StackSampler(
        [(waiting.bench.subtask, waiting.thread.thread), (computing.bench.subtask, computing.thread.thread)]
    )
    # The kernel's clock of a thread decides, so that a look says something only behind some time of the thread.
    pause, is_over = threading.Event(), deadline(TIMEOUT_S)
    while not is_over():
        pause.wait(0.01)
        sampler.look()
        if any(stack.on_cpu for stack in sampler.stacks()):
            break
    leave.set()
    stacks = sampler.stacks()
    of_waiting = [stack for stack in stacks if "wait_in_user_code" in _functions(stack.frames)]
    assert of_waiting
    assert all(stack.on_cpu == 0 for stack in of_waiting)
    assert any(stack.on_cpu for stack in stacks if "compute" in _functions(stack.frames))


def test_helper_thread_counts_for_the_subtask_that_started_it(kit: TaskKit, kept: list[Held]) -> None:
    helping, done = threading.Event(), threading.Event()

    def write() -> None:
        helping.set()
        done.wait(TIMEOUT_S)

    def start_writer() -> None:
        HelperThread(target=write, daemon=True).start()
        done.wait(TIMEOUT_S)

    held = Held(kit, start_writer)
    kept.append(held)
    assert helping.wait(TIMEOUT_S)
    sampler = StackSampler([(held.bench.subtask, held.thread.thread)])
    sampler.look()
    seen = {name for stack in sampler.stacks() for name in _functions(stack.frames)}
    done.set()
    assert {"write", "start_writer"} <= seen
    assert {stack.subtask for stack in sampler.stacks()} == {held.bench.subtask.index}


def test_answers_carry_the_numbers_of_their_questions_and_unknown_jobs_have_no_stacks() -> None:
    answers: list[WorkerAnswer] = []
    sent = threading.Event()

    def send(answer: WorkerAnswer) -> None:
        answers.append(answer)
        sent.set()

    diagnosis = Diagnosis(send, lambda: None)
    diagnosis.answer(DumpThreads(1))
    diagnosis.answer(ReadLog(2))
    sent.clear()
    diagnosis.answer(SampleStacks(3, "j", "v"))
    assert sent.wait(TIMEOUT_S)
    diagnosis.close()
    dump, log, stacks = answers
    assert isinstance(dump, ThreadDump)
    assert threading.current_thread().name in {info.name for info in dump.threads}
    assert isinstance(log, RecentLog)
    assert log.question == 2
    assert stacks == SampledStacks(3, ())
