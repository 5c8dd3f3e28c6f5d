"""Processors that Spark and the engine run on the same rows. Nothing here knows which of them it is."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import numpy as np
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

Said = Row("k", "what", "said")
SCHEMA = "k STRING, what STRING, said STRING"


class Thing:
    """An object with attributes."""

    def __init__(self, x: int, y: str) -> None:
        self.x = x
        self.y = y


class Talker(StatefulProcessor):
    """Keeps its handle; :meth:`say` makes a row."""

    handle: StatefulProcessorHandle

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle

    def say(self, key: Any, what: str, said: Any) -> Row:
        return Said(str(key[0]), what, repr(said))

    def close(self) -> None:
        pass


VALUES: dict[str, list[Any]] = {
    "i TINYINT": [1, None, np.int8(4)],
    "l BIGINT": [2**60, np.int64(3)],
    "f FLOAT": [1.5, 0.1, np.float32(0.5), 1e300],
    "d DOUBLE": [2.5, np.float32(0.1), float("inf")],
    "b BOOLEAN": [True, np.bool_(False)],
    "s STRING": ["a", 5, 1.5, True, 1e10, 1e-5, 100.0, Decimal("1.50"), np.float64(2.5), np.str_("q"), 2**70],
    "c DECIMAL(10, 2)": [Decimal("1.25"), Decimal("1.239"), Decimal(7)],
    "da DATE": [dt.date(2020, 1, 2), dt.datetime(2020, 1, 2, 3)],
    "ts TIMESTAMP": [dt.datetime(2020, 1, 2, 3, 4, 5, 6), dt.datetime(2020, 1, 2, 3, tzinfo=dt.UTC)],
    "tz TIMESTAMP": [dt.datetime(2020, 1, 2, 3, tzinfo=dt.timezone(dt.timedelta(hours=5)))],
    "tn TIMESTAMP_NTZ": [dt.datetime(2020, 1, 2, 3), dt.datetime(2020, 1, 2, 3, tzinfo=dt.UTC)],
    "y BINARY": [b"x", bytearray(b"yy"), "text"],
    "a ARRAY<INT>": [[1, None], (1, 2), []],
    "at ARRAY<TIMESTAMP>": [[dt.datetime(2020, 1, 2, tzinfo=dt.UTC)]],
    "m MAP<STRING, INT>": [{"a": 1}, {"a": None}, {1: 2}, {}],
    "st STRUCT<x: INT, y: STRING>": [
        Row(x=1, y="q"), (1, "t"), [1, "l"], {"x": 1, "y": "d"}, {"x": 1}, {"x": 1, "z": 3}, Row(a=1, b="r"),
        Thing(4, "thing"), None,
    ],
    "n STRUCT<a: ARRAY<STRUCT<x: INT>>, m: MAP<STRING, STRUCT<x: INT>>>": [([Row(x=1)], {"k": Row(x=2)})],
}  # fmt: skip
"""What is written to a field of each type."""


class EveryType(Talker):
    """Writes all of :data:`VALUES` to value states, and says what comes back in the same call and in the next batch."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        self.states = {ddl: handle.getValueState(f"v_{ddl.split()[0]}", ddl) for ddl in VALUES}

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            yield self.say(key, "row", (type(row).__name__, row.asDict()))
        for ddl, state in self.states.items():
            yield self.say(key, f"before {ddl}", (state.exists(), state.get()))
            for value in VALUES[ddl]:
                state.update((value,))
                yield self.say(key, ddl, (type(state.get()).__name__, state.get()))


class States(Talker):
    """Lists and maps in all their methods, also while they are read."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        self.value = handle.getValueState("value", "n INT, s STRING")
        self.list = handle.getListState("list", "a INT, st STRUCT<x: INT, y: STRING>")
        self.map = handle.getMapState("map", "word STRING", "n INT, at TIMESTAMP")
        self.nested = handle.getMapState("nested", "st STRUCT<x: INT>, z INT", "n INT")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        words = [row.word for row in rows]
        yield from self._of_value(key, words)
        yield from self._of_list(key)
        yield from self._of_map(key, words)
        yield self.say(
            key, "times", (timerValues.getCurrentProcessingTimeInMs(), timerValues.getCurrentWatermarkInMs())
        )

    def _of_value(self, key: Any, words: list[str]) -> Iterator[Row]:
        writes: list[Any] = [[1, "list"], (entry for entry in (2, "generator")), Row(n=3, s="row"), Row(a=4, b="names")]
        for write in writes:
            self.value.update(write)
            yield self.say(key, "value", self.value.get())
        self.value.clear()
        yield self.say(key, "cleared", (self.value.exists(), self.value.get()))
        self.value.update((len(words), words[-1]))

    def _of_list(self, key: Any) -> Iterator[Row]:
        yield self.say(key, "list before", (self.list.exists(), list(self.list.get())))
        self.list.appendValue((1, Row(x=1, y="a")))
        self.list.appendList((number, None) for number in range(2))
        seen = []
        for element in self.list.get():
            seen.append((type(element).__name__, element))
            if len(seen) == 1:
                self.list.appendValue((9, {"x": 7}))
        yield self.say(key, "list", seen)
        yield self.say(key, "twice", list(zip(self.list.get(), self.list.get(), strict=True)))
        self.list.put([(5, None)])
        yield self.say(key, "list put", list(self.list.get()))

    def _of_map(self, key: Any, words: list[str]) -> Iterator[Row]:
        found = self.map.getValue(("a",))
        yield self.say(key, "map before", (self.map.exists(), type(found).__name__, found, found and found.n))
        for word in words:
            (count, _) = self.map.getValue((word,)) or (0, None)
            self.map.updateValue((word,), (count + 1, dt.datetime(2020, 1, 1, count)))
        self.map.updateValue("s", (None, None))
        yield self.say(key, "map", sorted(self.map.iterator()))
        keys = sorted(self.map.keys())
        yield self.say(key, "keys", (keys, [type(k).__name__ for k in keys]))
        yield self.say(key, "values", sorted(map(repr, self.map.values())))
        yield self.say(key, "null", (self.map.containsKey(Row(word="s")), self.map.getValue(["s"])))
        self.map.removeKey(("nothing",))
        names = self.map.keys()
        for (word,) in names:
            if word != "a":
                self.map.removeKey((word,))
        yield self.say(key, "removed", list(self.map.iterator()))
        self.nested.updateValue((Row(x=1), 2), (3,))
        self.nested.updateValue((None, None), (4,))
        yield self.say(key, "nested", (self.nested.getValue(((1,), 2)), sorted(map(repr, self.nested.iterator()))))


class Deleted(Talker):
    """Deletes a state that it has asked for, and uses it."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        self.kept = handle.getValueState("kept", "n INT", 0)
        self.gone = handle.getValueState("gone", "n INT")
        self.list, self.map = handle.getListState("list", "n INT"), handle.getMapState("map", "k STRING", "n INT")
        for state in ("gone", "list", "map"):
            handle.deleteIfExists(state)
        handle.deleteIfExists("never")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        self.kept.update((sum(1 for _ in rows),))
        yield self.say(key, "kept", self.kept.get())
        for use in (
            *(self.gone.exists, self.gone.get, lambda: self.gone.update((1,)), self.gone.clear),
            *(self.list.exists, lambda: list(self.list.get()), lambda: self.list.appendValue((1,)), self.list.clear),
            *(self.map.exists, lambda: list(self.map.keys()), lambda: self.map.getValue(("a",)), self.map.clear),
        ):
            try:
                yield self.say(key, "gone", use())
            except PySparkRuntimeError as error:
                yield self.say(key, "gone", str(error).partition(":")[0])


class Habits(Talker):
    """One habit of user code for each word: how rows are read and what is returned."""

    seen = 0

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        self.count = handle.getValueState("count", "n INT")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Any:
        habits: dict[Any, Callable[[Any, Iterator[Row]], Any]] = {
            "ignores": lambda key, rows: iter([self.say(key, "ignored", key)]),
            "first": lambda key, rows: [self.say(key, "first", next(rows).v)],
            "twice": lambda key, rows: [self.say(key, "twice", ([r.v for r in rows], [r.v for r in rows]))],
            "empty": lambda key, rows: iter(()),
            "tuple": lambda key, rows: tuple(self.say(key, "tuple", r.v) for r in rows),
            "lazy": self._lazily,
            "partly": lambda key, rows: [Row(what="partly", k=key[0]), Row(extra=1, said="x", what="named")],
        }
        self.count.update((((self.count.get() or (0,))[0]) + 1,))
        return habits.get(key[0], self._tells)(key, rows)

    def _lazily(self, key: Any, rows: Iterator[Row]) -> Iterator[Row]:
        for row in rows:
            (count,) = self.count.get() or (0,)
            self.count.update((count + 1,))
            yield self.say(key, "lazy", (row.v, self.count.get()))

    def _tells(self, key: Any, rows: Iterator[Row]) -> Iterator[Row]:
        yield self.say(key, "key", (type(key).__name__, key, [row.v for row in rows], self.count.get()))


class Expiring(Talker):
    """States that live for a millisecond or an hour."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        self.short = handle.getValueState("short", "n INT", 1)
        self.short_list = handle.getListState("short_list", "n INT", 1)
        self.short_map = handle.getMapState("short_map", "n INT", "n INT", 1)
        self.long = handle.getValueState("long", "n INT", 3_600_000)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        yield self.say(key, "before", (*self._content(), self.long.get()))
        self.short.update((1,))
        self.short_list.appendValue((1,))
        self.short_map.updateValue((1,), (1,))
        self.long.update((sum(1 for _ in rows),))
        time.sleep(0.003)  # the clock of a call stands still
        yield self.say(key, "after", (*self._content(), self.long.get()))

    def _content(self) -> tuple[Any, ...]:
        return (self.short.get(), self.short.exists(), list(self.short_list.get()), list(self.short_map.iterator()))


class ClockTimers(Talker):
    """Timers of the clock: past ones, deleted ones, several, and one that never comes."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        yield self.say(key, "kept", sorted(self.handle.listTimers()))
        for time_ms in (30, 10, np.int64(20), 10, -5, 0, 2**62):
            self.handle.registerTimer(time_ms)
        self.handle.deleteTimer(99)
        self.handle.deleteTimer(20)
        yield self.say(key, "listed", (sum(1 for _ in rows), sorted(self.handle.listTimers())))
        yield self.say(key, "times", (timerValues.getCurrentProcessingTimeInMs() > 0, self._watermark(timerValues)))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        at = expiredTimerInfo.getExpiryTimeInMs()
        yield self.say(key, "fired", (type(key).__name__, key, at, sorted(self.handle.listTimers())))
        if at == 30:
            self.handle.registerTimer(30)  # the one that fires: gone afterwards

    def _watermark(self, values: Any) -> int:
        return int(values.getCurrentWatermarkInMs())


class Odd(Talker):
    """Reads what was never stored, nulls, what is cleared or changed meanwhile, and None where a tuple belongs."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        self.value = handle.getValueState("value", "n INT, s STRING")
        self.list = handle.getListState("list", "n INT")
        self.map = handle.getMapState("map", "n INT", "m INT")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        yield from self._of_value(key)
        yield from self._of_list(key)
        yield from self._of_map(key)
        yield self.say(key, "e refused", [self._refused(call) for call in self._calls()])

    def _calls(self) -> list[Callable[[], None]]:
        return [
            lambda: self.value.update(None),  # type: ignore[arg-type]
            lambda: self.list.appendValue(None),  # type: ignore[arg-type]
            lambda: self.list.put(None),  # type: ignore[arg-type]
            lambda: self.map.updateValue(None, (1,)),  # type: ignore[arg-type]
            lambda: self.map.updateValue((1,), None),  # type: ignore[arg-type]
            lambda: self.map.removeKey(None),  # type: ignore[arg-type]
        ]

    def _refused(self, call: Callable[[], None]) -> bool:
        """As a TypeError, after which the processor continues."""
        try:
            call()
        except TypeError:
            return True
        return False

    def _of_value(self, key: Any) -> Iterator[Row]:
        yield self.say(key, "1 value before", (self.value.exists(), self.value.get()))
        self.value.clear()
        self.value.update((None, None))
        yield self.say(key, "2 value of nulls", (self.value.exists(), self.value.get()))
        self.value.update((None, "s"))
        yield self.say(key, "3 value with a null", (self.value.exists(), self.value.get()))
        self.value.clear()
        self.value.clear()
        yield self.say(key, "4 value cleared", (self.value.exists(), self.value.get()))

    def _of_list(self, key: Any) -> Iterator[Row]:
        yield self.say(key, "5 list before", (self.list.exists(), list(self.list.get())))
        self.list.clear()
        self.list.appendValue((None,))
        self.list.appendList([(1,), (None,)])
        yield self.say(key, "6 list of nulls", (self.list.exists(), list(self.list.get())))
        elements = self.list.get()
        first = next(elements)
        self.list.clear()
        yield self.say(key, "7 list cleared while read", (first, self.list.exists(), list(self.list.get())))
        self.list.put([(1,)])
        elements = self.list.get()
        self.list.clear()
        yield self.say(key, "7 list cleared before it is read", list(elements))

    def _of_map(self, key: Any) -> Iterator[Row]:
        absent = (self.map.exists(), self.map.containsKey((1,)), self.map.getValue((1,)))
        yield self.say(key, "8 map before", (absent, list(self.map.iterator()), list(self.map.keys())))
        self.map.removeKey((1,))
        self.map.clear()
        self.map.updateValue((None,), (1,))
        self.map.updateValue((2,), (None,))
        content = [self.map.containsKey((entry,)) for entry in (None, 2, 3)]
        yield self.say(key, "9 map of nulls", (content, self.map.getValue((None,)), self.map.getValue((2,))))
        self.map.removeKey((None,))
        self.map.removeKey((None,))
        yield self.say(key, "a map without the null", (self.map.exists(), list(self.map.iterator())))
        self.map.removeKey((2,))
        yield self.say(key, "b map emptied", (self.map.exists(), list(self.map.iterator())))
        self.map.updateValue((1,), (1,))
        seen = []
        for entry in self.map.iterator():
            self.map.updateValue((len(seen) + 2,), (0,))
            self.map.updateValue((1,), (5,))
            seen.append(entry)
        yield self.say(key, "c map changed while read", (seen, sorted(self.map.iterator())))
        entries = self.map.keys()
        self.map.clear()
        yield self.say(key, "d map cleared", (next(entries, None), self.map.exists(), list(self.map.values())))


class OddTimers(Talker):
    """Timers for a key without state, twice, deleted while another fires, deleted by themselves, and again."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        self.value = handle.getValueState("value", "n INT")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for time_ms in (1000, 1000, 2000, 3000):
            self.handle.registerTimer(time_ms)
        self.handle.deleteTimer(3000)
        self.handle.deleteTimer(3000)
        self.handle.deleteTimer(4000)
        yield self.say(key, "listed", sorted(self.handle.listTimers()))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        at = expiredTimerInfo.getExpiryTimeInMs()
        yield self.say(key, f"fired {at}", (self.value.exists(), self.value.get(), sorted(self.handle.listTimers())))
        self.value.clear()
        self.handle.deleteTimer(at)
        self.handle.deleteTimer(at)
        yield self.say(key, f"left {at}", sorted(self.handle.listTimers()))


class EventTimers(Talker):
    """A timer five seconds behind each row, one that never comes, and what the watermark is."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        self.rows = handle.getListState("rows", "v INT")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        got = [(row.v, row.t) for row in rows]
        self.rows.appendList([(v,) for v, _ in got])
        for _, at in got:
            if at is not None:
                self.handle.registerTimer(int(at.timestamp() * 1000) + 5000)
        self.handle.registerTimer(2**63 - 1)
        yield self.say(key, "rows", (got, timerValues.getCurrentWatermarkInMs(), sorted(self.handle.listTimers())))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        rows = [v for (v,) in self.rows.get()]
        fired = (expiredTimerInfo.getExpiryTimeInMs(), timerValues.getCurrentWatermarkInMs(), rows)
        yield self.say(key, "fired", (key, fired))


class Passed(Talker):
    """Says each row that was not late."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            yield self.say(key, "row", row.v)


class RowsAndTimers(Talker):
    """Says each row, and each timer five seconds behind one, however calls divide them."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self.handle.registerTimer(int(row.t.timestamp() * 1000) + 5000)
            yield self.say(key, "row", (row.v, row.t.timestamp()))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield self.say(key, "fired", expiredTimerInfo.getExpiryTimeInMs())


class Total(Talker):
    """Sums ``v``, or what an operator before it said."""

    SCHEMA = "total INT"

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        self.state = handle.getValueState("total", self.SCHEMA)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        before = self.state.get()
        numbers = [row.v if "v" in row.asDict() else int(row.said) for row in rows]
        total = (before[0] if before else 0) + sum(numbers)
        self.state.update(self.updated(total, before))
        yield Said(str(key[0]), f"{len(numbers)} rows", str(total))

    def updated(self, total: int, before: Any) -> tuple[Any, ...]:
        return (total,)


class WiderTotal(Total):
    """Its next version: a wider type and a further field."""

    SCHEMA = "total BIGINT, before INT"

    def updated(self, total: int, before: Any) -> tuple[Any, ...]:
        return (total, None if before is None else before[0])

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        yield self.say(key, "state", self.state.get())
        yield from super().handleInputRows(key, rows, timerValues)
        yield self.say(key, "state", self.state.get())


class Nested(Talker):
    """Results with nested fields, as rows, dictionaries and what the input had."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            yield Row(k=key[0], st=Row(y="b", x=1), a=[Row(y=None, x=2)], m={"k": 1}, t=row.t)
            yield Row(k=key[0], st={"x": 3}, a=[{"y": "c"}], m=row.m, t=dt.datetime(2020, 1, 1))
            yield Row(k=key[0], st=row.st, a=[], m=None, t=None)
