"""The form that arrays have as inputs of kernels. This module imports no compiler, which takes half a second."""

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
