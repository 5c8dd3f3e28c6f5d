"""What Spark forks the Python of barrier tasks from: its own ``pyspark.daemon``, with the imports done before.

Spark forks an empty process, which then imports pyspark from a zip that has no compiled modules. That is seconds of the
time for which a job is down that has lost a slot. Runs no user code, and starts no thread before it forks.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from ckpt_runtime.spark.import_path import prefer_installed_pyspark

OWN_MODULES = ("ckpt_runtime.spark.barrier_stage", "ckpt_runtime.spark.slot_agent")
_VERSION = re.compile(rb"__version__[^=\n]*=\s*['\"]([^'\"]+)['\"]")
_THREADS = Path("/proc/self/task")


def main() -> None:
    """Never returns. The worker's module is on the command line, as Spark puts it there."""
    if is_sparks(installed_version(), zipped_version(sys.path)):
        prefer_installed_pyspark()
    prepare((*sys.argv[1:2], *OWN_MODULES))
    from pyspark.daemon import manager

    manager()


def is_sparks(installed: str | None, zipped: str | None) -> bool:
    """Whether the installed pyspark speaks as Spark's JVM does, which the zipped one comes with."""
    return installed is not None and installed == zipped


def installed_version() -> str | None:
    """None when pyspark is not installed."""
    with suppress(PackageNotFoundError):
        return version("pyspark")
    return None


def zipped_version(path: list[str]) -> str | None:
    """Of the copy that Spark has put on an import path; None without."""
    for entry in path:
        if Path(entry).name == "pyspark.zip":
            with suppress(OSError, KeyError, BadZipFile), ZipFile(entry) as archive:
                found = _VERSION.search(archive.read("pyspark/version.py"))
                return None if found is None else found[1].decode()
    return None


def prepare(modules: tuple[str, ...]) -> None:
    """Imports them. If that has started a thread, which a fork would not have, Spark's own daemon takes over."""
    for name in modules:
        importlib.import_module(name)
    if _THREADS.exists() and len(list(_THREADS.iterdir())) > 1:
        os.execv(sys.executable, [sys.executable, "-m", "pyspark.daemon", *sys.argv[1:]])
    gc.freeze()  # so that a process's first collection does not copy the memory of all of it


if __name__ == "__main__":
    main()
