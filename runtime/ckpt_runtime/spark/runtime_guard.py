"""Finds out before a session starts whether what only the engine needs is installed, and says how to install it.

The distribution ckpt-runtime without extras is the client and the command line. The engine's server and kernels are its
extra ``session``. Imports nothing of that extra.
"""

from __future__ import annotations

import importlib.util
import sys

MODULES = (
    "fastapi",
    "msgspec",
    "numba",
    "numpy",
    "orjson",
    "prometheus_client",
    "pydantic",
    "python_multipart",
    "uvicorn",
    "xxhash",
    "zstandard",
)
"""What the extra ``session`` installs, by the names that are imported."""


class RuntimeNotInstalledError(RuntimeError):
    """The extra ``session`` is missing, or a part of it. The message holds the command that installs it."""


def check_runtime() -> None:
    """Raises :class:`RuntimeNotInstalledError` when this interpreter lacks a package that a session needs."""
    missing = [module for module in MODULES if importlib.util.find_spec(module) is None]
    if missing:
        raise RuntimeNotInstalledError(
            f"a session needs {', '.join(missing)}, which {sys.executable} cannot import; "
            f"run: {sys.executable} -m pip install 'ckpt-runtime[session]'"
        )
