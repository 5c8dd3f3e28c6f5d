"""Columns as of one moment: kept values, growth, several moments at once, and a copy made beside updates."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.columns import AnyArray
from ckpt_runtime.state.memory.changes import FrozenColumns


def slots(*numbers: int) -> AnyArray:
    return read_only(np.array(numbers, dtype=np.uint32))


class Owner:
    """Two columns that are changed by the rules."""

    def __init__(self, size: int) -> None:
        self.numbers = np.arange(size, dtype=np.float64)
        self.flags = np.zeros(size, dtype=np.uint8)
        self.frozen: list[FrozenColumns] = []

    def freeze(self) -> FrozenColumns:
        self.frozen.append(FrozenColumns(len(self.numbers), [self.numbers, self.flags]))
        return self.frozen[-1]

    def update(self, changed: AnyArray) -> None:
        for frozen in self.frozen:
            if frozen.open:
                frozen.keep(changed)
        np.add.at(self.numbers, changed, 1.0)
        self.flags[changed] ^= 1

    def grow(self, more: int) -> None:
        self.numbers = np.concatenate([self.numbers, np.zeros(more)])
        self.flags = np.concatenate([self.flags, np.zeros(more, dtype=np.uint8)])

    def content(self) -> list[list[Any]]:
        return [self.numbers.tolist(), self.flags.tolist()]


@settings(deadline=None)  # the first call loads a kernel
@given(st.lists(st.one_of(st.none(), st.just("grow"), st.lists(st.integers(0, 11), max_size=6)), max_size=20))
def test_every_moment_is_shown_as_it_was(steps: list[Any]) -> None:
    owner = Owner(12)
    moments = []
    for step in steps:
        if step is None:
            moments.append((owner.freeze(), owner.content()))
        elif step == "grow":
            owner.grow(3)
        else:
            owner.update(slots(*step, len(owner.numbers) - 1))
    for frozen, content in moments:
        assert [column.tolist() for column in frozen.take()] == content
        assert not frozen.open


def test_values_have_their_types_and_released_columns_ask_for_nothing() -> None:
    owner = Owner(3)
    assert [column.dtype for column in owner.freeze().take()] == [np.float64, np.uint8]
    released = owner.freeze()
    released.release()
    assert not released.open


@pytest.mark.parametrize("size", [100, 100_000])
def test_copy_made_during_updates_has_the_state_of_its_moment(size: int) -> None:
    owner = Owner(size)
    generator = np.random.default_rng(7)
    taken: list[list[AnyArray]] = []
    for _ in range(20):
        content = [owner.numbers.copy(), owner.flags.copy()]
        frozen = owner.freeze()
        copier = threading.Thread(target=lambda source=frozen: taken.append(source.take()))
        copier.start()
        while copier.is_alive():
            owner.update(read_only(np.unique(generator.integers(0, size, 64)).astype(np.uint32)))
        copier.join()
        for copy, column in zip(taken.pop(), content, strict=True):
            assert np.array_equal(copy, column)
