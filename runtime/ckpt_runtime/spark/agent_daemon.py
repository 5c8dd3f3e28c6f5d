"""The process from which Spark forks the Python of barrier tasks: ``pyspark.daemon``, with the imports already done.

Spark itself forks an empty process, which then imports pyspark from a zip without compiled modules. This adds seconds
to the downtime of a job that has lost a slot. Runs no user code, and starts no thread before it forks.
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

from ckpt_runtime.spark.installation import prefer_installed_pyspark

OWN_MODULES = ("ckpt_runtime.spark.barrier_stage", "ckpt_runtime.spark.slot_agent")
_VERSION = re.compile(rb"__version__[^=\n]*=\s*['\"]([^'\"]+)['\"]")
_THREADS = Path("/proc/self/task")


def main() -> None:
    """Run the daemon; never returns. Spark passes the worker's module on the command line."""
    if is_sparks(installed_version(), zipped_version(sys.path)):
        prefer_installed_pyspark()
    prepare((*sys.argv[1:2], *OWN_MODULES))
    from pyspark.daemon import manager

    manager()


def is_sparks(installed: str | None, zipped: str | None) -> bool:
    """Whether the installed pyspark has the version of the zipped one, which belongs to Spark's JVM."""
    return installed is not None and installed == zipped


def installed_version() -> str | None:
    """The version of the installed pyspark; None if it is not installed."""
    with suppress(PackageNotFoundError):
        return version("pyspark")
    return None


def zipped_version(path: list[str]) -> str | None:
    """The version of the zipped copy that Spark has put on an import path; None if there is none."""
    for entry in path:
        if Path(entry).name == "pyspark.zip":
            with suppress(OSError, KeyError, BadZipFile), ZipFile(entry) as archive:
                found = _VERSION.search(archive.read("pyspark/version.py"))
                return None if found is None else found[1].decode()
    return None


def prepare(modules: tuple[str, ...]) -> None:
    """Import the modules. If that has started a thread, which forks would lack, Spark's own daemon is run instead."""
    for name in modules:
        importlib.import_module(name)
    if _THREADS.exists() and len(list(_THREADS.iterdir())) > 1:
        os.execv(sys.executable, [sys.executable, "-m", "pyspark.daemon", *sys.argv[1:]])
    gc.freeze()  # so that the first collection in a process does not copy all this memory


if __name__ == "__main__":
    main()
