"""The RocksDB backend beside dicts: a cache that little fits into, snapshots written late or never, rescaling."""

from __future__ import annotations

import shutil
import tempfile
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ckpt_runtime.checkpoint.completed_checkpoint import KeyedHandle
from ckpt_runtime.graph.key_groups import KeyGroupRange, key_group_range
from ckpt_runtime.state.backend import BackendParameters, KeyedSnapshot
from ckpt_runtime.state.hashing import hash_arrays, key_groups_of
from ckpt_runtime.state.rocksdb.backend import RocksDBKeyedStateBackend
from tests.support.effort import examples
from tests.support.inline_snapshots import CHECKPOINT, handles_of, restore, written

GROUPS = 16
KEYS = range(30)
KEY = pa.schema([("k", pa.int64())])
VALUE = pa.schema([("v", pa.int64())])
GROUP_OF = key_groups_of(hash_arrays([pa.array(KEYS, pa.int64())], ["k"]), GROUPS).tolist()

Model = dict[str, dict[int, Any]]


class RocksDBBesideDicts(RuleBasedStateMachine):
    """A list, a map and timers per key, over a few backends with key groups of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="ckpt-property-"))
        self.options: dict[str, str] = {}
        self.model: Model = {"list": {}, "map": {}, "timers": {}}
        self.taken: list[tuple[list[KeyedSnapshot], Model]] = []
        self.backends: list[RocksDBKeyedStateBackend] = []

    def teardown(self) -> None:
        for snapshots, _ in self.taken:
            for snapshot in snapshots:
                snapshot.release()
        for backend in self.backends:
            backend.close()
        assert list(self.root.iterdir()) == [], "local files stayed"
        shutil.rmtree(self.root)

    def opened(self, groups: KeyGroupRange, handles: list[KeyedHandle]) -> RocksDBKeyedStateBackend:
        parameters = BackendParameters("op", groups, GROUPS, lambda: tempfile.mkdtemp(dir=self.root), self.options)
        backend = RocksDBKeyedStateBackend(parameters)
        if handles:
            restore(backend, handles)
        return backend

    def deployed(self, parallelism: int, handles: list[KeyedHandle]) -> list[RocksDBKeyedStateBackend]:
        return [self.opened(key_group_range(GROUPS, parallelism, index), handles) for index in range(parallelism)]

    def owner(self, key: int) -> RocksDBKeyedStateBackend:
        (owner,) = [backend for backend in self.backends if GROUP_OF[key] in backend.key_groups]
        return owner

    @initialize(parallelism=st.integers(1, 2), cached_keys=st.sampled_from([6, 1000]))
    def deploy(self, parallelism: int, cached_keys: int) -> None:
        """With the larger cache, snapshots alone bring entries to the database."""
        self.options = {
            "state.backend.rocksdb.cache.max-keys": str(cached_keys),
            "state.backend.rocksdb.memory.fixed-per-slot": "8mb",
        }
        self.backends = self.deployed(parallelism, [])

    @rule(random=st.randoms(use_true_random=False), buffers=st.integers(1, 4))
    def work(self, random: Random, buffers: int) -> None:
        """As operators do: keys are named beforehand, and the backend does its housekeeping afterwards."""
        for _ in range(buffers):
            keys = random.sample(KEYS, random.randrange(1, 12))
            for backend in self.backends:
                backend.prefetch([(key,) for key in keys if GROUP_OF[key] in backend.key_groups])
            for key in keys:
                self.assert_read(key)
                random.choice([self.append, self.set, self.register, self.clear, self.assert_read])(key)
            for backend in self.backends:
                backend.maintain()

    def append(self, key: int) -> None:
        value = (len(self.model["list"].get(key, [])),)
        self.owner(key).list_state("list", KEY, VALUE).append((key,), [value])
        self.model["list"].setdefault(key, []).append(value)

    def set(self, key: int) -> None:
        entries = self.model["map"].setdefault(key, {})
        name, value = (len(entries) % 4,), (len(entries),)
        self.owner(key).map_state("map", KEY, VALUE, VALUE).put((key,), name, value)
        entries[name] = value

    def register(self, key: int) -> None:
        times = self.model["timers"].setdefault(key, set())
        self.owner(key).timers("timers", KEY).register((key,), len(times))
        times.add(len(times))

    def clear(self, key: int) -> None:
        owner = self.owner(key)
        owner.list_state("list", KEY, VALUE).clear((key,))
        owner.map_state("map", KEY, VALUE, VALUE).clear((key,))
        for time in self.model["timers"].pop(key, ()):
            owner.timers("timers", KEY).delete((key,), time)
        self.model["list"].pop(key, None)
        self.model["map"].pop(key, None)

    def assert_read(self, key: int) -> None:
        owner = self.owner(key)
        assert owner.list_state("list", KEY, VALUE).get((key,)) == self.model["list"].get(key, [])
        assert owner.map_state("map", KEY, VALUE, VALUE).get((key,)) == self.model["map"].get(key, {})
        assert set(owner.timers("timers", KEY).times_of((key,))) == self.model["timers"].get(key, set())

    @precondition(lambda self: len(self.taken) < 4)
    @rule()
    def take(self) -> None:
        self.taken.append(([backend.snapshot(1, CHECKPOINT) for backend in self.backends], deepcopy(self.model)))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        """In any order, and whatever has happened since."""
        snapshots, model = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        handles = [handle for snapshot in snapshots for handle in written(snapshot)]
        self.check(handles, model)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        snapshots, _ = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        for snapshot in snapshots:
            snapshot.release()

    @rule(parallelism=st.integers(1, 3))
    def rescale(self, parallelism: int) -> None:
        """Snapshots that are still to be written outlive their backends."""
        handles = handles_of(self.backends)
        for backend in self.backends:
            backend.close()
        self.backends = self.deployed(parallelism, handles)

    def check(self, handles: list[KeyedHandle], model: Model) -> None:
        looks = [self.opened(key_group_range(GROUPS, 2, index), handles) for index in range(2)]
        found: Model = {"list": {}, "map": {}, "timers": {}}
        for look in looks:
            for name, state in (
                ("list", look.list_state("list", KEY, VALUE)),
                ("map", look.map_state("map", KEY, VALUE, VALUE)),
                ("timers", look.timers("timers", KEY)),
            ):
                for (key,), entry in state.stored_entries():
                    assert key not in found[name], "a key in two parts"
                    found[name][key] = set(entry) if name == "timers" else entry
            look.close()
        assert found == model


TestRocksDBBesideDicts = RocksDBBesideDicts.TestCase
TestRocksDBBesideDicts.settings = settings(max_examples=examples(15), stateful_step_count=25, deadline=None)
