"""The events of Nexmark: persons, auctions and bids, each a function of its number, and a source that reads them.

The rules are those of the generator that is published with Nexmark for Flink: of 50 events one is a person, three are
auctions and 46 are bids; half of the bids go to one hot auction of the latest hundred, three quarters come from a hot
bidder, three quarters of the auctions from a hot seller; the columns have the published sizes. Strings come from
pools of some thousand values; those which the published generator takes from lists of its own are dictionary-encoded.
Within each group of 1,000 events arrival and event time have different orders.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ckpt_runtime.sources import Source, Split, SplitEnumerator, SplitReader, SplitRows

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

Numbers = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]


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
        self.names = pa.array([f"{one} {other}" for one in first for other in last])
        self.cities = pa.array(cities)
        self.states = pa.array(["AZ", "CA", "ID", "OR", "WA", "WY"])
        words = [text.replace(" ", "_") for text in _texts(1, _POOL, 12, 13)]
        self.emails = pa.array([f"{word[:7]}@{word[7:]}.com" for word in words])
        digits = mixed(np.arange(_POOL, dtype=np.uint64) + np.uint64(2 << 32)) % np.uint64(10**16)
        cards = [f"{number:016d}" for number in digits.tolist()]
        self.cards = pa.array([" ".join(card[at : at + 4] for at in range(0, 16, 4)) for card in cards])
        self.person_extras = pa.array(_texts(3, _POOL, 109, 163))
        self.items = pa.array(_texts(4, _POOL, 3, 20))
        self.descriptions = pa.array(_texts(5, _POOL, 3, 100))
        self.auction_extras = pa.array(_texts(6, _POOL, 312, 468))
        self.bid_extras = pa.array(_texts(7, _POOL, 54, 82))
        exponents = np.arange(_PRICES) / _PRICES * 6
        self.prices: Numbers = np.rint(10**exponents * 100).astype(np.int64)
        """Every price is as likely as another in the logarithm: from 100 to 100,000,000."""
        paths = [text.replace(" ", "_") for text in _texts(8, _CHANNELS + 4, 15, 16)]
        urls = [f"https://www.nexmark.com/{p[:5]}/{p[5:10]}/{p[10:]}/item.htm?query=1" for p in paths]
        numbers = mixed(np.arange(_CHANNELS, dtype=np.uint64) + np.uint64(9 << 32)) >> np.uint64(33)
        with_id = [
            url if number % 10 == 0 else f"{url}&channel_id={number}"
            for url, number in zip(urls[4:], numbers.tolist(), strict=True)
        ]
        hot = ["Google", "Facebook", "Baidu", "Apple"]
        self.channels = pa.array(hot + [f"channel-{at}" for at in range(_CHANNELS)])
        self.urls = pa.array(urls[:4] + with_id)


def _texts(number: int, count: int, least: int, most: int) -> list[str]:
    """Returns texts of letters and some spaces, of ``least`` to ``most`` - 1 characters."""
    heads = mixed(np.arange(count, dtype=np.uint64) + np.uint64(number << 40))
    lengths = (heads % np.uint64(most - least)).astype(np.int64) + least
    letters = mixed(np.arange(count * most, dtype=np.uint64) + np.uint64(number << 44))
    codes = (letters >> np.uint64(20)) % np.uint64(26) + np.uint64(97)
    codes[letters % np.uint64(13) == 0] = 32
    text = codes.astype(np.uint8).tobytes().decode("ascii")
    return [text[at * most : at * most + length] for at, length in enumerate(lengths.tolist())]


POOLS = Pools()


def _from_list(values: pa.Array, places: Hashes) -> pa.DictionaryArray:
    """Text that the published generator takes from a list of its own: the list as a dictionary, and positions."""
    return pa.DictionaryArray.from_arrays(pa.array(places.astype(np.int32)), values, safe=False)


def _batch(columns: Sequence[pa.Array], schema: pa.Schema) -> pa.RecordBatch:
    """The columns under the schema's names, as they are encoded."""
    return pa.RecordBatch.from_arrays(list(columns), names=schema.names)


def _last_person(numbers: Numbers) -> Numbers:
    """The number of the latest person among the events up to each number."""
    return numbers // _PROPORTION


def _last_auction(numbers: Numbers) -> Numbers:
    """The same of auctions: -1 in front of the first one."""
    return numbers // _PROPORTION * _AUCTIONS + np.minimum(numbers % _PROPORTION - 1, _AUCTIONS - 1)


def _some_person(numbers: Numbers, hashes: Hashes) -> Numbers:
    people = _last_person(numbers) + 1
    active = np.minimum(people, _ACTIVE_PEOPLE)
    some: Numbers = people - active + hashes.astype(np.int64) % (active + _LEAD)
    return some


def _bits(hashes: Hashes, at: int, count: int) -> Hashes:
    return (hashes >> np.uint64(at)) & np.uint64((1 << count) - 1)


def _below(hashes: Hashes, at: int, limit: int) -> Hashes:
    return (hashes >> np.uint64(at)) % np.uint64(limit)


@dataclass(frozen=True)
class Generator:
    """Makes events. ``events_per_s`` is their rate in event time."""

    events_per_s: int = EVENTS_PER_S

    def arrived(self, first: int, end: int) -> Numbers:
        """The numbers of the events that arrive from place ``first`` to ``end`` - 1."""
        places = np.arange(first, end, dtype=np.int64)
        return places - places % GROUP + places * _ARRIVAL_STEP % GROUP

    def times(self, numbers: Numbers) -> pa.Array:
        """The event times of events."""
        return pa.array(START_US + numbers * self._step_us).cast(_TIME)

    @cached_property
    def _step_us(self) -> int:
        return 1_000_000 // self.events_per_s

    def persons(self, numbers: Numbers) -> pa.RecordBatch:
        """The persons that have these numbers."""
        h = mixed(numbers.astype(np.uint64))
        columns = [
            pa.array(_last_person(numbers) + _FIRST_ID),
            _from_list(POOLS.names, _below(h, 1, len(POOLS.names))),
            POOLS.emails.take(pa.array(_bits(h, 8, 12))),
            POOLS.cards.take(pa.array(_bits(h, 20, 12))),
            _from_list(POOLS.cities, _below(h, 32, len(POOLS.cities))),
            _from_list(POOLS.states, _below(h, 40, len(POOLS.states))),
            self.times(numbers),
            POOLS.person_extras.take(pa.array(_bits(mixed(h), 0, 12))),
        ]
        return _batch(columns, PERSON)

    def auctions(self, numbers: Numbers) -> pa.RecordBatch:
        """The auctions that have these numbers."""
        h = mixed(numbers.astype(np.uint64))
        g = mixed(h)
        initial = POOLS.prices[_bits(h, 24, 16)]
        hot = _last_person(numbers) // _HOT * _HOT
        seller = np.where(_bits(g, 0, 2) > 0, hot, _some_person(numbers, _bits(g, 2, 24))) + _FIRST_ID
        horizon_us = max(1_000, _IN_FLIGHT_AUCTIONS * _PROPORTION // _AUCTIONS * self._step_us)
        lasts = 1_000 + _below(g, 36, 2 * horizon_us).astype(np.int64)
        columns = [
            pa.array(_last_auction(numbers) + _FIRST_ID),
            POOLS.items.take(pa.array(_bits(h, 0, 12))),
            POOLS.descriptions.take(pa.array(_bits(h, 12, 12))),
            pa.array(initial),
            pa.array(initial + POOLS.prices[_bits(h, 40, 16)]),
            self.times(numbers),
            pa.array(START_US + numbers * self._step_us + lasts).cast(_TIME),
            pa.array(seller),
            pa.array(_FIRST_CATEGORY + _below(g, 32, 5).astype(np.int64)),
            POOLS.auction_extras.take(pa.array(_bits(g, 48, 12))),
        ]
        return _batch(columns, AUCTION)

    def bids(self, numbers: Numbers) -> pa.RecordBatch:
        """The bids that have these numbers."""
        h = mixed(numbers.astype(np.uint64))
        g = mixed(h)
        latest = _last_auction(numbers)
        oldest = np.maximum(latest - _IN_FLIGHT_AUCTIONS, 0)
        some = oldest + _bits(h, 8, 20).astype(np.int64) % (latest - oldest + 1 + _LEAD)
        auction = np.where(_bits(h, 0, 1) > 0, latest // _HOT * _HOT, some) + _FIRST_ID
        hot = _last_person(numbers) // _HOT * _HOT + 1
        bidder = np.where(_bits(h, 1, 2) > 0, hot, _some_person(numbers, _bits(h, 32, 24))) + _FIRST_ID
        channel = np.where(_bits(g, 16, 1) > 0, _bits(g, 17, 2), _below(g, 20, _CHANNELS) + np.uint64(4))
        columns = [
            pa.array(auction),
            pa.array(bidder),
            pa.array(POOLS.prices[_bits(g, 0, 16)]),
            _from_list(POOLS.channels, channel),
            _from_list(POOLS.urls, channel),
            self.times(numbers),
            POOLS.bid_extras.take(pa.array(_bits(g, 48, 12))),
        ]
        return _batch(columns, BID)

    def events(self, first: int, end: int) -> pa.RecordBatch:
        """The events that arrive from place ``first`` to ``end`` - 1, as rows of :data:`EVENT`."""
        numbers = self.arrived(first, end)
        place = numbers % _PROPORTION
        is_person, is_auction = place == 0, (place > 0) & (place <= _AUCTIONS)
        kinds = np.full(len(numbers), 2, np.int32)
        kinds[is_person], kinds[is_auction] = 0, 1
        # Bids are computed for all events, because nearly all are bids; those of other events are behind a null.
        columns = [
            pa.array(kinds),
            _spread(self.persons(numbers[is_person]), is_person),
            _spread(self.auctions(numbers[is_auction]), is_auction),
            _struct(list(self.bids(numbers)), BID, kinds == 2),
        ]
        return _batch(columns, EVENT)


def _spread(rows: pa.RecordBatch, mask: npt.NDArray[np.bool_]) -> pa.StructArray:
    """Returns a struct for each element of the mask, with the next row where it is true, otherwise null."""
    rank = np.zeros(len(mask) + 1, np.int64)
    np.cumsum(mask, out=rank[1:])
    children = []
    for column in rows:
        buffers = column.buffers()
        if pa.types.is_dictionary(column.type):
            places = np.append(column.indices.to_numpy(), np.int32(0))[rank[:-1]]
            children.append(pa.DictionaryArray.from_arrays(pa.array(places), column.dictionary, safe=False))
        elif pa.types.is_string(column.type):
            offsets = np.frombuffer(buffers[1], np.int32)[: rows.num_rows + 1][rank]
            children.append(pa.StringArray.from_buffers(len(mask), pa.py_buffer(offsets), buffers[2]))
        else:
            values = np.append(np.frombuffer(buffers[1], np.int64)[: rows.num_rows], 0)[rank[:-1]]
            children.append(pa.Array.from_buffers(column.type, len(mask), [None, pa.py_buffer(values)]))
    return _struct(children, rows.schema, mask)


def _struct(children: Sequence[pa.Array], schema: pa.Schema, valid: npt.NDArray[np.bool_]) -> pa.StructArray:
    fields = [field.with_type(child.type) for field, child in zip(schema, children, strict=True)]
    return pa.StructArray.from_arrays(list(children), fields=fields, mask=pa.array(~valid))


class NexmarkSource(Source):
    """Format ``nexmark``: rows of :data:`EVENT`. It ends behind ``events`` of them, which are whole groups.

    A split holds ``eventsPerSplit`` events in a row, and ``splitsPerRange`` splits are found at one time.
    ``eventsPerSecond`` is the rate of events in event time.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self.events = self._number("events", "1000000")
        self.per_split = self._number("eventsPerSplit", "100000")
        self.splits = self._number("splitsPerRange", "2")
        self.generator = Generator(self._number("eventsPerSecond", str(EVENTS_PER_S)))
        for name, value in (("events", self.events), ("eventsPerSplit", self.per_split)):
            if value % GROUP:
                raise ValueError(f"{name} is {value}; it has to be a multiple of {GROUP}")

    def _number(self, name: str, default: str) -> int:
        given = {key.lower(): value for key, value in self.options.items()}
        text = given.get(name.lower(), default)
        if not text.isdigit() or int(text) == 0:
            raise ValueError(f"{name} is {text!r}; it has to be a positive whole number")
        return int(text)

    @classmethod
    def name(cls) -> str:
        return "nexmark"

    def schema(self, declared: pa.Schema | None) -> pa.Schema:
        if declared is not None:
            raise ValueError("the format nexmark has a schema of its own")
        return EVENT

    def open_enumerator(self, schema: pa.Schema, state: Any, *, bounded: bool) -> SplitEnumerator:
        return _Enumerator(self, int(state or 0))

    def open_reader(self, schema: pa.Schema, *, subtask: int, parallelism: int) -> SplitReader:
        return _Reader(self.generator)


class _Enumerator(SplitEnumerator):
    """Finds the splits of one range after the other. Its state is the number of events in the splits so far."""

    def __init__(self, source: NexmarkSource, found: int) -> None:
        self._source = source
        self._found = found

    def discover(self) -> Sequence[Split]:
        splits: list[Split] = []
        while self._found < self._source.events and len(splits) < self._source.splits:
            end = min(self._found + self._source.per_split, self._source.events)
            splits.append(Split(str(self._found), {"end": end}))
            self._found = end
        return splits

    def snapshot(self) -> Any:
        return self._found


class _Reader(SplitReader):
    """Reads one split after the other; a position is the place of the next event."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._splits: deque[tuple[Split, int]] = deque()

    def add(self, split: Split, position: Any) -> None:
        self._splits.append((split, int(split.id if position is None else position)))

    def read(self, most_rows: int) -> SplitRows | None:
        if not self._splits:
            return None
        split, place = self._splits.popleft()
        end = min(place + most_rows, split.description["end"])
        ended = end == split.description["end"]
        if not ended:
            self._splits.appendleft((split, end))
        return SplitRows(split.id, end, self._generator.events(place, end), ended=ended)
