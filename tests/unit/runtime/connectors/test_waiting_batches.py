"""Checkpoints that wait for a slow function: how many, in which order, and what a restored job calls again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.checkpoint.sink_state import MESSAGES
from ckpt_runtime.connectors import staged_sinks
from ckpt_runtime.connectors.file_sink import PendingFile
from ckpt_runtime.connectors.waiting_batches import WaitingCommitterOperator, WaitingWriterOperator
from ckpt_runtime.graph.specs import SinkSpec, UserFunction
from ckpt_runtime.sinks import Transaction
from tests.support.patience import patient
from tests.unit.runtime.connectors.harness import Collector, context, snapshot_of

SCHEMA = pa.schema([("n", pa.int64())])


class Function:
    """Records its calls; each waits until the test lets it return, or raises."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, list[int]]] = []
        self.returns = threading.Semaphore(0)
        self.error: BaseException | None = None

    def __call__(self, rows: pa.Table, batch_id: int) -> None:
        self.calls.append((batch_id, rows.column("n").to_pylist()))
        assert self.returns.acquire(timeout=patient(60))
        if self.error is not None:
            raise self.error


class Job:
    """One writer in front of the committer, in one attempt."""

    def __init__(
        self,
        place: Path,
        function: Function,
        attempt: int = 0,
        state: Any = (),
        restored: int | None = None,
        *,
        joins: bool = False,
        of_writer: Any = (),
    ) -> None:
        spec = SinkSpec("foreachBatch", {"path": str(place), "maxWaitingBatches": "2"}, UserFunction(function, None))
        self.now = 0.0
        self.committer = WaitingCommitterOperator(staged_sinks.staged_sink(spec), SCHEMA, joins=joins)
        self.committer.open(context(uid="out.committer", state=state, restored=restored, attempt=attempt), Collector())
        self.writer = WaitingWriterOperator(staged_sinks.staged_sink(spec), batch=SCHEMA if joins else None)
        where = context(uid="out", state=of_writer, restored=restored, attempt=attempt, monotonic_ms=lambda: self.now)
        self.writer.open(where, Collector(lambda batch: self.committer.process_batch(batch, 0)))

    def checkpoint(self, checkpoint_id: int, *numbers: int) -> Any:
        """Takes a completed checkpoint, and returns the committer's state in it."""
        if numbers:
            self.writer.process_batch(pa.record_batch({"n": pa.array(numbers, pa.int64())}), 0)
        self.writer.prepare_snapshot(checkpoint_id)
        self.writer.snapshot(checkpoint_id)
        state = snapshot_of(self.committer, checkpoint_id)
        self.writer.notify_complete(checkpoint_id)
        self.committer.notify_complete(checkpoint_id)
        return state

    def end_range(self, upto: int) -> None:
        """A range of the source has ended in front of its split ``upto``."""
        self.writer.context.chain_time.upto = upto
        self.writer.process_end_of_range()

    @property
    def full(self) -> tuple[bool, bool]:
        self.now += 1_000
        return self.writer.is_full, self.committer.is_full

    def close(self) -> None:
        self.writer.close()
        self.committer.close()


def until(condition: Callable[[], bool]) -> None:
    reached = threading.Event()
    for _ in range(int(patient(60) / 0.01)):
        if condition():
            return
        reached.wait(0.01)
    raise AssertionError("the condition did not become true")


@pytest.fixture
def function(monkeypatch: pytest.MonkeyPatch) -> Function:
    """A function that gets tables: without Spark there are no frames."""

    def table(committer: Any, _: Transaction, files: Sequence[PendingFile]) -> AbstractContextManager[pa.Table]:
        return nullcontext(pa.concat_tables([committer._read(file) for file in files]))

    monkeypatch.setattr(staged_sinks._BatchCommitter, "_frame", table)
    return Function()


@pytest.mark.row("ends.1")
def test_checkpoints_complete_while_the_function_runs_and_beyond_the_limit_no_rows_are_taken(
    function: Function, tmp_path: Path
) -> None:
    job = Job(tmp_path, function)
    for number in (1, 2):
        job.checkpoint(number, number)
        assert job.full == (False, False)
    job.checkpoint(3)  # without rows there is no call
    job.checkpoint(4, 4)
    until(lambda: function.calls == [(0, [1])])
    assert job.full == (True, True)
    function.returns.release()
    until(lambda: function.calls[1:] == [(1, [2])])
    until(lambda: job.full == (False, False))
    assert job.committer.has_commits_left
    function.returns.release(2)
    until(lambda: not job.committer.has_commits_left)
    assert function.calls == [(0, [1]), (1, [2]), (2, [4])]
    job.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.row("ends.1")
def test_calls_that_have_not_returned_are_made_again_with_the_same_ids_and_rows(
    function: Function, tmp_path: Path
) -> None:
    job = Job(tmp_path, function)
    job.checkpoint(1, 1, 10)
    until(lambda: len(function.calls) == 1)
    job.checkpoint(2, 2)
    state = job.checkpoint(3, 3)
    function.returns.release()
    until(lambda: len(function.calls) == 2)
    # The process ends here: call 2 has not returned, call 3 has not begun.
    again = Function()
    again.returns.release(9)
    restored = Job(tmp_path, again, attempt=1, state=state, restored=3)
    until(lambda: not restored.committer.has_commits_left)
    assert again.calls == [(1, [2]), (2, [3])]
    restored.close()
    assert list(tmp_path.iterdir()) == []
    function.error = SystemExit()  # ends the thread of the first attempt
    function.returns.release()


@pytest.mark.row("ends.1")
@pytest.mark.parametrize("joins", [True, False])
def test_batch_without_rows_has_a_call_unless_it_has_no_splits_or_was_staged_by_an_earlier_attempt(
    function: Function, tmp_path: Path, joins: bool
) -> None:
    function.returns.release(9)
    job = Job(tmp_path, function, joins=joins)
    job.end_range(2)
    job.checkpoint(1)
    job.end_range(2)
    job.checkpoint(2)
    job.end_range(3)
    state, of_writer = job.checkpoint(3, 30), snapshot_of(job.writer, 3)
    until(lambda: not job.committer.has_commits_left)
    again = Function()
    again.returns.release(9)
    restored = Job(tmp_path, again, attempt=1, state=state, restored=3, joins=joins, of_writer=of_writer)
    restored.end_range(3)
    restored.checkpoint(4)
    restored.end_range(5)
    restored.checkpoint(5)
    until(lambda: not restored.committer.has_commits_left)
    assert function.calls == ([(0, []), (1, [30])] if joins else [(0, [30])])
    assert again.calls[-1:] == ([(2, [])] if joins else [])
    job.close()
    restored.close()


@pytest.mark.parametrize("snapshots", [0, 1, 2])
@pytest.mark.parametrize("joins", [True, False])
def test_rows_of_aborted_checkpoints_are_in_the_call_of_the_next_one_where_it_is_one_batch(
    function: Function, tmp_path: Path, snapshots: int, joins: bool
) -> None:
    """Some of the aborted ones have reached the committer."""
    job = Job(tmp_path, function, joins=joins)
    function.returns.release(9)
    job.checkpoint(1, 1)
    for number in (2, 3):
        job.writer.process_batch(pa.record_batch({"n": pa.array([number], pa.int64())}), 0)
        job.writer.prepare_snapshot(number)
        if number - 2 < snapshots:
            snapshot_of(job.committer, number)
        job.committer.notify_aborted(number)
    state = job.checkpoint(4, 4)
    job.checkpoint(5, 5)
    until(lambda: not job.committer.has_commits_left)
    job.close()
    if not joins:
        assert function.calls == [(number, [number + 1]) for number in range(5)]
        return
    assert function.calls == [(0, [1]), (1, [2, 3, 4]), (2, [5])]
    assert [(item["checkpoint"], item["batch"]) for each in state if each.name == MESSAGES for item in each.items] in (
        [(4, 1)],
        [(1, 0), (4, 1)],  # the first call had not returned
    )


@pytest.mark.row("ends.1")
def test_what_a_committer_remembers_of_checkpoints_does_not_grow_with_their_number(
    function: Function, tmp_path: Path
) -> None:
    job = Job(tmp_path, function, joins=True)

    def remembered() -> int:
        return sum(len(value) for value in vars(job.committer).values() if isinstance(value, set | dict))

    sizes = []
    for checkpoint_id in range(1, 41, 2):
        job.committer.snapshot(checkpoint_id)
        job.committer.notify_aborted(checkpoint_id)
        job.checkpoint(checkpoint_id + 1)
        sizes.append(remembered())
    assert len(set(sizes)) == 1
    job.close()


def test_failure_of_a_call_is_raised_and_no_later_call_is_made(function: Function, tmp_path: Path) -> None:
    job = Job(tmp_path, function)
    function.error = ValueError("the table is locked")
    job.checkpoint(1, 1)
    job.checkpoint(2, 2)
    function.returns.release(2)
    with pytest.raises(ValueError, match="the table is locked"):
        until(lambda: job.committer.on_processing_time(0) is not None)
    assert [batch_id for batch_id, _ in function.calls] == [0]
    job.close()
    assert len(list(tmp_path.iterdir())) == 2


def test_closing_waits_for_the_call_in_progress_and_makes_no_other(function: Function, tmp_path: Path) -> None:
    job = Job(tmp_path, function)
    job.checkpoint(1, 1)
    job.checkpoint(2, 2)
    until(lambda: len(function.calls) == 1)
    closing = threading.Thread(target=job.close)
    closing.start()
    assert closing.is_alive()
    function.returns.release(2)
    closing.join(patient(60))
    assert not closing.is_alive()
    assert [batch_id for batch_id, _ in function.calls] == [0]
