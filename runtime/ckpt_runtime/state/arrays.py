"""The form that arrays have as inputs of kernels, and their different values.

This module imports no compiler, which takes half a second.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A read-only view, which is the form of kernel inputs."""
    if not array.flags.writeable:
        return array
    view = array.view()
    view.flags.writeable = False
    return view


def distinct(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The different numbers, ascending. ``np.unique`` puts them into a hash table, which takes ten times as long."""
    ordered = np.sort(values)
    is_first = np.ones(len(ordered), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    found: np.ndarray[Any, Any] = ordered[is_first]
    return found
