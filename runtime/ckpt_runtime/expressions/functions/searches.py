"""Searches in texts from a position on, and the similarity of two texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import pyarrow as pa

from ckpt_runtime.expressions.errors import EvaluationError
from ckpt_runtime.expressions.evaluation import Value, strict
from ckpt_runtime.expressions.nodes import Call
from ckpt_runtime.expressions.rows import per_row

_Units: TypeAlias = Sequence[bytes]


@strict("StringInstrWithOccurrence")
def _instr(call: Call) -> Callable[..., Value]:
    """Arguments: text, part, position of the first character that counts (from the end if negative), occurrence."""

    def find(text: str, part: str, start: int, occurrence: int) -> int:
        if occurrence < 1:
            raise EvaluationError(
                "INVALID_PARAMETER_VALUE", f"instr with the occurrence {occurrence}, which is below 1"
            )
        if not part:
            return 1
        if start == 0:
            return 0
        at = start - 1 if start > 0 else len(text) + start
        while 0 <= at <= len(text):
            at = text.find(part, at) if start > 0 else text.rfind(part, 0, at + len(part))
            if at < 0:
                return 0
            occurrence -= 1
            if not occurrence:
                return at + 1
            at += 1 if start > 0 else -1
        return 0

    return per_row(find, pa.int32())


@strict("JaroWinkler")
def _jaro_winkler(call: Call) -> Callable[..., Value]:
    """The similarity of Jaro and Winkler: 0 to 1. Characters are Java's, which are units of UTF-16."""

    def compare(left: str, right: str) -> float:
        if left == right:
            return 1.0
        first, second = _units(left), _units(right)
        similarity = _jaro(first, second)
        prefix = 0
        for one, other in zip(first[:4], second[:4], strict=False):
            if one != other:
                break
            prefix += 1
        return similarity + 0.1 * prefix * (1 - similarity)

    return per_row(compare, pa.float64())


def _units(text: str) -> _Units:
    data = text.encode("utf-16-le")
    return [data[at : at + 2] for at in range(0, len(data), 2)]


def _jaro(left: _Units, right: _Units) -> float:
    """Returns Jaro's similarity: equal characters that are near each other count, less where their order differs."""
    reach = max(max(len(left), len(right)) // 2 - 1, 0)
    matched_left: list[bytes] = []
    used = [False] * len(right)
    for at, unit in enumerate(left):
        for near in range(max(0, at - reach), min(len(right), at + reach + 1)):
            if not used[near] and right[near] == unit:
                used[near] = True
                matched_left.append(unit)
                break
    if not matched_left:
        return 0.0
    matched_right = [unit for unit, found in zip(right, used, strict=True) if found]
    matches = len(matched_left)
    transpositions = sum(one != other for one, other in zip(matched_left, matched_right, strict=True)) / 2
    return (matches / len(left) + matches / len(right) + (matches - transpositions) / matches) / 3
