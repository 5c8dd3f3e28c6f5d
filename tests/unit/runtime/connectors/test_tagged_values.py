"""Partitions and commit messages as data: what is carried, what is refused, and that no text names code to import."""

from __future__ import annotations

import json
import subprocess
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntFlag
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import orjson
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.datasource import InputPartition, WriterCommitMessage
from pyspark.sql.types import ArrayType, DecimalType, StructType

from ckpt_runtime.connectors.datasource_rows import values_of
from ckpt_runtime.connectors.tagged_values import UnreadableValueError, ValueNotCarriedError


class Source:
    """Stands for the data source: its module is this one."""


class Colour(Enum):
    RED = object()


class Access(IntFlag):
    READ = 1
    WRITE = 2


class Place(NamedTuple):
    topic: str
    offset: int


@dataclass(frozen=True)
class Frozen(WriterCommitMessage):
    value: Any
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Slim:
    value: Any


class Plain(InputPartition):
    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.calls = 1


class Slotted:
    __slots__ = ("__hidden", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.__hidden = "here"

    @property
    def hidden(self) -> str:
        return self.__hidden

    class Inner:
        """A class inside another."""


class Locked:
    """Leaves out what cannot travel, as for pickle."""

    def __init__(self, value: Any) -> None:
        self.value, self.lock = value, threading.Lock()

    def __getstate__(self) -> Any:
        return {"value": self.value}

    def __setstate__(self, state: Any) -> None:
        self.__init__(**state)  # type: ignore[misc]


class Number(int):
    """More than its attributes."""


class Reduced:
    def __reduce__(self) -> Any:
        return subprocess.run, (["false"],)


VALUES_OF_PLAN = values_of(Source)


def round_trip(value: Any) -> Any:
    text = VALUES_OF_PLAN.encode(value, "it")
    assert orjson.loads(text) == json.loads(text)
    return VALUES_OF_PLAN.decode(text)


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.uuids()
    | st.dates() | st.datetimes() | st.datetimes(timezones=st.timezones()) | st.times() | st.timedeltas()
    | st.decimals(allow_nan=False) | st.complex_numbers(allow_nan=False)
)  # fmt: skip
HASHABLE = SCALARS | st.tuples(SCALARS, SCALARS) | st.frozensets(SCALARS, max_size=3)
VALUES = st.recursive(
    HASHABLE | st.sets(HASHABLE, max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(HASHABLE, inner, max_size=4)
        | inner.map(Frozen)
        | inner.map(Slim)
    ),
    max_leaves=10,
)


@given(VALUES)
def test_values_come_back_as_they_were(value: Any) -> None:
    again = round_trip(value)
    assert again == value
    assert type(again) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        10**5000, -(2**63), 2**53 + 1, float("inf"), "caf\udce9", bytearray(b"x"), range(3, 2**70, 2),
        datetime(2020, 1, 1, tzinfo=UTC), datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
        datetime(2020, 1, 1, tzinfo=timezone(timedelta(hours=-3, seconds=5), "odd")), time(1, 2, tzinfo=UTC),
        date(2020, 1, 1), Decimal("1.50"), Decimal("Infinity"), UUID(int=7), Path("/a/b"), PurePosixPath("c\udcff"),
        OrderedDict([("b", 1), ("a", 2)]), {(1, "a"): {frozenset({1}): None}, None: [], 1.5: b""}, Access.READ,
        Access.READ | Access.WRITE, Colour.RED, Place("t", 3), Row(b=1, a=[Row(1, 2)]), Row("x", 1), (), [{}], True,
        {"$object": ["a:B", {}, {}]}, {"$int": "0x1"}, ZoneInfo("Asia/Tokyo"), UTC,
        np.int8(-3), np.uint64(2**64 - 1), np.float32(1.5), np.bool_(True), np.str_("é"), np.bytes_(b"x"),
        np.datetime64("2020-01-01T00:00:00.000000001"), np.timedelta64(3, "h"), np.complex64(1j),
        deque([1, (2,)], maxlen=3), deque(), Counter("abca"), defaultdict(list, {(1,): [2]}), defaultdict(None, a=1),
        pd.Timestamp("2020-01-01 00:00:00.000000001"), pd.Timestamp(1, unit="s"), pd.Timedelta("3h"),
        pd.Timestamp("2024-10-27 01:30", tz="UTC").tz_convert("Europe/Berlin"), pd.Timestamp("2024-10-27 00:30+02:00"),
        pd.Timestamp("2024-10-27 00:30", tz="UTC"),
        StructType().add("a", DecimalType(9, 2), False).add("b", ArrayType(StructType()), metadata={"d": 1}),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_values_of_every_kind_come_back_as_they_were(value: Any) -> None:
    again = round_trip(value)
    assert type(again) is type(value)
    assert again == value
    if not isinstance(value, int):
        assert repr(again) == repr(value)
    assert getattr(again, "fold", 0) == getattr(value, "fold", 0)


def test_not_a_number_and_arrays() -> None:
    assert str(round_trip(float("nan"))) == "nan"
    assert str(round_trip(Decimal("NaN"))) == "NaN"
    assert round_trip(pd.NaT) is pd.NaT
    array = np.arange(6, dtype=">i4").reshape(2, 3)
    again = round_trip({"a": array})["a"]
    assert (again.dtype, again.shape, again.tolist()) == (array.dtype, array.shape, array.tolist())
    again[0, 0] = 7


def test_objects_by_their_attributes() -> None:
    plain = round_trip(Plain((1, b"x")))
    assert (type(plain), plain.value, plain.calls) == (Plain, (1, b"x"), 1)
    slotted = round_trip(Slotted({1, 2}))
    assert (slotted.value, slotted.hidden) == ({1, 2}, "here")
    assert type(round_trip(Slotted.Inner())) is Slotted.Inner
    locked = round_trip([Locked("v")])[0]
    assert locked.value == "v"
    with locked.lock:
        pass
    assert round_trip(InputPartition(3)).value == 3
    assert type(round_trip(WriterCommitMessage())) is WriterCommitMessage


def local_class() -> Any:
    class Local:
        pass

    return Local()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Plain([0, {"a": threading.Lock()}]), r"^it\.value\[1\]\['a'\] is of type _thread.lock, which cannot travel"),
        (Frozen({object(): 1}), r"^it\.value key is of type object"),
        (lambda: 1, "^it is of type function, which cannot travel"),
        (Plain, "^it is of type type, which cannot travel"),
        (iter([1]), "^it is of type list_iterator"),
        (
            defaultdict(local_class),
            "^it is of type collections.defaultdict, which creates values of a type that is not built in",
        ),
        (Number(3), "Number, which cannot travel"),
        (Reduced(), "Reduced, which cannot travel"),
        (ValueError("x"), "^it is of type ValueError"),
        (local_class(), "Local, which is not a class of the plan: define it at the top level of the source's module"),
        (subprocess.CompletedProcess([], 0), "CompletedProcess, which cannot travel"),
        (np.array([object()]), r"ndarray, which with dtype \|O cannot travel"),
        (Slim(local_class()), r"^it\.__getstate__\(\)\[0\] is of type .*Local"),
    ],
)
def test_value_that_cannot_be_stored_is_named_with_its_path_and_a_remedy(value: Any, text: str) -> None:
    with pytest.raises(ValueNotCarriedError, match=text) as caught:
        VALUES_OF_PLAN.encode(value, "it")
    assert "Allowed are None, bool, int" in str(caught.value)
    assert "Pass the values from which the object can be created" in str(caught.value)


def test_value_that_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(
        ValueNotCarriedError, match=r"^it\[0\]\[0\].* is nested deeper than 100 levels, or contains itself"
    ):
        VALUES_OF_PLAN.encode(endless, "it")


@pytest.mark.parametrize(
    "document",
    [
        {"$object": ["subprocess:Popen", {"args": ["true"]}, {}]},
        {"$object": ["os:system", {}, {}]},
        {"$object": ["antigravity:Anything", {}, {}]},
        {"$object": ["pyspark.sql.session:SparkSession", {}, {}]},
        {"$object": ["ckpt_runtime.graph.errors:PlanError", {}, {}]},
        {"$object": [f"{__name__}:Reduced", {}, {}]},
        {"$object": [f"{__name__}:Colour", {}, {}]},
        {"$object": [f"{__name__}:Nothing", {}, {}]},
        {"$enum": [f"{__name__}:Plain", "RED"]},
        {"$enum": [f"{__name__}:Colour", "GREEN"]},
        {"$namedtuple": [f"{__name__}:Plain", []]},
        {"$state": ["builtins:object", {}]},
        {"$numpy": ["|O", None, ""]},
        {"$numpy": ["<i8", [1 << 60], ""]},
        {"$zone": "../../etc/passwd"},
        {"$path": ["Popen", "x"]},
        {"$eval": "1"},
        {"a": 1, "b": 2},
        {"$tuple": 3},
    ],
    ids=str,
)
def test_texts_make_nothing_but_values_and_objects_of_the_plan(document: dict[str, Any]) -> None:
    with pytest.raises(UnreadableValueError):
        VALUES_OF_PLAN.decode(json.dumps(document))


def test_class_that_no_longer_exists_is_named() -> None:
    text = VALUES_OF_PLAN.encode(Plain(1), "it").replace("Plain", "Gone")
    with pytest.raises(
        UnreadableValueError, match="class .*:Gone is not a class of the plan, but was one when the text was"
    ):
        VALUES_OF_PLAN.decode(text)
