"""Compiles kernels with numba, for fixed signatures, with a separate disk cache, on demand or in advance.

Inputs of kernels are read-only C-contiguous arrays, which :func:`ckpt_runtime.state.arrays.read_only` makes; outputs
and state are writable ones. Other array types would make numba compile a kernel again while a stream is running.
The cache is in ``$CKPT_KERNEL_CACHE_DIR`` (default ``~/.cache/ckpt/kernels``; empty switches it off), in a folder
named after the kernel sources and the versions of numba, NumPy and the CPU. Where it cannot be written, kernels are
compiled in memory and a line is logged. This module never falls back to interpreted code.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import pkgutil
import threading
from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite.binding as llvm
import numba
import numpy as np
from numba.core import config, types

from ckpt_runtime.state.arrays import read_only as read_only  # noqa: PLC0414 - modules with kernels find it here, too

CACHE_DIRECTORY_VARIABLE = "CKPT_KERNEL_CACHE_DIR"
_PACKAGE = "ckpt_runtime.state.kernels"
_NUMBA: Any = config
_LOG = logging.getLogger(__name__)
_REGISTERED: list[tuple[Any, tuple[tuple[Any, ...], ...]]] = []
_COMPILE_LOCK = threading.Lock()
_OPTIONS: dict[str, Any] = {"nogil": True, "_nrt": False}
"""Without numba's runtime a kernel cannot allocate, and counts no references to its arrays. It would count them, with
atomic instructions, in each call of a helper."""

F = TypeVar("F", bound=Callable[..., Any])

INT64 = types.int64
UINT64 = types.uint64
FLOAT64 = types.float64
BOOL = types.boolean


def _array(element: Any, read_only_array: bool) -> Any:
    return types.Array(element, 1, "C", readonly=read_only_array)


IN_I64 = _array(types.int64, True)
IN_I32 = _array(types.int32, True)
IN_U64 = _array(types.uint64, True)
IN_U32 = _array(types.uint32, True)
IN_U16 = _array(types.uint16, True)
IN_F64 = _array(types.float64, True)
IN_U8 = _array(types.uint8, True)
I64 = _array(types.int64, False)
I32 = _array(types.int32, False)
U64 = _array(types.uint64, False)
U32 = _array(types.uint32, False)
U16 = _array(types.uint16, False)
F64 = _array(types.float64, False)
U8 = _array(types.uint8, False)


@cache
def cache_directory() -> str | None:
    """The folder for compiled kernels, created and checked to be writable; None means: compile in memory."""
    configured = os.environ.get(CACHE_DIRECTORY_VARIABLE)
    if configured == "":
        return None
    try:
        base = Path(configured) if configured else Path.home() / ".cache" / "ckpt" / "kernels"
        directory = base / _cache_key()
        directory.mkdir(0o700, parents=True, exist_ok=True)
        probe = directory / f".probe-{os.getpid()}-{threading.get_ident()}"
        probe.write_bytes(b"")
        probe.unlink()
    except (OSError, RuntimeError) as error:
        _LOG.warning("kernel cache is not writable, kernels are compiled in memory: %s", error)
        return None
    return str(directory)


def _cache_key() -> str:
    """A key that changes with anything that invalidates a cached kernel; numba itself checks only one source file."""
    digest = hashlib.sha256()
    for entry in sorted(resources.files(_PACKAGE).iterdir(), key=lambda item: item.name):
        if entry.name.endswith(".py"):
            digest.update(entry.read_bytes())
    features = llvm.get_host_cpu_features().flatten()
    for part in (numba.__version__, np.__version__, llvm.get_host_cpu_name(), features):
        digest.update(b"\0" + str(part).encode())
    return f"numba{numba.__version__}-numpy{np.__version__}-{digest.hexdigest()[:16]}"


def kernel(*signatures: Sequence[Any]) -> Callable[[F], F]:
    """Declares a compiled function with its argument types; nothing is compiled before the first call or warm-up."""

    def decorate(function: F) -> F:
        dispatcher = _dispatcher(function)
        _REGISTERED.append((dispatcher, tuple(tuple(signature) for signature in signatures)))
        return cast(F, dispatcher)

    return decorate


def inlined(function: F) -> F:
    """Declares a helper that only kernels call. LLVM by itself would leave calls that pass seven words per array."""
    return cast(F, numba.njit(forceinline=True, **_OPTIONS)(function))


def _dispatcher(function: Callable[..., Any]) -> Any:
    directory = cache_directory()
    if directory is None:
        return numba.njit(**_OPTIONS)(function)
    before = _NUMBA.CACHE_DIR
    _NUMBA.CACHE_DIR = directory
    try:
        return numba.njit(cache=True, **_OPTIONS)(function)
    except (RuntimeError, OSError) as error:
        _LOG.warning("kernel %s cannot be cached, it is compiled in memory: %s", function.__name__, error)
        return numba.njit(**_OPTIONS)(function)
    finally:
        _NUMBA.CACHE_DIR = before


def registered_kernels() -> list[tuple[Any, tuple[tuple[Any, ...], ...]]]:
    """All kernels with their signatures, after importing every kernel module."""
    for module in pkgutil.iter_modules(importlib.import_module(_PACKAGE).__path__):
        importlib.import_module(f"{_PACKAGE}.{module.name}")
    return list(_REGISTERED)


def warm_up() -> None:
    """Compiles every kernel, or loads it from the cache. Call it before RUNNING; threads may call it repeatedly."""
    with _COMPILE_LOCK:
        for dispatcher, signatures in registered_kernels():
            for signature in signatures:
                dispatcher.compile(signature)
