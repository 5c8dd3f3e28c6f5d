"""Keys and entries as bytes: every type comes back, equal keys have equal bytes, everything else is refused."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.errors import CorruptStateError
from ckpt_runtime.state.rocksdb.codec import KeyCodec, RowsCodec, group_prefix, state_prefix
from ckpt_runtime.state.values import NAN

ALL = KeyGroupRange(0, 127)
TOKYO = dt.datetime(1999, 1, 1, 5, tzinfo=ZoneInfo("Asia/Tokyo"))


def codec(*kinds: pa.DataType, owned: KeyGroupRange = ALL) -> KeyCodec:
    return KeyCodec(pa.schema([(f"k{place}", kind) for place, kind in enumerate(kinds)]), owned, 128)


def never() -> int:
    raise AssertionError


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        (pa.int8(), -128), (pa.int64(), 2**63 - 1), (pa.uint64(), 2**64 - 1), (pa.bool_(), True), (pa.float32(), 1.5),
        (pa.float64(), float("inf")), (pa.string(), "ж\0"), (pa.large_binary(), b"\xff\0"), (pa.binary(3), b"abc"),
        (pa.decimal128(38, 10), Decimal("-1234567890.0000000001")), (pa.date32(), dt.date(1, 1, 1)),
        (pa.time64("us"), dt.time(23, 59, 59, 999999)), (pa.timestamp("us"), dt.datetime.max),
        (pa.timestamp("ms", "Asia/Tokyo"), TOKYO), (pa.duration("us"), dt.timedelta(days=-400, microseconds=5)),
        (pa.int64(), None), (pa.null(), None),
    ],
)  # fmt: skip
def test_keys_of_every_type_come_back(kind: pa.DataType, part: Any) -> None:
    keys = codec(kind, pa.string())
    (encoded,) = keys.encode(7, [(part, "x")])
    assert keys.decode(encoded) == (part, "x")
    assert encoded.startswith(state_prefix(int.from_bytes(encoded[:2], "big"), 7))


def test_equal_keys_have_equal_bytes() -> None:
    floats = codec(pa.float64())
    assert len(set(floats.encode(0, [(0.0,), (-0.0,)]))) == 1
    (encoded,) = floats.encode(0, [(NAN,)])
    assert floats.decode(encoded)[0] is NAN
    times = codec(pa.timestamp("us", "Asia/Tokyo"))
    assert len(set(times.encode(0, [(TOKYO,), (TOKYO.astimezone(dt.UTC),)]))) == 1


def test_keys_are_in_the_order_of_groups_and_states() -> None:
    prefixes = [state_prefix(group, state) for group in (0, 1, 255, 256, 32767) for state in (0, 255, 256, 65535)]
    assert prefixes == sorted(prefixes)
    assert state_prefix(3, 65536) == group_prefix(4) + b"\0\0"


def test_a_key_of_another_subtask_may_be_asked_for_but_not_written() -> None:
    keys = codec(pa.int64(), owned=KeyGroupRange(5, 5))
    assert len(keys.encode(0, [(number,) for number in range(99)])) == 99
    with pytest.raises(CorruptStateError, match="5 to 5 are its own"):
        keys.encode(0, [(number,) for number in range(99)], to_write=True)
    assert keys.encode(0, [], to_write=True) == []


@pytest.mark.parametrize("damage", [b"", b"\x91", b"\x91\xa1x", b"\x92\1\2", b"\x91\1\1"])
def test_bytes_that_are_no_key_are_refused(damage: bytes) -> None:
    with pytest.raises(CorruptStateError, match="the key"):
        codec(pa.int64()).decode(state_prefix(0, 0) + damage)


def test_rows_are_read_in_the_present_schema() -> None:
    old = pa.schema([("value.a", pa.int32()), ("value.gone", pa.string())])
    new = pa.schema([("value.b", pa.string()), ("value.a", pa.int64()), ("expires_at", pa.int64())])
    before = RowsCodec({0: old}, 0, never)
    now = RowsCodec({0: old, 1: new}, 1, lambda: 99)
    assert now.decode(before.encode([(1, "x"), (2, None)])) == [(None, 1, 99), (None, 2, 99)]
    assert now.decode(now.encode([("b", 2**40, 5)])) == [("b", 2**40, 5)]
    assert [now.is_current(rows.encode([])) for rows in (before, now)] == [False, True]
    with pytest.raises(CorruptStateError, match="unknown schema 1"):
        before.decode(now.encode([]))
