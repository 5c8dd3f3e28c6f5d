"""Checks before a session starts whether the engine's own dependencies are installed, and says how to install them.

The distribution ckpt-runtime without extras is the client and the command line. The extra ``session`` adds the engine's
server and kernels. Imports nothing of that extra.
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
    "pyarrow",
    "pydantic",
    "pyspark",
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


def check_connect() -> None:
    """Raises :class:`RuntimeNotInstalledError` if this interpreter lacks a package that Spark Connect needs."""
    missing = [module for module in ("grpc", "grpc_status", "pandas") if importlib.util.find_spec(module) is None]
    if missing:
        raise RuntimeNotInstalledError(
            f"connect.enabled: true needs {', '.join(missing)}, which {sys.executable} cannot import; "
            f"run: {sys.executable} -m pip install 'ckpt-runtime[connect]'"
        )
