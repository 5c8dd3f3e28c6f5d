"""Splits: the fixed pieces of a source whose positions are its state, and their assignment to subtasks.

There are always :data:`SPLITS` of them, whatever the parallelism, so that a snapshot can be restored at any other.
Positions are list state that is split among subtasks; a broadcast marker distinguishes a subtask that got no split
because all had ended from one whose source is new in the job.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct

from ckpt_runtime.checkpoint.state_handles import OperatorStateMode
from ckpt_runtime.graph.schema import NonNegative
from ckpt_runtime.operators.operator import OperatorContext, OperatorStateStore

SPLITS = 128

_POSITIONS = "positions"
_STARTED = "started"


class SplitPosition(Struct):
    """What is stored of a split; ``position`` is the number of its next row."""

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
