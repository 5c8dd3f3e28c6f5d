"""A stateful processor behind a join of two streams that one reader gives."""

from __future__ import annotations

import json

import side_processors
from late_joins import sides

from ckpt_runtime.api import StreamSession


def pipeline(session: StreamSession, case: str) -> None:
    """``case`` is JSON: source, chunk, output, watermark (of ``t``), processor, schema, mode, time_mode.

    The kind of join stands for the key.
    """
    given = json.loads(case)
    left, right = sides(session, given)
    joined = left.join(right, on=[("lk", "rk")], how=given["keys"][0], within=("-5 s", "5 s")).uid("join")
    named = joined.select(k="lk", t="lt", v="rv").uid("pairs")
    processor = getattr(side_processors, given["processor"])()
    told = named.groupBy("k").transformWithState(processor, given["schema"], given["mode"], given["time_mode"])
    told.uid("processor").writeStream.format("parquet").uid("sink").start(given["output"])
