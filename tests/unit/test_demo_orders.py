"""The comparison of the demonstration's table with the orders that were sent."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from demo.orders import COUNTRIES, ORDER_SCHEMA, write_customers
from demo.verify_orders import Difference, compare

deltalake = pytest.importorskip("deltalake")
pytest.importorskip("duckdb")

MINUTE = datetime(2026, 11, 1, 9, tzinfo=UTC)


class World:
    """Orders of three customers in two minutes, and the rows that they add up to."""

    def __init__(self, directory: Path) -> None:
        self.orders, self.customers, self.table = (directory / name for name in ("sent", "customers", "table"))
        write_customers(self.customers)
        orders = [
            {
                "order_id": number,
                "customer": f"customer-{number % 3}",
                "cents": 100 + number,
                "placed_at": MINUTE + timedelta(seconds=number),
            }
            for number in range(120)
        ]
        pq.write_table(pa.Table.from_pylist(orders, ORDER_SCHEMA), self.orders)
        self.rows = [
            {
                "minute": MINUTE + timedelta(minutes=minute),
                "country": COUNTRIES[customer * 7 % len(COUNTRIES)],
                "orders": 20,
                "revenue_cents": sum(
                    100 + number for number in range(60 * minute, 60 * minute + 60) if number % 3 == customer
                ),
            }
            for minute in range(2)
            for customer in range(3)
        ]

    def write(self, *rows: dict[str, object]) -> None:
        deltalake.write_deltalake(self.table, pa.Table.from_pylist(list(rows)), mode="append", schema_mode="merge")

    def difference(self) -> Difference:
        return compare(self.orders, self.customers, self.table)


def test_table_with_the_rows_of_both_versions_is_exact(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert world.difference() == Difference(120, 6, lost=6, duplicated=0, wrong=0)
    world.write(*world.rows[:4])
    assert world.difference() == Difference(120, 6, lost=2, duplicated=0, wrong=0)
    world.write(*({**row, "mean_cents": row["revenue_cents"] / 20} for row in world.rows[4:]))
    assert world.difference() == Difference(120, 6, lost=0, duplicated=0, wrong=0)


def test_rows_that_are_repeated_or_wrong_or_of_no_order_are_counted(tmp_path: Path) -> None:
    world = World(tmp_path)
    first, second, *others = world.rows
    world.write(first, {**second, "orders": 21}, *others, first, {**first, "country": "XX"})
    assert world.difference() == Difference(120, 6, lost=0, duplicated=1, wrong=2)
    world.write({**others[0], "mean_cents": 1.0})
    assert world.difference() == Difference(120, 6, lost=0, duplicated=2, wrong=3)
