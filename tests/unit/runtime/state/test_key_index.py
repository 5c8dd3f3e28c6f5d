"""The index of keys: equal slots in every form of its table, a table that suits the keys, and keys of equal hashes."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ckpt_runtime.state.memory import key_index as module
from ckpt_runtime.state.memory.key_index import KeyIndex, key_index
from tests.support.held_memory import bytes_held

LEAST, GREATEST = -(1 << 63), (1 << 63) - 1


class Model:
    """The index under test beside a dict."""

    def __init__(self, kind: pa.DataType | None = None) -> None:
        self.kind = kind or pa.int64()
        self.index: KeyIndex = key_index(pa.schema([("key", self.kind)]))
        self.slots: dict[int | str | None, int] = {}

    def add(self, keys: Iterable[int | str | None]) -> None:
        """A batch; every row must get its key's slot, in order of first appearance."""
        batch = list(keys)
        column = [pa.array(batch, self.kind)]
        assert self.index.find(column).tolist() == [self.slots.get(key, -1) for key in batch]
        expected = [self.slots.setdefault(key, len(self.slots)) for key in batch]
        assert self.index.slots_of(column).tolist() == expected
        assert self.index.find(column).tolist() == expected
        assert self.index.size == len(self.slots)

    def keys(self) -> list[int | str | None]:
        found: list[int | str | None] = self.index.freeze().arrays()[0].to_pylist()
        return found

    @property
    def bytes_per_key(self) -> float:
        return bytes_held(self.index) / max(1, len(self.slots))


def shuffled(keys: Iterable[int], seed: int = 1) -> list[int]:
    """In an order of their own."""
    rows = list(keys)
    random.Random(seed).shuffle(rows)
    return rows


@pytest.mark.parametrize("first", [0, 10**12, -70_000, LEAST, GREATEST - 99_999])
def test_dense_keys_keep_their_order_of_insertion(first: int) -> None:
    model = Model()
    keys = shuffled(range(first, first + 100_000))
    for start in range(0, len(keys), 20_000):
        model.add(keys[start : start + 20_000])
        model.add(keys[: start + 10])
    assert model.keys() == keys


def test_which_keys_are_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("the other form of table was used")

    close, far = Model(), Model()
    close.add(range(5_000))
    far.add(range(0, 5_000_000, 1_000))
    with monkeypatch.context() as patch:
        patch.setattr(module.kernels, "find_or_insert_int64", refuse)
        close.add(shuffled(range(60_000)))
        close.add(shuffled(range(200_000)))
    with monkeypatch.context() as patch:
        patch.setattr(module.kernels, "find_or_insert_direct", refuse)
        far.add(range(0, 10_000_000, 1_000))


@pytest.mark.parametrize("step", [1, -1, 3, -3], ids=str)
def test_keys_that_grow_by_and_by(step: int) -> None:
    model = Model()
    for batch in range(60):
        model.add(range(batch * 3_000 * step, (batch + 1) * 3_000 * step, step))
    assert model.bytes_per_key < 80


def test_keys_that_grow_in_both_directions() -> None:
    model = Model()
    for batch in range(40):
        above = range(batch * 2_000, (batch + 1) * 2_000)
        model.add(above if batch % 2 else [-key for key in above])
    assert model.bytes_per_key < 80


@pytest.mark.parametrize("far", [1 << 40, -(1 << 40), LEAST, GREATEST], ids=str)
@pytest.mark.parametrize("close", [10, 1_000, 50_000])
def test_key_far_from_the_others_takes_little_memory(close: int, far: int) -> None:
    model = Model()
    model.add(range(close))
    model.add([5, far, 7, far])
    model.add(shuffled(range(close + 5_000)))
    assert model.keys()[close] == far
    assert bytes_held(model.index) < 10_000_000


def test_sparse_keys_that_become_dense_take_little_memory() -> None:
    model = Model()
    model.add(range(0, 250_000, 100))
    model.add(range(0, 250_000, 2))
    model.add(shuffled(range(250_000)))
    assert model.bytes_per_key < 80


def test_nulls_have_a_slot_of_their_own_in_every_form() -> None:
    model = Model()
    model.add([None, 3, None])
    model.add([*range(100, 4_000), None])
    model.add([None] * 20_000)
    model.add([None, 1 << 50, 0, None])
    model.add([*range(50_000), None, 0])
    assert model.keys()[0] is None


def test_nulls_share_one_slot_also_in_slices() -> None:
    model = Model()
    for _ in range(3):
        model.add([None] * 5_000)
    model.add([])
    model.add([0, 10**6, None])
    index = key_index(pa.schema([("key", pa.int64())]))
    rows = pa.array([None if n % 7 == 0 else n for n in range(5_000)])
    assert index.slots_of([rows])[-1] == index.slots_of([rows.slice(4_999)])[0]


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint16(), pa.int32(), pa.uint64(), pa.date32()], ids=str)
def test_keys_of_every_integer_type_have_slots(kind: pa.DataType) -> None:
    index = key_index(pa.schema([("key", kind)]))
    rows = pa.array([n % 100 for n in range(5_000)]).cast(pa.int32()).cast(kind)
    assert index.slots_of([rows]).tolist() == [n % 100 for n in range(5_000)]
    assert index.freeze().arrays()[0].equals(rows[:100])


@pytest.mark.parametrize("seed", range(20))
def test_index_agrees_with_a_dictionary_for_any_mixture_of_keys(seed: int) -> None:
    draw = random.Random(seed)
    model = Model()
    for _ in range(12):
        spread = 10 ** draw.randint(1, 18)
        middle = draw.choice([0, 0, 10**6, LEAST // 2])
        rows = draw.randint(0, 4_000)
        model.add(
            None if draw.random() < 0.01 * (seed % 3) else middle + draw.randint(-spread // 2, spread // 2)
            for _ in range(rows)
        )


@pytest.mark.parametrize(
    "equal_bits", [2**64 - 1, 2**64 - 2**32, 2**32 - 1], ids=["all bits", "the high half", "the low half"]
)
def test_texts_are_distinguished_by_their_bytes_where_their_hashes_are_equal(
    equal_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stable_hash = module.hash_arrays

    def colliding(arrays: list[pa.Array], names: list[str]) -> Any:
        return stable_hash(arrays, names) & np.uint64(2**64 - 1 - equal_bits)

    monkeypatch.setattr(module, "hash_arrays", colliding)
    model = Model(pa.string())
    texts = [
        "",
        None,
        *("x" * length for length in range(1, 40)),
        *(f"{number:08}{number % 3}" for number in range(800)),
    ]
    random.Random(1).shuffle(texts)
    for start in range(0, len(texts), 100):
        model.add(texts[start : start + 100])
        model.add(texts[: start + 10])
    assert model.keys() == texts
