"""Runs a processor of ``side_processors`` or ``unusual_processors`` on the batches of a directory."""

from __future__ import annotations

import json

import side_processors
import unusual_processors
from batches import Batches

from ckpt_runtime.api import StreamSession


def pipeline(session: StreamSession, case: str) -> None:
    """``case`` is JSON: all fields of ``Case`` that a pipeline needs, ``source`` and ``output``.

    ``second`` names a processor behind the first one, with the same keys and schema.
    """
    given = json.loads(case)
    options = {"path": given["source"], "chunk": given["chunk"], "availableNow": given["ends"]}
    stream = session.readStream.format(Batches).options(**options).load().uid("source")
    if given["watermark"]:
        stream = stream.withWatermark(*given["watermark"]).uid("watermark")
    for uid in filter(None, ("processor", given["second"])):
        name = given["processor"] if uid == "processor" else uid
        processor = getattr(side_processors, name, None) or getattr(unusual_processors, name)
        grouped = stream.groupBy(*given["keys"])
        transform = grouped.transformWithStateInPandas if given["in_pandas"] else grouped.transformWithState
        stream = transform(processor(), given["schema"], given["mode"], given["time_mode"]).uid(uid)
    stream.writeStream.format("parquet").uid("sink").start(given["output"])
