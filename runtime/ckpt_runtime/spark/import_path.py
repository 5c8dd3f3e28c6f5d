"""Makes the processes of a session import the installed copy of pyspark instead of Spark's zipped one.

Spark puts ``pyspark.zip`` and ``py4j-*-src.zip`` first on the import path of the processes it starts. A zip has no
compiled modules: importing pyspark from it delays the start of each process by seconds.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_ZIPPED = ("pyspark.zip", "py4j-")


def import_path() -> list[str]:
    """This process's import path for use in another process; without the zipped copies if pyspark is installed."""
    return [entry for entry in _preferred() if entry]


def prefer_installed_pyspark() -> None:
    """Remove the zipped copies from the path of this process and its children. Call it before importing pyspark."""
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
