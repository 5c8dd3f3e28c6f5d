"""The write-back cache of entries: what it keeps, and what it asks the database for."""

from __future__ import annotations

from typing import Any, cast

from ckpt_runtime.state.rocksdb.entries import CachedEntries, EntryTable


class Table:
    """A database that says what it was asked for."""

    def __init__(self) -> None:
        self.content: dict[Any, Any] = {}
        self.asked: list[list[Any]] = []
        self.database = self

    def read(self, keys: list[Any]) -> list[tuple[Any, Any]]:
        self.asked.append(list(keys))
        return [(key, self.content.get(key)) for key in keys]

    def puts(self, changed: dict[Any, Any]) -> dict[Any, Any]:
        return {key: entry for key, entry in changed.items() if entry is not None}

    def deletes(self, changed: dict[Any, Any]) -> list[Any]:
        return [key for key, entry in changed.items() if entry is None]

    def write(self, puts: dict[Any, Any], deletes: list[Any]) -> None:
        self.content.update(puts)
        for key in deletes:
            self.content.pop(key, None)


def cache_of(table: Table, capacity: int) -> CachedEntries:
    entries = CachedEntries()
    entries.attach(cast(EntryTable, table), capacity)
    return entries


def held(entries: CachedEntries) -> int:
    return len(entries._young.keys() | entries._old.keys() | entries._changed.keys())


def test_batch_is_read_in_one_call_and_known_absent_keys_in_none() -> None:
    table = Table()
    table.content = {1: "a", 2: "b"}
    entries = cache_of(table, 100)
    entries.prefetch([1, 2, 3])
    assert [entries.get(key) for key in (1, 2, 3, 3)] == ["a", "b", None, None]
    entries.prefetch([2, 3])
    entries.remove(1)
    entries.put(4, "d")
    assert [entries.get(key) for key in (1, 4)] == [None, "d"]
    assert table.asked == [[1, 2, 3]]


def test_memory_is_bounded_though_no_snapshot_is_ever_taken() -> None:
    table = Table()
    entries = cache_of(table, 100)
    for start in range(0, 10_000, 60):
        entries.prefetch(range(start, start + 60))
        for key in range(start, start + 60):
            entries.put(key, key)
        entries.maintain(10)
        assert held(entries) <= 100 + 60
    assert [entries.get(key) for key in (0, 5_000, 9_999)] == [0, 5_000, 9_999]


def test_frozen_entries_are_read_until_the_database_has_them() -> None:
    table = Table()
    entries = cache_of(table, 2)
    entries.put(1, ["a"])
    [frozen] = entries.freeze()
    assert entries.freeze() == []
    for _ in range(3):  # forgotten as unused
        entries.put(2, "x")
        entries.put(3, "y")
        entries._young, entries._old = {}, {}
    changing = entries.writable(1, list)
    changing.append("b")
    assert frozen.changed == {1: ["a"]}
    assert entries.get(1) == ["a", "b"]
    assert table.asked == []
    table.write(frozen.puts(), frozen.deletes())  # type: ignore[arg-type]
    frozen.release()
    entries.maintain(1)
    assert entries.get(1) == ["a", "b"]
