"""A bounded job that keeps nothing of its rows: no operator of it needs a final checkpoint."""

from __future__ import annotations

import argparse

from ckpt_runtime.api import StreamSession, count


def pipeline(session: StreamSession, *arguments: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", required=True)
    options = parser.parse_args(arguments)
    numbers = session.readStream.format("numbers").option("rows", options.rows).load().uid("numbers")
    counts = numbers.groupBy("key").agg(count()).uid("counts")
    counts.writeStream.format("noop").uid("sink").start()
