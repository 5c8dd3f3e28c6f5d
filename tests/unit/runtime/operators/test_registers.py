"""Estimated numbers of distinct values: both forms of the registers beside a direct computation of HyperLogLog++."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ckpt_runtime.operators.aggregates.accumulator import Rows
from ckpt_runtime.operators.aggregates.registry import ApproximateDistinct
from ckpt_runtime.state.arrays import read_only
from tests.support.groups import aggregate

NOTHING = Rows(read_only(np.empty(0, dtype=np.uint32)), [pa.nulls(0, pa.large_binary())])


def accumulator(precision: int, **tables: list[float]) -> ApproximateDistinct:
    constants: dict[str, list[float]] = {"thresholds": [], "estimates": [], "biases": []} | tables
    settings = {"precision": precision, "tables": constants}
    return ApproximateDistinct(
        aggregate("HyperLogLogPlusPlus", "v", result=pa.int64(), settings=settings), [pa.int64()]
    )


def numbered(groups: list[int], *columns: pa.Array) -> Rows:
    return Rows(read_only(np.array(groups, dtype=np.uint32)), list(columns))


def dense(precision: int, hashes: Sequence[int | None]) -> bytes:
    """A byte for each register, by the definition."""
    registers = bytearray(1 << precision)
    for value in hashes:
        if value is not None:
            bits = f"{value % (1 << 64):064b}"
            number, rest = int(bits[:precision], 2), bits[precision:] + "1"
            registers[number] = max(registers[number], rest.index("1") + 1)
    return bytes(registers)


def estimate(registers: bytes, alpha: float) -> int:
    """Without corrections by tables."""
    size = len(registers)
    raw = alpha * size * size / sum(2.0**-rank for rank in registers)
    zeros = registers.count(0)
    return round(size * math.log(size / zeros) if zeros and raw <= 2.5 * size else raw)


def alpha_of(precision: int) -> float:
    return {4: 0.673, 5: 0.697, 6: 0.709}.get(precision, 0.7213 / (1 + 1.079 / (1 << precision)))


@pytest.mark.parametrize("precision", [4, 9, 11, 13, 19])
def test_groups_of_any_size_have_the_estimate_of_their_registers_however_rows_arrive(precision: int) -> None:
    generator = np.random.default_rng(precision)
    own = accumulator(precision)
    sizes = [0, 1, 2, 3, 30, 200, 3_000]
    hashes: list[list[int | None]] = [[] for _ in sizes]
    old = NOTHING
    for _ in range(4):
        groups, values = [], []
        for group, size in enumerate(sizes):
            for value in generator.integers(-(1 << 63), (1 << 63) - 1, size).tolist():
                groups += [group] * 3
                values += [value, None, value]
        order = generator.permutation(len(groups))
        groups, values = [groups[at] for at in order], [values[at] for at in order]
        for group, value in zip(groups, values, strict=True):
            hashes[group].append(value)
        given = pa.array([0, *values], pa.int64()).slice(1)
        stored = own.combined(len(sizes), old, numbered(groups, given))
        stored[0].validate(full=True)
        wanted = [dense(precision, each) for each in hashes]
        assert own.result(stored).to_pylist() == [estimate(each, alpha_of(precision)) for each in wanted]
        old = numbered(list(range(len(sizes))), stored[0])
    assert stored[0][0].as_py() == b""


def test_group_with_many_values_stores_a_byte_for_each_register_and_one_with_few_an_entry_for_each_in_use() -> None:
    own = accumulator(9)
    many = np.random.default_rng(1).integers(-(1 << 63), (1 << 63) - 1, 2_000).tolist()
    [stored] = own.combined(2, NOTHING, numbered([0] * 2_000 + [1, 1], pa.array([*many, 5, 1 << 61])))
    assert stored[0].as_py() == dense(9, many)
    # 5 is 61 zeros and 101, and 1 << 61 two zeros and a one: its first nine bits are number 64, and all others zeros.
    entries = np.frombuffer(stored[1].as_py(), dtype="<u2")
    assert [(int(entry) >> 6, int(entry) & 63) for entry in entries] == [(0, 53), (64, 56)]


def test_stored_registers_of_both_forms_and_of_several_rows_are_merged() -> None:
    own = accumulator(9)
    generator = np.random.default_rng(2)
    parts = [generator.integers(-(1 << 63), (1 << 63) - 1, size).tolist() for size in (900, 3, 40, 1)]
    small = [(group, value) for group, part in enumerate(parts[1:]) for value in part]
    few = own.combined(3, NOTHING, numbered([group for group, _ in small], pa.array([value for _, value in small])))
    stored = pa.array([dense(9, parts[0]), *few[0].to_pylist(), b"", None], pa.large_binary())
    merged = own.combined(3, numbered([1, 1, 0, 0, 2, 2], stored), numbered([1], pa.array([7])))
    wanted = [dense(9, parts[2] + parts[3]), dense(9, parts[0] + parts[1] + [7]), bytes(512)]
    assert own.result(merged).to_pylist() == [estimate(each, alpha_of(9)) for each in wanted]
    assert merged[0][1].as_py() == wanted[1]


def test_full_registers_of_an_earlier_version_with_few_values_become_entries() -> None:
    own = accumulator(9)
    values: list[Any] = [1 << 60, -5, 77]
    old = pa.array([dense(9, values[:2])], pa.large_binary())
    [stored] = own.combined(1, numbered([0], old), numbered([0], pa.array(values[2:])))
    assert len(stored[0].as_py()) == 2 * 3
    assert own.result([stored]).to_pylist() == own.result([pa.array([dense(9, values)], pa.large_binary())]).to_pylist()


def test_rank_beyond_the_precision_of_doubles_is_added_in_the_order_of_the_registers() -> None:
    tables = {"thresholds": [0.0], "estimates": [], "biases": []}
    own = accumulator(4, **tables)
    values = [0, 1 << 60]  # ranks 61 and 1 of registers 0 and 1
    [stored] = own.combined(1, NOTHING, numbered([0, 0], pa.array(values)))
    whole = pa.array([dense(4, values)], pa.large_binary())
    assert own.result([stored]).to_pylist() == own.result([whole]).to_pylist()
