"""Compares the Delta table of the orders pipeline with what the orders that were sent add up to.

DuckDB computes the answer from the sent orders and the customers, and reads the files of the table's newest version. It
shares no code with the engine.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_EXPECTED = """
SELECT date_trunc('minute', placed_at) AS minute, country, count(*) AS orders, sum(cents)::BIGINT AS revenue_cents
FROM read_parquet($orders) JOIN read_parquet($customers) USING (customer) GROUP BY ALL
"""
_DIFFERENCE = """
WITH expected AS (FROM expected_rows), found AS (
  SELECT minute, country, count(*) AS copies,
    bool_and(orders = o AND revenue_cents = r AND coalesce(abs(mean_cents - r / o) < 1e-6, true)) AS same
  FROM found_rows LEFT JOIN (SELECT minute, country, orders AS o, revenue_cents AS r FROM expected_rows)
    USING (minute, country)
  GROUP BY ALL
)
SELECT
  coalesce(sum(orders), 0), count(orders), count(*) FILTER (WHERE copies IS NULL),
  coalesce(sum(copies - 1) FILTER (WHERE orders IS NOT NULL), 0),
  count(*) FILTER (WHERE copies IS NOT NULL AND same IS DISTINCT FROM true)
FROM expected FULL JOIN found USING (minute, country)
"""


@dataclass(frozen=True)
class Difference:
    """``orders`` were sent, in ``rows`` minutes of a country. ``lost`` of these rows are missing in the table,
    ``duplicated`` are there too often, and ``wrong`` have other values or should not be there."""

    orders: int
    rows: int
    lost: int
    duplicated: int
    wrong: int


def compare(orders: Path, customers: Path, table: Path) -> Difference:
    """Compares the table with the sent orders."""
    import duckdb
    from deltalake import DeltaTable

    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        given = {"orders": str(orders), "customers": str(customers)}
        connection.execute(f"CREATE TABLE expected_rows AS {_EXPECTED}", given)
        connection.execute(
            "CREATE TABLE found_rows "
            "(minute TIMESTAMPTZ, country VARCHAR, orders BIGINT, revenue_cents BIGINT, mean_cents DOUBLE)"
        )
        files = DeltaTable(table).file_uris() if DeltaTable.is_deltatable(str(table)) else []
        if files:
            connection.execute(
                "INSERT INTO found_rows BY NAME SELECT * FROM read_parquet($files, union_by_name = true)",
                {"files": files},
            )
        row: Any = connection.execute(_DIFFERENCE).fetchone()
    return Difference(*map(int, row))


def compared(data: Path) -> dict[str, int]:
    """:func:`compare` for the files of the demonstration."""
    return asdict(compare(data / "sent.parquet", data / "customers.parquet", data / "revenue"))
