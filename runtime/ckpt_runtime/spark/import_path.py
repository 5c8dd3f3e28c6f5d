"""Which copy of pyspark the processes of a session import: the installed one, not Spark's zipped one.

Spark puts ``pyspark.zip`` and ``py4j-*-src.zip`` first on the import path of what it starts. A zip has no compiled
modules: importing pyspark from it takes seconds of each process's start.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_ZIPPED = ("pyspark.zip", "py4j-")


def import_path() -> list[str]:
    """This process's, without the zipped copies where the interpreter has pyspark installed; for another process."""
    return [entry for entry in _preferred() if entry]


def prefer_installed_pyspark() -> None:
    """Takes the zipped copies from this process's path, and from what its children inherit. Before pyspark's import."""
    path = _preferred()
    zipped = {entry for entry in sys.path if entry not in path}
    sys.path[:] = path
    inherited = os.environ.get("PYTHONPATH")
    if inherited is not None and zipped:
        kept = (entry for entry in inherited.split(os.pathsep) if entry not in zipped)
        os.environ["PYTHONPATH"] = os.pathsep.join(kept)


def _preferred() -> list[str]:
    if any((Path(entry) / "pyspark" / "__init__.py").is_file() for entry in sys.path if entry):
        return [entry for entry in sys.path if not _is_zipped(entry)]
    return list(sys.path)


def _is_zipped(entry: str) -> bool:
    return entry.endswith(".zip") and Path(entry).name.startswith(_ZIPPED)
