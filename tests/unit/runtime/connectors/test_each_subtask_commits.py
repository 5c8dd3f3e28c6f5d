"""A sink whose subtasks each commit what they prepared, into a target that remembers the ids of transactions."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pyarrow as pa
import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import OperatorListState, OperatorStateMode
from ckpt_runtime.checkpoint.sink_state import PENDING
from ckpt_runtime.connectors.sink_operators import CommittingSinkOperator
from ckpt_runtime.sinks import CommitOutcome, Sink, SinkCommitter, SinkContext, SinkWriter, Transaction
from tests.unit.runtime.connectors.harness import context, opened, redistributed, snapshot_of


class Rows(msgspec.Struct):
    numbers: list[int]


class Target(SinkCommitter):
    """Takes each transaction once, all of its rows or none, as the sink of the documentation does with a database."""

    def __init__(self) -> None:
        self.transactions: set[str] = set()
        self.numbers: list[int] = []

    def commit(self, transaction: Transaction, committables: Sequence[Rows]) -> CommitOutcome:
        if transaction.id in self.transactions:
            return CommitOutcome.ALREADY_COMMITTED
        self.transactions.add(transaction.id)
        self.numbers += [number for rows in committables for number in rows.numbers]
        return CommitOutcome.COMMITTED


class Writer(SinkWriter):
    """Prepares a committable for each batch."""

    def __init__(self) -> None:
        self.batches: list[Rows] = []

    def write(self, batch: pa.RecordBatch) -> None:
        self.batches.append(Rows(batch.column(0).to_pylist()))

    def prepare_commit(self, checkpoint_id: int) -> Sequence[Rows]:
        batches, self.batches = self.batches, []
        return batches


class EachCommits(Sink):
    committable = Rows
    single_committer = False

    def __init__(self, target: Target) -> None:
        super().__init__({})
        self.target = target

    @classmethod
    def name(cls) -> str:
        return "each"

    def open_writer(self, schema: pa.Schema, context: SinkContext) -> SinkWriter:
        return Writer()

    def open_committer(self, schema: pa.Schema | None, context: SinkContext) -> SinkCommitter:
        return self.target


def write(operator: CommittingSinkOperator, *numbers: int) -> None:
    for number in numbers:
        operator.process_batch(pa.record_batch({"n": pa.array([number], pa.int64())}), 0)


@pytest.mark.row("ends.5")
@pytest.mark.parametrize("parallelism", [1, 2, 3])
@pytest.mark.parametrize("committed", [(), (0,), (0, 1)], ids=lambda subtasks: f"after {len(subtasks)} commits")
def test_each_row_is_there_once_when_subtasks_commit_again_at_another_parallelism(
    parallelism: int, committed: tuple[int, ...]
) -> None:
    target = Target()
    subtasks = [CommittingSinkOperator(EachCommits(target)) for _ in range(2)]
    for number, operator in enumerate(subtasks):
        opened(operator, context(number, 2, uid="out"))
        write(operator, 10 * number, 10 * number + 1, 10 * number + 2)
    states = [snapshot_of(operator, 5) for operator in subtasks]
    for number in committed:
        subtasks[number].notify_complete(5)
    again = [CommittingSinkOperator(EachCommits(target)) for _ in range(parallelism)]
    for number, state in enumerate(redistributed(states, parallelism)):
        opened(again[number], context(number, parallelism, uid="out", state=state, restored=5, attempt=1))
    assert sorted(target.numbers) == [0, 1, 2, 10, 11, 12]
    for number, operator in enumerate(again):
        write(operator, 100 + number)
        snapshot_of(operator, 6)
        operator.notify_complete(6)
    assert sorted(target.numbers)[6:] == [100 + number for number in range(parallelism)]


@pytest.mark.row("ends.5")
def test_committables_that_an_earlier_release_has_stored_one_by_one_are_committed() -> None:
    target = Target()
    items = tuple({"checkpoint": 5, "writer": "w", "committable": {"numbers": [number]}} for number in range(2))
    state = [OperatorListState(PENDING, OperatorStateMode.SPLIT, items)]
    opened(CommittingSinkOperator(EachCommits(target)), context(uid="out", state=state, restored=5))
    assert sorted(target.numbers) == [0, 1]
    assert target.transactions == {"w-5"}
