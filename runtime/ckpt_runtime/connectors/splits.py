"""Splits: the fixed pieces of a source whose positions are its state, and their assignment to subtasks.

There are always :data:`SPLITS` of them, so that a snapshot can be restored at any parallelism.
Positions are list state that is split among subtasks; a broadcast marker distinguishes a subtask that got no split
because all had ended from one whose source is new in the job.

:class:`BuiltInSource` is the base of the engine's own sources of the public protocol.

A :class:`Pacer` limits a source to a number of rows per second, by the clock it is given, and never sleeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

import pyarrow as pa
from msgspec import Meta, Struct

from ckpt_runtime.checkpoint.completed_checkpoint import OperatorStateMode
from ckpt_runtime.graph.formats import source_options, source_schema
from ckpt_runtime.graph.schema import NonNegative
from ckpt_runtime.operators.operator import OperatorContext, OperatorStateStore
from ckpt_runtime.sources import Source

SPLITS = 128

_POSITIONS = "positions"
_STARTED = "started"


class SplitPosition(Struct):
    """The stored form of a split; ``position`` is the number of its next row."""

    split: Annotated[int, Meta(ge=0, lt=SPLITS)]
    position: NonNegative


P = TypeVar("P", bound=SplitPosition)


def assigned_splits(context: OperatorContext, schema: type[P], contiguous: bool = False) -> dict[int, P | None]:
    """This subtask's splits in ascending order, each with the item that :func:`put_positions` stored (None at a start).

    A fresh start assigns them round-robin, or as ``contiguous`` runs.
    """
    positions = context.operator_state.restored(_POSITIONS, schema)
    has_started: tuple[bool, ...] = context.operator_state.restored(_STARTED, bool)
    if positions or has_started:
        return {item.split: item for item in sorted(positions, key=lambda item: item.split)}
    if contiguous:
        owners = [split * context.parallelism // SPLITS for split in range(SPLITS)]
    else:
        owners = [split % context.parallelism for split in range(SPLITS)]
    return {split: None for split in range(SPLITS) if owners[split] == context.subtask_index}


def put_positions(store: OperatorStateStore, items: Iterable[dict[str, Any]]) -> None:
    """Puts the splits' items, each with its ``split`` and its read position."""
    store.put(_POSITIONS, list(items), OperatorStateMode.SPLIT)
    store.put(_STARTED, [True], OperatorStateMode.BROADCAST)


class BuiltInSource(Source):
    """A source of one of the engine's own formats, with the parsed values of its options."""

    def __init__(self, format_: str, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self._format = format_
        self._values = source_options(format_, options)

    @classmethod
    def name(cls) -> str:
        """Not used: the formats are built in."""
        return "built-in"

    def schema(self, declared: pa.Schema | None) -> pa.Schema:
        return source_schema(self._format, self.options, declared)


_BURST_SECONDS = 1.0
_UNLIMITED = 1 << 62
_PAUSE_MS = 50
"""Each pause ends with a small batch that goes through all operators: with 10 ms these took a fifth of a processor."""


class Pacer:
    """A token bucket: rows may be emitted as time passes; at most one second's worth is saved up."""

    def __init__(self, rows_per_second: float, monotonic_ms: Callable[[], float]) -> None:
        """``rows_per_second`` 0 means unlimited. The clock must be monotonic: a clock set back would stall a source."""
        self._rate = rows_per_second
        self._monotonic_ms = monotonic_ms
        self._at_ms = monotonic_ms()
        self._tokens = 0.0

    def allowance(self) -> int:
        """How many rows may be emitted now."""
        if not self._rate:
            return _UNLIMITED
        now = self._monotonic_ms()
        earned = (now - self._at_ms) * self._rate / 1000
        self._at_ms = now
        self._tokens = min(self._tokens + earned, max(1.0, self._rate * _BURST_SECONDS))
        return int(self._tokens)

    def spend(self, rows: int) -> None:
        """Notes that ``rows`` were emitted."""
        if self._rate:
            self._tokens -= rows

    def idle_ms(self) -> int:
        """How long to wait until a row may be emitted: 50 ms, or longer for rates below 20 rows per second."""
        if not self._rate:
            return _PAUSE_MS
        return max(_PAUSE_MS, min(1000, int((1.0 - self._tokens) * 1000 / self._rate) + 1))
