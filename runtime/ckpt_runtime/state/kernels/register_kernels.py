"""Registers of HyperLogLog++ for groups: adding hashes, merging stored registers, estimating the number of values.

A group's registers have one of two forms. The dense form has a byte for each of the ``2 ** precision`` registers: its
rank, the longest run of zeros so far. The sparse form has an entry for each register that is not zero, in order: its
number and its rank, in ``width`` bytes, the lowest first. The lengths differ, because an array of entries has at most
``most_sparse`` bytes, which are fewer than there are registers. No bytes at all stand for a group without values.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ckpt_runtime.state.kernels.compiler import FLOAT64, I64, IN_F64, IN_I64, IN_U8, IN_U32, INT64, U8, inlined, kernel
from ckpt_runtime.state.kernels.hash_kernels import is_valid

RANK_BITS = 6
"""A rank is at most 61: bits of a hash but those that choose the register, and one."""
_RANK = np.int64(63)
_EXACT_BITS = 53
"""Sums of powers of two that lie at most so many bits apart are exact in any order."""


@inlined
def _entry_of(key_hash: Any, precision: Any) -> Any:
    """The first bits of a hash choose the register, the zeros behind them are its rank."""
    bits = np.uint64(key_hash)
    register = np.int64(bits >> np.uint64(64 - precision))
    rest = (bits << np.uint64(precision)) | (np.uint64(1) << np.uint64(precision - 1))
    rank = np.int64(1)
    while rest < np.uint64(1 << 63):
        rest = rest << np.uint64(1)
        rank += 1
    return (register << RANK_BITS) | rank


@inlined
def _load(data: Any, at: Any, width: Any) -> Any:
    entry = np.int64(data[at]) | (np.int64(data[at + 1]) << 8)
    if width > 2:
        entry |= np.int64(data[at + 2]) << 16
    if width > 3:
        entry |= np.int64(data[at + 3]) << 24
    return entry


@inlined
def _store(data: Any, at: Any, width: Any, entry: Any) -> None:
    data[at] = np.uint8(entry & 255)
    data[at + 1] = np.uint8((entry >> 8) & 255)
    if width > 2:
        data[at + 2] = np.uint8((entry >> 16) & 255)
    if width > 3:
        data[at + 3] = np.uint8((entry >> 24) & 255)


@inlined
def _sort(entries: Any, count: Any) -> None:
    """Sorts in place as Shell does, which is by insertion for few entries."""
    gap = 1
    while 3 * gap < count:
        gap = 3 * gap + 1
    while gap > 0:
        for end in range(gap, count):
            entry = entries[end]
            at = end
            while at >= gap and entries[at - gap] > entry:
                entries[at] = entries[at - gap]
                at -= gap
            entries[at] = entry
        gap //= 3


@kernel((IN_U32, IN_I64, INT64, I64, I64, I64))
def link_rows(groups: Any, offsets: Any, size: Any, heads: Any, nexts: Any, sizes: Any) -> None:
    """Links the rows of each group, the last one first, and adds the bytes of each row to ``sizes``.

    ``heads`` starts at -1, which also ends each list. Without ``offsets`` each row has ``size`` bytes.
    """
    for row in range(groups.size):
        group = groups[row]
        nexts[row] = heads[group]
        heads[group] = row
        sizes[group] += offsets[row + 1] - offsets[row] if offsets.size else size


@kernel((I64, I64, IN_I64, IN_U8, I64, I64, IN_I64, IN_U8, INT64, I64, INT64, INT64, INT64, I64, I64, U8))
def combine_registers(
    old_heads: Any, old_nexts: Any, offsets: Any, data: Any,
    new_heads: Any, new_nexts: Any, hashes: Any, bitmap: Any, bit_offset: Any, sizes: Any,
    precision: Any, width: Any, most_sparse: Any, scratch: Any, ends: Any, out: Any,
) -> None:  # fmt: skip
    """Writes the registers of each group: those of its old rows, with the hashes of its new rows.

    ``sizes`` has the bytes of each group's old rows, and ``width`` more for each new row. ``scratch`` has an element
    for each register, which is zero before and afterwards. ``ends`` starts with a zero, and gets the end of each
    group's bytes in ``out``.
    """
    end = np.int64(0)
    for group in range(sizes.size):
        if sizes[group] <= most_sparse:
            end = _combine_sparse(
                old_heads[group], old_nexts, offsets, data, new_heads[group], new_nexts, hashes, bitmap, bit_offset,
                precision, width, scratch, end, out,
            )  # fmt: skip
        else:
            end = _combine_dense(
                old_heads[group], old_nexts, offsets, data, new_heads[group], new_nexts, hashes, bitmap, bit_offset,
                precision, width, most_sparse, scratch, end, out,
            )  # fmt: skip
        ends[group + 1] = end


@inlined
def _combine_sparse(
    old: Any, old_nexts: Any, offsets: Any, data: Any, new: Any, new_nexts: Any, hashes: Any, bitmap: Any,
    bit_offset: Any, precision: Any, width: Any, scratch: Any, end: Any, out: Any,
) -> Any:  # fmt: skip
    """Sorts the new entries and those of all old rows but the longest one, and merges them with the latter."""
    count = 0
    row = new
    while row >= 0:
        if bitmap.size == 0 or is_valid(bitmap, bit_offset + row):
            scratch[count] = _entry_of(hashes[row], precision)
            count += 1
        row = new_nexts[row]
    start = stop = np.int64(0)
    if old >= 0:
        longest = _longest_row(old, old_nexts, offsets)
        start, stop = offsets[longest], offsets[longest + 1]
        row = old
        while row >= 0:
            for at in range(offsets[row], offsets[row] if row == longest else offsets[row + 1], width):
                scratch[count] = _load(data, at, width)
                count += 1
            row = old_nexts[row]
    _sort(scratch, count)
    return _merge(data, start, stop, width, scratch, count, end, out)


@inlined
def _longest_row(head: Any, nexts: Any, offsets: Any) -> Any:
    longest = row = head
    while row >= 0:
        if offsets[row + 1] - offsets[row] > offsets[longest + 1] - offsets[longest]:
            longest = row
        row = nexts[row]
    return longest


@inlined
def _merge(data: Any, at: Any, stop: Any, width: Any, added: Any, count: Any, end: Any, out: Any) -> Any:
    """Merges entries in ``data`` with ``added`` ones, both in order; of each register, the highest rank stays.

    Returns the new end. The added entries are zero afterwards.
    """
    for number in range(count):
        entry = added[number]
        added[number] = 0
        register = entry >> RANK_BITS
        if number + 1 < count and added[number + 1] >> RANK_BITS == register:
            continue  # the next one has the same rank or a higher one
        while at < stop:
            known = _load(data, at, width)
            if known >> RANK_BITS >= register:
                if known >> RANK_BITS == register:
                    entry = max(entry, known)
                    at += width
                break
            _store(out, end, width, known)
            at += width
            end += width
        _store(out, end, width, entry)
        end += width
    for rest in range(at, stop):
        out[end] = data[rest]
        end += 1
    return end


@inlined
def _combine_dense(
    old: Any, old_nexts: Any, offsets: Any, data: Any, new: Any, new_nexts: Any, hashes: Any, bitmap: Any,
    bit_offset: Any, precision: Any, width: Any, most_sparse: Any, scratch: Any, end: Any, out: Any,
) -> Any:  # fmt: skip
    """Collects all ranks by register; returns the new end."""
    registers = np.int64(1) << precision
    row = old
    while row >= 0:
        start, stop = offsets[row], offsets[row + 1]
        if stop - start == registers:
            for register in range(registers):
                scratch[register] = max(scratch[register], np.int64(data[start + register]))
        else:
            for at in range(start, stop, width):
                entry = _load(data, at, width)
                scratch[entry >> RANK_BITS] = max(scratch[entry >> RANK_BITS], entry & _RANK)
        row = old_nexts[row]
    row = new
    while row >= 0:
        if bitmap.size == 0 or is_valid(bitmap, bit_offset + row):
            entry = _entry_of(hashes[row], precision)
            scratch[entry >> RANK_BITS] = max(scratch[entry >> RANK_BITS], entry & _RANK)
        row = new_nexts[row]
    used = np.int64(0)
    for register in range(registers):
        used += 1 if scratch[register] else 0
    is_sparse = used * width <= most_sparse
    for register in range(registers):
        rank = scratch[register]
        scratch[register] = 0
        if not is_sparse:
            out[end + register] = np.uint8(rank)
        elif rank:
            _store(out, end, width, (np.int64(register) << RANK_BITS) | rank)
            end += width
    return end if is_sparse else end + registers


@inlined
def _bias(estimate: Any, estimates: Any, biases: Any) -> Any:
    """The mean bias of the six known estimates that are nearest."""
    nearest = np.searchsorted(estimates, estimate)
    low = max(nearest - 5, 0)
    high = min(low + 6, estimates.size)
    while high < estimates.size and (estimate - estimates[high]) ** 2 < (estimate - estimates[low]) ** 2:
        low += 1
        high += 1
    total = 0.0
    for at in range(low, high):
        total += biases[at]
    return total / (high - low)


@inlined
def _inverse(rank: Any) -> Any:
    return 1.0 / (np.int64(1) << rank)


@inlined
def _sums(data: Any, start: Any, stop: Any, registers: Any, width: Any, precision: Any) -> Any:
    """The sum of the inverses of two to the power of each rank, in the order of the registers, and the zeros."""
    if stop - start == registers:
        inverse, zeros = 0.0, 0.0
        for at in range(start, stop):
            inverse += _inverse(np.int64(data[at]))
            if data[at] == 0:
                zeros += 1.0
        return inverse, zeros
    zeros = np.float64(registers - (stop - start) // width)
    inverse = zeros
    greatest = np.int64(0)
    for at in range(start, stop, width):
        rank = _load(data, at, width) & _RANK
        greatest = max(greatest, rank)
        inverse += _inverse(rank)
    if greatest + precision < _EXACT_BITS:
        return inverse, zeros
    inverse = 0.0
    register = np.int64(0)
    for at in range(start, stop, width):
        entry = _load(data, at, width)
        for _ in range((entry >> RANK_BITS) - register):
            inverse += 1.0
        inverse += _inverse(entry & _RANK)
        register = (entry >> RANK_BITS) + 1
    for _ in range(registers - register):
        inverse += 1.0
    return inverse, zeros


@kernel((IN_I64, IN_U8, INT64, INT64, FLOAT64, IN_F64, IN_F64, IN_F64, I64))
def estimate_distinct(
    offsets: Any, data: Any, precision: Any, width: Any, scale: Any,
    thresholds: Any, estimates: Any, biases: Any, counts: Any,
) -> None:  # fmt: skip
    """HyperLogLog++: the estimate of each row's registers, corrected as Spark does; 0 for a row without any."""
    registers = np.int64(1) << precision
    for row in range(counts.size):
        if offsets[row + 1] == offsets[row]:
            continue
        inverse, zeros = _sums(data, offsets[row], offsets[row + 1], registers, width, precision)
        raw = scale / inverse
        if zeros > 0.0:
            linear = registers * np.log(registers / zeros)
            if raw <= 2.5 * registers or (thresholds.size and linear <= thresholds[0]):
                counts[row] = np.int64(np.floor(linear + 0.5))
                continue
        estimate = raw
        if estimates.size and raw < 5.0 * registers:
            estimate -= _bias(raw, estimates, biases)
        counts[row] = np.int64(np.floor(estimate + 0.5))
