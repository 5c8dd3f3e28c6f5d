"""The rows of each query of Nexmark, computed by DuckDB from the same events, and the comparison with a result."""

from __future__ import annotations

from functools import cached_property

import pyarrow as pa

from benchmarks.nexmark.generator import KINDS, START_US, Generator

_DELAY_US = 4_000_000
_COUNTS = "SELECT auction, count(*) AS num, start FROM slid GROUP BY auction, start"
_FINAL = {
    "q12": (
        "SELECT bidder, sum(bids)::BIGINT AS bids FROM "
        '(SELECT bidder, max(bids) AS bids FROM result GROUP BY bidder, "start") GROUP BY bidder'
    ),
    "q17": "SELECT * FROM result QUALIFY row_number() OVER (PARTITION BY auction, day ORDER BY total_bids DESC) = 1",
    "q18": 'SELECT * FROM result QUALIFY row_number() OVER (PARTITION BY bidder, auction ORDER BY "dateTime" DESC) = 1',
}
"""The last row of each key, of queries in update mode. The windows of the clock differ, but not their sums."""
QUERIES = {
    "q0": 'SELECT auction, bidder, price, "dateTime", extra FROM bid',
    "q1": 'SELECT auction, bidder, (0.908 * price)::DECIMAL(24, 3) AS price, "dateTime", extra FROM bid',
    "q2": "SELECT auction, price FROM bid WHERE auction % 123 = 0",
    "q3": """SELECT name, city, state, auction.id AS auction FROM auction JOIN person ON seller = person.id
        WHERE category = 10 AND state IN ('OR', 'ID', 'CA')""",
    "q5": f"""WITH slid AS (
            SELECT auction, unnest(generate_series(0, 4)) * 2000000 AS back, us - us % 2000000 - back AS start FROM bid
        ), counts AS ({_COUNTS} HAVING start + 10000000 <= $watermark)
        SELECT auction, num, make_timestamp(start) AS start, make_timestamp(start + 10000000) AS "end" FROM counts
        QUALIFY num = max(num) OVER (PARTITION BY start)""",
    "q7": """WITH highest AS (
            SELECT us - us % 10000000 AS start, max(price) AS price FROM bid
            GROUP BY ALL HAVING start + 10000000 <= $watermark
        )
        SELECT auction, bid.price, bidder, "dateTime", extra FROM bid JOIN highest
        ON bid.price = highest.price AND us BETWEEN start AND start + 10000000""",
    "q8": """WITH people AS (SELECT DISTINCT id, name, us - us % 10000000 AS start FROM person),
            sellers AS (SELECT DISTINCT seller, us - us % 10000000 AS start FROM auction)
        SELECT id, name, make_timestamp(start) AS start FROM people JOIN sellers USING (start)
        WHERE id = seller AND start + 10000000 <= $watermark""",
    "q11": """WITH marked AS (
            SELECT bidder, us, us - lag(us) OVER (PARTITION BY bidder ORDER BY us) > 10000000 AS begins FROM bid
        ), sessions AS (
            SELECT bidder, us, count_if(coalesce(begins, false)) OVER (PARTITION BY bidder ORDER BY us) AS session
            FROM marked
        )
        SELECT bidder, count(*) AS bids, make_timestamp(min(us)) AS start, make_timestamp(max(us) + 10000000) AS "end"
        FROM sessions GROUP BY bidder, session HAVING max(us) + 10000000 <= $watermark""",
    "q12": "SELECT bidder, count(*) AS bids FROM bid GROUP BY bidder",
    "q17": """SELECT auction, strftime("dateTime", '%Y-%m-%d') AS day, count(*) AS total_bids,
            count_if(price < 10000) AS rank1_bids, count_if(price >= 10000 AND price < 1000000) AS rank2_bids,
            count_if(price >= 1000000) AS rank3_bids, min(price) AS min_price, max(price) AS max_price,
            sum(price)::DOUBLE / count(*) AS avg_price, sum(price)::BIGINT AS sum_price
        FROM bid GROUP BY auction, day""",
    "q18": """SELECT auction, bidder, price, channel, url, "dateTime", extra FROM bid
        QUALIFY row_number() OVER (PARTITION BY bidder, auction ORDER BY us DESC) = 1""",
    "q20": """SELECT bid.auction, bidder, price, channel, url, bid.extra, bid."dateTime", "itemName", description,
            "initialBid", reserve, expires, seller, category, auction."dateTime" AS auction_time,
            auction.extra AS auction_extra
        FROM bid JOIN auction ON bid.auction = auction.id WHERE category = 10""",
    "q21": """SELECT auction, bidder, price, channel, CASE lower(channel) WHEN 'apple' THEN '0' WHEN 'google' THEN '1'
            WHEN 'facebook' THEN '2' WHEN 'baidu' THEN '3'
            ELSE regexp_extract(url, '(&|^)channel_id=([^&]*)', 2) END AS channel_id
        FROM bid WHERE channel_id <> ''""",
    "q22": """SELECT auction, bidder, price, channel, split_part(url, '/', 4) AS dir1, split_part(url, '/', 5) AS dir2,
            split_part(url, '/', 6) AS dir3 FROM bid""",
}
"""The text of each query for DuckDB. ``us`` is event time in microseconds, and ``$watermark``, too."""
EVENTS = {name: f"SELECT * EXCLUDE us FROM {name}" for name in ("person", "auction", "bid")}
"""The text that gives all events of a kind: a peer that makes its own has to make the same."""
_TEXTS = {**QUERIES, **EVENTS}


class Expected:
    """The events from 0 to ``events`` - 1 as tables, and the results of the queries over them."""

    def __init__(self, events: int, events_per_s: int) -> None:
        import duckdb

        self._events = events
        self._generator = Generator(events_per_s)
        self._connection = duckdb.connect()
        for name, table in self._tables.items():
            self._connection.register(f"plain_{name}", table)
            self._connection.execute(f'CREATE VIEW {name} AS SELECT *, epoch_us("dateTime") AS us FROM plain_{name}')

    @cached_property
    def _tables(self) -> dict[str, pa.Table]:
        events = self._generator.events(0, self._events)
        tables = {}
        for kind in KINDS:
            rows = events[kind].drop_null()
            names = [field.name for field in rows.type]
            tables[kind] = _without_zone(pa.Table.from_arrays(rows.flatten(), names=names))
        return tables

    def difference(self, query: str, result: pa.Table, last_events: tuple[int, int]) -> tuple[int, str]:
        """Compares a result with the expected rows, in any order, and returns their number and the difference.

        ``last_events`` are the last events of the readers that are behind and ahead of all others. A window has a row
        if the watermark behind both has reached its end, and none if the watermark behind neither has: which of them
        counts depends on the reader that ends first. The second value is empty if nothing is wrong.
        """
        if not result.num_rows:
            return 0, "the result has no rows"
        connection = self._connection
        connection.register("result", _without_zone(result))
        connection.execute(f"CREATE OR REPLACE TEMP TABLE found AS {_FINAL.get(query, 'SELECT * FROM result')}")
        for name, event in zip(("required", "allowed"), last_events, strict=True):
            connection.register(name, self.rows(query, event))
        rows, missing, more = (
            connection.execute(f"SELECT count(*) FROM ({text})").fetchall()[0][0]
            for text in ("FROM required", "FROM required EXCEPT ALL FROM found", "FROM found EXCEPT ALL FROM allowed")
        )
        if not rows:
            return 0, "no row is expected: give more events"
        return rows, f"{missing} of {rows} rows are missing, and {more} are wrong" if missing or more else ""

    def rows(self, query: str, last_event: int) -> pa.Table:
        """Returns the rows of a query, its windows as of the watermark after an event."""
        text = _TEXTS[query]
        parameters = {"watermark": self._watermark_us(last_event)} if "$watermark" in text else {}
        return self._connection.sql(text, params=parameters).to_arrow_table()

    def _watermark_us(self, last_event: int) -> int:
        """The watermark after an event, in whole milliseconds, given in microseconds since the epoch."""
        time = START_US + last_event * (1_000_000 // self._generator.events_per_s)
        return time // 1_000 * 1_000 - _DELAY_US


def _without_zone(table: pa.Table) -> pa.Table:
    """Timestamps as DuckDB compares them without its extension for time zones: UTC. Dictionaries are decoded."""
    fields = [pa.field(field.name, _plain(field.type)) for field in table.schema]
    return table.cast(pa.schema(fields))


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us")
    return kind.value_type if pa.types.is_dictionary(kind) else kind
