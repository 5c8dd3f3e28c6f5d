"""The queries of Nexmark in Flink SQL, as they are published, with the columns that those of the engine have."""

from __future__ import annotations

_HOP = "TABLE(HOP(TABLE bid, DESCRIPTOR(`dateTime`), INTERVAL '2' SECOND, INTERVAL '10' SECOND))"
_TUMBLE = "TABLE(TUMBLE(TABLE {}, DESCRIPTOR({}), INTERVAL '10' SECOND))"
_COUNTS = f"""SELECT auction, count(*) AS num, window_start, window_end FROM {_HOP}
            GROUP BY auction, window_start, window_end"""
QUERIES = {
    "q0": "SELECT auction, bidder, price, `dateTime`, extra FROM bid",
    "q1": "SELECT auction, bidder, 0.908 * price AS price, `dateTime`, extra FROM bid",
    "q2": "SELECT auction, price FROM bid WHERE MOD(auction, 123) = 0",
    "q3": """SELECT P.name, P.city, P.state, A.id AS auction FROM auction AS A JOIN person AS P ON A.seller = P.id
        WHERE A.category = 10 AND P.state IN ('OR', 'ID', 'CA')""",
    "q5": f"""SELECT counts.auction, counts.num, counts.window_start AS `start`, counts.window_end AS `end`
        FROM ({_COUNTS}) AS counts
        JOIN (SELECT max(num) AS most, window_start, window_end FROM ({_COUNTS}) GROUP BY window_start, window_end)
            AS highest
        ON counts.window_start = highest.window_start AND counts.window_end = highest.window_end
            AND counts.num >= highest.most""",
    "q7": f"""SELECT B.auction, B.price, B.bidder, B.`dateTime`, B.extra FROM bid AS B
        JOIN (SELECT max(price) AS highest, window_end AS until FROM {_TUMBLE.format("bid", "`dateTime`")}
            GROUP BY window_start, window_end) AS H
        ON B.price = H.highest WHERE B.`dateTime` BETWEEN H.until - INTERVAL '10' SECOND AND H.until""",
    "q8": f"""SELECT P.id, P.name, P.window_start AS `start` FROM (
            SELECT id, name, window_start, window_end FROM {_TUMBLE.format("person", "`dateTime`")}
            GROUP BY id, name, window_start, window_end) AS P
        JOIN (SELECT seller, window_start, window_end FROM {_TUMBLE.format("auction", "`dateTime`")}
            GROUP BY seller, window_start, window_end) AS A
        ON P.id = A.seller AND P.window_start = A.window_start AND P.window_end = A.window_end""",
    "q11": """SELECT bidder, count(*) AS bids, SESSION_START(`dateTime`, INTERVAL '10' SECOND) AS `start`,
            SESSION_END(`dateTime`, INTERVAL '10' SECOND) AS `end`
        FROM bid GROUP BY bidder, SESSION(`dateTime`, INTERVAL '10' SECOND)""",
    "q12": f"""SELECT bidder, count(*) AS bids, window_start AS `start`, window_end AS `end`
        FROM {_TUMBLE.format("clocked_bid", "p_time")} GROUP BY bidder, window_start, window_end""",
    "q17": """SELECT auction, DATE_FORMAT(`dateTime`, 'yyyy-MM-dd') AS `day`, count(*) AS total_bids,
            count(*) FILTER (WHERE price < 10000) AS rank1_bids,
            count(*) FILTER (WHERE price >= 10000 AND price < 1000000) AS rank2_bids,
            count(*) FILTER (WHERE price >= 1000000) AS rank3_bids,
            min(price) AS min_price, max(price) AS max_price, avg(CAST(price AS DOUBLE)) AS avg_price,
            sum(price) AS sum_price
        FROM bid GROUP BY auction, DATE_FORMAT(`dateTime`, 'yyyy-MM-dd')""",
    "q18": """SELECT auction, bidder, price, channel, url, `dateTime`, extra FROM (
            SELECT *, ROW_NUMBER() OVER (PARTITION BY bidder, auction ORDER BY `dateTime` DESC) AS place FROM bid)
        WHERE place <= 1""",
    "q20": """SELECT B.auction, B.bidder, B.price, B.channel, B.url, B.extra, B.`dateTime`, A.itemName, A.description,
            A.initialBid, A.reserve, A.expires, A.seller, A.category, A.`dateTime` AS auction_time,
            A.extra AS auction_extra
        FROM bid AS B JOIN auction AS A ON B.auction = A.id WHERE A.category = 10""",
    "q21": """SELECT auction, bidder, price, channel, CASE lower(channel) WHEN 'apple' THEN '0'
            WHEN 'google' THEN '1' WHEN 'facebook' THEN '2' WHEN 'baidu' THEN '3'
            ELSE REGEXP_EXTRACT(url, '(&|^)channel_id=([^&]*)', 2) END AS channel_id
        FROM bid WHERE REGEXP_EXTRACT(url, '(&|^)channel_id=([^&]*)', 2) IS NOT NULL
            OR lower(channel) IN ('apple', 'google', 'facebook', 'baidu')""",
    "q22": """SELECT auction, bidder, price, channel, SPLIT_INDEX(url, '/', 3) AS dir1,
            SPLIT_INDEX(url, '/', 4) AS dir2, SPLIT_INDEX(url, '/', 5) AS dir3 FROM bid""",
    "person": "SELECT * FROM person",
    "auction": "SELECT * FROM auction",
    "bid": "SELECT * FROM bid",
}
"""The text of each query, over the views ``person``, ``auction``, ``bid`` and, for windows of the clock,
``clocked_bid``; and of all columns of each view.
"""
