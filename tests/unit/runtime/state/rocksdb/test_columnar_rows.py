"""Buffered rows on RocksDB beside those in memory: what every snapshot holds, and what it has to write for that."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.operators.operator import MAX_WATERMARK
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.backend import BackendParameters, KeyedStateBackend
from ckpt_runtime.state.errors import CorruptStateError, StateSchemaError
from ckpt_runtime.state.memory import row_buffer
from ckpt_runtime.state.memory.row_buffer import RowBuffers
from ckpt_runtime.state.registry import create_backend
from ckpt_runtime.state.rocksdb.columnar_rows import ChunkCodec
from ckpt_runtime.state.rocksdb.database import Database
from ckpt_runtime.state.rocksdb.row_runs import RunCodec
from ckpt_runtime.state.rocksdb.stored_row_buffers import StoredRowBuffer
from ckpt_runtime.state.states import RowBufferSpec
from tests.support.effort import THOROUGH
from tests.support.inline_snapshots import CANONICAL, CHECKPOINT, restore, written
from tests.support.joins import LEFT as LEFT_SIDE
from tests.support.joins import RIGHT as RIGHT_SIDE
from tests.support.joins import JoinJob, join_spec, text

SCHEMA = pa.schema([("k", pa.string()), ("t", pa.timestamp("ms")), ("v", pa.list_(pa.int64()))])
LEFT = RowBufferSpec("left", SCHEMA, ("k",), "t")
RIGHT = RowBufferSpec("right", SCHEMA, ("k",), "t", keeps_matched=False)
SPECS = [LEFT, RIGHT]
PLAIN = pa.schema([("k", pa.string()), ("t", pa.timestamp("ms")), ("v", pa.binary())])
"""Another form in the database."""
PLAIN_SPECS = [RowBufferSpec(spec.name, PLAIN, spec.keys, "t", spec.keeps_matched) for spec in SPECS]


Make = Callable[..., KeyedStateBackend]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Backends, which are closed in the end."""
    all_made: list[KeyedStateBackend] = []

    def made(name: str = "rocksdb", first: int = 0, last: int = 127, rows: int = 1000) -> KeyedStateBackend:
        groups = KeyGroupRange(first, last)
        options = {"state.backend.rocksdb.cache.max-rows": str(rows)}
        parameters = BackendParameters("op", groups, 128, lambda: tempfile.mkdtemp(dir=tmp_path), options)
        all_made.append(create_backend(name, parameters))
        return all_made[-1]

    yield made
    for backend in all_made:
        backend.close()


def batch_of(choice: Random, number: int, schema: pa.Schema = SCHEMA) -> pa.RecordBatch:
    rows = [{"k": f"key-{choice.randrange(9)}", "t": choice.randrange(1000), "v": [number, row]} for row in range(8)]
    if schema is PLAIN:
        rows = [{**row, "v": str(row["v"]).encode()} for row in rows]
    return pa.RecordBatch.from_pylist(rows, schema)


def content(buffers: RowBuffers) -> list[dict[Any, list[Any]]]:
    """Of each side, by key: its rows in order, with whether they have matched."""
    found = []
    for side in buffers.sides:
        by_key: dict[Any, list[Any]] = {}
        for batch, matched in [*side.living(), *spilled(side)]:
            for row, flag in zip(batch.to_pylist(), matched.tolist(), strict=True):
                by_key.setdefault(row["k"], []).append((row["t"], row["v"], flag))
        found.append(by_key)
        assert sum(map(len, by_key.values())) == len(side)
    return found


def spilled(side: Any) -> list[Any]:
    """What is not in memory."""
    if not isinstance(side, StoredRowBuffer):
        return []
    rows = side.spilled
    entries = [
        e for g in range(len(rows._counts)) for e in rows._database.scan(rows._codec.runs_prefix(rows._first + g))
    ]
    runs = [run for key, run in entries if not rows._is_gone(key)]
    return [side.loaded(stored) for _, stored in rows._codec.decode(runs)]


def act(buffers: RowBuffers, choice: Random, number: int) -> None:
    """Rows come, match, end by time, are taken out of memory, or are all taken at once."""
    side = buffers.sides[choice.randrange(2)]
    batch = batch_of(choice, number, side.spec.schema)
    slots = buffers.slots_of([batch["k"]])
    found = np.zeros(batch.num_rows, dtype=np.uint8)
    action = choice.random()
    if action < 0.2:
        list(side.matches(slots, side.times_of(batch), -200, 200, found))
    elif action < 0.3:
        for rows in side.expired(choice.randrange(500)):
            side.take(rows, range(3))
    elif action < 0.35:
        buffers.take_all()
    else:
        side.append(batch, slots, read_only(found + number % 2))
    buffers.compact_if_due()


@pytest.mark.parametrize(("specs", "rows"), [(SPECS, 1000), (SPECS, 10), (PLAIN_SPECS, 10), (PLAIN_SPECS, 60)])
@pytest.mark.parametrize("seed", range(2 if THOROUGH else 1))
def test_every_snapshot_holds_what_memory_holds(
    seed: int, specs: list[RowBufferSpec], rows: int, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``rows`` in memory, and others than these in the database."""
    monkeypatch.setattr(row_buffer, "_SPARE_ROWS", 0)
    ours, other = make(rows=rows), make("hashmap")
    buffers, model = ours.row_buffers(specs), other.row_buffers(specs)
    assert isinstance(buffers, RowBuffers)
    assert isinstance(model, RowBuffers)
    choice, same, picks = Random(seed), Random(seed), Random(seed)
    late: list[tuple[Any, Any]] = []
    for number in range(40 if THOROUGH else 21):
        for _ in range(4):
            act(buffers, choice, number)
            act(model, same, number)
        assert content(buffers) == content(model)
        late.append((ours.snapshot(number, CHECKPOINT), content(model)))
        if number % 7 == 6:
            snapshot, expected = late.pop(picks.randrange(len(late)))
            handles = written(snapshot)
            halves = [make(first=0, last=50), make(first=51, last=127, rows=rows)]
            for half in halves:
                restore(half, handles)
            halves[1].row_buffers(specs)
            whole = make(rows=rows)
            properties = picks.choice([CHECKPOINT, CANONICAL])
            restore(whole, [handle for half in halves for handle in written(half.snapshot(1, properties))])
            restored = whole.row_buffers(specs)
            assert isinstance(restored, RowBuffers)
            assert content(restored) == expected
            if number % 2:
                for each, _ in late:
                    each.release()
                late.clear()
                ours, buffers = whole, restored
                model = make("hashmap").row_buffers(specs)
                assert isinstance(model, RowBuffers)
                for side, mirror in zip(restored.sides, model.sides, strict=True):
                    for batch, matched in [*side.living(), *spilled(side)]:
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


def test_snapshot_writes_changed_rows_only(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_rewritten_chunk_accepts_flags_after_a_restore(make: Make) -> None:
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
    with pytest.raises(StateSchemaError, match="state 'left' of operator 'op': its rows end at an unexpected position"):
        again.row_buffers([RowBufferSpec("left", SCHEMA, ("k",))])


def test_a_join_keeps_several_times_the_rows_that_memory_has_room_for() -> None:
    """Outer, so that every row comes out, in pairs or when it ends; the same as from a backend with room for all."""
    spec = join_spec("full_outer", (-400, 400))
    most = 0
    with closing(JoinJob(spec, 2, "rocksdb", 600)) as job, closing(JoinJob(spec, 1)) as model:
        choice = Random(1)
        for number in range(24):
            for side, name in ((LEFT_SIDE, "l"), (RIGHT_SIDE, "r")):
                keys = choice.sample(range(6_000), 400)
                rows = [{"k": key, f"{name}t": 20 * number + choice.randrange(20), name: key} for key in keys]
                assert Counter(map(text, job.process(side, rows))) == Counter(map(text, model.process(side, rows)))
            if number % 4 == 3:
                ended = [Counter(map(text, each.watermark(20 * number))) for each in (job, model)]
                assert ended[0] == ended[1]
            if number == 12:
                job.rescale(3)
            assert job.living == model.living
            for subtask in job.subtasks:
                at_hand = sum(side.at_hand for side in subtask.operator._buffers.sides)  # type: ignore[attr-defined]
                assert at_hand <= 600
            most = max(most, sum(job.living))
        rest = [Counter(map(text, each.watermark(MAX_WATERMARK))) for each in (job, model)]
        assert rest[0] == rest[1]
        assert job.living == model.living == (0, 0)
    assert most > 5 * 2 * 600


def test_damaged_runs_are_errors() -> None:
    for schema, value in (
        (pa.schema([("key.k", pa.string()), ("matched", pa.bool_())]), None),
        (pa.schema([("key.k", pa.string()), ("value.v", pa.list_(pa.int8())), ("matched", pa.bool_())]), [1, 2]),
    ):
        codec = RunCodec("s", 1, {0: schema}, 0, KeyGroupRange(0, 127), 128)
        matched = [True, False, False]
        columns = [["a", "a", "b"], *([[value] * 3] if value else []), matched]
        rows = pa.record_batch(columns, schema=schema)
        runs = list(codec.encode(rows, np.array([0, 2]), np.array([5, -6])))
        [(places, found)] = codec.decode(runs)
        assert (places.tolist(), found) == ([0, 0, 1], rows)
        assert [codec.size(run) for run in runs] == [(5, 2), (-6, 1)]
        _, keys = codec.keys([pa.array(["a", "b"])])
        assert codec.key_columns(keys)[0].to_pylist() == ["a", "b"]
        assert [codec.found_by_time(codec.time_key(key, -6)) for key in keys] == [(-6, key) for key in keys]
        for length in (*range(0, len(runs[0]) - 8, 3), len(runs[0]) - 8):
            with pytest.raises(CorruptStateError):
                list(codec.decode([runs[0][:length]]))
        with pytest.raises(CorruptStateError, match="unknown schema 1"):
            list(codec.decode([b"\0\1" + runs[0][2:]]))


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
