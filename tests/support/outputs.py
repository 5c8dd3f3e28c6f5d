"""What the test pipelines wrote, and whether it is exactly what they should have."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq


def visible(directory: Path) -> pd.DataFrame:
    """All rows of the visible files of a Parquet sink; columns that only some files have are null elsewhere."""
    tables = [_read(file) for file in sorted(directory.glob("[!.]*.parquet"))]
    return pa.concat_tables(tables, promote_options="default").to_pandas() if tables else pd.DataFrame()


def _read(file: Path) -> pa.Table:
    """In a sixth of the time that ``read_table`` needs for a small file: tests look at many again and again."""
    with pq.ParquetFile(file) as opened:
        return opened.read(use_threads=False)


def hidden(directory: Path) -> list[str]:
    """Names of files that no reader should ever find: in progress or pending."""
    return sorted(file.name for file in directory.rglob(".*"))


def assert_sequence(output: Path, rows: int | None = None, *, cancelled: bool = False) -> int:
    """Proves the output of the ``sequence`` pipeline: every row once, state exact, nothing left. Returns the rows.

    ``rows`` is the number of rows of all sources; None when the job was stopped somewhere. A job that was
    ``cancelled`` leaves hidden files that its last checkpoint may or may not need.
    """
    order, counts = visible(output / "order"), visible(output / "counts")
    assert (order.seen == order.n + 1).all(), "keyed state lost or repeated rows"
    for name, frame, number in (("order", order, order.n), ("counts", counts, counts["rows"] - 1)):
        numbered = frame.assign(number=number).groupby("source").number
        assert not frame.assign(number=number).duplicated(["source", "number"]).any(), f"{name}: repeated rows"
        assert (numbered.max() + 1 == numbered.count()).all(), f"{name}: lost rows"
        if rows is not None:
            assert len(frame) == rows, f"{name}: {len(frame)} rows of {rows}"
    assert (counts["rows"] == counts.greatest + 1).all(), "the aggregate lost or repeated rows"
    assert len(order) == len(counts)
    assert cancelled or hidden(output) == []
    return len(order)


def assert_batches(directory: Path, limit: int) -> None:
    """Proves the output of the ``user_sources`` pipeline: every number once per reader, nothing staged left."""
    rows = [
        json.loads(line)
        for file in sorted((directory / "batches").glob("batch-*"))
        for line in file.read_text().splitlines()
    ]
    found = pd.DataFrame(rows, columns=["n", "label"])
    for label in ("partitioned", "simple"):
        assert sorted(found.n[found.label == label]) == list(range(limit)), label


def batch_rows(directory: Path) -> int:
    """Rows published so far by the ``user_sources`` pipeline."""
    return sum(len(file.read_text().splitlines()) for file in (directory / "batches").glob("batch-*"))
