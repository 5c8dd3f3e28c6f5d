"""A stateful processor behind a join of two streams that one reader gives."""

from __future__ import annotations

import json

import pyarrow.compute as pc
import side_processors
from batches import Batches

from ckpt_runtime.api import Stream, StreamSession


def pipeline(session: StreamSession, case: str) -> None:
    """``case`` is JSON: source, chunk, output, watermark (of ``t``), processor, schema, mode, time_mode.

    The kind of join stands for the key.
    """
    given = json.loads(case)
    rows = session.readStream.format(Batches).option("path", given["source"]).option("chunk", given["chunk"]).load()

    def side(letter: str) -> Stream:
        one = rows.filter(pc.equal(pc.field("side"), letter)).uid(f"{letter}-side")
        renamed = one.select(**{letter + name: name for name in "ktv"}).uid(f"{letter}-columns")
        return renamed.withWatermark(f"{letter}t", given["watermark"][1]).uid(f"{letter}-time")

    left, right = side("l"), side("r")
    rows.uid("source")
    joined = left.join(right, on=[("lk", "rk")], how=given["keys"][0], within=("-5 s", "5 s")).uid("join")
    named = joined.select(k="lk", t="lt", v="rv").uid("pairs")
    processor = getattr(side_processors, given["processor"])()
    told = named.groupBy("k").transformWithState(processor, given["schema"], given["mode"], given["time_mode"])
    told.uid("processor").writeStream.format("parquet").uid("sink").start(given["output"])
