"""Increments of the in-memory backend against complete snapshots: every kind of state, through any course of events.

The same backend writes an increment and a complete canonical savepoint of one moment. What is restored from the one has
to be what is restored from the other, whatever was aborted, lost, rescaled or left unused before.
"""

from __future__ import annotations

from collections import defaultdict
from operator import itemgetter
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_runtime.checkpoint.completed_checkpoint import IncrementalKeyedStateHandle, KeyedHandle, KeyedStateHandle
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.checkpoint.statistics import CheckpointType
from ckpt_runtime.graph.key_groups import KeyGroupRange, key_group_range
from ckpt_runtime.state.hashing import hash_arrays, key_groups_of
from ckpt_runtime.state.memory.backend import MemoryKeyedStateBackend
from ckpt_runtime.state.memory.increments import MOST_PARTS
from ckpt_runtime.state.memory.parts import read_block
from ckpt_runtime.state.states import AggregateColumn, RowBufferSpec, TimeToLive
from ckpt_runtime.state.stored_rows import schema_from_json
from tests.support.effort import examples
from tests.support.inline_snapshots import CANONICAL, CHECKPOINT, handles_of, restore, written

GROUPS = 16
KEYS = 24
KEY = pa.schema([("k", pa.int64())])
VALUE = pa.schema([("v", pa.string())])
ROWS = pa.schema([("k", pa.int64()), ("t", pa.timestamp("ms")), ("v", pa.string())])
SIDES = [RowBufferSpec("left", ROWS, ("k",), "t"), RowBufferSpec("right", ROWS, ("k",), "t", keeps_matched=False)]
COLUMNS = RowBufferSpec("columns", pa.schema([("k", pa.int64()), ("n", pa.int64())]), ("k",))
AGGREGATES = [
    AggregateColumn("count", None, "rows", None, pa.int64()),
    AggregateColumn("sum", "n", "total", pa.int64(), pa.int64()),
    AggregateColumn("max", "v", "last", pa.string(), pa.string()),
]
GROUP_OF = key_groups_of(hash_arrays([pa.array(range(KEYS), pa.int64())], ["k"]), GROUPS).tolist()
SAVEPOINT = CheckpointProperties(CheckpointType.SAVEPOINT)
Content = dict[str, dict[str, list[str]]]


class Subtask:
    """A backend whose states are changed at random. Half of them are asked for only by some attempts."""

    def __init__(self, groups: KeyGroupRange, handles: list[KeyedHandle], *, owned: bool, all_states: bool) -> None:
        self.backend = MemoryKeyedStateBackend(groups, GROUPS, "op", incremental=True)
        self.keys = [key for key in range(KEYS) if GROUP_OF[key] in groups]
        if handles:
            restore(self.backend, handles, owned=owned)
        ttl = TimeToLive(1 << 40, lambda: 1)
        self.values = [
            self.backend.value_state("values", KEY, VALUE),
            self.backend.value_state("brief", KEY, VALUE, ttl),
        ]
        self.table = self.backend.aggregate_table("totals", KEY, AGGREGATES)
        self.all_states = all_states
        if all_states:
            self.lists = self.backend.list_state("lists", KEY, VALUE)
            self.maps = self.backend.map_state("maps", KEY, VALUE, VALUE)
            self.timers = self.backend.timers("timers", KEY)
            self.rows = self.backend.row_buffers(SIDES)
            self.columns = self.backend.keyed_columns(COLUMNS)

    def change(self, random: Random) -> None:
        if not self.keys:
            return
        for _ in range(random.randrange(6)):
            key, text = (random.choice(self.keys),), (str(random.randrange(99)),)
            state = random.choice(self.values)
            state.clear(key) if random.random() < 0.3 else state.put(key, text)
            if self.all_states:
                self.change_more(random, key, text)
        rows = [random.choice(self.keys) for _ in range(random.randrange(4))]
        if rows:
            numbers = [random.choice([None, 1, 5]) for _ in rows]
            texts = [str(random.randrange(99)) for _ in rows]
            self.table.update(pa.record_batch({"k": rows, "n": pa.array(numbers, pa.int64()), "v": texts}))
        self.backend.maintain()

    def change_more(self, random: Random, key: Any, text: Any) -> None:
        match random.randrange(11):
            case 0:
                self.lists.append(key, [text])
            case 1:
                self.lists.put(key, [text, text])
            case 2:
                self.lists.clear(key)
            case 3:
                self.maps.put(key, text, text)
            case 4:
                self.maps.remove(key, next((name for name, _ in self.maps.items(key)), text))
            case 5:
                self.timers.register(key, random.randrange(5))
            case 6:
                for time in self.timers.times_of(key)[:1]:
                    self.timers.delete(key, time)
            case 7 | 8:
                given = [pa.array([*key], pa.int64())]
                self.columns.put(given, self.columns.slots_of(given), given, np.array([random.random() < 0.7]))
                if random.random() < 0.2:
                    self.columns._living = -(1 << 20)  # as if most keys had lost their rows
                    self.columns.compact_if_due()
            case _:
                self.change_rows(random)

    def change_rows(self, random: Random) -> None:
        side = random.choice(self.rows.sides)
        keys = [random.choice(self.keys) for _ in range(random.randrange(1, 4))]
        slots = self.rows.slots_of([pa.array(keys, pa.int64())])
        action = random.randrange(4)
        if action < 2:
            texts = [str(random.randrange(99)) for _ in keys]
            times = pa.array([random.randrange(9) for _ in keys], pa.timestamp("ms"))
            batch = pa.record_batch([pa.array(keys, pa.int64()), times, pa.array(texts)], schema=ROWS)
            side.append(batch, slots, np.array([random.randrange(2) for _ in keys], dtype=np.uint8))
        elif action == 2:
            side.expire(random.randrange(4))
        elif random.random() < 0.3:
            self.rows._compact(keeps_keys=random.random() < 0.5)
        else:
            found = side.candidates(slots, np.zeros(len(keys), dtype=np.int64), -(1 << 40), 1 << 40)
            for _, rows in found:
                side.accept(rows[:2])


def content(handles: list[KeyedHandle]) -> Content:
    """The rows by state and key, in order; entries of maps and timers in any."""
    backend = MemoryKeyedStateBackend(KeyGroupRange(0, GROUPS - 1), GROUPS, "op")
    restore(backend, handles)
    found: Content = {}
    for handle in handles_of([backend]):
        assert isinstance(handle, KeyedStateHandle)
        for section in handle.sections:
            by_key: dict[str, list[str]] = defaultdict(list)
            schema = schema_from_json(section.descriptor["schema"])
            for group, offset, length in section.key_group_offsets:
                block = (handle.file.inline or b"")[offset : offset + length]
                for row in (row for batch in read_block("", schema, block) for row in batch.to_pylist()):
                    assert GROUP_OF[row["key.k"]] == group
                    by_key[str(row["key.k"])].append(str(row))
            is_ordered = section.descriptor["kind"] in ("list", "rows")
            found[section.name] = {key: rows if is_ordered else sorted(rows) for key, rows in by_key.items()}
    return found


EVENTS = st.lists(
    st.sampled_from(["completed", "completed", "completed", "aborted", "lost", "savepoint", "overtaken", "restart"]),
    min_size=4,
    max_size=25,
)


@settings(max_examples=examples(60), deadline=None)
@given(EVENTS, st.integers(0, 1 << 30))
def test_an_increment_shows_what_a_complete_snapshot_of_its_moment_shows(events: list[str], seed: int) -> None:
    random = Random(seed)
    latest: list[KeyedHandle] = []
    subtasks = deployed(latest, 2, owned=True, all_states=True)
    for number, event in enumerate(events, 1):
        for subtask in subtasks:
            subtask.change(random)
        if event == "restart":
            subtasks = deployed(
                latest, random.randrange(1, 4), owned=random.random() < 0.7, all_states=random.random() < 0.7
            )
            continue
        full = CheckpointProperties(full=random.random() < 0.1)
        taken = [each.backend.snapshot(2 * number, SAVEPOINT if event == "savepoint" else full) for each in subtasks]
        whole = handles_of([each.backend for each in subtasks], CANONICAL, 2 * number + 1)
        if event == "overtaken":  # written only after the next one
            for subtask in subtasks:
                subtask.change(random)
            for snapshot in [each.backend.snapshot(2 * number + 1, CHECKPOINT) for each in subtasks]:
                written(snapshot)
        handles = [handle for snapshot in taken for handle in written(snapshot)]
        assert all(isinstance(handle, IncrementalKeyedStateHandle) for handle in handles)
        assert content(handles) == content(whole)
        if event in ("completed", "overtaken", "lost"):
            latest = handles
        for subtask in subtasks:
            if event in ("completed", "overtaken"):
                subtask.backend.notify_complete(2 * number)
            elif event == "aborted":
                subtask.backend.notify_aborted(2 * number)


def deployed(handles: list[KeyedHandle], parallelism: int, *, owned: bool, all_states: bool) -> list[Subtask]:
    ranges = [key_group_range(GROUPS, parallelism, index) for index in range(parallelism)]
    return [Subtask(groups, handles, owned=owned, all_states=all_states) for groups in ranges]


@pytest.mark.parametrize("change", [0.01, 0.2])
def test_parts_stay_few_and_small_and_an_increment_costs_what_has_changed(change: float) -> None:
    keys = 4000
    backend = MemoryKeyedStateBackend(KeyGroupRange(0, GROUPS - 1), GROUPS, "op", incremental=True)
    state = backend.value_state("values", KEY, VALUE)
    for key in range(keys):
        state.put((key,), ("before",))
    (complete,) = handles_of([backend], number=1)
    size = sum(file.length for file in complete.state_files())
    backend.notify_complete(1)
    random, known, costs, live = Random(3), set(complete.files), [], dict.fromkeys(range(keys), "before")
    for number in range(2, 130):
        for key in random.sample(range(keys), round(change * keys)):
            state.put((key,), (f"{number:06}",))
            live[key] = f"{number:06}"
        if number % 10 == 0:
            for key in random.sample(sorted(live), keys // 100):
                state.clear((key,))
                del live[key]
        (handle,) = handles_of([backend], number=number)
        backend.notify_complete(number)
        files = handle.files
        assert len(files) <= MOST_PARTS
        assert sum(file.length for file in files.values()) <= 2.3 * size
        costs.append(sum(file.length for name, file in files.items() if name not in known))
        known |= files.keys()
    assert sum(costs) / len(costs) < size * max(12 * change, 0.12) if change < 0.1 else max(costs) < 1.2 * size
    assert sorted(costs)[len(costs) // 4] < 2.5 * change * size
    found = MemoryKeyedStateBackend(KeyGroupRange(0, GROUPS - 1), GROUPS, "op")
    restore(found, [handle])
    restored = found.value_state("values", KEY, VALUE)
    assert {key: restored.get((key,)) for key in range(keys)} == {
        key: (live[key],) if key in live else None for key in range(keys)
    }


def test_rows_that_are_only_added_are_written_less_than_twice_and_read_back() -> None:
    spec = RowBufferSpec("left", ROWS, ("k",))
    backend = MemoryKeyedStateBackend(KeyGroupRange(0, GROUPS - 1), GROUPS, "op", incremental=True)
    rows, random = backend.row_buffers([spec]), Random(5)
    known, sizes, expected = set[str](), [], []
    for number in range(1, 30):
        added = [
            {"k": random.randrange(KEYS), "t": None, "v": f"{number} {at}"} for at in range(random.randrange(80, 120))
        ]
        batch = pa.RecordBatch.from_pylist(added, ROWS)
        rows.sides[0].append(batch, rows.slots_of([batch.column("k")]), np.zeros(len(added), np.uint8))
        expected += added
        (handle,) = handles_of([backend], number=number)
        backend.notify_complete(number)
        sizes.append(sum(file.length for name, file in handle.files.items() if name not in known))
        known |= handle.files.keys()
        assert len(handle.files) <= MOST_PARTS
    assert sum(sizes) < 2 * sum(file.length for file in handle.files.values())
    found = MemoryKeyedStateBackend(KeyGroupRange(0, GROUPS - 1), GROUPS, "op")
    restore(found, [handle])
    stored = pa.concat_batches(list(found.row_buffers([spec]).sides[0].stored())).to_pylist()
    # Rows of one key stay in order.
    assert sorted(stored, key=itemgetter("k")) == sorted(expected, key=itemgetter("k"))
