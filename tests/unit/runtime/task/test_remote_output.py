"""The sending end of a channel to another worker: overtaking, turning, and whom it wakes when."""

from __future__ import annotations

import pyarrow as pa
import pytest

from ckpt_runtime.network.elements import EndOfData, Watermark
from tests.unit.runtime.task.conftest import TaskKit


@pytest.mark.row("76.2")
def test_unaligned_barrier_is_sent_before_data_that_waits_for_credit(kit: TaskKit) -> None:
    wire = kit.Wire()
    wire.grant(1)
    for value in (1, 2, 3):
        wire.subpartition.send_batch(kit.rows(value))
    wire.subpartition.send_control(Watermark(5))
    one = kit.unaligned(1)
    overtaken = wire.subpartition.overtake(one, None)
    assert wire.take() == [[1], one]
    assert [type(element).__name__ for element in overtaken] == ["EncodedRows", "EncodedRows", "Watermark"]
    wire.grant(5)
    assert wire.take() == [[2], [3], Watermark(5)]


def test_output_is_not_sent_before_the_receiver_has_connected(kit: TaskKit) -> None:
    wire = kit.Wire()
    wire.subpartition.overtake(kit.unaligned(1), None)
    assert wire.take() == []
    assert wire.subpartition.holds_barrier(1)
    wire.grant(1)
    assert wire.take() == [kit.unaligned(1)]


def test_schema_precedes_the_first_rows_also_after_an_overtaking_barrier(kit: TaskKit) -> None:
    wire = kit.Wire()
    wire.subpartition.send_batch(kit.rows(1))
    wire.subpartition.overtake(kit.unaligned(1), None)
    wire.grant(1)
    assert wire.take() == [kit.unaligned(1), [1]]


@pytest.mark.row("76.2")
def test_a_change_of_the_schema_precedes_its_rows_and_overtaken_rows_know_theirs(kit: TaskKit) -> None:
    wire = kit.Wire()
    wire.grant(1)
    other = pa.record_batch({"m": pa.array([2], pa.int16()), "n": [5]})
    for batch in (kit.rows(1), other, other, kit.rows(3)):
        wire.subpartition.send_batch(batch)
    overtaken = wire.subpartition.overtake(kit.unaligned(1), None)
    assert [element.schema for element in overtaken] == [other.schema, other.schema, kit.rows(3).schema]
    wire.grant(3)
    assert wire.take() == [[1], kit.unaligned(1), [2], [2], [3]]


def test_the_producer_is_woken_when_there_is_room_again(kit: TaskKit) -> None:
    wire = kit.Wire(capacity=3)
    for value in (1, 2, 3):
        wire.subpartition.send_batch(kit.rows(value))
    assert not wire.subpartition.has_room
    assert wire.woken == 0
    wire.grant(1)
    assert wire.subpartition.has_room
    assert wire.woken == 1
    wire.grant(1)
    assert wire.woken == 1


def test_the_producer_is_woken_when_a_barrier_that_might_turn_has_left(kit: TaskKit) -> None:
    wire = kit.Wire(capacity=9)
    for element in (kit.rows(1), kit.unaligned(1, timeout_ms=60_000), kit.rows(2)):
        send = wire.subpartition.send_batch if hasattr(element, "schema") else wire.subpartition.send_control
        send(element)
    wire.grant(1)
    assert not wire.subpartition.holds_barrier(1)
    assert wire.woken == 1


def test_the_producer_is_woken_when_nothing_is_left(kit: TaskKit) -> None:
    """A subtask that ends waits for that, however little was queued."""
    wire = kit.Wire(capacity=9)
    wire.subpartition.send_batch(kit.rows(1))
    wire.subpartition.send_control(EndOfData(True))
    wire.grant(1)
    assert wire.subpartition.is_empty
    assert wire.woken == 1


def test_lost_connection_wakes_the_producer_with_the_reason(kit: TaskKit) -> None:
    wire = kit.Wire()
    wire.error = ConnectionError("gone")
    wire.subpartition.failed()
    assert wire.woken == 1
    assert wire.subpartition.error is wire.error
