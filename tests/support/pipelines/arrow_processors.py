"""Processors in Arrow that Spark and the engine run on the same rows. Nothing here knows which of them it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.processors import ArrowStatefulProcessor

TOTALS = "k STRING, n BIGINT, total DOUBLE, latest STRING, seen BIGINT"
SESSIONS = "k STRING, n BIGINT, ended BOOLEAN"
FORGETS = "forget"
GAP_MS = 10_000


class ColumnTotals(ArrowStatefulProcessor):
    """One row for each key and call: what the key has so far, until its last row says ``forget``."""

    keySchema = "k STRING"
    inputSchema = "word STRING, v INT, at TIMESTAMP, k STRING"
    stateSchema = "n BIGINT, total DOUBLE, latest STRING, seen TIMESTAMP, tags ARRAY<INT>"

    def handleBatch(self, rows: pa.Table, offsets: Any, state: pa.Table, timerValues: Any) -> Any:
        starts, last = offsets[:-1], pa.array(offsets[1:] - 1)
        assert rows["k"].take(pa.array(starts)).equals(state["k"])
        n = pc.add(pc.fill_null(state["n"], 0), pa.array(np.diff(offsets)))
        values = pc.fill_null(rows["v"].cast(pa.float64()), 0.0).to_numpy()
        total = pc.add(pc.fill_null(state["total"], 0.0), pa.array(np.add.reduceat(values, starts)))
        latest = pc.coalesce(rows["word"].take(last), state["latest"])
        seen = rows["at"].take(last)
        tags = rows["v"].take(last).to_pylist()
        columns = {"n": n, "total": total, "latest": latest, "seen": seen}
        out = pa.table(
            {
                "seen": seen.cast(pa.int64()),
                "k": state["k"],
                **{name: columns[name] for name in ("n", "total", "latest")},
            }
        )
        new = pa.table({**columns, "tags": pa.array([[tag] for tag in tags], pa.list_(pa.int32()))})
        goes = pc.fill_null(pc.equal(rows["word"].take(last), FORGETS), False)
        kept = [pc.if_else(goes, pa.scalar(None, column.type), column) for column in new.columns]
        return out, pa.Table.from_arrays(kept, names=new.schema.names)


class ColumnSessions(ArrowStatefulProcessor):
    """Visits that end ten seconds after their last row."""

    keySchema = "k STRING"
    inputSchema = "t TIMESTAMP"
    stateSchema = "n BIGINT, ends BIGINT"
    timerColumn = "ends"

    def handleBatch(self, rows: pa.Table, offsets: Any, state: pa.Table, timerValues: Any) -> Any:
        n = pc.add(pc.fill_null(state["n"], 0), pa.array(np.diff(offsets)))
        times = rows["t"].cast(pa.int64()).fill_null(0).to_numpy() // 1000
        latest = np.maximum.reduceat(times, offsets[:-1]) + GAP_MS
        ends = pc.max_element_wise(state["ends"], pa.array(latest))
        out = pa.table({"k": state["k"], "n": n, "ended": pa.array([False] * len(n))})
        return out, pa.table({"n": n, "ends": ends})

    def handleExpired(self, state: pa.Table, timerValues: Any) -> Any:
        assert pc.max(state["ends"]).as_py() <= timerValues.getCurrentWatermarkInMs()
        return pa.table({"k": state["k"], "n": state["n"], "ended": pa.array([True] * state.num_rows)}), None
