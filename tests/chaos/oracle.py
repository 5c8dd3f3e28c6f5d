"""What the pipeline must have written, computed in plain Python from the same input. Shares no code with the engine."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

KEYS = 8
WINDOW_MS = 2_000
PAYMENT_BASE = 1_000_000_000
_STEP_MS = 20
_JITTER_MS = 400
_EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
_LAST_MS = 10 * 86_400_000
"""Event time of the last row of each key: whatever is before it has been passed by the watermark."""


class WrongOutput(AssertionError):
    """The job wrote what it should not have, or did not write what it should."""


@dataclass(slots=True)
class Input:
    """``orders`` are (id, key, amount, at in ms), ``payments`` (number, key, paid at in ms), in file order.

    The last row of each key, from id ``rows`` on, only moves event time.
    """

    rows: int
    orders: list[tuple[int, int, int, int]] = field(default_factory=list)
    payments: list[tuple[int, int, int]] = field(default_factory=list)

    @classmethod
    def generate(cls, seed: int, rows: int) -> Input:
        choice = random.Random(seed)
        made = cls(rows)
        for number in range(rows):
            key, at = choice.randrange(KEYS), number * _STEP_MS + choice.randrange(_JITTER_MS)
            made.orders.append((number, key, choice.randrange(1000), at))
            if number % 3 == 0:
                made.payments.append((number, key, at + choice.randrange(100)))
        for key in range(KEYS):
            made.orders.append((rows + key, key, 0, _LAST_MS))
            made.payments.append((rows + key, key, _LAST_MS))
        return made

    def write(self, directory: Path) -> None:
        """As ``orders.parquet`` and ``payments.parquet``."""
        numbers, keys, amounts, times = zip(*self.orders, strict=True)
        orders = {"id": numbers, "key": keys, "amount": amounts, "at": _timestamps(times)}
        pq.write_table(pa.table(orders), directory / "orders.parquet")
        numbers, keys, times = zip(*self.payments, strict=True)
        payments = {"number": numbers, "key": keys, "paid_at": _timestamps(times)}
        pq.write_table(pa.table(payments), directory / "payments.parquet")


def _timestamps(times: tuple[int, ...]) -> pa.Array:
    return pa.array([_EPOCH + timedelta(milliseconds=ms) for ms in times], pa.timestamp("ms", "UTC"))


def check_content(expected: Input, output: Path) -> None:
    """Raises WrongOutput naming the first differences."""
    compare("totals", _totals(expected), _written(output / "totals", "key", "orders", "amount", "id"))
    start = int(_EPOCH.timestamp() * 1000)
    windows = _written(output / "windows", "key", "start", "orders", "amount")
    passed = [row for row in windows if row[1] < start + _LAST_MS // WINDOW_MS * WINDOW_MS]
    compare("windows", _windows(expected, start), passed)
    joined = [row for row in _written(output / "joined", "number", "paid_at") if row[0] < expected.rows]
    compare("joined", _joined(expected), joined)
    united = [(row[0],) for row in expected.orders] + [(row[0] + PAYMENT_BASE,) for row in expected.payments]
    compare("united", united, _written(output / "united", "id"))
    thirtieth = [(row[0],) for row in expected.payments if row[0] % 30 == 0]
    compare("thirtieth", thirtieth, _written(output / "thirtieth", "number"))


def _totals(expected: Input) -> list[tuple[Any, ...]]:
    return running_totals([row[:3] for row in expected.orders])


def running_totals(given: list[tuple[int, int, int]]) -> list[tuple[Any, ...]]:
    """One row for each order: what its key had come to. Only the order in which they are given leads to these."""
    known: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    rows: list[tuple[Any, ...]] = []
    for number, key, amount in given:
        orders, total = known[key]
        known[key] = (orders + 1, total + amount)
        rows.append((key, orders + 1, total + amount, number))
    return rows


def _windows(expected: Input, start_ms: int) -> list[tuple[Any, ...]]:
    known: dict[tuple[int, int], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for number, key, amount, at in expected.orders:
        if number < expected.rows:
            window = (start_ms + at) // WINDOW_MS * WINDOW_MS
            orders, total = known[key, window]
            known[key, window] = (orders + 1, total + amount)
    return [(key, window, *values) for (key, window), values in known.items()]


def _joined(expected: Input) -> list[tuple[Any, ...]]:
    paid = {number: _EPOCH + timedelta(milliseconds=at) for number, _, at in expected.payments}
    return [(number, paid.get(number)) for number, _, _, _ in expected.orders if number < expected.rows]


def _written(directory: Path, *columns: str) -> list[tuple[Any, ...]]:
    """Rows of the visible files."""
    rows: list[tuple[Any, ...]] = []
    for file in sorted(directory.glob("[!.]*.parquet")):
        table = pq.ParquetFile(file).read(columns=list(columns))
        rows += zip(*(table.column(name).to_pylist() for name in columns), strict=True)
    return rows


def compare(name: str, expected: list[tuple[Any, ...]], written: list[tuple[Any, ...]]) -> None:
    """Raises WrongOutput if the rows are not the same, in any order."""
    wanted, found = Counter(expected), Counter(written)
    if wanted != found:
        missing, excess = wanted - found, found - wanted
        raise WrongOutput(
            f"{name}: {missing.total()} rows of {wanted.total()} are missing, first {sorted(missing, key=repr)[:3]}; "
            f"{excess.total()} are too many, first {sorted(excess, key=repr)[:3]}"
        )
