"""Functions for ``applyInPandasWithState``; each gives all that it sees and does to its group's state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark.sql.streaming.state import GroupState

STATE = "n LONG, last TIMESTAMP, note STRING"
OUTPUT = "k STRING, what STRING, n LONG, watermark LONG"


def frame(key: tuple[Any, ...], what: str, state: GroupState, n: int) -> pd.DataFrame:
    watermark = state.getCurrentWatermarkMs()
    return pd.DataFrame({"k": [key[0]], "what": [what], "n": [n], "watermark": [watermark]})


def sessions(key: tuple[Any, ...], frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """A session ends five seconds after its last row; every fourth row of a session removes its state."""
    if state.hasTimedOut:
        rows = [len(each) for each in frames]
        n = state.get[0] if state.exists else -1
        state.remove()
        yield frame(key, f"ended after {rows}", state, n)
        return
    given = pd.concat(list(frames))
    before = state.getOption
    n = (before[0] if before else 0) + len(given)
    last = given["t"].max()
    if n >= 4:
        state.remove()
    else:
        state.update((n, None if pd.isna(last) else last, f"of {key[0]}"))
    end = state.getCurrentWatermarkMs() if pd.isna(last) else int(last.timestamp() * 1000)
    state.setTimeoutTimestamp(max(end, state.getCurrentWatermarkMs()) + 5000)
    yield frame(key, f"open, before {before and before[0], before and before[2]}", state, n)
    yield frame(key, "columns " + ",".join(given.columns), state, len(given))


def counts(key: tuple[Any, ...], frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Counts the rows of a key for ever."""
    n = (state.get[0] if state.exists else 0) + sum(map(len, frames))
    state.update((n, None, None))
    yield pd.DataFrame({"n": [n], "k": [key[0]], "what": [None], "watermark": [None]})


def soon(key: tuple[Any, ...], frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Its timeout is over when the next batch comes."""
    if state.hasTimedOut:
        state.remove()
        yield pd.DataFrame({"k": [key[0]], "what": ["timed out"], "n": [None], "watermark": [None]})
        return
    n = sum(map(len, frames))
    state.update((n, None, "x"))
    state.setTimeoutDuration(1)
    yield pd.DataFrame({"k": [key[0]], "what": ["rows"], "n": [n], "watermark": [None]})
