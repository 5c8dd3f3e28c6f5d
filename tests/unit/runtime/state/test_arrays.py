"""The different values of an array of numbers."""

from __future__ import annotations

import numpy as np
import pytest

from ckpt_runtime.state.arrays import distinct


@pytest.mark.parametrize("values", [[], [7], [3, 3, 3], [5, 1, 5, 0, 1], list(range(100, 0, -1))])
@pytest.mark.parametrize("kind", [np.uint32, np.int64])
def test_distinct_values_are_ascending_and_the_input_stays(values: list[int], kind: type[np.generic]) -> None:
    given = np.array(values, dtype=kind)
    found = distinct(given)
    assert found.dtype == kind
    assert found.tolist() == sorted(set(values))
    assert given.tolist() == values
