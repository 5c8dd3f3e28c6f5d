"""Programs of functions with state."""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from typing import Any, NamedTuple

import pandas as pd
from pyspark.sql import DataFrame, GroupedData, Row
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.streaming.state import GroupState

from tests.support.pipelines.acceptance import pipeline, program
from tests.support.pipelines.acceptance_aggregations import PAIRS, seconds, timed

__all__ = ["pipeline"]

PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
ROCKSDB = {"spark.sql.streaming.stateStore.providerClass": PROVIDER}
WITHOUT_EMPTY_BATCHES = {**ROCKSDB, "spark.sql.streaming.noDataMicroBatches.enabled": "false"}
"""With the clock as time, batches without data would never end."""
ROWS = ([("a", 1), ("b", 2), ("a", 3)], [("a", 4), ("c", 5)], [("b", 6), ("a", 40)])
COUNTED = "k STRING, n LONG"


class Processor(StatefulProcessor):
    """Keeps its handle; :meth:`number` and :meth:`keep` read and write one number."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.state = handle.getValueState("n", "n LONG")

    def number(self) -> int:
        return int(self.state.get()[0]) if self.state.exists() else 0

    def close(self) -> None:
        pass


class Counts(Processor):
    """The number of rows of each key so far."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        n = self.number() + sum(1 for _ in rows)
        self.state.update((n,))
        yield Row(k=key[0], n=n)


class CountsOfFrames(Processor):
    """The same with frames."""

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        n = self.number() + sum(map(len, rows))
        self.state.update((n,))
        yield pd.DataFrame({"k": pd.Series([key[0]], dtype=object), "n": [n]})


class Expiring(Processor):
    """Counts in a value, a list and a map that stay for an hour."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.value = handle.getValueState("value", "n LONG", 3_600_000)
        self.list = handle.getListState("list", "v INT", 3_600_000)
        self.map = handle.getMapState("map", "v INT", "n LONG", 3_600_000)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self.value.update(((self.value.get()[0] if self.value.exists() else 0) + 1,))
            self.list.appendValue((row.v,))
            self.map.updateValue((row.v,), (1,))
        yield Row(k=key[0], n=100 * self.value.get()[0] + 10 * len(list(self.list.get())) + len(list(self.map.keys())))


class FirstOfKey(Processor):
    """Emits a key once, and forgets a key whose row is 5."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        values = [row.v for row in rows]
        if not self.state.exists():
            yield Row(k=key[0], n=min(values))
        self.state.update((1,))
        if 5 in values:
            self.state.clear()


class Timed(Processor):
    """A timer at ten seconds after the last row ends the key; earlier timers are deleted."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        values = [row.v for row in rows]
        for timer in list(self.handle.listTimers()):
            self.handle.deleteTimer(timer)
        self.state.update((self.number() + len(values),))
        self.handle.registerTimer(1000 * (max(values) + 10))
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        n = self.number()
        self.state.clear()
        yield Row(k=key[0], n=1000 * n + expiredTimerInfo.getExpiryTimeInMs() // 1000)


class Rearmed(Processor):
    """Each timer sets another one, which may be due, and each second one deletes the last of the others."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            for later in (0, 7, 40):
                self.handle.registerTimer(1000 * (row.v + later))
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        n, at, timers = self.number(), expiredTimerInfo.getExpiryTimeInMs(), sorted(self.handle.listTimers())
        self.state.update((n + 1,))
        if n % 2:
            self.handle.deleteTimer(timers[-1])
        self.handle.registerTimer(at + (1000 if n % 4 else 30_000))
        yield Row(k=key[0], n=at + len(timers))


class Started(Counts):
    """Counts on from an initial state."""

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.state.update((initialState.n,))


class StartedWithTimers(Started):
    """The same; a timer of each key of the initial state is over with the first rows."""

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        super().handleInitialState(key, initialState, timerValues)
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() - 1)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(k=f"timer of {key[0]}", n=self.number())


class SaidKeys(Processor):
    """Says its key in each call, and when the timer of the key fires, ten seconds behind its last row."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        values = self.values(rows)
        self.state.update((self.number() + len(values),))
        self.handle.registerTimer(1000 * (max(values) + 10))
        yield self.said(tuple(key), self.number())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield self.said(key, -self.number())

    def values(self, rows: Iterator[Any]) -> list[int]:
        return [row.v for row in rows]

    def said(self, key: Any, n: int) -> Any:
        return Row(k=repr(key), n=n)


class SaidKeysOfFrames(SaidKeys):
    """The same with frames."""

    def values(self, rows: Iterator[Any]) -> list[int]:
        return [int(v) for frame in rows for v in frame["v"]]

    def said(self, key: Any, n: int) -> Any:
        return pd.DataFrame({"k": [repr(key)], "n": [n]})


class Address(NamedTuple):
    road: int
    city: str


class Composite(Processor, unittest.TestCase):
    """Keeps tuples, dicts and lists of them in states of structs, and emits dicts for structs.

    A processor that asserts may be a test case, too.
    """

    emitted = "k STRING, n LONG, last STRUCT<at: INT, city: STRING>"

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.value = handle.getValueState("value", "ids ARRAY<INT>, homes ARRAY<STRUCT<road: INT, city: STRING>>")
        self.map = handle.getMapState("map", "k STRING, n INT", "tags ARRAY<ARRAY<STRING>>, by MAP<STRING, INT>")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        ids, homes = self.value.get() or ([], [])
        values = [row.v for row in rows]
        known = [Address(home["road"], home["city"]) if isinstance(home, dict) else Address(*home) for home in homes]
        self.value.update(([*ids, *values], [*known, Address(values[0], f"{key[0]}{len(ids)}")]))
        place = (key[0], len(ids) % 2)
        old = self.map.getValue(place) if self.map.containsKey(place) else None
        self.map.updateValue(place, ([["a", None], []], {**(old[1] if old else {}), str(values[0]): len(values)}))
        tags, by = self.map.getValue(place)
        assert [list(each) for each in tags] == [["a", None], []]
        ids, homes = self.value.get()
        last = {"at": homes[-1][0], "city": homes[-1][1]}
        yield Row(k=key[0], n=1000 * sum(by.values()) + 100 * len(ids) + sum(ids), last=last)


class FiringBehindRows(Processor):
    """Counts until a timer of the clock, which is due at once, starts the count again; says how many timers there are.

    The timer of a call fires behind the next one, and both are there then.
    """

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        self.state.update((self.number() + sum(1 for _ in rows),))
        if key[0] == "a":
            self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 1)
        yield Row(k=key[0], n=self.number())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        self.state.clear()
        yield Row(k=key[0], n=-len(list(self.handle.listTimers())))


class Deleting(Processor):
    """Deletes a state that another version had, then counts."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        handle.deleteIfExists("before")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        self.state.update((self.number() + sum(1 for _ in rows),))
        yield Row(k=key[0], n=self.number())


class Failing(Processor):
    """Raises at a row of key c."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        if key[0] == "c":
            raise ValueError("the key is c")
        yield Row(k=key[0], n=1)


class RowsOfACall(Processor):
    """Emits how many rows each call got, which are those of a file."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> list[Row]:
        return [Row(n=sum(1 for _ in rows), k=key[0])]


class GreatestTwo(Processor):
    """Keeps the two greatest numbers of a key in a list, and emits them with each call."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.list = handle.getListState("list", "v INT")

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        values = [row[0] for row in self.list.get()] + [int(v) for frame in rows for v in frame["v"]]
        greatest = sorted(values, reverse=True)[:2]
        self.list.put([(value,) for value in greatest])
        for value in greatest:
            yield pd.DataFrame({"k": pd.Series([key[0]], dtype=object), "n": [value]})


class Stamped(Processor):
    """Emits the time of each row."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            yield Row(k=key[0], at=row.t)


class TimesInAZone(Processor):
    """Emits the key, and the times of its rows, as it gets them."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            yield Row(texts=[str(key[0]), str(row.t), str(row.ts)], at=row.t)


class TimesOfFramesInAZone(Processor):
    """The same with frames; a timer emits the key that it gets."""

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        for frame in rows:
            self.handle.registerTimer(1000 * int(frame["v"].max()) + 5000)
            texts = [[str(key[0]), str(t), str(list(ts))] for t, ts in zip(frame["t"], frame["ts"], strict=True)]
            yield pd.DataFrame({"texts": texts, "at": frame["t"]})

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        yield pd.DataFrame({"texts": [[str(key[0])]], "at": [None]})


class FramesOfACall(Processor):
    """Emits the sizes of the frames that each call got."""

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        yield pd.DataFrame({"k": [key[0]], "sizes": [[len(frame) for frame in rows]]})


class IntegersForDecimals(Processor):
    """Emits the number of rows as an integer, where a decimal is declared."""

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        yield pd.DataFrame({"k": [key[0]], "n": [sum(map(len, rows))]})


class TotalsFromAStart(Processor):
    """Totals of two keys that are not next to each other, from an initial state."""

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        n = self.number() + sum(int(frame["v"].sum()) for frame in rows)
        self.state.update((n,))
        yield pd.DataFrame({"k": [key[0]], "l": [key[1]], "n": [n]})

    def handleInitialState(self, key: Any, initialState: pd.DataFrame, timerValues: Any) -> None:
        self.state.update((int(initialState.at[0, "n"]),))


class Nested(Processor):
    """Keeps lists and maps of maps, and emits arrays, maps and structs in them."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.lists = handle.getListState("lists", "vs ARRAY<INT>")
        self.maps = handle.getMapState("maps", "k STRING", "m MAP<STRING, MAP<STRING, INT>>")

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        values = [int(v) for frame in rows for v in frame["v"]]
        self.lists.appendValue((values,))
        self.lists.appendList([([None, len(values)],)])
        known = self.maps.getValue(key)[0] if self.maps.containsKey(key) else {}
        self.maps.updateValue(key, ({**known, str(values[0]): {"n": len(values)}, "none": {}},))
        lists = [list(vs) for (vs,) in self.lists.get()]
        counts = {name: dict(inner) for _, (outer,) in self.maps.iterator() for name, inner in outer.items()}
        structs = [{"i": i, "words": [f"w{i}"] * i} for i in range(len(lists))]
        yield pd.DataFrame(
            {"k": [key[0]], "lists": [lists], "counts": [dict(sorted(counts.items()))], "structs": [structs]}
        )


program("update", schemas=PAIRS, settings=ROCKSDB, rows=ROWS)(
    processor_counts=lambda rows: rows.groupBy("k").transformWithState(Counts(), COUNTED, "Update", "None"),
    processor_of_frames_counts=lambda rows: rows.groupBy("k").transformWithStateInPandas(
        CountsOfFrames(), COUNTED, "Update", "None"
    ),
    processor_that_deletes_a_state=lambda rows: rows.groupBy("k").transformWithState(
        Deleting(), COUNTED, "Update", "None"
    ),
    processor_behind_an_aggregation_in_update_mode=lambda rows: (
        rows.groupBy("k").count().groupBy("k").transformWithState(Counts(), COUNTED, "Update", "None")
    ),
)

program("append", schemas=PAIRS, settings=ROCKSDB, rows=ROWS)(
    processor_emits_first_rows_in_append_mode=lambda rows: rows.groupBy("k").transformWithState(
        FirstOfKey(), COUNTED, "Append", "None"
    ),
    processor_with_expiring_states_and_no_time=lambda rows: rows.groupBy("k").transformWithState(
        Expiring(), COUNTED, "Append", "None"
    ),
    processor_with_timers_of_event_time=lambda rows: (
        timed(rows, "1 second").groupBy("k").transformWithState(Timed(), COUNTED, "Append", "EventTime")
    ),
    processor_with_timers_and_no_time=lambda rows: rows.groupBy("k").transformWithState(
        Timed(), COUNTED, "Append", "None"
    ),
    processor_that_fails=lambda rows: rows.groupBy("k").transformWithState(Failing(), COUNTED, "Append", "None"),
    processor_counts_the_rows_of_each_call=lambda rows: rows.groupBy("k").transformWithState(
        RowsOfACall(), COUNTED, "Append", "None"
    ),
    processor_of_frames_keeps_the_greatest_two=lambda rows: rows.groupBy("k").transformWithStateInPandas(
        GreatestTwo(), COUNTED, "Append", "None"
    ),
    processor_whose_output_mode_is_not_that_of_the_query=lambda rows: rows.groupBy("k").transformWithState(
        FirstOfKey(), COUNTED, "Update", "None"
    ),
)

REARMED = ([("a", 1), ("b", 2), ("a", 12)], [("b", 14), ("a", 15)], [("b", 14)], [("c", 33)], [("c", 33)])
program("append", schemas=PAIRS, settings=ROCKSDB, rows=(*REARMED, [("b", 80)], [("a", 79)], [("c", 120)]))(
    processor_whose_timers_set_and_delete_timers=lambda rows: (
        timed(rows).groupBy("k").transformWithState(Rearmed(), COUNTED, "Append", "EventTime")
    )
)

program("update", schemas=PAIRS, settings=WITHOUT_EMPTY_BATCHES, rows=ROWS)(
    processor_with_states_that_expire=lambda rows: rows.groupBy("k").transformWithState(
        Expiring(), COUNTED, "Update", "ProcessingTime"
    )
)

program("append", schemas=PAIRS, settings=WITHOUT_EMPTY_BATCHES, rows=ROWS)(
    processor_with_timers_of_the_clock_that_fire_behind_rows=lambda rows: rows.groupBy("k").transformWithState(
        FiringBehindRows(), COUNTED, "Append", "ProcessingTime"
    )
)

program(
    "append", schemas=PAIRS, settings=ROCKSDB, rows=ROWS, differs="The engine refuses it: the timers would never fire."
)(
    processor_with_timers_and_no_watermark=lambda rows: rows.groupBy("k").transformWithState(
        Timed(), COUNTED, "Append", "EventTime"
    )
)


@program("update", schemas=PAIRS, settings=ROCKSDB, rows=ROWS)
def processor_with_an_initial_state(rows: DataFrame) -> DataFrame:
    before = rows.sparkSession.createDataFrame([("a", 10), ("z", 5)], "k STRING, n LONG").groupBy("k")
    return rows.groupBy("k").transformWithState(Started(), COUNTED, "Update", "None", before)


@program("append", schemas=PAIRS, settings=WITHOUT_EMPTY_BATCHES, rows=ROWS)
def processor_with_an_initial_state_that_sets_timers(rows: DataFrame) -> DataFrame:
    before = rows.sparkSession.createDataFrame([("a", 10), ("z", 5)], "k STRING, n LONG").groupBy("k")
    return rows.groupBy("k").transformWithState(StartedWithTimers(), COUNTED, "Append", "ProcessingTime", before)


program("append", schemas=PAIRS, settings=ROCKSDB, rows=ROWS)(
    processor_of_composite_states=lambda rows: rows.groupBy("k").transformWithState(
        Composite(), Composite.emitted, "Append", "None"
    )
)


@program("update", schemas=PAIRS, settings=ROCKSDB, rows=ROWS)
def processor_with_an_initial_state_of_more_keys(rows: DataFrame) -> DataFrame:
    before = rows.sparkSession.createDataFrame([("a", 10)], "k STRING, n LONG").groupBy("k", "n")
    return rows.groupBy("k").transformWithState(Started(), COUNTED, "Update", "None", before)


NESTED = ([("a", 1), ("b", 2), ("a", 3), (None, 3)], [("a", 4), ("c", 5)], [("b", 6), (None, 7), ("a", 40)])
STRUCT = "struct(k AS of, timestamp_seconds(length(k)) AS at, struct(2.5D AS f) AS within)"


def nested(rows: DataFrame) -> GroupedData:
    """Groups by structs in structs and a text: some fields are null, and some structs."""
    stamped = timed(rows, "1 second").withColumn("s", F.when(F.col("v") != 7, F.expr(STRUCT)))
    return stamped.withColumn("l", F.coalesce("k", F.lit("none"))).groupBy("s", "l")


program("append", schemas=PAIRS, settings=ROCKSDB, rows=NESTED)(
    processor_of_structs_as_keys=lambda rows: nested(rows).transformWithState(
        SaidKeys(), COUNTED, "Append", "EventTime"
    ),
    processor_of_frames_with_structs_as_keys=lambda rows: nested(rows).transformWithStateInPandas(
        SaidKeysOfFrames(), COUNTED, "Append", "EventTime"
    ),
    function_of_frames_with_structs_as_keys=lambda rows: nested(rows).applyInPandasWithState(
        said, COUNTED, "n LONG", "append", "EventTimeTimeout"
    ),
    processor_of_windows_as_keys=lambda rows: (
        timed(rows, "1 second")
        .withColumn("w", F.window("t", "4 seconds"))
        .drop("t")
        .groupBy("w")
        .transformWithState(SaidKeys(), COUNTED, "Append", "EventTime")
    ),
    function_of_frames_with_arrays_as_keys=lambda rows: (
        timed(rows, "1 second")
        .withColumn("ks", F.array(F.expr(STRUCT)))
        .groupBy("ks")
        .applyInPandasWithState(said, COUNTED, "n LONG", "append", "EventTimeTimeout")
    ),
)


@program("append", schemas=PAIRS, settings=ROCKSDB, rows=ROWS)
def processor_of_structs_as_keys_with_an_initial_state(rows: DataFrame) -> DataFrame:
    keyed = F.struct(F.col("k").alias("of")).alias("k")
    before = rows.sparkSession.createDataFrame([("a", 10), ("z", 5)], "k STRING, n LONG").select(keyed, "n")
    return rows.select(keyed, "v").groupBy("k").transformWithState(
        Started(), "k STRUCT<of: STRING>, n LONG", "Append", "None", before.groupBy("k")
    )  # fmt: skip


program("complete", schemas=PAIRS, settings=ROCKSDB, rows=ROWS)(
    processor_in_complete_mode=lambda rows: rows.groupBy("k").transformWithState(Counts(), COUNTED, "Complete", "None")
)


@program("append", schemas=PAIRS, settings=ROCKSDB, rows=ROWS)
def processors_in_a_row(rows: DataFrame) -> DataFrame:
    first = rows.groupBy("k").transformWithState(FirstOfKey(), COUNTED, "Append", "None")
    return first.groupBy("n").transformWithState(Counts(), "k LONG, n LONG", "Append", "None")


@program("append", schemas=PAIRS, settings=ROCKSDB, rows=ROWS)
def windows_behind_a_processor(rows: DataFrame) -> DataFrame:
    stamped = timed(rows, "0 seconds").groupBy("k").transformWithState(
        Stamped(), "k STRING, at TIMESTAMP", "Append", "EventTime", eventTimeColumnName="at"
    )  # fmt: skip
    return stamped.groupBy(F.window("at", "5 seconds")).count().selectExpr(*seconds(), "count")


FRAMES_OF_ONE_ROW = {**ROCKSDB, "spark.sql.execution.arrow.maxRecordsPerBatch": "1"}
COERCED = {**ROCKSDB, "spark.sql.execution.pythonUDF.pandas.intToDecimalCoercionEnabled": "true"}


program("append", schemas=PAIRS, settings=FRAMES_OF_ONE_ROW, rows=ROWS)(
    processor_gets_frames_of_as_many_rows_as_an_option_says=lambda rows: rows.groupBy("k").transformWithStateInPandas(
        FramesOfACall(), "k STRING, sizes ARRAY<INT>", "Append", "None"
    )
)


@program("append", schemas=PAIRS, settings=COERCED, rows=ROWS)
def processor_emits_integers_for_decimals(rows: DataFrame) -> DataFrame:
    emitted = "k STRING, n DECIMAL(10, 2)"
    return rows.groupBy("k").transformWithStateInPandas(IntegersForDecimals(), emitted, "Append", "None")


program("append", schemas=PAIRS, settings=ROCKSDB, rows=ROWS)(
    processor_emits_integers_for_decimals_without_the_option=processor_emits_integers_for_decimals
)


@program(
    "append",
    schemas={"rows": "k STRING, v INT, l STRING"},
    settings=ROCKSDB,
    rows=([("a", 1, "x"), ("a", 2, "x"), ("b", 4, "w")], [("a", 8, "x"), ("a", 16, "y"), ("c", 32, "z")]),
)
def processor_of_frames_with_keys_apart_and_an_initial_state(rows: DataFrame) -> DataFrame:
    started = [(100, "a", "x"), (200, "d", "x")]
    before = rows.sparkSession.createDataFrame(started, "n LONG, k STRING, l STRING").groupBy("k", "l")
    grouped = rows.groupBy("k", "l")
    return grouped.transformWithStateInPandas(
        TotalsFromAStart(), "k STRING, l STRING, n LONG", "Append", "None", before
    )


@program("append", schemas=PAIRS, settings=ROCKSDB, rows=ROWS)
def processor_of_frames_with_nested_states_and_results(rows: DataFrame) -> DataFrame:
    emitted = "k STRING, lists ARRAY<ARRAY<INT>>, counts MAP<STRING, MAP<STRING, INT>>, "
    emitted += "structs ARRAY<STRUCT<i: INT, words: ARRAY<STRING>>>"
    return rows.groupBy("k").transformWithStateInPandas(Nested(), emitted, "Append", "None")


@program("append", schemas=PAIRS, settings=ROCKSDB, rows=([("a", 10), ("b", 15)], [("a", 16), ("c", 25)], [("a", 40)]))
def counts_of_the_times_and_keys_that_a_processor_emits(rows: DataFrame) -> DataFrame:
    stamped = timed(rows, "5 seconds").groupBy("k").transformWithState(
        Stamped(), "k STRING, at TIMESTAMP", "Append", "EventTime", eventTimeColumnName="at"
    )  # fmt: skip
    return stamped.groupBy("at", "k").count()


IN_A_ZONE = {**ROCKSDB, "spark.sql.session.timeZone": "America/New_York"}
TEXTS = "texts ARRAY<STRING>, at TIMESTAMP"


def of_times(rows: DataFrame) -> DataFrame:
    """The rows with an array of times, beside the time by which they are grouped."""
    return timed(rows, "1 second").withColumn("ts", F.array("t"))


program("append", schemas=PAIRS, settings=IN_A_ZONE, rows=ROWS)(
    processor_of_times_in_a_zone=lambda rows: (
        of_times(rows).groupBy("t").transformWithState(TimesInAZone(), TEXTS, "Append", "EventTime")
    ),
    processor_of_frames_of_times_in_a_zone=lambda rows: (
        of_times(rows).groupBy("t").transformWithStateInPandas(TimesOfFramesInAZone(), TEXTS, "Append", "EventTime")
    ),
    function_of_frames_of_times_in_a_zone=lambda rows: (
        of_times(rows).groupBy("t").applyInPandasWithState(times, TEXTS, "n LONG", "append", "EventTimeTimeout")
    ),
)


def times(key: tuple[Any, ...], frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    if state.hasTimedOut:
        state.remove()
        yield pd.DataFrame({"texts": [[str(key[0])]], "at": [None]})
        return
    for frame in frames:
        state.update((1,))
        state.setTimeoutTimestamp(1000 * int(frame["v"].max()) + 5000)
        texts = [[str(key[0]), str(t), str(list(ts))] for t, ts in zip(frame["t"], frame["ts"], strict=True)]
        yield pd.DataFrame({"texts": texts, "at": frame["t"]})


def first_timeout(key: tuple[Any, ...], frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Sets a timeout with the first rows of a key only. The calls with later rows change nothing."""
    n = sum(map(len, frames))
    if state.hasTimedOut:
        state.remove()
    elif not state.exists:
        state.update((n,))
        state.setTimeoutTimestamp(20_000)
    yield pd.DataFrame({"k": [key[0]], "n": [n]})


@program("append", schemas=PAIRS, rows=(*ROWS, [(None, 15)]))
def timeout_that_calls_without_a_change_keep(rows: DataFrame) -> DataFrame:
    grouped = timed(rows, "1 second").groupBy("k")
    return grouped.applyInPandasWithState(first_timeout, COUNTED, "n LONG", "append", "EventTimeTimeout")


def running(key: tuple[Any, ...], frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    n = (state.get[0] if state.exists else 0) + sum(map(len, frames))
    state.update((n,))
    yield pd.DataFrame({"k": pd.Series([key[0]], dtype=object), "n": [n]})


def ending(key: tuple[Any, ...], frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    if state.hasTimedOut:
        [n] = state.get
        state.remove()
        yield pd.DataFrame({"k": pd.Series([key[0]], dtype=object), "n": [n]})
        return
    values = [value for frame in frames for value in frame["v"]]
    state.update(((state.get[0] if state.exists else 0) + len(values),))
    state.setTimeoutTimestamp(1000 * (max(values) + 10))


def said(key: tuple[Any, ...], frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Says its key, with the number of its rows so far, below zero when its timeout is over."""
    [n] = state.get if state.exists else (0,)
    if state.hasTimedOut:
        state.remove()
        yield pd.DataFrame({"k": [repr(key)], "n": [-n]})
        return
    values = [int(value) for frame in frames for value in frame["v"]]
    state.update((n + len(values),))
    state.setTimeoutTimestamp(1000 * (max(values) + 10))
    yield pd.DataFrame({"k": [repr(key)], "n": [n + len(values)]})


program("update", schemas=PAIRS, rows=ROWS)(
    function_of_frames_with_state_counts=lambda rows: rows.groupBy("k").applyInPandasWithState(
        running, COUNTED, "n LONG", "update", "NoTimeout"
    )
)


program(
    "update",
    schemas=PAIRS,
    settings={"execution.stateful-processor.trigger.type": "CHECKPOINT"},
    trigger="once",
    rows=ROWS,
)(
    function_of_frames_with_state_in_a_batch_of_several_files=lambda rows: rows.groupBy("k").applyInPandasWithState(
        running, COUNTED, "n LONG", "update", "NoTimeout"
    )
)


@program("append", schemas=PAIRS, rows=ROWS)
def function_of_frames_with_state_ends_by_event_time(rows: DataFrame) -> DataFrame:
    grouped = timed(rows, "1 second").groupBy("k")
    return grouped.applyInPandasWithState(ending, COUNTED, "n LONG", "append", "EventTimeTimeout")


program("append", schemas=PAIRS, rows=ROWS)(
    function_of_frames_with_state_and_no_watermark=lambda rows: rows.groupBy("k").applyInPandasWithState(
        ending, COUNTED, "n LONG", "append", "EventTimeTimeout"
    ),
    function_of_frames_whose_output_mode_is_not_that_of_the_query=lambda rows: rows.groupBy("k").applyInPandasWithState(
        running, COUNTED, "n LONG", "update", "NoTimeout"
    ),
)


@program("append", schemas=PAIRS, rows=ROWS)
def functions_of_frames_without_state(rows: DataFrame) -> DataFrame:
    def doubled(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        for frame in frames:
            yield frame[["v"]] * 2

    return rows.mapInPandas(doubled, "v LONG").withColumn("w", F.udf("long")(lambda v: v + 1)("v"))


program("append", schemas=PAIRS, rows=ROWS, differs="The engine refuses it: its groups are those of a micro-batch.")(
    group_map_of_frames=lambda rows: rows.groupBy("k").applyInPandas(lambda frame: frame, "k STRING, v INT")
)
