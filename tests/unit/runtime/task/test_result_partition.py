"""Rows reach the right channel, in order, none lost, in buffers of a good size; and a full channel says so."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_runtime.graph.job_graph import Partitioning
from ckpt_runtime.graph.key_groups import owner_of_key_group
from ckpt_runtime.network.elements import CancelCheckpoint, EndOfRange, Watermark
from ckpt_runtime.network.gate import InputChannel, InputGate
from ckpt_runtime.operators.operator import MAX_WATERMARK
from ckpt_runtime.state.hashing import hash_columns
from ckpt_runtime.task.output import EARLY_PAUSE_MS, BufferLimits, LocalSubpartition, ResultPartition, Subpartition
from tests.support.reference_kernels import key_group_of_hash
from tests.unit.runtime.task.conftest import TaskKit

MAX_PARALLELISM = 16


def partition(
    partitioning: Partitioning,
    channels: list[Any],
    *,
    keys: tuple[str, ...] = (),
    buffer_rows: int = 8,
    buffer_bytes: int = 1 << 20,
    buffer_timeout_ms: int = 100,
    now_ms: Callable[[], float] = lambda: 0.0,
    overtakes: bool = True,
) -> ResultPartition:
    return ResultPartition(
        partitioning, keys, MAX_PARALLELISM, channels,
        limits=BufferLimits(buffer_rows, buffer_bytes, buffer_timeout_ms),
        now_ms=now_ms, overtakes=overtakes,
    )  # fmt: skip


def flat(sent: Any) -> list[int]:
    return [value for element in sent.elements if isinstance(element, list) for value in element]


def keyed_batches(sizes: list[int]) -> list[pa.RecordBatch]:
    """Batches of the given sizes: ``n`` counts through all of them, ``k`` has few values."""
    batches, start = [], 0
    for size in sizes:
        numbers = list(range(start, start + size))
        batches.append(pa.record_batch({"n": pa.array(numbers, pa.int64()), "k": [number % 7 for number in numbers]}))
        start += size
    return batches


class TestBuffers:
    def test_rows_wait_for_company_until_the_timeout(self, kit: TaskKit) -> None:
        now = [1_000.0]
        out = kit.Sent()
        part = partition(Partitioning.FORWARD, [out], now_ms=lambda: now[0])
        assert part.flush_at is None
        part.emit(kit.rows(1))
        assert part.flush_at == 1_100
        now[0] = 1_050
        part.emit(kit.rows(2))
        assert part.flush_at == 1_100
        assert out.elements == []
        part.flush()
        assert out.elements == [[1, 2]]
        assert part.flush_at is None

    def test_rows_of_another_schema_get_a_buffer_of_their_own(self, kit: TaskKit) -> None:
        out = kit.Sent()
        part = partition(Partitioning.FORWARD, [out])
        for batch in (kit.rows(1), kit.rows(2), pa.record_batch({"m": [3], "n": [4]}), kit.rows(5)):
            part.emit(batch)
        part.flush()
        assert out.elements == [[1, 2], [3], [5]]
        assert part.bytes == 8 * 5

    def test_full_buffer_and_batch_without_a_timeout_are_sent_at_once(self, kit: TaskKit) -> None:
        out = kit.Sent()
        part = partition(Partitioning.FORWARD, [out], buffer_rows=4)
        part.emit(kit.rows(1))
        part.emit(kit.rows(2))
        assert out.elements == [[1, 2]]
        out = kit.Sent()
        part = partition(Partitioning.FORWARD, [out], buffer_timeout_ms=0)
        part.emit(kit.rows(1))
        assert out.elements == [[1]]
        assert part.flush_at is None

    def test_large_batches_are_cut_by_rows_and_bytes(self, kit: TaskKit) -> None:
        out = kit.Sent()
        partition(Partitioning.FORWARD, [out], buffer_rows=4).emit(kit.rows(*range(100)))
        assert flat(out) == list(range(100))
        assert max(batch.num_rows for batch in out.batches) <= 8
        out = kit.Sent()
        part = partition(Partitioning.FORWARD, [out], buffer_rows=1_000, buffer_bytes=100)
        part.emit(pa.record_batch({"s": ["x" * 1_000, "y" * 1_000, "z" * 1_000]}))
        assert [batch.num_rows for batch in out.batches] == [1, 1, 1]

    def test_control_element_follows_all_earlier_rows(self, kit: TaskKit) -> None:
        outs = [kit.Sent(), kit.Sent()]
        part = partition(Partitioning.REBALANCE, outs)
        part.emit(kit.rows(1))
        part.emit(kit.rows(2))
        part.send_control(CancelCheckpoint(7))
        assert [out.elements for out in outs] == [[[1], CancelCheckpoint(7)], [[2], CancelCheckpoint(7)]]

    def test_rows_leave_early_when_their_receiver_has_processed_everything(self, kit: TaskKit) -> None:
        idle, busy = kit.Sent(), kit.Sent()
        part = partition(Partitioning.REBALANCE, [idle, busy], now_ms=lambda: 1_000.0)
        part.emit(kit.rows(1))
        part.emit(kit.rows(2))
        assert (idle.held, busy.held) == (True, True), "their producer is woken when they are drained"
        assert part.flush_at == 1_100
        part.flush_due(1_001)
        assert idle.elements == []
        idle.is_drained = True
        assert (part.flush_at or 0) <= 1_001
        part.flush_due(1_001)
        assert (idle.elements, busy.elements) == ([[1]], [])
        assert (idle.held, busy.held) == (False, True)
        assert part.flush_at == 1_100, "the other rows wait for their receiver or the timeout"
        part.flush_due(1_100)
        assert busy.elements == [[2]]
        assert part.flush_at is None

    def test_buffers_that_leave_early_are_apart_by_a_pause(self, kit: TaskKit) -> None:
        out = kit.Sent()
        out.is_drained = True
        part = partition(Partitioning.FORWARD, [out], now_ms=lambda: 1_000.0)
        part.emit(kit.rows(1))
        part.flush_due(1_000)
        part.emit(kit.rows(2))
        part.flush_due(1_000.5)
        part.emit(kit.rows(3))
        assert part.flush_at == 1_000 + EARLY_PAUSE_MS
        part.flush_due(1_000 + EARLY_PAUSE_MS)
        assert out.elements == [[1], [2, 3]]

    def test_rows_for_a_drained_channel_wait_for_others_while_the_thread_is_busy(self, kit: TaskKit) -> None:
        out = kit.Sent()
        out.is_drained = True
        part = partition(Partitioning.FORWARD, [out], now_ms=lambda: 1_000.0)
        part.emit(kit.rows(1))
        assert not part.flush_due(1_010, early=False)
        part.emit(kit.rows(2))
        assert part.flush_due(1_010)
        part.emit(kit.rows(3))
        assert part.flush_due(1_100, early=False)
        assert out.elements == [[1, 2], [3]]

    def test_watermark_leaves_early_only_when_all_receivers_have_processed_everything(self, kit: TaskKit) -> None:
        outs = [kit.Sent(), kit.Sent()]
        part = partition(Partitioning.REBALANCE, outs, now_ms=lambda: 1_000.0)
        part.emit(kit.rows(1))
        part.emit_watermark(7)
        outs[0].is_drained = True
        part.flush_due(1_001)
        assert [out.elements for out in outs] == [[[1]], []]
        assert all(out.held for out in outs)
        outs[1].is_drained = True
        part.flush_due(1_003)
        assert [out.elements for out in outs] == [[[1], Watermark(7)], [Watermark(7)]]
        assert not any(out.held for out in outs)
        assert part.flush_at is None

    def test_latest_watermark_is_sent_after_the_rows_before_it(self, kit: TaskKit) -> None:
        out = kit.Sent()
        part = partition(Partitioning.FORWARD, [out])
        part.emit_watermark(5)
        part.emit(kit.rows(1))
        part.emit_watermark(6)
        assert part.flush_at is not None
        part.flush()
        assert out.elements == [[1], Watermark(6)]
        part.flush()
        assert len(out.elements) == 2

    def test_the_watermark_of_the_end_of_data_replaces_none(self, kit: TaskKit) -> None:
        out = kit.Sent()
        part = partition(Partitioning.FORWARD, [out])
        part.emit(kit.rows(1))
        part.emit_watermark(5)
        part.emit_watermark(MAX_WATERMARK)
        assert out.elements == [[1], Watermark(5), Watermark(MAX_WATERMARK)]

    @pytest.mark.parametrize("channels", [1, 2])
    @pytest.mark.parametrize("partitioning", [p for p in Partitioning if p is not Partitioning.FORWARD])
    def test_end_of_a_range_is_not_sent_where_channels_meet(
        self, kit: TaskKit, partitioning: Partitioning, channels: int
    ) -> None:
        outs = [kit.Sent() for _ in range(channels)]
        part = partition(partitioning, outs, keys=("n",))
        part.emit(kit.rows(1))
        part.emit_end_of_range()
        part.flush()
        assert [element for out in outs for element in out.elements if element != [1]] == []

    def test_end_of_a_range_lets_its_rows_and_the_watermark_leave_before_later_rows_on_any_edge(
        self, kit: TaskKit
    ) -> None:
        out = kit.Sent()
        part = partition(Partitioning.HASH, [out], keys=("n",), buffer_timeout_ms=1_000)
        part.emit(kit.rows(1))
        part.emit_watermark(5)
        part.emit_end_of_range()
        part.emit(kit.rows(2))
        part.flush()
        assert out.elements == [[1], Watermark(5), [2]]

    def test_rows_of_two_ranges_share_a_buffer_where_no_consumer_uses_event_time(self, kit: TaskKit) -> None:
        out = kit.Sent()
        part = partition(Partitioning.HASH, [out], keys=("n",), buffer_timeout_ms=1_000)
        part.cut_by_ranges = False
        part.emit(kit.rows(1))
        part.emit_watermark(5)
        part.emit_end_of_range()
        part.emit(kit.rows(2))
        part.flush()
        assert out.elements == [[1, 2], Watermark(5)]

    def test_end_of_a_range_is_between_its_rows_and_the_next_ones(self, kit: TaskKit) -> None:
        out = kit.Sent()
        part = partition(Partitioning.FORWARD, [out])
        part.emit(kit.rows(1))
        part.emit_end_of_range()
        part.emit(kit.rows(2))
        part.flush()
        assert out.elements == [[1], EndOfRange(), [2]]

    def test_room_and_errors_are_those_of_all_channels(self, kit: TaskKit) -> None:
        outs = [kit.Sent(capacity=1), kit.Sent(capacity=1)]
        part = partition(Partitioning.REBALANCE, outs, buffer_timeout_ms=0)
        assert part.has_room
        part.emit(kit.rows(1))
        assert not part.has_room
        outs = [kit.Sent(), kit.Sent()]
        part = partition(Partitioning.BROADCAST, outs)
        assert part.error is None
        outs[1].error = ConnectionError("gone")
        assert part.error is outs[1].error


class TestLimitedBytes:
    """One channel's consumer wants smaller buffers (FLIP-183). Rows have 8 bytes."""

    def test_smaller_buffer_size_applies_to_its_channel_only(self, kit: TaskKit) -> None:
        outs = [kit.Sent(), kit.Sent()]
        part = partition(Partitioning.BROADCAST, outs, buffer_rows=100)
        part.limit_bytes(1, 32)
        part.emit(kit.rows(*range(64)))
        assert [batch.num_rows for batch in outs[0].batches] == [64]
        assert [batch.num_rows for batch in outs[1].batches] == [8] * 8
        assert flat(outs[1]) == list(range(64))

    def test_rows_are_gathered_up_to_the_smaller_size(self, kit: TaskKit) -> None:
        out = kit.Sent()
        part = partition(Partitioning.FORWARD, [out], buffer_rows=1_000)
        part.emit(kit.rows(0, 1))
        assert out.batches == []
        part.limit_bytes(0, 64)
        for start in range(2, 20, 2):
            part.emit(kit.rows(start, start + 1))
        assert [batch.num_rows for batch in out.batches] == [4] * 5

    def test_rows_gathered_before_are_sent_with_the_next_ones(self, kit: TaskKit) -> None:
        out = kit.Sent()
        part = partition(Partitioning.FORWARD, [out], buffer_rows=1_000)
        part.emit(kit.rows(*range(20)))
        part.limit_bytes(0, 64)
        part.emit(kit.rows(20))
        assert out.elements == [list(range(21))]

    def test_rows_stay_the_upper_bound_and_the_configured_bytes_too(self, kit: TaskKit) -> None:
        out = kit.Sent()
        part = partition(Partitioning.FORWARD, [out], buffer_rows=4, buffer_bytes=80)
        part.limit_bytes(0, 1 << 20)
        part.emit(kit.rows(*range(64)))
        assert {batch.num_rows for batch in out.batches} == {8}
        wide = partition(Partitioning.FORWARD, [out := kit.Sent()], buffer_rows=1_000, buffer_bytes=80)
        wide.limit_bytes(0, 1 << 20)
        wide.emit(kit.rows(*range(64)))
        assert {batch.num_rows for batch in out.batches} == {16}

    def test_a_row_larger_than_the_size_gets_a_buffer_of_its_own(self, kit: TaskKit) -> None:
        out = kit.Sent()
        part = partition(Partitioning.FORWARD, [out], buffer_rows=1_000)
        part.limit_bytes(0, 1)
        part.emit(kit.rows(1, 2, 3))
        assert out.elements == [[1], [2], [3]]

    def test_sizes_grow_again(self, kit: TaskKit) -> None:
        out = kit.Sent()
        part = partition(Partitioning.FORWARD, [out], buffer_rows=100)
        part.limit_bytes(0, 32)
        part.limit_bytes(0, 512)
        part.emit(kit.rows(*range(64)))
        assert [batch.num_rows for batch in out.batches] == [64]


SIZES = st.lists(st.integers(1, 40), max_size=12)
ACTIONS = st.lists(st.sampled_from(["flush", "control", "watermark", ""]), min_size=12, max_size=12)


class TestRouting:
    @given(SIZES, ACTIONS, st.integers(1, 4), st.integers(1, 20), st.sampled_from([0, 100]))
    @settings(deadline=None, max_examples=40)
    def test_hash_sends_each_key_to_its_owner_in_order(
        self, kit: TaskKit, sizes: list[int], actions: list[str], channels: int, buffer_rows: int, timeout: int
    ) -> None:
        outs = [kit.Sent() for _ in range(channels)]
        part = partition(Partitioning.HASH, outs, keys=("k",), buffer_rows=buffer_rows, buffer_timeout_ms=timeout)
        batches = keyed_batches(sizes)
        expected: dict[int, list[int]] = defaultdict(list)
        for batch, action in zip(batches, actions, strict=False):
            for number, key_hash in zip(batch.column("n").to_pylist(), hash_columns(batch, ["k"]), strict=True):
                group = key_group_of_hash(int(key_hash), MAX_PARALLELISM)
                expected[owner_of_key_group(group, MAX_PARALLELISM, channels)].append(number)
            part.emit(batch)
            self.act(part, action)
        part.flush()
        assert [flat(out) for out in outs] == [expected[index] for index in range(channels)]
        assert (part.rows, part.bytes) == (sum(sizes), 16 * sum(sizes))

    @given(SIZES, ACTIONS, st.integers(1, 4), st.integers(1, 20), st.sampled_from([0, 100]))
    @settings(deadline=None, max_examples=40)
    def test_rebalance_loses_nothing_and_keeps_the_order_within_a_channel(
        self, kit: TaskKit, sizes: list[int], actions: list[str], channels: int, buffer_rows: int, timeout: int
    ) -> None:
        outs = [kit.Sent() for _ in range(channels)]
        part = partition(Partitioning.REBALANCE, outs, buffer_rows=buffer_rows, buffer_timeout_ms=timeout)
        for batch, action in zip(keyed_batches(sizes), actions, strict=False):
            part.emit(batch)
            self.act(part, action)
        part.flush()
        assert sorted(value for out in outs for value in flat(out)) == list(range(sum(sizes)))
        assert all(flat(out) == sorted(flat(out)) for out in outs)

    @given(SIZES, ACTIONS, st.integers(1, 4))
    @settings(deadline=None, max_examples=40)
    def test_pieces_of_work_are_dealt_out_one_by_one_and_those_of_a_batch_arrive_together(
        self, kit: TaskKit, sizes: list[int], actions: list[str], channels: int
    ) -> None:
        outs = [kit.Sent() for _ in range(channels)]
        part = partition(Partitioning.REBALANCE, outs, buffer_rows=1 << 10, buffer_timeout_ms=0, overtakes=False)
        for batch, action in zip(keyed_batches(sizes), actions, strict=False):
            before = [len(out.elements) for out in outs]
            part.emit(batch)
            assert all(len(out.elements) - known <= 1 for out, known in zip(outs, before, strict=True))
            self.act(part, action)
        assert [flat(out) for out in outs] == [list(range(index, sum(sizes), channels)) for index in range(channels)]

    @given(SIZES, ACTIONS, st.integers(1, 4), st.integers(1, 20), st.sampled_from([0, 100]))
    @settings(deadline=None, max_examples=40)
    def test_broadcast_gives_everything_to_everybody(
        self, kit: TaskKit, sizes: list[int], actions: list[str], channels: int, buffer_rows: int, timeout: int
    ) -> None:
        outs = [kit.Sent() for _ in range(channels)]
        part = partition(Partitioning.BROADCAST, outs, buffer_rows=buffer_rows, buffer_timeout_ms=timeout)
        for batch, action in zip(keyed_batches(sizes), actions, strict=False):
            part.emit(batch)
            self.act(part, action)
        part.flush()
        assert all(flat(out) == list(range(sum(sizes))) for out in outs)
        assert (part.rows, part.bytes) == (sum(sizes), 16 * sum(sizes) * channels)

    def test_large_batches_are_spread_evenly(self, kit: TaskKit) -> None:
        outs = [kit.Sent() for _ in range(3)]
        part = partition(Partitioning.REBALANCE, outs, buffer_rows=6)
        part.emit(kit.rows(*range(30)))
        part.flush()
        assert [len(flat(out)) for out in outs] == [10, 10, 10]

    @staticmethod
    def act(part: ResultPartition, action: str) -> None:
        match action:
            case "flush":
                part.flush()
            case "control":
                part.send_control(CancelCheckpoint(1))
            case "watermark":
                part.emit_watermark(1)


def credit_returns(receiver: InputChannel, line: int, act: Callable[[], None]) -> None:
    """Has the consumer return credit; ``act`` runs in front of the given line of that."""
    lines = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code is not LocalSubpartition._return_credit.__code__:
            return None
        if event == "line":
            lines += 1
            if lines == line:
                act()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        receiver.buffer_consumed()
    finally:
        sys.settrace(before)


class TestLocalSubpartition:
    @pytest.mark.parametrize("window", [2, 8])
    def test_room_comes_back_with_the_consumers_credit(self, kit: TaskKit, window: int) -> None:
        """Half of a window that is larger than the channel would never be owed while anything waits behind the rows."""
        woken: list[bool] = []
        gate = InputGate(lambda: None)
        receiver = gate.add_channel(0, window)
        local: Subpartition = LocalSubpartition(receiver, 2, lambda: woken.append(True))
        local.send_batch(kit.rows(1))
        assert local.has_room
        local.send_batch(kit.rows(2))
        assert not local.has_room
        local.send_control(CancelCheckpoint(1))
        assert not woken
        assert gate.poll() is not None
        receiver.buffer_consumed()
        assert local.has_room
        assert woken
        assert local.error is None

    def test_producer_that_holds_rows_is_woken_when_the_channel_is_drained(self, kit: TaskKit) -> None:
        woken: list[bool] = []
        receiver = InputGate(lambda: None).add_channel(0, 8)
        local = LocalSubpartition(receiver, 8, lambda: woken.append(True))
        assert local.is_drained
        for held in (False, True):
            local.send_batch(kit.rows(1))
            assert not local.is_drained
            local.held = held
            receiver.queue.clear()
            receiver.buffer_consumed()
            assert local.is_drained
            assert bool(woken) is held

    @pytest.mark.parametrize("line", range(1, 4))
    def test_producer_that_holds_rows_while_the_channel_drains_sees_it_or_is_woken(
        self, kit: TaskKit, line: int
    ) -> None:
        woken: list[bool] = []
        seen: list[bool] = []
        receiver = InputGate(lambda: None).add_channel(0, 8)
        local = LocalSubpartition(receiver, 8, lambda: woken.append(True))
        local.send_batch(kit.rows(1))
        receiver.queue.clear()

        def hold() -> None:
            local.held = True
            seen.append(local.is_drained)

        credit_returns(receiver, line, hold)
        assert woken or seen != [False]

    def test_the_same_batch_arrives_without_a_copy(self, kit: TaskKit) -> None:
        gate = InputGate(lambda: None)
        local = LocalSubpartition(gate.add_channel(0, 2), 2, lambda: None)
        batch = kit.rows(1)
        local.send_batch(batch)
        arrived = gate.poll()
        assert arrived is not None
        assert arrived[1] is batch

    @pytest.mark.parametrize("line", range(1, 4))
    def test_a_producer_that_fills_the_channel_while_credit_comes_back_is_woken(self, kit: TaskKit, line: int) -> None:
        """The producer runs in front of the given line of the consumer's return of credit, finds no room, sleeps."""
        woken: list[bool] = []
        asleep: list[bool] = []
        receiver = InputGate(lambda: None).add_channel(0, 1)
        local = LocalSubpartition(receiver, 2, lambda: woken.append(True))
        local.send_batch(kit.rows(1))

        def fill() -> None:
            local.send_batch(kit.rows(2))
            asleep.append(not local.has_room)

        credit_returns(receiver, line, fill)
        assert local.has_room
        assert woken or True not in asleep
