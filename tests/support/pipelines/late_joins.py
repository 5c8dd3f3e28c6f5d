"""Joins of two streams that one reader gives, as (kind, number of the left row, that of the right one)."""

from __future__ import annotations

import json
from typing import Any

import pyarrow.compute as pc
from batches import Batches

from ckpt_runtime.api import Stream, StreamSession


def sides(session: StreamSession, given: dict[str, Any]) -> tuple[Stream, Stream]:
    """Both streams, with the names of their columns behind ``l`` and ``r``."""
    rows = session.readStream.format(Batches).option("path", given["source"]).option("chunk", given["chunk"]).load()

    def side(letter: str) -> Stream:
        one = rows.filter(pc.equal(pc.field("side"), letter)).uid(f"{letter}-side")
        renamed = one.select(**{letter + name: name for name in "ktv"}).uid(f"{letter}-columns")
        return renamed.withWatermark(f"{letter}t", given["watermark"][1]).uid(f"{letter}-time")

    left, right = side("l"), side("r")
    rows.uid("source")
    return left, right


def pipeline(session: StreamSession, case: str) -> None:
    """``case`` is JSON: source, output, chunk and watermark (of ``t``); kinds of join stand for a processor."""
    given = json.loads(case)
    left, right = sides(session, given)
    united: Stream | None = None
    for kind in json.loads(given["processor"]):
        joined = left.join(right, on=[("lk", "rk")], how=kind, within=("-5 s", "5 s")).uid(kind)
        pair = {
            "l": pc.coalesce(pc.field("lv"), pc.scalar(-1)),
            "r": pc.scalar(-1) if kind == "left_semi" else pc.coalesce(pc.field("rv"), pc.scalar(-1)),
        }
        named = joined.select(kind=pc.scalar(kind), **pair).uid(f"{kind}-pairs")
        united = named if united is None else united.union(named)
    assert united is not None
    united.writeStream.format("parquet").uid("sink").start(given["output"])
