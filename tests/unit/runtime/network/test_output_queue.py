"""What a sender has queued: barriers overtake rows and watermarks, never each other, and no more than a bound."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_runtime.checkpoint.properties import CheckpointOptions, CheckpointProperties
from ckpt_runtime.network.elements import CancelCheckpoint, CheckpointBarrier, EndOfData, SenderCredit, Watermark
from ckpt_runtime.network.output_queue import EncodedRows, OutputQueue

OPTIONS = CheckpointOptions(CheckpointProperties(), "dir", unaligned=True)
ONE, TWO, THREE = (CheckpointBarrier(number, 0, OPTIONS) for number in (1, 2, 3))
MARK = Watermark(7)


def message(content: bytes) -> EncodedRows:
    return EncodedRows(pa.schema([]), pa.py_buffer(content))


A, B, C = message(b"aaaa"), message(b"bbbb"), message(b"cccc")


def queue_of(*elements: Any, capacity: int = 100) -> OutputQueue:
    queue = OutputQueue(capacity)
    for element in elements:
        if isinstance(element, EncodedRows):
            queue.add_rows(element)
        else:
            queue.add_control(element)
    return queue


def taken(queue: OutputQueue, credit: int = 1_000) -> list[Any]:
    granted = SenderCredit()
    if credit:
        granted.grant(credit)
    return list(queue.take(granted))


@pytest.mark.row("76.2")
def test_barrier_overtakes_rows_and_watermarks_and_returns_them() -> None:
    queue = queue_of(A, MARK, B, EndOfData(True))
    assert queue.add_barrier(ONE) == [A, MARK, B]
    assert taken(queue) == [ONE, A, MARK, B, EndOfData(True)]


@pytest.mark.parametrize("stop", [ONE, CancelCheckpoint(1)])
def test_overtaking_barrier_stays_after_barriers_and_cancellations(stop: Any) -> None:
    queue = queue_of(A, stop, B, MARK)
    assert queue.add_barrier(TWO) == [B, MARK]
    assert taken(queue) == [A, stop, TWO, B, MARK]


@pytest.mark.row("76.1")
@pytest.mark.parametrize(
    ("limit", "overtaken"), [(0, [MARK]), (3, [MARK]), (4, [C, MARK]), (11, [B, C, MARK]), (12, [A, B, C, MARK])]
)
def test_a_bound_counts_bytes_of_rows_from_the_end(limit: int, overtaken: list[Any]) -> None:
    queue = queue_of(A, B, C, MARK)
    assert queue.add_barrier(ONE, limit) == overtaken
    assert taken(queue) == [e for e in (A, B, C) if id(e) not in map(id, overtaken)] + [ONE, *overtaken]


@pytest.mark.row("76.4")
def test_queued_barrier_turns_unaligned_and_keeps_the_elements_after_it() -> None:
    queue = queue_of(A, MARK, ONE, B)
    assert queue.holds_barrier(1)
    assert queue.switch_to_unaligned(1) == [A, MARK]
    assert taken(queue) == [ONE, A, MARK, B]


def test_sent_barrier_does_not_turn_unaligned() -> None:
    queue = queue_of(ONE, A)
    assert taken(queue, credit=0) == [ONE]
    assert not queue.holds_barrier(1)
    assert queue.switch_to_unaligned(1) == []
    assert taken(queue) == [A]


@pytest.mark.row("76.8")
def test_two_queued_barriers_turn_unaligned_up_to_the_older_one() -> None:
    queue = queue_of(A, ONE, B, TWO, C)
    assert queue.switch_to_unaligned(2) == [B]
    assert queue.switch_to_unaligned(1) == [A]
    assert taken(queue) == [ONE, A, TWO, B, C]
    queue = queue_of(A, ONE, B, TWO, C)
    assert queue.switch_to_unaligned(1) == [A]
    assert queue.switch_to_unaligned(2) == [A, B]
    assert taken(queue) == [ONE, TWO, A, B, C]


def test_bound_counts_the_data_before_the_barrier() -> None:
    queue = queue_of(A, B, ONE, C)
    assert queue.switch_to_unaligned(1, 4) == [B]
    assert taken(queue) == [A, ONE, B, C]


def test_rows_need_credit_and_room_and_barriers_neither() -> None:
    queue = queue_of(A, B, MARK, capacity=2)
    assert not queue.has_room
    queue.add_barrier(ONE)
    assert taken(queue, credit=1) == [ONE, A]
    assert queue.has_room
    assert queue.was_full(1)
    assert not queue.was_full(0)
    assert not queue.is_empty
    assert taken(queue) == [B, MARK]
    assert queue.is_empty
    assert queue.taken == 2


Action = tuple[str, int]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["rows", "take", "mark"]), st.integers(1, 5)),
            st.tuples(st.sampled_from(["overtake", "in order", "turn"]), st.sampled_from([-1, 0, 3, 10])),
        ),
        max_size=60,
    )
)
def test_sent_and_overtaken_data_together_are_the_data_before_a_barrier(actions: list[Action]) -> None:
    queue = OutputQueue(5)
    added: list[Any] = []
    before: dict[int, list[Any]] = {}
    overtaken: dict[int, list[Any]] = {}
    left: list[Any] = []
    for number, (action, amount) in enumerate(actions):
        barrier = CheckpointBarrier(number, 0, OPTIONS)
        limit = None if amount < 0 else amount
        if action == "rows":
            added.append(message(bytes(amount)))
            queue.add_rows(added[-1])
        elif action == "mark":
            added.append(Watermark(number))
            queue.add_control(added[-1])
        elif action == "take":
            left += taken(queue, amount)
        elif action == "overtake":
            before[number], overtaken[number] = list(added), queue.add_barrier(barrier, limit)
        elif action == "in order":
            before[number], overtaken[number] = list(added), []
            queue.add_control(barrier)
        else:
            for known, found in overtaken.items():
                if queue.holds_barrier(known) and not found:
                    overtaken[known] = queue.switch_to_unaligned(known, limit)
                    break
        if limit is not None and number in overtaken:
            assert sum(e.message.size for e in overtaken[number] if isinstance(e, EncodedRows)) <= limit
    left += taken(queue)
    identities = [e.checkpoint_id for e in left if isinstance(e, CheckpointBarrier)]
    assert identities == sorted(before)
    assert [id(e) for e in left if not isinstance(e, CheckpointBarrier)] == [id(e) for e in added]
    for known, expected in before.items():
        place = next(i for i, e in enumerate(left) if isinstance(e, CheckpointBarrier) and e.checkpoint_id == known)
        ahead = [e for e in left[:place] if not isinstance(e, CheckpointBarrier)]
        assert [id(e) for e in ahead + overtaken[known]] == [id(e) for e in expected]
