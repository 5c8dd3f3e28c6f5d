"""Lists and maps on RocksDB, which become large and small again, beside those in memory: reading, changing while they
are gone through, time to live, snapshots in both forms, rescaling."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import Row

from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.graph.key_groups import key_group_range
from ckpt_runtime.state.backend import BackendParameters, KeyedStateBackend
from ckpt_runtime.state.hashing import hash_arrays, key_groups_of
from ckpt_runtime.state.registry import create_backend
from ckpt_runtime.state.rocksdb import keyed_collections, stored_form
from ckpt_runtime.state.states import Key, TimeToLive
from ckpt_runtime.state.values import NAN, user_key_maker
from tests.support.effort import examples
from tests.support.inline_snapshots import CANONICAL, CHECKPOINT, handles_of, restore

GROUPS = 8
KEYS = [("a", 1), ("b", 1), ("a", None), ("", 0)]
KEY = pa.schema([("k", pa.string()), ("n", pa.int64())])
VALUE = pa.schema([("v", pa.int64())])
PAIR = pa.struct([("x", pa.float64()), ("y", pa.list_(pa.int64()))])
NAMES: list[tuple[pa.Schema, list[tuple[Any, ...]]]] = [
    (pa.schema([("u", pa.int64())]), [(number,) for number in range(-20, 180, 9)]),
    (pa.schema([("u", pa.string()), ("w", pa.int64())]), [(text, n) for text in ("", "a", "b") for n in range(6)]),
    (pa.schema([("u", pa.float64())]), [(0.0,), (-0.0,), (NAN,), *((n / 3,) for n in range(12))]),
    (pa.schema([("u", PAIR)]), [(Row(x=sign * n / 2, y=[n] * n),) for n in range(8) for sign in (1, -1)]),
]
GROUP_OF = key_groups_of(
    hash_arrays([pa.array([k for k, _ in KEYS]), pa.array([n for _, n in KEYS], pa.int64())], KEY.names), GROUPS
).tolist()


class Side:
    """The states of one backend, in several subtasks."""

    def __init__(self, name: str, root: Path, names: pa.Schema, ttl: TimeToLive | None, cached_keys: int) -> None:
        self._name = name
        self._root = root
        self._names = names
        self._ttl = ttl
        self._options = {"state.backend.rocksdb.cache.max-keys": str(cached_keys)}
        self.backends: list[KeyedStateBackend] = []
        self.deploy(1, [])

    def deploy(self, parallelism: int, handles: list[Any]) -> None:
        for backend in self.backends:
            backend.close()
        self.backends = []
        for index in range(parallelism):
            groups = key_group_range(GROUPS, parallelism, index)
            make_directory = lambda: tempfile.mkdtemp(dir=self._root)  # noqa: E731
            backend = create_backend(self._name, BackendParameters("op", groups, GROUPS, make_directory, self._options))
            restore(backend, handles)
            self.backends.append(backend)

    def _owner(self, key: Key) -> KeyedStateBackend:
        (owner,) = [backend for backend in self.backends if GROUP_OF[KEYS.index(key)] in backend.key_groups]
        return owner

    def list_of(self, key: Key) -> Any:
        return self._owner(key).list_state("l", KEY, VALUE, self._ttl)

    def map_of(self, key: Key) -> Any:
        return self._owner(key).map_state("m", KEY, self._names, VALUE, self._ttl)


def shown(name: tuple[Any, ...]) -> str:
    """0.0 and -0.0 are one."""
    return repr(name).replace("-0.0", "0.0")


def act(choice: Random, names: list[tuple[Any, ...]], tell: Callable[[Callable[[Side], Any]], Any]) -> None:
    """Something that operators do, to both."""
    key, name = choice.choice(KEYS), choice.choice(names)
    rows = [(choice.randrange(9),) for _ in range(choice.choice([1, 1, 2, 5, 20]))]
    some = [choice.choice(names) for _ in rows]

    def put_many(side: Side) -> None:
        for other, row in zip(some, rows, strict=True):
            side.map_of(key).put(key, other, row)

    def change_while_reading(side: Side) -> Any:
        """What is gone through is what was there; half of it goes meanwhile, and something comes."""
        found = []
        for number, (other, row) in enumerate(side.map_of(key).items(key)):
            found.append((shown(other), row))
            if shown(other) != shown(name) and crc32(shown(other).encode()) % 2:
                side.map_of(key).remove(key, other)
            if number == 1:
                side.map_of(key).put(key, name, rows[0])
        came = []
        for number, row in enumerate(side.list_of(key).elements(key)):
            came.append(row)
            if number == 2:
                side.list_of(key).append(key, rows)
        return sorted(found), came

    def clear(side: Side) -> None:
        side.map_of(key).clear(key)
        side.list_of(key).clear(key)

    def remove_many(side: Side) -> None:
        for other in some:
            side.map_of(key).remove(key, other)

    actions: list[Callable[[Side], Any]] = [
        lambda side: side.list_of(key).append(key, rows),
        lambda side: side.list_of(key).append(key, rows),
        lambda side: side.list_of(key).put(key, rows),
        put_many,
        put_many,
        remove_many,
        lambda side: side.map_of(key).get_value(key, name),
        change_while_reading,
        clear,
    ]
    tell(choice.choices(actions, [3, 3, 1, 4, 4, 4, 3, 3, 1])[0])


def rescale(parallelism: int, properties: CheckpointProperties, side: Side) -> None:
    side.deploy(parallelism, handles_of(side.backends, properties))


def content(side: Side) -> Any:
    found = []
    for key in KEYS:
        entries = list(side.map_of(key).items(key))
        assert entries == list(side.map_of(key).get(key).items())
        assert all(side.map_of(key).get_value(key, name) == value for name, value in entries)
        values = list(side.list_of(key).elements(key))
        assert values == side.list_of(key).get(key)
        exists = side.map_of(key).exists(key), side.list_of(key).exists(key)
        assert exists == (bool(entries), bool(values))
        found.append((sorted((shown(name), value) for name, value in entries), values))
    return found


@pytest.mark.parametrize("has_ttl", [False, True])
@settings(deadline=None, max_examples=examples(6))
@given(seed=st.integers(0, 2**32))
def test_large_collections_are_as_in_memory(seed: int, has_ttl: bool) -> None:
    choice = Random(seed)
    schema, names = choice.choice(NAMES)
    names = [user_key_maker(schema)(name) for name in names]
    now = 1000
    root = Path(tempfile.mkdtemp(prefix="ckpt-property-"))
    ttl = TimeToLive(50, lambda: now) if has_ttl else None
    with pytest.MonkeyPatch.context() as patch:
        most = choice.choice([3, 8])
        for module in (keyed_collections, stored_form):
            patch.setattr(module, "MOST_ROWS", most)
        patch.setattr(keyed_collections, "_MOST_SINGLY", choice.choice([2, 256]))
        sides = [Side(name, root, schema, ttl, choice.choice([4, 1000])) for name in ("hashmap", "rocksdb")]

        def tell(action: Callable[[Side], Any]) -> None:
            ours, theirs = (action(side) for side in sides)
            assert ours == theirs

        late: list[Any] = []
        for _ in range(60):
            act(choice, names, tell)
            if choice.random() < 0.5:
                tell(content)
            if choice.random() < 0.3:
                now += choice.randrange(20)
            if choice.random() < 0.3:
                tell(lambda side: [backend.maintain() for backend in side.backends for _ in range(20)])
            if choice.random() < 0.1:
                late += [backend.snapshot(7, CHECKPOINT) for backend in sides[1].backends]
            if choice.random() < 0.07:
                tell(partial(rescale, choice.randint(1, 3), choice.choice([CHECKPOINT, CANONICAL])))
                tell(content)
        tell(content)
        for snapshot in late:
            snapshot.release()
        for side in sides:
            for backend in side.backends:
                backend.close()
        assert list(root.iterdir()) == [], "local files stayed"
    shutil.rmtree(root)
