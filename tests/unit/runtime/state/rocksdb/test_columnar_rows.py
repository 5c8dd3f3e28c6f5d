"""Buffered rows on RocksDB beside those in memory: what every snapshot holds, and what it has to write for that."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.backend import BackendParameters, KeyedStateBackend
from ckpt_runtime.state.errors import CorruptStateError, StateSchemaError
from ckpt_runtime.state.kernels.compiler import read_only
from ckpt_runtime.state.memory import row_buffer
from ckpt_runtime.state.memory.row_buffer import RowBuffers
from ckpt_runtime.state.registry import create_backend
from ckpt_runtime.state.rocksdb.columnar_rows import ChunkCodec
from ckpt_runtime.state.rocksdb.database import Database
from ckpt_runtime.state.states import RowBufferSpec
from tests.support.inline_snapshots import CHECKPOINT, restore, written

SCHEMA = pa.schema([("k", pa.string()), ("t", pa.timestamp("ms")), ("v", pa.list_(pa.int64()))])
LEFT = RowBufferSpec("left", SCHEMA, ("k",), "t")
RIGHT = RowBufferSpec("right", SCHEMA, ("k",), "t", keeps_matched=False)
SPECS = [LEFT, RIGHT]


Make = Callable[..., KeyedStateBackend]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Backends, which are closed in the end."""
    all_made: list[KeyedStateBackend] = []

    def made(name: str = "rocksdb", first: int = 0, last: int = 127) -> KeyedStateBackend:
        groups = KeyGroupRange(first, last)
        parameters = BackendParameters("op", groups, 128, lambda: tempfile.mkdtemp(dir=tmp_path))
        all_made.append(create_backend(name, parameters))
        return all_made[-1]

    yield made
    for backend in all_made:
        backend.close()


def batch_of(choice: Random, number: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [{"k": f"key-{choice.randrange(9)}", "t": choice.randrange(1000), "v": [number, row]} for row in range(8)],
        SCHEMA,
    )


def content(buffers: RowBuffers) -> list[dict[Any, list[Any]]]:
    """Of each side, by key: its rows in order, with whether they have matched."""
    found = []
    for side in buffers.sides:
        by_key: dict[Any, list[Any]] = {}
        for batch, matched in side.living():
            for row, flag in zip(batch.to_pylist(), matched.tolist(), strict=True):
                by_key.setdefault(row["k"], []).append((row["t"], row["v"], flag))
        found.append(by_key)
    return found


def act(buffers: RowBuffers, choice: Random, number: int) -> None:
    """Rows come, match, end by time, are taken out of memory, or are all taken at once."""
    side = buffers.sides[choice.randrange(2)]
    batch = batch_of(choice, number)
    slots = buffers.slots_of([batch["k"]])
    found = np.zeros(batch.num_rows, dtype=np.uint8)
    action = choice.random()
    if action < 0.2:
        list(side.matches(slots, side.times_of(batch), -200, 200, found))
    elif action < 0.3:
        side.expire(choice.randrange(500))
    elif action < 0.35:
        buffers.take_all()
    else:
        side.append(batch, slots, read_only(found + number % 2))
    buffers.compact_if_due()


@pytest.mark.parametrize("seed", range(4))
def test_every_snapshot_holds_what_memory_holds(seed: int, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_buffer, "_SPARE_ROWS", 0)
    ours, other = make(), make("hashmap")
    buffers, model = ours.row_buffers(SPECS), other.row_buffers(SPECS)
    assert isinstance(buffers, RowBuffers)
    assert isinstance(model, RowBuffers)
    choice, same, picks = Random(seed), Random(seed), Random(seed)
    late: list[tuple[Any, Any]] = []
    for number in range(60):
        for _ in range(4):
            act(buffers, choice, number)
            act(model, same, number)
        assert content(buffers) == content(model)
        late.append((ours.snapshot(number, CHECKPOINT), content(model)))
        if number % 7 == 6:
            snapshot, expected = late.pop(picks.randrange(len(late)))
            handles = written(snapshot)
            halves = [make(first=0, last=50), make(first=51, last=127)]
            for half in halves:
                restore(half, handles)
            whole = make()
            restore(whole, [handle for half in halves for handle in written(half.snapshot(1, CHECKPOINT))])
            restored = whole.row_buffers(SPECS)
            assert isinstance(restored, RowBuffers)
            assert content(restored) == expected
            if number % 2:
                for each, _ in late:
                    each.release()
                late.clear()
                ours, buffers = whole, restored
                model = make("hashmap").row_buffers(SPECS)
                assert isinstance(model, RowBuffers)
                for side, mirror in zip(restored.sides, model.sides, strict=True):
                    for batch, matched in side.living():
                        mirror.append(batch, model.slots_of([batch["k"]]), matched)


def changes(backend: KeyedStateBackend, monkeypatch: pytest.MonkeyPatch) -> tuple[list[bytes], list[bytes]]:
    """The keys that a snapshot sets and removes."""
    puts: list[bytes] = []
    deletes: list[bytes] = []
    original = Database.freeze

    def freeze(self: Database, parts: Any) -> Any:
        for part in parts:
            puts.extend(key for key, _ in part.puts())
            deletes.extend(part.deletes())
        return original(self, parts)

    with monkeypatch.context() as patch:
        patch.setattr(Database, "freeze", freeze)
        backend.snapshot(1, CHECKPOINT).release()
    return puts, deletes


def test_a_snapshot_writes_what_has_changed_alone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make()
    buffers: Any = backend.row_buffers([LEFT])
    [side] = buffers.sides
    rows = [{"k": "a", "t": time, "v": None} for time in range(8)]
    batch = pa.RecordBatch.from_pylist(rows, SCHEMA)
    side.append(batch, buffers.slots_of([batch["k"]]), read_only(np.zeros(8, dtype=np.uint8)))
    ([key], deleted) = changes(backend, monkeypatch)
    flags = key[:-1] + b"\1"
    assert not deleted
    assert changes(backend, monkeypatch) == ([], [])
    side.expire(1)
    assert changes(backend, monkeypatch) == ([flags], [])
    side.expire(5)
    assert changes(backend, monkeypatch) == ([key], [flags])
    side.expire(6)
    assert changes(backend, monkeypatch) == ([flags], [])
    side.expire(7)
    assert changes(backend, monkeypatch) == ([], [key, flags])


def test_a_chunk_that_was_written_anew_takes_flags_after_a_restore(make: Make) -> None:
    backend = make()
    buffers: Any = backend.row_buffers([LEFT])
    batch = pa.RecordBatch.from_pylist([{"k": "a", "t": time, "v": None} for time in range(8)], SCHEMA)
    buffers.sides[0].append(batch, buffers.slots_of([batch["k"]]), read_only(np.zeros(8, dtype=np.uint8)))
    for bound, living in ((-1, 8), (4, 3), (5, 2)):
        buffers.sides[0].expire(bound)
        handles = written(backend.snapshot(1, CHECKPOINT))
        backend = make()
        restore(backend, handles)
        buffers = backend.row_buffers([LEFT])
        assert content(buffers) == [{"a": [(row["t"], None, 0) for row in batch.to_pylist()[8 - living :]]}]


def test_other_ends_of_rows_are_refused(make: Make) -> None:
    backend = make()
    backend.row_buffers([LEFT])
    handles = written(backend.snapshot(1, CHECKPOINT))
    again = make()
    restore(again, handles)
    with pytest.raises(StateSchemaError, match="state 'left' of operator 'op': its rows end otherwise"):
        again.row_buffers([RowBufferSpec("left", SCHEMA, ("k",))])


def test_damaged_chunks_are_errors() -> None:
    schema = pa.schema([("key.k", pa.string()), ("matched", pa.bool_())])
    codec = ChunkCodec("s", 1, {0: schema}, 0)
    rows = pa.record_batch([["a", "b"], [True, False]], schema=schema)
    key, flags_key = codec.keys(3, 7)
    value = codec.encode_rows(rows, np.arange(2, dtype=np.uint32))
    [(number, found, _, _)] = codec.decode([(key, value)])
    assert (number, found) == (7, rows)
    for length in (*range(0, len(value) - 8, 7), len(value) - 8):
        with pytest.raises(CorruptStateError):
            list(codec.decode([(key, value[:length])]))
    flags = codec.encode_flags(np.ones(2, dtype=np.uint8))
    for entries in ([(flags_key, flags)], [(key, value), (codec.keys(3, 8)[1], flags)], [(key, value), (key, b"\0\1")]):
        with pytest.raises(CorruptStateError):
            list(codec.decode(entries))
    with pytest.raises(CorruptStateError, match="a chunk of rows with 1 flags"):
        list(codec.decode([(key, value), (flags_key, flags[:-1])]))
