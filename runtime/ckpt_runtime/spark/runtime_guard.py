"""Checks before a session starts whether the engine's own dependencies are installed, and says how to install them.

The distribution ckpt-runtime without extras is the client and the command line. The extra ``session`` adds the engine's
server and kernels. Imports nothing of that extra.
"""

from __future__ import annotations

import importlib.util
import sys

MODULES = (
    "fastapi",
    "grpc",
    "grpc_status",
    "msgspec",
    "numba",
    "numpy",
    "orjson",
    "pandas",
    "prometheus_client",
    "pydantic",
    "python_multipart",
    "uvicorn",
    "xxhash",
    "zstandard",
)
"""The packages that the extra ``session`` installs, by their import names."""


class RuntimeNotInstalledError(RuntimeError):
    """The extra ``session`` is missing, or a part of it. The message holds the command that installs it."""


def check_runtime() -> None:
    """Raises :class:`RuntimeNotInstalledError` if this interpreter lacks a package that a session needs."""
    missing = [module for module in MODULES if importlib.util.find_spec(module) is None]
    if missing:
        raise RuntimeNotInstalledError(
            f"a session needs {', '.join(missing)}, which {sys.executable} cannot import; "
            f"run: {sys.executable} -m pip install 'ckpt-runtime[session]'"
        )
