"""Operators of one subtask: order of calls, what one emits reaches the next, and closing whatever happens."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.expressions.dictionaries import BatchDecoder
from ckpt_runtime.graph.job_graph import Partitioning
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.network.elements import Watermark
from ckpt_runtime.state.memory.backend import MemoryKeyedStateBackend
from ckpt_runtime.task.chain import ChainEnd, OperatorChain
from ckpt_runtime.task.output import BufferLimits, ResultPartition
from tests.unit.runtime.task.conftest import TaskKit


def forward(out: Any, timeout_ms: int = 0, now: Any = lambda: 0.0) -> ResultPartition:
    return ResultPartition(
        Partitioning.FORWARD, (), 128, [out], limits=BufferLimits(100, 1 << 20, timeout_ms), now_ms=now,
    )  # fmt: skip


def test_chain_opens_from_its_tail_so_that_operators_may_emit(kit: TaskKit) -> None:
    bench = kit.Bench(operators=3)
    bench.head.at["open"] = lambda: bench.head.output.emit(kit.rows(1))
    bench.subtask.open()
    assert [call[:2] for call in bench.calls] == [
        ("op2", "open"), ("op1", "open"), ("op0", "open"), ("op1", "batch"), ("op2", "batch"),
    ]  # fmt: skip
    assert bench.out.elements == [[1]]


def test_rows_and_watermarks_run_through(kit: TaskKit) -> None:
    bench = kit.Bench(operators=2).open()
    bench.chain.head.process_batch(kit.rows(1, 2), 0)
    bench.chain.head.process_watermark(9)
    bench.chain.end.flush_due(0)
    assert bench.calls == [
        ("op0", "batch", 0, [1, 2]), ("op1", "batch", 0, [1, 2]),
        ("op0", "watermark", 9), ("op1", "watermark", 9),
    ]  # fmt: skip
    assert bench.out.elements == [[1, 2], Watermark(9)]
    assert bench.chain.end.rows == 2


def test_empty_batches_stop_at_the_operator_that_made_them(kit: TaskKit) -> None:
    bench = kit.Bench(operators=2).open()
    bench.head.output.emit(kit.rows())
    bench.operators[1].output.emit(kit.rows())
    assert bench.calls == []
    assert bench.out.elements == []


def test_rows_emitted_by_finish_reach_later_operators_before_they_finish(kit: TaskKit) -> None:
    bench = kit.Bench(operators=2).open()
    bench.head.at["finish"] = lambda: bench.head.output.emit(kit.rows(7))
    bench.chain.finish()
    assert bench.calls == [("op0", "finish"), ("op1", "batch", 0, [7]), ("op1", "finish")]


def test_dictionaries_stay_for_a_consumer_that_takes_them_and_are_decoded_for_the_others(kit: TaskKit) -> None:
    kept, decoded = kit.Sent(), kit.Sent()
    partitions = [forward(kept), forward(decoded)]
    partitions[0].keeps_dictionaries = True
    batch = pa.record_batch({"s": _dictionary("a", None, "a")})
    ChainEnd(partitions).emit(batch)
    assert kept.batches[0] is batch
    assert decoded.batches[0].schema.types == [pa.string()]


def test_rows_with_dictionaries_go_to_the_owners_of_their_keys_as_plain_rows(kit: TaskKit) -> None:
    nested = pa.StructArray.from_arrays([_dictionary(*"xyxxy", None)], ["n"])
    columns = {"k": _dictionary("a", "b", None, "c", "a", "b"), "s": _dictionary("u", None, *"vuvw"), "c": nested}
    batch = pa.record_batch(columns)
    sent = []
    for given in (batch, BatchDecoder().decoded(batch)):
        outs = [kit.Sent() for _ in range(3)]
        limits = BufferLimits(100, 1 << 20, 0)
        ChainEnd([ResultPartition(Partitioning.HASH, ["k"], 16, outs, limits=limits, now_ms=lambda: 0.0)]).emit(given)
        sent.append([pa.Table.from_batches(out.batches, schema=out.batches[0].schema) for out in outs if out.batches])
    assert len(sent[0]) > 1
    assert sent[0] == sent[1]


def test_large_batches_are_cut_for_the_network_but_not_for_a_consumer_that_gets_them_by_reference(kit: TaskKit) -> None:
    batch = pa.record_batch({"s": ["x" * 100_000] * 60})  # 6 MB, 1 MiB in a buffer
    whole, cut, smaller = kit.Sent(), kit.Sent(), kit.Sent()
    partitions = [forward(out) for out in (whole, cut, smaller)]
    partitions[0].by_reference = partitions[2].by_reference = frozenset({0})
    partitions[2].limit_bytes(0, 1 << 18)  # as the consumer asks, whose queue is too long
    ChainEnd(partitions).emit(batch)
    assert [sent.num_rows for sent in whole.batches] == [60]
    assert max(sent.num_rows for sent in cut.batches) <= 20
    assert max(sent.num_rows for sent in smaller.batches) <= 5
    for out in (cut, smaller):
        assert pa.Table.from_batches(out.batches).equals(pa.Table.from_batches([batch]))
    huge = pa.record_batch({"s": ["x" * 1_000_000] * 60})
    ChainEnd(partitions[:1]).emit(huge)
    assert [sent.num_rows for sent in whole.batches[1:]] == [30, 30]


def test_gathered_batches_with_different_dictionaries_are_sent_as_one_plain_batch(kit: TaskKit) -> None:
    out = kit.Sent()
    partition = forward(out, timeout_ms=1_000)
    partition.keeps_dictionaries = True
    nested = pa.StructArray.from_arrays([_dictionary("x", "y")], ["n"])
    for text in ("a", "b"):
        ChainEnd([partition]).emit(pa.record_batch({"s": _dictionary(text, None), "c": nested}))
    partition.flush()
    (batch,) = out.batches
    assert batch.to_pydict() == {"s": ["a", None, "b", None], "c": [{"n": "x"}, {"n": "y"}] * 2}
    assert "dictionary" not in str(batch.schema)


def _dictionary(*values: str | None) -> pa.Array:
    return pa.array(values).dictionary_encode()


NESTED = {
    "struct": pa.StructArray.from_arrays([_dictionary("a", None, "a"), pa.array([1, 2, 3])], ["x", "y"]),
    "list": pa.ListArray.from_arrays(pa.array([0, None, 2, 3], pa.int32()), _dictionary("a", "b", "a")),
    "large_list": pa.LargeListArray.from_arrays([0, 1, 1, 3], _dictionary("a", "b", None)),
    "fixed_list": pa.FixedSizeListArray.from_arrays(_dictionary("a", "b", "c", "a", "b", None), 2),
    "map": pa.MapArray.from_arrays([0, 1, 1, 2], pa.array(["k", "l"]), _dictionary("a", "a")),
    "deep": pa.ListArray.from_arrays(
        [0, 1, 2, 2], pa.StructArray.from_arrays([pa.ListArray.from_arrays([0, 1, 2], _dictionary("u", "v"))], ["z"])
    ),
    "dictionary_of_structs": pa.DictionaryArray.from_arrays(
        pa.array([0, 1, 0]), pa.StructArray.from_arrays([_dictionary("a", "b")], ["x"])
    ),
}


@pytest.mark.parametrize("kind", NESTED)
def test_dictionaries_inside_of_nested_columns_are_decoded_too(kit: TaskKit, kind: str) -> None:
    out = kit.Sent()
    end = ChainEnd([forward(out)])
    column = NESTED[kind]
    schema = pa.schema([pa.field("c", column.type, nullable=True), pa.field("n", pa.int64(), nullable=False)])
    for _ in range(2):
        end.emit(pa.record_batch([column, pa.array([1, 2, 3])], schema=schema))
    for batch in out.batches:
        assert "dictionary" not in str(batch.schema.field("c").type)
        assert not batch.schema.field("n").nullable
        batch.validate(full=True)
        assert batch.column("c").to_pylist() == column.to_pylist()
        message = batch.serialize()
        assert pa.ipc.read_record_batch(message, batch.schema).equals(batch)


def test_a_change_of_the_schema_is_noticed(kit: TaskKit) -> None:
    out = kit.Sent()
    end = ChainEnd([forward(out)])
    for column in (pa.array(["a"]), _dictionary("b"), pa.array(["c"]), pa.array([1])):
        end.emit(pa.record_batch({"s": column}))
    assert [batch.column("s").to_pylist() for batch in out.batches] == [["a"], ["b"], ["c"], [1]]
    assert [batch.schema.types for batch in out.batches] == [[pa.string()]] * 3 + [[pa.int64()]]


def test_only_partitions_whose_timeout_has_passed_are_flushed(kit: TaskKit) -> None:
    early, late = kit.Sent(), kit.Sent()
    end = ChainEnd([forward(early, 10), forward(late, 50)])
    assert end.next_flush_ms is None
    end.emit(kit.rows(1))
    assert end.next_flush_ms == 10
    end.flush_due(10)
    assert (early.elements, late.elements) == ([[1]], [])
    assert end.next_flush_ms == 50


def test_closing_continues_after_a_failure_and_happens_once(kit: TaskKit) -> None:
    bench = kit.Bench(operators=3).open()
    bench.operators[1].raises_in.add("close")
    errors = bench.chain.close()
    assert [str(error) for error in errors] == ["close of op1"]
    assert bench.calls == [("op2", "close"), ("op1", "close"), ("op0", "close")]
    assert bench.chain.close() == []
    assert len(bench.calls) == 3


def test_operators_after_one_that_failed_to_open_are_closed(kit: TaskKit) -> None:
    bench = kit.Bench(operators=3)
    bench.operators[1].raises_in.add("open")
    with pytest.raises(RuntimeError, match="open of op1"):
        bench.subtask.open()
    bench.calls.clear()
    bench.chain.close()
    assert bench.calls == [("op2", "close"), ("op1", "close")]


def test_keyed_backends_are_closed_with_their_operators(kit: TaskKit, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr(MemoryKeyedStateBackend, "close", lambda self: closed.append(self.uid))
    backend = MemoryKeyedStateBackend(KeyGroupRange(0, 127), 128, "op")
    context = kit.context("op", kit.Host(), lambda _: None, keyed_state=backend)
    chain = OperatorChain([kit.Recorder("op", [])], [context], ChainEnd([]))
    chain.open()
    assert chain.close() == []
    assert closed == ["op"]


def test_keyed_backends_are_notified_of_completed_and_aborted_checkpoints(
    kit: TaskKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[str, int]] = []
    for call in ("notify_complete", "notify_aborted"):
        monkeypatch.setattr(MemoryKeyedStateBackend, call, lambda _, number, call=call: heard.append((call, number)))
    backend = MemoryKeyedStateBackend(KeyGroupRange(0, 127), 128, "op")
    context = kit.context("op", kit.Host(), lambda _: None, keyed_state=backend)
    chain = OperatorChain([kit.Recorder("op", [])], [context], ChainEnd([]))
    chain.notify_complete(4)
    chain.notify_aborted(5)
    assert heard == [("notify_complete", 4), ("notify_aborted", 5)]


def test_a_backend_is_closed_although_its_operator_was_never_opened(
    kit: TaskKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    monkeypatch.setattr(MemoryKeyedStateBackend, "close", lambda self: closed.append(self.uid))
    backend = MemoryKeyedStateBackend(KeyGroupRange(0, 127), 128, "op")
    context = kit.context("op", kit.Host(), lambda _: None, keyed_state=backend)
    chain = OperatorChain([kit.Recorder("op", [])], [context], ChainEnd([]))
    assert [chain.close(), chain.close()] == [[], []]
    assert closed == ["op"]
