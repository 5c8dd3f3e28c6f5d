"""Compiled kernels of the state package, and :func:`warm_up`, which compiles them all before a job reports RUNNING.

Every kernel releases the interpreter lock. There is no slow form to fall back to; tests have one of each for
comparison.
"""

from __future__ import annotations

from ckpt_runtime.state.kernels.compiler import CACHE_DIRECTORY_VARIABLE, warm_up

__all__ = ["CACHE_DIRECTORY_VARIABLE", "warm_up"]
