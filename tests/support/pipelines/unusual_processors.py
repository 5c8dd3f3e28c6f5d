"""Legal but unusual processors of rows and of frames that Spark and the engine run on the same input."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle

if TYPE_CHECKING or __package__:
    from tests.support.pipelines.side_processors import Talker
else:
    from side_processors import Talker

NEVER = 2**61
EAST = dt.timezone(dt.timedelta(hours=5))


class Pair(NamedTuple):
    n: int
    s: str


class Three(NamedTuple):
    n: int
    s: str
    st: Any


class Keys(Talker):
    """What the key is in calls with rows and of timers, in every kind of state; timers that change while listed."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        self.value = handle.getValueState("value", "n INT")
        self.list = handle.getListState("list", "n INT")
        self.map = handle.getMapState("map", "n INT", "n INT")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        numbers = [row.v for row in rows]
        self.value.update(((self.value.get() or (0,))[0] + len(numbers),))
        self.list.appendList([(n,) for n in numbers])
        for n in numbers:
            self.map.updateValue((n,), (n,))
        states = (self.value.get(), list(self.list.get()), sorted(self.map.keys()))
        yield self.say(key, "rows", ([type(part).__name__ for part in key], key, numbers, states))
        self.handle.registerTimer(1)
        for at in (NEVER, NEVER + 1, NEVER + 2):
            self.handle.registerTimer(at)
        seen = []
        for at in self.handle.listTimers():
            seen.append(at)
            if at >= NEVER:
                self.handle.deleteTimer(at)
        yield self.say(key, "while listed", (sorted(seen), sorted(self.handle.listTimers())))
        self.handle.registerTimer(NEVER)
        for at in list(self.handle.listTimers()):
            if at >= NEVER:
                self.handle.deleteTimer(at)
                self.handle.registerTimer(at + 10)
        one, other = self.handle.listTimers(), self.handle.listTimers()
        yield self.say(key, "listed twice", (sorted(one), sorted(other)))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield self.say(key, "timer", ([type(part).__name__ for part in key], tuple(key), self.value.get()))


class Unusual(Talker):
    """Forms of values, elements and entries; states that are written with what is read from them."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        self.value = handle.getValueState(
            "value", "n INT NOT NULL, s STRING, st STRUCT<x: INT NOT NULL, y: ARRAY<INT>>"
        )
        self.list = handle.getListState("list", "n INT, s STRING")
        self.deep = handle.getListState("deep", "at TIMESTAMP, d DECIMAL(10, 2), a ARRAY<STRUCT<x: INT>>, b BINARY")
        self.struct = handle.getMapState("struct", "st STRUCT<x: INT, y: STRING>, a ARRAY<INT>", "n INT")
        self.typed = handle.getMapState("typed", "d DECIMAL(10, 2), da DATE, ts TIMESTAMP, b BINARY, f DOUBLE", "n INT")
        self.map = handle.getMapState("map", "n INT, s STRING", "n INT, st STRUCT<x: INT>")
        self.zeros = handle.getMapState("zeros", "f DOUBLE, g FLOAT, a ARRAY<DOUBLE>", "d DECIMAL(10, 2)")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for number, said in enumerate((*self._values(), *self._lists(rows), *self._maps(), *self._zeros())):
            yield self.say(key, f"{number:02}", said)

    def _values(self) -> Iterator[Any]:
        got = self.value.get()
        yield got
        if got is not None:
            got[2].y.append(99)  # the caller's own: nothing that is stored changes
        yield self.value.get()
        mine = [1, 2]
        self.value.update((1, "a", (1, mine)))
        mine.append(3)
        yield self.value.get()
        for new in (np.array([1, 2, None], dtype=object), iter((1, "x", Row(x=3, y=None))), Three(4, "s", None)):
            self.value.clear()
            self.value.update(new)
            yield self.value.exists(), self.value.get()
        self.value.update((5, "s", {"x": 6, "y": (7,)}))

    def _lists(self, rows: Iterator[Row]) -> Iterator[Any]:
        yield list(self.list.get()), sorted(map(repr, self.deep.get()))
        for row in rows:
            self.list.appendValue((row.v, row.word))
        self.list.put((n, s) for n, s in self.list.get() if n != 3)
        yield list(self.list.get())
        self.list.appendList(self.list.get())
        yield list(self.list.get())
        self.list.appendList(((np.int32(5), np.str_("x")), [6, "y"], Row(n=7, s="z"), Row(8, "p")))
        yield list(self.list.get())
        self.list.put({(9, "set")})
        self.list.appendList(zip([1, 2], "ab", strict=True))
        elements = self.list.get()
        first = next(elements)
        self.list.put([(0, "put")])
        yield first, list(elements), list(self.list.get())
        for n, s in self.list.get():
            self.list.appendValue((n + 1, s))
        yield list(self.list.get())
        self.list.clear()
        self.list.appendValue((None, None))
        yield self.list.exists(), list(self.list.get())
        at = dt.datetime(2020, 1, 1, 5, tzinfo=EAST)
        self.deep.put(
            [
                (at, Decimal("1.005"), [(1,)], b"x"),
                (dt.datetime(2020, 1, 1), Decimal(3), [Row(x=2), None], bytearray(b"y")),
                (np.datetime64("2020-01-01T00:00:00").item(), None, [], None),
                (None, None, None, None),
            ]
        )
        yield list(self.deep.get())

    def _maps(self) -> Iterator[Any]:
        for state in (self.struct, self.typed, self.map):
            yield sorted(map(repr, state.iterator()))
        keys = [(Row(x=1, y="a"), [1, 2]), ((1, "a"), (1, 2)), ({"x": 1, "y": "a"}, [1, 2]), (None, [])]
        for number, key in enumerate((*keys, ((None, None), [None]))):
            self.struct.updateValue(key, (number,))
        yield sorted(map(repr, self.struct.iterator())), self.struct.getValue(((None, None), [None]))
        for (st, a), _ in self.struct.iterator():
            if st is not None and st.x is None:
                self.struct.removeKey((st, a))
        yield sorted(map(repr, self.struct.keys()))
        day, at = dt.date(2020, 1, 1), dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
        self.typed.updateValue((Decimal("1"), day, at, b"x", 1.0), (1,))
        self.typed.updateValue((Decimal("1.00"), day, at.replace(tzinfo=None), bytearray(b"x"), np.float64(1)), (2,))
        self.typed.updateValue((Decimal("1.001"), dt.datetime(2020, 1, 1, 4), at.astimezone(EAST), b"x", 1.0), (3,))
        self.typed.updateValue((None,) * 5, (4,))
        yield sorted(map(repr, self.typed.iterator()))
        self.map.updateValue(Pair(1, "a"), (1, (1,)))
        self.map.updateValue(Row(n=1, s="a"), (2, {"x": 2}))
        self.map.updateValue([np.int64(1), "a"], (3, Row(x=3)))
        self.map.updateValue((1, None), (None, None))  # type: ignore[arg-type]
        got: Any = self.map.getValue((1, "a"))
        yield got, got.n, got.st.x, got.asDict()
        yield sorted(map(repr, zip(self.map.iterator(), self.map.iterator(), strict=True)))
        next(self.map.keys())
        self.map.clear()
        yield self.map.exists(), self.map.getValue((1, "a"))
        self.map.updateValue((1, "b"), (1, None))

    def _zeros(self) -> Iterator[Any]:
        """Two entries of a map, one decimal; the second batch reads what the first one has stored."""
        yield sorted(map(repr, self.zeros.iterator()))
        names = [(0.0, 1.0, [1.0]), (-0.0, 1.0, [1.0]), (1.0, 0.0, [0.0]), (1.0, -0.0, [0.0]), (1.0, -0.0, [-0.0])]
        for number, name in enumerate(names):
            if not self.zeros.containsKey(name):
                self.zeros.updateValue(name, (Decimal(number) * Decimal("-0.001"),))
        yield sorted(map(repr, self.zeros.iterator())), sorted(map(repr, self.zeros.keys()))
        yield [(name, repr(self.zeros.getValue(name))) for name in names]
        self.zeros.removeKey(names[-1])
        yield self.zeros.containsKey(names[-1]), self.zeros.containsKey(names[-2]), len(list(self.zeros.keys()))


class Ending(Talker):
    """Sessions: a timer that each later row moves, state that goes at the end or not."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        self.open = handle.getValueState("open", "n INT, ends BIGINT")
        self.rows = handle.getMapState("rows", "v INT", "t TIMESTAMP")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        n, ends = self.open.get() or (0, None)
        for row in rows:
            n += 1
            self.rows.updateValue((row.v,), (row.t,))
            if row.t is None:
                continue
            at = int(row.t.timestamp() * 1000) + 3000
            if ends is None or at > ends:
                if ends is not None:
                    self.handle.deleteTimer(ends)
                self.handle.registerTimer(at)
                ends = at
        self.open.update((n, ends))
        yield self.say(key, "rows", (n, ends, timerValues.getCurrentWatermarkInMs()))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        at = expiredTimerInfo.getExpiryTimeInMs()
        yield self.say(key, f"fired {at}", (self.open.get(), sorted(map(repr, self.rows.iterator()))))
        if key.k == "y":
            self.handle.registerTimer(at + 100_000)
        else:
            self.open.clear()
            self.rows.clear()


class Frames(Talker):
    """What frames, keys and timers are, in every type; results in every form."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        self.value = handle.getValueState("value", "n BIGINT, f DOUBLE, s STRING")
        self.map = handle.getMapState("map", "i INT", "t TIMESTAMP")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        frames = list(rows)
        n, _, _ = self.value.get() or (0, None, None)
        for frame in frames:
            types = [(name, str(kind)) for name, kind in frame.dtypes.items()]
            cells = [[type(cell).__name__ for cell in row] for row in frame.itertuples(index=False)]
            yield self._frame(key, ("types", type(key).__name__, types, cells), ("values", frame.to_dict("list")))
            n += len(frame)
            for row in frame.itertuples():
                if "i" in frame and row.t is not pd.NaT:
                    self.map.updateValue((row.i,), (row.t,))
        self.value.update((n, np.float64(frames[0]["f"].sum()) if "f" in frames[0] else None, str(key[0])))
        yield pd.DataFrame()
        yield self._frame(key, ("state", (self.value.get(), list(self.map.iterator()))))[["said", "k", "what"]]
        further = self._frame(key, ("index", 1), ("further", 2)).assign(further=1.5)
        yield further.set_index(pd.Index([7, 7]))
        yield self._frame(key, ("categories", 1)).astype("category")
        yield self._frame(key, ("places", 1)).set_axis([0, 1, 2], axis=1)
        self.handle.registerTimer(1)

    def _frame(self, key: Any, *said: Any) -> Any:
        return pd.DataFrame({"k": [str(key[0])] * len(said), "what": [w for w, *_ in said], "said": [*map(repr, said)]})

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        fired = (type(key).__name__, key, expiredTimerInfo.getExpiryTimeInMs(), self.value.get())
        yield self._frame(key, ("fired", fired))


class TypedFrames(Talker):
    """Results of every type, of the input's columns."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Any:
        return [frame.assign(n=[None] * len(frame)) for frame in rows]


class FrameEvents(Frames):
    """Timers of event time."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for frame in rows:
            self.value.update((len(frame), None, None))
            for at in frame["t"].dropna():
                self.handle.registerTimer(int(at.timestamp() * 1000) + 3000)
            said = (frame["v"].tolist(), timerValues.getCurrentWatermarkInMs(), sorted(self.handle.listTimers()))
            yield self._frame(key, ("rows", said))
