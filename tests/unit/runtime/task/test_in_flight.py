"""In-flight data on its way into a checkpoint: sizes, and which buffers earlier checkpoints hold already."""

from __future__ import annotations

import gc
from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import StateFile
from ckpt_runtime.network.elements import Watermark
from ckpt_runtime.storage.channel_state import PersistedElement
from ckpt_runtime.task.in_flight import CapturedChannel, InFlight, PersistedBuffers, size_of
from tests.unit.runtime.task.conftest import TaskKit


def place(number: int) -> PersistedElement:
    return PersistedElement(StateFile(f"file:///shared/{number}", 100, "c"), 0, 10)


@pytest.fixture(params=["message", "batch"])
def buffer(request: pytest.FixtureRequest, kit: TaskKit) -> Any:
    return kit.encoded(1, 2) if request.param == "message" else kit.rows(1, 2)


def test_rows_count_as_they_are_kept_whether_they_came_over_the_wire_or_not(kit: TaskKit) -> None:
    batch = kit.rows(1, 2, 3)
    assert size_of(batch) == size_of(kit.encoded(1, 2, 3)) == batch.serialize().size
    assert size_of(batch.slice(1, 1)) == batch.slice(1, 1).serialize().size
    assert size_of(Watermark(5)) == 0
    assert size_of(place(1)) == 10
    assert CapturedChannel(0, [batch, Watermark(1), place(1)]).bytes == size_of(batch) + 10


def test_channels_without_elements_are_no_in_flight_data() -> None:
    empty = CapturedChannel(0)
    assert InFlight((empty,), (empty,)).is_empty
    assert not InFlight((empty,), (CapturedChannel(0, [Watermark(1)]),)).is_empty


class TestPersistedBuffers:
    def test_pending_older_checkpoint_that_stores_a_buffer_elsewhere_makes_its_file_unused(self, buffer: Any) -> None:
        known = PersistedBuffers()
        known.written(1, [(buffer, place(1))])
        known.completed(1)
        known.begun(2)
        assert known.place_of(buffer, 2) == place(1)
        assert known.place_of(buffer, 3) is None
        known.written(2, [(buffer, place(1))])
        assert known.place_of(buffer, 3) == place(1)
        known.written(2, [(buffer, place(2))])
        assert known.place_of(buffer, 3) is None
        known.aborted(2)
        assert known.place_of(buffer, 3) == place(1)

    @pytest.mark.row("76.11")
    def test_only_files_of_completed_checkpoints_are_reused(self, buffer: Any) -> None:
        known = PersistedBuffers()
        known.written(1, [(buffer, place(1))])
        assert known.place_of(buffer, 3) is None
        known.completed(1)
        assert known.place_of(buffer, 3) == place(1)

    def test_an_aborted_one_is_forgotten_and_what_was_known_stays(self, buffer: Any) -> None:
        known = PersistedBuffers()
        known.written(1, [(buffer, place(1))])
        known.completed(1)
        known.written(2, [(buffer, place(2))])
        known.aborted(2)
        known.completed(2)
        assert known.place_of(buffer, 3) == place(1)

    def test_later_checkpoint_replaces_the_buffer_and_earlier_ones_are_forgotten(
        self, buffer: Any, kit: TaskKit
    ) -> None:
        known, other = PersistedBuffers(), kit.rows(9)
        known.written(1, [(other, place(1))])
        known.written(2, [(buffer, place(2))])
        known.written(3, [(buffer, place(3))])
        known.completed(2)
        assert known.place_of(buffer, 3) == place(2)
        known.completed(1)
        assert known.place_of(other, 3) is None
        known.completed(3)
        assert known.place_of(buffer, 3) == place(3)

    def test_buffers_are_not_kept_alive(self, kit: TaskKit) -> None:
        known = PersistedBuffers()
        before = pa.total_allocated_bytes()
        for number in range(1, 4):
            big = kit.encoded(*range(100_000))
            known.written(number, [(big, place(number))])
            known.completed(number)
            assert known.place_of(big, 100) == place(number)
        del big
        gc.collect()
        assert pa.total_allocated_bytes() - before < 100_000
        assert known._places == {}
        assert known._written == {}

    def test_buffer_that_is_freed_before_completion_is_not_remembered(self, kit: TaskKit) -> None:
        known = PersistedBuffers()
        gone = kit.encoded(1)
        known.written(1, [(gone, place(1))])
        del gone
        gc.collect()
        known.completed(1)
        assert known._places == {}

    def test_an_equal_buffer_is_another_one(self, kit: TaskKit) -> None:
        known = PersistedBuffers()
        buffer = kit.encoded(1)
        known.written(1, [(buffer, place(1))])
        known.completed(1)
        assert known.place_of(kit.encoded(1), 3) is None
