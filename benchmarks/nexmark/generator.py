"""The events of Nexmark: persons, auctions and bids, each a function of its number, computed by a compiled kernel.

The rules are those of the generator that is published with Nexmark for Flink: of 50 events one is a person, three are
auctions and 46 are bids; half of the bids go to one hot auction of the latest hundred, three quarters come from a hot
bidder, three quarters of the auctions from a hot seller; the columns have the published sizes. Text comes from pools of
up to some thousand values, which columns refer to as dictionaries, as the rows of Flink's peer refer to its pools.
Within each group of 1,000 events arrival and event time have different orders.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ckpt_runtime.state.columns import bytes_array
from ckpt_runtime.state.kernels.compiler import I32, I64, IN_I64, INT64, U8, inlined, kernel, read_only

GROUP = 1_000
"""So many events lie between two points at which arrival and event time agree."""
START_US = 1_767_225_600_000_000
"""The event time of event 0, in microseconds since the epoch: 2026-01-01 in UTC."""
EVENTS_PER_S = 100_000
"""How many events there are in a second of event time, unless the source is given another number."""

_PROPORTION, _AUCTIONS = 50, 3
_FIRST_ID, _FIRST_CATEGORY = 1_000, 10
_IN_FLIGHT_AUCTIONS, _ACTIVE_PEOPLE, _LEAD, _HOT = 100, 1_000, 10, 100
_ARRIVAL_STEP = 953  # has no divisor in common with GROUP
_POOL, _PRICES, _CHANNELS = 4_096, 65_536, 10_000

_TIME = pa.timestamp("us", "UTC")
PERSON = pa.schema(
    [
        ("id", pa.int64()),
        *((name, pa.string()) for name in ("name", "emailAddress", "creditCard", "city", "state")),
        ("dateTime", _TIME),
        ("extra", pa.string()),
    ]
)
AUCTION = pa.schema(
    [
        ("id", pa.int64()),
        ("itemName", pa.string()),
        ("description", pa.string()),
        ("initialBid", pa.int64()),
        ("reserve", pa.int64()),
        ("dateTime", _TIME),
        ("expires", _TIME),
        ("seller", pa.int64()),
        ("category", pa.int64()),
        ("extra", pa.string()),
    ]
)
BID = pa.schema(
    [
        *((name, pa.int64()) for name in ("auction", "bidder", "price")),
        ("channel", pa.string()),
        ("url", pa.string()),
        ("dateTime", _TIME),
        ("extra", pa.string()),
    ]
)
EVENT = pa.schema(
    [
        ("event_type", pa.int32()),
        ("person", pa.struct(list(PERSON))),
        ("auction", pa.struct(list(AUCTION))),
        ("bid", pa.struct(list(BID))),
    ]
)
"""One row for each event; ``event_type`` is 0, 1 or 2, and only the column of that type is not null."""
KINDS = {"person": PERSON, "auction": AUCTION, "bid": BID}
"""The columns of each kind of event, by the column of :data:`EVENT` that has them; ``event_type`` numbers them."""

Hashes = npt.NDArray[np.uint64]


def place_of(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The places, in the order of arrival, of the events with these numbers, which are in the order of event time."""
    within = numbers % GROUP
    return numbers - within + within * pow(_ARRIVAL_STEP, -1, GROUP) % GROUP


def mixed(values: Hashes) -> Hashes:
    """Returns the splitmix64 hash of each value."""
    with np.errstate(over="ignore"):
        z = values + np.uint64(0x9E3779B97F4A7C15)
        z ^= z >> np.uint64(30)
        z *= np.uint64(0xBF58476D1CE4E5B9)
        z ^= z >> np.uint64(27)
        z *= np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return z


@inlined
def _mix(value: Any) -> Any:
    """splitmix64 of a number."""
    z = np.uint64(value) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@inlined
def _below(hashed: Any, at: int, limit: int) -> Any:
    return (hashed >> np.uint64(at)) % np.uint64(limit)


@kernel((INT64, INT64, IN_I64, U8))
def make_text(number: int, most: int, ends: Any, data: Any) -> None:
    """Writes letters and some spaces up to the end of each text of a pool, all of which have less than ``most``."""
    for text in range(ends.size - 1):
        first = (number << 44) + text * most - ends[text]
        for at in range(ends[text], ends[text + 1]):
            h = _mix(first + at)
            data[at] = np.uint8(32) if h % np.uint64(13) == 0 else np.uint8(97 + np.int64(_below(h, 20, 26)))


def _texts(number: int, count: int, least: int, most: int) -> pa.Array:
    """Returns texts of letters and some spaces, of ``least`` to ``most`` - 1 characters."""
    heads = mixed(np.arange(count, dtype=np.uint64) + np.uint64(number << 40))
    ends = np.zeros(count + 1, np.int64)
    np.cumsum((heads % np.uint64(most - least)).astype(np.int64) + least, out=ends[1:])
    data = np.empty(ends[-1], np.uint8)
    make_text(number, most, read_only(ends), data)
    return bytes_array(pa.string(), ends, data)


class Pools:
    """The values that strings and prices are taken from. Each pool is a function of its own number."""

    def __init__(self) -> None:
        first = ("Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter", "Walter")
        last = ("Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris")
        cities = [
            "Phoenix",
            "Los Angeles",
            "San Francisco",
            "Boise",
            "Portland",
            "Bend",
            "Redmond",
            "Seattle",
            "Kent",
            "Cheyenne",
        ]
        words = [text.replace(" ", "_") for text in _texts(1, _POOL, 12, 13).to_pylist()]
        digits = mixed(np.arange(_POOL, dtype=np.uint64) + np.uint64(2 << 32)) % np.uint64(10**16)
        cards = [f"{number:016d}" for number in digits.tolist()]
        paths = [text.replace(" ", "_") for text in _texts(8, _CHANNELS + 4, 15, 16).to_pylist()]
        urls = [f"https://www.nexmark.com/{p[:5]}/{p[5:10]}/{p[10:]}/item.htm?query=1" for p in paths]
        numbers = mixed(np.arange(_CHANNELS, dtype=np.uint64) + np.uint64(9 << 32)) >> np.uint64(33)
        with_id = [
            url if number % 10 == 0 else f"{url}&channel_id={number}"
            for url, number in zip(urls[4:], numbers.tolist(), strict=True)
        ]
        hot = ["Google", "Facebook", "Baidu", "Apple"]
        self.texts = {
            "person.name": pa.array([f"{one} {other}" for one in first for other in last]),
            "person.emailAddress": pa.array([f"{word[:7]}@{word[7:]}.com" for word in words]),
            "person.creditCard": pa.array([" ".join(card[at : at + 4] for at in range(0, 16, 4)) for card in cards]),
            "person.city": pa.array(cities),
            "person.state": pa.array(["AZ", "CA", "ID", "OR", "WA", "WY"]),
            "person.extra": _texts(3, _POOL, 109, 163),
            "auction.itemName": _texts(4, _POOL, 3, 20),
            "auction.description": _texts(5, _POOL, 3, 100),
            "auction.extra": _texts(6, _POOL, 312, 468),
            "bid.channel": pa.array(hot + [f"channel-{at}" for at in range(_CHANNELS)]),
            "bid.url": pa.array(urls[:4] + with_id),
            "bid.extra": _texts(7, _POOL, 54, 82),
        }
        """The values of each column of text."""
        exponents = np.arange(_PRICES) / _PRICES * 6
        self.prices = read_only(np.rint(10**exponents * 100).astype(np.int64))
        """Every price is as likely as another in the logarithm: from 100 to 100,000,000."""


POOLS = Pools()


@inlined
def _bits(hashed: Any, at: int, count: int) -> Any:
    return (hashed >> np.uint64(at)) & np.uint64((1 << count) - 1)


@inlined
def _remainder(hashed: Any, limit: int) -> Any:
    """Of numbers that have 32 bits, whose division takes less time."""
    return np.int64(np.uint32(hashed) % np.uint32(limit))


@inlined
def _last_auction(number: int) -> Any:
    """The number of the latest auction among the events up to a number: -1 in front of the first one."""
    return number // _PROPORTION * _AUCTIONS + min(number % _PROPORTION - 1, _AUCTIONS - 1)


@inlined
def _some_person(person: int, hashed: int) -> Any:
    """One of the active people when ``person`` is the latest."""
    people = person + 1
    active = min(people, _ACTIVE_PEOPLE)
    return people - active + _remainder(hashed, active + _LEAD)


@inlined
def _person(row: int, rows: int, number: int, time: int, texts: Any, numbers: Any) -> None:
    h = _mix(number)
    numbers[row] = number // _PROPORTION + _FIRST_ID
    numbers[rows + row] = time
    texts[row] = _below(h, 1, 99)
    texts[rows + row] = _bits(h, 8, 12)
    texts[2 * rows + row] = _bits(h, 20, 12)
    texts[3 * rows + row] = _below(h, 32, 10)
    texts[4 * rows + row] = _below(h, 40, 6)
    texts[5 * rows + row] = _bits(_mix(h), 0, 12)


@inlined
def _auction(row: int, rows: int, number: int, time: int, step_us: int, prices: Any, texts: Any, numbers: Any) -> None:
    h = _mix(number)
    g = _mix(h)
    person = number // _PROPORTION
    initial = prices[_bits(h, 24, 16)]
    horizon_us = max(1_000, _IN_FLIGHT_AUCTIONS * _PROPORTION // _AUCTIONS * step_us)
    seller = person // _HOT * _HOT if _bits(g, 0, 2) else _some_person(person, _bits(g, 2, 24))
    numbers[2 * rows + row] = _last_auction(number) + _FIRST_ID
    numbers[3 * rows + row] = initial
    numbers[4 * rows + row] = initial + prices[_bits(h, 40, 16)]
    numbers[5 * rows + row] = time
    numbers[6 * rows + row] = time + 1_000 + np.int64(_below(g, 36, 2 * horizon_us))
    numbers[7 * rows + row] = seller + _FIRST_ID
    numbers[8 * rows + row] = np.int64(_below(g, 32, 5)) + _FIRST_CATEGORY
    texts[6 * rows + row] = _bits(h, 0, 12)
    texts[7 * rows + row] = _bits(h, 12, 12)
    texts[8 * rows + row] = _bits(g, 48, 12)


@inlined
def _bid(row: int, rows: int, number: int, time: int, prices: Any, texts: Any, numbers: Any) -> None:
    h = _mix(number)
    g = _mix(h)
    person = number // _PROPORTION
    latest = _last_auction(number)
    oldest = max(latest - _IN_FLIGHT_AUCTIONS, 0)
    some = oldest + _remainder(_bits(h, 8, 20), latest - oldest + 1 + _LEAD)
    auction = latest // _HOT * _HOT if _bits(h, 0, 1) else some
    bidder = person // _HOT * _HOT + 1 if _bits(h, 1, 2) else _some_person(person, _bits(h, 32, 24))
    cold = _below(g, 20, _CHANNELS) + np.uint64(4)
    numbers[9 * rows + row] = auction + _FIRST_ID
    numbers[10 * rows + row] = bidder + _FIRST_ID
    numbers[11 * rows + row] = prices[_bits(g, 0, 16)]
    numbers[12 * rows + row] = time
    texts[9 * rows + row] = _bits(g, 17, 2) if _bits(g, 16, 1) else cold
    texts[10 * rows + row] = _bits(g, 48, 12)


@kernel((INT64, INT64, INT64, IN_I64, I32, I32, I64, U8))
def make_events(
    first: int, stride: int, step_us: int, prices: Any, kinds: Any, texts: Any, numbers: Any, valid: Any
) -> None:
    """Makes the events that arrive from place ``first`` on, as many as ``kinds`` has elements.

    The next group after each one begins ``stride`` places behind it.
    ``texts`` and ``numbers`` have a column behind the other, in the order of :data:`KINDS`, and ``valid`` a bitmap for
    each kind of events. All of them are zero before, and stay zero for events of other kinds.
    """
    rows = kinds.size
    bitmap = valid.size // 3
    for row in range(rows):
        within = first % GROUP + row
        place = first - first % GROUP + within // GROUP * stride + within % GROUP
        number = place - place % GROUP + place * _ARRIVAL_STEP % GROUP
        turn = number % _PROPORTION
        time = START_US + number * step_us
        kind = 2
        if turn > _AUCTIONS:
            _bid(row, rows, number, time, prices, texts, numbers)
        elif turn > 0:
            kind = 1
            _auction(row, rows, number, time, step_us, prices, texts, numbers)
        else:
            kind = 0
            _person(row, rows, number, time, texts, numbers)
        kinds[row] = kind
        valid[kind * bitmap + row // 8] |= np.uint8(1 << (row % 8))


@dataclass(frozen=True)
class _Column:
    """Where the kernel writes a column: its place among those of its width, and the values of a dictionary."""

    type: pa.DataType
    place: int
    dictionary: pa.Array | None = None


def _columns() -> Iterator[tuple[pa.DataType, list[_Column]]]:
    """Yields the type of each kind of events, and its columns."""
    texts = numbers = 0
    for kind, rows in KINDS.items():
        columns = []
        for field in rows:
            if field.type != pa.string():
                columns.append(_Column(field.type, numbers))
                numbers += 1
                continue
            texts -= field.name == "url"  # it belongs to the channel
            encoded = pa.dictionary(pa.int32(), pa.string())
            columns.append(_Column(encoded, texts, POOLS.texts[f"{kind}.{field.name}"]))
            texts += 1
        encoded_rows = zip(rows, columns, strict=True)
        yield pa.struct([field.with_type(column.type) for field, column in encoded_rows]), columns


_COLUMNS = list(_columns())
_TEXTS, _NUMBERS = 11, 13
"""How many columns of indices and of numbers the kernel writes."""


@dataclass(frozen=True)
class Generator:
    """Makes events. ``events_per_s`` is their rate in event time."""

    events_per_s: int = EVENTS_PER_S

    def events(self, first: int, count: int, *, stride: int = GROUP) -> pa.RecordBatch:
        """The ``count`` events that arrive from place ``first`` on, as rows of :data:`EVENT`.

        With a ``stride``, only those of the groups that begin so many places behind each other.
        """
        bitmap = -(-count // 64) * 8
        memory = pa.allocate_buffer(count * (8 * _NUMBERS + 4 * _TEXTS + 4) + 3 * bitmap)
        array = np.frombuffer(memory, np.uint8)
        array[:] = 0
        first_text, first_bit = count * 8 * _NUMBERS, memory.size - 3 * bitmap
        first_kind = first_bit - 4 * count
        numbers = array[:first_text].view(np.int64)
        texts, kinds = array[first_text:first_kind].view(np.int32), array[first_kind:first_bit].view(np.int32)
        step_us = 1_000_000 // self.events_per_s
        make_events(first, stride, step_us, POOLS.prices, kinds, texts, numbers, array[first_bit:])
        events = [pa.Array.from_buffers(pa.int32(), count, [None, memory.slice(first_kind, 4 * count)])]
        for kind, (struct, columns) in enumerate(_COLUMNS):
            children = []
            for column in columns:
                if column.dictionary is None:
                    values = memory.slice(column.place * count * 8, count * 8)
                    children.append(pa.Array.from_buffers(column.type, count, [None, values]))
                else:
                    indices = memory.slice(first_text + column.place * count * 4, count * 4)
                    children.append(
                        pa.DictionaryArray.from_buffers(column.type, count, [None, indices], column.dictionary)
                    )
            valid = memory.slice(first_bit + kind * bitmap, bitmap)
            events.append(pa.Array.from_buffers(struct, count, [valid], children=children))
        return pa.RecordBatch.from_arrays(events, names=EVENT.names)
