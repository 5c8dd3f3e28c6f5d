"""How much memory the arrays inside an object hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa


def bytes_held(found: Any) -> int:
    """Of all arrays and batches that can be reached through attributes, lists, tuples and dicts, each once."""
    seen: set[int] = set()
    total = 0
    waiting = [found]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, np.ndarray | pa.RecordBatch):
            total += int(value.nbytes)
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
        elif type(value).__module__.startswith("ckpt_runtime."):
            names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
            waiting += [getattr(value, name) for name in names]
    return total
