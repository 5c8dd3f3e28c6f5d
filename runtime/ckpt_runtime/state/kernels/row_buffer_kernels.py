"""Buffered rows by key: appends to the list of a slot, finds matches by slot and time, removes by time.

Rows are numbered from 0. A slot's rows are a linked list in order of arrival: ``heads`` and ``tails`` have an entry per
slot, ``nexts`` one per row, each holding row + 1 (0: none). ``flags`` has the bits :data:`ALIVE` and :data:`MATCHED`.
Rows that are not alive are unlinked when a probe visits them. ``block_least`` holds a lower bound of the times of the
live rows in each block of :data:`BLOCK` rows, so that blocks without expired rows are skipped.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ckpt_runtime.state.kernels.compiler import (
    I32,
    I64,
    IN_I32,
    IN_I64,
    IN_U8,
    IN_U16,
    IN_U32,
    IN_U64,
    INT64,
    U8,
    U16,
    U32,
    U64,
    inlined,
    kernel,
)
from ckpt_runtime.state.kernels.hash_kernels import copy_bytes

ALIVE, MATCHED = np.uint8(1), np.uint8(2)
BLOCK = 4096
PAIRS, FIRST, CONSUME, CANDIDATES = 0, 1, 2, 3
"""Modes of :func:`probe_rows`: all matches; only whether there is one; all matches, which it removes; all matches,
without marking them."""
POSITION, ENTRY, PREVIOUS, FOUND = 0, 1, 2, 3
"""Places in the cursor of :func:`probe_rows`; the last one holds the number of pairs of this call."""
NOT_STARTED = -1
UNMATCHED, EXPIRED = 0, 1
"""Places in the result of :func:`expire_rows`."""
_MAX = np.int64(2**63 - 1)
_MIN = np.int64(-(2**63))


@kernel((IN_U32, IN_I64, IN_U8, INT64, I32, I32, I32, I64, U8, I64))
def append_rows(
    slots: Any,
    times: Any,
    matched: Any,
    first: Any,
    heads: Any,
    tails: Any,
    nexts: Any,
    row_times: Any,
    flags: Any,
    block_least: Any,
) -> None:
    """Appends rows, numbered from ``first``, to their slots' lists. ``times`` is empty when rows have none."""
    for position in range(slots.size):
        row = first + position
        slot = slots[position]
        last = tails[slot]
        if last == 0:
            heads[slot] = row + 1
        else:
            nexts[last - 1] = row + 1
        tails[slot] = row + 1
        nexts[row] = 0
        flags[row] = ALIVE | MATCHED if matched[position] else ALIVE
        if times.size:
            time = times[position]
            row_times[row] = time
            block = row // BLOCK
            block_least[block] = min(block_least[block], time)


@inlined
def _shifted(time: Any, by: Any) -> Any:
    """``time + by``, limited to the range of 64 bits."""
    if by > 0 and time > _MAX - by:
        return _MAX
    if by < 0 and time < _MIN - by:
        return _MIN
    return time + by


@inlined
def _take_out(slot: Any, previous: Any, following: Any, heads: Any, tails: Any, nexts: Any) -> None:
    """Unlinks the row between two others of its slot's list (each as row + 1, 0: none)."""
    if previous == 0:
        heads[slot] = following
    else:
        nexts[previous - 1] = following
    if following == 0:
        tails[slot] = previous


@kernel((IN_U32, IN_I64, INT64, INT64, INT64, I64, I32, I32, I32, U8, U8, I64, I32, I32))
def probe_rows(
    slots: Any,
    times: Any,
    lower: Any,
    upper: Any,
    mode: Any,
    row_times: Any,
    heads: Any,
    tails: Any,
    nexts: Any,
    flags: Any,
    found: Any,
    cursor: Any,
    probes: Any,
    rows: Any,
) -> None:
    """Finds pairs of a probing position and a live row of the same slot, by position, then in order of arrival.

    With ``times``, a row matches when its time minus the probe's is between ``lower`` and ``upper``. Marks both sides
    of each pair, unless these are candidates. Stops when ``rows`` is full and continues there at the next call; at the
    end ``cursor`` is past the last position.
    """
    timed = times.size > 0
    position, entry, previous = cursor[POSITION], cursor[ENTRY], cursor[PREVIOUS]
    pairs = 0
    while position < slots.size:
        slot = slots[position]
        if entry == NOT_STARTED:
            entry, previous = np.int64(heads[slot]), np.int64(0)
        earliest = _shifted(times[position], lower) if timed else _MIN
        latest = _shifted(times[position], upper) if timed else _MAX
        while entry != 0 and pairs < rows.size:
            row = entry - 1
            following = np.int64(nexts[row])
            lives = flags[row] & ALIVE != 0
            if lives and (not timed or earliest <= row_times[row] <= latest):
                if mode != CANDIDATES:
                    found[position] = 1
                if mode == FIRST:
                    following = np.int64(0)
                elif mode == CANDIDATES:
                    probes[pairs], rows[pairs] = position, row
                    pairs += 1
                else:
                    lives = mode == PAIRS
                    flags[row] = ALIVE | MATCHED if lives else MATCHED
                    probes[pairs], rows[pairs] = position, row
                    pairs += 1
            if lives:
                previous = entry
            else:
                _take_out(slot, previous, following, heads, tails, nexts)
            entry = following
        if entry != 0:
            break
        position += 1
        entry = np.int64(NOT_STARTED)
    cursor[POSITION], cursor[ENTRY], cursor[PREVIOUS], cursor[FOUND] = position, entry, previous, pairs


@kernel((IN_U32, I32, I32, I32, U8, I32))
def consume_rows(slots: Any, heads: Any, tails: Any, nexts: Any, flags: Any, rows: Any) -> Any:
    """Removes the first live row of each slot; ``rows`` gets its number, or -1. Returns how many there were.

    No slot comes twice, and none has more than one live row: its whole list goes.
    """
    found = 0
    for position in range(slots.size):
        slot = slots[position]
        entry = heads[slot]
        while entry != 0 and flags[entry - 1] & ALIVE == 0:
            entry = nexts[entry - 1]
        rows[position] = entry - 1
        if entry != 0:
            flags[entry - 1] = MATCHED
            found += 1
        heads[slot] = 0
        tails[slot] = 0
    return found


@kernel((I32, I32, U32))
def slots_of_rows(heads: Any, nexts: Any, slots: Any) -> None:
    """The slot of each row that is in a list."""
    for slot in range(heads.size):
        entry = heads[slot]
        while entry != 0:
            slots[entry - 1] = slot
            entry = nexts[entry - 1]


@kernel((INT64, INT64, I64, U8, I64, I32, I64))
def expire_rows(
    bound: Any, size: Any, row_times: Any, flags: Any, block_least: Any, unmatched: Any, result: Any
) -> None:
    """Removes rows whose time is at or before ``bound``; lists those without a match, in order."""
    listed = 0
    expired = 0
    for block in range((size + BLOCK - 1) // BLOCK):
        if block_least[block] > bound:
            continue
        least = _MAX
        for row in range(block * BLOCK, min(size, (block + 1) * BLOCK)):
            if flags[row] & ALIVE:
                if row_times[row] <= bound:
                    expired += 1
                    if not flags[row] & MATCHED:
                        unmatched[listed] = row
                        listed += 1
                    flags[row] &= MATCHED
                elif row_times[row] < least:
                    least = row_times[row]
        block_least[block] = least
    result[UNMATCHED] = listed
    result[EXPIRED] = expired


@inlined
def _segment_of(ends: Any, row: Any) -> Any:
    """The first segment that ends behind the row."""
    low, high = 0, ends.size - 1
    while low < high:
        middle = (low + high) // 2
        if ends[middle] > row:
            high = middle
        else:
            low = middle + 1
    return low


@kernel((IN_I32, IN_I64, I64, I32, I32))
def order_by_segment(rows: Any, ends: Any, bounds: Any, places: Any, inside: Any) -> None:
    """Stable counting sort of row numbers by the segment that has them; ``ends`` says where segments end.

    Segment ``s`` gets the stretch from ``bounds[s]`` to ``bounds[s + 1]``: of ``places`` the positions in ``rows``, of
    ``inside`` the numbers counted from its first row. ``bounds`` is zero before, and has one entry more than ``ends``.
    """
    for position in range(rows.size):
        bounds[_segment_of(ends, rows[position])] += 1
    start = np.int64(0)
    for segment in range(ends.size):
        count = bounds[segment]
        bounds[segment] = start
        start += count
    for position in range(rows.size):
        segment = _segment_of(ends, rows[position])
        place = bounds[segment]
        bounds[segment] = place + 1
        places[place] = position
        inside[place] = rows[position] - (ends[segment - 1] if segment else 0)
    for segment in range(ends.size, 0, -1):
        bounds[segment] = bounds[segment - 1]
    bounds[0] = 0


@kernel(
    (IN_U8, IN_I32, IN_I32, U8),
    (IN_U16, IN_I32, IN_I32, U16),
    (IN_U32, IN_I32, IN_I32, U32),
    (IN_U64, IN_I32, IN_I32, U64),
)
def gather(values: Any, rows: Any, places: Any, out: Any) -> None:
    """Puts the value of each row at its place."""
    for position in range(rows.size):
        out[places[position]] = values[rows[position]]


@kernel((IN_I32, IN_I32, IN_I32, I64), (IN_I64, IN_I32, IN_I32, I64))
def gather_lengths(offsets: Any, rows: Any, places: Any, lengths: Any) -> None:
    """Puts the length of each row's bytes behind its place."""
    for position in range(rows.size):
        row = rows[position]
        lengths[places[position] + 1] = offsets[row + 1] - offsets[row]


@kernel((IN_I32, IN_U8, IN_I32, IN_I32, IN_I64, U8), (IN_I64, IN_U8, IN_I32, IN_I32, IN_I64, U8))
def gather_bytes(offsets: Any, data: Any, rows: Any, places: Any, ends: Any, out: Any) -> None:
    """Copies the bytes of each row to its place, which begins at ``ends[place]``."""
    for position in range(rows.size):
        row = rows[position]
        copy_bytes(data, offsets[row], out, ends[places[position]], offsets[row + 1] - offsets[row])
