"""The shell around the barrier handler: alignment, snapshots, aborts, savepoints, and the last checkpoint of all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckpt_runtime.checkpoint.executions import TaskState
from ckpt_runtime.checkpoint.properties import CheckpointType
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.network.elements import CancelCheckpoint, CheckpointBarrier, EndOfData, EndOfPartition, Watermark
from ckpt_runtime.operators.operator import MAX_WATERMARK, SourceStatus
from ckpt_runtime.state.memory.backend import MemoryKeyedStateBackend
from tests.unit.runtime.task.conftest import TaskKit


class TestSnapshot:
    def test_the_barrier_follows_what_preparing_emitted_and_state_comes_tail_first(self, kit: TaskKit) -> None:
        bench = kit.Bench(operators=2).open()
        bench.operators[1].at["prepare"] = lambda: bench.operators[1].output.emit(kit.rows(9))
        first = kit.barrier(1)
        bench.put(0, kit.rows(1), first, kit.rows(2)).run()
        assert bench.out.elements == [[1], [9], first, [2]]
        calls = [call[:2] for call in bench.calls if call[1] in ("prepare", "snapshot")]
        assert calls == [("op0", "prepare"), ("op1", "prepare"), ("op1", "snapshot"), ("op0", "snapshot")]
        ((checkpoint_id, snapshots, _),) = bench.host.snapshots
        assert checkpoint_id == 1
        assert [(snapshot.uid, snapshot.lists[0].items, snapshot.keyed) for snapshot in snapshots] == [
            ("op1", (1,), None), ("op0", (1,), None),
        ]  # fmt: skip

    def test_keyed_state_is_frozen_after_the_operators_own_part(self, kit: TaskKit) -> None:
        bench = kit.Bench()
        backend = MemoryKeyedStateBackend(KeyGroupRange(0, 127), 128, "op0")
        bench.chain.contexts[0] = kit.context("op0", bench.host, lambda _: None, keyed_state=backend)
        bench.open().put(0, kit.barrier(1)).run()
        snapshot = bench.host.snapshots[0][1][0].keyed
        assert snapshot is not None
        snapshot.release()

    def test_measures_have_delay_alignment_and_rows_between_the_barriers(self, kit: TaskKit) -> None:
        bench = kit.Bench(channels=2).open()
        bench.host.wall_ms = 1_000
        one = kit.barrier(1, timestamp=700)
        bench.put(0, kit.rows(1), one).run()
        bench.put(1, kit.rows(2, 3)).run()
        bench.host.wall_ms, bench.host.mono_ms = 1_050, 50
        bench.put(1, one).run()
        _, _, measures = bench.host.snapshots[0]
        assert measures.start_delay_ms == 300
        assert measures.alignment_ms == 50
        assert measures.processed_bytes == 16

    def test_slow_clock_gives_no_negative_delay(self, kit: TaskKit) -> None:
        bench = kit.Bench().open()
        bench.put(0, kit.barrier(1, timestamp=5_000)).run()
        assert bench.host.snapshots[0][2].start_delay_ms == 0

    def test_a_newer_checkpoint_subsumes_the_one_being_aligned(self, kit: TaskKit) -> None:
        bench = kit.Bench(channels=2).open()
        two = kit.barrier(2)
        bench.put(0, kit.barrier(1), two).put(1, two).run()
        assert bench.host.declined == [(1, "CHECKPOINT_DECLINED_SUBSUMED")]
        assert bench.out.elements == [CancelCheckpoint(1), two]
        assert bench.host.snapshot_ids == [2]

    def test_error_in_the_snapshot_of_an_operator_fails_the_step(self, kit: TaskKit) -> None:
        bench = kit.Bench().open()
        bench.head.raises_in.add("snapshot")
        with pytest.raises(RuntimeError, match="snapshot of op0"):
            bench.put(0, kit.barrier(1)).run()
        assert bench.host.snapshots == []


class TestTrigger:
    def test_a_source_snapshots_at_once(self, kit: TaskKit) -> None:
        bench = kit.Bench(source=[kit.rows(1)]).open()
        one = kit.barrier(1)
        bench.run()
        bench.mail(lambda: bench.subtask.trigger_checkpoint(one)).run()
        assert bench.out.elements == [[1], one]
        assert bench.host.snapshot_ids == [1]

    def test_trigger_reaches_a_source_without_output_room_once(self, kit: TaskKit) -> None:
        bench = kit.Bench(source=[], capacity=0).open()
        bench.mail(lambda: bench.subtask.trigger_checkpoint(kit.barrier(1))).run()
        assert bench.host.snapshot_ids == [1]
        bench = kit.Bench(source=[]).open()
        bench.subtask.trigger_checkpoint(kit.barrier(1))
        bench.subtask.trigger_checkpoint(kit.barrier(1))
        assert bench.host.snapshot_ids == [1]

    @pytest.mark.parametrize("ended", [False, True])
    def test_a_subtask_that_does_not_run_declines(self, kit: TaskKit, ended: bool) -> None:
        bench = kit.Bench(source=[])
        if ended:
            bench.open().subtask.cancel()
        bench.subtask.trigger_checkpoint(kit.barrier(1))
        assert bench.host.declined == [(1, "CHECKPOINT_DECLINED_TASK_NOT_READY")]

    @pytest.mark.row("147.1")
    def test_subtask_whose_inputs_have_ended_takes_its_snapshot_on_the_trigger(self, kit: TaskKit) -> None:
        bench = kit.Bench(channels=2).open()
        for channel in range(2):
            bench.put(channel, EndOfData(True), EndOfPartition())
        bench.run()
        bench.subtask.trigger_checkpoint(kit.barrier(1))
        assert bench.host.snapshot_ids == [1]

    def test_subtask_whose_inputs_are_ending_waits_for_their_ends(self, kit: TaskKit) -> None:
        """Its predecessors have finished, but what they sent at last may still be on its way."""
        bench = kit.Bench(channels=2).open()
        bench.put(0, EndOfData(True), EndOfPartition()).run()
        bench.subtask.trigger_checkpoint(kit.barrier(1))
        assert bench.host.snapshot_ids == []
        bench.put(1, kit.rows(5), EndOfData(True), EndOfPartition()).run()
        assert bench.host.snapshot_ids == [1]
        assert bench.out.elements[0] == [5]


class TestAbort:
    def test_a_cancel_barrier_unblocks_declines_and_is_forwarded(self, kit: TaskKit) -> None:
        bench = kit.Bench(channels=2).open()
        bench.put(0, kit.barrier(1), kit.rows(10)).put(1, CancelCheckpoint(1)).run()
        assert bench.host.declined == [(1, "CHECKPOINT_DECLINED_ON_CANCELLATION_BARRIER")]
        assert bench.out.elements == [CancelCheckpoint(1), [10]]
        assert bench.host.snapshots == []

    def test_abort_notifies_the_operators_behind_a_lost_completion(self, kit: TaskKit) -> None:
        bench = kit.Bench().open()
        bench.subtask.notify_aborted(3, 2)
        assert bench.calls == [("op0", "complete", 2), ("op0", "aborted", 3)]
        bench = kit.Bench().open()
        bench.put(0, kit.barrier(1)).run()
        bench.subtask.notify_aborted(1, None)
        assert bench.called("aborted") == [(1,)]

    def test_a_subtask_that_has_ended_hears_nothing(self, kit: TaskKit) -> None:
        bench = kit.Bench().open()
        bench.subtask.cancel()
        bench.calls.clear()
        bench.subtask.notify_aborted(1, 0)
        bench.subtask.notify_complete(1)
        assert bench.calls == []


class TestEndOfData:
    def test_operators_do_not_finish_if_one_channel_ended_without_drain(self, kit: TaskKit) -> None:
        bench = kit.Bench(channels=2).open()
        bench.put(0, EndOfData(True)).put(1, EndOfData(False)).run()
        assert bench.called("finish") == []
        assert bench.out.elements == [EndOfData(False)]

    def test_subtask_stays_until_a_later_checkpoint_is_complete(self, kit: TaskKit) -> None:
        bench = kit.Bench().open()
        two = kit.barrier(2)
        bench.put(0, kit.barrier(1), EndOfData(True)).run()
        bench.subtask.notify_complete(1)
        assert bench.host.states == []
        bench.put(0, two, EndOfPartition()).run()
        bench.subtask.notify_complete(2)
        assert bench.host.states == ["FINISHED"]
        assert bench.called("complete") == [(1,), (2,)]
        assert bench.out.elements[-2:] == [two, EndOfPartition()]
        assert bench.called("close") == [()]

    def test_subtask_never_ends_before_its_inputs(self, kit: TaskKit) -> None:
        """Otherwise a checkpoint could have it finished and its senders running, which no job could restore."""
        bench = kit.Bench(channels=2).open()
        for channel in range(2):
            bench.put(channel, EndOfData(True), kit.barrier(1))
        bench.put(0, EndOfPartition()).run()
        bench.subtask.notify_complete(1)
        assert bench.called("complete") == [(1,)]
        bench.put(1, kit.barrier(2)).run()
        assert bench.host.snapshot_ids == [1, 2]
        assert bench.host.states == []
        bench.put(1, EndOfPartition()).run()
        assert bench.host.states == ["FINISHED"]

    def test_a_later_completion_covers_the_final_checkpoint(self, kit: TaskKit) -> None:
        bench = kit.Bench().open()
        bench.put(0, EndOfData(True), kit.barrier(2), kit.barrier(3), EndOfPartition()).run()
        bench.subtask.notify_aborted(2, None)
        assert bench.host.states == []
        bench.subtask.notify_complete(3)
        assert bench.host.states == ["FINISHED"]

    @pytest.mark.row("147.2")
    def test_middle_one_of_three_pending_checkpoints_ends_the_subtask(self, kit: TaskKit) -> None:
        """Whatever is notified first ends it; what comes later finds nothing to do."""
        bench = kit.Bench().open()
        bench.put(0, kit.rows(1), EndOfData(True), kit.barrier(42), kit.barrier(43), kit.barrier(44))
        bench.put(0, EndOfPartition()).run()
        assert bench.host.snapshot_ids == [42, 43, 44]
        assert bench.subtask.state is TaskState.RUNNING
        bench.subtask.notify_complete(43)
        assert bench.subtask.state is TaskState.FINISHED
        calls = [call[1:] for call in bench.calls if call[1] in ("complete", "close")]
        assert calls == [("complete", 43), ("close",)]
        for late in (42, 44):
            bench.subtask.notify_complete(late)
            bench.subtask.notify_aborted(late, None)
        assert [call[1:] for call in bench.calls if call[1] in ("complete", "close", "abort")] == calls
        assert bench.out.elements[-1] == EndOfPartition()

    @pytest.mark.row("147.7")
    def test_sink_may_open_transactions_after_its_finish(self, kit: TaskKit) -> None:
        """42 and 43 are committed, 44 is aborted when the subtask closes; that 44 completes later harms nothing."""
        bench = kit.Bench().open()
        sink = bench.head
        transactions: dict[int, str] = {}
        current = [42]

        def snapshot() -> None:
            transactions[current[0]] = "pending"
            current[0] += 1
            transactions[current[0]] = "open"

        def complete() -> None:
            for number in [n for n in transactions if n <= bench.called("complete")[-1][0]]:
                transactions[number] = "committed"

        def close() -> None:
            for number in [n for n in transactions if transactions[n] != "committed"]:
                transactions[number] = "aborted"

        sink.at |= {"snapshot": snapshot, "complete": complete, "close": close}
        bench.put(0, kit.rows(1), EndOfData(True), kit.barrier(42), kit.barrier(43), kit.barrier(44))
        bench.put(0, EndOfPartition()).run()
        assert bench.called("finish") == [()]
        assert transactions == {42: "pending", 43: "pending", 44: "pending", 45: "open"}
        bench.subtask.notify_complete(43)
        ended = {42: "committed", 43: "committed", 44: "aborted", 45: "aborted"}
        assert (bench.subtask.state, transactions) == (TaskState.FINISHED, ended)
        bench.subtask.notify_complete(44)
        assert (bench.host.errors, transactions) == ([], ended)

    def test_abort_that_applies_the_lost_final_completion_ends_the_subtask(self, kit: TaskKit) -> None:
        bench = kit.Bench().open()
        bench.put(0, EndOfData(True), kit.barrier(2), EndOfPartition()).run()
        bench.subtask.notify_aborted(3, 2)
        assert bench.host.states == ["FINISHED"]
        assert bench.called("aborted") == []

    def test_an_ended_source_still_answers_triggers(self, kit: TaskKit) -> None:
        bench = kit.Bench(source=[SourceStatus.END_OF_INPUT]).open()
        bench.run()
        bench.mail(lambda: bench.subtask.trigger_checkpoint(kit.barrier(1))).run()
        bench.mail(lambda: bench.subtask.notify_complete(1)).run()
        assert bench.host.states == ["FINISHED"]
        assert bench.host.ends_of_data == 1

    def test_a_close_that_fails_after_the_final_checkpoint_fails_the_subtask(self, kit: TaskKit) -> None:
        bench = kit.Bench(source=[SourceStatus.END_OF_INPUT]).open()
        bench.run()
        bench.subtask.trigger_checkpoint(kit.barrier(1))
        bench.head.raises_in.add("close")
        bench.subtask.notify_complete(1)
        assert bench.host.states == ["FAILED"]
        assert str(bench.host.errors[0]) == "close of op0"

    def test_a_commit_that_fails_is_raised(self, kit: TaskKit) -> None:
        bench = kit.Bench(source=[SourceStatus.END_OF_INPUT]).open()
        bench.run()
        bench.subtask.trigger_checkpoint(kit.barrier(1))
        bench.head.raises_in.add("complete")
        with pytest.raises(RuntimeError, match="complete of op0"):
            bench.subtask.notify_complete(1)
        assert bench.host.states == []


class TestNoFinalCheckpoint:
    """FLIP-147: a subtask whose operators all need none."""

    def bench(self, kit: TaskKit, *needs: bool, **more: Any) -> Any:
        bench = kit.Bench(operators=len(needs), **more)
        for operator, need in zip(bench.operators, needs, strict=True):
            operator.requires_final_checkpoint = need
        return bench.open()

    @pytest.mark.row("147.3")
    def test_subtask_without_final_checkpoint_ends_with_its_data(self, kit: TaskKit) -> None:
        bench = self.bench(kit, False, False, source=[kit.rows(1), SourceStatus.END_OF_INPUT]).run()
        assert bench.host.states == ["FINISHED"]
        assert bench.host.waits is False
        assert bench.called("finish") == bench.called("close") == [(), ()]
        assert bench.out.elements == [[1], Watermark(MAX_WATERMARK), EndOfData(True), EndOfPartition()]

    @pytest.mark.row("147.3")
    def test_one_operator_that_needs_a_final_checkpoint_makes_the_subtask_wait(self, kit: TaskKit) -> None:
        bench = self.bench(kit, False, True, source=[SourceStatus.END_OF_INPUT]).run()
        assert (bench.host.states, bench.host.waits) == ([], True)

    @pytest.mark.row("147.3")
    def test_subtask_without_final_checkpoint_ends_after_its_inputs(self, kit: TaskKit) -> None:
        bench = self.bench(kit, False, channels=2)
        bench.put(0, EndOfData(True), EndOfPartition()).put(1, EndOfData(True)).run()
        assert (bench.host.states, bench.host.waits) == ([], False)
        bench.put(1, kit.barrier(1)).run()
        bench.subtask.snapshot_written(1)
        bench.put(1, EndOfPartition()).run()
        assert bench.host.states == ["FINISHED"]

    @pytest.mark.row("147.3")
    @pytest.mark.parametrize("how", ["written", "aborted", "completed"])
    def test_a_checkpoint_that_needs_its_snapshot_has_it_first(self, kit: TaskKit, how: str) -> None:
        bench = self.bench(kit, False)
        bench.put(0, kit.rows(1), kit.barrier(1), EndOfData(True), EndOfPartition()).run()
        assert (bench.host.snapshot_ids, bench.host.states) == ([1], [])
        assert not bench.subtask.has_work
        match how:
            case "written":
                bench.subtask.snapshot_written(1)
            case "aborted":
                bench.subtask.notify_aborted(1, None)
            case "completed":
                bench.subtask.notify_complete(1)
        bench.run()
        assert bench.host.states == ["FINISHED"]

    @pytest.mark.row("147.3")
    def test_subtask_that_waits_for_its_output_takes_part_in_checkpoints(self, kit: TaskKit) -> None:
        wire = kit.Wire()
        bench = self.bench(kit, False, wires=[wire], channels=1)
        two = kit.unaligned(2, timeout_ms=60_000)
        bench.put(0, kit.rows(1), two, EndOfData(True), EndOfPartition()).run()
        assert (bench.host.snapshot_ids, bench.host.states) == ([], [])
        wire.grant(1)
        bench.run()
        assert (bench.host.snapshot_ids, bench.host.states) == ([2], [])
        bench.subtask.snapshot_written(2)
        bench.run()
        assert bench.host.states == ["FINISHED"]

    @pytest.mark.row("147.3", "147.5")
    @pytest.mark.parametrize("drain", [True, False])
    def test_subtask_without_final_checkpoint_waits_for_the_savepoint_of_a_stop(
        self, kit: TaskKit, drain: bool
    ) -> None:
        """If it were gone when the savepoint fails, the job could not continue."""
        bench = self.bench(kit, False, source=[kit.rows(1)])
        bench.subtask.trigger_checkpoint(kit.barrier(4, CheckpointType.SYNC_SAVEPOINT, drain=drain))
        bench.subtask.snapshot_written(4)
        bench.run()
        assert (bench.host.states, bench.host.waits) == ([], True)
        bench.subtask.notify_complete(4)
        assert bench.host.states == ["FINISHED"]

    @pytest.mark.row("147.3")
    def test_subtask_after_sources_stopped_without_drain_waits_for_the_savepoint(self, kit: TaskKit) -> None:
        bench = self.bench(kit, False)
        bench.put(0, EndOfData(False), EndOfPartition()).run()
        assert (bench.host.states, bench.host.waits) == ([], True)

    @pytest.mark.row("147.7")
    def test_subtasks_end_with_the_last_checkpoint_if_checkpoints_stop_at_the_first_end(self, kit: TaskKit) -> None:
        bench = kit.Bench()
        bench.head.requires_final_checkpoint = False
        bench.subtask.checkpoints.end_with_all = True
        bench.open().put(0, EndOfData(True), kit.barrier(1), EndOfPartition()).run()
        bench.subtask.notify_complete(1)
        assert (bench.host.states, bench.host.waits) == ([], True)
        last = replace(kit.barrier(2).options, final=True)
        bench.subtask.trigger_checkpoint(CheckpointBarrier(2, 0, last))
        bench.subtask.notify_complete(2)
        assert bench.host.states == ["FINISHED"]


class TestSynchronousSavepoint:
    @pytest.mark.parametrize("drain", [True, False])
    def test_a_source_ends_its_data_before_the_barrier_and_itself_afterwards(self, kit: TaskKit, drain: bool) -> None:
        bench = kit.Bench(source=[kit.rows(1), kit.rows(2)]).open()
        bench.subtask.step()
        savepoint = kit.barrier(4, CheckpointType.SYNC_SAVEPOINT, drain=drain)
        bench.mail(lambda: bench.subtask.trigger_checkpoint(savepoint)).run()
        ended = [Watermark(MAX_WATERMARK), EndOfData(True)] if drain else [EndOfData(False)]
        assert bench.out.elements == [[1], *ended, savepoint]
        assert bench.called("finish") == ([()] if drain else [])
        assert bench.host.snapshot_ids == [4]
        bench.subtask.notify_complete(4)
        assert bench.host.states == ["FINISHED"]
        assert bench.out.elements[-1] == EndOfPartition()

    def test_a_source_that_has_ended_does_not_end_twice(self, kit: TaskKit) -> None:
        bench = kit.Bench(source=[SourceStatus.END_OF_INPUT]).open()
        bench.run()
        bench.subtask.trigger_checkpoint(kit.barrier(4, CheckpointType.SYNC_SAVEPOINT))
        assert bench.host.ends_of_data == 1
        assert bench.out.elements.count(EndOfData(True)) == 1

    def test_downstream_ends_with_its_inputs_and_waits_for_the_completion(self, kit: TaskKit) -> None:
        bench = kit.Bench(channels=2).open()
        savepoint = kit.barrier(4, CheckpointType.SYNC_SAVEPOINT)
        for channel in range(2):
            bench.put(channel, EndOfData(False), savepoint, EndOfPartition())
        bench.run()
        assert bench.out.elements == [EndOfData(False), savepoint]
        assert bench.called("finish") == []
        bench.subtask.notify_complete(4)
        assert bench.host.states == ["FINISHED"]
