"""How much tests with generated input try: a tenth in the suite, all of it with ``THOROUGH=1`` (``make test-long``)."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
from _pytest.mark.structures import ParameterSet

THOROUGH = os.environ.get("THOROUGH", "0") != "0"


def examples(most: int) -> int:
    """How many of ``most`` examples to try now."""
    return most if THOROUGH else max(2, most // 10)


def cells(rows: Sequence[str], columns: Sequence[str]) -> list[ParameterSet]:
    """Every pair. The suite runs each second row, with the columns in turn."""
    return [
        pytest.param(row, column, marks=() if x % 2 == 0 and (x // 2 + y) % 2 == 0 else pytest.mark.long)
        for x, row in enumerate(rows)
        for y, column in enumerate(columns)
    ]
