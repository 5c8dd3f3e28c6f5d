"""Copies any source into a Parquet directory. Arguments: the format, its options as JSON, its schema, the output."""

from __future__ import annotations

import json

from ckpt_runtime.api import StreamSession


def pipeline(session: StreamSession, source: str, options: str, schema: str, output: str) -> None:
    reader = session.readStream.format(source).options(**json.loads(options))
    rows = (reader.schema(schema) if schema else reader).load().uid("source")
    rows.writeStream.format("parquet").start(output).uid("sink")
