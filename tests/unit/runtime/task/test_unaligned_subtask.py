"""A subtask and checkpoints that may be unaligned: what it records, when it turns, and what it hands over."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_runtime.checkpoint.executions import TaskState
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.network.elements import CancelCheckpoint, EndOfData, EndOfPartition, Watermark
from ckpt_runtime.state.memory.backend import MemoryKeyedStateBackend
from tests.unit.runtime.task.conftest import Bench, TaskKit, Wire


def inputs(bench: Bench, kit: TaskKit, written: int = 0) -> dict[int, list[Any]]:
    """In-flight data of the inputs by peer, which is the channel here, of a snapshot that was handed over."""
    return {c.peer: kit.kept(c) for c in bench.host.written[written].in_flight.inputs if c.elements}


def outputs(bench: Bench, kit: TaskKit, written: int = 0) -> dict[int, list[Any]]:
    return {c.peer: kit.kept(c) for c in bench.host.written[written].in_flight.outputs}


class TestRecording:
    @pytest.mark.row("76.2")
    def test_an_announced_barrier_is_taken_at_once_and_what_is_queued_before_it_is_kept(self, kit: TaskKit) -> None:
        bench = kit.Bench().open()
        one = kit.unaligned(1)
        bench.put(0, kit.rows(1), Watermark(3), kit.rows(2), one, kit.rows(4))
        assert bench.subtask.step()
        assert bench.host.snapshot_ids == [1]
        assert inputs(bench, kit) == {0: [[1], Watermark(3), [2]]}
        assert bench.out.elements == [one]
        bench.run()
        assert bench.out.elements == [one, [1], Watermark(3), [2], [4]]
        assert bench.host.snapshot_ids == [1]

    @pytest.mark.row("76.2")
    def test_channels_are_recorded_until_their_barrier_arrives(self, kit: TaskKit) -> None:
        bench = kit.Bench(channels=3).open()
        one = kit.unaligned(1)
        bench.put(0, kit.rows(10), one).put(1, kit.rows(11))
        bench.subtask.step()
        assert bench.called("snapshot") == [(1,)]
        assert bench.host.snapshots == []
        bench.run()
        bench.put(1, Watermark(7), kit.rows(12)).put(2, kit.rows(20)).run()
        bench.put(1, kit.rows(13), one, kit.rows(14)).run()
        assert bench.host.snapshots == []
        bench.put(2, one, kit.rows(21)).run()
        assert bench.host.snapshot_ids == [1]
        assert inputs(bench, kit) == {0: [[10]], 1: [[11], Watermark(7), [12], [13]], 2: [[20]]}
        assert bench.out.elements[0] == one
        assert sorted(e[0] for e in bench.out.elements[1:]) == [10, 11, 12, 13, 14, 20, 21]

    def test_channels_are_not_recorded_after_the_last_barrier(self, kit: TaskKit) -> None:
        bench = kit.Bench(channels=2).open()
        bench.put(0, kit.unaligned(1)).run()
        assert bench.subtask.checkpoints.records
        bench.put(1, kit.unaligned(1)).run()
        assert not bench.subtask.checkpoints.records
        bench.put(1, kit.rows(1)).run()
        assert inputs(bench, kit) == {}

    @pytest.mark.row("76.8")
    def test_two_checkpoints_at_once_each_have_what_stood_before_their_barriers(self, kit: TaskKit) -> None:
        bench = kit.Bench(channels=2).open()
        one, two = kit.unaligned(1), kit.unaligned(2)
        bench.put(0, one, kit.rows(1), two).run()
        assert bench.called("snapshot") == [(1,), (2,)]
        bench.put(1, kit.rows(11)).run()
        bench.put(1, kit.rows(12), one, kit.rows(13)).run()
        bench.put(1, kit.rows(14), two, kit.rows(15)).run()
        assert bench.host.snapshot_ids == [1, 2]
        assert inputs(bench, kit, 0) == {1: [[11], [12]]}
        assert inputs(bench, kit, 1) == {0: [[1]], 1: [[11], [12], [13], [14]]}

    @pytest.mark.row("76.2")
    def test_the_rest_of_a_buffer_in_work_comes_first_in_its_channel(self, kit: TaskKit) -> None:
        bench = kit.Bench(channels=2).open()
        bench.row_ms = 5
        bench.put(0, kit.rows(*range(300)), kit.rows(300)).put(1, kit.rows(1_000))
        bench.subtask.step()
        done = len(bench.called("batch")[0][1])
        assert 0 < done < 300
        bench.put(0, kit.unaligned(1)).put(1, kit.unaligned(1)).run()
        assert inputs(bench, kit) == {0: [list(range(done, 300)), [300]], 1: [[1_000]]}
        assert [row for _, batch in bench.called("batch") for row in batch if row != 1_000] == list(range(301))

    @pytest.mark.row("76.2")
    def test_the_rest_in_work_of_a_recorded_channel_is_kept_once(self, kit: TaskKit) -> None:
        bench = kit.Bench(channels=2).open()
        bench.row_ms = 5
        bench.put(1, kit.rows(*range(300)))
        bench.subtask.step()
        done = len(bench.called("batch")[0][1])
        bench.put(0, kit.unaligned(1))
        bench.subtask.step()
        bench.subtask.step()
        bench.put(1, kit.rows(300), kit.unaligned(1)).run()
        assert inputs(bench, kit) == {1: [list(range(done, 300)), [300]]}

    def test_an_end_that_was_announced_before_the_barrier_is_captured(self, kit: TaskKit) -> None:
        bench = kit.Bench(channels=2, capacity=0).open()
        bench.put(1, kit.rows(11), EndOfData(True), EndOfPartition()).run()
        bench.put(0, kit.rows(1), kit.unaligned(1)).run()
        assert bench.host.snapshot_ids == [1]
        assert inputs(bench, kit) == {0: [[1]], 1: [[11]]}

    def test_rows_that_came_encoded_while_recording_are_captured_with_their_schema(self, kit: TaskKit) -> None:
        bench = kit.Bench(channels=2).open()
        bench.put(0, kit.unaligned(1)).run()
        bench.put(1, kit.encoded(4), kit.unaligned(1)).run()
        assert inputs(bench, kit) == {1: [[4]]}

    def test_channels_that_stay_in_order_are_aligned_first(self, kit: TaskKit) -> None:
        bench = kit.Bench(inputs=[(0, True), (1, False)]).open()
        bench.put(0, kit.rows(1), kit.unaligned(1)).put(1, kit.rows(2), kit.unaligned(1), kit.rows(3))
        bench.subtask.step()
        assert bench.host.snapshots == []
        bench.run()
        assert bench.host.snapshot_ids == [1]
        assert all(c.edge == 0 for c in bench.host.written[0].in_flight.inputs if c.elements)
        assert [row for _, batch in bench.called("batch") for row in batch] == [1, 2, 3]


class TestTurning:
    @pytest.mark.row("76.4")
    def test_alignment_ends_at_the_deadline(self, kit: TaskKit) -> None:
        bench = kit.Bench(channels=2).open()
        one = kit.unaligned(1, timeout_ms=100)
        bench.put(0, one, kit.rows(10)).run()
        bench.put(1, kit.rows(11)).run()
        assert bench.out.elements == [[11]]
        assert bench.subtask.wait_ms() == 100
        bench.host.wall_ms += 100
        assert bench.subtask.wait_ms() == 0
        bench.run()
        assert bench.out.elements == [[11], one, [10]]
        bench.put(1, kit.rows(12), one).run()
        assert inputs(bench, kit) == {1: [[12]]}
        assert bench.subtask.wait_ms() is None

    @pytest.mark.row("76.1")
    def test_a_bound_of_in_flight_data_is_kept(self, kit: TaskKit) -> None:
        size = kit.rows(1).serialize().size
        bench = kit.Bench(channels=2).open()
        one = kit.unaligned(1, limit=2 * size)
        for number in range(2):
            bench.put(number, kit.rows(1), kit.rows(2), kit.rows(3), one)
        bench.subtask.step()
        bench.subtask.step()
        assert bench.host.snapshots == []
        bench.run()
        kept = inputs(bench, kit)
        assert sum(map(len, kept.values())) == 2
        assert bench.host.snapshot_ids == [1]


class TestOutputs:
    @pytest.mark.row("76.2")
    def test_data_that_a_barrier_overtakes_in_outputs_is_kept_by_channel(self, kit: TaskKit) -> None:
        wires = [kit.Wire(), kit.Wire()]
        wires[0].grant(1)
        bench = kit.Bench(wires=wires).open()
        one = kit.unaligned(1)
        bench.put(0, kit.rows(1), Watermark(2), kit.rows(3)).run()
        bench.put(0, one).run()
        assert outputs(bench, kit) == {0: [[3]], 1: [[1], Watermark(2), [3]]}
        assert wires[0].take() == [[1], Watermark(2), one]
        assert wires[1].take() == []
        wires[1].grant(5)
        assert wires[1].take() == [one, [1], Watermark(2), [3]]

    @pytest.mark.row("76.4")
    def test_a_barrier_in_order_turns_where_it_is_still_queued_at_the_deadline(self, kit: TaskKit) -> None:
        wires = [kit.Wire(), kit.Wire()]
        bench = kit.Bench(wires=wires).open()
        one = kit.unaligned(1, timeout_ms=100)
        bench.put(0, kit.rows(1), one, kit.rows(2)).run()
        assert bench.host.snapshots == []
        wires[0].grant(1)
        assert wires[0].take() == [[1], one]
        bench.run()
        assert bench.host.snapshots == []
        assert bench.subtask.wait_ms() == 100
        bench.host.wall_ms += 100
        bench.run()
        assert outputs(bench, kit) == {1: [[1]]}
        assert bench.host.snapshots[0][2].unaligned
        wires[1].grant(9)
        assert wires[1].take() == [one, [1], [2]]

    def test_barrier_sent_in_time_keeps_no_data_and_is_noticed_before_the_thread_sleeps(self, kit: TaskKit) -> None:
        wire = kit.Wire()
        bench = kit.Bench(wires=[wire]).open()
        bench.put(0, kit.rows(1), kit.unaligned(1, timeout_ms=100)).run()
        assert not bench.subtask.has_work
        wire.grant(1)
        assert bench.subtask.has_work
        bench.run()
        assert bench.host.snapshot_ids == [1]
        assert bench.host.written[0].in_flight.is_empty
        assert not bench.host.snapshots[0][2].unaligned
        assert bench.subtask.wait_ms() is None

    @pytest.mark.row("76.1")
    def test_inputs_and_outputs_share_one_bound(self, kit: TaskKit) -> None:
        size = kit.rows(1).serialize().size
        wires = [kit.Wire(), kit.Wire()]
        bench = kit.Bench(wires=wires).open()
        bench.put(0, kit.rows(1)).run()
        bench.put(0, kit.rows(2), kit.unaligned(1, limit=2 * size))
        bench.run()
        found = bench.host.written[0].in_flight
        assert sum(c.bytes for c in (*found.inputs, *found.outputs)) == 2 * size
        assert inputs(bench, kit) == {0: [[2]]}

    def test_announcements_are_served_without_output_room(self, kit: TaskKit) -> None:
        wire = kit.Wire(capacity=1)
        bench = kit.Bench(wires=[wire]).open()
        bench.put(0, kit.rows(1), kit.rows(2)).run()
        assert bench.subtask.backpressured
        bench.put(0, kit.unaligned(1))
        assert bench.subtask.has_work
        bench.run()
        assert inputs(bench, kit) == {0: [[2]]}
        assert outputs(bench, kit) == {0: [[1]]}

    def test_a_lost_connection_is_seen_before_going_to_sleep(self, kit: TaskKit) -> None:
        wire = kit.Wire(capacity=1)
        bench = kit.Bench(wires=[wire]).open()
        bench.put(0, kit.rows(1)).run()
        assert not bench.subtask.has_work
        wire.error = ConnectionError("gone")
        assert bench.subtask.has_work
        with pytest.raises(ConnectionError, match="gone"):
            bench.run()


class TestEnd:
    def ended(self, kit: TaskKit, wire: Wire, *, timeout_ms: int = 0) -> Any:
        """A subtask whose final checkpoint is complete while rows of it wait for credit."""
        bench = kit.Bench(wires=[wire]).open()
        bench.put(0, kit.rows(1), EndOfData(True)).run()
        bench.put(0, kit.unaligned(1, timeout_ms=timeout_ms)).run()
        bench.mail(lambda: bench.subtask.notify_complete(1)).run()
        return bench

    def test_ended_subtask_waits_until_overtaken_data_is_sent(self, kit: TaskKit) -> None:
        wire = kit.Wire()
        bench = self.ended(kit, wire)
        bench.put(0, EndOfPartition()).run()
        assert outputs(bench, kit) == {0: [[1]]}
        assert bench.subtask.state is TaskState.RUNNING
        assert not bench.subtask.has_work
        wire.grant(1)
        assert bench.subtask.has_work
        bench.run()
        assert bench.subtask.state is TaskState.FINISHED
        assert wire.take() == [kit.unaligned(1), [1], EndOfData(True), EndOfPartition()]

    def test_next_checkpoint_keeps_the_unsent_data_again(self, kit: TaskKit) -> None:
        wire = kit.Wire()
        bench = self.ended(kit, wire)
        bench.put(0, kit.unaligned(2)).run()
        assert bench.host.snapshot_ids == [1, 2]
        assert outputs(bench, kit, 1) == {0: [[1]]}

    def test_checkpoint_whose_barrier_is_sent_last_is_stored_before_the_end(self, kit: TaskKit) -> None:
        wire = kit.Wire()
        bench = self.ended(kit, wire)
        bench.put(0, EndOfPartition()).run()
        two = kit.unaligned(2, timeout_ms=60_000)
        bench.subtask.checkpoints.trigger(two)
        assert bench.host.snapshot_ids == [1]
        wire.grant(1)
        bench.subtask._finish_when_sent()
        assert bench.host.snapshot_ids == [1, 2]
        assert bench.host.states == ["FINISHED"]

    def test_a_lost_connection_is_reported_while_it_waits(self, kit: TaskKit) -> None:
        wire = kit.Wire()
        bench = self.ended(kit, wire)
        bench.put(0, EndOfPartition()).run()
        wire.error = ConnectionError("gone")
        assert bench.subtask.has_work
        with pytest.raises(ConnectionError, match="gone"):
            bench.run()


class TestAbort:
    def frozen(self, kit: TaskKit) -> tuple[Any, Any]:
        """Two channels; a keyed backend that tells how many snapshots of it are held."""
        bench = kit.Bench(channels=2, wires=[kit.Wire()])
        backend = MemoryKeyedStateBackend(KeyGroupRange(0, 127), 128, "op0")
        held: list[int] = []
        take = backend.snapshot

        def snapshot(checkpoint_id: int, properties: CheckpointProperties) -> Any:
            frozen = take(checkpoint_id, properties)
            held.append(checkpoint_id)
            release = frozen.release
            object.__setattr__(frozen, "release", lambda: (held.remove(checkpoint_id), release()))
            return frozen

        backend.snapshot = snapshot  # type: ignore[method-assign]
        bench.chain.contexts[0] = kit.context("op0", bench.host, lambda _: None, keyed_state=backend)
        return bench.open(), held

    def test_abort_while_aligning_resumes_the_blocked_channels(self, kit: TaskKit) -> None:
        bench, held = self.frozen(kit)
        bench.put(0, kit.unaligned(1, timeout_ms=100), kit.rows(10)).run()
        assert bench.called("batch") == []
        bench.mail(lambda: bench.subtask.notify_aborted(1, None)).run()
        assert bench.called("batch") == [(0, [10])]
        bench.put(1, kit.unaligned(1, timeout_ms=100), kit.rows(11)).run()
        assert bench.called("batch") == [(0, [10]), (0, [11])]
        assert (held, bench.host.snapshots, bench.host.declined) == ([], [], [])

    def test_abort_while_recording_releases_frozen_state_and_recorded_data(self, kit: TaskKit) -> None:
        bench, held = self.frozen(kit)
        bench.put(0, kit.unaligned(1)).run()
        bench.put(1, kit.rows(11)).run()
        assert held == [1]
        bench.mail(lambda: bench.subtask.notify_aborted(1, None)).run()
        assert held == []
        assert not bench.subtask.checkpoints.records
        bench.put(1, kit.unaligned(1), kit.rows(12)).run()
        assert bench.called("batch") == [(0, [11]), (0, [12])]
        assert (bench.host.snapshots, bench.host.declined) == ([], [])

    def test_abort_while_the_barrier_is_queued_releases_the_snapshot(self, kit: TaskKit) -> None:
        bench, held = self.frozen(kit)
        one = kit.unaligned(1, timeout_ms=100)
        bench.put(0, kit.rows(1), one).put(1, one).run()
        assert held == [1]
        bench.mail(lambda: bench.subtask.notify_aborted(1, None)).run()
        assert held == []
        assert bench.subtask.wait_ms() is None

    @pytest.mark.parametrize("end", ["cancel", "fail"])
    def test_end_of_the_subtask_releases_open_snapshots(self, kit: TaskKit, end: str) -> None:
        bench, held = self.frozen(kit)
        bench.put(0, kit.unaligned(1)).run()
        assert held == [1]
        if end == "cancel":
            bench.subtask.cancel()
        else:
            bench.subtask.fail(RuntimeError("x"))
        assert held == []

    def test_a_cancellation_of_one_that_was_taken_declines_and_sends_no_cancellation(self, kit: TaskKit) -> None:
        bench = kit.Bench(channels=2).open()
        one = kit.unaligned(1)
        bench.put(0, one).run()
        bench.put(1, CancelCheckpoint(1)).run()
        assert bench.host.declined == [(1, "CHECKPOINT_DECLINED_ON_CANCELLATION_BARRIER")]
        assert bench.out.elements == [one]
        assert not bench.subtask.checkpoints.records


class TestMeasures:
    def test_measures_count_until_the_last_barrier(self, kit: TaskKit) -> None:
        bench = kit.Bench(channels=2).open()
        bench.host.wall_ms = 1_300
        bench.put(0, kit.unaligned(1)).run()
        bench.put(1, kit.rows(1, 2)).run()
        bench.host.mono_ms = 40
        bench.put(1, kit.unaligned(1)).run()
        measures = bench.host.snapshots[0][2]
        assert (measures.start_delay_ms, measures.alignment_ms, measures.processed_bytes) == (300, 40, 16)
        assert measures.unaligned

    def test_each_of_several_checkpoints_counts_its_own(self, kit: TaskKit) -> None:
        bench = kit.Bench(channels=2).open()
        bench.put(0, kit.unaligned(1), kit.unaligned(2)).run()
        for number in (1, 2):
            bench.put(1, kit.rows(number)).run()
            bench.put(1, kit.unaligned(number)).run()
        assert [measures.processed_bytes for _, _, measures in bench.host.snapshots] == [8, 16]
