"""Kernels for columns that a snapshot shows unchanged while their owner changes them: first changes, moved values."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckpt_runtime.state.kernels.compiler import IN_U8, IN_U32, IN_U64, INT64, U8, U32, U64, kernel


@kernel((IN_U32, INT64, U8, U32, INT64))
def first_touches(slots: Any, size: Any, touched: Any, found: Any, known: Any) -> Any:
    """Appends slots below ``size`` that are new to the ``known`` ones in ``found``; returns the new number of them.

    ``touched`` has a bit per slot.
    """
    for row in range(slots.size):
        slot = slots[row]
        if slot < size:
            bit = np.uint8(1 << (slot & 7))
            if not touched[slot >> 3] & bit:
                touched[slot >> 3] |= bit
                found[known] = slot
                known += 1
    return known


@kernel((IN_U8, IN_U32, U8), (IN_U64, IN_U32, U64))
def gather(values: Any, places: Any, out: Any) -> None:
    """Copies the values at the places to ``out``."""
    for row in range(places.size):
        out[row] = values[places[row]]
