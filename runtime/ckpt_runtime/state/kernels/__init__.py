"""Compiled kernels of the state room, and :func:`warm_up`, which compiles them all before a job reports RUNNING.

Every kernel releases the interpreter lock. ``reference.py`` holds slow forms of each, for tests only; production never
falls back to them.
"""

from __future__ import annotations

from ckpt_runtime.state.kernels.compiler import CACHE_DIRECTORY_VARIABLE, read_only, warm_up

__all__ = ["CACHE_DIRECTORY_VARIABLE", "read_only", "warm_up"]
